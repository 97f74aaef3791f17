"""The pipeline's thread over a linkd that the test plays; with a real one: tests/shell/test_conveyor.py."""

import queue
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from dilocox_peer import admission as door
from dilocox_peer.admission import Admission, Gate, Revocations, Right
from dilocox_peer.events import Event, Failed, NeighbourLinked, NeighbourUnlinked
from dilocox_peer.network.link import Arrived, LinkdEnded, LinkDown, LinkEvent, LinkUp
from dilocox_peer.peer.links import conveyor as shell
from dilocox_peer.peer.links import sessions
from dilocox_peer.peer.links.conveyor import HELLO, HOPS, Conveyor
from dilocox_peer.peer.links.dialling import LinkAddress
from dilocox_peer.peer.links.greeting import Greeter
from dilocox_peer.peer.links.sessions import FAULTS_UNTIL_DROPPED
from dilocox_peer.pipeline.scheduler import Scheduler
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import LinkId, PeerId
from dilocox_peer.wire.hops import SlotGrant, encode_hops
from tests.cut_runs import manifest_of

LINKS = [LinkId(f"theirs{number}") for number in range(4)]
LINK = LINKS[0]


class PlayedLink:
    """A Link without linkd. A batch of events is one poll's; what it is ordered is kept."""

    def __init__(self, _settings: object, *, on_log: object) -> None:
        self.link_id = LinkId("ours")
        self.addresses = ("/here",)
        self.orders: list[tuple[object, ...]] = []
        self.frames: list[tuple[LinkId, bytes]] = []
        self.is_full = False
        self.pid: int | None = 7
        self.paced = 0
        self._batches: queue.Queue[list[LinkEvent]] = queue.Queue()
        self._is_handling = False

    def start(self, _timeout_s: float) -> None: ...

    def restart(self, _timeout_s: float) -> None:
        self.orders.append(("restart",))

    def wake(self) -> None:
        self._batches.put([])

    def close(self, _timeout_s: float) -> None:
        self._done()

    def dial(self, neighbour: LinkId, addresses: tuple[str, ...]) -> None:
        self.orders.append(("dial", neighbour, *addresses))

    def hang_up(self, neighbour: LinkId) -> None:
        self.orders.append(("hang up", neighbour))

    def proved(self, neighbour: LinkId) -> None: ...

    def pace(self, bytes_per_s: int, *, at_home: bool) -> None:
        self.paced = bytes_per_s

    def send(self, neighbour: LinkId, header: bytes, body: object = None) -> bool:
        if not self.is_full:
            self.frames.append((neighbour, header))
        return not self.is_full

    def poll(self, timeout_s: float) -> list[LinkEvent]:
        self._done()
        try:
            batch = self._batches.get(timeout=timeout_s)
        except queue.Empty:
            return []
        self._is_handling = True
        return batch

    def happens(self, *events: LinkEvent) -> None:
        """Returns when they were taken in and acted on."""
        self._batches.put(list(events))
        self._batches.join()

    def begins(self, *events: LinkEvent) -> None:
        """They are told, and may not have been taken in yet."""
        self._batches.put(list(events))

    def _done(self) -> None:
        if self._is_handling:
            self._is_handling = False
            self._batches.task_done()

    @property
    def greeted(self) -> list[LinkId]:
        return [link for link, header in self.frames if header[:1] == HELLO]


