"""Getting the run's state while the rounds wait for it: from who keeps it and comes back later than we came.

The rounds look for a state among the stage's peers. A keeper of the run is none of them, nor are peers of other stages that keep a copy, so
here these are asked; when one has the state, the stay begins again, and finds it as any newcomer does (state/restore.py).
"""

import asyncio

from dilocox_peer.dht.directory import Directory
from dilocox_peer.errors import DilocoxError, RunUnreachable
from dilocox_peer.network.endpoint import Endpoint
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.state.restore import newest_copied
from dilocox_peer.peer.takeover import Move
from dilocox_peer.types import Digest

WAITED_S = 5.0  # by the rounds
LOOK_S = 5.0
MAX_PAUSE_S = 300.0


class RunOver(DilocoxError):
    """The run's last round is certified, and nothing of it is here: there is nothing to do but to get its model."""

    def __init__(self, round_number: int, head: Digest) -> None:
        super().__init__(f"the run is complete after round {round_number}")
        self.round = round_number
        self.head = head


class Rescue:
    """`run` ends when somebody keeps the state that the rounds wait for."""

    def __init__(
        self,
        endpoint: Endpoint,
        stage: int,
        *,
        num_stages: int,
        machine: RoundMachine,
        directory: Directory,
        times: int,
    ) -> None:
        """times: that this peer was rescued before; who said that it has the state and did not give it is asked more seldom."""
        self._endpoint = endpoint
        self._stage = stage
        self._num_stages = num_stages
        self._machine = machine
        self._directory = directory
        self._pause_s = min(LOOK_S * 2**times, MAX_PAUSE_S)

    async def run(self) -> Move:
        clock = asyncio.get_running_loop().time
        waits_since: float | None = None
        asked_at = clock()
        while True:
            await asyncio.sleep(1.0)
            if self._machine.waits_for(clock()) is None:
                waits_since = None
                continue
            waits_since = clock() if waits_since is None else waits_since
            if clock() - waits_since < WAITED_S or clock() - asked_at < self._pause_s:
                continue
            asked_at = clock()
            try:
                kept = await newest_copied(
                    self._stage, num_stages=self._num_stages, endpoint=self._endpoint, directory=self._directory
                )
            except RunUnreachable:  # the discovery tells it
                continue
            lacking = (
                self._machine.round + self._machine.is_ready
            )  # of a head whose state we have not, it is no use to be told of another
            if kept and kept >= lacking:
                return Move(self._stage, f"its state of round {kept} is kept by somebody who is here now")


async def over(directory: Directory, num_stages: int) -> RunOver | None:
    """That the run's owner has signed the last round of every stage. Raises RunUnreachable."""
    first: RunOver | None = None
    for stage in range(num_stages):
        word = await directory.word(stage)
        if word is None or not word[0].is_last:
            return None
        first = first or RunOver(word[0].round, word[0].head)
    return first
