"""`lowrank-int4`: a matrix as the product of two thin factors, found by one subspace iteration, each in 4 bits.

    payload: rank R u16 | exponents, R bytes | left scales, right scales (bfloat16) | left codes, right codes (4 bits each)
    x[m, n] ~ left scale[m] * right scale[n] * sum over r of left code[r, m] * right code[r, n] / 2**exponent[r]
Codes are -8 .. 7, two in a byte, even ones in the low half; a scale serves 128 / R neighbouring rows (columns), at least one.

Decoding is exact by construction: codes and powers of two are whole numbers, and exponents are limited so that every
partial sum of the product stays below 2**24. A float32 product of such factors has no rounding, in whatever order, fused or
not, on however many threads; then come two elementwise products. So equal bits everywhere at the speed of the machine's own
matrix product: 100M elements at rank 64 in 0.17 s on one thread, where 64 rank-1 updates in a fixed order (the other way to
equal bits) take 1.23 s and the bare float32 product, with other bits on other machines, 0.14 s.

Encoding: left = orthonormal basis of x @ right-before (PowerSGD, arXiv 1905.13727, here by `torch.linalg.qr`: Gram-Schmidt
loses orthogonality on rank-deficient input), quantised; then right = least squares against the *quantised* left, so the
right factor makes up for what 4 bits did to the left; quantised. right-before is the encoder's own memory (`encoder`): a warm
start, which no decoder needs; without one, seeded random numbers and one iteration more. Peers share no basis,
so any subset of them makes a round. Bound: |x - decoded| <= |x|, checked at every encoding: where quantising left nothing of
the gain, rank 0 is sent and all stays in the residual. A matrix of exact rank R loses about a sixth, to the 4 bits alone.

Any tensor is taken as a matrix of its first dimension against the rest. Which ones it pays for: `largest_rank` in sizes.py, names.py.
Differs from DiLoCoX: own basis, scales along the rank so that decoding is exact. No error feedback here (feedback.py).

Shape letters: M rows, N columns, R rank; factors are held as RM and RN (a product with an MR layout is several times slower
below rank 12); G groups of rows or columns that share a scale.
"""

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilocox_peer.compression.bfloat16 import from_bfloat16, to_bfloat16
from dilocox_peer.compression.reader import TensorReader, read_all
from dilocox_peer.compression.sizes import (
    SHARING,
    largest_rank,
    low_rank_bytes,
    matrix_shape,
    num_groups,
)
from dilocox_peer.errors import MalformedBlob

DEFAULT_RANK = 64

_LEFT_SCALES = (2.0**-20, 2.0)
_RIGHT_SCALES = (2.0**-80, 2.0**100)
"""Allowed beside 0. Their products with whole numbers below 2**24, and with 2**-18, are neither denormal nor infinite."""

_SMALLEST_INPUT = 2.0**-80
"""A matrix with no element above it is sent as rank 0."""

_MAX_SHIFT = 120
"""2**-shift is no denormal, and what is left of the largest float, 2**8, is small enough."""

_U8 = npt.NDArray[np.uint8]
_U16 = npt.NDArray[np.uint16]


class LowRankCodec:
    """See the module. rank: of what is encoded, less where largest_rank is; decoding takes any."""

    name = "lowrank-int4"
    is_finite = True

    def __init__(self, rank: int = DEFAULT_RANK) -> None:
        assert rank > 0, f"rank {rank}"
        self._rank = rank

    def encode(self, x: Tensor) -> bytearray:
        """From a cold start: equal input gives equal bytes on the same machine."""
        return self.encoder().encode(x)

    def encoder(self) -> "LowRankEncoder":
        """An encoder for one tensor over many rounds, which starts each where the last one ended."""
        return LowRankEncoder(self._rank)

    def open(self, payload: memoryview, shape: tuple[int, ...]) -> TensorReader:
        rows, columns = matrix_shape(shape)
        if len(payload) < 2:
            raise MalformedBlob(f"{self.name}: {len(payload)} bytes for shape {shape}")
        rank = rank_of(payload)
        if rank > largest_rank(shape):
            raise MalformedBlob(f"{self.name}: rank {rank} for shape {shape}, at most {largest_rank(shape)}")
        expected = low_rank_bytes(rows, columns, rank)
        if len(payload) != expected:
            raise MalformedBlob(f"{self.name}: {len(payload)} bytes for shape {shape}, rank {rank} has {expected}")
        if rank == 0:
            return _Zeros()
        parts = Factors(payload, rows, columns, rank)
        parts.check(self.name)
        return _LowRankReader(parts, rows, columns, rank)

    def decode(self, payload: memoryview, out: Tensor) -> None:
        read_all(self.open(payload, tuple(out.shape)), out)


def rank_of(payload: memoryview) -> int:
    """What it says of itself, of at least two bytes."""
    return int.from_bytes(payload[:2], "little")


class _Zeros:
    def read(self, _start: int, _stop: int, out_X: Tensor) -> None:
        out_X.zero_()


