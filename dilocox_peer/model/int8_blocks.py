"""Activations and gradients in 8 bits that trained networks survive: the largest channels apart, the rest in blocks.

A few channels of a trained network's residual stream are tens to thousands of times as large as the rest; a scale that has
to hold them leaves nothing for the others (at SmolLM2's middle cut the gradient was 24 % wrong). So the OUTLIERS channels
with the largest values of a body go as bfloat16, and what is left of each token is divided, BLOCK channels at a time, by a
scale of its own: the block's largest magnitude / 127, rounded up to bfloat16, so nothing is clipped and the error of an
element is at most half a scale. Source: LLM.int8() (arXiv 2208.07339) for the outliers; measured in
benchmarks/activations.py.

    u2 x O channels, ascending | bf16 x R x O values | bf16 x R x S scales | int8 x R x (D - O) codes

Shape letters: R rows (tokens), D width, O outlier channels, S blocks of a row, K channels of a block.
"""

import functools
import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from dilocox_peer.model.body_sizes import BF16_BYTES, BLOCK, Int8Sizes


@dataclass(frozen=True)
class Int8Blocks(Int8Sizes):
    """Bodies of so many rows of so many channels."""

    def pack(self, flat_RD: Tensor) -> bytes:
        """flat_RD: float32, any device; not modified."""
        channels_O = flat_RD.abs().amax(0).topk(self.num_outliers).indices.sort().values
        values_RO = flat_RD.index_select(1, channels_O).to(torch.bfloat16)
        padded_RD = flat_RD.index_select(1, self._order(channels_O).padded)
        blocks_RSK = padded_RD.view(self.rows, self.num_scales, -1)
        # The smallest normal bfloat16 keeps the division defined for blocks of zeros; + 1/128 rounds bfloat16's 8 bits up.
        largest_RS1 = blocks_RSK.abs().amax(2, keepdim=True)
        scales_RS1 = largest_RS1.div_(127).mul_(1 + 2.0**-7).clamp_(min=2.0**-126).to(torch.bfloat16)
        codes_RSK = torch.div(blocks_RSK, scales_RS1.float()).round_().clamp_(-127, 127).to(torch.int8)
        codes_RD = codes_RSK.view(self.rows, -1)[:, : self.width - self.num_outliers]
        return b"".join(
            (
                channels_O.cpu().numpy().astype("<u2").tobytes(),
                values_RO.cpu().view(torch.int16).numpy().astype("<i2").tobytes(),
                scales_RS1.cpu().view(torch.int16).numpy().astype("<i2").tobytes(),
                codes_RD.cpu().numpy().tobytes(),
            )
        )

    def why_not(self, view: memoryview) -> str | None:
        """What is wrong with the channels in a body of the right size."""
        channels = np.frombuffer(view[: self.num_outliers * BF16_BYTES], "<u2").tolist()
        if channels and (channels[-1] >= self.width or any(b <= a for a, b in pairwise(channels))):
            return f"channels {channels} of {self.width}"
        return None

    def largest(self, view: memoryview) -> float:
        """The largest magnitude that unpacking can give, infinity or NaN where a value or a scale is."""
        first, middle = self.num_outliers * BF16_BYTES, self.scales_at
        values, scales = largest_bfloat16(view[first:middle]), 127 * largest_bfloat16(view[middle : self.codes_at])
        return scales if scales != scales or scales > values else values

    def strength(self, view: memoryview) -> float:
        """The root of the mean square of what unpacking gives where every code is the largest."""
        first, middle = self.num_outliers * BF16_BYTES, self.scales_at
        of_scales = squares_bfloat16(view[middle : self.codes_at]) / max(1, self.rows * self.num_scales)
        squares = squares_bfloat16(view[first:middle]) + 127.0**2 * of_scales * self.rows * (
            self.width - self.num_outliers
        )
        return math.sqrt(squares / (self.rows * self.width))

    def scaled(self, view: memoryview, factor: float) -> bytes:
        """A body of what unpacking gives times a power of two."""
        first = self.num_outliers * BF16_BYTES
        numbers = scaled_bfloat16(view[first : self.codes_at], factor)  # values of outliers, then scales
        return b"".join((view[:first], numbers, view[self.codes_at :]))

    def unpack(self, view: memoryview, device: torch.device) -> Tensor:
        """(R, D) float32, new. The body was accepted by why_not."""
        first, outliers = self.num_outliers * BF16_BYTES, self.num_outliers
        codes_RD = torch.from_numpy(np.frombuffer(view[self.codes_at :], np.int8).astype(np.float32))
        codes_RD = codes_RD.view(self.rows, self.width - outliers).to(device)
        scales_RS1 = _bfloat16(view[self.scales_at : self.codes_at]).to(device).view(self.rows, self.num_scales, 1)
        if self.num_scales == 1:
            codes_RD.mul_(scales_RS1.view(-1, 1))
        else:
            codes_RD.mul_(scales_RS1.expand(-1, -1, BLOCK).reshape(self.rows, -1)[:, : codes_RD.shape[1]])
        if not outliers:
            return codes_RD
        channels_O = torch.from_numpy(np.frombuffer(view[:first], "<u2").astype(np.int64)).to(device)
        values_RO = _bfloat16(view[first : self.scales_at]).to(device).view(self.rows, outliers)
        return torch.cat((values_RO, codes_RD), 1).index_select(1, self._order(channels_O).places)

    def _order(self, channels_O: Tensor) -> "_Order":
        return _order_of(tuple(channels_O.tolist()), self.width, channels_O.device)


@dataclass(frozen=True, slots=True)
class _Order:
    """padded: the channels that are no outliers, ascending, the last as often as fills the last block: that changes no block's largest
    magnitude. places: of each channel where it is behind the outliers."""

    padded: Tensor
    places: Tensor


@functools.lru_cache(maxsize=256)
def _order_of(channels: tuple[int, ...], width: int, device: torch.device) -> _Order:
    """Mostly the same from one body to the next. 16 bytes a channel each: 33 MB at 8,192 channels, where a sender names ever others."""
    others = np.delete(np.arange(width), channels)
    missing = -len(others) % BLOCK if len(others) > BLOCK else 0
    padded = np.append(others, np.repeat(others[-1:], missing))
    places = np.argsort(np.append(np.array(channels, np.int64), others))
    return _Order(torch.from_numpy(padded).to(device), torch.from_numpy(places).to(device))


def _bfloat16(raw: memoryview) -> Tensor:
    return torch.from_numpy(np.frombuffer(raw, "<i2").astype(np.int16)).view(torch.bfloat16).float()


def scaled_bfloat16(raw: memoryview, factor: float) -> bytes:
    """Each number times a power of two, exactly but where it becomes too small."""
    values = (np.frombuffer(raw, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32) * np.float32(factor)
    return (values.view(np.uint32) >> np.uint32(16)).astype("<u2").tobytes()


def squares_bfloat16(raw: memoryview) -> float:
    """The sum of the squares."""
    values = (np.frombuffer(raw, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    return float(np.dot(values, values))


def largest_bfloat16(raw: memoryview) -> float:
    """Largest magnitude, infinity or NaN if one is: without their sign bits order like the numbers, NaN above all."""
    values = np.frombuffer(raw, "<u2")
    if not len(values):
        return 0.0
    bits = np.uint32((values & 0x7FFF).max()) << np.uint32(16)
    return float(bits.view(np.float32))
