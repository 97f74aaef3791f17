"""What a keeper of a run copies next, when it looks again and what it gives up, from what is certified and what lies on its disk. Pure.

A stage is kept as the whole state of one round and the contributions to the rounds since, by which whoever comes brings it to the
tip: a contribution costs a small part of a state, so what is kept is no older than the last look, whatever a round takes. When the
contributions have grown to half a state, or one of them is not to be had, the next state is copied: of one round in all stages, as a
whole model is put together from one round. Copying takes at most a tenth of the time, but for the first state and the last.

Whatever is copied leaves the peers by the lines that their rounds need. Of these a keeper takes a tenth: where lines are wide that is all
contributions at once, where they are narrow it is a state every so many rounds, and what is kept is so much older. Nothing is held
back of a stage that one peer trains alone, nor when its last peer is about to leave.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from dilocox_peer.wire.chain import VOUCHING, Certificate

FOLLOW_SHARE = 0.5  # of a state's size: more contributions than that, and a state is less to fetch for who comes
COPY_SHARE = 0.1  # of the time
LINE_SHARE = 0.1  # of what the peers' lines carry, or of what the peers send each other, if that is more
MOST_SAVED = 2  # states that may be saved up for
MOST_COUNTED = 512  # newest certificates: at a start they may be all of a year's
MOST_LOOKED_AT = 8  # certificates, for one of a round: view changes have no contributions
LEAVING_S = 10.0  # after a peer has said that it has a newer round and leaves
RETRY_S = 5.0
GIVE_UP_S = 15.0  # in which a peer that was killed may be back with what it has on its disk
LOOK_FIRST_S = 1.0  # before there is a pace of rounds
LOOK_LEAST_S, LOOK_MOST_S = 0.3, 10.0  # a look comes four times a round, within these
LOOK_ALONE_S = 5.0  # with nobody there


@dataclass(frozen=True, slots=True)
class StageAccount:
    """What is known of a stage, and what of it is here.

    state_bytes: of a whole state. proven: rounds whose states have digests that certificates name, or at the run's end its voters.
    is_over: the last round is certified. kept: the newest round whose state is here. following_bytes: of the contributions since;
    missing_bytes: of those that are not here. is_broken: one of them is to be had from nobody. spare_bytes: that its peers can spare by
    now (Allowance), None: any number.
    """

    state_bytes: int
    proven: frozenset[int]
    is_over: bool = False
    kept: int | None = None
    following_bytes: int = 0
    missing_bytes: int = 0
    is_broken: bool = False
    spare_bytes: int | None = None

    def can_spare(self, num_bytes: int) -> bool:
        return self.spare_bytes is None or num_bytes <= self.spare_bytes


class Allowance:
    """What a keeper may take of a stage's peers. It grows with time and with what they send one another."""

    def __init__(self, state_bytes: int) -> None:
        self._most = MOST_SAVED * state_bytes
        self._bytes = 0.0
        self._looked_at: float | None = None
        self._known = 0  # certificates
        self._leaving_until = float("-inf")

    def spare_bytes(self, certificates: Sequence[Certificate], now: float) -> int | None:
        """What they can spare by now, None: any number. certificates: of the stage, all."""
        known, self._known = self._known, len(certificates)
        new = certificates[max(min(known, len(certificates)), len(certificates) - MOST_COUNTED) :]
        passed_s = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        line_bps = lines_bps(certificates)
        if line_bps is None or now < self._leaving_until:
            return None
        earned = LINE_SHARE * max(float(sum(map(exchanged_bytes, new))), line_bps / 8 * passed_s)
        self._bytes = min(self._bytes + earned, float(self._most))
        return int(self._bytes)

    def taken(self, num_bytes: int) -> None:
        """So many have been fetched."""
        self._bytes = max(0.0, self._bytes - num_bytes)

    def leaving(self, now: float) -> None:
        """A peer with a newer round than is kept is about to go."""
        self._leaving_until = now + LEAVING_S


def exchanged_bytes(certificate: Certificate) -> int:
    """What the contributors to a round sent one another. What an entry says of its size is its author's word, so the median speaks for all."""
    entries, results = certificate.value.entries, certificate.value.results
    if results:  # each slice to its two, and what it came to to all others
        shared = VOUCHING * sum(each.size_bytes for each in entries) + len(entries) * sum(
            each.size_bytes for each in results
        )
        return shared * (len(entries) - 1) // len(entries)
    return int(median(each.size_bytes for each in entries)) * len(entries) * (len(entries) - 1) if entries else 0


def lines_bps(certificates: Sequence[Certificate]) -> float | None:
    """Bits a second that the lines of the newest round's contributors carry together, as they report; None: one of them does not know, or
    one peer trains alone, whose line is free."""
    for certificate in certificates[: -MOST_LOOKED_AT - 1 : -1]:
        if entries := certificate.value.entries:
            kbps = [each.report.uplink_kbps for each in entries]
            return 1000.0 * sum(kbps) if len(kbps) > 1 and all(kbps) else None
    return None


@dataclass(frozen=True, slots=True)
class KeepNext:
    """copy: the round whose state is to be copied for the stages in `lacking`. follow: stages whose missing contributions are to be
    fetched. full: why something is not kept, for people."""

    copy: int | None = None
    lacking: tuple[int, ...] = ()
    follow: tuple[int, ...] = ()
    full: str = ""


