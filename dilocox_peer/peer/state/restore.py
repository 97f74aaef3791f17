"""Taking over a stage that nobody holds any more, from a copy that a peer of another stage has kept.

Only where this disk has no state of the stage and nobody of the stage answers with a chain: whoever lives knows more. When
somebody of it comes back later the better chain wins, as after any partition (peer/rounds/forks.py). What is said of a copy
decides nothing but whom to ask first: chains are fetched, verified and judged before a state is.
"""

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from dilocox_peer.dht.directory import Directory
from dilocox_peer.dht.records import Lease
from dilocox_peer.errors import PeerUnavailable, ProtocolError
from dilocox_peer.events import Failed, Listener
from dilocox_peer.events_of_states import StageRestored, StateFetchFailed
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.architecture import layout_of
from dilocox_peer.network.endpoint import Endpoint
from dilocox_peer.peer.state.backup import Annals, Backup, BackupStore
from dilocox_peer.peer.state.backup_exchange import Summary, fetch_chain, fetch_summary
from dilocox_peer.peer.state.statesync import Agreed, fetch_state
from dilocox_peer.signing import verify
from dilocox_peer.types import Digest, PeerId

ASK_S = 5.0
MAX_ASKED = 32
MAX_FETCHED = 8  # chains read, of those who claim the most
CHAIN_TIMEOUT_S = 60.0  # for one of them
RESTORE_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class _Source:
    """A peer that has a copy; lease None: our own disk."""

    summary: Summary
    lease: Lease | None

    def rank(self) -> tuple[int, bool]:
        """Lowest first: by the state's round as claimed, then what costs no transfer."""
        return -self.summary.round, self.lease is not None


async def find_backup(
    manifest: Manifest,
    stage: int,
    own: BackupStore,
    *,
    endpoint: Endpoint,
    directory: Directory,
    listener: Listener,
) -> Backup | None:
    """The best copy of the stage that verifies; None if somebody of the stage lives, if it has not begun, or if there is none.

    own: our own copy, if there is one. Raises RunUnreachable.
    """
    of_stage = await directory.peers(stage)
    if any(await _summaries(endpoint, of_stage, stage)):
        return None
    others = [
        lease for other in range(manifest.stages.count) if other != stage for lease in await directory.peers(other)
    ]
    asked = random.Random(endpoint.incarnation).sample(others, min(len(others), MAX_ASKED))
    summaries = await _summaries(endpoint, asked, stage)
    sources = [_Source(summary, lease) for summary, lease in zip(summaries, asked, strict=True) if summary]
    kept = await asyncio.to_thread(own.load)
    if kept is not None:
        height, weight = kept.certificates[-1].value.height, kept.certificates[-1].value.weight
        sources.append(_Source(Summary(height, kept.state.round, weight), None))
    sources = sorted(sources, key=_Source.rank)[:MAX_FETCHED]
    judged = await _judged(manifest, stage, sources, kept, endpoint, directory, listener)
    for source, annals in judged:
        backup = kept
        if source.lease is not None:
            donors = [source.lease.peer, *(each.lease.peer for each, _ in judged if each.lease and each is not source)]
            agreed = annals.proven_at(source.summary.round)
            backup = None if agreed is None else await _fetch(donors, agreed, annals, own, manifest, endpoint, listener)
        if backup is not None:
            donor = endpoint.me if source.lease is None else source.lease.peer
            listener(StageRestored(stage, backup.state.round, donor, backup.state.size_bytes))
            return backup
    if others and await _has_begun(endpoint, asked):
        listener(Failed(f"stage {stage}", "nobody holds its state any more, nobody kept a copy: it begins anew"))
    return None


async def _judged(
    manifest: Manifest,
    stage: int,
    sources: Sequence[_Source],
    kept: Backup | None,
    endpoint: Endpoint,
    directory: Directory,
    listener: Listener,
) -> list[tuple[_Source, Annals]]:
    """The sources whose chains verify, those first that are on the best of them, each with its own chain as it was read."""
    word = await directory.word(stage)
    checkpoint = None if word is None else word[0]
    read: list[tuple[_Source, Annals]] = []
    best = Annals(manifest, stage, verify, checkpoint)
    for source in sources:
        annals = Annals(manifest, stage, verify, checkpoint)
        try:
            if source.lease is not None:
                await fetch_chain(endpoint.transport, source.lease.peer, annals, CHAIN_TIMEOUT_S)
            elif kept is not None:
                annals.take(kept.certificates)
        except (PeerUnavailable, ProtocolError) as error:
            listener(StateFetchFailed(source.lease.peer if source.lease is not None else endpoint.me, str(error)))
            continue
        with suppress(ProtocolError):  # of a branch that counts less
            best.take(annals.certificates)
        read.append((source, annals))
    return sorted(read, key=lambda each: best.round_at(each[1].place.head) is None)


async def _fetch(
    donors: Sequence[PeerId],
    proven: tuple[Digest, bytes],
    annals: Annals,
    own: BackupStore,
    manifest: Manifest,
    endpoint: Endpoint,
    listener: Listener,
) -> Backup | None:
    """The state that a certificate of annals names, from all who kept the same one."""
    head, digest = proven
    agreed = Agreed(annals.round_at(head) or 0, head, digest)
    state = await fetch_state(
        endpoint.transport, donors, agreed, layout=layout_of(manifest, annals.stage), timeout_s=RESTORE_TIMEOUT_S,
        listener=listener, shelf=own.arrivals,
    )  # fmt: skip
    return Backup(annals.up_to(head), state) if state is not None else None


async def _has_begun(endpoint: Endpoint, leases: Sequence[Lease]) -> bool:
    """Whether some of them have certified a round of their own stage."""
    own = await asyncio.gather(*(_summary(endpoint, lease, lease.stage) for lease in leases))
    return any(summary is not None and summary.round > 0 for summary in own)


async def _summaries(endpoint: Endpoint, leases: Sequence[Lease], stage: int) -> list[Summary | None]:
    return await asyncio.gather(*(_summary(endpoint, lease, stage) for lease in leases))


async def _summary(endpoint: Endpoint, lease: Lease, stage: int) -> Summary | None:
    """What one peer says that it has of the stage; None also when it does not answer in time."""
    if lease.peer == endpoint.me:
        return None
    try:
        await endpoint.transport.connect(lease.peer, lease.addresses, ASK_S)
        return await fetch_summary(endpoint.transport, lease.peer, stage, ASK_S)
    except (PeerUnavailable, ProtocolError):
        return None
