"""rounds.log on disk: the shell of durable.py. Appends and flushes; at start it reads, mends and compacts."""

import os
from contextlib import suppress
from pathlib import Path

from dilocox_peer.files import fsync_folder, replace_file, sweep_parts
from dilocox_peer.peer.rounds.durable import Durable, LoadedLog, encode_record, load_log
from dilocox_peer.types import Digest

COMPACT_BYTES = 16 * 1024 * 1024


class Journal:
    """The append-only log of one stage's rounds. Blocking: call it from a worker thread. One process owns the folder."""

    def __init__(self, path: Path, genesis: Digest) -> None:
        """Opens or makes the file; a torn, damaged or grown one is rewritten. Raises OSError."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        sweep_parts(path.parent)
        raw = path.read_bytes() if path.exists() else b""
        self.loaded: LoadedLog = load_log(raw, genesis)
        if self.loaded.reason or len(raw) > COMPACT_BYTES:
            # Rewritten, not cut: after damage in the middle the loaded votes are sealed, and a second restart that found
            # a merely shorter file would not know it.
            record = encode_record(self.loaded.durable) if self.loaded.durable is not None else b""
            replace_file(path, [record], mode=0o600)
        self._file = path.open("ab", buffering=0)  # what could not be written must not come out later
        self._size_bytes = os.fstat(self._file.fileno()).st_size
        fsync_folder(path.parent)

    def write(self, durable: Durable) -> None:
        """Appends one record; it is durable when this returns. Raises OSError: the log is as it was, and it may be tried again."""
        record = encode_record(durable)
        try:
            rest = memoryview(record)
            while rest:
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except OSError:
            with suppress(OSError):  # a torn record at the end is dropped by who reads it
                os.ftruncate(self._file.fileno(), self._size_bytes)
            raise
        self._size_bytes += len(record)

    def close(self) -> None:
        self._file.close()
