"""What the conductor tells of rounds, without a network and without a trainer."""

import asyncio
import math
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from dilocox_peer.compression.aggregate import clip_factors
from dilocox_peer.config import preset
from dilocox_peer.events import ContributionClipped, RoundCertified
from dilocox_peer.peer.planning.plan import first_plan
from dilocox_peer.peer.planning.timetable import Timetable
from dilocox_peer.peer.rounds.blobs import BlobStore
from dilocox_peer.peer.rounds.chain import Place
from dilocox_peer.peer.rounds.contract import Apply, BlobLost
from dilocox_peer.peer.training import conductor as conductor_module
from dilocox_peer.peer.training.conductor import Conductor
from dilocox_peer.peer.training.trainer import Merged
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import PeerId, sha256
from dilocox_peer.wire.chain import Certificate, Entry

MANIFEST = preset("tiny").signed_by(SigningKey(b"o" * 32))
ME = PeerId("me")
PLACE = Place.genesis(0, MANIFEST.genesis(0), first_plan(MANIFEST))


def done(**result):
    future: Future[Any] = Future()
    future.set_result(SimpleNamespace(**result))
    return future


def merge(blobs, _weights, *, round_number, **_named):
    """As the trainer's: the last of several contributions is ten times as large as the others."""
    norms = (*[2.0] * (len(blobs) - 1), 20.0) if len(blobs) > 1 else (0.0,) * len(blobs)
    merged: Future[Any] = Future()
    merged.set_result(
        Merged(round_number, sha256(b"state"), norms, clip_factors(norms, [8] * len(norms), norm_clip=4.0), 0)
    )
    return merged


def stage(blobs, disk, told, *, micro_batches=4):
    """(conductor, machine) with a trainer whose contribution holds so many micro-batches."""
    trainer: Any = SimpleNamespace(
        progress=lambda: SimpleNamespace(round=1, tokens=0),
        close=lambda: done(
            train_loss=2.5, blob=b"b", micro_batches=micro_batches, lost=0.0, raw_bytes=8
        ),
        merge=merge,
        withdraw=done,
    )  # fmt: skip
    machine: Any = SimpleNamespace(
        head=PLACE.head, round=0, state_digest=b"", expected_rounds=9, plan_for=lambda number: first_plan(MANIFEST)
    )
    conductor = Conductor(
        me=ME, incarnation=1, manifest=MANIFEST, machine=machine, trainer=trainer, blobs=blobs, disk=disk, raw_bytes=8,
        post=lambda happened: None, bytes_sent=lambda: 0, uplink_bps=lambda: 0.0, timetable=Timetable(MANIFEST),
        on_merged=lambda: None, listener=told.append,
    )  # fmt: skip
    return conductor, machine


async def merge_next(conductor):
    await conductor._merge(conductor._waiting[0])


async def test_who_has_not_closed_a_round_tells_no_loss_of_it():
    """Who has paused, say: else its last loss came again with every round that the others certify."""
    told: list[Any] = []
    with ThreadPoolExecutor(1) as disk:
        conductor, _ = stage(SimpleNamespace(put=sha256), disk, told)
        await conductor._close()
        place = PLACE
        for _ in range(2):
            certificate = Certificate(0, place.head, 1, 0, place.round_value([], [ME]), ((ME, b"s"),))
            place = place.then(certificate)
            conductor.on_apply(Apply(certificate, None))
            await merge_next(conductor)
    first, second = [event.train_loss for event in told if type(event).__name__ == "RoundCertified"]
    assert first == 2.5
    assert math.isnan(second)


async def test_a_contribution_that_is_clipped_is_told_with_its_norm_and_the_groups(tmp_path):
    blobs, told = BlobStore(tmp_path), list[Any]()
    entries = [Entry(PeerId(f"p{number}"), 1, blobs.put(bytes([number])), 1, 8) for number in range(3)]
    certificate = Certificate(0, PLACE.head, 1, 0, PLACE.round_value(entries, [ME]), ((ME, b"s"),))
    with ThreadPoolExecutor(1) as disk:
        conductor, _ = stage(blobs, disk, told)
        conductor.on_apply(Apply(certificate, None))
        await merge_next(conductor)
    certified, clipped = told[:2]
    assert isinstance(certified, RoundCertified)
    assert (certified.norms, certified.clip_factors) == ((2.0, 2.0, 20.0), (1.0, 1.0, 0.3984375))
    assert clipped == ContributionClipped(PeerId("p2"), 1, 20.0, 2.0, 0.3984375)
    assert clipped.line().endswith("clipped: its norm 20, the group's median 2, scaled by 0.398")


