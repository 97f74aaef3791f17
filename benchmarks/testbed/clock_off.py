"""dilocox-peer on a computer whose clock is off: `python benchmarks/testbed/clock_off.py SECONDS` and then what `dilocox-peer` takes.

The process that asks Python's clock is the one that is off; p2pd's own clock is right, and nobody asks it.
"""

import sys
import time

SECONDS = float(sys.argv[1])
del sys.argv[1]

_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + SECONDS
time.time_ns = lambda: _time_ns() + int(1e9 * SECONDS)

from dilocox_peer.__main__ import main  # noqa: E402  after the clock is set

main()
