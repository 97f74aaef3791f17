"""The dashboard as a picture: `render(status, size, now)` gives a rich renderable. Pure; the terminal is terminal.py.

Four panels: this peer, the swarm (stages by peers), the rounds, the log. They fit 80x24 and use what is more. Lines are
laid out by hand instead of with rich's tables, which take ten times as long as the whole picture may.
"""

import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.style import Style

from dilocox_peer.cli.demo_table import size as size_of
from dilocox_peer.cli.demo_table import sparkline
from dilocox_peer.cli.screen_help import help_page
from dilocox_peer.cli.trouble_strip import trouble_strip
from dilocox_peer.durations import duration
from dilocox_peer.events import short
from dilocox_peer.peer.contributions import Round
from dilocox_peer.peer.map_peer import MapPeer
from dilocox_peer.peer.rates import upload_words
from dilocox_peer.peer.status import LogLine, Status, printable, stage_words

MIN_WIDTH, MIN_HEIGHT = 76, 20  # below, one panel at a time
PANELS = ("my peer", "swarm", "rounds", "log")

Panel = Literal[1, 2, 3, 4]
Span = tuple[str, str]  # text, style
Line = list[Span]


class Size(NamedTuple):
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class View:
    """What of it is looked at. panel: alone; help: its page, from 1 on; quit_word: what q does here; note: of who shows it (a replay's speed)."""

    panel: Panel | None = None
    help: int = 0
    quit_word: str = "leave"
    may_pause: bool = True
    note: str = ""
    utc_offset_s: int = 0


