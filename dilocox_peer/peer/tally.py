"""What is counted over a whole session: it goes on when the network daemon, and all that counts with it, is started again."""

from dataclasses import dataclass, field

from dilocox_peer.events import StageSeen
from dilocox_peer.network.tcp_traffic import Traffic
from dilocox_peer.peer.lag import LoopLag


@dataclass(slots=True)
class Tally:
    """Kept by the session; bulletin.py adds."""

    lag: LoopLag = field(default_factory=LoopLag)
    daemon_traffic: Traffic = field(default_factory=Traffic)
    stage_seen: StageSeen | None = None  # the last that was told
