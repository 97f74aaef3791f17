"""Which codec each tensor of a contribution gets, from the name and the rank in the manifest.

- none, fp16: everywhere.
- Vectors (norm weights, biases: a thousandth of a model, every element scales a whole channel) get int8 whenever
  the named codec loses more than fp16 does.
- Matrices get the named codec; of lowrank-int4 only those that it pays for: not embedding and head, whose pseudo-gradients have
  rows of their own and a wide spectrum, and not small ones, where r * (m + n) * bits exceeds the 2 * m * n bits of int2.
  Those get int2.
Source: PowerSGD (arXiv 1905.13727), which leaves vectors as they are; that low rank costs more on embedding and head was
measured.
"""

from dilocox_peer.compression.codec import CodecPolicy, TensorCodec, codec_named, uniform_policy
from dilocox_peer.compression.lowrank import DEFAULT_RANK, LowRankCodec, largest_rank
from dilocox_peer.types import TensorSpec

VECTOR_CODEC = "int8"
BLOCK_CODEC = "int2"
"""Of matrices that low rank does not pay for: two bits with error feedback cost next to nothing."""

_EVERYWHERE = ("none", "fp16")


def policy_named(name: str, *, rank: int = DEFAULT_RANK) -> CodecPolicy:
    """The policy of a codec's name. rank: of lowrank-int4.

    Raises MalformedBlob for a name this version does not know.
    """
    if name in _EVERYWHERE:
        return uniform_policy(name)
    named, vector_codec, block_codec = codec_named(name), codec_named(VECTOR_CODEC), codec_named(BLOCK_CODEC)
    low_rank = LowRankCodec(rank) if name == LowRankCodec.name else None

    def codec_of(spec: TensorSpec) -> TensorCodec:
        if spec.is_vector:
            return vector_codec
        if low_rank is None:
            return named
        pays = len(spec.shape) == 2 and spec.role == "hidden" and rank <= largest_rank(spec.shape)
        return low_rank if pays else block_codec

    return codec_of
