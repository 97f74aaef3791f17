"""Block-wise codecs: `int8` and `int4` (a scale a block), `int2` and `sign` (magnitudes a block and bit planes).

    payload: magnitudes, bfloat16 little-endian, block after block | codes
    int8     block  64: 1 scale;  code q + 128, one byte             error <= absmax(block) / 254, 8.25 bits an element
    int4     block 128: 1 scale;  code q + 8, two in a byte          error <= absmax(block) / 14, 4.125 bits
    int2     block 256: 2 levels; sign plane, then plane of "upper"  block error shrinks, see PlaneCodec; 2.125 bits
    sign     block 256: 1 level;  sign plane                         the same; 1.0625 bits
(error bounds up to the magnitude's own rounding, a factor 1 + 2**-8). The last block may be shorter. Bits are filled from
the lowest up, even elements first; the size follows from the shape alone.

Decoding is elementwise, one product and one sum after another, and meets no denormals (bfloat16.py): equal bits on every
machine and with any number of threads. So is encoding, where a block is summed up half by half. It works through pieces of a tensor: extra memory is the payload and
under 4 MiB.

Sources: DiLoCoX (arXiv 2506.21263) for quantized pseudo-gradients with error feedback; the two-magnitude rule and the
block sizes were chosen by measuring. No error feedback here (feedback.py).
"""

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilocox_peer.compression.bfloat16 import MAX_MAGNITUDE, check_magnitudes, from_bfloat16, to_bfloat16
from dilocox_peer.compression.reader import PIECE, empty_payload, read_all
from dilocox_peer.compression.sizes import payload_limits
from dilocox_peer.errors import MalformedBlob

_PIECE = PIECE
"""Elements worked on at a time. Two buffers of 2 MiB stay in the caches; with fewer elements the forty small calls that
a piece takes would cost more than its arithmetic (int2 encodes 1.2 GB/s at 2**16, 2.6 at 2**18)."""

_U8 = npt.NDArray[np.uint8]
_U16 = npt.NDArray[np.uint16]
_F32 = npt.NDArray[np.float32]


