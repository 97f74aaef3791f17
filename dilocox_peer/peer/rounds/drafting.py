"""What a leader would propose of its own: the contributions that are here, what they came to, the next roster, the next plan. Pure."""

from collections.abc import Collection, Sequence

from dilocox_peer.peer.rounds.arrivals import Arrivals
from dilocox_peer.peer.rounds.averages import Slicing
from dilocox_peer.peer.rounds.contract import Action
from dilocox_peer.peer.rounds.jury import Jury
from dilocox_peer.peer.rounds.membership import Members
from dilocox_peer.peer.rounds.seat import Seat
from dilocox_peer.types import Digest
from dilocox_peer.wire.chain import Entry, Result, Value


class Drafts:
    """The drafts of one (head, view) at one peer. slicing: where its round is averaged in slices."""

    def __init__(self, seat: Seat, arrivals: Arrivals, members: Members, jury: Jury, slicing: Slicing | None) -> None:
        self._seat = seat
        self._arrivals = arrivals
        self._members = members
        self._conduct = seat.owner.conduct
        self._jury = jury
        self._slicing = slicing

    def entries(self, excluded: Collection[Digest], now: float) -> list[Entry]:
        """The contributions that are here."""
        return [entry for entry in self._arrivals.held(now) if entry.blob not in excluded]

    def next(self, ballot: int, excluded: Collection[Digest], now: float) -> tuple[Value | None, list[Action]]:
        """The value to propose in a ballot of ours; None while its slices are being averaged, and what has them averaged."""
        entries: Sequence[Entry] = self._believed(excluded, now)
        if self._slicing is None:
            return self._value(entries, now), []
        # Also when none is here: where another steps in for who is slow, it has none of them yet.
        entries = sorted(entries, key=lambda entry: entry.peer)
        asked = self._slicing.asked(entries, now, lambda each: self._jury.is_of_few(each, now))
        if all(self._may_name(entry, excluded, now) for entry in asked):
            entries = asked  # what another leader has named may have what we would not
        if not entries:
            return self._value((), now), []
        results = self._slicing.results(entries)
        if results is None or any(result.blob in excluded for result in results):
            return None, self._slicing.ask(ballot, entries, self._arrivals.authors(entries), now)
        return self._value(entries, now, results), []

    def _may_name(self, entry: Entry, excluded: Collection[Digest], now: float) -> bool:
        """Whether a contribution that another has named is one as far as we know: its author says so, or has said nothing here."""
        is_said = self._arrivals.offers.get(entry.peer) in (None, entry) and entry.peer != self._seat.me
        is_said = is_said or entry == self._arrivals.own
        return is_said and entry.blob not in excluded and not self._jury.why_not_worked(entry, now)

    def _believed(self, excluded: Collection[Digest], now: float) -> list[Entry]:
        entries = []
        for entry in self.entries(excluded, now):
            if reason := self._jury.why_not_worked(entry, now):
                self._conduct.strike(entry.peer, "claimed", reason)
            else:
                entries.append(entry)
        return entries

    def _value(self, entries: Sequence[Entry], now: float, results: tuple[Result, ...] = ()) -> Value:
        seat, offered = self._seat, self._arrivals.offers.keys()
        roster = self._members.next_roster(
            seat.place.roster, offered, seat.recent, me_too=True, max_peers=seat.owner.max_peers, now=now
        )
        banned = () if seat.directive is None else seat.directive.banned
        roster = tuple(
            peer for peer in roster if peer == seat.me or not (peer in banned or self._conduct.is_proven(peer))
        )
        refused = set(self._jury.refused_newcomers(roster))
        roster = tuple(peer for peer in roster if peer not in refused)
        directive = next(iter(seat.to_carry), None)
        return seat.place.round_value(entries, roster, seat.plan(), directive, results)
