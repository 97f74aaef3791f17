"""Stages in one process each with its real linkd between them: trainer, conveyor, scheduler, sockets."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch

from dilocox_peer.events import Event, NeighbourLinked, NeighbourUnlinked
from dilocox_peer.events_of_health import LinkProcessEnded
from dilocox_peer.model.activations import BodyFormat
from dilocox_peer.peer.links.conveyor import Conveyor
from dilocox_peer.peer.links.dialling import LinkAddress
from dilocox_peer.peer.training.outer import initial_state
from dilocox_peer.peer.training.trainer import Trainer
from dilocox_peer.pipeline.turnstile import Delay, at_once
from dilocox_peer.signing import SigningKey
from tests.cut_runs import corpus, manifest_of, one_model
from tests.shell.commands import free_port
from tests.shell.conftest import stands_still

DEADLINE_S = 60.0
INCARNATION = 7


def linkds() -> set[int]:
    """The linkds of this process."""
    found = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it was killed a moment ago
            if "dilocox_peer.network.linkd" in child.cmdline():
                found.add(child.pid)
    return found


class Peer:
    """One stage's trainer and conveyor. key: None for one of the seed's own."""

    def __init__(
        self, manifest, stage: int, *, seed: int, limit: int | None, pace=at_once, pace_in=at_once, key=None
    ) -> None:
        self.key = key or SigningKey(bytes([seed]) * 32)
        self.events: list[Event] = []
        self.failures: list[str] = []
        self.conveyor = Conveyor(
            manifest, stage, key=self.key, run_id=manifest.run_id, incarnation=INCARNATION,
            link_seed=bytes([seed + 100]) * 32, listen=(f"/ip4/127.0.0.1/tcp/{free_port()}",), listener=self.events.append,
            on_failure=self.failures.append, pace=pace, pace_in=pace_in,
        )  # fmt: skip
        self.trainer = Trainer(
            manifest, peer=self.key.peer_id, incarnation=INCARNATION, corpus=corpus() if stage == 0 else None, stage=stage,
            bench=self.conveyor.bench, on_failure=self.failures.append, micro_batch_limit=limit if stage == 0 else None,
        )  # fmt: skip
        self.conveyor.bench.set_on_work(self.trainer.nudge)
        self.trainer.start(initial_state(manifest, stage))
        before = linkds()
        self.conveyor.start()
        (self.first_linkd,) = linkds() - before

    @property
    def address(self) -> LinkAddress:
        return LinkAddress(self.key.peer_id, self.conveyor.link_id, self.conveyor.addresses)

    def saw(self, kind: type[Event]) -> int:
        return sum(isinstance(event, kind) for event in self.events)

    def stop(self) -> None:
        self.conveyor.stop(5.0)
        self.trainer.stop(5.0)


@contextlib.contextmanager
def running(
    manifest,
    layout: list[int],
    *,
    limit: int | None,
    pace: Delay = at_once,
    pace_in: Callable[[int], Delay] = lambda stage: at_once,
) -> Iterator[list[list[Peer]]]:
    """layout: replicas of each stage. pace_in: of a stage."""
    stages: list[list[Peer]] = []
    seed = 1
    try:
        for stage, replicas in enumerate(layout):
            stages.append([])
            for _ in range(replicas):
                stages[stage].append(Peer(manifest, stage, seed=seed, limit=limit, pace=pace, pace_in=pace_in(stage)))
                seed += 1
        for stage, peers in enumerate(stages[:-1]):
            for peer in peers:
                peer.conveyor.set_neighbours(other.address for other in stages[stage + 1])
        yield stages
        assert [peer.failures for peers in stages for peer in peers] == [[]] * (seed - 1)
    finally:
        for peers in stages:
            for peer in peers:
                peer.stop()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    tick = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "not within the deadline"
        tick.wait(0.02)


@pytest.mark.parametrize("stages", [2, 3])
def test_stages_over_linkd_equal_one_model_after_20_steps(stages: int):
    manifest = manifest_of(stages)
    with running(manifest, [1] * stages, limit=80) as peers:
        origin = peers[0][0]
        wait_until(lambda: all(peer.trainer.progress().micro_batches == 80 for peers_ in peers for peer in peers_))
        loops: list[Any] = [peer.trainer.loop for (peer,) in peers]
        wait_until(lambda: all(loop.optimizer.steps_done == 20 for loop in loops))
        single = one_model(
            manifest_of(1), micro_batches=80, cut_like=manifest, origin=origin.key.peer_id, incarnation=INCARNATION
        )
        for loop in loops:
            model = loop.current
            for spec, start, stop in model.layout.spans():
                torch.testing.assert_close(
                    model.flat_N[start:stop].detach(), single[spec.name].flatten(), rtol=0, atol=1e-5, msg=spec.name
                )


def test_a_killed_linkd_is_started_again_and_every_micro_batch_is_counted_once():
    manifest = manifest_of(2, schedule="carry")
    with running(manifest, [1, 2], limit=400) as ((origin,), (later, _other)):
        wait_until(lambda: origin.trainer.progress().micro_batches > 20 and origin.saw(NeighbourLinked) == 2)
        os.kill(later.first_linkd, signal.SIGKILL)
        wait_until(lambda: origin.saw(NeighbourUnlinked) > 0)
        os.kill(origin.first_linkd, signal.SIGKILL)
        wait_until(lambda: origin.saw(NeighbourLinked) >= 4)
        wait_until(lambda: origin.trainer.progress().micro_batches == 400)
        assert origin.conveyor.status().micro_batches.completed == 400


def test_a_linkd_that_is_killed_in_its_start_is_started_once_more():
    with running(manifest_of(2), [1, 1], limit=60) as ((origin,), (later,)):
        wait_until(lambda: origin.trainer.progress().micro_batches > 5)
        known = {origin.first_linkd, later.first_linkd}
        os.kill(later.first_linkd, signal.SIGKILL)
        wait_until(lambda: bool(linkds() - known))
        for pid in linkds() - known:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: origin.trainer.progress().micro_batches == 60)

        def is_back() -> bool:
            told = [event.is_back for event in later.events if isinstance(event, LinkProcessEnded)]
            return told.count(False) == 2 and told[-1]

        wait_until(is_back)


def test_a_peer_of_a_later_stage_that_ends_is_replaced_by_the_other():
    manifest = manifest_of(3, schedule="carry")
    with running(manifest, [1, 2, 1], limit=300) as ((origin,), (first, second), (last,)):
        wait_until(lambda: origin.trainer.progress().micro_batches > 20 and last.saw(NeighbourLinked) == 2)
        os.kill(first.first_linkd, signal.SIGSTOP)  # silent, as a machine that lost its power is
        try:
            wait_until(lambda: stands_still(first.first_linkd))
            wait_until(lambda: origin.trainer.progress().micro_batches == 300)
        finally:
            os.kill(first.first_linkd, signal.SIGCONT)
        assert origin.conveyor.status().micro_batches.completed == 300
        assert second.trainer.progress().micro_batches > 0


def test_a_stranger_that_did_not_sign_its_greeting_is_not_heard():
    manifest = manifest_of(2)
    with running(manifest, [1, 1], limit=8) as ((origin,), (last,)):
        wait_until(lambda: origin.trainer.progress().micro_batches == 8)
        key = SigningKey(b"s" * 32)
        key.peer_id = origin.key.peer_id  # claims to be the origin, and signs with its own key
        stranger = Peer(manifest, 0, seed=50, limit=8, key=key)
        try:
            stranger.conveyor.set_neighbours([last.address])
            wait_until(lambda: any("did not sign" in event.line() for event in last.events))
            assert last.saw(NeighbourLinked) == 1
        finally:
            stranger.stop()


def test_bodies_wait_for_the_upload_limit_and_all_arrive():
    manifest = manifest_of(2, schedule="carry")
    asked: list[int] = []

    def pace(num_bytes: int) -> float:
        asked.append(num_bytes)
        return 0.02

    with running(manifest, [1, 1], limit=16, pace=pace) as ((origin,), (_last,)):
        wait_until(lambda: origin.trainer.progress().micro_batches == 16)
        assert len(asked) == 2 * 16  # every body once, in both directions
        assert origin.conveyor.status().micro_batches.resent == 0


def test_a_download_limit_is_asked_before_each_body_and_each_answer():
    manifest = manifest_of(2, schedule="carry")
    asked: dict[int, list[int]] = {0: [], 1: []}

    def pace_of(stage: int) -> Callable[[int], float]:
        def pace(num_bytes: int) -> float:
            asked[stage].append(num_bytes)
            return 0.02

        return pace

    with running(manifest, [1, 1], limit=16, pace_in=pace_of) as ((origin,), (last,)):
        wait_until(lambda: origin.trainer.progress().micro_batches == 16)
        body = BodyFormat.of(manifest)
        assert asked[0] == [body.hidden_bytes] * 16  # a gradient for each micro-batch it sends
        assert asked[1][:16] == [body.step_bytes] * 16  # before each grant, and perhaps the next one's place
        assert len(asked[1]) <= 17
        assert origin.conveyor.status().micro_batches.resent == 0
        wait_until(lambda: last.conveyor.status().wire_bytes_received >= 16 * body.step_bytes)


def test_a_paused_peer_of_a_later_stage_sends_its_callers_to_the_other():
    manifest = manifest_of(2, schedule="carry")
    with running(manifest, [1, 2], limit=200) as ((origin,), (first, second)):
        wait_until(lambda: origin.trainer.progress().micro_batches > 20 and origin.saw(NeighbourLinked) == 2)
        first.trainer.hold("pause").result(DEADLINE_S)
        done_before = first.conveyor.status().micro_batches.executed
        wait_until(lambda: origin.trainer.progress().micro_batches == 200)
        assert first.conveyor.status().micro_batches.executed <= done_before + 1  # what it was at when it was paused
        assert origin.conveyor.status().micro_batches.completed == 200
        assert second.trainer.progress().micro_batches > 0
