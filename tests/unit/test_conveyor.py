"""What the pipeline's thread takes in from a link, without linkd below it; with it: tests/shell/test_conveyor.py."""

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from dilocox_peer import admission as door
from dilocox_peer.admission import Admission, Gate, Revocations, Right
from dilocox_peer.events import Event, Failed, NeighbourLinked, NeighbourUnlinked
from dilocox_peer.model.activations import BodyFormat
from dilocox_peer.network.link import Arrived, Linked, LinkId, Unlinked
from dilocox_peer.peer.links.body_queue import BodyQueue
from dilocox_peer.peer.links.conveyor import FAULTS_UNTIL_DROPPED, HELLO, HOPS, Conveyor
from dilocox_peer.peer.links.greeting import hello_statement
from dilocox_peer.peer.links.shunned import LINES_PER_MINUTE, MAX_SHUNNED, SHUN_S, Shunned
from dilocox_peer.peer.planning.timetable import Timetable
from dilocox_peer.peer.training.outer import initial_state
from dilocox_peer.peer.training.stage_loop import StageLoop
from dilocox_peer.pipeline import contract
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import PeerId, canonical
from dilocox_peer.wire import versions
from dilocox_peer.wire.hops import (
    Cancel,
    Grad,
    Grant,
    HopMessage,
    MicroBatchId,
    Refuse,
    Reserve,
    Step,
    encode_hops,
)
from tests.cut_runs import manifest_of

LINK = LinkId("theirs")


class Peer:
    """A conveyor that was not started, and what it told."""

    def __init__(self, stage: int, num_stages: int, admission: Admission | None = None) -> None:
        self.events: list[Event] = []
        self.manifest = manifest_of(num_stages, schedule="carry")
        self.conveyor = Conveyor(
            self.manifest, stage, key=SigningKey(b"\1" * 32), run_id=self.manifest.run_id, incarnation=1,
            link_seed=b"\2" * 32, listen=("/ip4/127.0.0.1/tcp/0",), listener=self.events.append, on_failure=lambda _: None,
            admission=admission,
        )  # fmt: skip

    def greet(self, seed: int, *, stage: int) -> None:
        """A greeting over LINK by the peer of that key."""
        self.greet_with(SigningKey(seed.to_bytes(32, "big")), stage=stage)

    def greet_with(self, key: SigningKey, *shown: bytes, stage: int = 1) -> None:
        statement = hello_statement(self.manifest.run_id, LINK, self.conveyor.link_id, stage, 5)
        hello = canonical([versions.HELLO, key.peer_id, stage, 5, key.sign(statement), *shown])
        self.conveyor._take(Arrived(LINK, HELLO + hello, memoryview(b""), 0.0))


@pytest.fixture
def origin() -> Iterator[Peer]:
    peer = Peer(0, 2)
    yield peer
    peer.conveyor._link.close(0.0)


def test_a_neighbour_without_a_pass_is_no_neighbour_and_one_that_is_put_out_is_none_any_more():
    owner, them = SigningKey(b"o" * 32), SigningKey(b"t" * 32)
    gate = Gate(manifest_of(2, schedule="carry").run_id, owner.peer_id)
    shown = door.Grant(gate.run_id, bytes(16), frozenset({Right.JOIN}), 1, 2**33, them.peer_id, 0).signed_by(owner)
    peer = Peer(0, 2, Admission(gate, b""))
    try:
        for raw in (b"", b"x" * 100, replace(shown, expires_s=5).signed_by(owner).to_bytes()):
            peer.conveyor._shunned = Shunned()
            peer.conveyor._take(Linked(LINK))
            peer.greet_with(them, raw)
            assert not any(isinstance(event, NeighbourLinked) for event in peer.events)
            assert "is not admitted" in peer.events[-1].line()
        peer.conveyor._shunned = Shunned()
        peer.conveyor._take(Linked(LINK))
        peer.greet_with(them, shown.to_bytes())
        assert isinstance(peer.events[-1], NeighbourLinked)
        gate.take(Revocations(gate.run_id, 1, ((bytes(16), 1),)))
        for _ in range(FAULTS_UNTIL_DROPPED):
            peer.conveyor._take(Arrived(LINK, HOPS + b"", memoryview(b""), 0.0))
        assert any("revoked" in event.line() for event in peer.events if isinstance(event, Failed))
        assert isinstance(peer.events[-1], NeighbourUnlinked)
    finally:
        peer.conveyor._link.close(0.0)


