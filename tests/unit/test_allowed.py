"""Which codecs others' contributions may be of: what some plan of the run may name, whatever this round's says."""

from typing import Any

import pytest
import torch

from dilocox_peer.compression.codec import CODECS, uniform_policy
from dilocox_peer.compression.contribution import encode_contribution
from dilocox_peer.compression.ladder import LADDER, LOW_RANK
from dilocox_peer.compression.policy import policy_named
from dilocox_peer.config import preset
from dilocox_peer.errors import MalformedBlob
from dilocox_peer.peer.planning.plan import first_plan, plan_bounds
from dilocox_peer.peer.training.known_norms import KnownNorms, allowed_codecs
from dilocox_peer.types import Layout, TensorSpec, sha256
from dilocox_peer.wire.declared import replaced

LAYOUT = Layout((TensorSpec("w", (96, 80)), TensorSpec("e", (50, 30), "embedding"), TensorSpec("b", (9,), "vector")))


def norms(**compression: Any) -> KnownNorms:
    return KnownNorms(LAYOUT, allowed_codecs(preset("tiny", compression=compression)))


def checked(norms: KnownNorms, codec_of: Any) -> None:
    blob = encode_contribution(LAYOUT, torch.randn(LAYOUT.num_elements), codec_of)
    norms.check(sha256(blob), memoryview(blob))
    assert norms.get(sha256(blob)) is not None


@pytest.mark.parametrize("first", [*LADDER, LOW_RANK])
def test_a_contribution_by_any_plan_that_the_run_may_have_is_taken(first: str) -> None:
    """So one by an earlier plan is, too, after the codec has changed."""
    for codec in {*LADDER, first}:
        checked(norms(codec=first), policy_named(codec, rank=8))
    checked(norms(codec=first, adapt="off", rank=8), policy_named(first, rank=8))
    if first == LOW_RANK:
        for rank in (1, 20, 64, 4096):
            checked(norms(codec=first), policy_named(first, rank=rank))
            checked(norms(codec=first, adapt="rank"), policy_named(first, rank=rank))


@pytest.mark.parametrize(
    ("compression", "codec"),
    [
        ({"codec": "int4"}, "ecsq"),
        ({"codec": "int4"}, LOW_RANK),
        ({"codec": "int4", "adapt": "off"}, "topk"),
        ({"codec": LOW_RANK, "adapt": "rank"}, "topk"),
    ],
)
def test_another_codec_is_refused_before_anything_is_decoded(
    compression: dict[str, str], codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = encode_contribution(LAYOUT, torch.randn(LAYOUT.num_elements), uniform_policy(codec))
    for each in CODECS.values():
        monkeypatch.setattr(each, "open", None)
    with pytest.raises(MalformedBlob, match=f"w in {codec}; in this run it may be in .*"):
        norms(**compression).check(sha256(blob), memoryview(blob))


def test_a_vector_is_refused_in_a_matrix_codec() -> None:
    with pytest.raises(MalformedBlob, match=r"b in topk; in this run it may be in fp16, int8, none"):
        checked(norms(codec="topk"), uniform_policy("topk"))


def test_a_rank_that_no_plan_may_name_is_refused() -> None:
    """Where the rank does not adapt, the manifest's is the largest, and of a certificate's plans, too."""
    fixed = {"codec": LOW_RANK, "adapt": "off", "rank": 8}
    with pytest.raises(MalformedBlob, match="w in rank 17; in this run at most 8"):
        checked(norms(**fixed), policy_named(LOW_RANK, rank=17))
    run = preset("tiny", compression=fixed)
    after = plan_bounds(run).after(first_plan(run), codec=LOW_RANK, rank=9, inner_steps=first_plan(run).inner_steps)
    assert "rank 9; at most 8" in (plan_bounds(run).why_not(after, first_plan(run)) or "")
    assert plan_bounds(run).why_not(replaced(after, rank=8), first_plan(run)) is None


@pytest.mark.parametrize("codec", [*LADDER, LOW_RANK])
def test_no_more_is_fetched_than_an_honest_contribution_may_have(codec: str) -> None:
    """61 times as much as an honest one was fetched of a stranger, in a run of topk alone, before it was looked at."""
    allowed = allowed_codecs(preset("tiny", compression={"codec": codec, "adapt": "off", "rank": 8}))
    for values_N in (
        torch.randn(LAYOUT.num_elements),
        torch.zeros(LAYOUT.num_elements),
        torch.ones(LAYOUT.num_elements),
    ):
        blob = encode_contribution(LAYOUT, values_N, policy_named(codec, rank=8))
        assert len(blob) <= allowed.max_bytes(LAYOUT)
    wide = Layout((TensorSpec("w", (512, 512)),))
    blob = encode_contribution(wide, torch.randn(wide.num_elements), policy_named(codec, rank=8))
    assert allowed.max_bytes(wide) < 1.5 * len(blob) + 1000
