"""What a run is to take of a peer that has not joined it yet: at the pace of its rounds where that can be read, else reckoned for as many
peers as are there, all like this machine, on usual lines. Both by peer/planning/upkeep.py. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from dilocox_peer.durations import duration
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.memory import size

UP_BPS, DOWN_BPS, ROUND_TRIP_S = 20e6, 100e6, 0.05  # as `plan` has them where nobody says
CORE = ((1.4e6, 2.3e10), (6.0e7, 7.0e10), (5.9e8, 9.0e10))
"""(operations a token of a model, operations a second of training it on one processor core): tiny, small and 125m, as
`benchmarks/predictions.py --core` measures them. What `init` reckons with, as the machines that will join are not known."""


@dataclass(frozen=True, slots=True)
class Expected:
    """sizes in bytes; a day's are 0 where they are not known. left_s: of the run; None: not known. basis: where it comes from."""

    memory_bytes: int
    disk_bytes: int
    sent_bytes_a_day: float
    received_bytes_a_day: float
    left_s: float | None
    basis: str

    @classmethod
    def at_its_pace(cls, document: Mapping[str, Any], stage: int | None) -> Self | None:
        """document: the run as its page has it. stage: that is meant; None: the one that takes most. None: it has no pace yet."""
        known = [each["costs"] for each in document["stages"] if stage in (None, each["stage"])]
        known = [each for each in known if each["sent_bytes_a_day"] is not None]
        if not known:
            return None
        most = max(known, key=lambda each: (each["sent_bytes_a_day"], each["memory_bytes"]))
        return cls(
            memory_bytes=max(each["memory_bytes"] for each in known),
            disk_bytes=max(each["disk_bytes"] for each in known),
            sent_bytes_a_day=most["sent_bytes_a_day"],
            received_bytes_a_day=most["received_bytes_a_day"],
            left_s=document["now"]["eta_s"],
            basis="at the pace of its newest rounds",
        )

    @classmethod
    def reckoned(cls, manifest: Manifest, peers: int, tokens_per_s: float, each: str) -> Self:
        """peers: of all stages, one a stage at least. tokens_per_s: of the whole model on one of them. each: what one of them is."""
        from dilocox_peer.peer.planning.forecast import Peers, forecast

        count = max(peers, manifest.stages.count)
        found = forecast(manifest, Peers(count, UP_BPS, DOWN_BPS, ROUND_TRIP_S, tokens_per_s))
        return cls(
            memory_bytes=found.memory_bytes,
            disk_bytes=found.disk_bytes,
            sent_bytes_a_day=found.sent_bytes_a_day,
            received_bytes_a_day=found.received_bytes_a_day,
            left_s=found.duration_s,
            basis=f"reckoned for {count} peer{'' if count == 1 else 's'}, each {each}, on {UP_BPS / 1e6:g} Mbit/s up",
        )

    def words(self) -> str:
        left = "" if self.left_s is None else f"; about {duration(self.left_s)} to its end"
        return (
            f"up to {size(self.memory_bytes)} of memory, {size(self.disk_bytes)} of disk, {size(round(self.sent_bytes_a_day))} up and "
            f"{size(round(self.received_bytes_a_day))} down a day{left} ({self.basis})"
        )


def on_one_core(manifest: Manifest) -> Expected:
    """Of a run before anybody has joined: two peers a stage, or as many as it waits for, of one processor core each."""
    from dilocox_peer.peer.planning.forecast import operations

    peers, a_token = max(2, manifest.rounds.start_peers) * manifest.stages.count, operations(manifest)
    a_second = max((speed for least, speed in CORE if least <= a_token), default=CORE[0][1])
    return Expected.reckoned(manifest, peers, a_second / a_token, "of one processor core")
