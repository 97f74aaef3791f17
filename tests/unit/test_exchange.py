"""What passes between links, scheduler and training loop, without a link below it: bench.py and exchange.py."""

import random
import time
from collections import deque
from collections.abc import Iterable

import pytest
import torch

from dilocox_peer.errors import ProtocolError
from dilocox_peer.events import Event
from dilocox_peer.model.activations import BodyFormat
from dilocox_peer.peer.links.bench import Bench
from dilocox_peer.peer.links.conveyor import max_slots
from dilocox_peer.peer.links.exchange import Exchange
from dilocox_peer.peer.planning.timetable import Timetable
from dilocox_peer.peer.training.outer import initial_state
from dilocox_peer.peer.training.stage_loop import StageLoop
from dilocox_peer.pipeline import contract
from dilocox_peer.pipeline.scheduler import Scheduler
from dilocox_peer.pipeline.turnstile import at_once
from dilocox_peer.types import PeerId
from dilocox_peer.wire.declared import replaced
from dilocox_peer.wire.hops import (
    Cancel,
    Grad,
    HopMessage,
    HopStatus,
    MicroBatchId,
    Refuse,
    Reserve,
    SlotGrant,
    Step,
    decode_hops,
    encode_hops,
)
from tests.cut_runs import manifest_of


class CountingBench(Bench):
    steps = 0

    def stepped(self, seconds: float) -> None:
        self.steps += 1
        super().stepped(seconds)


def bench_of(manifest, stage: int) -> CountingBench:
    scheduler = Scheduler(
        me=PeerId("me"), incarnation=1, stage=stage, num_stages=manifest.stages.count, mode="carry",
        accumulate=manifest.inner.accumulate, max_slots=max_slots(manifest), rng=random.Random(0), now=time.monotonic(),
    )  # fmt: skip
    return CountingBench(scheduler, stage=stage, trace=False, wake=lambda: None)


class MiddlePeer:
    """A stage in the middle, with the callers a and b and the callee z."""

    def __init__(self, pace=at_once) -> None:
        manifest = manifest_of(4, schedule="carry")
        body = BodyFormat.of(manifest)
        self.bench = bench_of(manifest, 2)
        self.told: list[Event] = []
        self.at_home: set[PeerId] = set()
        self.sent: list[tuple[PeerId, HopMessage]] = []
        self.exchange = Exchange(
            self.bench,
            body,
            pace=pace,
            pace_in=at_once,
            is_at_home=lambda peer: peer in self.at_home,
            admission=None,
            listener=self.told.append,
        )
        self.loop = StageLoop(
            manifest, 2, self.bench, peer=PeerId("me"), incarnation=1, corpus=None, device="cpu", clock=time.monotonic,
            micro_batch_limit=None, timetable=Timetable(manifest),
        )  # fmt: skip
        self.loop.begin(initial_state(manifest, 2))
        hidden_BTD = torch.ones(body.batch, body.tokens, body.width)
        self.gradient = body.pack_hidden(hidden_BTD)
        self.activations = self.gradient + body.pack_targets(torch.zeros(body.batch, body.tokens, dtype=torch.int64))
        for peer, stage in (("a", 1), ("b", 1), ("z", 3)):
            self.bench.take_in(contract.Linked(PeerId(peer), stage))

    def hear(self, peer: str, message: HopMessage, body: bytes = b"") -> None:
        self.exchange.take(PeerId(peer), encode_hops([message]), memoryview(body), 0.01)

    def receive(self, peer: str, index: int, call: int) -> MicroBatchId:
        """A caller's micro-batch is here, and waits to be computed."""
        id_ = MicroBatchId(PeerId("head"), 1, index)
        self.hear(peer, Reserve(*id_, call, 1))
        self.hear(peer, Step(*id_, call, 1, 8), self.activations)
        return id_

    def flush(self) -> None:
        def deliver(peer: PeerId, header: bytes, _body: object) -> bool:
            self.sent += [(peer, message) for message in decode_hops(header, PeerId("me"))]
            return True

        self.exchange.flush({PeerId(peer) for peer in "abz"}, deliver)

    def call_of(self, id_: MicroBatchId) -> int:
        """The number under which z was asked for a slot, the last time."""
        self.flush()
        return [message.call for _, message in self.sent if isinstance(message, Reserve) and message.id == id_][-1]

    def granted(self, id_: MicroBatchId) -> int:
        call = self.call_of(id_)
        self.hear("z", SlotGrant(*id_, call))
        return call

    def answer(self, id_: MicroBatchId) -> None:
        """The callee's gradient is here."""
        call = self.granted(id_)
        self.flush()
        self.hear("z", Grad(*id_, call, 1.0, 0), self.gradient)

    def sent_bodies(self) -> Iterable[PeerId]:
        return [peer for peer, message in self.sent if isinstance(message, Step | Grad)]


