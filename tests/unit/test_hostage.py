"""A callee that never grants a slot, and says SlotWait now and then: it must not keep its caller's micro-batches for ever."""

import random
from collections.abc import Sequence
from typing import Any, Literal

import pytest

from dilocox_peer.contract import Tick
from dilocox_peer.pipeline.contract import (
    Backward,
    BackwardDone,
    Forward,
    ForwardDone,
    HopReceived,
    HopSend,
    Linked,
    StepNow,
    Stepped,
    StepSent,
    Unlinked,
)
from dilocox_peer.pipeline.scheduler import Scheduler
from dilocox_peer.types import PeerId
from dilocox_peer.wire.hops import Cancel, Grad, HopStatus, Refuse, Reserve, SlotGrant, SlotWait, Step

HONEST, LIAR = PeerId("honest"), PeerId("aliar")
STATUS = HopStatus(1, 0, 0, 0, 0, 0.1, 0, 0.0, 0.1)
GOOD_S = 60.0  # for so long the liar answers as others do


def played(mode: Literal["carry", "flush"], lie: str, seconds: int = 900) -> tuple[int, int, int]:
    """(steps of an origin with two callees, in the last half of the time; micro-batches that the liar has at the end; how long the oldest)."""
    now = 0.0
    machine = Scheduler(
        me=PeerId("me"),
        incarnation=1,
        stage=0,
        num_stages=2,
        mode=mode,
        accumulate=4,
        max_slots=16,
        rng=random.Random(1),
        now=0.0,
    )
    todo: list[tuple[PeerId, Any, bytes | None]] = []
    kept: dict[int, tuple[Reserve, float]] = {}  # of the liar
    position = {"n": 60_000}
    calls: list[int] = []

    def take(actions: Sequence[object]) -> None:
        for each in actions:
            if not isinstance(each, HopSend):
                continue
            peer, message = each.peer, each.message
            if isinstance(message, Step):
                take(machine.handle(StepSent(peer, message), now))
            is_good = peer == HONEST or now < GOOD_S or (lie == "now and then" and getattr(message, "call", 0) % 2 == 0)
            if is_good and isinstance(message, Reserve):
                todo.append((peer, SlotGrant(*message.id, message.call), None))
            if is_good and isinstance(message, Step):
                todo.append((peer, Grad(*message.id, message.call, 1.0, 0), b"g"))
            if not is_good and lie.startswith("relinks"):  # takes the body, and drops its link some seconds later
                if isinstance(message, Reserve):
                    todo.append((LIAR, SlotGrant(*message.id, message.call), None))
            elif not is_good and isinstance(message, Reserve):
                kept.setdefault(message.call, (message, now))
                if lie == "moves up":  # each time it is asked, and only then
                    position["n"] -= 1
                    todo.append((LIAR, SlotWait(*message.id, message.call, position["n"]), None))
                if lie.startswith("refuses"):  # after a while in its line
                    todo.append((LIAR, SlotWait(*message.id, message.call, 1), None))
                if lie == "until told" and calls.count(message.call) == 0:
                    calls.append(message.call)
                    todo.append((LIAR, SlotGrant(*message.id, message.call), None))
                if lie == "forgets":  # takes the body; asked, it says that it forgot it
                    todo.append((LIAR, SlotGrant(*message.id, message.call), None))
                if lie == "works":  # takes the body, and says that it works on it when it is asked
                    todo.append((LIAR, SlotGrant(*message.id, message.call), None))
                    if calls.count(message.call):
                        todo[-1] = (LIAR, SlotWait(*message.id, message.call, 0), None)
                    calls.append(message.call)
            if peer == LIAR and isinstance(message, Cancel):
                kept.pop(message.call, None)
                if lie == "until told":  # keeps the answer back until it is to leave it
                    todo.insert(0, (LIAR, Grad(*message.id, message.call, 1.0, 0), b"g"))

    def link(peer: PeerId) -> None:
        take(machine.handle(Linked(peer, 1), now))
        take(machine.handle(HopReceived(peer, STATUS), now))

    for peer in (HONEST, LIAR):
        link(peer)
    steps = 0
    for second in range(seconds):
        now = float(second)
        take(machine.handle(HopReceived(HONEST, STATUS), now))  # as each peer tells each second
        take(machine.handle(Tick(), now))
        if lie.startswith("relinks") and now >= GOOD_S and second % int(lie.removeprefix("relinks after ")) == 0:
            take(machine.handle(Unlinked(LIAR), now))
            link(LIAR)
        if lie.startswith("refuses"):
            for call, (message, since) in list(kept.items()):
                if now - since >= float(lie.removeprefix("refuses after ")):
                    del kept[call]
                    todo.append((LIAR, Refuse(*message.id, call, "busy"), None))
        if lie == "unasked":
            for kept_one, _ in list(kept.values()):
                todo.append((LIAR, SlotWait(*kept_one.id, kept_one.call, 1), None))
        for _ in range(200):  # all that can be done in this second
            if todo:
                peer, message, body = todo.pop(0)
                take(machine.handle(HopReceived(peer, message, body), now))
                continue
            work, actions = machine.next_work(now)
            take(actions)
            if work is None:
                break
            match work:
                case Forward(id_):
                    take(machine.handle(ForwardDone(id_, b"y", 0.1), now))
                case Backward(id_):
                    take(machine.handle(BackwardDone(id_, None, 1.0, 0.1), now))
                case StepNow():
                    steps += second >= seconds // 2
                    take(machine.handle(Stepped(0.1), now))
                case _:
                    take(machine.handle(Stepped(0.1), now))
    oldest = max((now - since for _, since in kept.values()), default=0.0)
    return steps, len(kept), int(oldest)


BETWEEN = ("refuses after 15", "refuses after 29", "relinks after 20")  # those that stand beside them


@pytest.mark.parametrize("mode", ["carry", "flush"])
@pytest.mark.parametrize(
    "lie",
    [
        "silent",
        "now and then",
        "unasked",
        "moves up",
        "works",
        "forgets",
        *(f"refuses after {seconds}" for seconds in (5, 42)),
        "relinks after 38",
        *(pytest.param(each, marks=pytest.mark.slow) for each in BETWEEN),
    ],
)
def test_a_callee_that_grants_nothing_stops_nobody(mode: Literal["carry", "flush"], lie: str) -> None:
    steps, held, oldest = played(mode, lie)
    # of about 5,250 that the honest one alone makes in this toy
    assert steps > 2500, (
        f"{steps} steps in the last seven minutes and a half; the liar has {held}, the oldest for {oldest} s"
    )


@pytest.mark.parametrize("lie", ["silent", "now and then"])
@pytest.mark.parametrize("mode", ["carry", "flush"])
def test_one_that_falls_silent_costs_seconds(mode: Literal["carry", "flush"], lie: str) -> None:
    """It was asked again as soon as something had gone elsewhere, and held up each step for six seconds: 2 to 10 in a minute, for a quarter of an hour."""
    steps, _, _ = played(mode, lie, seconds=300)
    assert steps > 1500  # of about 1,750


@pytest.mark.parametrize("mode", ["carry", "flush"])
def test_an_answer_that_is_kept_back_until_it_is_called_off_forgives_nothing(mode: Literal["carry", "flush"]) -> None:
    """It had the pause that follows count as work: one step in six was lost for ever."""
    steps, _, _ = played(mode, "until told", seconds=1800)
    assert steps > 9800  # of about 10,500; 8,700 were
