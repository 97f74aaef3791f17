"""Contributions on disk, named by their hash: what an ACK promises to hold, and what others fetch from us.

A blob is durable (fsync of file and folder) before `put` returns. Reading verifies the hash again, so a damaged disk
shows as a missing blob, never as a wrong one.
"""

import os
from pathlib import Path

from dilocox_peer.types import DIGEST_BYTES, Digest, sha256


class BlobStore:
    """A folder of files named by the hex of their SHA-256. Blocking: call it from a worker thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._held = {Digest(bytes.fromhex(path.name)) for path in folder.iterdir() if _is_blob_name(path.name)}
        for path in folder.iterdir():
            if path.name.endswith(".part"):  # of a process that was killed in mid-write
                path.unlink(missing_ok=True)

    @property
    def held(self) -> frozenset[Digest]:
        return frozenset(self._held)

    def put(self, blob: bytes | bytearray) -> Digest:
        """Stores the blob durably; returns its digest. Storing it twice costs nothing."""
        digest = sha256(blob)
        if digest in self._held:
            return digest
        path = self._path(digest)
        part = path.with_name(path.name + ".part")
        with part.open("wb") as file:
            file.write(blob)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        fsync_folder(self._folder)
        self._held.add(digest)
        return digest

    def get(self, digest: Digest) -> bytes | None:
        """The blob, or None when it is not here (or no longer what its name says)."""
        if digest not in self._held:
            return None
        try:
            blob = self._path(digest).read_bytes()
        except OSError:
            self._held.discard(digest)
            return None
        if sha256(blob) != digest:
            self.forget(digest)
            return None
        return blob

    def forget(self, digest: Digest) -> None:
        self._held.discard(digest)
        self._path(digest).unlink(missing_ok=True)

    def _path(self, digest: Digest) -> Path:
        return self._folder / digest.hex()


def _is_blob_name(name: str) -> bool:
    return len(name) == 2 * DIGEST_BYTES and all(char in "0123456789abcdef" for char in name)


def fsync_folder(folder: Path) -> None:
    """Makes renames and new names in folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