STATUS = HopStatus(0, 0, 0, 0, 0, 0.1, 0, 0.0, 0.1)


@pytest.fixture
def middle() -> MiddlePeer:
    return MiddlePeer()


def test_a_body_that_nobody_let_come_says_nothing_of_what_is_usual(middle: MiddlePeer):
    """Strangers without a slot could have the bodies of all others refused, by sending some that were next to nothing."""
    body = BodyFormat.of(manifest_of(3, schedule="carry"))
    weak = body.pack_hidden(1e-4 * torch.ones(body.batch, body.tokens, body.width))
    weak += body.pack_targets(torch.zeros(body.batch, body.tokens, dtype=torch.int64))
    for number in range(4):
        middle.receive("a", number, number)
    id_ = MicroBatchId(PeerId("head"), 1, 99)
    for stranger in ("b", "c", "d"):
        middle.bench.take_in(contract.Linked(PeerId(stranger), 1))
        for call in range(50, 56):
            middle.hear(stranger, Step(*id_, call, 1, 8), weak)
    middle.receive("a", 5, 5)
    assert middle.bench.awaits(PeerId("b"), Step(*id_, 50, 1, 8)) is False


def test_a_caller_whose_activations_are_too_strong_is_told_so(middle: MiddlePeer):
    body = BodyFormat.of(manifest_of(3, schedule="carry"))
    strong = body.pack_hidden(50 * torch.ones(body.batch, body.tokens, body.width))
    strong += body.pack_targets(torch.zeros(body.batch, body.tokens, dtype=torch.int64))
    for number in range(4):
        middle.receive("a", number, number)
    id_ = MicroBatchId(PeerId("head"), 1, 9)
    middle.hear("a", Reserve(*id_, 9, 1))
    middle.hear("a", Step(*id_, 9, 1, 8), strong)
    middle.flush()
    assert (PeerId("a"), Refuse(*id_, 9, "not taken")) in middle.sent
    [told] = [event for event in middle.told if isinstance(event, contract.HopRefused)]
    assert "activations of strength 50" in told.line()


def test_a_caller_of_which_most_is_too_strong_breaks_the_protocol(middle: MiddlePeer):
    """One that passes on what a liar began with, beside honest work, does not: it lost its link, and the liar kept its own."""
    body = BodyFormat.of(manifest_of(4, schedule="carry"))
    strong = body.pack_hidden(50 * torch.ones(body.batch, body.tokens, body.width))
    strong += body.pack_targets(torch.zeros(body.batch, body.tokens, dtype=torch.int64))

    def send(index: int) -> None:
        id_ = MicroBatchId(PeerId("head"), 1, index)
        middle.hear("a", Reserve(*id_, index, 1))
        middle.hear("a", Step(*id_, index, 1, 8), strong)

    for index in range(0, 24, 2):
        middle.receive("a", index, index)
        if index >= 8:
            send(index + 1)
    with pytest.raises(ProtocolError, match="activations of strength 50"):
        send(24)


