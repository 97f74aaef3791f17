"""The evaluator looks for as long as the run lasts."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dilocox_peer.cli import evaluate
from dilocox_peer.cli.flags import EvaluateFlags
from dilocox_peer.config import preset
from dilocox_peer.errors import RunUnreachable
from dilocox_peer.events import Event, Failed
from dilocox_peer.peer.state import survey
from tests.virtual_loop import run_virtually


class Unreachable:
    """A survey while the directory gives no answer; after `looks` of them the test is over."""

    annals = SimpleNamespace(is_over=False)

    def __init__(self, looks: int) -> None:
        self._looks = looks

    async def look(self) -> None:
        self._looks -= 1
        if self._looks < 0:
            raise KeyboardInterrupt
        raise RunUnreachable("the directory gave no answer within 10 s")

    def states(self) -> list[Any]:
        return []


def look(monkeypatch: pytest.MonkeyPatch, *, is_down: bool) -> list[Event]:
    """What is told while the directory is silent."""
    events: list[Event] = []
    unused: Any = None
    monkeypatch.setattr(evaluate, "LOOK_S", 0.0)
    evaluator = evaluate.Evaluator(EvaluateFlags(link=""), unused, unused, events.append)
    found: Any = Unreachable(2)
    transport: Any = SimpleNamespace(is_down=is_down)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(evaluator.keep_looking([found], evaluate.Anchors([]), transport))
    return events


def test_a_directory_that_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch):
    assert [type(event) for event in look(monkeypatch, is_down=False)] == [Failed, Failed]


def test_the_end_of_our_own_network_daemon_ends_it(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(RunUnreachable):
        look(monkeypatch, is_down=True)


async def test_states_that_nobody_came_to_evaluate_are_passed_over_and_the_last_are_not():
    first, second, last = ([object()] for _ in range(3))
    anchors = evaluate.Anchors(first)  # type: ignore[arg-type]
    assert await anchors.next() == (tuple(first), False)
    anchors.put(second, is_last=False)  # type: ignore[arg-type]
    anchors.put(last, is_last=True)  # type: ignore[arg-type]
    assert await anchors.next() == (tuple(last), True)


async def test_what_ends_the_looks_ends_the_evaluator_as_it_is(tmp_path: Path) -> None:
    (text := tmp_path / "text.txt").write_text("hello world, this is a text.\n" * 4000)
    unused: Any = None
    flags = EvaluateFlags(link="", data=(text,), home=tmp_path)
    evaluator = evaluate.Evaluator(flags, unused, unused, lambda _event: None)

    async def look(_anchors: evaluate.Anchors) -> None:
        raise RunUnreachable("our own p2pd is gone")

    with pytest.raises(RunUnreachable):  # no group of one: it is a line and an exit code
        await evaluator.evaluate(preset("tiny", data={"source": "files"}), look)


def final_model(monkeypatch: pytest.MonkeyPatch, *, fetch_s: float, fails: int) -> tuple[tuple[Any, ...], bool]:
    """What is evaluated last, where the first so many fetches of the final state end with nothing after so long."""
    tip, left = (SimpleNamespace(round=9),), [None] * fails

    async def look_at_all(_found: object) -> None:
        pass

    async def common_tip(_found: object) -> Any:
        return tip

    async def fetch_newest(_found: object, wanted: Any) -> Any:
        await asyncio.sleep(fetch_s)
        return left.pop() if left else wanted

    for stand_in in (look_at_all, common_tip, fetch_newest):
        monkeypatch.setattr(survey, stand_in.__name__, stand_in)
    unused: Any = None
    evaluator = evaluate.Evaluator(EvaluateFlags(link=""), unused, unused, lambda _event: None)
    over: Any = SimpleNamespace(annals=SimpleNamespace(is_over=True))
    transport: Any = SimpleNamespace(is_down=False)

    async def last() -> tuple[tuple[Any, ...], bool]:
        anchors = evaluate.Anchors(())
        await evaluator.keep_looking([over], anchors, transport)
        return await anchors.next()

    return run_virtually(last(), monkeypatch)


def test_a_final_model_whose_fetches_are_slow_and_fail_is_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    states, is_last = final_model(monkeypatch, fetch_s=3 * evaluate.OVER_S, fails=2)
    assert [each.round for each in states] == [9]
    assert is_last


@pytest.mark.parametrize("fetch_s", [0.0, 10.0])
def test_a_final_model_that_nobody_has_is_given_up(monkeypatch: pytest.MonkeyPatch, fetch_s: float) -> None:
    assert final_model(monkeypatch, fetch_s=fetch_s, fails=10**4) == ((), True)
