"""The volunteer's limits of bandwidth, which rounds and pipeline share, and what went over this peer's transport."""

import asyncio
import math
import threading
import time

from dilocox_peer.network.bulk import CHUNK_BYTES
from dilocox_peer.network.uplink import UplinkMeter
from dilocox_peer.network.upload_shares import SHARE, Upload, UploadShares
from dilocox_peer.token_bucket import TokenBucket

LEAST_CHUNK_BYTES, MOST_PACED_BYTES = 2048, 16 * 1024
KNOWN_TO_GO = 0.5  # of the rate at which bodies have left a line that nobody measures
TOLD_SHARE = 0.25  # of the upload
CHUNK_S, LEAST_CHUNK_S = 0.01, 0.002  # of the line, that a chunk takes: others on it wait so long for it


class Bandwidth:
    """bytes_sent, bytes_received: messages, deflated, and bodies so far. uplink: how fast bodies leave. is_owners: whether the upload is limited by the
    volunteer. measured: bytes a second that the line is known to carry; None: nobody has measured it."""

    def __init__(
        self,
        upload_bytes_per_s: float | None,
        download_bytes_per_s: float | None,
        told_bytes_per_s: float = math.inf,
    ) -> None:
        """None: no limit, until there is another word about uploads by `set_upload`. told: of what strangers are told of the chain, which is also no more
        than TOLD_SHARE of the upload."""
        self.bytes_sent = 0
        self.bytes_received = 0
        self.uplink = UplinkMeter()
        self.measured: float | None = None
        self._lock = threading.Lock()
        now = time.monotonic()
        self._upload = UploadShares(now)
        self._upload.set_rate(upload_bytes_per_s, now)
        self.is_owners = upload_bytes_per_s is not None
        self._most_told = told_bytes_per_s
        rate = download_bytes_per_s
        self._download = TokenBucket(rate, burst=rate / 4, now=now) if rate is not None else None
        self._turns: dict[Upload, asyncio.Lock] = {kind: asyncio.Lock() for kind in SHARE}

    @property
    def upload_rate(self) -> float | None:
        """Bytes a second; None: no limit. Any thread."""
        return self._upload.rate

    @property
    def carries(self) -> float | None:
        """Bytes a second that the line carries at least, as far as is known: what was measured, else half of what bodies left at; None: nothing is."""
        if self.measured is not None:
            return self.measured
        return KNOWN_TO_GO * self.uplink.bps / 8 or None

    def spares(self, *, at_home: bool) -> bool:
        """Whether what goes there is not limited, though what leaves the network at home is: only the owner's limit is one of both."""
        return at_home and not self.is_owners and self._upload.rate is not None

    @property
    def bytes_let_go(self) -> int:
        """Of bodies and activations, so far."""
        with self._lock:
            return int(self._upload.let_go(time.monotonic()))

    def set_upload(self, bytes_per_s: float | None) -> None:
        """As from now on."""
        with self._lock:
            self._upload.set_rate(bytes_per_s, time.monotonic())

    def chunk_bytes(self) -> int:
        """Of a body, sent at a time: 16 KiB at most where there is a limit, or what a fast line carries in a moment."""
        rate = self._upload.rate
        if rate is None:
            return CHUNK_BYTES
        small = max(LEAST_CHUNK_BYTES, min(MOST_PACED_BYTES, int(rate * CHUNK_S)))
        return max(small, min(CHUNK_BYTES, int(rate * LEAST_CHUNK_S)))

    @property
    def told_rate(self) -> float:
        """Bytes a second of pages of the chain that may go to strangers: messages wait for no limit, and 80 bytes of asking bring 3,000 times as much."""
        upload = self._upload.rate
        return min(self._most_told, math.inf if upload is None else TOLD_SHARE * upload)

    def reserve_upload(self, num_bytes: int) -> float:
        """Seconds to wait before so many bytes of activations may go out; any thread."""
        with self._lock:
            return self._upload.reserve(num_bytes, time.monotonic())

    def reserve_download(self, num_bytes: int) -> float:
        """Seconds to wait before so many bytes may come in; any thread."""
        if self._download is None:
            return 0.0
        with self._lock:
            return self._download.reserve(num_bytes, time.monotonic())

    async def pace_upload(self, num_bytes: int, kind: Upload, *, at_home: bool = False) -> None:
        """Waits until so many bytes of a body may go out, after those who asked before for the same kind, and counts them. at_home: they do not
        leave the network at home: only a limit that the owner has set is one for them."""
        if self.spares(at_home=at_home):
            self.bytes_sent += num_bytes
            return
        self._upload.waits(kind)
        try:
            async with self._turns[kind]:
                while (wait_s := self._take(num_bytes, kind)) > 0:  # noqa: ASYNC110
                    await asyncio.sleep(wait_s)
        finally:
            self._upload.waits_no_more(kind)
        self.bytes_sent += num_bytes

    async def pace_download(self, num_bytes: int) -> None:
        """Waits after so many bytes of a body: what is not read fills the stream's window, and then its sender waits."""
        if (wait_s := self.reserve_download(num_bytes)) > 0:
            await asyncio.sleep(wait_s)

    def _take(self, num_bytes: int, kind: Upload) -> float:
        with self._lock:
            return self._upload.take(num_bytes, kind, time.monotonic())
