"""What a driver does with the parts that rounds in slices are made of, fetched of a stand-in for the network."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dilocox_peer.contract import Tick
from dilocox_peer.errors import MalformedBlob
from dilocox_peer.peer.rounds.contract import BlobHeld, BlobMissing, BlobPart, BlobRefused, FetchBlob
from dilocox_peer.peer.rounds.driver import RoundDriver
from dilocox_peer.store.bundles import BUNDLED_BYTES
from dilocox_peer.store.shelf import Shelf
from dilocox_peer.types import Digest, PeerId, sha256

NOTHING = cast("Any", None)


async def answers_to(
    wanted: list[FetchBlob], blobs: Shelf, fetch: Any, *, check: Any = lambda _view, _part: (), max_bytes: int = 1000
) -> dict[Any, Any]:
    """What a driver whose machine wants these parts tells it. max_bytes: that a part may have."""
    loop, answers, all_answered = asyncio.get_running_loop(), dict[Any, Any](), asyncio.Event()

    def handle(happened: Any, _now: float, *, more: bool) -> list[Any]:
        if isinstance(happened, Tick):
            return list(wanted)
        answers[happened.blob] = happened
        if len(answers) == len(wanted):
            all_answered.set()
        return []

    machine = SimpleNamespace(handle=handle, deadline=lambda: loop.time() + 60.0)
    with ThreadPoolExecutor(1) as disk:
        driver = RoundDriver(
            cast("Any", machine), transport=cast("Any", SimpleNamespace(fetch=fetch)), blobs=blobs, journal=NOTHING,
            disk=disk, check_blob=NOTHING, max_blob_bytes=1, on_apply=NOTHING, on_fetch_state=NOTHING,
            on_change=lambda: None, listener=NOTHING,
            slices=cast("Any", SimpleNamespace(max_bytes=lambda _part: max_bytes, check=check)),
        )  # fmt: skip
        running = asyncio.create_task(driver.run())
        async with asyncio.timeout(10):
            await all_answered.wait()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
    return answers


@pytest.mark.parametrize(("kind", "lasts"), [("table", False), ("slice", False), ("result", True), ("residual", True)])
@pytest.mark.parametrize("max_bytes", [1000, BUNDLED_BYTES + 1])
async def test_what_members_sign_that_they_hold_is_on_the_disk_before_it_counts_as_held(
    kind: Any, lasts: bool, max_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob, flushed = b"a part", list[int]()
    monkeypatch.setattr("os.fsync", flushed.append)

    async def fetch(_source: PeerId, _kind: str, _header: dict[str, Any], **_options: Any) -> Any:
        return {"sizes": [len(blob)], "size": len(blob)}, bytearray(blob)

    blobs = Shelf(tmp_path)
    (tmp_path / sha256(blob).hex()[:2]).mkdir()  # that a folder is made durable is its own matter
    wanted = FetchBlob(sha256(blob), (PeerId("author"),), part=BlobPart(kind, 0, sha256(b"table")))
    answers = await answers_to([wanted], blobs, fetch, max_bytes=max_bytes)
    assert answers == {wanted.blob: BlobHeld(wanted.blob, len(blob), (), wanted.part)}
    assert blobs.get(wanted.blob) == blob
    assert bool(flushed) is lasts


async def test_small_slices_of_a_bundle_are_checked_and_kept_each_for_itself(tmp_path: Path) -> None:
    here, good, bad, unknown = b"of before", b"a slice", b"no slice", b"nobody has it"
    asked = list[Any]()

    async def fetch(_source: PeerId, _kind: str, header: dict[str, Any], **_options: Any) -> Any:
        names = [header["names"][at : at + 32] for at in range(0, len(header["names"]), 32)]
        asked.extend(names)
        given = [{sha256(good): good, sha256(bad): bad}.get(name) for name in names]
        sizes = [-1 if raw is None else len(raw) for raw in given]
        return {"sizes": sizes}, bytearray(b"".join(raw or b"" for raw in given))

    def check(view: memoryview, _part: BlobPart) -> tuple[Any, ...]:
        if view == bad:
            raise MalformedBlob("it does not decode")
        return ()

    part = BlobPart("slice", 0, sha256(b"table"))
    wanted = [FetchBlob(sha256(blob), (PeerId("author"),), 10.0, False, part) for blob in (here, good, bad, unknown)]

    blobs = Shelf(tmp_path)
    blobs.put(here)
    answers = await answers_to(wanted, blobs, fetch, check=check)
    assert sorted(asked) == sorted(map(sha256, (good, bad, unknown))), "once each, and not what is here"
    assert answers == {
        sha256(here): BlobHeld(sha256(here), len(here), (), part),
        sha256(good): BlobHeld(sha256(good), len(good), (), part),
        sha256(bad): BlobRefused(sha256(bad), "it does not decode", part), sha256(unknown): BlobMissing(sha256(unknown)),
    }  # fmt: skip
    assert blobs.held == {sha256(here), sha256(good)}


@pytest.mark.parametrize("kind", ["table", "result", "residual"])
async def test_what_is_on_the_disk_is_checked_as_what_it_is_wanted_as(kind: Any, tmp_path: Path) -> None:
    """A table that two averagers named as the residual was here, whole, and no slice of any round could be averaged with it."""

    def check(_view: memoryview, part: BlobPart) -> tuple[Digest, ...]:
        raise MalformedBlob(f"no {part.kind}")

    blobs, part = Shelf(tmp_path), BlobPart(kind, 0)
    name = blobs.put(b"something else")
    answers = await answers_to([FetchBlob(name, (PeerId("author"),), part=part)], blobs, NOTHING, check=check)
    assert answers == {name: BlobRefused(name, f"no {kind}", part)}


@pytest.mark.parametrize(("kind", "lasts"), [("slice", False), ("result", True)])
async def test_a_result_that_was_here_as_a_slice_is_flushed_before_it_counts_as_held(
    kind: Any, lasts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs, flushed = Shelf(tmp_path), list[int]()
    name = blobs.put(b"the only contribution", durable=False)
    monkeypatch.setattr("os.fsync", flushed.append)
    wanted = FetchBlob(name, (PeerId("author"),), part=BlobPart(kind, 0, sha256(b"table")))
    assert list(await answers_to([wanted], blobs, NOTHING)) == [name]
    assert bool(flushed) is lasts
