"""The outer loop's shell with a trainer and a disk: what is done of what the outer loop wants. Its decisions: test_outer_loop.py."""

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from dilocox_peer.config import preset
from dilocox_peer.events import Failed, RoundCertified
from dilocox_peer.peer.planning.plan import first_plan
from dilocox_peer.peer.planning.timetable import Timetable
from dilocox_peer.peer.rounds.chain import Place
from dilocox_peer.peer.rounds.contract import Apply, BlobLost
from dilocox_peer.peer.training.conductor import Conductor
from dilocox_peer.peer.training.outer import OwnContribution
from dilocox_peer.peer.training.outer_contract import AnchorMoved
from dilocox_peer.peer.training.outer_loop import OuterPhase
from dilocox_peer.signing import SigningKey
from dilocox_peer.store.shelf import Shelf
from dilocox_peer.types import PeerId, sha256
from dilocox_peer.wire.chain import Certificate, Entry

MANIFEST = preset("tiny").signed_by(SigningKey(b"o" * 32))
ME = PeerId("me")
PLACE = Place.genesis(0, MANIFEST.genesis(0), first_plan(MANIFEST))


def done(result):
    future: Future[Any] = Future()
    future.set_result(result)
    return future


class TrainerStub:
    """Does at once what it is told, and remembers it."""

    def __init__(self):
        self.told = []
        self.at = SimpleNamespace(round=1, micro_batches=1000, tokens=0)  # the round in training has run its course
        self.weight = 4  # micro-batches of a contribution
        self.encoding: Future[Any] | None = None  # what close gives, if it is to take its time

    def progress(self):
        return self.at

    def close(self, *, sliced=False):
        self.told.append("close")
        encoded = done((OwnContribution(memoryview(b"b"), self.weight, raw_bytes=8, lost=0.0), 2.5))
        return encoded if self.encoding is None else self.encoding

    def merge(self, blobs, _weights, *, round_number, **_named):
        self.told.append(("merge", tuple(blobs)))
        self.at.round = round_number + 1
        return done(AnchorMoved(sha256(b"state"), (1.0,) * len(blobs), (1.0,) * len(blobs), 0))

    def withdraw(self):
        self.told.append("withdraw")
        return done(None)

    def hold(self):
        self.told.append("hold")

    def resume(self):
        self.told.append("resume")


class RoundsStub:
    """As the round machine at genesis, alone in its roster."""

    def __init__(self):
        self.head, self.round, self.state_digest = PLACE.head, 0, b""
        self.may_train = self.may_offer = True
        self.is_behind = False
        self.has_offered = self.is_sliced = False
        plan = first_plan(MANIFEST)
        self.schedule: Any = SimpleNamespace(last_round=2, expected_rounds=9, plan_for=lambda _number: plan)
        self.roster = (ME,)
        self.reports: dict[PeerId, tuple[int, int]] = {}
        self.plan_reason = ""
        self.directive = None
        self.chain: tuple[Certificate, ...] = ()

    def working(self, _now):
        return set()

    def may_end(self, _now):
        return True


class Stage:
    def __init__(self, blobs, disk):
        self.trainer, self.rounds = TrainerStub(), RoundsStub()
        self.posted, self.told = list[Any](), list[Any]()
        trainer: Any = self.trainer
        self.conductor = Conductor(
            me=ME, incarnation=1, manifest=MANIFEST, rounds=self.rounds, trainer=trainer, blobs=blobs, disk=disk, raw_bytes=8,
            post=self.posted.append, bytes_sent=lambda: 0, uplink_bps=lambda: 0.0, timetable=Timetable(MANIFEST),
            on_merged=lambda: self.told.append("kept"), listener=self.told.append,
        )  # fmt: skip

    def certify(self, *entries):
        """A certificate of the next round, which the round machine is at already."""
        certificate = Certificate(0, PLACE.head, 1, 0, PLACE.round_value(list(entries), [ME]), ((ME, b"s"),))
        self.rounds.head, self.rounds.round = certificate.head, certificate.value.round
        return certificate

    def names(self):
        return [type(each).__name__ for each in self.posted]


@pytest.fixture
def disk():
    with ThreadPoolExecutor(1) as executor:
        yield executor


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is awaited has no event
            await asyncio.sleep(0.001)


async def running(stage, condition):
    conducting = asyncio.create_task(stage.conductor.run())
    try:
        await until(condition)
    finally:
        conducting.cancel()
        await asyncio.gather(conducting, return_exceptions=True)


async def test_a_round_that_is_over_is_encoded_written_and_offered(tmp_path, disk):
    blobs = Shelf(tmp_path)
    stage = Stage(blobs, disk)
    await running(stage, lambda: "Closed" in stage.names())
    assert stage.trainer.told[0] == "close"
    assert blobs.get(sha256(b"b")) == b"b"


