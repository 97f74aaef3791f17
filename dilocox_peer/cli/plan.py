"""`plan`: what a run would be like for so many peers on such lines, before anybody joins it. Reckoned by peer/planning/forecast.py."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dilocox_peer.cli.flags import PlanFlags
from dilocox_peer.config import PRESETS, preset, read_manifest
from dilocox_peer.errors import ConfigError
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.memory import size
from dilocox_peer.plain_json import plain_json

if TYPE_CHECKING:
    from dilocox_peer.peer.planning.forecast import Forecast, Peers

SIZES: Mapping[str, Mapping[str, int]] = {
    "7b": {"layers": 32, "hidden_size": 4096, "heads": 32, "kv_heads": 32, "mlp_size": 11008, "vocab_size": 32000},
    "13b": {"layers": 40, "hidden_size": 5120, "heads": 40, "kv_heads": 40, "mlp_size": 13824, "vocab_size": 32000},
    "70b": {"layers": 80, "hidden_size": 8192, "heads": 64, "kv_heads": 8, "mlp_size": 28672, "vocab_size": 32000},
    "107b": {"layers": 77, "hidden_size": 8192, "heads": 64, "kv_heads": 8, "mlp_size": 49152, "vocab_size": 152064},
}
"""Beside the presets, to be reckoned with: Llama 2's, and Qwen1.5's 110B with fewer layers, which DiLoCoX trains (arXiv 2506.21263)."""
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128)
WORTH_IT = 0.8  # of an exchange all to all: what slices are told of for
HEADINGS = (
    "stages", "peers a stage", "memory", "micro-batch", "round", "H, codec", "exchange", "tokens/s", "GB a day up, down", "binds",
)  # fmt: skip


def run_plan(flags: PlanFlags) -> None:
    """Prints it. Raises ConfigError."""
    from dilocox_peer.model.architecture import prepare
    from dilocox_peer.model.partition import cut_into
    from dilocox_peer.peer.planning.forecast import best, forecast, in_slices

    manifest = _manifest_of(flags.model)
    prepare(manifest, is_own=True)
    peers = _peers_of(flags, manifest)
    counts = flags.stages or [count for count in COUNTS if count <= min(manifest.model.layers, peers.count)]
    found = []
    for count in counts:
        try:
            found.append(forecast(cut_into(manifest, count), peers))
        except ValueError as error:
            raise ConfigError(f"--stages {count}: {error}") from None
    chosen = best(found)
    sliced = in_slices(manifest) if chosen is not None else None
    other = forecast(cut_into(sliced, chosen.stages), peers) if chosen is not None and sliced is not None else None
    if flags.as_json:
        typer.echo(plain_json(_document(found, chosen, other, peers)))
        return
    for line in plan_lines(found, chosen, other, peers, flags):
        typer.echo(line)


def _manifest_of(model: str) -> Manifest:
    """Raises ConfigError."""
    if model in SIZES:
        return preset("1.3b", model={"context": 2048, "rope_theta": 500000.0, **SIZES[model]})
    if model in PRESETS:
        return preset(model)
    if Path(model).is_file():
        return read_manifest(Path(model))
    names = ", ".join([*PRESETS, *SIZES])
    raise ConfigError(f"{model} is no run.toml, and no size that is known: give a file, or one of {names}")


def _peers_of(flags: PlanFlags, manifest: Manifest) -> "Peers":
    from dilocox_peer.peer.planning.forecast import Peers, operations

    if flags.tokens_per_s is not None and flags.tflops is not None:
        raise ConfigError("--tokens-per-s and --tflops: give one of them")
    if flags.tokens_per_s is not None:
        tokens_per_s = flags.tokens_per_s
    elif flags.tflops is not None:
        tokens_per_s = flags.tflops * 1e12 / operations(manifest)
    else:
        tokens_per_s = _measured(manifest, flags)
    memory = None if flags.memory is None else int(flags.memory * 1e9)
    line = (flags.up * 1e6, flags.down * 1e6, flags.rtt / 1000)
    return Peers(flags.peers, *line, tokens_per_s, memory, by_site=flags.by_site)


def _measured(manifest: Manifest, flags: PlanFlags) -> float:
    """What this machine does with the whole model, as `doctor` measures it."""
    from dilocox_peer.cli.doctor import measured_tokens_per_s
    from dilocox_peer.model.partition import cut_into

    typer.echo("measuring this machine for some seconds; --tokens-per-s or --tflops spares it", err=True)
    return measured_tokens_per_s(cut_into(manifest, 1), device=flags.device, threads=flags.threads)


def plan_lines(
    found: "Sequence[Forecast]",
    chosen: "Forecast | None",
    in_slices: "Forecast | None",
    peers: "Peers",
    flags: PlanFlags,
) -> list[str]:
    """The table, what is best and why, and what was assumed. in_slices: the chosen one, averaged so; None: it is, or cannot be."""
    rows = [HEADINGS, *(_row(each, chosen) for each in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += ["", *_advice(found, chosen, peers, flags)]
    if chosen is not None and in_slices is not None and _is_worth_it(in_slices, chosen):
        other = in_slices.setting
        lines.append(
            f"averaged in slices (init --slices): H {other.inner_steps}, {other.codec}; an exchange of {_duration(in_slices.exchange_s)}, "
            f"{in_slices.sent_bytes_a_day / 1e9:,.1f} GB a day up"
        )
    lines.append("")
    memory = "" if peers.memory_bytes is None else f", {size(peers.memory_bytes)} of memory"
    lines.append(
        f"for {peers.count} equal peers: {peers.uplink_bps / 1e6:g} Mbit/s up, {peers.downlink_bps / 1e6:g} down"
        f"{' for the site of a replica' if peers.by_site else ''}, "
        f"{1000 * peers.round_trip_s:g} ms between two{memory}, {peers.tokens_per_s:,.0f} tokens/s of the whole model on one"
    )
    lines.append(
        "reckoned, not measured: windows always full, no peer away, training loses nothing to merges; codec and H as the run's own "
        "controller comes to on such lines"
    )
    return lines


def _is_worth_it(in_slices: "Forecast", chosen: "Forecast") -> bool:
    """Whether it is worth telling of: another codec or length of rounds, or shorter exchanges."""
    return in_slices.setting != chosen.setting or in_slices.exchange_s < WORTH_IT * chosen.exchange_s


def _row(each: "Forecast", chosen: "Forecast | None") -> tuple[str, ...]:
    return (
        f"{'> ' if each is chosen else ''}{each.stages}",
        str(each.replicas),
        size(each.memory_bytes) + ("*" if each.recomputes else ""),
        _duration(each.micro_batch_s),
        _duration(each.round_s),
        f"{each.setting.inner_steps}, {each.setting.codec}",
        "-" if each.replicas == 1 else f"{_duration(each.exchange_s)} ({each.exchange_share:.0%})",
        f"{each.tokens_per_s:,.0f}",
        f"{each.sent_bytes_a_day / 1e9:,.1f}, {each.received_bytes_a_day / 1e9:,.1f}",
        each.binding,
    )


def _advice(found: "Sequence[Forecast]", chosen: "Forecast | None", peers: "Peers", flags: PlanFlags) -> list[str]:
    lines = []
    if any(each.recomputes for each in found):
        lines.append("*: there it computes forwards twice, which peers do by themselves where memory is short")
    if chosen is None:
        least = min(found, key=lambda each: each.memory_bytes)
        return [
            *lines,
            f"it fits nowhere: the least is {size(least.memory_bytes)} a peer, with {least.stages} stages. More stages (with as many "
            "peers), a smaller inner.micro_batch, moments and residual in bfloat16, or adapters (--lora-rank) need less",
        ]
    stages = "1 stage" if chosen.stages == 1 else f"{chosen.stages} stages"
    lines.append(
        f"best: {stages} of {chosen.replicas}, {chosen.tokens_per_s:,.0f} tokens/s, the run's "
        f"{_count(chosen.tokens_per_s * chosen.duration_s)} tokens in {_duration(chosen.duration_s)}; "
        f"{size(chosen.disk_bytes)} of disk a peer"
        + (f"; {chosen.times_fewer:,.0f} times fewer bytes than AllReduce" if chosen.replicas > 1 else "")
    )
    if (spare := peers.count - chosen.peers) > 0:
        lines.append(f"{spare} of {peers.count} peers have no place: stages take whole sets, and limits.max_peers each")
    lines.append(_remedy(chosen, peers))
    if flags.price_hour or flags.price_gb:
        cost = chosen.peers * (24 * flags.price_hour + chosen.sent_bytes_a_day / 1e9 * flags.price_gb)
        lines.append(f"cost: {cost:,.2f} a day, {cost * chosen.duration_s / 86400:,.2f} for the run")
    return lines


def _remedy(chosen: "Forecast", peers: "Peers") -> str:
    needed = chosen.needed_uplink_bps / 1e6
    match chosen.binding:
        case "compute":
            return f"compute binds: faster machines or more peers make it faster; the lines are in use {needed / (peers.uplink_bps / 1e6):.0%}"
        case "activations":
            return f"activations bind: with {needed:,.0f} Mbit/s up compute would; or fewer stages, or the stages of a replica at one site (--by-site)"
        case "round trips":
            return "round trips bind: a larger inner.accumulate keeps more micro-batches under way, nearer peers need fewer"
        case "rounds":
            return f"rounds bind: with {needed:,.0f} Mbit/s up they would take no longer than the work; or a larger rounds.inner_steps"
        case "memory":
            return "memory binds"


def _document(
    found: "Sequence[Forecast]", chosen: "Forecast | None", in_slices: "Forecast | None", peers: "Peers"
) -> dict[str, Any]:
    return {
        "peers": asdict(peers),
        "cuts": [{**asdict(each), "is_best": each is chosen} for each in found],
        "best_in_slices": None if in_slices is None else asdict(in_slices),
    }


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"


def _count(tokens: float) -> str:
    for unit, of in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if tokens >= of:
            return f"{tokens / of:.1f} {unit}"
    return f"{tokens:,.0f}"
