"""One peer's part in a run: stay after stay, until the run is complete or the volunteer leaves. Decides nothing itself.

A stay (peer/stay.py) ends early when our network daemon dies, and another begins from disk; or when another stage needs this
peer more, and the next is there.
"""

import asyncio
import gc
import time
from collections.abc import Awaitable, Mapping

from dilocox_peer.events import Failed, Left, Listener, StageClaimed
from dilocox_peer.peer.dialback import DialbackVerdict
from dilocox_peer.peer.identity import Identity
from dilocox_peer.peer.incarnation import next_incarnation
from dilocox_peer.peer.pauses import Pauses
from dilocox_peer.peer.settings import SessionSettings
from dilocox_peer.peer.stay import NetworkLost, Resident, Stay
from dilocox_peer.peer.tally import Tally

MAX_RESTARTS = 5  # one after the other: more of them are no accident
LASTING_S = 3600.0  # a stay that lasted so long has shown that the daemon works: the next death begins the count anew


class Session:
    """`run` again and again, one at a time."""

    def __init__(self, settings: SessionSettings, identity: Identity, listener: Listener) -> None:
        self._listener = listener
        self._incarnation = 0
        self._last_incarnation = settings.run_folder / "incarnation"
        self._pauses = Pauses(listener)
        self._resident = Resident(
            settings,
            identity,
            Tally(),
            self._pauses,
            DialbackVerdict(outgoing_only=settings.choices.outgoing_only),
            listener,
        )

    @property
    def pauses(self) -> Mapping[str, str]:
        """Each holder of training here, and its reason; empty: nobody holds it."""
        return self._pauses.reasons

    def pause(self, who: str, why: str) -> None:
        """No micro-batch of ours begins until `who`, and everybody else who paused, has resumed. In the session's loop;
        at any time, also before `run`."""
        self._pauses.pause(who, why)

    def resume(self, who: str, why: str) -> None:
        """Takes back what `who` asked for; nothing happens if it had not."""
        self._pauses.resume(who, why)

    async def run(self, leave: Awaitable[str]) -> None:
        """Trains until the run is complete or `leave` gives a reason to go.

        Raises RunUnreachable, RunRefused, ConfigError from start-up; DilocoxError when a part fails for good. However
        it ends, nothing is left running.
        """
        leaving = asyncio.ensure_future(leave)
        restarts = 0
        try:
            while True:
                now_ms = max(self._incarnation + 1, time.time_ns() // 1_000_000)
                self._incarnation = next_incarnation(self._last_incarnation, now_ms)
                _take_back()
                began = time.monotonic()
                try:
                    move = await Stay(self._resident, self._incarnation).run(leaving)
                except NetworkLost as error:
                    restarts = 1 if time.monotonic() - began >= LASTING_S else restarts + 1
                    if restarts > MAX_RESTARTS:
                        raise
                    self._listener(Failed("network daemon", f"{error}; starting it again and going on from disk"))
                    continue
                if move is None:
                    break
                self._resident.stage = move.stage
                self._listener(StageClaimed(move.stage, move.why))
            self._resident.stage = None  # who comes back later claims anew
            self._listener(Left(leaving.result() if leaving.done() else "the run is complete"))
        finally:
            leaving.cancel()


def _take_back() -> None:
    """The memory of the stay before: its model refers to itself, and was frozen with all that start-up had made (stay.py)."""
    if gc.get_freeze_count():
        gc.unfreeze()
        gc.collect()
