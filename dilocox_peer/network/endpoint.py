"""One peer on the network, from one start of it to the next."""

from dataclasses import dataclass

from dilocox_peer.network.transport import Transport
from dilocox_peer.types import PeerId


@dataclass(frozen=True)
class Endpoint:
    """incarnation: wall-clock milliseconds at the start of the peer's process; the newest is the peer."""

    me: PeerId
    incarnation: int
    transport: Transport
