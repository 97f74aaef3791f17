"""The run's owner in one stage, as a pure object: signs the first roster once, and a checkpoint every few rounds.

It runs in the process that holds the owner's key (the bootstrap), unattended. It trains nothing and has no vote in rounds;
it asks the peers it knows for their chains, follows the one that counts (forks.py), and keeps it, so that who comes when
everybody is away learns where the run is, or that it is over.

    no chain  -> (enough peers at genesis, no new one for settle_s) -> first roster signed, made durable, told
    following -> (`every` rounds since the last checkpoint, or the end) -> checkpoint signed, made durable, told

It follows no roster that a minority wrote until that branch has stood for `patience_s` (patience.py), and for as long a quorum of the
roster before it, last heard elsewhere, has left questions unanswered (whereabouts.py): a checkpoint would draw the majority away from its
work. Meanwhile these voters are asked more often than others. One that none of the members before it signed it follows only when it has heard none of them for `away_s`, and asked all that time: newcomers who go on with a run that everybody
has left. The first roster is signed once; that it was is what the log is for.
"""

import math
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass

from dilocox_peer.contract import Note, Tick
from dilocox_peer.events import Event, FirstRosterSigned, MessageRefused, RoundVouched
from dilocox_peer.peer.planning.plan import PlanBounds
from dilocox_peer.peer.rounds.chain import Chain, Place, Suffix, Verifier, vote_for
from dilocox_peer.peer.rounds.contract import (
    Action,
    OwnerSpoke,
    OwnerVouched,
    PeerFound,
    PeerRefused,
    Persist,
    Received,
    Send,
    TailLost,
)
from dilocox_peer.peer.rounds.durable import Durable, Votes
from dilocox_peer.peer.rounds.forks import Forks
from dilocox_peer.peer.rounds.healing import Healing
from dilocox_peer.peer.rounds.membership import MAX_KNOWN, within_shares
from dilocox_peer.peer.rounds.patience import Patience
from dilocox_peer.peer.rounds.refusals import Refusals
from dilocox_peer.peer.rounds.schedule import ends_run
from dilocox_peer.peer.rounds.timing import AWAY_S, NEVER, Timing
from dilocox_peer.peer.rounds.whereabouts import Whereabouts
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import Certificate, acceptance
from dilocox_peer.wire.checkpoints import Checkpoint, sign_checkpoint
from dilocox_peer.wire.directives import Directive
from dilocox_peer.wire.rounds import Cert, ChainPage, Directed, GetChain, Heartbeat, Message, Vouch

POLL_FIRST_S = 1.0  # between two questions to a peer, while the run has not begun
POLL_S = 5.0
MOST_BETWEEN = 1.1  # times as much: notaries of many stages do not ask all at once
ASKED_AT_ONCE, ASKED_OF_ROSTER = 3, 2
TIMES_ASKED = 3  # each voter whose silence would decide, in the time that it decides after: a question may be lost
PATIENCE_S = 120.0  # five times what a roster waits for its quorum
FIRST_VIEW = 1
MOST_SETTLING = 10  # times settle_s: peers that come one after another for ever are not all waited for

NotaryInput = Tick | PeerFound | PeerRefused | Received | OwnerVouched | OwnerSpoke | TailLost


@dataclass(frozen=True)
class NotaryTerms:
    """What the manifest says that a notary needs. every: rounds between two checkpoints."""

    stage: int
    genesis: Place
    start_peers: int
    max_peers: int
    plans: PlanBounds
    every: int


@dataclass(slots=True)
class _Known:
    """A peer of the stage. at_genesis: when it was last heard to have no chain. range: of its addresses."""

    asked_at: float
    range: str = ""
    is_asked: bool = True
    at_genesis: float = NEVER


