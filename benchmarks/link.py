"""Speed, CPU and round trip of a link between two peers on loopback, beside a bare TCP connection in the same run.

    python benchmarks/link.py [--megabytes 128] [--repeats 5] [--echoes 500]

Four processes: client, its linkd, the other linkd, the other client; one direction. MB/s: from the first send until the
last body has arrived at the other client. CPU: user and system of all four, or of the two ends of the TCP connection
(sendall and recv_into), a MB of bodies. Round trip: a frame of 64 bytes to the other client, which answers with the same.
Expected beforehand: TLS and yamux in Python take 3.6 ms a MB on both ends together (measured alone), the two local
sockets, each crossed once by sendmsg and recv_into, 0.6 ms a MB each: 4.8 ms a MB in all and, with two cores for four
processes of which the two linkds need one each, 400 MB/s at best; a round trip is two of libp2p's 0.5 ms halves and four
hops through a local socket of 0.1 ms: 1 ms.
"""

import argparse
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import median

import psutil

from dilocox_peer.network.link import Arrived, Link, LinkdEnded, LinkUp
from dilocox_peer.network.linkd_process import LinkSettings
from dilocox_peer.types import LinkId

MB = 1 << 20


def settings(seed: int) -> LinkSettings:
    return LinkSettings(
        key_seed=bytes([seed]) * 32,
        listen=("/ip4/127.0.0.1/tcp/0",),
        protocol="/dilocox/link/1/benchmark",
        max_body_bytes=MB,
        queue_bytes=16 * MB,
    )


def other_end(pipe: Connection) -> None:
    """The other client: echoes frames without a body, counts bodies and answers the one with header "last"."""
    link = Link(settings(2), on_log=print)
    link.start(20)
    server = socket.create_server(("127.0.0.1", 0))
    pipe.send((link.link_id, link.addresses, server.getsockname()))
    link.poll(0)
    assert link._linkd is not None
    pipe.send(link._linkd.process.pid)
    parent = os.getppid()
    while os.getppid() == parent:
        for event in link.poll(5):
            if isinstance(event, Arrived) and event.header == b"tcp":
                receive(server)
            elif isinstance(event, Arrived) and event.header == b"stop":
                link.close(2)
                return
            elif isinstance(event, Arrived) and event.header != b"body":
                assert link.send(event.neighbour, event.header)


def receive(server: socket.socket) -> None:
    buffer = bytearray(MB)
    with server.accept()[0] as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while num_bytes := connection.recv_into(buffer):
            if num_bytes < 64 or buffer[num_bytes - 1] == 1:
                connection.sendall(b"\1" * 64)


@contextmanager
def cpu_of(pids: list[int], into: list[float]) -> Iterator[None]:
    """Appends the CPU seconds that each process took."""
    before = [sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids]
    yield
    into += [sum(psutil.Process(pid).cpu_times()[:2]) - earlier for pid, earlier in zip(pids, before, strict=True)]


def wait(link: Link, header: bytes) -> None:
    while True:
        for event in link.poll(30):
            assert not isinstance(event, LinkdEnded), event.reason
            if isinstance(event, Arrived) and event.header == header:
                return


def through_link(link: Link, neighbour: LinkId, body: bytes, count: int) -> float:
    start = time.perf_counter()
    for number in range(count):
        while not link.send(neighbour, b"last" if number == count - 1 else b"body", body):
            link.poll(1)
    wait(link, b"last")
    return time.perf_counter() - start


def through_tcp(connection: socket.socket, body: bytes, count: int) -> float:
    last = body[:-1] + b"\1"
    start = time.perf_counter()
    for number in range(count):
        connection.sendall(last if number == count - 1 else body)
    connection.recv(64, socket.MSG_WAITALL)
    return time.perf_counter() - start


def spread(values: list[float], form: str) -> str:
    return " / ".join(format(value, form) for value in (min(values), median(values), max(values)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=128, help="of each size, each repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--echoes", type=int, default=500)
    arguments = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(
        f"# {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, libp2p {version('libp2p')}, trio {version('trio')}, "
        f"commit {commit.stdout.strip()}\n# command: python {' '.join(sys.argv)}",
        flush=True,
    )
    ours, theirs = get_context("spawn").Pipe()
    other = get_context("spawn").Process(target=other_end, args=(theirs,), daemon=True)
    other.start()
    link = Link(settings(1), on_log=print)
    link.start(20)
    neighbour, addresses, tcp_address = ours.recv()
    other_linkd = ours.recv()
    link.dial(neighbour, addresses)
    deadline = time.monotonic() + 20
    while not any(isinstance(event, LinkUp) for event in link.poll(10)):
        assert time.monotonic() < deadline, "no link"
    assert link._linkd is not None
    assert other.pid is not None
    pids = [os.getpid(), link._linkd.process.pid, other_linkd, other.pid]
    rows: dict[str, list[tuple[float, list[float]]]] = {}
    for _ in range(arguments.repeats):
        for size in (128 * 1024, MB):
            count = arguments.megabytes * MB // size
            cpu: list[float] = []
            with cpu_of(pids, cpu):
                seconds = through_link(link, neighbour, bytes(size), count)
            rows.setdefault(f"link, {size // 1024} KiB", []).append((seconds, cpu))
        link.send(neighbour, b"tcp")
        with socket.create_connection(tcp_address) as connection:
            cpu = []
            with cpu_of([pids[0], pids[3]], cpu):
                seconds = through_tcp(connection, bytes(MB), arguments.megabytes)
            rows.setdefault("TCP, 1024 KiB", []).append((seconds, cpu))
    print("bodies            MB/s min / median / max      CPU ms a MB, min / median / max   of which, median")
    for name, runs in rows.items():
        rate = [arguments.megabytes / seconds for seconds, _ in runs]
        total = [sum(cpu) * 1000 / arguments.megabytes for _, cpu in runs]
        each = [median(cpu[index] for _, cpu in runs) * 1000 / arguments.megabytes for index in range(len(runs[0][1]))]
        labels = ("client", "linkd", "linkd", "client") if len(each) == 4 else ("sender", "receiver")
        parts = ", ".join(f"{label} {value:.2f}" for label, value in zip(labels, each, strict=True))
        print(f"{name:<17} {spread(rate, '6.0f'):<28} {spread(total, '5.2f'):<33} {parts}")
    trips: dict[str, list[float]] = {"link": [], "TCP": []}
    for _ in range(arguments.echoes):
        start = time.perf_counter()
        link.send(neighbour, b"e" * 64)
        wait(link, b"e" * 64)
        trips["link"].append((time.perf_counter() - start) * 1e6)
    link.send(neighbour, b"tcp")
    with socket.create_connection(tcp_address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(arguments.echoes):
            start = time.perf_counter()
            connection.sendall(b"\1" * 64)
            connection.recv(64, socket.MSG_WAITALL)
            trips["TCP"].append((time.perf_counter() - start) * 1e6)
    print(f"round trip of 64 bytes, {arguments.echoes} times, us: min / median / max")
    for name, values in trips.items():
        print(f"{name:<17} {spread(values, '.0f')}")
    link.send(neighbour, b"stop")
    other.join(10)
    link.close(2)


if __name__ == "__main__":
    main()
