"""p2pd's ports under watch: doorkeeper.py's decisions, with the clock, p2pd's connections and its memory.

p2pd lets in whom it likes, up to bounds of its own that do not tell one from another; so what is connected is looked at every LOOK_S,
and whom the doorkeeper does not want is hung up on.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import psutil

from dilocox_peer.errors import PeerUnavailable
from dilocox_peer.events import Event, Listener
from dilocox_peer.events_of_reach import TurnedAway
from dilocox_peer.invitation import place_of
from dilocox_peer.network.daemon import Daemon
from dilocox_peer.network.doorkeeper import Budgeted, Budgets, Doorkeeper, Trespass
from dilocox_peer.network.lasting import lasting
from dilocox_peer.token_bucket import TokenBucket
from dilocox_peer.types import PeerId

LOOK_S = 2.0
NUDGED_S = 0.25  # between two looks, when somebody was banned
SEEN_S = 1.0  # for the look at a new connection, which a nudge brings about
HANG_UP_S = 5.0
HANG_UPS_AT_ONCE = 8

UNSEEN, BY_RELAYS = "not seen yet", "by relays"  # in place of a range of addresses
LINES_PER_S, LINES = 0.2, 64.0  # of bans that are told: a name costs nothing, and each may be banned


class Doors:
    """`start` it once; `close` in the end."""

    def __init__(self, daemon: Daemon, allowed: Mapping[Budgeted, Budgets]) -> None:
        self.keeper = Doorkeeper(time.monotonic(), allowed=allowed)
        self.num_hung_up = 0
        self._hosts: dict[PeerId, list[str]] = {}
        self._lines = TokenBucket(LINES_PER_S, LINES, time.monotonic())
        self._daemon = daemon
        self._listener: Listener = lambda _event: None
        self._nudge, self._looked = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._hanging_up: asyncio.Task[None] | None = None  # beside the looks, which newcomers wait for

    def start(self) -> None:
        self._daemon.on_asking = lambda peer: self.keeper.proved(peer, time.monotonic())
        self._task = asyncio.create_task(lasting(self._watch, "the look at connections", self.tell), name="doors")

    async def close(self) -> None:
        tasks = [task for task in (self._task, self._hanging_up) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def set_listener(self, listener: Listener) -> None:
        """Told of those who are turned away, in the loop; when there are too many, not of all."""
        self._listener = listener

    def tell(self, event: Event) -> None:
        """To the listener that there is by then."""
        self._listener(event)

    # ---- what handlers ask -------------------------------------------------------------------------------------------

    def message(self, peer: PeerId, count: int, num_bytes: int) -> str | None:
        """Why so many messages of the peer, of so many bytes in all, are not looked at; None: they are, and count."""
        return self._asked(peer, (Budgeted.MESSAGES, float(count)), (Budgeted.MESSAGE_BYTES, float(num_bytes)))

    def stream(self, peer: PeerId) -> str | None:
        """As `message`, of a stream that the peer has opened."""
        return self._asked(peer, (Budgeted.STREAMS, 1.0))

    def request(self, peer: PeerId, num_bytes: int) -> str | None:
        """As `message`, of a request to the directory."""
        return self._asked(peer, (Budgeted.REQUESTS, 1.0), (Budgeted.REQUEST_BYTES, float(num_bytes)))

    def answered(self, peer: PeerId, num_bytes: int) -> None:
        """Its request to the directory, with so many bytes: they count as those of requests do."""
        self.keeper.charged(peer, Budgeted.REQUEST_BYTES, float(num_bytes), time.monotonic())

    def oversize(self, peer: PeerId) -> None:
        """It sent more than anything of this run has."""
        self._blamed(peer, Trespass.OVERSIZE)

    def malformed(self, peer: PeerId) -> None:
        """It sent what cannot be read."""
        self._blamed(peer, Trespass.MALFORMED)

    def _asked(self, peer: PeerId, *wanted: tuple[Budgeted, float]) -> str | None:
        if not self.keeper.is_seen(peer):
            self._nudge.set()
        reason = self.keeper.refusal(peer, time.monotonic(), *wanted)
        if reason is not None:
            self._tell()
        return reason

    def _blamed(self, peer: PeerId, trespass: Trespass) -> None:
        self.keeper.blamed(peer, trespass, time.monotonic())
        self._tell()

    def _tell(self) -> None:
        for ban in self.keeper.new_bans():
            self._nudge.set()
            if self._lines.try_take(1.0, time.monotonic()):
                self._listener(TurnedAway(ban.who, ban.reason, ban.seconds))

    # ---- connections -------------------------------------------------------------------------------------------------

    def hosts_of(self, peer: PeerId) -> Sequence[str]:
        """Those that our connections with peer led to, at the last look; none: it had none, but for relayed ones."""
        return self._hosts.get(peer, ())

    def place_of(self, peer: PeerId) -> str:
        """The range of addresses that its connection came from at the last look; "": not known."""
        return next((place for host in self.hosts_of(peer) if (place := place_of(host))), "")

    def holder_of(self, peer: PeerId) -> str:
        """What it holds is counted with that of all others of the same: its range of addresses, or itself where it is of this computer. Names cost nothing,
        so all that come by relays, or were not seen yet, are of one."""
        hosts = self._hosts.get(peer)
        if hosts is None:
            return UNSEEN
        return self.place_of(peer) or str(peer) if hosts else BY_RELAYS

    async def holder(self, peer: PeerId) -> str:
        """As `holder_of`, after a look at its connection."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SEEN_S):
                while peer not in self._hosts:
                    self._nudge.set()
                    await self._looked.wait()
        return self.holder_of(peer)

    async def _watch(self) -> None:
        """Until it is cancelled, or p2pd is gone, which others tell."""
        while not self._daemon.is_down:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._nudge.wait()
            self._nudge.clear()
            with suppress(PeerUnavailable, TimeoutError, OSError):
                await self._look()
            await asyncio.sleep(NUDGED_S)

    async def _look(self) -> None:
        async with asyncio.timeout(HANG_UP_S):
            connections = await self._daemon.connections()
        hosts: dict[PeerId, list[str]] = {}
        for peer, texts in connections:
            hosts.setdefault(peer, []).extend(_host(text) for text in texts if "/p2p-circuit" not in text)
        self._hosts = hosts
        self._looked.set()
        self._looked = asyncio.Event()
        out = list(self.keeper.seen(hosts.items(), time.monotonic(), daemon_bytes=self._daemon_bytes()))
        if out and (self._hanging_up is None or self._hanging_up.done()):
            self._hanging_up = asyncio.create_task(self._hang_up_all(out), name="hang up")

    async def _hang_up_all(self, peers: Sequence[PeerId]) -> None:
        for at in range(0, len(peers), HANG_UPS_AT_ONCE):
            await asyncio.gather(*map(self._hang_up, peers[at : at + HANG_UPS_AT_ONCE]))

    async def _hang_up(self, peer: PeerId) -> None:
        with suppress(PeerUnavailable, TimeoutError, OSError):  # the next look finds it again
            await self._daemon.hang_up(peer, HANG_UP_S)
            self.num_hung_up += 1

    def _daemon_bytes(self) -> int:
        try:
            return int(psutil.Process(self._daemon.pid).memory_info().rss)
        except psutil.Error:
            return 0


def _host(multiaddr: str) -> str:
    parts = multiaddr.split("/")
    return parts[2] if len(parts) > 2 and parts[1] in ("ip4", "ip6") else ""
