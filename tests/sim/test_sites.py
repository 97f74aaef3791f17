"""Micro-batches stay where the lines are fast, whatever the peers' ids are: at most 2 % of them cross a slow line."""

import pytest

from .sites import at_sites

LAYOUTS = {
    "2 x 2, ids pair the sites": ((2, 2), [[0, 1], [0, 1]]),
    "2 x 2, ids cross": ((2, 2), [[0, 1], [1, 0]]),
    "4 x 4": ((4, 4), [[0, 1, 0, 1], [1, 1, 0, 0]]),
    "three stages": ((2, 2, 2), [[0, 1], [1, 0], [0, 1]]),
    "three sites": ((3, 3), [[0, 1, 2], [2, 0, 1]]),
    "more origins than callees": ((3, 2), [[0, 0, 1], [0, 1]]),
}


@pytest.mark.parametrize("named", [False, True], ids=["measured", "named"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_micro_batches_stay_at_their_site(layout: str, named: bool) -> None:
    """With ids alone half of them cross, or all, and the line carries a tenth of what the peers compute."""
    seen = at_sites(1, *LAYOUTS[layout], named=named, measure_s=40.0)
    assert seen.crossed <= 0.02
    assert seen.share >= 0.95


def test_a_site_without_the_next_stage_uses_the_other_s() -> None:
    """All peers of stage 1 are at one of two sites: both origins work, over a line that carries it."""
    seen = at_sites(1, (2, 2), [[0, 1], [0, 0]], line_bps=1e8, measure_s=40.0)
    assert 0.4 <= seen.crossed <= 0.6
    assert seen.share >= 0.95
