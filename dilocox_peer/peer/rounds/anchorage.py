"""Which anchor state this peer holds, and how it gets another one whole: from its own disk, or from donors. Pure.

The chain says what was agreed, the anchor is what it comes to. The chain moves only when the anchor can follow; they
differ only after a restart (a state from disk, then the certificates since), or while Applies are being computed.
"""

import random
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from dilocox_peer.peer.rounds.chain import Chain, Suffix, place_after
from dilocox_peer.peer.rounds.contract import FetchState
from dilocox_peer.peer.rounds.copying import CopyPace
from dilocox_peer.peer.rounds.forks import Forks
from dilocox_peer.peer.rounds.membership import Members
from dilocox_peer.peer.rounds.timing import MAX_REPLAYED, Timing
from dilocox_peer.types import Digest, PeerId

MAX_HOLLOW = 512  # peers remembered that gave no state
MAX_DONORS = 1024  # of one state, and the voters beside them: names come and go as long as a copy takes
_HeldState = tuple[Digest, tuple[PeerId, ...], bytes]
"""A head, who holds the state there, and its digest."""


@dataclass(slots=True)
class _Fetching:
    """A FetchState that is out. suffix: what is adopted with it; None: the state of a head of our own chain. digest: b"" where it is asked of
    our own disk. donors: of whom it is asked by now. voters: at the head that was aimed at. is_left: others are to be asked, for another one."""

    head: Digest
    suffix: Suffix | None
    since: float
    digest: bytes
    donors: tuple[PeerId, ...]
    voters: frozenset[PeerId]
    pace: CopyPace
    is_left: bool = False


