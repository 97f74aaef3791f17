"""What the conductor tells of rounds, without a network and without a trainer."""

import math
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

from dilocox_peer.config import preset
from dilocox_peer.peer.chain import Certificate, Place
from dilocox_peer.peer.conductor import Conductor
from dilocox_peer.peer.contract import Apply
from dilocox_peer.peer.plan import first_plan
from dilocox_peer.peer.timetable import Timetable
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import PeerId, sha256

MANIFEST = preset("tiny").signed_by(SigningKey(b"o" * 32))
ME = PeerId("me")
PLACE = Place.genesis(0, MANIFEST.genesis(0), first_plan(MANIFEST))


def done(**result):
    future = Future()
    future.set_result(SimpleNamespace(**result))
    return future


async def test_who_has_not_closed_a_round_tells_no_loss_of_it():
    """Who has paused, say: else its last loss came again with every round that the others certify."""
    trainer = SimpleNamespace(
        progress=lambda: SimpleNamespace(round=1),
        close=lambda: done(train_loss=2.5, blob=b"b", round_micro_batches=4, micro_batches=4, lost=0.0, raw_bytes=8),
        merge=lambda *_given, **_named: done(state_digest=sha256(b"state"), needed_rank=0),
    )
    machine = SimpleNamespace(
        head=PLACE.head, round=0, state_digest=b"", expected_rounds=9, plan_for=lambda number: first_plan(MANIFEST)
    )
    told = []
    with ThreadPoolExecutor(1) as disk:
        conductor = Conductor(
            me=ME, incarnation=1, manifest=MANIFEST, machine=machine, trainer=trainer,
            blobs=SimpleNamespace(put=sha256), disk=disk, raw_bytes=8, post=lambda happened: None,
            bytes_sent=lambda: 0, uplink_bps=lambda: 0.0, timetable=Timetable(MANIFEST), on_merged=lambda: None,
            listener=told.append,
        )  # fmt: skip
        await conductor._close()
        place = PLACE
        for _ in range(2):
            certificate = Certificate(0, place.head, 1, 0, place.round_value([], [ME]), ((ME, b"s"),))
            place = Place.after(certificate)
            conductor.on_apply(Apply(certificate, None))
            await conductor._merge(conductor._waiting[0])
    first, second = [event.train_loss for event in told if type(event).__name__ == "RoundCertified"]
    assert first == 2.5
    assert math.isnan(second)