@pytest.mark.parametrize(("weight", "is_kept"), [(4, False), (0, True)])
async def test_a_close_that_came_too_late_deletes_its_own_contribution_alone(tmp_path, disk, weight, is_kept):
    """Idle peers' contributions are equal to the byte, so one file: the certificate that came in may name it."""
    blobs = Shelf(tmp_path)
    stage = Stage(blobs, disk)
    stage.trainer.weight = weight
    encoded = stage.trainer.close().result()
    stage.trainer.encoding = Future()
    conducting = asyncio.create_task(stage.conductor.run())
    await asyncio.sleep(0)
    stage.rounds.head = sha256(b"a certificate came in")
    stage.trainer.encoding.set_result(encoded)
    await until(lambda: "withdraw" in stage.trainer.told and stage.conductor.outer.phase is OuterPhase.IDLE)
    conducting.cancel()
    await asyncio.gather(conducting, return_exceptions=True)
    assert (blobs.get(sha256(b"b")) is not None) == is_kept
    assert "Closed" not in stage.names()


async def test_a_close_that_came_too_late_keeps_slices_that_were_here_before(tmp_path, disk):
    """Slices that are empty, or of rows that nobody has trained, are one file for all: others' are needed, and their mean."""
    blobs = Shelf(tmp_path)
    shared, own = blobs.put(b"nothing"), sha256(b"something")
    stage = Stage(blobs, disk)
    slices = (memoryview(b"nothing"), memoryview(b"something"))
    offer = OwnContribution(memoryview(b"table"), 4, raw_bytes=8, lost=0.0, slices=slices)
    stage.trainer.encoding = Future()
    conducting = asyncio.create_task(stage.conductor.run())
    await asyncio.sleep(0)
    stage.rounds.head = sha256(b"a certificate came in")
    stage.trainer.encoding.set_result((offer, 2.5))
    await until(lambda: "withdraw" in stage.trainer.told and stage.conductor.outer.phase is OuterPhase.IDLE)
    conducting.cancel()
    await asyncio.gather(conducting, return_exceptions=True)
    assert blobs.get(shared) == b"nothing"
    assert blobs.get(own) is None
    assert blobs.get(sha256(b"table")) is None


async def test_what_was_certified_is_read_merged_kept_and_told_until_the_last_round(tmp_path, disk):
    blobs = Shelf(tmp_path)
    stage = Stage(blobs, disk)
    stage.rounds.schedule.last_round = 1
    entries = [Entry(PeerId(f"p{number}"), 1, blobs.put(bytes([number])), 1, 8) for number in range(2)]
    stage.conductor.on_apply(Apply(stage.certify(*entries), None))
    async with asyncio.timeout(10):
        await stage.conductor.run()
    assert stage.trainer.told == [("merge", (b"\x00", b"\x01"))]  # it was held all the time
    assert stage.names() == ["StateComputed"]
    [certified, kept] = stage.told
    assert isinstance(certified, RoundCertified)
    assert kept == "kept"


async def test_what_cannot_be_read_for_now_is_not_told_gone_and_not_asked_for_without_end(tmp_path, disk, monkeypatch):
    """Without a file descriptor left it was told gone, fetched again and loaded again 5,000 times a second."""
    blobs = Shelf(tmp_path)
    stage = Stage(blobs, disk)
    stage.rounds.may_offer = False
    digest = blobs.put(b"contribution")
    monkeypatch.setattr(blobs, "mapped", lambda _name: None)  # gives None and keeps it, as for want of descriptors
    stage.conductor.on_apply(Apply(stage.certify(Entry(PeerId("other"), 1, digest, 12, 8)), None))
    conducting = asyncio.create_task(stage.conductor.run())
    await until(lambda: any(isinstance(each, Failed) for each in stage.told))
    assert stage.posted == []
    monkeypatch.undo()
    await until(lambda: "StateComputed" in stage.names())
    conducting.cancel()
    await asyncio.gather(conducting, return_exceptions=True)
    assert ("merge", (b"contribution",)) in stage.trainer.told


async def test_a_contribution_that_is_damaged_on_disk_is_asked_for_again_and_merged_then(tmp_path, disk):
    """It ended the session, and once more after every restart."""
    blobs = Shelf(tmp_path)
    stage = Stage(blobs, disk)
    stage.rounds.may_offer = False
    digest = blobs.put(b"contribution")
    certificate = stage.certify(Entry(PeerId("other"), 1, digest, 12, 8))
    path = blobs.path(digest)
    assert path is not None
    path.write_bytes(b"damaged")
    stage.conductor.on_apply(Apply(certificate, None))
    conducting = asyncio.create_task(stage.conductor.run())
    await until(lambda: stage.posted)
    assert stage.posted[0] == BlobLost(digest, certificate)
    blobs.put(b"contribution")
    stage.conductor.on_change()
    await until(lambda: "StateComputed" in stage.names())
    conducting.cancel()
    await asyncio.gather(conducting, return_exceptions=True)
    assert ("merge", (b"contribution",)) in stage.trainer.told
    assert stage.conductor.outer.num_waiting == 0