class Peer:
    """A conveyor over a played linkd, and what it told."""

    def __init__(self, admission: Admission | None = None) -> None:
        self.events: list[Event] = []
        self.failures: list[str] = []
        self.links: list[PlayedLink] = []
        self.rate: float | None = None
        self.manifest = manifest_of(2, schedule="carry")

        def link(settings: object, *, on_log: object) -> PlayedLink:
            self.links.append(PlayedLink(settings, on_log=on_log))
            return self.links[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shell, "Link", link)
            self.conveyor = Conveyor(
                self.manifest, 0, key=SigningKey(b"\1" * 32), run_id=self.manifest.run_id, incarnation=1,
                link_seed=b"\2" * 32, listen=(), listener=self.events.append, on_failure=self.failures.append,
                admission=admission, rate=lambda: self.rate,
            )  # fmt: skip
        self.link = self.links[0]
        self.conveyor.start()

    def hello(self, key: SigningKey, link: LinkId, shown: bytes | None = None) -> Arrived:
        """A greeting of stage 1, with a pass or none."""
        admission = None if shown is None else Admission(Gate(self.manifest.run_id, key.peer_id), shown)
        greeter = Greeter(key, self.manifest.run_id, lambda: link, 1, 5, admission)
        return Arrived(link, HELLO + greeter.hello(self.conveyor.link_id), memoryview(b""), 0.0)

    def told(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def start() -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def make(admission: Admission | None = None) -> Peer:
        peers.append(Peer(admission))
        return peers[-1]

    yield make
    for peer in peers:
        peer.conveyor.stop(10.0)


THEM = SigningKey(b"t" * 32)
FRAME = HOPS + encode_hops([SlotGrant(PeerId("peer"), 1, 1, 0)])


def test_linkd_is_told_how_fast_it_may_send_by_now(start: Callable[..., Peer]) -> None:
    peer = start()
    assert peer.conveyor.linkd_pid == 7
    for rate, paced in ((None, 0), (1e6, 1_000_000), (2.5e5, 250_000), (None, 0)):
        peer.rate = rate
        peer.link.happens()
        assert peer.link.paced == paced


def test_a_neighbour_without_a_pass_is_no_neighbour_and_one_that_is_put_out_is_none_any_more(
    start: Callable[..., Peer],
) -> None:
    owner = SigningKey(b"o" * 32)
    gate = Gate(manifest_of(2, schedule="carry").run_id, owner.peer_id)
    shown = door.Grant(gate.run_id, bytes(16), frozenset({Right.JOIN}), 1, 2**33, THEM.peer_id, 0).signed_by(owner)
    peer = start(Admission(gate, b""))
    late = replace(shown, expires_s=5).signed_by(owner)
    for link, raw in zip(LINKS, (b"", b"x" * 100, late.to_bytes()), strict=False):
        peer.link.happens(LinkUp(link), peer.hello(THEM, link, raw))
        assert not peer.told(NeighbourLinked)
        assert "is not admitted" in peer.events[-1].line()
    link = LINKS[3]
    peer.link.happens(LinkUp(link), peer.hello(THEM, link, shown.to_bytes()))
    assert peer.conveyor.status().linked == {THEM.peer_id: 1}
    gate.take(Revocations(gate.run_id, 1, ((bytes(16), 1),)))
    peer.link.happens(*[Arrived(link, HOPS + b"", memoryview(b""), 0.0)] * FAULTS_UNTIL_DROPPED)
    assert any("revoked" in event.line() for event in peer.told(Failed))
    assert peer.told(NeighbourUnlinked)
    assert peer.conveyor.status().linked == {}


def test_a_link_that_came_twice_within_one_poll_is_greeted_once(start: Callable[..., Peer]) -> None:
    """What is sent goes over the second link each time: the other side would hear a second greeting, and refuse it."""
    peer = start()
    peer.link.happens(LinkUp(LINK), LinkDown(LINK, "gone"), LinkUp(LINK))
    assert peer.link.greeted == [LINK]


def test_a_neighbour_hears_our_greeting_before_anything_else(start: Callable[..., Peer]) -> None:
    peer = start()
    peer.link.happens(LinkUp(LINK), peer.hello(THEM, LINK))
    assert peer.link.greeted == [LINK]
    assert peer.link.frames[0][1][:1] == HELLO
    assert len(peer.link.frames) > 1, "the scheduler has told its new neighbour nothing"


def test_a_frame_before_a_greeting_is_not_heard_and_one_of_an_unknown_kind_costs_the_link(
    start: Callable[..., Peer],
) -> None:
    peer = start()
    peer.link.happens(LinkUp(LINK), Arrived(LINK, HOPS + b"nonsense", memoryview(b""), 0.0))
    assert peer.events == []
    peer.link.happens(Arrived(LINK, b"\xff", memoryview(b""), 0.0))
    assert ("hang up", LINK) in peer.link.orders


def test_a_neighbour_whose_link_takes_no_more_is_hung_up_and_the_scheduler_told(start: Callable[..., Peer]) -> None:
    peer = start()
    peer.conveyor.set_neighbours([LinkAddress(THEM.peer_id, LINK, ("/there",))])
    peer.link.happens(LinkUp(LINK), peer.hello(THEM, LINK))
    peer.link.is_full = True
    peer.conveyor.bench.rounds(2, 1, None, 4)  # news, which the scheduler tells its neighbours
    peer.link.happens()
    assert peer.link.orders == [("dial", LINK, "/there"), ("hang up", LINK)]
    assert peer.conveyor.status().linked == {}


def test_linkd_is_started_again_by_the_thread_that_polls_it(start: Callable[..., Peer]) -> None:
    peer = start()
    peer.link.happens(LinkUp(LINK), peer.hello(THEM, LINK))
    peer.link.happens(LinkDown(LINK, "killed"), LinkdEnded("killed"))
    assert peer.link.orders == [("restart",)]
    assert len(peer.told(NeighbourUnlinked)) == 1
    assert peer.failures == []


def test_a_stop_in_the_pause_before_linkd_is_started_again_starts_none(
    start: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "RESTART_PAUSE_S", 1000.0)
    peer = start()
    peer.link.happens(LinkdEnded("killed"))  # the first has no pause
    peer.link.begins(LinkdEnded("killed"))
    peer.conveyor.stop(30.0)
    assert peer.link.orders == [("restart",)]


def test_a_frame_that_finds_a_fault_in_the_scheduler_costs_its_link_alone(
    start: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = start()
    peer.link.happens(LinkUp(LINK), peer.hello(THEM, LINK))

    def fail(*_arguments: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "handle", fail)
        patch.setattr(Scheduler, "deadline", lambda _self: float("inf"))
        peer.link.happens(Arrived(LINK, FRAME, memoryview(b""), 0.0))
    peer.link.happens(Arrived(LINK, FRAME, memoryview(b""), 0.0))
    assert any("ZeroDivisionError" in event.line() for event in peer.told(Failed))
    assert not peer.told(NeighbourUnlinked)
    assert peer.failures == []