class AbsmaxCodec:
    """Symmetric integers of 8 or 4 bits; a block's scale is absmax / (2**(bits - 1) - 1), rounded to bfloat16."""

    is_finite = True  # magnitudes are limited (bfloat16.py)

    def __init__(self, name: str, *, bits: int, block: int) -> None:
        assert bits in (4, 8), f"{bits} bits"
        self.name = name
        self._bits = bits
        self._block = block
        self._zero = 1 << (bits - 1)  # code of 0
        self._steps = self._zero - 1

    def encode(self, x: Tensor) -> memoryview:
        flat_N = x.detach().reshape(-1)
        n = len(flat_N)
        payload = empty_payload(payload_limits(self.name, (n,))[0])
        scales, codes = _parts(payload, _ceil(n, self._block))
        work_N = torch.empty(min(n, _PIECE))
        bytes_N = np.empty(min(n, _PIECE) + 1, np.uint8)
        for start, stop, width in _pieces(n, self._block):
            values_XB, work_XB = flat_N[start:stop].view(-1, width), work_N[: stop - start].view(-1, width)
            absmax_X = torch.abs(values_XB, out=work_XB).amax(1)
            if not float(absmax_X.amax()) <= MAX_MAGNITUDE:
                values_XB = values_XB.clamp(-MAX_MAGNITUDE, MAX_MAGNITUDE)
                absmax_X = values_XB.abs().amax(1)
            own_scales = scales[start // self._block :][: len(absmax_X)]
            np.copyto(own_scales, to_bfloat16((absmax_X / self._steps).numpy()))
            torch.mul(values_XB, _column(_inverse(from_bfloat16(own_scales))), out=work_XB)
            work_XB.add_(self._zero + 0.5)  # and cut off below: rounds to the nearest
            with np.errstate(invalid="ignore"):  # NaN: its scale is NaN too, nobody will decode this
                np.copyto(bytes_N[: stop - start], work_N[: stop - start].numpy(), casting="unsafe")
            first, last = start * self._bits // 8, _ceil(stop * self._bits, 8)
            if self._bits == 8:
                codes[first:last] = bytes_N[: stop - start]
            else:
                bytes_N[stop - start] = 0  # the padding of an odd number
                pairs = bytes_N[: 2 * (last - first)].view("<u2")
                np.copyto(codes[first:last], pairs | (pairs >> 4), casting="unsafe")
        return payload

    def open(self, payload: memoryview, shape: tuple[int, ...]) -> "_AbsmaxReader":
        n = math.prod(shape)
        _check_size(self, payload, shape)
        scales, codes = _parts(payload, _ceil(n, self._block))
        check_magnitudes(self.name, scales)
        _check_padding(self.name, codes, n * self._bits)
        return _AbsmaxReader(scales, codes, n, bits=self._bits, block=self._block)

    def decode(self, payload: memoryview, out: Tensor) -> None:
        read_all(self.open(payload, tuple(out.shape)), out)


class _AbsmaxReader:
    def __init__(self, scales: _U16, codes: _U8, n: int, *, bits: int, block: int) -> None:
        self._scales = scales
        self._codes = codes
        self._n = n
        self._bits = bits
        self._block = block
        self._zero = 1 << (bits - 1)

    def read(self, start: int, stop: int, out_X: Tensor) -> None:
        for first, last, width in _pieces(self._n, self._block, start, stop):
            values_N = out_X[first - start : last - start]
            packed = self._codes[first * self._bits // 8 : _ceil(last * self._bits, 8)]
            if self._bits == 4:
                pairs = packed.astype("<u2")
                pairs |= pairs << 4
                pairs &= 0x0F0F
                codes = pairs.view(np.int8)[: last - first]
                codes -= self._zero  # while they are bytes: a quarter of what floats would be
            else:
                codes = np.bitwise_xor(packed, self._zero).view(np.int8)  # - 128
            values_XB = values_N.copy_(torch.from_numpy(codes)).view(-1, width)  # numpy's cast takes a third longer
            values_XB.mul_(_column(from_bfloat16(self._scales[first // self._block :][: len(values_XB)])))


class PlaneCodec:
    """One sign a bit, and for every block one magnitude (`sign`) or two (`int2`).

    t is the mean of |x| over the block. `sign` decodes to +-t; `int2` to the mean of what is above t, or of the rest.
    These means are the least-squares levels, so for every block of n elements
        |x - decoded|**2 <= |x|**2 - (1 - 2**-16) * n * t**2
    and encoding is a contraction, which is what error feedback needs to converge.
    """

    is_finite = True

    def __init__(self, name: str, *, num_levels: int, block: int) -> None:
        assert num_levels in (1, 2), f"{num_levels} levels"
        assert block % 64 == 0, f"block {block}"
        self.name = name
        self._num_levels = num_levels
        self._block = block

    def encode(self, x: Tensor) -> memoryview:
        flat_N = x.detach().reshape(-1)
        n = len(flat_N)
        payload = empty_payload(payload_limits(self.name, (n,))[0])
        levels, planes = self._levels_and_planes(payload, n)
        work_N = torch.empty(min(n, _PIECE))
        bools_N = np.empty(min(n, _PIECE), np.bool_)
        for start, stop, width in _pieces(n, self._block):
            values_N, work_XB = flat_N[start:stop], work_N[: stop - start].view(-1, width)
            flags = bools_N[: stop - start]
            own_bytes = slice(start // 8, _ceil(stop, 8))
            np.less(values_N.numpy(), 0, out=flags)
            planes[0, own_bytes] = np.packbits(flags, bitorder="little")
            sum_X = _row_sums(torch.abs(values_N.view(-1, width), out=work_XB))
            if not float(sum_X.amax()) <= MAX_MAGNITUDE:
                sum_X = _row_sums(work_XB.clamp_(max=MAX_MAGNITUDE))
            mean_X = sum_X / width
            own_levels = levels[start // self._block :][: len(mean_X)]
            if self._num_levels == 1:
                own_levels[:, 0] = to_bfloat16(mean_X.numpy())
                continue
            work_XB.sub_(mean_X[:, None])
            with np.errstate(invalid="ignore"):  # NaN, as above
                np.greater(work_XB.view(-1).numpy(), 0, out=flags)
            planes[1, own_bytes] = np.packbits(flags, bitorder="little")
            num_upper_X = _counts(planes[1, own_bytes], width)
            upper_X = _row_sums(work_XB.clamp_(min=0)).add_(mean_X * num_upper_X)  # the sum of the upper ones
            lower_X = (sum_X - upper_X).clamp_(min=0).div_((width - num_upper_X).clamp_(min=1))
            upper_X.div_(num_upper_X.clamp(min=1))
            # A class without members takes the other's level: of equal numbers the rounded mean may miss them all.
            lower_X = torch.where(num_upper_X == width, upper_X, lower_X)
            upper_X = torch.maximum(torch.where(num_upper_X == 0, lower_X, upper_X), lower_X)
            own_levels[:, 0], own_levels[:, 1] = to_bfloat16(lower_X.numpy()), to_bfloat16(upper_X.numpy())
        return payload

    def open(self, payload: memoryview, shape: tuple[int, ...]) -> "_PlaneReader":
        n = math.prod(shape)
        _check_size(self, payload, shape)
        levels, planes = self._levels_and_planes(payload, n)
        check_magnitudes(self.name, levels)
        if self._num_levels == 2 and bool((levels[:, 0] > levels[:, 1]).any()):
            raise MalformedBlob(f"{self.name}: a lower level above its upper one")
        for plane in planes:
            _check_padding(self.name, plane, n)
        return _PlaneReader(levels, planes, n, block=self._block)

    def decode(self, payload: memoryview, out: Tensor) -> None:
        read_all(self.open(payload, tuple(out.shape)), out)

    def _levels_and_planes(self, payload: memoryview, n: int) -> tuple[_U16, _U8]:
        """(blocks, levels) and (planes, bytes of one) as views of the payload."""
        levels, planes = _parts(payload, self._num_levels * _ceil(n, self._block))
        return levels.reshape(-1, self._num_levels), planes.reshape(self._num_levels, -1)


class _PlaneReader:
    def __init__(self, levels: _U16, planes: _U8, n: int, *, block: int) -> None:
        self._levels = levels
        self._planes = planes
        self._n = n
        self._block = block

    def read(self, start: int, stop: int, out_X: Tensor) -> None:
        work_N = torch.empty(min(stop - start, _PIECE))
        for first, last, width in _pieces(self._n, self._block, start, stop):
            values_N, signs_N = out_X[first - start : last - start], work_N[: last - first]
            values_XB, own_bytes = values_N.view(-1, width), slice(first // 8, _ceil(last, 8))
            own_levels = from_bfloat16(self._levels[first // self._block :][: len(values_XB)])
            negative = np.unpackbits(self._planes[0, own_bytes], count=last - first, bitorder="little")
            if len(self._planes) == 1:
                values_XB = values_N.copy_(torch.from_numpy(negative)).view(-1, width)
                values_XB.mul_(_column(own_levels[:, 0] * np.float32(-2))).add_(_column(own_levels[:, 0]))
                continue
            upper = np.unpackbits(self._planes[1, own_bytes], count=last - first, bitorder="little")
            values_N.copy_(torch.from_numpy(upper))
            values_XB.mul_(_column(own_levels[:, 1] - own_levels[:, 0])).add_(_column(own_levels[:, 0]))
            values_N.mul_(signs_N.copy_(torch.from_numpy(negative)).mul_(-2.0).add_(1.0))


def _pieces(n: int, block: int, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int, int]]:
    """(start, stop, block width) of what lies from start, a whole piece, to stop: runs of whole blocks, then what is left of n
    elements as one shorter block."""
    end = n if stop is None else stop
    whole = min(n - n % block, end)
    for first in range(start, whole, _PIECE):
        yield first, min(first + _PIECE, whole), block
    if whole < end:
        yield whole, end, end - whole


def _parts(payload: memoryview, num_magnitudes: int) -> tuple[_U16, _U8]:
    """The magnitudes' bits and the codes, as views; writable if the payload is."""
    return (
        np.frombuffer(payload, "<u2", count=num_magnitudes),
        np.frombuffer(payload, np.uint8, offset=2 * num_magnitudes) if len(payload) else np.empty(0, np.uint8),
    )


def _check_size(codec: AbsmaxCodec | PlaneCodec, payload: memoryview, shape: tuple[int, ...]) -> None:
    expected, _ = payload_limits(codec.name, shape)
    if len(payload) != expected:
        raise MalformedBlob(f"{codec.name}: {len(payload)} bytes for shape {shape}, expected {expected}")


def _check_padding(name: str, codes: _U8, num_bits: int) -> None:
    if num_bits % 8 and int(codes[-1]) >> num_bits % 8:
        raise MalformedBlob(f"{name}: padding bits that are not 0")


def _inverse(scales: _F32) -> _F32:
    """1 / scale, 0 for 0."""
    return np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)


def _column(values: _F32) -> Tensor:
    return torch.from_numpy(values)[:, None]


def _row_sums(values_XB: Tensor) -> Tensor:
    """Of each row, halves upon halves: in one order on every processor, as those must come to the same bytes who average a slice."""
    width = values_XB.shape[1]
    if width & (width - 1):
        values_XB = torch.nn.functional.pad(values_XB, (0, (1 << width.bit_length()) - width))
        width = values_XB.shape[1]
    while width > 1:
        width //= 2
        values_XB = torch.add(values_XB[:, :width], values_XB[:, width:])
    return values_XB[:, 0].clone()


def _counts(plane: _U8, width: int) -> Tensor:
    """Bits set in each block of `width` elements, as float32."""
    if width % 64:  # the last, shorter block
        return torch.tensor([float(np.unpackbits(plane).sum())])
    words = np.ascontiguousarray(plane).view("<u8")  # counted in parallel within a word (Hacker's Delight 5-1)
    words = words - ((words >> 1) & 0x5555555555555555)
    words = (words & 0x3333333333333333) + ((words >> 2) & 0x3333333333333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F0F0F0F0F
    words = (words * np.uint64(0x0101010101010101)) >> 56
    return torch.from_numpy(words.reshape(-1, width // 64).sum(1).astype(np.float32))


def _ceil(n: int, divisor: int) -> int:
    return -(-n // divisor)
