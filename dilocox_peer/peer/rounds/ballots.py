"""Which offers make the next certificate: single-decree Paxos among the roster of one head. Pure.

Ballot b is led by the peer of rank b mod |R| at this head; ballot 0 needs no promises. An ACK says: I hold every blob
of this value, durably, and will not accept less in a lower ballot. Two quorums share a peer, so once a value has a
quorum of ACKs, every later leader hears of it and proposes it again: it has to show the promises that it heeded
(justified.py), and a member accepts nothing else.

No member is taken at its word. What has come of the round is in arrivals.py, whose turn it is to lead in turns.py, whom to
believe in jury.py; a proposal that leaves out what we hold is accepted only when it is late.

    lead:    idle -> (offers complete or late) -> proposing 0 -> certificate
             idle -> (no certificate in time, my turn) -> preparing b -> proposing b -> certificate
             proposing b -> (blobs NACKed by too many) -> preparing b' > b without them
    member:  ballot >= promised -> fetch blobs -> Persist(accepted) -> ACK
Invariants: promised never falls; accepted.ballot <= promised; one value a ballot; Persist precedes what it backs.
"""

from collections.abc import Iterable

from dilocox_peer.contract import Note
from dilocox_peer.peer.rounds.arrivals import Arrivals
from dilocox_peer.peer.rounds.averages import Slicing
from dilocox_peer.peer.rounds.contract import Action, BlobPart, Send
from dilocox_peer.peer.rounds.drafting import Drafts
from dilocox_peer.peer.rounds.holdings import Holdings, part_of
from dilocox_peer.peer.rounds.jury import MAX_JUMP, Jury
from dilocox_peer.peer.rounds.justified import promise_statement
from dilocox_peer.peer.rounds.membership import Members
from dilocox_peer.peer.rounds.proposals import Lead, Pending, failed_before, forced_value, unhindered
from dilocox_peer.peer.rounds.seat import Seat, send_all
from dilocox_peer.peer.rounds.timing import FOREVER
from dilocox_peer.peer.rounds.turns import Turns
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import Certificate, Entry, Thing, Value
from dilocox_peer.wire.rounds import (
    Accepted,
    Ack,
    Inputs,
    Nack,
    Prepare,
    Promise,
    Promised,
    Proof,
    Propose,
    Statement,
)


