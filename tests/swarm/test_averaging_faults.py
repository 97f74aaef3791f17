"""A peer that is killed in mid-averaging leaves the others with one answer, and a right one: benchmarks/averaging_faults.py
on our side only, with a small vector."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "averaging_faults.py"


def test_survivors_of_a_kill_in_mid_averaging_hold_one_right_answer(tmp_path):
    trials_file = tmp_path / "trials.json"
    command = [sys.executable, str(BENCHMARK), "--systems", "ours", "--elements", "500000", "--repeats", "1"]
    done = subprocess.run(
        [*command, "--timeout", "120", "--json", str(trials_file)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    trials = json.loads(trials_file.read_text())
    assert [trial["moment"] for trial in trials] == ["5% of bytes", "accepted, leader"]
    for trial in trials:
        assert trial["num_hung"] == 0, done.stdout
        assert trial["wrong"] == [0.0] * 3, done.stdout
        assert trial["distinct"] == 1, done.stdout
