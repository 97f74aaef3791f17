"""The outer loop's decisions, without a thread, a disk or a network: what it tells of rounds and what it measures."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dilocox_peer.compression.aggregate import clip_factors
from dilocox_peer.config import preset
from dilocox_peer.events import RoundCertified
from dilocox_peer.events_of_rounds import ContributionClipped
from dilocox_peer.peer.planning.plan import first_plan
from dilocox_peer.peer.planning.timetable import Timetable
from dilocox_peer.peer.rounds.chain import Place
from dilocox_peer.peer.rounds.contract import Apply, Closed, RoundProgress
from dilocox_peer.peer.training.outer_contract import (
    AdoptionBegun,
    AdoptionOver,
    AnchorMoved,
    BranchDropped,
    CloseRound,
    ContributionsLoaded,
    EndRun,
    Glance,
    HoldTraining,
    LoadContributions,
    MergeRound,
    OfferBack,
    Origins,
    Pulse,
    Readings,
    RoundEncoded,
    StateAdopted,
    ToListener,
    ToRounds,
    WithdrawOffer,
)
from dilocox_peer.peer.training.outer_loop import OuterLoop, OuterPhase
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import PeerId, sha256
from dilocox_peer.wire.chain import Certificate, Entry

MANIFEST = preset("tiny", inner={"accumulate": 4}).signed_by(SigningKey(b"o" * 32))
ME = PeerId("me")
PLACE = Place.genesis(0, MANIFEST.genesis(0), first_plan(MANIFEST))
SHARE = MANIFEST.rounds.inner_steps * MANIFEST.inner.accumulate
BLOB = sha256(b"ours")


class Rounds:
    """As the round machine: at genesis, alone in its roster; a test moves it."""

    def __init__(self) -> None:
        self.head, self.round, self.state_digest = PLACE.head, 0, b""
        self.may_train = self.may_offer = True
        self.has_offered = self.is_sliced = self.is_behind = False
        plan = first_plan(MANIFEST)
        self.schedule: Any = SimpleNamespace(last_round=9, expected_rounds=9, plan_for=lambda _number: plan)
        self.roster: tuple[PeerId, ...] = (ME,)
        self.reports: dict[PeerId, tuple[int, int]] = {}
        self.plan_reason = ""
        self.directive = None
        self.is_end_believed = True
        self.chain: tuple[Certificate, ...] = ()

    def working(self, _now):
        return set(self.roster)

    def may_end(self, _now):
        return self.is_end_believed


class Peer:
    """An outer loop, its rounds and what its threads show."""

    def __init__(self, overlap: str = "arrival") -> None:
        self.rounds, self.place = Rounds(), PLACE
        manifest = MANIFEST.model_copy(update={"outer": MANIFEST.outer.model_copy(update={"overlap": overlap})})
        self.outer = OuterLoop(
            me=ME,
            incarnation=1,
            manifest=manifest,
            rounds=self.rounds,
            timetable=Timetable(MANIFEST),
            raw_bytes=8,
            now=0.0,
        )
        self.seen = Readings(1, 0, 0, is_paused=False, uplink_bps=0.0, bytes_sent=0)
        self.told: list[Any] = []
        self.posted: list[Any] = []

    def on(self, happened, now=0.0, **seen):
        """What is to be done, but for what is told."""
        self.seen = replace(self.seen, **seen)
        actions = self.outer.handle(happened, now, self.seen)
        self.told += [each.event for each in actions if isinstance(each, ToListener)]
        self.posted += [each.happened for each in actions if isinstance(each, ToRounds)]
        return [each for each in actions if not isinstance(each, ToListener | ToRounds)]

    def certified(self, *entries, own=None):
        """The next round is certified, and the round machine at it."""
        value = self.place.round_value(list(entries), [ME])
        certificate = Certificate(0, self.place.head, 1, 0, value, ((ME, b"s"),))
        self.place = self.place.then(certificate)
        self.rounds.head, self.rounds.round, self.rounds.has_offered = certificate.head, value.round, False
        return Apply(certificate, own)

    def encoded(self, *, micro_batches=SHARE, loss=2.5):
        return RoundEncoded(BLOB, 1, 8, micro_batches, loss, 0.0)

    def merge(self, certificate, now=0.0, norms=()):
        """All steps of it."""
        assert [type(each) for each in self.on(certificate, now)] == [LoadContributions]
        assert [type(each) for each in self.on(ContributionsLoaded(None), now)] == [MergeRound]
        factors = clip_factors(norms, [8] * len(norms), norm_clip=4.0) if norms else ()
        moved = AnchorMoved(sha256(b"state"), norms, factors, 0)
        return self.on(moved, now, training_round=self.rounds.round + 1, micro_batches=0)

    def rounds_told(self):
        return [event for event in self.told if isinstance(event, RoundCertified)]


def test_a_peer_that_has_not_closed_a_round_tells_no_loss_of_it():
    """One that has paused, say: else its last loss came again with every round that the others certify."""
    peer = Peer()
    assert peer.on(Glance(), micro_batches=SHARE) == [CloseRound()]
    peer.on(peer.encoded())
    peer.on(Glance(), micro_batches=0)
    for _ in range(2):
        peer.merge(peer.certified())
    first, second = [event.train_loss for event in peer.rounds_told()]
    assert first == 2.5
    assert math.isnan(second)


def shown(peer):
    return [event.line() for event in peer.told if event.level != "debug"]


def test_rounds_that_were_made_before_a_peer_came_are_one_line():
    peer = Peer()
    peer.rounds.is_behind = True  # more is known to have been certified
    for number in range(3):
        peer.on(Glance(), tokens=100 * number)  # between two of them there may be time for a step
        peer.merge(peer.certified())
    assert shown(peer) == []
    peer.rounds.is_behind = False
    peer.merge(peer.certified())
    assert shown(peer) == ["fetched rounds 1 to 4, made before this peer came"]
    assert [event.round for event in peer.rounds_told()] == [1, 2, 3, 4]
    peer.merge(peer.certified())
    assert shown(peer)[1:] == ["round 5: 0 contributions"]


def test_a_long_way_to_the_run_is_told_in_parts():
    peer = Peer()
    peer.rounds.is_behind = True
    for number in range(4):
        peer.merge(peer.certified(), now=4.0 * number)
    assert shown(peer) == ["fetched rounds 1 to 4, made before this peer came"]
    peer.rounds.is_behind = False
    peer.merge(peer.certified(), now=17.0)
    assert shown(peer)[1:] == ["round 5: 0 contributions"]


def test_that_ours_comes_with_the_next_is_told_of_rounds_that_we_trained_in_alone():
    peer = Peer()
    peer.on(Glance(), tokens=100)
    peer.merge(peer.certified())
    peer.merge(peer.certified())  # paused, say
    assert shown(peer) == ["round 1: 0 contributions, mine comes with the next", "round 2: 0 contributions"]
    peer.rounds.is_behind = True
    peer.merge(peer.certified())
    peer.rounds.is_behind = False
    peer.merge(peer.certified(own=Entry(ME, 1, BLOB, 1, 8)))
    assert shown(peer)[2:] == ["fetched round 3, made without this peer", "round 4: 0 contributions"]


def test_rounds_of_ours_that_a_restart_merges_again_were_not_made_without_us():
    peer = Peer()
    peer.rounds.is_behind = True  # they are on the disk, and the run has gone on
    peer.on(Glance(), tokens=100)
    for _ in range(2):
        peer.merge(peer.certified(Entry(ME, 1, BLOB, 1, 8)), norms=(1.0,))
    peer.merge(peer.certified())
    peer.rounds.is_behind = False
    peer.merge(peer.certified())
    ours = ["round 1: 1 contribution", "round 2: 1 contribution"]
    assert shown(peer) == [*ours, "fetched rounds 3 to 4, made without this peer"]


def test_a_contribution_that_is_clipped_is_told_with_its_norm_and_the_groups():
    peer = Peer()
    entries = [Entry(PeerId(f"p{number}"), 1, sha256(bytes([number])), 1, 8) for number in range(3)]
    peer.merge(peer.certified(*entries), norms=(2.0, 2.0, 20.0))
    certified, clipped = peer.told[:2]
    assert (certified.norms, certified.clip_factors) == ((2.0, 2.0, 20.0), (1.0, 1.0, 0.3984375))
    assert clipped == ContributionClipped(PeerId("p2"), 1, 20.0, 2.0, 0.3984375)
    assert clipped.line().endswith("clipped: its norm 20, the group's median 2, scaled by 0.398")


def test_of_a_round_in_slices_nobody_is_told_to_weigh_all():
    """What each weighs as a whole nobody knows there."""
    peer = Peer()
    entries = [Entry(PeerId(f"p{number}"), 1, sha256(bytes([number])), 1, 8) for number in range(4)]
    peer.merge(peer.certified(*entries))
    (certified,) = peer.rounds_told()
    assert (len(certified.contributors), certified.norms, certified.clip_factors) == (4, (), ())
    assert not [event for event in peer.told if isinstance(event, ContributionClipped)]


def test_a_pause_is_no_part_of_what_a_step_takes():
    a_step = MANIFEST.inner.accumulate * MANIFEST.inner.micro_batch * MANIFEST.model.context
    peer = Peer()
    peer.on(Glance(), micro_batches=SHARE)
    peer.on(peer.encoded())
    peer.merge(peer.certified())
    peer.on(Glance(), 7200.0, micro_batches=0, tokens=10 * a_step, is_paused=True)
    assert peer.on(Glance(), 7204.0, micro_batches=SHARE, tokens=14 * a_step, is_paused=False) == [CloseRound()]
    peer.on(peer.encoded(), 7204.0)
    assert peer.posted[-1].entry.report.step_us == 1_000_000


def test_a_close_that_came_too_late_is_taken_back_and_is_no_exchange():
    """The time from it to the merge of what came in is no time in which our contribution was on its way."""
    peer = Peer()
    assert peer.on(Glance(), micro_batches=SHARE) == [CloseRound()]
    assert peer.on(peer.certified()) == []  # one piece of work at a time
    assert peer.on(peer.encoded(), 5.0) == [WithdrawOffer((BLOB,))]
    [load] = peer.on(OfferBack(), 5.0)
    assert isinstance(load, LoadContributions)
    peer.on(ContributionsLoaded(None), 5.0)
    peer.on(AnchorMoved(sha256(b"state"), (), (), 0), 6.0, training_round=2)
    [certified] = peer.rounds_told()
    assert certified.delay_s is None
    assert not any(isinstance(each, Closed) for each in peer.posted)


def test_the_contribution_of_an_idle_peer_is_not_deleted_when_it_came_too_late():
    peer = Peer()
    peer.on(Glance(), micro_batches=SHARE)
    peer.certified()
    assert peer.on(peer.encoded(micro_batches=0)) == [WithdrawOffer(())]


def test_contributions_that_cannot_be_read_for_now_are_read_again_a_second_later_and_not_fetched():
    peer = Peer()
    peer.on(Glance())
    assert [type(each) for each in peer.on(peer.certified())] == [LoadContributions]
    posted = len(peer.posted)
    assert peer.on(ContributionsLoaded(BLOB, for_now=True), 5.0) == []
    for now in (5.0, 5.5, 5.9):
        assert peer.on(Glance(), now, has_lost_back=False) == []
    assert peer.posted[posted:] == []
    assert [type(each) for each in peer.on(Glance(), 6.0)] == [LoadContributions]


def test_nothing_is_closed_or_merged_while_a_state_is_fetched_and_what_it_leaves_behind_is_never_merged():
    peer = Peer()
    peer.on(Glance())
    peer.on(AdoptionBegun())
    peer.on(AdoptionBegun())
    assert peer.on(peer.certified(), micro_batches=SHARE) == []
    peer.on(BranchDropped())
    peer.on(StateAdopted(peer.rounds.head, 1), training_round=2)
    peer.on(AdoptionOver())
    assert peer.outer.phase is OuterPhase.IDLE  # the other one is still under way
    assert peer.on(AdoptionOver()) == [CloseRound()]
    assert peer.outer.merged_round == 1


def test_what_was_adopted_voids_a_merge_whose_contributions_are_being_read():
    peer = Peer()
    peer.on(Glance())
    assert [type(each) for each in peer.on(peer.certified())] == [LoadContributions]
    peer.on(AdoptionBegun())
    peer.on(BranchDropped())
    assert peer.on(ContributionsLoaded(None)) == []
    assert peer.outer.phase is OuterPhase.IDLE


@pytest.mark.parametrize("overlap", ["arrival", "one-step", "none"])
def test_when_a_certificate_is_merged_and_what_waits_for_it(overlap):
    peer = Peer(overlap)
    assert peer.on(Glance(), micro_batches=SHARE) == [CloseRound()]
    after = peer.on(peer.encoded(), training_round=2, micro_batches=0)
    assert after == [HoldTraining(False)]
    peer.rounds.has_offered = True
    # The next round is over before the certificate is here.
    early = peer.on(Glance(), micro_batches=SHARE)
    assert early == ([] if overlap == "arrival" else [HoldTraining(True)])
    came = peer.on(peer.certified(), micro_batches=0 if overlap == "arrival" else SHARE)
    assert [type(each) for each in came] == [LoadContributions]


def test_a_certificate_waits_for_the_end_of_the_round_with_one_step():
    peer = Peer("one-step")
    peer.on(Glance())
    assert peer.on(peer.certified(), training_round=2) == []
    assert [type(each) for each in peer.on(Glance(), micro_batches=SHARE)] == [LoadContributions]


def test_a_later_stage_closes_when_stage_0_is_further():
    peer = Peer()
    caller = (PeerId("caller"), PeerId("origin"))
    still = Origins({caller: (1, 8)}, 0)
    assert peer.on(Glance(), micro_batches=100 * SHARE, origins=still) == [HoldTraining(False)]
    assert peer.on(Glance(), origins=Origins({caller: (2, 8)}, 0)) == [CloseRound()]
    behind = Peer()
    assert behind.on(Glance(), micro_batches=0, origins=Origins({}, 1)) == [CloseRound()]


def test_progress_is_told_at_once_at_each_half_share_and_once_only():
    peer = Peer()
    for done, now in ((0, True), (SHARE // 2 - 1, False), (SHARE // 2, True), (SHARE // 2, False)):
        peer.on(Pulse(), micro_batches=done, origins=Origins({}, 0))
        assert peer.posted[-1] == RoundProgress(done, tell_now=now, paused=False)


def test_as_a_round_comes_to_its_end_every_micro_batch_is_told_but_not_all_the_time():
    peer = Peer()
    peer.on(Pulse(), micro_batches=SHARE // 2)
    near = 7 * SHARE // 8
    peer.on(Pulse(), now=1.0, micro_batches=near)  # the clock is asked, and sees the end
    told = []
    for done, now in ((near, 1.1), (near, 2.0), (near + 1, 1.2), (near + 1, 1.4)):
        peer.on(Pulse(), now=now, micro_batches=done)
        told.append(peer.posted[-1].tell_now)
    assert told == [True, False, False, True]


def test_what_is_trained_beyond_the_shares_waits_for_heartbeats():
    peer = Peer()
    peer.rounds.head = sha256(b"a certificate that is still on its way to us")  # the round cannot be closed yet
    told = []
    for second, done in enumerate((SHARE - 1, SHARE, SHARE + 1, SHARE + 2, 2 * SHARE, 3 * SHARE)):
        peer.on(Pulse(), now=1.0 + second, micro_batches=done)  # the clock is asked, and sees the end
        told.append(peer.posted[-1].tell_now)
    assert told == [True, True, True, False, False, False], "twice near the end, once at it"
    peer.on(Pulse(), now=8.0, micro_batches=1, training_round=2)
    peer.on(Pulse(), now=9.0, micro_batches=SHARE // 2, training_round=2)
    assert peer.posted[-1].tell_now


def test_it_ends_when_the_last_round_is_merged_and_not_before():
    peer = Peer()
    peer.rounds.schedule.last_round = 2
    peer.on(Glance())
    assert not any(isinstance(each, EndRun) for each in peer.merge(peer.certified()))
    assert peer.merge(peer.certified())[-2:] == [HoldTraining(True), EndRun()]
    assert peer.outer.phase is OuterPhase.OVER


def test_an_end_that_is_not_believed_is_waited_at_and_training_with_it():
    peer = Peer()
    peer.rounds.schedule.last_round, peer.rounds.is_end_believed = 1, False
    peer.on(Glance())
    assert peer.merge(peer.certified())[-1] == HoldTraining(True)
    assert peer.on(Pulse())[-1:] != [EndRun()]
    peer.rounds.is_end_believed = True
    assert peer.on(Pulse())[-1] == EndRun()
