"""What a peer reports with a contribution is read by everybody, however long something took."""

import pytest

from dilocox_peer.peer.planning.measured import Measured
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import MAX_QUANTITY, Entry
from dilocox_peer.wire.rounds import Offer, decode_message, encode_message


@pytest.mark.parametrize(("hours", "accumulate"), [(1.0, 512), (40.0, 8), (24.0 * 365, 4096)])
@pytest.mark.parametrize("uplink_bps", [0.0, 1e6, 1e18])
def test_a_slow_peers_own_report_is_within_what_others_read(hours: float, accumulate: int, uplink_bps: float) -> None:
    """One micro-batch in an hour, of a step of 512, or one of 8 after a stage was empty for two days: its offers were malformed, and
    their sender was turned away."""
    measured, peer = Measured(), PeerId("a")
    measured.on_close(0.0, tokens=0, tokens_a_step=1, lost=0.0, uplink_bps=uplink_bps)
    measured.on_merge(1e10 * hours, needed_rank=1)
    report = measured.on_close(
        hours * 3600, tokens=1024, tokens_a_step=accumulate * 1024, lost=0.0, uplink_bps=uplink_bps
    )
    assert report.step_us == report.exchange_ms == MAX_QUANTITY
    offer = Offer(0, Digest(bytes(32)), 0, Entry(peer, 1, Digest(bytes(32)), 100, 1, b"", report), b"s" * 64)
    assert decode_message(encode_message(offer), peer) == offer
