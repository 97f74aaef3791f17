"""Stores over real transports: a file from two peers, one of which is lost on the way."""

import asyncio
import random
from collections import Counter
from pathlib import Path

from dilocox_peer.network.transport import Transport, TransportLimits
from dilocox_peer.store.bundles import BUNDLED_BYTES, Bundles
from dilocox_peer.store.shelf import Shelf
from dilocox_peer.store.store import Store
from dilocox_peer.types import Digest, sha256

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


async def test_small_things_come_together_and_larger_ones_do_not(make_transport: MakeTransport, tmp_path: Path) -> None:
    small, large = [bytes((number,)) * 5000 for number in range(20)], bytes(BUNDLED_BYTES + 1)
    donor, _ = await make_transport("donor")
    shelf, served = Shelf(tmp_path / "things"), Counter[Digest]()
    for thing in (*small, b"", large):
        shelf.put(thing)
    await Store(donor, [shelf], on_served=lambda name, num_bytes: served.update({name: num_bytes})).serve()
    client, _ = await make_transport("client", initial_peers=donor.addresses)
    failed: list[str] = []
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        bundles = Bundles(
            client, lambda ask, name: tasks.create_task(ask, name=name), at_once=4, stall_s=10.0,
            on_failed=lambda _donor, why, _lied: failed.append(why),
        )  # fmt: skip
        names = [sha256(thing) for thing in (*small, b"", large, b"unknown")]
        found = await asyncio.gather(*(bundles.get(name, [donor.peer_id], BUNDLED_BYTES) for name in names))
    assert found == [*small, b"", None, None]
    assert not failed
    assert served == {sha256(thing): len(thing) for thing in (*small, b"")}
