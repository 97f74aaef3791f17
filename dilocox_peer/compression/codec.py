"""The protocol of tensor codecs, and the two plain ones.

A codec turns one float32 tensor into bytes and back. It keeps no state that decoding needs: whoever holds the bytes,
the shape and the codec's name can decode them. Error feedback lives outside (feedback is `sent - decode(encode(sent))`,
peer/outer.py), a whole contribution is contribution.py.
"""

import math
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from dilocox_peer.errors import MalformedBlob


@runtime_checkable
class TensorCodec(Protocol):
    """Encodes one tensor. Deterministic: equal input gives equal bytes."""

    name: str

    def encode(self, x: Tensor) -> bytes:
        """Bytes of x. x: any shape, float32, CPU, contiguous; not modified."""
        ...

    def payload_limits(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Smallest and largest number of bytes that encode a tensor of this shape; known before any is read."""
        ...

    def decode(self, payload: memoryview, out: Tensor) -> None:
        """Writes the decoded values into out (float32, CPU, contiguous; its shape is the tensor's).

        Raises MalformedBlob with the reason; out is then unspecified. Never allocates more than out's size.
        """
        ...


class PlainCodec:
    """Every element as it is: `none` (float32) or rounded to float16 (`fp16`, error <= 2**-11 relative, +-65504 at most)."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self._dtype = dtype

    def encode(self, x: Tensor) -> bytes:
        clamped = x.clamp(-65504.0, 65504.0) if self._dtype == torch.float16 else x  # inf would poison every peer
        return clamped.to(self._dtype).reshape(-1).view(torch.uint8).numpy().tobytes()

    def payload_limits(self, shape: tuple[int, ...]) -> tuple[int, int]:
        size_bytes = math.prod(shape) * self._dtype.itemsize
        return size_bytes, size_bytes

    def decode(self, payload: memoryview, out: Tensor) -> None:
        size_bytes, _ = self.payload_limits(tuple(out.shape))
        if len(payload) != size_bytes:
            raise MalformedBlob(f"{self.name}: {len(payload)} bytes for shape {tuple(out.shape)}, expected {size_bytes}")
        if size_bytes:
            out.copy_(torch.frombuffer(bytearray(payload), dtype=self._dtype).view(out.shape))


CODECS: Mapping[str, TensorCodec] = {
    codec.name: codec for codec in (PlainCodec("none", torch.float32), PlainCodec("fp16", torch.float16))
}


def codec_named(name: str) -> TensorCodec:
    """The codec of this name. Raises MalformedBlob, as names come from strangers."""
    codec = CODECS.get(name)
    if codec is None:
        raise MalformedBlob(f"unknown codec {name!r}; this version knows {', '.join(CODECS)}")
    return codec
