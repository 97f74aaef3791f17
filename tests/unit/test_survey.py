"""Whom a reader of a run asks, and what it makes of their answers. Over real networks: shell/test_survey.py."""

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from dilocox_peer.dht.records import Lease
from dilocox_peer.errors import PeerUnavailable, RunUnreachable
from dilocox_peer.peer.state.backup import Annals
from dilocox_peer.peer.state.backup_exchange import BackupServer
from dilocox_peer.peer.state.survey import (
    MEMBERS_ASKED,
    OTHERS_ASKED,
    PATIENCE_S,
    Survey,
    by_trust,
    look_at_all,
    most_named,
    to_ask,
)
from dilocox_peer.signing import verify
from dilocox_peer.types import PeerId, sha256
from tests.certified_stage import MANIFEST, ROSTER, STAGE, CertifiedStage
from tests.virtual_loop import run_virtually

A, B, C, D, X, Y, Z = (PeerId(name) for name in "abcdxyz")
TRUE, FALSE = sha256(b"true"), sha256(b"false")


def test_the_roster_comes_first_and_those_that_failed_last() -> None:
    for seed in range(20):
        order = by_trust([X, A, Y, B], {A, B}, {A: 2, X: 1}, random.Random(seed))
        assert order == [B, A, Y, X]
    orders = {tuple(by_trust([X, Y, Z], (), {}, random.Random(seed))) for seed in range(100)}
    assert len(orders) == 6, "of equals nobody is always the first"


def test_others_are_asked_too_however_many_members_there_are() -> None:
    assert to_ask([A, B, C, D, X, Y, Z], {A, B, C, D}) == [A, B, C, X, Y]
    assert to_ask([A, X, Y, Z], {A}) == [A, X, Y, Z]
    many = [PeerId(f"{number}") for number in range(50)]
    assert len(to_ask(many, ())) == MEMBERS_ASKED + OTHERS_ASKED


@pytest.mark.parametrize(
    ("named", "expected"),
    [([TRUE, TRUE, FALSE], TRUE), ([TRUE, FALSE], b""), ([TRUE, b"", b"", b""], TRUE), ([b"", b""], b""), ([], b"")],
)
def test_more_than_half_of_those_that_name_one_must_name_the_same(named: list[bytes], expected: bytes) -> None:
    assert most_named(named) == expected


async def test_a_look_that_fails_leaves_no_other_behind() -> None:
    """One that went on unseen would take certificates in while the next look does."""
    ended: list[str] = []

    class Stage:
        def __init__(self, name: str, *, fails: bool) -> None:
            self.name, self.fails = name, fails

        async def look(self) -> None:
            if self.fails:
                raise RunUnreachable("the directory gave no answer")
            for _ in range(5):
                await asyncio.sleep(0)
            ended.append(self.name)

    found: Any = [Stage("first", fails=True), Stage("second", fails=False)]
    with pytest.raises(RunUnreachable):
        await look_at_all(found)
    assert ended == ["second"]


class Run:
    """Three voters. The last of them has gone on alone from round 5, for twenty rounds; the others are in a round that takes minutes. Made-up
    names that have the run's chain are reached too."""

    named, heard, addresses, peer_id = frozenset[PeerId](), dict[PeerId, float](), (), PeerId("me")

    def __init__(self) -> None:
        self.stage, self.forged = CertifiedStage().rounds(5), CertifiedStage().rounds(5).seized(ROSTER[2]).rounds(20)
        self.away: set[PeerId] = set()

    async def connect(self, peer: PeerId, _addresses: object, timeout_s: float = 10.0) -> None:
        if peer in self.away:
            raise PeerUnavailable(peer, "no answer")

    async def fetch(
        self, peer: PeerId, _kind: str, header: dict[str, Any], **_options: object
    ) -> tuple[dict[str, Any], bytearray]:
        await self.connect(peer, ())
        stage = self.forged if peer == ROSTER[2] else self.stage
        reply = await BackupServer(STAGE, certificates=lambda: stage.certificates, kept={}).serve(peer, header)
        return reply.header, bytearray(b"".join(map(bytes, reply.body)))  # type: ignore[arg-type]

    async def leases(self, stage: int, timeout_s: float = 10.0) -> list[Lease]:
        return [
            Lease(
                peer=peer, stage=stage, incarnation=1, addresses=("/ip4/10.0.0.1/tcp/1",), protocol=1, tokens_per_s=0.0,
                memory_bytes=0, reachability="direct", round=4,
            )
            for peer in ROSTER
        ]  # fmt: skip

    async def keepers(self, timeout_s: float = 10.0) -> list[Lease]:
        return []

    async def word(self, _stage: int, timeout_s: float = 10.0) -> None:
        return None


def test_a_reader_follows_no_liar_while_a_quorum_answers_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a round takes; it followed after half a minute. When that quorum is gone it follows, and comes back."""

    async def main() -> None:
        run: Any = Run()
        survey = Survey(MANIFEST, STAGE, transport=run, directory=run, listener=lambda _: None, rng=random.Random(1))

        async def looks(seconds: float) -> None:
            until = asyncio.get_running_loop().time() + seconds
            while asyncio.get_running_loop().time() < until:
                await survey.look()
                await asyncio.sleep(2.0)

        await looks(4 * PATIENCE_S)
        assert survey.annals.place == run.stage.place
        run.away.update(ROSTER[:2])
        await looks(PATIENCE_S - 5.0)
        assert survey.annals.place == run.stage.place
        await looks(15.0)
        assert survey.annals.place == run.forged.place, "nobody else is there any more"
        run.away.clear()
        run.stage.round()
        await looks(15.0)
        assert survey.annals.place == run.stage.place

    run_virtually(main(), monkeypatch)


def test_who_looks_all_the_time_looks_for_keepers_and_the_owners_word_more_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each look asks every node of a small run, for four keys and one, and who keeps runs changes in minutes."""

    class Counted(Run):
        def __init__(self) -> None:
            super().__init__()
            self.looked: Counter[str] = Counter()

        async def leases(self, stage: int, timeout_s: float = 10.0) -> list[Lease]:
            self.looked["leases"] += 1
            return await super().leases(stage, timeout_s)

        async def keepers(self, timeout_s: float = 10.0) -> list[Lease]:
            self.looked["keepers"] += 1
            return await super().keepers(timeout_s)

        async def word(self, stage: int, timeout_s: float = 10.0) -> None:
            self.looked["word"] += 1

    async def main(*, looks_on: bool) -> Counter[str]:
        run = Counted()
        there: Any = run
        survey = Survey(
            MANIFEST, STAGE, transport=there, directory=there, listener=lambda _: None, rng=random.Random(1),
            annals=Annals(MANIFEST, STAGE, verify) if looks_on else None,
        )  # fmt: skip
        for _ in range(30):
            await survey.look()
            await asyncio.sleep(2.0)
        assert survey.annals.place == run.stage.place
        return run.looked

    once = run_virtually(main(looks_on=False), monkeypatch)
    assert once["keepers"] == once["word"] == once["leases"]
    on = run_virtually(main(looks_on=True), monkeypatch)
    assert on["keepers"] == on["word"] == 3, "in a minute"
    assert on["leases"] > 2 * on["keepers"]
