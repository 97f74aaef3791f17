"""Learning of other chains and choosing among them: pages of foreign certificates, verified, become a path. Pure.

`path` is the best verified continuation that beats our chain: what machine.py is to adopt, by blobs or by a whole state.
A draft is a verified beginning of a chain that does not beat ours yet. Nothing foreign is believed before its links,
arithmetic, quorums and signatures hold. Anybody can sign a chain of his own, so neither grows longer than the run can be,
and how long it is says nothing (forks.py).
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dilocox_peer.peer.planning.plan import PlanBounds
from dilocox_peer.peer.rounds.chain import Chain, Place, Suffix, Verifier, place_after, suffix_of
from dilocox_peer.peer.rounds.contract import Send
from dilocox_peer.peer.rounds.forks import Forks
from dilocox_peer.peer.rounds.timing import NEVER, Timing
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import Certificate
from dilocox_peer.wire.rounds import MAX_LOCATOR, MAX_PAGE, ChainPage, GetChain

MAX_JUDGED = 1024  # heads remembered as worse than ours
MAX_WAITING = 64  # peers that are to be asked


@dataclass(frozen=True, slots=True)
class _Claim:
    """Where a peer said it is, and when."""

    head: Digest
    heard_at: float


class Reader(Protocol):
    """On whose behalf chains are read: a peer of the stage, or the owner's notary."""

    @property
    def verify(self) -> Verifier: ...
    @property
    def timing(self) -> Timing: ...
    @property
    def max_peers(self) -> int: ...
    @property
    def plans(self) -> PlanBounds: ...


