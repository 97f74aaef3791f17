"""The stage that this peer will hold: the one its volunteer asked for, or the one that needs it most.

Which that is, dht/assignment.py decides; here it is fed with what the machine has room for and what the directory says.
"""

import asyncio
import random
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf

from dilocox_peer.dht.assignment import (
    Claimant,
    better_stage,
    choose_stage,
    doubtful,
    eligible_stages,
    is_full,
    nearest,
    no_place,
    to_ask,
    where_they_are,
    without,
)
from dilocox_peer.dht.directory import Directory
from dilocox_peer.dht.records import Lease
from dilocox_peer.errors import ConfigError, LackedForNow, PeerUnavailable, ProtocolError, RunUnreachable
from dilocox_peer.events import Listener, Remark, StageClaimed
from dilocox_peer.invitation import all_loopback
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.memory import Room, StageSize
from dilocox_peer.network.lead_budget import TooManyLeads
from dilocox_peer.network.transport import RequestRefused, Transport
from dilocox_peer.peer.device import chosen_device, first_of, free_on, is_in_machine_memory, taken_on, whole_of
from dilocox_peer.peer.dialback import ADVICE, AGAIN_S
from dilocox_peer.peer.disk_room import stage_needs
from dilocox_peer.peer.footprint import available_memory, resident_bytes, whole_memory
from dilocox_peer.peer.planning.disk import DiskAllowed
from dilocox_peer.peer.presence import Presence
from dilocox_peer.peer.settings import Wish
from dilocox_peer.peer.stage_leases import leases_of_stages
from dilocox_peer.store.pull import STORE_SERVICE
from dilocox_peer.types import DIGEST_BYTES, PeerId

CLAIM_LOOKS, CLAIM_WAIT_S = 4, 1.5
MAX_TRIED, TRY_S = 24, 3.0  # peers that are asked before a claim, all at once: whether they are there, and how far
TRY_RELAYED_S = 8.0  # to reach one that nobody can dial: first its relay, and by way of that the peer itself


async def claim_stage(
    manifest: Manifest,
    wish: Wish,
    *,
    presence: Presence,
    directory: Directory,
    listener: Listener,
    held: int | None = None,
) -> int:
    """A stage of the run that fits here; announced already where others might be claiming it at the same moment. held: the one of
    which a state is on this disk.

    Raises ConfigError when there is none, or not room for the one that was asked for, LackedForNow where there may be later; RunUnreachable.
    """
    count, most = manifest.stages.count, manifest.limits.max_peers
    if wish.stage is not None and wish.stage >= count:
        raise ConfigError(f"--stage {wish.stage}: the run has stages 0 to {count - 1}")
    rooms = _rooms_and_needs(manifest, wish)
    disk, disk_needs = DiskAllowed(wish.max_disk_bytes), stage_needs(manifest)
    fits = fitting_stages(manifest, wish)
    insisted = 0 if count == 1 else wish.stage
    if insisted is None and not fits:
        least = next((needs for room, needs in rooms if not room.fitting(needs)), disk_needs)
        insisted = least.index(min(least))  # to say what is lacking
    if insisted is not None:
        for room, needs in rooms:
            if reason := room.why_not(insisted, needs):
                raise (LackedForNow if room.may_come(needs[insisted]) else ConfigError)(reason)
        if reason := disk.why_not(insisted, disk_needs):
            raise ConfigError(reason)
        stages = await _leases_of_all(directory, count)
        claimant = Claimant(presence.me, fits, presence.is_dialable, held, most=most)
        if is_full(stages, claimant, insisted):
            _hear(no_place(stages, claimant, [insisted], mode=manifest.admission.mode), manifest, listener)
        if not all_loopback(presence.transport.addresses):
            await presence.reachability.ask_entries(presence.transport)
        return insisted
    await _try_to_be_dialled(presence, await _leases_of_all(directory, count), listener)
    stages = await _leases_of_all(directory, count)  # that took seconds, and others have chosen meanwhile
    found = await ask_peers(presence, stages)
    near = near_peers(presence, stages, found)
    answered = {peer: seconds is not None for peer, seconds in found.items()}
    doubted = doubtful(
        without(stages, {presence.me}), answered, random.Random(presence.incarnation), mode=manifest.admission.mode
    )
    stages = without(stages, doubted)
    claimant = Claimant(presence.me, fits, presence.is_dialable, held, near, most)
    eligible = eligible_stages(stages, claimant)
    if eligible and all(is_full(stages, claimant, each) for each in eligible):
        _hear(no_place(stages, claimant, eligible, mode=manifest.admission.mode), manifest, listener)
        claimant = replace(claimant, most=sys.maxsize)
    stage, why = await _claim_by_need(presence, directory, stages, claimant, doubted)
    listener(StageClaimed(stage, why))
    return stage


