"""Where a peer of a run of adapters has its stage's frozen weights from: its own disk, the published model's folder, or peers.

They are a thing of the store, named by the hash in the manifest, and whoever has it serves it to the others.
"""

import asyncio
import random
from contextlib import suppress
from typing import TYPE_CHECKING

from dilocox_peer.dht.directory import Directory
from dilocox_peer.dht.records import Lease
from dilocox_peer.dht.turns import AskedInTurn
from dilocox_peer.errors import ConfigError, PeerUnavailable, StateCorrupt, ThingUnavailable
from dilocox_peer.events import Listener, Remark
from dilocox_peer.files import will_pass
from dilocox_peer.manifest import Manifest, PublishedSection
from dilocox_peer.model.architecture import frozen_layout_of
from dilocox_peer.model.frozen import FrozenBase, FrozenLayout, read_base
from dilocox_peer.model.memory import size
from dilocox_peer.network.endpoint import Endpoint
from dilocox_peer.store.shelf import Shelf
from dilocox_peer.store.store import Store
from dilocox_peer.types import Digest, PeerId

if TYPE_CHECKING:
    from dilocox_peer.model.weights import ModelFolder

PATIENCE_S = 60.0  # with peers that are starting, too
MOST_PATIENT = 10.0  # times that, while there are leases of peers that have not been asked yet
MAX_DONORS = 16
LOOK_S = 2.0
CONNECT_S = 5.0
FETCH_S = 24 * 3600.0


async def frozen_base(
    manifest: Manifest,
    stage: int,
    things: Shelf,
    model: "ModelFolder | None",
    endpoint: Endpoint,
    directory: Directory,
    listener: Listener,
    *,
    patience_s: float = PATIENCE_S,
) -> FrozenBase | None:
    """The stage's frozen weights, memory-mapped; None of a run that trains all parameters. model: its folder, if it is here.
    Raises ConfigError when nobody has them or the folder's are others, RunUnreachable, OSError."""
    layout, section = await asyncio.to_thread(frozen_layout_of, manifest, stage), manifest.model
    if layout is None or not isinstance(section, PublishedSection):
        return None
    name = Digest(bytes.fromhex(section.base[stage]))
    things.pin([name])
    if (base := await asyncio.to_thread(base_on, things, name, layout)) is not None:
        return base
    if model is not None:
        await asyncio.to_thread(put_base, things, name, layout, model, section)
    else:
        listener(
            Remark(
                f"the weights of {section.source} are not on this machine: asking the peers of stage {stage}, for "
                f"{patience_s:.0f} s; they are {size(layout.size_bytes)}"
            )
        )
        await _fetch(name, layout, things, stage, endpoint, directory, section, patience_s)
    base = await asyncio.to_thread(base_on, things, name, layout)
    if base is None:
        raise ConfigError(
            f"{things.folder} does not keep what is written to it: look at its disk, or pass another --home"
        )
    return base


def base_on(things: Shelf, name: Digest, layout: FrozenLayout) -> FrozenBase | None:
    """What a shelf has, looked through; None where that is not all of it. Blocking."""
    content = things.content(name)
    if content is None:
        return None
    try:
        for index in range(len(content.outline.chunks)):
            content.chunk(index)
        return FrozenBase.open(content.path, layout)
    except (StateCorrupt, OSError) as error:
        if not will_pass(error):
            things.forget(name)
        return None


def put_base(
    things: Shelf, name: Digest, layout: FrozenLayout, model: "ModelFolder", section: PublishedSection
) -> None:
    """Has a shelf hold what a published model's folder says. Blocking. Raises ConfigError, OSError."""
    from dilocox_peer.model.published import design_of

    before = things.held
    things.make_room_for(layout.size_bytes)
    written = things.write(lambda take: read_base(model, design_of(section), layout, take))
    if written != name:
        if written not in before:
            things.forget(written)
        raise ConfigError(
            f"{model.path}: its weights are not those that the run's adapters belong to (hash {written.hex()[:12]}, the run's "
            f"{name.hex()[:12]}): take {' '.join(filter(None, (section.source, section.revision)))}"
        )


async def _fetch(
    name: Digest,
    layout: FrozenLayout,
    things: Shelf,
    stage: int,
    endpoint: Endpoint,
    directory: Directory,
    section: PublishedSection,
    patience_s: float,
) -> None:
    store = Store(endpoint.transport, [things])
    loop = asyncio.get_running_loop()
    began = loop.time()
    deadline, turns = began + patience_s, AskedInTurn(random.Random(endpoint.incarnation))

    async def dial(lease: Lease) -> PeerId | None:
        with suppress(PeerUnavailable):
            await endpoint.transport.connect(lease.peer, lease.addresses, CONNECT_S)
            return lease.peer
        return None

    while True:
        others = [lease for lease in await directory.peers(stage) if lease.peer != endpoint.me]
        reached = await asyncio.gather(*map(dial, turns.take(others, endpoint.transport, MAX_DONORS)))
        donors = [peer for peer in reached if peer is not None]
        tried_s = loop.time()
        try:
            await store.fetch(name, donors=donors, max_bytes=layout.size_bytes, timeout_s=FETCH_S)
            return
        except (ThingUnavailable, TimeoutError):
            if loop.time() - tried_s > patience_s:  # somebody had part of it
                deadline = loop.time() + patience_s
            if loop.time() > (deadline if turns.were_all_asked(others) else began + MOST_PATIENT * patience_s):
                raise ConfigError(
                    f"no peer of stage {stage} has the weights beside the adapters, and they are not on this machine: pass --model "
                    f"with the folder of {' '.join(filter(None, (section.source, section.revision)))}"
                ) from None
        await asyncio.sleep(LOOK_S)
