"""Where the program begins: `dilocox-peer`, and `python -m dilocox_peer` where the script is not on the PATH.

Imports nothing but the standard library before its `try`: the command line takes some tenths of a second to be imported,
and who presses Ctrl-C meanwhile is owed no traceback.
"""

import os
import signal
import sys


def main() -> None:
    """Runs the command line. Ends with 130 after Ctrl-C, and as by the signal after SIGTERM, when all is cleaned up."""
    terminated = False

    def terminate(_number: int, _frame: object) -> None:
        nonlocal terminated
        terminated = True
        raise KeyboardInterrupt  # the way on which everything is cleaned up

    try:
        signal.signal(signal.SIGTERM, terminate)  # until a command that leaves in order has a handler of its own
        from dilocox_peer.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        if terminated:  # to whoever sent it, we end as by the signal
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
