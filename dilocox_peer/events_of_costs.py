"""What taking part costs a volunteer, as values."""

from dataclasses import dataclass

from dilocox_peer.durations import duration
from dilocox_peer.events import Event


@dataclass(frozen=True, slots=True)
class NeedsReckoned(Event):
    """What the stage that this peer has joined takes, before its first round (peer/planning/upkeep.py). memory_bytes: at most, of the machine;
    disk_bytes: as contributions begin. parameters, frozen_bytes, copied, sent_bytes, received_bytes, is_sliced, codec, card_bytes: of StageNeeds."""

    stage: int
    memory_bytes: int
    disk_bytes: int
    parameters: int
    frozen_bytes: int
    copied: int
    sent_bytes: int
    received_bytes: int
    is_sliced: bool
    codec: str = "int4"  # of logs in which it was not told
    card_bytes: int = 0

    def line(self) -> str:
        return f"it takes up to {needs_words(self.memory_bytes, self.card_bytes, self.disk_bytes)} here"


@dataclass(frozen=True, slots=True)
class UpkeepReckoned(Event):
    """What taking part comes to at the pace of the newest rounds: told after the first that this peer has seen, and again where it has become otherwise. left_s: of the run; None: not known."""

    sent_bytes_a_day: int
    received_bytes_a_day: int
    disk_bytes: int
    left_s: float | None

    def line(self) -> str:
        left = "" if self.left_s is None or self.left_s < 1 else f"; the run takes about {duration(self.left_s)} more"
        return (
            f"at this pace it sends {size_words(self.sent_bytes_a_day)} and receives {size_words(self.received_bytes_a_day)} a day, "
            f"{size_words(self.disk_bytes)} of disk{left}"
        )


@dataclass(frozen=True, slots=True)
class MonthCounted(Event):
    """What this peer sent and received in a calendar month so far, in bytes; once a minute. allowed: of both together, as the volunteer
    says; 0: any number."""

    month: str
    sent: int
    received: int
    allowed: int
    LEVEL = "debug"


@dataclass(frozen=True, slots=True)
class LineUsed(Event):
    """What p2pd sent and received since the session began, in bytes; every few seconds of a start, which may fetch a model, and at its end. Afterwards
    TrainingProgress tells it."""

    sent: int
    received: int
    LEVEL = "debug"


def needs_words(memory_bytes: int, card_bytes: int, disk_bytes: float) -> str:
    """For people. card_bytes: 0: no card trains."""
    card = f", {size_words(card_bytes)} of the card's" if card_bytes else ""
    return f"{size_words(memory_bytes)} of memory{card} and {size_words(disk_bytes)} of disk"


def size_words(num_bytes: float) -> str:
    """For people: two digits are all that is known beforehand."""
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.0f} MB"
