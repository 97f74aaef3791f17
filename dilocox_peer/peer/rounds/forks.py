"""Which of two chains counts. Pure.

1. The one that holds the newest checkpoint of the run's owner.
2. At the place where they part, the votes of that place's roster, of each member its latest one: signatures given since by
   peers that are in no roster both chains have count nothing, and neither does the number of certificates. A member that
   changed its mind counts where it is now. With as many votes here as there, the branch with the member of the lowest
   position; without any, the lower hash.
3. A chain beats its own beginning.

Why the latest vote and not any: somebody may keep back a certificate that honest peers signed and then left, and show it
when it hurts. Why not weight, as it was: anybody can sign a long chain alone, in a second.

Two bounds, whatever the votes say. Nobody leaves a chain for one without the newest checkpoint that it holds. Nobody goes
back more than `max_back` rounds without a newer checkpoint: keys that were the majority long ago do not rewrite a run. Rounds after a view
change that left a quorum behind count for that only where we have signed them ourselves, as soon as that quorum stands on the other chain:
one member, or a stranger whom a newcomer meets first, signs any number in a second, and whoever had followed would never come back.

A branch is as strong as all that grew out of its first certificate: votes on branches that we have left are remembered for the
places where we left them, or three branches could be better than one another in a circle; and votes on paths that are held back
(following.py) count for what they go on from, although nobody follows them yet.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dilocox_peer.peer.rounds.chain import Chain, Place, Suffix, VoteOrders, is_quorum, order_of, place_after, votes_on
from dilocox_peer.peer.rounds.unfounded import unfounded
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import Certificate
from dilocox_peer.wire.checkpoints import Checkpoint

MAX_LEFT = 64  # branches remembered
MAX_HELD = 16  # paths that are held back
MAX_LOOKED_BACK = 16  # certificates before a path that is held back: electors at any of them may have signed it


@dataclass(frozen=True, slots=True)
class _Held:
    """A path that is held back. parent: the head that it goes on from. heads: its own. votes: of each signer the latest,
    and on which of the certificates it is."""

    parent: Digest
    heads: tuple[Digest, ...]
    votes: Mapping[PeerId, tuple[int, int]]

    def child_of(self, head: Digest) -> Digest | None:
        """Its first head after this one; None: it does not come through there, or ends there."""
        start = 0 if head == self.parent else self.heads.index(head) + 1 if head in self.heads else len(self.heads)
        return self.heads[start] if start < len(self.heads) else None

    def votes_on(self, first: Digest, holds: Callable[[Digest], bool]) -> VoteOrders:
        """The votes that count for a branch which begins with first and holds these heads."""
        if holds(self.parent):
            start = 0
        elif first in self.heads:
            start = self.heads.index(first)
        else:
            return {}
        return {peer: order for peer, (order, index) in self.votes.items() if index >= start}


@dataclass(frozen=True, slots=True)
class _Tail:
    """A branch: its first head, of each of its signers the latest vote, and which heads are on it."""

    first: Digest
    votes: VoteOrders
    holds: Callable[[Digest], bool]

    @classmethod
    def of(cls, certificates: Sequence[Certificate]) -> "_Tail":
        heads = frozenset(certificate.head for certificate in certificates)
        return cls(certificates[0].head, votes_on(certificates), heads.__contains__)


def supporters(electors: Sequence[PeerId], branches: Mapping[Digest, VoteOrders]) -> dict[Digest, list[int]]:
    """The positions of the electors that stand on each branch, by the branch's first head. An elector stands where its
    latest vote is; equally late ones, which only a liar can have, count for the lowest head."""
    standing: dict[Digest, list[int]] = {head: [] for head in branches}
    for position, peer in enumerate(electors):
        latest = [(-votes[peer], head) for head, votes in branches.items() if peer in votes]
        if latest:
            standing[min(latest)[1]].append(position)
    return standing


class Forks:
    """The order of chains as one peer knows it. checkpoint: the newest of the owner's, None while none is known."""

    def __init__(
        self, chain: Chain, *, max_back: int | None, checkpoint: Checkpoint | None = None, me: PeerId | None = None
    ) -> None:
        """max_back: outer rounds that may be taken back without the owner's word; None: any number. me: None: of somebody who signs nothing."""
        self._chain = chain
        self._me = me
        self._max_back = max_back
        self._left: OrderedDict[tuple[Digest, Digest], dict[PeerId, int]] = OrderedDict()
        self._held: OrderedDict[Digest, _Held] = OrderedDict()
        self.checkpoint = checkpoint

    def held_back(self, path: Suffix) -> None:
        """A verified path that is not followed to its end by now: those who signed it stand where it leads all the same."""
        votes: dict[PeerId, tuple[int, int]] = {}
        for index, certificate in enumerate(path.certificates):
            for peer, vote in certificate.signatures:
                votes[peer] = max(votes.get(peer, (-1, -1)), (order_of(vote), index))
        if path.votes.keys().isdisjoint(self._electors_up_to(path.ancestor)):
            return  # strangers' alone: they count nowhere here, and would take the places of others
        self._held[path.tip] = _Held(self._chain.head_at(path.ancestor), path.heads, votes)
        self._held.move_to_end(path.tip)
        if len(self._held) > MAX_HELD:
            self._held.popitem(last=False)

    def _electors_up_to(self, height: int) -> set[PeerId]:
        """Whoever is an elector at one of the places where a branch may part that is worth comparing: who has no vote at the last of
        them may have one before, and stands there where it goes on from."""
        places = range(max(0, height - MAX_LOOKED_BACK), height + 1)
        return {peer for each in places for peer in self._chain.place_at(each).electors}

    def left(self, ancestor: int, dropped: Sequence[Certificate]) -> None:
        """Our chain has just been cut back to height ancestor; these followed there."""
        if dropped:
            key = (self._chain.head_at(ancestor), dropped[0].head)
            tail = _Tail.of(dropped)
            votes = _joined(self._left.get(key, {}), tail.votes)
            for held in self._held.values():
                votes = _joined(votes, held.votes_on(tail.first, tail.holds))
            self._left[key] = votes
            self._left.move_to_end(key)
            if len(self._left) > MAX_LEFT:
                self._left.popitem(last=False)

    def is_better(self, left: Suffix | None, right: Suffix | None) -> bool:
        """Whether our chain with left in place of what it has above the ancestor beats it with right (None: as it is)."""
        holds = [self.holds_checkpoint(suffix) for suffix in (left, right)]
        if holds[0] != holds[1]:
            return holds[0]
        start = min(self._ancestor(suffix) for suffix in (left, right))
        tails = [self._tail(suffix, start) for suffix in (left, right)]
        shared = 0
        while shared < min(map(len, tails)) and tails[0][shared].head == tails[1][shared].head:
            shared += 1
        ours, theirs = tails[0][shared:], tails[1][shared:]
        if not ours or not theirs:
            return len(ours) > len(theirs)
        place = place_after(self._chain.place_at(start), tails[0][:shared])
        keys = self._keys(place, ours, theirs)
        return keys[0] < keys[1]

    def holds_checkpoint(self, suffix: Suffix | None) -> bool:
        """Whether the newest checkpoint is in our chain with suffix (None: in our chain). Without one every chain does."""
        checkpoint = self.checkpoint
        if checkpoint is None:
            return True
        if suffix is None or suffix.ancestor >= checkpoint.height:
            return self._chain.height_of(checkpoint.head) is not None
        return checkpoint.head in suffix.index_of

    def may_be_vouched(self, suffix: Suffix) -> bool:
        """Whether suffix, the beginning of a longer branch, may still come to the checkpoint that our own chain lacks."""
        height = suffix.certificates[-1].value.height
        return not self.holds_checkpoint(None) and self.checkpoint is not None and height < self.checkpoint.height

    def why_not(self, suffix: Suffix) -> str | None:
        """Why our chain may not be left for this one, whoever signed it; None if it may, should it be better."""
        place = self._chain.place_at(suffix.ancestor)
        if suffix.ancestor == self._chain.height:
            return None
        if self.holds_checkpoint(suffix) and not self.holds_checkpoint(None):
            return None
        if self.checkpoint is not None and self.holds_checkpoint(None) and not self.holds_checkpoint(suffix):
            return f"a branch from round {place.round} on, without round {self.checkpoint.round} that the run's owner has signed"
        back = self._chain.place.round - place.round
        if self._max_back is not None and min(back, self._counted(suffix, self._max_back)) > self._max_back:
            return f"a branch from round {place.round} on, {back} rounds back; at most {self._max_back} without the owner's word"
        theirs, ours = self.support(suffix)
        if theirs == 0 < ours:
            return f"a branch from round {place.round} on that nobody of the roster there has signed"
        return None

    def _counted(self, suffix: Suffix, most: int) -> int:
        """How many of the rounds that suffix takes back count for that it takes back too many, as far as they are no more than `most` and one."""
        chain, start = self._chain, self._chain.place_at(suffix.ancestor)
        founded = chain.place.round - start.round
        if founded <= most:
            return founded
        standing = {start.electors[position] for position in self._standing(suffix)[0]}
        left = next(unfounded(chain, suffix.ancestor, self._me), None)
        if left is None or not is_quorum(standing, start.electors):
            return founded
        height, _ = left
        counted = chain.place_at(height).round - start.round
        if self._me in chain.votes_since(height):
            # From the newest on: whoever takes part has soon signed enough.
            for number in range(chain.height - 1, height, -1):
                if counted > most:
                    break
                certificate = chain.certificates[number]
                counted += certificate.value.kind == "round" and any(p == self._me for p, _ in certificate.signatures)
        return counted

    def why_worse(self, suffix: Suffix) -> str:
        """In words, of one that is not better than our chain, or goes on from it against a quorum that is at work."""
        theirs, ours = self.support(suffix)
        place = self._chain.place_at(suffix.ancestor)
        other = f"ours has {ours}" if suffix.ancestor < self._chain.height else "a quorum of it is at work"
        return (
            f"a branch from round {place.round} on with {theirs} of the roster's {len(place.electors)} votes; {other}"
        )

    def support(self, suffix: Suffix) -> tuple[int, int]:
        """How many electors of the place where suffix begins stand on it, and how many on our chain there."""
        theirs, ours = self._standing(suffix)
        return len(theirs), len(ours)

    def _standing(self, suffix: Suffix) -> tuple[list[int], list[int]]:
        """The same by their positions."""
        place = self._chain.place_at(suffix.ancestor)
        tails = [_Tail(suffix.heads[0], suffix.votes, suffix.index_of.__contains__), *self._own(place, suffix.heads[0])]
        standing = supporters(place.electors, self._branches(place, tails))
        return standing[tails[0].first], standing[tails[1].first] if len(tails) > 1 else []

    def _keys(self, place: Place, *tails: Sequence[Certificate]) -> list[tuple[int, list[int], Digest]]:
        """Of each branch at place what orders it, the best first."""
        firsts = [tail[0].head for tail in tails]
        compared = [*map(_Tail.of, tails), *self._own(place, *firsts)]
        standing = supporters(place.electors, self._branches(place, compared))
        return [(-len(standing[head]), standing[head], head) for head in firsts]

    def _own(self, place: Place, *others: Digest) -> list[_Tail]:
        """What our chain has above place, if it is there and goes on in another way than these: of two branches neither of which is ours, members
        that stand on ours stand on none."""
        chain, height = self._chain, self._chain.height_of(place.head)
        if height is None or height == chain.height or (first := chain.head_at(height + 1)) in others:
            return []
        start = height
        return [_Tail(first, chain.votes_since(start), lambda head: (chain.height_of(head) or 0) > start)]

    def _branches(self, place: Place, tails: Sequence[_Tail]) -> dict[Digest, VoteOrders]:
        """All branches known to begin at place: these, with what goes on from them, those we have left, those held back."""
        branches: dict[Digest, VoteOrders] = {
            child: votes for (parent, child), votes in self._left.items() if parent == place.head
        }
        compared = {tail.first for tail in tails}
        for held in self._held.values():
            if (child := held.child_of(place.head)) is not None and child not in compared:
                branches[child] = _joined(branches.get(child, {}), held.votes_on(child, lambda _: False))
        for tail in tails:
            votes = tail.votes
            for held in self._held.values():
                votes = _joined(votes, held.votes_on(tail.first, tail.holds))
            branches[tail.first] = _joined(branches[tail.first], votes) if tail.first in branches else votes
        return branches

    def _ancestor(self, suffix: Suffix | None) -> int:
        return self._chain.height if suffix is None else suffix.ancestor

    def _tail(self, suffix: Suffix | None, start: int) -> Sequence[Certificate]:
        """What follows height start in our chain with suffix."""
        stop = self._ancestor(suffix)
        own = self._chain.certificates[start:stop]
        return own if suffix is None else [*own, *suffix.certificates]


def _joined(one: VoteOrders, other: VoteOrders) -> dict[PeerId, int]:
    return {peer: max(one.get(peer, -1), other.get(peer, -1)) for peer in {**one, **other}}
