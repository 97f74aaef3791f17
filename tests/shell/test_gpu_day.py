"""The script for the day with an accelerator runs, so that the day is not spent on the script."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_day.py"


@pytest.mark.slow
def test_all_but_what_a_card_alone_can_show_is_kept_on_a_cpu(tmp_path: Path) -> None:
    report = tmp_path / "day.json"
    command = [
        sys.executable,
        str(SCRIPT),
        "--device",
        "cpu",
        "--preset",
        "tiny",
        "--steps",
        "2",
        "--json",
        str(report),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=SCRIPT.parents[1])
    found = {each["check"]: each["verdict"] for each in json.loads(report.read_text())}
    # Speed on a machine that does other things says nothing.
    assert [check for check, verdict in found.items() if verdict == "missed"] in ([], ["beside transformers"]), (
        ran.stdout
    )
    assert {check for check, verdict in found.items() if verdict == "skipped"} == {"memory", "two cards"}