class Anchorage:
    """height: of the anchor we hold, Applies under way counted as done; None: we hold none that is in our chain."""

    def __init__(
        self,
        owner: tuple[PeerId, int],
        chain: Chain,
        forks: Forks,
        members: Members,
        timing: Timing,
        rng: random.Random,
        is_own: Callable[[Digest], bool],
        stored_states: Collection[Digest],
        now: float,
    ) -> None:
        """owner: this peer and its incarnation. is_own: whether a contribution is ours. stored_states: heads of the states on our disk."""
        self._owner = owner
        self._chain = chain
        self._forks = forks
        self._members = members
        self._timing = timing
        self._rng = rng
        self._is_own = is_own
        heights = map(chain.height_of, stored_states)
        self._stored = sorted(
            height for height in heights if height is not None and (height or chain.height <= MAX_REPLAYED)
        )  # from the very first state nobody comes far
        self.height: int | None = 0 if chain.height == 0 else None
        self._is_computed = chain.height == 0
        self._digest = b""
        self._fetching: _Fetching | None = None
        self._left: set[PeerId] = set()  # voters of whom a state was asked that was left for others', since one came
        self._voters_known: tuple[Digest, frozenset[PeerId]] | None = None  # of the head that was aimed at last
        self._target: Digest | None = None
        self._failures = 0
        self._no_donor_since: float | None = None
        self.retry_at = now
        self.took_s = 0.0  # to get the newest that was installed
        self.hollow: dict[
            PeerId, None
        ] = {}  # who said that they hold a state and have not given it, since one came; the newest last

    # ---- what is held ----

    @property
    def is_current(self) -> bool:
        """Whether it is the anchor at our head, or will be once the Applies given are done."""
        return self.height == self._chain.height and self._fetching is None

    @property
    def is_computed(self) -> bool:
        return self._is_computed and self.is_current

    @property
    def digest(self) -> bytes:
        """Digest of the anchor at our head, b"" while it is not computed or not known."""
        return self._digest if self._is_computed and self.height == self._chain.height else b""

    @property
    def is_fetching(self) -> bool:
        return self._fetching is not None

    def applying(self, height: int) -> None:
        """An Apply of the certificate at height is given."""
        self.height = height
        self._is_computed, self._digest = False, b""

    def computed(self, head: Digest, digest: bytes) -> None:
        if head == self._chain.head and self.height == self._chain.height:
            self._is_computed, self._digest = True, digest

    def lose(self) -> None:
        """It cannot be brought to our head: another one is needed."""
        self.height = None

    def leave_behind(self) -> None:
        """Our chain has gone on from genesis by more than anybody can replay."""
        self.height = None
        self._stored.clear()

    # ---- getting another one ----

    def restore(self, now: float) -> list[FetchState]:
        """The newest of our own chain's states on our disk, if we hold none."""
        if self.height is not None or self._fetching is not None or not self._stored:
            return []
        return self._ask(self._chain.head_at(self._stored.pop()), None, (), b"", now, frozenset())

    def fetch(self, path: Suffix | None, now: float) -> list[FetchState]:
        """The state of the newest head that somebody holds: of the path, or None: of our own head."""
        if now < self.retry_at or self._fetching is not None or (path is None and self.height is not None):
            return []
        self._aim(self._chain.head if path is None else path.tip)
        voters = self._voters(path)
        for head, donors, named in self._held(path, voters, now):
            if not donors:
                continue
            suffix = None if path is None else path.up_to(head)
            if suffix is None or self._forks.is_better(suffix, None):  # half a better branch may be worse
                digest = self._certified_digest(head, path) or named
                return self._ask(head, suffix, self._ranked(donors, voters), digest, now, voters)
        if self._no_donor_since is None:
            self._no_donor_since = now
        return []

    def _held(self, path: Suffix | None, voters: frozenset[PeerId], now: float) -> Iterator[_HeldState]:
        """The states to be had, the best one first: of a voter who has not failed, of another voter, of strangers, who may say that they hold the
        newest as soon as there is one; of each the newest. What is further back than what is replayed comes after all others."""
        heads = [self._chain.head] if path is None else self._heads_held(path, now)
        near = [head for head in heads if self._is_near(head, path)]
        found = [(head, *holders(head, path, now)) for holders in (self._donors, self._lagging) for head in near]
        fresh = voters - self.hollow.keys()
        yield from sorted(found, key=lambda held: (voters.isdisjoint(held[1]), fresh.isdisjoint(held[1])))
        for holders in (self._donors, self._lagging):
            yield from ((head, *holders(head, path, now)) for head in heads[len(near) :])

    def _is_near(self, head: Digest, path: Suffix | None) -> bool:
        """Whether from there on to the end of the path no more is missing than what is replayed."""
        return path is None or len(path.certificates) - 1 - path.index_of[head] <= self._timing.replay_limit

    def _voters(self, path: Suffix | None) -> frozenset[PeerId]:
        """Those at the head that is aimed at."""
        head = self._chain.head if path is None else path.tip
        if self._voters_known is None or self._voters_known[0] != head:
            self._voters_known = head, self._voters_at(head, path)
        return self._voters_known[1]

    def _ranked(self, donors: Iterable[PeerId], voters: Collection[PeerId]) -> tuple[PeerId, ...]:
        """The run's voters first, as names cost nothing; who has given nothing last; else in an order that nobody else knows, as names are made
        that come first by any other."""
        drawn = {peer: self._rng.random() for peer in sorted(donors)}
        return tuple(sorted(drawn, key=lambda peer: (peer not in voters, peer in self.hollow, drawn[peer])))

    def _heads_held(self, path: Suffix, now: float) -> list[Digest]:
        """Those of the path that somebody alive is at, or one certificate further, newest first."""
        at = {path.index_of[head] for head in self._members.heads(now) if head in path.index_of}
        return [path.heads[index] for index in sorted(at | {index - 1 for index in at if index}, reverse=True)]

    def _aim(self, target: Digest) -> None:
        """What failed on the way to another target counts no more."""
        if target != self._target:
            self._target, self._failures, self._no_donor_since = target, 0, None

    def is_hopeless(self, path: Suffix, now: float) -> bool:
        """Whether path should be left alone for a while: too many failures, or nobody has had its state for long."""
        if path.tip != self._target:
            return False
        patience_s = self._timing.state_tries * self._timing.state_retry_s
        unheld = self._no_donor_since is not None and now - self._no_donor_since > patience_s
        return unheld or self._failures >= self._timing.state_tries

    def give_up(self) -> None:
        """The path is left alone; should it be tried again, it starts afresh."""
        self._target, self._failures, self._no_donor_since = None, 0, None

    def expire(self, now: float) -> None:
        """A FetchState that was never answered counts as failed."""
        if self._fetching is not None and now - self._fetching.since > self._timing.state_patience_s:
            self.missed(self._fetching.head, now)

    def is_wanted(self, head: Digest, path: Suffix | None) -> bool:
        """Whether the state at head, which took its time to come, still leads to the best chain known: path, None: ours."""
        fetching = self._fetching
        if fetching is None or fetching.head != head:
            return False  # given up, or another is asked for by now
        if fetching.suffix is None:
            return True
        if path is not None and head in path.index_of:
            return True
        return self._forks.why_not(fetching.suffix) is None and self._forks.is_better(fetching.suffix, path)

    def copying(self, head: Digest, share: float, path: Suffix | None, now: float) -> tuple[PeerId, ...]:
        """Of whom to ask for the state at head by now, of which that share is here: those who have come to it since, too. Nobody: it is not wanted
        any more, or left for another that would be here sooner, as it seems."""
        fetching = self._fetching
        if fetching is None or fetching.is_left or not self.is_wanted(head, path):
            return ()
        voters = fetching.voters
        holders = {peer for peer in self._members.at(head, now) if self._said(peer) == fetching.digest}
        if path is not None and head in path.index_of and self._certified_digest(head, path) == fetching.digest:
            holders.update(self._lagging(head, path, now)[0])
        found, room = self._ranked(holders.difference(fetching.donors), voters), MAX_DONORS - len(fetching.donors)
        fetching.donors += tuple(peer for place, peer in enumerate(found) if place < room or peer in voters)
        fetching.pace.came(share, now)
        asked = voters.intersection(fetching.donors)
        others = self._holding(path, voters, now).difference(asked, self._left)
        if fetching.pace.is_slow(now) and len(others) > 2 * len(asked):
            fetching.is_left = True
            self._left |= asked
            for peer in others:  # whatever they failed with, it was another one
                self.hollow.pop(peer, None)
            return ()
        return fetching.donors

    def _said(self, peer: PeerId) -> bytes:
        """The digest of its state, by its word."""
        said = self._members[peer].said
        return b"" if said is None else said.state_digest

    def _holding(self, path: Suffix | None, voters: Collection[PeerId], now: float) -> set[PeerId]:
        """The voters that hold a state close to the end of the path."""
        heads = [self._chain.head] if path is None else path.heads[-1 - self._timing.replay_limit :]
        return {peer for head in heads for peer in self._members.at(head, now)}.intersection(voters)

    def missed(self, head: Digest, now: float) -> None:
        """Nobody gave it: again later, perhaps elsewhere."""
        if self._fetching is None or self._fetching.head != head:
            return
        self.hollow |= dict.fromkeys(self._fetching.donors)
        while len(self.hollow) > MAX_HOLLOW:  # names cost nothing
            del self.hollow[next(iter(self.hollow))]
        is_left, self._fetching = self._fetching.is_left, None
        if is_left:
            self.retry_at = now
            return
        self._failures += 1
        self.retry_at = now + self._timing.state_retry_s * min(self._failures, 4) * (0.5 + self._rng.random())

    def installed(self, head: Digest, digest: bytes, now: float) -> Suffix | None:
        """Our anchor is now the one at head; gives back what our chain must adopt for that, None for a head it has."""
        fetching, self._fetching = self._fetching, None
        suffix = fetching.suffix if fetching is not None and fetching.head == head else None
        self.took_s = now - fetching.since if fetching is not None else 0.0
        self.retry_at = now
        self.hollow.clear()
        self._left.clear()
        self._digest = digest
        self.height = suffix.certificates[-1].value.height if suffix is not None else self._chain.height_of(head)
        self._is_computed = suffix is not None or self.height == self._chain.height
        return suffix

    def _ask(
        self,
        head: Digest,
        suffix: Suffix | None,
        donors: tuple[PeerId, ...],
        digest: bytes,
        now: float,
        voters: frozenset[PeerId],
    ) -> list[FetchState]:
        self._fetching = _Fetching(head, suffix, now, digest, donors, voters, CopyPace(now))
        certificates = () if suffix is None else suffix.certificates
        entries = (entry for each in certificates for entry in each.value.entries)
        is_in = any((each.peer, each.incarnation) == self._owner or self._is_own(each.blob) for each in entries)
        keep = self.height is not None and not is_in
        height = self._chain.height_of(head)
        round_number = certificates[-1].value.round if certificates else self._chain.place_at(height or 0).round
        leaves = () if suffix is None else tuple(self._chain.certificates[suffix.ancestor :])
        return [FetchState(head, round_number, digest, donors, keep, leaves)]

    def _donors(self, head: Digest, path: Suffix | None, now: float) -> tuple[tuple[PeerId, ...], bytes]:
        """The peers that hold the state at head, and its digest: the certified one, else the one that most of the voters there name,
        whatever others say. A peer that names another is left out."""
        digests: dict[bytes, list[PeerId]] = {}
        for peer in sorted(self._members.at(head, now)):
            said = self._members[peer].said
            assert said is not None, "a peer that said it is at head"
            digests.setdefault(said.state_digest, []).append(peer)
        if not digests:
            return (), b""
        named = self._certified_digest(head, path)
        if named not in digests:
            voters = self._voters_at(head, path) if len(digests) > 1 else frozenset()

            def rank(digest: bytes) -> tuple[int, int, bytes]:
                peers = digests[digest]
                return -len(voters.intersection(peers)), -len(peers), digest

            named = min(digests, key=rank)
        return tuple(digests[named]), named

    def _lagging(self, head: Digest, path: Suffix | None, now: float) -> tuple[tuple[PeerId, ...], bytes]:
        """The peers at the next head of the path, if its certificate names the state at this one: a peer that has not merged
        that certificate yet, which takes a round with overlap one-step, still holds this state."""
        named = self._certified_digest(head, path)
        if path is None or not named:
            return (), b""
        child = path.heads[path.index_of[head] + 1]
        return tuple(sorted(self._members.at(child, now, ready=False))), named

    def _voters_at(self, head: Digest, path: Suffix | None) -> frozenset[PeerId]:
        if path is None or head not in path.index_of:
            height = self._chain.height_of(head)
            assert height is not None, "a head of our chain"
            return frozenset(self._chain.place_at(height).voters)
        return frozenset(place_after(self._chain.place_at(path.ancestor), path.up_to(head).certificates).voters)

    def _certified_digest(self, head: Digest, path: Suffix | None) -> bytes:
        if path is None:
            return b""
        child = path.index_of[head] + 1 if head in path.index_of else 0 if path.certificates[0].parent == head else -1
        return path.certificates[child].value.state_digest if 0 <= child < len(path.certificates) else b""
