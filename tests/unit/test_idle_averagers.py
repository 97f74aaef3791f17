"""Who is blamed, once a round is certified, for letting the others wait for its slices: nobody who went over to what another leader named."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from dilocox_peer.peer.rounds.averages import Slicing
from dilocox_peer.peer.rounds.chain import Place
from dilocox_peer.peer.rounds.conduct import Conduct
from dilocox_peer.peer.rounds.slices import ranked
from dilocox_peer.types import PeerId, sha256
from dilocox_peer.wire.chain import Certificate, Entry, Plan, Value
from dilocox_peer.wire.rounds import Gathered, Inputs

PEERS = tuple(PeerId(f"p{number}") for number in range(6))
ME, BALLOT_S = PEERS[0], 10.0
PATIENCE_S = BALLOT_S / 2
ENTRIES = tuple(Entry(peer, 1, sha256(peer.encode()), 10, 8) for peer in PEERS)
FIRST, SECOND = ENTRIES[:5], ENTRIES


class Blame(Conduct):
    def __init__(self) -> None:
        super().__init__(ME)
        self.silent_ones = set[PeerId]()

    def silent(self, peer: PeerId) -> None:
        self.silent_ones.add(peer)


def blamed(named: list[tuple[float, tuple[Entry, ...]]], certified_at: float) -> set[PeerId]:
    """All hold everything and average nothing. named: when which inputs were; the last ones are certified."""
    genesis = Place.genesis(0, sha256(b"genesis"), Plan("int4", 0, 8), slices=4)
    place = Place(0, genesis.head, 1, 0, 0, 1, PEERS, genesis.plan, voters=PEERS, sharing=genesis.sharing)
    conduct = Blame()
    seat = SimpleNamespace(
        place=place, me=ME, others=PEERS[1:], at=lambda: (0, place.head, 0),
        owner=SimpleNamespace(conduct=conduct), pace=SimpleNamespace(ballot_s=BALLOT_S, round_s=None),
        timing=SimpleNamespace(retry_s=1.0),
    )  # fmt: skip
    members = SimpleNamespace(takes_part=lambda _peer, _now: True)
    slicing = Slicing(cast("Any", seat), cast("Any", members), cast("Any", None), 0.0)
    for peer in PEERS[1:]:
        slicing.on_gathered(peer, Gathered(0, place.head, 0, tuple(sorted(entry.blob for entry in ENTRIES))))
    for ballot, (at, entries) in enumerate(named):
        assert slicing.on_inputs(PEERS[1 + ballot], Inputs(0, place.head, 0, ballot, entries, ()), at) == ([], None)
    value = Value("round", 1, 1, 0, named[-1][1], PEERS, genesis.plan)
    slicing.settle(Certificate(0, place.head, 0, 1, value, ()), certified_at)
    return conduct.silent_ones


@pytest.mark.parametrize(("after_s", "is_blamed"), [(1.0, False), (PATIENCE_S + 1.0, True)])
def test_what_another_leader_named_soon_after_is_averaged_instead_and_that_is_nobodys_fault(
    after_s: float, is_blamed: bool
) -> None:
    """The first inputs have been known for long by the end in both cases."""
    begun = 2 * PATIENCE_S
    found = blamed([(begun, FIRST), (begun + after_s, SECOND)], begun + after_s + PATIENCE_S - 0.5)
    assert bool(found) is is_blamed
    assert bool(blamed([(begun, FIRST)], begun + PATIENCE_S + 0.5)), "one that averages nothing for so long is"


def test_inputs_that_come_back_have_their_time_from_then_on() -> None:
    named = [(0.0, FIRST), (1.0, SECOND), (2.0 * PATIENCE_S, FIRST)]
    assert not blamed(named[:2], PATIENCE_S)
    found = blamed(named, 2.0 * PATIENCE_S + 1.0)
    assert found, "the second were averaged for long, by nobody"
    assert found <= {peer for order in ranked_of() for peer in order[:2]}


def ranked_of() -> tuple[tuple[PeerId, ...], ...]:
    sharing = Place.genesis(0, sha256(b"genesis"), Plan("int4", 0, 8), slices=4).sharing
    assert sharing is not None
    return ranked(sharing, PEERS)
