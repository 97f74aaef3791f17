"""Averaging in slices at one head: which slices are here, what they came to, and what a member makes of the others' word. Pure.

    offers' tables come (arrivals.py) -> whoever a slice is drawn to fetches that slice of each, and says of which contributions it holds all
    that is its own (Gathered) -> the leader names the inputs (Inputs) -> they average, and sign what it came to (Averages) -> where two say
    the same it is a result, which all fetch -> the leader proposes inputs and results (ballots.py)

Nothing here is agreed on: what two members have signed, of all that a member heard of a slice, is what it votes for. One that is gone, or says
nothing, is stepped in for by the next in order (slices.py), by each member's own clock; so is one that another contradicts: then the third
decides. Two signatures under different results of one slice stay as a proof that one of the two peers, or its machine, is wrong.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from dilocox_peer.peer.rounds.able import Able
from dilocox_peer.peer.rounds.conduct import NO_RESULT
from dilocox_peer.peer.rounds.contract import Action, AverageSlice, BlobPart, SliceAveraged
from dilocox_peer.peer.rounds.gathering import Gathering
from dilocox_peer.peer.rounds.holdings import SLICE, TABLE, Holdings
from dilocox_peer.peer.rounds.membership import Members
from dilocox_peer.peer.rounds.named import Named, are_passed_over, told_apart
from dilocox_peer.peer.rounds.overheard import Overheard
from dilocox_peer.peer.rounds.seat import Seat, send_all
from dilocox_peer.peer.rounds.slices import averagers, ranked
from dilocox_peer.peer.rounds.timing import FOREVER
from dilocox_peer.peer.rounds.words import Words
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import VOUCHING, Certificate, Entry, Result, SliceOutcome, Value, inputs_of
from dilocox_peer.wire.rounds import Averages, Gathered, Inputs

MAX_ASKED = 4  # inputs that one leader may name at one head
TRIES = 2  # of a residual that nobody gives; then its slice goes on without


class Slicing:
    """The slices of one (head, view) at one peer, where its round is averaged so."""

    def __init__(self, seat: Seat, members: Members, holdings: Holdings, now: float) -> None:
        sharing = seat.place.sharing
        assert sharing is not None, "a run that averages all to all"
        self._seat = seat
        self._members = members
        self._holdings = holdings
        self._sharing = sharing
        self._orders = ranked(sharing, averagers(seat.place.roster, seat.place.voters))
        self.gathering, self.overheard = Gathering(seat, now), Overheard()
        self._able = Able(seat, members, self.gathering, self._orders)
        self._authors: dict[Digest, set[PeerId]] = {}
        self._leads = self._is_averaged_late = False
        self._given_up: set[Digest] = set()  # contributions that held up what was named with them
        self.words = Words(seat, holdings, self._orders)
        self._batches = self.words.batches
        self._current: Digest | None = None
        self._named = Counter[PeerId]()
        self._asked, self._asked_at = (0, Digest(b"")), now  # in which ballot of ours, and what
        self._drawn_at: tuple[float, int] = (now, -1)
        self._drawn: dict[int, list[PeerId]] = {}
        self._everyone_drawn: set[PeerId] = set()
        self._gathered_by_all: frozenset[Digest] | None = None
        self._own_drawn: list[int] | None = None
        self._missed: dict[Digest, tuple[int, float]] = {}  # of residuals, fetches in vain before we asked, and when
        self._num_heard = 0
        self.offers_due = self.late_at = FOREVER  # offers, and contributions on their way, are waited for no longer

    @property
    def _batch(self) -> Named | None:
        """The inputs that were named last."""
        return None if self._current is None else self._batches[self._current]

    # ---- whose slices they are ----

    def drawn_to(self, index: int, now: float) -> list[PeerId]:
        """The members that are to average a slice, as far as we know: the first two in order that are here, one more for every one of them that
        lets the others wait, or that another contradicts."""
        self._look(now)
        if index not in self._drawn:
            self._drawn[index] = self._draw(index, now)
        return self._drawn[index]

    def _look(self, now: float) -> None:
        """What was drawn counts for this moment: it is asked many times in one."""
        if self._drawn_at != (now, self._num_heard):
            self._drawn_at, self._drawn = (now, self._num_heard), {}
            self._everyone_drawn, self._gathered_by_all, self._own_drawn = set(), None, None
            self._able.look(now, late_at=self.late_at, patience_s=self.patience_s)

    def _everyone(self, now: float) -> set[PeerId]:
        """The members that average any slice."""
        self._look(now)
        if not self._everyone_drawn:
            self._everyone_drawn = {peer for index in range(self._sharing.count) for peer in self.drawn_to(index, now)}
        return self._everyone_drawn

    def _draw(self, index: int, now: float) -> list[PeerId]:
        wanted = VOUCHING
        if (batch := self._batch) is not None and index not in batch.settled:
            wanted += int(batch.open_s(index, now) / self.patience_s)
            wanted += self.words.num_disputed(batch, index)
        return self._able.drawn(index, wanted)

    @property
    def patience_s(self) -> float:
        """Seconds until another steps in for who averages: on a busy machine it is slow, and who steps in makes it slower."""
        return max(self._seat.pace.ballot_s / 2, (self._seat.pace.round_s or 0.0) / 4)

    def _own(self, now: float) -> list[int]:
        """Slices that are ours to average."""
        self._look(now)
        if self._own_drawn is None:
            self._own_drawn = [
                index
                for index in range(self._sharing.count)
                if self._seat.me in self.drawn_to(index, now)
                or self._is_passed_over(index)
                or self._looks_after(index, now)
            ]
        return self._own_drawn

    def _looks_after(self, index: int, now: float) -> bool:
        """Whether we lead, and nobody has averaged a slice in the time that there is for it: whoever was to may have been given less than it
        says, and a leader that tries for itself finds out of whom."""
        batch = self._batch
        return self._leads and batch is not None and batch.open_s(index, now) > self.patience_s

    def _is_passed_over(self, index: int) -> bool:
        """Whether a slice is settled by one that comes after us, to whom somebody before it seemed not to be here: the others put their
        votes off until we have said what it comes to (is_early)."""
        if (batch := self._batch) is None or index not in batch.settled or self._seat.me in batch.said.get(index, {}):
            return False
        order, result = self._orders[index], self.words.result(batch, index)
        return result is not None and self._seat.me in order[: max(order.index(peer) for peer, _ in result.by)]

    # ---- what of the contributions is here, as arrivals.py asks ----

    def has(self, table: Digest, now: float) -> bool:
        """Whether a contribution can be averaged: all whose slices they are hold theirs of it, or for a while all but few of many; when it is
        late, one of them for each slice. Its author is that one only where no other has said anything: nobody else may have been given the slice."""
        if not self._holdings.has(table, TABLE) or self._holdings.is_refused(table):
            return False
        if now < self.late_at:
            if not (everyone := self._everyone(now)) or table in self._by_all(everyone):
                return True
            if not self.gathering.is_by_most(table, everyone, now) and not self._is_made_up_for(table, now):
                return False
        holders, authors = self.gathering.by(table), self._authors.get(table, set())
        for index in range(self._sharing.count):
            drawn = self.drawn_to(index, now)
            spoken = [peer for peer in drawn if peer not in authors and self.gathering.has_spoken(peer)]
            if holders.isdisjoint(spoken or drawn):
                return False
        return True

    def _is_made_up_for(self, table: Digest, now: float) -> bool:
        """Whether those who have stepped in for who is behind hold it: two for each slice, as without anybody behind."""
        holders, all_drawn = self.gathering.by(table), (self.drawn_to(each, now) for each in range(self._sharing.count))
        return bool(self._able.behind) and all(len(holders.intersection(drawn)) >= VOUCHING for drawn in all_drawn)

    def _by_all(self, everyone: Iterable[PeerId]) -> frozenset[Digest]:
        """What all that average hold of."""
        if self._gathered_by_all is None:
            self._gathered_by_all = self.gathering.by_all(everyone)
        return self._gathered_by_all

    def is_under_way(self, table: Digest, now: float) -> bool:
        if self._holdings.is_refused(table) or self.has(table, now):
            return False
        return self._holdings.has(table, TABLE) or self._holdings.is_under_way(table)

    def lacking(self, table: Digest, now: float) -> Digest | None:
        """What of a contribution is still to come to us: its table, or a slice of it that is ours to average; None: nothing."""
        held, parts = self._holdings, self._holdings.parts_of(table)
        if not held.has(table, TABLE):
            return table
        own = (index for index in self._own(now) if parts and not self._able.steps_in(index))
        return next((parts[index] for index in own if not held.has(parts[index], SLICE)), None)

    # ---- what comes in ----

    def offered(self, entry: Entry) -> None:
        """A member says that this contribution is its own."""
        self._authors.setdefault(entry.blob, set()).add(entry.peer)

    def on_gathered(self, sender: PeerId, message: Gathered) -> None:
        self._num_heard += self.gathering.heard(sender, message)

    def on_inputs(self, sender: PeerId, message: Inputs, now: float) -> tuple[list[Action], str | None]:
        """From the leader of its ballot, which may lack what we have said: it hears that again."""
        name = inputs_of(message.entries)
        self._num_heard += 1
        if name not in self._batches:
            return [], self._take_up(name, sender, Named(message.entries, now, is_news=True))
        self._go_over_to(name, now)
        return self._said_again(name, [sender]), None

    def said_of(self, entries: Sequence[Entry], leader: PeerId) -> list[Action]:
        """What we have said of these, to who is not heeded here yet: what was said before it named them was lost there."""
        name = inputs_of(entries)
        return self._said_again(name, [leader]) if name in self._batches and leader in self._orders[0] else []

    def on_proposed(self, leader: PeerId, value: Value, now: float) -> None:
        """A proposal names its inputs, too. A member that had promised a higher ballot when they were named averages nothing of them till then, and
        votes wait for its word (is_early)."""
        if not value.results:
            return
        self._num_heard += 1
        if (name := inputs_of(value.entries)) in self._batches:
            self._go_over_to(name, now)
        else:
            self._take_up(name, leader, Named(value.entries, now))

    def _take_up(self, name: Digest, leader: PeerId, batch: Named) -> str | None:
        """Why inputs are not looked at, or None."""
        peers = [entry.peer for entry in batch.entries]
        if peers != sorted(set(peers)) or not set(peers) <= set(self._seat.place.roster):
            return "inputs that are no contributions of the roster, in order"
        if self._named[leader] >= MAX_ASKED:
            return "names inputs again and again"
        self._named[leader] += 1
        self._batches[name] = batch
        self._go_over_to(name, batch.since)
        return None

    def _go_over_to(self, name: Digest, now: float) -> None:
        """These are averaged from now on, and no others."""
        if name != self._current:
            if (before := self._batch) is not None:
                before.until = now
            self._current, self._batches[name].heeded, self._batches[name].until = name, now, FOREVER

    def on_averages(self, sender: PeerId, message: Averages) -> tuple[list[Action], str | None]:
        batch = self._batches.get(message.inputs)
        if sender not in self._orders[0]:
            return [], None
        if batch is None:  # what its leader said was lost on its way here; what they came to is said again
            self.overheard.heard(sender, message.inputs)
            return [], None
        self._num_heard += 1
        actions: list[Action] = []
        for each in message.averages:
            outcome = SliceOutcome(each.blob, each.size_bytes, each.base, each.residual)
            if each.slice >= self._sharing.count or outcome.base not in (b"", self._sharing.base(each.slice)):
                return actions, f"a slice {each.slice}, or a residual of it, that there is not"
            if sender in (said := batch.said.setdefault(each.slice, {})):
                continue
            statement = self.words.statement(message.inputs, each.slice, outcome)
            if not self._seat.owner.verify(sender, statement, each.signature):
                return actions, "a signature that does not verify"
            said[sender] = outcome, each.signature
            actions += told_apart(batch, each.slice, self._seat.place)
        return actions, None

    def averaged(self, done: SliceAveraged) -> list[Action]:
        """We have averaged a slice, or could not."""
        inputs, index, outcome = done.inputs, done.slice, done.outcome
        if (batch := self._batches.get(inputs)) is None:
            return []
        self._num_heard += 1
        batch.under_way.discard(index)
        if outcome is None:
            batch.failed.add(index)  # the next in order steps in, or other inputs are named
            return []
        place, owner, round_number = self._seat.place, self._seat.owner, self._seat.place.round + 1
        self._holdings.held(outcome.blob, round_number, outcome.size_bytes, part=BlobPart("result", index))
        self._holdings.held(outcome.residual, round_number, 0, part=BlobPart("residual", index))
        self._holdings.pass_by([outcome.residual])
        signature = owner.sign(self.words.statement(inputs, index, outcome))
        batch.said.setdefault(index, {})[self._seat.me] = outcome, signature
        batch.is_untold = True
        return told_apart(batch, index, place)

    # ---- what follows ----

    def advance(self, offers: Iterable[Entry], now: float) -> list[Action]:
        """All that is due by now. offers: that are known."""
        if not self._seat.is_member:
            return []
        batch, own, actions = self._batch, self._own(now), list[Action]()
        entries = {entry.blob: entry for entry in (*offers, *(batch.entries if batch else ()))}
        for entry in entries.values():
            actions += self._want_slices(entry, own, now)
        gathered = [table for table in entries if self._is_gathered(table, own)]
        trusted = self._seat.owner.conduct.waited_for(self._seat.place.roster)
        waited = trusted - {each.peer for each in entries.values()}
        is_awaited = now < self.offers_due and any(self._members.may_offer(peer, now) for peer in waited)
        # One that does not deliver what it offers is not waited for: our word of the others' would be late in every round.
        coming = {blob for blob, each in entries.items() if each.peer in trusted}
        self.gathering.look(entries, coming, self._everyone(now), self._able.all, now)
        is_all = coming <= set(gathered) and not is_awaited
        self._num_heard += self.gathering.hold(gathered)
        actions += self.gathering.say(now, is_all=is_all, is_late=now >= self.late_at)
        if batch is not None and self._current is not None:
            actions += self._average(self._current, batch, own, now)
            if batch.is_untold and not batch.under_way:
                batch.is_untold = False
                actions += self._said_again(self._current, self._seat.others)
            actions += self._want_results(batch, now)
        return actions

    def deadline(self, now: float) -> float:
        retry_s = self._seat.timing.retry_s
        return now + retry_s / 2 if self.gathering.has_spoken(self._seat.me) or self._current is not None else FOREVER

    def _is_gathered(self, table: Digest, own: Sequence[int]) -> bool:
        held, parts = self._holdings, self._holdings.parts_of(table)
        return bool(parts) and held.has(table, TABLE) and held.has_all((parts[index] for index in own), SLICE)

    def _want_slices(self, entry: Entry, own: Sequence[int], now: float) -> list[Action]:
        parts, actions = self._holdings.parts_of(entry.blob), list[Action]()
        if not parts or self._holdings.is_refused(entry.blob):
            return []
        asked = {index: BlobPart("slice", index, entry.blob) for index in own}
        missing = [index for index, part in asked.items() if self._holdings.may_want(parts[index], now, part)]
        if not missing:
            return []
        holders = self.gathering.holders(entry.blob)
        for index in missing:
            drawn = [peer for peer in self.drawn_to(index, now) if peer in holders]
            actions += self._want(parts[index], asked[index], [entry.peer, *drawn], now, perhaps=holders)
        return actions

    def _want(
        self, name: Digest, part: BlobPart, sources: Iterable[PeerId], now: float,
        *, perhaps: Iterable[PeerId] = (), elsewhere: bool = False,
    ) -> list[Action]:  # fmt: skip
        """The fetch to start now, if any. sources: that should have it; perhaps: that may, and are asked after them, however well they behave.
        elsewhere: others had been asked before, of whom it did not come."""
        if not elsewhere and not self._holdings.may_want(name, now, part):
            return []
        best_first = self._seat.owner.conduct.best_first
        others = [peer for group in (sources, perhaps) for peer in best_first(group) if peer != self._seat.me]
        pace = self._seat.pace
        within_s = pace.exchange_s if part.kind in ("table", "slice") else pace.result_s
        return [
            *self._holdings.want(
                name, others, round_number=self._seat.place.round + 1, now=now, within_s=within_s, part=part, elsewhere=elsewhere,
            )
        ]  # fmt: skip

    def _average(self, inputs: Digest, batch: Named, own: Sequence[int], now: float) -> list[Action]:
        tables, actions = [entry.blob for entry in batch.entries], list[Action]()
        if lost := [each for each in batch.entries if own and not self._is_gathered(each.blob, ())]:  # their offers
            sources = {each.blob: [each.peer, *self.gathering.holders(each.blob)] for each in lost}
            return [act for table, some in sources.items() for act in self._want(table, BlobPart("table"), some, now)]
        for index in own:
            if index in batch.under_way | batch.failed or self._seat.me in batch.said.get(index, {}):
                continue
            is_here = self._holdings.has_all((self._holdings.parts_of(table)[index] for table in tables), SLICE)
            base, as_what = self._sharing.base(index), BlobPart("residual", index)
            if base and not self._holdings.has(residual := Digest(base), as_what):  # it comes while the slices do
                holders = [peer for peer, _ in self._sharing.results[index].by]
                actions += self._want(residual, as_what, holders, now, perhaps=self._seat.others)
                tries = self._holdings.failures(residual)
                before, since = self._missed.setdefault(residual, (tries, now))
                most = TRIES if now < since + self._seat.pace.result_s else 1
                if tries < most + before and not self._holdings.is_refused(residual, as_what):
                    continue
                base = b""
            if not is_here:
                continue
            batch.under_way.add(index)
            plan = self._seat.place.plan
            actions.append(AverageSlice(inputs, index, batch.entries, base, plan.codec, plan.inner_steps))
        return actions

    def _said_again(self, inputs: Digest, to: Iterable[PeerId]) -> list[Action]:
        """What we came to."""
        averages = self.words.ours(self._batches[inputs])
        return [*send_all(to, Averages(*self._seat.at(), inputs, averages))] if averages else []

    def _want_results(self, batch: Named, now: float) -> list[Action]:
        actions: list[Action] = []
        for index in range(self._sharing.count):
            result = self.words.result(batch, index)
            self.words.look(batch, index, now, self._seat.pace.result_s)
            self._num_heard += batch.settle(index, now, is_settled=result is not None)
            if result is not None:
                by = [peer for peer, _ in result.by]
                part, others = BlobPart("result", index), result.blob in batch.tried
                actions += self._want(result.blob, part, by, now, perhaps=self._seat.others, elsewhere=others)
        return actions

    # ---- what became of it ----

    def settle(self, certificate: Certificate, now: float) -> None:
        """The round is certified: who let the others wait for its slices, and who said that they came to something else."""
        value, conduct = certificate.value, self._seat.owner.conduct
        if (batch := self._batches.get(inputs_of(value.entries))) is None:
            return
        heeded = [each for each in self._batches.values() if each.was_heeded_for(self.patience_s, now)]
        silent = {peer for each in heeded for peer in each.idle(self._orders, self.gathering.holds)}
        if now >= self.late_at:
            drawn = {peer for order in self._orders for peer in order[:VOUCHING]}
            silent |= {peer for peer in drawn if not self.gathering.has_spoken(peer)}
        for peer in sorted(silent - {self._seat.me}):
            if self._members.takes_part(peer, now):
                conduct.silent(peer)
        for peer, index in batch.contradicting(value.results):
            conduct.strike(peer, "averaged", f"came to another result of slice {index} than others did")
        for peer in sorted(batch.failing):
            if self._members.takes_part(peer, now):
                conduct.withheld(peer)

    def broken_off(self, now: float) -> None:
        """A view change is certified here: who withheld what it came to is left none, or it would hold up what follows too."""
        for batch in self._batches.values():
            is_our_line = 2 * len(batch.took) <= len(batch.known)
            for peer in () if is_our_line else sorted(batch.failing):
                if self._members.takes_part(peer, now):
                    self._seat.owner.conduct.strike(peer, "averaged", NO_RESULT)

    # ---- what it comes to ----

    def are_averaged(self, entries: Sequence[Entry]) -> bool:
        """Whether more than a third of the members average these: they heed who named them."""
        return 3 * self.overheard.count(inputs_of(entries)) > len(self._seat.place.roster)

    def named_since(self, entries: Sequence[Entry], now: float) -> float:
        """Since when it is known here that a leader has named these: what comes after that is not in what they come to. now: that is not known."""
        return now if (batch := self._batches.get(inputs_of(entries))) is None else batch.since

    def has_news(self) -> bool:
        """Whether a slice's result is known that was not when this was asked last."""
        return (batch := self._batch) is not None and batch.takes_news()

    def results(self, entries: Sequence[Entry]) -> tuple[Result, ...] | None:
        """What these contributions came to, if all of it is known and here."""
        return self.words.results(entries)

    def ask(self, ballot: int, entries: Sequence[Entry], authors: tuple[bytes, ...], now: float) -> list[Action]:
        """We lead: have these averaged. authors: who made them, as they signed. Those whose word is missing are asked again and again."""
        name = inputs_of(entries)
        message = Inputs(*self._seat.at(), ballot, tuple(entries), authors)
        asked: Iterable[PeerId] = self._seat.others
        if name not in self._batches:
            self._batches[name] = Named(tuple(entries), now, is_news=True)
            self._named[self._seat.me] += 1
        elif self._asked == (ballot, name) and now < self._asked_at + self._seat.timing.retry_s:
            self._go_over_to(name, now)  # another has named its own meanwhile
            return []
        elif self._current == name:
            batch = self._batches[name]
            open_ones = (index for index in range(self._sharing.count) if index not in batch.settled)
            drawn = ((index, peer) for index in open_ones for peer in self.drawn_to(index, now))
            lacking = {peer for index, peer in drawn if peer not in batch.said.get(index, {})}
            asked = sorted(lacking - {self._seat.me})
        self._num_heard += name != self._current or not self._leads
        self._go_over_to(name, now)
        self._asked, self._asked_at, self._leads = (ballot, name), now, True
        return [*send_all(asked, message)]

    def asked(self, entries: Sequence[Entry], now: float, few: Callable[[Sequence[Entry]], bool]) -> Sequence[Entry]:
        """What a leader that would have these averaged names: what was named before, while that has its time, if it is most of these; but not what
        holds that up."""
        if (batch := self._batch) is not None:
            late = {each.blob for each in batch.entries if self._holds_up(batch, each.blob, now)}
            if 2 * len(late) < len(batch.entries):  # else no author is to blame
                self._given_up |= late
            batch = batch if now < batch.since + 8 * self.patience_s else None
        mine = [each for each in entries if each.blob not in self._given_up]
        may_name = self._named[self._seat.me] < MAX_ASKED  # whoever named more with each word is soon not listened to
        if batch is None or (may_name and batch.is_outgrown(mine, now - self._seat.timing.retry_s)):
            return mine
        if self._asked[1] != self._current and few(batch.entries) and not few(mine):
            return mine  # of ours it would take turns with these, as what is here changes with what is named
        is_gone = any(self._holdings.is_refused(each.blob) or each.blob in self._given_up for each in batch.entries)
        return mine if is_gone else batch.entries

    def _holds_up(self, batch: Named, table: Digest, now: float) -> bool:
        """Whether we asked in vain, again and again, for a slice of it that nobody has averaged yet."""
        parts, open_ones = self._holdings.parts_of(table), set(self._own(now)) - batch.settled
        return any(self._holdings.failures(parts[index]) >= TRIES for index in open_ones if parts)

    def taken_over(self, now: float) -> None:
        """Another is to lead: by no fault of those before, if what they named has long been without a result."""
        if (batch := self._batch) is not None:
            open_s = max(batch.open_s(index, now) for index in range(self._sharing.count))
            self._is_averaged_late |= open_s >= self.patience_s

    def excuses(self, now: float) -> bool:
        """Whether no leader is to blame for the time that it took: what was named has no result, had none until just now, or not in time."""
        then = now - self._seat.pace.ballot_s
        are_open = any(batch.is_open(self._sharing.count, then) for batch in self._batches.values())
        return are_open or self._is_averaged_late

    # ---- what is voted for ----

    def why_not_vouched(self, value: Value) -> str | None:
        """Why we do not vote for these results, or None."""
        return self.words.why_not_vouched(value)

    def is_early(self, value: Value, now: float) -> bool:
        """Whether it has results by members whose turn it is not: others that are here come before all but one of its supporters, and have
        not said what they came to. Later it is voted for all the same."""
        if not value.results or now >= self.late_at + 2 * self.patience_s:
            return False
        batch = self._batches.get(inputs_of(value.entries))
        most = 0 if batch is None else int((now - batch.since) / self.patience_s)  # as many were stepped in for
        self._look(now)
        return are_passed_over(value, self.words.about(value), self._orders, self._able.is_awaited, most)