class Ballots:
    """The ballots of one (head, view) at one peer. `certificate` is set once a ballot of ours has its quorum."""

    jury_type: type[Jury] = Jury  # the simulator plants a credulous one
    drafts_type: type[Drafts] = Drafts
    _forced_value = staticmethod(forced_value)  # and a leader that ignores it

    def __init__(
        self,
        seat: Seat,
        arrivals: Arrivals,
        members: Members,
        holdings: Holdings,
        now: float,
        slicing: Slicing | None = None,
    ) -> None:
        self._seat = seat
        self._arrivals = arrivals
        self._members = members
        self._holdings = holdings
        self._conduct = seat.owner.conduct
        self.jury = self.jury_type(seat, arrivals, members, now)
        self._slicing = slicing
        self._drafts = self.drafts_type(seat, arrivals, members, self.jury, slicing)
        self._turns = Turns(seat, members, slicing)
        self.certificate: Certificate | None = None
        self._lead: Lead | None = None
        self._overtaken: Lead | None = None  # our last one with a value, above which somebody has asked
        self._first: Lead | None = None  # of ballot 0, while its value is drafted
        self.pending: Pending | None = None
        self._excluded = arrivals.excluded
        self.proposed_at: float | None = None
        accepted = seat.votes.accepted
        self._interrupted: Accepted | None = None
        if accepted is not None:  # after a restart: nobody may have anything to offer again, so look at once
            self._end_round(now)
            is_shown = self._arrivals.why_not_signed(accepted.value.entries, accepted.authors) is None
            if (
                is_shown
                and accepted.ballot == seat.votes.promised
                and seat.is_voter
                and seat.leader(accepted.ballot) == seat.me
            ):
                self._interrupted = accepted

    # ---- what comes in ----

    def offer(self, entry: Entry, now: float) -> None:
        """Our own contribution; its blob is held."""
        self._arrivals.offer(entry, now)
        if self._seat.is_member and self._arrivals.ended_at is None:
            self._end_round(now)

    def on_propose(self, sender: PeerId, message: Propose, now: float) -> tuple[list[Action], str | None]:
        seat, ballot, value = self._seat, message.ballot, message.value
        if reason := self._why_not_led(sender, ballot):
            return [], f"proposes in ballot {ballot}, {reason}"
        if ballot < seat.votes.promised:
            return [self._seat.nack(sender, ballot, ())], None
        accepted = seat.votes.accepted
        if accepted is not None and accepted.ballot == ballot:
            if accepted.value != value:
                self.jury.hear_leader(message, sender)
                return [], f"a second value in ballot {ballot}"
            return [self._seat.ack(sender, ballot, value)], None
        pending = self.pending
        if pending is not None and (pending.ballot, pending.value) == (ballot, value):
            return [], None
        if value.kind != "round":
            return [], "proposes a view change in a ballot"
        if reason := seat.place.why_not(value, seat.place.view, seat.owner.max_peers, seat.owner.plans):
            return [], reason
        for entry in value.entries:
            if entry.peer == seat.me and entry.incarnation == seat.incarnation and entry != self._arrivals.own:
                return [], "an offer in our name that is not ours"
        if not seat.verifies(sender, message.signature, value, view=seat.place.view, ballot=ballot):
            return [], "a signature that does not verify"
        if reason := self._arrivals.why_not_signed(value.entries, message.authors, sender):
            return [], reason
        if reason := self.jury.why_not_justified(ballot, value, message.promises):
            self._conduct.strike(sender, "led", reason)
            return [], reason
        self.jury.hear(sender, seat.voted(value, message.signature, ballot=ballot))
        self.jury.hear_promises(ballot, message.promises)
        self.jury.proposed(sender)
        if reason := self.jury.why_not_believed(sender, value, now):
            return [], reason
        if self._slicing is not None and (reason := self._slicing.why_not_vouched(value)):
            return [], reason
        if reason := self.jury.why_withheld(sender, message, now):
            return [*self.jury.answers(sender, message)], reason
        if reason := self._members.why_crowded(seat.place.roster, value.roster, seat.owner.max_peers):
            self._conduct.strike(sender, "led", reason)
            return [], reason
        guilty = [self._conduct.proof_against(peer) for peer in value.roster if peer != sender]
        if pending is None or ballot > pending.ballot:
            failed = failed_before(value, self._holdings)
            self.pending = Pending(
                ballot, value, sender, message.signature, message.promises, message.authors, now, failed
            )
        self._turns.follow(ballot, now)
        if self._slicing is not None:
            self._slicing.on_proposed(sender, value, now)
        # The leader may not have heard what we can prove.
        return [Send(sender, Proof(*seat.at(), *proof)) for proof in guilty if proof is not None], None

    def on_inputs(self, sender: PeerId, message: Inputs, now: float) -> tuple[list[Action], str | None]:
        """The leader of the ballot under way has its contributions averaged: it has its time. Nobody else takes the averagers' time, but a leader
        that is not heeded here and is by others, who average for it. A member without a vote promises nothing and knows of no ballot that is under
        way: it averages for the leader of the named one."""
        ballot, promised = message.ballot, self._seat.votes.promised if self._seat.may_vote else message.ballot
        if self._slicing is None or (ballot > promised and not self._slicing.are_averaged(message.entries)):
            return [] if self._slicing is None else self._slicing.said_of(message.entries, sender), None
        if reason := self._why_not_led(sender, ballot):
            return [], f"names inputs in ballot {ballot}, {reason}"
        if ballot < promised:  # it proposes nothing yet that would be answered so
            return [self._seat.nack(sender, ballot, ())], None
        if reason := self._arrivals.why_not_signed(message.entries, message.authors, sender):
            return [], reason
        return self._slicing.on_inputs(sender, message, now)

    def _is_overheard(self, slicing: Slicing) -> bool:
        """Whether somebody averages for a leader that was not heard here; it may be one that we do not heed, and wait for no longer."""
        return slicing.overheard.has_news() and self.jury.heeds_all

    def on_ack(self, sender: PeerId, message: Ack) -> str | None:
        lead = next((each for each in (self._lead, self._overtaken) if each and each.ballot == message.ballot), None)
        if lead is None or lead.value is None or sender in lead.acks:
            return None
        if reason := lead.why_not_acked(sender, message, self._seat):
            return reason
        self.jury.hear(sender, self._seat.voted(lead.value, message.signature, ballot=lead.ballot))
        lead.acks[sender] = message.signature
        lead.nackers.discard(sender)
        self._count(lead, lead.value)
        return None

    def on_nack(self, sender: PeerId, message: Nack, now: float) -> None:
        lead = self._lead or self._first
        if lead is not None and message.ballot == lead.ballot and sender in self._seat.order:
            known = self.jury.highest(self._seat.votes.promised)
            highest = known + MAX_JUMP - len(self._seat.order)  # theirs follow, too
            if lead.is_outbid(sender, message, highest):
                lead.outbid_at = min(lead.outbid_at, now + self._seat.jittered(self._seat.timing.retry_s))

    def on_prepare(self, sender: PeerId, message: Prepare, now: float) -> tuple[list[Action], str | None]:
        seat, ballot = self._seat, message.ballot
        reason = "which needs no promises" if ballot == 0 else self._why_not_led(sender, ballot)
        if reason:
            return [], f"prepares ballot {ballot}, {reason}"
        if ballot < seat.votes.promised:
            return [self._seat.nack(sender, ballot, ())], None
        actions: list[Action] = []
        if ballot > seat.votes.promised:
            is_in_vain = self.pending is not None and self.jury.is_of_few(self.pending.value.entries, now)
            if not is_in_vain and self._turns.is_early(sender, ballot, now, since_end_s=self._arrivals.since_end(now)):
                return [], None  # it asks again
            if not self.jury.heeds(sender, ballot, now, late_at=self._turns.due):
                return [self._seat.nack(sender, ballot, ())] if self.jury.is_answered(sender) else [], None
            actions.append(seat.vote(promised=ballot))
        self._turns.follow(ballot, now)
        promised = seat.promise(ballot, seat.votes.accepted)
        actions.append(Send(sender, Promise(*seat.at(), ballot, seat.votes.accepted, promised.signature)))
        return actions, None

    def on_promise(self, sender: PeerId, message: Promise) -> str | None:
        lead, accepted = self._lead, message.accepted
        if lead is None or lead.value is not None or message.ballot != lead.ballot or sender not in self._seat.order:
            return None
        if accepted is not None:
            if accepted.ballot >= lead.ballot:
                return f"accepted in ballot {accepted.ballot} and promises {lead.ballot}"
            if reason := self.jury.why_not_accepted(accepted):
                return reason
        named = None if accepted is None else accepted.named
        statement = promise_statement(self._seat.at(), lead.ballot, named)
        if not self._seat.owner.verify(sender, statement, message.signature):
            return "a signature that does not verify"
        self.jury.hear(sender, Statement(statement, message.signature))
        lead.promises[sender] = accepted
        lead.signed[sender] = Promised(sender, named, message.signature)
        return None

    def _why_not_led(self, sender: PeerId, ballot: int) -> str | None:
        """Why a ballot of sender's is not looked at, or None."""
        if sender == self._seat.me or sender != self._seat.leader(ballot):
            return "which it does not lead"
        if not self.jury.is_in_reach(sender, ballot, self._seat.votes.promised):
            return f"far above {self._seat.votes.promised}"
        return None

    # ---- what follows from it ----

    def advance(self, now: float) -> list[Action]:
        """Everything that is due. Call after every input; cheap when nothing is."""
        if self.certificate is not None:
            return []
        if self._slicing is not None and (self._slicing.has_news() or self._is_overheard(self._slicing)):
            self._turns.goes_on(now, self._slicing.patience_s)
        if self._arrivals.ended_at is None and self._seat.is_member:
            proposed = () if self.pending is None else self.pending.value.entries
            if self._arrivals.has_ended(proposed, now):
                self._end_round(now)
        if not self._seat.may_vote:  # it contributes; others certify
            return self._arrivals.offer_again(now)
        actions = self._accept_pending(now)
        actions += self._arrivals.offer_again(now)
        if self._lead is None:
            actions += self._take_the_lead(now)
        if self._lead is not None:
            actions += self._go_on_leading(self._lead, now)
        return actions

    def deadline(self, now: float) -> float:
        """When `advance` has something to do again if nothing comes in."""
        if not self._seat.may_vote:
            return self._arrivals.again_at
        times = [self._arrivals.again_at, self._arrivals.deadline(now)]
        if not self._awaits_blobs(now):
            times.append(self._turns.due)
        if self.pending is not None:
            times.append(self.pending.since + self._seat.pace.ballot_s / 2)
            if (few_due := self._arrivals.few_due(now)) > now:
                times.append(few_due)
        if self._lead is not None:
            times += [self._lead.resend_at, self._lead.outbid_at]
        return min(times)

    def _accept_pending(self, now: float) -> list[Action]:
        pending, seat = self.pending, self._seat
        if pending is None:
            return []
        if pending.ballot < seat.votes.promised:
            self.pending = None
            return []
        if self._may_accept(pending.value):
            if self._slicing is not None and self._slicing.is_early(pending.value, now):
                self.jury.accepted_of.add(pending.leader)  # it did what it could
                return []
            if self.jury.puts_off(pending, now, late_at=self._turns.due):
                return []
            self.pending = None
            self.jury.accepted_of.add(pending.leader)
            if self.proposed_at is None:
                self.proposed_at = now
                self._turns.accepted(now)
            shown = pending.promises, pending.authors
            accepted = Accepted(pending.ballot, pending.value, pending.signature, *shown)
            return [
                *self._backed(seat.vote(promised=pending.ballot, accepted=accepted)),
                self._seat.ack(pending.leader, pending.ballot, pending.value),
            ]
        actions: list[Action] = []
        for thing in pending.value.things:
            is_slow = now - pending.since >= seat.pace.ballot_s / 2  # whoever it was asked of first
            sources = [thing.holder, pending.leader, *seat.others]
            actions += self._arrivals.want_thing(thing, self._conduct.best_first(sources), now, elsewhere=is_slow)
        if (bad := pending.bad(self._holdings)) - pending.nacked:
            pending.nacked |= bad
            actions.append(self._seat.nack(pending.leader, pending.ballot, tuple(sorted(bad))))
        return actions

    def _may_accept(self, value: Value) -> bool:
        """Holding every blob is part of what an ACK says."""
        return self._holdings.has_things(value.things)

    def _backed(self, persist: Action) -> list[Action]:
        return [persist]  # it must precede the ACK

    def _take_the_lead(self, now: float) -> list[Action]:
        """Ballot 0 when the offers are in; a higher one when its turn has come."""
        seat, interrupted = self._seat, self._interrupted
        self._interrupted = None
        if interrupted is not None and interrupted.ballot == seat.votes.promised:
            # Proposed before a crash: the same value in the same ballot may be proposed again, and no other.
            lead = Lead(interrupted.ballot, now, shown=interrupted.promises)
            return self._propose(lead, interrupted.value, now)
        if self._turns.is_first and seat.leader(0) == seat.me and self._is_all_in(now):
            first = self._first = self._first or Lead(0, now)
            is_free = seat.votes.promised == 0 and seat.votes.accepted is None and now < first.outbid_at
            above = max(first.outbid, seat.votes.promised)  # promises, ours from before a restart or others', forbid it
            return self._propose_own(first, now) if is_free else self._lead_above(above, now)
        if awaits_blobs := self._awaits_blobs(now):
            self._turns.goes_on(now, 0.0)  # the leader waits, too, where a line is slow for both; its time is then
        if now < self._turns.due:
            # A leader proposes when the offers are in, or late. Waiting for late alone would in a first round, where nothing is
            # learned yet, let a view change come before the next leader.
            would_have = self._arrivals.offers_due <= now or self._is_all_in(now)
            if not (would_have and self._turns.is_lost(self._arrivals.since_end(now), now)):
                return []
        return [] if awaits_blobs else self._next_turn(now)

    def _is_all_in(self, now: float) -> bool:
        """All of the roster that are here have offered and their blobs too; or it is late and there is something, and a round of few is
        proposed somewhat later: the others would put it off."""
        if self._arrivals.is_awaiting(now):
            return False
        entries = self._drafts.entries(self._excluded, now)
        if entries and self.jury.is_of_few(entries, now) and now < self._turns.due - 0.75 * self._seat.pace.ballot_s:
            return False
        return bool(entries) or not self._arrivals.are_under_way(now) or now >= self._turns.due

    def _awaits_blobs(self, now: float) -> bool:
        return self._turns.ballot == 0 and self._arrivals.is_awaiting_blobs(now)

    def _next_turn(self, now: float) -> list[Action]:
        ballot = self._turns.next(now)
        return self._prepare(ballot, now) if self._seat.leader(ballot) == self._seat.me else []

    def _lead_above(self, promised: int, now: float) -> list[Action]:
        """Ask for promises in the next ballot of ours above this one."""
        return self._prepare(self._turns.ours_above(promised), now)

    def _prepare(self, ballot: int, now: float) -> list[Action]:
        seat = self._seat
        assert ballot > seat.votes.promised, f"ballot {ballot} after {seat.votes.promised}"
        self._turns.follow(ballot, now)
        own = {seat.me: seat.promise(ballot, seat.votes.accepted)}
        self._give_way()
        self._lead = Lead(ballot, now, promises={seat.me: seat.votes.accepted}, signed=own)
        self._lead.resend_at = now + seat.jittered(seat.timing.retry_s)
        return [seat.vote(promised=ballot), *send_all(seat.others, Prepare(*seat.at(), ballot))]

    def _go_on_leading(self, lead: Lead, now: float) -> list[Action]:
        seat = self._seat
        if lead.ballot < seat.votes.promised:
            return self._give_way()
        actions: list[Action] = []
        if lead.value is None:
            actions += self._choose(lead, now)
        elif lead.nacked.keys() - self._excluded and not self._seat.is_quorum(self._could_ack(lead, now)):
            self._excluded |= lead.most_refused(self._excluded)
            return self._lead_above(seat.votes.promised, now)
        if self._lead is lead and self.certificate is None:
            if now >= self._turns.due:  # our ballot goes on, though, until somebody asks in a higher one
                return actions + self._next_turn(now)
            if now >= lead.outbid_at:
                return actions + self._lead_above(max(lead.outbid, seat.votes.promised), now)
            if now >= lead.resend_at:
                lead.resend_at = now + seat.jittered(seat.timing.retry_s)
                actions += self._ask_again(lead)
        return actions

    def _give_way(self) -> list[Action]:
        self._overtaken, self._lead = self._lead if self._lead and self._lead.value else self._overtaken, None
        return []

    def _count(self, lead: Lead, value: Value) -> None:
        """With a quorum of ACKs it is certified, overtaken or not: whoever leads above it has to find its value, and may propose no other."""
        if self._seat.is_quorum(lead.acks):
            self.certificate = self._seat.certificate(value, lead.acks, view=self._seat.place.view, ballot=lead.ballot)

    def _choose(self, lead: Lead, now: float) -> list[Action]:
        """With a quorum of promises: the accepted value of the highest ballot, else one of our own."""
        if not self._seat.is_quorum(lead.promises):
            return []
        late = lead.started_at + (self._turns.due - lead.started_at) / 2
        heeded = unhindered(lead.promises, self._seat.is_quorum, lambda value: self._is_hindrance(value, now))
        forced = self._forced_value(heeded)
        are_more_to_come = any(peer not in lead.promises for peer in self._could_ack(lead, now))
        if not self._seat.is_quorum(heeded):
            if now < self._turns.due and are_more_to_come:  # whoever answers next may not be bound by it
                return []
            heeded = lead.promises
            forced = self._forced_value(heeded)
        elif forced is not None and are_more_to_come and now < lead.started_at + self._seat.timing.retry_s:
            return []  # one vote for little, from a leader that meant ill, need not bind a quorum that gave none
        lead.shown = tuple(lead.signed[peer] for peer in sorted(heeded))
        if forced is not None and self.jury.would_refuse(forced, now) and not self.jury.is_excused(forced, lead.shown):
            return []  # it would be lost here, and our own vote would speak for it in the next ballot
        if forced is not None:
            sources = [peer for peer in sorted(lead.promises) if lead.promises[peer] is not None]
            actions: list[Action] = []
            for thing in forced.things:
                givers = self._conduct.best_first([*sources, thing.holder, *self._seat.others])
                actions += self._arrivals.want_thing(thing, givers, now)
            if self._may_accept(forced):
                actions += self._propose(lead, forced, now)
            return actions
        entries = self._drafts.entries(self._excluded, now)
        if not entries and now < late and (self._arrivals.are_under_way(now) or self.jury.are_too_few((), now)):
            return []
        return self._propose_own(lead, now)

    def _is_hindrance(self, value: Value, now: float) -> bool:
        return (
            not self._may_accept(value)
            or any(self._is_hopeless(thing) for thing in value.things)
            or self.jury.would_refuse(value, now)
            or (self._slicing is not None and self._slicing.why_not_vouched(value) is not None)
        )

    def _is_hopeless(self, thing: Thing) -> bool:
        failures = self._holdings.failures(thing.name)
        is_refused = self._holdings.is_refused(thing.name, part_of(thing))
        return thing.name in self._excluded or is_refused or failures >= self._seat.timing.blob_tries

    def _propose(self, lead: Lead, value: Value, now: float) -> list[Action]:
        """Accepts value ourselves, durably, before anyone else hears of it: one value a ballot, even after a crash."""
        seat = self._seat
        self._lead, lead.value = lead, value
        lead.outbid, lead.outbid_at = 0, FOREVER
        lead.resend_at = now + seat.jittered(seat.timing.retry_s)
        if self.proposed_at is None:
            self.proposed_at = now
        actions: list[Action] = []
        signature = seat.signature(value, view=seat.place.view, ballot=lead.ballot)
        accepted = Accepted(lead.ballot, value, signature, lead.shown, self._arrivals.authors(value.entries))
        if accepted != seat.votes.accepted:
            actions += self._backed(seat.vote(promised=lead.ballot, accepted=accepted))
        lead.acks[seat.me] = signature
        self._turns.proposed(lead.ballot, now)
        self._count(lead, value)
        return actions if self.certificate is not None else [*actions, *self._asked(lead, value, seat.others)]

    def _ask_again(self, lead: Lead) -> list[Action]:
        seat = self._seat
        if lead.value is None:
            silent = [peer for peer in seat.others if peer not in lead.promises]
            return [*send_all(silent, Prepare(*seat.at(), lead.ballot))]
        return self._asked(lead, lead.value, [peer for peer in seat.others if peer not in lead.acks])

    def _asked(self, lead: Lead, value: Value, peers: Iterable[PeerId]) -> list[Action]:
        signature, authors = lead.acks[self._seat.me], self._arrivals.authors(value.entries)
        return [*send_all(peers, Propose(*self._seat.at(), lead.ballot, value, signature, lead.shown, authors))]

    def _could_ack(self, lead: Lead, now: float) -> set[PeerId]:
        return {peer for peer in self._seat.order if peer not in lead.nackers and self._members.takes_part(peer, now)}

    def _propose_own(self, lead: Lead, now: float) -> list[Action]:
        value, actions = self._drafts.next(lead.ballot, self._excluded, now)
        return actions if value is None else self._propose(lead, value, now)

    def on_refused(self, blob: Digest, reason: str, part: BlobPart | None) -> list[Action]:
        pending = self.pending
        leader = pending.leader if pending is not None and blob in pending.value.blobs else None
        return self._arrivals.refused(blob, reason, leader, part)

    def settle(self, certificate: Certificate, now: float) -> list[Note]:
        """What this round, certified, tells of the others. Gives back whose contributions it goes without."""
        alive = {peer for peer in self._members.alive(now) if self._members.takes_part(peer, now)}
        able = alive if self._slicing is None or not self._slicing.excuses(now) else ()
        self.jury.hear_certificate(certificate)
        self._arrivals.settle(certificate.value.entries, now)
        self.jury.settle_leaders(certificate.ballot, able, now, is_late=self._arrivals.leader_is_late(now))
        self._conduct.round_certified(self._seat.place.roster, alive, now)
        return self._arrivals.missed_by(certificate, now)

    def _end_round(self, now: float) -> None:
        self._arrivals.end(now)
        self._turns.begin(self._arrivals.offers_due)
