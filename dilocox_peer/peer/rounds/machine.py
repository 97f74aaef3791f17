"""The round protocol of one stage: a pure state machine, events and time in, actions out.

The same object runs in the simulator (tests/sim) and in the peer (averaging.py). It never reads a clock, a socket or a
file. This file puts its parts together; docs/protocol.md tells the story:

    contract.py    inputs and actions            sitting.py   what goes on at one head:
    membership.py  who is there                    seat.py          who we are there and what we voted
    passing.py     messages by way of others       gathering.py     what members hold of slices
    heartbeats.py  what we say of ourselves        ballots.py       which offers make the next certificate
    holdings.py    which blobs are here            arrivals.py      what came of the round
    timing.py      bounds and learned times        turns.py         whose turn it is to lead
    slices.py      whose slices are whose          averages.py      what slices came to
    schedule.py    plans, and the last round       view_changes.py  a new roster when the quorum is lost, and at genesis
    chain.py       what was agreed               adoption.py  how the chain moves, and the anchor with it:
    conduct.py     who is waited for               healing.py       other chains, and the best of them
    telling.py     what strangers get of it        forks.py         which of two counts (wire/checkpoints.py: the owner's word)
    named_state.py the state a certificate names   following.py     how far a better one is followed by now
                                                   ending.py        whether the run's end is believed
                                                   replay.py        round by round, or a whole state:
                                                   anchorage.py     which anchor we hold, and getting another one whole

The chain (what was agreed; `head`) and the anchor we hold are kept apart. While a better chain is known and not adopted, we
certify nothing. Invariants: docs/protocol.md.
"""

import itertools
import random
from collections.abc import Callable, Collection, Mapping, Sequence

from dilocox_peer.contract import Leaving, Note, Tick
from dilocox_peer.events import EquivocationProved, MessageRefused
from dilocox_peer.peer.planning.plan import ANY_PLAN, PlanBounds
from dilocox_peer.peer.planning.planner import FixedPlanner, JudgingPlanner, Planner
from dilocox_peer.peer.rounds.adoption import Adoption, Wait, show_newest
from dilocox_peer.peer.rounds.anchorage import Anchorage
from dilocox_peer.peer.rounds.chain import Chain, Place, Verifier
from dilocox_peer.peer.rounds.conduct import Conduct
from dilocox_peer.peer.rounds.contract import (
    Action,
    BlobHeld,
    BlobLost,
    BlobMissing,
    BlobRefused,
    BytesCame,
    Closed,
    Input,
    OwnerSpoke,
    OwnerVouched,
    PeerFound,
    PeerRefused,
    PeerUnreached,
    Received,
    RoundProgress,
    Send,
    SliceAveraged,
    StateComputed,
    StateInstalled,
    StateMissing,
)
from dilocox_peer.peer.rounds.crowds import Crowds
from dilocox_peer.peer.rounds.directing import Authority, Directing
from dilocox_peer.peer.rounds.durable import Durable, Votes
from dilocox_peer.peer.rounds.ending import Ending
from dilocox_peer.peer.rounds.forks import Forks
from dilocox_peer.peer.rounds.heartbeats import Heartbeats
from dilocox_peer.peer.rounds.holdings import Holdings
from dilocox_peer.peer.rounds.membership import Members
from dilocox_peer.peer.rounds.passing import Passing
from dilocox_peer.peer.rounds.refusals import Refusals
from dilocox_peer.peer.rounds.replay import Replay
from dilocox_peer.peer.rounds.schedule import Schedule
from dilocox_peer.peer.rounds.seat import Owner, Seat, send_all
from dilocox_peer.peer.rounds.seats import SeatTerms
from dilocox_peer.peer.rounds.sitting import Sitting
from dilocox_peer.peer.rounds.timing import CLOSE_BEHIND, MAX_REPLAYED, Pace, Timing
from dilocox_peer.peer.rounds.view_changes import changes_in_vain, close_heads
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import Certificate, Plan
from dilocox_peer.wire.checkpoints import Checkpoint
from dilocox_peer.wire.directives import Directive
from dilocox_peer.wire.rounds import Cert, ChainPage, Directed, GetChain, Heartbeat, Leave, Message, Offer, Proof, Vouch

_FROM_ANYBODY = (GetChain, ChainPage, Cert, Vouch, Directed)


