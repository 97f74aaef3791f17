"""The codec of each tensor of a contribution, by the names that names.py gives them."""

from dilocox_peer.compression.codec import CODECS, CodecPolicy, codec_named
from dilocox_peer.compression.ladder import LOW_RANK
from dilocox_peer.compression.lowrank import DEFAULT_RANK, LowRankCodec
from dilocox_peer.compression.names import codec_names


def policy_named(name: str, *, rank: int = DEFAULT_RANK) -> CodecPolicy:
    """The policy of a codec's name. rank: of lowrank-int4.

    Raises MalformedBlob for a name this version does not know.
    """
    codecs = {**CODECS, LOW_RANK: LowRankCodec(rank)} if codec_named(name).name == LOW_RANK else CODECS
    name_of = codec_names(name, rank=rank)
    return lambda spec: codecs[name_of(spec)]
