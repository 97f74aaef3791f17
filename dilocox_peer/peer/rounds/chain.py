"""The chain that certificates (wire/chain.py) form, and what may follow what in it. Pure values; the protocol that makes
them is machine.py, and which of two chains counts is decided in forks.py.

A vote is a signature with its order: a number that only grows at one peer. So of two votes of a peer everybody can tell
the later one, on whatever branches they are.
"""

import itertools
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from dilocox_peer.peer.planning.plan import ANY_PLAN, PlanBounds
from dilocox_peer.peer.rounds.directing import Authority
from dilocox_peer.peer.rounds.index import Index
from dilocox_peer.peer.rounds.named_state import majority_digest
from dilocox_peer.peer.rounds.past import MOST_IN_BLOCK, Block, BlockStore, Certificates, Past
from dilocox_peer.peer.rounds.seats import EVERYBODY, Seats, SeatTerms, keeps_order
from dilocox_peer.peer.rounds.slices import Sharing
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import Averaged, Certificate, Entry, Kind, Plan, Result, Value, acceptance
from dilocox_peer.wire.declared import Parser, encode
from dilocox_peer.wire.directives import Directive

Verifier = Callable[[PeerId, bytes, bytes], bool]
"""(peer, message, signature) -> whether the signature is the peer's. signing.verify in a peer, a cheap one in the simulator."""

VoteOrders = Mapping[PeerId, int]
"""The order of each peer's latest vote on a branch."""

ORDER_BYTES = 8  # of a vote, before its signature
MAX_COUNTED = 16  # heights since which a chain's votes are kept counted
# No certificate's view is further above its parent's: one alone could use up all that can be written.
MAX_VIEWS = 1 << 40
LOCATOR_DENSE = 8  # newest heads named one by one in a locator; older ones at doubling distances


def vote_for(message: bytes, order: int, sign: Callable[[bytes], bytes]) -> bytes:
    """A vote: the order, 8 bytes big-endian, and the signature of both it and the message."""
    head = order.to_bytes(ORDER_BYTES, "big")
    return head + sign(head + message)


def order_of(vote: bytes) -> int:
    """When in its signer's life the vote was cast; later votes of a peer have higher numbers."""
    return int.from_bytes(vote[:ORDER_BYTES], "big")


def votes_on(certificates: Iterable[Certificate]) -> dict[PeerId, int]:
    """The order of each signer's latest vote on these certificates."""
    latest: dict[PeerId, int] = {}
    for certificate in certificates:
        _count_votes(latest, certificate)
    return latest


def _count_votes(latest: dict[PeerId, int], certificate: Certificate) -> None:
    for peer, vote in certificate.signatures:
        latest[peer] = max(latest.get(peer, -1), order_of(vote))


def is_vote(verify: Verifier, peer: PeerId, message: bytes, vote: bytes) -> bool:
    """Whether vote is peer's for message."""
    return len(vote) > ORDER_BYTES and verify(peer, vote[:ORDER_BYTES] + message, vote[ORDER_BYTES:])


def is_quorum(peers: Collection[PeerId], voters: Sequence[PeerId]) -> bool:
    """More than half of the voters, or exactly half with voters[0] among them. Two quorums always share a peer."""
    present = sum(map(peers.__contains__, voters))
    if 2 * present == len(voters):
        return bool(voters) and voters[0] in peers
    return 2 * present > len(voters)


