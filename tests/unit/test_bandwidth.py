"""What strangers are told of the chain is a part of the upload, and of the month."""

import pytest

from dilocox_peer.network.bandwidth import LEAST_TOLD_BYTES, TOLD_BURST_S, TOLD_SHARE, Bandwidth
from dilocox_peer.peer.settings import AtMost

PAGE = 100_000


def told(bandwidth: Bandwidth) -> int:
    """Bytes at once."""
    found = 0
    while found < 10**9 and bandwidth.may_tell(PAGE):
        found += PAGE
    return found


@pytest.mark.parametrize("upload", [625_000.0, 100.0])
def test_strangers_are_told_a_part_of_the_upload(upload: float) -> None:
    """A stranger's 80 bytes bring a page of 290 kB: three of them drew 32 Mbit/s of a line of five."""
    most = max(TOLD_SHARE * TOLD_BURST_S * upload, LEAST_TOLD_BYTES)
    assert most - PAGE < told(Bandwidth(upload, None)) <= most + PAGE


def test_without_any_limit_all_is_told() -> None:
    assert told(Bandwidth(None, None)) == 10**9


def test_a_limit_that_comes_later_holds() -> None:
    bandwidth = Bandwidth(None, None)
    assert bandwidth.may_tell(PAGE)
    bandwidth.set_upload(1000.0)
    assert told(bandwidth) <= LEAST_TOLD_BYTES


def test_a_month_s_traffic_leaves_a_tenth_for_it() -> None:
    limits = AtMost(max_gb_month=50.0).limits
    assert limits.told_bytes_per_s * 30 * 86400 == pytest.approx(5e9)
    assert AtMost().limits.told_bytes_per_s * 8 == 32e6
