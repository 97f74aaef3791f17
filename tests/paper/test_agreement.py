"""What the agreement on a round rests on, against references that share no code with it.

Single-decree consensus: L. Lamport, "Paxos Made Simple" (2001), section 2.2: P2b (once a value is chosen, every proposal of a higher
number has that value) and P2c (by which proposers keep it). Quorums that meet: section 2.1. The votes on branches: each voter's
latest message alone counts, V. Zamfir et al., "Introducing the 'Minimal CBC Casper' Family of Consensus Protocols" (2018), section 4.
"""

import itertools
import random
from dataclasses import dataclass, field

import pytest

from dilocox_peer.peer.rounds.chain import is_quorum
from dilocox_peer.peer.rounds.forks import supporters
from dilocox_peer.peer.rounds.justified import promise_statement, why_not_justified
from dilocox_peer.types import Digest, PeerId, sha256
from dilocox_peer.wire.rounds import Promised

AT = (0, sha256(b"head"), 1)
VALUES = tuple(sha256(name) for name in (b"one", b"two", b"three"))


def roster_of(count: int) -> tuple[PeerId, ...]:
    return tuple(PeerId(f"peer{number}") for number in range(count))


def sign(peer: PeerId, message: bytes) -> bytes:
    return sha256(peer.encode(), message)


def verify(peer: PeerId, message: bytes, signature: bytes) -> bool:
    return signature == sign(peer, message)


# ---- the reference ----


@dataclass
class Acceptor:
    """Section 2.2, phases 1b and 2b."""

    promised: int = 0
    accepted: tuple[int, Digest] | None = None

    def prepare(self, ballot: int) -> bool:
        if ballot <= self.promised:
            return False
        self.promised = ballot
        return True

    def accept(self, ballot: int, value: Digest) -> bool:
        if ballot < self.promised:
            return False
        self.promised, self.accepted = ballot, (ballot, value)
        return True


@dataclass
class Decree:
    """Acceptors and what they have accepted in each ballot. A set of them decides that is more than half, or half with the
    first: two such sets have a member in common."""

    count: int
    acceptors: list[Acceptor] = field(init=False)
    votes: dict[tuple[int, Digest], set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.acceptors = [Acceptor() for _ in range(self.count)]

    def decides(self, members: set[int]) -> bool:
        return 2 * len(members) > self.count or (2 * len(members) == self.count and 0 in members)

    def chosen(self) -> set[Digest]:
        return {value for (_, value), members in self.votes.items() if self.decides(members)}


def may_propose(promises: dict[int, tuple[int, Digest] | None]) -> set[Digest]:
    """P2c: the value of the highest-numbered proposal that these acceptors have accepted, or any."""
    highest = max((each for each in promises.values() if each is not None), default=None)
    return set(VALUES) if highest is None else {highest[1]}


# ---- the statements ----


@pytest.mark.parametrize("count", range(1, 8))
def test_a_quorum_is_what_decides_and_any_two_meet(count):
    roster, decree = roster_of(count), Decree(count)
    quorums = []
    for size in range(count + 1):
        for members in itertools.combinations(range(count), size):
            chosen = {roster[index] for index in members}
            assert is_quorum(chosen, roster) == decree.decides(set(members))
            if is_quorum(chosen, roster):
                quorums.append(chosen)
    assert all(one & other for one in quorums for other in quorums)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_what_is_proposed_after_a_choice_is_the_choice(count):
    """P2b, over random schedules in which messages are lost and leaders give up half-way. What a leader may propose, the
    package says; whether a value is chosen, the reference."""
    roster = roster_of(count)
    choices = 0
    for seed in range(400):
        rng, decree = random.Random(seed), Decree(count)
        for ballot in range(1, 7):
            asked = [index for index in range(count) if rng.random() < 0.7]
            promises = {
                index: decree.acceptors[index].accepted for index in asked if decree.acceptors[index].prepare(ballot)
            }
            shown = [
                Promised(roster[index], accepted, sign(roster[index], promise_statement(AT, ballot, accepted)))
                for index, accepted in promises.items()
            ]
            allowed = {value for value in VALUES if why_not_justified(shown, AT, ballot, value, roster, verify) is None}
            assert allowed == (may_propose(promises) if decree.decides(set(promises)) else set())
            if not allowed:
                continue
            value = rng.choice(sorted(allowed))
            assert decree.chosen() <= {value}, "a value was passed over that is chosen"
            for index in range(count):
                if rng.random() < 0.6 and decree.acceptors[index].accept(ballot, value):
                    decree.votes.setdefault((ballot, value), set()).add(index)
        assert len(decree.chosen()) <= 1
        choices += len(decree.chosen())
    assert choices > 200, "hardly anything was chosen: the schedules show nothing"


def test_a_voter_stands_where_its_latest_message_is_and_nowhere_else():
    heads = sorted(VALUES)
    for seed in range(300):
        rng = random.Random(seed)
        electors = roster_of(rng.randrange(1, 7))
        branches = {
            head: {peer: rng.randrange(6) for peer in (*electors, PeerId("outsider")) if rng.random() < 0.6}
            for head in heads
        }
        found = supporters(electors, branches)
        for position, peer in enumerate(electors):
            voted = {head: votes[peer] for head, votes in branches.items() if peer in votes}
            latest = [head for head, order in voted.items() if order == max(voted.values())]
            expected = {min(latest)} if latest else set()  # equally late ones are a liar's
            assert {head for head in heads if position in found[head]} == expected
        assert sum(map(len, found.values())) <= len(electors)  # whoever is no elector counts nothing
