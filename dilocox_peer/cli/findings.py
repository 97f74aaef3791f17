"""What `doctor` found, as it is shown: a table and a line for a person, JSON for a program. Pure."""

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dilocox_peer import __version__
from dilocox_peer.cli import checks
from dilocox_peer.cli.checks import Check

MIN_WIDTH = 40  # of a table: its first two columns take 28
_STYLE = {"ok": "green", "warn": "yellow", "fail": "bold red", "skipped": "dim"}


def render(found: Sequence[Check], width: int) -> RenderableType:
    """A table of the checks; a remedy stands below what it is for. width: of the terminal, in cells; of a narrow one every check is a line of its
    own, since a table would leave no room for what was found."""
    if width < MIN_WIDTH:
        return Group(*(_line(check) for check in found))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("check", "", "found"):
        table.add_column(column, header_style="bold", no_wrap=column == "check", overflow="fold")
    for check in found:
        text = Text(check.found)
        if check.remedy:
            text.append(f"\n→ {check.remedy}", style="italic")
        table.add_row(check.name, Text(check.status, style=_STYLE[check.status]), text)
    return table


def _line(check: Check) -> Text:
    text = Text.assemble((check.status, _STYLE[check.status]), f"  {check.name}: {check.found}")
    return text.append(f"\n→ {check.remedy}", style="italic") if check.remedy else text


def summary(found: Sequence[Check]) -> str:
    """One line: how many of each verdict."""
    counts = {status: sum(check.status == status for check in found) for status in _STYLE}
    words = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return f"{len(found)} checks: {words}"


def report(found: Sequence[Check]) -> dict[str, object]:
    """The --json form."""
    return {
        "version": __version__,
        "ok": not checks.exit_code(found),
        "checks": [asdict(check) for check in found],
    }
