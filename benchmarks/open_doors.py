"""A peer whose doorkeeper lets everybody ask for everything: what is behind the doors is fuzzed through it (fuzz.py).

python benchmarks/open_doors.py [--pace SECONDS] COMMAND...      as `dilocox-peer COMMAND...`

With --pace it computes no faster than that (paced.py): else less of what is sent arrives.
"""

import sys

from paced import slow_down

from dilocox_peer.__main__ import main
from dilocox_peer.network import doorkeeper


def open_wide() -> None:
    """Budgets as they were of peers before strangers had fewer, and nobody is ever turned away."""
    most = doorkeeper.Budget(1e6, 1e9)
    for kind, budgets in doorkeeper.ALLOWED.items():
        doorkeeper.ALLOWED[kind] = doorkeeper.Budgets(budgets.member, budgets.member, most, most)
    doorkeeper.BANNED_AT = doorkeeper.PLACE_BANNED_AT = float("inf")


if __name__ == "__main__":
    open_wide()
    if sys.argv[1:2] == ["--pace"]:
        slow_down(float(sys.argv[2]))
        del sys.argv[1:3]
    main()
