"""A peer whose doorkeeper lets everybody ask for everything: what is behind the doors is fuzzed through it (fuzz.py).

python benchmarks/open_doors.py [--pace SECONDS] COMMAND...      as `dilocox-peer COMMAND...`

With --pace a micro-batch takes SECONDS, the computing of it included: on a machine shared with what sends, a peer that computes all
day takes the processors that senders and its own loop need, and less of what is sent arrives.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

from dilocox_peer.__main__ import main
from dilocox_peer.network import doorkeeper


def open_wide() -> None:
    """Budgets as they were of peers before strangers had fewer, and nobody is ever turned away."""
    most = doorkeeper.Budget(1e6, 1e9)
    for kind, budgets in doorkeeper.ALLOWED.items():
        doorkeeper.ALLOWED[kind] = doorkeeper.Budgets(budgets.member, budgets.member, most, most)
    doorkeeper.BANNED_AT = doorkeeper.PLACE_BANNED_AT = float("inf")


def slow_down(batch_s: float) -> None:
    """Micro-batches of this process are computed, and then slept through until batch_s have passed."""
    from dilocox_peer.model.passes import Passes
    from dilocox_peer.model.stage import Stage

    def paced(compute: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            until = time.perf_counter() + seconds
            found = compute(*arguments, **named)
            time.sleep(max(0.0, until - time.perf_counter()))
            return found

        return run

    for owner, name, seconds in (
        (Stage, "train_micro_batch", batch_s),
        (Passes, "turn", batch_s),
        (Passes, "begin", batch_s / 3),
        (Passes, "backward", 2 * batch_s / 3),
    ):
        setattr(owner, name, paced(getattr(owner, name), seconds))


if __name__ == "__main__":
    open_wide()
    if sys.argv[1:2] == ["--pace"]:
        slow_down(float(sys.argv[2]))
        del sys.argv[1:3]
    main()
