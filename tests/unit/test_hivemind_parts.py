"""hivemind's network, loaded alone, says nothing on a volunteer's terminal."""

import asyncio
import gc
import logging

import pytest

from dilocox_peer.network.hivemind_parts import load_hivemind


def test_a_search_that_is_called_off_leaves_no_words_on_the_terminal(caplog: pytest.LogCaptureFixture) -> None:
    """Of each of its workers asyncio said that a task was destroyed."""
    load_hivemind()
    from hivemind.dht.routing import DHTID
    from hivemind.dht.traverse import traverse_dht

    async def silent(_peer: object, _queries: object) -> None:
        await asyncio.sleep(60.0)

    async def scenario() -> None:
        nodes = [DHTID.generate() for _ in range(5)]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await traverse_dht(
                    queries=[DHTID.generate()],
                    initial_nodes=nodes,
                    beam_size=5,
                    num_workers=2,
                    queries_per_call=1,
                    get_neighbors=silent,
                )
        gc.collect()
        await asyncio.sleep(0)
        gc.collect()
        logging.getLogger("asyncio").error("what else there is")

    asyncio.run(scenario())
    assert [record.getMessage() for record in caplog.records] == ["what else there is"]
