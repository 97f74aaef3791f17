"""What a member makes of the others' votes at one head: what it believes, whom it heeds, and what it heard them sign. Pure.

Ballots ask it before they follow anybody. It holds no vote of ours, and nothing in it decides what is certified: it refuses,
or it does not.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from dilocox_peer.peer.rounds.arrivals import Arrivals
from dilocox_peer.peer.rounds.conduct import BALLOTS_A_HEAD, REFUSED_SPREAD
from dilocox_peer.peer.rounds.contract import Send
from dilocox_peer.peer.rounds.justified import Witness, is_forced, promise_statement
from dilocox_peer.peer.rounds.justified import why_not_justified as unjustified
from dilocox_peer.peer.rounds.membership import Members, name_of
from dilocox_peer.peer.rounds.named import why_not_signed
from dilocox_peer.peer.rounds.proposals import Pending
from dilocox_peer.peer.rounds.seat import Seat
from dilocox_peer.types import PeerId
from dilocox_peer.wire.chain import Certificate, Entry, Value
from dilocox_peer.wire.rounds import Accepted, Directed, Justification, Propose, Statement

MAX_JUMP = 1 << 20  # of a ballot above those known: of 64 peers, one that hears nobody is there after a week
MAX_ASKED = 4  # ballots of one member remembered per head


@dataclass(slots=True)
class _Asked:
    """What one member has asked for at this head. spent: ballots of its budget; promised: by us, and not proposed in yet;
    refused: how often."""

    spent: float = 0.0
    refilled_at: float = 0.0
    ballots: set[int] = field(default_factory=set)
    promised: dict[int, float] = field(default_factory=dict)
    refused: int = 0

    def remember(self, ballot: int) -> None:
        if len(self.ballots) < MAX_ASKED:
            self.ballots.add(ballot)


class Jury:
    """The votes of one (head, view), as one peer judges them."""

    def __init__(self, seat: Seat, arrivals: Arrivals, members: Members, now: float) -> None:
        self._seat = seat
        self._arrivals = arrivals
        self._members = members
        self._conduct = seat.owner.conduct
        self._began_at = now
        self._asked: dict[PeerId, _Asked] = {}
        self._reached: dict[PeerId, int] = {}  # the highest ballot that each has asked us for, heeded or not
        self._witness = Witness()
        self.accepted_of: set[PeerId] = set()  # leaders that proposed what we could accept

    # ---- what is believed ----

    def why_not_justified(self, ballot: int, value: Value, promises: Justification) -> str | None:
        seat = self._seat
        if ballot == 0:  # nothing can have been accepted before: what it showed would pass for having had no choice
            return "proposes in ballot 0 with promises" if promises else None
        return unjustified(promises, seat.at(), ballot, value.digest(), seat.place.voters, seat.owner.verify)

    def why_not_believed(self, leader: PeerId, value: Value, now: float) -> str | None:
        """Why we do not vote for what is within the run's bounds: a plan that does not follow, or work that nobody can do."""
        seat = self._seat
        if reason := seat.why_not_planned(value):
            self._conduct.strike(leader, "planned", reason)
            return reason
        for entry in value.entries:
            if reason := self.why_not_worked(entry, now, REFUSED_SPREAD):
                if (offered := self._arrivals.offers.get(entry.peer)) == entry:
                    self._conduct.strike(entry.peer, "claimed", reason)
                elif offered is not None:
                    self._conduct.strike(
                        leader, "led", f"says that {entry.peer} {reason}, which that has not said here"
                    )
                return f"has an entry of {entry.peer} that {reason}"
        return None

    def _why_expelled(self, value: Value, now: float) -> str | None:
        """Why value has not the next roster of who leads in good faith."""
        before = [peer for peer in self._seat.place.roster if not self._may_be_left_out(peer)]
        return self._members.why_expelled(before, value.roster, {entry.peer for entry in value.entries}, now)

    def _why_unseated(self, value: Value, now: float, leader: PeerId | None = None) -> str | None:
        """Why its next roster has too few of the voters, whoever wrote it. leader: who has proposed it."""
        return self._members.why_unseated(
            value.roster, now, is_unwanted=self._may_be_left_out, max_peers=self._seat.owner.max_peers, leader=leader
        )

    def _why_unknown(self, value: Value) -> str | None:
        """Why its next roster has newcomers of whom too little is known here."""
        place = self._seat.place
        vote_at_once = place.seats.terms.contributions == 0
        return self._members.why_unknown(place.roster, value.roster, vote_at_once=vote_at_once)

    def _may_be_left_out(self, peer: PeerId) -> bool:
        """Whether it is banned, or a proof against it is known here."""
        directive = self._seat.directive
        return (directive is not None and peer in directive.banned) or self._conduct.is_proven(peer)

    def would_refuse(self, value: Value, now: float) -> bool:
        """As why_not_believed, of a value that nobody proposes to us."""
        if self._why_expelled(value, now) or self._why_unseated(value, now):
            return True
        if self._why_unknown(value) or self.refused_newcomers(value.roster):
            return True
        if self.are_too_few(value.entries, now):
            return True
        is_overdone = any(self.why_not_worked(entry, now, REFUSED_SPREAD) for entry in value.entries)
        return is_overdone or self._seat.why_not_planned(value) is not None

    def why_withheld(self, leader: PeerId, message: Propose, now: float) -> str | None:
        """Why we do not vote for what leaves out, by the leader's choice, the directive of the run's owner that is known here, or members; or
        takes in newcomers that we may hear of."""
        seat, value = self._seat, message.value
        if self.is_excused(value, message.promises):
            return None
        reason = seat.owner.directing.why_withheld(value.directive, seat.place.directive)
        is_bound = is_forced(message.promises)  # by the vote of one that meant ill, as like as not
        if (reason := reason or self._why_expelled(value, now)) and not is_bound:
            self._conduct.strike(leader, "led", reason)
        reason = reason or self._why_unseated(value, now, None if is_bound else leader)
        return reason or self._why_unknown(value)

    def answers(self, leader: PeerId, message: Propose) -> list[Send]:
        """To a proposal that gets no vote: what its leader may not know. Without the newcomers that most have not met it gets one."""
        seat, value = self._seat, message.value
        directed = [Send(leader, Directed(*seat.at(), each)) for each in seat.to_carry]
        unmet = self._members.unmet(seat.place.roster, value.roster) if self._why_unknown(value) else []
        return [*directed, seat.nack(leader, message.ballot, tuple(map(name_of, unmet)))] if unmet else directed

    def refused_newcomers(self, roster: Collection[PeerId]) -> list[PeerId]:
        """Those of a next roster that too many had not met, when we led with them at this head."""
        excluded, before = self._arrivals.excluded, self._seat.place.roster
        return [peer for peer in roster if peer not in before and name_of(peer) in excluded] if excluded else []

    def why_not_worked(self, entry: Entry, now: float, spread: float = 1.0) -> str | None:
        """Why nobody can have done what entry claims, as far as we can know."""
        if entry.peer == self._seat.me:
            return None
        most = self._conduct.most_work(entry.peer, self._seat.place.roster, self._began_at, now)
        if most is None or entry.micro_batches <= spread * most:
            return None
        return f"claims {entry.micro_batches} micro-batches where at most {int(most)} can have been done"

    def puts_off(self, pending: Pending, now: float, *, late_at: float) -> bool:
        """Whether the proposal leaves out, by the leader's choice, what we hold and it is not late yet: later it is accepted all the same, as the leader
        may not have got it. One that is put off for having done so is given less time. A round of few is put off until others have had their time to
        lead: whoever is faster than the others would have rounds to itself, with nobody's norm beside its own."""
        entries, roster = pending.value.entries, self._seat.place.roster
        if self.is_excused(pending.value, pending.promises):
            return False
        if (ended_at := self._arrivals.ended_at) is None:
            return True  # nobody's round is over
        are_few = self.is_of_few(entries, now)
        is_time = now >= (self._arrivals.offers_due if self._conduct.leads(pending.leader) else late_at)
        if is_time and not self.are_too_few(entries, now):
            return False
        named = self._named_in(entries)
        omitted = [since for peer, since in self._arrivals.here(now).items() if peer not in named]
        then = self._arrivals.named_since(entries, pending.since)
        if is_forced(pending.promises):
            reason = None  # by the vote of one that meant ill, as like as not
        elif 3 * sum(since <= then for since in omitted) > len(roster):
            reason = f"led and left out {len(omitted)} contributions that are here"
        elif are_few and then < ended_at - self._seat.pace.ballot_s:
            reason = "led long before the others had ended their round"
        else:
            reason = None
            if are_few:
                self.accepted_of.add(pending.leader)  # it may have done what it could
        if reason is not None:
            self._conduct.strike(pending.leader, "led", reason)
        return are_few or 3 * len(omitted) > len(roster)

    def is_excused(self, value: Value, promises: Justification) -> bool:
        """Whether its leader had no choice: we had accepted it, or a quorum shows that it had. What fewer show they may have made up among them,
        and a leader by itself."""
        accepted, digest = self._seat.votes.accepted, value.digest()
        if accepted is not None and accepted.value == value:
            return True
        return self._seat.is_quorum(
            {each.peer for each in promises if each.accepted is not None and each.accepted[1] == digest}
        )

    def _named_in(self, entries: Sequence[Entry]) -> set[PeerId]:
        """Whose contributions these are: of several that offer one, one is named."""
        return {entry.peer for entry in entries} | self._arrivals.offering(entry.blob for entry in entries)

    def is_of_few(self, entries: Sequence[Entry], now: float) -> bool:
        """Whether these are contributions of fewer than half of the members of whom one is to be expected."""
        named = self._named_in(entries)
        return 2 * len(named) < len(named | self._arrivals.expected(now))

    def are_too_few(self, entries: Sequence[Entry], now: float) -> bool:
        """Whether it is too early for a round of few."""
        return self.is_of_few(entries, now) and now < self._arrivals.few_due(now)

    def is_in_reach(self, sender: PeerId, ballot: int, promised: int) -> bool:
        """Whether the ballot that sender leads is not too far above those known here. Without a bound, one message could use the numbers up: nobody
        reads a ballot above them. What two have asked for is known: by ballots far apart, one could have the others never heed each other."""
        known = self.highest(promised)
        if ballot <= known + 4 * MAX_JUMP:
            self._reached[sender] = max(ballot, self._reached.get(sender, 0))
        return ballot <= known + MAX_JUMP

    def highest(self, promised: int) -> int:
        """The highest ballot known here: promised, or what two members at least have come to."""
        reached = sorted(self._reached.values())
        return max(promised, reached[-2] if len(reached) > 1 else 0)

    def heeds(self, sender: PeerId, ballot: int, now: float, *, late_at: float) -> bool:
        """Whether the ballot is within the sender's budget: every one that is heeded takes the floor from whoever has it. A
        member that is put off has to wait until it is late by our own clock; then it may be the only one left to lead."""
        asked, ballot_s = self._asked.setdefault(sender, _Asked(refilled_at=now)), self._seat.pace.ballot_s
        asked.spent = max(0.0, asked.spent - (now - asked.refilled_at) / ballot_s)
        asked.refilled_at = now
        if asked.spent + 1 > BALLOTS_A_HEAD:
            if ballot not in asked.ballots and len(asked.ballots) >= MAX_ASKED:
                self._conduct.strike(sender, "outbid", f"asked for {len(asked.ballots)} ballots and more on one head")
            asked.remember(ballot)
            asked.refused += 1
            return False
        if sender not in self._conduct.trusted(self._seat.place.voters) and now < late_at:
            asked.refused += 1
            return False
        asked.spent += 1
        asked.promised[ballot] = now
        while len(asked.promised) > MAX_ASKED:
            del asked.promised[next(iter(asked.promised))]
        asked.remember(ballot)
        return True

    @property
    def heeds_all(self) -> bool:
        """Whether every ballot that was asked for here was heeded so far."""
        return not any(asked.refused for asked in self._asked.values())

    def is_answered(self, sender: PeerId) -> bool:
        """Whether the ballot that was not heeded just now gets an answer: a few a head do, and more would be work that anybody
        can have us do."""
        return self._asked[sender].refused <= MAX_ASKED

    def why_not_accepted(self, accepted: Accepted) -> str | None:
        """Why what a promise brings cannot have been proposed to its sender, or None."""
        seat, value = self._seat, accepted.value
        if value.kind != "round":
            return "accepted a view change in a ballot"
        if reason := seat.place.why_not(value, seat.place.view, seat.owner.max_peers, seat.owner.plans):
            return reason
        leader, ballot = seat.leader(accepted.ballot), accepted.ballot
        if not seat.verifies(leader, accepted.signature, value, view=seat.place.view, ballot=ballot):
            return f"accepted in ballot {accepted.ballot} what its leader did not sign"
        if reason := self.why_not_justified(accepted.ballot, value, accepted.promises):
            return f"accepted what {reason}"
        reason = self._arrivals.why_not_signed(value.entries, accepted.authors)
        if reason := reason or why_not_signed(value, seat.place, seat.owner.verify):
            return f"accepted {reason}"  # which no honest member did
        self.hear(leader, seat.voted(value, accepted.signature, ballot=ballot))
        self.hear_promises(accepted.ballot, accepted.promises)
        return None

    def proposed(self, leader: PeerId) -> None:
        """It has done in its ballot what it asked for."""
        if asked := self._asked.get(leader):
            asked.promised.clear()

    # ---- what they signed ----

    def hear(self, peer: PeerId, statement: Statement) -> None:
        """Remembers what a peer signed; the proof, should it have signed the contrary before."""
        if peer == self._seat.me or self._conduct.is_proven(peer):
            return
        if (proof := self._witness.hears(peer, statement)) is not None:
            self._conduct.accuse(proof, self._seat.place.stage, self._seat.owner.verify)

    def hear_promises(self, ballot: int, promises: Justification) -> None:
        for promised in promises:
            message = promise_statement(self._seat.at(), ballot, promised.accepted)
            self.hear(promised.peer, Statement(message, promised.signature))

    def hear_leader(self, message: Propose, leader: PeerId) -> None:
        """A proposal is its leader's acceptance, and shows promises of others."""
        seat, value, ballot = self._seat, message.value, message.ballot
        if seat.verifies(leader, message.signature, value, view=seat.place.view, ballot=ballot):
            self.hear(leader, seat.voted(value, message.signature, ballot=ballot))
            if self.why_not_justified(message.ballot, message.value, message.promises) is None:
                self.hear_promises(message.ballot, message.promises)

    def hear_certificate(self, certificate: Certificate) -> None:
        """The signatures of a verified certificate on our head."""
        if certificate.value.kind == "round" and certificate.view == self._seat.place.view:
            for peer, signature in certificate.signatures:
                self.hear(peer, self._seat.voted(certificate.value, signature, ballot=certificate.ballot))

    # ---- what became of it ----

    def settle_leaders(self, certified: int, alive: Collection[PeerId], now: float, *, is_late: bool) -> None:
        """A ballot is certified: what its leader and those of others were worth. alive: those of whom something was to be expected. is_late: the first had
        its time."""
        seat, conduct = self._seat, self._conduct
        leader = seat.leader(certified)
        conduct.led(leader)
        for peer, asked in self._asked.items():
            in_vain = [ballot for ballot, at in asked.promised.items() if now - at > seat.pace.ballot_s]
            if peer != leader and in_vain and peer in alive and min(in_vain) < certified:
                conduct.strike(peer, "outbid", f"asked for ballot {in_vain[0]} and proposed nothing in it")
        first = seat.leader(0)
        if certified > 0 and first in alive and first not in self.accepted_of and is_late:
            conduct.strike(first, "led", "its turn came and it proposed nothing that we could accept")
