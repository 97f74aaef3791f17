"""Adopting another's state while certificates of our own chain wait to be merged."""

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dilocox_peer.config import preset
from dilocox_peer.peer import averaging
from dilocox_peer.peer.averaging import Averaging
from dilocox_peer.peer.planning.plan import first_plan
from dilocox_peer.peer.planning.timetable import Timetable
from dilocox_peer.peer.rounds.chain import Place
from dilocox_peer.peer.rounds.contract import Apply, FetchState, StateInstalled, StateMissing
from dilocox_peer.peer.training.conductor import Conductor
from dilocox_peer.peer.training.outer import initial_state
from dilocox_peer.peer.training.outer_loop import OuterPhase
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import PeerId, sha256
from dilocox_peer.wire.chain import Certificate, Entry

MANIFEST = preset("tiny").signed_by(SigningKey(b"o" * 32))
ME, DONOR = PeerId("me"), PeerId("donor")
STATE = initial_state(MANIFEST)
PLACE = Place.genesis(0, MANIFEST.genesis(0), first_plan(MANIFEST))
APPLY = Apply(Certificate(0, PLACE.head, 1, 0, PLACE.view_change([ME]), ((ME, b"s"),)), None)
WANTED = FetchState(STATE.head, 0, b"", (DONOR,), True)


def done(result):
    future: Future[Any] = Future()
    future.set_result(result)
    return future


class TrainerStub:
    """Notes what it is told to do."""

    def __init__(self):
        self.told = []

    def _done(self, what, result):
        self.told.append(what)
        return done(result)

    def state(self):
        return STATE

    def progress(self):
        return SimpleNamespace(round=1, micro_batches=0, tokens=0)

    def resume(self):
        pass

    def install(self, state, *, keep_pseudo_gradient):
        return self._done("install and keep" if keep_pseudo_gradient else "install", None)

    def merge(self, blobs, weights, **rest):
        return self._done("merge", SimpleNamespace(state_digest=sha256(b"state"), needed_rank=0))


@pytest.fixture
def disk():
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture
async def peer(disk):
    posted, trainer, blobs = list[Any](), cast("Any", TrainerStub()), cast("Any", None)
    rounds: Any = SimpleNamespace(
        head=PLACE.head, round=0, may_train=False, may_offer=False, has_offered=False, roster=(), reports={}, directive=None,
        working=lambda now: set(), is_wanted=lambda head: True, copying=lambda head, share: (DONOR,), may_end=lambda now: False,
        schedule=SimpleNamespace(last_round=9, plan_for=lambda number: first_plan(MANIFEST)),
    )  # fmt: skip
    conductor = Conductor(
        me=ME, incarnation=1, manifest=MANIFEST, rounds=rounds, trainer=trainer, blobs=blobs, disk=disk, raw_bytes=0,
        post=posted.append, bytes_sent=lambda: 0, uplink_bps=lambda: 0.0, timetable=Timetable(MANIFEST),
        on_merged=lambda: None, listener=lambda event: None,
    )  # fmt: skip
    keeper = SimpleNamespace(save=lambda state: done(None), arrivals=None)
    return SimpleNamespace(
        conductor=conductor, rounds=rounds, machine=rounds, driver=SimpleNamespace(post=posted.append), posted=posted, trainer=trainer,
        keeper=keeper, _trainer=trainer, _keeper=keeper, _transport=None, _listener=None,
    )  # fmt: skip


def donors_give(monkeypatch, state):
    async def fetch_state(*_arguments, **_options):
        return state

    monkeypatch.setattr(averaging, "fetch_state", fetch_state)


async def test_what_waits_is_still_merged_when_no_donor_has_the_state(peer, monkeypatch):
    donors_give(monkeypatch, None)
    peer.conductor.on_apply(APPLY)
    await Averaging.adopt_state(peer, WANTED)
    assert peer.posted == [StateMissing(WANTED.head)]
    assert peer.conductor.outer.num_waiting == 1


async def test_a_state_that_is_no_longer_wanted_when_it_is_here_replaces_nothing(peer, monkeypatch):
    donors_give(monkeypatch, STATE)
    peer.conductor.on_apply(APPLY)
    peer.rounds.is_wanted = lambda head: head != WANTED.head
    await Averaging.adopt_state(peer, WANTED)
    assert peer.posted == [StateMissing(WANTED.head)]
    assert peer.conductor.outer.num_waiting == 1


async def test_what_waits_is_void_when_the_state_is_installed(peer, monkeypatch):
    donors_give(monkeypatch, STATE)
    peer.conductor.on_apply(APPLY)
    await Averaging.adopt_state(peer, WANTED)
    assert peer.posted == [StateInstalled(STATE.head, STATE.digest)]
    assert peer.conductor.outer.num_waiting == 0


async def test_a_merge_whose_blobs_are_being_read_is_void_too(peer, monkeypatch, disk):
    donors_give(monkeypatch, STATE)
    peer.rounds.may_train, peer.rounds.head = True, APPLY.certificate.head
    go_on: Future[Any] = Future()
    disk.submit(go_on.result)  # the disk has other things to do first
    try:
        peer.conductor.on_apply(APPLY)
        assert peer.conductor.outer.phase is OuterPhase.LOADING
        conducting = asyncio.create_task(peer.conductor.run())
        await asyncio.sleep(0)
        await Averaging.adopt_state(peer, WANTED)
    finally:
        go_on.set_result(None)  # or the disk would be waited for
    async with asyncio.timeout(10):
        while peer.conductor.outer.phase is OuterPhase.LOADING:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.001)
    conducting.cancel()
    await asyncio.gather(conducting, return_exceptions=True)
    assert peer.trainer.told == ["install and keep"]


async def test_a_pseudo_gradient_that_waits_to_be_settled_is_not_sent_again(peer, monkeypatch):
    """It is in the state that is installed, if our chain's rounds are."""
    donors_give(monkeypatch, STATE)
    own = Entry(ME, 1, sha256(b"blob"), 10, 8)
    peer.conductor.on_apply(replace(APPLY, own=own))
    await Averaging.adopt_state(peer, WANTED)
    assert peer.trainer.told == ["install"]


async def test_a_state_is_on_disk_before_the_chain_follows_it(peer, monkeypatch):
    """The machine persists the chain when it hears of the state: killed then, and the donors gone, nobody had it any more."""
    donors_give(monkeypatch, STATE)
    written: Future[Any] = Future()
    peer.keeper.save = lambda state: written
    adopting = asyncio.create_task(Averaging.adopt_state(peer, WANTED))
    for _ in range(20):  # more turns of the loop than it takes
        await asyncio.sleep(0)
    assert (peer.trainer.told, peer.posted) == (["install and keep"], [])
    written.set_result(None)
    await adopting
    assert peer.posted == [StateInstalled(STATE.head, STATE.digest)]
