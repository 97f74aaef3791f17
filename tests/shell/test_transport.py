"""Transport against itself, in this process."""

import asyncio
import errno
import logging
import os
import random
import signal
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest

from dilocox_peer.errors import ConfigError, LackedForNow, PeerUnavailable, ProtocolError, RunUnreachable
from dilocox_peer.network import bulk
from dilocox_peer.network.daemon import calls_under_way, handlers_under_way
from dilocox_peer.network.doorkeeper import Budget, Budgeted, Budgets
from dilocox_peer.network.lead_budget import RANGE_LEADS
from dilocox_peer.network.message_frames import MAX_MESSAGE_BYTES
from dilocox_peer.network.transport import (
    PeerGone,
    PeerRefusing,
    PeerSilent,
    Reply,
    RequestRefused,
    Transport,
    TransportLimits,
)
from dilocox_peer.peer.identity import Identity
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import PeerId

from .conftest import RUN, MakeTransport, is_running, stands_still, until
from .peer_process import blob, serve_blob

STRANGER = SigningKey(bytes(32)).peer_id


def flat(per_s: float, burst: float) -> Budgets:
    """The same for everybody."""
    return Budgets(*[Budget(per_s, burst)] * 4)


async def pair(make_transport: MakeTransport, **options: Any) -> tuple[Transport, Transport]:
    server, _ = await make_transport("server", **options)
    client, _ = await make_transport("client", initial_peers=server.addresses)
    return server, client


# -- messages ---------------------------------------------------------------------------------------------------------


async def test_two_transports_exchange_messages(make_transport: MakeTransport) -> None:
    server, client = await pair(make_transport)
    got: list[tuple[PeerId, bytes]] = []
    for transport in (server, client):
        transport.set_message_handler(lambda peer, raw: got.append((peer, raw)))

    await client.send(server.peer_id, b"there", 30)
    await server.send(client.peer_id, bytes(MAX_MESSAGE_BYTES), 30)

    assert got == [(client.peer_id, b"there"), (server.peer_id, bytes(MAX_MESSAGE_BYTES))]
    assert 5 < client.bandwidth.bytes_sent == server.bandwidth.bytes_received < 50
    assert MAX_MESSAGE_BYTES < server.bandwidth.bytes_sent == client.bandwidth.bytes_received < MAX_MESSAGE_BYTES + 50


async def test_a_transport_has_the_address_and_the_peer_id_of_its_key(make_transport: MakeTransport) -> None:
    transport, identity = await make_transport()
    assert len(transport.addresses) == 1
    assert transport.addresses[0].startswith("/ip4/127.0.0.1/tcp/")
    assert transport.addresses[0].endswith(f"/p2p/{identity.peer_id}")
    assert await transport.refresh_addresses() == transport.addresses


async def test_an_oversized_message_is_not_sent(make_transport: MakeTransport) -> None:
    transport, _ = await make_transport()
    with pytest.raises(ValueError, match="serve it for fetch"):
        await transport.send(STRANGER, bytes(MAX_MESSAGE_BYTES + 1), 1)


async def test_a_fault_in_a_handler_costs_one_message(
    make_transport: MakeTransport, caplog: pytest.LogCaptureFixture
) -> None:
    server, client = await pair(make_transport)
    with pytest.raises(RequestRefused, match="not ready"):
        await client.send(server.peer_id, b"early", 30)
    got: list[bytes] = []

    def handler(peer: PeerId, raw: bytes) -> None:
        if raw == b"malformed":
            raise ProtocolError(peer, "no such message")
        if raw == b"bug":
            raise KeyError("secret")
        got.append(raw)

    server.set_message_handler(handler)
    with pytest.raises(RequestRefused, match="no such message"):
        await client.send(server.peer_id, b"malformed", 30)
    with caplog.at_level(logging.CRITICAL), pytest.raises(RequestRefused, match=r"internal error$"):
        await client.send(server.peer_id, b"bug", 30)
    await client.send(server.peer_id, b"good", 30)
    assert got == [b"good"]


