"""How strong the bodies of neighbours are, and which are not like what is seen of the others. Pure.

A body's size and that it is finite follow from the run; that it is what the model computes cannot be told from it. But its strength (the root
of its mean square) can be compared with that of others: micro-batches of one moment are much alike, and so are replicas of one stage. So a body
that is MOST times as strong as what is usual is refused. One that is FAR weaker says nothing of what is usual, and is refused as well where it is activations: a norm
that divides by next to nothing makes of them gradients that half precision cannot hold (a gradient may honestly be nothing). Usual is the median of what each neighbour sent last, everybody's own median counting once,
and not the one's that is judged, once another is known: so nobody raises it by itself, nor by sending more. One alone is compared with its own past; of two, who have no majority, each with the stronger of both, or the one could
have the other refused by sending next to nothing; its own past counts as at most FAR times the other's there, or it could double it without end.
What is refused is remembered too, as a claim: or the first that sends would say what is usual, and have all others refused for ever. What more than half claim,
and more than one, is taken beside what is usual, and does not become that: so claims, of whatever names, have nobody refused.
Names are free: so against newcomers, even if they are the most, one that was here before them has its own past in the same way. What came FRESH_S ago says nothing any more: gradients change as training goes on, and peers that
are gone must not have those that are there refused. What two peers answer alike to the same question is taken, up to MOST times more: it is the question.
What is taken and is more than PASSED times as strong as usual is halved until it is not: a backward gives on the strength that came, so one that took the most would be refused itself, by those that it
answers, for what a liar behind it sent. (Of 900 honest micro-batches of a tiny model in training from scratch, gradients were 2.3 times as strong as usual in the 99th percentile, activations 1.6.)
"""

import math
from collections import OrderedDict, deque
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from statistics import median, median_high, median_low

from dilocox_peer.types import PeerId

MOST = 8.0  # times
PASSED = 4.0  # times; less than MOST by what a backward may add, and enough that the second callee's answer tells what is made stronger (checks.py)
FAR = 100.0  # times; more than MOST: what one neighbour sends at least must not have another refused
REMEMBERED = 32  # bodies of a peer
LEAST_SEEN = 4  # of a peer, before it says what is usual
CLAIMED = 8  # newest bodies of a peer, taken or not, that are its claim
LEAST_AGREED = 2  # peers: what rests on one alone is its word against another's
MAX_PEERS = 256
ALIKE = 1.1  # times as strong, of two answers to one question
MAX_REFUSED = 64  # questions whose refused answers are remembered
FRESH_S = 600.0  # since a peer's last body that was taken


@dataclass(slots=True)
class _Past:
    """What one peer sent."""

    strengths: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))  # of those that were taken
    claims: deque[float] = field(default_factory=lambda: deque(maxlen=CLAIMED))  # of all
    since: float = 0.0
    latest: float = -math.inf  # that was taken
    claimed_at: float = 0.0

    def is_telling(self, now: float) -> bool:
        return len(self.strengths) >= LEAST_SEEN and now - self.latest < FRESH_S

    def is_claiming(self, now: float) -> bool:
        return len(self.claims) >= LEAST_SEEN and now - self.claimed_at < FRESH_S