class Notary:
    """`handle` inputs; `deadline` says when to Tick."""

    def __init__(
        self,
        terms: NotaryTerms,
        *,
        sign: Callable[[bytes], bytes],
        verify: Verifier,
        timing: Timing,
        rng: random.Random,
        now: float,
        wall_ms: int,
        durable: Durable | None = None,
        chain: Chain | None = None,
        patience_s: float = PATIENCE_S,
        away_s: float = AWAY_S,
        kept: Callable[[], Digest | None] | None = None,
    ) -> None:
        """sign: with the owner's key. wall_ms: the wall clock at `now`; orders and sequences are counted from it. chain: that durable has; None: made of it. kept: the newest head
        that can be gone on from with what a keeper beside us has; None: nobody keeps the run here."""
        self._kept = kept
        assert terms.genesis.founder is not None, "a run without an owner"
        self._terms = terms
        self._owner = terms.genesis.founder
        self._sign = sign
        self._verify = verify
        self._timing = timing
        self._rng = rng
        self._patience_s = patience_s
        self._whereabouts = Whereabouts(patience_s / 2)
        self._patience = Patience(patience_s, are_away=self._are_away, elsewhere=self._whereabouts.elsewhere)
        self._away_s = away_s
        self._began_at = now
        self._heard_at: dict[PeerId, float] = {}  # voters
        self._wall_offset_s = wall_ms / 1000 - now
        self._chain = chain or Chain(terms.genesis, durable.appended if durable is not None else ())
        self._forks = Forks(self._chain, max_back=None, checkpoint=durable.checkpoint if durable is not None else None)
        self._healing = Healing(
            self, self._chain, self._forks, self._settled, is_stranger=lambda peer: peer not in self._chain.place.roster
        )
        self._known: dict[PeerId, _Known] = {}
        self._settled_at = now  # since then no peer is new
        self._enough_since: float | None = None
        self._refusals = Refusals()
        self._poll_at = now
        self._heard: Checkpoint | None = None  # not ours, and not durable yet
        self._directive: Directive | None = None  # that peers are told of
        self._now = now

    # ---- what Healing reads ----

    @property
    def verify(self) -> Verifier:
        return self._verify

    @property
    def timing(self) -> Timing:
        return self._timing

    @property
    def max_peers(self) -> int:
        return self._terms.max_peers

    @property
    def plans(self) -> PlanBounds:
        return self._terms.plans

    # ---- what the shell reads ----

    @property
    def chain(self) -> Chain:
        """What this stage has agreed on, as far as it is known here; do not modify."""
        return self._chain

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The newest one signed."""
        return self._forks.checkpoint

    @property
    def is_over(self) -> bool:
        """Whether the run's last round is certified."""
        return self._terms.plans.total_steps is not None and self._is_last(self._chain.height)

    def deadline(self) -> float:
        return self._poll_at

    # ---- what happens ----

    def handle(self, event: NotaryInput, now: float) -> list[Action]:
        """What is to be done about event, in order. now: monotonic seconds."""
        self._now = now
        actions: list[Action] = []
        match event:
            case PeerFound(peer, addresses):
                actions += self._meet(peer, addresses)
            case OwnerVouched(checkpoint):
                self._hear(checkpoint)
            case OwnerSpoke(directive):
                self._directive = directive
                actions += [Send(peer, Directed(*self._at(), directive)) for peer in sorted(self._known)]
            case PeerRefused(peer):
                self._forget(peer)
            case TailLost(head):
                actions += self._give_up_after(head)
            case Received(sender, message):
                actions += self._receive(sender, message)
            case Tick():
                pass
        if self._heard is not None:
            actions.append(self._persist(self._chain.height, (), self._heard))
            self._heard = None
        actions += self._follow()
        if self._chain.height == 0:
            actions += self._begin()
        else:
            actions += self._vouch()
        return actions + self._poll()

    def knows(self, peer: PeerId) -> bool:
        """Whether it was told of it, and has not forgotten it for others."""
        return peer in self._known

    def _meet(self, peer: PeerId, addresses: str = "") -> list[Action]:
        if peer in self._known:
            return []
        if (
            len(self._known) >= MAX_KNOWN
        ):  # made-up ones cost nothing: they push out no member, who would not be heard any more
            others = self._known.keys() - set(self._chain.place.roster)
            self._forget(min(others, key=lambda each: (self._known[each].asked_at, each)))
        self._known[peer] = _Known(self._now, addresses)
        told = [] if self._directive is None else [Send(peer, Directed(*self._at(), self._directive))]
        return [self._question(peer), *told]

    def _forget(self, peer: PeerId) -> None:
        """It is asked no more. A voter stays where it was for as long as one that leaves a question unanswered: it may only start again."""
        self._known.pop(peer, None)
        if self._has_voted(peer):
            self._whereabouts.asked(peer, self._now)
        else:
            self._whereabouts.forget(peer)

    def _has_voted(self, peer: PeerId) -> bool:
        return peer in self._heard_at or peer in self._chain.place.voters

    def _receive(self, sender: PeerId, message: Message) -> list[Action]:
        if message.stage != self._terms.stage:
            return []
        if self._has_voted(sender):  # also who was left out meanwhile, and speaks
            self._heard_at[sender] = self._now
        actions: list[Action] = []
        reason: str | None = None
        if self._whereabouts.is_cut_off(self._now):
            self._began_at = self._now
        self._whereabouts.heard(self._now)
        if isinstance(message, Heartbeat | ChainPage) and sender in self._known:
            self._whereabouts.said(sender, message.head)
        match message:
            case Vouch():
                reason = self._hear(message.checkpoint)
            case GetChain():
                if (page := self._healing.answer(sender, message.locator, self._now)) is not None:
                    actions.append(Send(sender, page))
            case Heartbeat():
                actions += self._meet(sender)
                actions += self._healing.heard_of(sender, message.head, self._now)
            case ChainPage():
                self._note_genesis(sender, message)
                questions, reason = self._healing.on_page(
                    sender, message.certificates, more=message.more, now=self._now
                )
                actions += [*questions, *self._catch_up(sender, message.head)]
            case Cert():
                certificates = (message.certificate,)
                questions, reason = self._healing.on_page(sender, certificates, more=False, now=self._now)
                actions += questions
            case _:
                pass
        if reason is not None and self._refusals.is_due(sender, self._now):
            actions.append(self._note(MessageRefused(sender, reason)))
        return actions

    def _catch_up(self, peer: PeerId, head: Digest) -> list[Action]:
        """What a peer lacks that we asked and that is behind us, or elsewhere: it may have missed the first roster, and the newest
        checkpoint. Once for each question of ours."""
        known, checkpoint = self._known.get(peer), self._forks.checkpoint
        if known is None or not known.is_asked:
            return []
        known.is_asked = False
        told = [Send(peer, Vouch(*self._at(), checkpoint))] if checkpoint is not None else []
        page = self._healing.page_after([head]) if self._chain.height_of(head) is not None else None
        return [*told, *([Send(peer, page)] if page is not None and page.certificates else [])]

    def _note_genesis(self, sender: PeerId, page: ChainPage) -> None:
        known = self._known.get(sender)
        if known is None or page.head != self._terms.genesis.head or page.certificates:
            return
        if known.at_genesis == NEVER:
            self._settled_at = self._now
        known.at_genesis = self._now

    def _hear(self, checkpoint: Checkpoint) -> str | None:
        """Why checkpoint is refused; a newer one of the owner's, signed elsewhere with the same key, counts from here on."""
        terms = self._terms
        if not checkpoint.is_newer(self._forks.checkpoint):
            return None
        if reason := checkpoint.why_not(
            stage=terms.stage, genesis=terms.genesis.head, owner=self._owner, verify=self._verify
        ):
            return reason
        self._forks.checkpoint = self._heard = checkpoint
        self._healing.reconsider()
        return None

    # ---- the first roster ----

    def _begin(self) -> list[Action]:
        """The first roster, once enough peers have been here for a while and no new one has come; or for a long while, as anybody can come."""
        here = sorted(
            peer for peer, known in self._known.items() if self._now - known.at_genesis <= self._timing.alive_s
        )
        if len(here) < self._terms.start_peers:
            self._enough_since = None
            return []
        self._enough_since = self._now if self._enough_since is None else self._enough_since
        begins_at = self._settled_at + self._timing.settle_s
        if self._now < min(begins_at, self._enough_since + MOST_SETTLING * self._timing.settle_s):
            return []
        if not here or self._forks.checkpoint is not None:  # begun long ago, should our log be lost: it is looked for
            return []
        genesis = self._terms.genesis
        roster = within_shares((), here, lambda peer: self._known[peer].range, self._terms.max_peers)
        value = genesis.view_change(roster[: self._terms.max_peers])
        message = acceptance(genesis.stage, genesis.head, FIRST_VIEW, 0, value)
        vote = vote_for(message, self._wall_ms, self._sign)
        certificate = Certificate(genesis.stage, genesis.head, FIRST_VIEW, 0, value, ((self._owner, vote),))
        self._chain.append(certificate)
        self._healing.rebase()
        told = [Send(peer, Cert(*self._at(), certificate)) for peer in sorted(self._known)]
        signed = self._note(FirstRosterSigned(self._terms.stage, value.roster))
        return [self._persist(0, (certificate,)), signed, *told]

    # ---- following and vouching ----

    def _follow(self) -> list[Action]:
        """Our copy of the chain is the best one known; there is no state to wait for."""
        path = self._healing.path
        path = self._settled(path) if path is not None else None
        if path is None or not self._forks.is_better(path, None):
            return []
        dropped = self._chain.truncate(path.ancestor)
        self._forks.left(path.ancestor, dropped)
        for certificate in path.certificates:
            self._chain.append(certificate)
        self._healing.rebase()
        return [self._persist(path.ancestor, path.certificates)]

    def _are_away(self, voters: Collection[PeerId], now: float) -> bool:
        since = now - self._away_s
        if self._whereabouts.is_cut_off(now):
            return False
        return self._began_at <= since and all(self._heard_at.get(peer, since) <= since for peer in voters)

    def _give_up_after(self, head: Digest) -> list[Action]:
        """Certificates that nobody can go on from any more would keep us for ever from following those who do go on."""
        height, checkpoint = self._chain.height_of(head), self._forks.checkpoint
        if (
            height is None
            or not 0 < height < self._chain.height
            or (checkpoint is not None and checkpoint.height > height)
        ):
            return []
        if not self._are_away(self._chain.place_at(height).voters, self._now):
            return []
        self._forks.left(height, self._chain.truncate(height))
        self._healing.reconsider()
        return [self._persist(height, ())]

    def _settled(self, path: Suffix) -> Suffix | None:
        return self._patience.settled(self._chain, path, self._forks.checkpoint, self._now)

    def _vouch(self) -> list[Action]:
        """The next checkpoint, when it is due: of the newest head that another one has followed, or of the last."""
        height = self._vouchable()
        checkpoint = self._forks.checkpoint
        if not self._forks.holds_checkpoint(None):
            return []
        if height < 1 or (checkpoint is not None and height <= checkpoint.height):
            return []
        place, is_last = self._chain.place_at(height), self._is_last(height)
        if checkpoint is not None and not is_last and place.round < checkpoint.round + self._terms.every:
            return []
        if checkpoint is not None and checkpoint.is_last:
            return []
        sequence = max(self._wall_ms, 0 if checkpoint is None else checkpoint.sequence + 1)  # a clock may be set back
        unsigned = Checkpoint(
            self._terms.stage, self._terms.genesis.head, height, place.round, place.head, sequence, is_last
        )
        signed = self._forks.checkpoint = sign_checkpoint(unsigned, self._sign)
        self._healing.reconsider()
        told = [Send(peer, Vouch(*self._at(), signed)) for peer in sorted(self._known)]
        return [self._persist(self._chain.height, (), signed), self._note(RoundVouched(place.round, True)), *told]

    def _vouchable(self) -> int:
        """The height of the newest head to sign. Of a run that is kept here none that is not kept: should all peers be gone, a
        newcomer would wait for a state that nobody has. But a keeper that is far behind, its disk full, is not waited for."""
        if self.is_over:
            return self._chain.height
        newest = self._chain.height - 1
        if self._kept is None:
            return newest
        kept = self._kept()
        height = min(newest, (self._chain.height_of(kept) or 0) if kept is not None else 0)
        late = self._chain.place.round - 2 * self._terms.every
        while height < newest and self._chain.place_at(height + 1).round <= late:
            height += 1
        return height

    def _is_last(self, height: int) -> bool:
        return ends_run(self._chain, height, self._terms.plans)

    # ---- asking ----

    def _poll(self) -> list[Action]:
        if self._now < self._poll_at:
            return []
        pause_s = POLL_FIRST_S if self._chain.height == 0 else POLL_S
        self._poll_at = self._now + pause_s * self._rng.uniform(2.0 - MOST_BETWEEN, MOST_BETWEEN)
        actions: list[Action] = []
        for peer in self._next_asked():
            known = self._known[peer]
            known.asked_at, known.is_asked = self._now, True
            self._whereabouts.asked(peer, self._now)
            actions.append(self._question(peer))
        return actions

    def _next_asked(self) -> list[PeerId]:
        """Before the run has begun all; then a few in turn, most of them of the roster: of a run with many stages a process
        asks for each, and who only says that it is there keeps nobody else from being asked. Where a branch waits for voters to be
        silent, more of these."""
        by_turn = sorted(self._known, key=lambda peer: (self._known[peer].asked_at, peer))
        if self._chain.height == 0:
            return by_turn
        roster, voters = set(self._chain.place.roster), self._waited_for()
        enough = math.ceil(len(voters) * TIMES_ASKED * MOST_BETWEEN * POLL_S / self._patience_s)
        decisive = [peer for peer in by_turn if peer in voters][:enough]
        rest = [peer for peer in by_turn if peer not in decisive]
        members = [peer for peer in rest if peer in roster][:ASKED_OF_ROSTER]
        return decisive + members + [peer for peer in rest if peer not in roster][: ASKED_AT_ONCE - len(members)]

    def _waited_for(self) -> Collection[PeerId]:
        """The voters of the place where a branch parts that would be followed if they were silent."""
        path = self._healing.path
        return () if path is None else self._chain.place_at(path.ancestor).voters

    def _question(self, peer: PeerId) -> Action:
        return Send(peer, GetChain(*self._at(), tuple(self._chain.locator())))

    def _at(self) -> tuple[int, Digest, int]:
        place = self._chain.place
        return place.stage, place.head, place.view

    @property
    def _wall_ms(self) -> int:
        return int(1000 * (self._now + self._wall_offset_s))

    def _persist(self, keep: int, appended: tuple[Certificate, ...], checkpoint: Checkpoint | None = None) -> Action:
        return Persist(Durable(keep, appended, Votes(self._chain.head), checkpoint))

    def _note(self, event: Event) -> Action:
        return Note(event)
