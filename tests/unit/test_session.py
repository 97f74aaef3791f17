"""Stay after stay: when the death of the network daemon begins another, and when it is the end."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dilocox_peer.events import Failed
from dilocox_peer.peer import session
from dilocox_peer.peer.session import LASTING_S, MAX_RESTARTS, Session
from dilocox_peer.peer.stay import NetworkLost
from tests.virtual_loop import run_virtually


def stays(monkeypatch: pytest.MonkeyPatch, folder: Path, lasting_s: list[float]) -> tuple[int, list[Any]]:
    """(how many there were, what was told) where the daemon dies at the end of each of these, and then the run is complete."""
    left, told = list(lasting_s), list[Any]()

    class Lost:
        def __init__(self, resident: object, incarnation: int) -> None:
            pass

        async def run(self, leaving: object) -> None:
            if left:
                await asyncio.sleep(left.pop(0))
                raise NetworkLost("p2pd ended")

    monkeypatch.setattr(session, "Stay", Lost)
    settings: Any = SimpleNamespace(run_folder=folder, choices=SimpleNamespace(outgoing_only=False))
    unused: Any = None

    async def run() -> None:
        try:
            await Session(settings, unused, told.append).run(asyncio.get_running_loop().create_future())
        except NetworkLost as error:
            told.append(error)

    run_virtually(run(), monkeypatch)
    return len(lasting_s) - len(left), told


def test_a_daemon_that_dies_once_a_week_never_ends_a_peer(monkeypatch, tmp_path):
    count, told = stays(monkeypatch, tmp_path, [7 * 86400.0] * 12)
    assert count == sum(isinstance(each, Failed) for each in told) == 12


@pytest.mark.parametrize("before", [[], [LASTING_S]])
def test_a_daemon_that_dies_again_and_again_is_the_end(monkeypatch, tmp_path, before):
    count, told = stays(monkeypatch, tmp_path, before + [1.0] * 52)
    assert count == MAX_RESTARTS + 1
    assert isinstance(told[-1], NetworkLost)
