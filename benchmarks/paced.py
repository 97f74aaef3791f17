"""A peer that computes no faster than at a pace: `python benchmarks/paced.py --pace SECONDS COMMAND...`, as `dilocox-peer COMMAND...`.

A micro-batch takes SECONDS, the computing of it included: on a machine that is shared with what attacks or sends, a peer that computes all day takes the
processors that the others need, as nobody's accelerator would.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

from dilocox_peer.__main__ import main


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
    assert sys.argv[1:2] == ["--pace"], __doc__
    slow_down(float(sys.argv[2]))
    del sys.argv[1:3]
    main()
