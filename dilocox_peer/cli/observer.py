"""Everybody who is told of a peer's events: one status for all that show something, and any number of listeners.

Events come from several threads and the status is read by others, so both go through one lock.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from dilocox_peer.events import Event, Listener
from dilocox_peer.peer.status import Status
from dilocox_peer.peer.summary import summary

T = TypeVar("T")


class Observer:
    """Called with every event; `read` gives what a function makes of the status meanwhile."""

    def __init__(self, listeners: Sequence[Listener] = (), *, clock: Callable[[], float] = time.time) -> None:
        self._status = Status()
        self._lock = threading.Lock()
        self._listeners = list(listeners)
        self.clock = clock

    def __call__(self, event: Event) -> None:
        self.take(event, self.clock())
        for listener in self._listeners:
            listener(event)

    def add(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def take(self, event: Event, at_s: float) -> None:
        """Into the status alone: what happened elsewhere or earlier."""
        with self._lock:
            self._status.take(event, at_s)

    def replace(self, status: Status) -> None:
        with self._lock:
            self._status = status

    def read(self, look: Callable[[Status], T]) -> T:
        """What look makes of the status; nothing moves while it looks, and it keeps no reference to it."""
        with self._lock:
            return look(self._status)

    def summary(self) -> dict[str, Any]:
        now = self.clock()
        return self.read(lambda status: summary(status, now))