@pytest.mark.parametrize(("micro_batches", "is_kept"), [(4, False), (0, True)])
async def test_a_close_that_came_too_late_deletes_its_own_contribution_alone(tmp_path, micro_batches, is_kept):
    """Idle peers' contributions are equal to the byte, so one file: the certificate that came in may name it."""
    blobs = BlobStore(tmp_path)
    with ThreadPoolExecutor(1) as disk:
        conductor, machine = stage(blobs, disk, list[Any](), micro_batches=micro_batches)
        closing = asyncio.create_task(conductor._close())
        await asyncio.sleep(0)
        machine.head = sha256(b"a certificate came in")
        await closing
    assert (blobs.get(sha256(b"b")) is not None) == is_kept


async def test_a_pause_is_no_part_of_what_a_step_takes(monkeypatch):
    trained, now, posted = SimpleNamespace(round=1, tokens=0, micro_batches=0), [0.0], list[Any]()
    a_step = MANIFEST.inner.accumulate * MANIFEST.inner.micro_batch * MANIFEST.model.context
    monkeypatch.setattr(conductor_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with ThreadPoolExecutor(1) as disk:
        conductor, machine = stage(SimpleNamespace(put=sha256), disk, list[Any]())
        conductor._trainer.progress = lambda: trained
        vars(machine).update(
            is_ready=True, may_train=True, roster=(ME,), may_offer=True, has_offered=False, last_round=9
        )
        conductor._is_due, conductor._is_paused, conductor._post = lambda progress: False, lambda: True, posted.append
        conductor._trainer.resume = lambda: None
        await conductor._close()
        now[0], trained.tokens = 7200.0, 10 * a_step
        conducting = asyncio.create_task(conductor.run())
        await asyncio.sleep(0)  # it looks once, and waits
        conducting.cancel()
        await asyncio.gather(conducting, return_exceptions=True)
        now[0], trained.tokens = 7204.0, 14 * a_step
        await conductor._close()
    assert posted[-1].entry.report.step_us == 1_000_000


async def test_a_close_that_came_too_late_is_no_exchange():
    """The time from it to the merge of what came in is no time in which our contribution was on its way."""
    told, posted = list[Any](), list[Any]()
    with ThreadPoolExecutor(1) as disk:
        conductor, machine = stage(SimpleNamespace(put=sha256, forget=lambda digest: None), disk, told)
        conductor._post = posted.append
        closing = asyncio.create_task(conductor._close())
        await asyncio.sleep(0)
        certificate = Certificate(0, PLACE.head, 1, 0, PLACE.round_value([], [ME]), ((ME, b"s"),))
        machine.head = certificate.head
        await closing
        conductor.on_apply(Apply(certificate, None))
        await merge_next(conductor)
        await conductor._close()
    [certified] = [event for event in told if type(event).__name__ == "RoundCertified"]
    assert certified.delay_s is None
    assert posted[-1].entry.report.exchange_ms == 0


async def test_a_contribution_that_is_damaged_on_disk_is_asked_for_again_and_merged_then(tmp_path):
    """It ended the session, and once more after every restart."""
    blobs, told, posted = BlobStore(tmp_path), list[Any](), list[Any]()
    digest = blobs.put(b"contribution")
    entry = Entry(PeerId("other"), 1, digest, 12, 8)
    certificate = Certificate(0, PLACE.head, 1, 0, PLACE.round_value([entry], [ME]), ((ME, b"s"),))
    with ThreadPoolExecutor(1) as disk:
        conductor, machine = stage(blobs, disk, told)
        vars(machine).update(
            is_ready=True, may_train=True, roster=(ME,), may_offer=False, has_offered=False, last_round=9
        )
        machine.head = certificate.head
        conductor._post, conductor._is_due = posted.append, lambda progress: False
        (tmp_path / digest.hex()).write_bytes(b"damaged")
        conductor.on_apply(Apply(certificate, None))
        await merge_next(conductor)
        assert posted == [BlobLost(digest, certificate)]
        assert not conductor._situation().ready
        blobs.put(b"contribution")
        assert conductor._situation().ready
        await merge_next(conductor)
    assert [type(happened).__name__ for happened in posted] == ["BlobLost", "StateComputed"]
    assert not conductor._waiting
