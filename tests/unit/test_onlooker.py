"""What `status LINK` makes of a run that it reads and whose bootstrap it asks."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from dilocox_peer.cli.onlooker import Onlooker
from dilocox_peer.network.bulk import PeerSilent
from dilocox_peer.peer.lookout import lookout_of_keeper
from dilocox_peer.types import PeerId
from dilocox_peer.web.document import RunPage
from dilocox_peer.wire.declared import encode
from dilocox_peer.wire.health import HealthForm
from dilocox_peer.wire.records import KEEPERS
from tests.simulated_run import simulated_facts, simulated_manifest

BOOT = PeerId("boot")
MANIFEST = simulated_manifest(40, 2)
CHAINS = [each.certificates for each in simulated_facts(MANIFEST, peers=8, rounds=40).stages]


class TransportStub:
    """Whose one bootstrap says that it keeps the run up to a round; None: it says nothing."""

    def __init__(self, kept_round: int | None) -> None:
        self.named = {BOOT}
        self._kept_round = kept_round

    async def fetch(self, peer: PeerId, *_: Any, **__: Any) -> tuple[dict[str, Any], bytes]:
        assert peer == BOOT, f"nobody else is there: {peer}"
        if self._kept_round is None:
            raise PeerSilent(peer, "no answer")
        return {}, encode(HealthForm(KEEPERS, self._kept_round, time.time_ns() // 1_000_000))


class SurveyStub:
    """Of a stage that nobody holds any more, and whose certificates a keeper gave."""

    def __init__(self, stage: int, *, is_over: bool) -> None:
        self.stage, self.leases, self.reached = stage, (), ()
        place = SimpleNamespace(roster=())
        self.annals = SimpleNamespace(certificates=CHAINS[stage], place=place, is_over=is_over)

    async def look(self) -> None:
        pass


async def seen(kept_round: int | None, *, is_over: bool) -> dict[str, Any]:
    """What a look finds, of a run that everybody has left."""
    surveys: Any = [SurveyStub(stage, is_over=is_over) for stage in range(2)]
    transport: Any = TransportStub(kept_round)
    document = await Onlooker(RunPage(MANIFEST), surveys, "dilocox://x", transport, MANIFEST).look()
    assert document is not None
    now: dict[str, Any] = document["now"]
    return now


@pytest.mark.parametrize(
    ("kept_round", "is_over", "why"),
    [
        (39, False, "nobody is here: the run is kept up to round 39, and goes on from there with who joins"),
        (0, False, "nobody is here: the run waits for somebody who has it"),
        (None, False, "nobody is here: the run waits; what is kept of it is not known"),
        (40, True, "the run is over: its model is to be had with `dilocox-peer export`"),
        (39, True, "the run is over: its last round is not kept yet"),
        (None, True, "the run is over: whether its last round is kept is not known"),
    ],
)
async def test_what_is_kept_of_a_run_is_what_its_bootstrap_says(kept_round: int | None, is_over: bool, why: str):
    now = await seen(kept_round, is_over=is_over)
    assert (now["kept_round"], now["why"]) == (kept_round, why)


async def test_that_everybody_has_left_is_wrong_only_before_the_last_round():
    kinds = {
        is_over: [each["kind"] for each in (await seen(40, is_over=is_over))["troubles"]] for is_over in (False, True)
    }
    assert kinds == {False: ["empty", "empty"], True: []}


async def test_a_keeper_tells_nothing_more_of_who_is_missing_once_the_run_is_over():
    transport: Any = TransportStub(None)
    transport.named, transport.peer_id, is_over = (), BOOT, False
    lookout = lookout_of_keeper(
        transport, MANIFEST, kept_round=lambda: 40, leases=lambda: {0: (), 1: ()}, look_again=lambda: None,
        is_over=lambda: is_over, listener=lambda _event: None,
    )  # fmt: skip
    assert [each.kind for each in await lookout.look_once()] == ["waiting", "waiting"]
    is_over = True
    assert await lookout.look_once() == ()
