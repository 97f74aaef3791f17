"""What somebody without a vote believes of view changes that no quorum signed."""

import pytest

from dilocox_peer.peer.rounds import patience as patience_module
from dilocox_peer.peer.rounds.chain import Chain, Suffix
from dilocox_peer.peer.rounds.genesis import genesis_of
from dilocox_peer.peer.rounds.patience import Patience, steps_a_second
from dilocox_peer.wire.chain import Certificate
from dilocox_peer.wire.checkpoints import Checkpoint
from tests.certified_stage import MANIFEST, ROSTER, STAGE, CertifiedStage

A, B, C = ROSTER
GENESIS = genesis_of(MANIFEST, STAGE)
BEFORE = 3  # certificates that all three signed: the first roster, two rounds


def settled(patience: Patience, stage: CertifiedStage, now: float, checkpoint: Checkpoint | None = None) -> int:
    """How many certificates of the whole chain are believed."""
    path = Suffix(0, tuple(stage.certificates))
    found = patience.settled(Chain(GENESIS), path, checkpoint, now)
    return 0 if found is None else len(found.certificates)


def word(certificate: Certificate) -> Checkpoint:
    value = certificate.value
    return Checkpoint(STAGE, GENESIS.head, value.height, value.round, certificate.head, 1, False)


def test_a_view_change_of_a_minority_counts_once_it_has_stood() -> None:
    patience, stage = Patience(30.0), CertifiedStage().rounds(2).seized(A).rounds(3)
    assert [settled(patience, stage, now) for now in (100.0, 129.9, 130.0)] == [BEFORE, BEFORE, BEFORE + 4]


def test_one_that_a_quorum_signed_counts_at_once() -> None:
    assert settled(Patience(30.0), CertifiedStage().rounds(2).seized(A, B).rounds(1), 0.0) == BEFORE + 2


def test_one_that_no_voter_of_the_roster_signed_never_counts() -> None:
    patience, stage = Patience(30.0), CertifiedStage().rounds(2).seized(A).seized(B)
    settled(patience, stage, 0.0)
    assert settled(patience, stage, 10**6) == BEFORE + 1, "B is not of the roster that A made of itself"


def test_one_that_no_voter_signed_counts_to_who_has_heard_none_of_them_for_long() -> None:
    stage = CertifiedStage().rounds(2).seized(A).seized(B).rounds(1)
    away = {A: 50.0}
    patience = Patience(30.0, are_away=lambda voters, now: all(now >= away.get(peer, 1e9) for peer in voters))
    assert [settled(patience, stage, now) for now in (0.0, 49.9, 50.0)] == [BEFORE, BEFORE + 1, BEFORE + 3]


@pytest.mark.parametrize(("gone", "believed"), [({B}, BEFORE), ({B, C}, BEFORE + 2), ({A, B, C}, BEFORE + 2)])
def test_one_counts_at_once_where_all_who_have_not_signed_it_are_surely_gone(gone: set[str], believed: int) -> None:
    patience = Patience(30.0, are_gone=lambda voters, _now: set(voters) <= gone)
    assert settled(patience, CertifiedStage().rounds(2).seized(A).rounds(1), 0.0) == believed


def test_what_the_owner_has_signed_counts_at_once() -> None:
    stage = CertifiedStage().rounds(2).seized(A).rounds(2)
    assert settled(Patience(30.0), stage, 0.0, word(stage.certificates[BEFORE])) == BEFORE + 3
    assert settled(Patience(30.0), stage, 0.0, word(stage.certificates[1])) == BEFORE, "below it only"


def test_what_is_behind_an_open_one_is_timed_too() -> None:
    patience, stage = Patience(30.0), CertifiedStage().rounds(2).seized(A, B).rounds(1).seized(A).seized(A)
    believed = BEFORE + 2
    assert settled(patience, stage, 0.0) == believed + 2, "half of two, with the first of them, are a quorum"
    stage = CertifiedStage().rounds(2).seized(C).rounds(1)
    settled(patience, stage, 0.0)
    assert settled(patience, stage, 30.0) == BEFORE + 2


def test_those_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience_module, "MAX_REMEMBERED", 4)
    patience, oldest = Patience(30.0), CertifiedStage().rounds(1).seized(A)
    settled(patience, oldest, 0.0)
    for first in range(4):
        settled(patience, CertifiedStage(float(first + 2)).rounds(1).seized(A), 1.0)
    assert settled(patience, oldest, 40.0) == BEFORE - 1, "forgotten, and timed anew"
    assert settled(patience, oldest, 70.0) == BEFORE


