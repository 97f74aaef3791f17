"""Which tensor gets which codec."""

import pytest

from dilocox_peer.compression.feedback import decay_by_codec
from dilocox_peer.compression.policy import policy_named
from dilocox_peer.config import preset
from dilocox_peer.errors import MalformedBlob
from dilocox_peer.model.architecture import layout_of
from dilocox_peer.model.stage_layout import EMBEDDING, LM_HEAD
from dilocox_peer.peer.training.outer import OuterSettings
from dilocox_peer.types import TensorSpec


@pytest.mark.parametrize("name", ["int8", "int4", "int2", "sign", "topk"])
def test_matrices_get_the_named_codec_and_vectors_int8(name):
    codec_of = policy_named(name)
    for spec in layout_of(preset("tiny")).tensors:
        assert codec_of(spec).name == (name if len(spec.shape) == 2 else "int8")
    assert codec_of(TensorSpec("scalar", ())).name == "int8"


@pytest.mark.parametrize("name", ["none", "fp16"])
def test_what_loses_next_to_nothing_is_used_everywhere(name):
    assert {policy_named(name)(spec).name for spec in layout_of(preset("tiny")).tensors} == {name}


def test_an_unknown_name_is_refused_before_anything_is_encoded():
    with pytest.raises(MalformedBlob, match="'zip'"):
        policy_named("zip")


def test_the_outer_loop_takes_policy_and_decay_from_the_manifest():
    settings = OuterSettings.of(preset("tiny", compression={"codec": "int2"}))
    assert settings.codec_of(TensorSpec("matrix", (2, 2))).name == "int2"
    assert settings.residual_decay is None  # each tensor by its codec


def test_low_rank_is_for_large_hidden_matrices_and_the_rest_is_two_bits():
    manifest = preset("125m", compression={"codec": "lowrank-int4", "rank": 64})
    codec_of, layout = OuterSettings.of(manifest).codec_of, layout_of(manifest)
    for spec in layout.tensors:
        is_hidden = spec.name not in (EMBEDDING, LM_HEAD)
        expected = "int8" if len(spec.shape) == 1 else "lowrank-int4" if is_hidden else "int2"
        assert codec_of(spec).name == expected, spec.name
        if expected == "lowrank-int4":
            rows, columns = spec.shape
            assert 64 * (rows + columns) * 4 < 2 * rows * columns
    assert decay_by_codec(layout, codec_of) == tuple(
        0.8 if codec_of(spec).name == "lowrank-int4" else 1.0 for spec in layout.tensors
    )


def test_matrices_too_small_for_their_rank_are_two_bits():
    codec_of = OuterSettings.of(preset("tiny", compression={"codec": "lowrank-int4", "rank": 64})).codec_of
    assert {codec_of(spec).name for spec in layout_of(preset("tiny")).tensors} == {"int2", "int8"}
    codec_of = OuterSettings.of(preset("tiny", compression={"codec": "lowrank-int4", "rank": 8})).codec_of
    assert "lowrank-int4" in {codec_of(spec).name for spec in layout_of(preset("tiny")).tensors}
