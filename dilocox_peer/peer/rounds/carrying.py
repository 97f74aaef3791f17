"""Tables of contributions that go out beside the offers that name them, so that nobody asks for them. Pure.

A member that has not got one, as its message was lost or the table is too large for one, fetches it as ever.
"""

from collections import OrderedDict

from dilocox_peer.peer.rounds.contract import Closed
from dilocox_peer.types import Digest, sha256
from dilocox_peer.wire.chain import MAX_ROSTER
from dilocox_peer.wire.rounds import MAX_CARRIED_BYTES, Carried, Message, Offer

MAX_KEPT = 2 * MAX_ROSTER  # of others: those of a round, and some more


class Carrying:
    """Of one peer."""

    def __init__(self) -> None:
        self._own: tuple[Digest, bytes] | None = None
        self._came: OrderedDict[Digest, bytes] = OrderedDict()

    def closed(self, closed: Closed) -> None:
        """Our own contribution."""
        fits = 0 < len(closed.table) <= MAX_CARRIED_BYTES
        self._own = (closed.entry.blob, closed.table) if fits else None

    def beside(self, message: Message) -> Carried | None:
        """What goes out before it, to the same peer."""
        if not isinstance(message, Offer) or self._own is None or message.entry.blob != self._own[0]:
            return None
        return Carried(message.stage, message.head, message.view, self._own[1])

    def came(self, raw: bytes) -> None:
        """From another; whatever it is."""
        self._came[sha256(raw)] = raw
        while len(self._came) > MAX_KEPT:
            self._came.popitem(last=False)

    def take(self, name: Digest) -> bytes | None:
        """What has come of that name, once."""
        return self._came.pop(name, None)
