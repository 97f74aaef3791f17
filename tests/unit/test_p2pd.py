"""What surrounds hivemind's bindings, without them."""

import asyncio
import itertools
from typing import Any

from dilocox_peer.network.p2pd import FairReader


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
