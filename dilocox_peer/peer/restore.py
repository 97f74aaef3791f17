"""Taking over a stage that nobody holds any more, from a copy that a peer of another stage has kept.

Only where this disk has no state of the stage and nobody of the stage answers with a chain: whoever lives knows more. When
somebody of it comes back later the heavier chain wins, as after any partition (peer/rounds/healing.py).
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from dilocox_peer.dht.directory import Directory
from dilocox_peer.dht.records import Lease
from dilocox_peer.errors import PeerUnavailable, ProtocolError, StateCorrupt
from dilocox_peer.events import Failed, Listener, StageRestored, StateFetchFailed
from dilocox_peer.manifest import Manifest
from dilocox_peer.peer.presence import Presence
from dilocox_peer.peer.state.backup import Annals, Backup, BackupStore
from dilocox_peer.peer.state.backup_exchange import Summary, fetch_chain, fetch_kept_state, fetch_summary
from dilocox_peer.peer.training.outer import AnchorState
from dilocox_peer.pipeline.model import layout_of
from dilocox_peer.signing import verify
from dilocox_peer.types import Layout

ASK_S = 5.0
MAX_ASKED = 32
RESTORE_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class _Source:
    """Who has a copy; lease None: our own disk."""

    summary: Summary
    lease: Lease | None

    def rank(self) -> tuple[int, int, bool]:
        """Lowest first: by the chain's weight, then the state's round, then what costs no transfer."""
        return -self.summary.weight, -self.summary.round, self.lease is not None


async def find_backup(
    manifest: Manifest,
    stage: int,
    own: BackupStore,
    *,
    presence: Presence,
    directory: Directory,
    listener: Listener,
) -> Backup | None:
    """The best copy of the stage that verifies; None if somebody of the stage lives, if it has not begun, or if there is none.

    own: our own copy, if there is one. Raises RunUnreachable.
    """
    of_stage = await directory.peers(stage)
    if any(await _summaries(presence, of_stage, stage)):
        return None
    others = [
        lease for other in range(manifest.stages.count) if other != stage for lease in await directory.peers(other)
    ]
    asked = random.Random(presence.incarnation).sample(others, min(len(others), MAX_ASKED))
    summaries = await _summaries(presence, asked, stage)
    sources = [_Source(summary, lease) for summary, lease in zip(summaries, asked, strict=True) if summary]
    kept = await asyncio.to_thread(own.load)
    if kept is not None:
        height, weight = kept.certificates[-1].value.height, kept.certificates[-1].value.weight
        sources.append(_Source(Summary(height, kept.state.round, weight), None))
    layout = layout_of(manifest, stage)
    for source in sorted(sources, key=_Source.rank):
        backup = (
            kept if source.lease is None else await _fetch(manifest, stage, source.lease, presence, layout, listener)
        )
        if backup is not None:
            donor = presence.me if source.lease is None else source.lease.peer
            listener(StageRestored(stage, backup.state.round, donor, backup.state.size_bytes))
            return backup
    if others and await _has_begun(presence, asked):
        listener(Failed(f"stage {stage}", "nobody holds its state any more, nobody kept a copy: it begins anew"))
    return None


async def _fetch(
    manifest: Manifest, stage: int, lease: Lease, presence: Presence, layout: Layout, listener: Listener
) -> Backup | None:
    annals = Annals(manifest, stage, verify)
    try:
        await fetch_chain(presence.transport, lease.peer, annals)
        state: AnchorState | None = await fetch_kept_state(
            presence.transport, lease.peer, annals, layout, RESTORE_TIMEOUT_S
        )
    except (PeerUnavailable, ProtocolError, StateCorrupt) as error:
        listener(StateFetchFailed(lease.peer, str(error)))
        return None
    return Backup(annals.up_to(state.head), state) if state is not None else None


async def _has_begun(presence: Presence, leases: Sequence[Lease]) -> bool:
    """Whether some of them have certified a round of their own stage."""
    own = await asyncio.gather(*(_summary(presence, lease, lease.stage) for lease in leases))
    return any(summary is not None and summary.round > 0 for summary in own)


async def _summaries(presence: Presence, leases: Sequence[Lease], stage: int) -> list[Summary | None]:
    return await asyncio.gather(*(_summary(presence, lease, stage) for lease in leases))


async def _summary(presence: Presence, lease: Lease, stage: int) -> Summary | None:
    """What one peer says that it has of the stage; None also when it does not answer in time."""
    if lease.peer == presence.me:
        return None
    try:
        await presence.transport.connect(lease.peer, lease.addresses, ASK_S)
        return await fetch_summary(presence.transport, lease.peer, stage, ASK_S)
    except (PeerUnavailable, ProtocolError):
        return None
