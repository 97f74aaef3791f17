"""A leader that has itself, or an accomplice, accept what nobody would, and then says that it is bound by that: it is believed when a quorum shows the same."""

from collections.abc import Sequence

import msgspec
import pytest

from dilocox_peer.peer.rounds.ballots import Ballots
from dilocox_peer.peer.rounds.contract import Action
from dilocox_peer.peer.rounds.drafting import Drafts
from dilocox_peer.peer.rounds.proposals import Lead
from dilocox_peer.types import PeerId
from dilocox_peer.wire.chain import Entry, Result, Value
from dilocox_peer.wire.rounds import Message, Propose

from .test_few import alone
from .test_takeover import machine_with
from .test_withheld import HOSTILE, Withholding


def _excused(hostile: set[PeerId], *, at_once: bool) -> type[Ballots]:
    """Hostile ones that lead first accept a value of theirs, ask for their next ballot, and propose it there with their own acceptance. at_once: as
    soon as their own contributions are here."""

    class Excused(Ballots):
        def advance(self, now: float) -> list[Action]:
            seat, lead = self._seat, self._lead
            if seat.me in hostile and seat.may_vote and seat.leader(0) == seat.me and self.certificate is None:
                has_accepted = seat.votes.accepted is not None
                are_here = len(self._drafts.entries(self._excluded, now)) >= len(hostile)
                if at_once and self._arrivals.own is not None and seat.votes.promised == 0 and not has_accepted:
                    first = self._first = self._first or Lead(0, now)
                    return self._propose_own(first, now) if are_here else []
                if seat.votes.promised == 0 and has_accepted and lead is not None and lead.ballot == 0:
                    return self._lead_above(0, now)
            return super().advance(now)

        def _choose(self, lead: Lead, now: float) -> list[Action]:
            seat, forced = self._seat, self._forced_value(lead.promises)
            if seat.me not in hostile or not seat.is_quorum(lead.promises) or forced is None:
                return super()._choose(lead, now)
            lead.shown = tuple(lead.signed[peer] for peer in sorted(lead.promises))
            return self._propose(lead, forced, now) if self._may_accept(forced) else []

    return Excused


@pytest.mark.parametrize(("num_peers", "slices"), [(5, 0), (5, 4), (7, 0)])
def test_no_leader_excuses_a_roster_of_its_own_with_its_own_vote(num_peers: int, slices: int) -> None:
    """It was the whole roster, and certified alone, from the eleventh certificate on."""

    class ItselfAlone(Drafts):
        def _value(self, entries: Sequence[Entry], now: float, results: tuple[Result, ...] = ()) -> Value:
            value = super()._value(entries, now, results)
            return msgspec.structs.replace(value, roster=(HOSTILE,)) if self._seat.me == HOSTILE else value

    world = Withholding(num_peers, slices, machine_with(ItselfAlone, _excused({HOSTILE}, at_once=False)))
    deliver = world.deliver

    def keep(sender: PeerId, to: PeerId, message: Message) -> None:
        if not (sender == HOSTILE and isinstance(message, Propose) and message.ballot == 0):
            deliver(sender, to, message)

    world.deliver = keep  # type: ignore[method-assign]
    assert world.rounds_in(80.0) >= 8
    assert {len(certificate.value.roster) for certificate in world.chain()[1:]} == {num_peers}


@pytest.mark.parametrize(
    ("num_peers", "hostile"),
    [(5, ("p01", "p03")), (5, ("p03",)), (7, ("p01", "p03", "p05")), (9, ("p01", "p03", "p05", "p07"))],
)
def test_nor_rounds_of_few(num_peers: int, hostile: tuple[str, ...]) -> None:
    """One of five had 7 of 32 rounds to itself, two of five 10 of 33 where they were put off without the excuse."""
    ours = {PeerId(peer) for peer in hostile}
    world = Withholding(num_peers, 0, machine_with(alone(ours), _excused(ours, at_once=True)))
    for peer in ours:
        world.nodes[peer].slowness = 0.3
    assert world.rounds_in(120.0) >= 15
    rounds = [certificate.value for certificate in world.chain() if certificate.value.kind == "round"]
    assert not [value.round for value in rounds if {entry.peer for entry in value.entries} <= ours]
