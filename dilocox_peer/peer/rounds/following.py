"""How far a better chain is to be followed by now. Pure.

A view change that less than a quorum of its roster has signed draws nobody away from a quorum that is at work: a peer that hears
nobody writes such a view change, and a hostile one whenever it likes. It is held back, wherever on the path it is: at our head,
before it, where our own chain goes on with what a quorum has certified, or further up, which is where somebody meets it
who is a certificate behind. The path is followed up to there; it counts when that quorum is lost, or has come over, or when
the run's owner has signed what follows it. A peer that comes back, and whose roster has all gone on without it, goes along.
A quorum that has gone on with our own chain is at work as long as the roster that it wrote there is: of a roster of which too
few are left for half of T_d nothing comes (but where more of them are ready here than are on the path, they have
the time to write their own), and those who held the old quorum and are in no newer roster are at no work. Nor are
those who have not come as far as the view change, where nobody gives what leads there: neither they nor we shall ever stand there.
"""

from collections.abc import Collection
from dataclasses import dataclass

from dilocox_peer.peer.rounds.chain import Chain, Suffix, is_quorum, votes_on
from dilocox_peer.peer.rounds.forks import Forks
from dilocox_peer.peer.rounds.membership import Members
from dilocox_peer.peer.rounds.view_changes import ViewChanges
from dilocox_peer.types import Digest, PeerId


@dataclass(frozen=True, slots=True)
class _Thin:
    """A view change that no quorum has signed. index: on the path. voters: whose quorum it would have been. is_bare: none of
    them has signed it, nor anything after it on the path."""

    index: int
    voters: tuple[PeerId, ...]
    is_bare: bool


