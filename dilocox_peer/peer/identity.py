"""The key file of a peer (or of a run's owner): made on first use, private, and used by one process at a time.

The file is the form that p2pd reads, libp2p's protobuf PrivateKey{key_type: Ed25519, data: seed || public key}, written by
hand: 08 01 12 40 and 64 bytes. The PeerID is the public key, so keeping the file is keeping the peer. The lock is on the
file itself (a link to it is the same identity); a `.pid` file beside it only serves the error message.
"""

import errno
import fcntl
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from dilocox_peer.errors import ConfigError, disk_remedy, not_written
from dilocox_peer.paths import expanded
from dilocox_peer.signing import PUBLIC_KEY_BYTES, SEED_BYTES, SigningKey
from dilocox_peer.types import PeerId

_ED25519_PREFIX = bytes.fromhex("08011240")
_KEY_FILE_BYTES = len(_ED25519_PREFIX) + SEED_BYTES + PUBLIC_KEY_BYTES
_RSA_PREFIX = bytes.fromhex("0800")


class Identity:
    """An open, locked key file. Close it, or use it in a `with`; the lock also ends with the process."""

    def __init__(self, path: Path, key: SigningKey, lock_fd: int) -> None:
        self.path = path
        self.key = key
        self._lock_fd: int | None = lock_fd

    @property
    def peer_id(self) -> PeerId:
        return self.key.peer_id

    @classmethod
    def open(cls, path: str | Path, *, flag: str = "--identity-path") -> "Identity":
        """The identity in path, made if path does not exist. Raises ConfigError: not such a key, not private, in use, in nobody's
        home; DiskTakesNothing where one is to be made.

        flag: by which another path is given.
        """
        path = expanded(path)
        try:
            if not path.exists():
                create_key(path)
            fd = _open_file(path, flag)
        except FileExistsError:
            raise ConfigError(f"cannot use identity {path}: {path.parent} is not a directory") from None
        except OSError as error:
            if disk_remedy(error):
                raise not_written(f"identity {path} cannot be made", error) from None
            raise ConfigError(f"cannot use identity {path}: {_reason(error)}; pass another {flag}") from None
        try:
            key = _read(fd, path, flag)  # first: of a file that is no key, no other mode is asked for
            _check_private(fd, path)
            _lock(fd, path)
        except BaseException:
            os.close(fd)
            raise
        _write_pid(path)
        return cls(path, key, fd)

    def close(self) -> None:
        """Gives the lock back. May be called twice."""
        if self._lock_fd is not None:
            with suppress(OSError):
                _pid_path(self.path).unlink()  # before the lock goes: afterwards it may be another process's
            os.close(self._lock_fd)
            self._lock_fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"


def read_key(path: str | Path, *, flag: str) -> SigningKey:
    """The key in path, of somebody who only signs with it. Raises ConfigError: not there, not such a key, not private.

    Without the lock, which keeps two processes from being one peer of a network: a run's owner is none, and signs
    invitations while a bootstrap redeems others.
    """
    path = expanded(path)
    try:
        fd = _open_file(path, flag)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: pass the key that signed the run as {flag}") from None
    except OSError as error:
        raise ConfigError(f"cannot use identity {path}: {_reason(error)}; pass another {flag}") from None
    try:
        key = _read(fd, path, flag)
        _check_private(fd, path)
    finally:
        os.close(fd)
    return key


def encode_key(seed: bytes) -> bytes:
    """The bytes of a key file for a 32-byte Ed25519 seed."""
    return _ED25519_PREFIX + seed + SigningKey(seed).public_key


def decode_key(raw: bytes) -> SigningKey:
    """The key in the bytes of a key file. Raises ValueError with what is wrong with them."""
    if not raw:
        raise ValueError("is empty")
    if raw.startswith(_RSA_PREFIX):
        raise ValueError("holds an RSA key, as hivemind and Petals make them; this program uses Ed25519")
    if not raw.startswith(_ED25519_PREFIX) or len(raw) != _KEY_FILE_BYTES:
        raise ValueError("is no libp2p Ed25519 key file")
    key = SigningKey(raw[len(_ED25519_PREFIX) :][:SEED_BYTES])
    if not raw.endswith(key.public_key):
        raise ValueError("is damaged: its public key does not belong to its private key")
    return key


def create_key(path: Path) -> None:
    """A new key at path, unless another process was faster: then that one's stands."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(encode_key(secrets.token_bytes(SEED_BYTES)))
            file.flush()
            os.fsync(fd)
        with suppress(FileExistsError):
            hard_link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # else the name can be lost in a power cut, and the peer with it
    finally:
        os.close(folder)


def hard_link(source: Path, target: Path) -> None:
    """Gives source its final name without ever replacing a key: rename would, link does not."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links (FAT, some network and FUSE mounts)
        os.rename(source, target)


def _open_file(path: Path, flag: str) -> int:
    flags = os.O_CLOEXEC | os.O_NONBLOCK  # NONBLOCK: opening a named pipe must not hang
    try:
        fd = os.open(path, os.O_RDWR | flags)  # a lock over NFS needs write access
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise
        fd = os.open(path, os.O_RDONLY | flags)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ConfigError(f"identity {path} is no regular file: pass another {flag}")
    return fd


def _check_private(fd: int, path: Path) -> None:
    mode = os.fstat(fd).st_mode
    if mode & 0o077:
        hint = "; on a Windows drive that has no effect, keep it in your Linux home" if mode & 0o777 == 0o777 else ""
        raise ConfigError(f"identity {path} can be read by others: run `chmod 600 {path}`{hint}")


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _read_pid(path)
        by = f"process {holder}" if holder else "another process"
        raise ConfigError(
            f"identity {path} is in use by {by}: stop it, or pass another --name or --identity-path"
        ) from None
    except OSError as error:
        raise ConfigError(f"identity {path} cannot be locked ({_reason(error)}): keep it on a local disk") from None


def _read(fd: int, path: Path, flag: str) -> SigningKey:
    try:
        return decode_key(os.pread(fd, _KEY_FILE_BYTES + 1, 0))
    except ValueError as error:
        raise ConfigError(f"identity {path} {error}: pass another {flag}, a new key is made there") from None
    except OSError as error:
        raise ConfigError(f"identity {path} cannot be read: {_reason(error)}") from None


def _pid_path(path: Path) -> Path:
    return path.with_name(path.name + ".pid")


def _write_pid(path: Path) -> None:
    with suppress(OSError):
        _pid_path(path).write_text(f"{os.getpid()}\n", encoding="ascii")


def _read_pid(path: Path) -> int | None:
    try:
        return int(_pid_path(path).read_text(encoding="ascii")[:16])
    except (OSError, ValueError):
        return None


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
