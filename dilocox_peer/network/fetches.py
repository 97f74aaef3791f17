"""What we fetch of others: one request and its reply on a stream, which stays open for the next one.

A stream of its own for each fetch costs a kilobyte or two of negotiation and a dozen wake-ups at both ends, where a peer of a run that averages
in slices fetches forty things a round. A stream is kept where the reply's end says so; whoever serves may close it at any time, and then the next fetch opens one.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from dilocox_peer.network.bandwidth import Bandwidth
from dilocox_peer.network.bulk import Acknowledging, PeerGone, PeerSilent, Take, receive_reply, send_request
from dilocox_peer.network.daemon import Daemon
from dilocox_peer.types import PeerId

KEPT_S = 90.0  # without a fetch a stream is closed; who serves waits longer (serving.KEPT_S), so that it is seldom both at once
MAX_KEPT, MAX_KEPT_PER_PEER = 64, 4  # streams; the longest kept goes


@dataclass(frozen=True, slots=True)
class _FetchStream:
    peer: PeerId
    kind: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def is_over(self) -> bool:
        return self.reader.at_eof() or self.reader.exception() is not None or self.writer.transport.is_closing()


class KeptStreams:
    """Open streams on which nothing is fetched at the moment."""

    def __init__(self) -> None:
        self._kept: list[tuple[float, _FetchStream]] = []  # until when, the longest kept first
        self._timer: asyncio.TimerHandle | None = None

    def take(self, peer: PeerId, kind: str) -> _FetchStream | None:
        """The one used last that leads there, if any; it is the caller's from now on."""
        for index in reversed(range(len(self._kept))):
            stream = self._kept[index][1]
            if (stream.peer, stream.kind) == (peer, kind):
                del self._kept[index]
                if not stream.is_over:
                    return stream
                stream.writer.transport.abort()
        return None

    def keep(self, stream: _FetchStream) -> None:
        """Until it is taken, or nobody has for KEPT_S."""
        of_peer = [each for _, each in self._kept if each.peer == stream.peer]
        if stream.is_over:
            stream.writer.transport.abort()
            return
        if len(of_peer) >= MAX_KEPT_PER_PEER:
            self._end(lambda each: each is of_peer[0])
        elif len(self._kept) >= MAX_KEPT:
            self._end(lambda each: each is self._kept[0][1])
        self._kept.append((time.monotonic() + KEPT_S, stream))
        self._wait()

    def drop(self, peers: Collection[PeerId]) -> None:
        """What is fetched of these next goes on new streams."""
        self._end(lambda each: each.peer in peers)

    def close(self) -> None:
        self._end(lambda _each: True)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self, is_meant: Callable[[_FetchStream], bool]) -> None:
        gone = [each for _, each in self._kept if is_meant(each)]
        self._kept = [each for each in self._kept if each[1] not in gone]
        for stream in gone:
            stream.writer.transport.abort()

    def _wait(self) -> None:
        if self._timer is None and self._kept:
            self._timer = asyncio.get_running_loop().call_later(
                max(0.0, self._kept[0][0] - time.monotonic()), self._on_time
            )

    def _on_time(self) -> None:
        self._timer = None
        now = time.monotonic()
        late = [stream for until, stream in self._kept if until <= now]
        self._end(lambda each: each in late)
        self._wait()


class BulkFetches:
    """`once`, and `close` in the end."""

    def __init__(
        self,
        daemon: Daemon,
        bandwidth: Bandwidth,
        protocol_of: Callable[[str], str],
        on_bytes: Callable[[PeerId], None],
    ) -> None:
        """protocol_of: the name of a kind's protocol. on_bytes: told of a peer whose bytes came."""
        self._daemon, self._bandwidth = daemon, bandwidth
        self._protocol_of, self._on_bytes = protocol_of, on_bytes
        self._under_way: Counter[PeerId] = Counter()
        self.kept = KeptStreams()
        self._is_closed = False

    def is_fetching(self, peer: PeerId) -> bool:
        return self._under_way[peer] > 0

    def close(self) -> None:
        self._is_closed = True
        self.kept.close()

    async def once(
        self,
        peer: PeerId,
        kind: str,
        header: dict[str, Any],
        *,
        max_body_bytes: int,
        timeout_s: float,
        stall_timeout_s: float,
        take: Take | None,
    ) -> tuple[dict[str, Any], bytearray]:
        """As `Transport.fetch`, without its pass. A kept stream that ends before anything has come was closed meanwhile: another is opened."""
        seen = 0

        def count(num_bytes: int) -> None:
            nonlocal seen
            self._bandwidth.bytes_received += num_bytes
            seen += num_bytes
            self._on_bytes(peer)

        async def on(stream: _FetchStream) -> tuple[dict[str, Any], bytearray]:
            return await self._fetch_on(
                stream, header, max_body_bytes=max_body_bytes, stall_timeout_s=stall_timeout_s, take=take, count=count
            )

        self._under_way[peer] += 1
        try:
            async with asyncio.timeout(timeout_s):
                if (kept := self.kept.take(peer, kind)) is not None:
                    try:
                        return await on(kept)
                    except (PeerGone, OSError):
                        if seen:
                            raise
                return await on(await self._open(peer, kind, stall_timeout_s))
        except TimeoutError:
            raise self._daemon.unavailable(
                peer, PeerSilent, f"{kind} was not complete within {timeout_s:g} s ({seen} bytes)"
            ) from None
        except (PeerGone, OSError) as error:
            await self._daemon.check(peer)  # the stream of our own killed p2pd ends just like the peer's
            if isinstance(error, PeerGone):
                raise
            raise self._daemon.unavailable(peer, PeerGone, f"{kind}: {error}") from None
        finally:
            self._under_way[peer] -= 1
            if not self._under_way[peer]:
                del self._under_way[peer]

    async def _open(self, peer: PeerId, kind: str, timeout_s: float) -> _FetchStream:
        reader, writer = await self._daemon.open_stream(peer, self._protocol_of(kind), timeout_s)
        return _FetchStream(peer, kind, reader, writer)

    async def _fetch_on(
        self,
        stream: _FetchStream,
        header: dict[str, Any],
        *,
        max_body_bytes: int,
        stall_timeout_s: float,
        take: Take | None,
        count: Callable[[int], None],
    ) -> tuple[dict[str, Any], bytearray]:
        """Ends the stream, unless it can be kept."""
        told, may_be_kept = Acknowledging(stream.writer), False

        def stays_open() -> None:
            nonlocal may_be_kept
            may_be_kept = told.is_told and not self._is_closed

        try:
            await send_request(stream.writer, header)
            return await receive_reply(
                stream.reader, stream.peer, max_body_bytes=max_body_bytes, stall_timeout_s=stall_timeout_s, on_bytes=count,
                pace=self._bandwidth.pace_download, take=take, tell=told, stays_open=stays_open,
            )  # fmt: skip
        finally:
            if may_be_kept:
                self.kept.keep(stream)
            else:
                stream.writer.transport.abort()
