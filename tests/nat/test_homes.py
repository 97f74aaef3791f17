"""Peers behind real routers, in network namespaces: benchmarks/homes.py, as tests. `make test-nat` runs them, as root; elsewhere they are
skipped with a word."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HOMES = ROOT / "benchmarks" / "homes.py"
PATIENCE_S = 25.0 - 3.0  # rounds/timing.py's degrade_s, and heartbeats that were missed
LACKS = 77  # exit code of a scenario on a machine that has no namespaces

pytestmark = [pytest.mark.nat, pytest.mark.slow, pytest.mark.timeout(600)]


def played(scenario: str, *flags: str, timeout_s: float = 580.0) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, HOMES, scenario, "--json", *flags],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )
    if done.returncode == LACKS:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    outcome: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return outcome


@pytest.mark.parametrize("scenario", ["a", "b2", "b4", "c", "6"])
def test_homes_that_cannot_dial_one_another_train_one_model(scenario: str):
    outcome = played(scenario)
    assert outcome["met_s"] is not None
    assert len(set(outcome["heads"].values())) == outcome["num_stages"]
    for name, seen in outcome["paths"].items():
        others = {other: how for other, how in seen.items() if other != name}
        assert len(others) == len(outcome["names"]) - 1
        assert set(others.values()) <= {"relayed", "punched", "direct"}, f"{name} sees {others}"


def test_a_relay_that_is_killed_and_comes_back_costs_no_round():
    """Unless it was away for longer than a lost quorum is waited for, as on a machine that is busy."""
    outcome = played("d")
    assert outcome["again_s"] is not None
    assert outcome["away_s"] is not None
    if outcome["away_s"] < PATIENCE_S:
        assert outcome["num_lost"] == 0
    assert len(set(outcome["heads"].values())) == 1


def test_members_pass_on_when_the_bootstrap_is_gone_for_good():
    outcome = played("m")
    assert outcome["met_s"] is not None
    assert outcome["again_s"] is not None
    assert outcome["num_lost"] == 0
    assert len(set(outcome["heads"].values())) == 1


@pytest.mark.parametrize("scenario", ["n", "z"])
def test_a_home_whose_line_changes_contributes_again(scenario: str):
    outcome = played(scenario)
    assert outcome["met_s"] is not None
    assert outcome["again_s"] is not None
    assert len(set(outcome["heads"].values())) == 1


@pytest.mark.nightly
@pytest.mark.timeout(1300)
def test_a_home_that_slept_ten_minutes_and_woke_in_another_network_contributes_again():
    outcome = played("z", "--sleep", "600", timeout_s=1280.0)
    assert outcome["met_s"] is not None
    assert outcome["again_s"] is not None
    assert len(set(outcome["heads"].values())) == 1


def test_homes_that_cannot_meet_by_any_path_found_no_chain_and_say_so():
    outcome = played("o")
    assert outcome["met_s"] is None
    assert not any(outcome["counts"].values())
    assert set(outcome["reach"].values()) == {"outgoing"}


def test_homes_without_a_path_to_one_another_train_with_a_member_that_both_hear():
    """Their messages are passed on by it, and each other's contributions are had of it."""
    outcome = played("g")
    assert outcome["met_s"] is not None
    assert len(set(outcome["heads"].values())) == 1
    assert outcome["paths"]["s"]["t"] == outcome["paths"]["t"]["s"] == "passed on"
    for counts in outcome["counts"].values():
        assert max(counts, key=counts.get) == "3", "most rounds have the contributions of all"


def test_neighbours_whose_routers_lead_to_p2pd_and_not_to_linkd_are_linked():
    """Else each dials the other's closed port, and the run never begins."""
    outcome = played("f")
    assert outcome["met_s"] is not None
    assert len(set(outcome["heads"].values())) == outcome["num_stages"]
    assert set(outcome["reach"].values()) == {"direct"}
    for name in outcome["names"]:
        beside = [other for other in outcome["names"] if outcome["stages"][other] != outcome["stages"][name]]
        assert outcome["links"][name] == sorted(beside)


def test_a_router_that_can_opens_a_port_for_the_neighbours_of_the_pipeline():
    outcome = played("u")
    assert len(set(outcome["heads"].values())) == outcome["num_stages"]
    for name in ("h0", "h2"):
        assert len(outcome["opened"][name]) == 1
        assert outcome["dialled"][name] > 0
    assert outcome["opened"]["h1"] == outcome["opened"]["h3"] == []
