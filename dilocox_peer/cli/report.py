"""The JSON report of a demo, from what was seen, and what is said of it at the end. Pure.

Bytes are those a peer handed to the wire for the outer loop: protocol messages and contributions with their frame
headers, not TLS and TCP headers, not state served to joiners and the evaluator. They are compared with a ring
all-reduce of float32 gradients after every inner step among the same replicas, which sends 2 (n-1)/n * 4 P bytes for the P
parameters of a stage; both are means over the peers. What stages send each other is counted on its own.
"""

import json
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from dilocox_peer.cli.demo_table import size
from dilocox_peer.cli.swarm_view import RoundView, SwarmView, pipeline_of, progress_of


def build_report(view: SwarmView, *, stages: int, replicas: int) -> dict[str, Any]:
    """What `demo --report` writes, as a JSON-able dictionary."""
    digests: dict[str, dict[str, str]] = {}
    heads: dict[str, str] = {}
    peers = view.peers.values()
    for peer in peers:
        last = peer.complete or peer.certified
        heads[peer.me], digest = ("", "") if last is None else (last.head, last.anchor_digest)
        digests.setdefault(str(peer.stage), {})[peer.me] = digest
    tokens = view.tokens
    by_stage = {peer.stage: peer.certified.raw_bytes // 4 for peer in peers if peer.certified is not None}
    num_parameters = sum(by_stage.values())
    num_origins = sum(peer.stage == 0 for peer in peers)
    mean_sent = fmean(progress_of(peer).bytes_sent for peer in peers) if peers else 0.0
    step_tokens = view.tokens_of(view.manifest.inner.accumulate)
    return {
        "stages": stages,
        "replicas": replicas,
        "parameters": num_parameters,
        "run_id": view.manifest.run_id,
        "overlap": view.manifest.outer.overlap,
        "rounds": _rounds(view),
        "initial_val_loss": view.initial_val_loss,
        "final_val_loss": view.final_val_loss,
        "bigram_entropy": view.bigram_entropy,
        "unigram_entropy": view.unigram_entropy,
        "tokens": tokens,
        "tokens_per_second": round(view.tokens_per_s, 1),
        "outer_bytes_per_token": round(mean_sent / max(1, tokens / max(1, num_origins)), 4),
        "allreduce_bytes_per_token": round(
            2 * (replicas - 1) / replicas * 4 * num_parameters / stages / step_tokens, 4
        ),
        "heads": heads,
        "anchor_digests": digests,
        "pipeline_bytes_per_token": round(sum(pipeline_of(peer).bytes_sent for peer in peers) / max(1, tokens), 4),
        "resent_micro_batches": view.resent_micro_batches,
        "orphaned_contributions": view.orphaned_contributions,
        "loop_lag_ms_p99": {peer.me: progress_of(peer).lag_ms_p99 for peer in peers},
        "events": view.events,
        "errors": view.errors,
    }


def verdict(report: Mapping[str, Any]) -> list[str]:
    """What is wrong with the swarm that wrote this report; empty when all agree and it learned from its data."""
    problems = [str(error) for error in report["errors"]]
    for stage, digests in report["anchor_digests"].items():
        if len(set(digests.values())) != 1:
            problems.append(f"stage {stage}: the anchors differ: {json.dumps(digests)}")
        heads = {peer: report["heads"][peer] for peer in digests}
        if len(set(heads.values())) != 1:
            problems.append(f"stage {stage}: the chain heads differ: {json.dumps(heads)}")
    if report["final_val_loss"] is None:
        problems.append("no anchor was evaluated")
    return problems


def summary(report: Mapping[str, Any], *, bytes_sent: int, elapsed_s: float) -> list[str]:
    """What a demo says of itself at its end, as lines. bytes_sent: by all peers, for rounds."""
    final, bigram, unigram = (report[key] for key in ("final_val_loss", "bigram_entropy", "unigram_entropy"))
    heads = set(report["heads"].values())
    lines = [""]
    if final is not None and bigram:
        lines += [
            f"validation loss of the anchor  {final:.4f} nats/byte (before training {report['initial_val_loss']:.4f})",
            f"  of its bigram entropy        {final / bigram:.2f} x {bigram:.4f}   (unigram {unigram:.4f})",
        ]
    lines.append(f"tokens                         {report['tokens']:,}, {report['tokens_per_second']:,.0f} a second")
    ours, all_reduce = report["outer_bytes_per_token"], report["allreduce_bytes_per_token"]
    lines.append(f"sent by all peers              {size(bytes_sent)}, {ours:.1f} bytes a token")
    if all_reduce:  # one peer alone would send nothing
        fewer = all_reduce / max(1e-9, ours)
        lines.append(f"  than float32 all-reduce      {fewer:.0f} times fewer ({all_reduce:.0f} bytes a token)")
    named = ", ".join(head[:12] for head in heads)
    return [
        *lines,
        f"heads and anchors              {len(heads)} for {len(report['heads'])} peers: {named}",
        f"time, start to end             {elapsed_s:.0f} s",
    ]


def _rounds(view: SwarmView) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    previous_s = view.first_training_s
    for seen in sorted(view.rounds.values(), key=lambda each: each.number):
        rows.append(_round(view, seen, previous_s))
        previous_s = seen.first_seen_s
    return rows


def _round(view: SwarmView, seen: RoundView, previous_s: float | None) -> dict[str, Any]:
    return {
        "round": seen.number,
        "seconds": round(seen.first_seen_s - (previous_s if previous_s is not None else seen.first_seen_s), 3),
        "tokens": view.tokens_of(seen.micro_batches),
        "train_loss": round(seen.train_loss, 5) if seen.train_losses else None,
        "val_loss": seen.val_loss,
        "contributors": {str(stage): count for stage, count in sorted(seen.stage_contributors.items())},
        "bytes_sent": round(fmean(seen.bytes_sent)),
        "raw_bytes": round(fmean(seen.raw_bytes)),
        "codec": seen.codec,
        "rank": seen.rank or None,
        "inner_steps": seen.inner_steps,
        "exchange_seconds": round(fmean(seen.delays_s), 3) if seen.delays_s else None,
    }
