"""Batches of messages without what they repeat: each is deflated (RFC 1951) with what the stream carried before it. Pure.

Hashes and signatures do not shrink, but most are said more than once on the same stream: a proposal's in the certificate that comes of
it, the contributions that are here in each list of them, the head in every message. Each batch ends where a byte does (a sync
flush, without its last four bytes, which are always the same, as in RFC 7692), so that it is read as soon as it is here.
"""

import zlib

from dilocox_peer.errors import ProtocolError
from dilocox_peer.network.message_answers import ANSWERED_AT_ONCE, Asking
from dilocox_peer.network.message_frames import MAX_DEFLATED_BYTES, BatchHead, BatchPacking, pack_head, split_batch

WINDOW_BITS = 15  # 32 KiB: a proposal of many members still repeats in its certificate
MEMORY_LEVEL = 7  # 200 kB a stream that sends, 40 kB one that reads
_TAIL = b"\x00\x00\xff\xff"


class Packer:
    """Of a stream that messages are sent on. What `pack` gives has to be sent in the order it was asked for."""

    def __init__(self) -> None:
        self._deflate: zlib._Compress | None = None

    def pack(self, num_messages: int, raw: bytes, asking: Asking = ANSWERED_AT_ONCE) -> bytes:
        """A batch with its head. raw: the messages, joined (message_frames.join_batch)."""
        if len(raw) > MAX_DEFLATED_BYTES:
            return pack_head(BatchHead(BatchPacking.NONE, num_messages, len(raw), len(raw), *asking)) + raw
        packing = BatchPacking.GOES_ON
        if self._deflate is None:
            packing = BatchPacking.BEGINS
            self._deflate = zlib.compressobj(wbits=-WINDOW_BITS, memLevel=MEMORY_LEVEL)
        packed = self._deflate.compress(raw) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
        assert packed.endswith(_TAIL)
        packed = packed[: -len(_TAIL)]
        return pack_head(BatchHead(packing, num_messages, len(raw), len(packed), *asking)) + packed

    def forget(self) -> None:
        """The other end has not looked at a batch: the next begins anew."""
        self._deflate = None


class Unpacker:
    """Of a stream that messages come on."""

    def __init__(self) -> None:
        self._inflate: zlib._Decompress | None = None

    def is_lost(self, head: BatchHead) -> bool:
        """Whether the batch goes on with one that was not looked at."""
        return head.packing is BatchPacking.GOES_ON and self._inflate is None

    def unpack(self, head: BatchHead, packed: bytes) -> list[bytes]:
        """The messages of a batch that is not lost; never more bytes than its head says. Raises ProtocolError."""
        if head.packing is BatchPacking.NONE:
            return split_batch(head.num_messages, packed)
        if head.packing is BatchPacking.BEGINS:
            self._inflate = zlib.decompressobj(wbits=-WINDOW_BITS)
        assert self._inflate is not None
        try:
            raw = self._inflate.decompress(packed + _TAIL, head.num_bytes + 1)
        except zlib.error as error:
            raise ProtocolError(None, f"messages that do not inflate: {error}") from None
        if len(raw) != head.num_bytes or self._inflate.unconsumed_tail or self._inflate.eof:
            raise ProtocolError(
                None, f"messages that inflate to other than the {head.num_bytes} bytes they were said to have"
            )
        return split_batch(head.num_messages, raw)

    def forget(self) -> None:
        """A batch was not looked at: what goes on with it cannot be."""
        self._inflate = None
