"""Nobody begins a run anew that has begun, and who waits says for what: the machine's rule, and its words."""

import random

import pytest

from dilocox_peer.contract import Note, Tick
from dilocox_peer.events import Event, MessageRefused, OwnerAwaited, RoundVouched
from dilocox_peer.events_of_states import EndAwaited, PeersUnreached, RunIsOver, StageFull, StateAwaited
from dilocox_peer.manifest import Manifest
from dilocox_peer.peer.planning.plan import first_plan, plan_bounds
from dilocox_peer.peer.rounds.contract import (
    Action,
    FetchState,
    Input,
    OwnerVouched,
    PeerFound,
    PeerRefused,
    Persist,
    Received,
    Send,
    StateComputed,
    StateInstalled,
)
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.rounds.timing import Timing
from dilocox_peer.peer.waiting import ALONE_S, FULL_S, OVER_S, TELL_S, Waiting
from dilocox_peer.signing import SigningKey, verify
from dilocox_peer.wire.checkpoints import Checkpoint, sign_checkpoint
from dilocox_peer.wire.rounds import ChainPage, Heartbeat, Vouch
from tests.certified_stage import MANIFEST, OWNER, ROSTER, STAGE, CertifiedStage

ME = SigningKey(b"m" * 32)
KEEN = SigningKey(b"k" * 32)  # another newcomer


class Newcomer:
    """A peer without any state, second by second."""

    def __init__(self, manifest: Manifest = MANIFEST) -> None:
        self.now = 0.0
        self.machine = RoundMachine(
            me=ME.peer_id, incarnation=1, stage=STAGE, genesis=MANIFEST.genesis(STAGE), timing=Timing(), sign=ME.sign,
            verify=verify, rng=random.Random(0), now=0.0, plan=first_plan(MANIFEST), start_peers=1, max_peers=16,
            plans=plan_bounds(MANIFEST), run_owner=OWNER.peer_id, max_back=MANIFEST.rounds.checkpoint_every,
        )  # fmt: skip
        self.told: list[Event] = []
        self.wanted: list[Action] = []
        self.waiting = Waiting(manifest, STAGE, ME.peer_id, self.machine, self.told.append, "dilocox://run")
        self.give(StateComputed(self.machine.head, b"s" * 32))

    def give(self, *inputs: Input) -> None:
        for happened in inputs:
            self.wanted += self.machine.handle(happened, self.now)

    def wait(self, seconds: float) -> bool:
        """Whether it gives up on the way."""
        for _ in range(int(seconds)):
            self.now += 1.0
            self.give(Tick())
            if self.waiting.look(self.now):
                return True
        return False

    def hear_owner(self, stage: CertifiedStage, height: int, *, is_last: bool = False) -> None:
        place = stage.certificates[height - 1]
        word = Checkpoint(STAGE, MANIFEST.genesis(STAGE), height, place.value.round, place.head, height, is_last)
        self.give(OwnerVouched(sign_checkpoint(word, OWNER.sign)))

    def see(self, stage: CertifiedStage) -> None:
        """A notary shows the chain; nobody who holds the state is there."""
        for start in range(0, len(stage.certificates), 8):
            page = tuple(stage.certificates[start : start + 8])
            more = start + 8 < len(stage.certificates)
            self.give(Received(OWNER.peer_id, ChainPage(STAGE, stage.certificates[-1].head, 1, page, more)))


@pytest.fixture
def newcomer() -> Newcomer:
    return Newcomer()


def test_who_waits_for_the_owner_says_so_once_and_signs_nothing(newcomer: Newcomer):
    newcomer.give(PeerFound(ROSTER[0]))
    assert not newcomer.wait(300)
    assert newcomer.told == [OwnerAwaited(STAGE, 1), PeersUnreached(STAGE, (ROSTER[0],))]
    assert not [action for action in newcomer.wanted if isinstance(action, Persist)]
    assert not newcomer.machine.may_train


def test_who_reaches_none_of_those_in_the_directory_is_told_so_once(newcomer: Newcomer):
    stage = CertifiedStage().rounds(12)
    newcomer.hear_owner(stage, 9)
    newcomer.give(PeerFound(ROSTER[0]), PeerFound(ROSTER[1]))
    newcomer.give(PeerRefused(ROSTER[0]))
    newcomer.wait(ALONE_S - 1)
    assert not [each for each in newcomer.told if isinstance(each, PeersUnreached)]
    newcomer.wait(300)
    [told] = [each for each in newcomer.told if isinstance(each, PeersUnreached)]
    assert set(told.peers) == {ROSTER[0], ROSTER[1]}
    assert "this peer is alone" in told.line()


