"""What taking part costs a volunteer, as far as its peer has told: a part of its status. Pure."""

from dataclasses import dataclass
from typing import Any

from dilocox_peer.events import Event
from dilocox_peer.events_of_costs import MonthCounted


@dataclass(slots=True)
class CostsTold:
    """month: None before anything was counted."""

    month: MonthCounted | None = None

    def take(self, event: Event) -> None:
        match event:
            case MonthCounted():
                self.month = event
            case _:
                pass

    def summary(self) -> dict[str, Any]:
        """Its part of the JSON form; sizes in bytes."""
        month = self.month
        return {
            "month": None
            if month is None
            else {
                "month": month.month,
                "sent": month.sent,
                "received": month.received,
                "allowed": month.allowed or None,
            },
        }