def test_one_link_greets_for_one_peer(origin: Peer):
    """Else each greeting adds a callee, and all but the last stay when the link ends: an origin would wait for them."""
    origin.conveyor._take(Linked(LINK))
    for seed in range(10, 15):
        origin.greet(seed, stage=1)
    assert sum(isinstance(event, NeighbourLinked) for event in origin.events) == 1
    assert any("a second greeting" in event.line() for event in origin.events if isinstance(event, Failed))
    origin.conveyor._take(Unlinked(LINK, "gone"))
    assert sum(isinstance(event, NeighbourUnlinked) for event in origin.events) == 1
    assert origin.conveyor._scheduler.linked_callees == ()
    assert origin.conveyor.status().linked == {}


def test_a_new_link_may_greet_again(origin: Peer):
    for _ in range(2):
        origin.conveyor._take(Linked(LINK))
        origin.greet(10, stage=1)
        assert len(origin.conveyor._scheduler.linked_callees) == 1
        origin.conveyor._take(Unlinked(LINK, "gone"))
    assert origin.conveyor._scheduler.linked_callees == ()


def test_who_was_refused_is_hung_up_unheard_when_it_dials_in_again(origin: Peer, monkeypatch: pytest.MonkeyPatch):
    """Else each greeting costs it a link, and us a signature to check and an event."""
    hung_up: list[LinkId] = []
    monkeypatch.setattr(origin.conveyor._link, "hang_up", hung_up.append)
    for _ in range(5):
        origin.conveyor._take(Linked(LINK))
        origin.greet(10, stage=5)  # no neighbour of stage 0
        origin.conveyor._take(Unlinked(LINK, "hung up"))
    assert hung_up == [LINK] * 5
    assert sum(isinstance(event, Failed) for event in origin.events) == 1
    later = time.monotonic() + SHUN_S + 1.0
    monkeypatch.setattr(time, "monotonic", lambda: later)
    origin.conveyor._take(Linked(LINK))
    origin.greet(10, stage=1)
    assert len(origin.conveyor._scheduler.linked_callees) == 1


def test_a_flood_of_strangers_does_not_fill_the_log(origin: Peer):
    for number in range(3 * LINES_PER_MINUTE):
        stranger = LinkId(f"stranger{number}")
        origin.conveyor._take(Linked(stranger))
        origin.conveyor._take(Arrived(stranger, HELLO + b"?", memoryview(b""), 0.0))
    assert sum(isinstance(event, Failed) for event in origin.events) == LINES_PER_MINUTE


def test_shunned_links_are_forgotten_in_time_and_beyond_a_number():
    shunned, links = Shunned(), [LinkId(f"stranger{number}") for number in range(MAX_SHUNNED + 1)]
    for link in links:
        shunned.add(link, 0.0)
    assert not shunned.has(links[0], 1.0)
    assert all(shunned.has(link, 1.0) for link in links[1:])
    shunned.add(links[1], 1.0)
    assert shunned.has(links[1], SHUN_S)
    assert not shunned.has(links[2], SHUN_S)
    shunned.add(links[0], SHUN_S + 2.0)
    assert len(shunned._until) == 1


class MiddlePeer(Peer):
    """A stage in the middle, with the callers a and b and the callee z. Nothing is sent: its own thread never comes round."""

    def __init__(self) -> None:
        super().__init__(1, 3)
        manifest = self.manifest
        self.loop = StageLoop(
            manifest, 1, self.conveyor, peer=PeerId("me"), incarnation=1, corpus=None, device="cpu",
            clock=time.monotonic, micro_batch_limit=None, timetable=Timetable(manifest),
        )  # fmt: skip
        self.loop.begin(initial_state(manifest, 1).anchor_N(), 0)
        body = BodyFormat.of(manifest)
        hidden_BTD = torch.ones(body.batch, body.tokens, body.width)
        self.gradient = body.pack_hidden(hidden_BTD)
        self.activations = self.gradient + body.pack_targets(torch.zeros(body.batch, body.tokens, dtype=torch.int64))
        for peer, stage in (("a", 0), ("b", 0), ("z", 2)):
            self.conveyor._tell(contract.Linked(PeerId(peer), stage))

    def hear(self, peer: str, message: HopMessage, body: bytes | None = None) -> None:
        self.conveyor._tell(contract.Received(PeerId(peer), message, body))

    def receive(self, peer: str, index: int, call: int) -> MicroBatchId:
        """A caller's micro-batch is here, and waits to be computed."""
        id_ = MicroBatchId(PeerId("origin"), 1, index)
        self.hear(peer, Reserve(*id_, call, 1))
        self.hear(peer, Step(*id_, call, 1, 8), self.activations)
        return id_

    def answer(self, id_: MicroBatchId) -> None:
        """The callee's gradient is here."""
        call = self.conveyor._scheduler._busy[id_].call
        self.hear("z", Grant(*id_, call))
        self.hear("z", Grad(*id_, call, 1.0, 0), self.gradient)