def test_the_first_caller_of_a_peer_neither_has_the_others_refused_for_ever_nor_blamed(middle: MiddlePeer):
    """Its four bodies of next to nothing were usual from then on, and honest callers lost their links, one after the other."""
    body = BodyFormat.of(manifest_of(4, schedule="carry"))
    refused = list[str]()
    for caller, strength, count in (("a", 0.01, 4), ("b", 1.0, 12), ("c", 1.0, 12), ("d", 1.0, 12)):
        middle.bench.take_in(contract.Linked(PeerId(caller), 1))
        activations = body.pack_hidden(strength * torch.ones(body.batch, body.tokens, body.width))
        activations += body.pack_targets(torch.zeros(body.batch, body.tokens, dtype=torch.int64))
        for index in range(count):
            id_ = MicroBatchId(PeerId(f"{caller}head"), 1, index)
            middle.hear(caller, Reserve(*id_, index, 1))
            middle.hear(caller, Step(*id_, index, 1, 8), activations)
            middle.flush()
            refused += [caller] if (PeerId(caller), Refuse(*id_, index, "not taken")) in middle.sent else []
    assert refused == [*"bbbbbbbbbbbb", *"cccc"], "until two say it, of three"


def test_what_of_a_hostile_callers_micro_batches_is_too_strong_ends_no_callees_link(middle: MiddlePeer):
    """Each callee's is: once most of that caller's have come to nothing, the callee's own record is left alone."""
    body = BodyFormat.of(manifest_of(4, schedule="carry"))
    strong = body.pack_hidden(50 * torch.ones(body.batch, body.tokens, body.width))

    def begin(caller: str, index: int) -> Grad:
        id_ = middle.receive(caller, index, index)
        while id_ not in {message.id for _, message in middle.sent if isinstance(message, Reserve)}:
            assert middle.loop.train_on()
            middle.flush()
        call = middle.granted(id_)
        middle.flush()
        return Grad(*id_, call, 1.0, 0)

    for index in range(5):
        middle.hear("z", begin("b", index), middle.gradient)
    begun = [begin("a", index) for index in range(5, 12)]
    for grad in begun:
        middle.hear("z", grad, strong)
    assert not any(middle.bench.is_doubted(grad.id) for grad in begun), "all were given up"
    middle.hear("z", begin("b", 12), strong)
    grad = begin("b", 13)
    with pytest.raises(ProtocolError, match="a gradient of strength"):
        middle.hear("z", grad, strong)


def compared_by_hand(
    middle: MiddlePeer, monkeypatch: pytest.MonkeyPatch
) -> tuple[BodyFormat, MicroBatchId, list[contract.HopInput], deque[contract.HopAction]]:
    """What bodies look like, a micro-batch, and what its bench is told and wants: every answer is awaited."""
    taken: list[contract.HopInput] = []
    actions = deque[contract.HopAction]()
    monkeypatch.setattr(middle.bench, "awaited", lambda _peer, _message: middle.activations)
    monkeypatch.setattr(middle.bench, "take_in", taken.append)
    monkeypatch.setattr(middle.bench, "take_actions", lambda: actions)
    return BodyFormat.of(manifest_of(4, schedule="carry")), MicroBatchId(PeerId("head"), 1, 7), taken, actions


def test_gradients_that_were_halved_otherwise_are_compared_as_they_came(
    middle: MiddlePeer, monkeypatch: pytest.MonkeyPatch
):
    """Equal ones agreed by a half, where their senders' strengths are usually not the same."""
    body, id_, taken, actions = compared_by_hand(middle, monkeypatch)
    strong = body.pack_hidden(6 * torch.ones(body.batch, body.tokens, body.width))
    for peer, usual in (("y", 1.0), ("x", 2.0), ("z", 1.2)):
        of_usual = body.pack_hidden(usual * torch.ones(body.batch, body.tokens, body.width))
        for index in range(4):
            middle.hear(peer, Grad(*MicroBatchId(PeerId("head"), 1, index), 1, 1.0, 0), of_usual)
    taken.clear()
    for peer in ("y", "x"):
        middle.hear(peer, Grad(*id_, 1, 1.0, 0), strong)
    one, other = (event.body for event in taken if isinstance(event, contract.HopReceived))
    assert one is not None
    assert other is not None
    assert one != other, "halved otherwise"
    actions.append(contract.Compare(PeerId("y"), PeerId("x"), one, other, id_))
    middle.flush()
    assert taken[-1] == contract.Compared(PeerId("y"), PeerId("x"), 1.0)


