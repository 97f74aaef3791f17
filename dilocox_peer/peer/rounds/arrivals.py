"""What has come of a round's contributions at one head, and until when the rest is waited for. Pure.

A round ends here when our own contribution is out, or those of half of the members are here: fewer than half, should they be
faster or mean ill, do not end the others' round. From then on offers are
waited for as long as they have been seen to take, and a contribution on its way as long as an exchange may take; not those
of a member that stands out by conduct.py. Offers are what their members say; a contribution counts when its blob is here.
"""

from collections.abc import Iterable, Sequence

from dilocox_peer.contract import Note
from dilocox_peer.events_of_rounds import ContributionRefused, ContributionsMissed
from dilocox_peer.peer.rounds.averages import Slicing
from dilocox_peer.peer.rounds.contract import Action, BlobPart
from dilocox_peer.peer.rounds.holdings import Holdings
from dilocox_peer.peer.rounds.membership import Members
from dilocox_peer.peer.rounds.seat import Seat, send_all
from dilocox_peer.peer.rounds.timing import FOREVER
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import Certificate, Entry, Thing, offer_statement
from dilocox_peer.wire.rounds import Offer

MAX_INCARNATIONS = 4  # offers of one peer looked at per head: a restart is normal, a stream of them is not
MAX_SIGNED = 4 * MAX_INCARNATIONS  # entries of one peer that are remembered, whoever names them
UNSIGNED = bytes(64)
FEW_BALLOTS = 4  # after the first leader's time, that others have to lead before a round of few is better than none
MOST_UNTOLD = 2.0  # times as long as usual an offer in slices waits until it is told again for the first time


