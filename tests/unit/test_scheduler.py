"""One test per rule of the scheduler; the simulator (tests/sim) plays them together."""

import math
import random
from collections import Counter
from typing import Any, Literal

import pytest

from dilocox_peer.contract import Leaving, Note, Tick
from dilocox_peer.events import Event
from dilocox_peer.peer.training.clock import follows
from dilocox_peer.pipeline.contract import (
    Backward,
    BackwardDone,
    Forward,
    ForwardDone,
    GradRefused,
    Hold,
    HopAction,
    HopReceived,
    HopRefused,
    HopSend,
    HopTiming,
    Linked,
    MicroBatchDone,
    MicroBatchResent,
    MicroBatchTimed,
    PauseWanted,
    Publish,
    Release,
    Replicas,
    Rounds,
    RoundTrip,
    Shifted,
    StepNow,
    Stepped,
    StepRefused,
    StepSent,
    Turn,
    Unlinked,
    Work,
)
from dilocox_peer.pipeline.flight import MOSTLY_NOTHING
from dilocox_peer.pipeline.scheduler import Scheduler
from dilocox_peer.pipeline.turnstile import Turnstile
from dilocox_peer.types import PeerId
from dilocox_peer.wire.declared import replaced
from dilocox_peer.wire.hops import (
    Cancel,
    Grad,
    GradAck,
    HopMessage,
    HopStatus,
    MicroBatchId,
    Refuse,
    Reserve,
    SlotGrant,
    SlotWait,
    Step,
    decode_hops,
    encode_hops,
)

ME, UP, UP2, DOWN, DOWN2 = (PeerId(name) for name in ("me", "up", "up2", "down", "down2"))
STATUS = HopStatus(2, 0, 0, 0, 0, 0.1, 0, 0.0, 0.1)


def id_of(index: int, origin: PeerId = UP) -> MicroBatchId:
    return MicroBatchId(origin, 1, index)


class Bench:
    """A scheduler and what it said; time stands still unless moved."""

    def __init__(
        self,
        stage: int,
        num_stages: int = 3,
        *,
        mode: Literal["carry", "flush"] = "carry",
        accumulate: int = 4,
        **more: object,
    ) -> None:
        options: dict[str, Any] = {"max_slots": 16, "timing": HopTiming(), "trace": False} | more
        self.now = 0.0
        self.machine = Scheduler(
            me=ME, incarnation=1, stage=stage, num_stages=num_stages, mode=mode, accumulate=accumulate,
            rng=random.Random(1), now=0.0, **options,
        )  # fmt: skip
        self.stage = stage
        self.holds_bodies = False

    def feed(self, happened: object) -> list[HopAction]:
        """What it does about it. Bodies leave at once unless they are held up."""
        actions = self.machine.handle(happened, self.now)  # type: ignore[arg-type]
        for action in actions if not self.holds_bodies else ():
            if isinstance(action, HopSend) and isinstance(action.message, Step):
                self.machine.handle(StepSent(action.peer, action.message), self.now)
        return actions

    def says(self, happened: object) -> list[tuple[PeerId, HopMessage]]:
        """What it sends, Statuses left out."""
        return [
            (action.peer, action.message)
            for action in self.feed(happened)
            if isinstance(action, HopSend) and not isinstance(action.message, HopStatus)
        ]

    def notes(self, actions: list[HopAction], kind: type[Event]) -> list[Event]:
        return [action.event for action in actions if isinstance(action, Note) and isinstance(action.event, kind)]

    def work(self) -> tuple[Work | None, list[tuple[PeerId, HopMessage]]]:
        work, actions = self.machine.next_work(self.now)
        sends = [(action.peer, action.message) for action in actions if isinstance(action, HopSend)]
        return work, sends

    def get(self, peer: PeerId, message: HopMessage, body: bytes | None = None) -> list[tuple[PeerId, HopMessage]]:
        return self.says(HopReceived(peer, message, body))

    def link(self, *peers: PeerId) -> "Bench":
        for peer in peers:
            self.feed(Linked(peer, self.stage + (1 if peer in (DOWN, DOWN2) else -1)))
        return self

    def take(self, index: int, caller: PeerId = UP, call: int | None = None, origin: PeerId = UP) -> None:
        """A caller reserves, is granted and sends the body."""
        call = index if call is None else call
        assert self.get(caller, Reserve(*id_of(index, origin), call, 0)) == [
            (caller, SlotGrant(*id_of(index, origin), call))
        ]
        self.get(caller, Step(*id_of(index, origin), call, 0, 4), b"x")

    def name_origin(self, origin: PeerId, caller: PeerId = UP, *, round_number: int = 0) -> None:
        """A caller sends a micro-batch of an origin, and cancels it."""
        self.get(caller, Reserve(*id_of(0, origin), 0, round_number))
        self.get(caller, Step(*id_of(0, origin), 0, round_number, 4), b"x")
        self.get(caller, Cancel(*id_of(0, origin), 0))

    def begin(self) -> tuple[MicroBatchId, PeerId, int]:
        """Starts a forward, which must be there; its id, and the callee and number of its call."""
        work, sends = self.work()
        assert isinstance(work, Forward)
        ((callee, reserve),) = sends
        assert isinstance(reserve, Reserve)
        return work.id, callee, reserve.call

    def call(self) -> tuple[MicroBatchId, PeerId, int]:
        """The same up to the sent body."""
        id_, callee, call = self.begin()
        assert self.says(ForwardDone(id_, b"y", 0.1)) == []
        ((to, step),) = self.get(callee, SlotGrant(*id_, call))
        assert to == callee
        assert isinstance(step, Step)
        return id_, callee, call

    def tick(self, seconds: float) -> list[tuple[PeerId, HopMessage]]:
        self.now += seconds
        return self.says(Tick())


def origin(**more: object) -> Bench:
    return Bench(0, **more).link(DOWN)  # type: ignore[arg-type]


def middle(**more: object) -> Bench:
    return Bench(1, **more).link(UP, DOWN)  # type: ignore[arg-type]


def last(**more: object) -> Bench:
    return Bench(2, **more).link(UP)  # type: ignore[arg-type]


# ---- 1: slots -------------------------------------------------------------------------------------------------------


def test_a_slot_is_reserved_when_the_forward_starts() -> None:
    id_, callee, _ = origin().begin()
    assert callee == DOWN
    assert id_ == MicroBatchId(ME, 1, 0)


def test_a_body_is_sent_when_granted_and_computed_whichever_comes_last() -> None:
    bench = origin()
    id_, _, call = bench.begin()
    assert bench.get(DOWN, SlotGrant(*id_, call)) == []
    ((_, step),) = bench.says(ForwardDone(id_, b"y", 0.1))
    assert isinstance(step, Step)
    bench.call()


def test_a_body_without_a_slot_is_refused_and_counted() -> None:
    bench = last()
    actions = bench.feed(HopReceived(UP, Step(*id_of(1), 1, 0, 4), b"x"))
    assert HopSend(UP, Refuse(*id_of(1), 1, "no slot")) in actions
    assert bench.notes(actions, HopRefused)
    assert bench.machine.protocol_errors == 1
    assert bench.work() == (None, [])


