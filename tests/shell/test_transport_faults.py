"""Transport when processes are killed and frozen."""

import asyncio
import os
import signal
import time

import pytest

from dilocox_peer.dht.directory import Directory
from dilocox_peer.network.daemon import calls_under_way
from dilocox_peer.network.transport import PeerGone, PeerSilent, Transport, TransportDown

from .commands import free_port
from .conftest import ENDS_S, RUN, MakeTransport, PeerProcess, SpawnPeer, is_running, stands_still, until
from .peer_process import blob

pytestmark = pytest.mark.slow  # each starts Python processes that import torch

UPLOAD = 4e6  # bytes a second: 20 MB last 5 s, and the fault comes in the middle
SIZE = 20_000_000


async def start(
    make_transport: MakeTransport, spawn_peer: SpawnPeer, **options: object
) -> tuple[Transport, PeerProcess]:
    remote = await spawn_peer("remote", **options)
    transport, _ = await make_transport("local", initial_peers=remote.addresses)
    return transport, remote


async def fetch_until(
    transport: Transport, remote: PeerProcess, at_bytes: int, fault: object, *, stall_timeout_s: float = 10.0
) -> bytearray:
    """Fetches SIZE bytes and calls fault() once when at_bytes of them are here."""
    pending, body = [fault], bytearray()

    async def take(piece: bytes) -> bool:
        body.extend(piece)
        if len(body) >= at_bytes and pending:
            pending.pop()()  # type: ignore[operator]
        return True

    await transport.fetch(
        remote.peer, "blob", {"size_bytes": SIZE}, max_body_bytes=SIZE, timeout_s=60, stall_timeout_s=stall_timeout_s,
        take=take,
    )  # fmt: skip
    return body


@pytest.mark.parametrize("victim", ["python", "p2pd", "both"])
async def test_a_peer_killed_in_mid_fetch_is_an_error_and_no_short_body(
    make_transport: MakeTransport, spawn_peer: SpawnPeer, victim: str
) -> None:
    transport, remote = await start(make_transport, spawn_peer, upload_bytes_per_s=UPLOAD)
    pids = {"python": [remote.process.pid], "p2pd": [remote.p2pd], "both": [remote.process.pid, remote.p2pd]}[victim]

    def kill() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(PeerGone, match=f"the stream ended after [0-9]+ of {SIZE} bytes"):
        await fetch_until(transport, remote, 3_000_000, kill)

    await until(lambda: not is_running(remote.p2pd))
    with pytest.raises(PeerGone):
        await transport.send(remote.peer, b"x", 30)
    with pytest.raises(PeerGone):
        await transport.fetch(remote.peer, "blob", {"size_bytes": 1}, max_body_bytes=1, timeout_s=60)


async def test_a_peer_frozen_in_mid_fetch_is_silent_at_the_stall_deadline(
    make_transport: MakeTransport, spawn_peer: SpawnPeer
) -> None:
    transport, remote = await start(make_transport, spawn_peer, upload_bytes_per_s=UPLOAD)
    with pytest.raises(PeerSilent, match=r"nothing for 2 s after"):
        await fetch_until(transport, remote, 3_000_000, remote.freeze, stall_timeout_s=2)
    await until(remote.is_frozen)

    with pytest.raises(PeerSilent, match=r"no answer within 0.3 s"):
        await transport.send(remote.peer, b"x", 0.3)
    with pytest.raises(PeerSilent):
        await transport.fetch(remote.peer, "blob", {"size_bytes": 1}, max_body_bytes=1, timeout_s=0.3)

    remote.thaw()
    _, body = await transport.fetch(remote.peer, "blob", {"size_bytes": 9}, max_body_bytes=9, timeout_s=60)
    assert body == blob(9)


async def test_a_fetch_that_trickles_ends_at_its_total_deadline(
    make_transport: MakeTransport, spawn_peer: SpawnPeer
) -> None:
    transport, remote = await start(make_transport, spawn_peer, upload_bytes_per_s=1e6)
    with pytest.raises(PeerSilent, match=r"blob was not complete within 2 s \([0-9]+ bytes\)"):
        await transport.fetch(remote.peer, "blob", {"size_bytes": SIZE}, max_body_bytes=SIZE, timeout_s=2)