def render(status: Status, size: Size, now: float, view: View = View()) -> "Picture":
    """The whole screen, exactly size.height lines of size.width cells. now: wall clock."""
    width, height = max(20, size.width), max(6, size.height)
    body = height - 2
    panel = view.panel
    if panel is None and (width < MIN_WIDTH or height < MIN_HEIGHT):
        panel = 1
    if view.help:
        title, lines, more = help_page(view.help, width, height, view.quit_word, may_pause=view.may_pause)
        lines = _box(title, lines, width, body, right=more)
    else:
        strip = trouble_strip(status, width, now, most=max(1, body // 6, min(3, body // 3)))
        room = body - len(strip)
        shown = (
            _four(status, width, room, now, view) if panel is None else _single(panel, status, width, room, now, view)
        )
        lines = [*strip, *shown]
    picture = [_header(status, width, now, view), *lines, _footer(status, width, view)]
    return Picture([_fit(line, width) for line in picture])


class Picture:
    """Lines of styled text as a renderable."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for index, line in enumerate(self.lines):
            if index:
                yield Segment.line()
            for text, style in line:
                yield Segment(text, _style(style))


# ---- layout ----------------------------------------------------------------------------------------------------------


def _four(status: Status, width: int, height: int, now: float, view: View) -> list[Line]:
    top = min(13, max(9, height // 3), height - 7)  # with the longest strip over a screen of MIN_HEIGHT there are 15
    rounds = min(max(7, (height - top) // 2), height - top - 3)  # the log has a line inside its frame at least
    log = height - top - rounds
    left = width // 2
    beside = [
        [*one, *other]
        for one, other in zip(
            _box("1 my peer", _my_peer(status, left - 4, top - 2, now), left, top, right=_health_word(status, now)),
            _box("2 swarm", _swarm(status, width - left - 4, top - 2), width - left, top, right=_swarm_word(status)),
            strict=True,
        )
    ]
    return [
        *beside,
        *_box(
            _rounds_title(status, now),
            _rounds(status, width - 4, rounds - 2, view),
            width,
            rounds,
            right=_loss_word(status),
        ),
        *_box("4 log", _log(status, width - 4, log - 2, view), width, log),
    ]


def _single(panel: Panel, status: Status, width: int, height: int, now: float, view: View) -> list[Line]:
    title = f"{panel} {PANELS[panel - 1]}"
    inner, rows = width - 4, height - 2
    match panel:
        case 1:
            return _box(title, _my_peer(status, inner, rows, now), width, height, right=_health_word(status, now))
        case 2:
            return _box(title, _swarm(status, inner, rows), width, height, right=_swarm_word(status))
        case 3:
            return _box(
                _rounds_title(status, now), _rounds(status, inner, rows, view), width, height, right=_loss_word(status)
            )
        case 4:
            return _box(title, _log(status, inner, rows, view, wrap=True), width, height)


def _box(title: str, lines: Sequence[Line], width: int, height: int, *, right: Span = ("", "")) -> list[Line]:
    word, style = right
    word = f" {word} " if word else ""
    if cell_len(word) > width - len(title) - 8:
        word = _cut(word, max(0, width - len(title) - 8))
    fill = max(0, width - 5 - cell_len(title) - cell_len(word))
    edge = "dim"
    top: Line = [("╭─", edge), (f" {title} ", "bold cyan"), ("─" * (fill - 1), edge), (word, style), ("─╮", edge)]
    inner = [
        [("│ ", edge), *_fit(lines[row] if row < len(lines) else [], width - 4), (" │", edge)]
        for row in range(height - 2)
    ]
    return [_fit(top, width), *inner, [("╰" + "─" * (width - 2) + "╯", edge)]]


def _header(status: Status, width: int, now: float, view: View) -> Line:
    joined = status.joined
    name = joined.run_name if joined is not None else "dilocox-peer"
    where = stage_words(status.stage, status.num_stages) if status.stage is not None else ""
    left = "  ".join(part for part in (name, short(status.me) if status.me else "", where, status.phase) if part)
    right = "  ".join(part for part in (view.note, _elapsed(status, now), _clock(now, view)) if part)
    space = max(1, width - cell_len(left) - cell_len(right) - 2)
    return [(f" {left}{' ' * space}{right} ", "bold white on blue")]


def _footer(status: Status, width: int, view: View) -> Line:
    pause = "resume" if status.paused is not None else "pause"
    keys = [("q", view.quit_word), ("1-4", "panel"), ("l", "log"), ("?", "help")]
    if view.may_pause:
        keys.insert(1, ("p", pause))
    if sum(len(f"{key} {word}   ") for key, word in keys) > width:  # the help has them all
        keys.insert(1, keys.pop())
    line: Line = [(" ", "")]
    for key, word in keys:
        line += [(key, "bold"), (f" {word}   ", "dim")]
    return line


# ---- panels ----------------------------------------------------------------------------------------------------------


def _my_peer(status: Status, width: int, rows: int, now: float) -> list[Line]:
    joined, progress, pipeline = status.joined, status.progress, status.pipeline
    health, why = status.health(now)
    lines: list[Line] = [_row("health", [(why, _HEALTH[health])])]
    if progress is None or joined is None:
        return lines
    share = min(1.0, progress.micro_batches / max(1, status.share))
    shown = min(progress.round, status.total_rounds)
    lines.append(
        _row("round", [(f"{shown}/{status.total_rounds} ", ""), *_bar(share, max(4, min(24, width - 26))), (f" {share:.0%}", "dim")])
    )  # fmt: skip
    lines.append(
        _row("speed", [(f"{status.rates.tokens_per_s():,.0f} tok/s", "bold"), (f"   busy {status.busy():.0%}", "")])
    )
    losses = [each.train_loss for each in status.rounds if each.train_loss == each.train_loss]
    lines.append(
        _row("loss", [(_loss(progress.train_loss), "bold"), ("  " + sparkline(losses[-(width - 20) :]), "green")])
    )
    device = joined.device if joined.device != "cpu" else f"cpu, {_count(joined.threads, 'thread')}"
    memory = size_of(progress.memory_bytes) if progress.memory_bytes else "-"
    lines.append(_row("memory", [(f"{memory}   {device}", "")]))
    rates: Line = [(f"{size_of(status.rates.up_bytes_per_s())}/s", ""), ("   down ", "dim"), (f"{size_of(status.rates.down_bytes_per_s())}/s", "")]  # fmt: skip
    overhead = status.link_overhead()
    if overhead is not None and width >= 48:
        rates.append((f"   link +{overhead:.0%}", "dim"))
    lines.append(_row("up", rates))
    lag_style = "yellow" if progress.lag_ms_p99 > 100 else ""
    lag: Line = [(f"{progress.lag_ms_p99:.1f} ms", lag_style)]
    if pipeline is not None:
        lag.append((f"   {_count(pipeline.linked, 'link')}", "" if pipeline.linked else "bold red"))
    lines.append(_row("lag p99", lag))
    if progress.upload_bps:
        words = upload_words(progress.upload_bps, progress.line_bps, progress.queueing_ms)
        lines.append(_row("upload", [(words, "")]))
    if pipeline is not None:
        under_way = f"{pipeline.in_flight} under way, {pipeline.waiting} wait"
        lines.append(_row("pipeline", [(under_way, "")]))
    link_sent = pipeline.bytes_sent if pipeline is not None else 0
    link_received = pipeline.bytes_received if pipeline is not None else 0
    lines.append(_row("tokens", [(f"{progress.tokens:,} since the start", "")]))
    lines.append(
        _row("traffic", [(f"{size_of(progress.bytes_sent + link_sent)} sent, {size_of(progress.bytes_received + link_received)} received", "")])
    )  # fmt: skip
    if (found := status.costs.upkeep(status.rounds)) is not None:
        up, down, disk = (
            size_of(each) for each in (found.sent_bytes_a_day, found.received_bytes_a_day, found.disk_bytes)
        )
        lines.append(_row("a day", [(f"{up} up, {down} down; disk {disk}", "")]))
    beside = f" of adapters, {joined.num_frozen:,} stay" if joined.num_frozen else ""
    lines.append(_row("stage", [(f"{joined.num_parameters:,} parameters{beside}", "")]))
    trouble = f"view {status.view}, {status.orphaned} orphaned"
    if pipeline is not None:
        trouble += f", {pipeline.resent} resent"
    lines.append(_row("history", [(trouble, "")]))
    if rows > len(lines):
        lines += [_row("address" if index == 0 else "", [(text, "dim")]) for index, text in enumerate(status.addresses)]
    return lines


def _swarm(status: Status, width: int, rows: int) -> list[Line]:
    stages = status.seen_stages
    if not stages:
        return [[("looking for the others", "dim")]]
    # As much as fits: everybody by name, the peers of our own stage by name, or a line a stage.
    sizes = {stage: 1 + max(1, len(status.of_stage(stage))) for stage in stages}
    if sum(sizes.values()) <= rows:
        return [line for stage in stages for line in _stage_in_full(status, stage, width)]
    own = status.stage if status.stage is not None else -1
    if own in sizes and len(stages) - 1 + sizes[own] <= rows:
        return [
            line
            for stage in stages
            for line in ([_stage_line(status, stage, width)] if stage != own else _stage_in_full(status, stage, width))
        ]
    if len(stages) <= rows:
        return [_stage_line(status, stage, width) for stage in stages]
    # Too many to show: those that matter most, in their order, and how many are not shown.
    urgent = sorted(stages, key=lambda stage: (not status.is_thin(stage), stage != own, stage))[: rows - 1]
    lines = [_stage_line(status, stage, width) for stage in sorted(urgent)]
    return [*lines, [(f"… {len(stages) - len(urgent)} more stages", "dim")]]


def _stage_line(status: Status, stage: int, width: int, *, glyphs: bool = True) -> Line:
    """`▸0 ◆★●‖  4 peers  12.3k tok/s thin`"""
    peers = status.of_stage(stage)
    holders = sum(peer.counts for peer in peers)
    mine = stage == status.stage
    line: Line = [(f"{'▸' if mine else ' '}{stage:<2} ", "bold" if mine else "")]
    if holders == 0:
        return [*line, (" EMPTY ", "bold white on red"), (" nobody holds it", "bold red")]
    thin = status.is_thin(stage)
    words = f"{_count(holders, 'peer'):>8} {_stage_speed(status, stage):>6} tok/s"
    room = max(3, width - 4 - len(words) - 5)
    shown = [_glyph(peer, status) for peer in peers] if glyphs else []
    if len(shown) > room:
        shown = [*shown[: room - 1], ("…", "dim")]
    line += [*shown, (" " * (room - len(shown)), ""), (words, "yellow" if thin else "")]
    return [*line, (" thin", "bold yellow")] if thin else line


def _stage_in_full(status: Status, stage: int, width: int) -> list[Line]:
    return [_stage_line(status, stage, width, glyphs=False), *_full(status.of_stage(stage), status, width)]


def _full(peers: Sequence[MapPeer], status: Status, width: int) -> list[Line]:
    lines: list[Line] = []
    for peer in peers:
        me = peer.peer == status.me
        speed = 0.0 if peer.is_paused else status.rates.tokens_per_s() if me else peer.tokens_per_s
        what = "paused" if peer.is_paused else "gone" if peer.is_here is False else peer.reachability
        words = f" {short(peer.peer)} {what:<7} {_speed(speed):>6} r{peer.round}"
        more = ", ".join(word for word in ("me" if me else "", "leader" if peer.is_leader else "") if word)
        if more and width > 50:
            words += f"  {more}"
        line = [("  ", ""), _glyph(peer, status), (words, "dim" if not peer.counts else "")]
        if width > 50 and (each := status.contributions.by_peer.get(peer.peer)) is not None:
            said = ((each.num_refused, "refused"), (each.num_clipped, "clipped"))
            line.append(("  " + ", ".join(f"{count} {word}" for count, word in said if count), "yellow"))
        lines.append(line)
    return lines or [[("    -", "dim")]]


def _glyph(peer: MapPeer, status: Status) -> Span:
    if peer.is_here is False:
        return "✖", "red"
    if peer.is_paused:
        return "‖", "yellow"
    colour = "bold cyan" if peer.peer == status.me else "green" if peer.is_here else "dim green"
    if peer.is_leader:
        return "★", colour
    if peer.peer == status.me:
        return "◆", colour
    if peer.reachability in ("relayed", "passed on"):
        return "◌", colour
    return ("●" if peer.is_here else "○"), colour


def _rounds_title(status: Status, now: float) -> str:
    left_s = status.time_left_s(now)
    return "3 rounds" if left_s is None else f"3 rounds, about {duration(left_s)} left"


def _rounds(status: Status, width: int, rows: int, view: View) -> list[Line]:
    wide = width >= 100
    total = str(status.total_rounds or "-")
    newest_first = list(reversed(status.rounds))[: max(0, rows - 1)]
    number = max([7, *(len(f"{each.number}/{total}") for each in newest_first)])  # what it takes, the codec's gives
    codec = max([22 - number, *(len(_codec(each)) for each in newest_first)])
    head = (
        f"{'round':>{number}} {'who':>5} {'train':>7} {'val':>7}  {'codec':<{codec}} {'H':>4} {'delay':>6} {'sent':>9}"
    )
    head += f" {'less':>6}" if not wide else f"  {'all-reduce':>10} {'less':>6}  {'at':<8}  {'took':>7}"
    lines: list[Line] = [[(_cut(head, width), "bold")]]
    if not status.rounds:
        return [*lines, [("no round is certified yet", "dim")]]
    every = list(status.rounds)
    before = {later.number: earlier.at_s for earlier, later in pairwise(every)}
    return lines + [
        _round_line(
            each,
            f"{each.number}/{total}".rjust(number),
            _codec(each).ljust(codec),
            before.get(each.number),
            wide=wide,
            view=view,
        )
        for each in newest_first
    ]


def _codec(each: Round) -> str:
    return f"{each.codec}/{each.rank}" if each.rank else each.codec or "-"


def _round_line(each: Round, number: str, codec: str, before_s: float | None, *, wide: bool, view: View) -> Line:
    who_style = "red" if each.contributors == 0 else "yellow" if each.contributors < each.roster else ""
    delay = "-" if each.delay_s is None else f"{each.delay_s:.1f} s"
    less = "-" if each.times_less is None else f"{each.times_less:,.0f}x"
    line: Line = [
        (f"{number} ", ""),
        (f"{f'{each.contributors}/{each.roster}':>5}", who_style),
        (f" {_loss(each.train_loss):>7} {_loss(each.val_loss):>7}  ", ""),
        (f"{codec} {each.inner_steps or '-':>4} {delay:>6} ", "dim"),
        (f"{size_of(each.bytes_sent):>9}", ""),
    ]
    if wide:
        took = "-" if before_s is None else f"{each.at_s - before_s:.1f} s"
        all_reduce = size_of(each.allreduce_bytes) if each.allreduce_bytes else "-"
        line += [
            (f"  {all_reduce:>10}", "dim"),
            (f" {less:>6}", "green"),
            (f"  {_clock(each.at_s, view)}  {took:>7}", "dim"),
        ]
    else:
        line.append((f" {less:>6}", "green"))
    marks = "".join(
        f"{mark}{count if wide else ''}" for mark, count in (("✖", each.refused), ("⇣", each.clipped)) if count
    )
    if not each.own_included:
        marks = "not mine" if wide and not marks else f"*{marks}"
    if marks:
        line.append((f"  {marks}" if wide else marks, "yellow"))
    return line


def _log(status: Status, width: int, rows: int, view: View, *, wrap: bool = False) -> list[Line]:
    if not status.log:
        return [[("nothing yet", "dim")]]
    lines: list[Line] = []
    for each in list(status.log)[-rows:]:
        lines += _log_lines(each, width, view) if wrap else [_log_line(each, width, view)]
    return lines[-rows:]


def _log_line(each: LogLine, width: int, view: View) -> Line:
    return [(f"{_clock(each.at_s, view)} ", "dim"), (_cut(each.text, width - 9), _LEVEL.get(each.level, ""))]


def _log_lines(each: LogLine, width: int, view: View) -> list[Line]:
    pieces = textwrap.wrap(each.text, max(10, width - 9)) or [""]
    stamps = [f"{_clock(each.at_s, view)} ", *(" " * 9 for _ in pieces[1:])]
    style = _LEVEL.get(each.level, "")
    return [[(stamp, "dim"), (piece, style)] for stamp, piece in zip(stamps, pieces, strict=True)]


# ---- words -----------------------------------------------------------------------------------------------------------

_HEALTH = {"ok": "bold green", "wait": "bold yellow", "warn": "bold yellow", "bad": "bold white on red"}
_LEVEL = {"warning": "yellow", "error": "bold red", "debug": "dim"}


def _health_word(status: Status, now: float) -> Span:
    health, _why = status.health(now)
    return {"ok": "●", "wait": "…", "warn": "!", "bad": "✖"}[health], _HEALTH[health]


def _swarm_word(status: Status) -> Span:
    peers = sum(peer.counts for peer in status.peers.values())
    return (f"{_count(peers, 'peer')}, {_stage_speed(status, 0)} tok/s", "") if peers else ("", "")


def _loss_word(status: Status) -> Span:
    validated = [each.val_loss for each in status.rounds if each.val_loss is not None]
    losses = validated or [each.train_loss for each in status.rounds if each.train_loss == each.train_loss]
    if not losses:
        return "", ""
    return f"{'validation' if validated else 'train'} {sparkline(losses[-24:])} {losses[-1]:.4f}", "green"


def _row(name: str, value: Line) -> Line:
    return [(f"{name:<8} ", "dim"), *value]


def _bar(share: float, width: int) -> Line:
    full = round(share * width)
    return [("━" * full, "cyan"), ("╌" * (width - full), "dim")]


def _loss(value: float | None) -> str:
    return "-" if value is None or value != value else f"{value:.4f}"


def _short_number(value: float) -> str:
    for unit in ("", "k", "M"):
        if value < 999.5 or unit == "M":
            return f"{value:.0f}" if not unit else f"{value:.1f}{unit}"
        value /= 1000
    raise AssertionError("unreachable")


def _speed(tokens_per_s: float) -> str:
    """A lease says 0 until its peer has measured itself."""
    return _short_number(tokens_per_s) if tokens_per_s else "-"


def _stage_speed(status: Status, stage: int) -> str:
    """With ≥ where somebody who trains there has not said how fast."""
    speed = status.stage_speed(stage)
    return f"{'' if not speed or status.stage_speed_is_whole(stage) else '≥'}{_speed(speed)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _clock(at_s: float, view: View) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(at_s + view.utc_offset_s))


def _elapsed(status: Status, now: float) -> str:
    if status.started_s is None:
        return ""
    seconds = max(0, int(now - status.started_s))
    hours, minutes = seconds // 3600, seconds // 60 % 60
    return f"{hours}:{minutes:02}:{seconds % 60:02}"


def _cut(text: str, width: int) -> str:
    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 1)) + "…" * (width > 0)


def _fit(line: Line, width: int) -> Line:
    """line in exactly width cells, and of nothing but what is printed: this is the last that sees it before the terminal."""
    fitted: Line = []
    left = width
    for words, style in line:
        text = printable(words)
        cells = cell_len(text)
        if cells > left:
            fitted.append((_cut(text, left), style))
            left = 0
            break
        fitted.append((text, style))
        left -= cells
    if left:
        fitted.append((" " * left, ""))
    return fitted


@lru_cache(maxsize=64)
def _style(text: str) -> Style:
    return Style.parse(text) if text else Style.null()
