"""Asks the peers of a run how they are, says how this one is, and tells what is wrong with the run as soon as it is.

What is wrong is swarm_health.py's to say. Nothing is decided by it: rounds and links have their own means. A keeper has one
for the run's page, and so has, for one look, `status LINK`.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from dilocox_peer.admission import Right
from dilocox_peer.dht.records import Lease
from dilocox_peer.errors import PeerUnavailable, ProtocolError
from dilocox_peer.events import Event, Listener
from dilocox_peer.events_of_health import Trouble, TroubleBegan, TroubleOver, TroublesSeen
from dilocox_peer.manifest import Manifest
from dilocox_peer.network.bulk import PeerRefusing, PeerSilent, Reply, RequestRefused, TransportDown
from dilocox_peer.network.transport import Transport
from dilocox_peer.peer.ails import Ails
from dilocox_peer.peer.links.conveyor import Conveyor
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.swarm_health import SwarmHealth
from dilocox_peer.types import PeerId
from dilocox_peer.wire.declared import encode
from dilocox_peer.wire.health import HEALTH, MAX_HEALTH_BYTES, HealthForm
from dilocox_peer.wire.records import KEEPERS

SERVICE = "health"
LOOK_S = 1.0
CONNECT_S, ANSWER_S = 4.0, 5.0
SETTLE_S = 1.0  # what is over sooner is not told
LOOK_AGAIN_S = 10.0  # at the directory, while something is wrong
MAX_ASKED_ONCE = 64
DRIFT_S = 5.0  # by which a forecast has to change to be told again

Signs = Iterable[tuple[PeerId, int, float]]
"""(peer, its stage, when it was last heard), on the monotonic clock."""


async def answer_who_asks(transport: Transport, own: Callable[[], HealthForm]) -> None:
    """How this peer is, to who asks; from here on."""

    async def answer(_peer: PeerId, _header: object) -> Reply:
        return Reply({}, [encode(own())])

    await transport.serve(SERVICE, answer, right=Right.READ)


async def ask_how_it_is(transport: Transport, peer: PeerId, timeout_s: float = ANSWER_S) -> tuple[HealthForm, float]:
    """What it says of itself, and how many seconds its wall clock is ahead of ours. Raises PeerUnavailable, ProtocolError."""
    began, wall = time.monotonic(), time.time()
    _, body = await transport.fetch(
        peer, SERVICE, {}, max_body_bytes=MAX_HEALTH_BYTES, timeout_s=timeout_s, stall_timeout_s=timeout_s
    )
    said = HEALTH.hear(body, peer)
    return said, said.at_ms / 1000 - wall - (time.monotonic() - began) / 2


class Lookout:
    """`serve`, then `run` it. troubles: as they were told last. kept_round: that the bootstraps keep the run up to, as `look_once` heard; None: not known."""

    def __init__(
        self,
        transport: Transport,
        health: SwarmHealth,
        *,
        own: Callable[[], HealthForm],
        leases: Callable[[], Mapping[int, Sequence[Lease]]],
        signs: Callable[[], Signs] = tuple,
        look_again: Callable[[], object] = lambda: None,
        is_over: Callable[[], bool] = bool,
        listener: Listener,
    ) -> None:
        """own: what this one says of itself. leases: as the directory was last read, of those that have not left. look_again: has it read.
        is_over: whether the last round of all stages is certified."""
        self._transport = transport
        self._health = health
        self._own = own
        self._leases = leases
        self._signs = signs
        self._look_again = look_again
        self._is_over = is_over
        self._listener = listener
        self._read: Mapping[int, Sequence[Lease]] = {}
        self._again_at = 0.0
        self._heard_of: set[PeerId] = set()
        self._since: dict[object, float] = {}
        self._began: dict[object, Trouble] = {}
        self._told_since: dict[object, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.troubles: tuple[Trouble, ...] = ()
        self.told_at = 0.0  # monotonic
        self.kept_round: int | None = None

    async def serve(self) -> None:
        """Answers who asks, from here on."""
        await answer_who_asks(self._transport, self._own)

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                self._look(time.monotonic())
                await asyncio.sleep(LOOK_S)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def look_once(self) -> tuple[Trouble, ...]:
        """Asks everybody that is listed, a second time where there was no answer; what is wrong. Of a visitor, who may have looked long ago: what
        it heard then tells nothing of now."""
        health, began = self._health, time.monotonic()
        for _ in range(2):
            health.listed(self._leases(), time.monotonic(), time.time())
            asked = [peer for peer in health.to_ask(float("inf"), MAX_ASKED_ONCE) if not health.is_heard(peer, began)]
            await asyncio.gather(*(self._ask(peer) for peer in asked))
        self.kept_round = health.kept_round(began)
        troubles = self._troubles(time.monotonic())
        return tuple(each for each in troubles if each.kind != "clocks")  # ours is nobody's trouble

    def _look(self, now: float) -> None:
        health = self._health
        health.look(now)
        if health.me is not None:
            health.of_ourselves(self._own(), now)
        leases = self._leases()
        if leases != self._read:
            self._read = dict(leases)
            health.listed(leases, now, time.time())
        signs = list(self._signs())
        for peer, stage, at in signs:
            health.heard(peer, stage, at)
        health.ask_soon(
            self._heard_of - {peer for peer, _, _ in signs}
        )  # links that have ended, members that fell silent
        self._heard_of = {peer for peer, _, _ in signs}
        for peer in health.to_ask(now):
            task = asyncio.create_task(self._ask(peer), name="how are you")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._tell(self._troubles(now), now)

    def _troubles(self, now: float) -> tuple[Trouble, ...]:
        self._health.is_over = self._is_over()
        return self._health.troubles(now)

    async def _ask(self, peer: PeerId) -> None:
        health, addresses = self._health, self._health.addresses(peer)
        health.asked(peer, time.monotonic())
        try:
            if addresses:
                try:
                    await self._transport.connect(peer, addresses, CONNECT_S)
                except PeerSilent:
                    health.missed(peer, "unreached", time.monotonic())
                    return
            said, ahead_s = await ask_how_it_is(self._transport, peer)
            health.told(peer, said, time.monotonic(), ahead_s=ahead_s)
        except (RequestRefused, ProtocolError):
            health.told(peer, None, time.monotonic())
        except PeerSilent:
            health.missed(peer, "silent", time.monotonic())
        except TransportDown:
            health.missed(peer, "unreached", time.monotonic())
        except PeerUnavailable as error:
            health.missed(peer, "gone", time.monotonic(), refuses=isinstance(error, PeerRefusing))

    def _tell(self, troubles: tuple[Trouble, ...], now: float) -> None:
        """What changed. What comes and goes within SETTLE_S is not told."""
        self._since = {each.key: self._since.get(each.key, now) for each in troubles}
        settled = tuple(each for each in troubles if now - self._since[each.key] >= SETTLE_S)
        for each in settled:
            if each.key not in self._began:
                self._listener(TroubleBegan(each))
        keys = {each.key for each in settled}
        for key, each in list(self._began.items()):
            if key not in keys:
                del self._began[key]
                self._listener(TroubleOver(each, round(now - self._told_since.pop(key, now), 1)))
        for each in settled:
            self._began[each.key] = each
            self._told_since.setdefault(each.key, self._since[each.key])
        if not self._is_as_told(settled, now):
            self.troubles, self.told_at = settled, now
            self._listener(TroublesSeen(settled))
        if any(each.stops for each in troubles) and now >= self._again_at:
            self._again_at = now + LOOK_AGAIN_S
            self._look_again()

    def _is_as_told(self, troubles: tuple[Trouble, ...], now: float) -> bool:
        if [each.key for each in troubles] != [each.key for each in self.troubles]:
            return False
        passed_s = now - self.told_at
        return all(
            new.helper == old.helper
            and abs(new.in_s - max(0.0, old.in_s - passed_s)) < DRIFT_S
            and (
                abs(new.number - old.number) < DRIFT_S if new.kind in ("clock", "clocks") else new.number == old.number
            )
            for new, old in zip(troubles, self.troubles, strict=True)
        )


def heeding(me: PeerId, listener: Listener) -> tuple[Ails, Listener]:
    """What ails this peer, from all that it tells from here on with this listener, which passes it on."""
    ails = Ails(me)

    def tell(event: Event) -> None:
        ails.take(event, time.monotonic())
        listener(event)

    return ails, tell


def lookout_of_peer(
    transport: Transport,
    stage: int,
    manifest: Manifest,
    *,
    machine: RoundMachine,
    conveyor: Conveyor | None,
    ails: Ails,
    leases: Callable[[], Mapping[int, Sequence[Lease]]],
    is_paused: Callable[[], bool],
    moves: bool,
    look_again: Callable[[], object],
    listener: Listener,
) -> Lookout:
    """Of a peer that trains. conveyor: of a run with several stages. moves: it takes a stage over that nobody holds."""
    health = SwarmHealth(
        transport.peer_id, manifest.stages.count, manifest.rounds.start_peers, stage=stage, bootstraps=transport.named
    )

    def own() -> HealthForm:
        now = time.monotonic()
        return HealthForm(
            stage, machine.round, time.time_ns() // 1_000_000, is_paused=is_paused(), moves=moves, ails=ails.now(now),
            accused=ails.accused(now),
        )  # fmt: skip

    def signs() -> Iterable[tuple[PeerId, int, float]]:
        heard = transport.heard
        mates = {*machine.roster, *machine.alive(asyncio.get_running_loop().time())} - {transport.peer_id}
        yield from ((peer, stage, heard[peer]) for peer in mates if peer in heard)
        if conveyor is not None:
            status = conveyor.status()
            yield from ((peer, of, status.heard[peer]) for peer, of in status.linked.items() if peer in status.heard)

    return Lookout(transport, health, own=own, leases=leases, signs=signs, look_again=look_again, listener=listener)


def entry_health(kept_round: Callable[[], int] = int) -> HealthForm:
    """What a bootstrap says of itself. kept_round: that it keeps the run up to."""
    return HealthForm(KEEPERS, kept_round(), time.time_ns() // 1_000_000)


def lookout_of_keeper(
    transport: Transport,
    manifest: Manifest,
    *,
    kept_round: Callable[[], int],
    leases: Callable[[], Mapping[int, Sequence[Lease]]],
    look_again: Callable[[], object],
    is_over: Callable[[], bool],
    listener: Listener,
) -> Lookout:
    """Of a bootstrap that keeps the run."""
    health = SwarmHealth(
        transport.peer_id, manifest.stages.count, manifest.rounds.start_peers, bootstraps=transport.named
    )
    own = partial(entry_health, kept_round)
    return Lookout(transport, health, own=own, leases=leases, look_again=look_again, is_over=is_over, listener=listener)


def lookout_of_visitor(
    transport: Transport,
    manifest: Manifest,
    *,
    leases: Callable[[], Mapping[int, Sequence[Lease]]],
    is_over: Callable[[], bool],
) -> Lookout:
    """Of somebody who only looks, with `look_once`."""
    health = SwarmHealth(None, manifest.stages.count, manifest.rounds.start_peers, bootstraps=transport.named)
    return Lookout(transport, health, own=entry_health, leases=leases, is_over=is_over, listener=lambda _event: None)