async def test_our_own_p2pd_killed_ends_every_call_and_is_reported(
    make_transport: MakeTransport, spawn_peer: SpawnPeer
) -> None:
    transport, remote = await start(make_transport, spawn_peer)
    failure = asyncio.create_task(transport.wait_for_failure())
    remote.freeze()
    await until(remote.is_frozen)
    calls = [
        asyncio.create_task(transport.send(remote.peer, b"x", 30)),
        asyncio.create_task(
            transport.fetch(remote.peer, "never", {}, max_body_bytes=0, timeout_s=60, stall_timeout_s=30)
        ),
        asyncio.create_task(transport.daemon.call(remote.peer, transport.pass_protocol, b"x", 30)),
    ]
    # The last of them is the one kind that p2pd answers by number. The others, begun before it, open streams.
    await until(lambda: any(not call.done() for call in calls_under_way(transport.p2p)))
    pid = transport.daemon_pid
    os.kill(pid, signal.SIGKILL)

    async with asyncio.timeout(60):
        assert await failure == f"this peer's own p2pd (process {pid}) has ended"
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(result) for result in results] == [TransportDown] * 3
        with pytest.raises(TransportDown, match=f"process {pid}"):
            await transport.send(remote.peer, b"x", 30)
        with pytest.raises(TransportDown):
            await transport.fetch(remote.peer, "blob", {}, max_body_bytes=0, timeout_s=60)
        await transport.close()


async def test_our_own_p2pd_that_has_just_died_is_down_whatever_it_is_asked(make_transport: MakeTransport) -> None:
    """Before its watcher has seen it."""
    transport, _ = await make_transport("local")
    os.kill(transport.daemon_pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while is_running(transport.daemon_pid):  # without a turn of the loop
        assert time.monotonic() < deadline
    assert await transport.refresh_addresses() == transport.addresses
    with pytest.raises(TransportDown):
        await transport.paths()


async def test_our_own_p2pd_frozen_is_killed_by_close(make_transport: MakeTransport) -> None:
    transport, _ = await make_transport()
    pid = transport.daemon_pid
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: stands_still(pid))
    await transport.close(timeout_s=0.3)
    assert not is_running(pid)


async def test_kill_9_leaves_no_p2pd_and_the_same_peer_can_start_again(spawn_peer: SpawnPeer) -> None:
    first = await spawn_peer("remote", port=free_port())  # one that nobody takes while it is down
    assert os.getsid(first.p2pd) == first.p2pd
    first.kill()
    await until(lambda: not is_running(first.p2pd), ENDS_S)
    stale = sockets_of(first)
    assert stale

    again = await spawn_peer("remote", port=first.addresses[0].split("/")[4])
    assert again.peer == first.peer
    assert again.addresses == first.addresses
    assert not sockets_of(again) & stale
    again.process.stdin.close()  # type: ignore[union-attr]
    assert again.process.wait(60) == 0
    assert sockets_of(again) == set()
    assert not is_running(again.p2pd)


def sockets_of(peer: PeerProcess) -> set[str]:
    return {entry.name for entry in peer.sockets.glob("*") if entry.is_socket()}


async def test_ctrl_c_in_a_terminal_reaches_us_and_not_p2pd(spawn_peer: SpawnPeer) -> None:
    remote = await spawn_peer("remote")
    assert os.getpgid(remote.p2pd) != os.getpgid(remote.process.pid)


async def test_a_peer_that_restarts_is_reached_again(make_transport: MakeTransport, spawn_peer: SpawnPeer) -> None:
    """By a new dial of its own: ours is held back for seconds after a failure (p2pd's dial backoff)."""
    transport, identity = await make_transport("local")
    async with await Directory.create(transport, RUN, identity.key):
        remote = await spawn_peer("remote", initial_peers=transport.addresses)
        await transport.send(remote.peer, b"x", 30)
        remote.kill()
        await until(lambda: not is_running(remote.p2pd))
        with pytest.raises(PeerGone):
            await transport.send(remote.peer, b"x", 30)
        again = await spawn_peer("remote", initial_peers=transport.addresses)
        assert again.peer == remote.peer
        await transport.send(again.peer, b"x", 30)