@pytest.mark.parametrize("is_refused", [True, False])
async def test_a_served_stream_is_ended_by_its_fetcher(make_transport: MakeTransport, is_refused: bool) -> None:
    """The end of a stream on both sides at once can overtake what was said last."""
    server, client = await pair(make_transport)

    async def answer(peer: PeerId, _header: dict[str, Any]) -> Reply:
        if is_refused:
            raise ProtocolError(peer, "no such thing")
        return Reply({}, [])

    await server.serve("thing", answer)
    reader, writer = await client.open_stream(server.peer_id, client.fetch_protocol("thing"), 30)
    try:
        await bulk.send_request(writer, {})
        async with asyncio.timeout(60):
            assert await reader.readexactly(1)
        rest = asyncio.create_task(reader.read())  # it ends with the stream
        await asyncio.wait({rest}, timeout=1)
        assert not rest.done()
        rest.cancel()
        assert not server.is_busy(client.peer_id), "its place is free all the same"
    finally:
        writer.transport.abort()


async def test_a_flood_of_messages_is_refused(make_transport: MakeTransport) -> None:
    limits = TransportLimits(allowed={Budgeted.MESSAGES: flat(0.001, 3)})
    server, client = await pair(make_transport, limits=limits)
    got: list[bytes] = []
    server.set_message_handler(lambda _peer, raw: got.append(raw))
    results = await asyncio.gather(*(client.send(server.peer_id, b"x", 30) for _ in range(5)), return_exceptions=True)
    assert len(got) == 3
    assert [type(result) for result in results if result is not None] == [RequestRefused] * 2


async def test_strangers_that_take_all_the_time_there_is_keep_no_member_from_its_contribution(
    make_transport: MakeTransport,
) -> None:
    """Identities cost nothing: as many as it takes may ask, and read so slowly that nobody else is answered."""
    limits = TransportLimits(streams=4, streams_waiting=4)
    server, stranger = await pair(make_transport, limits=limits)
    member, _ = await make_transport("member", initial_peers=server.addresses)
    server.set_members(lambda peer: peer == member.peer_id)
    asked, go_on = 0, asyncio.Event()

    async def serve(peer: PeerId, _header: dict[str, Any]) -> Reply:
        nonlocal asked
        if peer == stranger.peer_id:
            asked += 1
            await go_on.wait()
        return Reply({}, [b"contribution"])

    await server.serve("blob", serve)
    held = [
        asyncio.create_task(stranger.fetch(server.peer_id, "blob", {}, max_body_bytes=100, timeout_s=60))
        for _ in range(4)
    ]
    await until(lambda: asked == 2)
    _, body = await member.fetch(server.peer_id, "blob", {}, max_body_bytes=100, timeout_s=60)
    assert bytes(body) == b"contribution"
    assert asked == 2, "half of the places are for others"
    go_on.set()
    assert [bytes(each) for _, each in await asyncio.gather(*held)] == [b"contribution"] * 4


async def test_two_runs_do_not_mix(make_transport: MakeTransport) -> None:
    server, _ = await make_transport("server", namespace="cd" * 32)
    client, _ = await make_transport("client", initial_peers=server.addresses)
    server.set_message_handler(lambda _peer, _raw: None)
    await server.serve("blob", serve_blob)
    with pytest.raises(RequestRefused, match=r"not \(yet\) in this run"):
        await client.send(server.peer_id, b"x", 30)
    with pytest.raises(RequestRefused, match=r"not \(yet\) in this run"):
        await client.fetch(server.peer_id, "blob", {}, max_body_bytes=10, timeout_s=60)


async def test_an_unknown_peer_is_gone_at_once(make_transport: MakeTransport) -> None:
    _, client = await pair(make_transport)
    with pytest.raises(PeerGone):
        await client.send(STRANGER, b"x", 30)
    with pytest.raises(PeerGone):
        await client.fetch(STRANGER, "blob", {}, max_body_bytes=10, timeout_s=60)
    with pytest.raises(PeerRefusing, match="refused"):
        await client.connect(STRANGER, [f"/ip4/127.0.0.1/tcp/9/p2p/{STRANGER}"])


async def test_a_peer_that_there_is_no_way_to_is_not_said_to_be_gone(make_transport: MakeTransport) -> None:
    """It may be our own line that is down: then all of a run's voters would look gone, and who goes on without them the run."""
    client, _ = await make_transport("client")
    nowhere = f"/ip4/224.0.0.1/tcp/9/p2p/{STRANGER}"
    for _ in range(2):  # p2pd dials once, and says then that it does not dial again yet
        with pytest.raises(PeerSilent, match=r"undialable|backoff"):
            await client.connect(STRANGER, [nowhere])
    with pytest.raises(PeerSilent):
        await client.connect(STRANGER, [nowhere, f"/ip4/127.0.0.1/tcp/9/p2p/{STRANGER}"])


