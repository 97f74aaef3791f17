"""What others make of the tasks that keep a peer connected. Real p2pd processes."""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import pytest

from dilocox_peer.network.bulk import Reply
from dilocox_peer.peer.dialback import SERVICE, DialbackVerdict
from dilocox_peer.peer.reaching import Reaching
from dilocox_peer.types import PeerId

from .conftest import MakeTransport

pytestmark = pytest.mark.usefixtures("no_process_left")


async def test_an_answer_of_nonsense_ends_nobodys_stay(make_transport: MakeTransport) -> None:
    """A peer that was heard once and fell silent is asked whether it is there; a body in its answer, where none may be, ended the peer."""
    asked = asyncio.Event()

    async def answer(_peer: PeerId, _header: Mapping[str, Any]) -> Reply:
        asked.set()
        return Reply({}, [b"x"])

    victim, _ = await make_transport("victim")
    victim.set_message_handler(lambda _sender, _raw: None)
    hostile, _ = await make_transport("hostile", initial_peers=victim.addresses)
    await hostile.serve(SERVICE, answer, right=None)
    async with AsyncExitStack() as stack:
        verdict = DialbackVerdict(outgoing_only=False)
        reaching = Reaching(victim, verdict, look_now=asyncio.Event(), listener=lambda _event: None)
        task = reaching.start(stack)
        await hostile.send(victim.peer_id, b"hello", 5.0)
        async with asyncio.timeout(60.0):
            await asked.wait()
        done, _ = await asyncio.wait({task}, timeout=2.0)
        assert not done
