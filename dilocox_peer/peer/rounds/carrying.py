"""Tables of contributions that go out beside the offers that name them, so that nobody asks for them. Pure.

A member that has not got one, as its message was lost or the table is too large for one, fetches it as ever.
"""

from collections import OrderedDict

from dilocox_peer.peer.rounds.contract import Closed
from dilocox_peer.types import Digest, PeerId, sha256
from dilocox_peer.wire.chain import MAX_ROSTER
from dilocox_peer.wire.rounds import MAX_CARRIED_BYTES, Carried, Message, Offer

KEPT_OF_EACH = 2  # newest: of a round and the next
MAX_SENDERS = MAX_ROSTER


class Carrying:
    """Of one peer."""

    def __init__(self) -> None:
        self._own: tuple[Digest, bytes] | None = None
        self._came: OrderedDict[PeerId, OrderedDict[Digest, bytes]] = OrderedDict()

    def closed(self, closed: Closed) -> None:
        """Our own contribution."""
        fits = 0 < len(closed.table) <= MAX_CARRIED_BYTES
        self._own = (closed.entry.blob, closed.table) if fits else None

    def together(self, message: Message) -> tuple[Message, ...]:
        """The message, after what goes out before it to the same peer."""
        if not isinstance(message, Offer) or self._own is None or message.entry.blob != self._own[0]:
            return (message,)
        return Carried(message.stage, message.head, message.view, self._own[1]), message

    def came(self, sender: PeerId, raw: bytes) -> None:
        """From a member of the roster; whatever it is."""
        of_sender = self._came.setdefault(sender, OrderedDict())
        self._came.move_to_end(sender)
        of_sender[sha256(raw)] = raw
        while len(of_sender) > KEPT_OF_EACH:
            of_sender.popitem(last=False)
        while len(self._came) > MAX_SENDERS:
            self._came.popitem(last=False)

    def take(self, name: Digest) -> bytes | None:
        """What has come of that name, once."""
        found = (of_sender.pop(name) for of_sender in self._came.values() if name in of_sender)
        return next(found, None)
