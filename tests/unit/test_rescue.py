"""Whom a peer asks that waits for its stage's state, and what it takes for one."""

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dilocox_peer.dht.directory import Directory
from dilocox_peer.dht.records import Lease
from dilocox_peer.network.endpoint import Endpoint
from dilocox_peer.peer import rescue as rescue_module
from dilocox_peer.peer.rescue import Rescue
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.state import restore as restore_module
from dilocox_peer.peer.state.backup_exchange import Summary
from dilocox_peer.types import PeerId
from tests.certified_stage import ROSTER, STAGE

ME, HEAD, BOOTSTRAP = ROSTER


async def connect(*_arguments: object) -> None:
    """Everybody is there."""


ENDPOINT = cast(
    "Endpoint",
    SimpleNamespace(me=ME, incarnation=1, transport=SimpleNamespace(named={BOOTSTRAP}, peer_id=ME, connect=connect)),
)


def lease(peer: PeerId, stage: int) -> Lease:
    return Lease(peer, stage, 1, (f"/ip4/127.0.0.1/tcp/4000/p2p/{peer}",), 1, 0.0, 0, "direct", 1)


def directory_of(heads: Sequence[PeerId] = (), keepers: Sequence[PeerId] = ()) -> Directory:
    """heads: peers of the other stage."""

    async def peers(stage: int) -> list[Lease]:
        return [lease(peer, stage) for peer in heads] if stage != STAGE else []

    async def all_keepers() -> list[Lease]:
        return [lease(peer, 0) for peer in keepers]

    async def word(_stage: int) -> None:
        return None

    return cast("Directory", SimpleNamespace(peers=peers, keepers=all_keepers, word=word))


def say(monkeypatch: pytest.MonkeyPatch, said: dict[PeerId, int]) -> None:
    async def summary(_transport: object, peer: PeerId, _stage: int, _timeout_s: float) -> Summary | None:
        reached = said.get(peer)
        return None if reached is None else Summary(reached + 1, reached, 3, reached)

    monkeypatch.setattr(restore_module, "fetch_summary", summary)


async def is_rescued(
    monkeypatch: pytest.MonkeyPatch, directory: Directory, *, round_number: int, is_ready: bool
) -> bool:
    """Within some looks of a peer whose rounds wait for the run's state."""
    monkeypatch.setattr(rescue_module, "WAITED_S", 0.0)
    monkeypatch.setattr(rescue_module, "LOOK_S", 0.0)
    sleep: Callable[[float], Any] = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda _seconds: sleep(0.001))
    machine = SimpleNamespace(waits_for=lambda _now: "state", round=round_number, is_ready=is_ready)
    waiting = Rescue(ENDPOINT, STAGE, num_stages=2, machine=cast("RoundMachine", machine), directory=directory, times=0)
    try:
        async with asyncio.timeout(0.2):
            await waiting.run()
    except TimeoutError:
        return False
    return True


async def test_the_copy_of_a_peer_of_another_stage_that_came_later_is_waited_for_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A newcomer asked when nobody who had a copy was there, in a run that nobody keeps."""
    directory = directory_of([HEAD])
    say(monkeypatch, {HEAD: 9})
    assert await is_rescued(monkeypatch, directory, round_number=0, is_ready=True)
    assert not await is_rescued(monkeypatch, directory, round_number=9, is_ready=True), "as far as we are"
    say(monkeypatch, {HEAD: 2**40, BOOTSTRAP: 8})
    directory = directory_of([HEAD], [BOOTSTRAP])
    assert not await is_rescued(monkeypatch, directory, round_number=8, is_ready=True), "whom the link names knows"
