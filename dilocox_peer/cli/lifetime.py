"""How long a command runs: until it is done, or until SIGINT, SIGTERM, or the end of standard input asks it to leave."""

import asyncio
import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

import typer

INTERRUPTED = 130
END_S = 0.5  # that threads have to end by themselves


class Stop:
    """`wait()` returns the reason to leave. Signals reach the main process alone; its helpers run in other sessions."""

    def __init__(self, *, until_stdin_closes: bool) -> None:
        self._asked = asyncio.Event()
        self.reason = ""
        self.exit_code = 0
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self.ask, "interrupted", INTERRUPTED)
        loop.add_signal_handler(signal.SIGTERM, self.ask, "terminated", 0)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup's wish is kept
            loop.add_signal_handler(signal.SIGHUP, self.ask, "its terminal is gone", 0)
        if until_stdin_closes:
            # A thread, as asyncio cannot watch every kind of standard input; it ends with the process.
            threading.Thread(target=self._watch_stdin, args=(loop,), name="stdin", daemon=True).start()

    async def wait(self) -> str:
        await self._asked.wait()
        return self.reason

    def ask(self, reason: str, exit_code: int = 0) -> None:
        """Has `wait` return; the first to ask is heard. In the loop's thread."""
        if not self._asked.is_set():
            self.reason, self.exit_code = reason, exit_code
            self._asked.set()

    def _watch_stdin(self, loop: asyncio.AbstractEventLoop) -> None:
        # os.read, not sys.stdin: its lock, held by a daemon thread when the interpreter ends, would abort the process.
        while os.read(sys.stdin.fileno(), 4096):
            pass
        try:
            loop.call_soon_threadsafe(self.ask, "its supervisor is gone", 0)
        except RuntimeError:
            return  # the loop has ended by itself


class _NotWaitedFor(ThreadPoolExecutor):
    """asyncio's own threads (asyncio.to_thread), which asyncio.run waits for: one that reads a text of gigabytes, or hangs at a disk, cannot be
    cancelled. Whoever needs its end awaits it; `end` does not wait for the rest."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


def run_until_stopped(work: Callable[[Stop], Awaitable[None]], *, until_stdin_closes: bool) -> int:
    """Runs work(stop) in a new event loop; returns the exit code that `stop` asked for, 0 when work ended by itself."""

    async def main() -> int:
        stop = Stop(until_stdin_closes=until_stdin_closes)
        asyncio.get_running_loop().set_default_executor(_NotWaitedFor(thread_name_prefix="asyncio"))
        await work(stop)
        return stop.exit_code

    return asyncio.run(main())


def end(code: int) -> NoReturn:
    """Ends the process with that exit code, once everything is closed. A thread that is still at work (a micro-batch of minutes, a disk
    that hangs) is not waited for: what was agreed is on the disk, as it is for a process that is killed. Nor is the interpreter, which would take
    apart one by one all objects that torch and the rest have made, in which time nobody can insist."""

    def insist() -> None:
        time.sleep(END_S)
        os._exit(code)

    sys.stdout.flush()
    sys.stderr.flush()
    threading.Thread(target=insist, name="end", daemon=True).start()
    atexit.register(
        os._exit, code
    )  # comes after the threads that have ended by themselves, before what others registered
    raise typer.Exit(code)


@contextmanager
def interruptible() -> Iterator[None]:
    """For imports that take seconds: Ctrl-C in the block ends it as KeyboardInterrupt, whatever is made of it there.

    numpy and torch, when interrupted while they load, turn it into another error now and then, or swallow it.
    """
    before, interrupted = signal.getsignal(signal.SIGINT), False

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    if before is signal.SIG_IGN:  # whoever started us wants that
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception:
        if not interrupted:
            raise
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupted:
        raise KeyboardInterrupt
