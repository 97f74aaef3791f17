"""What a run takes on a peer's disk, and what a volunteer allows of it (`--max-disk`). Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from dilocox_peer.peer.planning.plan import KEPT_ROUNDS
from dilocox_peer.peer.planning.sent import AveragedKept

STATE_BYTES = 8  # a parameter: anchor and momentum
STATES = 4  # three checkpoints, and one that is written
COPIES = 2  # of another stage's state, where there are several: the copy, and the next while it is written
GB = 1e9
LOOKS_OVER = 2  # in a row: while a state is written there is one more for a moment


def disk_bytes(parameters: int, kept: AveragedKept, *, copied: int = 0) -> int:
    """Of one stage. kept: of what its peers average; of the last KEPT_ROUNDS it stays, and of older ones as long as all of it together
    is no larger than a state (peer/rounds/replay.py). copied: parameters of the stage whose copy is kept; 0: none."""
    state = STATE_BYTES * parameters
    averaged = max(state, int(KEPT_ROUNDS * kept.a_round)) + int(kept.passing)
    return STATES * state + averaged + copy_bytes(copied)


def copy_bytes(copied: int) -> int:
    """Of a copy of a stage with so many parameters."""
    return COPIES * STATE_BYTES * copied


def least_allowed_gb(needs: Sequence[int]) -> float:
    """With which one of these stages fits: what it needs, rounded up to hundredths."""
    return -(-min(needs) // 10**7) / 100


@dataclass(frozen=True, slots=True)
class DiskAllowed:
    """num_bytes: for all that a peer writes; None: as much as there is."""

    num_bytes: int | None

    def fitting(self, needs: Sequence[int]) -> list[int]:
        """Of stages that need so many bytes each, copies of others apart, those there is room for."""
        return [stage for stage, need in enumerate(needs) if self.num_bytes is None or need <= self.num_bytes]

    def why_not(self, stage: int, needs: Sequence[int]) -> str:
        """What is wrong with holding that stage and what to do about it; empty when it fits."""
        fitting = self.fitting(needs)
        if stage in fitting or self.num_bytes is None:
            return ""
        other = f", or join with --stage {fitting[0]}" if fitting else ""
        allow = least_allowed_gb(needs[stage : stage + 1])
        return f"stage {stage} needs {allow:.2f} GB of disk, --max-disk allows {self.num_bytes / GB:g}: allow {allow:g}{other}"

    def copies(self, need: int, each: int, wanted: int) -> int:
        """How many other stages there is room to keep a copy of, beside our own. need: of our own; each: of a copy."""
        if self.num_bytes is None or not each:
            return wanted
        return max(0, min(wanted, (self.num_bytes - need) // each))

    def left(self, need: int) -> int | None:
        """Bytes for what is fetched and may be dropped again, shards of data. need: of all else; None: any number."""
        return None if self.num_bytes is None else max(0, self.num_bytes - need)

    def is_over(self, taken: int) -> bool:
        """Whether a peer that takes so many bytes has to drop what it can do without."""
        return self.num_bytes is not None and taken > self.num_bytes


class DiskUse:
    """Whether a peer has to go for what it takes, from one look to the next; cli/disk_watch.py looks, drops and has it leave."""

    def __init__(self, allowed: DiskAllowed) -> None:
        self.allowed = allowed
        self._times_over = 0

    def take(self, taken: int) -> bool:
        """taken: bytes that are left when nothing more can be dropped. True: it is beyond what is allowed, and was at the look before."""
        self._times_over = self._times_over + 1 if self.allowed.is_over(taken) else 0
        return self._times_over >= LOOKS_OVER
