"""`leave --finish`: a peer goes once what it has trained counts, so that nothing of it waits for its return. Pure."""

from collections.abc import Callable

from dilocox_peer.events import Event, RoundCertified, TrainingProgress

ROUNDS_MORE = 2  # after which it goes though its own contribution was left out: it would be in the next round for ever


class Finishing:
    """Of one session: `take` every event; ask: what has it leave, with a reason."""

    def __init__(self, ask: Callable[[str], None]) -> None:
        self._ask = ask
        self._progress: TrainingProgress | None = None
        self._certified: int | None = None  # the newest round
        self._last: int | None = None  # the round that is waited for; None: nobody wants it

    def begin(self) -> str:
        """What to say about it."""
        self._last = self._under_way()
        if self._last is None:
            self._ask("asked to leave, with nothing to finish")
            return "leaving in order: nothing is under way that could count"
        return (
            f"leaves once round {self._last} is certified with what is trained here; `dilocox-peer leave` goes at once"
        )

    def _under_way(self) -> int | None:
        """The last round that has work of this peer and is not certified: the one it trains for, or the one that it has closed."""
        progress = self._progress
        if progress is not None and progress.is_training and progress.micro_batches:
            return progress.round
        if progress is None or self._certified is None or progress.round <= self._certified + 1:
            return None
        return progress.round - 1

    def take(self, event: Event) -> None:
        if isinstance(event, TrainingProgress):
            self._progress = event
        elif isinstance(event, RoundCertified):
            self._certified = event.round
            if self._is_finished(event):
                self._last = None
                self._ask(f"finished round {event.round}")

    def _is_finished(self, event: RoundCertified) -> bool:
        if self._last is None or event.round < self._last:
            return False
        return event.own_included or event.round >= self._last + ROUNDS_MORE
