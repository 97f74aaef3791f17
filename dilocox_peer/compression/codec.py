"""The protocol of tensor codecs, the two plain ones, and the table of all.

A codec turns one float32 tensor into bytes and back. It keeps no state that decoding needs: whoever holds the bytes,
the shape and the codec's name can decode them. Error feedback lives outside (feedback.py), a whole contribution is
contribution.py, the choice of a codec for each tensor names.py.

To add one: write its TensorCodec (blockwise.py has two to copy), and give it a place in `_ALL` below and a row in `_LIMITS`
(sizes.py: how many bytes it takes) and in `DECAY_BY_CODEC` (feedback.py). From then on this version decodes it. For runs that
name it, also in `CompressionSection` (manifest.py), `LADDER` (ladder.py), `RESULT_CODEC` (slices.py), `CODEC_POINTS`
(peer/planning/controller.py) and `RESULT_TIMES` (peer/planning/sent.py). Peers that do not know its name refuse the blob.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilocox_peer.compression.blockwise import AbsmaxCodec, PlaneCodec
from dilocox_peer.compression.ecsq import EcsqCodec
from dilocox_peer.compression.lowrank import LowRankCodec
from dilocox_peer.compression.reader import Payload, TensorReader, read_all
from dilocox_peer.compression.sizes import ABSMAX, MAX_CODEC_NAME_BYTES, PLAIN, PLANES, payload_limits
from dilocox_peer.compression.topk import TopKCodec
from dilocox_peer.errors import MalformedBlob
from dilocox_peer.types import TensorSpec

FP16_MAX = 65504.0

_PIECE = 1 << 18
"""Elements cast at a time, so that an encode takes no second tensor."""


@runtime_checkable
class TensorCodec(Protocol):
    """Encodes one tensor. Deterministic: equal input gives equal bytes."""

    name: str
    is_finite: bool
    """Whether whatever decodes comes to finite values."""

    def encode(self, x: Tensor) -> Payload:
        """Bytes of x. x: any shape, float32, CPU, contiguous, finite; not modified. NaN in x may end as bytes that
        every decoder refuses."""
        ...

    def open(self, payload: memoryview, shape: tuple[int, ...]) -> TensorReader:
        """The tensor of this shape, to be read piece by piece; payload stays as it is until then.

        Raises MalformedBlob with the reason, and so does reading, where only decoding tells. Never allocates more than the tensor's size.
        Whether the values are finite is the caller's check where the codec does not say so.
        """
        ...

    def decode(self, payload: memoryview, out: Tensor) -> None:
        """Writes the decoded values into out (float32, CPU, contiguous; its shape is the tensor's). Raises as open does."""
        ...


class TensorEncoder(Protocol):
    """Encodes one tensor of a stage, round after round."""

    def encode(self, x: Tensor) -> Payload:
        """As TensorCodec.encode, save that it may start from what it remembers of the tensors before."""
        ...


@runtime_checkable
class RememberingCodec(TensorCodec, Protocol):
    """A codec that encodes better with a memory of the rounds before. No decoder needs that memory."""

    def encoder(self) -> TensorEncoder:
        """A new encoder, which remembers nothing yet; for one tensor."""
        ...


CodecPolicy = Callable[[TensorSpec], TensorCodec]
"""Which codec a tensor is encoded with."""


class PlainCodec:
    """Every element as it is: `none` (float32), or rounded to float16: `fp16`, error <= 2**-11 relative, +-65504 at most.

    Little-endian on every machine.
    """

    is_finite = False

    def __init__(self, name: str, size_bytes: int) -> None:
        self.name = name
        self._dtype = np.dtype(f"<f{size_bytes}")

    def encode(self, x: Tensor) -> Payload:
        flat_N = x.detach().reshape(-1)
        values = np.empty(len(flat_N), self._dtype)
        for start in range(0, len(flat_N), _PIECE):
            piece = flat_N[start : start + _PIECE]
            if self._dtype.itemsize == 2:
                # Clamped, as inf would poison every peer. Cast by torch: numpy's is ten times slower.
                piece = piece.clamp(-FP16_MAX, FP16_MAX).to(torch.float16)
            values[start : start + len(piece)] = piece.numpy()  # `tobytes` would hold every other thread for all of it
        return values.view(np.uint8).data

    def open(self, payload: memoryview, shape: tuple[int, ...]) -> "_PlainReader":
        size_bytes, _ = payload_limits(self.name, shape)
        if len(payload) != size_bytes:
            raise MalformedBlob(f"{self.name}: {len(payload)} bytes for shape {shape}, expected {size_bytes}")
        return _PlainReader(np.frombuffer(payload, self._dtype) if payload else np.empty(0, self._dtype))

    def decode(self, payload: memoryview, out: Tensor) -> None:
        read_all(self.open(payload, tuple(out.shape)), out)


class _PlainReader:
    def __init__(self, values: npt.NDArray[np.floating[Any]]) -> None:
        self._values = values

    def read(self, start: int, stop: int, out_X: Tensor) -> None:
        if self._values.dtype.itemsize == 4:
            np.copyto(out_X.numpy(), self._values[start:stop])
            return
        for first in range(start, stop, _PIECE):
            piece = self._values[first : min(first + _PIECE, stop)].astype(np.float16)  # in the machine's byte order
            out_X[first - start : first - start + len(piece)].copy_(torch.from_numpy(piece))


_ALL: tuple[TensorCodec, ...] = (
    *(PlainCodec(name, size_bytes) for name, size_bytes in PLAIN.items()),
    *(AbsmaxCodec(name, bits=bits, block=block) for name, (bits, block) in ABSMAX.items()),
    *(PlaneCodec(name, num_levels=levels, block=block) for name, (levels, block) in PLANES.items()),
    TopKCodec(),
    EcsqCodec(),
    LowRankCodec(),
)
CODECS: Mapping[str, TensorCodec] = {codec.name: codec for codec in _ALL}


def codec_named(name: str) -> TensorCodec:
    """The codec of this name. Raises MalformedBlob, as names come from strangers."""
    codec = CODECS.get(name)
    if codec is None:
        raise MalformedBlob(f"unknown codec {name[:MAX_CODEC_NAME_BYTES]!r}; this version knows {', '.join(CODECS)}")
    return codec


def uniform_policy(name: str) -> CodecPolicy:
    """The policy that encodes every tensor with the codec of this name."""
    codec = codec_named(name)
    return lambda _spec: codec
