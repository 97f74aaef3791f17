"""How a peer leaves: what ends beside its goodbyes, for how long it is waited for, and whose memory goes back, then or before."""

import asyncio
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dilocox_peer.compression.codec import uniform_policy
from dilocox_peer.config import preset
from dilocox_peer.errors import RunUnreachable
from dilocox_peer.events import Failed
from dilocox_peer.model.inner import InnerOptimizer
from dilocox_peer.model.stage import build_stage
from dilocox_peer.peer import farewell
from dilocox_peer.peer.farewell import Parting, say_goodbye
from dilocox_peer.peer.training.given_back import LEAST_BYTES, give_back, give_back_by_piece
from dilocox_peer.peer.training.outer import OuterOptimizer, OuterSettings, first_state
from dilocox_peer.types import Layout, sha256

linux = pytest.mark.skipif(sys.platform != "linux", reason="madvise as Linux has it")
LARGE = LEAST_BYTES // 4


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@linux
def test_the_memory_of_large_vectors_goes_back_and_that_of_small_ones_stays():
    large, small = torch.ones(4 * LARGE), torch.ones(1000)
    before = resident_bytes()
    given = give_back([large, small, large])  # named twice: given once
    assert 4 * LEAST_BYTES - 8192 <= given <= 4 * LEAST_BYTES
    assert before - resident_bytes() > 3 * LEAST_BYTES
    assert not large[4096:-4096].any()
    assert small.all()


@linux
def test_only_whole_pages_of_a_vector_are_given_back():
    around = torch.ones(3 * LARGE)
    inner = around[LARGE + 1 : 2 * LARGE + 2]
    give_back([inner])
    assert around[: LARGE + 1].all()
    assert around[2 * LARGE + 2 :].all()


@linux
def test_the_memory_of_a_vector_goes_back_before_it_is_freed():
    large = torch.ones(4 * LARGE)
    before = resident_bytes()
    assert 4 * LEAST_BYTES - 8192 <= give_back_by_piece(large) <= 4 * LEAST_BYTES
    assert before - resident_bytes() > 3 * LEAST_BYTES
    assert not large[4096:-4096].any()


@pytest.mark.parametrize(
    "of",
    [lambda: torch.ones(4 * LARGE)[LARGE:], lambda: torch.from_numpy(np.ones(4 * LARGE, np.float32)), lambda: torch.ones(1000)],
    ids=["part", "another's", "small"],
)  # fmt: skip
def test_memory_that_others_may_hold_stays(of):
    vector = of()
    assert give_back_by_piece(vector) == 0
    assert vector.all()


@pytest.mark.parametrize(
    ("changes", "bytes_each"),
    [({"optimizer": "adamw"}, 8), ({"optimizer": "adamw", "moments": "bfloat16"}, 4), ({"optimizer": "muon"}, 4)],
)
def test_every_moment_that_is_kept_is_named(changes, bytes_each):
    """bytes_each: of a parameter; Muon has one moment of hidden matrices, and AdamW's two of the rest."""
    manifest = preset("tiny", inner=changes)
    model = build_stage(manifest).model
    optimizer = InnerOptimizer(model, manifest.inner)
    model.flat_grad_N.fill_(1e-3)
    optimizer.step(micro_batches=1, share=1.0)
    kept = sum(each.numel() * each.element_size() for each in optimizer.moments())
    assert kept >= bytes_each * model.layout.num_elements


def test_a_loop_names_its_residual_and_what_it_has_offered():
    layout = Layout.of([("a", (20, 10))])
    state = first_state(layout, torch.zeros(200), head=sha256(b"first"))
    outer = OuterOptimizer(OuterSettings(0.7, 0.6, uniform_policy("int4")), state)
    assert [each is outer.residual_N for each in outer.vectors()] == [True]
    local = torch.ones(200)
    outer.offer(local, 1)
    assert outer.vectors()[1].data_ptr() == local.data_ptr()


class Told:
    """The directory, the transport and the rounds of a peer that nobody answers."""

    def __init__(self):
        self.said: list[Any] = []
        self.machine = SimpleNamespace(round=3)

    def post(self, what):
        self.said.append(type(what).__name__)

    async def drained(self):
        self.said.append("drained")

    async def leave(self, *, timeout_s):
        self.said.append("lease")


async def test_goodbye_is_said_though_nobody_takes_the_last_round_over(monkeypatch):
    async def never(*_):
        await asyncio.Event().wait()

    monkeypatch.setattr(farewell, "hand_over", never)
    monkeypatch.setattr(farewell, "HAND_OVER_S", 0.0)
    told: Any = Told()
    await say_goodbye(0, told.machine, told, told, told)
    assert told.said == ["Leaving", "lease", "drained"]


async def test_goodbye_is_said_though_the_run_cannot_be_reached(monkeypatch):
    async def unreachable(*_):
        raise RunUnreachable("nobody is there")

    monkeypatch.setattr(farewell, "hand_over", unreachable)
    told: Any = Told()
    await say_goodbye(0, told.machine, told, told, told)
    assert told.said == ["Leaving", "lease", "drained"]


async def test_what_ends_is_begun_once_and_goes_on_while_its_owner_does_something_else():
    began, goes_on, calls = threading.Event(), threading.Event(), list[float]()

    def stop(timeout_s):
        calls.append(timeout_s)
        began.set()
        assert goes_on.wait(10)

    ending = Parting(stop, 2.0, "", lambda event: None)
    ending.begin()
    await asyncio.to_thread(began.wait, 10)
    ending.begin()
    goes_on.set()
    await ending.over()
    await ending.over()
    assert calls == [2.0]


async def test_what_does_not_end_in_its_time_is_told_each_time_that_it_is_waited_for():
    def stop(timeout_s):
        raise TimeoutError(f"still at work after {timeout_s} s")

    events: list[Any] = []
    await Parting(stop, 1.5, "; it is not waited for", events.append).over()
    assert events == [Failed("leaving", "still at work after 1.5 s; it is not waited for")]
