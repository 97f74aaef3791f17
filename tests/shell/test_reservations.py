"""Reservations at a real relay, over a real p2pd."""

import asyncio

import pytest

from dilocox_peer.errors import PeerUnavailable, ProtocolError
from dilocox_peer.network.relay_choice import ENOUGH_BYTES
from dilocox_peer.network.reservations import Reservations, reserve
from tests.shell.conftest import MakeTransport


async def test_a_peer_is_reached_through_the_relay_that_has_it(make_transport: MakeTransport) -> None:
    relay, _ = await make_transport("relay", serves_as_relay=True)
    private, _ = await make_transport("private", initial_peers=relay.addresses)
    stranger, _ = await make_transport("stranger")
    got: list[bytes] = []
    private.set_message_handler(lambda _peer, raw: got.append(raw))
    reservations = Reservations(private)
    reservations.offer(relay.addresses)
    running = asyncio.create_task(reservations.run())
    try:
        async with asyncio.timeout(10):
            await reservations.changed.wait()
        assert reservations.held == (relay.peer_id,)
        assert reservations.addresses == (f"{relay.addresses[0]}/p2p-circuit/p2p/{private.peer_id}",)
        await stranger.connect(private.peer_id, reservations.addresses)
        await stranger.send(private.peer_id, b"x", 10)
        assert got == [b"x"]
        assert private.peer_id in await stranger.paths()  # relayed, and soon direct: on one machine p2pd finds the way
        assert (await private.paths())[relay.peer_id] == "direct"
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_bootstrap_has_the_large_limits(make_transport: MakeTransport) -> None:
    relay, _ = await make_transport("relay", serves_as_relay=True)
    private, _ = await make_transport("private", initial_peers=relay.addresses)
    limit, reason = await reserve(private, relay.peer_id, relay.addresses)
    assert reason == ""
    assert limit is not None
    assert limit.num_bytes >= ENOUGH_BYTES


async def test_a_relay_that_is_gone_is_told_as_such(make_transport: MakeTransport) -> None:
    relay, _ = await make_transport("relay", serves_as_relay=True)
    private, _ = await make_transport("private", initial_peers=relay.addresses)
    await relay.close()
    with pytest.raises((PeerUnavailable, ProtocolError)):
        await reserve(private, relay.peer_id, relay.addresses)
