"""What taking part costs a volunteer, as far as its peer has told: a part of its status. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from dilocox_peer.events import Event, RoundClosed
from dilocox_peer.events_of_costs import MonthCounted, NeedsReckoned
from dilocox_peer.peer.contributions import Round
from dilocox_peer.peer.planning.upkeep import RoundPace, StageNeeds, Upkeep, upkeep
from dilocox_peer.peer.time_left import newest_in_a_row


@dataclass(slots=True)
class CostsTold:
    """needs: of the stage joined; None before that. month: None before anything was counted."""

    needs: NeedsReckoned | None = None
    month: MonthCounted | None = None
    closed: RoundClosed | None = None  # our newest

    def take(self, event: Event) -> None:
        match event:
            case NeedsReckoned():
                self.needs, self.closed = event, None
            case RoundClosed():
                self.closed = event
            case MonthCounted():
                self.month = event

    def upkeep(self, rounds: Sequence[Round]) -> Upkeep | None:
        """At the pace of the newest of these rounds; None while there is none, or nothing of ours was in one."""
        newest = newest_in_a_row(rounds)
        if self.needs is None or self.closed is None or len(newest) < 2 or newest[-1].at_s <= newest[0].at_s:
            return None
        needs = self.needs
        pace = RoundPace(
            peers=max(1, newest[-1].contributors),
            contribution_bytes=self.closed.blob_bytes,
            micro_batches=self.closed.micro_batches,
            round_s=(newest[-1].at_s - newest[0].at_s) / (len(newest) - 1),
            codec=newest[-1].codec,
        )
        return upkeep(StageNeeds(**{each.name: getattr(needs, each.name) for each in fields(StageNeeds)}), pace)

    def summary(self, rounds: Sequence[Round]) -> dict[str, Any]:
        """Its part of the JSON form, sizes in bytes. memory, disk: at most, as reckoned; a_day: at the pace of now."""
        needs, month, found = self.needs, self.month, self.upkeep(rounds)
        disk = needs.disk_bytes if needs is not None else None
        return {
            "memory_bytes": needs.memory_bytes if needs is not None else None,
            "card_bytes": needs.card_bytes if needs is not None else None,
            "disk_bytes": disk if found is None else found.disk_bytes,
            "sent_bytes_a_day": None if found is None else round(found.sent_bytes_a_day),
            "received_bytes_a_day": None if found is None else round(found.received_bytes_a_day),
            "month": None
            if month is None
            else {
                "month": month.month,
                "sent": month.sent,
                "received": month.received,
                "allowed": month.allowed or None,
            },
        }
