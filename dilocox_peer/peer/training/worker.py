"""One thread that runs jobs in order, and something of its own while there are none."""

import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

MAX_CALLS = 64
"""Calls that may wait in a queue; a session has a handful at most, so more is its fault and is refused."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Job:
    run: Callable[[], Any]
    future: "Future[Any]"
    after: "Future[Any] | None"
    is_fatal: bool
    is_urgent: bool


class Worker:
    """One thread that runs jobs in order, each when the Future it comes after is done (a job after one that failed fails
    with it, unrun); and `idle` while none is ready.

    niceness: beside the process's own. idle: does one piece of work; False: nothing to do until a job has changed something, or until a nudge. A job's failure goes to its
    Future; that of idle, or of a fatal job, ends the thread and is reported.
    """

    def __init__(
        self,
        name: str,
        on_failure: Callable[[str], None],
        *,
        num_threads: int,
        niceness: int = 0,
        idle: Callable[[], bool] = lambda: False,
    ) -> None:
        self._on_failure = on_failure
        self._num_threads = num_threads
        self._niceness = niceness
        self._idle = idle
        self._wake = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._stop_reason: str | None = None
        self._is_nudged = False
        self._thread = threading.Thread(target=self._run, name=name)

    @property
    def is_full(self) -> bool:
        return len(self._jobs) >= MAX_CALLS

    def start(self) -> None:
        self._thread.start()

    def submit(
        self,
        run: Callable[[], T],
        *,
        after: "Future[Any] | None" = None,
        is_fatal: bool = False,
        is_urgent: bool = False,
    ) -> "Future[T]":
        """The Future of run's result. Once asked to stop it fails at once with RuntimeError.

        is_urgent: it goes before all that wait, behind those as urgent, so it waits for what is being done alone: one job or
        one piece of `idle`.
        """
        assert not (is_urgent and after is not None), "what is urgent waits for nothing"
        future: Future[T] = _uncancellable()
        with self._wake:
            if self._stop_reason is not None:
                future.set_exception(RuntimeError(self._stop_reason))
                return future
            job = _Job(run, future, after, is_fatal, is_urgent)
            self._jobs.insert(sum(each.is_urgent for each in self._jobs) if is_urgent else len(self._jobs), job)
            self._wake.notify()
        if after is not None:
            after.add_done_callback(lambda _: self._notify())
        return future

    def nudge(self) -> None:
        """`idle` may have something to do again; any thread."""
        with self._wake:
            self._is_nudged = True
            self._wake.notify()

    def ask_to_stop(self, reason: str) -> None:
        with self._wake:
            self._stop_reason = self._stop_reason or reason
            self._wake.notify()

    def join(self, timeout_s: float) -> None:
        if self._thread.ident is None or self._thread is threading.current_thread():
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"thread {self._thread.name} is still at work after {timeout_s:.1f} s")

    def _run(self) -> None:
        try:
            self._give_way()
            torch.set_num_threads(self._num_threads)  # holds for this thread only
            may_idle = True
            while self._stop_reason is None:
                job = self._next_job(may_wait=not may_idle)
                if job is not None:
                    self._carry_out(job)
                    may_idle = True
                    del job  # and with it what its Future holds: vectors of the stage
                elif self._stop_reason is None:
                    may_idle = self._idle()
        except Exception as error:  # the boundary of the thread: whatever it was, say it and stop
            self._on_failure(f"{self._thread.name}: {type(error).__name__}: {error}")
        finally:
            self.ask_to_stop("the trainer was stopped")
            self._refuse_waiting()

    def _give_way(self) -> None:
        """On Linux, where each thread has a niceness, which those that torch starts from it inherit."""
        if self._niceness and sys.platform == "linux":
            niceness = min(os.getpriority(os.PRIO_PROCESS, 0) + self._niceness, 19)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)

    def _next_job(self, *, may_wait: bool) -> _Job | None:
        with self._wake:
            while self._stop_reason is None:
                if self._jobs and (self._jobs[0].after is None or self._jobs[0].after.done()):
                    return self._jobs.popleft()
                if not may_wait or self._is_nudged:
                    self._is_nudged = False
                    return None
                self._wake.wait()  # every change of what is asked above notifies
        return None

    def _carry_out(self, job: _Job) -> None:
        failed = job.after.exception() if job.after is not None else None
        if failed is not None:
            job.future.set_exception(failed)
            return
        try:
            result = job.run()
        except Exception as error:
            job.future.set_exception(error)
            if job.is_fatal:
                raise
        else:
            job.future.set_result(result)

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _refuse_waiting(self) -> None:
        with self._wake:
            waiting = list(self._jobs)
            self._jobs.clear()
        for job in waiting:
            job.future.set_exception(RuntimeError(self._stop_reason))


def _uncancellable() -> "Future[Any]":
    """A Future that is under way: whoever stops waiting for a call does not undo half of it."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future
