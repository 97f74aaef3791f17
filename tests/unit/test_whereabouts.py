"""Until when a quorum of voters is elsewhere, as far as somebody knows who asks them in turn; and what the run's owner makes of it."""

import random
from collections.abc import Sequence
from functools import partial

import pytest

from dilocox_peer.contract import Tick
from dilocox_peer.peer.planning.plan import PlanBounds
from dilocox_peer.peer.rounds.chain import Chain, Place, vote_for
from dilocox_peer.peer.rounds.contract import PeerFound, PeerRefused, Received, Send
from dilocox_peer.peer.rounds.notary import PATIENCE_S, TIMES_ASKED, Notary, NotaryTerms
from dilocox_peer.peer.rounds.timing import FOREVER, NEVER, Timing
from dilocox_peer.peer.rounds.whereabouts import Whereabouts
from dilocox_peer.types import Digest, PeerId, sha256
from dilocox_peer.wire.chain import Certificate, Plan, Value, acceptance
from dilocox_peer.wire.rounds import ChainPage, GetChain
from tests.unit.test_forks import OWNER, A, B, C, D, sign, verify

HERE, THERE = sha256(b"here"), sha256(b"there")
VOTERS = (A, B, C, D)
PLANS = PlanBounds(("fp16",), 255, 8, 32, 8 * 5000)
GENESIS = Place.genesis(0, sha256(b"genesis of a full run"), Plan("fp16", 0, 8), OWNER)
MEMBERS = tuple(PeerId(f"member{number:02d}") for number in range(64))
*HONEST, LIAR = MEMBERS


def test_a_voter_is_where_it_said_until_it_leaves_a_question_unanswered() -> None:
    found = Whereabouts()
    assert found.elsewhere(VOTERS, [HERE]) == NEVER
    for peer in (B, C, D):
        found.said(peer, THERE)
    assert found.elsewhere(VOTERS, [HERE]) == FOREVER, "nobody has asked them since"
    assert found.elsewhere(VOTERS, [HERE, THERE]) == NEVER
    found.asked(D, 10.0)
    found.asked(D, 20.0)
    assert found.elsewhere(VOTERS, [HERE]) == 10.0, "since the first of them"
    found.said(D, THERE)
    assert found.elsewhere(VOTERS, [HERE]) == FOREVER
    found.said(D, HERE)
    assert found.elsewhere(VOTERS, [HERE]) == NEVER, "it came over"


def test_those_who_are_fewer_than_a_quorum_are_not_waited_for() -> None:
    found = Whereabouts()
    for peer in (C, D):
        found.said(peer, THERE)
    assert found.elsewhere(VOTERS, [HERE]) == NEVER
    found.said(A, THERE)
    found.asked(C, 5.0)
    assert found.elsewhere(VOTERS, [HERE]) == FOREVER, "A, the first of four, and D are half of them"
    found.forget(A)
    assert found.elsewhere(VOTERS, [HERE]) == NEVER


def certified(place: Place, value: Value, signers: Sequence[PeerId], view: int) -> Certificate:
    message = acceptance(0, place.head, view, 0, value)
    votes = tuple((peer, vote_for(message, place.height, partial(sign, peer))) for peer in sorted(signers))
    return Certificate(0, place.head, view, 0, value, votes)


class FullRun:
    """64 members and the owner's notary, which knows the chain of round 3. The liar has gone on alone from there, for twenty rounds."""

    def __init__(self) -> None:
        chain = Chain(GENESIS)
        chain.append(certified(chain.place, chain.place.view_change(MEMBERS), [OWNER], 1))
        for _ in range(3):
            chain.append(certified(chain.place, chain.place.round_value([], MEMBERS), HONEST, 1))
        self.honest = chain
        self.forged = Chain(GENESIS, chain.certificates)
        self.forged.append(certified(chain.place, chain.place.view_change([LIAR]), [LIAR], 2))
        for _ in range(20):
            place = self.forged.place
            self.forged.append(certified(place, place.round_value([], [LIAR]), [LIAR], 2))
        self.now = 1000.0
        self.silent: set[PeerId] = set()
        self.asked: list[PeerId] = []
        self.notary = Notary(
            NotaryTerms(0, GENESIS, 64, 64, PLANS, every=8), sign=partial(sign, OWNER), verify=verify, timing=Timing(),
            rng=random.Random(1), now=self.now, wall_ms=10**12,
        )  # fmt: skip
        for peer in MEMBERS:
            self.give(PeerFound(peer))

    def give(self, happened: Tick | PeerFound | PeerRefused | Received) -> None:
        for action in self.notary.handle(happened, self.now):
            if isinstance(action, Send) and isinstance(action.message, GetChain):
                self.asked.append(action.to)
                if action.to not in self.silent:
                    self.answer(action.to, action.message.locator)

    def answer(self, peer: PeerId, heads: Sequence[Digest]) -> None:
        chain = self.forged if peer == LIAR else self.honest
        height = next(height for head in heads if (height := chain.height_of(head)) is not None)
        page = tuple(chain.certificates[height:])
        self.give(Received(peer, ChainPage(0, chain.head, chain.place.view, page, False)))

    def go_on(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, max(self.notary.deadline(), self.now + 0.1))
            self.give(Tick())


def test_a_liar_is_not_signed_while_all_others_answer_however_many_they_are() -> None:
    """64 had their turns once in 160 s: after 120 s of the owner's patience none of them counted as heard, and the liar's branch was signed."""
    run = FullRun()
    run.go_on(3 * PATIENCE_S)
    assert run.notary.chain.head == run.honest.head
    run.asked.clear()
    run.go_on(PATIENCE_S)
    assert min(map(run.asked.count, HONEST)) >= TIMES_ASKED - 1, "one lost question decides nothing"
    for peer in HONEST[:30]:  # they start again, all at once, while the liar's branch has stood for long
        run.give(PeerRefused(peer))
    run.give(Tick())
    assert run.notary.chain.head == run.honest.head


@pytest.mark.parametrize("silent", [32, 63])
def test_those_who_are_left_are_followed_when_a_quorum_is_silent(silent: int) -> None:
    run = FullRun()
    run.go_on(PATIENCE_S)
    run.silent.update(HONEST[:silent])
    run.go_on(PATIENCE_S * (1.0 - 1.0 / TIMES_ASKED))
    assert run.notary.chain.head == run.honest.head
    run.go_on(PATIENCE_S)
    assert run.notary.chain.head == run.forged.head
