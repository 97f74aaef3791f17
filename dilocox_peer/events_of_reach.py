"""How a peer comes in, and how it and the others reach one another, as values."""

from dataclasses import dataclass
from typing import Literal

from dilocox_peer.events import Event, short
from dilocox_peer.types import PeerId

Reach = Literal["direct", "relayed", "outgoing"]


@dataclass(frozen=True, slots=True)
class ReachChanged(Event):
    """Whether others can dial us; told when it is known and when it changes. relayed: through relays, so many; outgoing: not even
    so, and we meet only those whom we can dial."""

    reach: Reach
    num_relays: int

    def line(self) -> str:
        if self.reach == "direct":
            return "others can dial this peer"
        if self.reach == "relayed":
            relays = "a relay" if self.num_relays == 1 else f"{self.num_relays} relays"
            return f"others cannot dial this peer directly: {relays} will pass them on to it"
        return (
            "others cannot dial this peer, and no relay has a place for it: it meets those that can be dialled, and no others. "
            "A TCP port opened in the router would help (docs/troubleshooting.md, 3)"
        )


@dataclass(frozen=True, slots=True)
class PassingOn(Event):
    """For how many peers that nobody can dial this one is a relay; told when it changes. num_bytes: passed on so far."""

    num_peers: int
    num_bytes: int

    def line(self) -> str:
        peers = "a peer" if self.num_peers == 1 else f"{self.num_peers} peers"
        done = f", {self.num_bytes / 1e6:,.1f} MB so far" if self.num_bytes else ""
        return f"passes on for {peers} that nobody can dial{done}" if self.num_peers else f"passes on for nobody{done}"


@dataclass(frozen=True, slots=True)
class PortOpened(Event):
    """The router has a port of its own lead to linkd's. way: how it was asked."""

    host: str
    port: int
    way: str

    def line(self) -> str:
        return f"the router has opened port {self.port} of {self.host} for the neighbours of the pipeline ({self.way})"


@dataclass(frozen=True, slots=True)
class HeardThrough(Event):
    """There is no path to a member of our stage, and what it says of rounds comes by way of another."""

    peer: PeerId
    through: PeerId

    def line(self) -> str:
        return f"there is no path to {short(self.peer)}: its messages come through {short(self.through)}, its contributions from whoever has them"


@dataclass(frozen=True, slots=True)
class LineChanged(Event):
    """This computer has other addresses than before, or slept."""

    def line(self) -> str:
        return "the line is another one, or this computer has slept: all connections are made anew"


def _addresses(num_known: int) -> str:
    return "the one known address" if num_known == 1 else f"any of {num_known} known addresses"


@dataclass(frozen=True, slots=True)
class NobodyAnswers(Event):
    """Nobody of the run does, at any address that is known; this peer has a state of it, and opens the run by itself."""

    num_known: int
    LEVEL = "warning"

    def line(self) -> str:
        return (
            f"nobody of the run answers at {_addresses(self.num_known)}: it is opened from this disk, which has its settings and a state. "
            "The others are waited for, and looked for; training goes on as soon as the stage may go on without them"
        )


@dataclass(frozen=True, slots=True)
class NobodyToEnterBy(Event):
    """At a bootstrap: nobody answers whom it is to enter a run by that it has served before."""

    num_known: int
    LEVEL = "warning"

    def line(self) -> str:
        return (
            f"nobody of the run answers at {_addresses(self.num_known)} (--initial-peers, and who was met before): it is served from here alone. The others are "
            "looked for each minute, and who joins by this bootstrap's link finds what is here"
        )


@dataclass(frozen=True, slots=True)
class Starting(Event):
    """A step of the start-up begins. is_short: as a rule it is over at once."""

    step: str
    is_short: bool = False

    @property
    def level(self) -> str:
        return "debug" if self.is_short else "info"

    def line(self) -> str:
        return self.step


@dataclass(frozen=True, slots=True)
class TurnedAway(Event):
    """By this peer alone, for so many seconds. who: a peer, or a range of addresses."""

    who: str
    reason: str
    seconds: float
    LEVEL = "warning"

    def line(self) -> str:
        return f"turned away for {self.seconds:.0f} s: {self.who}, for {self.reason}"