class Following:
    """How far one peer follows a better chain. `watch` whenever time has passed, before `allowed`."""

    def __init__(self, me: PeerId, chain: Chain, forks: Forks, members: Members) -> None:
        self._me = me
        self._chain = chain
        self._forks = forks
        self._members = members
        self._began_at = chain.head if chain.height else None  # a peer that was here before
        self._deserted_since: float | None = None
        self._unreached: Digest | None = None  # whose state could not be had, nor what leads there
        self._seen: tuple[Suffix, tuple[_Thin, ...]] | None = None

    def watch(self, path: Suffix | None, now: float) -> None:
        """Notes since when those of our roster who are here and not on the path are no quorum: nothing comes of waiting."""
        if path is None:
            self._deserted_since = None
            return
        here = self._members.here(now)
        if self._is_view_change_here(path) or path.ancestor < self._chain.height:
            here = self._not_on(path.index_of, here)
        if is_quorum(here, self._chain.place.voters):
            self._deserted_since = None
        elif self._deserted_since is None:
            self._deserted_since = now

    def give_up(self, path: Suffix) -> None:
        """What leads to the end of path is not to be had."""
        self._unreached = path.tip

    def allowed(self, path: Suffix | None, view_changes: ViewChanges, now: float) -> Suffix | None:
        """The path as far as it is to be followed, None: not at all. view_changes: those at our head."""
        if path is None:
            return None
        vouched = self._vouched(path)
        for thin in self._thin(path):
            if thin.index > vouched and self._is_held_back(path, thin, view_changes, now):
                return path.up_to(path.heads[thin.index - 1]) if thin.index else None
        return path

    def _vouched(self, path: Suffix) -> int:
        """Up to which of its certificates the run's owner has signed the path where our own chain goes elsewhere; -1: none."""
        if self._forks.checkpoint is None or self._forks.holds_checkpoint(None):
            return -1
        head = self._forks.checkpoint.head
        return path.index_of.get(head, -1)

    def _is_held_back(self, path: Suffix, thin: _Thin, view_changes: ViewChanges, now: float) -> bool:
        index, voters = thin.index, thin.voters
        if index == 0 and self._is_view_change_here(path):
            return self._is_held_back_here(path, view_changes, now)
        here = self._members.here(now)
        if index > 0:  # those who left before it, with us, are at no work there
            here = {peer for peer in here if not self._is_on_our_branch(peer, path.ancestor)}
        if thin.is_bare and any(peer in voters for peer in self._not_on(path.heads[index:], here)):
            return True
        if index == 0 and self._chain.certificates[path.ancestor].value.kind == "epoch":
            return False  # ours is no better founded: the votes have decided
        if index == 0 and self._is_deserted(view_changes, now):
            return False  # the quorum that went on with ours wrote a roster that has none here
        if index > 0 and path.heads[index - 1] == self._unreached and not self._members.at(self._unreached, now):
            here = {peer for peer in here if not self._is_behind(peer, path.heads[: index - 1])}
        return is_quorum(self._not_on(path.heads[index:], here), voters)

    def _is_on_our_branch(self, peer: PeerId, ancestor: int) -> bool:
        head = self._chain.head if peer == self._me else self._members.head_of(peer)
        height = None if head is None else self._chain.height_of(head)
        return height is not None and height > ancestor

    def _is_behind(self, peer: PeerId, heads: Collection[Digest]) -> bool:
        """Whether it is in our chain, or at one of these heads."""
        head = self._chain.head if peer == self._me else self._members.head_of(peer)
        return head is not None and (head in heads or self._chain.height_of(head) is not None)

    def _is_held_back_here(self, path: Suffix, view_changes: ViewChanges, now: float) -> bool:
        """Of one at our head. One that none of our roster has signed counts only where none of it is left, but who goes along with it."""
        voters = self._chain.place.voters
        support, _ = self._forks.support(path)
        if support == 0 and any(peer in voters for peer in self._not_on(path.index_of, self._members.here(now))):
            return True
        if 2 * support > len(voters) or self._comes_back_to(path, now):
            return False
        gone_on = set(voters) - self._not_on(path.index_of, voters)
        if view_changes.has_more_here(gone_on.union(path.certificates[0].value.roster), now):
            return True
        if view_changes.is_wanted(now) or self._is_deserted(view_changes, now):
            return False
        return is_quorum(self._not_on(path.index_of, voters), voters)

    def _is_deserted(self, view_changes: ViewChanges, now: float) -> bool:
        """Whether too few of our roster have been left here for half of T_d."""
        return self._deserted_since is not None and now - self._deserted_since >= view_changes.patience_s / 2

    def _comes_back_to(self, path: Suffix, now: float) -> bool:
        """Whether we have certified nothing since we came back, and all of our roster who are here have gone on along the path: it
        was made because we were away. Half of a roster of two is a quorum alone, and would found a branch."""
        voters = set(self._chain.place.voters) - {self._me}
        others = self._members.here(now) & voters
        are_most = 2 * len(others) > len(voters)  # whoever is heard first would speak for all
        return self._chain.head == self._began_at and are_most and not self._not_on(path.index_of, others)

    def _is_view_change_here(self, path: Suffix) -> bool:
        return path.ancestor == self._chain.height and path.certificates[0].value.kind == "epoch"

    def _thin(self, path: Suffix) -> tuple[_Thin, ...]:
        """The view changes of the path that no quorum has signed, nor we: where, and whose quorum it would have been."""
        if self._seen is not None and self._seen[0] is path:
            return self._seen[1]
        place, found = self._chain.place_at(path.ancestor), []
        for index, certificate in enumerate(path.certificates):
            is_view_change = certificate.value.kind == "epoch" and not place.is_genesis
            signers = {peer for peer, _ in certificate.signatures} if is_view_change else set()
            if is_view_change and self._me not in signers and not is_quorum(signers, place.voters):
                is_bare = not any(peer in place.voters for peer in votes_on(path.certificates[index:]))
                found.append(_Thin(index, place.voters, is_bare))
            place = place.then(certificate)
        self._seen = path, tuple(found)
        return self._seen[1]

    def _not_on(self, heads: Collection[Digest], peers: Collection[PeerId]) -> set[PeerId]:
        return {peer for peer in peers if self._members.head_of(peer) not in heads}
