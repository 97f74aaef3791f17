"""A command's flags, read from the one frozen dataclass that declares them (dilocox_peer/flags.py): typer's parameters are
made of its fields, and what was typed makes the dataclass.

A field that is such a dataclass itself stands for its fields, at its place. A field `tuple[X, ...]` is an option that may
repeat, whose default counts when it is not given.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields, is_dataclass
from types import GenericAlias
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperGroup

from dilocox_peer.errors import ConfigError
from dilocox_peer.flags import Flag, Positional

PREFIX = "DILOCOX"  # of the environment variables
MAX_FLOAT = 1e9  # of any flag, whatever its unit: what is more overflows where it is turned into bytes or times

MAX_USAGE_CHARS = 500  # of what is said about an argument, which may be a whole file by mistake
_UsageError: Any = typer.BadParameter.__base__  # of click, or of typer's own copy of it

T = TypeVar("T")
Run = Callable[[T], None]


class Commands(TyperGroup):
    """The program's commands. What was typed wrong is told without all of an argument that has no end."""

    def make_context(self, *arguments: Any, **named: Any) -> Any:
        with _cut_short():
            return super().make_context(*arguments, **named)

    def invoke(self, ctx: Any) -> Any:
        with _cut_short():
            return super().invoke(ctx)


@contextmanager
def _cut_short() -> Iterator[None]:
    try:
        yield
    except _UsageError as error:
        if len(error.message) > MAX_USAGE_CHARS:
            error.message = f"{error.message[:MAX_USAGE_CHARS]}..."
        raise


def command(app: typer.Typer, *, hidden: bool = False) -> Callable[[Run[T]], Run[T]]:
    """Makes a command of a function of its flags, named and described like the function."""

    def register(run: Run[T]) -> Run[T]:
        [flags] = [hint for name, hint in get_type_hints(run).items() if name != "return"]

        def carry_out(**typed: object) -> None:
            run(made(flags, typed))

        parameters = list(_parameters(flags, f"{PREFIX}_{run.__name__.upper()}"))
        carry_out.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer asks inspect for it
        app.command(run.__name__, help=run.__doc__, hidden=hidden)(carry_out)
        return run

    return register


def made(flags: type[T], typed: Mapping[str, object]) -> T:
    """The dataclass of what was typed; typed: by the names of fields. Raises ConfigError for a number that nothing can be reckoned with."""
    values: dict[str, object] = {}
    for field, hint, mark in _declared(flags):
        if mark is None:
            values[field.name] = made(hint, typed)
        elif _is_many(hint):
            given = typed[field.name]
            values[field.name] = tuple(given) if isinstance(given, list | tuple) and given else field.default
        else:
            value = values[field.name] = typed[field.name]
            if isinstance(value, float) and not abs(value) <= MAX_FLOAT:  # NaN too, which no `least` refuses
                name = mark.name if isinstance(mark, Flag) and mark.name else field.name.replace("_", "-")
                raise ConfigError(f"--{name} {value:g}: give a number, at most {MAX_FLOAT:g}")
    return flags(**values)


def _declared(flags: Any) -> Iterator[tuple[Field[Any], Any, Flag | Positional | None]]:
    """(field, its type, its mark) of each; no mark: it is a group of others."""
    hints = get_type_hints(flags, include_extras=True)
    for field in fields(flags):
        hint = hints[field.name]
        if is_dataclass(hint):
            yield field, hint, None
        else:
            kind, mark = get_args(hint)
            yield field, kind, mark


def _is_many(kind: Any) -> bool:
    return get_origin(kind) is tuple


def _parameters(flags: Any, prefix: str) -> Iterator[inspect.Parameter]:
    for field, hint, mark in _declared(flags):
        if mark is None:
            yield from _parameters(hint, prefix)
            continue
        kind, default = hint, inspect.Parameter.empty if field.default is MISSING else field.default
        if _is_many(hint):
            kind, default = GenericAlias(list, get_args(hint)[:1]) | None, None
        info = _argument(mark) if isinstance(mark, Positional) else _option(mark, field.name, prefix)
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
        )


def _argument(mark: Positional) -> Any:
    return typer.Argument(help=mark.help, show_default=mark.shown, metavar=mark.metavar, envvar=mark.variable)


def _option(mark: Flag, field: str, prefix: str) -> Any:
    name = mark.name or field.replace("_", "-")
    return typer.Option(
        f"--{name}/--no-{name}" if mark.has_opposite else f"--{name}",
        help=mark.help,
        show_default=mark.shown,
        min=mark.least,
        max=mark.most,
        hidden=mark.hidden,
        metavar=mark.metavar,
        envvar=f"{prefix}_{name.upper()}" if mark.name else None,  # else typer makes it, of the field's name
    )
