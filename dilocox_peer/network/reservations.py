"""Our reservations at relays: asks for them over our own p2pd, again and again, as relay_choice.py says.

What a relay answers is a stranger's: bounded in size and time, and nothing of it is announced but that it has us; the
addresses are those at which we dial it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from dilocox_peer.errors import ConfigError, PeerUnavailable, ProtocolError
from dilocox_peer.invitation import parse_multiaddr
from dilocox_peer.network import relay_protocol
from dilocox_peer.network.bulk import PeerGone, PeerSilent, RequestRefused
from dilocox_peer.network.p2pd import greets
from dilocox_peer.network.relay_choice import RelayChoice
from dilocox_peer.types import PeerId

ASK_S = 5.0  # for connecting and the answer, each


class Dialler(Protocol):
    """What is needed of network.transport.Transport."""

    @property
    def peer_id(self) -> PeerId: ...
    @property
    def named(self) -> Collection[PeerId]: ...
    async def connect(self, peer: PeerId, addresses: Sequence[str], timeout_s: float = ...) -> None: ...
    async def hang_up(self, peer: PeerId, timeout_s: float = ...) -> None: ...
    async def paths(self, timeout_s: float = ...) -> Mapping[PeerId, str]: ...
    async def open_stream(
        self, peer: PeerId, protocol: str, timeout_s: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]: ...


class Reservations:
    """`run` until cancelled. `addresses` are to be announced; `changed` is set whenever they are others."""

    def __init__(self, dialler: Dialler, on_regained: Callable[[PeerId], None] = lambda _relay: None) -> None:
        """on_regained: told of a relay that has us again after the connection with it was lost."""
        self._dialler = dialler
        self._on_regained = on_regained
        self._lost: set[PeerId] = set()
        self._seen: set[PeerId] = set()  # those that have us that were connected with at the last look
        self._choice = RelayChoice(dialler.peer_id)
        self._addresses: tuple[str, ...] = ()
        self._silent: set[PeerId] = set()  # that did not answer the last time, on an open connection
        self._nudge = asyncio.Event()
        self.changed = asyncio.Event()

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._choice.addresses

    @property
    def held(self) -> tuple[PeerId, ...]:
        """The relays that pass on to us."""
        return self._choice.held

    def need(self, is_needed: bool) -> None:
        """As RelayChoice.need."""
        if self._choice.need(is_needed):
            self._note_change()

    def look(self, connected: Collection[PeerId]) -> None:
        """connected: whom we have a connection with, as of now. Relays that are lost are asked at once."""
        held = set(self._choice.held)
        lost = (held & self._seen) - set(
            connected
        )  # one that was connected with since the last look may have us already
        self._seen = held & set(connected)
        for peer in lost:
            self._choice.lost(peer, asyncio.get_running_loop().time())
        if lost:
            self._lost |= lost
            self._nudge.set()

    def tell(self, is_told: bool) -> None:
        """Whether others are to know where relays pass on to us; until they are, `addresses` is empty."""
        if self._choice.is_told != is_told:
            self._choice.is_told = is_told
            self._note_change()

    def offer(self, addresses: Sequence[str]) -> None:
        """Peers that may be relays, best first, by their addresses; relayed ones are none."""
        candidates: dict[PeerId, dict[str, None]] = {}
        for text in addresses:
            try:
                address = parse_multiaddr(text, "lease")
            except ConfigError:
                continue
            if not address.is_relayed and address.peer is not None:
                candidates.setdefault(address.peer, {})[address.text] = None
        self._choice.offer({peer: tuple(texts) for peer, texts in candidates.items()}, self._dialler.named)
        self._lost &= candidates.keys()
        self._nudge.set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as asking:
            while True:
                self._nudge.clear()
                for peer, addresses in self._choice.due(loop.time()):
                    asking.create_task(self._ask(peer, addresses), name="reservation")
                try:
                    async with asyncio.timeout(self._choice.wait_s(loop.time())):
                        await self._nudge.wait()
                except TimeoutError:
                    pass

    async def _ask(self, peer: PeerId, addresses: Sequence[str]) -> None:
        clock = asyncio.get_running_loop().time
        try:
            limit, _reason = await reserve(self._dialler, peer, addresses)
        except PeerSilent:
            if (
                peer in self._silent
            ):  # the second time: its connection leads nowhere, which p2pd finds out half a minute later
                with suppress(PeerUnavailable):
                    await self._dialler.hang_up(peer)
            self._silent ^= {peer}
            self._choice.failed(peer, clock())
        except RequestRefused:  # it is there, and passes nobody on
            self._choice.refused(peer, clock())
        except (PeerUnavailable, ProtocolError):
            self._choice.failed(peer, clock())
        else:
            self._silent.discard(peer)
            if limit is not None:
                self._choice.reserved(peer, limit, clock())
                if peer in self._lost:
                    self._lost.discard(peer)
                    self._on_regained(peer)
            else:
                self._choice.refused(peer, clock())
        self._note_change()

    def _note_change(self) -> None:
        if self._choice.addresses != self._addresses:
            self._addresses = self._choice.addresses
            self.changed.set()
        self._nudge.set()


async def reserve(
    dialler: Dialler, relay: PeerId, addresses: Sequence[str]
) -> tuple[relay_protocol.RelayLimit | None, str]:
    """Asks relay to pass on to us: as relay_protocol.read_answer. Raises PeerUnavailable, ProtocolError; takes at most 3 * ASK_S."""
    try:
        is_connected = relay in await dialler.paths(ASK_S)
    except TimeoutError:
        raise PeerSilent(relay, "this peer's own p2pd does not answer") from None
    if not is_connected:
        # p2pd counts every dial that fails, and dials ever more seldom: it is to find the relay there at once.
        if not await _is_there(addresses):
            raise PeerGone(relay, "nothing of libp2p answers there")
        await dialler.connect(relay, addresses, ASK_S)
    reader, writer = await dialler.open_stream(relay, relay_protocol.PROTOCOL, ASK_S)
    try:
        async with asyncio.timeout(ASK_S):
            writer.write(relay_protocol.RESERVE)
            await writer.drain()
            prefix = b""
            while (length := relay_protocol.length_of(prefix)) is None:
                prefix += await reader.readexactly(1)
            return relay_protocol.read_answer(await reader.readexactly(length))
    except TimeoutError:
        raise PeerSilent(relay, f"no answer to a request for a reservation within {ASK_S:g} s") from None
    except (OSError, asyncio.IncompleteReadError):
        raise PeerGone(relay, "it ended the request for a reservation") from None
    except ValueError as error:
        raise ProtocolError(relay, f"answer to a request for a reservation: {error}") from None
    finally:
        writer.transport.abort()


async def _is_there(addresses: Sequence[str]) -> bool:
    tried: list[Awaitable[bool]] = [greets(parse_multiaddr(text, "lease")) for text in addresses]
    return any(await asyncio.gather(*tried))
