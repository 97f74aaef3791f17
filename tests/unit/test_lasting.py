"""A task that nobody waits for goes on after what nobody foresaw."""

import asyncio

import pytest

from dilocox_peer.events import Event, Failed
from dilocox_peer.network import lasting as lasting_module
from dilocox_peer.network.lasting import lasting


def test_what_nobody_foresaw_is_told_and_the_work_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lasting_module, "AGAIN_S", 0.001)
    told: list[Event] = []
    tries = iter([ValueError("unknown protocol"), ExceptionGroup("tasks", [KeyError("x")]), None])

    async def work() -> None:
        if (error := next(tries)) is not None:
            raise error

    asyncio.run(lasting(work, "the look", told.append))
    assert [(each.where, each.reason.partition(";")[0]) for each in told if isinstance(each, Failed)] == [
        ("the look", "ValueError: unknown protocol"),
        ("the look", "KeyError: 'x'"),
    ]


def test_a_cancelled_task_ends() -> None:
    async def scenario() -> None:
        async def work() -> None:
            await asyncio.Event().wait()

        task = asyncio.create_task(lasting(work, "the look", lambda _event: None))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