class Likeness:
    """The strength of one kind of body: activations from those before us, or gradients from those behind."""

    def __init__(self, what: str, *, refuses_weak: bool = False) -> None:
        """what: to name it by. refuses_weak: what is FAR weaker than usual is not taken."""
        self._what = what
        self._refuses_weak = refuses_weak
        self._seen: OrderedDict[PeerId, _Past] = OrderedDict()
        self._refused: OrderedDict[Hashable, dict[PeerId, float]] = OrderedDict()  # by question

    def why_not(self, peer: PeerId, strength: float, now: float, *, about: Hashable = None) -> str | None:
        """Why a body of peer is not taken; None if it is, and then it is remembered. about: the question that it answers, which others may be asked too.
        now: seconds, of any clock that only goes on."""
        least, most = self._usual(peer, now) or (0.0, math.inf)
        lowest, highest = self._with_claims(least, most, now)
        past = self._claimed(peer, strength, now)
        is_strong = strength > MOST * most and not self._is_confirmed(peer, strength, about, most)
        if is_strong and strength > MOST * highest:
            return f"{self._what} of strength {strength:.2g}, where {most:.2g} is usual"
        is_weak = strength * FAR < least
        if is_weak and self._refuses_weak and strength * FAR < lowest:
            return f"{self._what} of strength {strength:.2g}, where {least:.2g} is usual"
        if past is not None and not is_weak and not is_strong:
            past.strengths.append(strength)
            past.latest = now
        return None

    def _claimed(self, peer: PeerId, strength: float, now: float) -> _Past | None:
        """A body of peer has come, whatever becomes of it. None: it is of nothing at all, which says nothing of what is usual."""
        if not strength:
            return None
        past = self._seen.setdefault(peer, _Past(since=now))
        past.claims.append(strength)
        past.claimed_at = now
        self._seen.move_to_end(peer)
        while len(self._seen) > MAX_PEERS:
            self._seen.popitem(last=False)
        return past

    def is_agreed(self, peer: PeerId, now: float) -> bool:
        """Whether what is usual for peer rests on its own past, or on more than half of those that are heard, and more than one: not on the word of
        whoever came first against all others'."""
        telling = {each for each, past in self._seen.items() if past.is_telling(now)}
        num_heard = sum(now - past.claimed_at < FRESH_S for past in self._seen.values())
        return peer in telling or (len(telling) >= LEAST_AGREED and 2 * len(telling) > num_heard)

    def halvings(self, peer: PeerId, strength: float, now: float) -> int:
        """How often what why_not has let pass is to be halved before it is worked with."""
        least, most = self._usual(peer, now) or (0.0, math.inf)
        others = [each for each, past in self._seen.items() if each != peer and past.is_telling(now)]
        if len(others) < LEAST_AGREED:  # else what claims let in weighs no more than what is usual: names cost nothing
            _, most = self._with_claims(least, most, now)
        return 0 if strength <= PASSED * most else math.ceil(math.log2(strength / (PASSED * most)))

    def _is_confirmed(self, peer: PeerId, strength: float, about: Hashable, usual: float) -> bool:
        if about is None or strength > MOST * MOST * usual:
            return False
        refused = self._refused.setdefault(about, {})
        self._refused.move_to_end(about)
        while len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)
        others = [each for other, each in refused.items() if other != peer]
        refused[peer] = strength
        return any(max(each, strength) <= ALIKE * min(each, strength) for each in others)

    def forget(self, peer: PeerId) -> None:
        self._seen.pop(peer, None)

    @property
    def num_known(self) -> int:
        """Peers that are remembered."""
        return len(self._seen)

    def _usual(self, peer: PeerId, now: float) -> tuple[float, float] | None:
        """What a body of peer may not be far weaker than, and not much stronger; None as long as too little is known."""
        known = {each: median(past.strengths) for each, past in self._seen.items() if past.is_telling(now)}
        own = known.pop(peer, None)
        if not known:
            return None if own is None else (own, own)
        usual = median(known.values())
        if own is None or (len(known) > 1 and not self._is_older(peer, known)):
            return usual, usual
        return min(usual, max(own, usual / FAR)), max(usual, min(own, usual * FAR))

    def _with_claims(self, least: float, most: float, now: float) -> tuple[float, float]:
        """The same, further apart where more than half of all claim what is too strong or too weak for it."""
        claims = [median(past.claims) for past in self._seen.values() if past.is_claiming(now)]
        if len(claims) >= LEAST_AGREED and (all_but_half := median_low(claims)) > MOST * most:
            return least, all_but_half
        if len(claims) >= LEAST_AGREED and (all_but_half := median_high(claims)) * FAR < least:
            return all_but_half, most
        return least, most

    def _is_older(self, peer: PeerId, others: Collection[PeerId]) -> bool:
        """Whether more than half of the others came after it."""
        since = self._seen[peer].since
        return 2 * sum(self._seen[each].since > since for each in others) > len(others)
