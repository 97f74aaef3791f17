"""One peer of stalling.py whose compute is emulated: `emulated_member.py SECONDS MODE ROUND` and then what `dilocox-peer` takes. Not run by hand.

On one machine eight peers take each other's processors, and hostile ones theirs from the others; at home they do not. A micro-batch
that sleeps leaves them to what the rounds cost: contributions, messages and merges are real. MODE, ROUND: as of tests/hostile/member.py.
"""

import sys

from headline_worker import emulate

from tests.hostile.member import turn


def main() -> None:
    batch_s, mode, after_round = sys.argv[1:4]
    del sys.argv[1:4]
    emulate(float(batch_s), None)
    turn(mode, int(after_round))
    from dilocox_peer.__main__ import main as join

    join()


if __name__ == "__main__":
    main()
