"""A callee that is left alone for having been slower than another, when that other one goes."""

import random
from collections.abc import Sequence

import pytest

from dilocox_peer.contract import Tick
from dilocox_peer.pipeline.contract import Forward, ForwardDone, HopInput, HopReceived, HopSend, Linked, Unlinked
from dilocox_peer.pipeline.scheduler import Scheduler
from dilocox_peer.types import PeerId
from dilocox_peer.wire.hops import Cancel, HopStatus, Refuse, Reserve, SlotWait

SLOW, OTHER = PeerId("a"), PeerId("b")
STATUS = HopStatus(1, 0, 0, 0, 0, 0.1, 0, 0.0, 0.1)


class _Origin:
    """One with two micro-batches and two callees, of which one is silent, and the other says that it has them in its line."""

    def __init__(self) -> None:
        self.machine = Scheduler(
            me=PeerId("me"), incarnation=1, stage=0, num_stages=2, mode="flush", accumulate=2, max_slots=16,
            rng=random.Random(1), now=0.0,
        )  # fmt: skip
        self.now = 0.0
        self.asked: list[tuple[float, PeerId, Reserve]] = []
        self.left_alone = False
        for peer in (SLOW, OTHER):
            self.handle(Linked(peer, 1))
            self.handle(HopReceived(peer, STATUS))
        while True:
            work, actions = self.machine.next_work(self.now)
            self._take(actions)
            if work is None:
                break
            assert isinstance(work, Forward)
            self.handle(ForwardDone(work.id, b"y", 0.1))
        for second in range(1, 121):
            self.now = float(second)
            self.handle(HopReceived(OTHER, STATUS))
            self.handle(Tick())
            if self.left_alone:
                return
        pytest.fail("what the silent one has was never moved")

    def handle(self, happened: HopInput) -> None:
        self._take(self.machine.handle(happened, self.now))

    def _take(self, actions: Sequence[object]) -> None:
        for action in actions:
            if not isinstance(action, HopSend):
                continue
            self.left_alone |= action.peer == SLOW and isinstance(action.message, Cancel)
            if isinstance(action.message, Reserve):
                self.asked.append((self.now, action.peer, action.message))
                if action.peer == OTHER:
                    self.handle(HopReceived(OTHER, SlotWait(*action.message.id, action.message.call, 1)))


def test_it_is_asked_at_once_when_nobody_else_is_left() -> None:
    """Until the end of its pause, which is ten minutes at most, an origin did nothing."""
    origin = _Origin()
    origin.handle(Unlinked(OTHER))
    assert {peer for at, peer, _ in origin.asked if at == origin.now} >= {SLOW}


def test_one_that_refuses_for_a_second_is_waited_for() -> None:
    origin = _Origin()
    asked = {message.call: message for _, peer, message in origin.asked if peer == OTHER}
    origin.asked.clear()
    for message in asked.values():
        origin.handle(HopReceived(OTHER, Refuse(*message.id, message.call, "busy")))
    assert not origin.asked
