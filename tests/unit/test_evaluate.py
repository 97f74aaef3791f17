"""The evaluator asks for as long as the run lasts."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dilocox_peer.cli import evaluate
from dilocox_peer.errors import RunUnreachable
from dilocox_peer.events import Event, Failed, RunComplete
from dilocox_peer.peer.training.outer import AnchorState, initial_state
from tests.cut_runs import corpus, manifest_of


class SilentDirectory:
    async def peers(self, stage: int) -> list[Any]:
        raise RunUnreachable("the directory gave no answer within 10 s")


def ask(*, is_down: bool) -> tuple[Any, list[Event]]:
    """What one question brings while the directory is silent, and what was told."""
    events: list[Event] = []
    unused: Any = None
    evaluator = evaluate._Evaluator(unused, unused, unused, (), (), events.append, None)
    return asyncio.run(evaluator._state(SimpleNamespace(is_down=is_down), SilentDirectory(), 0, {}, unused)), events


def test_a_directory_that_does_not_answer_once_is_asked_again():
    state, events = ask(is_down=False)
    assert state is None
    assert [type(event) for event in events] == [Failed]


def test_the_end_of_our_own_network_daemon_ends_it():
    with pytest.raises(RunUnreachable):
        ask(is_down=True)


def test_the_last_round_is_not_fetched_again_and_again_while_another_stage_is_missing(monkeypatch: pytest.MonkeyPatch):
    """Stage 0 has its last state at once, whole; without a pause it would be asked for as fast as the network can."""
    manifest = manifest_of(2)
    asked: list[str] = []
    pause = asyncio.sleep

    async def slept(seconds: float) -> None:
        asked.append(f"slept {seconds}")
        await pause(0)

    async def state_of(_transport: Any, _directory: Any, stage: int, _request: Any, _layout: Any) -> AnchorState | None:
        asked.append(f"stage {stage}")
        is_missing = stage == 1 and asked.count("stage 1") == 1
        return None if is_missing else replace(initial_state(manifest, stage), round=1, is_final=True)

    unused: Any = None
    events: list[Event] = []
    evaluator = evaluate._Evaluator(unused, unused, unused, (), (), events.append, None)
    monkeypatch.setattr(evaluator, "_state", state_of)
    monkeypatch.setattr("dilocox_peer.pipeline.data.load_corpus", lambda *_, **__: corpus())
    monkeypatch.setattr(evaluate, "ROUND_BYTES", 512)
    monkeypatch.setattr(evaluate, "FINAL_BYTES", 512)
    monkeypatch.setattr(asyncio, "sleep", slept)
    asyncio.run(evaluator._follow(unused, unused, manifest))
    assert asked == ["stage 0", "stage 1", f"slept {evaluate.RETRY_S}", "stage 0", "stage 1"]
    assert sum(isinstance(event, RunComplete) for event in events) == 2