def test_who_finds_no_slot_waits_in_line_and_is_granted_when_an_answer_is_sent() -> None:
    bench = last(max_slots=1)
    bench.take(1)
    assert bench.get(UP, Reserve(*id_of(2), 2, 0)) == [(UP, SlotWait(*id_of(2), 2, 1))]
    work, _ = bench.work()
    assert isinstance(work, Turn)
    sent = bench.says(BackwardDone(work.id, b"dx", 1.0, 0.1))
    assert sent == [(UP, Grad(*id_of(1), 1, 1.0, 0)), (UP, SlotGrant(*id_of(2), 2))]


def test_slots_follow_the_window_that_callers_announce_and_the_replicas() -> None:
    bench = last(max_slots=100).link(UP2)
    bench.get(UP, Reserve(*id_of(1), 1, 0))
    bench.get(UP, Step(*id_of(1), 1, 0, 5), b"x")
    assert bench.machine.slots == 20
    bench.feed(Replicas(2))
    assert bench.machine.slots == 10


def test_a_slot_whose_body_does_not_come_is_taken_back() -> None:
    bench = last()
    bench.get(UP, Reserve(*id_of(1), 1, 0))
    assert (UP, Refuse(*id_of(1), 1, "expired")) in bench.tick(121.0)
    assert bench.machine.slots_in_use == 0


def test_who_leaves_slots_unused_gets_none_for_a_while_and_a_new_link_forgives_nothing() -> None:
    """It reserved again at once, and held slots for ever that it never used."""
    bench = last()
    bench.get(UP, Reserve(*id_of(1), 1, 0))
    bench.tick(121.0)
    refused = (UP, Refuse(*id_of(2), 2, "left its slots unused"))
    assert bench.get(UP, Reserve(*id_of(2), 2, 0)) == [refused]
    bench.feed(Unlinked(UP))
    bench.link(UP)
    assert refused in bench.get(UP, Reserve(*id_of(2), 2, 0))
    bench.tick(123.0)
    assert (UP, SlotGrant(*id_of(3), 3)) in bench.get(UP, Reserve(*id_of(3), 3, 0))


def test_a_caller_whose_body_is_not_taken_is_told_at_once_and_its_slot_goes_to_the_next() -> None:
    """Else it asks what became of it, is told to wait, and both are without a slot for minutes."""
    bench = last(max_slots=1)
    bench.get(UP, Reserve(*id_of(1), 1, 0))
    bench.get(UP, Reserve(*id_of(2), 2, 0))
    refused = StepRefused(UP, Step(*id_of(1), 1, 0, 4))
    assert bench.says(refused) == [(UP, Refuse(*id_of(1), 1, "not taken")), (UP, SlotGrant(*id_of(2), 2))]
    assert bench.says(refused) == []  # it is over
    assert bench.says(StepRefused(UP, Step(*id_of(1), 2, 0, 4))) == []  # another call's number


def test_what_a_callee_answers_wrongly_another_callee_has_to_do() -> None:
    bench = origin().link(DOWN2)
    id_, callee, call = bench.call()
    other = DOWN2 if callee == DOWN else DOWN
    grad = Grad(*id_, call, 1.0, 0)
    assert bench.says(GradRefused(other, grad)) == []  # it was not asked
    assert bench.says(GradRefused(callee, grad)) == [(callee, Cancel(*id_, call)), (other, Reserve(*id_, call, 0))]
    assert bench.machine.awaited(callee, grad) is None
    bench.get(other, SlotGrant(*id_, call))
    bench.get(other, grad, b"dx")
    assert isinstance(bench.work()[0], Backward)


def test_what_the_only_callee_answers_wrongly_it_has_to_do_again_later() -> None:
    bench = origin()
    id_, callee, call = bench.call()
    assert bench.says(GradRefused(callee, Grad(*id_, call, 1.0, 0))) == [(callee, Cancel(*id_, call))]
    assert (callee, Reserve(*id_, call, 0)) in bench.tick(2.0)


def test_a_caller_with_too_much_outstanding_is_refused() -> None:
    bench = last()
    for index in range(256):
        bench.get(UP, Reserve(*id_of(index), index, 0))
    assert bench.get(UP, Reserve(*id_of(999), 999, 0)) == [(UP, Refuse(*id_of(999), 999, "too many"))]


# ---- 2: the window --------------------------------------------------------------------------------------------------


def test_the_window_is_two_a_stage_and_two_a_service_time_on_the_way_at_most_accumulate() -> None:
    bench = origin(accumulate=100)
    assert bench.machine.window == 6
    bench.feed(HopReceived(DOWN, replaced(STATUS, stage=1, path_s=0.1, slowest_s=0.2)))
    bench.feed(RoundTrip(DOWN, 0.25))
    assert bench.machine.window == 10
    small = origin(accumulate=4)
    assert small.machine.window == 4


def test_one_origin_of_many_later_peers_has_a_window_for_all_of_them() -> None:
    bench = Bench(0, 2, accumulate=100).link(DOWN, DOWN2)
    assert bench.machine.window == 6


def test_a_origin_issues_its_window_and_no_more() -> None:
    bench = origin(accumulate=3)
    for _ in range(3):
        bench.call()
    assert bench.work() == (None, [])
    assert bench.machine.in_flight == 3


def test_no_more_is_under_way_than_there_is_memory_for_whatever_a_caller_asks_for() -> None:
    bench = middle(accumulate=64, max_slots=64, most_under_way=3)
    for index in range(16):
        assert bench.get(UP, Reserve(*id_of(index), index, 0)) == [(UP, SlotGrant(*id_of(index), index))] or index > 11
        bench.get(UP, Step(*id_of(index), index, 0, 65_536), b"x")
    begun = [bench.call() for _ in range(3)]
    assert bench.work() == (None, [])
    assert bench.machine.in_flight == 3
    id_, callee, call = begun[0]
    bench.get(callee, Grad(*id_, call, 1.0, 0), b"g")
    work, _ = bench.work()
    assert isinstance(work, Backward)
    bench.feed(BackwardDone(id_, b"d", 1.0, 0.1))
    bench.call()  # one is back, and the next that waits begins
    assert bench.work() == (None, [])


def test_an_origin_keeps_no_more_under_way_than_there_is_memory_for_whatever_a_callee_says() -> None:
    bench = origin(accumulate=64, most_under_way=5)
    bench.feed(HopReceived(DOWN, replaced(STATUS, stage=1, path_s=600.0, width=4096.0)))
    for _ in range(5):
        bench.call()
    assert bench.work() == (None, [])


def test_a_caller_that_is_an_origin_gets_slots_for_no_more_than_a_step_takes() -> None:
    bench = middle(accumulate=4, max_slots=100)
    bench.get(UP, Reserve(*id_of(1), 1, 0))
    bench.get(UP, Step(*id_of(1), 1, 0, 65_536), b"x")
    assert bench.machine.slots == 8


# ---- 3: what comes next ---------------------------------------------------------------------------------------------


def test_forwards_and_backwards_alternate_when_both_are_there() -> None:
    bench = origin(accumulate=100)
    calls = [bench.call() for _ in range(4)]
    for id_, _, call in calls[:2]:
        assert bench.get(DOWN, Grad(*id_, call, 1.0, 0), b"dy") == [(DOWN, GradAck(*id_, call))]
    kinds = []
    for _ in range(3):
        work, _ = bench.work()
        kinds.append(type(work))
        assert isinstance(work, Forward | Backward)
        bench.feed(
            ForwardDone(work.id, b"y", 0.1) if isinstance(work, Forward) else BackwardDone(work.id, None, 0.0, 0.1)
        )
    assert kinds == [Backward, Forward, Backward]


