"""Fetches between two transports that go on the stream of the one before."""

import asyncio
from typing import Any

import pytest

from dilocox_peer.errors import ProtocolError
from dilocox_peer.network import fetches, serving
from dilocox_peer.network.doorkeeper import Budgeted
from dilocox_peer.network.transport import PeerGone, Reply, RequestRefused, Transport, TransportLimits
from dilocox_peer.types import PeerId

from .conftest import MakeTransport, until
from .peer_process import blob, serve_blob
from .test_transport import flat


class Pair:
    """client fetches of server. streams: that were opened for it."""

    def __init__(self, server: Transport, client: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server, self.client = server, client
        self.streams: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        open_stream = client.daemon.open_stream

        async def counted(*arguments: Any) -> Any:
            self.streams.append(stream := await open_stream(*arguments))
            return stream

        monkeypatch.setattr(client.daemon, "open_stream", counted)

    @property
    def opened(self) -> int:
        return len(self.streams)

    async def fetch(self, size: int, **options: Any) -> bytes:
        header, most = {"size_bytes": size}, options.pop("most", size)
        _, body = await self.client.fetch(
            self.server.peer_id, "blob", header, max_body_bytes=most, timeout_s=60, **options
        )
        return bytes(body)


@pytest.fixture
async def pair(make_transport: MakeTransport, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Pair:
    server, _ = await make_transport("server", limits=getattr(request, "param", TransportLimits()))
    client, _ = await make_transport("client", initial_peers=server.addresses)
    server.set_members(lambda peer: peer == client.peer_id)
    await server.serve("blob", serve_blob)
    return Pair(server, client, monkeypatch)


async def test_a_members_fetches_go_on_one_stream(pair: Pair) -> None:
    for size in (0, 1, 3_000_000, 0, 600_000, 7):
        assert await pair.fetch(size) == blob(size)
    assert pair.opened == 1
    await asyncio.gather(*(pair.fetch(100_000) for _ in range(3)))
    assert pair.opened == 3, "those at one time need one each"
    await asyncio.gather(*(pair.fetch(100_000) for _ in range(3)))
    assert pair.opened == 3
    await until(lambda: not pair.server.is_busy(pair.client.peer_id))  # a stream that is kept keeps nobody busy
    assert not pair.client.is_busy(pair.server.peer_id)


async def test_a_strangers_do_not(pair: Pair) -> None:
    pair.server.set_members(lambda _peer: False)
    for size in (10, 20, 30):
        assert await pair.fetch(size) == blob(size)
    assert pair.opened == 3


async def test_a_stream_that_was_closed_meanwhile_costs_nothing_but_another(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "KEPT_S", 0.05)
    for expected in (1, 2, 3):
        assert await pair.fetch(1000) == blob(1000)
        assert pair.opened == expected
        await until(pair.streams[-1][0].at_eof)


async def test_it_is_closed_when_nothing_is_fetched_for_long(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetches, "KEPT_S", 0.05)
    await pair.fetch(1000)
    await until(pair.streams[-1][1].transport.is_closing)
    await pair.fetch(1000)
    assert pair.opened == 2


async def test_after_a_body_that_was_not_wanted_to_its_end_another_is_opened(pair: Pair) -> None:
    async def none(_piece: bytes) -> bool:
        return False

    assert await pair.fetch(3_000_000, take=none) == b""
    with pytest.raises(ProtocolError):
        await pair.fetch(2000, most=1000)
    assert await pair.fetch(2000) == blob(2000)
    assert pair.opened == 3


async def test_a_fetch_that_is_cancelled_leaves_no_half_reply_for_the_next(pair: Pair) -> None:
    await pair.fetch(10)
    for _ in range(5):
        begun = asyncio.Event()

        async def slow(_piece: bytes, begun: asyncio.Event = begun) -> bool:
            begun.set()
            await asyncio.Event().wait()
            return True

        fetching = asyncio.create_task(pair.fetch(3_000_000, take=slow))
        await asyncio.wait_for(begun.wait(), 60)
        fetching.cancel()
        await asyncio.wait({fetching})
        assert await pair.fetch(1000) == blob(1000)
    await until(lambda: not pair.server.is_busy(pair.client.peer_id))


async def test_a_refusal_ends_the_stream(pair: Pair) -> None:
    async def refuse(peer: PeerId, _header: dict[str, Any]) -> Reply:
        raise ProtocolError(peer, "not here")

    await pair.server.serve("none", refuse)
    await pair.fetch(10)
    for _ in range(2):
        with pytest.raises(RequestRefused, match="not here"):
            await pair.client.fetch(pair.server.peer_id, "none", {}, max_body_bytes=0, timeout_s=60)
    await pair.fetch(10)
    assert pair.opened == 3, "and none but that"


@pytest.mark.parametrize("pair", [TransportLimits(allowed={Budgeted.STREAMS: flat(0.001, 3)})], indirect=True)
async def test_each_request_counts_as_a_stream_does(pair: Pair) -> None:
    for _ in range(3):
        await pair.fetch(10)
    assert pair.opened == 1
    with pytest.raises(PeerGone):
        await pair.fetch(10)
