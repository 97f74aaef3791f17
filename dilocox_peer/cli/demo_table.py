"""What the demo shows as it goes: `render(view) -> renderable`, pure, tested as text."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dilocox_peer.cli.swarm_view import RoundView, SwarmView, pipeline_of, progress_of
from dilocox_peer.peer.status import Status

_BARS = "▁▂▃▄▅▆▇█"
_ROUNDS_SHOWN = 8
_MAX_BAR = 1e18


def render(view: SwarmView, *, elapsed_s: float) -> RenderableType:
    """The live table: peers, the last rounds, and one line of totals. Fits 80 columns."""
    return Group(_peers(view), _rounds(view), _totals(view, elapsed_s))


def round_line(view: SwarmView, seen: RoundView) -> str:
    """One certified round as a line, for terminals that are none."""
    contributors = " ".join(f"{count}" for _stage, count in sorted(seen.stage_contributors.items()))
    validation = f"{seen.val_loss:.4f}" if seen.val_loss is not None else "-"
    rank = f"/{seen.rank}" if seen.rank else ""
    return (
        f"round {seen.number:>3}/{view.expected_rounds}  contributors {contributors}  "
        f"train {seen.train_loss:.4f}  validation {validation}  {view.tokens_per_s:,.0f} tokens/s  "
        f"{seen.codec}{rank} H={seen.inner_steps}"
    )


def sparkline(values: list[float]) -> str:
    """Values as eight-step bars, lowest to highest; without what has diverged, which no bar is high enough for."""
    values = [value for value in values if abs(value) < _MAX_BAR]
    if not values:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(_BARS[min(7, int((value - low) / span * 8))] for value in values)


def size(num_bytes: float) -> str:
    """Bytes in decimal units, three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000 or unit == "GB":
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    raise AssertionError("unreachable")


def _peers(view: SwarmView) -> Table:
    table = Table(
        title="peers", title_justify="left", expand=True, box=None, header_style="bold", title_style="bold cyan"
    )
    table.add_column("peer", no_wrap=True)
    for name in ("stage", "round", "loss", "tok/s", "busy", "sent", "received"):
        table.add_column(name, justify="right")
    table.add_column("state")
    for label, status in view.peers.items():
        of, links = progress_of(status), pipeline_of(status)
        table.add_row(
            f"{label} …{status.me[-6:]}", str(status.stage), str(min(of.round, view.expected_rounds)), _loss(of.train_loss),
            f"{of.tokens_per_s:,.0f}", _share(links.busy), size(of.bytes_sent + links.bytes_sent), size(of.bytes_received), _state(status),
        )  # fmt: skip
    return table


def _state(status: Status) -> str:
    if status.complete is not None:
        return "complete"
    if status.left is not None:
        return "left"
    return "joining" if status.progress is None else "training"


def _rounds(view: SwarmView) -> Table:
    table = Table(
        title="rounds", title_justify="left", expand=True, box=None, header_style="bold", title_style="bold cyan"
    )
    for name in ("round", "contributors", "train loss", "validation", "codec", "H", "sent a peer"):
        table.add_column(name, justify="right")
    for seen in sorted(view.rounds.values(), key=lambda each: each.number)[-_ROUNDS_SHOWN:]:
        contributors = " ".join(str(count) for _stage, count in sorted(seen.stage_contributors.items()))
        table.add_row(
            f"{seen.number}/{view.expected_rounds}", contributors, _loss(seen.train_loss),
            _loss(seen.val_loss), f"{seen.codec}/{seen.rank}" if seen.rank else seen.codec, str(seen.inner_steps), size(sum(seen.bytes_sent) / len(seen.bytes_sent)),
        )  # fmt: skip
    return table


def _totals(view: SwarmView, elapsed_s: float) -> Text:
    losses = [seen.val_loss for seen in view.rounds.values() if seen.val_loss is not None]
    text = Text(f"{view.tokens:,} tokens  {view.tokens_per_s:,.0f} tokens/s  {elapsed_s:.0f} s  ")
    text.append(sparkline(losses[-24:]), style="green")
    if view.bigram_entropy is not None:
        text.append(f"  bigram entropy {view.bigram_entropy:.3f}")
    return text


def _loss(value: float | None) -> str:
    return "-" if value is None or value != value else f"{value:.4f}"


def _share(value: float) -> str:
    return f"{value:.0%}" if value else "-"
