"""What taking part costs a volunteer, as values."""

from dataclasses import dataclass

from dilocox_peer.events import Event


@dataclass(frozen=True, slots=True)
class MonthCounted(Event):
    """What this peer sent and received in a calendar month so far, in bytes; once a minute. allowed: of both together, as the volunteer
    says; 0: any number."""

    month: str
    sent: int
    received: int
    allowed: int
    LEVEL = "debug"
