"""Reservations at a real relay, and what it passes on, over real p2pds."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import base58
import pytest

from dilocox_peer.errors import PeerUnavailable, ProtocolError
from dilocox_peer.network import bulk, relay_protocol, relaying
from dilocox_peer.network.relay_desk import BURST_S, MOST_PIECE_BYTES
from dilocox_peer.network.relay_protocol import RelayStatus
from dilocox_peer.network.relaying import Relay
from dilocox_peer.network.reservations import Reservations, reserve
from dilocox_peer.network.transport import Reply, Transport
from dilocox_peer.types import PeerId
from tests.shell.conftest import MakeTransport, until

NOWHERE = ("/ip4/127.0.0.1/tcp/1",)  # announced by who is not to be dialled
PLENTY = 1e9

MakeRelay = Callable[..., Awaitable[tuple[Transport, Relay]]]


@pytest.fixture
async def make_relay(make_transport: MakeTransport) -> AsyncIterator[MakeRelay]:
    async with AsyncExitStack() as stack:

        async def make(name: str = "relay", bytes_per_s: float = PLENTY, is_open: bool = True) -> Any:
            transport, _ = await make_transport(name)
            relay = Relay(transport, bytes_per_s, is_open=lambda: is_open)
            stack.push_async_callback(relay.close)
            await relay.serve()
            return transport, relay

        yield make


async def test_a_peer_is_reached_through_the_relay_that_has_it(
    make_transport: MakeTransport, make_relay: MakeRelay
) -> None:
    relay, at_relay = await make_relay()
    private, _ = await make_transport("private", initial_peers=relay.addresses, announce_maddrs=NOWHERE)
    stranger, _ = await make_transport("stranger", announce_maddrs=NOWHERE)
    got: list[bytes] = []
    private.set_message_handler(lambda _peer, raw: got.append(raw))
    reservations = Reservations(private)
    reservations.offer(relay.addresses)
    running = asyncio.create_task(reservations.run())
    try:
        async with asyncio.timeout(60):
            await reservations.changed.wait()
        assert reservations.held == (relay.peer_id,)
        assert reservations.addresses == (f"{relay.addresses[0]}/p2p-circuit/p2p/{private.peer_id}",)
        await stranger.connect(private.peer_id, reservations.addresses)
        await stranger.send(private.peer_id, b"x", 30)
        assert got == [b"x"]
        assert (await stranger.paths())[private.peer_id] == "relayed"
        assert (await private.paths())[relay.peer_id] == "direct"
        assert (at_relay.num_reserved, at_relay.num_circuits) == (1, 1)
        assert at_relay.num_bytes > 0
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_relay_whose_connection_is_lost_is_asked_at_once_and_its_return_is_told(
    make_transport: MakeTransport, make_relay: MakeRelay
) -> None:
    relay, _ = await make_relay()
    private, _ = await make_transport("private", initial_peers=relay.addresses, announce_maddrs=NOWHERE)
    regained: list[PeerId] = []
    reservations = Reservations(private, on_regained=regained.append)
    reservations.offer(relay.addresses)
    running = asyncio.create_task(reservations.run())
    try:
        await until(lambda: reservations.held == (relay.peer_id,))
        reservations.look(())  # it was not connected with at an earlier look
        reservations.look(await private.paths())
        await private.hang_up(relay.peer_id)
        reservations.look(())
        await until(lambda: bool(regained))
        reservations.look(await private.paths())
        assert relay.peer_id in await private.paths()
        assert regained == [relay.peer_id]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_the_owners_budget_holds_for_what_is_passed_on(
    make_transport: MakeTransport, make_relay: MakeRelay
) -> None:
    rate, body = 500_000.0, bytes(1_500_000)
    relay, at_relay = await make_relay(bytes_per_s=rate)
    private, _ = await make_transport("private", initial_peers=relay.addresses, announce_maddrs=NOWHERE)
    stranger, _ = await make_transport("stranger", announce_maddrs=NOWHERE)

    async def answer(_peer: PeerId, _header: dict[str, Any]) -> Reply:
        return Reply({}, [body])

    await private.serve("thing", answer)
    assert (await reserve(private, relay.peer_id, relay.addresses))[1] == ""
    began = time.monotonic()
    await stranger.connect(private.peer_id, [f"{relay.addresses[0]}/p2p-circuit/p2p/{private.peer_id}"])
    _, got = await stranger.fetch(private.peer_id, "thing", {}, max_body_bytes=len(body), timeout_s=60)
    assert bytes(got) == body
    assert len(body) < at_relay.num_bytes
    assert at_relay.num_bytes <= rate * (time.monotonic() - began + BURST_S) + MOST_PIECE_BYTES


async def asked(of: Transport, relay: Transport, request: bytes) -> bytes:
    """What the relay answers to a request, without its length; empty: it says nothing."""
    answer = b""
    reader, writer = await of.open_stream(relay.peer_id, relay_protocol.PROTOCOL, 30)
    try:
        writer.write(request)
        async with asyncio.timeout(60):
            answer = await reader.read(1024)
    finally:
        writer.transport.abort()
    return answer[1:]


def connecting(target: PeerId) -> bytes:
    name: bytes = base58.b58decode(target)
    peer = b"\x0a" + bytes([len(name)]) + name
    message = b"\x08\x01\x12" + bytes([len(peer)]) + peer
    return bytes([len(message)]) + message


async def test_a_relay_passes_on_to_nobody_who_did_not_ask_for_it(
    make_transport: MakeTransport, make_relay: MakeRelay
) -> None:
    relay, at_relay = await make_relay()
    one, _ = await make_transport("one", initial_peers=relay.addresses)
    other, _ = await make_transport("other", initial_peers=relay.addresses)
    refused = relay_protocol.answered(RelayStatus.NO_RESERVATION)[1:]
    assert await asked(one, relay, connecting(other.peer_id)) == refused
    assert await asked(one, relay, connecting(relay.peer_id)) == refused
    assert await asked(one, relay, b"\x02\x08\x09") == relay_protocol.answered(RelayStatus.MALFORMED)[1:]
    assert await asked(one, relay, b"\xff\xff\xff") == relay_protocol.answered(RelayStatus.MALFORMED)[1:]
    assert at_relay.num_circuits == 0


@pytest.mark.parametrize("heard_s", [60.0, 0.2])
async def test_an_answer_is_not_overtaken_by_the_end_of_its_stream(
    make_transport: MakeTransport, make_relay: MakeRelay, monkeypatch: pytest.MonkeyPatch, heard_s: float
) -> None:
    """The relay ends the stream once the asker has, or does not in time."""
    monkeypatch.setattr(bulk, "HEARD_S", heard_s)
    relay, _ = await make_relay()
    one, _ = await make_transport("one", initial_peers=relay.addresses)
    reader, writer = await one.open_stream(relay.peer_id, relay_protocol.PROTOCOL, 30)
    try:
        writer.write(connecting(relay.peer_id))
        answer = relay_protocol.answered(RelayStatus.NO_RESERVATION)
        async with asyncio.timeout(60):
            assert await reader.readexactly(len(answer)) == answer
        if heard_s < 1:
            async with asyncio.timeout(60):
                assert await reader.read() == b""
        else:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await reader.read()
    finally:
        writer.transport.abort()


async def test_a_target_that_left_costs_the_relay_no_circuit(
    make_transport: MakeTransport, make_relay: MakeRelay
) -> None:
    relay, at_relay = await make_relay()
    one, _ = await make_transport("one", initial_peers=relay.addresses, announce_maddrs=NOWHERE)
    private, _ = await make_transport("private", initial_peers=relay.addresses, announce_maddrs=NOWHERE)
    assert (await reserve(private, relay.peer_id, relay.addresses))[1] == ""
    circuit = [f"{relay.addresses[0]}/p2p-circuit/p2p/{private.peer_id}"]
    await one.connect(private.peer_id, circuit)
    assert at_relay.num_circuits == 1
    await private.close()
    await until(lambda: at_relay.num_circuits == 0)
    assert await asked(one, relay, connecting(private.peer_id)) == relay_protocol.answered(RelayStatus.NOT_REACHED)[1:]
    assert at_relay.num_circuits == 0


async def test_a_circuit_that_passes_nothing_gives_its_place_back(
    make_transport: MakeTransport, make_relay: MakeRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a few who open circuits and say nothing hold all places for as long as they like."""
    monkeypatch.setattr(relaying, "IDLE_S", 0.5)
    relay, at_relay = await make_relay()
    private, _ = await make_transport("private", initial_peers=relay.addresses, announce_maddrs=NOWHERE)
    one, _ = await make_transport("one", announce_maddrs=NOWHERE)
    assert (await reserve(private, relay.peer_id, relay.addresses))[1] == ""
    await one.connect(private.peer_id, [f"{relay.addresses[0]}/p2p-circuit/p2p/{private.peer_id}"])
    await until(lambda: at_relay.num_bytes > 0 and at_relay.num_circuits == 0)


async def test_who_passes_nobody_on_refuses_and_p2pd_does_not_do_it_instead(
    make_transport: MakeTransport, make_relay: MakeRelay
) -> None:
    closed, _ = await make_relay("closed", is_open=False)
    private, _ = await make_transport("private", initial_peers=closed.addresses)
    limit, reason = await reserve(private, closed.peer_id, closed.addresses)
    assert limit is None
    assert reason == "it refuses reservations"


async def test_a_relay_that_is_gone_is_told_as_such(make_transport: MakeTransport, make_relay: MakeRelay) -> None:
    relay, _ = await make_relay()
    private, _ = await make_transport("private", initial_peers=relay.addresses)
    await relay.close()
    with pytest.raises((PeerUnavailable, ProtocolError)):
        await reserve(private, relay.peer_id, relay.addresses)
