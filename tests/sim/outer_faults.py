"""Planted faults of the outer loop: each is a mistake one could make in OuterLoop. The simulator must catch every one."""

from dataclasses import replace

from dilocox_peer.peer.rounds.contract import Apply, Closed, RoundProgress, StateComputed
from dilocox_peer.peer.training.outer_contract import (
    AdoptionBegun,
    BranchDropped,
    CloseRound,
    EndRun,
    HoldTraining,
    MergeRound,
    OuterAction,
    OuterInput,
    Readings,
    RoundEncoded,
    ToRounds,
)
from dilocox_peer.peer.training.outer_loop import OuterLoop, OuterPhase


class _MergesWhileAdopting(OuterLoop):
    """Closes and merges while another's state is on its way."""

    def handle(self, happened: OuterInput, now: float, seen: Readings) -> list[OuterAction]:
        if isinstance(happened, AdoptionBegun):
            self._adoptions -= 1
        return super().handle(happened, now, seen)


class _KeepsWhatWaits(OuterLoop):
    """Does not drop what waits to be merged when another state takes its place."""

    def handle(self, happened: OuterInput, now: float, seen: Readings) -> list[OuterAction]:
        waiting = list(self._waiting)
        actions = super().handle(happened, now, seen)
        if isinstance(happened, BranchDropped):
            self._waiting.extend(waiting)
        return actions


class _OffersLate(OuterLoop):
    """Offers a contribution although the head has moved while it was encoded."""

    def handle(self, happened: OuterInput, now: float, seen: Readings) -> list[OuterAction]:
        if isinstance(happened, RoundEncoded):
            self._base = self._rounds.head
        return super().handle(happened, now, seen)


class _CountsAsOurs(OuterLoop):
    """Takes every certificate for one with our contribution in it."""

    def handle(self, happened: OuterInput, now: float, seen: Readings) -> list[OuterAction]:
        actions = super().handle(happened, now, seen)
        return [replace(each, own=True) if isinstance(each, MergeRound) else each for each in actions]


class _NeverOurs(OuterLoop):
    """Takes no certificate for one with our contribution in it: what was merged is sent again."""

    def handle(self, happened: OuterInput, now: float, seen: Readings) -> list[OuterAction]:
        actions = super().handle(happened, now, seen)
        return [replace(each, own=False) if isinstance(each, MergeRound) else each for each in actions]


class _ClosesOnTheOldAnchor(OuterLoop):
    """Closes at the round machine's head before the certificate has reached it."""

    def handle(self, happened: OuterInput, now: float, seen: Readings) -> list[OuterAction]:
        self._known_head = self._rounds.head
        return super().handle(happened, now, seen)


class _MergesTheNewestFirst(OuterLoop):
    """Takes the newest of what waits."""

    def handle(self, happened: OuterInput, now: float, seen: Readings) -> list[OuterAction]:
        if isinstance(happened, Apply) and self.phase is OuterPhase.IDLE and self._waiting:
            self._waiting.rotate(1)
        elif isinstance(happened, Apply) and self._waiting:
            self._waiting.insert(1, happened)
            self._known_head = happened.certificate.head
            return []
        return super().handle(happened, now, seen)


class _HoldsForGood(OuterLoop):
    """Does not let training go on after it has held it once."""

    def handle(self, happened: OuterInput, now: float, seen: Readings) -> list[OuterAction]:
        actions = super().handle(happened, now, seen)
        return [each for each in actions if self.merged_round == 0 or each != HoldTraining(False)]


class _EndsEarly(OuterLoop):
    """Ends when the last round is closed, not when it is merged."""

    def handle(self, happened: OuterInput, now: float, seen: Readings) -> list[OuterAction]:
        actions = super().handle(happened, now, seen)
        last = self._rounds.schedule.last_round
        has_closed = any(isinstance(each, ToRounds) and isinstance(each.happened, Closed) for each in actions)
        if has_closed and last is not None and self.merged_round + 1 >= last:
            self.phase = OuterPhase.OVER
            return [*actions, HoldTraining(True), EndRun()]
        return actions


class _OffersTwice(OuterLoop):
    """Forgets that its offer is out while the round machine has not looked at it yet."""

    def handle(self, happened: OuterInput, now: float, seen: Readings) -> list[OuterAction]:
        self._offered_at = None
        return super().handle(happened, now, seen)


class _TellsNoProgress(OuterLoop):
    """Keeps to itself how far it is: the clocks of the others wait for it."""

    def handle(self, happened: OuterInput, now: float, seen: Readings) -> list[OuterAction]:
        actions = super().handle(happened, now, seen)
        return [
            each for each in actions if not (isinstance(each, ToRounds) and isinstance(each.happened, RoundProgress))
        ]


class _TellsNoState(OuterLoop):
    """Keeps to itself what its anchor has come to: nobody can take it over."""

    def handle(self, happened: OuterInput, now: float, seen: Readings) -> list[OuterAction]:
        actions = super().handle(happened, now, seen)
        return [
            each for each in actions if not (isinstance(each, ToRounds) and isinstance(each.happened, StateComputed))
        ]


class _NamesNoState(OuterLoop):
    """A close that follows its merge at once names no state: with overlap one-step nobody who was away comes back."""

    def handle(self, happened: OuterInput, now: float, seen: Readings) -> list[OuterAction]:
        actions = super().handle(happened, now, seen)
        if any(isinstance(each, CloseRound) for each in actions):
            self._base_digest = self._rounds.state_digest
        return actions


FAULTS: dict[str, type[OuterLoop]] = {
    "merges while it adopts": _MergesWhileAdopting,
    "keeps what waits": _KeepsWhatWaits,
    "offers late": _OffersLate,
    "counts each as ours": _CountsAsOurs,
    "counts none as ours": _NeverOurs,
    "closes on the old anchor": _ClosesOnTheOldAnchor,
    "merges the newest first": _MergesTheNewestFirst,
    "holds for good": _HoldsForGood,
    "ends early": _EndsEarly,
    "offers twice": _OffersTwice,
    "tells no progress": _TellsNoProgress,
    "tells no state": _TellsNoState,
    "names no state": _NamesNoState,
}
