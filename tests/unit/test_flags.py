"""The commands and their flags are what people's scripts, unit files and habits hold on to: golden/flags.txt lists them all.

`python tests/unit/test_flags.py` writes the list anew, for whoever changes one on purpose.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dilocox_peer.cli.main import app

GOLDEN = Path(__file__).parent / "golden" / "flags.txt"


def listing() -> str:
    """Every command with its help and, in the order of `--help`, its arguments and options: names, environment, type, default."""
    group: Any = typer.main.get_command(app)
    lines = ["dilocox-peer", *_parameters(group, "DILOCOX")]
    for name, command in group.commands.items():
        lines += ["", f"{name}{' (hidden)' if command.hidden else ''}: {command.help}"]
        lines += _parameters(command, f"DILOCOX_{name.upper()}")
    return "\n".join(lines) + "\n"


def _parameters(command: Any, prefix: str) -> Iterator[str]:
    context = command.make_context("x", [], resilient_parsing=True)
    for each in sorted(command.params, key=lambda each: each.param_type_name):
        is_option = each.param_type_name == "option"
        names = " ".join([*each.opts, *each.secondary_opts]) if is_option else each.metavar or each.name.upper()
        environment = each.envvar or (
            f"{prefix}_{each.name.upper()}" if is_option and each.allow_from_autoenv else "no variable"
        )
        marks = {
            "required": each.required,
            "hidden": each.hidden,
            "repeats": each.multiple or each.nargs == -1,
            "switch": is_option and each.is_flag,
        }
        of = [
            environment,
            each.display_type(context),
            f"{each.min}..{each.max}",
            *(mark for mark in marks if marks[mark]),
        ]
        shown = f", shown as {each.show_default}" if each.show_default is not True else ""
        yield f"  {names}  ({', '.join(of)})"
        yield f"      default {_default(each)}{shown}: {each.help or ''}"


def _default(parameter: Any) -> object:
    """An empty list is as good as none: the flag was not given."""
    default = parameter.default
    return None if isinstance(default, list | tuple) and not default else default


def test_no_flag_changes_unseen():
    assert listing() == GOLDEN.read_text(), "a flag has changed: if it was meant to, write the list anew and say so"


@pytest.mark.parametrize(
    "typed", [["{}"], ["--{}"], ["join", "a", "{}"], ["join", "--{}"], ["join", "a", "--threads", "{}"]]
)
def test_an_argument_without_an_end_is_told_with_its_beginning(typed: list[str]) -> None:
    told = CliRunner().invoke(app, [each.format("x" * 70_000) for each in typed])
    assert told.exit_code == 2
    assert 100 < len(told.output) < 2000


if __name__ == "__main__":
    GOLDEN.write_text(listing())
