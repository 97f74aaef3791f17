"""A file with what would else be typed as flags: a table for each command, a key for each flag, named like it.

    [join]
    link = "dilocox://..."
    threads = 4
    hours = "mon-fri 22:00-07:00"
    data = ["/home/me/texts"]

What is typed counts before the environment, the environment before the file. The file is $DILOCOX_CONFIG, or config.toml in
$XDG_CONFIG_HOME/dilocox-peer (home.py). Its values are taken exactly as the same flags' are; what is no flag is refused.
"""

import difflib
import math
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer

from dilocox_peer.errors import ConfigError

MAX_BYTES = 1 << 20


def read_config(path: Path, group: Callable[[], Any], *, is_named: bool) -> dict[str, dict[str, Any]]:
    """command -> parameter -> value, for click's default_map. group: gives the program's commands, of click. is_named: somebody gave this path, so
    it has to be there; a file that nobody named and that cannot be looked at counts as absent, which is told. Raises ConfigError."""
    try:
        raw = path.read_bytes()[: MAX_BYTES + 1]
    except (FileNotFoundError, NotADirectoryError):
        if is_named:
            raise ConfigError(f"{path} does not exist: DILOCOX_CONFIG names it") from None
        return {}
    except OSError as error:
        if isinstance(error, PermissionError) and not is_named:
            typer.echo(f"{path} is not readable for this user, so no settings are taken from there", err=True)
            return {}
        raise ConfigError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{path} is no file of settings: it has more than {MAX_BYTES} bytes")
    try:
        tables = tomllib.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None
    commands = group()
    return {command: _of_command(path, command, table, commands) for command, table in tables.items()}


def _of_command(path: Path, name: str, table: object, group: Any) -> dict[str, Any]:
    command = group.commands.get(name)
    if command is None:
        raise ConfigError(
            f"{path}: [{name}] is no command{_meant(name, group.commands)}; settings stand under one, as [join]"
        )
    if not isinstance(table, Mapping):
        raise ConfigError(f"{path}: {name} is a command, and no setting: write [{name}], and its settings below it")
    context = command.make_context(name, [], resilient_parsing=True)
    by_name = {_spelled(option): each for each in command.params for option in (*each.opts, each.name)}
    found = {}
    for key, value in table.items():
        parameter = by_name.get(_spelled(key))
        if parameter is None:
            raise ConfigError(f"{path}: [{name}] {key} is no flag of `{name}`{_meant(_spelled(key), by_name)}")
        try:
            typed = _as_typed(value)
        except ValueError:  # 0xFF...: TOML reads it, and Python writes no number of so many digits
            raise ConfigError(f"{path}: [{name}] {key}: a number of thousands of digits") from None
        if (parameter.multiple or parameter.nargs == -1) and not isinstance(value, list):
            raise ConfigError(f"{path}: [{name}] {key} = {value!r}: write a list, with brackets: {key} = [...]")
        values = value if isinstance(value, list) else [value]
        if any(isinstance(each, float) and not math.isfinite(each) for each in values):
            raise ConfigError(f"{path}: [{name}] {key} = {value!r}: give a number")
        try:
            parameter.process_value(context, typed)
        except typer.BadParameter as error:
            reason = " ".join(error.message.split())
            raise ConfigError(f"{path}: [{name}] {key} = {value!r}: {reason}") from None
        found[parameter.name] = typed
    return found


def _as_typed(value: Any) -> Any:
    """Numbers and paths as text, as they come from a terminal; switches and lists as they are."""
    if isinstance(value, list):
        return [_as_typed(each) for each in value]
    return value if isinstance(value, bool) else str(value)


def _spelled(name: str) -> str:
    return name.lstrip("-").replace("_", "-").lower()


def _meant(name: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    return f" (did you mean {near[0]}?)" if near else ""
