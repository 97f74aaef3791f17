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
from dilocox_peer.peer.rounds.founding import DEAD_ENDS, FOUNDED_FROM, Founding, any_vote
from dilocox_peer.peer.rounds.telling import Telling
from dilocox_peer.peer.rounds.timing import NEVER, Timing
from dilocox_peer.token_bucket import TokenBucket
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import VOUCHING, Certificate
from dilocox_peer.wire.rounds import MAX_LOCATOR, MAX_PAGE, ChainPage, GetChain

MAX_JUDGED = 1024  # heads remembered as worse than ours
MAX_WAITING = 64  # peers that are to be asked
CROWDED = 8  # of them; then who was asked in vain is not asked again
LEAST_PAGE, PAGE_SIGNATURES = (
    16,
    256,
)  # certificates that a page has at least, signatures that it has at most beyond them
LOOKED_AT_A_S = 256.0  # signatures of what strangers show unasked; beyond, they are asked in turn
LOOKED_AT_ONCE = 1024.0
WEIGHED_FROM = 64  # certificates; a longer chain is weighed each time it has doubled, and at its end: else joining grows with its square


@dataclass(frozen=True, slots=True)
class _Claim:
    """Where a peer said it is, and when."""

    head: Digest
    heard_at: float


@dataclass(slots=True)
class _Growing:
    """What has come of a peer's chain, page by page, beyond height `start` of ours. place: where it ends. weighed: certificates that it
    had when it was compared with others. is_unsigned: no signature was looked at, as the owner's further on stands for them."""

    start: int
    certificates: list[Certificate]
    place: Place
    weighed: int = 0
    is_unsigned: bool = False


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

    founded_from = FOUNDED_FROM  # the simulator takes in short ones

    def __init__(
        self,
        reader: Reader,
        chain: Chain,
        forks: Forks,
        allowed: Callable[[Suffix], Suffix | None] = lambda path: path,
        is_stranger: Callable[[PeerId], bool] = lambda _peer: False,
    ) -> None:
        """allowed: a path as far as it is to be followed by now. One that is held back does not stand in another's way. is_stranger: of a peer,
        whether it had no vote in any roster that we know."""
        self._allowed, self._is_stranger = allowed, is_stranger
        self._looked_at = TokenBucket(LOOKED_AT_A_S, LOOKED_AT_ONCE, 0.0)
        self.telling = Telling()
        self._reader = reader
        self._chain = chain
        self._forks = forks
        self.path: Suffix | None = None
        self._draft: Suffix | None = None
        self._growing: _Growing | None = None
        self._founding: Founding | None = None
        self.founded: Chain | None = None  # what ours is to become
        self._trusts_the_owner = True  # that signatures below its word need no look
        self._judged: OrderedDict[Digest, str] = OrderedDict()  # why each is not followed, "": the path was better
        self._shunned: dict[Digest, float] = {}
        self._asked: PeerId | None = None
        self._asked_until = 0.0
        self._asked_at: dict[PeerId, float] = {}
        self.in_vain: OrderedDict[PeerId, None] = OrderedDict()  # of whom nothing came
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
        if self._asked is not None and now >= self._asked_until:
            self._was_in_vain(self._asked)
        if peer in self._waiting or len(self._waiting) < (CROWDED if peer in self.in_vain else MAX_WAITING):
            self._waiting[peer] = _Claim(head, now)
        if self._asked is not None and now < self._asked_until:
            return []
        first = self._next_waiting(now)
        return [] if first is None else self._ask(first, now)

    def _next_waiting(self, now: float) -> PeerId | None:
        """Whose turn it is, from here on asked."""
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
                return first
        return None

    def _was_in_vain(self, peer: PeerId) -> None:
        """It has said that it has something, and does not show it: keys cost nothing, and others' turns come after so many of them."""
        self.in_vain[peer] = None
        if len(self.in_vain) > MAX_JUDGED:
            self.in_vain.popitem(last=False)

    def _may_beat(self, head: Digest, now: float) -> bool:
        return not self._knows(head, now) and head not in self._judged

    def is_elsewhere(self, head: Digest) -> bool:
        """Whether a head is known to be on another branch than ours: one that is worse, or is held back."""
        return bool(self._judged.get(head)) or (self.path is not None and head in self.path.index_of)

    def _knows(self, head: Digest, now: float) -> bool:
        if self._chain.height_of(head) is not None or (self.path is not None and head in self.path.index_of):
            return True
        return now < self._shunned.get(head, now)

    def _ask(self, peer: PeerId, now: float) -> list[Send]:
        self._asked, self._asked_until = peer, now + self._reader.timing.sync_wait_s
        known = () if self._may_found() else (self._draft, self.path)
        tips = [suffix.tip for suffix in known if suffix is not None]
        if self._growing is not None:
            tips.insert(0, self._growing.place.head)
        if self._founding is not None:
            tips[:0] = self._founding.chain.locator()
        locator = tuple([*tips, *self._chain.locator()][:MAX_LOCATOR])
        place = self._chain.place
        return [Send(peer, GetChain(place.stage, place.head, place.view, locator))]

    def answer(self, asker: PeerId, heads: Sequence[Digest], now: float) -> ChainPage | None:
        """The page after these for who asked; None also while strangers have had more than their part."""
        if not self._is_stranger(asker):
            return self.page_after(heads)
        if not self.telling.may_tell(asker, now) or (page := self.page_after(heads)) is None:
            return None
        self.telling.told(asker, sum(_names_in(each) for each in page.certificates), now)
        return page

    def page_after(self, heads: Sequence[Digest]) -> ChainPage | None:
        """Our certificates after the first of these heads that we have; None if we have none of them."""
        for head in heads:
            height = self._chain.height_of(head)
            if height is not None:
                page = self._page_from(height)
                place = self._chain.place
                return ChainPage(place.stage, place.head, place.view, page, height + len(page) < self._chain.height)
        return None

    def _page_from(self, height: int) -> tuple[Certificate, ...]:
        """As many as can be looked at in some 50 ms."""
        page: list[Certificate] = []
        signatures = 0
        for certificate in self._chain.certificates[height : height + MAX_PAGE]:
            signatures += len(certificate.signatures) + VOUCHING * len(certificate.value.results)
            if signatures > PAGE_SIGNATURES and len(page) >= LEAST_PAGE:
                break
            page.append(certificate)
        return tuple(page)

    # ---- what comes in ----

    def on_page(
        self, sender: PeerId, certificates: Sequence[Certificate], *, more: bool, now: float
    ) -> tuple[list[Send], str | None]:
        """Takes in certificates; gives back the next question, or why they were refused."""
        asked = self._asked == sender
        if asked:
            self._asked = None
            self.in_vain.pop(sender, None)
            if more and len(certificates) < LEAST_PAGE:  # no honest page, but where it ends
                self._was_in_vain(sender)
        if not certificates:
            if asked:
                self._end_of_founding()
            return [], None
        if (judged := self._judged.get(certificates[-1].head)) is not None:
            return [], judged or None  # said again: who shows it again is named, also if we learned later what it is
        if asked and (answer := self._found(sender, certificates, more=more, now=now)) is not None:
            return answer
        if not asked and self._may_found():  # pages that come unasked begin at genesis each time
            return self.heard_of(sender, certificates[-1].head, now), None
        growing = self._grown_to(certificates[0].parent)
        if growing is None:
            return self.heard_of(sender, certificates[-1].head, now), None
        most = growing.place.bounds(self._reader.plans).longest_chain
        if most is not None and len(growing.certificates) + len(certificates) > most:
            return [], f"a chain of more than {most} certificates beyond ours; this run has not so many"
        if (count := self._num_looked_at(certificates, is_asked=asked)) < len(certificates):
            if not asked:
                return self.heard_of(sender, certificates[-1].head, now), None
            certificates, more = certificates[:count], True
        if not asked and self._is_stranger(sender):
            new = [each for each in certificates if self._chain.height_of(each.head) is None]
            if not self._looked_at.try_take(sum(len(each.signatures) for each in new), now):
                return self.heard_of(sender, certificates[-1].head, now), None
        if asked:
            self._growing = None  # unless there is more to come of it
        if reason := self._grow(growing, certificates, is_asked=asked):
            if growing.is_unsigned:
                self._distrust()
            return [], reason
        if growing.is_unsigned:
            answer = self._under_the_word(growing, sender, more=more, asked=asked, now=now)
            if answer is not None:
                return answer
        length = len(growing.certificates)
        if more and asked and length > max(WEIGHED_FROM, 2 * growing.weighed):
            growing.weighed = length
        elif more and asked and length > WEIGHED_FROM:
            return self._ask_on(growing, sender, now), None
        suffix = suffix_of(self._chain, growing.start, growing.certificates)
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
        return (self._ask_on(growing, sender, now) if more and asked else []), None

    def _may_found(self) -> bool:
        """Whether a chain is to be taken in up to the owner's word (founding.py)."""
        checkpoint = self._forks.checkpoint
        if checkpoint is None or checkpoint.height < self.founded_from:
            return False
        return not self._chain.height and self.founded is None and self._trusts_the_owner

    def _found(
        self, sender: PeerId, certificates: Sequence[Certificate], *, more: bool, now: float
    ) -> tuple[list[Send], str | None] | None:
        """The answer to a page of the long chain that a newcomer takes in; None: it is no such page."""
        checkpoint, founding = self._forks.checkpoint, self._founding
        if checkpoint is None or not self._may_found():
            return None
        parent = certificates[0].parent
        begins = parent == self._chain.head
        if founding is not None:
            if founding.chain.height >= checkpoint.height or (begins and founding.dead_ends):
                self._give_up_founding()  # of another branch than the newest word, or nobody goes on with it
                founding = None
            elif parent != founding.head and founding.chain.height_of(parent) is not None:
                self._end_of_founding()
                return [], None
        if founding is None:
            if not begins:
                return None
            founding = self._founding = Founding(self._chain.place, self._chain.store)
        if parent != founding.head:
            return None
        most = founding.chain.place.bounds(self._reader.plans).longest_chain
        if most is not None and founding.chain.height + len(certificates) > most:
            reason: str | None = f"a chain of more than {most} certificates; this run has not so many"
        else:
            reason = founding.grow(certificates, checkpoint, self._reader)
        if founding.is_done:
            self.founded, self._founding = founding.chain, None
            return [], None
        if reason is None and more:
            questions = self._ask_more(sender, now)
            founding.dead_ends += self._asked != sender  # who is asked instead may begin anew
            return questions, None
        self._end_of_founding(is_a_lie=reason is not None)
        return [], reason

    def _end_of_founding(self, *, is_a_lie: bool = False) -> None:
        """One whom we asked for what follows has nothing that does. The next one may: if several have not, those who are here are behind
        the owner's word, and are read by their signatures, from the beginning."""
        if self._founding is None:
            return
        self._founding.dead_ends += 1
        if is_a_lie or self._founding.dead_ends >= DEAD_ENDS:
            self._give_up_founding()
            self._distrust()

    def _give_up_founding(self) -> None:
        if self._founding is not None:
            self._founding.give_up()
        self._founding = None

    def _ask_on(self, growing: _Growing, sender: PeerId, now: float) -> list[Send]:
        """For what follows, of who has shown so much."""
        self._growing = growing
        return self._ask_more(sender, now)

    def _ask_more(self, sender: PeerId, now: float) -> list[Send]:
        """One that shows a few certificates at a time, each at the end of the time that there is for it, has no more turns than others."""
        if sender in self.in_vain:
            self._waiting.pop(sender, None)
            sender = self._next_waiting(now) or sender
        return self._ask(sender, now)

    def _num_looked_at(self, certificates: Sequence[Certificate], *, is_asked: bool) -> int:
        """How many of these are looked at at once, the first ones: messages wait for it, and anybody can sign with keys of his own."""
        signatures = 0
        for number, certificate in enumerate(certificates):
            if self._chain.height_of(certificate.head) is None and not self._is_covered(certificate, is_asked=is_asked):
                signatures += len(certificate.signatures)
            if signatures > PAGE_SIGNATURES and number:
                return number
        return len(certificates)

    def _is_covered(self, certificate: Certificate, *, is_asked: bool) -> bool:
        """Whether the owner's signature further on may stand for those of this one."""
        if not is_asked or not self._trusts_the_owner or self._forks.holds_checkpoint(None):
            return False
        checkpoint = self._forks.checkpoint
        return checkpoint is not None and certificate.value.height <= checkpoint.height

    def _grow(self, growing: _Growing, certificates: Sequence[Certificate], *, is_asked: bool) -> str | None:
        """Why these do not go on from growing, which is as it was then; None: they do, and it has them."""
        place, is_unsigned = growing.place, growing.is_unsigned
        for certificate in certificates:
            if self._chain.height_of(certificate.head) is None:
                is_covered = self._is_covered(certificate, is_asked=is_asked)
                reader = self._reader
                verify = any_vote if is_covered else reader.verify
                if reason := place.why_not_certificate(certificate, verify, reader.max_peers, reader.plans):
                    return reason
                is_unsigned = is_unsigned or is_covered
            place = place.then(certificate)
        growing.certificates.extend(certificates)
        growing.place, growing.is_unsigned = place, is_unsigned
        return None

    def _under_the_word(
        self, growing: _Growing, sender: PeerId, *, more: bool, asked: bool, now: float
    ) -> tuple[list[Send], str | None] | None:
        """The answer to a chain whose signatures were not looked at; None: it holds what the owner has signed, which so proves
        all that is before."""
        checkpoint = self._forks.checkpoint
        assert checkpoint is not None, "why signatures were not looked at"
        at = checkpoint.height - 1 - growing.start
        if at >= len(growing.certificates):
            if not asked:
                return [], None
            if more:
                return self._ask_on(growing, sender, now), None
            self._distrust()  # somebody who is behind: by its signatures then, from the beginning
            return self._ask(sender, now), None
        if at >= 0 and growing.certificates[at].head == checkpoint.head:
            growing.is_unsigned = False
            return None
        self._distrust()
        self._judge(growing.place.head, reason := "a chain that parts from the one that the run's owner has signed")
        return [], reason

    def _distrust(self) -> None:
        """Every signature is looked at until the owner speaks again: the next such chain is found out at its first page."""
        self._growing, self._trusts_the_owner = None, False

    def _grown_to(self, parent: Digest) -> _Growing | None:
        """What is known of a chain up to parent; None: nothing."""
        growing = self._growing
        if growing is not None and growing.place.head == parent:
            return growing
        height = self._chain.height_of(parent)
        if height is not None:
            return _Growing(height, [], self._chain.place_at(height))
        for suffix in (self.path, self._draft):
            if suffix is not None and parent in suffix.index_of:
                before = list(suffix.up_to(parent).certificates)
                place = place_after(self._chain.place_at(suffix.ancestor), before)
                return _Growing(suffix.ancestor, before, place, weighed=len(before))
        return None

    def _is_draft(self, suffix: Suffix) -> bool:
        return self._draft is not None and suffix.tip in self._draft.index_of

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

    def judge_anew(self) -> None:
        """We have gone over to another branch. What was worse than ours was so by votes that have moved since: where members changed sides, it
        may be better than the one we are on now, and nobody would ask for it again."""
        self._judged.clear()

    def reconsider(self) -> None:
        """The owner has spoken: what was worse may be better now, and the other way round."""
        self.judge_anew()
        self._shunned.clear()
        self._draft = self._growing = None
        self._trusts_the_owner = True
        self.rebase()

    # ---- what the machine does with the path ----

    def rebase(self) -> None:
        """Our chain has changed: what it has by now is no longer ahead."""
        self.path = self._rebased(self.path)
        self._draft = self._rebased(self._draft)
        if self._chain.height:
            self._give_up_founding()
        if (growing := self._growing) is not None and self._chain.height_of(
            growing.certificates[0].parent
        ) != growing.start:
            self._growing = None
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
        """The path's state is not to be had: leave it alone for a while, go on with what we have, or with what was only worse than that path."""
        assert self.path is not None
        self._judged = OrderedDict((head, reason) for head, reason in self._judged.items() if reason)
        self._shunned = {head: until for head, until in self._shunned.items() if until > now}
        for head in self.path.heads:
            self._shunned[head] = now + self._reader.timing.shun_s
        self.path = None


def _names_in(certificate: Certificate) -> int:
    """Names and signatures of a certificate, by which its size and the work of writing it go."""
    value = certificate.value
    return len(certificate.signatures) + len(value.entries) + len(value.roster) + VOUCHING * len(value.results)
