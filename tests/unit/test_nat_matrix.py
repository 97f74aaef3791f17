"""benchmarks/nat_matrix.py without a word is of homes of all kinds."""

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

PROGRAM = """
import sys
import nat_matrix

nat_matrix.missing = lambda: "nothing is started here"
sys.argv[1:] = WORDS
sys.exit(nat_matrix.main())
"""


def told(*words: str) -> tuple[int, str]:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("WORDS", repr(words))],
        cwd=BENCHMARKS, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return ran.returncode, ran.stderr


def test_all_homes_are_taken_where_none_is_named() -> None:
    assert told() == (77, "skipped: nothing is started here\n")


def test_a_home_of_no_kind_is_refused() -> None:
    status, said = told("a", "x")
    assert (status, "no such home: x" in said) == (2, True), said