class Keeping:
    """Of one run. quota_bytes: of all that is kept of it."""

    def __init__(self, quota_bytes: int) -> None:
        self._quota_bytes = quota_bytes
        self._rests_until = float("-inf")
        self._not_before = float("-inf")

    def next(self, stages: Sequence[StageAccount], used_bytes: int, now: float, *, arriving_bytes: int = 0) -> KeepNext:
        """What to do now; nothing of it may be under way. used_bytes: on the disk; arriving_bytes: of these, what came of states of
        which copies broke off. now: monotonic seconds."""
        room = self._quota_bytes - used_bytes
        copy, full = self._due(stages, now), ""
        lacking: tuple[int, ...] = ()
        if copy is not None:
            lacking = tuple(number for number, stage in enumerate(stages) if stage.kept != copy)
            sizes = [stages[number].state_bytes for number in lacking]
            needed = sum(sizes) + max(sizes)  # one of them twice: as it comes, and as it is written
            if needed > room + arriving_bytes:  # which the next copy goes on with, or drops
                full = self._full(f"round {copy}", needed, used_bytes - arriving_bytes)
                copy, lacking = None, ()
            else:
                room += arriving_bytes - needed
        follow = []
        for number, stage in enumerate(stages):
            if stage.kept is None or stage.is_broken or not stage.missing_bytes:
                continue
            if stage.following_bytes > stage.state_bytes or not stage.can_spare(stage.missing_bytes):
                continue  # the next state is less
            if stage.missing_bytes > room:
                full = full or self._full(f"the contributions to stage {number}", stage.missing_bytes, used_bytes)
                continue
            room -= stage.missing_bytes
            follow.append(number)
        return KeepNext(copy, lacking, tuple(follow), full)

    def copied(self, seconds: float, now: float) -> None:
        """The states of a round are here; it took so long."""
        self._rests_until = now + seconds / COPY_SHARE

    def failed(self, now: float) -> None:
        """They were not to be had, or there was no room."""
        self._not_before = now + RETRY_S

    def _due(self, stages: Sequence[StageAccount], now: float) -> int | None:
        """The round to copy the states of, None: none now."""
        common = frozenset[int].intersection(*(stage.proven for stage in stages)) if stages else frozenset()
        newest = max(common, default=None)
        kept = {stage.kept for stage in stages}
        if newest is None or now < self._not_before or kept == {newest}:
            return None
        if None in kept or len(kept) > 1:  # nothing whole is here yet
            return newest
        if newest <= max(number for number in kept if number is not None):
            return None
        if all(stage.is_over for stage in stages):
            return newest
        has_grown = any(stage.following_bytes > FOLLOW_SHARE * stage.state_bytes for stage in stages)
        is_wanted = has_grown or any(stage.is_broken for stage in stages)
        can_spare = all(stage.can_spare(stage.state_bytes) for stage in stages)
        return newest if is_wanted and can_spare and now >= self._rests_until else None

    def _full(self, what: str, needed: int, used_bytes: int) -> str:
        gb = [f"{size / 1e9:.2f}" for size in (needed, used_bytes, self._quota_bytes)]
        return f"{what} takes {gb[0]} GB beside the {gb[1]} GB that are kept, and --keep-disk allows {gb[2]} GB"


@dataclass(frozen=True, slots=True)
class TailAccount:
    """What is known of the certificates after the newest head that a stage can be brought to with what is kept.

    is_there: there are some. is_over: the last round is certified. is_tried: their contributions were to be had from nobody, or there is
    nobody to ask. is_under_way: some are being fetched. is_left: nobody is there who has made them.
    """

    is_there: bool
    is_over: bool = False
    is_tried: bool = False
    is_under_way: bool = False
    is_left: bool = False

    @property
    def is_lost(self) -> bool:
        return self.is_there and not self.is_over and self.is_tried and not self.is_under_way and self.is_left


class Tails:
    """When they are given up: newcomers go on from what is kept, and theirs would never follow."""

    def __init__(self) -> None:
        self._lost_since: dict[int, float] = {}

    def is_given_up(self, stage: int, tail: TailAccount, now: float) -> bool:
        """Whether the tail has been lost for GIVE_UP_S, without a break. now: monotonic seconds."""
        if not tail.is_lost:
            self._lost_since.pop(stage, None)
            return False
        return now - self._lost_since.setdefault(stage, now) >= GIVE_UP_S


class LookPace:
    """How long a keeper rests between two looks: a quarter of a round, as rounds have been coming."""

    def __init__(self) -> None:
        self._moved_at: float | None = None
        self._round_s = 4 * LOOK_FIRST_S
        self._tip = 0

    def pause_s(self, tip: int, now: float, *, is_complete: bool, is_alone: bool) -> float:
        """Seconds. tip: the newest round certified in all stages. now: monotonic seconds. is_alone: no peer was reached."""
        if tip > self._tip:
            if self._tip and self._moved_at is not None:
                self._round_s = 0.5 * self._round_s + 0.5 * (now - self._moved_at) / (tip - self._tip)
            self._tip, self._moved_at = tip, now
        if is_complete:
            return LOOK_MOST_S
        if is_alone:
            return LOOK_ALONE_S if self._tip else LOOK_FIRST_S
        return min(max(0.25 * self._round_s, LOOK_LEAST_S), LOOK_MOST_S)
