"""Threads that share out pieces of work."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch

from dilocox_peer.compression.reader import PIECE
from dilocox_peer.files import PartFile
from dilocox_peer.peer.training.crew import Crew


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_every_job_is_done_once(num_threads):
    crew, done = Crew(num_threads), list[int]()
    crew.each(lambda job, _scratch: done.append(job), range(100))
    assert sorted(done) == list(range(100))
    crew.each(lambda job, _scratch: done.append(job), [])
    crew.stop()


def test_two_threads_work_at_the_same_time_and_each_in_its_own_scratch():
    crew, met = Crew(2), threading.Barrier(2)
    vectors: list[torch.Tensor] = []

    def meet(_job, scratch):
        met.wait(10)
        vectors.append(scratch.of(3)[0])

    crew.each(meet, range(2))
    assert vectors[0].data_ptr() != vectors[1].data_ptr()
    assert len(vectors[0]) == 3 <= PIECE
    crew.stop()


def test_what_fails_is_raised_and_ends_the_rest():
    crew, done = Crew(2), list[int]()

    def work(job, _scratch):
        if job == 3:
            raise ValueError("the third")
        done.append(job)

    with pytest.raises(ValueError, match="the third"):
        crew.each(work, range(10_000))
    assert len(done) < 9_999
    crew.each(work, [1])  # the next ones are done
    crew.stop()


def test_a_crew_that_is_stopped_while_helpers_are_asked_waits_for_those_that_are_at_work():
    """Else they write on when the file is closed, by a number that may be another file's."""
    crew, at_work, go_on, written = Crew(3), threading.Event(), threading.Event(), list[int]()

    def work(job, _scratch):
        at_work.set()
        go_on.wait(10)
        written.append(job)

    real, asked = ThreadPoolExecutor.submit, list[Any]()

    def submit(pool, do):
        if asked:  # the second helper, when the pool has just been shut down
            at_work.wait(10)
            raise RuntimeError("cannot schedule new futures after shutdown")
        asked.append(future := real(pool, do))
        wait_for = future.result

        def result(timeout: float | None = None) -> Any:
            go_on.set()  # the helper ends when it is waited for, not before
            return wait_for(timeout)

        future.result = result  # type: ignore[method-assign]
        return future

    try:
        with mock.patch.object(ThreadPoolExecutor, "submit", submit), pytest.raises(RuntimeError):
            crew.each(work, range(4))
        assert written, "it has left a helper at work"
    finally:
        go_on.set()
        crew.stop()


def test_a_crew_that_is_stopped_before_it_began_begins_nothing():
    crew, done = Crew(2), list[int]()
    crew.stop()
    with pytest.raises(InterruptedError):
        crew.each(lambda job, _scratch: done.append(job), range(4))
    assert done == []


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_crew_that_is_stopped_ends_with_the_pieces_at_hand(num_threads):
    crew, done, is_stopped = Crew(num_threads), list[int](), threading.Event()

    def work(job, _scratch):
        done.append(job)
        if job == 5:
            crew.stop()
            is_stopped.set()
        elif job > 5:  # else all the others may be done before the thread that stops it has its turn again
            is_stopped.wait(10)

    with pytest.raises(InterruptedError):
        crew.each(work, range(10_000))
    assert len(done) < 100
    with pytest.raises(InterruptedError):
        crew.require_going()


@pytest.mark.parametrize("end", ["discard", "finish"])
def test_what_is_written_to_a_file_that_was_closed_goes_to_no_other(tmp_path, end):
    part = PartFile(tmp_path / "anchor", 8)
    getattr(part, end)()
    with (tmp_path / "journal").open("wb"), pytest.raises(OSError, match="descriptor"):
        part.write(0, b"a piece")
    assert (tmp_path / "journal").read_bytes() == b""