A_ROUND_S = 60.0
START_S = 1e6  # of a machine that is up for long


def slow(stage: CertifiedStage, count: int) -> CertifiedStage:
    """Rounds that took A_ROUND_S each, as those tell who contributed."""
    for _ in range(count):
        stage.round(closed_ms=int(1000 * A_ROUND_S * (1 + stage.place.round)))
    return stage


@pytest.mark.parametrize("is_in_two_parts", [False, True])
def test_a_lone_branch_counts_no_faster_than_a_run_can_go(is_in_two_parts: bool) -> None:
    """However many rounds a stranger has signed, and when newcomers go on it counts."""
    patience = Patience(30.0, are_away=lambda _voters, _now: True, are_gone=lambda _voters, _now: True)
    stage = slow(CertifiedStage(), 5).seized(A)
    lone = len(stage.certificates) + 1
    certificates = stage.seized(B).rounds(30).certificates
    chain, believed = Chain(GENESIS), []
    for now in (START_S, START_S + A_ROUND_S, START_S + 2 * A_ROUND_S, START_S + 5 * A_ROUND_S):
        path = Suffix(chain.height, tuple(certificates[chain.height :]))
        found = patience.settled(chain, path, None, now)
        believed.append(chain.height + (len(found.certificates) if found is not None else 0) - lone)
        for certificate in found.certificates if is_in_two_parts and found is not None else ():
            chain.append(certificate)
    free, pace = patience_module.FREE_ROUNDS, int(patience_module.PACE)
    assert believed == [free, free + pace, free + 2 * pace, 30]


def test_a_restart_makes_a_lone_branch_no_faster() -> None:
    """Who has followed its beginning and comes back believes as much of the rest as who has just seen it begin."""
    certificates = slow(CertifiedStage(), 5).seized(A).seized(B).rounds(30).certificates
    followed = Chain(GENESIS, certificates[:9])
    patience = Patience(30.0, are_away=lambda _voters, _now: True, are_gone=lambda _voters, _now: True)
    believed = []
    for now in (START_S, START_S + A_ROUND_S):
        found = patience.settled(followed, Suffix(9, tuple(certificates[9:])), None, now)
        believed.append(0 if found is None else len(found.certificates))
    assert believed == [patience_module.FREE_ROUNDS, patience_module.FREE_ROUNDS + int(patience_module.PACE)]


def test_what_the_owner_has_signed_of_a_lone_branch_counts_and_the_rest_from_there_on() -> None:
    patience = Patience(30.0, are_gone=lambda _voters, _now: True)
    stage = slow(CertifiedStage(), 5).seized(A).seized(B).rounds(30)
    signed = word(stage.certificates[-20])
    assert settled(patience, stage, START_S, signed) == len(stage.certificates) - 19
    assert settled(patience, stage, START_S + A_ROUND_S, signed) == len(stage.certificates) - 19 + int(
        patience_module.PACE
    )


def test_a_branch_that_a_voter_signed_is_as_fast_as_it_is() -> None:
    patience = Patience(30.0, are_gone=lambda _voters, _now: True)
    stage = slow(CertifiedStage(), 5).seized(A).rounds(30)
    assert settled(patience, stage, 0.0) == len(stage.certificates)


def test_how_fast_a_run_went_is_what_most_say_of_most_rounds() -> None:
    assert steps_a_second(CertifiedStage().rounds(5).certificates) == float("inf")
    assert steps_a_second(slow(CertifiedStage(), 1).certificates) == float("inf")
    assert steps_a_second(slow(CertifiedStage(), 5).certificates) == pytest.approx(4 / A_ROUND_S)
    assert steps_a_second(slow(CertifiedStage().rounds(20), 5).certificates) == pytest.approx(4 / A_ROUND_S)


def test_clocks_that_go_back_have_a_run_go_no_faster() -> None:
    """Each time a clock went back counted as a thousandth of a second: no pace was too fast for a run of which most rounds were told so."""
    stage = slow(CertifiedStage(), 5)
    last_ms = int(5000 * A_ROUND_S)
    for number in range(1, 10):
        stage.round(closed_ms=last_ms - number)
    assert steps_a_second(stage.certificates) == pytest.approx(4 / A_ROUND_S)
