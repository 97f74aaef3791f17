"""Whom a peer asks that waits for its stage's state, and what it takes for one."""

import asyncio
import errno
import itertools
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dilocox_peer.dht.directory import Directory
from dilocox_peer.dht.records import Lease
from dilocox_peer.network.endpoint import Endpoint
from dilocox_peer.peer import rescue as rescue_module
from dilocox_peer.peer.rescue import Rescue
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.state import keeper as keeper_module
from dilocox_peer.peer.state import restore as restore_module
from dilocox_peer.peer.state.backup import Annals, Backup
from dilocox_peer.peer.state.backup_exchange import Summary
from dilocox_peer.peer.state.backup_store import backup_store
from dilocox_peer.peer.state.keeper import Keeper
from dilocox_peer.peer.state.restore import Own, find_backup
from dilocox_peer.peer.state.statesync import Agreed, Copying
from dilocox_peer.peer.training.anchor_state import AnchorState
from dilocox_peer.store.pull import Pull
from dilocox_peer.store.shelf import Shelf
from dilocox_peer.types import PeerId
from tests.certified_stage import MANIFEST, ROSTER, STAGE, CertifiedStage, keep_in
from tests.virtual_loop import run_virtually

ME, HEAD, BOOTSTRAP = ROSTER


MOST_LOOKS = 20


async def connect(*_arguments: object) -> None:
    """Everybody is there."""


ENDPOINT = cast(
    "Endpoint",
    SimpleNamespace(
        me=ME, incarnation=1, transport=SimpleNamespace(named={BOOTSTRAP}, heard=(), peer_id=ME, connect=connect)
    ),
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
    looks = itertools.count()

    async def between_looks(_seconds: float) -> None:
        if next(looks) >= MOST_LOOKS:  # and not a time: a busy computer looks seldom
            raise TimeoutError
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", between_looks)
    machine = SimpleNamespace(waits_for=lambda _now: "state", round=round_number, is_ready=is_ready)
    waiting = Rescue(ENDPOINT, STAGE, num_stages=2, machine=cast("RoundMachine", machine), directory=directory, times=0)
    try:
        async with asyncio.timeout(60.0):
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


async def test_a_peer_that_has_lost_its_state_is_rescued_by_the_one_at_its_own_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    say(monkeypatch, {BOOTSTRAP: 9})
    directory = directory_of(keepers=[BOOTSTRAP])
    assert await is_rescued(monkeypatch, directory, round_number=9, is_ready=False)
    say(monkeypatch, {})
    assert not await is_rescued(monkeypatch, directory, round_number=0, is_ready=False), "nobody has any"


async def find(folder: Path, keeper: Keeper) -> Backup | None:
    found = await find_backup(
        MANIFEST, STAGE, backup_store(folder, MANIFEST, STAGE), Own.of(keeper), endpoint=ENDPOINT, directory=directory_of(),
        listener=lambda _event: None,
    )  # fmt: skip
    return found.backup


async def test_a_copy_whose_state_found_no_room_is_taken_over_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chain is there by then; without its state nothing comes of it."""
    stage = CertifiedStage().rounds(9)
    keep_in(backup_store(tmp_path, MANIFEST, STAGE), stage.certificates, stage.states[8])
    keeper = Keeper(tmp_path, MANIFEST, STAGE, lambda _event: None)
    backup = await find(tmp_path, keeper)
    assert backup is not None

    def full(*_arguments: object, **_options: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(keeper_module, "write_checkpoint", full)
        with pytest.raises(OSError, match="No space"):
            keeper.adopt(backup, me=ME)
    keeper.close()
    again = Keeper(tmp_path, MANIFEST, STAGE, lambda _event: None)
    assert again.chain.place.round == 8
    found = await find(tmp_path, again)
    assert found is not None
    again.adopt(found, me=ME)
    again.close()
    last = Keeper(tmp_path, MANIFEST, STAGE, lambda _event: None)
    assert last.state == stage.states[8]
    assert await find(tmp_path, last) is None, "it has what there is"
    last.close()


def test_who_claims_the_most_and_lets_a_byte_come_now_and_then_keeps_nobody_from_who_gives_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody of the stage is gone. The bootstrap has the state of round 6; a stranger that says it keeps the run, and has its chain, says 8."""
    stage, stranger = CertifiedStage().rounds(9), PeerId("stranger")
    say(monkeypatch, {BOOTSTRAP: 6, stranger: 8})

    async def state(pulling: SimpleNamespace, timeout_s: float) -> None:
        pulling.share = 0.001
        await asyncio.sleep(timeout_s)

    found, asked, seconds = restored(tmp_path, monkeypatch, stage, stranger, state)
    assert found == stage.states[6]
    assert asked == [8, 6]
    assert seconds < 600.0, "an hour for each name of it"


@pytest.mark.parametrize(("looked_at_s", "dialled_s", "minutes"), [(0.0, 20.0, 40), (70.0, 40.0, 20), (300.0, 5.0, 35)])
def test_an_honest_keeper_is_not_left_for_a_moment_in_which_little_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looked_at_s: float, dialled_s: float, minutes: int
) -> None:
    """It has the newest state, which takes a good part of the hour that there is. What came of it before is looked at, it is dialled, and in its
    second minute half as much comes: all would have gone on from an older one."""
    stage, keeper = CertifiedStage().rounds(9), PeerId("keeper")
    say(monkeypatch, {BOOTSTRAP: 6, keeper: 8})

    async def before() -> None:
        await asyncio.sleep(looked_at_s)

    async def state(pulling: SimpleNamespace, _timeout_s: float) -> None:
        await asyncio.sleep(dialled_s)
        minute = 0
        while pulling.share < 1.0:
            await asyncio.sleep(60.0)
            minute += 1
            pulling.share = min(1.0, pulling.share + (0.5 if minute == 2 else 1.0) / minutes)

    found, asked, _seconds = restored(tmp_path, monkeypatch, stage, keeper, state, before)
    assert found == stage.states[8]
    assert asked == [8]