@pytest.mark.parametrize("name", ["0 is not in base58", "abc"])
async def test_a_name_that_is_no_peer_id_is_a_peer_that_is_gone(make_transport: MakeTransport, name: str) -> None:
    """Rosters name peers, and a leader may write anything there; it must end no task of those who greet them."""
    client, _ = await make_transport("client")
    with pytest.raises(PeerGone):
        await client.send(PeerId(name), b"x", 30)
    with pytest.raises(PeerGone):
        await client.fetch(PeerId(name), "blob", {}, max_body_bytes=10, timeout_s=60)


async def test_peers_meet_by_the_address_of_a_lease(make_transport: MakeTransport) -> None:
    """Without a peer that both know."""
    first, _ = await make_transport("first")
    second, _ = await make_transport("second")
    first.set_message_handler(lambda _peer, _raw: None)
    with pytest.raises(PeerGone):
        await second.send(first.peer_id, b"x", 30)
    await second.connect(first.peer_id, first.addresses)
    await second.send(first.peer_id, b"x", 30)
    assert await second.paths() == {first.peer_id: "direct"}


async def test_cancelled_calls_do_not_break_the_transport(make_transport: MakeTransport) -> None:
    """hivemind's reader dies of an answer that arrives just after its call was cancelled, and all later calls hang."""
    server, client = await pair(
        make_transport,
        limits=TransportLimits(allowed={Budgeted.MESSAGES: flat(1e6, 1e6), Budgeted.MESSAGE_BYTES: flat(1e9, 1e9)}),
    )
    server.set_message_handler(lambda _peer, _raw: None)
    rng = random.Random(1)
    for _ in range(40):
        calls = [asyncio.create_task(client.send(server.peer_id, b"x", 30)) for _ in range(10)]
        await asyncio.sleep(rng.random() * 0.004)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    await client.send(server.peer_id, b"x", 30)
    assert all(call.done() for call in calls_under_way(client.p2p))
    await until(lambda: not handlers_under_way(server.p2p))


# -- bulk -------------------------------------------------------------------------------------------------------------


async def test_twenty_megabytes_arrive_intact(make_transport: MakeTransport) -> None:
    server, client = await pair(make_transport)
    await server.serve("blob", serve_blob)
    header, body = await client.fetch(
        server.peer_id, "blob", {"size_bytes": 20_000_000}, max_body_bytes=20_000_000, timeout_s=60
    )
    assert header == {"size_bytes": 20_000_000}
    assert body == blob(20_000_000)
    assert server.bandwidth.bytes_sent == client.bandwidth.bytes_received == 20_000_000


async def test_a_body_is_taken_piece_by_piece_and_no_further_than_it_is_wanted(make_transport: MakeTransport) -> None:
    server, client = await pair(make_transport)
    await server.serve("blob", serve_blob)
    taken = bytearray()

    async def take(piece: bytes) -> bool:
        taken.extend(piece)
        return len(taken) < most

    for most in (20_000_000, 1_000_000):
        taken.clear()
        _, body = await client.fetch(
            server.peer_id, "blob", {"size_bytes": 20_000_000}, max_body_bytes=20_000_000, timeout_s=60, take=take
        )
        assert (bytes(body), bytes(taken)) == (b"", blob(20_000_000)[: len(taken)])
        assert most <= len(taken) < most + 600_000


async def test_a_fetch_under_an_upload_cap_and_several_at_once_arrive_intact(make_transport: MakeTransport) -> None:
    server, client = await pair(make_transport, limits=TransportLimits(upload_bytes_per_s=20e6, streams=2))
    await server.serve("blob", serve_blob)
    sizes = [0, 1, 1_000_000, 1_000_001]
    replies = await asyncio.gather(
        *(client.fetch(server.peer_id, "blob", {"size_bytes": n}, max_body_bytes=n, timeout_s=60) for n in sizes)
    )
    assert [body == blob(size) for size, (_, body) in zip(sizes, replies, strict=True)] == [True] * 4


async def test_a_body_above_the_cap_is_refused_before_memory_is_taken(make_transport: MakeTransport) -> None:
    server, client = await pair(make_transport)
    await server.serve("blob", serve_blob)
    taken: list[bytes] = []

    async def take(piece: bytes) -> bool:
        taken.append(piece)
        return True

    with pytest.raises(ProtocolError, match="body of 1001 bytes, at most 1000"):
        await client.fetch(
            server.peer_id, "blob", {"size_bytes": 1001}, max_body_bytes=1000, timeout_s=60, take=take
        )  # fmt: skip
    assert taken == []