def test_backwards_go_oldest_first() -> None:
    bench = origin(accumulate=3)
    calls = [bench.call() for _ in range(3)]
    for id_, _, call in (calls[2], calls[0]):
        bench.get(DOWN, Grad(*id_, call, 1.0, 0), b"dy")
    work, _ = bench.work()
    assert isinstance(work, Backward)
    assert work.id == calls[0][0]


def test_forwards_go_in_the_order_of_their_grants() -> None:
    bench = last()
    for index in (1, 2):
        bench.get(UP, Reserve(*id_of(index), index, 0))
    for index in (2, 1):
        bench.get(UP, Step(*id_of(index), index, 0, 4), b"x")
    work, _ = bench.work()
    assert isinstance(work, Turn)
    assert work.id == id_of(1)


def test_nothing_is_handed_out_while_something_runs() -> None:
    bench = origin()
    bench.begin()
    assert bench.work() == (None, [])


@pytest.mark.parametrize("happened", [Hold(is_held=True), Leaving(), Rounds(1, 0, 0), Unlinked(DOWN)], ids=str)
def test_a_origin_that_may_not_issue_does_not(happened: object) -> None:
    bench = origin()
    bench.feed(happened)
    assert bench.work() == (None, [])


def test_the_issue_limit_is_one_rounds() -> None:
    bench = origin()
    bench.feed(Rounds(1, 0, 1))
    bench.call()
    assert bench.work() == (None, [])
    bench.feed(Rounds(2, 1, 1))
    bench.call()


def test_a_head_two_rounds_ahead_waits_until_it_is_one_ahead() -> None:
    bench = origin()
    bench.feed(HopReceived(DOWN, replaced(STATUS, stage=1, behind=1)))
    bench.feed(Rounds(4, 3))
    assert bench.machine.is_drifting
    assert bench.work() == (None, [])
    bench.feed(HopReceived(DOWN, replaced(STATUS, stage=1, behind=2)))
    bench.call()


# ---- 4: versions ----------------------------------------------------------------------------------------------------


def test_a_step_takes_all_completed_ones_and_makes_a_version() -> None:
    bench = last(accumulate=2)
    for index in (1, 2):
        bench.take(index)
        work, _ = bench.work()
        assert isinstance(work, Turn)
        assert work.version == 0
        bench.feed(BackwardDone(work.id, b"dx", 1.0, 0.1))
    assert bench.work()[0] == StepNow(2)
    bench.feed(Stepped(0.1))
    assert bench.machine.versions.current == 1


@pytest.mark.parametrize("mode", ["carry", "flush"])
def test_micro_batches_that_come_slowly_make_steps_of_no_fewer(mode: Literal["carry", "flush"]) -> None:
    """Two seconds without work made a step of what there was: of one micro-batch, where they come more slowly than that."""
    bench = last(accumulate=3, mode=mode)
    for index in range(1, 7):
        bench.take(index)
        work, _ = bench.work()
        assert isinstance(work, Turn)
        bench.feed(BackwardDone(work.id, b"dx", 1.0, 0.1))
        if index % 3:
            assert bench.work()[0] is None
        bench.tick(100.0)
        work, _ = bench.work()
        assert work == (None if index % 3 else StepNow(3))
        if work is not None:
            bench.feed(Stepped(0.1))


def test_what_is_left_of_an_origin_that_is_gone_is_in_the_next_step() -> None:
    bench = last(accumulate=3).link(UP2)
    for index, caller in ((1, UP), (2, UP), (3, UP2)):
        bench.take(index, caller)
        work, _ = bench.work()
        assert isinstance(work, Turn)
        bench.feed(BackwardDone(work.id, b"dx", 1.0, 0.1))
        if index == 2:
            bench.feed(Unlinked(UP))
            bench.feed(Rounds(2, 1))
            bench.tick(10_000.0)
            assert bench.work()[0] is None
    assert bench.work()[0] == StepNow(3)


def test_a_shift_is_published_at_once_when_nothing_is_in_flight() -> None:
    bench = origin()
    bench.feed(Shifted())
    assert bench.work()[0] == Publish()
    bench.feed(Stepped(0.0))
    work, _ = bench.work()
    assert isinstance(work, Forward)
    assert work.version == 1


# ---- 6: overdue, gone, again ----------------------------------------------------------------------------------------


def test_an_overdue_callee_is_asked_and_left_when_it_does_not_answer() -> None:
    bench = origin().link(DOWN2)
    id_, callee, call = bench.call()
    other = DOWN2 if callee == DOWN else DOWN
    assert bench.tick(29.0) == []
    assert bench.tick(1.5) == [(callee, Reserve(*id_, call, 0))]
    actions = bench.machine.handle(Tick(), bench.now + 5.0)
    sent = [(a.peer, a.message) for a in actions if isinstance(a, HopSend) and not isinstance(a.message, HopStatus)]
    assert sent == [(callee, Cancel(*id_, call)), (other, Reserve(*id_, call, 0))]
    assert bench.notes(actions, MicroBatchResent)
    assert bench.machine.resent == 1


def test_an_overdue_callee_that_works_on_it_is_left_alone() -> None:
    bench = origin().link(DOWN2)
    id_, callee, call = bench.call()
    assert bench.tick(31.0) == [(callee, Reserve(*id_, call, 0))]
    assert bench.get(callee, SlotWait(*id_, call, 0)) == []
    assert bench.tick(10.0) == []


def test_a_callee_is_not_late_while_the_body_waits_for_our_upload_limit() -> None:
    bench = origin().link(DOWN2)
    bench.holds_bodies = True
    id_, callee, call = bench.begin()
    bench.says(ForwardDone(id_, b"y", 0.1))
    ((_, step),) = bench.get(callee, SlotGrant(*id_, call))
    assert isinstance(step, Step)
    assert bench.tick(100.0) == []
    bench.feed(StepSent(callee, step))
    assert bench.tick(29.0) == []
    assert bench.tick(1.5) == [(callee, Reserve(*id_, call, 0))]


def test_an_only_callee_that_forgot_a_micro_batch_gets_it_again() -> None:
    bench = origin()
    id_, _, call = bench.call()
    assert bench.tick(31.0) == [(DOWN, Reserve(*id_, call, 0))]
    ((_, step),) = bench.get(DOWN, SlotGrant(*id_, call))
    assert isinstance(step, Step)


def test_a_grant_that_was_not_asked_for_sends_nothing_twice() -> None:
    bench = origin()
    id_, _, call = bench.call()
    assert bench.get(DOWN, SlotGrant(*id_, call)) == []


def test_the_first_gradient_wins_later_ones_are_acknowledged_and_dropped() -> None:
    bench = origin().link(DOWN2)
    id_, callee, call = bench.call()
    other = DOWN2 if callee == DOWN else DOWN
    bench.says(Unlinked(callee))
    bench.link(callee)
    bench.get(other, SlotGrant(*id_, call))
    assert bench.get(callee, Grad(*id_, call, 1.0, 0), b"dy") == [
        (callee, GradAck(*id_, call)),
        (other, Cancel(*id_, call)),
    ]
    assert bench.get(other, Grad(*id_, call, 1.0, 0), b"dy") == [(other, GradAck(*id_, call))]
    assert bench.machine.duplicates == 1
    work, _ = bench.work()
    assert isinstance(work, Backward)
    actions = bench.feed(BackwardDone(id_, None, 0.0, 0.1))
    [done] = bench.notes(actions, MicroBatchDone)
    assert isinstance(done, MicroBatchDone)
    assert done.loss == 1.0
    assert bench.machine.completed_total == 1


