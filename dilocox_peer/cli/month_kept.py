"""What a peer moved in this month (monthly.py), on its disk; and a peer that leaves when its part is used up, and comes back with the next.

    traffic.json   {"month": "2026-11", "sent": ..., "received": ...}, in the peer's folder

Counted is what the system counts of our helpers' connections (p2pd, linkd: contributions, states, activations, messages, directory,
encryption, what is passed on for others); where it does not say, the payload alone. Months are those of this machine's local time.
"""

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from dilocox_peer.cli.monthly import GB, Grown, Month, MonthlyAllowance
from dilocox_peer.events import Event, Left, Listener, PeerStarted, PipelineProgress, Remark, TrainingProgress
from dilocox_peer.events_of_costs import LineUsed, MonthCounted
from dilocox_peer.files import replace_file

FILE_NAME = "traffic.json"
MAX_FILE_BYTES = 4096
KEEP_S = 60.0  # what a kill may lose
LOOK_S = 30.0  # while it waits for a month: the clock may be set, the machine may sleep


def read_month(path: Path, now: Month) -> tuple[Month, str]:
    """(what was counted of this month so far, what is wrong with the file; empty where nothing is)."""
    try:
        with path.open("rb") as file:
            raw = json.loads(file.read(MAX_FILE_BYTES))
        year, month = (int(each) for each in str(raw["month"]).split("-"))
        if not 1 <= month <= 12:
            raise ValueError(f"month {month}")
        found = Month(year, month, max(0, int(raw["sent"])), max(0, int(raw["received"])))
    except FileNotFoundError:
        return now, ""
    except (OSError, ValueError, OverflowError, TypeError, KeyError, RecursionError) as error:
        return now, f"{path} cannot be read ({type(error).__name__}): this month's traffic is counted from 0"
    return (now if now.later(found) else found), ""  # a clock that is behind at the start may be set in a moment


def write_month(path: Path, month: Month) -> None:
    """Raises OSError."""
    raw = json.dumps({"month": str(month), "sent": month.sent, "received": month.received})
    replace_file(path, [raw.encode()], durable=False)


class MonthKept:
    """A listener to a peer's progress that keeps its month on the disk; `run` beside the session. `is_used_up` is set in the loop's
    thread, by `run`."""

    def __init__(
        self,
        folder: Path,
        max_gb: float | None,
        listener: Listener,
        local: Callable[[], time.struct_time] = time.localtime,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = folder / FILE_NAME
        self._listener, self._local, self._clock = listener, local, clock
        month, wrong = read_month(self._path, Month.at(local()))
        if wrong:
            listener(Remark(wrong))
        self._allowance = MonthlyAllowance(month, None if max_gb is None else int(max_gb * GB))
        # They begin again each at its time: a stay ends, the session goes on.
        self._payload, self._line = Grown(), Grown()
        self._lock = threading.Lock()  # events come from several threads
        self._kept_at_s = -KEEP_S

    def take(self, event: Event) -> None:
        match event:
            case PeerStarted():  # a stay begins, with a network of its own; the line's counter is the session's
                self._payload.begin_again()
                with self._lock:
                    self._allowance.begin_again("links")
                return
            case TrainingProgress():
                payload = self._payload.take(event.bytes_sent, event.bytes_received)
                line = self._line.take(event.daemon_bytes_sent, event.daemon_bytes_received)
                counter, (sent, received) = "rounds", map(max, payload, line)
            case LineUsed():  # a start may fetch a model
                line = self._line.take(event.sent, event.received)
                counter, (sent, received) = "rounds", map(max, self._payload.total, line)
            case PipelineProgress():
                counter, sent = "links", max(event.bytes_sent, event.wire_bytes_sent)
                received = max(event.bytes_received, event.wire_bytes_received)
            case _:
                return
        with self._lock:
            self._allowance.on_month(Month.at(self._local()), self._clock())
            self._allowance.take(counter, sent, received)

    @property
    def is_used_up(self) -> bool:
        with self._lock:
            self._allowance.on_month(Month.at(self._local()), self._clock())
            return self._allowance.is_used_up

    def words(self) -> str:
        with self._lock:
            return self._allowance.words()

    async def until_used_up(self) -> None:
        """Keeps count until then, or until cancelled."""
        try:
            while not self.is_used_up:
                if time.monotonic() - self._kept_at_s >= KEEP_S:
                    await asyncio.to_thread(self.keep)
                await asyncio.sleep(1.0)
        finally:
            self.keep()

    async def until_next_month(self) -> None:
        while True:
            if not self.is_used_up:
                return
            await asyncio.sleep(LOOK_S)

    def keep(self) -> None:
        """On the disk, and told. A disk that is full is told of elsewhere."""
        self._kept_at_s = time.monotonic()
        with self._lock:
            month, allowed = self._allowance.month, self._allowance.allowed
        with suppress(OSError):
            write_month(self._path, month)
        self._listener(MonthCounted(str(month), month.sent, month.received, allowed or 0))


class Stays(Protocol):
    """Of a session, what is needed here."""

    async def run(self, leave: Awaitable[str]) -> None: ...


async def run_within(
    counted: MonthKept, session: Stays, stop: Callable[[], Coroutine[Any, Any, str]], listener: Listener
) -> None:
    """The session until it ends or `stop()` gives a reason to go; it leaves in order when a month's part is used up, and runs again when
    the next month has begun."""
    if counted.is_used_up:
        listener(Left(counted.words()))  # as a session says it that leaves for it
    while True:
        if counted.is_used_up and await _first(stop(), counted.until_next_month()):
            return
        is_used_up = False

        async def leave() -> str:
            nonlocal is_used_up
            reason = await _first(stop(), counted.until_used_up())
            is_used_up = not reason
            return reason or counted.words()

        await session.run(leave())
        if not is_used_up:
            return


async def _first(stop: Coroutine[Any, Any, str], other: Coroutine[Any, Any, None]) -> str:
    """What `stop` gives; empty when the other was first."""
    stopping, doing = asyncio.create_task(stop), asyncio.create_task(other)
    try:
        await asyncio.wait({stopping, doing}, return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            return stopping.result()
        doing.result()
        return ""
    finally:
        for each in (stopping, doing):
            each.cancel()
        await asyncio.gather(stopping, doing, return_exceptions=True)