async def nothing_to_look_at() -> None:
    """Of it nothing came before."""


def restored(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: CertifiedStage,
    first: PeerId,
    comes: Callable[[SimpleNamespace, float], Coroutine[Any, Any, None]],
    before: Callable[[], Coroutine[Any, Any, None]] = nothing_to_look_at,
) -> tuple[AnchorState, list[int], float]:
    """The state that a newcomer goes on from, the rounds whose states it asked for, and how long that took, in virtual seconds. comes: how that of
    round 8 does, of the one named first; before: the look at what is here of it. Any other is had at once."""
    asked = list[int]()

    async def chain(_transport: object, _peer: PeerId, annals: Annals, _timeout_s: float) -> None:
        annals.take(stage.certificates)

    async def state(
        _transport: object, _donors: object, agreed: Agreed, *, timeout_s: float, copying: Copying, **_options: object
    ) -> AnchorState:
        asked.append(agreed.round)
        pulling = SimpleNamespace(share=0.0)
        if agreed.round == 8:
            await before()
        copying.began(cast("Pull", pulling))
        if agreed.round == 8:
            await comes(pulling, timeout_s)
        return stage.states[agreed.round]

    async def main() -> tuple[AnchorState, list[int], float]:
        began = asyncio.get_running_loop().time()
        found = await find_backup(
            MANIFEST, STAGE, backup_store(tmp_path, MANIFEST, STAGE), Own((), None, Shelf(tmp_path / "contributions")),
            endpoint=ENDPOINT, directory=directory_of(keepers=[first, BOOTSTRAP]), listener=lambda _event: None,
        )  # fmt: skip
        assert found.backup is not None
        return found.backup.state, asked, asyncio.get_running_loop().time() - began

    monkeypatch.setattr(restore_module, "fetch_chain", chain)
    monkeypatch.setattr(restore_module, "fetch_state", state)
    return run_virtually(main(), monkeypatch)