def test_a_loss_that_one_callee_tells_otherwise_than_two_others_does_not_count() -> None:
    bench, third = origin(accumulate=1000).link(DOWN2), PeerId("down3")
    bench.feed(Linked(third, 1))
    done: dict[PeerId, list[float]] = {DOWN: [], DOWN2: [], third: []}
    for _ in range(32):
        calls = [bench.call() for _ in range(3)]
        bench.feed(Hold(is_held=True))
        for id_, callee, call in calls:
            bench.get(callee, Grad(*id_, call, 0.01 if callee == DOWN else 4.0, 0), b"dy")
            work, _ = bench.work()
            assert isinstance(work, Backward)
            done[callee].append(work.loss)
            bench.feed(BackwardDone(id_, None, 0.0, 0.1))
        bench.feed(Hold(is_held=False))
    assert all(len(losses) >= 16 for losses in done.values()), {peer: len(each) for peer, each in done.items()}
    assert math.isnan(done[DOWN][-1])
    assert done[DOWN2][-1] == done[third][-1] == 4.0


def test_a_gradient_of_a_callee_that_never_had_the_body_is_not_taken() -> None:
    bench = origin()
    id_, _, call = bench.begin()
    assert bench.get(DOWN, Grad(*id_, call, 1.0, 0), b"dy") == [(DOWN, GradAck(*id_, call))]
    assert bench.machine.duplicates == 1


def test_calls_of_a_callee_that_is_gone_go_elsewhere_or_wait_for_a_link() -> None:
    bench = origin()
    id_, _, call = bench.call()
    assert bench.says(Unlinked(DOWN)) == []
    bench.link()
    assert bench.says(Linked(DOWN2, 1)) == [(DOWN2, Reserve(*id_, call, 0))]


def test_a_refusal_sends_the_call_elsewhere_and_leaves_the_callee_alone_for_a_while() -> None:
    bench = origin()
    id_, _, call = bench.begin()
    assert bench.get(DOWN, Refuse(*id_, call, "too many")) == []
    assert bench.tick(1.1) == [(DOWN, Reserve(*id_, call, 0))]


def test_an_answer_is_kept_until_acknowledged() -> None:
    bench = last()
    bench.take(1)
    bench.work()
    bench.feed(BackwardDone(id_of(1), b"dx", 1.0, 0.1))
    bench.feed(Unlinked(UP))
    bench.link(UP)
    grad = (UP, Grad(*id_of(1), 1, 1.0, 0))
    assert bench.get(UP, Reserve(*id_of(1), 1, 0)) == [grad]
    assert bench.get(UP, Step(*id_of(1), 1, 0, 4), b"x") == [(UP, SlotWait(*id_of(1), 1, 0))], "it is on its way"
    bench.get(UP, GradAck(*id_of(1), 1))
    assert bench.get(UP, Reserve(*id_of(1), 1, 0)) == [(UP, SlotGrant(*id_of(1), 1))]


def test_an_answer_asked_for_again_and_again_is_sent_more_and_more_seldom() -> None:
    """It may be our upload limit that it waits for: it is never refused."""
    bench = last()
    bench.take(1)
    bench.work()
    bench.feed(BackwardDone(id_of(1), b"dx", 1.0, 0.1))
    sent_at = []
    for second in range(1, 900):
        bench.now = float(second)
        [(_, message)] = bench.get(UP, Reserve(*id_of(1), 1, 0))
        assert isinstance(message, Grad | SlotWait)
        if isinstance(message, Grad):
            sent_at.append(second)
    assert sent_at == [15, 45, 105, 225, 465]


@pytest.mark.parametrize("callees", [(DOWN,), (DOWN, DOWN2)])
@pytest.mark.parametrize("reason", ["not finite", "not taken"])
def test_what_comes_to_nothing_is_given_up_by_its_origin(callees: tuple[PeerId, ...], reason: str) -> None:
    """By two callees, or by the only one: it would go round for ever, and no step comes while it is out."""
    bench = origin().link(*callees)
    id_, callee, call = bench.call()
    for _ in callees:
        assert id_ in bench.machine.own
        bench.get(callee, Refuse(*id_, call, reason))
        callee = DOWN2 if callee == DOWN else DOWN
        bench.get(callee, SlotGrant(*id_, call))
    assert id_ not in bench.machine.own


def test_what_nobody_computes_finitely_goes_back_to_its_caller() -> None:
    bench = middle()
    bench.take(1)
    id_, callee, call = bench.call()
    said = bench.get(callee, Refuse(*id_, call, "not finite"))
    assert (UP, Refuse(*id_, 1, "not finite")) in said
    assert not bench.machine.callers.flights


def test_a_micro_batch_whose_gradients_are_unlike_at_two_callees_goes_back_to_its_caller() -> None:
    bench = middle().link(DOWN2)
    bench.take(1)
    id_, callee, call = bench.call()
    for is_last in (False, True):
        said = bench.says(GradRefused(callee, Grad(*id_, call, 1.0, 0), is_unlike=True))
        assert ((UP, Refuse(*id_, 1, "not finite")) in said) is is_last
        callee = DOWN2 if callee == DOWN else DOWN
        bench.get(callee, SlotGrant(*id_, call))
    assert not bench.machine.callers.flights


class Poisoned:
    """A micro-batch whose gradient is too strong at whoever computes it; one callee has just answered, and the other is asked."""

    def __init__(self) -> None:
        self.bench = middle().link(DOWN2)
        self.bench.take(1)
        self.id, self.failed, self.call = self.bench.call()
        self.other = DOWN2 if self.failed == DOWN else DOWN
        self.reserve = Reserve(*self.id, self.call, 0)
        assert self.fails() == [(self.failed, Cancel(*self.id, self.call)), (self.other, self.reserve)]

    def fails(self) -> list[tuple[PeerId, HopMessage]]:
        return self.bench.says(GradRefused(self.failed, Grad(*self.id, self.call, 1.0, 0), is_unlike=True))

    def is_given_up(self, said: list[tuple[PeerId, HopMessage]]) -> bool:
        return (UP, Refuse(*self.id, 1, "not finite")) in said


@pytest.mark.parametrize("reason", ["paused", "leaving", "too many", "no slot"])
def test_what_comes_to_nothing_at_the_one_callee_that_takes_work_goes_back(reason: str) -> None:
    """It went round between that one and one that had paused, for ever, and cost the honest one its link again and again."""
    poisoned = Poisoned()
    said: list[tuple[PeerId, HopMessage]] = [(poisoned.other, poisoned.reserve)]
    for _ in range(60):
        assert (poisoned.failed, poisoned.reserve) not in said
        asked, said = said, []
        if (poisoned.other, poisoned.reserve) in asked:
            said += poisoned.bench.get(poisoned.other, Refuse(*poisoned.id, poisoned.call, reason))
        said += poisoned.bench.tick(0.5)
        if poisoned.is_given_up(said):
            break
    assert 6.0 < poisoned.bench.now < 12.0, "not before the other has had some seconds to take it"