# ---- a place in a chain, and what may follow it ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """A head with what decides about the certificates that may follow it. plan: of round `round + 2`. founder: at genesis,
    the run's owner, who alone signs the first roster; None: a run without one, which its first peers start. voters: those of
    the roster whose votes certify, by what the chain up to here says (seats). authority: whose directives apply, directive: the newest
    in the chain up to here. sharing: of a run that averages in slices."""

    stage: int
    head: Digest
    height: int
    round: int
    weight: int
    view: int
    roster: tuple[PeerId, ...]
    plan: Plan
    founder: PeerId | None = None
    voters: tuple[PeerId, ...] = ()
    seats: Seats = EVERYBODY
    authority: Authority | None = None
    directive: Directive | None = None
    sharing: Sharing | None = None

    @classmethod
    def genesis(
        cls,
        stage: int,
        head: Digest,
        plan: Plan,
        founder: PeerId | None = None,
        terms: SeatTerms | None = None,
        authority: Authority | None = None,
        slices: int = 0,
    ) -> "Place":
        return cls(
            stage=stage, head=head, height=0, round=0, weight=0, view=0, roster=(), plan=plan, founder=founder,
            seats=Seats(terms) if terms is not None else EVERYBODY, authority=authority,
            sharing=Sharing(slices) if slices else None,
        )  # fmt: skip

    def then(self, certificate: Certificate) -> "Place":
        """The place after certificate, which follows this one."""
        value = certificate.value
        seats = self.seats.after(value, self.voters)
        roster = self.roster if value.roster == self.roster else value.roster  # one object for many places
        voters = seats.voters(roster)
        return Place(
            stage=certificate.stage, head=certificate.head, height=value.height, round=value.round, weight=value.weight,
            view=certificate.view, roster=roster, plan=value.plan, seats=seats,
            voters=self.voters if voters == self.voters else voters,
            authority=self.authority, directive=value.directive or self.directive,
            sharing=self.sharing and self.sharing.after(value),
        )  # fmt: skip

    def packed(self) -> bytes:
        """For `unpacked`, in a file that this process alone reads."""
        return encode(replace(self, authority=None))

    @staticmethod
    def unpacked(raw: bytes, genesis: "Place") -> "Place":
        """genesis: where the same chain begins."""
        return replace(_PLACE.read(raw), authority=genesis.authority)

    @property
    def is_sliced(self) -> bool:
        """Whether the next round is averaged in slices."""
        return self.sharing is not None and self.sharing.is_used(self.roster)

    @property
    def is_genesis(self) -> bool:
        return self.height == 0

    @property
    def electors(self) -> tuple[PeerId, ...]:
        """Whose votes decide between branches that begin here: the voters; at genesis the run's owner."""
        return self.voters if self.founder is None else (self.founder,)

    @property
    def directed(self) -> int:
        """The number of the owner's newest directive in the chain; 0: there is none."""
        return 0 if self.directive is None else self.directive.number

    @property
    def is_stopped(self) -> bool:
        """Whether the run is over here because its owner wants it to be."""
        return self.directive is not None and 0 < self.directive.stop_after <= self.round

    def bounds(self, plans: PlanBounds) -> PlanBounds:
        """What may be planned after this place, where the manifest bounds plans so."""
        if self.directive is None or not self.directive.total_steps:
            return plans
        return replace(plans, total_steps=self.directive.total_steps)

    def round_value(
        self,
        entries: Iterable[Entry],
        roster: Iterable[PeerId],
        plan: Plan | None = None,
        directive: Directive | None = None,
        results: tuple[Result, ...] = (),
    ) -> Value:
        """The value of a round with these entries (any order) that makes roster the next one. plan: without one the next
        round but two is like the one before it. directive: that is to apply from here on. results: of its slices."""
        ordered = tuple(sorted(entries, key=lambda entry: entry.peer))
        return Value(
            what=Averaged(results, directive) if results else directive or "round", height=self.height + 1, round=self.round + 1, weight=self.weight + len(ordered),
            entries=ordered, roster=tuple(roster), plan=plan or self.plan.next(), state_digest=majority_digest(ordered, self.voters),
        )  # fmt: skip

    def view_change(self, roster: Iterable[PeerId]) -> Value:
        """The void value that makes roster the next one."""
        return Value(
            what="epoch", height=self.height + 1, round=self.round, weight=self.weight,
            entries=(), roster=tuple(roster), plan=self.plan,
        )  # fmt: skip

    def why_not(self, value: Value, view: int, max_peers: int, plans: PlanBounds = ANY_PLAN) -> str | None:
        """Why value may not follow this place in view, or None. Signatures are not looked at."""
        entrants = [entry.peer for entry in value.entries]
        if value.height != self.height + 1:
            return f"height {value.height} after height {self.height}"
        if not 0 < len(value.roster) <= max_peers or len(set(value.roster)) != len(value.roster):
            return f"a roster of {len(value.roster)} peers, {len(set(value.roster))} distinct; at most {max_peers}"
        if not keeps_order(self.roster, value.roster):
            return "a roster in another order"
        if value.weight != self.weight + len(entrants):
            return f"weight {value.weight} after {self.weight} with {len(entrants)} entries"
        if reason := self._why_not_directed(value):
            return reason
        if value.kind == "epoch":
            return self._why_not_view_change(value, view)
        if view != self.view:
            return f"a round of view {view} in view {self.view}"
        if value.round != self.round + 1:
            return f"round {value.round} after round {self.round}"
        if any(left >= right for left, right in itertools.pairwise(entrants)):
            return "entries not in the order of distinct peers"
        if not set(entrants) <= set(self.roster):
            return "an entry of a peer that is not in the roster"
        if value.state_digest != majority_digest(value.entries, self.voters):
            return "a state digest that is not the one its entries report"
        if reason := (self.sharing or Sharing(0)).why_not(value, self.roster if self.sharing else (), self.voters):
            return reason
        return self.bounds(plans).why_not(value.plan, self.plan)

    def _why_not_directed(self, value: Value) -> str | None:
        """Why value does not go by what the run's owner wants."""
        new = value.directive
        if new is not None:
            if self.authority is None:
                return "a directive in a run without an owner"
            if new.number <= self.directed:
                return f"directive {new.number} after directive {self.directed}"
            if reason := self.authority.why_not(new):
                return reason
        applies = new or self.directive
        if applies is not None and (banned := set(applies.banned) & set(value.roster)):
            return f"a roster with {min(banned)}, whom the run's owner has banned"
        return None

    def _why_not_view_change(self, value: Value, view: int) -> str | None:
        if not self.view < view <= self.view + MAX_VIEWS:
            return f"view {view} called in view {self.view}"
        if value.round != self.round or value.entries or value.state_digest or value.plan != self.plan:
            return "a view change that is not void"
        stay = set(value.roster) & set(self.roster)
        if stay and len(stay) < len(value.roster):
            return "a view change that seats newcomers beside members: those who stay go on alone first"
        return None

    def founder_alone(self, kind: Kind, signers: Sequence[PeerId]) -> bool:
        """Whether these signers make a first roster: the run's owner, and nobody else."""
        return kind == "epoch" and list(signers) == [self.founder]

    def why_not_certificate(
        self, certificate: Certificate, verify: Verifier, max_peers: int, plans: PlanBounds = ANY_PLAN
    ) -> str | None:
        """Why certificate does not extend this place, or None: link, arithmetic, quorum and every signature hold."""
        if certificate.stage != self.stage or certificate.parent != self.head:
            return "a certificate of another parent"
        value, signers = certificate.value, [peer for peer, _ in certificate.signatures]
        if reason := self.why_not(value, certificate.view, max_peers, plans):
            return reason
        if len(set(signers)) != len(signers):
            return "a peer that signed twice"
        if self.founder is not None:
            if not self.founder_alone(value.kind, signers):
                return f"a first roster that the run's owner ({self.founder}) has not signed"
        elif value.kind == "epoch":
            if set(signers) != set(value.roster):
                return "a view change not signed by all of its roster"
        elif not set(signers) <= set(self.voters) or not is_quorum(signers, self.voters):
            return "signatures that are no quorum of the roster"
        message = acceptance(self.stage, self.head, certificate.view, certificate.ballot, value)
        if not all(is_vote(verify, peer, message, vote) for peer, vote in certificate.signatures):
            return "a signature that does not verify"
        return None


