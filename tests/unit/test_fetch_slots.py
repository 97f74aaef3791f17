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
