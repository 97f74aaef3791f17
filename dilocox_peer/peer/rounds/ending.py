"""Whether the run's end, once our chain has it, is believed. Pure.

A newcomer that meets nobody but a stranger follows the stranger's chain: a view change that it wrote alone, and a thousand rounds signed
in a second, to the last. Training on is mended when the others come; an end is not, as who has ended looks no more. So an end
that follows a view change no quorum signed is for the run's owner to sign, or for those of its voters who are not on it to be
silent for as long as the owner's notary waits for them: then nobody else is the run.
"""

from collections.abc import Collection

from dilocox_peer.peer.rounds.chain import Chain
from dilocox_peer.peer.rounds.forks import Forks
from dilocox_peer.peer.rounds.membership import Members
from dilocox_peer.peer.rounds.timing import AWAY_S
from dilocox_peer.peer.rounds.unfounded import unfounded
from dilocox_peer.types import Digest, PeerId


class Ending:
    """Whether one peer believes that the run is over."""

    def __init__(self, me: PeerId, chain: Chain, forks: Forks, members: Members, now: float) -> None:
        self._me = me
        self._chain = chain
        self._forks = forks
        self._members = members
        self._began_at = now
        self._missing: tuple[Digest, int, frozenset[PeerId]] | None = None  # of (head, from this height on)

    def is_believed(self, now: float) -> bool:
        """Whether the last certificate of our chain is believed to be the run's last one. now: monotonic seconds."""
        missing = [peer for peer in self._not_on_it() if not self._has_left(peer)]
        if not missing:
            return True
        since = now - AWAY_S
        return self._began_at <= since and not any(self._was_heard(peer, since) for peer in missing)

    def _has_left(self, peer: PeerId) -> bool:
        return peer in self._members.known and self._members[peer].has_left

    def _was_heard(self, peer: PeerId, since: float) -> bool:
        return peer in self._members.known and self._members[peer].heard_at > since

    def _not_on_it(self) -> Collection[PeerId]:
        """The voters that view changes have left behind which no quorum of theirs has signed or followed, nor the owner vouched for."""
        checkpoint = self._forks.checkpoint
        vouched = 0 if checkpoint is None else self._chain.height_of(checkpoint.head) or 0
        if self._missing is None or self._missing[:2] != (self._chain.head, vouched):
            missing = {peer for _, voters in unfounded(self._chain, vouched, self._me) for peer in voters}
            self._missing = self._chain.head, vouched, frozenset(missing)
        return self._missing[2]
