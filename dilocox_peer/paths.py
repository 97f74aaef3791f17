"""Paths with `~` in them, on machines where nobody's home folder is known as well: a container's user that the system does not list."""

import os
import pwd
from contextlib import suppress
from pathlib import Path

from dilocox_peer.errors import ConfigError


def expanded(path: str | Path) -> Path:
    """With the folder that `~` or `~user` stands for. Raises ConfigError where there is none."""
    first, *others = Path(path).parts or (".",)
    try:
        return _home().joinpath(*others) if first == "~" else Path(path).expanduser()
    except RuntimeError:
        if first == "~":
            raise ConfigError("no home folder is known here: set HOME, or pass --home") from None
        raise ConfigError(f"{path}: no user of that name has a home folder here: write the whole path") from None


def with_tilde(path: Path) -> str:
    """As a person reads it: `~` for the home folder, if one is known."""
    try:
        home = _home()
    except (RuntimeError, ConfigError):
        return str(path)
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def _home() -> Path:
    """An empty HOME is none, as in cron tables and containers: pathlib takes it for the root of all files. A relative one would be another folder in each
    that the program is started in, and so would what the system lists for a user without one. Raises RuntimeError; ConfigError for a relative HOME."""
    if named := os.environ.get("HOME"):
        if not os.path.isabs(named):
            raise ConfigError(f"HOME is {named!r}, no whole path: set it, or pass --home")
        return Path(named)
    with suppress(KeyError):
        if os.path.isabs(listed := pwd.getpwuid(os.getuid()).pw_dir):
            return Path(listed)
    raise RuntimeError("no home folder")
