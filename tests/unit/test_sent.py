"""What averaging makes a peer send and keep, all to all and in slices."""

import pytest

from dilocox_peer.compression.ladder import LADDER
from dilocox_peer.compression.slices import RESULT_CODEC
from dilocox_peer.peer.planning.sent import (
    LOST_BYTES,
    RESULT_TIMES,
    TABLE_BYTES,
    AveragedKept,
    contributions_kept,
    contributions_sent,
)


def test_all_to_all_grows_with_peers_and_slices_do_not() -> None:
    assert [contributions_sent(n, "int4", is_sliced=False) for n in (1, 2, 4, 64)] == [0, 1, 3, 63]
    assert [contributions_sent(n, "int4", is_sliced=True) for n in (1, 2, 3)] == [0, 1, 2]
    assert contributions_sent(4, "int4", is_sliced=True) == pytest.approx(9 / 4)
    assert contributions_sent(64, "int4", is_sliced=True) < 3


def test_all_to_all_keeps_what_all_have_sent_and_slices_one_result() -> None:
    assert [contributions_kept(n, 10, 0, "int4", is_sliced=False) for n in (1, 4, 64)] == [(10, 0), (40, 0), (640, 0)]
    assert [contributions_kept(n, 10, 9, "int4", is_sliced=True) for n in (1, 3)] == [(10, 0), (30, 0)], "no slices yet"
    four, many = (contributions_kept(n, 1e6, 10**6, "int4", is_sliced=True) for n in (4, 64))
    assert four == AveragedKept(1e6, 3 * (2.5e6 + 4 * TABLE_BYTES) + 4 * LOST_BYTES / 2 * 10**6)
    assert many.a_round == four.a_round
    assert many.passing < four.passing, "of three contributions, and its part of what was lost"
    assert contributions_kept(4, 1e6, 10**6, "topk", is_sliced=True).a_round == 3e6, "its results are larger"


@pytest.mark.parametrize("codec", LADDER)
def test_every_codec_of_a_contribution_has_a_result(codec: str) -> None:
    assert RESULT_TIMES[codec] >= 1
    assert codec in RESULT_CODEC
