"""Which tensor gets which codec."""

import pytest

from dilocox_peer.compression.policy import policy_named
from dilocox_peer.config import preset
from dilocox_peer.errors import MalformedBlob
from dilocox_peer.peer.outer import OuterSettings
from dilocox_peer.pipeline.model import layout_of
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
    assert settings.residual_decay == 1.0
