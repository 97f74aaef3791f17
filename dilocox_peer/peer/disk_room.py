"""What `--max-disk` leaves a peer of a run: which stages it may hold, of how many others it keeps copies, how many shards of data."""

from dilocox_peer.manifest import Manifest
from dilocox_peer.peer.planning.disk import DiskAllowed, copy_bytes
from dilocox_peer.peer.planning.upkeep import StageNeeds, first_disk
from dilocox_peer.peer.settings import AtMost

USUAL_PEERS = 3  # of a stage, besides this one: with fewer it takes less, with more the watch over the disk says so (cli/disk_watch.py)


def stage_needs(manifest: Manifest) -> list[int]:
    """Bytes of disk of each stage, copies of others apart."""
    return [_with_copies(manifest, stage, 0) for stage in range(manifest.stages.count)]


def allowed(at_most: AtMost) -> DiskAllowed:
    return DiskAllowed(None if at_most.max_disk is None else int(at_most.max_disk * 1e9))


def copies_kept(manifest: Manifest, stage: int, at_most: AtMost) -> int:
    """Of how many other stages."""
    copied = StageNeeds.of(manifest, stage).copied
    return allowed(at_most).copies(_with_copies(manifest, stage, 0), copy_bytes(copied), at_most.backup_stages)


def shard_quota(manifest: Manifest, stage: int, at_most: AtMost) -> int | None:
    """Bytes for shards of data that were fetched; None: any number."""
    copies = copies_kept(manifest, stage, at_most) if manifest.stages.count > 1 else 0
    return allowed(at_most).left(_with_copies(manifest, stage, copies))


def _with_copies(manifest: Manifest, stage: int, copies: int) -> int:
    needs = StageNeeds.of(manifest, stage)
    whole = first_disk(manifest, needs, USUAL_PEERS)
    return whole + (copies - 1) * copy_bytes(needs.copied)
