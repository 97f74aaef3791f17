"""How many contributions a peer sends, all to all and in slices."""

import pytest

from dilocox_peer.compression.ladder import LADDER
from dilocox_peer.compression.slices import RESULT_CODEC
from dilocox_peer.peer.planning.sent import RESULT_TIMES, contributions_sent


def test_all_to_all_grows_with_peers_and_slices_do_not() -> None:
    assert [contributions_sent(n, "int4", is_sliced=False) for n in (1, 2, 4, 64)] == [0, 1, 3, 63]
    assert [contributions_sent(n, "int4", is_sliced=True) for n in (1, 2, 3)] == [0, 1, 2]
    assert contributions_sent(4, "int4", is_sliced=True) == pytest.approx(9 / 4)
    assert contributions_sent(64, "int4", is_sliced=True) < 3


@pytest.mark.parametrize("codec", LADDER)
def test_every_codec_of_a_contribution_has_a_result(codec: str) -> None:
    assert RESULT_TIMES[codec] >= 1
    assert codec in RESULT_CODEC