def test_what_was_halved_in_an_earlier_answer_says_nothing_of_the_next(
    middle: MiddlePeer, monkeypatch: pytest.MonkeyPatch
):
    """An honest callee's second answer for one micro-batch, equal to another's, agreed by a half or a quarter."""
    body, id_, taken, actions = compared_by_hand(middle, monkeypatch)
    strong = body.pack_hidden(6 * torch.ones(body.batch, body.tokens, body.width))
    for peer in ("y", "x"):
        for index in range(4):
            middle.hear(peer, Grad(*MicroBatchId(PeerId("head"), 1, index), 1, 1.0, 0), middle.gradient)
    middle.hear("y", Grad(*id_, 1, 1.0, 0), strong)
    taken.clear()
    for peer in ("y", "x"):
        middle.hear(peer, Grad(*id_, 2, 1.0, 0), middle.gradient)
    one, other = (event.body for event in taken if isinstance(event, contract.HopReceived))
    assert one is not None
    assert other is not None
    actions.append(contract.Compare(PeerId("y"), PeerId("x"), one, other, id_))
    middle.flush()
    assert taken[-1] == contract.Compared(PeerId("y"), PeerId("x"), 1.0)


def test_activations_that_are_strong_are_taken_at_half(middle: MiddlePeer, monkeypatch: pytest.MonkeyPatch):
    body, carried = BodyFormat.of(manifest_of(3, schedule="carry")), list[bytes]()

    def take_in(event: contract.HopInput) -> None:
        if isinstance(event, contract.HopReceived) and event.body is not None:
            assert isinstance(event.body, bytes | bytearray | memoryview)
            carried.append(bytes(event.body))
        Bench.take_in(middle.bench, event)

    monkeypatch.setattr(middle.bench, "take_in", take_in)
    for number in range(4):
        middle.receive("a", number, number)
    strong = body.pack_hidden(5 * torch.ones(body.batch, body.tokens, body.width)) + bytes(
        body.targets_of(middle.activations)
    )
    id_ = MicroBatchId(PeerId("head"), 1, 9)
    middle.hear("a", Reserve(*id_, 9, 1))
    middle.hear("a", Step(*id_, 9, 1, 8), strong)
    assert carried == [middle.activations] * 4 + [body.halved(strong, 1)]


def test_a_gradient_with_the_wrong_size_is_done_again(middle: MiddlePeer):
    id_ = middle.receive("a", 7, 1)
    assert middle.loop.train_on()
    call = middle.granted(id_)
    middle.flush()
    with pytest.raises(ProtocolError):
        middle.hear("z", Grad(*id_, call, 1.0, 0), middle.gradient[:-1])
    middle.flush()
    assert (PeerId("z"), Cancel(*id_, call)) in middle.sent


def test_a_micro_batch_that_one_caller_gives_up_and_another_has_sent_keeps_its_activations(middle: MiddlePeer):
    id_ = middle.receive("a", 7, 1)
    middle.receive("b", 7, 2)
    assert middle.loop.train_on()  # a's forward
    middle.hear("a", Cancel(*id_, 1))
    assert middle.loop.train_on()  # b's forward
    middle.answer(id_)
    assert middle.loop.train_on()
    assert middle.loop.progress.micro_batches == 1


def test_a_step_that_a_lost_caller_makes_due_has_a_buffer_for_its_weights(middle: MiddlePeer):
    middle.receive("a", 0, 1)
    assert middle.loop.train_on()  # stays out, on the first weights
    for index in range(1, 9):
        id_ = middle.receive("b", index, index)
        assert middle.loop.train_on()
        middle.answer(id_)
        assert middle.loop.train_on()
        if index == 4:
            assert middle.loop.train_on()  # the step: second weights
    middle.receive("b", 9, 9)
    assert middle.loop.train_on()  # stays out, on the second weights
    steps_before = middle.bench.steps
    middle.bench.take_in(contract.Unlinked(PeerId("a")))
    assert middle.loop.train_on()
    assert middle.bench.steps == steps_before + 1


def test_the_share_of_a_later_stage_counts_the_heads_that_are_listed():
    bench, caller = bench_of(manifest_of(3, schedule="carry"), 2), PeerId("a")
    bench.take_in(contract.Linked(caller, 1))
    for number in range(10):
        id_ = MicroBatchId(PeerId(f"head{number}"), 1, 0)
        for message, body in (
            (Reserve(*id_, number, 1), None),
            (Step(*id_, number, 1, 8), b"x"),
            (Cancel(*id_, number), None),
        ):
            bench.take_in(contract.HopReceived(caller, message, body))
    assert bench.load_share() == 2.0  # nobody is listed yet: one more than there are callers
    bench.set_listed_origins(6)
    bench.set_replicas(3)
    assert bench.load_share() == 2.0


