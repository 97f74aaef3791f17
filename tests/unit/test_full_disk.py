"""A disk that is full for some hours: what is read from the directory again and again does not fill the driver's queue."""

import asyncio
import errno
import os
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dilocox_peer.peer.rounds import disk as disk_module
from dilocox_peer.peer.rounds.contract import Closed, OwnerSpoke, OwnerVouched, PeerRefused, Persist, Received
from dilocox_peer.peer.rounds.disk import until_written
from dilocox_peer.peer.rounds.driver import MAX_INPUTS, RoundDriver
from dilocox_peer.peer.rounds.durable import Durable, Votes
from dilocox_peer.types import PeerId, sha256
from dilocox_peer.wire.rounds import Leave


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EROFS, "mount it writable again"),
        (errno.EACCES, "look at the disk and its rights"),
    ],
)
async def test_what_to_do_about_a_disk_that_refuses_fits_why(
    monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    monkeypatch.setattr(disk_module, "DISK_RETRY_S", 0.0)
    told, refusals = list[Any](), [OSError(number, os.strerror(number))] * 2

    async def write() -> str:
        if refusals:
            raise refusals.pop()
        return "done"

    assert await until_written(write, "the log of rounds", told.append) == "done"
    assert [event.line() for event in told] == [
        f"the log of rounds: {os.strerror(number).lower()}; {remedy}: this peer goes on as soon as it can write",
        "the log of rounds: written, the disk takes it again",
    ]


async def test_a_disk_that_is_full_overnight_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "DISK_RETRY_S", 0.01)
    loop, refused, told = asyncio.get_running_loop(), asyncio.Event(), list[Any]()
    first = [[Persist(Durable(0, (), Votes(sha256(b"head"))))]]

    class Full:
        def write(self, _durable: Durable) -> None:
            loop.call_soon_threadsafe(refused.set)
            raise OSError(errno.ENOSPC, "No space left on device")

    machine = SimpleNamespace(
        handle=lambda happened, now, more: first.pop() if first else [],
        deadline=lambda: None,
        directive=None,
        alive=lambda now: {"me"},
    )
    driver = RoundDriver(
        cast("Any", machine), transport=cast("Any", None), blobs=cast("Any", None), journal=cast("Any", Full()), disk=cast("Any", None),
        check_blob=cast("Any", None), max_blob_bytes=1, on_apply=cast("Any", None), on_fetch_state=cast("Any", None), on_change=lambda: None,
        listener=told.append,
    )  # fmt: skip
    running = asyncio.create_task(driver.run())
    try:
        await refused.wait()
        for number in range(2 * MAX_INPUTS):  # the others' messages, first
            driver.post(Received(PeerId("other"), Leave(0, sha256(b"head"), 1, number)))
        directive, vouched = cast("Any", object()), cast("Any", object())
        for _ in range(1500):  # every 15 s or so, where nobody is heard, for six hours
            for read_again in (OwnerSpoke(directive), OwnerVouched(vouched), PeerRefused(PeerId("other"))):
                driver.post(read_again)
        assert driver.inputs.qsize() < MAX_INPUTS
        driver.post(
            Closed(sha256(b"head"), cast("Any", SimpleNamespace(blob=sha256(b"x"))), ())
        )  # what happens once has room
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
