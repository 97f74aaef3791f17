"""Fewer than half that are faster than the others, or say so, and name nobody else where they lead: no round is theirs alone."""

from collections.abc import Collection

import pytest

from dilocox_peer.peer.rounds.ballots import Ballots
from dilocox_peer.peer.rounds.drafting import Drafts
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import Entry

from .test_takeover import machine_with
from .test_withheld import Withholding

NUM_ROUNDS = 120.0 / 6.0  # a round takes 4 s of training


def alone(ours: Collection[PeerId]) -> type[Drafts]:
    """These name nobody else's contributions."""

    class OursAlone(Drafts):
        def entries(self, excluded: Collection[Digest], now: float) -> list[Entry]:
            entries = super().entries(excluded, now)
            return [entry for entry in entries if self._seat.me not in ours or entry.peer in ours]

    return OursAlone


@pytest.mark.parametrize(
    ("num_peers", "hostile", "slowness", "slices"),
    [
        (5, ("p01", "p03"), 0.3, 0),
        (5, ("p01", "p03"), 0.8, 0),
        (5, ("p01", "p03"), 0.3, 4),
        (7, ("p03",), 0.3, 0),
        (7, ("p01", "p03", "p05"), 0.3, 0),
        (9, ("p01", "p03", "p05", "p07"), 0.5, 0),
    ],
)
def test_who_is_faster_than_the_others_has_no_round_to_itself(
    num_peers: int, hostile: tuple[str, ...], slowness: float, slices: int
) -> None:
    """Two of five had 50 of 54 rounds, one of seven 5 of 28: a mean of theirs alone, with no norm of the others beside it. And the honest were doubted, as nothing
    came of them in time."""
    ours = {PeerId(peer) for peer in hostile}

    class AtOnce(Ballots):
        def _is_all_in(self, now: float) -> bool:
            if self._seat.me in ours:
                return len(self._drafts.entries(self._excluded, now)) >= len(ours)
            return super()._is_all_in(now)

    world = Withholding(num_peers, slices, machine_with(alone(ours), AtOnce))
    for peer in ours:
        world.nodes[peer].slowness = slowness
    assert world.rounds_in(120.0) >= 0.75 * NUM_ROUNDS
    rounds = [certificate.value for certificate in world.chain() if certificate.value.kind == "round"]
    theirs = [value.round for value in rounds if {entry.peer for entry in value.entries} <= ours]
    assert len(theirs) <= bool(slices), "in slices a vote of theirs may bind a leader that hears of no others in time"
    assert len(world.doubted_but_by(ours) - ours) <= 1


@pytest.mark.parametrize(("num_peers", "spoiled", "slow"), [(3, ("p01",), ("p02",)), (5, ("p01", "p03"), ("p02",))])
def test_a_round_is_not_put_off_for_contributions_that_were_refused(
    num_peers: int, spoiled: tuple[str, ...], slow: tuple[str, ...]
) -> None:
    """Those that nobody can average were expected all the same: the first round with one slow peer beside them took 5 ballots of three members, and 6 of five (seed
    6409)."""
    world = Withholding(num_peers, 0)
    for peer in spoiled:
        world.nodes[PeerId(peer)].malformed = True
    for peer in slow:
        world.nodes[PeerId(peer)].slowness = 6.0
    world.rounds_in(60.0)
    rounds = [certificate for certificate in world.chain() if certificate.value.kind == "round"]
    of_the_others = num_peers - len(spoiled) - len(slow)
    assert next(each.ballot for each in rounds if len(each.value.entries) == of_the_others) == 0


def test_who_leads_again_without_what_was_refused_waits_for_the_others() -> None:
    """It proposed nothing at all, at once, which was put off for the whole of its turn: 12 rounds of two members, of which one's contributions were
    malformed, took up to 3 ballots (seed 7836 of the outer loop)."""
    world = Withholding(2, 0)
    spoiled = world.nodes[PeerId("p01")]
    spoiled.malformed, spoiled.slowness = True, 0.3
    assert world.rounds_in(60.0) >= 14
    assert max(each.ballot for each in world.chain() if each.value.kind == "round") <= 2
