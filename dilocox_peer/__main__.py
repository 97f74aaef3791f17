"""Where the program begins: `dilocox-peer`, and `python -m dilocox_peer` where the script is not on the PATH.

Imports nothing but the standard library before its `try`: the command line takes some tenths of a second to be imported,
and who presses Ctrl-C meanwhile is owed no traceback.
"""

import atexit
import os
import signal
import sys
from contextlib import suppress


def main() -> None:
    """Runs the command line. Ends with 130 after Ctrl-C, and as by the signal after SIGTERM and SIGHUP, when all is cleaned up."""
    ended_by: int | None = None
    is_interrupted = False

    def keep_exit_code() -> None:
        # Python remembers a KeyboardInterrupt that an exec() was left by, as there are in modules that are imported, and under `-m`
        # ends by SIGINT for it after all, whoever has caught it.
        if is_interrupted:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(130)

    def terminate(number: int, _frame: object) -> None:
        nonlocal ended_by
        ended_by = number
        # Of a terminal that closes it comes twice, from the shell and from the system.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        raise KeyboardInterrupt  # the way on which everything is cleaned up

    atexit.register(keep_exit_code)  # the first, so that it comes after what others register
    try:
        signal.signal(signal.SIGTERM, terminate)  # until a command that leaves in order has a handler of its own
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup's wish is kept
            signal.signal(signal.SIGHUP, terminate)
        from dilocox_peer.cli.main import main as run

        run()
    except KeyboardInterrupt:
        is_interrupted = True
        sys.exit(130)
    finally:
        if ended_by is not None:  # to whoever sent it, we end as by the signal
            signal.signal(ended_by, signal.SIG_DFL)
            os.kill(os.getpid(), ended_by)


if __name__ == "__main__":
    main()
