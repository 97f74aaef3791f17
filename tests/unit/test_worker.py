"""The thread that trains: what it is asked goes in order, what is urgent before that."""

import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from dilocox_peer.peer.training.worker import Worker

DEADLINE_S = 20.0


@pytest.fixture
def worker() -> Iterator[Worker]:
    failures: list[str] = []
    made = Worker("test", failures.append, num_threads=1)
    made.start()
    yield made
    made.ask_to_stop("the test is over")
    made.join(DEADLINE_S)
    assert failures == []


def test_jobs_go_in_order_also_behind_one_that_waits(worker: Worker):
    done: list[str] = []
    gate: Future[None] = Future()
    worker.submit(lambda: done.append("first"), after=gate)
    second = worker.submit(lambda: done.append("second"))
    assert not second.done()
    gate.set_result(None)
    second.result(DEADLINE_S)
    assert done == ["first", "second"]


def test_a_pause_does_not_wait_for_a_merge_that_is_still_being_decoded(worker: Worker):
    """The merge waits for the outer thread, for seconds with a large model, while training goes on."""
    done: list[str] = []
    decoded: Future[None] = Future()
    merged = worker.submit(lambda: done.append("merge"), after=decoded)
    worker.submit(lambda: done.append("pause"), is_urgent=True).result(DEADLINE_S)
    assert done == ["pause"]
    decoded.set_result(None)
    merged.result(DEADLINE_S)
    assert done == ["pause", "merge"]


def test_urgent_ones_keep_their_order_and_wait_for_the_piece_of_work_at_hand():
    begun, may_end = threading.Event(), threading.Event()
    done: list[str] = []

    def train() -> bool:
        begun.set()
        assert may_end.wait(DEADLINE_S)
        return False

    worker = Worker("test", done.append, num_threads=1, idle=train)
    worker.start()
    try:
        assert begun.wait(DEADLINE_S)
        late = worker.submit(lambda: done.append("in order"))
        worker.submit(lambda: done.append("pause"), is_urgent=True)
        worker.submit(lambda: done.append("resume"), is_urgent=True)
        assert done == []
        may_end.set()
        late.result(DEADLINE_S)
        assert done == ["pause", "resume", "in order"]
    finally:
        may_end.set()
        worker.ask_to_stop("the test is over")
        worker.join(DEADLINE_S)


@pytest.mark.skipif(sys.platform != "linux", reason="niceness is a thread's on Linux alone")
def test_who_trains_gives_way_and_so_do_the_threads_that_torch_starts_for_it():
    failures: list[str] = []
    nice = Worker("test", failures.append, num_threads=2, niceness=5)
    nice.start()
    try:
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert nice.submit(niceness).result(DEADLINE_S) == min(own + 5, 19)
        assert nice.submit(_of_a_thread_started_here).result(DEADLINE_S) == min(own + 5, 19)
        assert niceness() == own
    finally:
        nice.ask_to_stop("the test is over")
        nice.join(DEADLINE_S)


def niceness() -> int:
    """Of the thread that asks."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def _of_a_thread_started_here() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(niceness()))
    thread.start()
    thread.join(DEADLINE_S)
    return found[0]


@pytest.mark.parametrize("num_threads", [0, 1 << 40])
def test_a_thread_that_cannot_begin_says_so_and_refuses_what_waits(num_threads: int):
    failures: list[str] = []
    worker = Worker("test", failures.append, num_threads=num_threads)
    waiting = worker.submit(lambda: None)
    worker.start()
    worker.join(DEADLINE_S)
    [failure] = failures
    assert failure.startswith("test: ")
    assert isinstance(waiting.exception(DEADLINE_S), RuntimeError)
