"""Messages of a run: who may send them, what they are counted for, and what goes wrong in the words of the transport."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from dilocox_peer.errors import ProtocolError
from dilocox_peer.network.bandwidth import Bandwidth
from dilocox_peer.network.bulk import PeerGone, PeerSilent
from dilocox_peer.network.daemon import Daemon
from dilocox_peer.network.doors import Doors
from dilocox_peer.network.message_frames import Told
from dilocox_peer.network.message_streams import MessageIntake, MessageLines
from dilocox_peer.types import PeerId

MessageHandler = Callable[[PeerId, bytes], None]

OPEN_S = 30.0  # whoever sends has a shorter deadline

_logger = logging.getLogger(__name__)


class Messages:
    """`serve`, then `send`; `end` in the end."""

    def __init__(
        self,
        daemon: Daemon,
        doors: Doors,
        bandwidth: Bandwidth,
        protocol: str,
        refusal: Callable[[PeerId], str | None],
        on_heard: Callable[[PeerId], None],
    ) -> None:
        """refusal: why a peer may not send any, or None. on_heard: a message of the peer has come."""
        self.handler: MessageHandler | None = None
        self._daemon = daemon
        self._doors = doors
        self._bandwidth = bandwidth
        self._protocol = protocol
        self._refusal = refusal
        self._on_heard = on_heard
        self._intake = MessageIntake(
            self._admitted, self._taken, doors.keeper.is_stranger, self._on_unreadable, self._came, self._told
        )
        self._lines = MessageLines(self._open, self._intake.tell, self._intake.tell_again)
        self._is_over = False
        self.bytes_sent = 0  # as they went, of what was answered

    async def serve(self) -> None:
        """From here on what others send is taken, once there is a handler. Raises TransportDown, TimeoutError."""
        await self._daemon.accept(self._protocol, self._on_stream)

    def end(self) -> set[asyncio.Task[Any]]:
        """Nothing is sent or taken any more. Gives back the tasks that end now."""
        self._is_over = True
        return {*self._intake.end(), *self._lines.close()}

    async def send(self, peer: PeerId, messages: Sequence[bytes], timeout_s: float) -> list[str]:
        """As Transport.send_all."""
        self._daemon.check_up(peer)
        self._daemon.on_asking(peer)
        try:
            reasons, num_bytes = await self._lines.send(peer, messages, timeout_s)
        except (PeerGone, PeerSilent) as error:
            await self._daemon.check(peer)  # the streams of our own killed p2pd end just like the peer's
            raise self._daemon.unavailable(peer, type(error), error.reason) from None
        self.bytes_sent += num_bytes
        self._bandwidth.bytes_sent += num_bytes
        return reasons

    def on_paths_changed(self, peers: Sequence[PeerId]) -> None:
        """These are reached by another path now; a stream stays on the one that it was opened on."""
        self._lines.renew(peers)

    async def _open(self, peer: PeerId) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await self._daemon.open_stream(peer, self._protocol, OPEN_S)

    async def _on_stream(self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_over or self._doors.stream(peer) is not None:
            writer.transport.abort()
        else:
            await self._intake.on_stream(peer, reader, writer)

    def _told(self, peer: PeerId, told: Told) -> None:
        self._lines.taken(peer, told)

    def _came(self, num_bytes: int) -> None:
        self._bandwidth.bytes_received += num_bytes

    def _admitted(self, peer: PeerId, count: int, num_bytes: int) -> str | None:
        if (reason := self._doors.message(peer, count, num_bytes)) is not None:
            return reason
        if self.handler is None or self._is_over:
            return "not ready"
        return self._refusal(peer)

    def _taken(self, peer: PeerId, raw: bytes) -> str:
        assert self.handler is not None
        self._on_heard(peer)
        try:
            self.handler(peer, raw)
        except ProtocolError as error:
            return error.reason
        except Exception:  # task boundary: a fault in a handler must not end the transport
            _logger.exception("message from %s could not be handled; it was dropped", peer)
            return "internal error"
        return ""

    def _on_unreadable(self, peer: PeerId, is_oversize: bool) -> None:
        if is_oversize:
            self._doors.oversize(peer)
        else:
            self._doors.malformed(peer)
