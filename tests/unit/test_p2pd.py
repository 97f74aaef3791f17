"""What surrounds hivemind's bindings, without them."""

import asyncio
import itertools
import socket
import threading
from contextlib import suppress
from typing import Any

import pytest

from dilocox_peer.invitation import parse_multiaddr
from dilocox_peer.network import p2pd
from dilocox_peer.network.p2pd import GREETING, MAX_LOOKED_UP, FairReader, greets
from dilocox_peer.signing import SigningKey


async def test_a_flood_in_the_buffer_does_not_keep_the_loop_from_going_on() -> None:
    stream = asyncio.StreamReader(limit=1 << 20)
    stream.feed_data(b"\x01x" * 1000)
    stream.feed_eof()
    read, at_turn = 0, list[Any]()

    async def take_all() -> None:
        nonlocal read
        reader = FairReader(stream)
        while not stream.at_eof():
            await reader.readexactly(1)
            await reader.readexactly(1)
            read += 1

    async def others() -> None:
        while not taking.done():
            at_turn.append(read)
            await asyncio.sleep(0)

    taking = asyncio.create_task(take_all())
    await others()
    assert read == 1000
    assert max(after - before for before, after in itertools.pairwise(at_turn)) <= 16


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (GREETING, "answers, but is not this peer (it was set up anew)"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://login.example\r\n\r\n", "is answered by a web server (this network may want a login"),
        (b"\x15\x03\x01\x00\x02\x02\x46", "answers, but not as a peer does (another program has the port; or this network may want a login"),
        (b"", "takes the connection and says nothing (another program has the port; or this network may want a login"),
    ],
    ids=["a peer", "a login page", "tls", "nothing"],
)  # fmt: skip
async def test_what_answers_in_a_peers_place_is_told(answer: bytes, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2pd, "DIAGNOSIS_TIMEOUT_S", 0.5)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(64)
        writer.write(answer)
        with suppress(ConnectionError):
            await reader.read()  # until the other end hangs up
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        address = parse_multiaddr(
            f"/ip4/127.0.0.1/tcp/{port}/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN", role="peer"
        )
        line = await p2pd.diagnose([address])
    assert said in line
    assert "\n" not in line


async def test_names_that_nobody_resolves_leave_threads_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease may name eight hosts whose server does not answer: each look-up keeps a thread, for much longer than it is waited for."""
    may_end = threading.Event()
    monkeypatch.setattr("dilocox_peer.network.p2pd.DIAL_S", 0.1)
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_args, **_options: may_end.wait(20.0) and [(0, 0, 0, "", ("127.0.0.1", 9))]
    )
    peer = SigningKey(bytes(32)).peer_id
    addresses = [parse_multiaddr(f"/dns4/h{number}.example/tcp/4001/p2p/{peer}", "lease") for number in range(40)]
    try:
        found = await asyncio.gather(*map(greets, addresses))
        assert found.count(False) == MAX_LOOKED_UP
        async with asyncio.timeout(10.0):
            assert await asyncio.to_thread(lambda: "done") == "done"
    finally:
        may_end.set()