async def test_a_refusal_carries_its_reason(make_transport: MakeTransport) -> None:
    server, client = await pair(make_transport, limits=TransportLimits(handler_timeout_s=0.05))

    async def handler(peer: PeerId, header: dict[str, Any]) -> Reply:
        match header["want"]:
            case "nothing":
                raise ProtocolError(peer, "round 3 is not kept")
            case "other":
                raise PeerUnavailable(STRANGER, "asked it in vain")
            case "bug":
                raise KeyError("secret")
            case _:
                await asyncio.Event().wait()
        raise AssertionError

    await server.serve("state", handler)
    for want, says in (
        ("nothing", "round 3 is not kept$"),
        ("other", "in vain"),
        ("bug", "internal error$"),
        ("slow", "not ready"),
    ):
        with pytest.raises(RequestRefused, match=says):
            await client.fetch(server.peer_id, "state", {"want": want}, max_body_bytes=0, timeout_s=60)
    with pytest.raises(RequestRefused, match=r"not \(yet\)"):
        await client.fetch(server.peer_id, "unserved", {}, max_body_bytes=0, timeout_s=60)


async def test_one_peer_gets_only_its_share_of_streams(make_transport: MakeTransport) -> None:
    server, client = await pair(make_transport, limits=TransportLimits(streams_per_peer=2))
    release, waiting = asyncio.Event(), asyncio.Semaphore(0)

    async def handler(_peer: PeerId, _header: dict[str, Any]) -> Reply:
        waiting.release()
        await release.wait()
        return Reply({})

    await server.serve("slow", handler)
    fetches = [
        asyncio.create_task(client.fetch(server.peer_id, "slow", {}, max_body_bytes=0, timeout_s=60)) for _ in range(2)
    ]
    for _ in fetches:
        await asyncio.wait_for(waiting.acquire(), 60)
    with pytest.raises(RequestRefused, match="busy"):
        await client.fetch(server.peer_id, "slow", {}, max_body_bytes=0, timeout_s=60)
    release.set()
    assert await asyncio.gather(*fetches) == [({}, bytearray())] * 2


async def test_failed_and_cancelled_calls_leave_no_descriptor_open(make_transport: MakeTransport) -> None:
    server, client = await pair(make_transport, limits=TransportLimits(handler_timeout_s=0.05))

    async def never(_peer: PeerId, _header: dict[str, Any]) -> Reply:
        await asyncio.Event().wait()
        raise AssertionError

    await server.serve("never", never)

    async def fail() -> None:
        for _ in range(10):
            with pytest.raises(PeerUnavailable):
                await client.fetch(STRANGER, "blob", {}, max_body_bytes=0, timeout_s=60)
            with pytest.raises(PeerUnavailable):
                await client.fetch(server.peer_id, "never", {}, max_body_bytes=0, timeout_s=0.01)
            with pytest.raises(PeerUnavailable):
                await client.connect(STRANGER, [f"/ip4/127.0.0.1/tcp/9/p2p/{STRANGER}"])
        os.kill(client.daemon_pid, signal.SIGSTOP)  # it takes connections, and answers nothing
        try:
            await until(lambda: stands_still(client.daemon_pid))  # its threads are stopped one after the other
            for _ in range(10):
                with pytest.raises(TimeoutError):
                    await client.leads_to(server.peer_id, timeout_s=0.01)
                assert await client.refresh_addresses(timeout_s=0.01) == client.addresses
        finally:
            os.kill(client.daemon_pid, signal.SIGCONT)

    async def num_descriptors() -> tuple[int, int]:
        await until(lambda: not server.is_busy(client.peer_id))  # with what nobody waits for any more
        return len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{client.daemon_pid}/fd"))

    await fail()
    before = await num_descriptors()
    for _ in range(3):
        await fail()
    here, _ = await num_descriptors()
    assert here <= before[0] + 3  # a socket or two may be closing just now

    def has_closed() -> bool:  # p2pd has only just gone on, and closes what was closed here
        return len(os.listdir(f"/proc/{client.daemon_pid}/fd")) <= before[1] + 3

    await until(has_closed)


# -- start and end ----------------------------------------------------------------------------------------------------


