"""Callees whose gradients are not those of the others for the same micro-batch: found out by comparing, and nobody honest with them."""

import random
from collections.abc import Callable, Collection, Iterable

import pytest
import torch

from dilocox_peer.events import Event
from dilocox_peer.model.activations import BodyFormat
from dilocox_peer.model.body_sizes import Form
from dilocox_peer.pipeline.checks import (
    DOUBTED_SHARE,
    FAR_SHARE,
    LEAST_AGREEMENT,
    MAX_REMEMBERED,
    OUT_S,
    PATIENCE,
    SHARE,
    SUSPECT_S,
    TOLD_EVERY_S,
    Checks,
)
from dilocox_peer.pipeline.contract import CalleesDisagree, GradientsFalse
from dilocox_peer.pipeline.routes import AnswerTimes, Callee
from dilocox_peer.types import PeerId

TIMES = AnswerTimes(start_s=1.0, floor_s=1.0, cap_s=1.0, mad_factor=1.0)


def peers(count: int) -> list[PeerId]:
    return [PeerId(f"p{number}") for number in range(count)]


def callees(names: Iterable[PeerId], far: Collection[PeerId] = ()) -> dict[PeerId, Callee]:
    return {peer: Callee(peer, TIMES, TIMES, is_far=peer in far) for peer in names}


def play(
    checks: Checks,
    known: dict[PeerId, Callee],
    agreement: Callable[[PeerId, PeerId], float],
    *,
    answers: int = 2000,
    now: float = 0.0,
) -> tuple[list[Event], int]:
    """Every callee answers in turn; what is to be checked is compared at once, and who is out is avoided. What was told, and how many were
    checked."""
    told: list[Event] = []
    checked = 0
    for _ in range(answers):
        for first in [peer for peer, callee in known.items() if callee.avoid_until <= now]:
            checks.answered(first)
            second = checks.second(first, known, now)
            if second is not None:
                checked += 1
                told += checks.compared(first, second, agreement(first, second), known, now)
            for peer, callee in known.items():
                callee.avoid_until = checks.out_until(peer)
        now += 0.01
    return told, checked


def lied_by(*liars: PeerId, alike: bool = False) -> Callable[[PeerId, PeerId], float]:
    def agreement(one: PeerId, other: PeerId) -> float:
        if one in liars and other in liars:
            return 1.0 if alike else 0.0
        return 0.0 if one in liars or other in liars else 0.95

    return agreement


def test_one_in_so_many_is_checked_and_a_new_one_at_once():
    names = peers(4)
    checks, known = Checks(random.Random(1), hops=1, stages_behind=0), callees(names)
    assert checks.second(names[0], known, 0.0) is not None
    told, checked = play(checks, known, lied_by())
    assert not told
    assert 0.8 < checked / (4 * 2000 / SHARE) < 1.25


def test_who_is_far_is_asked_seldom_and_only_where_nobody_is_near():
    names = peers(3)
    known = callees(names, far=names[2:])
    checks = Checks(random.Random(1), hops=1, stages_behind=0)
    play(checks, known, lied_by())
    assert all(checks.second(names[0], known, 30.0) != names[2] for _ in range(500))
    known = callees(names[:2], far=names[1:2])
    checks.compared(names[0], names[1], 0.95, known, 30.0)
    checked = sum(checks.second(names[0], known, 30.0) is not None for _ in range(20 * FAR_SHARE))
    assert 8 < checked < 40


def test_who_is_avoided_checks_nobody():
    names = peers(2)
    known = callees(names)
    known[names[1]].avoid_until = 10.0
    checks = Checks(random.Random(1), hops=1, stages_behind=0)
    assert checks.second(names[0], known, 0.0) is None
    assert checks.second(names[0], {}, 0.0) is None


@pytest.mark.parametrize(
    ("count", "liars", "alike"), [(3, 1, False), (4, 1, True), (5, 2, True), (8, 2, True), (8, 3, True), (16, 4, False)]
)
def test_liars_are_found_out_as_long_as_they_are_fewer_than_half(count: int, liars: int, alike: bool):
    for seed in range(20):
        names = peers(count)
        false = names[:liars]
        checks, known = Checks(random.Random(seed), hops=1, stages_behind=0), callees(names)
        told, _ = play(checks, known, lied_by(*false, alike=alike), answers=1000)
        assert {event.peer for event in told if isinstance(event, GradientsFalse)} == set(false)
        assert all(checks.out_until(peer) >= OUT_S for peer in false)
        assert not checks.doubted


def test_who_lies_now_and_then_lies():
    rng = random.Random(3)
    names = peers(4)
    checks, known = Checks(random.Random(1), hops=1, stages_behind=0), callees(names)
    lies = lied_by(names[0])
    told, _ = play(checks, known, lambda one, other: lies(one, other) if rng.random() < 0.25 else 0.95)
    assert [event.peer for event in told if isinstance(event, GradientsFalse)] == [names[0]]
    assert "are not those of" in told[0].line()


def test_of_two_that_disagree_neither_is_dropped_and_it_is_told_now_and_then():
    names = peers(2)
    checks, known = Checks(random.Random(1), hops=1, stages_behind=0), callees(names)
    told, _ = play(checks, known, lied_by(names[0]), answers=500)
    assert [type(event) for event in told] == [CalleesDisagree]
    assert "a third peer" in told[0].line()
    assert checks.out_until(names[0]) < 0
    told, _ = play(checks, known, lied_by(names[0]), answers=500, now=TOLD_EVERY_S + 1.0)
    assert [type(event) for event in told] == [CalleesDisagree]


