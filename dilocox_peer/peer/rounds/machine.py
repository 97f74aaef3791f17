"""The round protocol of one stage: a pure state machine, events and time in, actions out.

The same object runs in the simulator (tests/sim) and in the peer (averaging.py). It never reads a clock, a socket or a
file. This file puts its parts together; docs/protocol.md tells the story:

    contract.py    inputs and actions            seat.py      who we are at this head and what we voted there
    membership.py  who is there                  ballots.py   which offers make the next certificate
    holdings.py    which blobs are here          view_changes.py    a new roster when the quorum is lost, and at genesis
    arrivals.py    what came of the round        turns.py     whose turn it is to lead
    chain.py       what was agreed               healing.py   other chains, and the best of them
    forks.py       which of two chains counts (wire/checkpoints.py: what the run's owner vouches for)
    following.py   how far a better one is followed by now            replay.py   round by round, or a whole state
    timing.py      bounds and learned times      anchorage.py which anchor we hold, and getting another one whole

The chain (what was agreed; `head`) and the anchor we hold are kept apart. A certificate is adopted when its blobs, or a
whole state, are here: never before, so that a peer is never at a head it could not go on from. While a better chain is
known and not adopted, we certify nothing. Invariants (checked after every simulated event): I1-I5 and I7-I8 of docs/protocol.md.
"""

import itertools
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

from dilocox_peer.events import (
    BranchSwitched,
    EquivocationProved,
    MessageRefused,
    NeighbourLost,
    NeighbourSeen,
    RoundVouched,
    ViewChanged,
)
from dilocox_peer.peer.planning.plan import ANY_PLAN, PlanBounds
from dilocox_peer.peer.planning.planner import FixedPlanner, JudgingPlanner, Planner
from dilocox_peer.peer.rounds.anchorage import Anchorage
from dilocox_peer.peer.rounds.arrivals import Arrivals
from dilocox_peer.peer.rounds.ballots import Ballots
from dilocox_peer.peer.rounds.chain import Chain, Place, Suffix, Verifier, leader
from dilocox_peer.peer.rounds.conduct import Conduct
from dilocox_peer.peer.rounds.contract import (
    Action,
    Apply,
    BlobHeld,
    BlobLost,
    BlobMissing,
    BlobRefused,
    Closed,
    ForgetBlobs,
    Input,
    Leaving,
    Note,
    OwnerVouched,
    PeerFound,
    PeerRefused,
    Persist,
    Progress,
    Received,
    Send,
    StateComputed,
    StateInstalled,
    StateMissing,
    Tick,
)
from dilocox_peer.peer.rounds.durable import Durable, Votes, newest_left, sealed_votes
from dilocox_peer.peer.rounds.following import Following
from dilocox_peer.peer.rounds.forks import Forks
from dilocox_peer.peer.rounds.healing import Healing
from dilocox_peer.peer.rounds.holdings import Holdings
from dilocox_peer.peer.rounds.membership import Members
from dilocox_peer.peer.rounds.refusals import Refusals
from dilocox_peer.peer.rounds.replay import FETCHED_AHEAD, Replay
from dilocox_peer.peer.rounds.seat import Owner, Seat, send_all
from dilocox_peer.peer.rounds.seats import SeatTerms
from dilocox_peer.peer.rounds.timing import CLOSE_BEHIND, Pace, Timing
from dilocox_peer.peer.rounds.view_changes import MAX_IN_VAIN, ViewChanges
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import Certificate, Entry, Plan
from dilocox_peer.wire.checkpoints import Checkpoint
from dilocox_peer.wire.rounds import (
    Ack,
    Cert,
    ChainPage,
    GetChain,
    Heartbeat,
    Leave,
    Message,
    Nack,
    Offer,
    Prepare,
    Promise,
    Proof,
    Propose,
    ViewAnswer,
    ViewCall,
    ViewPropose,
    ViewSign,
    Vouch,
)

Wait = Literal["owner", "state"]

_FROM_ANYBODY = (GetChain, ChainPage, Cert, Vouch)
PLANNED_FROM = 256  # newest certificates that a planner is shown at a restart


