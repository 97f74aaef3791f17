"""Where the program begins: `dilocox-peer`, and `python -m dilocox_peer` where the script is not on the PATH.

Imports nothing but the standard library before its `try`: the command line takes some tenths of a second to be imported,
and who presses Ctrl-C meanwhile is owed no traceback.
"""

import os
import signal
import sys


def main() -> None:
    """Runs the command line. Ends with 130 after Ctrl-C, and as by the signal after SIGTERM and SIGHUP, when all is cleaned up."""
    ended_by: int | None = None

    def terminate(number: int, _frame: object) -> None:
        nonlocal ended_by
        ended_by = number
        # Of a terminal that closes it comes twice, from the shell and from the system.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        raise KeyboardInterrupt  # the way on which everything is cleaned up

    try:
        signal.signal(signal.SIGTERM, terminate)  # until a command that leaves in order has a handler of its own
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup's wish is kept
            signal.signal(signal.SIGHUP, terminate)
        from dilocox_peer.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        if ended_by is not None:  # to whoever sent it, we end as by the signal
            signal.signal(ended_by, signal.SIG_DFL)
            os.kill(os.getpid(), ended_by)


if __name__ == "__main__":
    main()
