"""What somebody without a vote believes of a view change that no quorum signed: it counts once it has stood for a while. Pure.

The majority may only be out of sight, and one member can write such a view change alone, in a second, and go on from it to
the end of the run. One that no voter of the roster before it signed counts only to those who look for these voters all the time
(a keeper, the owner's notary) and have heard none of them for long: to others that is for the run's owner to decide. Where all
voters who have not signed it are surely gone, no majority is out of sight: it counts at once, as what the owner's checkpoint holds.

Nobody knows a branch that begins with one no voter signed ("lone") but its own signers: they may be newcomers who go on with a run that
everybody has left, or a stranger who signs a thousand rounds in a second, up to the end. What follows is believed no faster than PACE
times as the run went before, by the clocks of those who contributed. After a restart that is counted anew from where our chain ends.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from statistics import median

from dilocox_peer.peer.rounds.chain import Chain, Place, Suffix, is_quorum
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import Certificate
from dilocox_peer.wire.checkpoints import Checkpoint

MAX_REMEMBERED = 1024  # view changes
PACE = 8.0  # newcomers may have faster machines
FREE_ROUNDS = 4  # of a lone branch, which count at once
MEASURED_ROUNDS = 16
READ_BACK = 512  # certificates of our own chain that are looked at for the beginning of a lone branch


@dataclass(slots=True)
class _Lone:
    """The beginning of a lone branch. Inner steps of the run (planned, as of a Place): steps, that are believed at `since`, in monotonic
    seconds; a_second: that are believed more in each after it. vouched, vouched_since: the same from the owner's newest checkpoint on."""

    steps: int
    since: float
    a_second: float
    vouched: int = 0
    vouched_since: float = inf

    def allowed(self, now: float) -> float:
        return max(
            self.steps + self.a_second * (now - self.since), self.vouched + self.a_second * (now - self.vouched_since)
        )


class Patience:
    """When each view change was first seen."""

    def __init__(
        self,
        seconds: float,
        *,
        are_away: Callable[[Collection[PeerId], float], bool] = lambda _voters, _now: False,
        are_gone: Callable[[Collection[PeerId], float], bool] = lambda _voters, _now: False,
        elsewhere: Callable[[Sequence[PeerId], Collection[Digest]], float] = lambda _voters, _heads: -inf,
    ) -> None:
        """seconds: that a view change of a minority must have stood. are_away(voters, now): whether none of them has been heard for
        long; are_gone: whether all of them have said so, or refuse connections. elsewhere(voters, heads): until when a quorum of them was
        heard at other heads than these, -inf: never; it is at work there, however long its round takes."""
        self._seconds = seconds
        self._are_away = are_away
        self._are_gone = are_gone
        self._elsewhere = elsewhere
        self._since: OrderedDict[Digest, float] = (
            OrderedDict()
        )  # of those that voters signed with whom our chain goes elsewhere
        self._since_of_others: OrderedDict[Digest, float] = (
            OrderedDict()
        )  # anybody can have these forgotten, and not those
        self._lone: OrderedDict[Digest, _Lone] = OrderedDict()
        self._has_read = False  # what our chain had when it was first seen

    def settled(self, chain: Chain, path: Suffix, checkpoint: Checkpoint | None, now: float) -> Suffix | None:
        """The path from chain as far as it is to be believed by now; None: not at all. now: monotonic seconds."""
        place, settled, is_believed = chain.place_at(path.ancestor), 0, True
        voters_here = set(place.voters)
        vouched = -1 if checkpoint is None else path.index_of.get(checkpoint.head, -1)
        if not self._has_read:
            self._has_read = True
            self._read(chain, now)
        lone = self._lone_below(chain, path.ancestor)
        for index, certificate in enumerate(path.certificates):
            signers = {peer for peer, _ in certificate.signatures}
            is_view_change = certificate.value.kind == "epoch" and not place.is_genesis
            is_lone = is_view_change and not signers & set(place.voters)
            if index > vouched and is_view_change and not is_quorum(signers, place.voters):
                # Timed also behind another that has not.
                seen = self._since if signers & voters_here else self._since_of_others
                since = max(_seen(seen, certificate.head, now), self._elsewhere(place.voters, path.heads[index:]))
                has_stood = now - since >= self._seconds
                is_theirs = bool(signers & set(place.voters)) or self._are_away(place.voters, now)
                has_stood = has_stood and is_theirs
                is_believed = is_believed and (has_stood or self._are_gone(set(place.voters) - signers, now))
            if lone is None and is_lone:
                newest = chain.certificates[max(0, path.ancestor - 4 * MEASURED_ROUNDS) : path.ancestor]
                lone = self._begin(certificate.head, place, [*newest, *path.certificates[:index]], now)
            place = place.then(certificate)
            if lone is not None and index == vouched and place.plan.first_step > lone.vouched:
                lone.vouched, lone.vouched_since = place.plan.first_step, now
            elif lone is not None and index > vouched:
                is_believed = is_believed and place.plan.first_step <= lone.allowed(now)
            settled += is_believed
        return path.up_to(path.heads[settled - 1]) if settled else None

    def _read(self, chain: Chain, now: float) -> None:
        """Of a chain from before a restart: what it has is believed, and what follows it is a lone branch's if its last part is."""
        for height in range(max(1, chain.height - READ_BACK), chain.height):
            place, certificate = chain.place_at(height), chain.certificates[height]
            signers = {peer for peer, _ in certificate.signatures}
            if certificate.value.kind == "epoch" and not signers & set(place.voters):
                newest = chain.certificates[max(0, height - 4 * MEASURED_ROUNDS) : height]
                self._begin(certificate.head, chain.place, newest, now)
                return

    def _lone_below(self, chain: Chain, height: int) -> _Lone | None:
        """Where the chain up to height has left its voters, as far as that was seen here."""
        heights = ((chain.height_of(head), lone) for head, lone in self._lone.items())
        found = [(at, lone) for at, lone in heights if at is not None and at <= height]
        return min(found, key=lambda each: each[0])[1] if found else None

    def _begin(self, head: Digest, place: Place, before: Sequence[Certificate], now: float) -> _Lone:
        if head not in self._lone:
            free = place.plan.first_step + FREE_ROUNDS * place.plan.inner_steps
            self._lone[head] = _Lone(free, now, PACE * steps_a_second(before))
            if len(self._lone) > MAX_REMEMBERED:
                self._lone.popitem(last=False)
        return self._lone[head]


def _seen(table: OrderedDict[Digest, float], head: Digest, now: float) -> float:
    """When head was first seen, as far as table remembers it."""
    since = table.setdefault(head, now)
    if len(table) > MAX_REMEMBERED:
        table.popitem(last=False)
    return since


def steps_a_second(certificates: Sequence[Certificate]) -> float:
    """How fast the run went in its last rounds, in inner steps, by the wall clocks that contributors told: of each round the median, and
    that of the rounds, as there may be nights between two. Without two rounds that were told it is infinite. Pure."""
    rounds = [each.value for each in certificates[-4 * MEASURED_ROUNDS :]]
    closed = [[entry.report.closed_ms for entry in each.entries if entry.report.closed_ms] for each in rounds]
    told = [(median(said), each.plan.first_step) for said, each in zip(closed, rounds, strict=True) if said]
    rates = [
        1000.0 * (steps - past_steps) / max(1.0, at - past)
        for (past, past_steps), (at, steps) in pairwise(told[-MEASURED_ROUNDS:])
        if at > past  # a clock that goes back tells no pace
    ]
    return median(rates) if rates else inf
