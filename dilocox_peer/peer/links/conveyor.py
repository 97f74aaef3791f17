"""The pipeline's own thread: owns the link to linkd, puts in what happens on it, carries out what comes of it.

Decides nothing. Which links are heard, dialled and hung up is sessions.py; which micro-batch goes where is the scheduler, on
the bench (bench.py) that this thread shares with the torch thread and the session; what a frame may hold is exchange.py; the
bytes on the wire are linkd's.
"""

import hashlib
import logging
import math
import random
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import assert_never

from dilocox_peer.admission import Admission
from dilocox_peer.errors import DilocoxError, ProtocolError
from dilocox_peer.events import Listener, Remark
from dilocox_peer.events_of_health import LinkProcessEnded
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.activations import BodyFormat, Bytes
from dilocox_peer.network.link import (
    Arrived,
    Found,
    Link,
    LinkdEnded,
    LinkDown,
    LinkdTraffic,
    LinkEvent,
    LinkPing,
    LinkUp,
)
from dilocox_peer.network.linkd_process import LinkFailed, LinkSettings
from dilocox_peer.peer.links.bench import Bench, MicroBatchCounts
from dilocox_peer.peer.links.dialling import Dial, HangUp, LinkAddress
from dilocox_peer.peer.links.exchange import Exchange
from dilocox_peer.peer.links.greeting import Greeter
from dilocox_peer.peer.links.sessions import GiveUp, Greet, Hand, LinkAction, LinkSessions, Proved, StartLinkd, Tell
from dilocox_peer.pipeline import contract
from dilocox_peer.pipeline.scheduler import Scheduler
from dilocox_peer.pipeline.turnstile import Delay, Turnstile, at_once
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import LinkId, PeerId, RunId

_logger = logging.getLogger(__name__)

HELLO, HOPS = b"\x01", b"\x02"
START_S = 30.0  # of linkd, which imports py-libp2p on a busy machine
POLL_MAX_S = 0.5
MAX_UNPROVED = 16  # links that others made and that have not greeted yet; beyond, the oldest makes room


@dataclass(frozen=True)
class ConveyorStatus:
    """What a screen shows of the pipeline. linked: stages of the neighbours; heard: when the last frame of each came (monotonic); rtt_s: by neighbour; bytes: with headers, and
    wire_bytes: what linkd's connections carry for them, by its last count, 0 before that."""

    linked: Mapping[PeerId, int]
    heard: Mapping[PeerId, float]
    rtt_s: Mapping[PeerId, float]
    bytes_sent: int
    bytes_received: int
    wire_bytes_sent: int
    wire_bytes_received: int
    micro_batches: MicroBatchCounts


