"""Bytes with something wrong, from bytes that are right. Pure; all from one seed."""

import random
from collections.abc import Sequence

INTERESTING = (
    b"\x00", b"\xff", b"\x7f", b"\x80", b"\xc0", b"\xc1", b"\x90", b"\x9f", b"\x80", b"\x8f", b"\xa0", b"\xbf",
    b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xde\xff\xff", b"\xdf\x7f\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc9\x00\x00\x10\x00\x50",
    b"\xcb\x7f\xf8" + bytes(6), b"\xcb\x7f\xf0" + bytes(6), b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7), b"\xca\x7f\x80\x00\x00",
    b"\xe2\x80\xae", b"\x1b[2J", b"\n", b"/", b"..", b"\xed\xa0\x80", b"e999999999", b"-1", b"{", b"[", b'"',
)  # fmt: skip
"""Edges of msgpack, protobuf, UTF-8, JSON, numbers and terminals."""
MOST_BYTES = 8192


class Mutator:
    """corpus: what to begin with, at least one; what `learn` adds is begun with as well."""

    def __init__(self, corpus: Sequence[bytes], seed: int) -> None:
        self._corpus = list(corpus)
        self._rng = random.Random(seed)

    def learn(self, raw: bytes) -> None:
        self._corpus.append(raw)

    def next(self) -> bytes:
        rng = self._rng
        raw = bytearray(rng.choice(self._corpus))
        for _ in range(rng.choice((1, 1, 2, 4, 12))):
            self._change(raw)
        return bytes(raw[:MOST_BYTES])

    def _change(self, raw: bytearray) -> None:
        rng = self._rng
        at = rng.randrange(len(raw) + 1)
        size = min(len(raw) - at, rng.choice((1, 1, 2, 4, 16, 200)))
        match rng.randrange(8):
            case 0 if at < len(raw):
                raw[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(raw):
                raw[at] = rng.randrange(256)
            case 2:
                del raw[at : at + size]
            case 3:
                raw[at:at] = rng.choice(INTERESTING)
            case 4:
                found = rng.choice(INTERESTING)
                raw[at : at + len(found)] = found
            case 5:
                raw[at:at] = raw[at : at + size] * rng.choice((1, 2, 40))
            case 6:  # the end of another
                raw[at:] = rng.choice(self._corpus)[-rng.randrange(1, 100) :]
            case _:
                raw[at:at] = rng.randbytes(rng.choice((1, 4, 30)))
