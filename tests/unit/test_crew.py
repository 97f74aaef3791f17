"""Threads that share out pieces of work."""

import threading

import pytest
import torch

from dilocox_peer.compression.reader import PIECE
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


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_crew_that_is_stopped_ends_with_the_pieces_at_hand(num_threads):
    crew, done = Crew(num_threads), list[int]()

    def work(job, _scratch):
        done.append(job)
        if job == 5:
            crew.stop()

    with pytest.raises(InterruptedError):
        crew.each(work, range(10_000))
    assert len(done) < 100
    with pytest.raises(InterruptedError):
        crew.require_going()
