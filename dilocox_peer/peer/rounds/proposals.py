"""A ballot under way: one of ours that we lead, or another's proposal (ballots.py). Pure."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from dilocox_peer.peer.rounds.holdings import Holdings, part_of
from dilocox_peer.peer.rounds.membership import name_of
from dilocox_peer.peer.rounds.seat import Seat
from dilocox_peer.peer.rounds.timing import FOREVER
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import Value
from dilocox_peer.wire.rounds import Accepted, Ack, Justification, Nack, Promised


@dataclass(slots=True)
class Lead:
    """A ballot of ours. value: None while promises are gathered."""

    ballot: int
    started_at: float
    promises: dict[PeerId, Accepted | None] = field(default_factory=dict)
    signed: dict[PeerId, Promised] = field(default_factory=dict)
    value: Value | None = None
    shown: Justification = ()
    acks: dict[PeerId, bytes] = field(default_factory=dict)
    nackers: set[PeerId] = field(default_factory=set)
    nacked: dict[Digest, set[PeerId]] = field(default_factory=dict)
    resend_at: float = 0.0
    outbid: int = 0  # highest ballot that a NACK named as promised
    outbid_at: float = FOREVER  # when to ask above it, if whoever leads it has not been heard by then

    def why_not_acked(self, sender: PeerId, message: Ack, seat: Seat) -> str | None:
        """What is wrong with an ACK in this ballot, or None."""
        assert self.value is not None, "an ACK of nothing"
        if message.value != self.value.digest():
            return "accepts what was not proposed"
        if sender not in seat.order:
            return "accepts and is not in the roster"
        if not seat.verifies(sender, message.signature, self.value, view=seat.place.view, ballot=self.ballot):
            return "a signature that does not verify"
        return None

    def most_refused(self, excluded: Collection[Digest]) -> set[Digest]:
        """Those that most refuse, but for what is excluded: one member alone does not talk everybody's contributions out of the round."""
        refusals = {blob: len(peers) for blob, peers in self.nacked.items() if blob not in excluded}
        most, names = max(refusals.values()), self._names
        # Newcomers that greeted some more than others would take a ballot for each such number.
        return {blob for blob, count in refusals.items() if count == most or (blob in names and 2 * count >= most)}

    @property
    def _names(self) -> set[Digest]:
        return set() if self.value is None else set(map(name_of, self.value.roster))

    def is_outbid(self, sender: PeerId, message: Nack, highest: int) -> bool:
        """Takes a NACK in this ballot in; whether it names a higher promised one than was known. highest: those above it are not heeded.

        Whoever leads the higher ballot asks us too, and then we give way. If nobody does, the promise is a leftover of a leader that
        died or moved on: we ask above it, or a quorum without that peer goes on in our ballot."""
        if message.promised > self.ballot:
            if not self.outbid < message.promised <= highest:
                return False
            self.outbid = message.promised
            return True
        if self.value is not None:
            self.nackers.add(sender)
            for blob in set(message.blobs) & {*self.value.blobs, *self._names}:
                self.nacked.setdefault(blob, set()).add(sender)
        return False


def failed_before(value: Value, holdings: Holdings) -> dict[Digest, int]:
    """How often each result of a value was asked for in vain."""
    return {result.blob: holdings.failures(result.blob) for result in value.results}


def forced_value(promises: Mapping[PeerId, Accepted | None]) -> Value | None:
    """The accepted value of the highest ballot that they name."""
    accepted = [each for each in promises.values() if each is not None]
    return max(accepted, key=lambda each: each.ballot).value if accepted else None


def unhindered(
    promises: Mapping[PeerId, Accepted | None],
    is_quorum: Callable[[Collection[PeerId]], bool],
    is_hindrance: Callable[[Value], bool],
) -> dict[PeerId, Accepted | None]:
    """The promises without any value, if they are a quorum; else those without the values that are a hindrance: whose blobs are not here, bad or
    not, and those that we would refuse.

    Any quorum of promises will do: had such a value a quorum of ACKs, one of them would be in it. Without this, the
    vote of a leader for its own bad blob, or for nothing at all, would come back in every later ballot.
    """
    free: dict[PeerId, Accepted | None] = {peer: None for peer, each in promises.items() if each is None}
    if is_quorum(free):
        return free
    return {peer: each for peer, each in promises.items() if each is None or not is_hindrance(each.value)}


@dataclass(slots=True)
class Pending:
    """A proposal of another that is accepted as soon as its blobs are here. failed: results of it that were asked for in vain before, and how often: its
    leader may have them."""

    ballot: int
    value: Value
    leader: PeerId
    signature: bytes
    promises: Justification
    authors: tuple[bytes, ...]
    since: float
    failed: Mapping[Digest, int]
    nacked: set[Digest] = field(default_factory=set)

    def bad(self, holdings: Holdings) -> set[Digest]:
        """What of it is not to be had."""
        return {
            thing.name
            for thing in self.value.things
            if holdings.is_refused(thing.name, part_of(thing))
            or holdings.failures(thing.name) > self.failed.get(thing.name, 0)
        }
