"""Sockets of another process of ours, paced by the kernel: a child tells at what rate its own is."""

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from dilocox_peer.network.kernel_pace import NO_PACE, KernelPace
from dilocox_peer.network.tcp_traffic import Connection, connections_of

CHILD = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as sock:
    print("there", flush=True)
    for _ in sys.stdin:
        print(int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, 47, 4), sys.byteorder), flush=True)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not pace")


class Child:
    def __init__(self, port: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._to, self._said = self.process.stdin, self.process.stdout
        assert self._said.readline() == "there\n"

    @property
    def pace(self) -> int:
        self._to.write("\n")
        self._to.flush()
        return int(self._said.readline())

    @property
    def connections(self) -> list[Connection]:
        return connections_of([self.process.pid])


@pytest.fixture
def child() -> Iterator[Child]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        made = Child(server.getsockname()[1])
        peer, _ = server.accept()
        with peer, made.process:
            yield made
            made.process.kill()


def test_a_connection_of_a_child_is_paced_as_told_and_by_no_more_calls_than_that_takes(child: Child) -> None:
    if not child.connections:
        pytest.skip("this system does not say")
    kernel, pid = KernelPace(), child.process.pid
    kernel.pace(pid, child.connections, 500_000.0)
    if not kernel.is_possible:
        pytest.skip("this system lends no sockets")
    assert child.pace == 500_000
    kernel.pace(pid, child.connections, 510_000.0)
    assert child.pace == 500_000, "so little is not worth a call"
    kernel.pace(pid, child.connections, 700_000.0)
    assert child.pace == 700_000
    kernel.pace(pid, child.connections, None)
    assert child.pace == NO_PACE


def test_connections_that_are_not_named_are_left_alone(child: Child) -> None:
    kernel = KernelPace()
    kernel.pace(child.process.pid, [Connection(1, 1, 0, 0)], 500_000.0)
    assert child.pace == NO_PACE


def test_of_a_process_that_has_ended_nothing_comes() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    kernel = KernelPace()
    kernel.pace(gone.pid, [Connection(1, 1, 0, 0)], 500_000.0)
    assert connections_of([gone.pid]) == []
