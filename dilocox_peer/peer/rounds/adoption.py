"""How our chain moves, by what we certify and towards the best chain that is known; and the anchor with it. Pure.

A certificate is adopted when its contributions, or a whole state, are here: never before, so that a peer is never at a head it
could not go on from. Which chains are known says healing.py, how far a better one is followed by now following.py, what is
replayed and what fetched whole replay.py and anchorage.py.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from dilocox_peer.contract import Note
from dilocox_peer.events import BranchSwitched, RoundVouched, ViewChanged
from dilocox_peer.peer.planning.plan import PlanBounds
from dilocox_peer.peer.planning.planner import JudgingPlanner
from dilocox_peer.peer.rounds.anchorage import Anchorage
from dilocox_peer.peer.rounds.chain import Chain, Suffix
from dilocox_peer.peer.rounds.contract import Action, Apply, ForgetBlobs, Persist, Send
from dilocox_peer.peer.rounds.durable import (
    LOST_VOTES_VIEWS,
    Durable,
    Votes,
    newest_left,
    sealed_votes,
)
from dilocox_peer.peer.rounds.following import Following
from dilocox_peer.peer.rounds.forks import Forks
from dilocox_peer.peer.rounds.healing import Healing
from dilocox_peer.peer.rounds.holdings import Holdings
from dilocox_peer.peer.rounds.membership import Members
from dilocox_peer.peer.rounds.replay import FETCHED_AHEAD, Replay
from dilocox_peer.peer.rounds.seat import Owner
from dilocox_peer.peer.rounds.sitting import Sitting
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import Certificate
from dilocox_peer.wire.checkpoints import Checkpoint
from dilocox_peer.wire.journal import MAX_LEFT
from dilocox_peer.wire.rounds import Heartbeat

PLANNED_FROM = 256  # newest certificates that a planner is shown when many come at once
Wait = Literal["owner", "state", "end"]


def show_newest(planner: JudgingPlanner, chain: Chain, plans: PlanBounds, most: int = PLANNED_FROM) -> None:
    """The chain's newest certificates, each with the bounds as they were by it: the run's owner may have made it longer since, and whoever sees
    them now is to come to what those came to who saw each in its time. plans: as the manifest bounds them."""
    newest = chain.certificates[max(chain.height - min(most, PLANNED_FROM), 0) :]
    place = chain.place_at(chain.height - len(newest))
    for number, certificate in enumerate(newest, 1):
        place = place.then(certificate) if number < len(newest) else chain.place
        planner.observe(certificate, place.bounds(plans))


class Adoption:
    """How the chain of one peer moves. sitting: at our head. now: of the event that is handled; whoever owns this sets it."""

    def __init__(
        self,
        owner: Owner,
        chain: Chain,
        forks: Forks,
        members: Members,
        holdings: Holdings,
        *,
        replay: Replay,
        anchor: Anchorage,
        sit: Callable[[Votes], Sitting],
        durable: Durable | None,
        now: float,
    ) -> None:
        """sit: takes a new seat at the chain's head, with these votes."""
        self._owner = owner
        self._chain = chain
        self._forks = forks
        self._members = members
        self._holdings = holdings
        self._replay = replay
        self._sit = sit
        self._following = Following(owner.peer, chain, forks, members)
        self.healing = Healing(owner, chain, forks, self._allowed, is_stranger=lambda peer: not members.has_voted(peer))
        members.is_elsewhere = self.healing.is_elsewhere
        self.anchor = anchor
        self.now = now
        self._left = durable.left if durable is not None else ()
        # Votes may be lost: also those at later heads, which we have had before and come to again.
        signed = 0 if durable is None else durable.votes.view_change_signed
        self._has_lost_votes = signed >= chain.place.view + LOST_VOTES_VIEWS
        self._rests_since: float | None = None
        self._is_rested = False  # so long that of a head further on we would have heard
        # The number of the highest view change that we signed at each of the newest heads.
        self._signed: OrderedDict[Digest, int] = OrderedDict()
        self._ahead = 0  # the highest round of a better chain met so far
        self._again: Certificate | None = None  # its Apply waits for a contribution that our disk has lost
        self.sent_ahead: Digest | None = None  # see send_ahead
        self.sitting = sit(durable.votes if durable is not None else Votes(chain.head))

    # ---- where we stand ----

    @property
    def path(self) -> Suffix | None:
        """The better chain to follow, as far as it is to be followed by now."""
        path = self.healing.path
        return None if path is None else self._allowed(path)

    def _allowed(self, path: Suffix) -> Suffix | None:
        return self._following.allowed(path, self.sitting.view_changes, self.now)

    @property
    def is_at_the_end(self) -> bool:
        """Whether we certify: we hold the state, and know of nothing better."""
        return self.anchor.is_current and self.path is None and not self.is_left_behind

    @property
    def is_left_behind(self) -> bool:
        """Whether we are to certify nothing before we have the run's state: it is over, or it has begun and what we hold is
        where it began. A peer that comes back to a run must not begin it anew alone."""
        checkpoint = self._forks.checkpoint
        if checkpoint is not None and checkpoint.is_last and self._chain.height_of(checkpoint.head) is None:
            return True
        if self._chain.place.round > 0:
            return False
        is_vouched = checkpoint is not None and checkpoint.round > 0
        return is_vouched or (self._ahead > 0 and not self.sitting.seat.is_member)

    def waits_for(self, now: float) -> Wait | None:
        """What we can do nothing without: the owner's signature, or somebody who holds the run's state. None: nothing."""
        if self.anchor.is_fetching:
            return None
        place = self._chain.place
        has_none = self.anchor.height is None
        if not self.is_left_behind and not has_none and not (place.round == 0 and self._ahead):
            return "owner" if place.founder is not None else None
        path, checkpoint = self.healing.path, self._forks.checkpoint
        heads = [head for head in self._members.heads(now) if path is not None and head in path.index_of]
        if checkpoint is not None and (has_none or self._chain.height_of(checkpoint.head) is None):
            heads.append(checkpoint.head)  # one in our chain is what we hold already
        if has_none:
            heads.append(self._chain.head)
        # Not counted: one that says it has something and gives nothing. Of a run that is over it may, and we would go.
        is_last = checkpoint is not None and checkpoint.is_last
        in_vain = set() if is_last else self.anchor.hollow.keys() | self.healing.in_vain.keys()
        return None if any(self._members.at(head, now) - in_vain for head in heads) else "state"

    def copying(self, head: Digest, share: float) -> tuple[PeerId, ...]:
        """Of whom to ask by now for the state at head, which FetchState asked for and of which so much is here; nobody: it is to be left, and
        StateMissing is the answer."""
        return self.anchor.copying(head, share, self.path, self.now)

    def has_drifted(self, child: Certificate) -> bool:
        """Whether our anchor is not the one that most voters among the contributors to our head's child started from. They have to be as many as half of
        its signers: of a round with few contributions those few would have everybody fetch their state."""
        certified, ours, voters = child.value.state_digest, self.anchor.digest, self._chain.place.voters
        saying = sum(entry.state_digest == certified and entry.peer in voters for entry in child.value.entries)
        return bool(certified and ours and certified != ours) and 2 * saying > len(child.signatures)

    def hear_owner(self, checkpoint: Checkpoint) -> tuple[list[Action], str | None]:
        """A newer checkpoint changes which chains count, and is made durable; or why it is refused."""
        origin = self._chain.place_at(0)
        if origin.founder is None or not checkpoint.is_newer(self._forks.checkpoint):
            return [], None
        if reason := checkpoint.why_not(
            stage=origin.stage, genesis=origin.head, owner=origin.founder, verify=self._owner.verify
        ):
            return [], reason
        self._forks.checkpoint = checkpoint
        self.healing.reconsider()
        persist = Persist(Durable(self._chain.height, (), self.sitting.seat.votes, checkpoint))
        is_ours = self._chain.height_of(checkpoint.head) is not None
        is_ahead = checkpoint.round > self._chain.place.round
        return [persist, Note(RoundVouched(checkpoint.round, is_ours, is_ahead))], None

    # ---- towards the best chain ----

    def watch(self) -> None:
        """Takes note of where the others are; call before `follow`."""
        path = self.healing.path
        self._following.watch(path, self.now)
        if path is not None or not self.anchor.is_current:
            self._rests_since = None
        else:
            self._rests_since = self.now if self._rests_since is None else self._rests_since
            rest_s = 2 * self._owner.timing.absent_s(len(self._chain.place.roster))
            self._is_rested |= self.now - self._rests_since >= rest_s
        if path is not None:
            self._ahead = max(self._ahead, path.certificates[-1].value.round)

    def follow(self) -> list[Action]:
        """Certificate by certificate where the contributions can be had, else by a whole state."""
        now, anchor = self.now, self.anchor
        anchor.expire(now)
        actions = self._become_what_is_founded()
        actions += [*anchor.restore(now), *self._fetch_again(), *self._replay_own()]
        while not anchor.is_fetching and ((path := self.path) is not None or not anchor.is_current):
            if path is None or not self._can_replay(path):
                if path is not None and anchor.is_hopeless(path, now):
                    if path.tip == self.sent_ahead:
                        self.sitting.view_changes.give_up(now)
                    self._following.give_up(path)
                    if self.path == path:  # no further either
                        self.healing.shun(now)
                    anchor.give_up()
                    continue
                return [*actions, *anchor.fetch(path, now)]
            certificate = path.certificates[0]
            actions += self._replay.want(path.certificates[:FETCHED_AHEAD], now)
            if not self._replay.is_here(certificate):
                return actions
            actions += self.adopt(certificate)
        return actions

    def _can_replay(self, path: Suffix) -> bool:
        """Whether the path goes on from the state we hold, is worth it, and the blobs of its next certificate may be had."""
        if not path.ancestor == self.anchor.height == self._chain.height or not self._replay.is_worth(path):
            return False
        return not self.has_drifted(path.certificates[0]) and not self._replay.is_lost(path.certificates[0])

    def lack(self, certificate: Certificate) -> None:
        """Its Apply is given, and lacks a contribution."""
        self._again = certificate

    def _fetch_again(self) -> list[Action]:
        """What an Apply that is given lacks, from the others; if it is not to be had there, another anchor is needed."""
        certificate = self._again
        if certificate is None:
            return []
        is_lost = self._replay.is_lost(certificate)
        if is_lost:
            self.anchor.lose()
        if is_lost or self._replay.is_here(certificate):
            self._again = None
            return []
        return [*self._replay.want([certificate], self.now)]

    def _replay_own(self) -> list[Action]:
        """After a restart: the certificates since the state on our disk, as far as their blobs are to be had."""
        actions: list[Action] = []
        while (
            not self.anchor.is_fetching and (height := self.anchor.height) is not None and height < self._chain.height
        ):
            certificate = self._chain.certificates[height]
            actions += self._replay.want([certificate], self.now)
            if self._replay.is_lost(certificate):
                self.anchor.lose()
            elif self._replay.is_here(certificate):
                actions.append(Apply(certificate, None))
                self.anchor.applying(height + 1)
            else:
                break
        return actions

    def send_ahead(self, certificate: Certificate) -> bool:
        """Whether a certificate that we made and cannot apply, because our own anchor is not the one most others started from, is
        to be sent: it is theirs at once, ours when we have fetched the state from them. (Should they miss it, the next leader
        hears of its value and certifies it again.)"""
        if self.sent_ahead == certificate.head:
            return False
        self.sent_ahead = certificate.head
        self.healing.on_page(self._owner.peer, (certificate,), more=False, now=self.now)
        return True

    # ---- the head moves ----

    def adopt(self, certificate: Certificate) -> list[Action]:
        """To its child, whose contributions are all here."""
        own, entries = self.sitting.arrivals.own, certificate.value.entries
        path, notes = self.healing.path, list[Note]()
        if certificate.value.kind == "round":
            notes = self.sitting.settle(certificate, self.now, is_newest=path is None or path.tip == certificate.head)
            self._owner.directing.certified()
        else:
            self.sitting.broken_off(self.now)
        for name in certificate.value.blobs:
            self._holdings.certified(name, certificate.value.round)
        if path is None or (path.tip == certificate.head and self._is_rested):
            self._has_lost_votes = False  # nobody had this head before
        self._append([certificate])
        self.anchor.applying(self._chain.height)
        persist = Persist(Durable(self._chain.height - 1, (certificate,), self._first_votes()))
        # Another may have offered the same bytes: what is applied of ours is settled, in whosever name.
        is_settled = own is not None and any(entry.blob == own.blob for entry in entries)
        apply = Apply(certificate, own if is_settled else None)
        return [persist, apply, *notes, *self._arrive([certificate])]

    def install(self, head: Digest, state_digest: bytes) -> list[Action]:
        """The anchor is now the one at head: our chain follows it there."""
        self._again = None  # with the Applies that wait
        suffix = self.anchor.installed(head, state_digest, self.now)
        if suffix is None:
            return []
        place = self._chain.place
        left = self._voted_above(suffix.ancestor)
        self._left = newest_left(self._left, left)
        dropped = self._chain.truncate(suffix.ancestor)
        self._forks.left(suffix.ancestor, dropped)
        if dropped:
            self.healing.judge_anew()
        ancestor_round = self._chain.place.round
        self._append(suffix.certificates)
        orphaned = self._orphans(dropped, suffix.certificates)
        switched = Note(BranchSwitched(ancestor_round, place.round, self._chain.place.round, orphaned))
        persist = Persist(Durable(suffix.ancestor, suffix.certificates, self._first_votes(), left=left))
        arrived = self._arrive(suffix.certificates)
        return [persist, switched, *arrived, *self._replay.why_never(self.healing.path, self.anchor.took_s)]

    def _become_what_is_founded(self) -> list[Action]:
        """A newcomer's chain becomes the one that the owner has proved (founding.py), and waits there for a state."""
        if (founded := self.healing.founded) is None or self.anchor.is_fetching:
            return []
        self.healing.founded = None
        if self._chain.height:
            return []
        self._chain.become(founded)
        show_newest(self._owner.planner, self._chain, self._owner.plans)
        self.anchor.leave_behind()
        return [Persist(Durable(0, self._chain.as_it_is(), self._first_votes())), *self._arrive(())]

    def _append(self, certificates: Sequence[Certificate]) -> None:
        for certificate in certificates:
            self._chain.append(certificate)
        show_newest(self._owner.planner, self._chain, self._owner.plans, len(certificates))

    def _voted_above(self, ancestor: int) -> tuple[Digest, ...]:
        """Heads that are about to be left for another branch at which we may have voted: the place where the branches part, those above it, and
        ours. Another chain may end at any of them, without the certificate that we know to follow."""
        if ancestor == self._chain.height:
            return ()
        below = range(max(ancestor, self._chain.height - MAX_LEFT), self._chain.height)
        places = [place for place in map(self._chain.place_at, below) if self._owner.peer in place.voters]
        has_voted = self.sitting.seat.votes != Votes(self._chain.head)
        return (*(place.head for place in places), *((self._chain.head,) if has_voted else ()))[-MAX_LEFT:]

    def _orphans(self, dropped: Sequence[Certificate], adopted: Sequence[Certificate]) -> int:
        """Own contributions in dropped certificates that the adopted ones do not have."""
        lost = {entry for each in dropped for entry in each.value.entries if entry.peer == self._owner.peer}
        return len(lost - {entry for each in adopted for entry in each.value.entries})

    def _first_votes(self) -> Votes:
        """At a new head; where we have been before and voted, and left for another branch, no vote is given again, nor, where votes are lost, at any
        that may have been there before."""
        place = self._chain.place
        if place.head not in self._left and not self._has_lost_votes:
            return Votes(place.head)
        votes = sealed_votes(place.head, place.view)  # whose number others may have outrun
        return replace(votes, view_change_signed=max(votes.view_change_signed, self._signed.get(place.head, 0)))

    def _arrive(self, certificates: Sequence[Certificate]) -> list[Action]:
        """What every change of head brings with it."""
        votes = self.sitting.seat.votes
        self._signed[votes.head] = max(votes.view_change_signed, self._signed.pop(votes.head, 0))
        while len(self._signed) > MAX_LEFT:
            self._signed.popitem(last=False)
        self.sitting = self._sit(self._first_votes())
        self._rests_since, self._is_rested = None, False
        self.healing.rebase()
        actions: list[Action] = []
        for each in certificates:
            if each.value.kind == "epoch":
                reason = "the run starts" if each.value.height == 1 else "the old roster no longer certified"
                actions.append(Note(ViewChanged(each.view, each.value.roster, reason)))
        if (sharing := self._chain.place.sharing) is not None:  # whoever averages the next one needs them
            self._holdings.stay((result.residual for result in sharing.results), self._chain.place.round + 1)
        if old := self._holdings.forget_before(*self._replay.first_kept()):
            actions.append(ForgetBlobs(old))
        return actions

    def tell_where_we_are(self, peer: PeerId, head: Digest, heartbeat: Callable[[], Heartbeat]) -> list[Action]:
        """SYNC: a peer at a head in our past gets what follows it, unless that has just been told to all; one at an unknown head is asked,
        and told ours."""
        seen, retry_s = self._members[peer], self._owner.timing.retry_s
        height = self._chain.height_of(head)
        is_on_its_way = height == self._chain.height - 1 and self.now < self.sitting.began_at + retry_s / 2
        if is_on_its_way or self.now - seen.answered_at < retry_s:
            return []
        seen.answered_at = self.now
        if height is not None:
            page = self.healing.page_after([head])
            assert page is not None, "a head of our chain"
            return [Send(peer, page)]
        return [Send(peer, heartbeat()), *self.healing.heard_of(peer, head, self.now)]
