"""An event loop whose clock stands still while anything runs, and jumps to what is due next: minutes of waiting take no time.

For what waits by the clock and neither reads sockets nor starts processes. Threads' work is done at once, in the loop.
"""

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


class _Jumping(selectors.DefaultSelector):
    loop: "VirtualLoop"

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        assert timeout is not None or found, "everything waits for ever"
        if not found and timeout:
            self.loop.now += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now = 1000.0
        selector = _Jumping()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def run_virtually(main: Coroutine[Any, Any, T], monkeypatch: pytest.MonkeyPatch) -> T:
    """What it gives back. time.monotonic is the loop's clock meanwhile."""
    loop = VirtualLoop()
    monkeypatch.setattr(time, "monotonic", loop.time)
    try:
        return loop.run_until_complete(main)
    finally:
        monkeypatch.undo()
        loop.close()
