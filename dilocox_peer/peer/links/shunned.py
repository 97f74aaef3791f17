"""Links that broke the protocol: who is left alone for how long, and how much of it is told. Pure.

A greeting that is refused costs its sender a new link, and us a signature to check and a line to tell: so a link that is
shunned is hung up unheard, and the lines have a limit, as a stranger may come with a new identity each time.
"""

from dilocox_peer.types import LinkId

SHUN_S = 60.0
MAX_SHUNNED = 1024  # beyond these the first are forgotten
LINES_PER_MINUTE = 20


class Shunned:
    def __init__(self) -> None:
        self._until: dict[LinkId, float] = {}  # in the order of their ends
        self._counted_from = float("-inf")
        self._lines = 0

    def __len__(self) -> int:
        """How many are kept in memory."""
        return len(self._until)

    def add(self, link: LinkId, now: float) -> None:
        """From now on it is shunned, for SHUN_S."""
        self._until.pop(link, None)
        self._until[link] = now + SHUN_S
        while len(self._until) > MAX_SHUNNED or next(iter(self._until.values())) <= now:
            del self._until[next(iter(self._until))]

    def until(self, link: LinkId) -> float:
        """When it is shunned no more; -inf for one that is not known."""
        return self._until.get(link, float("-inf"))

    def has(self, link: LinkId, now: float) -> bool:
        return self.until(link) > now

    def may_tell(self, now: float) -> bool:
        """Whether one more line may be told; it counts as told then."""
        if now - self._counted_from > 60.0:
            self._counted_from, self._lines = now, 0
        self._lines += 1
        return self._lines <= LINES_PER_MINUTE
