"""`pause`, `pause --for 2h` and `resume`: the operator's part in who holds training (peer/pauses.py)."""

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from dilocox_peer.cli.hours import Pausable

LOOK_S = 30.0  # whether a pause for a time is over
OPERATOR = "operator"  # who pauses by key or command; apart from the hours
CallLater = Callable[[float, Callable[[], None]], "Cancellable"]
"""(seconds, what) -> what is cancelled before its time. asyncio's."""


class Cancellable(Protocol):
    def cancel(self) -> None: ...


class Steered(Pausable, Protocol):
    @property
    def pauses(self) -> Mapping[str, str]: ...


class Operator:
    """Of one session. `pause` and `resume` return what to say about it."""

    def __init__(
        self,
        session: Steered,
        name_flag: str,
        call_later: CallLater,
        away: Callable[[], str] = str,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """name_flag: with which a command finds this peer. away: why it is in no run now, and until when; empty: it is there."""
        self._session = session
        self._name_flag = name_flag
        self._call_later = call_later
        self._wall = wall
        self._away = away
        self._going_on: Cancellable | None = None

    def pause(self, seconds: int | None = None) -> str:
        """None: until it is told to go on. A pause replaces the one before. Of a peer that is away it holds when it comes back."""
        self.close()
        line = f"`dilocox-peer resume{self._name_flag}` trains on"
        away = self._away()
        if seconds is None:
            self._session.pause(OPERATOR, "asked to")
            if away:
                return f"{away}, and is paused then. {line} then"
            return f"paused; this peer votes and merges on. {line}"
        form = "%a %H:%M" if seconds < 6 * 86_400 else "%Y-%m-%d %H:%M"  # a weekday is the next one of that name
        until = time.strftime(form, time.localtime(time.time() + seconds))
        self._session.pause(OPERATOR, f"asked to, until {until}")
        self._wait(float(seconds), self._wall() + seconds)
        if away:
            return f"{away}, and is paused then if that is before {until}"
        return f"paused until {until}; this peer votes and merges on. {line} earlier"

    def resume(self) -> str:
        self.close()
        self._session.resume(OPERATOR, "asked to")
        still = "; ".join(self._session.pauses.values())
        if away := self._away():
            return f"{away}, and is still paused then: {still}" if still else f"{away}, and trains then"
        return f"still paused: {still}" if still else "training again"

    def close(self) -> None:
        """Nothing goes on by itself any more."""
        if self._going_on is not None:
            self._going_on.cancel()
        self._going_on = None

    def _wait(self, left_s: float, until_s: float) -> None:
        """left_s: by the clock that only runs, which stands while the machine sleeps; until_s: by the one on the wall, which may be set. The first to be there counts."""
        pause_s = min(LOOK_S, left_s)

        def look() -> None:
            if left_s - pause_s <= 0.0 or self._wall() >= until_s:
                self._is_over()
            else:
                self._wait(left_s - pause_s, until_s)

        self._going_on = self._call_later(pause_s, look)

    def _is_over(self) -> None:
        self._going_on = None
        self._session.resume(OPERATOR, "the time that it was paused for is over")
