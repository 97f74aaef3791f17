"""Where a peer of a published model takes its stage's weights from when it has no state of its own: files, or other peers.

With the model's files on this machine the first state is read from them. Without, it comes from peers of the stage: the
newest state that their certificates name, or, before the first of them, the state that the run began with, whose hash is
in the manifest. What a donor says decides nothing.
"""

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dilocox_peer.dht.directory import Directory
from dilocox_peer.errors import ConfigError
from dilocox_peer.events import Listener, Remark
from dilocox_peer.flags import check_base_bits
from dilocox_peer.manifest import Manifest, PublishedSection
from dilocox_peer.model.frozen import FrozenBase
from dilocox_peer.model.quantized import library
from dilocox_peer.network.endpoint import Endpoint
from dilocox_peer.peer.state.backup import Backup
from dilocox_peer.peer.state.base import frozen_base
from dilocox_peer.peer.state.keeper import Keeper
from dilocox_peer.peer.state.survey import Survey
from dilocox_peer.peer.state.trial import try_out

if TYPE_CHECKING:
    from dilocox_peer.model.weights import ModelFolder

PATIENCE_S = 60.0  # with peers that are starting, too
LOOK_S = 2.0


def folder_of(manifest: Manifest, given: Path | None) -> "ModelFolder | None":
    """The folder with the run's model on this machine: the one given, or the one it was published from. None: there is
    none, or the run needs none. Raises ConfigError when the one given is of another model."""
    section = manifest.model
    if not isinstance(section, PublishedSection):
        if given is not None:
            raise ConfigError(f"--model {given}: this run's model starts from a seed; leave --model out")
        return None
    from dilocox_peer.model.weights import open_folder, place_of

    if (place := place_of(section, given)) is None:
        return None
    try:
        folder = open_folder(place)
    except ConfigError:
        if given is None:  # a folder of that name that is another thing here
            return None
        raise
    if folder.config_json == section.config:
        return folder
    if given is not None:
        raise ConfigError(f"--model {given}: its config.json is not that of the run's model: take {section.source}")
    return None


async def begin(
    manifest: Manifest,
    stage: int,
    keeper: Keeper,
    model: "ModelFolder | None",
    endpoint: Endpoint,
    directory: Directory,
    listener: Listener,
    *,
    device: str,
    bits: int = 0,
) -> FrozenBase | None:
    """Has the keeper hold a state of the stage; gives what stays as it is beside it, in a run of adapters, to be computed with in so many
    bits. model: the published model's folder, if it is here. Raises ConfigError when nobody has them or device computes another model, RunUnreachable,
    OSError."""
    check_bits(manifest, bits)
    if not keeper.has_state:
        await fetch_beginning(manifest, stage, keeper, endpoint, directory, listener)
    base = await frozen_base(manifest, stage, keeper.things, model, endpoint, directory, listener)
    await asyncio.to_thread(try_out, manifest, stage, keeper, model, base, device)
    return None if base is None else replace(base, bits=bits)


def check_bits(manifest: Manifest, bits: int) -> None:
    """Raises ConfigError where frozen weights cannot be held in so many bits; 0: as they are."""
    if not bits:
        return
    check_base_bits(bits)
    if not isinstance(manifest.model, PublishedSection) or not manifest.model.lora_rank:
        raise ConfigError(f"--base-bits {bits}: this run trains all parameters; leave it out")
    library()


async def fetch_beginning(
    manifest: Manifest,
    stage: int,
    keeper: Keeper,
    endpoint: Endpoint,
    directory: Directory,
    listener: Listener,
    *,
    patience_s: float = PATIENCE_S,
) -> None:
    """Has the keeper begin with a state of the stage from its peers. Raises ConfigError when nobody has one, RunUnreachable."""
    section = manifest.model
    assert isinstance(section, PublishedSection), "others are made from the seed"
    listener(
        Remark(
            f"the weights of {section.source} are not on this machine: asking the peers of stage {stage}, for {patience_s:.0f} s"
        )
    )
    survey = Survey(
        manifest, stage, transport=endpoint.transport, directory=directory, listener=listener, rng=random.Random()
    )
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    while True:
        await survey.look()
        newest = [*survey.states()]
        if (tip := await survey.tip()) is not None and tip.round > 0:
            newest.append(tip)  # nobody has certified its state yet: after those that are
        for agreed in newest:
            if (state := await survey.fetch(agreed)) is not None:
                await asyncio.to_thread(keeper.adopt, Backup(survey.annals.up_to(state.head), state), me=endpoint.me)
                return
        if not newest and (state := await survey.fetch_first(bytes.fromhex(section.genesis[stage]))) is not None:
            await asyncio.to_thread(keeper.begin, state)
            return
        if loop.time() > deadline:
            raise ConfigError(
                f"no peer of stage {stage} has its weights, and they are not on this machine: pass --model with the folder of "
                f"{' '.join(filter(None, (section.source, section.revision)))}"
            )
        await asyncio.sleep(LOOK_S)
