"""What is wrong with a run, as values: the words in which every peer, the page and the log name it, and what happens next.

peer/swarm_health.py decides what is wrong; here is how it is said. A trouble is the same one as long as its kind, its stage and its
peers are the same, whatever else of it changes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from dilocox_peer.events import Event, short
from dilocox_peer.types import PeerId

MAX_NAMED = 3

TroubleKind = Literal[
    "empty", "frozen", "paused", "waiting", "thin", "slow", "silent", "disk", "links", "line", "data", "clock", "clocks",
    "bootstrap", "hostile", "refused",
]  # fmt: skip
NOTES = {"thin", "slow"}  # nothing is lost yet


@dataclass(frozen=True, slots=True)
class Trouble:
    """stage: None: of none. peers: those that it is about. stops: the run stands as long as it lasts. helper: who takes the stage, in about
    in_s seconds from when this was told; None: nobody can. number, of: waiting: peers that are here, that it takes; clock: seconds
    that it is ahead, or behind if negative."""

    kind: TroubleKind
    stage: int | None = None
    peers: tuple[PeerId, ...] = ()
    stops: bool = False
    helper: PeerId | None = None
    in_s: float = 0.0
    number: int = 0
    of: int = 0

    @property
    def key(self) -> tuple[TroubleKind, int | None, tuple[PeerId, ...], bool]:
        """What makes it this one."""
        return self.kind, self.stage, self.peers, self.stops

    @property
    def cause(self) -> str:
        """What is wrong."""
        return _CAUSES[self.kind](self)

    def next_words(self, passed_s: float = 0.0) -> str:
        """What happens next; passed_s: since this was told."""
        if self.helper is not None:
            left_s = self.in_s - passed_s
            when = f"in about {left_s:.0f} s" if left_s >= 1.0 else "any moment now"
            unless = "unless it comes back, " if self.kind == "frozen" else ""
            return f"{unless}{short(self.helper)} takes it {when}"
        return _NEXT[self.kind](self)

    def words(self, passed_s: float = 0.0) -> str:
        """Both, as one line."""
        return f"{self.cause}: {self.next_words(passed_s)}"


def _peers(number: int) -> str:
    return "one peer" if number == 1 else f"{number} peers"


def _named(peers: Sequence[PeerId]) -> str:
    return ", ".join(map(short, peers[:MAX_NAMED])) + (
        f" and {len(peers) - MAX_NAMED} more" if len(peers) > MAX_NAMED else ""
    )


def _whose(trouble: Trouble) -> str:
    """Of one peer, as a rule."""
    where = "" if trouble.stage is None else f" (stage {trouble.stage})"
    return f"{_named(trouble.peers)}{where}"


def _alone(trouble: Trouble) -> str:
    return f" ({_named(trouble.peers)})" if trouble.peers else ""


def _of_clock(trouble: Trouble) -> str:
    side = "ahead of" if trouble.number > 0 else "behind"
    return f"the clock of {_named(trouble.peers)} is {abs(trouble.number)} s {side} the others'"


_CAUSES: dict[TroubleKind, Callable[[Trouble], str]] = {
    "empty": lambda it: f"nobody holds stage {it.stage}" + (f", {_named(it.peers)} is gone" if it.peers else ""),
    "frozen": lambda it: f"nobody of stage {it.stage} answers{_alone(it)}",
    "paused": lambda it: f"everybody of stage {it.stage} has paused{_alone(it)}",
    "waiting": lambda it: f"stage {it.stage} has {it.number} of the {_peers(it.of)} that it begins with",
    "thin": lambda it: f"stage {it.stage} has one peer{_alone(it)}, where others have more",
    "slow": lambda it: f"stage {it.stage} is less than half as fast as the others",
    "silent": lambda it: f"{_whose(it)} does not answer",
    "disk": lambda it: f"the disk of {_whose(it)} takes nothing",
    "links": lambda it: f"the link process of {_whose(it)} has ended",
    "line": lambda it: f"the line of {_whose(it)} is full",
    "data": lambda it: f"{_whose(it)} has data that are not the run's",
    "clock": _of_clock,
    "clocks": lambda it: f"the clocks of {' and '.join(map(short, it.peers))} are {abs(it.number)} s apart",
    "bootstrap": lambda it: f"the bootstrap {_named(it.peers)} does not answer",
    "hostile": lambda it: f"{_whose(it)} is proven hostile, as its stage says",
    "refused": lambda it: f"what {_whose(it)} sends is refused, as its stage says",
}  # fmt: skip


def _or_waits(goes_on: str, waits: str) -> Callable[[Trouble], str]:
    return lambda it: f"the run waits {waits}" if it.stops else goes_on


_NEXT: dict[TroubleKind, Callable[[Trouble], str]] = {
    "empty": lambda it: f"the run waits for a peer that takes stage {it.stage}",
    "frozen": lambda it: f"the run waits until it comes back, or for a peer that joins stage {it.stage}",
    "paused": lambda it: f"the run waits until one of them goes on, or for a peer that joins stage {it.stage}",
    "waiting": lambda it: f"the run begins when {it.of - it.number} more {'is' if it.of - it.number == 1 else 'are'} here",
    "thin": lambda it: "should it go, the run waits until another takes its place",
    "slow": lambda it: "the others wait for it; a peer that joins goes there",
    "silent": lambda it: "its stage goes on without it",
    "disk": _or_waits("its stage goes on without it until it can write", "until it can write"),
    "links": _or_waits("it is started again, the others go on", "while it is started again"),
    "line": _or_waits("what it trains comes late, and is not waited for", "for what it sends"),
    "data": _or_waits("it trains on what is right of them", "until it has some"),
    "clock": lambda it: "the others refuse what it announces; it has to be set right (`timedatectl set-ntp true`)",
    "clocks": lambda it: "one of them has to be set right (`timedatectl set-ntp true`)",
    "bootstrap": lambda it: "training goes on; nobody can join by its address alone until it is back",
    "hostile": lambda it: "it is left out of its stage's rosters",
    "refused": lambda it: "its stage goes on without it",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TroublesSeen(Event):
    """All that is wrong as far as is known here, the worst first; told when it changes. For screens; the log has the next two."""

    troubles: tuple[Trouble, ...]
    LEVEL = "debug"


@dataclass(frozen=True, slots=True)
class TroubleBegan(Event):
    trouble: Trouble

    @property
    def level(self) -> str:
        return "info" if self.trouble.kind in NOTES or self.trouble.kind == "waiting" else "warning"

    def line(self) -> str:
        return self.trouble.words()


@dataclass(frozen=True, slots=True)
class TroubleOver(Event):
    """seconds: that it lasted."""

    trouble: Trouble
    seconds: float

    def line(self) -> str:
        return f"over after {self.seconds:.0f} s: {self.trouble.cause}"


@dataclass(frozen=True, slots=True)
class DiskRefused(Event):
    """Something that a round cannot do without could not be written; told once until the reason is another. is_over: it is written now.
    remedy: what to do about the disk."""

    what: str
    reason: str
    is_over: bool = False
    remedy: str = "free some space"

    @property
    def level(self) -> str:
        return "info" if self.is_over else "error"

    def line(self) -> str:
        if self.is_over:
            return f"{self.what}: written, the disk takes it again"
        return f"{self.what}: {self.reason}; {self.remedy}: this peer goes on as soon as it can write"


@dataclass(frozen=True, slots=True)
class LinkProcessEnded(Event):
    """linkd, all links with it. is_back: it runs again, and the links are made anew."""

    reason: str
    is_back: bool = False

    @property
    def level(self) -> str:
        return "info" if self.is_back else "error"

    def line(self) -> str:
        if self.is_back:
            return "pipeline: linkd runs again, links are made anew"
        return f"pipeline: linkd ended ({self.reason}); starting it again"