async def test_p2pd_is_in_a_session_of_its_own_and_ends_with_the_transport(
    make_transport: MakeTransport,
) -> None:
    transport, _ = await make_transport()
    pid, folder = transport.daemon_pid, transport.daemon.folder
    assert os.getsid(pid) == pid != os.getsid(0)
    assert list(folder.iterdir())
    await transport.close()
    await transport.close()
    assert not is_running(pid)
    assert not list(folder.glob("*"))
    with pytest.raises(PeerUnavailable, match="closed"):
        await transport.send(STRANGER, b"x", 1)


async def test_a_disk_that_is_read_only_meanwhile_keeps_no_p2pd_from_ending(
    make_transport: MakeTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`leave` ended in the system's error with another exit code, and what followed on p2pd's end was left out."""
    transport, _ = await make_transport()

    def refuse(path: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr(os, "remove", refuse)
    await transport.close()


async def test_a_taken_port_is_named(make_transport: MakeTransport) -> None:
    """p2pd itself would start, share the port by SO_REUSEPORT, and get half of the other's callers."""
    other, _ = await make_transport("other")
    port = other.addresses[0].split("/")[4]
    with pytest.raises(ConfigError, match=f"cannot listen on /ip4/127.0.0.1/tcp/{port} .*in use.*: stop what uses it"):
        await make_transport("late", host_maddrs=[f"/ip4/127.0.0.1/tcp/{port}"])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match="in use"):
            await make_transport("later", host_maddrs=[f"/ip4/127.0.0.1/tcp/{port}"])


async def test_the_port_of_a_transport_can_be_taken_again_at_once(make_transport: MakeTransport) -> None:
    server, client = await pair(make_transport)
    server.set_message_handler(lambda _peer, _raw: None)
    await client.send(server.peer_id, b"x", 30)
    host = server.addresses[0].split("/p2p/")[0]
    await server.close()
    again, _ = await make_transport("again", host_maddrs=[host])
    assert again.addresses[0].startswith(host)


