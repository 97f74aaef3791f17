"""Threads that share out pieces of work on long vectors.

Which thread does which piece changes nothing: each writes to a part of its own, and its arithmetic depends on that part alone.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from dilocox_peer.compression.reader import PIECE

J = TypeVar("J")


@dataclass(frozen=True, slots=True)
class Scratch:
    """One thread's vectors of PIECE elements, float32."""

    vectors: tuple[Tensor, ...] = field(default_factory=lambda: tuple(torch.empty(PIECE) for _ in range(4)))

    def of(self, num_elements: int) -> tuple[Tensor, ...]:
        """Their beginnings, so long."""
        return tuple(vector[:num_elements] for vector in self.vectors)


class Crew:
    """num_threads, the caller's among them. `each` is for one caller at a time."""

    def __init__(self, num_threads: int = 1) -> None:
        assert num_threads > 0, f"{num_threads} threads"
        self._helpers = num_threads - 1
        self._pool: ThreadPoolExecutor | None = None
        self._starting = threading.Lock()  # a pool is not made, nor given work, while it is stopped
        self._scratch = threading.local()
        self._is_stopped = False

    def each(self, do: Callable[[J, Scratch], object], jobs: Iterable[J]) -> None:
        """Does every job, and returns when all are done. Raises what the first that failed raised; no job is begun after that.
        Raises InterruptedError once `stop` was called."""
        waiting, lock, failures = iter(jobs), threading.Lock(), list[BaseException]()

        def work() -> None:
            scratch = self._own_scratch()
            for job in _taken(waiting, lock):
                if failures:
                    return
                try:
                    self.require_going()
                    do(job, scratch)
                except BaseException as error:  # told to the caller, in whose thread it is raised
                    failures.append(error)
                    return

        helping = list[Future[None]]()
        try:
            for _ in range(self._helpers):
                helping.append(self._submit(work))
            work()
        except BaseException as error:
            failures.append(error)  # helpers that are at work end with the piece at hand
        for each in helping:  # none goes on once this has ended: what it writes to may be another's then
            each.result()
        if failures:
            raise failures[0]

    def require_going(self) -> None:
        """Raises InterruptedError once `stop` was called."""
        if self._is_stopped:
            raise InterruptedError("the trainer was stopped")

    def stop(self) -> None:
        """Any thread: what is under way ends with the pieces at hand, in InterruptedError; nothing can be done any more."""
        with self._starting:
            self._is_stopped = True
            if self._pool is not None:
                self._pool.shutdown(wait=False)

    def _submit(self, work: Callable[[], None]) -> Future[None]:
        """Raises InterruptedError once `stop` was called."""
        with self._starting:
            self.require_going()
            if self._pool is None:
                self._pool = ThreadPoolExecutor(
                    self._helpers,
                    thread_name_prefix="dilocox-outer-helper",
                    initializer=torch.set_num_threads,
                    initargs=(1,),
                )
            return self._pool.submit(work)

    def _own_scratch(self) -> Scratch:
        scratch: Scratch | None = getattr(self._scratch, "own", None)
        if scratch is None:
            scratch = self._scratch.own = Scratch()
        return scratch


def _taken(waiting: Iterator[J], lock: threading.Lock) -> Iterator[J]:
    """What nobody else has taken."""
    while True:
        with lock:
            try:
                job = next(waiting)
            except StopIteration:
                return
        yield job
