"""A contribution: the encoded pseudo-gradient of a whole stage, as one blob.

    header length u32 (big-endian) | msgpack header | payload of tensor 0 | payload of tensor 1 | ...
    header: ["dilocox-contribution", version, layout digest, [codec of each tensor], [payload bytes of each tensor]]

Self-describing: whoever knows the layout can decode it. Blobs come from strangers: every size is checked against the
layout before anything is decoded, and nothing is decoded before the header is whole. Lists, not dictionaries, so that
equal pseudo-gradients give equal bytes. Combining contributions is aggregate.py.
"""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from dilocox_peer.compression.codec import CodecPolicy, RememberingCodec, TensorCodec, TensorEncoder, codec_named
from dilocox_peer.compression.reader import Payload, TensorReader, pieces
from dilocox_peer.compression.sizes import max_header_bytes, payload_limits
from dilocox_peer.errors import MalformedBlob
from dilocox_peer.files import let_go
from dilocox_peer.types import Layout, TensorSpec
from dilocox_peer.wire import versions
from dilocox_peer.wire.blobs import CONTRIBUTION_HEADER, ContributionHeader
from dilocox_peer.wire.declared import encode

_LENGTH = struct.Struct(">I")

Blob = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Contribution:
    """A blob whose header fits its layout: sizes and codecs are known and allowed; payloads are not yet decoded."""

    layout: Layout
    codecs: tuple[TensorCodec, ...]
    payloads: tuple[memoryview, ...]

    def decode_into(self, scratch_X: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """(start, stop, values) piece by piece, in order, as offsets into the flat vector; values lies in scratch until the next.

        scratch_X: float32, CPU, of PIECE elements. Raises MalformedBlob, also for values that are not finite.
        """
        for index, (spec, first, _stop) in enumerate(self.layout.spans()):
            reader = self.open(index)
            for start, stop in pieces(spec.num_elements):
                values = scratch_X[: stop - start]
                reader.read(start, stop, values)
                yield first + start, first + stop, values
            self.let_go(index)

    def open(self, index: int) -> TensorReader:
        """The tensor of that place in the layout, to be read piece by piece. Raises MalformedBlob, also in reading: for values
        that are not finite, too."""
        spec, codec = self.layout.tensors[index], self.codecs[index]
        reader = codec.open(self.payloads[index], spec.shape)
        return reader if codec.is_finite else _FiniteReader(spec, reader)

    def let_go(self, index: int) -> None:
        """That tensor was read, and need not stay in memory if the blob is a mapped file's."""
        let_go(self.payloads[index])


class _FiniteReader:
    def __init__(self, spec: TensorSpec, reader: TensorReader) -> None:
        self._spec = spec
        self._reader = reader

    def read(self, start: int, stop: int, out_X: Tensor) -> None:
        self._reader.read(start, stop, out_X)
        _check_finite(self._spec, out_X)


class ContributionEncoder:
    """Encodes the pseudo-gradients of one stage, round after round, with one encoder for each tensor that has use for it.

    Asks the policy anew each time; a tensor that changes its codec starts afresh.
    """

    def __init__(self, layout: Layout, codec_of: CodecPolicy) -> None:
        self._layout = layout
        self._codec_of = codec_of
        self._encoders: dict[str, tuple[TensorCodec, TensorEncoder]] = {}

    def use(self, codec_of: CodecPolicy) -> None:
        """Another policy from the next contribution on. Encoders of tensors that keep their codec go on."""
        self._codec_of = codec_of

    def reset(self) -> None:
        """Forgets every round: for pseudo-gradients that have nothing to do with those before."""
        self._encoders.clear()

    def encode(self, flat_N: Tensor) -> bytes:
        """As `blob_of`, copied at one time: for what is small."""
        return bytes(self.blob_of(flat_N))

    def blob_of(self, flat_N: Tensor) -> memoryview:
        """The blob of flat_N. flat_N: (layout.num_elements,) float32, CPU, contiguous; not modified.

        Deterministic in the pseudo-gradients since the last reset.
        """
        layout = self._layout
        assert flat_N.shape == (layout.num_elements,), f"{tuple(flat_N.shape)} for a layout of {layout.num_elements}"
        payloads = [
            self.encode_tensor(index, flat_N[start:stop].view(spec.shape))
            for index, (spec, start, stop) in enumerate(layout.spans())
        ]
        return self.joined(payloads)

    def encode_tensor(self, index: int, x: Tensor) -> Payload:
        """The payload of the tensor of that place in the layout."""
        spec = self._layout.tensors[index]
        return self._encoder(spec, self._codec_of(spec)).encode(x)

    def joined(self, payloads: list[Payload]) -> memoryview:
        """The blob of these payloads, one for each tensor; takes them over, and gives each one's memory back once it is copied.
        Does not hold the GIL for the whole."""
        return join_payloads(self._layout, self._codec_of, payloads)

    def _encoder(self, spec: TensorSpec, codec: TensorCodec) -> TensorEncoder:
        if not isinstance(codec, RememberingCodec):
            return codec
        known_codec, encoder = self._encoders.get(spec.name, (None, codec))
        if known_codec is not codec:
            encoder = codec.encoder()
            self._encoders[spec.name] = (codec, encoder)
        return encoder


def join_payloads(layout: Layout, codec_of: CodecPolicy, payloads: list[Payload]) -> memoryview:
    """The blob of these payloads, one for each tensor of layout, by the policy's codecs. See ContributionEncoder.joined."""
    sizes = tuple(len(payload) for payload in payloads)
    names = tuple(codec_of(spec).name for spec in layout.tensors)
    header = encode(ContributionHeader(versions.CONTRIBUTION, layout.digest(), names, sizes))
    beginning = _LENGTH.pack(len(header)) + header
    blob = np.empty(len(beginning) + sum(sizes), np.uint8)
    blob[: len(beginning)] = np.frombuffer(beginning, np.uint8)
    at = len(beginning)
    payloads.reverse()
    while payloads:
        payload = payloads.pop()
        if payload:
            np.copyto(blob[at : at + len(payload)], np.frombuffer(payload, np.uint8))
        at += len(payload)
    return blob.data.toreadonly()


def encode_contribution(layout: Layout, flat_N: Tensor, codec_of: CodecPolicy) -> bytes:
    """The blob of flat_N alone, by encoders that remember nothing. Deterministic. As ContributionEncoder.encode."""
    return ContributionEncoder(layout, codec_of).encode(flat_N)


def open_contribution(raw: Blob, layout: Layout) -> Contribution:
    """The contribution in raw, every size checked, no payload decoded. Raises MalformedBlob with the reason."""
    view = memoryview(raw).cast("B")
    if len(view) < _LENGTH.size:
        raise MalformedBlob(f"{len(view)} bytes are no contribution")
    (header_bytes,) = _LENGTH.unpack(view[: _LENGTH.size])
    if header_bytes > max_header_bytes(layout) or _LENGTH.size + header_bytes > len(view):
        raise MalformedBlob(f"header of {header_bytes} bytes in a blob of {len(view)}")
    names, sizes = _read_header(bytes(view[_LENGTH.size : _LENGTH.size + header_bytes]), layout)

    codecs, payloads, start = [], [], _LENGTH.size + header_bytes
    for spec, name, size_bytes in zip(layout.tensors, names, sizes, strict=True):
        codec = codec_named(name)
        smallest, largest = payload_limits(codec.name, spec.shape)
        if not smallest <= size_bytes <= largest:
            raise MalformedBlob(f"{spec.name} in {name}: {size_bytes} bytes, expected {smallest} to {largest}")
        codecs.append(codec)
        payloads.append(view[start : start + size_bytes])
        start += size_bytes
    if start != len(view):
        raise MalformedBlob(f"the blob has {len(view)} bytes, its header announces {start}")
    return Contribution(layout, tuple(codecs), tuple(payloads))


def decode_contribution(raw: Blob, layout: Layout, out_N: Tensor) -> None:
    """Writes the decoded pseudo-gradient into out_N ((layout.num_elements,) float32, CPU).

    Raises MalformedBlob with the reason; out_N is then unspecified. No further memory of out's size is taken.
    """
    assert out_N.shape == (layout.num_elements,), f"{tuple(out_N.shape)} for a layout of {layout.num_elements}"
    contribution = open_contribution(raw, layout)
    for codec, payload, (spec, start, stop) in zip(
        contribution.codecs, contribution.payloads, layout.spans(), strict=True
    ):
        values = out_N[start:stop]
        codec.decode(payload, values.view(spec.shape))
        _check_finite(spec, values)


def _check_finite(spec: TensorSpec, values: Tensor) -> None:
    if values.numel() and not all(math.isfinite(bound) for bound in values.aminmax()):  # one pass, no temporary
        raise MalformedBlob(f"{spec.name} holds values that are not finite")


def _read_header(packed: bytes, layout: Layout) -> tuple[tuple[str, ...], tuple[int, ...]]:
    num_tensors = len(layout.tensors)
    try:
        header = CONTRIBUTION_HEADER.read(packed)
    except ValueError as error:
        raise MalformedBlob(str(error)) from None
    if header.layout != layout.digest():
        raise MalformedBlob("made for another layout (other model or stage)")
    if len(header.codecs) != num_tensors or len(header.sizes) != num_tensors:
        raise MalformedBlob(f"{len(header.codecs)} codecs and {len(header.sizes)} sizes for {num_tensors} tensors")
    return header.codecs, header.sizes
