"""Strangers' bytes at every entry of a live bootstrap and live peers: benchmarks/fuzz.py, in small."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_twenty_thousand_mutated_messages_end_and_stop_nobody():
    """The script judges: everybody is the process it was, answers, certifies rounds, and has grown by at most 64 MB."""
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "benchmarks" / "fuzz.py"),
            "--messages",
            "20000",
            "--strangers",
            "3",
            "--calm",
            "0",
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=390,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("well")
    for entry in (
        "directory to peer0",
        "message to peer0",
        "stream to bootstrap",
        "message: taken",  # some are whole, and reach whom they are for
        "link frame to peer0",
        "answer to rpc_store",
    ):
        assert entry in done.stdout, done.stdout
