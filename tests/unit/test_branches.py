"""A peer goes over to another branch: where it may have voted it votes no more, and what was worse is looked at anew."""

import random
from functools import partial

import pytest

from dilocox_peer.contract import Tick
from dilocox_peer.peer.rounds.chain import Chain
from dilocox_peer.peer.rounds.contract import (
    Action,
    FetchState,
    Input,
    OwnerVouched,
    Persist,
    Received,
    Send,
    StateInstalled,
    StateMissing,
)
from dilocox_peer.peer.rounds.durable import LOST_VOTES_VIEWS, Durable, Votes
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.rounds.timing import Timing
from dilocox_peer.types import PeerId
from dilocox_peer.wire.rounds import ChainPage, GetChain, Heartbeat, ViewPropose, ViewSign
from tests.unit.test_forks import GENESIS, OWNER, A, B, Branch, C, D, E, checkpoint_of, sign, verify


class Peer:
    """One that starts with a chain, and gets every state that it wants."""

    def __init__(self, me: PeerId, own: Branch) -> None:
        self.now = 0.0
        head = own.place.head
        self.machine = RoundMachine(
            me=me, incarnation=1, stage=0, genesis=GENESIS.head, timing=Timing(), sign=partial(sign, me), verify=verify,
            rng=random.Random(0), now=0.0, plan=GENESIS.plan, start_peers=1, max_peers=16, run_owner=OWNER,
            durable=Durable(0, own.certificates, Votes(head)), chain=Chain(GENESIS, own.certificates), stored_states={head},
        )  # fmt: skip
        self.done: list[Action] = []

    def give(self, happened: Input) -> None:
        self.now += 0.1
        actions = self.machine.handle(happened, self.now)
        self.done += actions
        for action in actions:
            if isinstance(action, FetchState):
                self.give(StateInstalled(action.head, action.state_digest))

    def shown(self, branch: Branch, *voices: PeerId) -> None:
        """voices: who stands there, and says so for half a minute, or until the peer is there too."""
        place, page = branch.place, tuple(branch.certificates[1:])
        self.give(Received(voices[0], ChainPage(0, place.head, place.view, page, False)))
        for _ in range(30):
            self.now += 1.0
            for voice in voices:
                beat = Heartbeat(0, place.head, place.view, 1, place.height, place.round, 0, 1, 0, True, b"")
                self.give(Received(voice, beat))
            self.give(Tick())
            if self.machine.head == place.head:
                return


def test_who_leaves_a_branch_votes_no_more_at_any_head_of_it_where_it_may_have_voted() -> None:
    """Found by slicing seed 368: it came back below a round that it alone knew to be certified, and certified another there."""
    start = Branch().start(A, B, C)
    ours = start.fork().round(A, B, order=2).round(A, B, order=3)
    theirs = start.fork().view(B, C, order=9)
    peer = Peer(A, ours)
    peer.shown(theirs, B, C)
    assert peer.machine.head == theirs.place.head
    [left] = [each.state.left for each in peer.done if isinstance(each, Persist) and each.state.left]
    assert left == (start.place.head, ours.certificates[1].head), "not the last: there it gave no vote"


def test_who_had_no_vote_on_a_branch_has_none_to_be_careful_with() -> None:
    start = Branch().start(A, B, C)
    ours, theirs = start.fork().round(A, B, order=2), start.fork().view(B, C, order=9)
    peer = Peer(E, ours)
    peer.shown(theirs, B, C)
    assert peer.machine.head == theirs.place.head
    assert not [each for each in peer.done if isinstance(each, Persist) and each.state.left]


def test_a_branch_that_was_worse_than_one_we_have_left_is_looked_at_anew() -> None:
    """Members changed sides meanwhile: it was worse than what two stood on, of whom one stands elsewhere since."""
    start = Branch().start(A, B, C, D)
    ours, worse = start.fork().view(B, D, order=5), start.fork().view(A, order=6)
    third = start.fork().view(B, order=8)
    peer = Peer(E, ours)
    peer.shown(worse, A)
    assert peer.machine.head == ours.place.head
    peer.shown(third, B)
    assert peer.machine.head == third.place.head
    peer.shown(worse, A)
    assert peer.machine.head == worse.place.head


def test_who_comes_back_to_a_head_signs_no_other_view_change_with_a_number_that_it_signed_there() -> None:
    """However high the number was that another had it sign: two under one number are proof against an honest peer."""
    start = Branch().start(A, B, C, D)
    ours, theirs = start.fork().view(A, B, C, order=6), start.fork().view(B, C, D, order=7)
    peer, number = Peer(A, ours), ours.place.view + 5 * LOST_VOTES_VIEWS

    def signed(*roster: PeerId) -> list[ViewSign]:
        peer.give(Tick())
        peer.machine.sitting.view_changes.give_up(peer.now)
        value, place, before = ours.place.view_change(roster), ours.place, len(peer.done)
        peer.give(Received(B, ViewPropose(0, place.head, place.view, number, value)))
        sent = (each.message for each in peer.done[before:] if isinstance(each, Send))
        return [each for each in sent if isinstance(each, ViewSign)]

    assert signed(A, B, C)
    peer.shown(theirs, B, C, D)
    assert peer.machine.head == theirs.place.head
    for members, order in (
        ((B, C), 8),
        ((B,), 9),
    ):  # the others part, and A's own branch has as many votes as theirs again
        peer.shown(start.fork().view(*members, order=order), *members)
    peer.shown(ours, B)
    assert peer.machine.head == ours.place.head
    assert not signed(A, B)


class Poor(Peer):
    """Gets no state that it wants."""

    def give(self, happened: Input) -> None:
        self.now += 0.1
        actions = self.machine.handle(happened, self.now)
        self.done += actions
        for action in actions:
            if isinstance(action, FetchState):
                self.give(StateMissing(action.head))


@pytest.mark.parametrize("has_the_chain", [False, True])
def test_who_says_that_it_holds_the_runs_state_and_gives_nothing_is_not_waited_for(has_the_chain: bool) -> None:
    """A newcomer to a stage that all have left goes to a keeper then; one stranger's heartbeats kept it from that."""
    run = Branch().start(A, B, C)
    for order in range(2, 14):
        run.round(A, B, order=order)
    stranger, newcomer = PeerId("stranger"), Poor(E, Branch())
    word, place = checkpoint_of(run, 12), run.place
    newcomer.give(OwnerVouched(word))
    assert newcomer.machine.waits_for(newcomer.now) == "state"
    waits = []
    for _ in range(40):
        head, height, number = (place.head, 13, 12) if has_the_chain else (word.head, 12, 11)
        newcomer.give(Received(stranger, Heartbeat(0, head, 1, 1, height, number, 0, number + 1, 0, True, b"")))
        asked = any(isinstance(each, Send) and isinstance(each.message, GetChain) for each in newcomer.done)
        if has_the_chain and asked:
            newcomer.done.clear()
            newcomer.give(Received(stranger, ChainPage(0, place.head, 1, tuple(run.certificates), False)))
        newcomer.now += 0.9
        waits.append(newcomer.machine.waits_for(newcomer.now))
    assert waits[-20:] == ["state"] * 20
