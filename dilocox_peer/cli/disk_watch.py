"""Looks now and then how much of the disk a peer takes, all its runs and logs together, and has it leave beyond `--max-disk`."""

import asyncio
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dilocox_peer.events import Listener, Remark
from dilocox_peer.peer.planning.disk import GB, DiskAllowed, DiskUse, least_allowed_gb

LOOK_S = 30.0


BLOCK_BYTES = 512  # of st_blocks, whatever the disk's are


def folder_bytes(folder: Path) -> int:
    """That all files in it take of the disk, each once: of a partial file what has come. Its runs may be a link to another disk, as may each
    of them; other links are not followed. Files that come and go meanwhile may be missed."""
    total, seen = 0, set[tuple[int, int]]()
    for top in (folder, *_links(folder / "runs")):
        for root, _folders, files in os.walk(top):  # goes by folders that have gone
            for name in files:
                with suppress(OSError):
                    found = (Path(root) / name).stat(follow_symlinks=False)
                    if stat.S_ISREG(found.st_mode) and (found.st_dev, found.st_ino) not in seen:
                        seen.add((found.st_dev, found.st_ino))
                        total += found.st_blocks * BLOCK_BYTES
    return total


def _links(runs: Path) -> list[Path]:
    """Of runs and what is in it those that are links, where they lead."""
    try:
        found = [each for each in (runs, *runs.iterdir()) if each.is_symlink()]
        return [each.resolve() for each in found]
    except (OSError, RuntimeError):  # there is nothing yet; a link to itself
        return []


def drop_left(folder: Path) -> int:
    """Removes what is least missed, the oldest branch that was left in any run (peer/state/left.py); returns how many bytes that were."""
    branches = [each for each in folder.glob("runs/*/left/*") if each.is_dir()]
    if not branches:
        return 0
    oldest = min(branches, key=lambda each: each.stat().st_mtime)
    num_bytes = folder_bytes(oldest)
    shutil.rmtree(oldest, ignore_errors=True)
    return num_bytes - folder_bytes(oldest)  # a disk may refuse


async def keep_within(
    folder: Path, max_gb: float, leave: Callable[[str], None], listener: Listener, *, look_s: float = LOOK_S
) -> None:
    """Until cancelled, or until it has called leave, with a reason. folder: the peer's."""
    use = DiskUse(DiskAllowed(int(max_gb * GB)))
    while True:
        taken = await asyncio.to_thread(folder_bytes, folder)
        while use.allowed.is_over(taken) and (gone := await asyncio.to_thread(drop_left, folder)):
            listener(
                Remark(f"{gone / 1e6:,.0f} MB of a branch that was left are dropped: --max-disk allows {max_gb:g} GB")
            )
            taken -= gone
        if use.take(taken):
            leave(
                f"what it keeps takes {least_allowed_gb([taken]):.2f} GB of disk, --max-disk allows {max_gb:g}: "
                f"allow {least_allowed_gb([6 * taken // 5]):.2f}, or remove what is not needed of {folder}"
            )
            return
        await asyncio.sleep(look_s)
