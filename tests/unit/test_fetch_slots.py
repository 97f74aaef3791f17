"""A member whose slices, or contributions of several incarnations, come a byte now and then takes one slot of the real RoundDriver."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dilocox_peer.peer.rounds.contract import BlobHeld, BlobPart, FetchBlob
from dilocox_peer.peer.rounds.driver import RoundDriver
from dilocox_peer.peer.rounds.fetch_slots import UNKNOWN_S, FetchSlots
from dilocox_peer.store.shelf import Shelf
from dilocox_peer.types import PeerId, sha256

WITHIN_S = 20.0  # Pace.exchange_s at least; two rounds, or 600 s before the first


@pytest.mark.parametrize("is_sliced", [True, False])
async def test_who_trickles_takes_no_more_than_a_slot(tmp_path: Path, is_sliced: bool) -> None:
    loop, blob, came = asyncio.get_running_loop(), b"honest", asyncio.Event()
    table = sha256(b"table")
    parts = [BlobPart("slice", n, table) if is_sliced else None for n in range(4)]
    hostile = [FetchBlob(sha256(bytes([n])), (PeerId("hostile"),), WITHIN_S, False, parts[n]) for n in range(4)]
    honest = FetchBlob(sha256(blob), (PeerId("honest"),), WITHIN_S, False, parts[0])

    async def fetch(source: PeerId, *_arguments: Any, **_options: Any) -> Any:
        if source == "hostile":
            await asyncio.sleep(3600.0)  # bytes come within each stall_timeout_s
        return {"size": len(blob)}, bytearray(blob)

    wanted = [[*hostile, honest]]

    def handle(happened: Any, _now: float, *, more: bool) -> list[Any]:
        if isinstance(happened, BlobHeld) and happened.blob == honest.blob:
            came.set()
        return wanted.pop() if wanted else []

    machine = SimpleNamespace(handle=handle, deadline=lambda: loop.time() + 60.0, roster=())
    with ThreadPoolExecutor(1) as disk:
        driver = RoundDriver(
            cast("Any", machine), transport=cast("Any", SimpleNamespace(fetch=fetch)), blobs=Shelf(tmp_path), journal=cast("Any", None), disk=disk,
            check_blob=lambda _name, _raw: None, max_blob_bytes=1 << 20, on_apply=cast("Any", None), on_fetch_state=cast("Any", None),
            on_change=lambda: None, listener=lambda _event: None,
            slices=cast("Any", SimpleNamespace(max_bytes=lambda _part: 1 << 20, check=lambda _view, _part: ())),
        )  # fmt: skip
        running = asyncio.create_task(driver.run())
        try:
            async with asyncio.timeout(3.0):
                await came.wait()
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


def wanted(number: int, *sources: str, doubted: bool = False) -> FetchBlob:
    return FetchBlob(sha256(bytes([number])), tuple(map(PeerId, sources)), WITHIN_S, doubted, None)


def test_a_few_things_come_at_once_and_the_next_when_one_is_here() -> None:
    slots, things = FetchSlots(), [wanted(number, "abcdefgh"[number], "z") for number in range(6)]
    assert [slots.ask(each, 0.0) for each in things] == [[each] for each in things[:4]] + [[], []]
    assert slots.is_anything_waiting
    assert slots.ended(things[1].blob, 0.5, has_come=True) == [things[4]]
    assert slots.ended(things[0].blob, 0.6, has_come=False) == [things[5]]
    assert not slots.is_anything_waiting


def test_what_takes_far_longer_than_usual_keeps_nothing_else_waiting() -> None:
    slots, first = FetchSlots(), [wanted(number, "abcd"[number]) for number in range(4)]
    for each in first:
        slots.ask(each, 0.0)
    waiting = [wanted(10 + number, "efgh"[number]) for number in range(4)]
    for each in waiting:
        assert slots.ask(each, 0.1) == []
    assert slots.look(UNKNOWN_S - 0.1) == []
    assert slots.look(UNKNOWN_S) == waiting
    assert slots.ended(waiting[0].blob, UNKNOWN_S + 1.0, has_come=True) == []
    later = [wanted(20 + number, "ijk"[number]) for number in range(3)]
    assert [slots.ask(each, UNKNOWN_S + 1.0) for each in later] == [[later[0]], [], []]
    assert slots.look(UNKNOWN_S + 4.1) == later[1:], "one came within a second; four times that is late"


def test_of_one_source_alone_one_thing_comes_at_a_time() -> None:
    slots, things = FetchSlots(), [wanted(number, "a") for number in range(3)]
    assert [slots.ask(each, 0.0) for each in things] == [[things[0]], [], []]
    assert slots.ask(beside := wanted(9, "a", "b"), 0.0) == [beside]
    assert slots.ended(things[0].blob, 1.0, has_come=True) == [things[1]]


def test_those_that_often_do_not_deliver_wait_for_each_other_only() -> None:
    slots = FetchSlots()
    doubted = [wanted(number, "ab"[number], doubted=True) for number in range(2)]
    others = [wanted(10 + number, "cdef"[number]) for number in range(4)]
    assert [slots.ask(each, 0.0) for each in (*doubted, *others)] == [[doubted[0]], [], *([each] for each in others)]


def test_who_is_asked_elsewhere_has_its_place_anew() -> None:
    slots, first = FetchSlots(), wanted(1, "a")
    slots.ask(first, 0.0)
    elsewhere = wanted(1, "b")
    assert slots.ask(elsewhere, 1.0) == [elsewhere]
    assert slots.ended(first.blob, 2.0, has_come=True) == []
    assert slots.ask(again := wanted(2, "b"), 2.0) == [again]
