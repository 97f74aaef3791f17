"""Which codec each tensor of a contribution gets, from the one name in the manifest.

Matrices get the named codec. One-dimensional tensors (norm weights: a thousandth of a model, and every element scales a
whole channel) get int8 whenever that codec loses more than fp16 does. Source: DESIGN section 8, facts/algorithm2.md 5.
"""

from dilocox_peer.compression.codec import CodecPolicy, TensorCodec, codec_named, uniform_policy
from dilocox_peer.types import TensorSpec

VECTOR_CODEC = "int8"
_EVERYWHERE = ("none", "fp16")


def policy_named(name: str) -> CodecPolicy:
    """The policy of a codec's name. Raises MalformedBlob for a name this version does not know."""
    if name in _EVERYWHERE:
        return uniform_policy(name)
    matrix_codec, vector_codec = codec_named(name), codec_named(VECTOR_CODEC)

    def codec_of(spec: TensorSpec) -> TensorCodec:
        return matrix_codec if len(spec.shape) > 1 else vector_codec

    return codec_of
