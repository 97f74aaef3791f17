"""The holders of training here, and their reasons: the operator, the hours, an idle watch. It goes on when all of them have let go.

Only our own micro-batches pause: the rounds go on, and what others certify is merged (conductor.py).
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol

from dilocox_peer.events import Listener, Paused, Resumed
from dilocox_peer.peer.training.book import HoldReason

SETTLE_S = 1.0


class Holdable(Protocol):
    """Of a trainer, what is needed here. Both raise RuntimeError when it has no room for another call."""

    def hold(self, reason: HoldReason) -> object: ...

    def resume(self, reason: HoldReason) -> object: ...


class Pauses:
    """Of one session, over all its trainers. All calls in the session's loop, at any time; also before there is a trainer."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._reasons: dict[str, str] = {}
        self._of_everybody: set[str] = set()  # of those who pause, who holds everybody
        self._told: Paused | None = None
        self._trainer: Holdable | None = None
        self._is_trainer_paused = False
        self.changed = asyncio.Event()  # for the one who announces it: training was paused, or goes on

    @property
    def reasons(self) -> Mapping[str, str]:
        """Each holder of training, and its reason; empty: nobody holds it."""
        return self._reasons

    @property
    def is_paused(self) -> bool:
        return bool(self._reasons)

    def pause(self, who: str, why: str, *, is_everybody: bool = False) -> None:
        """No micro-batch of ours begins until `who`, and everybody else who paused, has resumed. is_everybody: nor of anybody's."""
        if not self._reasons:
            self.changed.set()
        self._reasons[who] = why
        (self._of_everybody.add if is_everybody else self._of_everybody.discard)(who)
        self._tell()
        self._settle()

    def resume(self, who: str, why: str) -> None:
        """Takes back what `who` asked for; nothing happens if it had not."""
        if self._reasons.pop(who, None) is not None and not self._reasons:
            self._told = None
            self._listener(Resumed(why))
            self.changed.set()
        self._tell()
        self._settle()

    def _tell(self) -> None:
        """By whom and why training is held, where that is no more what was told: the reason of who has held it longest."""
        if not self._reasons:
            return
        who, why = next(iter(self._reasons.items()))
        if (paused := Paused(why, who in self._of_everybody)) != self._told:
            self._told = paused
            self._listener(paused)

    def set_trainer(self, trainer: Holdable | None) -> None:
        """From here on this one is held and resumed; it has not been paused yet. None: the last one has ended."""
        self._trainer, self._is_trainer_paused = trainer, False
        self._settle()

    async def keep(self) -> None:
        """Until cancelled, tells the trainer again what it had no room for."""
        while True:
            await asyncio.sleep(SETTLE_S)
            self._settle()

    def _settle(self) -> None:
        """Has the trainer do as is wished, unless it has no room for the call now."""
        if self._trainer is None or self.is_paused == self._is_trainer_paused:
            return
        with suppress(RuntimeError):
            if self.is_paused:
                self._trainer.hold("pause")
            else:
                self._trainer.resume("pause")
            self._is_trainer_paused = self.is_paused