def test_one_that_is_back_is_checked_at_once_and_out_again_if_it_lies_still():
    names = peers(3)
    checks, known = Checks(random.Random(1), hops=1, stages_behind=0), callees(names)
    play(checks, known, lied_by(names[0]), answers=400)
    later = OUT_S + 10.0
    assert checks.second(names[0], known, later) is not None
    told, _ = play(checks, known, lied_by(names[0]), answers=100, now=later)
    assert [type(event) for event in told] == [GradientsFalse]
    told, _ = play(checks, known, lied_by(), answers=100, now=2 * later + SUSPECT_S)
    assert not told
    assert names[0] not in checks.doubted


def test_one_whose_stages_behind_deceive_it_has_its_time_to_find_out():
    names = peers(3)
    checks, known = Checks(random.Random(1), hops=1, stages_behind=1), callees(names)
    deceived = lied_by(names[0])
    told, _ = play(checks, known, deceived, answers=PATIENCE // 2)
    assert not told
    assert names[0] in checks.doubted
    told, _ = play(checks, known, lied_by(), answers=40 * DOUBTED_SHARE)
    assert not told
    assert not checks.doubted
    told, _ = play(checks, known, deceived, answers=2 * PATIENCE, now=100.0)
    assert [event.peer for event in told if isinstance(event, GradientsFalse)] == [names[0]]


def test_what_is_kept_is_bounded_and_only_callees_are_doubted():
    checks = Checks(random.Random(1), hops=1, stages_behind=0)
    names = peers(3)
    known = callees(names)
    for number in range(3 * MAX_REMEMBERED):
        checks.compared(names[0], PeerId(f"q{number}"), 0.0, {**known, PeerId(f"q{number}"): known[names[1]]}, 0.0)
    assert checks.num_remembered <= 3 * MAX_REMEMBERED
    checks.compared(names[0], PeerId("stranger"), 0.0, known, 0.0)
    assert PeerId("stranger") not in checks.doubted


def test_neither_pausing_its_lies_nor_a_new_link_gives_a_liar_its_time_again():
    """In mid-pipeline, where it has time: by lying for a while and then not it began anew each time, as by dialling again."""
    names = peers(3)
    checks, known = Checks(random.Random(1), hops=2, stages_behind=1), callees(names)
    told: list[Event] = []
    for turn in range(30):
        lies = lied_by(names[0]) if turn % 2 == 0 else lied_by()
        known = callees(names)  # every link is new
        told += play(checks, known, lies, answers=PATIENCE // 2, now=20.0 * turn)[0]
    assert [event.peer for event in told if isinstance(event, GradientsFalse)] == [names[0]]


@pytest.mark.parametrize(("count", "liars"), [(13, 6), (20, 7), (20, 9), (30, 9)])
def test_a_wide_stage_is_no_easier_to_turn_against_its_honest_peers(count: int, liars: int):
    """Names are free, and those that conspire may take the last ones."""
    for seed in range(3):
        names = peers(count)
        false = names[-liars:]
        checks, known = Checks(random.Random(seed), hops=1, stages_behind=0), callees(names)
        told, _ = play(checks, known, lied_by(*false, alike=True), answers=1500)
        assert {event.peer for event in told if isinstance(event, GradientsFalse)} == set(false)


def test_those_that_never_answer_a_check_keep_no_liar_from_being_found_out():
    names = peers(5)
    mute, liar = names[0], names[4]
    checks, known = Checks(random.Random(2), hops=1, stages_behind=0), callees(names)
    told: list[Event] = []
    for number in range(4000):
        now = 0.01 * number
        first = names[1 + number % 4]
        if checks.out_until(first) > now:
            continue
        second = checks.second(first, known, now)
        if second not in (None, mute):
            told += checks.compared(first, second, lied_by(liar)(first, second), known, now)
    assert {event.peer for event in told if isinstance(event, GradientsFalse)} == {liar}


def test_who_had_a_micro_batch_already_does_not_check_it():
    names = peers(3)
    checks = Checks(random.Random(1), hops=1, stages_behind=0)
    assert checks.second(names[0], callees(names), 0.0, had=names[:2]) == names[2]
    assert checks.second(names[1], callees(names), 0.0, had=names) is None


def body(form: Form) -> BodyFormat:
    return BodyFormat(form, 2, 8, 64, 256)


@pytest.mark.parametrize("form", ["fp32", "bf16", "int8"])
def test_how_much_two_gradients_agree(form: Form):
    torch.manual_seed(1)
    format_ = body(form)
    gradient, noise = torch.randn(2, 8, 64) * 1e-3, torch.randn(2, 8, 64) * 1e-3

    def agreement(one: torch.Tensor, other: torch.Tensor) -> float:
        return format_.agreement(format_.pack_hidden(one), format_.pack_hidden(other))

    assert agreement(gradient, gradient) == pytest.approx(1.0, abs=1e-6)
    assert agreement(gradient, -gradient) == pytest.approx(-1.0, abs=1e-6)
    assert abs(agreement(gradient, noise)) < 0.15
    assert agreement(gradient, 4 * gradient) == pytest.approx(0.25, abs=0.01), "too strong is not alike either"
    assert agreement(4 * gradient, gradient) == pytest.approx(0.25, abs=0.01)
    assert agreement(gradient, gradient + 0.3 * noise) > 0.8 > LEAST_AGREEMENT
    nothing = torch.zeros(2, 8, 64)
    assert agreement(nothing, gradient) == 0.0
    assert agreement(nothing, nothing) == 1.0