def test_who_has_heard_somebody_is_not_unreachable(newcomer: Newcomer):
    newcomer.give(PeerFound(ROSTER[0]), PeerFound(ROSTER[1]))
    newcomer.give(Received(ROSTER[1], Heartbeat(STAGE, newcomer.machine.head, 0, 1, 0, 0, 0, 1, 0, True, b"")))
    newcomer.wait(300)
    assert not [each for each in newcomer.told if isinstance(each, PeersUnreached)]


def test_before_the_owner_is_seen_to_be_missing_nothing_is_said(newcomer: Newcomer):
    assert not newcomer.wait(TELL_S - 1)
    assert newcomer.told == []


@pytest.mark.parametrize("shown", [False, True], ids=["by its word alone", "and by the chain"])
def test_a_run_that_has_begun_is_waited_for_and_not_begun_anew(newcomer: Newcomer, shown: bool):
    stage = CertifiedStage().rounds(12)
    newcomer.hear_owner(stage, 9)
    if shown:
        newcomer.see(stage)
    assert not newcomer.wait(900)
    assert newcomer.told == [StateAwaited(STAGE, 8)]
    assert newcomer.machine.round == 0
    assert not newcomer.machine.may_train
    written = [each for action in newcomer.wanted if isinstance(action, Persist) for each in action.state.appended]
    assert not [each for each in written if ME.peer_id in each.value.roster], "it wrote a roster of its own"


def test_the_owners_word_of_a_later_round_is_not_told_as_another_chain(newcomer: Newcomer):
    newcomer.hear_owner(CertifiedStage().rounds(12), 9)
    [told] = [each.event for each in newcomer.wanted if isinstance(each, Note) and isinstance(each.event, RoundVouched)]
    assert told == RoundVouched(8, is_ours=False, is_ahead=True)
    assert (told.level, "another chain" in told.line()) == ("info", False)
    assert RoundVouched(8, is_ours=False).level == "warning"


def beat_at(stage: CertifiedStage) -> Heartbeat:
    """Of one that holds the state at the chain's end."""
    tip = stage.certificates[-1]
    return Heartbeat(
        STAGE, tip.head, tip.view, incarnation=1, height=tip.value.height, round=tip.value.round,
        weight=tip.value.weight, training_round=13, micro_batches=0, ready=True, state_digest=stage.states[-1].digest,
        paused=False,
    )  # fmt: skip


def come_in(newcomer: Newcomer, stage: CertifiedStage, vouched: int = 9) -> FetchState:
    """Somebody with the state comes, and it is asked for. vouched: the height that the owner has signed; 0: none."""
    if vouched:
        newcomer.hear_owner(stage, vouched)
    newcomer.see(stage)
    newcomer.wait(60)
    newcomer.wanted.clear()
    for _ in range(40):
        newcomer.give(Received(ROSTER[1], beat_at(stage)))
        newcomer.see(stage)
        newcomer.wait(1)
        if fetches := [action for action in newcomer.wanted if isinstance(action, FetchState)]:
            return fetches[0]
    raise AssertionError("it asks for no state")


def test_when_somebody_with_the_state_comes_it_is_fetched(newcomer: Newcomer):
    stage = CertifiedStage().rounds(12)
    fetch = come_in(newcomer, stage)
    assert fetch.head == stage.certificates[-1].head
    assert fetch.donors == (ROSTER[1],)
    assert newcomer.machine.waits_for(newcomer.now) is None


@pytest.mark.parametrize("max_peers", [3, 4])
def test_who_finds_no_place_in_the_roster_is_told_so_once(max_peers: int):
    """The roster has three."""
    limits = MANIFEST.limits.model_copy(update={"max_peers": max_peers})
    newcomer, stage = Newcomer(MANIFEST.model_copy(update={"limits": limits})), CertifiedStage().rounds(12)
    fetch = come_in(newcomer, stage)
    newcomer.give(StateInstalled(fetch.head, stage.states[-1].digest))
    assert newcomer.machine.is_ready
    for second in range(100):
        newcomer.give(*(Received(peer, beat_at(stage)) for peer in ROSTER))
        newcomer.wait(1)
        assert second > FULL_S - 2 or not [each for each in newcomer.told if isinstance(each, StageFull)]
    found = [each for each in newcomer.told if isinstance(each, StageFull)]
    assert found == ([StageFull(STAGE, 3)] if max_peers == 3 else [])


