"""A contribution without a micro-batch weighs nothing in the mean: what the codec had lost of earlier rounds stays with its author."""

import pytest
import torch

from dilocox_peer.compression.policy import policy_named
from dilocox_peer.peer.training.outer import OuterOptimizer, OuterSettings, first_state
from dilocox_peer.types import Layout, TensorSpec, sha256

N = 4096


def _peer(codec: str) -> OuterOptimizer:
    layout = Layout((TensorSpec("w", (64, 64)),))
    state = first_state(layout, torch.zeros(N), head=sha256(b"genesis"))
    return OuterOptimizer(OuterSettings(1.0, 0.0, policy_named(codec, rank=1)), state)


@pytest.mark.parametrize("codec", ["sign", "int2", "topk"])
@pytest.mark.parametrize("is_anybody_working", [True, False])
def test_who_did_nothing_in_a_round_loses_nothing_of_the_rounds_before(codec: str, is_anybody_working: bool) -> None:
    torch.manual_seed(0)
    me, other = _peer(codec), _peer(codec)
    local_N = torch.randn(N)
    mine = me.offer(local_N.clone(), 8)
    theirs = other.offer(torch.randn(N), 8)
    shift_N = me.merge([mine.blob, theirs.blob], [8, 8], own=True, round_number=1, head=sha256(b"1"))[1]
    other.merge([mine.blob, theirs.blob], [8, 8], own=True, round_number=1, head=sha256(b"1"))
    local_N += shift_N
    before = me.residual_N.clone()
    assert float(before.norm()) > 0.1 * N**0.5, "the codec has lost something"
    for number in range(2, 6):  # four rounds in which we do nothing (paused, or no origin sends us work)
        mine = me.offer(local_N.clone(), 0)
        assert mine.micro_batches == 0
        theirs = other.offer(torch.randn(N), 8 if is_anybody_working else 0)
        given = [mine.blob, theirs.blob], [0, 8 if is_anybody_working else 0]
        head = sha256(bytes([number]))
        local_N += me.merge(*given, own=True, round_number=number, head=head)[1]
        other.merge(*given, own=True, round_number=number, head=head)
    decay = 0.8**4 if codec == "topk" else 1.0  # at most, were every idle round one of feedback
    kept = float(me.residual_N.norm() / before.norm())
    assert kept >= 0.99 * decay, f"of the residual {kept:.3f} is left, and nobody's anchor has the rest"