class _LowRankReader:
    """The factors of one matrix; see the module for why its parts have equal bits however they are computed."""

    def __init__(self, parts: "Factors", rows: int, columns: int, rank: int) -> None:
        top = largest_exponent(rank)
        self._columns = columns
        self._left_RM = _whole_numbers(parts.left_codes, rank, rows)
        self._right_RN = _whole_numbers(parts.right_codes, rank, columns)
        self._right_RN.mul_(torch.from_numpy(np.exp2(top - parts.exponents.astype(np.float32)))[:, None])
        self._left_scale_M = _per_element(parts.left_scales, rank, rows)
        self._right_scale_N = _per_element(parts.right_scales, rank, columns).mul_(2.0**-top)

    def read(self, start: int, stop: int, out_X: Tensor) -> None:
        """Rows that lie in it in part, then all whole ones at once."""
        at = start
        while at < stop:
            row, column = divmod(at, self._columns)
            last = (stop - at) // self._columns if column == 0 else 0  # whole rows
            end = at + last * self._columns if last else min(stop, (row + 1) * self._columns)
            piece_XN = out_X[at - start : end - start].view(max(last, 1), -1)
            columns = slice(column, column + piece_XN.shape[1])
            rows = slice(row, row + max(last, 1))
            torch.mm(self._left_RM[:, rows].t(), self._right_RN[:, columns], out=piece_XN)  # exact, see the module
            piece_XN.mul_(self._left_scale_M[rows, None])
            piece_XN.mul_(self._right_scale_N[columns])
            at = end