_PLACE = Parser[Place](Place, "a place of a chain", 1 << 24, is_canonical=False)


# ---- the chain ------------------------------------------------------------------------------------------------------


class Chain:
    """Certificates from genesis on, each the child of the one before. Trusts what it is given. The newest are in memory, older ones in
    blocks once they are sealed (past.py); reading those may raise OSError or ValueError, where a disk fails."""

    def __init__(
        self, genesis: Place, certificates: Iterable[Certificate] = (), store: BlockStore | None = None
    ) -> None:
        """store: for blocks; None: in memory."""
        self._past = Past(store)
        self._index = Index(self._past.store)  # of what is in blocks
        self._newest: list[Certificate] = []
        self._places: list[Place] = [genesis]  # from where the newest begin
        self._genesis = genesis
        self._heights: dict[Digest, int] = {genesis.head: 0}  # of those places
        self._votes: OrderedDict[int, dict[PeerId, int]] = OrderedDict()
        self._view_changes = array("I")
        self.place = genesis
        for certificate in certificates:
            self.append(certificate)

    @property
    def head(self) -> Digest:
        return self.place.head

    @property
    def height(self) -> int:
        return self.place.height

    @property
    def certificates(self) -> Sequence[Certificate]:
        """All of them, as they are by now; do not modify."""
        return Certificates(self._past, self._newest, self.height_of) if self._past.count else self._newest

    def as_it_is(self) -> Sequence[Certificate]:
        """All of them, whatever becomes of the chain: for another thread."""
        return (
            Certificates(self._past.copy(), list(self._newest), self.height_of)
            if self._past.count
            else tuple(self._newest)
        )

    def view_changes(self, start: int) -> Sequence[int]:
        """Heights from start on that a view change follows."""
        return self._view_changes[bisect_left(self._view_changes, start) :]

    def append(self, certificate: Certificate) -> None:
        assert certificate.parent == self.head, f"certificate {certificate.head.hex()[:8]} is no child of our head"
        self._newest.append(certificate)
        if certificate.value.kind == "epoch":
            self._view_changes.append(self.height)
        for latest in self._votes.values():
            _count_votes(latest, certificate)
        self.place = self.place.then(certificate)
        self._heights[self.place.head] = self.height
        self._places.append(self.place)

    def seal(self, blocks: Iterable[Block]) -> bool:
        """Of certificates that lie in these blocks by now none is kept in memory, as far as the disk takes the index of them. blocks: from the
        first certificate on. Whether they are this chain's: it may be another branch since they were written."""
        with suppress(OSError):
            return self._seal(blocks)
        return True

    def seal_all_but(self, newest: int) -> None:
        """Writes blocks itself. Raises OSError."""
        if len(self._newest) >= newest + MOST_IN_BLOCK:
            self._seal(self._past.write(self._newest[:-newest]))

    def _seal(self, blocks: Iterable[Block]) -> bool:
        for block in blocks:
            if block.stop <= self._past.count:
                continue
            if block.first != self._past.count or block.stop > self.height or self.head_at(block.stop) != block.last:
                return False
            heads = [place.head for place in self._places[: block.count]]
            self._index.add(heads, self._places[0].packed())
            self._past.add(block)
            self._newest = self._newest[block.count :]  # who was given the list has it still
            self._places = self._places[block.count :]
            for head in heads:
                del self._heights[head]
        return True

    @property
    def blocks(self) -> Sequence[Block]:
        """The blocks of its older certificates."""
        return self._past.blocks

    @property
    def store(self) -> BlockStore:
        """Where they lie, and those of another chain can."""
        return self._past.store

    def become(self, other: "Chain") -> None:
        """From here on this is the other one, which is not used any more. It goes on from what we have."""
        assert other.height_of(self.head) is not None, "a chain that does not hold our head"
        self._past, self._index, self._newest, self._places = other._past, other._index, other._newest, other._places
        self._heights, self.place, self._view_changes = other._heights, other.place, other._view_changes
        self._votes.clear()

    def truncate(self, height: int) -> list[Certificate]:
        """Drop everything above height; gives back what was dropped."""
        assert 0 <= height <= self.height, f"height {height} of {self.height}"
        dropped = list(self.certificates[height:])
        if dropped:
            self._votes.clear()
        if height < self._past.count:
            start = self._start(self._past.index_of(height))
            self._newest, self._places = self._past.cut(height), [start]
            for certificate in self._newest:
                self._places.append(self._places[-1].then(certificate))
            self._index.cut(len(self._past.blocks))
            self._heights = {place.head: place.height for place in self._places}
        else:
            for place in self._places[height - self._past.count + 1 :]:
                del self._heights[place.head]
            del self._newest[height - self._past.count :]
            del self._places[height - self._past.count + 1 :]
        del self._view_changes[bisect_left(self._view_changes, height) :]
        self.place = self._places[-1]
        return dropped

    def height_of(self, head: Digest) -> int | None:
        """Where head is in this chain (genesis 0), None if it is not."""
        height = self._heights.get(head)
        return self._index.height_of(head) if height is None else height

    def __contains__(self, head: object) -> bool:
        return isinstance(head, bytes) and self.height_of(Digest(head)) is not None

    def votes_since(self, height: int) -> VoteOrders:
        """The order of each signer's latest vote on what follows this height; kept up to date for the few heights that are asked for
        again and again, as the walk grows with the chain."""
        if height not in self._votes:
            self._votes[height] = votes_on(self.certificates[height:])
            if len(self._votes) > MAX_COUNTED:
                self._votes.popitem(last=False)
        return self._votes[height]

    def head_at(self, height: int) -> Digest:
        first = self._past.count
        return self._places[height - first].head if height >= first else self._index.head_at(height)

    def place_at(self, height: int) -> Place:
        first = self._past.count
        if height >= first:
            return self._places[height - first]
        place = self._start(index := self._past.index_of(height))
        return place_after(place, self._past.block(index)[: height - place.height])

    def _start(self, index: int) -> Place:
        """Where a block begins."""
        return Place.unpacked(self._index.start(index), self._genesis) if index else self._genesis

    def newest_heads(self, count: int) -> tuple[Digest, ...]:
        """The last of our heads, oldest first; genesis is one."""
        return tuple(map(self.head_at, range(max(self.height + 1 - count, 0), self.height + 1)))

    def locator(self) -> list[Digest]:
        """Heads newest first, thinning out towards genesis: enough for anyone to find a near common ancestor."""
        heads, height, step = [], self.height, 1
        while height > 0:
            heads.append(self.head_at(height))
            if len(heads) >= LOCATOR_DENSE:
                step *= 2
            height -= step
        return [*heads, self._genesis.head]


