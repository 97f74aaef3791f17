"""What is wrong with the run, over all that the dashboard shows. Pure."""

import textwrap

from dilocox_peer.events_of_health import NOTES
from dilocox_peer.peer.status import Status

Strip = list[list[tuple[str, str]]]
"""Lines of (text, style)."""


def trouble_strip(status: Status, width: int, now: float, most: int) -> Strip:
    """At most so many lines, the worst in full if it fits; what is only worth a note, the map shows. now: wall clock."""
    texts = [(each, status.trouble_words(each, now)) for each in status.troubles if each.kind not in NOTES]
    lines: Strip = []
    for index, (each, text) in enumerate(texts):
        style = "bold white on red" if each.stops and each.kind != "waiting" else "yellow"
        rows = textwrap.wrap(text, max(10, width - 5)) or [""]
        are_more = index + 1 < len(texts)
        if lines and len(lines) + len(rows) + are_more > most:
            left = len(texts) - index
            return [*lines[: max(1, most - 1)], [(f" + {left} more, which `status` lists", "dim")]][:most]
        lines += [[(" ! " if row == 0 else "   ", style), (words, style)] for row, words in enumerate(rows)]
    return lines[:most]
