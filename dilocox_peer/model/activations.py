"""What stages send each other: activations forward with the targets beside them, gradients back; as bytes of known size.

Forms: `fp32`, `bf16` (round to nearest even), `int8` (8 bits with the largest channels apart: int8_blocks.py). A body's
size follows from the manifest alone, so a wrong one is refused before it is read. Values that are not finite, or so large that what is
computed from them would not be, are refused: one of them in a gradient would be the end of a stage's parameters.

Shape letters: B sequences, T tokens, D hidden size, R rows = B * T.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dilocox_peer.model.body_sizes import BodySizes
from dilocox_peer.model.int8_blocks import Int8Blocks, largest_bfloat16, scaled_bfloat16, squares_bfloat16
from dilocox_peer.types import IGNORED

Bytes = bytes | bytearray | memoryview

MAX_MAGNITUDE = 2.0**24
"""Models have shown activations up to some 10**4. A gradient's norm squared, over a stage, stays far below float32's 3e38."""


@dataclass(frozen=True)
class BodyFormat(BodySizes):
    """The bodies of a run."""

    @cached_property
    def _blocks(self) -> Int8Blocks:
        return Int8Blocks(self.rows, self.width)

    # ---- writing ----

    def pack_hidden(self, hidden_BTD: Tensor) -> bytes:
        """The body of a gradient, or the first part of that of a step. hidden_BTD: float32, any device."""
        assert hidden_BTD.shape == (self.batch, self.tokens, self.width), hidden_BTD.shape
        flat_RD = hidden_BTD.detach().reshape(self.rows, self.width)
        match self.form:
            case "fp32":
                return _little_endian(flat_RD.cpu())
            case "bf16":
                return _little_endian(flat_RD.to(torch.bfloat16).cpu().view(torch.int16))
            case "int8":
                return self._blocks.pack(flat_RD)

    def pack_targets(self, targets_BT: Tensor, starts_BT: Tensor | None = None) -> bytes:
        """The second part of the body of a step. starts_BT: where documents begin within a sequence (borders.py)."""
        targets_R = targets_BT.cpu().numpy().reshape(-1)
        counts_R = targets_R != IGNORED
        ids = np.where(counts_R, targets_R, 0).astype(self.target_dtype)
        starts_R = np.zeros(self.rows, np.bool_) if starts_BT is None else starts_BT.cpu().numpy().reshape(-1)
        return ids.tobytes() + b"".join(np.packbits(each, bitorder="little").tobytes() for each in (counts_R, starts_R))

    # ---- reading ----

    def why_not(self, body: Bytes, *, is_step: bool) -> str | None:
        """What is wrong with a body from a neighbour: its size, values that are not finite or too large, targets outside
        the vocabulary. None: it can be unpacked. No torch, so any thread may ask."""
        expected = self.step_bytes if is_step else self.hidden_bytes
        if len(body) != expected:
            return f"{len(body)} bytes of activations, expected {expected}"
        view = memoryview(body)
        match self.form:
            case "fp32":
                values = np.frombuffer(view[: self.hidden_bytes], "<f4")
                largest = float(np.maximum(values.max(), -values.min()))  # NaN if one is
            case "bf16":
                largest = largest_bfloat16(view[: self.hidden_bytes])
            case "int8":
                if reason := self._blocks.why_not(view):
                    return reason
                largest = self._blocks.largest(view[: self.hidden_bytes])
        if not largest < math.inf:
            return "activations that are not finite"
        if largest > MAX_MAGNITUDE:
            return f"activations of {largest:.1e}, at most {MAX_MAGNITUDE:.1e}"
        return self._why_not_targets(view[self.hidden_bytes :]) if is_step else None

    def strength(self, body: Bytes) -> float:
        """The root of the mean square of the activations or the gradient in a body that why_not lets pass; in the form int8 of the largest that its scales
        allow. No torch, so any thread may ask."""
        view = memoryview(body)[: self.hidden_bytes]
        match self.form:
            case "fp32":
                values = np.frombuffer(view, "<f4")
                return math.sqrt(float(np.dot(values, values)) / len(values))
            case "bf16":
                return math.sqrt(squares_bfloat16(view) / (self.rows * self.width))
            case "int8":
                return self._blocks.strength(view)

    def strength_for_all(self, gradient: Bytes, output: Bytes) -> float:
        """That of a gradient, as if every target counted in what it answers, the body of a step: the loss is added up over the targets that count, so the gradient
        is the stronger, as the root of their number, the more there are."""
        return self.strength(gradient) / math.sqrt(max(self.counted(output), 1 / self.rows))

    def counted(self, body: Bytes) -> float:
        """What loss.counted says of the targets in the body of a step. No torch, so any thread may ask."""
        return int(self._counts(memoryview(self.targets_of(body))).sum()) / self.rows

    def halved(self, body: Bytes, times: int) -> bytes:
        """The body of activations or of a gradient so many times half as strong; targets stay. No torch, so any thread may ask."""
        view, factor = memoryview(body), 2.0**-times
        match self.form:
            case "fp32":
                hidden = (np.frombuffer(view[: self.hidden_bytes], "<f4") * np.float32(factor)).astype("<f4").tobytes()
            case "bf16":
                hidden = scaled_bfloat16(view[: self.hidden_bytes], factor)
            case "int8":
                hidden = self._blocks.scaled(view[: self.hidden_bytes], factor)
        return hidden + bytes(view[self.hidden_bytes :])

    def agreement(self, one: Bytes, other: Bytes) -> float:
        """Of two gradients in bodies that why_not lets pass: their product over the square of the longer one; 1 for equal ones, also
        for two that are nothing, 0 for such as have nothing to do with each other, -1 for one turned round."""
        a_N, b_N = (self.unpack_hidden(each, torch.device("cpu")).view(-1) for each in (one, other))
        squares = max(float(a_N.dot(a_N)), float(b_N.dot(b_N)))
        return float(a_N.dot(b_N)) / squares if squares > 0.0 else 1.0

    def _why_not_targets(self, view: memoryview) -> str | None:
        if not self._number(view, 0) & self._all:
            return "targets of which none counts"
        if not self.takes_borders and self._number(view, 1) & self._within:
            return "borders within a sequence, in a run that packs none"
        if self.vocab_size < 2 ** (8 * self.target_dtype.itemsize):
            target = int(np.frombuffer(view[: self.ids_bytes], self.target_dtype).max())
            if target >= self.vocab_size:
                return f"a target {target} of a vocabulary of {self.vocab_size}"
        return None

    def unpack_hidden(self, body: Bytes, device: torch.device) -> Tensor:
        """(B, T, D) float32, new. The body was accepted by why_not."""
        view = memoryview(body)[: self.hidden_bytes]
        match self.form:
            case "fp32":
                flat_RD = torch.from_numpy(np.frombuffer(view, "<f4").astype(np.float32)).to(device)
            case "bf16":
                raw = np.frombuffer(view, "<i2").astype(np.int16)
                flat_RD = torch.from_numpy(raw).view(torch.bfloat16).to(device).float()
            case "int8":
                flat_RD = self._blocks.unpack(view, device)
        return flat_RD.view(self.batch, self.tokens, self.width)

    def targets_of(self, body: Bytes) -> Bytes:
        """The part of a step's body that is passed on as it is."""
        return memoryview(body)[self.hidden_bytes :]

    def unpack_targets(self, body: Bytes, device: torch.device) -> Tensor:
        """(B, T) int64, new; IGNORED where one does not count."""
        view = memoryview(self.targets_of(body))
        targets_R = np.frombuffer(view[: self.ids_bytes], self.target_dtype).astype(np.int64)
        targets_R[self._counts(view) == 0] = IGNORED
        return torch.from_numpy(targets_R).view(self.batch, self.tokens).to(device)

    def unpack_starts(self, body: Bytes, device: torch.device) -> Tensor | None:
        """(B, T) bool, new: where documents begin; None: nowhere but at the beginning of a sequence."""
        bits = self._bits(memoryview(self.targets_of(body)), 1).reshape(self.batch, self.tokens)
        return torch.from_numpy(bits.astype(np.bool_)).to(device) if bits[:, 1:].any() else None

    def _counts(self, targets: memoryview) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        """(R): 1 for each target that counts."""
        return self._bits(targets, 0)

    @cached_property
    def _all(self) -> int:
        """The bits of all tokens; those that fill the last byte mean nothing."""
        return (1 << self.rows) - 1

    @cached_property
    def _within(self) -> int:
        """Those of all that begin no sequence."""
        firsts = sum(1 << self.tokens * each for each in range(self.batch))
        return self._all & ~firsts

    def _number(self, targets: memoryview, number: int) -> int:
        """What `_bits` gives, as one integer, which needs no array to be looked at."""
        first = self.ids_bytes + number * self.bits_bytes
        return int.from_bytes(targets[first : first + self.bits_bytes], "little")

    def _bits(self, targets: memoryview, number: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        first = self.ids_bytes + number * self.bits_bytes
        raw = np.frombuffer(targets[first : first + self.bits_bytes], np.uint8)
        return np.unpackbits(raw, count=self.rows, bitorder="little")


def _little_endian(values: Tensor) -> bytes:
    array = values.contiguous().numpy()
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