def _hear(verdict: tuple[bool, str], manifest: Manifest, listener: Listener) -> None:
    """Raises LackedForNow where this peer is kept out: a place may be free later."""
    is_out, words = verdict
    if is_out:
        raise LackedForNow(f"no place in run {manifest.run.name!r}: {words}")
    listener(Remark(words))


def fitting_stages(manifest: Manifest, wish: Wish) -> list[int]:
    """Those there is room for, what this peer takes now counted as free."""
    on_disk = DiskAllowed(wish.max_disk_bytes).fitting(stage_needs(manifest))
    fitting = [room.fitting(needs) for room, needs in _rooms_and_needs(manifest, wish)]
    return [stage for stage in on_disk if all(stage in each for each in fitting)]


def _rooms_and_needs(manifest: Manifest, wish: Wish) -> list[tuple[Room, list[int]]]:
    """The machine's memory and, where a card trains, the card's, with what each stage needs of it."""
    device = chosen_device(first_of(wish.device))
    on_cpu = is_in_machine_memory(device)
    sizes = [StageSize.of(manifest, stage, base_bits=wish.base_bits) for stage in range(manifest.stages.count)]
    needs = [each.host_bytes(on_cpu=on_cpu, checkpointing=True) for each in sizes]
    free_bytes = available_memory() + resident_bytes()
    rooms = [(Room(free_bytes, wish.max_memory_bytes, whole_bytes=whole_memory()), needs)]
    if not on_cpu:
        on_card = [each.device_bytes(checkpointing=True) for each in sizes]
        on = Room(free_on(device) + taken_on(device), card=device, whole_bytes=whole_of(device))
        rooms.append((on, on_card))
    return rooms


def wants_checkpointing(manifest: Manifest, stage: int, wish: Wish) -> bool:
    """Whether activations are to be kept layer by layer: there is no room for all of them."""
    device, size = chosen_device(first_of(wish.device)), StageSize.of(manifest, stage, base_bits=wish.base_bits)
    if not is_in_machine_memory(device):
        return not Room(free_on(device)).fitting([size.device_bytes()])
    room = Room(available_memory() + resident_bytes(), wish.max_memory_bytes)
    return not room.fitting([size.host_bytes()])


def most_under_way(manifest: Manifest, stage: int, wish: Wish) -> int:
    """Micro-batches whose values there is room for at once. Asked for before the stage's memory is taken."""
    device, size = chosen_device(first_of(wish.device)), StageSize.of(manifest, stage, base_bits=wish.base_bits)
    on_cpu = is_in_machine_memory(device)
    if on_cpu:
        room = Room(available_memory() + resident_bytes(), wish.max_memory_bytes)
    else:
        room = Room(free_on(device), card=device)
    recomputes = wants_checkpointing(manifest, stage, wish)
    return size.most_under_way(room.most_bytes, on_cpu=on_cpu, checkpointing=recomputes)


async def _try_to_be_dialled(presence: Presence, stages: dict[int, list[Lease]], listener: Listener) -> None:
    if presence.reachability.at(presence.transport.addresses) == "relayed":  # known already
        return
    others = [lease for leases in stages.values() for lease in leases if lease.peer != presence.me]
    rng = random.Random(presence.incarnation)
    again_s = 0.0 if presence.has_relays else AGAIN_S
    found = await presence.reachability.try_out(presence.transport, others, rng, again_s=again_s)
    if found is False and not presence.is_dialable:
        listener(Remark(ADVICE))


