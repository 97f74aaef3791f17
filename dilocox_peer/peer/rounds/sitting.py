"""What goes on at one head: our seat there, what has come of the round, ballots, and view changes. Pure."""

from dilocox_peer.contract import Note
from dilocox_peer.peer.rounds.arrivals import Arrivals
from dilocox_peer.peer.rounds.averages import Slicing
from dilocox_peer.peer.rounds.ballots import Ballots
from dilocox_peer.peer.rounds.contract import Action
from dilocox_peer.peer.rounds.holdings import Holdings
from dilocox_peer.peer.rounds.membership import Members
from dilocox_peer.peer.rounds.seat import Seat
from dilocox_peer.peer.rounds.view_changes import ViewChanges
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import Certificate
from dilocox_peer.wire.rounds import (
    Ack,
    Averages,
    Gathered,
    Inputs,
    Message,
    Nack,
    Offer,
    Prepare,
    Promise,
    Propose,
    ViewAnswer,
    ViewCall,
    ViewPropose,
    ViewSign,
)

_OF_MEMBERS = (Offer, Gathered, Inputs, Averages)  # whether or not they vote


class Sitting:
    """The sitting of one (head, view) at one peer. Nothing of it is left when the head moves."""

    ballots_type: type[Ballots] = Ballots  # the simulator plants faulty ones
    view_changes_type: type[ViewChanges] = ViewChanges
    slicing_type: type[Slicing] = Slicing

    def __init__(self, seat: Seat, members: Members, holdings: Holdings, now: float, *, in_vain: int) -> None:
        """in_vain: view changes in a row that led here."""
        self.seat = seat
        self.began_at = now
        self.slicing = self.slicing_type(seat, members, holdings, now) if seat.place.is_sliced else None
        self.arrivals = Arrivals(seat, members, holdings, now, self.slicing)
        self.ballots = self.ballots_type(seat, self.arrivals, members, holdings, now, self.slicing)
        self.view_changes = self.view_changes_type(seat, self.arrivals, members, now, in_vain=in_vain)

    def hear(self, sender: PeerId, message: Message, now: float) -> tuple[list[Action], str | None]:
        """What follows from a message about this head, or why it is refused."""
        ballots, view_changes = self.ballots, self.view_changes
        if isinstance(message, ViewCall | ViewAnswer | ViewPropose | ViewSign):
            view_changes.watch(now)
        elif not self.seat.may_vote and not (isinstance(message, _OF_MEMBERS) and self.seat.is_member):
            return [], None
        match message:
            case Offer():
                return self.arrivals.on_offer(sender, message, now)
            case Gathered() if self.slicing is not None:
                self.slicing.on_gathered(sender, message)
            case Inputs():
                return ballots.on_inputs(sender, message, now)
            case Averages() if self.slicing is not None:
                return self.slicing.on_averages(sender, message)
            case Propose():
                return ballots.on_propose(sender, message, now)
            case Ack():
                return [], ballots.on_ack(sender, message)
            case Nack():
                ballots.on_nack(sender, message, now)
            case Prepare():
                return ballots.on_prepare(sender, message, now)
            case Promise():
                return [], ballots.on_promise(sender, message)
            case ViewCall():
                return view_changes.on_call(sender, message, now), None
            case ViewAnswer():
                view_changes.on_answer(sender, message)
            case ViewPropose():
                return view_changes.on_propose(sender, message, now)
            case ViewSign():
                return [], view_changes.on_sign(sender, message)
        return [], None

    def advance(self, now: float) -> list[Action]:
        """All that is due by now."""
        self.view_changes.watch(now)
        actions: list[Action] = [] if self.ballots.pending is not None else self.arrivals.want_again(now)
        if self.slicing is not None:
            actions += self.slicing.advance(self.arrivals.offers.values(), now)
            self.arrivals.look(now)
        return [*actions, *self.ballots.advance(now), *self.view_changes.advance(now)]

    def certificate(self, sent_ahead: Digest | None) -> Certificate | None:
        """What has its quorum here. sent_ahead: the head of one that nobody can follow, which is no reason not to go on."""
        ours, other = self.ballots.certificate, self.view_changes.certificate
        return other if ours is None or (ours.head == sent_ahead and other is not None) else ours

    def deadlines(self, now: float) -> tuple[float, ...]:
        slicing = () if self.slicing is None else (self.slicing.deadline(now),)
        return self.ballots.deadline(now), self.view_changes.deadline(now), *slicing

    def settle(self, certificate: Certificate, now: float, *, is_newest: bool) -> list[Note]:
        """The round here is certified: how long it took, and what it tells of the others. is_newest: nothing that follows it is known; else it was
        over before we heard of it, and says how long we did not hear of it."""
        pace = self.seat.pace
        if is_newest:
            pace.observe_round(now - self.began_at)
        self.arrivals.observe_missing(now)
        notes = self.ballots.settle(certificate, now)
        if self.slicing is not None:
            self.slicing.settle(certificate, now)
        is_usual = not self.ballots.jury.is_of_few(certificate.value.entries, now)  # else it was put off
        if self.ballots.proposed_at is not None and is_usual:
            pace.observe_ballot(now - self.ballots.proposed_at)
        return notes

    def broken_off(self, now: float) -> None:
        """A view change is certified here."""
        self.arrivals.broken_off(now)
        if self.slicing is not None:
            self.slicing.broken_off(now)