@pytest.fixture
def slow() -> MiddlePeer:
    """Its bodies wait for ever under its upload limit, unless they are dropped."""
    return MiddlePeer(pace=lambda _: 1e6)


def waits(peer: MiddlePeer) -> bool:
    peer.flush()
    assert not peer.sent_bodies()
    return peer.exchange.opens_at < float("inf")


def step_in_the_line(peer: MiddlePeer) -> tuple[MicroBatchId, int]:
    """A body for z waits; its call."""
    id_ = peer.receive("a", 7, 1)
    assert peer.loop.train_on()
    call = peer.granted(id_)
    assert waits(peer)
    return id_, call


def test_a_body_that_we_cancel_while_it_waits_for_the_upload_limit_is_not_sent(slow: MiddlePeer):
    """It would take the uplink of one that is wanted, and its callee would blame us for a body without a slot."""
    id_, _call = step_in_the_line(slow)
    slow.hear("a", Cancel(*id_, 1))
    assert not waits(slow)


def test_a_body_that_its_callee_refuses_while_it_waits_is_not_sent(slow: MiddlePeer):
    id_, call = step_in_the_line(slow)
    slow.hear("z", Refuse(*id_, call, "paused"))
    assert not waits(slow)


def test_a_gradient_that_its_caller_cancels_while_it_waits_is_not_sent():
    paces = iter([0.0])  # the step goes out, and nothing after it
    peer = MiddlePeer(pace=lambda _: next(paces, 1e6))
    id_ = peer.receive("a", 7, 1)
    assert peer.loop.train_on()
    peer.answer(id_)
    assert peer.loop.train_on()
    peer.sent.clear()
    assert waits(peer)
    peer.hear("a", Cancel(*id_, 1))
    assert not waits(peer)


def test_of_many_statuses_in_one_frame_the_last_counts(middle: MiddlePeer):
    heard: list[object] = []
    middle.bench.take_in = heard.append  # type: ignore[method-assign, assignment]
    claims = [replaced(STATUS, stage0_certified=number) for number in range(64)]
    middle.exchange.take(PeerId("a"), encode_hops(claims), memoryview(b""), 0.01)
    assert heard == [contract.HopReceived(PeerId("a"), claims[-1], None, 0.01)]


def test_who_sends_statuses_without_end_is_told_that_it_is_a_fault_and_others_are_heard(middle: MiddlePeer):
    def flood() -> None:
        for _ in range(100_000):
            middle.hear("a", STATUS)

    with pytest.raises(ProtocolError, match="statuses a second"):
        flood()
    middle.hear("b", STATUS)
    middle.hear("a", Reserve(*MicroBatchId(PeerId("head"), 1, 1), 1, 1))
    middle.exchange.forget(PeerId("a"))
    middle.hear("a", STATUS)


def test_what_neighbours_said_while_this_peer_was_suspended_is_none_too_many(middle: MiddlePeer):
    """linkd goes on meanwhile, and has 11 a second for it: three honest neighbours in a row were refused and unlinked."""
    middle.hear("a", STATUS)
    middle.exchange.stood_still(180.0)

    def hear(count: int) -> None:
        for _ in range(count):
            middle.hear("a", STATUS)

    hear(180 * 11)
    with pytest.raises(ProtocolError, match="statuses a second"):  # once, and no more at once afterwards than before
        hear(180 * 20)


def test_two_statuses_of_one_moment_leave_as_one(middle: MiddlePeer):
    middle.flush()
    middle.sent.clear()
    for _ in range(2):
        middle.bench.take_in(contract.Linked(PeerId("c"), 1))
        middle.bench.take_in(contract.Unlinked(PeerId("c")))
        middle.bench.take_in(contract.Linked(PeerId("c"), 1))
    middle.flush()
    assert sum(isinstance(message, HopStatus) for peer, message in middle.sent if peer == "c") == 1
