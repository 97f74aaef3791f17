"""The demo's table and report are projections of the peers' events, and say what went wrong."""

import io
import json
from typing import Any

import pytest
from rich.console import Console

from dilocox_peer.cli.demo_table import render, size, sparkline
from dilocox_peer.cli.report import build_report, verdict
from dilocox_peer.cli.swarm_view import SwarmView
from dilocox_peer.config import preset
from dilocox_peer.events import (
    BranchSwitched,
    Failed,
    PeerStarted,
    PipelineProgress,
    RoundCertified,
    RunComplete,
    TrainingProgress,
)
from dilocox_peer.events_of_data import DataMeasured, Evaluated
from dilocox_peer.types import PeerId

PEERS = {"peer0": PeerId("12D3KooWaaaaaa"), "peer1": PeerId("12D3KooWbbbbbb")}


def swarm(*, digests: tuple[str, str] = ("d1", "d1"), validation: float | None = 1.5) -> SwarmView:
    view = SwarmView(preset("tiny", rounds={"total": 2}))
    view.take("evaluator", DataMeasured(3.0, 2.4, 1000).record(0.0))
    view.take("evaluator", Evaluated(0, 5.5, 100).record(0.5))
    for label, peer in PEERS.items():
        view.take(label, PeerStarted(peer, "run", 0, ()).record(1.0))
        view.take(label, TrainingProgress(1, 10, 5120, 1000.0, 3.0, 500, 400, 2.0).record(2.0))
    for number in (1, 2):
        for (label, peer), digest in zip(PEERS.items(), digests, strict=True):
            certified = RoundCertified(
                round=number,
                head=f"h{number}",
                view=1,
                ballot=0,
                contributors=tuple(PEERS.values()),
                roster=tuple(PEERS.values()),
                micro_batches=64,
                own_included=True,
                wait_s=1.0,
                bytes_sent=1000,
                raw_bytes=4000,
                train_loss=3.0 - number,
                anchor_digest=digest,
            )
            view.take(label, certified.record(2.0 + number))
            view.take(label, RunComplete(number, f"h{number}", digest).record(3.0 + number))
            assert peer
        if validation is not None:
            view.take("evaluator", Evaluated(number, validation, 100).record(2.5 + number))
    return view


def report_of(view: SwarmView) -> dict[str, Any]:
    return build_report(view, stages=1, replicas=2)


def test_the_report_has_every_promised_field_and_is_json():
    report = json.loads(json.dumps(report_of(swarm())))
    promised = {
        "stages", "replicas", "rounds", "initial_val_loss", "final_val_loss", "bigram_entropy", "unigram_entropy",
        "tokens_per_second", "outer_bytes_per_token", "allreduce_bytes_per_token", "anchor_digests",
        "resent_micro_batches", "orphaned_contributions", "events", "errors",
    }  # fmt: skip
    assert promised <= set(report)
    row = report["rounds"][1]
    assert {"round", "seconds", "tokens", "train_loss", "val_loss", "contributors", "bytes_sent", "raw_bytes"} <= set(
        row
    )
    assert row["tokens"] == 64 * 8 * 64
    assert row["contributors"] == {"0": 2}
    assert report["initial_val_loss"] == 5.5


def test_bytes_a_token_are_what_one_peer_sent_over_what_it_trained():
    report = report_of(swarm())
    assert report["outer_bytes_per_token"] == pytest.approx(500 / 5120, abs=1e-4)
    assert report["allreduce_bytes_per_token"] == pytest.approx(2 * (1 / 2) * 4 * 1000 / 512, abs=1e-3)


def test_a_swarm_that_agrees_has_no_problems():
    assert verdict(report_of(swarm())) == []


def test_anchors_that_differ_are_a_problem():
    assert any("anchors differ" in problem for problem in verdict(report_of(swarm(digests=("d1", "d2")))))


def test_a_run_nobody_evaluated_is_a_problem():
    view = swarm(validation=None)
    view.final_val_loss = None
    assert "no anchor was evaluated" in verdict(report_of(view))


def test_failures_and_orphans_are_carried_into_the_report():
    view = swarm()
    view.take("peer1", Failed("transport", "gone").record(9.0))
    view.take("peer1", BranchSwitched(1, 2, 3, 2).record(9.0))
    report = report_of(view)
    assert report["errors"] == ["peer1: transport: gone"]
    assert report["orphaned_contributions"] == 2


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_the_terminal(width):
    out = io.StringIO()
    Console(file=out, width=width).print(render(swarm(), elapsed_s=12.0))
    text = out.getvalue()
    assert all(len(line) <= width for line in text.splitlines())
    for needed in ("peer0", "peer1", "2/2", "1.5000", "bigram entropy 2.400", "complete"):
        assert needed in text


def test_small_numbers_are_drawn_readably():
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁"
    assert sparkline([]) == ""


@pytest.mark.parametrize("diverged", [float("inf"), float("-inf"), float("nan"), 1e308, -1e308])
def test_a_loss_that_has_diverged_is_no_bar(diverged: float) -> None:
    assert sparkline([3.0, diverged, 2.0, 1.0, -diverged]) == "█▅▁"
    assert sparkline([diverged]) == ""
    assert size(999) == "999 B"
    assert size(1_500_000) == "1.5 MB"


def two_stages(*, heads: tuple[str, str] = ("h1", "h1")) -> SwarmView:
    """Two heads, two peers of stage 1 with three times the parameters."""
    view = SwarmView(preset("tiny", rounds={"total": 1}, stages={"count": 2}))
    view.take("evaluator", Evaluated(1, 1.5, 100).record(9.0))
    for index in range(4):
        label, peer, stage = f"peer{index}", PeerId(f"12D3KooW{index}"), index % 2
        view.take(label, PeerStarted(peer, "run", stage, ()).record(1.0))
        view.take(label, TrainingProgress(1, 10, 5120, 1000.0, 3.0, 500, 400, 2.0).record(2.0))
        view.take(label, PipelineProgress(2, 0.5, 3, 1, 6, index, 0, 9000, 9000).record(2.0))
        certified = RoundCertified(
            round=1, head=heads[index // 2] if stage else "h0", view=1, ballot=0, contributors=(peer,), roster=(peer,),
            micro_batches=64 if stage == 0 else 70, own_included=True, wait_s=1.0, bytes_sent=1000,
            raw_bytes=4000 if stage == 0 else 12000, train_loss=2.0, anchor_digest=f"d{stage}",
        )  # fmt: skip
        view.take(label, certified.record(3.0))
    return view


def test_tokens_count_once_at_stage_0_and_parameters_once_a_stage():
    report = build_report(two_stages(), stages=2, replicas=2)
    assert report["tokens"] == 2 * 5120
    assert report["rounds"][0]["tokens"] == 64 * 8 * 64
    assert report["parameters"] == 1000 + 3000
    assert report["resent_micro_batches"] == 0 + 1 + 2 + 3
    assert report["pipeline_bytes_per_token"] == pytest.approx(4 * 9000 / 10240, abs=1e-4)
    assert report["outer_bytes_per_token"] == pytest.approx(500 / 5120, abs=1e-4)
    assert report["allreduce_bytes_per_token"] == pytest.approx(2 * (1 / 2) * 4 * 2000 / 512, abs=1e-3)


def test_each_stage_has_a_head_of_its_own():
    assert verdict(build_report(two_stages(), stages=2, replicas=2)) == []
    problems = verdict(build_report(two_stages(heads=("h1", "other")), stages=2, replicas=2))
    assert any("stage 1: the chain heads differ" in problem for problem in problems)
