"""What strangers are told of the chain is a part of the upload, and of the month."""

import math

import pytest

from dilocox_peer.network.bandwidth import TOLD_SHARE, Bandwidth
from dilocox_peer.peer.settings import AtMost


def test_strangers_are_told_a_part_of_the_upload() -> None:
    """A stranger's 80 bytes bring a page of 290 kB: three of them drew 32 Mbit/s of a line of five."""
    bandwidth = Bandwidth(None, None)
    assert bandwidth.told_rate == math.inf
    bandwidth.set_upload(1000.0)
    assert bandwidth.told_rate == TOLD_SHARE * 1000.0
    assert Bandwidth(1e6, None, 2000.0).told_rate == 2000.0


def test_a_month_s_traffic_leaves_a_tenth_for_it() -> None:
    limits = AtMost(max_gb_month=50.0).limits
    assert limits.told_bytes_per_s * 30 * 86400 == pytest.approx(5e9)
    assert AtMost().limits.told_bytes_per_s * 8 == 32e6
