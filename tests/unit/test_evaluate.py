"""The evaluator asks for as long as the run lasts."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dilocox_peer.cli.evaluate import _Evaluator
from dilocox_peer.errors import RunUnreachable
from dilocox_peer.events import Event, Failed


class SilentDirectory:
    async def peers(self, stage: int) -> list[Any]:
        raise RunUnreachable("the directory gave no answer within 10 s")


def ask(*, is_down: bool) -> tuple[Any, list[Event]]:
    """What one question brings while the directory is silent, and what was told."""
    events: list[Event] = []
    unused: Any = None
    evaluator = _Evaluator(unused, unused, unused, (), (), events.append, None)
    return asyncio.run(evaluator._state(SimpleNamespace(is_down=is_down), SilentDirectory(), 0, {}, unused)), events


def test_a_directory_that_does_not_answer_once_is_asked_again():
    state, events = ask(is_down=False)
    assert state is None
    assert [type(event) for event in events] == [Failed]


def test_the_end_of_our_own_network_daemon_ends_it():
    with pytest.raises(RunUnreachable):
        ask(is_down=True)
