"""What the scan lets pass is decoded by hivemind's own serializer no deeper than the bound; all else is a ValueError."""

from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dilocox_peer.scan import DICTIONARY_EXT, HIVEMIND_EXTS, TUPLE_EXT, scan

DEPTH, ITEMS, BYTES = 6, 200, 20_000

plain = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(max_size=300)
values = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=20)
        | st.dictionaries(st.text(max_size=3), inner, max_size=5)
        | st.lists(inner, max_size=3).map(lambda items: msgpack.ExtType(TUPLE_EXT, msgpack.packb(items)))
        | inner.map(lambda item: msgpack.ExtType(DICTIONARY_EXT, msgpack.packb(item)))
    ),
    max_leaves=30,
)


def check(raw: bytes, **bounds: int) -> None:
    limits: dict[str, Any] = {"max_bytes": BYTES, "max_depth": DEPTH, "max_items": ITEMS} | bounds
    scan(raw, **limits, nested_exts=HIVEMIND_EXTS)


def nested(depth: int, raw: bytes = b"\xc0") -> bytes:
    """The attack: a dictionary value in a dictionary value, so many deep."""
    for _ in range(depth):
        raw = msgpack.packb(msgpack.ExtType(DICTIONARY_EXT, msgpack.packb([None, 1.0, []])[:-1] + b"\x91" + raw))
    return raw


def depth_and_items(value: Any) -> tuple[int, int]:
    """By recursion, what the scan counts without it."""
    match value:
        case msgpack.ExtType():
            deepest, items = depth_and_items(msgpack.unpackb(value.data, strict_map_key=False))
            return deepest + 1, items + 1
        case list():
            inner = [depth_and_items(item) for item in value]
        case dict():
            inner = [depth_and_items(item) for pair in value.items() for item in pair]
        case _:
            return 0, 1
    return 1 + max((deepest for deepest, _ in inner), default=0), 1 + sum(items for _, items in inner)


@given(values)
def test_it_passes_what_is_within_the_bounds_and_nothing_else(value: Any):
    raw = msgpack.packb(value)
    depth, items = depth_and_items(value)
    if depth <= DEPTH and items <= ITEMS and len(raw) <= BYTES:
        check(raw)
        check(raw, max_depth=depth, max_items=items, max_bytes=len(raw))
        if depth:
            with pytest.raises(ValueError, match="deep"):
                check(raw, max_depth=depth - 1)
        with pytest.raises(ValueError, match="more than"):
            check(raw, max_items=items - 1)
    else:
        with pytest.raises(ValueError, match=r"deep|more than|at most"):
            check(raw)


@given(st.binary(max_size=400))
@example(b"")
@example(b"\xc1")
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\xc9\xff\xff\xff\xff\x50")
@example(b"\xc7\x00\x50")
@example(b"\xd4")
@example(b"\xd4\x50")
@example(b"\xd4\x50\xc0")
def test_it_raises_nothing_but_value_errors_and_what_passes_can_be_decoded(raw: bytes):
    try:
        check(raw)
    except ValueError:
        return
    decoded = shown_by_hivemind(raw)
    assert decoded is None or not isinstance(decoded, RecursionError | MemoryError)


@given(values, st.data())
def test_a_flipped_byte_makes_another_value_or_a_value_error(value: Any, data: st.DataObject):
    raw = bytearray(msgpack.packb(value))
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(1, len(raw)))]
    try:
        check(bytes(raw))
    except ValueError:
        return
    shown_by_hivemind(bytes(raw))


def shown_by_hivemind(raw: bytes) -> Exception | None:
    """What hivemind's serializer raises for raw, with its depth watched. It may raise: types are not the scan's business."""
    from hivemind.dht.storage import DictionaryDHTValue  # noqa: F401 (registers its extension type)
    from hivemind.utils.serializer import MSGPackSerializer

    deepest = 0
    depth = 0

    class Watched(MSGPackSerializer):  # type: ignore[misc]  # hivemind has no types
        @classmethod
        def _decode_ext_types(cls, type_code: int, data: bytes) -> Any:
            nonlocal depth, deepest
            depth += 1
            deepest = max(deepest, depth)
            try:
                return msgpack.loads(data, ext_hook=cls._decode_ext_types, raw=False)
            finally:
                depth -= 1

    try:
        Watched.loads(raw)
    except (ValueError, TypeError) as error:  # text that is no UTF-8, keys that cannot be hashed
        return error
    finally:
        assert deepest <= DEPTH
    return None


@pytest.mark.parametrize("depth", [DEPTH + 1, 200, 20_000])
def test_the_attack_is_refused(depth: int):
    raw = nested(depth) if depth <= 200 else b"\x91" * depth + b"\xc0"  # without quadratic copies
    with pytest.raises(ValueError, match="deep"):
        check(raw, max_bytes=1 << 20)


def test_a_list_cannot_declare_more_than_the_bytes_there_are():
    lists = b"\xdc\x10\x00" * 3 + b"\xc0" * 4200  # 4096 items in the first of 4096 items in the first of ...
    with pytest.raises(ValueError, match="to come"):
        check(lists, max_items=10**6)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"\xc0\xc0", "1 bytes too many"),
        (b"\xd5\x50\xc0\xc0", "an extension type has 1 bytes too many"),
        (b"\x92\xd5\x50\xc0\xc0\xc0", "an extension type has 1 bytes too many"),
        (b"\xd4\x50\x91", "ends early|to come"),
        (b"\xd4\x51\xc0", "code 0x51"),
        (b"\xd6\xff\x00\x00\x00\x00", "code 0xff"),
        (b"\xa5abcd", "ends early"),
        (b"\xc6\xff\xff\xff\xffabcd", "ends early"),
        (b"\xc1", "begins no value"),
    ],
)
def test_what_is_wrong_is_said(raw: bytes, reason: str):
    with pytest.raises(ValueError, match=reason):
        check(raw)
