"""Exchanges that take much of a round lose no contribution: what is on its way is waited for as long as the plan lets it take."""

import pytest

from .exchange import exchange


@pytest.mark.parametrize("peers", [2, 4])
@pytest.mark.parametrize(("blob_s", "share"), [(0.5, 0.98), (2.0, 0.98), (2.5, 0.98), (2.8, 0.95)])
def test_contributions_on_their_way_are_waited_for(peers: int, blob_s: float, share: float) -> None:
    """A round takes 4 s, so the last is the 0.7 of one that the planner aims at. Half of a round was all that was waited for: there
    0.5 of the contributions of two counted, and a third of those of four."""
    seen = [exchange(seed, peers=peers, blob_s=blob_s, rounds=30) for seed in range(2)]
    assert min(each.share for each in seen) >= share
    assert max(each.round_s for each in seen) < 4.6


def test_bytes_on_their_way_are_a_sign_of_life() -> None:
    """Where messages wait behind contributions for longer than a peer may be silent, what it sends shows that it is there."""
    silent, told = (
        [
            exchange(seed, peers=2, blob_s=3.2, rounds=30, waits_behind=True, tells_bytes=tells).share
            for seed in range(2)
        ]
        for tells in (False, True)
    )
    assert sum(told) > sum(silent) + 0.2, "a tenth of all contributions"
    assert min(told) >= 0.85