class Conveyor:
    """`start`, then `stop`."""

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
        pace: Delay = at_once,
        pace_in: Delay = at_once,
        rate: Callable[[], float | None] = lambda: None,
        paces_home: bool = True,
        admission: Admission | None = None,
        site: str = "",
        most_under_way: float = math.inf,
    ) -> None:
        """on_failure: the pipeline has ended for good, from its thread. pace, pace_in: for bodies that go out, and for those
        that we ask for, by a grant or by a body that is answered; called by several threads. rate: bytes a second that may go out by
        now, for the kernel to keep to within a body, and for what waits; None: no limit. paces_home: pace and rate hold also for
        what stays in the network at home. admission: of a run that is not open. most_under_way: micro-batches whose values there
        is memory for at once.
        """
        self._rate = rate
        self._paces_home = paces_home
        self._at_home: set[LinkId] = set()
        body = BodyFormat.of(manifest)
        slots = max_slots(manifest)
        self._listener = listener
        self._on_failure = on_failure
        self._link = Link(
            LinkSettings(
                key_seed=link_seed,
                listen=listen,
                protocol=f"/dilocox/link/1/{run_id[:16]}",
                max_body_bytes=body.step_bytes,
                queue_bytes=2 * slots * body.step_bytes + (1 << 20),
                max_unproved=MAX_UNPROVED,
                mdns=mdns,
            ),
            on_log=lambda line: listener(Remark(f"linkd: {line}")),
        )
        scheduler = Scheduler(
            me=key.peer_id, incarnation=incarnation, stage=stage, num_stages=manifest.stages.count,
            mode=manifest.stages.schedule, accumulate=manifest.inner.accumulate, max_slots=slots,
            rng=random.Random(secrets.randbits(128)), now=time.monotonic(), trace=trace,
            entry=Turnstile(body.step_bytes, pace_in), site=site, most_under_way=most_under_way,
        )  # fmt: skip
        self.bench = Bench(scheduler, stage=stage, trace=trace, wake=self._link.wake)
        self._exchange = Exchange(
            self.bench,
            body,
            pace=pace,
            pace_in=pace_in,
            rate=rate,
            is_at_home=self._is_spared,
            admission=admission,
            listener=listener,
        )
        self._greeter = Greeter(key, run_id, lambda: self._link.link_id, stage, incarnation, admission)
        self._lock = threading.Lock()
        # Moved under the lock, by this thread but for `want`.
        secret = secrets.token_bytes(16)
        self._sessions = LinkSessions(
            stage, self._greeter.checked, lambda peer: hashlib.blake2b(peer.encode(), key=secret).hexdigest()
        )
        self._stopped = threading.Event()
        self._turned_at = time.monotonic()
        self._started = threading.Event()
        self._start_error: str | None = None
        self._thread = threading.Thread(target=self._run, name="dilocox-pipeline")

    # ---- any thread --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Returns when linkd listens. Raises DilocoxError with its reason. Blocking."""
        self._thread.start()
        if not self._started.wait(START_S + 5.0):
            raise DilocoxError(f"linkd did not start within {START_S:.0f} s")
        if self._start_error is not None:
            raise DilocoxError(f"the pipeline's link cannot start: {self._start_error}")

    def ban(self, peers: Collection[PeerId]) -> None:
        """Nothing of these is heard any more, by the word of the run's owner."""
        self._greeter.banned = self._exchange.banned = peers

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
    def linkd_pid(self) -> int | None:
        return self._link.pid

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._link.addresses

    def set_neighbours(self, neighbours: Iterable[LinkAddress]) -> None:
        """The peers of the next stage and of the one before that are to be dialled."""
        with self._lock:
            self._sessions.want(neighbours, time.monotonic())
        self._link.wake()

    def status(self) -> ConveyorStatus:
        traffic = self._exchange.traffic
        with self._lock:
            linked = self._sessions.linked
            return ConveyorStatus(
                linked=linked,
                heard={peer: at for peer in linked if (at := self._exchange.heard.get(peer)) is not None},
                rtt_s=self._sessions.rtt_s,
                bytes_sent=traffic.sent,
                bytes_received=traffic.received,
                wire_bytes_sent=traffic.wire_sent,
                wire_bytes_received=traffic.wire_received,
                micro_batches=self.bench.counts(),
            )

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
            self._exchange.flush(self._sessions, self._deliver)
        except Exception as error:  # the boundary of the thread: say it, and the session ends
            self._on_failure(f"{type(error).__name__}: {error}")
        finally:
            self._link.close(1.0)

    def _turn(self) -> None:
        """Waits for something to happen, takes it in, sends what comes of it."""
        due_at = min(self.bench.deadline, self._exchange.opens_at, self._sessions.deadline)
        events = self._link.poll(min(POLL_MAX_S, max(0.0, due_at - time.monotonic())))
        now = time.monotonic()
        self._exchange.stood_still(now - self._turned_at)
        self._turned_at = now
        for event in events:
            self._take(event)
        is_due = self.bench.tick()
        self._carry_out(self._sessions.tick)  # after all events: what of them is not true any more is not acted on
        self._exchange.flush(self._sessions, self._deliver)
        self._link.pace(int(self._rate() or 0), at_home=self._paces_home)
        if events or is_due:
            self.bench.nudge()

    def _take(self, event: LinkEvent) -> None:
        sessions = self._sessions
        match event:
            case Arrived():
                self._arrived(event)
            case LinkUp(link, is_at_home):
                (self._at_home.add if is_at_home else self._at_home.discard)(link)
                self._carry_out(lambda now: sessions.opened(link, now))
            case LinkDown(link, reason):
                self._at_home.discard(link)
                self._carry_out(lambda now: sessions.lost(link, reason, now))
            case LinkPing(link, seconds):
                self._carry_out(lambda _: sessions.measured(link, seconds))
            case Found(link, addresses):
                self._carry_out(lambda _: sessions.found(link, addresses))
            case LinkdTraffic():
                self._exchange.traffic.told(event)
            case LinkdEnded(reason):
                self._exchange.traffic.ended()
                self._at_home.clear()
                self._carry_out(lambda now: sessions.linkd_ended(reason, now))
            case _:
                assert_never(event)

    def _arrived(self, event: Arrived) -> None:
        link, kind, rest = event.neighbour, event.header[:1], event.header[1:]
        try:
            if kind == HELLO:
                self._carry_out(lambda now: self._sessions.greeting(link, rest, now))
            elif kind != HOPS:
                raise ProtocolError(None, "a frame of an unknown kind")
            elif (peer := self._sessions.peer_of(link)) is not None:
                self._exchange.take(peer, rest, event.body, event.wire_s)
        except ProtocolError as error:
            self._refuse(link, error.reason)
        except Exception as error:  # the boundary to a neighbour: a fault its frame finds in us ends the link at most
            _logger.exception("a frame of %s could not be handled", link)
            self._refuse(link, f"{type(error).__name__} in handling it")

    def _refuse(self, link: LinkId, reason: str) -> None:
        self._carry_out(lambda now: self._sessions.refused(link, reason, now))

    def _carry_out(self, decide: Callable[[float], list[LinkAction]]) -> None:
        """Has something decided about links, at this time, and does it."""
        with self._lock:
            actions = decide(time.monotonic())
        for action in actions:
            match action:
                case Greet(link):
                    self._link.send(link, HELLO + self._greeter.hello(link))
                case Proved(link):
                    self._link.proved(link)
                case Dial(link, addresses):
                    self._link.dial(link, addresses)
                case HangUp(link):
                    self._link.hang_up(link)
                case Hand(happened):
                    if isinstance(happened, contract.Unlinked):
                        self._exchange.forget(happened.peer)
                    self.bench.take_in(happened)
                case Tell(event):
                    self._listener(event)
                case StartLinkd(pause_s):
                    if not self._stopped.wait(pause_s):
                        self._start_linkd()
                case GiveUp(reason):
                    raise DilocoxError(reason)
                case _:
                    assert_never(action)

    def _start_linkd(self) -> None:
        """Again, from this thread, which lives as long as linkd is needed. Ended in its start it has ended once more."""
        try:
            self._link.restart(START_S)
        except LinkFailed as error:
            reason = str(error)
            self._carry_out(lambda now: self._sessions.linkd_ended(reason, now))
        else:
            self._listener(LinkProcessEnded("", is_back=True))

    def _is_spared(self, peer: PeerId) -> bool:
        """Whether no limit of the upload holds for what goes to it."""
        return not self._paces_home and self._sessions.link_of(peer) in self._at_home

    def _deliver(self, peer: PeerId, header: bytes, body: Bytes | None) -> bool:
        link = self._sessions.link_of(peer)
        if link is None:
            return False  # unlinked meanwhile; the scheduler has been told
        is_sent = self._link.send(link, HOPS + header, body)
        if not is_sent:
            self._carry_out(lambda now: self._sessions.congested(link, now))
        return is_sent


def max_slots(manifest: Manifest) -> int:
    """How many micro-batches of others a peer may have accepted at once: bounds the activations it keeps."""
    stages = manifest.stages.count
    return max(16, 4 * max(manifest.inner.accumulate, 4 * stages))