class RoundMachine:
    """One peer of one stage. schedule: of the rounds, by the chain as it is by now. history: that chain. copying: to be asked every WANTED_S while a state comes."""

    sitting_type: type[Sitting] = Sitting  # the simulator plants faulty ones
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
        chain: Chain | None = None,
        stored_states: Collection[Digest] = (),
        stored_blobs: Collection[Digest] = (),
        run_owner: PeerId | None = None,
        authority: Authority | None = None,
        max_back: int | None = None,
        seats: SeatTerms | None = None,
        state_bytes: int = 0,
        slices: int = 0,
    ) -> None:
        """plan: of round 1. run_owner: signs the first roster and checkpoints; None: the first peers start the run, and
        nobody vouches for it. slices: in which the run averages; 0: all to all. authority: whose directives apply. max_back: rounds that may be taken back without the owner's word. seats: how newcomers earn a vote. planner: of the later ones; None keeps its codec, rank and H. durable: what load_log gave. chain: that it has; None: made of it.
        stored_states: heads of the anchor states that are on our disk. stored_blobs: contributions there. state_bytes: of a whole state, as a donor sends it; 0: not known."""
        self._now, self._due, self._crowds = now, now, Crowds()
        judge = JudgingPlanner(planner if planner is not None else FixedPlanner(plans))
        self._conduct = Conduct(me)
        self._owner = Owner(
            me, incarnation, sign, verify, timing, Pace(timing), rng, start_peers, max_peers, plans, judge,
            self._conduct, itertools.count(incarnation), Directing(authority),
        )  # fmt: skip
        start = Place.genesis(stage, genesis, FixedPlanner(plans).next(plan), run_owner, seats, authority, slices)
        self._chain = self.history = chain or Chain(start, durable.appended if durable is not None else ())
        show_newest(judge, self._chain, plans)
        self.schedule = Schedule(self._chain, plans, plan)
        self._members = Members(me, timing)
        self._holdings = Holdings(timing)
        newest = self._chain.certificates[-2 * MAX_REPLAYED :]  # those of before were forgotten, but for a crash
        self._holdings.found(stored_blobs, newest, self.round)
        self._forks = Forks(self._chain, max_back=max_back, checkpoint=durable.checkpoint if durable else None, me=me)
        self._adoption = Adoption(
            self._owner, self._chain, self._forks, self._members, self._holdings,
            replay=self.replay_type(me, self._chain, self._holdings, self._members, self._conduct, timing, state_bytes),
            anchor=Anchorage((me, incarnation), self._chain, self._forks, self._members, timing, rng, self._holdings.is_own, stored_states, now),
            sit=self._sit_down, durable=durable, now=now,
        )  # fmt: skip
        self.telling, self.copying = self._adoption.healing.telling, self._adoption.copying
        if durable is not None and durable.votes.accepted is not None:
            self._holdings.held_all(durable.votes.accepted.value.things, self.round + 1)
        self._ending = Ending(me, self._chain, self._forks, self._members, now)
        self._heartbeats = Heartbeats(self._owner, self._members, now)
        self._passing = Passing(self._owner, genesis, self._members, hear=self._receive, refuse=self._refuse)
        self._refusals, self._has_left = Refusals(), False

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
        return self.sitting.seat.order[0] if self.voters else None

    @property
    def sitting(self) -> Sitting:
        """What goes on at `head`."""
        return self._adoption.sitting

    @property
    def state_digest(self) -> bytes:
        """Of our anchor at `head`, b"" while it is not computed or not known."""
        return self._adoption.anchor.digest

    @property
    def is_ready(self) -> bool:
        """Whether the anchor at `head` is ours, or will be once the Applies already given are done: no FetchState is needed."""
        return self._adoption.anchor.is_current

    def is_wanted(self, head: Digest) -> bool:
        """Whether the state at head, which FetchState asked for, is still to be installed; no: StateMissing is the answer."""
        return self._adoption.anchor.is_wanted(head, self._adoption.path)

    @property
    def may_train(self) -> bool:
        """Whether local steps make sense: the anchor is ours, the run has started (who came early must not outweigh its first peers in
        the first round), and it has not gone on without us."""
        return self.is_ready and bool(self.roster) and not self._adoption.is_left_behind

    @property
    def is_behind(self) -> bool:
        """Whether a better chain is known, whose next certificate we have not come to."""
        return self._adoption.path is not None

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The newest of the run's owner that is known here."""
        return self._forks.checkpoint

    @property
    def directive(self) -> Directive | None:
        """The newest of the run's owner that is known here, whether or not it applies yet."""
        return self._owner.directing.newest(self._chain.place.directive)

    def waits_for(self, now: float) -> Wait | None:
        """What we can do nothing without: the owner's signature, somebody who holds the run's state, the word that it is over. None: nothing."""
        if self.schedule.is_over and not self._ending.is_believed(now):
            return "end"
        return self._adoption.waits_for(now)

    def may_end(self, now: float) -> bool:
        """Whether the run is over at our head, and that is believed."""
        return self.schedule.is_over and self._ending.is_believed(now)

    @property
    def unreached(self) -> list[PeerId]:
        """Peers of our stage that discovery has named, where none was ever heard."""
        return self._members.unreached()

    @property
    def is_sliced(self) -> bool:
        """Whether the next round is averaged in slices."""
        return self._chain.place.is_sliced

    @property
    def has_offered(self) -> bool:
        """Whether our contribution on top of `head` is out and not settled yet."""
        return self.sitting.arrivals.own is not None

    @property
    def may_offer(self) -> bool:
        """Whether a contribution closed now could be certified: we are in the roster, at its head, with nothing out."""
        return self._takes_part and self.sitting.seat.is_member and not self.has_offered

    @property
    def training_round(self) -> int:
        """The round local steps belong to: the one after our head's, or after our offer."""
        return self.round + (2 if self.has_offered else 1)

    @property
    def reports(self) -> Mapping[PeerId, tuple[int, int]]:
        """(round in training, micro-batches done in it) as each peer last said or its offer says, ourselves included."""
        reports = self._members.reports(self.sitting.arrivals.offers, self.round + 2)
        return {**reports, self._owner.peer: (self.training_round, self._heartbeats.micro_batches)}

    @property
    def passed_on(self) -> set[PeerId]:
        """Peers that are heard by way of others alone."""
        return self._members.alive(self._now) & self._members.cut_off

    def alive(self, now: float) -> set[PeerId]:
        """Peers heard within three heartbeats, and ourselves."""
        return set(self._members.here(now))

    def working(self, now: float) -> set[PeerId]:
        """Those of `alive` that have not said they pause, and deliver what they offer: whose share of a round can be counted on."""
        counts = self._conduct.waited_for(self._members.alive(now))
        here = {peer for peer in counts if not self._members.is_paused(peer)}
        return here if self._heartbeats.is_paused else here | {self._owner.peer}

    def at_head(self, now: float) -> set[PeerId]:
        """Peers heard within three heartbeats that said they are at our head, and ourselves."""
        return set(self._members.at(self.head, now)) | {self._owner.peer}

    @property
    def plan_reason(self) -> str:
        """Why our planner last decided otherwise than before."""
        return self._owner.planner.reason

    def handle(self, event: Input, now: float, *, more: bool = False) -> list[Action]:
        """What is to be done about event, in order. now: monotonic seconds, never less than before. more: others wait already (crowds.py)."""
        assert now >= self._now, f"time went back from {self._now} to {now}"
        if self._has_left:
            return []
        self._now = self._adoption.now = now
        actions = self._take_in(event)
        self._heartbeats.told(actions, now)
        is_beat = isinstance(event, Received) and self._passing.was_beat
        if not self._has_left and not (is_beat and now < self._due):  # most of what comes in: it can wait for our own
            is_put_off = self._crowds.waits(event, more=more)
            actions += [] if is_put_off else self._go_on()
            self._due = now if is_put_off else self._next_due()
        return self._passing.through(actions, self.roster, now)

    def deadline(self) -> float | None:
        """When to Tick if nothing else happens; None once we have left."""
        return None if self._has_left else self._due

    def _next_due(self) -> float:
        sitting = self.sitting.deadlines(self._now) if self._takes_part else ()
        times = (self._heartbeats.due, self._adoption.anchor.retry_at, self._holdings.deadline(), *sitting)
        return min((time for time in times if time > self._now), default=self._heartbeats.due)

    def _take_in(self, event: Input) -> list[Action]:
        now = self._now
        match event:
            case Tick():
                pass
            case Received(sender, message):
                return self._passing.receive(sender, message, self.roster, now)
            case PeerFound(peer, addresses):
                is_new = self._members.add(peer)
                self._members.seen_in(peer, addresses)
                return [Send(peer, self._heartbeat())] if is_new else []
            case PeerRefused(peer, is_out):
                self._members.refused(peer, now, is_out=is_out)
            case PeerUnreached(peer):
                self._members.cut(peer, now)
            case BytesCame(peer):
                self._members.is_here(peer, now)
            case RoundProgress():
                self._heartbeats.progressed(event, now)
            case Closed():
                self._close(event)
            case BlobHeld(blob, size_bytes, parts, part):
                self._holdings.held(blob, self.round + 1, size_bytes, parts, part)
                self.sitting.arrivals.on_held(blob, now)
                self._conduct.came(blob, now)
            case BlobRefused(blob, reason, part):
                return self.sitting.ballots.on_refused(blob, reason, part)
            case BlobMissing(blob):
                if self._holdings.missing(blob, now):
                    self._conduct.failed(blob, self._members.alive(now))
            case SliceAveraged():
                if self.sitting.slicing is not None:
                    return self.sitting.slicing.averaged(event)
            case BlobLost(blob, certificate):
                self._holdings.lost(blob)
                self._adoption.lack(certificate)
            case StateInstalled(head, state_digest):
                return self._adoption.install(head, state_digest)
            case StateMissing(head):
                self._adoption.anchor.missed(head, now)
            case StateComputed(head, state_digest):
                self._adoption.anchor.computed(head, state_digest)
                if not self.sitting.seat.is_member:
                    self._heartbeats.due = now  # it is taken in by what it said last
            case OwnerVouched(checkpoint):
                return self._hear_owner(checkpoint)
            case OwnerSpoke(directive):
                return self._hear_directive(directive)
            case Leaving():
                self._has_left = True
                goodbye = Leave(*self.sitting.seat.at(), self._owner.incarnation)
                return [*send_all(self._everybody(), goodbye)]
        return []

    def _hear_owner(self, checkpoint: Checkpoint, sender: PeerId | None = None) -> list[Action]:
        """A newer checkpoint is told to those here."""
        actions, reason = self._adoption.hear_owner(checkpoint)
        if actions:
            actions += send_all(self._everybody(sender), Vouch(*self.sitting.seat.at(), checkpoint))
        return actions + (self._refuse(sender, reason) if reason and sender is not None else [])

    def _hear_directive(self, directive: Directive, sender: PeerId | None = None) -> list[Action]:
        """A newer one is told to those here; the next leader brings it into the chain."""
        told, reason = self._owner.directing.hear(directive, self._chain.place.directive)
        if told:
            return [*send_all(self._everybody(sender), Directed(*self.sitting.seat.at(), directive))]
        return self._refuse(sender, reason) if reason and sender is not None else []

    def _everybody(self, but: PeerId | None = None) -> list[PeerId]:
        """Those of the roster and those alive, without ourselves."""
        return sorted({*self.roster, *self._members.alive(self._now)} - {self._owner.peer, but})

    def _close(self, closed: Closed) -> None:
        entry = closed.entry
        assert entry.peer == self._owner.peer, f"an offer of {entry.peer}"
        self._heartbeats.closed()
        self._holdings.held_own(entry, self.round + 1, closed.parts)  # too late or not, it is on the disk
        if closed.base == self.head and not self.has_offered and not self.schedule.is_over:
            self.sitting.ballots.offer(entry, self._now)

    def _go_on(self) -> list[Action]:
        """All that is due by now."""
        now, adoption = self._now, self._adoption
        actions: list[Action] = []
        self.sitting.view_changes.watch(now)
        adoption.watch()
        while True:
            actions += adoption.follow()
            if not self._takes_part:
                break
            actions += self.sitting.advance(now)
            if (certificate := self.sitting.certificate(adoption.sent_ahead)) is None:
                break
            following = self._members.following(self._chain.newest_heads(1 + CLOSE_BEHIND), now)
            told = sorted({*self.roster, *certificate.value.roster, *following} - {self._owner.peer})
            if adoption.has_drifted(certificate):
                if adoption.send_ahead(certificate):
                    actions += [*send_all(told, Cert(*self.sitting.seat.at(), certificate)), *adoption.follow()]
                break
            actions += adoption.adopt(certificate)
            actions += send_all(told, Cert(*self.sitting.seat.at(), certificate))
        actions += self._tell_of_others()
        return actions + self._heartbeats.beat(actions, self.roster, self._heartbeat, now)

    def _tell_of_others(self) -> list[Action]:
        """What we have learned of others' conduct: to the user, and what can be proved to the roster too."""
        events, self._conduct.events = self._conduct.events, []
        actions: list[Action] = []
        for event in events:
            actions.append(Note(event))
            if isinstance(event, EquivocationProved) and (proof := self._conduct.proof_against(event.peer)):
                actions += send_all(self._everybody(event.peer), Proof(*self.sitting.seat.at(), *proof))
        return actions + [Note(told) for told in self._owner.directing.news(self._chain.place.directive)]

    @property
    def _takes_part(self) -> bool:
        """Whether we certify: nothing better is known, and the run is not over."""
        return self._adoption.is_at_the_end and not self.schedule.is_over

    def _sit_down(self, votes: Votes) -> Sitting:
        """A new head: a new seat, nothing offered, no votes but these."""
        seat = Seat(self._owner, self._chain.place, votes, close_heads(self._chain, 1 + CLOSE_BEHIND))
        self._members.sit_down(self.roster, self.voters, seat.recent, self._now)
        in_vain = changes_in_vain(self._chain.certificates)
        return self.sitting_type(seat, self._members, self._holdings, self._now, in_vain=in_vain)

    def _receive(self, sender: PeerId, message: Message) -> list[Action]:
        """A message of sender's, by whichever way it came."""
        now = self._now
        if sender == self._owner.peer or (self.directive is not None and sender in self.directive.banned):
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
                    actions += self._adoption.healing.heard_of(sender, message.head, now)
            case Leave():
                self._members.left(sender, message.incarnation)
            case GetChain():
                if (page := self._adoption.healing.answer(sender, message.locator, now)) is not None:
                    actions.append(Send(sender, page))
            case Cert():
                page = ChainPage(*self.sitting.seat.at(), (message.certificate,), more=False)
                actions += self._take_page(sender, page)
            case ChainPage():
                actions += self._take_page(sender, message)
            case Vouch():
                actions += self._hear_owner(message.checkpoint, sender)
            case Directed():
                actions += self._hear_directive(message.directive, sender)
            case Proof(contradiction=proof):
                is_known = self._conduct.is_proven(proof.peer) or proof.peer not in {*self.roster, *self._members.known}
                is_new = proof.peer not in self.roster and not self._members.has_voted(proof.peer)
                if not is_known and not self._conduct.accuse(proof, message.stage, self._owner.verify, is_new=is_new):
                    actions += self._refuse(sender, f"a proof against {proof.peer} that proves nothing")
            case _:
                if message.head != self.head or message.view != self.view:
                    actions += self._adoption.tell_where_we_are(sender, message.head, self._heartbeat)
                elif self._takes_part:
                    answers, reason = self.sitting.hear(sender, message, now)
                    actions += [*answers, *(self._refuse(sender, reason) if reason else [])]
                elif isinstance(message, Offer):  # it will be wanted, should we be back in time
                    actions += self.sitting.arrivals.on_offer(sender, message, now)[0]
        return actions

    def _take_page(self, sender: PeerId, page: ChainPage) -> list[Action]:
        questions, reason = self._adoption.healing.on_page(sender, page.certificates, more=page.more, now=self._now)
        refusal = self._refuse(sender, reason) if reason else []
        if refusal and self.checkpoint is not None and self._forks.holds_checkpoint(None):
            # A peer on a branch of its own may not have heard what the owner has signed, and nobody else says it again.
            refusal.append(Send(sender, Vouch(*self.sitting.seat.at(), self.checkpoint)))
        return [*questions, *refusal]

    def _refuse(self, peer: PeerId, reason: str) -> list[Action]:
        return [Note(MessageRefused(peer, reason))] if self._refusals.is_due(peer, self._now) else []

    def _heartbeat(self) -> Heartbeat:
        return self._heartbeats.now(self._chain.place, self.training_round, self._adoption.anchor)
