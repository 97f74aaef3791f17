"""What comes to nothing of the view changes that one sender asks for, and how far it raises their numbers. Pure.

Whoever signs a proposal takes up no call with a lower number and votes no more at that head. One that proposes again and again and signs none itself
would so stop all view changes. The next attempt of a sender is heeded only after a while, which doubles with each that nothing came of; in
between the others have the time for theirs. Honest ones fail too, as messages are lost and peers die: they wait as long before they
propose again, and nobody is left out for good.
"""

from collections import Counter

from dilocox_peer.types import PeerId

FREE = 2  # attempts of one sender after which the waits double: who does not sign is found out by two
MAX_DOUBLED = 4  # times

Account = PeerId | None
"""By whom attempts are counted: a sender, or None, those of whom nothing is needed, together."""


def pause_s(num_attempts: int, view_wait_s: float) -> float:
    """From the last of so many attempts at a head to the next one that is heeded: at first as long as an honest one has for its own."""
    return 2 * view_wait_s * (1 << min(max(num_attempts - FREE, 0), MAX_DOUBLED)) if num_attempts else 0.0


class Attempts:
    """Of each sender at one head, those that were heeded. Nothing came of them, or the head would have moved."""

    def __init__(self, view_wait_s: float) -> None:
        self._view_wait_s = view_wait_s
        self._heeded: Counter[Account] = Counter()
        self._last_at: dict[Account, float] = {}

    def may(self, account: Account, now: float) -> bool:
        """Whether another one is to be heeded by now."""
        last_at = self._last_at.get(account)
        return last_at is None or now >= last_at + pause_s(self._heeded[account], self._view_wait_s)

    def heeded(self, account: Account, now: float) -> None:
        self._heeded[account] += 1
        self._last_at[account] = now


class Numbers:
    """The highest number seen at one head, and by how much each sender has raised it: by `most` in all, as many senders cannot use up what
    can be written."""

    def __init__(self, highest: int, most: int) -> None:
        self.highest = highest
        self._most = most
        self._raised: Counter[Account] = Counter()

    def reaches(self, account: Account, number: int) -> bool:
        """Whether this sender may name so high a number."""
        return self._raised[account] + max(number - self.highest, 0) <= self._most

    def seen(self, account: Account, number: int) -> None:
        if number > self.highest:
            self._raised[account] += number - self.highest
            self.highest = number

    def called(self, number: int) -> None:
        """One of our own."""
        self.highest = number
