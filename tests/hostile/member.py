"""A real peer that turns hostile: `python -m tests.hostile.member MODE ROUND` and then what `dilocox-peer` takes.

It is honest until it has certified ROUND rounds, counted from when it came in; then it is one of machines.MODES, or "honest".
"""

import asyncio
import sys
from typing import Any

from dilocox_peer.peer import averaging
from dilocox_peer.peer.averaging import Averaging
from dilocox_peer.peer.network.transport import Reply
from dilocox_peer.types import PeerId

from .machines import MODES

STALL_S = 3600.0


def turn(mode: str, after_round: int) -> None:
    """What this process makes of its rounds from now on."""
    if mode == "honest":
        return

    def has_turned(machine: Any) -> bool:
        return bool(machine.round >= after_round)

    averaging.RoundMachine = type("Turned", (MODES[mode],), {"has_turned": property(has_turned)})  # type: ignore[misc]
    if mode == "hangs":
        serve = Averaging._serve_blob

        async def hang(self: Averaging, peer: PeerId, header: dict[str, Any]) -> Reply:
            if has_turned(self.machine):
                await asyncio.sleep(STALL_S)
            return await serve(self, peer, header)

        Averaging._serve_blob = hang  # type: ignore[method-assign]


if __name__ == "__main__":
    given_mode, given_round = sys.argv[1:3]
    del sys.argv[1:3]
    turn(given_mode, int(given_round))
    from dilocox_peer.__main__ import main

    main()
