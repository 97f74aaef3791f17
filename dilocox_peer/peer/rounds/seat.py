"""A peer's seat at one head: who it is, where it is, what it has voted there. Shared by ballots.py and view_changes.py."""

import random
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from dilocox_peer.peer.planning.plan import PlanBounds
from dilocox_peer.peer.planning.planner import JudgingPlanner
from dilocox_peer.peer.rounds.chain import ORDER_BYTES, Place, Verifier, is_quorum, is_vote, vote_for
from dilocox_peer.peer.rounds.conduct import Conduct
from dilocox_peer.peer.rounds.contract import Persist, Send
from dilocox_peer.peer.rounds.directing import Directing
from dilocox_peer.peer.rounds.durable import Durable, Votes
from dilocox_peer.peer.rounds.justified import promise_statement
from dilocox_peer.peer.rounds.ranks import by_rank, turn_of
from dilocox_peer.peer.rounds.timing import Pace, Timing
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import MAX_ROSTER, Certificate, Plan, Value, acceptance
from dilocox_peer.wire.directives import Directive
from dilocox_peer.wire.rounds import Accepted, Ack, Message, Nack, Promised, Statement


@dataclass(frozen=True)
class Owner:
    """What stays the same as long as the process lives. orders: the numbers of our votes, growing, also over restarts
    (from the incarnation on, which is a wall clock in milliseconds)."""

    peer: PeerId
    incarnation: int
    sign: Callable[[bytes], bytes]
    verify: Verifier
    timing: Timing
    pace: Pace
    rng: random.Random
    start_peers: int
    max_peers: int
    plans: PlanBounds
    planner: JudgingPlanner
    conduct: Conduct
    orders: Iterator[int]
    directing: Directing


class Seat:
    """One head. Votes change through `vote` only, which gives back the Persist that must precede telling anyone."""

    def __init__(self, owner: Owner, place: Place, votes: Votes, recent: tuple[Digest, ...]) -> None:
        """recent: the newest heads of our chain, this one among them: a newcomer is as good as here that is at one of them."""
        assert votes.head == place.head, "votes of another head"
        self.me = owner.peer
        self.incarnation = owner.incarnation
        self.owner = owner
        self.timing = owner.timing
        self.pace = owner.pace
        self.place = place
        self.votes = votes
        self.recent = recent
        self.turn = turn_of(place.stage, place.height, place.view)
        self.order = by_rank(place.voters, self.turn)
        self.others = tuple(peer for peer in place.roster if peer != self.me)

    def again_s(self, num_told: int) -> float:
        """Until what was told so many times to all is told again, in seconds."""
        return self.timing.again_s(num_told, len(self.place.roster))

    @property
    def is_member(self) -> bool:
        """Whether it is in the roster: it contributes here."""
        return self.me in self.place.roster

    @property
    def is_voter(self) -> bool:
        return self.me in self.order

    @property
    def may_vote(self) -> bool:
        """Whether it votes in ballots here: a voter that has signed no view change above, and that the run's owner has not banned."""
        return self.is_voter and self.me not in self.banned and self.votes.view_change_signed <= self.place.view

    @property
    def directive(self) -> Directive | None:
        """The newest of the run's owner that is known here."""
        return self.owner.directing.newest(self.place.directive)

    @property
    def banned(self) -> tuple[PeerId, ...]:
        """By it, whether or not it is in the chain yet."""
        return () if self.directive is None else self.directive.banned

    @property
    def to_carry(self) -> tuple[Directive, ...]:
        """It, if our own proposal is to bring it into the chain."""
        directive = self.owner.directing.to_carry(self.place.directive)
        return () if directive is None else (directive,)

    def plan(self) -> Plan:
        """That we would propose for the round after next."""
        return self.owner.planner.next(self.place.plan, self.place.bounds(self.owner.plans))

    def why_not_planned(self, value: Value) -> str | None:
        """Why value plans what does not follow here, or None."""
        return self.owner.planner.why_not(value.plan, self.place.plan, self.place.bounds(self.owner.plans))

    def leader(self, ballot: int) -> PeerId:
        return self.order[ballot % len(self.order)]

    def vote(self, **changed: Any) -> Persist:
        self.votes = replace(self.votes, **changed)
        return Persist(Durable(keep=self.place.height, appended=(), votes=self.votes))

    def at(self) -> tuple[int, Digest, int]:
        """(stage, head, view) of every message."""
        return (self.place.stage, self.place.head, self.place.view)

    def signature(self, value: Value, *, view: int, ballot: int) -> bytes:
        message = acceptance(self.place.stage, self.place.head, view, ballot, value)
        return vote_for(message, next(self.owner.orders), self.owner.sign)

    def verifies(self, peer: PeerId, signature: bytes, value: Value, *, view: int, ballot: int) -> bool:
        message = acceptance(self.place.stage, self.place.head, view, ballot, value)
        return is_vote(self.owner.verify, peer, message, signature)

    def voted(self, value: Value, vote: bytes, *, ballot: int) -> Statement:
        """What a vote says that accepts value here in a ballot, and the signature of just that."""
        message = acceptance(self.place.stage, self.place.head, self.place.view, ballot, value)
        return Statement(vote[:ORDER_BYTES] + message, vote[ORDER_BYTES:])

    def promise(self, ballot: int, accepted: Accepted | None) -> Promised:
        """Our promise of ballot, signed."""
        named = None if accepted is None else accepted.named
        return Promised(self.me, named, self.owner.sign(promise_statement(self.at(), ballot, named)))

    def certificate(self, value: Value, signatures: dict[PeerId, bytes], *, view: int, ballot: int) -> Certificate:
        return Certificate(self.place.stage, self.place.head, view, ballot, value, tuple(sorted(signatures.items())))

    def is_quorum(self, peers: Collection[PeerId]) -> bool:
        return is_quorum(peers, self.place.voters)

    def ack(self, to: PeerId, ballot: int, value: Value) -> Send:
        """Only after the Persist that backs it."""
        signature = self.signature(value, view=self.place.view, ballot=ballot)
        return Send(to, Ack(*self.at(), ballot, value.digest(), signature))

    def nack(self, to: PeerId, ballot: int, blobs: tuple[Digest, ...]) -> Send:
        return Send(to, Nack(*self.at(), ballot, self.votes.promised, blobs[:MAX_ROSTER]))

    def jittered(self, seconds: float) -> float:
        """Up to a fifth longer, so that peers do not act in step."""
        return seconds * (1.0 + 0.2 * self.owner.rng.random())


def send_all(peers: Iterable[PeerId], message: Message) -> list[Send]:
    return [Send(peer, message) for peer in peers]