@dataclass(frozen=True)
class Suffix:
    """Certificates that follow height `ancestor` of our chain, the first of them not in it. Verified."""

    ancestor: int
    certificates: tuple[Certificate, ...]

    @cached_property
    def heads(self) -> tuple[Digest, ...]:
        return tuple(certificate.head for certificate in self.certificates)

    @cached_property
    def index_of(self) -> Mapping[Digest, int]:
        """Where each head is among the certificates."""
        return {head: index for index, head in enumerate(self.heads)}

    @cached_property
    def votes(self) -> VoteOrders:
        return votes_on(self.certificates)

    @property
    def tip(self) -> Digest:
        return self.certificates[-1].head

    def up_to(self, head: Digest) -> "Suffix":
        return Suffix(self.ancestor, self.certificates[: self.index_of[head] + 1])


def place_after(place: Place, certificates: Iterable[Certificate]) -> Place:
    """Where certificates lead that follow place."""
    for certificate in certificates:
        place = place.then(certificate)
    return place


def suffix_of(chain: Chain, start: int, certificates: Sequence[Certificate]) -> Suffix:
    """The certificates after height start of chain as a Suffix: what chain has of them already is left out."""
    shared = 0
    while shared < len(certificates) and chain.height_of(certificates[shared].head) is not None:
        shared += 1
    return Suffix(start + shared, tuple(certificates[shared:]))
