"""Whether bytes are MessagePack within bounds, told without decoding them. Pure, iterative, O(depth) memory.

hivemind's serializer follows extension types by recursion in C: a dictionary value in a dictionary value, 200 deep, ends the
process by a segmentation fault (5.6 kB [m]). So what comes from others is scanned before a decoder sees it, contents of
extension types too. The invariants of what passes:
S1 it is exactly one value and as long as it says; S2 containers and extension types are nested at most `max_depth` deep;
S3 it holds at most `max_items` values; S4 no container declares more items than there are bytes left for all open containers
together, so a decoder that takes memory by declared length takes at most a pointer for each byte it was sent.
"""

from collections.abc import Set
from typing import Final

TUPLE_EXT: Final = 0x40  # hivemind: a tuple, as a list
DICTIONARY_EXT: Final = 0x50  # hivemind: DictionaryDHTValue, as a list of its fields
HIVEMIND_EXTS: Final = frozenset({TUPLE_EXT, DICTIONARY_EXT})
"""Codes of extension types whose content hivemind reads as MessagePack again."""

_FIXED = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_BLOB_HEADS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}  # bin and str: bytes of their length
_FIXED_EXTS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_EXT_HEADS = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_CONTAINER_HEADS = {
    0xDC: (2, 1),
    0xDD: (4, 1),
    0xDE: (2, 2),
    0xDF: (4, 2),
}  # list and map: bytes of length, values each


def scan(
    raw: bytes,
    *,
    max_bytes: int,
    max_depth: int,
    max_items: int,
    nested_exts: Set[int] = frozenset(),
    what: str = "value",
) -> None:
    """Raises ValueError unless raw holds S1-S4 of the module.

    nested_exts: codes of extension types whose contents are MessagePack too; an extension type of another code is refused.
    what: its name in the error.
    """
    size = len(raw)
    if size > max_bytes:
        raise ValueError(f"{what} of {size} bytes, at most {max_bytes}")
    at = 0  # what comes before it has been read
    num_items = 0
    # For each level above the one being read: values to be read there, and for the content of an extension type where the
    # bytes around it end and how many values are to come in them, else -1, -1.
    above: list[tuple[int, int, int]] = []
    left, end = 1, size  # values to be read in this level, and where its bytes end
    pending = 1  # values to be read in all open containers up to `end`; S4
    while True:
        while left == 0:
            if not above:
                if at != size:
                    raise ValueError(f"{what}: {size - at} bytes too many")
                return
            left, outer_end, outer_pending = above.pop()
            if outer_end >= 0:
                if at != end:
                    raise ValueError(f"{what}: an extension type has {end - at} bytes too many")
                end, pending = outer_end, outer_pending
        if at >= end:
            raise ValueError(f"{what} ends early, after {at} bytes")
        num_items += 1
        if num_items > max_items:
            raise ValueError(f"{what} holds more than {max_items} values")
        head = raw[at]
        at += 1
        left -= 1
        pending -= 1
        count, ext_bytes = -1, -1
        if head < 0x80 or head >= 0xE0 or head in (0xC0, 0xC2, 0xC3):
            continue
        if head < 0x90:
            count = 2 * (head & 0x0F)
        elif head < 0xA0:
            count = head & 0x0F
        elif head < 0xC0:
            at += head & 0x1F
        elif head in _FIXED:
            at += _FIXED[head]
        elif head in _BLOB_HEADS:
            width = _BLOB_HEADS[head]
            at += width + _length(raw, at, width, end, what)
        elif head in _CONTAINER_HEADS:
            width, each = _CONTAINER_HEADS[head]
            count = each * _length(raw, at, width, end, what)
            at += width
        elif head in _FIXED_EXTS:
            ext_bytes = _FIXED_EXTS[head]
        elif head in _EXT_HEADS:
            width = _EXT_HEADS[head]
            ext_bytes = _length(raw, at, width, end, what)
            at += width
        else:
            raise ValueError(f"{what}: byte {head:#04x} begins no value")
        if ext_bytes >= 0:
            at += 1  # its code
        if at + max(0, ext_bytes) > end:
            raise ValueError(f"{what} ends early, after {end} bytes")
        if count < 0 and ext_bytes < 0:
            continue
        if len(above) >= max_depth:
            raise ValueError(f"{what} is nested more than {max_depth} deep")
        if ext_bytes >= 0:
            if raw[at - 1] not in nested_exts:
                raise ValueError(f"{what} holds an extension type of code {raw[at - 1]:#04x}")
            above.append((left, end, pending))
            left, pending, end = 1, 1, at + ext_bytes
        else:
            above.append((left, -1, -1))
            left = count
            pending += count
            if pending > end - at:
                raise ValueError(f"{what}: {pending} values are to come in {end - at} bytes")


def _length(raw: bytes, at: int, width: int, end: int, what: str) -> int:
    if at + width > end:
        raise ValueError(f"{what} ends early, after {end} bytes")
    return int.from_bytes(raw[at : at + width], "big")
