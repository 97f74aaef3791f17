"""What a fetch knows of one of its donors: what it was asked for, how fast it is, how often it failed. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from dilocox_peer.store.outline import CHUNK_BYTES, Outline
from dilocox_peer.types import PeerId

UNMEASURED_S = 2.0  # a donor that has sent nothing yet is not called slow before
# Donors that were asked for outlines and not for bytes yet: the next ones are asked when some of them were.
UNTRIED = 16
IMPATIENT_S = 3.0  # with a donor that does not say what the thing is made of, before the next is asked too


@dataclass(slots=True)
class FetchDonor:
    """at, stop: what is left of its range, stop 0: none. began_s, heard_s, got: of that range. retry_s: not to be asked before."""

    outline: Outline | None = None
    is_out: bool = False
    is_asked: bool = False  # for its outline
    asked_s: float = 0.0
    at: int = 0
    stop: int = 0
    began_s: float = 0.0
    heard_s: float = 0.0
    got: int = 0
    rate: float | None = None  # bytes a second; None: it has not been tried
    has_given: bool = False  # all of a chunk, which was right
    failures: int = 0
    failures_in_all: int = 0
    retry_s: float = 0.0
    reasons: list[str] = field(default_factory=list)

    @property
    def is_busy(self) -> bool:
        return self.stop > 0

    def is_unasked(self, now: float) -> bool:
        return self.outline is None and not self.is_out and not self.is_asked and now >= self.retry_s

    def may_yet_say(self, now: float) -> bool:
        """Whether it was asked for its outline just now."""
        return self.is_asked and now < self.asked_s + IMPATIENT_S

    def is_untried(self, now: float) -> bool:
        """Whether it has an outline, or may yet say that, and was not asked for bytes."""
        return not self.is_out and self.rate is None and (self.outline is not None or self.may_yet_say(now))

    def is_resting(self, now: float) -> bool:
        return not self.is_out and now < self.retry_s

    def turn(self, *, is_trying: bool) -> tuple[bool, float]:
        """Those that may be fast come first. is_trying: one is sending that has given nothing yet; then those come first that have."""
        return is_trying and not self.has_given, -(inf if self.rate is None else self.rate)

    def begin(self, at: int, stop: int, now: float) -> None:
        self.at, self.stop = at, stop
        self.began_s, self.heard_s, self.got = now, now, 0

    def heard(self, num_bytes: int, now: float) -> None:
        """So many bytes of its range have come."""
        self.got += num_bytes
        self.heard_s = now
        if self.rate is None or self.got >= CHUNK_BYTES or now - self.began_s >= UNMEASURED_S:  # a few bytes say little
            self.reckon(now)

    def reckon(self, now: float) -> None:
        """Its rate is that of this range so far: who began fast and then trickles, or sends nothing, is not asked before all others again."""
        self.rate = max(self.got / max(now - self.began_s, 1e-6), 1.0)

    def left_s(self, now: float) -> float:
        """Until it is done at its speed so far, and no less than it has been silent; 0 while its speed is not known."""
        waited = now - self.began_s
        if not self.got and waited < UNMEASURED_S:
            return 0.0
        return max((self.stop - self.at) / max(self.got / max(waited, 1e-6), 1.0), now - self.heard_s)


def next_asked(donors: Mapping[PeerId, FetchDonor], now: float, *, is_outlined: bool) -> list[PeerId]:
    """The donors that are asked for an outline now, in the order in which they are given: however many they are, all have their turn, and a crowd that says
    nothing, or gives nothing, holds nobody's place. is_outlined: one is known; before, as a small thing comes with its outline, one is asked,
    and as many more as say nothing each time that they have had IMPATIENT_S."""
    most = UNTRIED - sum(donor.is_untried(now) for donor in donors.values())
    if not is_outlined:
        silent = [donor for donor in donors.values() if donor.is_asked]
        if any(donor.may_yet_say(now) for donor in silent):
            return []
        most = min(most, max(1, len(silent)))
    return [peer for peer, donor in donors.items() if donor.is_unasked(now)][: max(0, most)]


def part_of(donor: FetchDonor, hoped: Sequence[FetchDonor], at_once: int) -> float:
    """Its part, by the speeds, of what those of hoped send that are fastest, so many at once."""
    known = [each.rate for each in hoped if each.rate is not None]
    usual = sum(known) / len(known) if known else 1.0
    rates = sorted((usual if each.rate is None else each.rate for each in hoped), reverse=True)[:at_once]
    return min((usual if donor.rate is None else donor.rate) / max(sum(rates), 1e-9), 1.0)


def why_nobody(donors: Mapping[PeerId, FetchDonor]) -> str:
    """Why none of them is asked any more."""
    if not donors:
        return "nobody to ask"
    said = (f"{peer}: {donor.reasons[-1]}" for peer, donor in donors.items() if donor.reasons)
    return "; ".join(said) or "nobody has it"