def test_what_one_callee_comes_to_nothing_with_waits_for_another_that_is_busy() -> None:
    """Whatever comes of others meanwhile, and however long the line is: the first one may be what is bad."""
    poisoned = Poisoned()
    bench, id_, call, other = poisoned.bench, poisoned.id, poisoned.call, poisoned.other
    bench.get(other, Refuse(*id_, call, "left its slots unused"))
    bench.now += 0.5
    bench.take(2)
    id_of_next, callee, next_call = bench.call()
    assert callee == poisoned.failed
    said = bench.get(callee, Grad(*id_of_next, next_call, 1.0, 0), b"g")
    assert poisoned.reserve not in [message for _, message in said]
    assert (other, poisoned.reserve) in bench.tick(1.1)
    for _ in range(20):
        bench.get(other, SlotWait(*id_, call, 3))
        assert (poisoned.failed, poisoned.reserve) not in bench.tick(1.0)
    ((_, step),) = bench.get(other, SlotGrant(*id_, call))
    assert isinstance(step, Step)
    bench.get(other, Grad(*id_, call, 1.0, 0), b"g")
    assert bench.work()[0] == Backward(id_, 0, b"g", 1.0)


def test_what_came_to_nothing_keeps_its_place_in_the_line_of_the_other_callee() -> None:
    """One that is slow to say that it waits was told to forget it, for a callee that it does not go to again."""
    poisoned = Poisoned()
    said: list[tuple[PeerId, HopMessage]] = []
    while not said:
        said = poisoned.bench.tick(1.0)
    assert said == [(poisoned.other, poisoned.reserve)], "asked whether it still knows it"
    assert (poisoned.other, Cancel(*poisoned.id, poisoned.call)) not in poisoned.bench.tick(10.0)


def test_a_callee_that_only_lets_wait_what_came_to_nothing_elsewhere_has_it_no_longer_than_anything() -> None:
    poisoned = Poisoned()
    said: list[tuple[PeerId, HopMessage]] = []
    while not poisoned.is_given_up(said):
        assert poisoned.bench.now < 600.0
        said = poisoned.bench.get(poisoned.other, SlotWait(*poisoned.id, poisoned.call, 3)) + poisoned.bench.tick(1.0)
        assert (poisoned.failed, poisoned.reserve) not in said


@pytest.mark.parametrize("reason", ["expired", "paused", "no slot", "leaving"])
def test_one_refusal_of_a_callee_that_took_what_came_to_nothing_elsewhere_ends_nothing(reason: str) -> None:
    bench = middle().link(DOWN2)
    bench.take(1)
    id_, failed, call = bench.call()
    other = DOWN2 if failed == DOWN else DOWN
    bench.says(GradRefused(failed, Grad(*id_, call, 1.0, 0), is_unlike=True))
    for _ in range(9):
        bench.get(other, SlotWait(*id_, call, 3))
        bench.tick(1.0)
    bench.get(other, SlotGrant(*id_, call))
    assert (UP, Refuse(*id_, 1, "not finite")) not in bench.get(other, Refuse(*id_, call, reason))


def test_a_caller_that_is_put_out_comes_back_when_its_callee_takes_it_again() -> None:
    """All that it had in the line was refused at once, each refusal counted as a delay of the callee's: it was left alone for ten minutes."""
    bench = middle(max_slots=16, accumulate=64).link(DOWN2)
    held = []
    for index in range(14):
        bench.take(index)
        id_, callee, call = bench.call()
        if index >= 6:
            held.append((id_, callee, call))
            continue
        # It has had some, so that more are on their way at once.
        bench.get(callee, HopStatus(2, 0, 0, 0, 0, 0.1, 0, 0.0, 0.1))
        bench.get(callee, Grad(*id_, call, 1.0, 0), b"g")
        bench.work()
        bench.feed(BackwardDone(id_, b"g", 1.0, 0.1))
    for second in range(40):
        for id_, callee, call in held:
            bench.get(callee, SlotWait(*id_, call, max(1, 60 - second)))
        bench.tick(1.0)
    [(whose, _)] = Counter(callee for _, callee, _ in held).most_common(1)
    mine = [(id_, call) for id_, callee, call in held if callee == whose]
    assert len(mine) > 1
    for id_, call in mine:
        bench.get(whose, Refuse(*id_, call, MOSTLY_NOTHING))
    again = [peer for _ in range(70) for peer, message in bench.tick(1.0) if isinstance(message, Reserve)]
    assert whose in again


def test_another_callee_that_comes_and_goes_does_not_keep_what_comes_to_nothing_alive() -> None:
    poisoned = Poisoned()
    bench = poisoned.bench
    said: list[tuple[PeerId, HopMessage]] = []
    for _ in range(2):
        assert not poisoned.is_given_up(said)
        assert (poisoned.failed, poisoned.reserve) in bench.says(Unlinked(poisoned.other))
        bench.get(poisoned.failed, SlotGrant(*poisoned.id, poisoned.call))
        bench.link(poisoned.other)
        said = poisoned.fails()
    assert poisoned.is_given_up(said)


@pytest.mark.parametrize("held", ["before its slot", "before its body"])
def test_what_a_callee_has_no_body_of_it_cannot_say_to_come_to_nothing(held: str) -> None:
    """Two callees that lie ended micro-batches with eighty bytes each, and without the upload."""
    bench = origin().link(DOWN2)
    bench.holds_bodies = True
    id_, callee, call = bench.begin()
    bench.feed(ForwardDone(id_, b"y", 0.1))
    for _ in range(2):
        if held == "before its body":
            ((_, step),) = bench.get(callee, SlotGrant(*id_, call))
            assert isinstance(step, Step)
        bench.get(callee, Refuse(*id_, call, "not finite"))
        assert id_ in bench.machine.own
        callee = DOWN2 if callee == DOWN else DOWN
    assert (callee, Reserve(*id_, call, 0)) in bench.tick(1.5), "left alone for a second, as for any refusal"


def test_a_bad_micro_batch_costs_no_callee_its_next_ones() -> None:
    """Somebody who begins one now and then had both callees left alone for a second, or for eight times as long as they had kept it."""
    bench = origin().link(DOWN2)
    id_, callee, call = bench.call()
    bench.now += 20.0
    bench.get(callee, Refuse(*id_, call, "not taken"))
    other = DOWN2 if callee == DOWN else DOWN
    bench.get(other, SlotGrant(*id_, call))
    bench.get(other, Refuse(*id_, call, "not taken"))
    assert id_ not in bench.machine.own
    found = {bench.call()[1] for _ in range(2)}
    assert found == {DOWN, DOWN2}


def test_a_callee_that_refuses_most_is_left_alone() -> None:
    bench = origin()
    for _ in range(4):
        id_, callee, call = bench.call()  # asked again at once: it may have been the micro-batch
        bench.get(callee, Refuse(*id_, call, "not taken"))
    work, sends = bench.work()
    assert isinstance(work, Forward)
    assert sends == [], "parked"


