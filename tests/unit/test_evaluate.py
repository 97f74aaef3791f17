"""The evaluator looks for as long as the run lasts."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dilocox_peer.cli import evaluate
from dilocox_peer.cli.flags import EvaluateFlags
from dilocox_peer.errors import RunUnreachable
from dilocox_peer.events import Event, Failed


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
    survey: Any = Unreachable(2)
    transport: Any = SimpleNamespace(is_down=is_down)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(evaluator.keep_looking([survey], evaluate.Anchors([]), transport))
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