@pytest.mark.parametrize("vouched", [1, 0], ids=["the owner has signed the first roster", "it has signed nothing"])
def test_those_who_know_of_a_round_that_nobody_holds_are_told_so_however_many_they_are(
    newcomer: Newcomer, vouched: int
):
    """Another one stands where we do, at the first roster: neither has the round that its only voter certified, and left with."""
    stage = CertifiedStage().rounds(1)
    first = stage.certificates[0]
    newcomer.give(Received(OWNER.peer_id, ChainPage(STAGE, first.head, 1, (first,), False)))
    newcomer.give(StateComputed(first.head, stage.states[0].digest))
    if vouched:
        newcomer.hear_owner(stage, vouched)
    beat = Heartbeat(STAGE, first.head, 1, 1, 1, 0, 0, 1, 0, True, stage.states[0].digest)
    for _ in range(60):
        newcomer.give(Received(KEEN.peer_id, beat))
        newcomer.see(stage)
        newcomer.wait(1)
    assert newcomer.machine.waits_for(newcomer.now) == "state"
    told = [each for each in newcomer.told if isinstance(each, StateAwaited)]
    assert told == [StateAwaited(STAGE, 0 if vouched else None)]


@pytest.mark.parametrize("vouched", [9, 0])
def test_who_is_on_a_branch_that_the_owner_has_not_signed_is_told_what_it_has(newcomer: Newcomer, vouched: int):
    """Else one that missed it goes on there until the owner signs again."""
    stage, branch = CertifiedStage().rounds(12), CertifiedStage().rounds(2).seized(ROSTER[2]).rounds(2)
    newcomer.give(StateInstalled(come_in(newcomer, stage, vouched).head, stage.states[-1].digest))
    newcomer.wanted.clear()
    page = ChainPage(STAGE, branch.certificates[-1].head, branch.place.view, tuple(branch.certificates), False)
    for _ in range(3):
        newcomer.give(Received(ROSTER[2], page))
    refused = [
        each.event for each in newcomer.wanted if isinstance(each, Note) and isinstance(each.event, MessageRefused)
    ]
    assert len(refused) == 1, "and is told once for each time that it is told of"
    told = [each for each in newcomer.wanted if isinstance(each, Send) and isinstance(each.message, Vouch)]
    assert [(each.to, each.message.checkpoint.height) for each in told if isinstance(each.message, Vouch)] == (
        [(ROSTER[2], vouched)] if vouched else []
    )


def test_a_run_that_is_over_is_an_end_for_who_comes_later(newcomer: Newcomer):
    stage = CertifiedStage().rounds(12)
    newcomer.hear_owner(stage, 13, is_last=True)
    newcomer.see(stage)
    assert newcomer.wait(OVER_S + 5)
    assert newcomer.told == [RunIsOver(12, 0, stage.certificates[12].head.hex(), "dilocox://run")]
    assert "dilocox-peer export 'dilocox://run'" in newcomer.told[0].line()


def test_an_end_that_one_has_written_alone_is_none_before_the_owner_says_so(newcomer: Newcomer):
    """It joins, and meets nobody but one who took over from two others and signed up to the run's last round."""
    stage = CertifiedStage().rounds(2).seized(ROSTER[1]).rounds(38)
    fetch = come_in(newcomer, stage, vouched=0)
    newcomer.give(StateInstalled(fetch.head, stage.states[-1].digest))
    assert newcomer.machine.schedule.is_over
    assert not newcomer.wait(60)
    assert [each for each in newcomer.told if isinstance(each, EndAwaited)] == [EndAwaited(STAGE, 40)]
    assert not newcomer.machine.may_end(newcomer.now)
    newcomer.hear_owner(stage, len(stage.certificates), is_last=True)
    assert newcomer.machine.may_end(newcomer.now)
    assert newcomer.machine.waits_for(newcomer.now) is None
