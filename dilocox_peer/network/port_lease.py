"""When to ask the router for a port, and until when it is ours. Pure: what came of asking and the time in, whether to ask out."""

from dataclasses import dataclass

LEASE_S = 600.0  # asked for: a port of a peer that was killed is closed after so long
LEAST_LEASE_S, MOST_LEASE_S = 60.0, 3600.0  # believed, of what the router says
RETRIES_S = (20.0, 60.0, 300.0)  # it may speak later: after its start, or when its owner allows it


@dataclass(frozen=True, slots=True)
class OpenPort:
    """A port of the router that leads to one of ours."""

    host: str
    port: int
    way: str  # how it was asked for


class PortLease:
    """Of one port of ours."""

    def __init__(self) -> None:
        self._open: OpenPort | None = None
        self._until_s = 0.0
        self._due_s = float("-inf")
        self._failures = 0

    def is_due(self, now_s: float) -> bool:
        """Whether to ask now, which `opened` or `failed` follows."""
        return now_s >= self._due_s

    def at(self, now_s: float) -> OpenPort | None:
        """What is open for us."""
        return self._open if self._open is not None and now_s < self._until_s else None

    def opened(self, port: OpenPort, seconds: float, now_s: float) -> None:
        """Asked for again when half of the time is over."""
        seconds = min(max(seconds, LEAST_LEASE_S), MOST_LEASE_S)
        self._open, self._until_s, self._due_s, self._failures = port, now_s + seconds, now_s + seconds / 2, 0

    def failed(self, now_s: float) -> None:
        """What was open stays so until its time is over."""
        self._due_s = now_s + RETRIES_S[min(self._failures, len(RETRIES_S) - 1)]
        self._failures += 1

    def moved(self, now_s: float) -> None:
        """Our line, or our port, is another one."""
        self._open, self._due_s, self._failures = None, now_s, 0
