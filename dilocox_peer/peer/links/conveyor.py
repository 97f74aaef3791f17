"""The pipeline's own thread: owns the link to linkd, feeds the scheduler what happens, sends what it wants sent.

Decides nothing: which micro-batch goes where is scheduler.py, the bytes on the wire are linkd's. The torch thread takes its
work here (`WorkBench` of stage_loop.py) and puts results back; the session says whom to dial. All of them touch the
scheduler under one lock; frames are sent by this thread alone, small messages of one moment together.

The peer at the other end of a link: linkd has authenticated a link identity; a HELLO, signed by the peer, says whose it is.
Nothing else is taken from a link before it. A neighbour whose frames break the protocol is dropped, and for a while
neither dialled nor heard (shunned.py).
"""

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dilocox_peer.admission import Admission, Right
from dilocox_peer.errors import DilocoxError, ProtocolError
from dilocox_peer.events import Event, Failed, Listener, NeighbourLinked, NeighbourUnlinked, Remark
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.activations import BodyFormat, Bytes
from dilocox_peer.network.link import (
    Arrived,
    Found,
    Link,
    LinkdEnded,
    Linked,
    LinkEvent,
    LinkFailed,
    LinkId,
    LinkSettings,
    RoundTrip,
    Traffic,
    Unlinked,
)
from dilocox_peer.peer.links.body_queue import BodyQueue
from dilocox_peer.peer.links.greeting import Greeter, Hello
from dilocox_peer.peer.links.link_traffic import LinkTraffic
from dilocox_peer.peer.links.shunned import Shunned
from dilocox_peer.pipeline import contract
from dilocox_peer.pipeline.contract import Work
from dilocox_peer.pipeline.scheduler import Scheduler
from dilocox_peer.pipeline.turnstile import Pace, Turnstile, at_once
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import PeerId, RunId
from dilocox_peer.wire.hops import (
    MAX_MESSAGES,
    Cancel,
    Grad,
    HopMessage,
    MicroBatchId,
    Refuse,
    Step,
    decode_hops,
    encode_hops,
)

_logger = logging.getLogger(__name__)

HELLO, HOPS = b"\x01", b"\x02"
START_S = 30.0  # of linkd, which imports py-libp2p on a busy machine
POLL_MAX_S = 0.5
FAULTS_UNTIL_DROPPED = 3
MAX_DIALLED = 48
MAX_TRACED = 1024  # micro-batches whose packing times are kept
MAX_RESTARTS, RESTARTS_WITHIN_S = 5, 120.0  # of linkd: more of them are no accident
RESTART_PAUSE_S = 0.25  # before the second within that time, then twice as long each


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """Where the link of a peer of a neighbouring stage is, as its lease says."""

    peer: PeerId
    link: LinkId
    addresses: tuple[str, ...]


@dataclass
class _Neighbour:
    hello: Hello | None = None
    faults: int = 0


@dataclass(frozen=True)
class ConveyorStatus:
    """What a screen shows of the pipeline. linked: stages of the neighbours; rtt_s: by neighbour; bytes: with headers, and
    wire_bytes: what linkd's connections carry for them, by its last count, 0 before that; the rest as the scheduler counts it."""

    linked: Mapping[PeerId, int]
    rtt_s: Mapping[PeerId, float]
    bytes_sent: int
    bytes_received: int
    wire_bytes_sent: int
    wire_bytes_received: int
    in_flight: int
    waiting: int
    window: int
    resent: int
    duplicates: int