async def _claim_by_need(
    presence: Presence,
    directory: Directory,
    stages: dict[int, list[Lease]],
    claimant: Claimant,
    doubted: Collection[PeerId],
) -> tuple[int, str]:
    """(stage, why) after those who chose at the same moment had time to be seen. stages: without the leases of those who are doubted."""
    held, others = claimant.held, without(stages, {claimant.peer})
    stage, why = choose_stage(others, claimant)
    if stage is None:
        raise LackedForNow(f"no stage of the run can be held here: {why}")
    rng = random.Random(presence.incarnation)
    for _ in range(CLAIM_LOOKS):
        await directory.announce(presence.lease(stage))
        if stage == held and not all(others.values()):
            break  # a run that comes together again: nobody moves before all had time to be there
        # Others may be choosing at this moment; what they announced is seen at the second look.
        await asyncio.sleep(CLAIM_WAIT_S * rng.uniform(0.5, 1.0))
        try:
            seen = without(await _leases_of_all(directory, len(stages)), doubted)
        except RunUnreachable:
            break  # announced it is; Takeover looks again
        better, reason = better_stage(seen, claimant, stage)
        if better is None:
            break
        await directory.leave()
        stage, why = better, reason
    return stage, why


async def ask_peers(presence: Presence, stages: Mapping[int, Sequence[Lease]]) -> dict[PeerId, float | None]:
    """What a way there and back takes, of some peers of each stage; None: it is not there. One that may not be dialled now is left out."""
    tried = to_ask(without(stages, {presence.me}), MAX_TRIED, random.Random(presence.incarnation))
    found = await asyncio.gather(*(_round_trip_s(presence.transport, lease) for lease in tried), return_exceptions=True)
    answers = dict[PeerId, float | None]()
    for lease, answer in zip(tried, found, strict=True):
        if isinstance(answer, BaseException) and not isinstance(answer, TooManyLeads):
            raise answer
        if not isinstance(answer, BaseException):
            answers[lease.peer] = answer
    return answers


def near_peers(
    presence: Presence, stages: Mapping[int, Sequence[Lease]], found: Mapping[PeerId, float | None]
) -> frozenset[PeerId]:
    """Those of our site where we name one; else those with short ways there and back, of those that were asked."""
    if presence.site:
        others = (lease for leases in stages.values() for lease in leases if lease.peer != presence.me)
        return frozenset(lease.peer for lease in others if lease.site == presence.site)
    return nearest({peer: seconds for peer, seconds in found.items() if seconds is not None})


async def _round_trip_s(transport: Transport, lease: Lease) -> float | None:
    """The shorter of two, of a question that every peer answers at once; infinite where it is there and does not answer in time, None where it is not
    reached. Raises TooManyLeads."""
    loop, seconds = asyncio.get_running_loop(), [inf]
    question = {"name": bytes(DIGEST_BYTES), "want": "outline"}
    within_s = TRY_RELAYED_S if lease.is_relayed else TRY_S
    try:
        async with asyncio.timeout(within_s):
            await transport.connect(lease.peer, lease.addresses, within_s)
    except TooManyLeads:
        raise
    except (PeerUnavailable, TimeoutError):
        return None
    with suppress(TimeoutError):  # a slow one has shown its key all the same: no made-up lease does
        try:
            async with asyncio.timeout(TRY_S):
                for _ in range(2):
                    began = loop.time()
                    with suppress(RequestRefused):  # that takes as long
                        await transport.fetch(
                            lease.peer, STORE_SERVICE, question, max_body_bytes=0, timeout_s=2 * TRY_S
                        )
                    seconds.append(loop.time() - began)
        except (PeerUnavailable, ProtocolError):
            return seconds[1] if len(seconds) > 1 else None
    return min(seconds)


async def _leases_of_all(directory: Directory, count: int) -> dict[int, list[Lease]]:
    """Raises RunUnreachable also where one stage is not told of: it would be taken for one that nobody can hold."""
    found = await leases_of_stages(directory, range(count))
    if missing := sorted(set(range(count)) - found.keys()):
        raise RunUnreachable(f"the directory does not tell who holds stage {missing[0]}; try again later")
    return where_they_are(found)
