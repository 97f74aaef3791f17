"""Where the micro-batches' time went: a picture of a few seconds, and a table of means. Pure: records in, text out.

The records are MicroBatchTimed events of peers on one machine, whose monotonic clocks are one clock. A row for each peer:
on top what its torch thread computed, below a line for each micro-batch with what it waited for. One micro-batch at one
stage goes

    asked, granted, arrived | forward_start, forward_end | step_sent ... (the stages behind) ... grad | backward_start, _end

and the time between two neighbouring moments belongs to one of SHARES.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean

MAX_WINDOW_S = 2.0  # of the picture
WIDTH, LEFT, LANE, ROW, TOP = 1400, 150, 14, 3, 64
MAX_LANES = 16
COLOURS = {
    "forward": "#4c78a8", "turn": "#54a24b", "backward": "#f58518",
    "slot": "#e45756", "queue": "#eeca3b", "behind": "#d8d8d8",
}  # fmt: skip
MEANINGS = {
    "forward": "forward", "turn": "forward, loss, backward", "backward": "backward", "slot": "waits for a slot",
    "queue": "waits for the torch thread", "behind": "on the wire and at the stages behind",
}  # fmt: skip
SHARES = ("slot", "wire", "queue", "compute", "encode")


@dataclass(frozen=True, slots=True)
class Timed:
    """A micro-batch at a peer. moments: seconds on the machine's monotonic clock, by name. encode_s: packing and unpacking,
    a part of the compute."""

    peer: str
    stage: int
    key: tuple[str, int]
    moments: Mapping[str, float]
    encode_s: float

    def between(self, first: str, second: str) -> tuple[float, float] | None:
        start, end = self.moments.get(first), self.moments.get(second)
        return None if start is None or end is None or end < start else (start, end)

    @property
    def is_turn(self) -> bool:
        return "forward_end" not in self.moments

    @property
    def end(self) -> float:
        return self.moments["backward_end"]


def read(peer: str, stage: int, record: Mapping[str, object]) -> Timed | None:
    """What a MicroBatchTimed record says; None if the micro-batch did not come to its end here."""
    match record:
        case {"id": {"origin": str(origin), "index": int(index)}, "moments": list() | tuple() as moments}:
            times = {str(name): float(moment) for name, moment in moments}
            encode_s = record.get("encode_s")
            if not {"forward_start", "backward_end"} <= times.keys():
                return None
            return Timed(peer, stage, (origin, index), times, encode_s if isinstance(encode_s, float) else 0.0)
        case _:
            return None


def shares(timed: Sequence[Timed]) -> dict[int, dict[str, float]]:
    """stage -> share -> mean milliseconds a micro-batch. wire: both ways, between this stage and the one before it."""
    at: dict[tuple[int, tuple[str, int]], Timed] = {(each.stage, each.key): each for each in timed}
    sums: dict[int, dict[str, list[float]]] = defaultdict(lambda: {share: [] for share in SHARES})
    for each in timed:
        of_stage = sums[each.stage]
        compute_s = _length(each.between("forward_start", "forward_end")) + _length(
            each.between("backward_start", "backward_end")
        )
        if each.is_turn:
            compute_s = _length(each.between("forward_start", "backward_end"))
        of_stage["compute"].append(compute_s - each.encode_s)
        of_stage["encode"].append(each.encode_s)
        of_stage["slot"].append(_length(each.between("forward_end", "step_sent")))
        of_stage["queue"].append(
            _length(each.between("arrived", "forward_start")) + _length(each.between("grad", "backward_start"))
        )
        caller = at.get((each.stage - 1, each.key))
        if caller is not None and {"step_sent", "grad"} <= caller.moments.keys() and "arrived" in each.moments:
            there = each.moments["arrived"] - caller.moments["step_sent"]
            back = caller.moments["grad"] - each.end
            if there >= 0 and back >= 0:  # else it was sent twice, and these are two different journeys
                of_stage["wire"].append(there + back)
    return {
        stage: {share: 1e3 * fmean(values) if values else 0.0 for share, values in of_stage.items()}
        for stage, of_stage in sorted(sums.items())
    }


def table(timed: Sequence[Timed]) -> list[str]:
    """The shares as lines for a terminal."""
    lines = ["milliseconds a micro-batch  " + "".join(f"{share:>10}" for share in SHARES)]
    for stage, of_stage in shares(timed).items():
        lines.append(f"  stage {stage:<20}" + "".join(f"{of_stage[share]:>10.2f}" for share in SHARES))
    return lines


def render_svg(timed: Sequence[Timed], *, title: str) -> str:
    """The picture of the busiest MAX_WINDOW_S in the middle of what was timed. Raises ValueError if that is nothing."""
    if not timed:
        raise ValueError("no micro-batch was timed")
    first, last = min(_first(each) for each in timed), max(each.end for each in timed)
    start = first + max(0.0, (last - first - MAX_WINDOW_S) / 2)
    end = min(last, start + MAX_WINDOW_S)
    rows: dict[tuple[int, str], list[Timed]] = defaultdict(list)
    for each in timed:
        if each.end > start and _first(each) < end:
            rows[each.stage, each.peer].append(each)
    scale = (WIDTH - LEFT - 20) / (end - start)

    def x(moment: float) -> float:
        return LEFT + (min(max(moment, start), end) - start) * scale

    parts, y = [], TOP
    for (stage, peer), of_peer in sorted(rows.items()):
        row, height = _row(of_peer, x, y)
        parts.append(f'<text x="8" y="{y + 11}">stage {stage}, {escape(peer)}</text>')
        parts += row
        y += height + 12
    parts += _axis(start, end, x, y)
    legend = _legend()
    body = "\n".join([*legend, *parts])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 30}" '
        'font-family="sans-serif" font-size="11">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n<text x="8" y="20" font-size="14">{escape(title)}</text>\n'
        f"{body}\n</svg>\n"
    )


def _row(timed: Sequence[Timed], x: Callable[[float], float], y: int) -> tuple[list[str], int]:
    """The drawing of a peer, and its height."""
    parts: list[str] = []
    free_at: list[float] = []
    for each in sorted(timed, key=_first):
        lane = next((index for index, until in enumerate(free_at) if until <= _first(each)), len(free_at))
        if lane == len(free_at):
            free_at.append(0.0)
        free_at[lane] = each.end
        for kind, span in _spans(each):
            if kind in ("forward", "turn", "backward"):
                parts.append(_box(x, span, y, LANE, COLOURS[kind]))
            if lane < MAX_LANES:
                parts.append(_box(x, span, y + LANE + 3 + lane * (ROW + 1), ROW, COLOURS[kind]))
    return parts, LANE + 3 + min(len(free_at), MAX_LANES) * (ROW + 1)


def _spans(each: Timed) -> list[tuple[str, tuple[float, float]]]:
    found = [
        ("queue", each.between("arrived", "forward_start")),
        ("turn", each.between("forward_start", "backward_end") if each.is_turn else None),
        ("forward", each.between("forward_start", "forward_end")),
        ("slot", each.between("forward_end", "step_sent")),
        ("behind", each.between("step_sent", "grad")),
        ("queue", each.between("grad", "backward_start")),
        ("backward", each.between("backward_start", "backward_end")),
    ]
    return [(kind, span) for kind, span in found if span is not None]


def _box(x: Callable[[float], float], span: tuple[float, float], y: float, height: int, colour: str) -> str:
    left, right = x(span[0]), x(span[1])
    if right - left <= 0:
        return ""
    return f'<rect x="{left:.1f}" y="{y}" width="{right - left:.1f}" height="{height}" fill="{colour}"/>'


def _axis(start: float, end: float, x: Callable[[float], float], y: int) -> list[str]:
    span = end - start
    step = next((each for each in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5) if span / each <= 12), 1.0)
    parts = []
    for tick in range(int(span / step) + 1):
        at = x(start + tick * step)
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP - 6}" y2="{y}" stroke="black" stroke-opacity="0.1"/>')
        parts.append(f'<text x="{at:.1f}" y="{y + 14}" text-anchor="middle">{1e3 * tick * step:.0f} ms</text>')
    return parts


def _legend() -> list[str]:
    parts, at = [], 8
    for kind, colour in COLOURS.items():
        parts.append(f'<rect x="{at}" y="32" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{at + 17}" y="42">{MEANINGS[kind]}</text>')
        at += 40 + 7 * len(MEANINGS[kind])
    return parts


def _first(each: Timed) -> float:
    return min(each.moments.values())


def _length(span: tuple[float, float] | None) -> float:
    return 0.0 if span is None else span[1] - span[0]
