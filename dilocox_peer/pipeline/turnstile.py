"""One body at a time, each when its bytes may come in: what a download limit makes of grants. Pure but for `pace`."""

from collections.abc import Callable

Delay = Callable[[int], float]
"""Seconds to wait before so many bytes may pass, which count as passed from then on."""


def at_once(num_bytes: int) -> float:
    """A Delay without a limit."""
    return 0.0


class Turnstile:
    """Takes a place in the line of the limit for one body, and lets one pass when it has come up.

    The place is kept while nobody wants to pass, so at most one body's bytes are set aside in vain.
    """

    def __init__(self, num_bytes: int, pace: Delay = at_once) -> None:
        """num_bytes: of one body."""
        self._num_bytes = num_bytes
        self._pace = pace
        self._at: float | None = None

    def passes(self, now: float) -> bool:
        """Whether one may pass now; it has passed then."""
        if self._at is None:
            self._at = now + self._pace(self._num_bytes)
        if now < self._at:
            return False
        self._at = None
        return True

    @property
    def opens_at(self) -> float:
        """When the next may pass; -inf if that has not been asked yet."""
        return float("-inf") if self._at is None else self._at
