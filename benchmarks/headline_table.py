"""What headline.py measured, as a table, as a picture and as what the next run goes on from."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

TOKENS = 1024  # a micro-batch


@dataclass(frozen=True)
class Regime:
    """mbit: of the lines of two peers. rounds: that diloco and hivemind are measured for."""

    batch_s: float
    inner_steps: int
    codec: str
    mbit: float

    def mbit_of(self, peers: int) -> float:
        """With which an all-reduce between so many takes as long."""
        return self.mbit * 2 * (peers - 1) / peers

    def dilated(self, times: float) -> "Regime":
        """So many times slower in all that is emulated, compute and lines."""
        return replace(self, batch_s=self.batch_s * times, mbit=self.mbit / times)


REGIMES = {
    "32": Regime(0.2, 20, "int4", 13.88),
    "358": Regime(0.1, 125, "int2", 2.41),
    "4300": Regime(0.1, 250, "topk", 0.2),
}
EXTREME = ("4300",)  # an all-reduce would take seven minutes: only where it is asked for
WHO = ("limit", "ddp", "powersgd", "diloco", "hivemind", "peers")
LAYOUTS = {"sites": 2.41, "homes": 100.0}  # Mbit/s of the line
OF_STAGES = Regime(0.1, 16, "int2", 2.41)
GOALS = {"share": 0.95, "averaged": 0.95, "off": 0.10, "share of stages": 0.90}


@dataclass(frozen=True)
class Measured:
    """One case. share: of the limit, of the same regime and as many peers. averaged, planned_h, effective_h: None where it has no meaning. exchange_s: from the close
    of a round to its merge, the median of all peers, of the stage where that is longest. memory_bytes: of the peer that took most. micro_batch_s: of an origin, on average. way_s: of a
    micro-batch through the stages and back, the median; None: of one stage. All None of who is no peer."""

    case: str
    who: str
    peers: int
    mbit: float
    tokens_per_s: float
    sent_per_token: float = 0.0
    averaged: float | None = None
    planned_h: float | None = None
    effective_h: float | None = None
    more: str = ""
    at: str = ""
    exchange_s: float | None = None
    memory_bytes: int | None = None
    micro_batch_s: float | None = None
    way_s: float | None = None

    @property
    def off(self) -> float | None:
        if self.planned_h is None or self.effective_h is None:
            return None
        return self.effective_h / self.planned_h - 1


def limit_of(found: dict[str, Measured], each: Measured) -> float | None:
    """Tokens a second, of all."""
    if each.case in LAYOUTS:
        return each.peers * TOKENS / OF_STAGES.batch_s
    limit = found.get(f"{each.case} {each.peers} limit")
    return limit.tokens_per_s if limit is not None else None


def row(found: dict[str, Measured], each: Measured) -> list[str]:
    limit = limit_of(found, each)
    reduced = found.get(f"{each.case} {each.peers} ddp")
    return [
        each.case if each.case in LAYOUTS else f"1+rho {each.case}",
        str(each.peers),
        f"{each.mbit:.2f}",
        each.who,
        f"{each.tokens_per_s:,.0f}",
        "-" if limit is None else f"{each.tokens_per_s / limit:.3f}",
        "-" if reduced is None else f"{each.tokens_per_s / reduced.tokens_per_s:.1f}",
        f"{each.sent_per_token:.1f}" if each.sent_per_token else "-",
        "-" if each.averaged is None else f"{each.averaged:.3f}",
        "-" if each.effective_h is None else f"{each.effective_h:.1f} of {each.planned_h:.1f}",
        each.more,
        each.at,
    ]


HEAD = [
    "case", "replicas", "Mbit/s", "who", "tokens/s", "of the limit", "x AllReduce", "B/token", "averaged", "effective H", "", "measured at",
]  # fmt: skip


def markdown(found: dict[str, Measured]) -> str:
    lines = [f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
    lines += [f"| {' | '.join(row(found, each))} |" for each in ordered(found)]
    return "\n".join(lines) + "\n"


def ordered(found: dict[str, Measured]) -> list[Measured]:
    cases, who = [*REGIMES, *LAYOUTS], [*WHO, "peers, adapting"]
    return sorted(found.values(), key=lambda each: (cases.index(each.case), each.peers, who.index(each.who)))


def why_missed(found: dict[str, Measured], each: Measured) -> list[str]:
    """The goals that a case of peers misses."""
    if not each.who.startswith("peers"):
        return []
    limit, goal = limit_of(found, each), GOALS["share of stages" if each.case in LAYOUTS else "share"]
    missed = []
    if limit is not None and each.tokens_per_s < goal * limit:
        missed.append(f"{each.tokens_per_s / limit:.3f} of the limit, {goal} wanted")
    if each.averaged is not None and each.averaged < GOALS["averaged"]:
        missed.append(f"{each.averaged:.3f} of the contributions averaged, {GOALS['averaged']} wanted")
    if each.off is not None and abs(each.off) > GOALS["off"]:
        missed.append(f"effective H {each.off:+.0%} off")
    return missed


def draw(found: dict[str, Measured], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = [
        (title, members)
        for title, members in (
            (
                f"{case if case in LAYOUTS else f'1+rho = {case}'}, {peers} replicas",
                [each for each in ordered(found) if each.case == case and each.peers == peers and each.who != "limit"],
            )
            for case in (*REGIMES, *LAYOUTS)
            for peers in sorted({each.peers for each in found.values()})
        )
        if members
    ]
    if not groups:
        return
    figure, axes = pyplot.subplots(1, len(groups), figsize=(3.2 * len(groups), 3.6), sharey=True, squeeze=False)
    for axis, (title, members) in zip(axes[0], groups, strict=True):
        shares = [each.tokens_per_s / (limit_of(found, each) or float("nan")) for each in members]
        colours = ["#2a6fdb" if each.who.startswith("peers") else "#9aa4b2" for each in members]
        for bar, share in zip(axis.bar([each.who for each in members], shares, color=colours), shares, strict=True):
            axis.annotate(
                f"{share:.3f}", (bar.get_x() + bar.get_width() / 2, share), ha="center", va="bottom", fontsize=8
            )
        axis.set_title(title, fontsize=9)
        axis.axhline(1.0, color="#444444", linewidth=0.6)
        axis.set_ylim(0, 1.12)
        axis.tick_params(axis="x", rotation=60, labelsize=8)
    axes[0][0].set_ylabel("tokens a second, share of compute alone")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def read_results(path: Path) -> dict[str, Measured]:
    if not path.exists():
        return {}
    return {name: Measured(**each) for name, each in json.loads(path.read_text())["measured"].items()}


def write_results(folder: Path, found: dict[str, Measured]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    measured = {name: asdict(found[name]) for name in sorted(found)}
    (folder / "headline.json").write_text(json.dumps({"measured": measured}, indent=1) + "\n")
    (folder / "headline.md").write_text(
        "# Tokens a second over slow lines\n\nWritten by `sudo python benchmarks/headline.py`, which says what the columns mean. One run a "
        f"row; what else the machine did meanwhile: [BENCHMARKS.md](../BENCHMARKS.md).\n\n{markdown(found)}"
    )
    draw(found, folder / "headline.png")
