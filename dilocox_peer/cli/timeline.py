"""Where the micro-batches' time went: a picture of a few seconds, a trace of all of it for Perfetto or Chrome, and a table of means.
Pure: events in, text out.

The events are the MicroBatchTimed of peers on one machine, whose monotonic clocks are one clock. A row for each peer:
on top what its torch thread computed, below a line for each micro-batch with what it waited for. One micro-batch at one
stage goes

    asked, granted, arrived | forward_start, forward_end | step_sent ... (the stages behind) ... grad | backward_start, _end

and the time between two neighbouring moments belongs to one of SHARES.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean

from dilocox_peer.pipeline.contract import MicroBatchTimed

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
COMPUTED = ("forward", "turn", "backward")  # by the torch thread
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


def read(peer: str, stage: int, event: MicroBatchTimed) -> Timed | None:
    """What the event says; None if the micro-batch did not come to its end here."""
    moments = dict(event.moments)
    if not {"forward_start", "backward_end"} <= moments.keys():
        return None
    return Timed(peer, stage, (event.id.origin, event.id.index), moments, event.encode_s)


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
    rows = _rows(each for each in timed if each.end > start and _first(each) < end)
    scale = (WIDTH - LEFT - 20) / (end - start)

    def x(moment: float) -> float:
        return LEFT + (min(max(moment, start), end) - start) * scale

    parts, y = [], TOP
    for (stage, peer), of_peer in rows:
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


def chrome_trace(timed: Sequence[Timed]) -> dict[str, object]:
    """All that was timed in the Trace Event Format's JSON object form, which ui.perfetto.dev and chrome://tracing open.

    A process for each peer; its thread 0 is the torch thread, the others are lanes of micro-batches, as in the picture.
    Microseconds since the first moment.
    """
    rows = _rows(timed)
    start = min((_first(each) for each in timed), default=0.0)
    events: list[dict[str, object]] = []
    for pid, ((stage, peer), of_peer) in enumerate(rows, start=1):
        lanes = _lanes(of_peer)
        names = ["torch", *(f"micro-batches {lane}" for lane in range(1, 2 + max(lane for _each, lane in lanes)))]
        events.append(
            {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": f"stage {stage}, {peer}"}}
        )
        events += [
            {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
            for tid, name in enumerate(names)
        ]
        for each, lane in lanes:
            for kind, (begin, end) in _spans(each):
                of = {
                    "name": MEANINGS[kind], "cat": kind, "ph": "X", "pid": pid,
                    "ts": round(1e6 * (begin - start), 3), "dur": round(1e6 * (end - begin), 3),
                    "args": {"head": each.key[0], "index": each.key[1]},
                }  # fmt: skip
                events += [{**of, "tid": tid} for tid in ((0, lane + 1) if kind in COMPUTED else (lane + 1,))]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _rows(timed: Iterable[Timed]) -> list[tuple[tuple[int, str], list[Timed]]]:
    """((stage, peer), its micro-batches) of each, in that order."""
    rows: dict[tuple[int, str], list[Timed]] = defaultdict(list)
    for each in timed:
        rows[each.stage, each.peer].append(each)
    return sorted(rows.items())


def _lanes(timed: Iterable[Timed]) -> list[tuple[Timed, int]]:
    """(micro-batch, lane) in the order in which they came; those of one lane follow each other."""
    free_at: list[float] = []
    found = []
    for each in sorted(timed, key=_first):
        lane = next((index for index, until in enumerate(free_at) if until <= _first(each)), len(free_at))
        free_at[lane : lane + 1] = [each.end]
        found.append((each, lane))
    return found


def _row(timed: Sequence[Timed], x: Callable[[float], float], y: int) -> tuple[list[str], int]:
    """The drawing of a peer, and its height."""
    parts: list[str] = []
    lanes = _lanes(timed)
    for each, lane in lanes:
        for kind, span in _spans(each):
            if kind in COMPUTED:
                parts.append(_box(x, span, y, LANE, COLOURS[kind]))
            if lane < MAX_LANES:
                parts.append(_box(x, span, y + LANE + 3 + lane * (ROW + 1), ROW, COLOURS[kind]))
    return parts, LANE + 3 + min(1 + max(lane for _each, lane in lanes), MAX_LANES) * (ROW + 1)


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
