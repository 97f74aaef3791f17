"""`plan` as a person uses it."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dilocox_peer.cli.flags import PlanFlags
from dilocox_peer.cli.main import app
from dilocox_peer.cli.plan import SIZES, run_plan
from dilocox_peer.config import preset, to_toml
from dilocox_peer.errors import ConfigError


def printed(capsys: pytest.CaptureFixture[str], flags: PlanFlags) -> str:
    run_plan(flags)
    return capsys.readouterr().out


def test_a_table_what_is_best_and_what_was_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, PlanFlags(model="125m", peers=8, tokens_per_s=6000.0, memory=16.0))
    lines = out.splitlines()
    assert lines[0].split()[0] == "stages"
    assert [line.split()[0] for line in lines if line.strip().startswith(">")] == [">"]
    assert "best: 1 stage of 8, 48,000 tokens/s" in out
    assert "compute binds" in out
    assert "reckoned, not measured" in out
    assert all(len(line) < 150 for line in lines[:8])


def test_a_run_of_ones_own_and_json_for_programs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(to_toml(preset("small")))
    flags = PlanFlags(model=str(path), peers=2, tokens_per_s=900.0, stages=(1, 2), as_json=True)
    found = json.loads(printed(capsys, flags))
    assert [cut["stages"] for cut in found["cuts"]] == [1, 2]
    assert [cut["is_best"] for cut in found["cuts"]] == [True, False]
    assert found["peers"]["tokens_per_s"] == 900.0


def test_what_slices_would_change_is_told_where_many_share_a_stage(capsys: pytest.CaptureFixture[str]) -> None:
    def told(peers: int) -> tuple[str, Any]:
        flags = PlanFlags(model="125m", peers=peers, tokens_per_s=8000.0, up=20.0, stages=(1,))
        document = json.loads(printed(capsys, replace(flags, as_json=True)))
        return printed(capsys, flags), document

    out, document = told(16)
    [cut], sliced = document["cuts"], document["best_in_slices"]
    assert (cut["setting"]["codec"], sliced["setting"]["codec"]) == ("topk", "int2")
    assert "averaged in slices (init --slices): H 32, int2; an exchange of" in out
    out, document = told(3)
    assert document["best_in_slices"]["exchange_s"] == document["cuts"][0]["exchange_s"], "the same up to three"
    assert "slices" not in out


def test_stages_of_a_site_leave_its_line_to_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    flags = PlanFlags(model="125m", peers=4, tokens_per_s=6000.0, stages=(2,))
    assert "activations bind" in printed(capsys, flags)
    out = printed(capsys, replace(flags, by_site=True))
    assert "compute binds" in out
    assert "20 Mbit/s up, 100 down for the site of a replica" in out


@pytest.mark.parametrize("name", SIZES)
def test_large_sizes_are_what_they_are_called(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = PlanFlags(model=name, peers=64, tflops=100.0, up=1000.0, down=1000.0, stages=(1,), as_json=True)
    [cut] = json.loads(printed(capsys, flags))["cuts"]
    assert cut["parameters"] == pytest.approx(1e9 * float(name[:-1]), rel=0.05)


def test_where_it_fits_nowhere_the_least_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, PlanFlags(model="13b", peers=8, memory=8.0, tflops=20.0))
    assert "it fits nowhere: the least is" in out
    assert "best:" not in out


def test_costs_are_reckoned_where_prices_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, PlanFlags(model="125m", peers=2, tokens_per_s=6000.0, stages=(1,), price_hour=0.5))
    assert "cost: 24.00 a day" in out


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (PlanFlags(model="nothing"), "is no run.toml, and no size that is known"),
        (PlanFlags(model="tiny", tokens_per_s=1.0, tflops=1.0), "give one of them"),
        (PlanFlags(model="tiny", tokens_per_s=1.0, peers=1, stages=(2,)), "2 stages need as many peers, there are 1"),
        (PlanFlags(model="tiny", tokens_per_s=1.0, stages=(3,)), "--stages 3: 3 stages of 2 blocks"),
    ],
)
def test_wrong_input_is_one_line(flags: PlanFlags, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        run_plan(flags)


# ---- docs/planning.md --------------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"


def typed(words: str) -> str:
    """What `dilocox-peer plan` and these words print."""
    told = CliRunner().invoke(app, ["plan", *words.split()])
    assert told.exit_code == 0, told.output
    return told.output


def test_the_example_of_the_page_is_what_the_command_prints() -> None:
    found = re.search(r"^```text\n\$ dilocox-peer plan (.*)\n((?:.*\n)*?)```$", PAGE.read_text(), re.MULTILINE)
    assert found is not None
    assert typed(found[1]) == found[2]


def test_the_sizes_of_the_page_are_what_the_command_prints() -> None:
    rows = re.findall(r"^\| `(.* --rtt 30|125m .*)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == 6
    for words, told in rows:
        out = typed(words)
        best = next(line for line in out.splitlines() if line.strip().startswith(">"))
        stages, replicas, memory, _, length, _, exchange, tokens, _, _, binds = re.split(
            r" {2,}|, (?=[0-9])", best.strip(" >")
        )
        run = re.search(r"the run's (.*) tokens in (.*?);", out)
        assert run is not None
        assert (
            told == f"{stages} x {replicas} | {memory} | {length}, {exchange} | {tokens} ({binds}) | {run[1]}, {run[2]}"
        )
