"""A joiner's state from one donor and from two, on loopback, beside a plain TCP connection in the same run.

    python benchmarks/state_sync.py [--megabytes 256] [--repeats 5] [--in-memory]

Donors are processes with a transport, a store and an anchor state in memory; the joiner is this process, with `fetch_state` as a
peer runs it: asked for by the certified digest, every chunk checked, put together in a file that survives a restart, or (--in-memory,
as a visitor has it) in memory. MB/s: megabytes (10^6) of state over the time until it can be installed. TCP: sendall and recv_into of the same bytes
between two processes, neither encrypted nor checked. The ways take turns. CPU: user and system of the joiner, the donors and all
their p2pd, a MB. Stop: the longest that another thread of the joiner, which wants to run every 5 ms, was kept from it (of the
interpreter, or of a machine that is busy with other things), and that its event loop was late. Then the faults: a donor killed when
a third of the state is here (bytes that came in all, against the state's size), and a donor that lies.
Expected beforehand: 9-11 ms CPU a MB of all four processes for one donor, as for a single stream; with two idle cores 150-200 MB/s,
from two donors no less, and a bound that the cores set and not the number of donors.
"""

import argparse
import asyncio
import os
import platform
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from dilocox_peer.events import Event
from dilocox_peer.events_of_states import StateFetchFailed
from dilocox_peer.network.transport import Transport
from dilocox_peer.peer.identity import Identity
from dilocox_peer.peer.state.statesync import Agreed, States, fetch_state
from dilocox_peer.peer.training.anchor_state import AnchorState
from dilocox_peer.store.shelf import Shelf
from dilocox_peer.store.store import Store
from dilocox_peer.types import Digest, Layout, PeerId, RunId

RUN = RunId("5c" * 32)
TICK_S = 0.005