@pytest.fixture
def middle() -> Iterator[MiddlePeer]:
    peer = MiddlePeer()
    yield peer
    peer.conveyor._link.close(0.0)


def test_a_micro_batch_that_one_caller_gives_up_and_another_has_sent_keeps_its_activations(middle: MiddlePeer):
    id_ = middle.receive("a", 7, 1)
    middle.receive("b", 7, 2)
    assert middle.loop.train_on()  # a's forward
    middle.hear("a", Cancel(*id_, 1))
    assert middle.loop.train_on()  # b's forward
    middle.conveyor._flush()
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
    steps_before = middle.loop._optimizer.steps_done
    middle.conveyor._tell(contract.Unlinked(PeerId("a")))
    assert middle.loop.train_on()
    assert middle.loop._optimizer.steps_done == steps_before + 1


def test_the_share_of_a_later_stage_counts_the_origins_that_are_listed():
    last = Peer(2, 3)
    try:
        conveyor, caller = last.conveyor, PeerId("a")
        conveyor._tell(contract.Linked(caller, 1))
        for number in range(10):
            id_ = MicroBatchId(PeerId(f"origin{number}"), 1, 0)
            for message, body in (
                (Reserve(*id_, number, 1), None),
                (Step(*id_, number, 1, 8), b"x"),
                (Cancel(*id_, number), None),
            ):
                conveyor._tell(contract.Received(caller, message, body))
        assert conveyor.load_share() == 2.0  # nobody is listed yet: one more than there are callers
        conveyor.set_listed_origins(6)
        conveyor.set_replicas(3)
        assert conveyor.load_share() == 2.0
    finally:
        last.conveyor._link.close(0.0)


class SlowPeer(MiddlePeer):
    """Its bodies wait for ever under its upload limit, unless they are dropped."""

    def __init__(self) -> None:
        super().__init__()
        conveyor = self.conveyor
        conveyor._bodies = BodyQueue(lambda _: 1e6, lambda _: 0.0, answer_bytes=1)
        conveyor._links = {PeerId(peer): LinkId(peer) for peer in "abz"}

    def waits(self) -> bool:
        self.conveyor._flush()
        return self.conveyor._bodies.opens_at < float("inf")

    def take_hops(self, peer: str, message: HopMessage) -> None:
        self.conveyor._take_hops(PeerId(peer), encode_hops([message]), memoryview(b""))

    def send_step(self) -> tuple[MicroBatchId, int]:
        """A body for z is in the line; its call."""
        id_ = self.receive("a", 7, 1)
        assert self.loop.train_on()
        call = self.conveyor._scheduler._busy[id_].call
        self.hear("z", Grant(*id_, call))
        assert self.waits()
        return id_, call


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowPeer]:
    peer = SlowPeer()
    monkeypatch.setattr(peer.conveyor._link, "send", lambda link, header, body=None: True)
    yield peer
    peer.conveyor._link.close(0.0)


def test_a_body_that_we_cancel_while_it_waits_for_the_upload_limit_is_not_sent(slow: SlowPeer):
    """It would take the uplink of one that is wanted, and its callee would blame us for a body without a slot."""
    id_, _call = slow.send_step()
    slow.hear("a", Cancel(*id_, 1))
    assert not slow.waits()


def test_a_body_that_its_callee_refuses_while_it_waits_is_not_sent(slow: SlowPeer):
    id_, call = slow.send_step()
    slow.take_hops("z", Refuse(*id_, call, "paused"))
    assert not slow.waits()


def test_a_gradient_that_its_caller_cancels_while_it_waits_is_not_sent(slow: SlowPeer):
    id_, call = slow.send_step()
    slow.hear("z", Grad(*id_, call, 1.0, 0), slow.gradient)
    slow.conveyor._bodies.drop(PeerId("z"), id_, call)
    assert slow.loop.train_on()
    assert slow.waits()
    slow.take_hops("a", Cancel(*id_, 1))
    assert not slow.waits()


def test_a_frame_that_finds_a_fault_in_the_scheduler_costs_its_link_alone(
    origin: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin.conveyor._take(Linked(LINK))
    origin.greet(10, stage=1)
    frame = HOPS + encode_hops([Grant(*MicroBatchId(PeerId("peer"), 1, 1), 0)])

    def fail(*_arguments: object) -> list[contract.Action]:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(origin.conveyor._scheduler, "handle", fail)
        origin.conveyor._take(Arrived(LINK, frame, memoryview(b""), 0.0))
    origin.conveyor._take(Arrived(LINK, frame, memoryview(b""), 0.0))
    assert [event.line() for event in origin.events if isinstance(event, Failed)] != []
    assert not any(isinstance(event, NeighbourUnlinked) for event in origin.events)
