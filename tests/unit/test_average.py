"""The running average of anchors."""

import pytest
import torch

from dilocox_peer.peer.training.anchor_state import AnchorState
from dilocox_peer.peer.training.average import AnchorAverage
from dilocox_peer.types import Digest, Layout

LAYOUT = Layout.of([("a", (3,))])


def state(number, value):
    anchor = torch.full((3,), float(value)).numpy().tobytes()
    return AnchorState.of(LAYOUT, head=Digest(bytes(32)), round_number=number, anchor=anchor, momentum=bytes(12))


def test_one_anchor_is_its_own_average_and_more_weigh_by_age():
    average = AnchorAverage(0.8)
    average.take(state(1, 5.0))
    assert average.mean_N().tolist() == pytest.approx([5.0] * 3)
    average.take(state(2, 10.0))
    assert average.mean_N()[0].item() == pytest.approx((0.8 * 0.2 * 5 + 0.2 * 10) / (0.8 * 0.2 + 0.2))
    average.take(state(2, 99.0))
    assert average.mean_N()[0].item() < 10.0


def test_rounds_that_were_passed_over_do_not_make_it_slower():
    every, some = AnchorAverage(0.8), AnchorAverage(0.8)
    every.take(state(1, 1.0))
    some.take(state(1, 1.0))
    for number in (2, 3, 4):
        every.take(state(number, 3.0))
    some.take(state(4, 3.0))
    assert torch.allclose(every.mean_N(), some.mean_N())