def test_a_caller_of_which_most_comes_to_nothing_gets_no_slot_for_a_while() -> None:
    bench = middle().link(UP2)
    for index in range(4):
        bench.take(index)
        id_, callee, call = bench.call()
        actions = bench.feed(HopReceived(callee, Refuse(*id_, call, "not taken")))
    assert [event.peer for event in bench.notes(actions, HopRefused) if isinstance(event, HopRefused)] == [UP]
    asked = Reserve(*id_of(9), 9, 0)
    assert bench.get(UP, asked) == [(UP, Refuse(*id_of(9), 9, "most of it came to nothing"))]
    bench.take(5, UP2, origin=UP2)
    bench.tick(61.0)
    assert bench.get(UP, asked) == [(UP, SlotGrant(*id_of(9), 9))]


def flagged() -> tuple[Bench, list[HopAction], tuple[MicroBatchId, PeerId, int]]:
    """A caller of which four have just come to nothing; a fifth is at the callee, a sixth is ready, more are granted or wait. What was said, and the fifth's call."""
    bench = middle(max_slots=10).link(UP2)
    calls = []
    for index in range(5):
        bench.take(index)
        calls.append(bench.call())
    bench.take(5)
    for index in range(6, 12):
        bench.get(UP, Reserve(*id_of(index), index, 0))
    assert 0 < bench.machine.waiting < 6
    bench.get(UP2, Reserve(*id_of(0, UP2), 0, 0))
    actions: list[HopAction] = []
    for id_, callee, call in calls[:4]:
        actions = bench.feed(HopReceived(callee, Refuse(*id_, call, "not taken")))
    return bench, actions, calls[4]


def test_what_a_caller_of_which_most_comes_to_nothing_has_in_the_line_goes_with_it() -> None:
    """It was granted and sent on, for as long as the line was: up to 256, of which each cost honest callees their name."""
    bench, actions, _ = flagged()
    said = [(action.peer, action.message) for action in actions if isinstance(action, HopSend)]
    refused = [message.call for peer, message in said if peer == UP and isinstance(message, Refuse)]
    assert sorted(refused) == [3, *range(5, 12)], "the fourth that failed, and all that is not begun"
    assert not [message for peer, message in said if peer == UP and isinstance(message, SlotGrant)]
    assert set(bench.machine.callers.flights) == {(UP, 4), (UP2, 0)}
    assert bench.work() == (None, [])
    assert bench.get(UP, Step(*id_of(6), 6, 0, 4), b"x") == [(UP, Refuse(*id_of(6), 6, "no slot"))]
    assert bench.machine.protocol_errors == 0, "it was on its way"


def test_what_else_of_such_a_caller_comes_to_nothing_is_no_mark_of_the_callee() -> None:
    """Whoever is left with honest callers beside hostile ones had most of their answers refused."""
    bench, _, (id_, callee, call) = flagged()
    assert bench.machine.callers.is_doubted(id_)
    bench.tick(1.5)
    bench.get(callee, Refuse(*id_, call, "not taken"))
    assert not bench.machine.callers.is_doubted(id_)
    bench.take(1, UP2, origin=UP2)
    assert bench.call()[1] == callee, "it is asked at once"


def test_a_caller_with_a_slow_line_keeps_its_slots_while_its_bodies_come() -> None:
    """It had all its slots granted at once, and a body takes it 50 s: from the third on they were taken back, and it was told off."""
    bench = last(max_slots=16)
    for index in range(6):
        bench.get(UP, Reserve(*id_of(index), index, 0))
    for index in range(6):
        assert not [said for said in bench.tick(50.0) if isinstance(said[1], Refuse)]
        assert bench.get(UP, Step(*id_of(index), index, 0, 6), b"x") == []
    bench.get(UP, Reserve(*id_of(6), 6, 0))
    assert (UP, Refuse(*id_of(6), 6, "expired")) in bench.tick(121.0)


def test_nobody_keeps_slots_by_a_body_now_and_then() -> None:
    bench = last(max_slots=16)
    for index in range(6):
        bench.get(UP, Reserve(*id_of(index), index, 0))
    said = []
    for index in range(6):
        said += bench.tick(110.0)
        bench.get(UP, Step(*id_of(index), index, 0, 6), b"x")
    assert (UP, Refuse(*id_of(5), 5, "expired")) in said


def test_a_callee_that_refuses_what_waited_for_our_upload_limit_is_asked_again_soon() -> None:
    """It has had nothing of it, however long ago it granted the slot."""
    bench = origin().link(DOWN2)
    bench.holds_bodies = True
    id_, callee, call = bench.begin()
    bench.feed(ForwardDone(id_, b"y", 0.1))
    bench.get(callee, SlotGrant(*id_, call))
    bench.now = 119.0
    bench.get(callee, Refuse(*id_, call, "expired"))
    bench.feed(Unlinked(DOWN2 if callee == DOWN else DOWN))
    assert (callee, Reserve(*id_, call, 0)) in bench.tick(1.5)


def test_an_answer_is_for_its_caller_and_its_output_alone() -> None:
    bench = last().link(UP2)
    bench.take(1)
    bench.work()
    bench.feed(BackwardDone(id_of(1), b"dx", 1.0, 0.1))
    assert bench.get(UP2, Reserve(*id_of(1), 1, 0)) == [(UP2, SlotGrant(*id_of(1), 1))]
    assert bench.get(UP, Reserve(*id_of(1), 2, 0)) == [(UP, SlotGrant(*id_of(1), 2))]


def test_the_same_call_again_does_nothing_twice() -> None:
    bench = last()
    bench.take(1)
    assert bench.get(UP, Reserve(*id_of(1), 1, 0)) == [(UP, SlotWait(*id_of(1), 1, 0))]
    assert bench.get(UP, Step(*id_of(1), 1, 0, 4), b"x") == []
    bench.work()
    assert bench.get(UP, Step(*id_of(1), 1, 0, 4), b"x") == []
    bench.feed(BackwardDone(id_of(1), b"dx", 1.0, 0.1))
    assert bench.work()[0] is None
    assert bench.machine.duplicates == 2


def test_the_same_id_of_another_caller_is_computed_afresh_and_after_the_first() -> None:
    bench = Bench(2, 4).link(UP, UP2, DOWN)
    bench.take(1, UP)
    bench.take(1, UP2)
    id_, callee, call = bench.call()
    assert bench.work() == (None, [])
    bench.get(callee, Grad(*id_, call, 1.0, 0), b"dy")
    work, _ = bench.work()
    assert isinstance(work, Backward)
    bench.feed(BackwardDone(id_, b"dx", 0.0, 0.1))
    again, _, other_call = bench.call()
    assert again == id_
    assert other_call != call


def test_cancelled_work_is_dropped_at_once_and_its_activations_released() -> None:
    bench = middle()
    bench.take(1)
    id_, callee, call = bench.call()
    actions = bench.feed(HopReceived(UP, Cancel(*id_of(1), 1)))
    assert HopSend(callee, Cancel(*id_, call)) in actions
    assert Release(id_) in actions
    assert bench.machine.slots_in_use == 0
    assert bench.machine.versions.in_flight == 0


def test_a_forward_cancelled_while_it_runs_is_discarded_when_done() -> None:
    bench = middle()
    bench.take(1)
    id_, callee, call = bench.begin()
    assert bench.says(Unlinked(UP)) == [(callee, Cancel(*id_, call))]
    assert Release(id_) in bench.feed(ForwardDone(id_, b"y", 0.1))
    assert bench.machine.is_drained