def state_of(num_bytes: int) -> AnchorState:
    """The same on every donor."""
    layout = Layout.of([("weights", (num_bytes // 8,))])
    rng = np.random.default_rng(1)
    anchor, momentum = (rng.standard_normal(layout.num_elements, dtype="<f4").data for _ in range(2))
    return AnchorState.of(layout, head=Digest(bytes(32)), round_number=1, anchor=anchor, momentum=momentum)


class Lies:
    """A source with the right outline and other bytes."""

    def __init__(self, state: AnchorState) -> None:
        self.outline = state.outline
        self._state = state

    def content(self, _name: Digest) -> "Lies":
        return self

    def chunk(self, index: int) -> bytes:
        return bytes(len(self._state.chunk(index)))


def donor(pipe: Connection, home: Path, num_bytes: int, is_lying: bool) -> None:
    asyncio.run(_donor(pipe, home, num_bytes, is_lying))


async def _donor(pipe: Connection, home: Path, num_bytes: int, is_lying: bool) -> None:
    state = state_of(num_bytes)
    with Identity.open(home / "identity.key") as identity:
        async with await Transport.create(
            identity.path, identity.peer_id, namespace=RUN, runtime_dir=home / "run"
        ) as transport:
            source: Any = Lies(state) if is_lying else States(lambda: state, [])
            await Store(transport, [Shelf(home / "things")], sources=[source]).serve()
            server = socket.create_server(("127.0.0.1", 0))
            pipe.send((identity.peer_id, transport.addresses, transport.daemon_pid, server.getsockname(), state.digest))
            threading.Thread(target=serve_tcp, args=(server, state), daemon=True).start()
            await asyncio.to_thread(pipe.poll, None)


def serve_tcp(server: socket.socket, state: AnchorState) -> None:
    while True:
        with server.accept()[0] as connection:
            for part in state.parts():
                connection.sendall(part)


def over_tcp(address: tuple[str, int], num_bytes: int) -> None:
    buffer, left = bytearray(1 << 20), num_bytes
    with socket.create_connection(address) as connection:
        while left > 0 and (got := connection.recv_into(buffer)):
            left -= got


class Stops:
    """The longest stops of the interpreter and of the event loop since the last look."""

    def __init__(self) -> None:
        self.thread_s = self.loop_s = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)
        self._thread.start()
        self._task = asyncio.create_task(self._tick_loop())

    def _tick(self) -> None:
        last = time.monotonic()
        while not self._is_over.wait(TICK_S):
            now = time.monotonic()
            self.thread_s, last = max(self.thread_s, now - last - TICK_S), now

    async def _tick_loop(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self.loop_s, last = max(self.loop_s, now - last - TICK_S), now

    async def close(self) -> None:
        self._is_over.set()
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task


class Bench:
    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.num_bytes: int = arguments.megabytes * 10**6 // 8 * 8
        self.on_disk = not arguments.in_memory
        self.folder = folder
        self.layout = Layout.of([("weights", (self.num_bytes // 8,))])
        self.told: list[Event] = []
        self.processes: list[Any] = []
        self.donors: list[tuple[PeerId, list[str], int, tuple[str, int], Digest]] = []

    async def start(self, stack: AsyncExitStack) -> None:
        identity = stack.enter_context(Identity.open(self.folder / "me" / "identity.key"))
        self.transport = await Transport.create(
            identity.path, identity.peer_id, namespace=RUN, runtime_dir=self.folder / "me" / "run"
        )
        stack.push_async_callback(self.transport.close)
        self.shelf = Shelf(self.folder / "me" / "arrivals") if self.on_disk else None

    async def start_donor(self, *, is_lying: bool = False) -> PeerId:
        mine, theirs = get_context("spawn").Pipe()
        home = self.folder / f"donor{len(self.processes)}"
        process = get_context("spawn").Process(target=donor, args=(theirs, home, self.num_bytes, is_lying))
        process.start()
        self.processes.append((process, mine))
        said = await asyncio.to_thread(mine.recv)
        self.donors.append(said)
        await self.transport.connect(said[0], said[1], timeout_s=30.0)
        return PeerId(said[0])

    async def fetch(self, donors: Sequence[PeerId]) -> AnchorState | None:
        agreed = Agreed(1, Digest(bytes(32)), self.donors[0][4])
        return await fetch_state(
            self.transport, donors, agreed, layout=self.layout, timeout_s=600.0, listener=self.told.append,
            shelf=self.shelf,
        )  # fmt: skip

    async def timed(self, donors: Sequence[PeerId]) -> float:
        began = time.monotonic()
        state = await self.fetch(donors)
        seconds = time.monotonic() - began
        assert state is not None, self.told
        return float(self.num_bytes / 1e6 / seconds)

    def cpu_s(self) -> float:
        pids = [os.getpid(), self.transport.daemon_pid]
        pids += [pid for process, _ in self.processes if process.is_alive() for pid in [process.pid]]
        pids += [said[2] for said, (process, _) in zip(self.donors, self.processes, strict=True) if process.is_alive()]
        times = [psutil.Process(pid).cpu_times() for pid in pids]
        return float(sum(each.user + each.system for each in times))

    async def kill_one(self, victim: int, donors: Sequence[PeerId]) -> int:
        """Bytes that came in all when a donor is killed on the way."""
        before = self.transport.bandwidth.bytes_received
        fetching = asyncio.create_task(self.fetch(donors))
        while self.transport.bandwidth.bytes_received - before < self.num_bytes / 3:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        self.processes[victim][0].kill()
        psutil.Process(self.donors[victim][2]).kill()
        assert await fetching is not None, self.told
        return self.transport.bandwidth.bytes_received - before

    def close(self) -> None:
        for process, pipe in self.processes:
            with suppress(OSError):
                pipe.send("end")
            process.join(5.0)
            process.kill()


def row(name: str, values: Sequence[float], unit: str = "MB/s") -> str:
    ordered = sorted(values)
    return f"| {name} | {ordered[0]:.0f} | {statistics.median(ordered):.0f} | {ordered[-1]:.0f} | {unit} |"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--in-memory", action="store_true")
    arguments = parser.parse_args()
    print(f"`python benchmarks/state_sync.py {' '.join(sys.argv[1:])}`")
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dilocox-state-sync-")))
        bench = Bench(arguments, folder)
        stack.callback(bench.close)
        await bench.start(stack)
        donors = [await bench.start_donor() for _ in range(2)]
        speeds: dict[str, list[float]] = {"plain TCP": [], "one donor": [], "two donors": []}
        cpu: dict[str, list[float]] = {"one donor": [], "two donors": []}
        stops: dict[str, list[float]] = {"interpreter": [], "event loop": []}
        for _ in range(arguments.repeats):
            began = time.monotonic()
            await asyncio.to_thread(over_tcp, bench.donors[0][3], bench.num_bytes)
            speeds["plain TCP"].append(bench.num_bytes / 1e6 / (time.monotonic() - began))
            for name, asked in (("one donor", donors[:1]), ("two donors", donors)):
                watched, before = Stops(), bench.cpu_s()
                speeds[name].append(await bench.timed(asked))
                cpu[name].append((bench.cpu_s() - before) * 1e3 / (bench.num_bytes / 1e6))
                await watched.close()
                stops["interpreter"].append(watched.thread_s * 1e3)
                stops["event loop"].append(watched.loop_s * 1e3)
        print(f"| {bench.num_bytes / 1e6:.0f} MB | min | median | max | |\n|---|---|---|---|---|")
        for name, values in speeds.items():
            print(row(name, values))
        for name, values in cpu.items():
            print(row(f"CPU, {name}", values, "ms/MB"))
        for name, values in stops.items():
            print(row(f"longest stop, {name}", values, "ms"))
        outlines = 2 * 32 * -(-bench.num_bytes // (1 << 20))
        came = await bench.kill_one(1, donors)
        print(
            f"\na donor killed on the way: {came} bytes came for {bench.num_bytes} of state and {outlines} of outlines"
        )
        liar = await bench.start_donor(is_lying=True)
        bench.told.clear()
        assert await bench.fetch([liar, donors[0]]) is not None
        named = {event.donor for event in bench.told if isinstance(event, StateFetchFailed)}
        print(
            f"a donor that lies: {'named' if named == {liar} else f'NOT NAMED: {named}'}, and the state came from the other"
        )


if __name__ == "__main__":
    asyncio.run(main())
