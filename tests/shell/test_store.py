"""Stores over real transports: a file from two peers, one of which is lost on the way."""

import asyncio
import random
from collections import Counter
from pathlib import Path

from dilocox_peer.network.transport import Transport, TransportLimits
from dilocox_peer.store.shelf import Shelf
from dilocox_peer.store.store import Store
from dilocox_peer.types import sha256

from .conftest import MakeTransport, until

THING = random.Random(2).randbytes(12_000_001)


async def test_a_file_comes_from_two_peers_and_whole_when_one_of_them_goes(
    make_transport: MakeTransport, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(THING)
    limits = TransportLimits(upload_bytes_per_s=4e6)
    donors, served = list[Transport](), Counter[str]()
    for name in ("a", "b"):
        initial = donors[0].addresses if donors else ()
        transport, _ = await make_transport(name, limits=limits, initial_peers=initial)
        store = Store(
            transport, [Shelf(tmp_path / name / "things")],
            on_served=lambda _name, num_bytes, who=name: served.update({who: num_bytes}),  # type: ignore[misc]
        )  # fmt: skip
        assert await store.add(tmp_path / "file") == sha256(THING)
        await store.serve()
        donors.append(transport)
    client, _ = await make_transport("client", initial_peers=donors[0].addresses)
    await client.connect(donors[1].peer_id, donors[1].addresses)
    me = Store(client, [Shelf(tmp_path / "client" / "things")])
    fetching = asyncio.create_task(
        me.fetch(sha256(THING), donors=[each.peer_id for each in donors], max_bytes=1 << 30, timeout_s=60)
    )
    await until(lambda: min(served["a"], served["b"]) >= 1_000_000)
    assert not fetching.done()
    await donors[1].close()
    path = await fetching
    assert path.read_bytes() == THING
    assert client.bandwidth.bytes_received < len(THING) + 1_000_000
