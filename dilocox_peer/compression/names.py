"""Which codec each tensor of a contribution gets, from the name and the rank in the manifest. Names only: needs no torch.

- none, fp16: everywhere.
- Vectors (norm weights, biases: a thousandth of a model, every element scales a whole channel) get int8 whenever
  the named codec loses more than fp16 does.
- Matrices get the named codec; of lowrank-int4 only those that it pays for: not embedding and head, whose pseudo-gradients have
  rows of their own and a wide spectrum, and not small ones, where r * (m + n) * bits exceeds the 2 * m * n bits of int2.
  Those get int2.
Source: PowerSGD (arXiv 1905.13727), which leaves vectors as they are; that low rank costs more on embedding and head was
measured.
"""

from dilocox_peer.compression.ladder import LOW_RANK
from dilocox_peer.compression.sizes import CodecNames, largest_rank
from dilocox_peer.types import TensorSpec

VECTOR_CODEC = "int8"
BLOCK_CODEC = "int2"
"""Of matrices that low rank does not pay for: two bits with error feedback cost next to nothing."""

_EVERYWHERE = ("none", "fp16")


def codec_names(codec: str, *, rank: int) -> CodecNames:
    """The codec of each tensor where this one is named, in the manifest or a plan. rank: of lowrank-int4."""

    def name_of(spec: TensorSpec) -> str:
        if codec in _EVERYWHERE:
            return codec
        if spec.is_vector:
            return VECTOR_CODEC
        pays = len(spec.shape) == 2 and spec.role == "hidden" and rank <= largest_rank(spec.shape)
        return codec if codec != LOW_RANK or pays else BLOCK_CODEC

    return name_of
