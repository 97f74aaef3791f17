"""The upload where its owner has not limited it: looks at what the kernel knows of our connections, and sets its rate (upload_control.py).

Only Linux tells. Where nothing leaves the network at home, as between processes of one computer, and on other systems, there is no limit.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dilocox_peer.network import tcp_traffic
from dilocox_peer.network.bandwidth import Bandwidth
from dilocox_peer.network.kernel_pace import KernelPace
from dilocox_peer.network.tcp_traffic import HOME_RTT_S, Connection
from dilocox_peer.network.upload_control import UploadControl, waiting_of

LOOK_S = 0.2  # while something is sent, and leaves the network at home
IDLE_LOOK_S = 2.0
IDLE_BYTES = 1500  # less since the last look: nothing is sent
FASTER = 1.25  # than the rate may the kernel send: what is fed evens out, and what was late catches up
TELLING_BYTES = 4096  # of a connection since the last look: its round trip is of now


@dataclass(frozen=True, slots=True)
class LineUse:
    """rate: bytes a second that may leave; None: no limit. line: that the line carries, as measured; 0: not known, or not asked.
    waiting_s: of a packet of anybody behind ours."""

    rate: float | None
    line: float
    waiting_s: float


class UploadWatch:
    """`run` it. Of a limit that the owner set (is_owners) it says what it is and changes nothing. home_hosts: those we are connected with that are in the
    network at home, by their addresses and by the kernel's round trips, as a private address may be a tunnel's."""

    def __init__(self, bandwidth: Bandwidth, pid: Callable[[], int | None]) -> None:
        """pid: of the process that has our connections."""
        self._bandwidth = bandwidth
        self._pids = (pid, pid)
        self._kernel = KernelPace()
        self.is_owners = bandwidth.is_owners
        self._control = UploadControl()
        self._seen: dict[int, int] | None = None  # bytes acknowledged, by connection; None before the first look
        self._let_go = 0  # bytes, at the last look
        self._taken_s = 0.0  # when that was
        self.home_hosts: frozenset[str] = frozenset()

    def include(self, pid: Callable[[], int | None]) -> None:
        """The other process that sends over the same line for us; asked from another thread."""
        self._pids = (self._pids[0], pid)

    @property
    def use(self) -> LineUse:
        control, rate = self._control, self._bandwidth.upload_rate
        return LineUse(rate, 0.0 if rate is None or self.is_owners else control.line, control.waiting_s)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            found = await asyncio.to_thread(self._look)
            self.take(found, time.monotonic())
            await self._pause(self._bandwidth.bytes_let_go, any(each.leaves for each in found))

    async def _pause(self, let_go: int, is_leaving: bool) -> None:
        """Short while something is sent; what begins to be sent in a long one ends it. A look costs the kernel a walk over all connections of the
        machine: where none of ours leaves the network at home, there is nothing to limit until one does."""
        if not is_leaving:
            return await asyncio.sleep(IDLE_LOOK_S)
        until = time.monotonic() + IDLE_LOOK_S
        while time.monotonic() < until:
            await asyncio.sleep(LOOK_S)
            if self._bandwidth.bytes_let_go - let_go >= IDLE_BYTES:
                return

    def _look(self) -> list[Connection]:
        pids = [each() for each in self._pids]
        found = tcp_traffic.connections_of({pid for pid in pids if pid is not None})
        rate = self._bandwidth.upload_rate
        if pids[0] is not None:  # the other paces its own
            paced = (each for each in found if each.leaves)
            self._kernel.pace(pids[0], paced, rate * FASTER if rate is not None else None)
        return found

    def take(self, found: Iterable[Connection], now_s: float) -> None:
        """found: our connections as they are now."""
        found = list(found)
        self.home_hosts = frozenset(
            each.host for each in found if not each.leaves and 0 < each.least_rtt_s < HOME_RTT_S
        )
        found = [each for each in found if each.leaves]
        if self._seen is None:
            self._seen = {each.cookie: each.sent for each in found}
        sent = {each.cookie: each.sent - self._seen.get(each.cookie, 0) for each in found}
        self._seen = {each.cookie: each.sent for each in found}
        seconds, self._taken_s = now_s - self._taken_s, now_s
        waits = [
            waiting_of(each.rtt_s, each.least_rtt_s, sent[each.cookie] / max(seconds, LOOK_S))
            for each in found
            if sent[each.cookie] >= TELLING_BYTES and each.least_rtt_s > 0
        ]
        num_let_go = max(0, self._bandwidth.bytes_let_go - self._let_go)
        self._let_go += num_let_go
        self._control.take(num_let_go, sum(sent.values()), min(waits, default=None), now_s)
        if not self.is_owners and (found or self._bandwidth.upload_rate is not None):
            self._bandwidth.set_upload(self._control.rate)
        if found:  # an owner may allow more than the line carries
            owners = self._bandwidth.upload_rate
            self._bandwidth.measured = min(self._control.rate, math.inf if owners is None else owners)
