"""Where a peer keeps its key and state on this machine. The only place, with main.py, that reads the environment."""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dilocox_peer.errors import ConfigError, not_written
from dilocox_peer.paths import expanded
from dilocox_peer.types import RunId

DEFAULT_NAME = "default"  # of a peer that is given none
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def default_home() -> Path:
    """$XDG_DATA_HOME/dilocox-peer, else ~/.local/share/dilocox-peer. Raises ConfigError."""
    return expanded(os.environ.get("XDG_DATA_HOME") or "~/.local/share") / "dilocox-peer"


def chosen_home(home: Path | None) -> Path | None:
    """What --home has to say where this environment is not, to mean the same; None where nobody has chosen a folder. Raises ConfigError."""
    if home is None and not os.environ.get("XDG_DATA_HOME"):
        return None
    return (home or default_home()).absolute()


def config_variables() -> dict[str, str]:
    """The variables by which this environment says where the file of settings is, with whole paths. Raises ConfigError."""
    path, is_named = config_path()
    if path is not None and is_named:
        return {"DILOCOX_CONFIG": str(path.absolute())}
    return {"XDG_CONFIG_HOME": str(config_home().absolute())} if os.environ.get("XDG_CONFIG_HOME") else {}


def config_path() -> tuple[Path | None, bool]:
    """The file of settings, and whether somebody has named it: $DILOCOX_CONFIG, else config.toml in $XDG_CONFIG_HOME/dilocox-peer; None
    where no home folder is known to look in. Raises ConfigError for one that is named."""
    if named := os.environ.get("DILOCOX_CONFIG"):
        return expanded(named), True
    try:
        return config_home() / "dilocox-peer" / "config.toml", False
    except ConfigError:
        return None, False


def config_home() -> Path:
    """$XDG_CONFIG_HOME, else ~/.config. Raises ConfigError."""
    return expanded(os.environ.get("XDG_CONFIG_HOME") or "~/.config")


@dataclass(frozen=True, slots=True)
class PeerHome:
    """The folder of one peer: its identity, its runtime files (sockets), and one folder for each run."""

    folder: Path
    identity_path: Path

    @classmethod
    def at(cls, home: Path | None, name: str, identity_path: Path | None = None) -> "PeerHome":
        """Raises ConfigError for a name that is no folder name, and where no home folder is known. Makes nothing yet."""
        if not _NAME.fullmatch(name) or name in {".", ".."}:
            raise ConfigError(f"--name {name!r}: use letters, digits, . _ and -, at most 64")
        folder = (home or default_home()) / "peers" / name
        return cls(folder, identity_path or folder / "identity.key")

    @property
    def name_flag(self) -> str:
        """What a command to this peer has to say beside its own name."""
        return "" if self.folder.name == DEFAULT_NAME else f" --name {self.folder.name}"

    def names_beside(self) -> list[str]:
        """The other names under the same --home, whether their peers run or not."""
        try:
            return sorted(each.name for each in self.folder.parent.iterdir() if each != self.folder and each.is_dir())
        except OSError:
            return []

    @property
    def tokenizers(self) -> Path:
        """Of all peers under the same --home."""
        return tokenizers_folder(self.folder.parent.parent)

    @property
    def runtime(self) -> Path:
        return self.folder / "runtime"

    def runtime_of(self, index: int) -> Path:
        """For a process with several network daemons."""
        return self.runtime if index == 0 else self.folder / f"runtime-{index}"

    def run_folder(self, run_id: RunId) -> Path:
        return self.folder / "runs" / run_id[:16]

    def make(self) -> None:
        """Creates the folder (0700). Raises ConfigError when it cannot be, DiskTakesNothing."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise not_written(f"{self.folder} cannot be made", error, "pass another --home") from None

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Nobody else has the folder meanwhile, whatever its identity: two that vote by one log may vote twice. Raises ConfigError: somebody has
        it; DiskTakesNothing."""
        path = self.folder / "in_use"
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise not_written(f"{path} cannot be made", error, "pass another --home") from None
        try:
            self._lock(lock)
            yield
        finally:
            os.close(lock)

    def _lock(self, file: int) -> None:
        """Raises ConfigError."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{self.folder} is in use by another peer: stop it, or pass another --name") from None
        except OSError as error:
            raise ConfigError(f"{self.folder} cannot be locked ({error.strerror}): keep it on a local disk") from None


def tokenizers_folder(home: Path | None) -> Path:
    """Where tokenizer files are kept, by hash."""
    return (home or default_home()) / "tokenizers"


def owner_key_path(owner_key: Path | None, home: Path | None) -> Path:
    return owner_key or (home or default_home()) / "owner.key"
