"""The volunteer's limits of bandwidth, which rounds and pipeline share, and what went over this peer's transport."""

import asyncio
import threading
import time

from dilocox_peer.network.bulk import CHUNK_BYTES
from dilocox_peer.network.uplink import UplinkMeter
from dilocox_peer.token_bucket import TokenBucket

LEAST_CHUNK_BYTES = 4096


class Bandwidth:
    """bytes_sent, bytes_received: messages and bodies so far. uplink: how fast bodies leave.

    chunk_bytes: of a body, sent at a time: a quarter of a second's worth under a limit.
    """

    def __init__(self, upload_bytes_per_s: float | None, download_bytes_per_s: float | None) -> None:
        """None: no limit."""
        self.bytes_sent = 0
        self.bytes_received = 0
        self.uplink = UplinkMeter()
        self._lock = threading.Lock()
        self._upload, self._download = (
            TokenBucket(rate, burst=rate / 4, now=time.monotonic()) if rate is not None else None
            for rate in (upload_bytes_per_s, download_bytes_per_s)
        )
        most = CHUNK_BYTES if upload_bytes_per_s is None else int(upload_bytes_per_s / 4)
        self.chunk_bytes = max(LEAST_CHUNK_BYTES, min(CHUNK_BYTES, most))

    def reserve_upload(self, num_bytes: int) -> float:
        """Seconds to wait before so many bytes may go out; any thread."""
        return self._reserve(self._upload, num_bytes)

    def reserve_download(self, num_bytes: int) -> float:
        """Seconds to wait before so many bytes may come in; any thread."""
        return self._reserve(self._download, num_bytes)

    async def pace_upload(self, num_bytes: int) -> None:
        """Waits until so many bytes of a body may go out, and counts them."""
        await _wait(self.reserve_upload(num_bytes))
        self.bytes_sent += num_bytes

    async def pace_download(self, num_bytes: int) -> None:
        """Waits after so many bytes of a body: what is not read fills the stream's window, and then its sender waits."""
        await _wait(self.reserve_download(num_bytes))

    def _reserve(self, bucket: TokenBucket | None, num_bytes: int) -> float:
        if bucket is None:
            return 0.0
        with self._lock:
            return bucket.reserve(num_bytes, time.monotonic())


async def _wait(seconds: float) -> None:
    if seconds > 0:
        await asyncio.sleep(seconds)
