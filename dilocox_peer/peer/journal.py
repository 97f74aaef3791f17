"""rounds.log on disk: the shell of durable.py. Appends and flushes; at start it reads, mends a torn end, and compacts."""

import os
from pathlib import Path

from dilocox_peer.peer.blobs import fsync_folder
from dilocox_peer.peer.durable import Durable, Loaded, encode_record, load_log
from dilocox_peer.types import Digest

COMPACT_BYTES = 16 * 1024 * 1024


class Journal:
    """The append-only log of one stage's rounds. Blocking: call it from a worker thread. One process owns the folder."""

    def __init__(self, path: Path, genesis: Digest) -> None:
        """Opens or makes the file; a torn last record is cut off, a grown log rewritten. Raises OSError."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        raw = path.read_bytes() if path.exists() else b""
        self.loaded: Loaded = load_log(raw, genesis)
        if self.loaded.durable is not None and len(raw) > COMPACT_BYTES:
            _rewrite(path, encode_record(self.loaded.durable))
        elif self.loaded.valid_bytes < len(raw):
            os.truncate(path, self.loaded.valid_bytes)
        self._file = path.open("ab")
        fsync_folder(path.parent)

    def write(self, durable: Durable) -> None:
        """Appends one record; it is durable when this returns."""
        self._file.write(encode_record(durable))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _rewrite(path: Path, record: bytes) -> None:
    temporary = path.with_suffix(".new")
    with temporary.open("wb") as file:
        file.write(record)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    fsync_folder(path.parent)