class LowRankEncoder:
    """Encodes the same tensor of every round. Its memory is the last right factor: R * N floats, no decoder needs it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._right_RN: Tensor | None = None

    def reset(self) -> None:
        """Forgets the last right factor."""
        self._right_RN = None

    def encode(self, x: Tensor) -> bytearray:
        """As TensorCodec.encode; the warm start makes it a function of the tensors before, too."""
        rows, columns = matrix_shape(tuple(x.shape))
        rank = min(self._rank, largest_rank(tuple(x.shape)))
        size = _absmax(x)
        if not math.isfinite(size):
            return _unreadable(rows, columns)
        if size < _SMALLEST_INPUT:
            return bytearray(2)
        x_MN = x.detach().view(rows, columns)
        # The factors are found for x / 2**shift, whose elements are at most 1: no square of a large one overflows. The
        # shift goes into the small factor of each product, as x itself is not to be copied.
        shift = min(math.frexp(size)[1], _MAX_SHIFT)
        right_RN = self._right_RN
        if right_RN is None or right_RN.shape != (rank, columns):
            left_RM = _basis(x_MN, _seeded(rank, columns).mul_(2.0**-shift))
            right_RN = torch.mm(left_RM.mul_(2.0**-shift), x_MN)
        left_RM = _basis(x_MN, right_RN.mul(2.0**-shift))

        payload = bytearray(low_rank_bytes(rows, columns, rank))
        payload[:2] = rank.to_bytes(2, "little")
        parts = Factors(payload, rows, columns, rank)
        left_RM = _quantised(left_RM, parts.left_scales, parts.left_codes, limits=_LEFT_SCALES)
        seen_RN = torch.mm(left_RM.mul(2.0**-shift), x_MN)
        gram_RR = torch.mm(left_RM, left_RM.t())
        right_RN = torch.linalg.solve(gram_RR.double() + 1e-6 * torch.eye(rank), seen_RN.double()).float().contiguous()
        self._right_RN = right_RN / torch.linalg.vector_norm(right_RN, dim=1, keepdim=True).clamp(min=1e-30)

        norms_R = torch.linalg.vector_norm(right_RN, dim=1).clamp(min=1e-30)
        exponents_R = torch.log2(norms_R.max() / norms_R).round().clamp(0, largest_exponent(rank))
        parts.exponents[:] = exponents_R.numpy()
        factors_R1 = torch.exp2(exponents_R)[:, None]
        found_RN = _quantised(
            right_RN * factors_R1, parts.right_scales, parts.right_codes, limits=_RIGHT_SCALES, shift=shift
        )
        found_RN.div_(factors_R1)
        # |x|**2 - |x - decoded|**2, from the small factors alone
        gain = 2 * (seen_RN * found_RN).sum() - (torch.mm(gram_RR, found_RN) * found_RN).sum()
        return payload if float(gain) > 0 else bytearray(2)


class Factors:
    """Views of a payload of known rank; writable if it is."""

    def __init__(self, payload: bytearray | memoryview, rows: int, columns: int, rank: int) -> None:
        left, right = (num_groups(size, rank) for size in (rows, columns))
        start = 2 + rank
        self.exponents: _U8 = np.frombuffer(payload, np.uint8, count=rank, offset=2)
        self.left_scales: _U16 = np.frombuffer(payload, "<u2", count=left, offset=start)
        self.right_scales: _U16 = np.frombuffer(payload, "<u2", count=right, offset=start + 2 * left)
        start += 2 * (left + right)
        left_bytes = (rank * rows + 1) // 2
        self.left_codes: _U8 = np.frombuffer(payload, np.uint8, count=left_bytes, offset=start)
        self.right_codes: _U8 = np.frombuffer(payload, np.uint8, offset=start + left_bytes)
        self._paddings = [
            codes for codes, size in ((self.left_codes, rows), (self.right_codes, columns)) if rank * size % 2
        ]
        self._top = largest_exponent(rank)

    def check(self, name: str) -> None:
        """Raises MalformedBlob for numbers that no encoder writes and that would make decoding inexact."""
        if (self.exponents > self._top).any():
            raise MalformedBlob(f"{name}: exponent {int(self.exponents.max())}, at most {self._top} at this rank")
        for side, bits, (least, most) in (
            ("left", self.left_scales, _LEFT_SCALES),
            ("right", self.right_scales, _RIGHT_SCALES),
        ):
            scales = from_bfloat16(bits)
            wrong = ~((bits == 0) | ((scales >= least) & (scales <= most)))
            if wrong.any():
                raise MalformedBlob(
                    f"{name}: a {side} scale of {scales[wrong][0]}; allowed are 0 and {least} to {most}"
                )
        if any(int(codes[-1]) >> 4 for codes in self._paddings):
            raise MalformedBlob(f"{name}: padding bits that are not 0")


def largest_exponent(rank: int) -> int:
    """Partial sums of R products of codes, at most 8 * 8 * 2**this each, are whole numbers up to 2**24: exact."""
    return 18 - (rank - 1).bit_length()


def _unreadable(rows: int, columns: int) -> bytearray:
    """What is sent for a tensor that is not finite: of rank 1 with scales of NaN, which every decoder refuses."""
    payload = bytearray(low_rank_bytes(rows, columns, 1))
    payload[:2] = b"\x01\x00"
    Factors(payload, rows, columns, 1).left_scales[:] = 0x7FC0
    return payload


def _absmax(x: Tensor) -> float:
    """Largest |element|, NaN if one is; 0 for an empty tensor. Takes no second tensor."""
    if not x.numel():
        return 0.0
    least, most = torch.aminmax(x.detach())
    return float(torch.maximum(-least, most))


def _seeded(rank: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(rank, columns, generator=generator)


def _basis(x_MN: Tensor, right_RN: Tensor) -> Tensor:
    """R x M, orthonormal rows that span x @ right."""
    basis_MR: Tensor = torch.linalg.qr(torch.mm(x_MN, right_RN.t())).Q  # right.t() costs nothing here, x.t() does
    return basis_MR.t().contiguous()


def _quantised(values_RX: Tensor, scales: _U16, codes: _U8, *, limits: tuple[float, float], shift: int = 0) -> Tensor:
    """values in 4 bits, written into scales (times 2**shift) and codes; what they decode to (without the shift) is given
    back in the place of values, which are overwritten."""
    rank, size = values_RX.shape
    group = max(1, SHARING // rank)
    absmax_X = torch.zeros(len(scales) * group)
    torch.amax(values_RX.abs(), 0, out=absmax_X[:size])
    wanted_G = (absmax_X.view(-1, group).amax(1).double() / 7 * 2.0**shift).clamp(max=limits[1]).float()
    bits_G = to_bfloat16(wanted_G.numpy())
    bits_G = np.where(from_bfloat16(bits_G) < limits[0], 0, bits_G).astype(np.uint16)
    scales[:] = bits_G
    scale_G = torch.from_numpy(from_bfloat16(bits_G)).double().mul_(2.0**-shift).float()
    inverse_G = torch.where(scale_G > 0, 1 / scale_G, 0.0)
    values_RX.mul_(inverse_G.repeat_interleave(group)[:size]).add_(8.5).clamp_(1.0, 15.5)
    codes_X = np.zeros((rank * size + 1) // 2 * 2, np.uint8)
    codes_X[: rank * size] = values_RX.to(torch.uint8).view(-1).numpy()
    np.bitwise_or(codes_X[::2], codes_X[1::2] << 4, out=codes)
    torch.sub(torch.from_numpy(codes_X[: rank * size]).view(rank, size).float(), 8.0, out=values_RX)
    return values_RX.mul_(scale_G.repeat_interleave(group)[:size])


def _whole_numbers(codes: _U8, rank: int, size: int) -> Tensor:
    """Codes as float32 whole numbers from -8 to 7."""
    values = np.empty(2 * len(codes), np.float32)
    np.bitwise_and(codes, 15, out=values[::2], casting="unsafe")
    np.right_shift(codes, 4, out=values[1::2], casting="unsafe")
    return torch.from_numpy(values)[: rank * size].view(rank, size).sub_(8.0)


def _per_element(scales: _U16, rank: int, size: int) -> Tensor:
    return torch.from_numpy(from_bfloat16(scales)).repeat_interleave(max(1, SHARING // rank))[:size]
