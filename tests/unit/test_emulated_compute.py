"""Benchmarks of large stages sleep through micro-batches: what a stage's loop asks of them is known there."""

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_whatever_a_stage_asks_of_its_passes_is_emulated() -> None:
    """In a process of its own, as the package's classes are another's from there on."""
    program = "from headline_worker import emulate; emulate(0.1, None); print('all of them')"
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=BENCHMARKS, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.stdout == "all of them\n", ran.stderr