def test_a_forward_of_which_nothing_comes_is_given_back() -> None:
    """Nobody is sent it, its caller is told, and the callee that it was kept a slot at."""
    bench = middle()
    bench.take(1)
    id_, callee, call = bench.begin()
    bench.get(callee, SlotGrant(*id_, call))
    actions = bench.feed(ForwardDone(id_, None, 0.1))
    sent = [(each.peer, each.message) for each in actions if isinstance(each, HopSend)]
    assert sorted(sent, key=str) == sorted([(UP, Refuse(*id_, 1, "not finite")), (callee, Cancel(*id_, call))], key=str)
    assert Release(id_) in actions
    assert bench.machine.protocol_errors == 0
    assert bench.machine.is_drained
    assert bench.machine.slots_in_use == 0


def test_an_origin_does_without_a_forward_of_which_nothing_comes() -> None:
    bench = origin()
    bench.feed(Rounds(1, 0, 1))
    id_, callee, call = bench.begin()
    actions = bench.feed(ForwardDone(id_, None, 0.1))
    assert HopSend(callee, Cancel(*id_, call)) in actions
    assert Release(id_) in actions
    assert bench.machine.in_flight == 0
    assert bench.call()[0] == MicroBatchId(ME, 1, id_.index + 1), "the round's only one was not of use"


def test_what_is_computed_for_a_caller_that_is_gone_is_kept_for_its_return() -> None:
    bench = last()
    bench.take(1)
    bench.work()
    bench.feed(Unlinked(UP))
    assert bench.says(BackwardDone(id_of(1), b"dx", 1.0, 0.1)) == []
    bench.link(UP)
    assert bench.get(UP, Reserve(*id_of(1), 1, 0)) == [(UP, Grad(*id_of(1), 1, 1.0, 0))]


# ---- 8: rounds ------------------------------------------------------------------------------------------------------


