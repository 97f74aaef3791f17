"""linkd's way to a neighbour that neither can dial: a stream of p2pd, direct, punched or through a relay.

For each such neighbour a port on 127.0.0.1 is a door: what linkd dials there comes out at the neighbour's linkd. p2pd carries the bytes
as they are; TLS within them is linkd's own, so neither the relay nor we can say anything in its name.

A stream stays on the connection that it was opened on. One that a relay passes on is often opened a moment before a hole is punched: it is
ended then, once, and linkd makes its link anew through the hole.

Leases cost nothing: where more neighbours are listed than there are doors, one that led to nobody for a while makes room for who waits longest; so new
names do not come before who had a door and lost it.
"""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dilocox_peer.admission import Right
from dilocox_peer.errors import PeerUnavailable
from dilocox_peer.invitation import parse_multiaddr
from dilocox_peer.network.crowding import to_give_up
from dilocox_peer.network.transport import Transport
from dilocox_peer.token_bucket import TokenBucket
from dilocox_peer.types import PeerId

KIND = "link"
MAX_DOORS = 64
DOOR_S = 180.0  # that one leads to nobody before it makes room
MAX_STREAMS, MAX_STREAMS_PER_PEER = 64, 4  # that others opened; linkd needs one
# Of a range of addresses, or a peer whose is not known, that is no neighbour; of so many holders.
KNOCKS_A_S, KNOCKS_AT_ONCE, MAX_HOLDERS = 1.0, 16.0, 1024
READ_BYTES = 256 * 1024
CONNECT_S, OPEN_S = 5.0, 10.0
PROVED_S = 120.0  # our linkd ends sooner what does not say who it is

_Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(slots=True)
class _Door:
    """led_at: when it last led to whom it is for, or was opened."""

    server: asyncio.Server
    addresses: tuple[str, ...]
    led_at: float
    streams: set[float] = field(default_factory=set)  # when those that are under way began

    def is_in_vain(self, now: float) -> bool:
        has_led = any(now - began >= PROVED_S for began in self.streams)
        return not has_led and now - self.led_at >= DOOR_S


