"""Inputs that others average and that nobody has named here: what their leader said was lost, or it is not heeded here. Pure."""

from dilocox_peer.types import Digest, PeerId

MAX_OVERHEARD = 4  # inputs of one member: who makes more up is not listened to


class Overheard:
    """At one (head, view) of one peer."""

    def __init__(self) -> None:
        self._of: dict[PeerId, set[Digest]] = {}
        self._is_news = False

    def heard(self, sender: PeerId, inputs: Digest) -> None:
        """A member has said what these came to."""
        named = self._of.setdefault(sender, set())
        self._is_news |= not named
        if len(named) < MAX_OVERHEARD:
            named.add(inputs)

    def has_news(self) -> bool:
        """Whether a member was overheard for the first time since this was asked last: who makes inputs up holds nobody up for long."""
        is_news, self._is_news = self._is_news, False
        return is_news

    def count(self, inputs: Digest) -> int:
        """How many members average these: they heed who named them."""
        return sum(inputs in named for named in self._of.values())
