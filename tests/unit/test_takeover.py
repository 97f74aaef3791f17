"""For leases that may be made up nobody leaves a stage whose last peer it is."""

import asyncio
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from dilocox_peer.dht.records import Lease
from dilocox_peer.peer import takeover as takeover_module
from dilocox_peer.peer.takeover import Move, Takeover
from dilocox_peer.types import PeerId

ME, THERE = PeerId("me"), PeerId("there")
FAKES = [PeerId(f"made up {number}") for number in range(3)]


def lease(peer: PeerId, stage: int, incarnation: int) -> Lease:
    return Lease(peer, stage, incarnation, (), 1, 1.0, 1, "direct", 0)


class ReadTwice:
    """A directory of two stages: ours with older leases beside our own, and one of a single peer. seen: it was read again and again."""

    def __init__(self) -> None:
        self.seen, self._times = asyncio.Event(), 0

    async def peers(self, stage: int) -> list[Lease]:
        self._times += 1
        if self._times > 20:
            self.seen.set()
        ours = [lease(ME, 0, 1_764_000_000_000), *(lease(fake, 0, 1) for fake in FAKES)]
        return ours if stage == 0 else [lease(THERE, 1, 1_764_000_005_000)]


async def moved(mates: Collection[PeerId], monkeypatch: pytest.MonkeyPatch) -> Move | None:
    """None: it has looked many times, and stays."""
    monkeypatch.setattr(takeover_module, "LOOK_S", 0.001)
    directory: Any = ReadTwice()
    presence: Any = SimpleNamespace(me=ME, incarnation=1, is_dialable=True, transport=None)
    takeover = Takeover(
        presence, 0, num_stages=2, start_peers=2, fits=(0, 1), linked=lambda: {THERE: 1}, mates=lambda: mates,
        is_paused=lambda: False, directory=directory,
    )  # fmt: skip
    moving, seen = asyncio.create_task(takeover.run()), asyncio.create_task(directory.seen.wait())
    async with asyncio.timeout(60):
        await asyncio.wait({moving, seen}, return_when=asyncio.FIRST_COMPLETED)
    for task in (moving, seen):
        task.cancel()
    await asyncio.gather(moving, seen, return_exceptions=True)
    return None if moving.cancelled() else moving.result()


async def test_the_last_peer_of_a_stage_stays_whatever_leases_name_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await moved([], monkeypatch) is None


async def test_where_the_others_are_heard_the_newest_moves_to_the_stage_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    move = await moved(FAKES, monkeypatch)
    assert move is not None
    assert move.stage == 1
