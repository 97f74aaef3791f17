"""Writing the roster anew when its quorum is lost, and for the first time at genesis. Pure.

A caller asks who is there, makes a void value whose roster is who answered, and needs the signatures of all of them.
A peer signs at most one value per (head, number), durably, and from then on votes in no ballot of the older view changes of
that head. Two view changes on one head have the same number only with disjoint rosters: that is the documented fork of a
partition longer than T_d; healing.py ends it.

    idle -> (quorum lost for T_d, my turn by rank) -> calling -> signing -> certificate
    calling, signing -> (not all in time) -> idle, and again with a higher number
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from dilocox_peer.peer.rounds.arrivals import Arrivals
from dilocox_peer.peer.rounds.attempts import Account, Attempts, Numbers, pause_s
from dilocox_peer.peer.rounds.chain import MAX_VIEWS, Chain, is_quorum
from dilocox_peer.peer.rounds.contract import Action, Send
from dilocox_peer.peer.rounds.membership import Members
from dilocox_peer.peer.rounds.ranks import rank_of
from dilocox_peer.peer.rounds.seat import Seat, send_all
from dilocox_peer.peer.rounds.timing import FOREVER
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import Certificate, Value
from dilocox_peer.wire.rounds import Directed, ViewAnswer, ViewCall, ViewPropose, ViewSign

TRIES = 2  # view changes of ours that another's is made to wait for
UNSIGNED = 2  # times; then it is in no roster that we propose here
# By which one sender may raise the number at a head, in all: else it would use up the MAX_VIEWS of it.
MAX_NUMBER_AHEAD = 1 << 20
MAX_IN_VAIN = 6  # view changes in a row after which the patience doubles no more


@dataclass(slots=True)
class _Call:
    """A view change of ours. value: None while answers are gathered."""

    number: int
    until: float
    resend_at: float
    asked: tuple[PeerId, ...]
    answered: set[PeerId] = field(default_factory=set)
    value: Value | None = None
    signatures: dict[PeerId, bytes] = field(default_factory=dict)


def changes_in_vain(certificates: Sequence[Certificate]) -> int:
    """View changes at the end of a chain after the first of them, as far as they count."""
    kinds = [certificate.value.kind for certificate in certificates[-MAX_IN_VAIN - 1 :]]
    rounds = [index for index, kind in enumerate(kinds) if kind == "round"]
    return max(len(kinds) - (rounds[-1] + 1 if rounds else 0) - 1, 0)


def close_heads(chain: Chain, count: int) -> tuple[Digest, ...]:
    """So many newest heads of chain, oldest first: who holds the state at one of them comes along, and may be in the next roster. None
    from before a view change that no quorum signed: a peer there may stay with the roster it had, and one of such peers stands still."""
    heads, first = chain.newest_heads(count), chain.height - count + 1
    for height in reversed(chain.view_changes(max(first, 1))):
        signers = [peer for peer, _ in chain.certificates[height].signatures]
        if not is_quorum(signers, chain.place_at(height).voters):
            return heads[height - chain.height :]
    return heads


class ViewChanges:
    """The view changes called on one head at one peer. `certificate` is set once all of a roster have signed."""

    def __init__(self, seat: Seat, arrivals: Arrivals, members: Members, now: float, *, in_vain: int = 0) -> None:
        """in_vain: view changes in a row that led to this head. Every one of them made the peers offer anew; the patience
        with a quorum that makes no progress doubles, or contributions slower than it would never arrive."""
        self._seat = seat
        self._arrivals = arrivals
        self._in_vain = min(in_vain, MAX_IN_VAIN)
        self._members = members
        self.certificate: Certificate | None = None
        self.reason = ""
        self._since = now
        self._lost_since: float | None = None
        self._offers_seen_at: float | None = None
        self._company_since = now
        self._company: frozenset[PeerId] = frozenset()
        self._call: _Call | None = None
        self._numbers = Numbers(max(seat.place.view, seat.votes.view_change_signed), MAX_NUMBER_AHEAD)
        self._signed = Attempts(seat.timing.view_wait_s)  # proposals of others
        self._given_way_to = Attempts(seat.timing.view_wait_s)  # calls of others that ended ours
        self._failed = 0  # proposals of ours
        self._blocked_since: float | None = now if seat.votes.view_change_signed > seat.place.view else None
        self._not_before = now
        self._unsigned: Counter[PeerId] = Counter()  # rosters of ours that each agreed to and did not sign in time
        self._ranks: dict[PeerId, tuple[bool, bytes]] = {}

    # ---- whether one is needed ----

    def watch(self, now: float) -> None:
        """Takes note of who is there; call before anything below."""
        seat = self._seat
        if seat.place.is_genesis:
            company = frozenset(self._members.at(seat.place.head, now))
            if company - self._company:
                self._company_since = now
            self._company = company
            return
        if not seat.is_member:  # nobody sends it offers, and its answer is wanted too when they lead to nothing
            seen_at = now if self._offers_seen_at is None else self._offers_seen_at
            self._offers_seen_at = seen_at if self._somebody_has_offered(now) else None
        if is_quorum(self._members.here(now), seat.place.voters):
            self._lost_since = None
        elif self._lost_since is None:
            self._lost_since = now

    def _somebody_has_offered(self, now: float) -> bool:
        """Whether one of the roster says so: it trains for the round after."""
        seat, here = self._seat, self._members.at(self._seat.place.head, now)
        said = (self._members[peer].said for peer in seat.place.roster if peer in here)
        return any(each is not None and each.training_round > seat.place.round + 1 for each in said)

    def give_up(self, now: float) -> None:
        """What was certified here cannot be followed by anyone: no round will come, and no waiting helps."""
        if self._blocked_since is None:
            self._blocked_since = now

    def overdue(self, now: float) -> float | None:
        """Seconds since a view change fell due (negative: until then), None if none is needed."""
        seat = self._seat
        if seat.place.is_genesis:
            return self._genesis_overdue(now)
        waits = []
        ended_at = self._offers_seen_at if self._arrivals.ended_at is None else self._arrivals.ended_at
        if self._lost_since is not None:
            waits.append(self._lost_since + self._degrade_s())
        if ended_at is not None:
            waits.append(ended_at + self._stuck_s())
        if self._blocked_since is not None:
            waits.append(self._blocked_since + 2 * seat.timing.view_wait_s)
        return now - min(waits) if waits else None

    def is_wanted(self, now: float) -> bool:
        """Whether the roster here does not work: at genesis, without a quorum for half the patience, or given up."""
        if self._seat.place.is_genesis or self._blocked_since is not None or self._call is not None:
            return True
        return self._lost_since is not None and now - self._lost_since >= self._degrade_s() / 2

    def has_more_here(self, others: Collection[PeerId], now: float) -> bool:
        """Whether more of our voters are ready here than are among the others, who have gone on along a view change of theirs, and they have the
        time to write one: else who is first to write one of itself alone has the rest go along, and is the quorum of all that follows."""
        seat = self._seat
        if seat.place.is_genesis:
            return False
        here = {*self._members.at(seat.place.head, now), seat.me}
        counted = self._counted(here.union(others))
        ready = here & counted
        roster, gone = set(seat.place.roster), set(others)
        ours, theirs = (len(ready - gone), len((here & roster) - gone)), (len(counted & gone), len(roster & gone))
        if ours <= theirs:  # where as many voters are on both sides, those without a vote decide
            return False
        overdue = self.overdue(now)
        patience_s = len(ready) * seat.timing.view_turn_s + TRIES * 3 * seat.timing.view_wait_s
        return overdue is None or overdue <= patience_s

    @property
    def patience_s(self) -> float:
        """How long a lost quorum is waited for where somebody has gone on: who can be followed has been met, also before the first round."""
        return self._seat.timing.degrade_refused_s if self._is_surely_lost() else self._seat.pace.degrade_s

    def _stuck_s(self) -> float:
        """Patience with a quorum that makes no progress; without one before the first round, with that."""
        patience_s = float((self._seat.pace.degrade_s + self._seat.pace.offer_wait_s) * 2**self._in_vain)
        if self._seat.place.round == 0 and self._lost_since is not None:
            return max(patience_s, self._degrade_s())
        return patience_s

    def _degrade_s(self) -> float:
        """Short if those surely gone are enough to take the quorum away: then no waiting brings it back. Long before the first
        round: peers that have never met are not a run that has lost its quorum, but lines that do not lead to each other."""
        if self._is_surely_lost():
            return self._seat.timing.degrade_refused_s
        if self._seat.place.round == 0:
            return max(self._seat.timing.first_degrade_s, self._seat.pace.degrade_s)
        return self._seat.pace.degrade_s

    def _is_surely_lost(self) -> bool:
        left = {peer for peer in self._seat.place.voters if not self._members.is_surely_gone(peer)}
        return not is_quorum(left, self._seat.place.voters)

    def _genesis_overdue(self, now: float) -> float | None:
        seat = self._seat
        if len(self._company) + 1 < seat.owner.start_peers or seat.place.founder is not None:
            return None
        due = self._company_since + seat.timing.settle_s
        if not self._company and self._members.known:
            due = max(due, self._since + seat.timing.genesis_patience_s)
        return now - due

    # ---- what comes in ----

    def on_call(self, sender: PeerId, message: ViewCall, now: float) -> list[Action]:
        """An answer, if we too see the need: one peer with a bad link must not dissolve a working roster."""
        seat, number = self._seat, message.number
        if not self._has_a_say(sender) or not self._agrees(sender, number, now):
            return []
        self._numbers.seen(self._by_seat(sender), number)
        if number <= seat.votes.view_change_signed:
            return [
                Send(sender, ViewAnswer(*seat.at(), seat.votes.view_change_signed))
            ]  # "too low": the caller learns by how much
        call = self._call
        account = self._by_vote(sender, now)
        is_ours_later = call is not None and call.value is None and self._rank(sender) < self._rank(seat.me)
        if is_ours_later and self._given_way_to.may(account, now):
            self._given_way_to.heeded(account, now)
            self._call = None
            self._not_before = now + seat.timing.view_wait_s * 2
        return [Send(sender, ViewAnswer(*seat.at(), number))]

    def _has_a_say(self, sender: PeerId) -> bool:
        """Whether what it calls or answers counts: a member has no use for a newcomer's, and by numbers that anybody can name it would call one that
        the other members do not heed."""
        seat = self._seat
        return seat.place.is_genesis or not seat.is_member or sender in seat.place.roster

    def on_answer(self, sender: PeerId, message: ViewAnswer) -> None:
        if not self._has_a_say(sender):
            return
        if self._numbers.reaches(account := self._by_seat(sender), message.number):
            self._numbers.seen(account, message.number)
        if self._call is not None and message.number == self._call.number and sender in self._call.asked:
            self._call.answered.add(sender)

    def on_propose(self, sender: PeerId, message: ViewPropose, now: float) -> tuple[list[Action], str | None]:
        seat, number, value = self._seat, message.number, message.value
        if seat.votes.view_change_signed == number and seat.votes.view_change == value:
            return [self._sign(sender, number, value)], None
        if not self._agrees(sender, number, now) or number <= seat.votes.view_change_signed:
            return [], None
        if not self._signed.may(account := self._by_vote(sender, now), now):
            return [], None
        if value.kind != "epoch" or seat.me not in value.roster or sender not in value.roster:
            return [], "proposes a view change without us or itself"
        if reason := seat.place.why_not(value, number, seat.owner.max_peers, seat.owner.plans):
            return [], reason
        if proven := [peer for peer in value.roster if seat.owner.conduct.is_proven(peer)]:
            return [], f"proposes a roster with {proven[0]}, of whom there is proof that it votes twice"
        if (directive := seat.directive) is not None and set(value.roster).intersection(seat.banned):
            told = Send(sender, Directed(*seat.at(), directive))  # it may not have heard
            return [told], "proposes a roster with who is banned"
        if seat.place.is_genesis and len(value.roster) < seat.owner.start_peers:
            return [], f"starts the run with {len(value.roster)} peers of {seat.owner.start_peers}"
        if not seat.place.is_genesis and self._is_torn(value, sender, now):
            return [], "proposes a roster without most of the members that are here"
        if self._call is not None and self._call.value is None:
            self._call = None
        self._numbers.seen(self._by_seat(sender), number)
        self._signed.heeded(account, now)
        self._blocked_since = now
        return [
            *self._backed(seat.vote(view_change_signed=number, view_change=value)),
            self._sign(sender, number, value),
        ], None

    def _is_torn(self, value: Value, sender: PeerId, now: float) -> bool:
        """Whether it leaves out most of the others that are ready here, several at least: with a roster of two for each of them, one could have
        all sign and none vote."""
        here = set(self._members.at(self._seat.place.head, now))
        ready = here & self._counted({self._seat.me, sender, *here})
        ready -= {self._seat.me, sender, *self._unsigned}
        missing = len(ready - set(value.roster))
        return missing > 1 and 2 * missing > len(ready)

    def _counted(self, peers: Collection[PeerId]) -> set[PeerId]:
        """Whom a comparison of two parts of the roster counts: its voters, as newcomers without a vote cost nothing. All of it if none of
        these peers votes: newcomers that are left alone are the run."""
        place = self._seat.place
        voters = set(place.voters)
        return set(place.roster) if voters.isdisjoint(peers) else voters

    def on_sign(self, sender: PeerId, message: ViewSign) -> str | None:
        call = self._call
        if call is None or call.value is None or message.number != call.number or sender not in call.value.roster:
            return None
        if message.value != call.value.digest():
            return "signs what was not proposed"
        if not self._seat.verifies(sender, message.signature, call.value, view=call.number, ballot=0):
            return "a signature that does not verify"
        call.signatures[sender] = message.signature
        return None

    # ---- what follows from it ----

    def advance(self, now: float) -> list[Action]:
        if self.certificate is not None:
            return []
        call = self._call
        if call is None:
            overdue = self.overdue(now)
            if overdue is None or overdue < 0 or now < self._not_before or not self._may_call(now):
                return []
            if overdue < self._turn(now) * self._seat.timing.view_turn_s:
                return []
            return self._start_call(now)
        if call.value is None:
            if now < call.until and len(call.answered) < len(call.asked):
                return self._ask_again(call, now)
            return self._ask_for_signatures(call, now)
        if len(call.signatures) == len(call.value.roster):
            self.certificate = self._seat.certificate(call.value, call.signatures, view=call.number, ballot=0)
            return []
        if now >= call.until:
            self._unsigned.update(set(call.value.roster) - call.signatures.keys())
            self._call = None
            self._failed += 1
            view_wait_s = self._seat.timing.view_wait_s
            # This proposal has taken the first part of the pause.
            unheeded_s = pause_s(self._failed, view_wait_s) - 2 * view_wait_s
            self._not_before = now + max(view_wait_s * self._seat.owner.rng.random(), unheeded_s)
            return []
        return self._ask_again(call, now)

    def deadline(self, now: float) -> float:
        if self._call is not None:
            return min(self._call.until, self._call.resend_at)
        overdue = self.overdue(now)
        if overdue is None:
            return FOREVER
        turn_s = self._turn(now) * self._seat.timing.view_turn_s if overdue >= 0 else 0.0
        return max(now - overdue + turn_s, self._not_before, now + 0.01)

    def _by_seat(self, sender: PeerId) -> Account:
        """Whose account its numbers are on. Those of strangers, without a seat, are on one."""
        place = self._seat.place
        return sender if place.is_genesis or sender in place.roster else None

    def _by_vote(self, sender: PeerId, now: float) -> Account:
        """Whose account its attempts are on. While a voter is here newcomers write no roster, and theirs are on one."""
        seat = self._seat
        counted = self._counted({seat.me, *self._members.at(seat.place.head, now)})
        return sender if seat.place.is_genesis or sender in counted else None

    def _agrees(self, sender: PeerId, number: int, now: float) -> bool:
        seat = self._seat
        if not seat.place.view < number <= seat.place.view + MAX_VIEWS:
            return False
        if not self._numbers.reaches(self._by_seat(sender), number):
            return False
        if seat.place.is_genesis or self._blocked_since is not None or self._call is not None:
            return True
        overdue = self.overdue(now)
        return overdue is not None and overdue > -self._patience_s() / 2

    def _patience_s(self) -> float:
        return self._degrade_s() if self._lost_since is not None else self._stuck_s()

    def _may_call(self, now: float) -> bool:
        """Whether it is for us to write the roster anew: a newcomer does only where no member is left."""
        here = self._members.at(self._seat.place.head, now)
        return self._seat.is_member or not any(peer in here for peer in self._seat.place.roster)

    def _candidates(self, now: float) -> list[PeerId]:
        """The peers that could be in the new roster: ready at this head and here, members in their order; others only where no member
        is left. Newcomers join a roster that works, they do not make one beside its members: else a crowd of them that one
        member calls would be the roster's quorum."""
        seat = self._seat
        here = {peer for peer in self._members.at(seat.place.head, now) if not seat.owner.conduct.is_proven(peer)}
        here -= {peer for peer, times in self._unsigned.items() if times >= UNSIGNED}  # or one could stop all of them
        here.difference_update(seat.banned)
        here.add(seat.me)
        old = [peer for peer in seat.place.roster if peer in here]
        return (old or sorted(here))[: seat.owner.max_peers]

    def _turn(self, now: float) -> int:
        """How many peers here come before us in rank; those of the roster before all others."""
        seat = self._seat
        here = self._members.at(seat.place.head, now)
        return sum(1 for peer in here if self._rank(peer) < self._rank(seat.me))

    def _rank(self, peer: PeerId) -> tuple[bool, bytes]:
        rank = self._ranks.get(peer)
        if rank is None:
            rank = self._ranks[peer] = (peer not in self._seat.order, rank_of(self._seat.turn, peer))
        return rank

    def _start_call(self, now: float) -> list[Action]:
        seat = self._seat
        signed = max(seat.votes.view_change_signed, seat.place.view)
        number = max(self._numbers.highest, signed) + 1
        if number > seat.place.view + MAX_VIEWS:
            number = signed + 1  # what others have called does not bind us
        self._numbers.called(number)
        asked = tuple(peer for peer in self._candidates(now) if peer != seat.me)
        self._call = _Call(
            number, until=now + seat.timing.view_wait_s, resend_at=now + seat.timing.retry_s, asked=asked
        )
        if not asked:
            return self._ask_for_signatures(self._call, now)
        return [*send_all(asked, ViewCall(*seat.at(), number))]

    def _ask_for_signatures(self, call: _Call, now: float) -> list[Action]:
        seat = self._seat
        here = call.answered | {seat.me}
        disagree = self._members.at(seat.place.head, now) - call.answered  # they see no need: a quorum of them goes on
        too_few = seat.place.is_genesis and len(here) < seat.owner.start_peers
        if call.number <= seat.votes.view_change_signed or too_few or is_quorum(disagree, seat.place.voters):
            self._call = None
            self._not_before = now + seat.timing.view_wait_s * (0.5 + seat.owner.rng.random())
            return []
        old = [peer for peer in seat.place.roster if peer in here]
        roster = old or sorted(here)
        call.value = seat.place.view_change(roster)
        call.until = now + 2 * seat.timing.view_wait_s
        call.resend_at = now + seat.timing.retry_s
        self._blocked_since = now
        actions = self._backed(seat.vote(view_change_signed=call.number, view_change=call.value))
        call.signatures[seat.me] = seat.signature(call.value, view=call.number, ballot=0)
        if len(roster) == 1:
            self.certificate = seat.certificate(call.value, call.signatures, view=call.number, ballot=0)
            return actions
        return [*actions, *send_all(sorted(set(roster) - {seat.me}), ViewPropose(*seat.at(), call.number, call.value))]

    def _ask_again(self, call: _Call, now: float) -> list[Action]:
        seat = self._seat
        if now < call.resend_at:
            return []
        call.resend_at = now + seat.timing.retry_s
        if call.value is None:
            return [*send_all(sorted(set(call.asked) - call.answered), ViewCall(*seat.at(), call.number))]
        silent = [peer for peer in call.value.roster if peer not in call.signatures]
        return [*send_all(silent, ViewPropose(*seat.at(), call.number, call.value))]

    def _sign(self, to: PeerId, number: int, value: Value) -> Action:
        signature = self._seat.signature(value, view=number, ballot=0)
        return Send(to, ViewSign(*self._seat.at(), number, value.digest(), signature))

    def _backed(self, persist: Action) -> list[Action]:
        """The Persist that must precede the signature."""
        return [persist]
