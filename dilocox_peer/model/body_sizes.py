"""How many bytes stages send each other, by the manifest alone. Needs no torch, so who only reckons starts without it. What the bytes are
is in activations.py and int8_blocks.py.

Shape letters: B sequences, T tokens, D hidden size, R rows = B * T.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Self

import numpy as np

from dilocox_peer.manifest import Manifest

Form = Literal["int8", "bf16", "fp32"]

OUTLIERS = 8
BLOCK = 128
BF16_BYTES = 2
_NARROW = 64  # of so many channels at most one is an outlier, or the outliers would cost more than they bring


@dataclass(frozen=True)
class Int8Sizes:
    """Of bodies of so many rows of so many channels."""

    rows: int
    width: int

    @cached_property
    def num_outliers(self) -> int:
        return min(OUTLIERS, self.width // _NARROW)

    @cached_property
    def num_scales(self) -> int:
        """Of a row."""
        return -(-(self.width - self.num_outliers) // BLOCK)

    @cached_property
    def scales_at(self) -> int:
        return self.num_outliers * BF16_BYTES * (1 + self.rows)

    @cached_property
    def codes_at(self) -> int:
        return self.scales_at + self.rows * self.num_scales * BF16_BYTES

    @cached_property
    def size_bytes(self) -> int:
        return self.codes_at + self.rows * (self.width - self.num_outliers)


@dataclass(frozen=True)
class BodySizes:
    """Sizes and forms of the bodies of a run."""

    form: Form
    batch: int
    tokens: int
    width: int
    vocab_size: int
    takes_borders: bool = True  # of documents within a sequence

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        model = manifest.model
        return cls(
            manifest.stages.activations,
            manifest.inner.micro_batch,
            model.context,
            model.hidden_size,
            model.vocab_size,
            takes_borders=manifest.data.packing == "best-fit",
        )

    @cached_property
    def rows(self) -> int:
        return self.batch * self.tokens

    @cached_property
    def hidden_bytes(self) -> int:
        """Of activations alone, which is the body of a gradient."""
        match self.form:
            case "int8":
                return Int8Sizes(self.rows, self.width).size_bytes
            case "bf16":
                return self.rows * self.width * 2
            case "fp32":
                return self.rows * self.width * 4

    @cached_property
    def step_bytes(self) -> int:
        """Of activations with their targets."""
        return self.hidden_bytes + self.ids_bytes + 2 * self.bits_bytes

    @cached_property
    def ids_bytes(self) -> int:
        """Targets; behind them is a bit for each, whether it counts, and a bit for each token, whether a document begins with it."""
        return self.rows * self.target_dtype.itemsize

    @cached_property
    def bits_bytes(self) -> int:
        return -(-self.rows // 8)

    @cached_property
    def target_dtype(self) -> "np.dtype[np.unsignedinteger]":
        return np.dtype("<u1" if self.vocab_size <= 2**8 else "<u2" if self.vocab_size <= 2**16 else "<u4")