class Arrivals:
    """The contributions of one (head, view) at one peer. ended_at: when the round ended here, by our clock; None: it goes on."""

    def __init__(
        self, seat: Seat, members: Members, holdings: Holdings, now: float, slicing: Slicing | None = None
    ) -> None:
        """slicing: where the round is averaged in slices: a contribution is here when those have it whose slices they are."""
        self._seat = seat
        self._slicing = slicing
        self._members = members
        self._holdings = holdings
        self._conduct = seat.owner.conduct
        self._began_at = now
        self.own: Entry | None = None
        self.excluded: set[Digest] = set()  # what we led with and others refused
        self.offers: dict[PeerId, Entry] = {}
        self._signed: dict[Entry, bytes] = {}  # by their authors, as we saw
        self._incarnations: dict[PeerId, int] = {}
        self._held_at: dict[Digest, float] = {}
        self.ended_at: float | None = None
        self.offers_due = FOREVER  # those that have not come
        self._blobs_due = FOREVER  # those on their way
        self.again_at = FOREVER  # when ours is offered again
        self._num_offered = 0
        self._offered_at: dict[PeerId, float] = {}
        self._told: set[tuple[PeerId, int]] = set()  # who was at this head when ours was offered, with its incarnation
        self._reminded: set[PeerId] = set()  # who lacked ours when most had it

    # ---- what comes in ----

    def offer(self, entry: Entry, now: float) -> None:
        """Our own contribution; its blob is held."""
        self.own = entry
        self._signed[entry] = self._seat.owner.sign(self._statement(entry))
        if self._slicing is not None:
            self._slicing.offered(entry)
        if self._seat.is_member:
            self.offers[self._seat.me] = entry
            self._held_at[entry.blob] = now
            self._conduct.worked(entry.peer, entry.micro_batches, self._began_at, now)
            self.again_at = now

    def on_offer(self, sender: PeerId, message: Offer, now: float) -> tuple[list[Action], str | None]:
        if (entry := message.entry).peer != sender:
            return [], f"an offer in the name of {entry.peer}"
        if sender not in self._seat.place.roster:
            return [], None  # a joiner that is not in the roster yet; its time comes
        known = self.offers.get(sender)
        if known == entry:
            return self.want(entry, now), None
        if known is not None and entry.incarnation < known.incarnation:
            return [], None
        if known is not None and entry.incarnation == known.incarnation:
            return [], "two offers on one head"
        if self._incarnations.get(sender, 0) >= MAX_INCARNATIONS:
            return [], "too many incarnations on one head"
        if reason := self.why_not_signed([entry], [message.signature]):
            return [], reason
        self._incarnations[sender] = self._incarnations.get(sender, 0) + 1
        # Two may offer one thing, of which the first counts: a second offer has not the place of an earlier one.
        self.offers.pop(sender, None)
        self.offers[sender] = entry
        if self._slicing is not None:
            self._slicing.offered(entry)
        if self._is_here(entry.blob, now):
            self._held_at.setdefault(entry.blob, now)
        return self.want(entry, now), None

    def _statement(self, entry: Entry) -> bytes:
        return offer_statement(self._seat.place.stage, self._seat.place.head, entry)

    def why_not_signed(
        self, entries: Sequence[Entry], authors: Sequence[bytes], by: PeerId | None = None
    ) -> str | None:
        """Why these entries are not those that their authors signed here, or None. What verifies is remembered. by: the leader that names
        them, which has seen the signatures if it is honest."""
        if len(entries) != len(authors):
            return f"{len(entries)} entries with {len(authors)} signatures of their authors"
        for entry, signature in zip(entries, authors, strict=True):
            if entry in self._signed:
                continue
            if (
                entry.peer not in self._seat.place.roster
            ):  # anybody can make keys and sign with them: what is remembered has a bound
                return f"an entry of {entry.peer}, which is not in the roster"
            if not self._seat.owner.verify(entry.peer, self._statement(entry), signature):
                if by is not None:
                    self._conduct.strike(by, "led", f"named a contribution of {entry.peer} that this has not signed")
                return f"an entry that {entry.peer} has not signed"
            self._remember(entry, signature)
        return None

    def _remember(self, entry: Entry, signature: bytes) -> None:
        """One that signs many variants of its offer has the oldest of them forgotten: not what it offered here, nor ours."""
        offered = self.offers.get(entry.peer)
        others = [each for each in self._signed if each.peer == entry.peer and each not in (offered, self.own)]
        if len(others) >= MAX_SIGNED:
            del self._signed[others[0]]
        self._signed[entry] = signature

    def authors(self, entries: Iterable[Entry]) -> tuple[bytes, ...]:
        """Their authors' signatures, which were shown here; of a value from a log of before there are none, and nobody follows it."""
        return tuple(self._signed.get(entry, UNSIGNED) for entry in entries)

    def refused(self, blob: Digest, reason: str, leader: PeerId | None, part: BlobPart | None = None) -> list[Action]:
        """A blob that no mean can take. Those answer for it that signed an offer of it, whoever showed that; for a result the leader that proposes it."""
        self._holdings.refused(blob, part)
        guilty = sorted({entry.peer for entry in self._signed if entry.blob == blob})
        if not guilty and leader is not None:
            guilty, reason = [leader], f"{reason} (it proposed it)"
        return [Note(ContributionRefused(peer, self._seat.place.round + 1, reason)) for peer in guilty]

    def on_held(self, blob: Digest, now: float) -> None:
        """Learns how late contributions come; the blob counts, not its announcement."""
        if self._slicing is not None and (blob in self._held_at or not self._slicing.has(blob, now)):
            return
        self._held_at.setdefault(blob, now)
        for peer, entry in self.offers.items():
            if entry.blob == blob and peer != self._seat.me:
                self._seat.pace.observe_offer(self.since_end(now))

    def look(self, now: float) -> None:
        """Whether contributions in slices are here by now: it depends on what others say."""
        for entry in self.offers.values() if self._slicing is not None else ():
            self.on_held(entry.blob, now)

    def _is_here(self, blob: Digest, now: float) -> bool:
        return self._holdings.has(blob) if self._slicing is None else self._slicing.has(blob, now)

    def _is_under_way(self, blob: Digest, now: float) -> bool:
        if self._slicing is None:
            return self._holdings.is_under_way(blob)
        return self._slicing.is_under_way(blob, now)

    def _lacking(self, blob: Digest, now: float) -> Digest | None:
        """The name of what is still to come here of a contribution; None if others alone lack some of it."""
        return blob if self._slicing is None else self._slicing.lacking(blob, now)

    # ---- when the round ends, and what is waited for then ----

    def has_ended(self, proposed: Iterable[Entry], now: float) -> bool:
        """Whether half of the members whose work is to be expected have delivered it. Were it one, the first thing that
        anybody offers would end everybody's round. Should no others follow, one is enough in the end. proposed: by a leader
        whose offers we may have missed."""
        entries = {entry.peer: entry for entry in (*proposed, *self.offers.values())}
        if not entries:
            return now >= self._enough_at
        waited = self._conduct.waited_for(self._seat.place.roster)
        here = {peer for peer, entry in entries.items() if peer in waited and self._is_here(entry.blob, now)}
        return 2 * len(here) >= len(here | self.expected(now)) or now >= self._enough_at

    def expected(self, now: float) -> set[PeerId]:
        """The members of whom a contribution is to be expected: not those whose offer nobody can average, as was found here or by others."""
        waited, bad = self._conduct.waited_for(self._seat.place.roster), self.excluded
        refused = {
            peer for peer, each in self.offers.items() if each.blob in bad or self._holdings.is_refused(each.blob)
        }
        return {peer for peer in waited - refused if self._members.may_offer(peer, now)}

    @property
    def _enough_at(self) -> float:
        """When one contribution is enough."""
        return min(self._held_at.values(), default=FOREVER) + self._seat.pace.degrade_s

    def end(self, now: float) -> None:
        self.ended_at = now
        self.offers_due = now + self._seat.pace.offer_wait_s
        self._blobs_due = now + self._seat.pace.exchange_wait_s
        if self._slicing is not None:
            self._slicing.offers_due, self._slicing.late_at = self.offers_due, self._blobs_due

    def since_end(self, now: float) -> float:
        """Seconds, 0 while the round goes on."""
        return 0.0 if self.ended_at is None else now - self.ended_at

    def is_awaiting(self, now: float) -> bool:
        """Whether an offer may still come, or what was offered and is on its way."""
        if self.ended_at is None or self.is_awaiting_blobs(now):
            return True
        if now >= self.offers_due:
            return False
        silent = [peer for peer in self._conduct.waited_for(self._seat.place.roster) if peer not in self.offers]
        return any(self._members.may_offer(peer, now) for peer in silent)

    def is_awaiting_blobs(self, now: float) -> bool:
        """Whether a contribution is on its way here, and an exchange may still take that long."""
        if self.ended_at is None or now >= self._blobs_due:
            return False
        coming = [peer for peer, entry in self.offers.items() if self._is_coming(peer, entry, now)]
        if not coming:
            return False
        waited = self._conduct.waited_for(self._seat.place.roster)
        return any(peer in waited and self._members.is_alive(peer, now) for peer in coming)

    def deadline(self, now: float) -> float:
        """When the round ends or something is waited for no longer, if nothing comes in."""
        if self.ended_at is None:
            return self._enough_at
        return min((each for each in (self.offers_due, self._blobs_due) if each > now), default=FOREVER)

    def _is_coming(self, peer: PeerId, entry: Entry, now: float) -> bool:
        """Under way, or asked for again and again: those of whom it is to be had may have to fetch it first."""
        if self._is_under_way(entry.blob, now):
            return True
        is_gone = self._is_here(entry.blob, now) or self._holdings.is_refused(entry.blob)
        return peer in self._members.cut_off and not is_gone

    def are_under_way(self, now: float) -> bool:
        return any(self._is_under_way(entry.blob, now) for entry in self.offers.values())

    def held(self, now: float) -> list[Entry]:
        """Offers whose contributions are here. Where several name the same one, and claim work for it, the first to be offered: a peer that
        hears what another has made can offer it as well, but later."""
        first: dict[Digest, PeerId] = {}
        for peer, entry in self.offers.items():
            if entry.micro_batches:
                first.setdefault(entry.blob, peer)
        return [
            entry
            for peer, entry in self.offers.items()
            if self._is_here(entry.blob, now) and first.get(entry.blob, peer) == peer
        ]

    def here(self, now: float) -> dict[PeerId, float]:
        """Whose contributions are here that are worth waiting for, and since when."""
        return {
            peer: self._held_at.get(entry.blob, now)
            for peer, entry in self._worth_waiting_for()
            if self._is_here(entry.blob, now)
        }

    def named_since(self, entries: Sequence[Entry], proposed_at: float) -> float:
        """Since when these are to be averaged: they are proposed when that is done, and until then more may have come."""
        return proposed_at if self._slicing is None else self._slicing.named_since(entries, proposed_at)

    def offering(self, blobs: Iterable[Digest]) -> set[PeerId]:
        """Those that offered one of these themselves: that an entry in a proposal names a peer proves nothing of that peer."""
        among = set(blobs)
        return {peer for peer, entry in self.offers.items() if entry.blob in among}

    def _worth_waiting_for(self) -> list[tuple[PeerId, Entry]]:
        """Offers of those that keep to what they offer."""
        waited = self._conduct.waited_for(self._seat.place.roster)
        return [(peer, entry) for peer, entry in self.offers.items() if peer in waited]

    # ---- what follows from it ----

    def offer_again(self, now: float) -> list[Action]:
        """At once to those who have come to this head since, or say that they hold others': this one was lost on its way to them; once more to the
        few that lack it when most hold it; to all that may not know of it ever more seldom."""
        if self.own is None:
            return []
        head, members, others = self._seat.place.head, self._members, self._seat.others
        there = {(peer, members[peer].incarnation) for peer in others if members.head_of(peer) == head}
        wanting = {peer for peer, _ in there - self._told}
        self._told |= there
        if self._slicing is not None:
            settled = now - self._seat.timing.retry_s / 2  # what was told since may be on its way
            gathering = self._slicing.gathering
            unaware = gathering.unaware_of(self.own.blob)
            wanting |= {peer for peer in unaware if self._offered_at.get(peer, settled) <= settled}
            missing = gathering.missed_by(self.own.blob, self._seat.place.roster, now) - self._reminded
            wanting |= missing
            self._reminded |= missing
        if now < self.again_at:
            others = tuple(peer for peer in others if peer in wanting)
        else:
            known = set[PeerId]() if self._slicing is None else self._slicing.gathering.by(self.own.blob)
            others = tuple(peer for peer in others if peer not in known or peer in wanting)
            self._num_offered += 1
            self.again_at = now + self._seat.jittered(self._again_s())
        self._offered_at |= dict.fromkeys(others, now)
        return [*send_all(others, Offer(*self._seat.at(), self.own, self._signed[self.own]))]

    def _again_s(self) -> float:
        """In slices others say that they have ours once all are here: the first time that is waited for, or it would be told again to all."""
        usual_s = self._seat.again_s(self._num_offered)
        if self._slicing is None or self._num_offered > 1:
            return usual_s
        return max(usual_s, min((self._seat.pace.round_s or 0.0) / 2, MOST_UNTOLD * usual_s))

    def want(self, entry: Entry, now: float) -> list[Action]:
        """The fetch of an offered contribution to start now, if any; of one in slices that of its table. It is asked of its author, and
        where there is no path to it of whoever there is one to: they may have to get it first."""
        part = None if self._slicing is None else BlobPart("table")
        thing, members = Thing(entry.blob, entry.size_bytes, entry.peer), self._members
        linked = [peer for peer in self._seat.others if members.is_linked(peer, now)]
        if entry.peer not in members.cut_off or not linked:
            return self.want_thing(thing, [entry.peer], now, part=part)
        # One at a time: of several the first that has nothing would be left for one that hangs.
        times = self._holdings.times_early(entry.blob)
        around = members.around(entry.peer, self._conduct.best_first(linked), times // 2)
        return self.want_thing(thing, [around[times % len(around)]], now, early=True, part=part)

    def want_again(self, now: float) -> list[Action]:
        """Contributions of members that there is no path to: they are asked for until somebody has them."""
        cut = self._members.cut_off
        late = [entry for peer, entry in self.offers.items() if peer in cut and not self._is_here(entry.blob, now)]
        return [action for entry in late for action in self.want(entry, now)]

    def want_thing(
        self,
        thing: Thing,
        sources: Sequence[PeerId],
        now: float,
        *,
        elsewhere: bool = False,
        early: bool = False,
        part: BlobPart | None = None,
    ) -> list[Action]:
        """The fetch of what a proposal names, or of part, to start now, if any."""
        others = self._members.reachable(peer for peer in sources if peer != self._seat.me)
        is_doubted = self._conduct.is_doubted(thing.holder) or self._conduct.owes(thing.holder)
        within_s = self._seat.pace.exchange_s
        if thing.slice is not None:
            is_doubted, part, within_s = False, BlobPart("result", thing.slice), self._seat.pace.result_s
        return [
            *self._holdings.want(
                thing.name,
                others,
                round_number=self._seat.place.round + 1,
                now=now,
                within_s=within_s,
                doubted=is_doubted and len(sources) == 1,  # its author, or who may have it of a member that is cut off
                elsewhere=elsewhere,
                early=early,
                part=part,
            )
        ]

    # ---- the round is certified ----

    def observe_missing(self, now: float) -> None:
        """What is not here by now is at least this late. Without it only those in time would be measured, the wait would
        shrink to them, and slow peers would never be waited for again."""
        if self.ended_at is None:
            return
        for peer in self._seat.place.roster:
            offer = self.offers.get(peer)
            if offer is None and not self._members.may_offer(peer, now):
                continue
            if (offer is None or not self._is_here(offer.blob, now)) and self._members.is_alive(peer, now):
                self._seat.pace.observe_offer(now - self.ended_at)

    def settle(self, certified: Sequence[Entry], now: float) -> None:
        """What the round tells of the others: whose contributions came, and what work they claimed."""
        seat, conduct, alive = self._seat, self._conduct, self._members.alive(now)
        contributors = {entry.peer for entry in certified}
        for peer in seat.others:
            entry = self.offers.get(peer)
            if peer not in alive:
                continue
            if entry is None:
                if now >= self.offers_due and peer not in contributors and self._members.may_offer(peer, now):
                    conduct.silent(peer)
            elif self._is_here(entry.blob, now) or peer in contributors:
                conduct.delivered(peer)
            elif (lacking := self._lacking(entry.blob, now)) is None:
                conduct.undelivered_to_others(peer, in_time=now < self._blobs_due)
            else:
                conduct.undelivered(
                    peer,
                    lacking,
                    due_at=now + seat.pace.exchange_s,
                    waited_until=self._blobs_due if self.ended_at is not None else now + seat.pace.exchange_wait_s,
                    has_failed=not self._is_coming(peer, entry, now),
                )
        for entry in certified:
            conduct.worked(entry.peer, entry.micro_batches, self._began_at, now)

    def broken_off(self, now: float) -> None:
        """No round came of these offers: what was waited for to the end, and is not here, is not waited for again without end."""
        if self.ended_at is None or now < self._blobs_due:
            return
        for peer in self._members.alive(now):
            entry = self.offers.get(peer)
            if entry is None or peer == self._seat.me or self._is_here(entry.blob, now):
                continue
            if (lacking := self._lacking(entry.blob, now)) is not None:
                self._conduct.undelivered(peer, lacking, due_at=now, waited_until=now, has_failed=True)

    def leader_is_late(self, now: float) -> bool:
        """Whether who leads first has had its time. It may have waited for what came last: a line that is slow here is likely to
        be slow there too."""
        return now >= self._all_came_at(now) + self._seat.pace.ballot_s

    def few_due(self, now: float) -> float:
        """When a round of few is better than none: others have had their time to lead, or a view change would come next."""
        if self.ended_at is None:
            return FOREVER
        came_at, pace = self._all_came_at(now), self._seat.pace
        before_s = pace.degrade_s - 2 * pace.ballot_s
        return min(came_at + FEW_BALLOTS * pace.ballot_s, max(came_at + pace.ballot_s, self.ended_at + before_s))

    def _all_came_at(self, now: float) -> float:
        """When what is waited for was here or late; not before now while something is to come."""
        last = max((self._held_at.get(entry.blob, now) for _, entry in self._worth_waiting_for()), default=now)
        return max(self.offers_due, min(self._blobs_due, last))

    def missed_by(self, certificate: Certificate, now: float) -> list[Note]:
        """What became of the contributions that the certificate goes without, as far as they could be expected."""
        certified = {entry.peer for entry in certificate.value.entries}
        absent = [peer for peer in sorted(self._seat.place.roster) if peer not in certified]
        late = tuple(
            (peer, self._why_missed(peer, now))
            for peer in absent
            if peer in self.offers or self._members.may_offer(peer, now)
        )
        return [Note(ContributionsMissed(certificate.value.round, late))] if late and self.ended_at is not None else []

    def _why_missed(self, peer: PeerId, now: float) -> str:
        entry, waited_s = self.offers.get(peer), self.since_end(now)
        if entry is None:
            return f"had not ended its round {waited_s:.1f} s after the first"
        if self._holdings.is_refused(entry.blob):
            return "was refused"
        if (came_at := self._held_at.get(entry.blob)) is not None:
            late_s = self.since_end(came_at)
            came = f"{late_s:.1f} s after the first" if late_s >= 0.05 else "with the first"
            return f"came {came} here, too late for the leader"
        if self._is_under_way(entry.blob, now):
            return f"was on its way {waited_s:.1f} s after the first"
        return "was not to be had"
