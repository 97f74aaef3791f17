"""When a round of local training is over (docs/pipeline.md, rounds). Pure.

Stage 0, where micro-batches start, is the clock of the run: its round is over when the roster's members that are here have
together done their shares, so that a slow peer does less and nobody waits for it; or at twice the usual time. What a member
says it has done is taken as at most four times the median of the others, as in the mean: none can end a round alone. A later stage
follows: its round is over when the origins that most of its work comes from are in the next one, none counted for more than
others, or when stage 0 has certified it. Else never for a peer that has done nothing itself.
"""

import statistics
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

from dilocox_peer.types import PeerId

REMEMBERED_ROUNDS = 8  # whose median is the usual time: short enough to follow a swarm that grew or slowed down
OVERTIME = 2.0
NEAR = 7 / 8  # of the shares
ROUNDING = 1e-9  # of shares that are equal
MOST_COUNTED = 4  # of a member's micro-batches, times the median of the others'; the mean weighs them no higher either


class RoundClock:
    """One peer's view. share_of: micro-batches a peer does in a round, on average (H times K)."""

    def __init__(self, share_of: Callable[[int], int]) -> None:
        self._share_of = share_of
        self._round = 0
        self._since = 0.0
        self._paces: deque[float] = deque(maxlen=REMEMBERED_ROUNDS)  # seconds a micro-batch of the share
        self._done: dict[PeerId, int] = {}
        self._is_near = self._is_at = False  # its end is the round that was asked about last, by what is counted

    def usual_s(self, round_number: int) -> float | None:
        """What the round should take by the median of those before, however long they were; None before the second."""
        return self._share_of(round_number) * statistics.median(self._paces) if self._paces else None

    def is_over(
        self,
        round_number: int,
        *,
        me: PeerId,
        own: int,
        roster: Sequence[PeerId],
        alive: Collection[PeerId],
        reports: Mapping[PeerId, tuple[int, int]],
        now: float,
    ) -> bool:
        """Whether the round that this peer trains should be closed now.

        own: its own micro-batches in it. reports: (round in training, micro-batches) of the others as they last said;
        a member in a later round counts as having done at least its share here. Members not in alive are left out of
        both sides. Remembers what was reported for this round, so call it whenever reports or time have moved.
        """
        self._begin(round_number, now)
        if own == 0:
            return False
        usual_s, share = self.usual_s(round_number), self._share_of(round_number)
        if usual_s is not None and now - self._since >= OVERTIME * usual_s:
            return True
        others = [peer for peer in roster if peer != me and peer in alive]
        later = 0
        for peer in others:
            training_round, micro_batches = reports.get(peer, (0, 0))
            if training_round == round_number:
                self._done[peer] = max(self._done.get(peer, 0), micro_batches)
            elif training_round > round_number:
                self._done[peer] = max(self._done.get(peer, 0), share)
                later += 1
        if 2 * later > len(others):  # they saw it reach the target; their counts of it are no longer reported
            return True
        members = [*others, me] if me in roster or not others else others
        done = [own if peer == me else self._done.get(peer, 0) for peer in members]
        counted, wanted = sum(_counted(done)), share * len(members)
        self._is_near, self._is_at = counted >= NEAR * wanted, counted >= wanted
        return self._is_at

    def is_near_end_of(self, round_number: int) -> bool:
        """Whether most of the shares were done when it was asked last."""
        return self._is_near and self._round == round_number

    def is_at_end_of(self, round_number: int) -> bool:
        """Whether all of them were."""
        return self._is_at and self._round == round_number

    def _begin(self, round_number: int, now: float) -> None:
        if round_number == self._round:
            return
        if round_number == self._round + 1 and self._round > 0:
            self._paces.append((now - self._since) / self._share_of(self._round))
        self._round, self._since = round_number, now
        self._done.clear()
        self._is_near = self._is_at = False


def _counted(done: Sequence[int]) -> list[float]:
    """What each is taken to have done. Our own is no exception: we would close before all the others, and be alone."""
    if len(done) == 1:
        return [*done]
    medians = (statistics.median([*done[:index], *done[index + 1 :]]) for index in range(len(done)))
    return [min(each, MOST_COUNTED * median) for each, median in zip(done, medians, strict=True)]


def follows(
    round_number: int, *, own: int, origins: Mapping[tuple[PeerId, PeerId], tuple[int, int]], certified_at_stage_0: int
) -> bool:
    """Whether a peer of a later stage should close the round that it trains.

    own: its own micro-batches in it. origins: by caller and origin, the latest round that work came of, and how many of our
    recent micro-batches were theirs. One that computes nothing sends many times what honest ones do, and names any round: an origin counts as
    `_most_counted` of the others of its caller, which may have invented it, and a caller of the other callers. Where two disagree, stage 0's
    certificate decides.
    """
    if certified_at_stage_0 >= round_number:
        return (
            True  # also with nothing done: origins may have sent all of it to others, and go no further before we close
        )
    if own == 0:
        return False
    of_callers: dict[PeerId, dict[PeerId, int]] = {}
    for (caller, origin), (_, count) in origins.items():
        of_callers.setdefault(caller, {})[origin] = count
    counted = {caller: _most_counted(of_callers[caller]) for caller in of_callers}
    sums = {caller: sum(each.values()) for caller, each in counted.items()}
    shares = {caller: most / sums[caller] for caller, most in _most_counted(sums).items()}
    recent = sum(shares[caller] * sums[caller] for caller in sums)
    ahead = sum(
        shares[caller] * counted[caller][origin]
        for (caller, origin), (latest, _) in origins.items()
        if latest > round_number
    )
    return 2 * ahead > recent * (1 + ROUNDING)


def _most_counted(counts: Mapping[PeerId, float]) -> dict[PeerId, float]:
    """What each is taken to have sent: the other's where there are two, and else at most twice the median of the others', as honest ones are of
    unequal speed and nobody is to be waited for because he is slow."""
    if len(counts) == 1:
        return {**counts}
    medians = {peer: statistics.median([count for each, count in counts.items() if each != peer]) for peer in counts}
    return {peer: min(count, medians[peer] * (2 if len(counts) > 2 else 1)) for peer, count in counts.items()}