class Healing:
    """Foreign chains at one peer."""

    def __init__(
        self,
        reader: Reader,
        chain: Chain,
        forks: Forks,
        allowed: Callable[[Suffix], Suffix | None] = lambda path: path,
    ) -> None:
        """allowed: a path as far as it is to be followed by now. One that is held back does not stand in another's way."""
        self._allowed = allowed
        self._reader = reader
        self._chain = chain
        self._forks = forks
        self._most = reader.plans.longest_chain
        self.path: Suffix | None = None
        self._draft: Suffix | None = None
        self._judged: OrderedDict[Digest, str] = OrderedDict()  # why each is not followed
        self._shunned: dict[Digest, float] = {}
        self._asked: PeerId | None = None
        self._asked_until = 0.0
        self._asked_at: dict[PeerId, float] = {}
        self._waiting: dict[PeerId, _Claim] = {}  # of whom something better may be had, in the order of their turns

    # ---- asking and answering ----

    def heard_of(self, peer: PeerId, head: Digest, now: float) -> list[Send]:
        """The question that follows from a peer's being at head, if its chain may beat ours.

        One is asked at a time, and all in turn: who always claims something better, and shows nothing, else keeps us from
        those who have it.
        """
        if not self._may_beat(head, now):
            self._waiting.pop(peer, None)
            return []
        if peer in self._waiting or len(self._waiting) < MAX_WAITING:
            self._waiting[peer] = _Claim(head, now)
        if self._asked is not None and now < self._asked_until:
            return []
        while self._waiting:
            first = next(iter(self._waiting))
            claim = self._waiting.pop(first)
            is_heard = now - claim.heard_at <= self._reader.timing.alive_s
            if now - self._asked_at.get(first, NEVER) < self._reader.timing.retry_s:
                continue
            if is_heard and self._may_beat(claim.head, now):
                if len(self._asked_at) >= MAX_JUDGED:
                    self._asked_at.clear()
                self._asked_at[first] = now
                return self._ask(first, now)
        return []

    def _may_beat(self, head: Digest, now: float) -> bool:
        return not self._knows(head, now) and head not in self._judged

    def _knows(self, head: Digest, now: float) -> bool:
        if self._chain.height_of(head) is not None or (self.path is not None and head in self.path.heads):
            return True
        return now < self._shunned.get(head, now)

    def _ask(self, peer: PeerId, now: float) -> list[Send]:
        self._asked, self._asked_until = peer, now + self._reader.timing.sync_wait_s
        tips = [suffix.tip for suffix in (self._draft, self.path) if suffix is not None]
        locator = tuple([*tips, *self._chain.locator()][:MAX_LOCATOR])
        place = self._chain.place
        return [Send(peer, GetChain(place.stage, place.head, place.view, locator))]

    def page_after(self, heads: Sequence[Digest]) -> ChainPage | None:
        """Our certificates after the first of these heads that we have; None if we have none of them."""
        for head in heads:
            height = self._chain.height_of(head)
            if height is not None:
                page = tuple(self._chain.certificates[height : height + MAX_PAGE])
                place = self._chain.place
                return ChainPage(place.stage, place.head, place.view, page, height + len(page) < self._chain.height)
        return None

    # ---- what comes in ----

    def on_page(
        self, sender: PeerId, certificates: Sequence[Certificate], *, more: bool, now: float
    ) -> tuple[list[Send], str | None]:
        """Takes in certificates; gives back the next question, or why they were refused."""
        asked = self._asked == sender
        if asked:
            self._asked = None
        if not certificates:
            return [], None
        if (judged := self._judged.get(certificates[-1].head)) is not None:
            return [], judged or None  # said again: who shows it again is named, also if we learned later what it is
        found = self._foothold(certificates[0].parent)
        if found is None:
            return self.heard_of(sender, certificates[-1].head, now), None
        start, before, place = found
        if self._most is not None and len(before) + len(certificates) > self._most:
            return [], f"a chain of more than {self._most} certificates beyond ours; this run has not so many"
        taken = list(before)
        for certificate in certificates:
            if reason := self._why_not(place, certificate):
                return [], reason
            taken.append(certificate)
            place = place.then(certificate)
        suffix = suffix_of(self._chain, start, taken)
        if not suffix.certificates or self._knows(suffix.tip, now) or self._is_draft(suffix):
            return [], None  # nothing new: no further question, or two pages would beget questions for ever
        if (reason := self._forks.why_not(suffix)) is None:
            reason = self._take(suffix, more)
        elif more and self._forks.may_be_vouched(suffix):
            self._draft, reason = suffix, None
        else:
            self._judge(suffix.tip, reason)
        if reason is not None:
            return [], reason
        return (self._ask(sender, now) if more and asked else []), None

    def _why_not(self, place: Place, certificate: Certificate) -> str | None:
        if self._chain.height_of(certificate.head) is not None:
            return None
        return place.why_not_certificate(certificate, self._reader.verify, self._reader.max_peers, self._reader.plans)

    def _foothold(self, parent: Digest) -> tuple[int, tuple[Certificate, ...], Place] | None:
        """Where parent is: (height of our chain, certificates from there up to parent, its place)."""
        height = self._chain.height_of(parent)
        if height is not None:
            return height, (), self._chain.place_at(height)
        for suffix in (self.path, self._draft):
            if suffix is not None and parent in suffix.heads:
                before = suffix.up_to(parent).certificates
                return suffix.ancestor, before, place_after(self._chain.place_at(suffix.ancestor), before)
        return None

    def _is_draft(self, suffix: Suffix) -> bool:
        return self._draft is not None and suffix.tip in self._draft.heads

    def _take(self, suffix: Suffix, more: bool) -> str | None:
        """Why suffix, the end of a chain, is not to be followed; None if it is, or may be when more of it is known."""
        if self._allowed(suffix) != suffix:
            self._forks.held_back(suffix)
            self._give_up_what_is_worse()
        if self._beats_path(suffix):
            self.path = suffix
            self._draft = None
        elif more:
            self._draft = suffix
        else:
            is_ours_better = suffix.ancestor < self._chain.height or self._allowed(suffix) != suffix
            reason = self._forks.why_worse(suffix) if is_ours_better else ""  # of two that beat ours: nobody's fault
            self._judge(suffix.tip, reason)
            return reason or None
        return None

    def _beats_path(self, suffix: Suffix) -> bool:
        """Whether suffix is to be the path: what counts first is where each leads by now."""
        ours = None if self.path is None else self._allowed(self.path)
        theirs = self._allowed(suffix)
        if (None if ours is None else ours.tip) != (None if theirs is None else theirs.tip):
            return self._forks.is_better(theirs, ours)
        return self._forks.is_better(suffix, self.path)

    def _judge(self, head: Digest, reason: str) -> None:
        self._judged[head] = reason
        if len(self._judged) > MAX_JUDGED:
            self._judged.popitem(last=False)

    def reconsider(self) -> None:
        """The owner has spoken: what was worse may be better now, and the other way round."""
        self._judged.clear()
        self._shunned.clear()
        self._draft = None
        self.rebase()

    # ---- what the machine does with the path ----

    def rebase(self) -> None:
        """Our chain has changed: what it has by now is no longer ahead."""
        self.path = self._rebased(self.path)
        self._draft = self._rebased(self._draft)
        self._give_up_what_is_worse()

    def _give_up_what_is_worse(self) -> None:
        if self.path is None:
            return
        reason = self._forks.why_not(self.path)
        if reason is not None or not self._forks.is_better(self.path, None):
            self._judge(self.path.tip, reason or self._forks.why_worse(self.path))
            self.path = None

    def _rebased(self, suffix: Suffix | None) -> Suffix | None:
        if suffix is None:
            return None
        rest = suffix_of(self._chain, suffix.ancestor, suffix.certificates).certificates
        if not rest:
            return None
        ancestor = self._chain.height_of(rest[0].parent)
        return None if ancestor is None else Suffix(ancestor, rest)

    def shun(self, now: float) -> None:
        """The path's state is not to be had: leave it alone for a while, go on with what we have."""
        assert self.path is not None
        self._shunned = {head: until for head, until in self._shunned.items() if until > now}
        for head in self.path.heads:
            self._shunned[head] = now + self._reader.timing.shun_s
        self.path = None