class Conveyor:
    """`start`, then `stop`. It is the WorkBench of the stage's training loop."""

    def __init__(
        self,
        manifest: Manifest,
        stage: int,
        *,
        key: SigningKey,
        run_id: RunId,
        incarnation: int,
        link_seed: bytes,
        listen: tuple[str, ...],
        listener: Listener,
        on_failure: Callable[[str], None],
        trace: bool = False,
        mdns: bool = False,
        pace: Pace = at_once,
        pace_in: Pace = at_once,
        admission: Admission | None = None,
    ) -> None:
        """on_failure: the pipeline has ended for good, from its thread. pace, pace_in: for bodies that go out, and for those
        that we ask for, by a grant or by a body that is answered; called by several threads. admission: of a run that is not
        open.
        """
        body = BodyFormat.of(manifest)
        self._body = body
        self._me = key.peer_id
        self._stage = stage
        self._listener = listener
        self._on_work: Callable[[], None] = lambda: None
        self._on_failure = on_failure
        self._bodies = BodyQueue(pace, pace_in, answer_bytes=body.hidden_bytes)
        slots = max_slots(manifest)
        self._scheduler = Scheduler(
            me=self._me, incarnation=incarnation, stage=stage, num_stages=manifest.stages.count,
            mode=manifest.stages.schedule, accumulate=manifest.inner.accumulate, max_slots=slots,
            rng=random.Random(f"{self._me} {incarnation}"), now=time.monotonic(), trace=trace,
            entry=Turnstile(body.step_bytes, pace_in),
        )  # fmt: skip
        self._link = Link(
            LinkSettings(
                key_seed=link_seed,
                listen=listen,
                protocol=f"/dilocox/link/1/{run_id[:16]}",
                max_body_bytes=body.step_bytes,
                queue_bytes=2 * slots * body.step_bytes + (1 << 20),
                mdns=mdns,
            ),
            on_log=lambda line: listener(Remark(f"linkd: {line}")),
        )
        self._greeter = Greeter(key, run_id, lambda: self._link.link_id, stage, incarnation, admission)
        self._admission = admission
        self._lock = threading.Lock()
        self._actions: deque[contract.Action] = deque()  # of the scheduler, in order; sent by this thread
        self._released: list[MicroBatchId] = []
        self._neighbours: dict[LinkId, _Neighbour] = {}
        self._links: dict[PeerId, LinkId] = {}  # of those whose HELLO we have
        self._dialled: dict[LinkId, LinkAddress] = {}
        self._wanted: tuple[LinkAddress, ...] = ()
        self._wanted_changed = False
        self._shunned = Shunned()
        self._stopped = threading.Event()
        self._started = threading.Event()
        self._start_error: str | None = None
        self._restarts: deque[float] = deque()
        self._num_replicas = 1
        self._listed_origins = 0
        self._packed_s: dict[MicroBatchId, float] | None = {} if trace else None
        self._stage_of: dict[PeerId, int] = {}
        self._rtt_s: dict[PeerId, float] = {}
        self._traffic = LinkTraffic()
        self._thread = threading.Thread(target=self._run, name="dilocox-pipeline")

    # ---- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Returns when linkd listens. Raises DilocoxError with its reason. Blocking."""
        self._thread.start()
        if not self._started.wait(START_S + 5.0):
            raise DilocoxError(f"linkd did not start within {START_S:.0f} s")
        if self._start_error is not None:
            raise DilocoxError(f"the pipeline's link cannot start: {self._start_error}")

    def set_on_work(self, on_work: Callable[[], None]) -> None:
        """Called, from any thread, when there may be work; before `start`."""
        self._on_work = on_work

    def stop(self, timeout_s: float) -> None:
        """Ends linkd and the thread. Raises TimeoutError."""
        if self._thread.ident is None:
            return
        self._stopped.set()
        self._link.wake()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the pipeline's thread is still at work after {timeout_s:.1f} s")

    @property
    def link_id(self) -> LinkId:
        return self._link.link_id

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._link.addresses

    # ---- the session's side ------------------------------------------------------------------------------------------

    def set_neighbours(self, neighbours: Iterable[LinkAddress]) -> None:
        """The peers of the next stage and of the one before that are to be dialled; any thread. Both sides dial: a
        newcomer knows the others at once, they may read the directory only minutes later."""
        with self._lock:
            self._wanted = tuple(sorted(neighbours, key=lambda address: address.peer))[:MAX_DIALLED]
            self._wanted_changed = True
        self._link.wake()

    def set_replicas(self, count: int) -> None:
        """How many peers our own stage has."""
        if max(1, count) != self._num_replicas:
            self._num_replicas = max(1, count)
            self._tell(contract.Replicas(self._num_replicas))

    def set_listed_origins(self, count: int) -> None:
        """How many peers of stage 0 the directory lists."""
        self._listed_origins = count

    def leave(self) -> None:
        """Callers are told to go elsewhere."""
        self._tell(contract.Leaving())

    def status(self) -> ConveyorStatus:
        with self._lock:
            scheduler = self._scheduler
            return ConveyorStatus(
                linked=dict(self._stage_of),
                rtt_s=dict(self._rtt_s),
                bytes_sent=self._traffic.sent,
                bytes_received=self._traffic.received,
                wire_bytes_sent=self._traffic.wire_sent,
                wire_bytes_received=self._traffic.wire_received,
                in_flight=scheduler.in_flight,
                waiting=scheduler.waiting,
                window=scheduler.window,
                resent=scheduler.resent,
                duplicates=scheduler.duplicates,
            )

    @property
    def recent_origins(self) -> Mapping[tuple[PeerId, PeerId], tuple[int, int]]:
        with self._lock:
            return self._scheduler.recent_origins()

    @property
    def certified_at_stage_0(self) -> int:
        with self._lock:
            return self._scheduler.stage0_certified

    @property
    def behind(self) -> int:
        """The lowest certified round of this stage and those behind it, as far as we know."""
        with self._lock:
            return self._scheduler.behind

    # ---- WorkBench ---------------------------------------------------------------------------------------------------

    def next_work(self) -> Work | None:
        with self._lock:
            work, actions = self._scheduler.next_work(time.monotonic())
            self._keep(actions)
        if actions:
            self._link.wake()
        return work

    def released(self) -> list[MicroBatchId]:
        with self._lock:
            released, self._released = self._released, []
        return released

    def packed(self, micro_batch: MicroBatchId, seconds: float) -> None:
        if self._packed_s is not None:
            with self._lock:
                self._packed_s[micro_batch] = self._packed_s.get(micro_batch, 0.0) + seconds

    def forward_done(self, micro_batch: MicroBatchId, body: bytes, seconds: float) -> None:
        self._tell(contract.ForwardDone(micro_batch, body, seconds), nudge=False)

    def backward_done(self, micro_batch: MicroBatchId, body: bytes | None, loss: float, seconds: float) -> None:
        self._tell(contract.BackwardDone(micro_batch, body, loss, seconds), nudge=False)

    def stepped(self, seconds: float) -> None:
        self._tell(contract.Stepped(seconds), nudge=False)

    def shifted(self) -> None:
        self._tell(contract.Shifted())

    def rounds(self, training: int, certified: int, issue_limit: int | None) -> None:
        self._tell(contract.Rounds(training, certified, issue_limit))

    def hold(self, is_held: bool) -> None:
        self._tell(contract.Hold(is_held))

    def pause(self, is_paused: bool) -> None:
        self._tell(contract.Paused(is_paused))

    def load_share(self) -> float:
        if self._stage == 0:
            return 1.0
        with self._lock:
            origins = self._scheduler.num_origins(self._listed_origins)
        return max(1, origins) / self._num_replicas

    def _tell(self, happened: contract.Input, *, nudge: bool = True) -> None:
        with self._lock:
            actions = self._scheduler.handle(happened, time.monotonic())
            self._keep(actions)
        if actions:
            self._link.wake()
        if nudge:
            self._on_work()

    def _keep(self, actions: Iterable[contract.Action]) -> None:
        """Under the lock. What is released the torch thread is told with the next work, which may rest on it (a version
        that is free, an id that comes again); the rest is this thread's to do."""
        for action in actions:
            if isinstance(action, contract.Release):
                self._released.append(action.id)
            else:
                self._actions.append(action)

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._link.start(START_S)
        except LinkFailed as error:
            self._start_error = str(error)
            self._started.set()
            return
        self._started.set()
        try:
            while not self._stopped.is_set():
                self._turn()
            self._flush()
        except Exception as error:  # the boundary of the thread: say it, and the session ends
            self._on_failure(f"{type(error).__name__}: {error}")
        finally:
            self._link.close(1.0)

    def _turn(self) -> None:
        """Waits for something to happen, takes it in, sends what comes of it."""
        now = time.monotonic()
        with self._lock:
            wait_s = 0.0 if self._actions else min(POLL_MAX_S, max(0.0, self._scheduler.deadline() - now))
        wait_s = min(wait_s, max(0.0, self._bodies.opens_at - now))
        events = self._link.poll(wait_s)
        for event in events:
            self._take(event)
        now = time.monotonic()
        with self._lock:
            is_due = self._scheduler.deadline() <= now
            if is_due:
                self._keep(self._scheduler.handle(contract.Tick(), now))
        if self._wanted_changed:
            self._dial()
        self._flush()
        if events or is_due:
            self._on_work()

    def _take(self, event: LinkEvent) -> None:
        match event:
            case Arrived(link, header, body):
                self._arrived(link, header, body)
            case Linked(link):
                self._linked(link)
            case Unlinked(link, reason):
                self._unlinked(link, reason)
            case RoundTrip(link, seconds):
                self._round_trip(link, seconds)
            case Found(link, addresses):
                self._found(link, addresses)
            case Traffic():
                with self._lock:
                    self._traffic.told(event)
            case LinkdEnded(reason):
                with self._lock:
                    self._traffic.ended()
                self._restart(reason)

    def _linked(self, link: LinkId) -> None:
        if self._shunned.has(link, time.monotonic()):  # it dialled us
            self._link.hang_up(link)
            return
        self._neighbours[link] = _Neighbour()
        self._link.send(link, HELLO + self._greeter.hello(link))

    def _arrived(self, link: LinkId, header: bytes, body: memoryview) -> None:
        neighbour = self._neighbours.get(link)
        if neighbour is None:
            return
        try:
            kind, rest = header[:1], header[1:]
            if kind == HELLO:
                self._greeted(link, neighbour, rest)
            elif kind == HOPS and neighbour.hello is not None:
                self._take_hops(neighbour.hello.peer, rest, body)
            elif kind != HOPS:
                raise ProtocolError(None, "a frame of an unknown kind")
        except ProtocolError as error:
            self._fault(link, neighbour, error.reason)
        except (
            Exception
        ) as error:  # the boundary to a neighbour: a fault that its frame finds in us ends the link at most
            _logger.exception("a frame of %s could not be handled", link)
            self._fault(link, neighbour, f"{type(error).__name__} in handling it")

    def _take_hops(self, peer: PeerId, raw: bytes, body: memoryview) -> None:
        if self._admission is not None:  # it was let in when it greeted; it may have been put out since
            reason = self._admission.gate.refusal(peer, Right.JOIN, time.time())
            if reason is not None:
                raise ProtocolError(peer, f"it is not admitted any more: {reason}")
        messages = decode_hops(raw, peer)
        last = messages[-1]
        if isinstance(last, Step | Grad):
            reason = self._body.why_not(body, is_step=isinstance(last, Step))
            if reason is not None:
                raise ProtocolError(peer, reason)
        elif len(body):
            raise ProtocolError(peer, f"{len(body)} bytes behind a message that has none")
        now = time.monotonic()
        with self._lock:
            self._traffic.received += len(raw) + len(body)
            for message in messages:
                if isinstance(message, Cancel | Refuse):
                    self._bodies.drop(peer, message.id, message.call)
                carried: Bytes | None = body if message is last and isinstance(message, Step | Grad) else None
                self._keep(self._scheduler.handle(contract.Received(peer, message, carried), now))

    def _greeted(self, link: LinkId, neighbour: _Neighbour, raw: bytes) -> None:
        if neighbour.hello is not None:  # one peer a link: all but the last would stay when it ends
            raise ProtocolError(neighbour.hello.peer, "a second greeting")
        hello = self._greeter.checked(link, raw)
        dialled = self._dialled.get(link)
        if dialled is not None and dialled.peer != hello.peer:
            raise ProtocolError(hello.peer, "another peer answers at this link than its lease says")
        if abs(hello.stage - self._stage) != 1:
            raise ProtocolError(hello.peer, f"it holds stage {hello.stage}, no neighbour of stage {self._stage}")
        old = self._links.get(hello.peer)
        if old is not None and old != link:
            self._unlinked(old, "it came back with another link")
        neighbour.hello = hello
        self._links[hello.peer] = link
        with self._lock:
            self._stage_of[hello.peer] = hello.stage
            self._keep(self._scheduler.handle(contract.Linked(hello.peer, hello.stage), time.monotonic()))
        self._listener(NeighbourLinked(hello.peer, hello.stage))

    def _unlinked(self, link: LinkId, reason: str) -> None:
        neighbour = self._neighbours.pop(link, None)
        if neighbour is None or neighbour.hello is None:
            return
        peer = neighbour.hello.peer
        if self._links.get(peer) != link:
            return
        del self._links[peer]
        with self._lock:
            self._stage_of.pop(peer, None)
            self._rtt_s.pop(peer, None)
            self._keep(self._scheduler.handle(contract.Unlinked(peer), time.monotonic()))
        self._listener(NeighbourUnlinked(peer, neighbour.hello.stage, reason))

    def _round_trip(self, link: LinkId, seconds: float) -> None:
        neighbour = self._neighbours.get(link)
        if neighbour is None or neighbour.hello is None:
            return
        peer = neighbour.hello.peer
        with self._lock:
            self._rtt_s[peer] = seconds
            self._keep(self._scheduler.handle(contract.RoundTrip(peer, seconds), time.monotonic()))

    def _found(self, link: LinkId, addresses: tuple[str, ...]) -> None:
        """A neighbour that its lease names is on this network: its addresses here come first. Others are none of ours."""
        known = self._dialled.get(link)
        if known is not None and not set(addresses) <= set(known.addresses):
            nearer = replace(known, addresses=tuple(dict.fromkeys((*addresses, *known.addresses))))
            self._dialled[link] = nearer
            self._link.dial(link, nearer.addresses)

    def _fault(self, link: LinkId, neighbour: _Neighbour, reason: str) -> None:
        now = time.monotonic()
        neighbour.faults += 1
        who: Any = neighbour.hello.peer if neighbour.hello is not None else link
        if self._shunned.may_tell(now):
            self._listener(Failed("pipeline", f"a frame of {who} was refused: {reason}"))
        if neighbour.hello is None or neighbour.faults >= FAULTS_UNTIL_DROPPED:
            self._shunned.add(link, now)
            self._link.hang_up(link)
            self._dialled.pop(link, None)
            self._unlinked(link, reason)

    def _restart(self, reason: str) -> None:
        """linkd ended under us: again, from this thread, which lives as long as it is needed."""
        now = time.monotonic()
        self._restarts.append(now)
        while self._restarts[0] < now - RESTARTS_WITHIN_S:
            self._restarts.popleft()
        times = len(self._restarts)
        self._listener(Failed("pipeline", f"linkd ended ({reason}); starting it again"))
        for link in list(self._neighbours):
            self._unlinked(link, "our own linkd ended")
        if times > MAX_RESTARTS:
            raise DilocoxError(f"linkd ended {times} times in {RESTARTS_WITHIN_S:.0f} s, the last time: {reason}")
        if times > 1:
            self._stopped.wait(RESTART_PAUSE_S * 2 ** (times - 2))
        self._link.restart(START_S)

    def _dial(self) -> None:
        now = time.monotonic()
        with self._lock:
            wanted, self._wanted_changed = self._wanted, False
        by_link = {address.link: address for address in wanted if not self._shunned.has(address.link, now)}
        for link in [link for link in self._dialled if link not in by_link and link not in self._neighbours]:
            del self._dialled[link]
            self._link.hang_up(link)
        for link, address in by_link.items():
            known = self._dialled.get(link)
            if known is None or not set(address.addresses) <= set(known.addresses):
                self._dialled[link] = address
                self._link.dial(link, address.addresses)

    # ---- sending -----------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Sends what the scheduler wants sent: to each neighbour its small messages together, before its bodies."""
        with self._lock:
            actions, self._actions = self._actions, deque()
        small: dict[PeerId, list[HopMessage]] = {}
        notes: list[Event] = []
        for action in actions:
            match action:
                case contract.Send(peer, message, None):
                    if isinstance(message, Cancel):
                        self._bodies.drop(peer, message.id, message.call)
                    small.setdefault(peer, []).append(message)
                case contract.Send(peer, message, body):
                    assert isinstance(body, bytes | memoryview), type(body)
                    assert isinstance(message, Step | Grad), type(message)
                    self._bodies.add(peer, message, body)
                case contract.Note(contract.MicroBatchDone()):
                    pass  # the training loop counts and shows them
                case contract.Note(contract.MicroBatchTimed() as timed):
                    notes.append(self._with_packing(timed))
                case contract.Note(event):
                    notes.append(event)
        for peer, messages in small.items():
            for first in range(0, len(messages), MAX_MESSAGES):
                self._send(peer, encode_hops(messages[first : first + MAX_MESSAGES]), None)
        self._send_bodies()
        for event in notes:
            self._listener(event)

    def _send_bodies(self) -> None:
        """Those whose time has come, in order."""
        while (next_ := self._bodies.take(time.monotonic(), self._links)) is not None:
            peer, message, body = next_
            self._send(peer, encode_hops([message]), body)
            if isinstance(message, Step):
                self._tell(contract.StepSent(peer, message), nudge=False)

    def _with_packing(self, timed: contract.MicroBatchTimed) -> Event:
        assert self._packed_s is not None, "timed without being traced"
        with self._lock:
            seconds = self._packed_s.pop(timed.id, 0.0)
            while len(self._packed_s) > MAX_TRACED:  # of those that never came to their end
                self._packed_s.pop(next(iter(self._packed_s)))
        return replace(timed, encode_s=seconds)

    def _send(self, peer: PeerId, header: bytes, body: Bytes | None) -> None:
        link = self._links.get(peer)
        if link is None:
            return  # unlinked meanwhile; the scheduler has been told
        if self._link.send(link, HOPS + header, body):
            with self._lock:
                self._traffic.sent += len(header) + (len(body) if body is not None else 0)
        else:
            self._unlinked(link, "it does not take what we send")
            self._link.hang_up(link)


def max_slots(manifest: Manifest) -> int:
    """How many micro-batches of others a peer may have accepted at once: bounds the activations it keeps."""
    stages = manifest.stages.count
    return max(16, 4 * max(manifest.inner.accumulate, 4 * stages))