@pytest.mark.parametrize("address", ["/ip4/203.0.113.77/tcp/0", "/ip4/203.0.113.77/tcp/4000"])
async def test_an_address_of_another_host_is_named(make_transport: MakeTransport, address: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on {address}"):
        await make_transport(host_maddrs=[address])


async def test_an_unreachable_bootstrap_is_named_with_the_reason(make_transport: MakeTransport) -> None:
    with pytest.raises(RunUnreachable, match=r"/ip4/127.0.0.1/tcp/9/p2p/\S+ refuses the connection"):
        await make_transport("a", initial_peers=[f"/ip4/127.0.0.1/tcp/9/p2p/{STRANGER}"])


async def test_a_bootstrap_with_another_key_is_named(make_transport: MakeTransport) -> None:
    server, _ = await make_transport("server")
    wrong = server.addresses[0].replace(server.peer_id, STRANGER)
    with pytest.raises(RunUnreachable, match="is not this peer"):
        await make_transport("a", initial_peers=[wrong])


async def test_one_reachable_peer_of_several_is_enough(make_transport: MakeTransport) -> None:
    server, _ = await make_transport("server")
    server.set_message_handler(lambda _peer, _raw: None)
    dead = f"/ip4/240.0.0.1/tcp/9/p2p/{STRANGER}"
    client, _ = await make_transport("client", initial_peers=[dead, *server.addresses])
    await client.send(server.peer_id, b"x", 30)


async def test_a_peer_does_not_dial_itself(make_transport: MakeTransport, tmp_path: Path) -> None:
    with Identity.open(tmp_path / "peer" / "identity.key") as identity:
        own = f"/ip4/127.0.0.1/tcp/9/p2p/{identity.peer_id}"
    transport, _ = await make_transport("peer", initial_peers=[own])
    assert transport.initial_peers == ()


async def test_another_key_than_the_peers_is_refused(tmp_path: Path, no_process_left: None) -> None:
    with (
        Identity.open(tmp_path / "identity.key") as identity,
        pytest.raises(ConfigError, match=r"is .* the key of this peer"),
    ):
        await Transport.create(identity.path, STRANGER, namespace=RUN, runtime_dir=tmp_path / "run")


async def test_two_transports_do_not_share_a_runtime_folder(make_transport: MakeTransport, short_path: Path) -> None:
    await make_transport("a", runtime_dir=short_path / "run")
    with pytest.raises(ConfigError, match="in use by another process"):
        await make_transport("b", runtime_dir=short_path / "run")


async def test_a_runtime_folder_open_to_others_is_refused(make_transport: MakeTransport, short_path: Path) -> None:
    (short_path / "run").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        await make_transport("a", runtime_dir=short_path / "run")


@pytest.mark.parametrize("name", ["x" * 120, "with space", "ü"])
async def test_a_folder_that_no_socket_path_can_name_has_a_short_stand_in(
    make_transport: MakeTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    transport, _ = await make_transport("a", runtime_dir=tmp_path / name)
    stand_in = transport.daemon.folder
    assert transport.peer_id[-12:] in stand_in.name
    assert stand_in.stat().st_mode & 0o777 == 0o700
    await transport.close()
    assert not stand_in.exists()


async def test_stand_ins_of_killed_peers_are_swept_and_those_in_use_kept(
    make_transport: MakeTransport, tmp_path: Path, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    other, _ = await make_transport("b", runtime_dir=tmp_path / ("y" * 120))
    left, written = (short_path / f"dilocox-{os.getuid()}-{name}-0123" for name in ("killed-peer1", "written-peer"))
    control = short_path / f"dilocox-{os.getuid()}-{'0a' * 8}"  # of a control socket, which no lock tells of
    control.mkdir(mode=0o700)
    for each in (left, written):
        each.mkdir(mode=0o700)
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(each / "p2pd-old.sock"))
    (written / "note").touch()
    mine, _ = await make_transport("a", runtime_dir=tmp_path / ("x" * 120))
    found = {name for name in os.listdir(short_path) if name.startswith("dilocox-")}
    assert found == {other.daemon.folder.name, mine.daemon.folder.name, written.name, control.name}
    assert os.listdir(written) == ["note"]
    assert os.listdir(other.daemon.folder), "a peer at work lost its sockets"


async def test_stale_sockets_are_swept_and_other_files_kept(make_transport: MakeTransport, short_path: Path) -> None:
    folder = short_path / "run"
    folder.mkdir(mode=0o700)
    (folder / "note").touch()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(folder / "p2pd-old.sock"))
    transport, _ = await make_transport("a", runtime_dir=folder)
    assert not (folder / "p2pd-old.sock").exists()
    await transport.close()
    assert [entry.name for entry in folder.iterdir()] == ["note"]


async def test_a_start_that_is_cancelled_or_too_slow_leaves_nothing(
    make_transport: MakeTransport, short_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the connection and never says a word
        address = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{STRANGER}"
        for timeout_s in (0.01, 0.1, 0.3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await make_transport(f"a{timeout_s}", initial_peers=[address], runtime_dir=short_path / "run")
            assert list((short_path / "run").iterdir()) == []
        with pytest.raises(RunUnreachable, match="takes the connection and says nothing"):
            await make_transport("b", initial_peers=[address], runtime_dir=short_path / "run", startup_timeout_s=0.5)
        with pytest.raises(LackedForNow, match=r"p2pd was not ready within 0\.001 s: the machine is overloaded"):
            await make_transport("d", runtime_dir=short_path / "run", startup_timeout_s=0.001)
        assert list((short_path / "run").iterdir()) == []
    transport, _ = await make_transport("c", runtime_dir=short_path / "run")
    assert transport.addresses


async def test_nothing_of_hivemind_reaches_the_screen(
    make_transport: MakeTransport, capfd: pytest.CaptureFixture[str]
) -> None:
    _, client = await pair(make_transport)
    with pytest.raises(RequestRefused):
        await client.fetch(client.initial_peers[0].rsplit("/", 1)[1], "none", {}, max_body_bytes=0, timeout_s=60)  # type: ignore[arg-type]
    assert capfd.readouterr() == ("", "")


async def test_made_up_leases_have_nobody_dial_a_third_party_without_end(
    make_transport: MakeTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, _ = await make_transport("a")
    dialled: list[bytes] = []

    async def dial(_peer: PeerId, addresses: list[bytes], _timeout_s: float) -> None:
        dialled.extend(addresses)

    monkeypatch.setattr(transport.daemon, "dial", dial)
    refused = 0
    for number in range(200):
        fake = SigningKey(bytes([number]) * 32).peer_id
        try:
            await transport.connect(fake, [f"/ip4/192.0.2.1/tcp/{port}/p2p/{fake}" for port in (22, 25, 80, 443)])
        except PeerUnavailable:
            refused += 1
    assert refused > 0
    assert RANGE_LEADS <= len(dialled) < 2 * RANGE_LEADS
    known = SigningKey(b"k" * 32).peer_id
    transport.heard[known] = 0.0
    await transport.connect(known, [f"/ip4/192.0.2.1/tcp/1/p2p/{known}"])
