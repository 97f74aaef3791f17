"""Where peers said that they are, to somebody who asks them in turn: until when a quorum of voters is at work elsewhere. Pure.

A voter is where it last said it is until it leaves a question unanswered. Counted from its last answer it would be given up for no other
reason than that nobody has asked it since: sixty-four members have their turns minutes apart.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dilocox_peer.peer.rounds.chain import is_quorum
from dilocox_peer.peer.rounds.timing import FOREVER, NEVER
from dilocox_peer.types import Digest, PeerId


@dataclass(slots=True)
class _Whereabouts:
    """head: where it last said it is; None: it was not asked yet. until: when it was first asked since and has not answered; FOREVER: it was
    not."""

    head: Digest | None
    until: float = FOREVER


class Whereabouts:
    """Whoever was `met` or has `said` something is to be asked again and again, or else given up by one more `asked`."""

    def __init__(self, gap_s: float = FOREVER) -> None:
        """gap_s: without a word of anybody, after which it is our own line that is down: nobody is called silent for that time."""
        self._said: dict[PeerId, _Whereabouts] = {}
        self._gap_s = gap_s
        self._now = self._heard_at = NEVER

    @property
    def known(self) -> Collection[PeerId]:
        return self._said.keys()

    def met(self, peer: PeerId) -> None:
        """It is here, and will have its turn: until then nobody knows of it that it is not at work."""
        self._said.setdefault(peer, _Whereabouts(None))

    def is_cut_off(self, now: float) -> bool:
        """Whether nobody at all was heard for long."""
        return now - self._heard_at > self._gap_s

    def heard(self, now: float) -> None:
        """Anybody at all. What was not answered while our line was down is nobody's silence."""
        if self.is_cut_off(now):
            for each in self._said.values():
                if self._heard_at < each.until < now:
                    each.until = now
        self._now = self._heard_at = now

    def said(self, peer: PeerId, head: Digest) -> None:
        """It answers that its chain ends there."""
        self._said[peer] = _Whereabouts(head)

    def asked(self, peer: PeerId, now: float) -> None:
        """It is asked, or cannot be any more."""
        self._now = now
        if (found := self._said.get(peer)) is not None:
            found.until = min(found.until, now)

    def forget(self, peer: PeerId) -> None:
        self._said.pop(peer, None)

    def elsewhere(self, voters: Sequence[PeerId], heads: Collection[Digest]) -> float:
        """Until when a quorum of the voters was at other heads than these, as far as is known: FOREVER while it is, NEVER if it never was."""
        if self.is_cut_off(self._now):
            return FOREVER
        known = {peer: self._said[peer] for peer in voters if peer in self._said}
        others = {peer: each.until for peer, each in known.items() if each.head not in heads}
        longest = sorted(others, key=others.__getitem__, reverse=True)
        # Fewer than half are no quorum, more than half always are.
        half = len(voters) // 2
        for count in range(max(half, 1), min(half + 1, len(longest)) + 1):
            if is_quorum(set(longest[:count]), voters):
                return others[longest[count - 1]]
        return NEVER