def test_a_later_stage_knows_the_rounds_of_its_recent_origins() -> None:
    bench = last(max_slots=200)
    for index in range(70):
        bench.get(UP, Reserve(*id_of(index), index, index // 10))
        bench.get(UP, Step(*id_of(index), index, index // 10, 50), b"x")
    other = id_of(0, UP2)
    bench.get(UP, Reserve(*other, 500, 9))
    bench.get(UP, Step(*other, 500, 9, 50), b"x")
    assert bench.machine.recent_origins() == {(UP, UP): (6, 63), (UP, UP2): (9, 1)}
    assert bench.machine.num_origins(listed=2) == 2


def test_a_caller_that_is_an_origin_works_for_itself_alone() -> None:
    bench = Bench(1, max_slots=200).link(UP, UP2)
    bench.name_origin(UP)
    for origin in (PeerId("invented"), UP):  # with the id of another's, that would not be computed here
        assert bench.get(UP2, Reserve(*id_of(0, origin), 0, 0)) == [
            (UP2, Refuse(*id_of(0, origin), 0, "another's micro-batch"))
        ]
    bench.name_origin(UP2, UP2)
    assert bench.machine.recent_origins() == {(UP, UP): (0, 1), (UP2, UP2): (0, 1)}
    assert bench.machine.num_origins(listed=1) == 2


def test_invented_origins_are_no_more_than_are_listed_or_one_more_than_callers() -> None:
    """Their number makes the share of a round, and so the learning rate's place in it."""
    bench = Bench(2, max_slots=200).link(UP, UP2)
    for index in range(60):
        bench.name_origin(PeerId(f"origin{index}"))
    assert [bench.machine.num_origins(listed) for listed in (0, 2, 5, 100)] == [3, 3, 5, 60]


def test_a_caller_that_lies_about_the_round_of_others_origins_does_not_end_ours() -> None:
    bench = last(max_slots=200).link(UP2)
    for _ in range(40):
        bench.name_origin(UP)
    bench.name_origin(UP, UP2, round_number=10**6)
    origins = bench.machine.recent_origins()
    assert origins == {(UP, UP): (0, 40), (UP2, UP): (10**6, 1)}
    assert not follows(1, own=40, origins=origins, certified_at_stage_0=0)


def test_round_fields_are_told_at_once_and_flow_through() -> None:
    bench = middle()
    told = {
        action.peer: action.message
        for action in bench.feed(HopReceived(UP, replaced(STATUS, stage=0, stage0_certified=5, certified=5)))
        if isinstance(action, HopSend)
    }
    assert isinstance(down := told[DOWN], HopStatus)
    assert down.stage0_certified == 5
    bench.feed(Rounds(4, 3))
    bench.now = 0.2
    told = {
        action.peer: action.message
        for action in bench.feed(HopReceived(DOWN, replaced(STATUS, behind=2)))
        if isinstance(action, HopSend)
    }
    assert isinstance(up := told[UP], HopStatus)
    assert up.behind == 2
    assert bench.machine.behind == 2


def test_a_caller_whose_word_goes_to_and_fro_has_the_others_told_ten_times_a_second_at_most() -> None:
    bench = middle()
    told = []
    for turn in range(1000):
        bench.now = turn * 0.001
        flipping = HopReceived(UP, replaced(STATUS, stage=0, stage0_certified=turn % 2, certified=5))
        for happened in (flipping, *([Tick()] if bench.machine.deadline() <= bench.now else [])):
            told += [
                action.message
                for action in bench.feed(happened)
                if isinstance(action, HopSend) and isinstance(action.message, HopStatus) and action.peer == DOWN
            ]
    assert 5 <= len(told) <= 20
    bench.feed(HopReceived(UP, replaced(STATUS, stage=0, stage0_certified=7, certified=5)))
    assert bench.machine.deadline() <= bench.now + 0.1, "what is not told at once is told soon"


def test_statuses_come_every_second() -> None:
    bench = middle()
    bench.now = 1.0
    assert sum(isinstance(a, HopSend) and isinstance(a.message, HopStatus) for a in bench.feed(Tick())) == 2
    bench.now = 1.5
    assert not any(isinstance(a, HopSend) for a in bench.feed(Tick()))


# ---- 9 and strangers ------------------------------------------------------------------------------------------------


def test_who_leaves_refuses_what_is_new_and_finishes_what_it_has() -> None:
    bench = last()
    bench.take(1)
    bench.get(UP, Reserve(*id_of(2), 2, 0))
    assert bench.says(Leaving()) == [(UP, Refuse(*id_of(2), 2, "leaving"))]
    assert bench.get(UP, Reserve(*id_of(3), 3, 0)) == [(UP, Refuse(*id_of(3), 3, "leaving"))]
    assert not bench.machine.is_drained
    bench.work()
    assert bench.says(BackwardDone(id_of(1), b"dx", 1.0, 0.1)) == [(UP, Grad(*id_of(1), 1, 1.0, 0))]
    assert bench.machine.is_drained


def test_messages_of_strangers_and_unknown_ids_are_dropped() -> None:
    bench = middle()
    stranger = PeerId("stranger")
    for message in (
        Reserve(*id_of(1), 0, 0),
        SlotGrant(*id_of(1), 0),
        GradAck(*id_of(1), 0),
        Cancel(*id_of(1), 0),
        STATUS,
    ):
        assert bench.get(stranger, message) == []
    answers: tuple[tuple[PeerId, HopMessage], ...] = (
        (UP, GradAck(*id_of(1), 0)),
        (UP, Cancel(*id_of(1), 0)),
        (DOWN, SlotGrant(*id_of(1), 0)),
        (DOWN, SlotWait(*id_of(1), 0, 1)),
    )
    for peer, answer in answers:
        assert bench.get(peer, answer) == []
    assert bench.machine.protocol_errors == 0


def test_a_caller_that_sends_and_cancels_without_end_takes_no_memory() -> None:
    bench = last()
    bench.take(0)
    bench.work()
    for index in range(1, 1000):
        bench.take(index)
        bench.get(UP, Cancel(*id_of(index), index))
    machine = bench.machine
    assert machine.slots_in_use == 1
    assert len(machine.callers.ready) < 200
    assert len(machine.callers.flights) == 1


def test_a_message_in_the_wrong_direction_is_a_protocol_error() -> None:
    bench = middle()
    assert bench.get(UP, SlotGrant(*id_of(1), 0)) == []
    assert bench.get(DOWN, Reserve(*id_of(1), 0, 0)) == []
    assert bench.machine.protocol_errors == 2


def test_a_traced_micro_batch_tells_the_moments_of_its_life() -> None:
    bench = origin(trace=True)
    id_, _, call = bench.call()
    bench.get(DOWN, Grad(*id_, call, 1.0, 0), b"dy")
    bench.work()
    (event,) = bench.notes(bench.feed(BackwardDone(id_, None, 0.0, 0.1)), MicroBatchTimed)
    assert isinstance(event, MicroBatchTimed)
    assert [name for name, _ in event.moments] == [
        "forward_start", "reserve", "forward_end", "grant", "step_sent", "grad", "backward_start", "backward_end",
    ]  # fmt: skip


def test_one_caller_that_lies_about_stage_0_does_not_end_our_rounds():
    bench = Bench(1)
    callers = [PeerId(f"caller{index}") for index in range(3)]
    for caller in callers:
        bench.feed(Linked(caller, 0))
    bench.feed(HopReceived(callers[0], replaced(STATUS, stage=0, stage0_certified=3)))
    bench.feed(HopReceived(callers[1], replaced(STATUS, stage=0, stage0_certified=1_000_000)))
    assert bench.machine.stage0_certified == 3  # of two, what both say at least
    bench.feed(HopReceived(callers[2], replaced(STATUS, stage=0, stage0_certified=4)))
    assert bench.machine.stage0_certified == 4


def test_one_callee_that_lies_about_what_is_behind_does_not_hold_a_origin():
    bench = Bench(0)
    callees = [PeerId(f"callee{index}") for index in range(3)]
    for callee in callees:
        bench.feed(Linked(callee, 1))
    bench.feed(Rounds(6, 5))
    for callee, behind in zip(callees, (0, 4, 5), strict=True):
        bench.feed(HopReceived(callee, replaced(STATUS, stage=1, behind=behind)))
    assert bench.machine.behind == 4
    assert not bench.machine.is_drifting


def test_a_paused_peer_gives_back_what_it_has_not_begun_and_takes_nothing():
    bench = last()
    bench.take(1)
    assert bench.get(UP, Reserve(*id_of(2), 2, 0)) == [(UP, SlotGrant(*id_of(2), 2))]
    assert bench.says(PauseWanted(True)) == [
        (UP, Refuse(*id_of(1), 1, "paused")),
        (UP, Refuse(*id_of(2), 2, "paused")),
    ]
    assert bench.work() == (None, [])
    assert bench.get(UP, Reserve(*id_of(3), 3, 0)) == [(UP, Refuse(*id_of(3), 3, "paused"))]
    bench.says(PauseWanted(False))
    bench.take(4)
    work, _ = bench.work()
    assert isinstance(work, Turn)


def test_who_waits_for_the_download_limit_is_in_the_line_and_granted_in_time():
    waits = iter([0.0, 3.0, 0.0])
    bench = Bench(2, entry=Turnstile(100, lambda num_bytes: next(waits))).link(UP)
    assert bench.get(UP, Reserve(*id_of(1), 1, 0)) == [(UP, SlotGrant(*id_of(1), 1))]
    assert bench.get(UP, Reserve(*id_of(2), 2, 0)) == [(UP, SlotWait(*id_of(2), 2, 1))]
    assert bench.get(UP, Reserve(*id_of(2), 2, 0)) == [
        (UP, SlotWait(*id_of(2), 2, 1))
    ]  # asked again: still in the line
    assert bench.machine.deadline() <= 3.0
    bench.now = 2.9
    assert bench.says(Tick()) == []
    assert bench.machine.deadline() == 3.0
    bench.now = 3.0
    assert bench.says(Tick()) == [(UP, SlotGrant(*id_of(2), 2))]
    assert bench.machine.deadline() > 3.0  # or its thread would turn without end
    bench.get(UP, Step(*id_of(2), 2, 0, 4), b"x")
    assert bench.machine.protocol_errors == 0


def test_what_one_caller_said_of_stage_0_is_gone_with_it() -> None:
    """The first to be linked, alone for a moment, said 2**53: that stayed for ever, and each round was closed at once."""
    bench = Bench(1)
    liar, *callers = [PeerId(f"caller{index}") for index in range(4)]
    bench.feed(Linked(liar, 0))
    bench.feed(HopReceived(liar, replaced(STATUS, stage=0, stage0_certified=2**53)))
    bench.feed(Unlinked(liar))
    assert bench.machine.stage0_certified <= 1
    for caller in callers:
        bench.feed(Linked(caller, 0))
        bench.feed(HopReceived(caller, replaced(STATUS, stage=0, stage0_certified=3)))
    assert bench.machine.stage0_certified == 3


@pytest.mark.parametrize("said", [{"path_s": 1e6}, {"width": 1e6}, {"slowest_s": 1e6}, {"service_s": 1e6}])
def test_what_a_callee_says_is_told_on_within_what_others_take(said: dict[str, float]) -> None:
    """A way of 1e6 s and our own on top of it was more than anybody reads: our neighbours hung up on us."""
    bench = middle()
    bench.feed(RoundTrip(DOWN, 0.5))
    bench.feed(HopReceived(DOWN, replaced(STATUS, **said)))
    bench.now += 10.0
    told = [action.message for action in bench.feed(Tick()) if isinstance(action, HopSend)]
    assert any(isinstance(message, HopStatus) for message in told)
    assert decode_hops(encode_hops(told), PeerId("us")) == tuple(told)


def test_a_caller_that_asks_for_more_gets_no_more_than_its_part() -> None:
    """With 256 calls outstanding one had nine parts of ten of a callee's work, and its rounds ended by what that said."""
    bench, worked = last(max_slots=64).link(UP2), Counter[PeerId]()

    def feed(happened: object) -> None:
        """Whoever is granted a slot sends its body at once."""
        for action in bench.feed(happened):
            if isinstance(action, HopSend) and isinstance(grant := action.message, SlotGrant):
                feed(HopReceived(action.peer, Step(*grant.id, grant.call, 0, 8), b"x"))

    for caller, count in ((UP2, 40), (UP, 16)):
        for index in range(count):
            feed(HopReceived(caller, Reserve(*id_of(index, caller), index, 0)))
    while sum(worked.values()) < 24:
        work, _ = bench.work()
        if isinstance(work, Turn):
            worked[work.id.origin] += 1
            feed(BackwardDone(work.id, b"dy", 1.0, 0.1))
        else:
            feed(Stepped(0.0))
    assert min(worked.values()) >= 10, worked