class Tunnels:
    """Doors to others by `towards`, and with `serve` theirs to our linkd."""

    def __init__(self, transport: Transport, clock: Callable[[], float] = time.monotonic) -> None:
        self._transport = transport
        self._clock = clock
        self._doors: dict[PeerId, _Door] = {}
        self._queue: dict[PeerId, None] = {}  # all that are listed; one whose door made room is last
        self._taken: Counter[PeerId] = Counter()
        self._held: dict[
            asyncio.Task[None], str
        ] = {}  # of these streams, by which range of addresses, or peer; the oldest first
        self._proved: OrderedDict[PeerId, None] = OrderedDict()  # linkd kept a stream of it for long, the newest last
        self._knocks: OrderedDict[str, TokenBucket] = OrderedDict()
        self._relayed: dict[PeerId, set[asyncio.StreamWriter]] = {}  # linkd's ends of what a relay passes on

    async def serve(self, where: Callable[[], tuple[str, int]]) -> None:
        """From here on streams of others come out where our linkd listens: host and port, asked for each. Raises
        PeerUnavailable, TimeoutError."""

        async def take(peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task, is_known = asyncio.current_task(), self._is_known(peer)
            try:
                holder = str(peer) if is_known else await self._transport.doors.holder(peer)
            except asyncio.CancelledError:
                writer.transport.abort()
                return
            if task is None or self._taken[peer] >= MAX_STREAMS_PER_PEER or not (is_known or self._may_knock(holder)):
                writer.transport.abort()
                return
            if not self._has_room(holder):
                writer.transport.abort()
                return
            self._taken[peer] += 1
            self._held[task] = holder
            began_s = time.monotonic()
            try:
                async with asyncio.timeout(CONNECT_S):
                    inside = await asyncio.open_connection(*where())
                await _join((reader, writer), inside)
            except (OSError, asyncio.CancelledError):  # TimeoutError is an OSError; the task does nothing else
                writer.transport.abort()
            finally:
                self._held.pop(task, None)
                self._has_ended(peer, time.monotonic() - began_s)
                self._taken[peer] -= 1
                if not self._taken[peer]:
                    del self._taken[peer]

        self._transport.doors.keeper.keep(lambda peer: peer in self._taken or peer in self._doors)
        await self._transport.take_streams(KIND, take, right=Right.JOIN)

    def _has_ended(self, peer: PeerId, seconds: float) -> None:
        if seconds >= PROVED_S:
            self._proved[peer] = None
            self._proved.move_to_end(peer)
            if len(self._proved) > MAX_HOLDERS:
                self._proved.popitem(last=False)

    def _is_known(self, peer: PeerId) -> bool:
        """Whether it is a neighbour, or was one: strangers of its range do not shut it out."""
        return peer in self._doors or peer in self._proved or not self._transport.doors.keeper.is_stranger(peer)

    def _may_knock(self, holder: str) -> bool:
        """Whether our linkd is bothered: all that comes by here comes from this computer to it, whose dials it counts together."""
        now = time.monotonic()
        knocks = self._knocks.setdefault(holder, TokenBucket(KNOCKS_A_S, KNOCKS_AT_ONCE, now))
        self._knocks.move_to_end(holder)
        while len(self._knocks) > MAX_HOLDERS:
            self._knocks.popitem(last=False)
        return knocks.try_take(1.0, now)

    def _has_room(self, holder: str) -> bool:
        """Whether one more stream of the holder is taken; another's may have to go for it: a stranger with many names could keep all neighbours out."""
        if len(self._held) < MAX_STREAMS:
            return True
        if (oldest := to_give_up(self._held, holder)) is None:
            return False
        del self._held[oldest]
        oldest.cancel()
        return True

    async def open_doors(self, addresses: Mapping[PeerId, Sequence[str]], rank: Callable[[PeerId], Any]) -> None:
        """For these neighbours, and no others; of too many those that wait longest, of these those of the lowest rank. addresses: of their leases.
        Raises OSError."""
        self.keep(addresses)
        self._queue |= dict.fromkeys(sorted(addresses.keys() - self._queue.keys(), key=rank))
        for peer in [*self._queue]:
            await self.towards(peer, addresses[peer])

    async def towards(self, peer: PeerId, addresses: Sequence[str]) -> str | None:
        """A multiaddress of this machine that leads to the neighbour's linkd; None if there are too many. addresses: of its lease.
        Raises OSError."""
        if (door := self._doors.get(peer)) is not None:
            door.addresses = tuple(addresses)
        elif self._has_free_door():
            server = await asyncio.start_server(
                lambda reader, writer: self._pass_on(peer, (reader, writer)), "127.0.0.1", 0
            )
            self._doors[peer] = _Door(server, tuple(addresses), self._clock())
        return self.door_of(peer)

    def door_of(self, peer: PeerId) -> str | None:
        """As `towards`, of a door that is there."""
        if (door := self._doors.get(peer)) is None:
            return None
        return f"/ip4/127.0.0.1/tcp/{door.server.sockets[0].getsockname()[1]}"

    def _has_free_door(self) -> bool:
        """If need be once another is closed."""
        if len(self._doors) < MAX_DOORS:
            return True
        now = self._clock()
        in_vain = {peer: door.led_at for peer, door in self._doors.items() if door.is_in_vain(now)}
        if not in_vain:
            return False
        oldest = min(in_vain, key=in_vain.__getitem__)
        self._doors.pop(oldest).server.close()
        if oldest in self._queue:
            del self._queue[oldest]
            self._queue[oldest] = None
        return True

    def keep(self, peers: Collection[PeerId]) -> None:
        """Closes the doors to all others; what is under way goes on."""
        self._queue = {peer: None for peer in self._queue if peer in peers}
        for peer in [peer for peer in self._doors if peer not in peers]:
            self._doors.pop(peer).server.close()

    def close(self) -> None:
        self.keep(())

    def reached(self, peers: Collection[PeerId]) -> None:
        """These have a connection that no relay passes on: what goes through one all the same is made anew."""
        for peer in self._relayed.keys() & set(peers):
            for writer in self._relayed.pop(peer):
                writer.transport.abort()

    async def _pass_on(self, peer: PeerId, inside: _Pair) -> None:
        """A connection of our linkd, to its end."""
        door = self._doors.get(peer)
        try:
            await self._transport.connect(peer, () if door is None else door.addresses, OPEN_S)
            is_relayed = (await self._transport.paths()).get(peer) != "direct"
            outside = await self._transport.open_stream(peer, self._transport.stream_protocol(KIND), OPEN_S)
        except (PeerUnavailable, TimeoutError):
            inside[1].transport.abort()
            return
        except asyncio.CancelledError:  # as Transport's own streams: Python 3.11 prints a traceback for it
            inside[1].transport.abort()
            return
        if is_relayed:
            self._relayed.setdefault(peer, set()).add(inside[1])
        began = self._clock()
        if door is not None:
            door.streams.add(began)
        try:
            await _join(inside, outside)
        finally:
            if door is not None:
                door.streams.discard(began)
                if self._clock() - began >= PROVED_S:
                    door.led_at = self._clock()
            if peer in self._relayed:
                self._relayed[peer].discard(inside[1])
                if not self._relayed[peer]:
                    del self._relayed[peer]


async def _join(one: _Pair, other: _Pair) -> None:
    """Bytes both ways, until one of the two ends. linkd's pings end what hangs."""
    ways = [asyncio.ensure_future(_copy(one[0], other[1])), asyncio.ensure_future(_copy(other[0], one[1]))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        pass
    finally:
        for way in ways:
            way.cancel()
        for _, writer in (one, other):
            writer.transport.abort()
        await asyncio.gather(*ways, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(READ_BYTES):
            writer.write(data)
            await writer.drain()


def own_door(addresses: Sequence[str]) -> tuple[str, int]:
    """Host and port of this machine at which a linkd that listens at these addresses is dialled from here. Raises ConnectionError
    before it listens."""
    found = [parse_multiaddr(text, "lease") for text in addresses]
    if not found:
        raise ConnectionError("linkd does not listen yet")
    best = next((each for each in found if each.host in ("127.0.0.1", "::1")), found[0])
    return best.host, best.port
