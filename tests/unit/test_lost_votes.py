"""A log that is damaged before its end: its votes are lost, also those at heads that the peer has to come to again."""

import pytest

from dilocox_peer.peer.rounds.contract import Action, FetchState, StateInstalled
from dilocox_peer.peer.rounds.durable import LOST_VOTES_VIEWS, Durable, encode_record, load_log, sealed_votes
from dilocox_peer.types import PeerId
from dilocox_peer.wire.rounds import Ack, Promise
from tests.unit.test_rounds import GENESIS, Table


class Disks(Table):
    """Every state that is asked for is there."""

    def _carry_out(self, peer: PeerId, action: Action) -> None:
        if isinstance(action, FetchState):
            self.give(peer, StateInstalled(action.head, action.head))
        else:
            super()._carry_out(peer, action)


def begun(*names: str) -> tuple[Disks, PeerId]:
    """A round is certified. In the next one all have accepted the first leader's proposal, and nobody's ACK arrives. Then of one, which comes
    back, all that its log had of the round before, and since, is damaged."""
    table = Disks(*names)
    table.start()
    table.offer(*names)
    late = PeerId(table.by_rank()[1])
    table.swallow = lambda _sender, _to, message: isinstance(message, Ack)
    table.offer(*names)
    table.wait(1.0)
    accepted = table.seat(late).votes.accepted
    assert accepted is not None
    assert (accepted.ballot, table.machine(late).round) == (0, 1)
    first = table.machine(late).chain[0]
    table.leave_the_room(late)
    table.logs[late] = encode_record(Durable(0, (first,), sealed_votes(first.head, first.view)))
    loaded = load_log(table.logs[late], GENESIS).durable
    assert loaded is not None
    assert loaded.votes.view_change_signed == first.view + LOST_VOTES_VIEWS
    table.now += 1.0
    table.sit(late, incarnation=2, stored_states={GENESIS}, stored_blobs=table.blobs[late])
    for _ in range(40):
        if table.machine(late).round < 1:
            table.wait(0.25)
    assert table.machine(late).round == 1
    return table, late


def test_where_it_may_have_voted_it_gives_no_second_vote() -> None:
    table, late = begun("a", "b", "c", "d")
    assert not table.seat(late).may_vote
    table.done[late].clear()
    table.wait(3.0)
    assert not table.said(late, Promise)
    assert not table.said(late, Ack)


@pytest.mark.parametrize("is_needed", [False, True])
def test_at_heads_that_are_made_since_it_votes_again(is_needed: bool) -> None:
    """is_needed: without its vote there is no quorum, as another has gone."""
    table, late = begun("a", "b", "c")
    if is_needed:
        table.leave_the_room(next(peer for peer in map(PeerId, table.by_rank()[::-1]) if peer != late))
    table.swallow = lambda _sender, _to, _message: False
    for _ in range(6):
        table.wait(40.0)
        table.offer(*table.machines)
    table.wait(40.0)
    assert len(table.heads()) == 1
    assert table.machine(late).round >= 4
    assert set(table.machine(late).roster) == set(table.machines)
    assert table.seat(late).may_vote
