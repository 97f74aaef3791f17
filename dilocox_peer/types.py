"""The words of the whole program, as types: ids, digests, and the layout of a stage's parameters.

Nothing here does anything; every floor above imports it. Field names follow ARCHITECTURE.md's glossary.
"""

import functools
import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NewType

import msgpack

PeerId = NewType("PeerId", str)
"""base58 form of a libp2p PeerID; self-certifying, an Ed25519 public key is inside it (signing.py)."""

LinkId = NewType("LinkId", str)
"""base58 form of the libp2p PeerID of a linkd."""

RunId = NewType("RunId", str)
"""Hex SHA-256 of a run's manifest; what an invitation link names."""

Digest = NewType("Digest", bytes)
"""32 bytes of SHA-256."""

DIGEST_BYTES = 32

IGNORED = -100
"""A target that counts for nothing: a question in fine-tuning, or what stands in another document. torch's own default."""


def sha256(*parts: bytes | bytearray | memoryview) -> Digest:
    """SHA-256 of the parts one after another. Releases the GIL for parts over 2 KiB."""
    state = hashlib.sha256()
    for part in parts:
        state.update(part)
    return Digest(state.digest())


def canonical(value: Any) -> bytes:
    """msgpack of value: equal values give equal bytes on every peer. Takes lists, tuples, str, bytes, int, float, None.

    Dictionaries are refused: their order is not part of their value.
    """
    _refuse_dicts(value)
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def _refuse_dicts(value: Any) -> None:
    assert not isinstance(value, dict), "a dict has no canonical order; pass a list of pairs"
    if isinstance(value, list | tuple):
        for item in value:
            _refuse_dicts(item)


ParameterRole = Literal["embedding", "head", "hidden", "vector"]
"""What a parameter does, as far as optimizers and codecs treat it differently. vector: norms, biases and the like, whatever
their shape; hidden: matrices between embedding and head, or stacks of them (the experts of a layer)."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape and role of one parameter."""

    name: str
    shape: tuple[int, ...]
    role: ParameterRole = "hidden"

    @property
    def is_vector(self) -> bool:
        """No weight decay, no Muon, 8 bits in a contribution."""
        return self.role == "vector" or len(self.shape) < 2

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The parameters of a stage in the one order that all its peers use.

    A stage's parameters, anchor, momentum, residual and contribution are each one flat float32 vector of
    `num_elements`; the spans say where each tensor lies in it.
    """

    tensors: tuple[TensorSpec, ...]

    @functools.cached_property
    def num_elements(self) -> int:
        return sum(spec.num_elements for spec in self.tensors)

    @property
    def state_bytes(self) -> int:
        """What the anchor and the momentum take together, as they are sent."""
        return 2 * 4 * self.num_elements

    @property
    def num_matrix_elements(self) -> int:
        """Length of the part of a stage's vector that holds matrices; what is a vector lies behind it."""
        return sum(spec.num_elements for spec in self.tensors if not spec.is_vector)

    def spans(self) -> list[tuple[TensorSpec, int, int]]:
        """(spec, start, stop) of every tensor, in order, as element offsets into the flat vector."""
        spans, start = [], 0
        for spec in self.tensors:
            stop = start + spec.num_elements
            spans.append((spec, start, stop))
            start = stop
        return spans

    def digest(self) -> Digest:
        return self._digest

    @functools.cached_property
    def _digest(self) -> Digest:  # each contribution that is opened is held against it
        return sha256(canonical([[spec.name, list(spec.shape)] for spec in self.tensors]))

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Sequence[int]]]) -> "Layout":
        return cls(tuple(TensorSpec(name, tuple(shape)) for name, shape in tensors))