class RoundMachine:
    """One peer of one stage."""

    ballots_type: type[Ballots] = Ballots  # the simulator plants faulty ones
    view_changes_type: type[ViewChanges] = ViewChanges
    replay_type: type[Replay] = Replay

    def __init__(
        self,
        *,
        me: PeerId,
        incarnation: int,
        stage: int,
        genesis: Digest,
        timing: Timing,
        sign: Callable[[bytes], bytes],
        verify: Verifier,
        rng: random.Random,
        now: float,
        plan: Plan,
        start_peers: int,
        max_peers: int,
        plans: PlanBounds = ANY_PLAN,
        planner: Planner | None = None,
        durable: Durable | None = None,
        stored_states: Collection[Digest] = (),
        stored_blobs: Collection[Digest] = (),
        run_owner: PeerId | None = None,
        max_back: int | None = None,
        seats: SeatTerms | None = None,
        state_bytes: int = 0,
    ) -> None:
        """plan: of round 1. run_owner: signs the first roster and checkpoints; None: the first peers start the run, and
        nobody vouches for it. max_back: rounds that may be taken back without the owner's word. seats: how newcomers earn a vote. planner: of the later ones; None keeps its codec, rank and H. durable: what load_log gave.
        stored_states: heads of the anchor states that are on our disk. stored_blobs: contributions there. state_bytes: of a whole
        state, as a donor sends it; 0: not known."""
        self._pace = Pace(timing)
        judge = JudgingPlanner(planner if planner is not None else FixedPlanner(plans))
        self._conduct = Conduct(me)
        self._owner = Owner(
            me, incarnation, sign, verify, timing, self._pace, rng, start_peers, max_peers, plans, judge,
            self._conduct, itertools.count(incarnation),
        )  # fmt: skip
        self._run_owner, self._genesis = run_owner, genesis
        self._timing = timing
        self._rng = rng
        self._first_plan = plan
        genesis_place = Place.genesis(stage, genesis, FixedPlanner(plans).next(plan), run_owner, seats)
        self._chain = Chain(genesis_place, durable.appended if durable is not None else ())
        for certificate in self._chain.certificates[-PLANNED_FROM:]:
            judge.observe(certificate)
        self._members = Members(me, timing)
        self._holdings = Holdings(timing)
        self._replay = self.replay_type(
            me, self._chain, self._holdings, self._members, self._conduct, timing, state_bytes
        )
        checkpoint = durable.checkpoint if durable is not None else None
        self._forks = Forks(self._chain, max_back=max_back, checkpoint=checkpoint)
        self._following = Following(me, self._chain, self._forks, self._members)
        self._healing = Healing(self._owner, self._chain, self._forks, self._allowed)
        self._anchor = Anchorage(
            (me, incarnation), self._chain, self._forks, self._members, timing, rng, stored_states, now
        )
        self._micro_batches = 0
        self._is_paused = False
        self._sent_ahead: Digest | None = None
        self._left = durable.left if durable is not None else ()
        self._ahead = 0  # the highest round of a better chain met so far
        self._again: Certificate | None = None  # its Apply waits for a blob that our disk has lost
        self._head_since = now
        self._now = now
        self._beat_at = now
        self._due = now
        self._beats = 0
        self._was_alive: set[PeerId] = set()
        self._refusals = Refusals()
        self._has_left = False
        if stored_blobs:
            of_round = {
                entry.blob: each.value.round for each in self._chain.certificates for entry in each.value.entries
            }
            for blob in stored_blobs:
                self._holdings.stored(blob, of_round.get(blob, self.round))
        votes = durable.votes if durable is not None else Votes(self._chain.head)
        self._sit_down(votes, now)
        if votes.accepted is not None:
            for entry in votes.accepted.value.entries:
                self._holdings.held(entry.blob, self.round + 1, entry.size_bytes)

    # ---- what the session reads ----

    @property
    def head(self) -> Digest:
        return self._chain.head

    @property
    def round(self) -> int:
        """Outer rounds certified at our head."""
        return self._chain.place.round

    @property
    def view(self) -> int:
        return self._chain.place.view

    @property
    def roster(self) -> tuple[PeerId, ...]:
        """The peers that contribute to the next round, in order; empty at genesis. Those of them that vote: `voters`."""
        return self._chain.place.roster

    @property
    def voters(self) -> tuple[PeerId, ...]:
        """Those of the roster whose votes certify the next round."""
        return self._chain.place.voters

    @property
    def chain(self) -> Sequence[Certificate]:
        """All certificates from genesis on; do not modify."""
        return self._chain.certificates

    @property
    def leader(self) -> PeerId | None:
        """The peer that proposes first at this head; None at genesis."""
        return leader(self.voters, self.head, 0) if self.voters else None

    @property
    def state_digest(self) -> bytes:
        """Of our anchor at `head`, b"" while it is not computed or not known."""
        return self._anchor.digest

    @property
    def is_ready(self) -> bool:
        """Whether the anchor at `head` is ours, or will be once the Applies already given are done: no FetchState is
        needed. False: training makes no sense, its pseudo-gradient could not be offered."""
        return self._anchor.is_current

    def is_wanted(self, head: Digest) -> bool:
        """Whether the state at head, which FetchState asked for, is still to be installed; no: StateMissing is the answer."""
        return self._anchor.is_wanted(head, self._path)

    @property
    def may_train(self) -> bool:
        """Whether local steps make sense: the anchor is ours, the run has started (it waits for its first peers, and
        whoever came early must not outweigh them in the first round), and it has not gone on without us."""
        return self.is_ready and bool(self.roster) and not self._is_left_behind

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The newest of the run's owner that is known here."""
        return self._forks.checkpoint

    def waits_for(self, now: float) -> Wait | None:
        """What we can do nothing without: the owner's signature, or somebody who holds the run's state. None: nothing."""
        if self._anchor.is_fetching:
            return None
        if not self._is_left_behind and not (self.round == 0 and self._ahead):
            return "owner" if self._chain.place.founder is not None else None
        heads = [] if self._healing.path is None else list(self._healing.path.heads)
        if self.checkpoint is not None:
            heads.append(self.checkpoint.head)
        return None if any(self._members.at(head, now) for head in heads) else "state"

    @property
    def unreached(self) -> list[PeerId]:
        """Peers of our stage that discovery has named, where none was ever heard."""
        return self._members.unreached()

    @property
    def _is_left_behind(self) -> bool:
        """Whether we are to certify nothing before we have the run's state: it is over, or it has begun and what we hold is
        where it began. A peer that comes back to a run must not begin it anew alone."""
        checkpoint = self.checkpoint
        if checkpoint is not None and checkpoint.is_last and self._chain.height_of(checkpoint.head) is None:
            return True
        if self.round > 0:
            return False
        is_vouched = checkpoint is not None and checkpoint.round > 0
        return is_vouched or (self._ahead > 0 and not self._seat.is_member)

    @property
    def has_offered(self) -> bool:
        """Whether our contribution on top of `head` is out and not settled yet."""
        return self._arrivals.own is not None

    @property
    def may_offer(self) -> bool:
        """Whether a contribution closed now could be certified: we are in the roster, at its head, with nothing out."""
        return self._takes_part and self._seat.is_member and not self.has_offered

    @property
    def is_finished(self) -> bool:
        plans = self._owner.plans
        return plans.total_steps is not None and self.round > 0 and plans.is_last(self.plan_for(self.round))

    @property
    def training_round(self) -> int:
        """The round local steps belong to: the one after our head's, or after our offer."""
        return self.round + (2 if self.has_offered else 1)

    @property
    def reports(self) -> Mapping[PeerId, tuple[int, int]]:
        """(round in training, micro-batches done in it) as each peer last said, ourselves included. An offer says that
        its round is over, and comes before the next heartbeat."""
        said = {peer: self._members[peer].said for peer in self._members.known}
        reports = {peer: (each.training_round, each.micro_batches) for peer, each in said.items() if each is not None}
        for peer in self._arrivals.offers:
            if reports.get(peer, (0, 0))[0] < self.round + 2:
                reports[peer] = (self.round + 2, 0)
        return {**reports, self._owner.peer: (self.training_round, self._micro_batches)}

    def alive(self, now: float) -> set[PeerId]:
        """Peers heard within three heartbeats, and ourselves."""
        return self._members.alive(now) | {self._owner.peer}

    def working(self, now: float) -> set[PeerId]:
        """Those of `alive` that have not said they pause, and deliver what they offer: whose share of a round can be counted on."""
        counts = self._conduct.waited_for(self._members.alive(now))
        here = {peer for peer in counts if not self._members.is_paused(peer)}
        return here if self._is_paused else here | {self._owner.peer}

    def at_head(self, now: float) -> set[PeerId]:
        """Peers heard within three heartbeats that said they are at our head, and ourselves."""
        return set(self._members.at(self.head, now)) | {self._owner.peer}

    def plan_for(self, round_number: int) -> Plan:
        """The plan of a round, up to the one after next: what the certificate two rounds before it says."""
        if round_number <= 1:
            return self._first_plan
        for certificate in reversed(self._chain.certificates):
            if certificate.value.kind == "round" and certificate.value.round <= round_number - 2:
                return certificate.value.plan
        return self._chain.place_at(0).plan

    @property
    def last_round(self) -> int | None:
        """The number of the run's last round; None while it is not planned yet."""
        for number in range(max(self.round, 1), self.round + 3):
            if self._owner.plans.is_last(self.plan_for(number)):
                return number
        return None

    @property
    def plan_reason(self) -> str:
        """Why our planner last decided otherwise than before."""
        return self._owner.planner.reason

    @property
    def expected_rounds(self) -> int | None:
        """How many rounds the run will have if H stays as it is; None: it does not end."""
        total, plan = self._owner.plans.total_steps, self._chain.place.plan
        if total is None or self.last_round is not None:
            return self.last_round
        return self.round + 2 - (plan.end - total) // plan.inner_steps

    # ---- what happens ----

    def handle(self, event: Input, now: float) -> list[Action]:
        """What is to be done about event, in order. now: monotonic seconds, never less than before."""
        assert now >= self._now, f"time went back from {self._now} to {now}"
        if self._has_left:
            return []
        self._now = now
        actions = self._take_in(event)
        if self._has_left:
            return actions
        if now < self._due and isinstance(event, Received) and isinstance(event.message, Heartbeat):
            return actions  # most of what comes in; what follows from it can wait for our own next beat
        actions += self._go_on()
        self._due = self._next_due()
        return actions

    def deadline(self) -> float | None:
        """When to Tick if nothing else happens; None once we have left."""
        return None if self._has_left else self._due

    def _next_due(self) -> float:
        now, times = self._now, [self._beat_at, self._anchor.retry_at, self._holdings.deadline()]
        if self._takes_part:
            times.append(self._ballots.deadline(now))
            times.append(self._view_changes.deadline(now))
        return min((time for time in times if time > now), default=self._beat_at)

    def _take_in(self, event: Input) -> list[Action]:
        now = self._now
        match event:
            case Tick():
                pass
            case Received(sender, message):
                return self._receive(sender, message)
            case PeerFound(peer, addresses):
                is_new = self._members.add(peer)
                self._members.seen_in(peer, addresses)
                if is_new:
                    return [Send(peer, self._heartbeat())]
            case PeerRefused(peer):
                self._members.refused(peer)
            case Progress(micro_batches, tell_now, paused):
                self._micro_batches = micro_batches
                tell_now = tell_now or paused != self._is_paused
                self._is_paused = paused
                self._members.we_said(micro_batches=micro_batches, paused=paused)
                if tell_now:
                    self._beat_at = now
            case Closed(base, entry):
                self._close(base, entry)
            case BlobHeld(blob, size_bytes):
                self._holdings.held(blob, self.round + 1, size_bytes)
                self._arrivals.on_held(blob, now)
                self._conduct.came(blob)
            case BlobRefused(blob, reason):
                return self._ballots.on_refused(blob, reason)
            case BlobMissing(blob):
                self._holdings.missing(blob, now)
                self._conduct.failed(blob, self._members.alive(now))
            case BlobLost(blob, certificate):
                self._holdings.lost(blob)
                self._again = certificate
            case StateInstalled(head, state_digest):
                return self._install(head, state_digest)
            case StateMissing(head):
                self._anchor.missed(head, now)
            case StateComputed(head, state_digest):
                self._anchor.computed(head, state_digest)
                if not self._seat.is_member:
                    self._beat_at = now  # it is taken in by what it said last
            case OwnerVouched(checkpoint):
                return self._hear_owner(checkpoint)
            case Leaving():
                self._has_left = True
                goodbye = Leave(*self._seat.at(), self._owner.incarnation)
                return [*send_all(sorted({*self.roster, *self._members.alive(now)} - {self._owner.peer}), goodbye)]
        return []

    def _hear_owner(self, checkpoint: Checkpoint, sender: PeerId | None = None) -> list[Action]:
        """A newer checkpoint changes which chains count; it is made durable, and told to those here."""
        if self._run_owner is None or not checkpoint.is_newer(self._forks.checkpoint):
            return []
        if reason := checkpoint.why_not(
            stage=self._chain.place.stage, genesis=self._genesis, owner=self._run_owner, verify=self._owner.verify
        ):
            return self._refuse(sender, reason) if sender is not None else []
        self._forks.checkpoint = checkpoint
        self._healing.reconsider()
        told = {*self.roster, *self._members.alive(self._now)} - {self._owner.peer, sender}
        persist = Persist(Durable(self._chain.height, (), self._seat.votes, checkpoint))
        seen = Note(RoundVouched(checkpoint.round, self._chain.height_of(checkpoint.head) is not None))
        return [persist, seen, *send_all(sorted(told), Vouch(*self._seat.at(), checkpoint))]

    def _close(self, base: Digest, entry: Entry) -> None:
        assert entry.peer == self._owner.peer, f"an offer of {entry.peer} closed by {self._owner.peer}"
        self._micro_batches = 0
        self._members.we_said(micro_batches=0, paused=self._is_paused)
        if base == self.head and not self.has_offered and not self.is_finished:
            self._holdings.held(entry.blob, self.round + 1, entry.size_bytes)
            self._ballots.offer(entry, self._now)

    def _go_on(self) -> list[Action]:
        """All that is due by now."""
        actions: list[Action] = []
        self._view_changes.watch(self._now)
        self._watch_path()
        while True:
            actions += self._follow_path()
            if not self._takes_part:
                break
            self._view_changes.watch(self._now)
            actions += self._ballots.advance(self._now)
            actions += self._view_changes.advance(self._now)
            certificate = self._ballots.certificate
            if certificate is None or (certificate.head == self._sent_ahead and self._view_changes.certificate):
                certificate = self._view_changes.certificate  # what nobody can follow is no reason not to go on
            if certificate is None:
                break
            following = self._members.following(self._seat.recent, self._now)
            told = {*self.roster, *certificate.value.roster, *following} - {self._owner.peer}
            if self._has_drifted(certificate):
                actions += self._send_ahead(certificate, told)
                break
            actions += self._adopt(certificate)
            actions += send_all(sorted(told), Cert(*self._seat.at(), certificate))
        return actions + self._tell_of_others() + self._beat()

    def _tell_of_others(self) -> list[Action]:
        """What we have learned of others' conduct: to the user, and what can be proved to the roster too."""
        events, self._conduct.events = self._conduct.events, []
        actions: list[Action] = []
        for event in events:
            actions.append(Note(event))
            if isinstance(event, EquivocationProved) and (proof := self._conduct.proof_against(event.peer)):
                told = sorted({*self.roster, *self._members.alive(self._now)} - {self._owner.peer, event.peer})
                actions += send_all(told, Proof(*self._seat.at(), *proof))
        return actions

    def _send_ahead(self, certificate: Certificate, told: set[PeerId]) -> list[Action]:
        """A certificate we made and cannot apply, because our own anchor is not the one most others started from: it is
        theirs at once, ours when we have fetched the state from them. (Should they miss it, the next leader hears of its
        value and certifies it again.)"""
        if self._sent_ahead == certificate.head:
            return []
        self._sent_ahead = certificate.head
        self._healing.on_page(self._owner.peer, (certificate,), more=False, now=self._now)
        return [*send_all(sorted(told), Cert(*self._seat.at(), certificate)), *self._follow_path()]

    @property
    def _takes_part(self) -> bool:
        """Whether we certify: we hold the state, know of nothing better, and the run is not over."""
        return self.is_ready and self._path is None and not self.is_finished and not self._is_left_behind

    @property
    def _path(self) -> Suffix | None:
        """The better chain to follow, as far as it is to be followed by now."""
        return self._following.allowed(self._healing.path, self._view_changes, self._now)

    def _allowed(self, path: Suffix) -> Suffix | None:
        return self._following.allowed(path, self._view_changes, self._now)

    def _watch_path(self) -> None:
        path = self._healing.path
        self._following.watch(path, self._now)
        if path is not None:
            self._ahead = max(self._ahead, path.certificates[-1].value.round)

    # ---- messages ----

    def _receive(self, sender: PeerId, message: Message) -> list[Action]:
        now = self._now
        if sender == self._owner.peer:
            return []
        if message.stage != self._chain.place.stage:
            return []  # who moved here from another stage may still be greeted by those it left
        if isinstance(message, _FROM_ANYBODY) and sender not in self._members.known:
            is_new = False  # the owner's notary or a reader: no member, and no news of one
        else:
            is_new = self._members.add(sender)
            self._members.heard(sender, now)
        actions: list[Action] = [Send(sender, self._heartbeat())] if is_new else []
        match message:
            case Heartbeat():
                if self._members.said(sender, message):
                    actions += self._healing.heard_of(sender, message.head, now)
            case Leave():
                self._members.left(sender, message.incarnation)
            case GetChain():
                if (page := self._healing.page_after(message.locator)) is not None:
                    actions.append(Send(sender, page))
            case Cert():
                actions += self._take_certificates(sender, (message.certificate,), more=False)
            case ChainPage():
                actions += self._take_certificates(sender, message.certificates, more=message.more)
            case Vouch():
                actions += self._hear_owner(message.checkpoint, sender)
            case Proof(contradiction=proof):
                is_known = self._conduct.is_proven(proof.peer) or proof.peer not in {*self.roster, *self._members.known}
                if not is_known and not self._conduct.accuse(proof, message.stage, self._owner.verify):
                    actions += self._refuse(sender, f"a proof against {proof.peer} that proves nothing")
            case _:
                if message.head != self.head or message.view != self.view:
                    actions += self._tell_where_we_are(sender, message.head)
                elif self._takes_part:
                    actions += self._vote(sender, message)
                elif isinstance(message, Offer):  # it will be wanted, should we be back in time
                    actions += self._arrivals.on_offer(sender, message, now)[0]
        return actions

    def _vote(self, sender: PeerId, message: Message) -> list[Action]:
        now, ballots, view_changes = self._now, self._ballots, self._view_changes
        actions: list[Action] = []
        reason: str | None = None
        if isinstance(message, ViewCall | ViewAnswer | ViewPropose | ViewSign):
            view_changes.watch(now)
        elif not self._seat.may_vote and not (isinstance(message, Offer) and self._seat.is_member):
            return []
        match message:
            case Offer():
                actions, reason = self._arrivals.on_offer(sender, message, now)
            case Propose():
                actions, reason = ballots.on_propose(sender, message, now)
            case Ack():
                reason = ballots.on_ack(sender, message)
            case Nack():
                ballots.on_nack(sender, message, now)
            case Prepare():
                actions, reason = ballots.on_prepare(sender, message, now)
            case Promise():
                reason = ballots.on_promise(sender, message)
            case ViewCall():
                actions = view_changes.on_call(sender, message, now)
            case ViewAnswer():
                view_changes.on_answer(sender, message)
            case ViewPropose():
                actions, reason = view_changes.on_propose(sender, message, now)
            case ViewSign():
                reason = view_changes.on_sign(sender, message)
        return actions + (self._refuse(sender, reason) if reason else [])

    def _take_certificates(self, sender: PeerId, certificates: Sequence[Certificate], *, more: bool) -> list[Action]:
        questions, reason = self._healing.on_page(sender, certificates, more=more, now=self._now)
        return [*questions, *(self._refuse(sender, reason) if reason else [])]

    def _tell_where_we_are(self, peer: PeerId, head: Digest) -> list[Action]:
        """SYNC: a peer at a head in our past gets what follows it; one at an unknown head is asked, and told ours."""
        seen = self._members[peer]
        if self._now - seen.answered_at < self._timing.retry_s:
            return []
        seen.answered_at = self._now
        if self._chain.height_of(head) is not None:
            page = self._healing.page_after([head])
            assert page is not None, "a head of our chain"
            return [Send(peer, page)]
        return [Send(peer, self._heartbeat()), *self._healing.heard_of(peer, head, self._now)]

    def _refuse(self, peer: PeerId, reason: str) -> list[Action]:
        return [Note(MessageRefused(peer, reason))] if self._refusals.is_due(peer, self._now) else []

    # ---- heartbeats ----

    def _heartbeat(self) -> Heartbeat:
        place = self._chain.place
        return Heartbeat(
            *self._seat.at(), incarnation=self._owner.incarnation, height=place.height, round=place.round,
            weight=place.weight, training_round=self.training_round, micro_batches=self._micro_batches,
            ready=self._anchor.is_computed, state_digest=self.state_digest, paused=self._is_paused,
        )  # fmt: skip

    def _beat(self) -> list[Action]:
        """Heartbeats: every beat to the roster and to whoever is alive, now and then to the silent ones."""
        if self._now < self._beat_at:
            return []
        self._beat_at = self._now + self._timing.heartbeat_s * (0.9 + 0.2 * self._rng.random())
        self._beats += 1
        alive = self._members.alive(self._now)
        due = {*self.roster, *alive}
        if self._beats % self._timing.stranger_every == 0:
            here = (peer for peer in self._members.known if not self._members[peer].has_left)  # it says when it is back
            due.update(here)
        actions: list[Action] = [*send_all(sorted(due - {self._owner.peer}), self._heartbeat())]
        actions += [Note(NeighbourSeen(peer)) for peer in sorted(alive - self._was_alive)]
        for peer in sorted(self._was_alive - alive):
            reason = "silent"
            if peer in self._members.known:  # not any more, where more peers are heard than are remembered
                seen = self._members[peer]
                reason = "it left" if seen.has_left else "refuses connections" if seen.refused else "silent"
            actions.append(Note(NeighbourLost(peer, reason)))
        self._was_alive = alive
        return actions

    # ---- adopting ----

    def _first_votes(self) -> Votes:
        """At a new head; where we have been before and voted, and left for another branch, no vote is given again."""
        return sealed_votes(self.head, self.view) if self.head in self._left else Votes(self.head)

    def _sit_down(self, votes: Votes, now: float) -> None:
        """A new head: a new seat, nothing offered, no votes but these."""
        self._seat = Seat(self._owner, self._chain.place, votes, self._chain.newest_heads(1 + CLOSE_BEHIND))
        self._arrivals = Arrivals(self._seat, self._members, self._holdings, now)
        self._ballots = self.ballots_type(self._seat, self._arrivals, self._members, self._holdings, now)
        self._view_changes = self.view_changes_type(
            self._seat, self._arrivals, self._members, now, in_vain=self._changes_in_vain()
        )
        for peer in self.roster:
            self._members.add(peer)

    def _changes_in_vain(self) -> int:
        """View changes at the end of our chain, one after another."""
        kinds = [certificate.value.kind for certificate in self._chain.certificates[-MAX_IN_VAIN - 1 :]]
        rounds = [index for index, kind in enumerate(kinds) if kind == "round"]
        return max(len(kinds) - (rounds[-1] + 1 if rounds else 0) - 1, 0)

    def _adopt(self, certificate: Certificate) -> list[Action]:
        """Our head moves to its child, whose blobs are all here."""
        now, own = self._now, self._arrivals.own
        notes: list[Note] = []
        if certificate.value.kind == "round":
            self._pace.observe_round(now - self._head_since)
            self._arrivals.observe_missing(now)
            notes = self._ballots.settle(certificate, now)
            if self._ballots.proposed_at is not None:
                self._pace.observe_ballot(now - self._ballots.proposed_at)
        settled = own if own is not None and own in certificate.value.entries else None
        for entry in certificate.value.entries:
            self._holdings.certified(entry.blob, certificate.value.round)
        self._chain.append(certificate)
        self._owner.planner.observe(certificate)
        self._anchor.applying(self._chain.height)
        actions: list[Action] = [Persist(Durable(self._chain.height - 1, (certificate,), self._first_votes()))]
        return [*actions, Apply(certificate, settled), *notes, *self._arrive([certificate])]

    def _arrive(self, certificates: Sequence[Certificate]) -> list[Action]:
        """What every change of head brings with it."""
        self._head_since = self._now
        self._sit_down(self._first_votes(), self._now)
        self._healing.rebase()
        actions: list[Action] = [
            Note(
                ViewChanged(
                    each.view,
                    each.value.roster,
                    "the run starts" if each.value.height == 1 else "the old roster no longer certified",
                )
            )
            for each in certificates
            if each.value.kind == "epoch"
        ]
        if old := self._holdings.forget_before(*self._replay.first_kept()):
            actions.append(ForgetBlobs(old))
        return actions

    def _follow_path(self) -> list[Action]:
        """Towards the best chain known: certificate by certificate where the blobs can be had, else by a whole state."""
        self._anchor.expire(self._now)
        actions: list[Action] = [*self._anchor.restore(self._now)]
        actions += self._fetch_again()
        actions += self._replay_own()
        while not self._anchor.is_fetching and ((path := self._path) is not None or not self.is_ready):
            if path is None or not self._can_replay(path):
                if path is not None and self._anchor.is_hopeless(path, self._now):
                    if path.tip == self._sent_ahead:
                        self._view_changes.give_up(self._now)
                    self._healing.shun(self._now)
                    self._anchor.give_up()
                    continue
                return [*actions, *self._anchor.fetch(path, self._now)]
            certificate = path.certificates[0]
            actions += self._replay.want(path.certificates[:FETCHED_AHEAD], self._now)
            if not self._replay.is_here(certificate):
                return actions
            actions += self._adopt(certificate)
        return actions

    def _can_replay(self, path: Suffix) -> bool:
        """Whether the path goes on from the state we hold, is worth it, and the blobs of its next certificate may be had."""
        if not path.ancestor == self._anchor.height == self._chain.height or not self._replay.is_worth(path):
            return False
        return not self._has_drifted(path.certificates[0]) and not self._replay.is_lost(path.certificates[0])

    def _has_drifted(self, child: Certificate) -> bool:
        """Whether our anchor is not the one that most contributors to our head's child started from."""
        certified = child.value.state_digest
        return bool(certified and self.state_digest and certified != self.state_digest)

    def _fetch_again(self) -> list[Action]:
        """What an Apply that is given lacks, from the others; if it is not to be had there, another anchor is needed."""
        certificate = self._again
        if certificate is None:
            return []
        is_lost = self._replay.is_lost(certificate)
        if is_lost:
            self._anchor.lose()
        if is_lost or self._replay.is_here(certificate):
            self._again = None
            return []
        return [*self._replay.want([certificate], self._now)]

    def _replay_own(self) -> list[Action]:
        """After a restart: the certificates since the state on our disk, as far as their blobs are to be had."""
        actions: list[Action] = []
        while (
            not self._anchor.is_fetching
            and self._anchor.height is not None
            and self._anchor.height < self._chain.height
        ):
            certificate = self._chain.certificates[self._anchor.height]
            actions += self._replay.want([certificate], self._now)
            if self._replay.is_lost(certificate):
                self._anchor.lose()
            elif self._replay.is_here(certificate):
                actions.append(Apply(certificate, None))
                self._anchor.applying(self._anchor.height + 1)
            else:
                break
        return actions

    def _install(self, head: Digest, state_digest: bytes) -> list[Action]:
        """The anchor is now the one at head: our chain follows it there."""
        self._again = None  # with the Applies that wait
        suffix = self._anchor.installed(head, state_digest, self._now)
        if suffix is None:
            return []
        old_round = self.round
        left = (self.head,) if self._seat.votes != Votes(self.head) and suffix.ancestor < self._chain.height else ()
        self._left = newest_left(self._left, left)
        dropped = self._chain.truncate(suffix.ancestor)
        self._forks.left(suffix.ancestor, dropped)
        ancestor_round = self.round
        for certificate in suffix.certificates:
            self._chain.append(certificate)
            self._owner.planner.observe(certificate)
        switched = BranchSwitched(ancestor_round, old_round, self.round, self._orphans(dropped, suffix.certificates))
        persist = Persist(Durable(suffix.ancestor, suffix.certificates, self._first_votes(), left=left))
        actions = [persist, Note(switched), *self._arrive(suffix.certificates)]
        return [*actions, *self._replay.why_never(self._healing.path, self._anchor.took_s)]

    def _orphans(self, dropped: Sequence[Certificate], adopted: Sequence[Certificate]) -> int:
        """Own contributions in dropped certificates that the adopted ones do not have."""
        lost = {entry for each in dropped for entry in each.value.entries if entry.peer == self._owner.peer}
        return len(lost - {entry for each in adopted for entry in each.value.entries})
