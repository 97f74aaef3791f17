"""The run's owner in one stage: what it signs, what it never signs, and what of it outlives a restart."""

import random
from collections.abc import Callable

import pytest

from dilocox_peer.contract import Note, Tick
from dilocox_peer.events import Event, FirstRosterSigned, MessageRefused, RoundVouched
from dilocox_peer.peer.planning.plan import plan_bounds
from dilocox_peer.peer.planning.planner import FixedPlanner
from dilocox_peer.peer.rounds.chain import Place, place_after, vote_for
from dilocox_peer.peer.rounds.contract import OwnerVouched, PeerFound, Persist, Received, Send, TailLost
from dilocox_peer.peer.rounds.durable import encode_record, load_log
from dilocox_peer.peer.rounds.genesis import genesis_of
from dilocox_peer.peer.rounds.membership import MAX_KNOWN
from dilocox_peer.peer.rounds.notary import MOST_SETTLING, POLL_S, Notary, NotaryInput, NotaryTerms
from dilocox_peer.peer.rounds.timing import AWAY_S, Timing
from dilocox_peer.signing import SigningKey, verify
from dilocox_peer.types import Digest, PeerId, sha256
from dilocox_peer.wire.chain import Certificate, Entry, acceptance
from dilocox_peer.wire.checkpoints import Checkpoint, sign_checkpoint
from dilocox_peer.wire.declared import replaced
from dilocox_peer.wire.rounds import Cert, ChainPage, GetChain, Heartbeat, Message, Vouch
from tests.certified_stage import KEYS, MANIFEST, OWNER, ROSTER, STAGE, CertifiedStage

GENESIS = genesis_of(MANIFEST, STAGE)
A, B, C = ROSTER
STRANGER = PeerId("stranger")
TIMING = Timing()
PATIENCE_S = 30.0


class Office:
    """A notary, its log, and what it has said."""

    def __init__(
        self, *, start_peers: int = 1, every: int = 2, kept: Callable[[], Digest | None] | None = None
    ) -> None:
        self.kept = kept
        self.terms = NotaryTerms(STAGE, GENESIS, start_peers, 16, plan_bounds(MANIFEST), every)
        self.log = b""
        self.now = 0.0
        self.open()

    def open(self, wall_ms: int = 1_000_000) -> None:
        """A start, from the log."""
        self.sent: list[tuple[PeerId, Message]] = []
        self.told: list[Event] = []
        self.notary = Notary(
            self.terms, sign=OWNER.sign, verify=verify, timing=TIMING, rng=random.Random(0), now=self.now,
            wall_ms=wall_ms, durable=load_log(self.log, GENESIS.head).durable, patience_s=PATIENCE_S, kept=self.kept,
        )  # fmt: skip

    def give(self, *inputs: NotaryInput) -> None:
        for happened in inputs:
            for action in self.notary.handle(happened, self.now):
                match action:
                    case Persist(durable):
                        self.log += encode_record(durable)
                    case Send(to, message):
                        if isinstance(message, Cert | Vouch):
                            assert self.is_durable(message), "told before it was on disk"
                        self.sent.append((to, message))
                    case Note(event):
                        self.told.append(event)

    def is_durable(self, message: Cert | Vouch) -> bool:
        durable = load_log(self.log, GENESIS.head).durable
        assert durable is not None
        if isinstance(message, Vouch):
            return durable.checkpoint is not None and durable.checkpoint.sequence >= message.checkpoint.sequence
        return message.certificate in durable.appended

    def at_genesis(self, *peers: PeerId, seconds: float = 0.0) -> None:
        """They say that they have no chain, now and every second until then."""
        until = self.now + seconds
        while True:
            page = ChainPage(STAGE, GENESIS.head, 0, (), False)
            self.give(*(Received(peer, page) for peer in peers))
            if self.now >= until:
                return
            self.now += 1.0

    def show(self, sender: PeerId, certificates: list[Certificate]) -> None:
        last = certificates[-1]
        self.give(Received(sender, ChainPage(STAGE, last.head, last.view, tuple(certificates), False)))

    def said(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.told if isinstance(event, kind)]

    @property
    def vouched(self) -> list[int]:
        return [event.round for event in self.told if isinstance(event, RoundVouched)]


@pytest.fixture
def office() -> Office:
    return Office()


@pytest.fixture
def stage() -> CertifiedStage:
    return CertifiedStage().rounds(9)


# ---- the first roster ------------------------------------------------------------------------------------------------


def test_the_first_roster_is_signed_when_enough_are_here_and_no_new_one_comes():
    office = Office(start_peers=2)
    office.give(PeerFound(A), PeerFound(B), PeerFound(C))
    office.at_genesis(A, seconds=60.0)
    assert office.notary.chain.height == 0, "one is not enough"
    office.at_genesis(A, B, seconds=1.0)
    office.at_genesis(A, B, C, seconds=TIMING.settle_s - 1.0)
    assert office.notary.chain.height == 0, "a new one has just come: others may follow"
    office.at_genesis(A, B, C, seconds=2.0)
    [signed] = office.said(FirstRosterSigned)
    assert isinstance(signed, FirstRosterSigned)
    assert signed.roster == tuple(sorted(ROSTER))
    certificate = office.notary.chain.certificates[0]
    assert GENESIS.why_not_certificate(certificate, verify, 16) is None
    assert {to for to, message in office.sent if isinstance(message, Cert)} == set(ROSTER)


@pytest.mark.parametrize("is_new", [False, True])
def test_a_run_begins_although_strangers_come_and_go(is_new: bool):
    """Two that answered one question of four, or new ones each time, put it off for ever."""
    office = Office(start_peers=2)
    office.give(PeerFound(A), PeerFound(B), PeerFound(C))
    beat = Heartbeat(STAGE, GENESIS.head, 0, 1, 0, 0, 0, 1, 0, True, b"")
    page = ChainPage(STAGE, GENESIS.head, 0, (), False)
    while office.now < MOST_SETTLING * TIMING.settle_s + 5:
        office.at_genesis(A, B, C)
        if office.now % 2 == 0:
            stranger = PeerId(f"stranger{int(office.now) if is_new else int(office.now) % 4}")
            office.give(Received(stranger, beat), Received(stranger, page))
        office.now += 1.0
    assert office.notary.chain.height == 1
    assert {A, B, C} <= set(office.notary.chain.place.roster)


def test_it_says_whom_it_has_forgotten_for_others():
    """Who is met once and forgotten has to be met again, or is never asked any more."""
    office = Office(start_peers=2)
    office.give(PeerFound(A))
    assert office.notary.knows(A)
    office.give(*(PeerFound(PeerId(f"stranger{number}")) for number in range(MAX_KNOWN + 1)))
    assert not office.notary.knows(A)
    office.give(PeerFound(A))
    assert office.notary.knows(A)


def test_who_has_gone_is_not_in_the_first_roster():
    office = Office(start_peers=1)
    office.give(PeerFound(A), PeerFound(B), PeerFound(C))
    office.at_genesis(A, B)
    office.at_genesis(A, seconds=TIMING.settle_s - 1.0)
    office.at_genesis(A, C, seconds=TIMING.settle_s)
    assert office.notary.chain.place.roster == tuple(sorted((A, C)))


def test_it_signs_once_also_after_a_restart(office: Office):
    office.give(PeerFound(A))
    office.at_genesis(A, seconds=5.0)
    first = office.notary.chain.head
    office.open()
    assert office.notary.chain.head == first
    office.give(PeerFound(B))
    office.at_genesis(B, seconds=60.0)
    assert office.notary.chain.certificates[0].head == first
    assert office.said(FirstRosterSigned) == []
    office.give(Received(B, GetChain(STAGE, GENESIS.head, 0, (GENESIS.head,))))
    shown = [message for to, message in office.sent if to == B and isinstance(message, ChainPage)]
    assert shown[-1].certificates[0].head == first, "who has missed it gets it"


def test_with_its_log_lost_it_begins_nothing_that_its_own_word_says_has_begun(office: Office, stage: CertifiedStage):
    word = sign_checkpoint(Checkpoint(STAGE, GENESIS.head, 4, 3, stage.certificates[3].head, 7, False), OWNER.sign)
    office.give(PeerFound(A), OwnerVouched(word))
    office.at_genesis(A, seconds=60.0)
    assert office.notary.chain.height == 0
    office.show(B, stage.certificates)
    assert office.notary.chain.head == stage.certificates[-1].head
    assert office.notary.checkpoint is not None
    assert office.notary.checkpoint.sequence > word.sequence


def test_with_its_log_lost_it_follows_those_who_have_begun(office: Office, stage: CertifiedStage):
    office.give(PeerFound(A), PeerFound(B))
    office.show(B, stage.certificates[:3])
    office.at_genesis(A, seconds=60.0)
    assert office.said(FirstRosterSigned) == []
    assert office.notary.chain.certificates[0].head == stage.certificates[0].head


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def test_it_vouches_every_few_rounds_for_what_another_certificate_has_followed(office: Office, stage: CertifiedStage):
    for height in range(1, len(stage.certificates) + 1):
        office.show(A, stage.certificates[:height])
    assert office.vouched == [0, 2, 4, 6, 8]
    newest = office.notary.checkpoint
    assert newest is not None
    assert newest.head == stage.certificates[8].head, "the tip is round 9: it may still be left for another"
    assert newest.why_not(stage=STAGE, genesis=GENESIS.head, owner=OWNER.peer_id, verify=verify) is None
    sequence = newest.sequence
    office.open(wall_ms=5)  # the clock was set back meanwhile
    stage.rounds(3)
    office.show(A, stage.certificates)
    assert office.notary.checkpoint is not None
    assert office.notary.checkpoint.sequence > sequence


def test_the_last_round_is_vouched_for_at_once_and_as_the_last(office: Office):
    stage = CertifiedStage().rounds(MANIFEST.rounds.total)
    for start in range(0, len(stage.certificates), 16):
        office.show(A, stage.certificates[: start + 16])
    assert office.notary.is_over
    assert office.notary.checkpoint is not None
    assert (office.notary.checkpoint.round, office.notary.checkpoint.is_last) == (MANIFEST.rounds.total, True)


def test_who_is_found_on_another_branch_is_told_what_was_signed(office: Office, stage: CertifiedStage):
    """It may have missed that."""
    office.show(A, stage.certificates)
    branch = CertifiedStage().rounds(2).seized(C).rounds(2).certificates
    office.give(PeerFound(C))
    office.sent.clear()
    for _ in range(2):
        office.show(C, branch)
    assert len(office.said(MessageRefused)) == 1
    told = [message for to, message in office.sent if to == C]
    assert [message.checkpoint for message in told if isinstance(message, Vouch)] == [office.notary.checkpoint]
    assert len(told) == 1, "once for each question"


def test_a_minority_that_writes_the_roster_is_not_vouched_for(office: Office, stage: CertifiedStage):
    honest = stage.certificates[:3]
    place = genesis_of(MANIFEST, STAGE)
    for certificate in honest:
        place = place.then(certificate)
    value = place.view_change([A])
    vote = vote_for(acceptance(STAGE, place.head, 2, 0, value), 9999, KEYS[A].sign)
    minority = Certificate(STAGE, place.head, 2, 0, value, ((A, vote),))
    assert place.why_not_certificate(minority, verify, 16) is None
    office.show(A, [*honest, minority])
    assert office.notary.chain.head == honest[-1].head
    office.show(B, stage.certificates[:6])
    assert office.notary.chain.head == stage.certificates[5].head, "the majority was only out of sight"


def test_strangers_have_no_view_change_of_voters_forgotten(office: Office, stage: CertifiedStage):
    """Seventeen pages of theirs were as many view changes as are remembered: the survivors' was new at each look, and never counted."""
    keys = [SigningKey(bytes([number]) * 32) for number in (9, 10)]
    honest = stage.certificates[:3]
    start = place_after(GENESIS, honest)
    survivors = _view_change(start, KEYS[A], 1)
    office.give(PeerFound(A), PeerFound(B), PeerFound(C))
    office.show(B, honest)
    office.show(A, [*honest, survivors])
    for view in range(1, 18):
        office.now += PATIENCE_S / 17
        place, page = start, []
        for number in range(64):  # of two, in turn: neither is a voter of the other's roster
            page.append(_view_change(place, keys[number % 2], view))
            place = place.then(page[-1])
        office.show(STRANGER, page)
    office.now += 1.0
    office.show(A, [survivors])
    office.give(Tick())
    assert office.notary.chain.head == survivors.head


def _view_change(place: Place, key: SigningKey, ahead: int) -> Certificate:
    """To key's peer alone, signed by it."""
    value, view = place.view_change([key.peer_id]), place.view + ahead
    vote = vote_for(acceptance(STAGE, place.head, view, 0, value), 9999, key.sign)
    return Certificate(STAGE, place.head, view, 0, value, ((key.peer_id, vote),))


def test_a_minority_is_not_vouched_for_while_a_quorum_is_heard_elsewhere_however_long_its_round_takes(
    office: Office, stage: CertifiedStage
):
    """One member wrote a roster of its own, and rounds; the others trained, in a round that took longer than the owner's patience."""
    honest = stage.certificates[:3]
    place = place_after(GENESIS, honest)
    branch = []
    for number in range(4):
        value = place.view_change([A]) if not number else place.round_value(
            [Entry(A, 1, sha256(bytes([number])), 10, 4)], [A], FixedPlanner(plan_bounds(MANIFEST)).next(place.plan)
        )  # fmt: skip
        view = place.view + (not number)
        vote = vote_for(acceptance(STAGE, place.head, view, 0, value), 9999 + number, KEYS[A].sign)
        branch.append(Certificate(STAGE, place.head, view, 0, value, ((A, vote),)))
        place = place.then(branch[-1])
    office.give(PeerFound(A), PeerFound(B), PeerFound(C))
    office.show(B, honest)
    office.show(A, [*honest, *branch])
    for _ in range(10):
        office.now += PATIENCE_S / 4
        office.give(*(Received(peer, ChainPage(STAGE, honest[-1].head, honest[-1].view, (), False)) for peer in (B, C)))
    assert office.notary.chain.head == honest[-1].head
    office.now += PATIENCE_S - 1.0
    office.show(A, branch)
    assert office.notary.chain.head == honest[-1].head
    office.now += 1.0
    office.give(Tick())
    assert office.notary.chain.head == branch[-1].head, "nobody else is heard any more"


def answers_for(office: Office, peer: PeerId, seconds: float, certificates: list[Certificate]) -> None:
    """Somebody is there all the time, so it is not our own line that is down."""
    until = office.now + seconds
    while office.now < until:
        office.now = min(until, office.now + PATIENCE_S / 4)
        office.show(peer, certificates)


def test_while_nobody_answers_at_all_our_own_line_is_down_and_no_branch_is_gone_over_to(
    office: Office, stage: CertifiedStage
):
    """A liar shows its branch once and waits until our router starts anew."""
    office.show(A, stage.certificates[:4])
    liar = SigningKey(bytes([9]) * 32)
    place = place_after(GENESIS, stage.certificates[:4])
    value = place.view_change([liar.peer_id])
    vote = vote_for(acceptance(STAGE, place.head, place.view + 1, 0, value), 9999, liar.sign)
    branch = [Certificate(STAGE, place.head, place.view + 1, 0, value, ((liar.peer_id, vote),))]
    office.show(liar.peer_id, branch)
    for _ in range(4):
        office.now += AWAY_S
        office.give(Tick())
        assert office.notary.chain.head == stage.certificates[3].head
    office.show(liar.peer_id, branch)  # it is the first to answer again
    assert office.notary.chain.head == stage.certificates[3].head


@pytest.mark.parametrize("is_heard", [True, False])
def test_newcomers_who_go_on_alone_are_vouched_for_once_no_voter_was_heard_for_long(
    office: Office, stage: CertifiedStage, is_heard: bool
):
    office.show(A, stage.certificates[:4])
    newcomer = SigningKey(bytes([9]) * 32)
    answers_for(office, newcomer.peer_id, AWAY_S - 1.0, stage.certificates[:4])
    place = place_after(GENESIS, stage.certificates[:4])
    branch = []
    for number in range(4):
        value = place.view_change([newcomer.peer_id]) if not number else place.round_value(
            [Entry(newcomer.peer_id, 1, sha256(bytes([number])), 10, 4)], [newcomer.peer_id], FixedPlanner(plan_bounds(MANIFEST)).next(place.plan)
        )  # fmt: skip
        view = place.view + (not number)
        vote = vote_for(acceptance(STAGE, place.head, view, 0, value), 9999 + number, newcomer.sign)
        branch.append(Certificate(STAGE, place.head, view, 0, value, ((newcomer.peer_id, vote),)))
        place = place.then(branch[-1])
    office.show(newcomer.peer_id, branch)
    assert office.said(MessageRefused) == []
    assert office.notary.chain.head == stage.certificates[3].head
    if is_heard:
        office.give(Received(B, GetChain(STAGE, GENESIS.head, 0, (GENESIS.head,))))
    answers_for(office, newcomer.peer_id, PATIENCE_S, branch)
    office.give(Tick())
    assert (office.notary.chain.head == branch[-1].head) == (not is_heard)
    assert (office.vouched[-1] > 3) == (not is_heard)


def test_what_nobody_has_any_more_is_given_up_for_those_who_go_on_but_nothing_that_was_signed(
    office: Office, stage: CertifiedStage
):
    office.show(A, stage.certificates[:9])
    assert office.notary.checkpoint is not None
    signed, heads = office.notary.checkpoint.height, [each.head for each in stage.certificates]
    office.give(TailLost(heads[7]))
    assert office.notary.chain.height == 9, "its voters were heard a moment ago"
    answers_for(office, SigningKey(bytes([9]) * 32).peer_id, AWAY_S, stage.certificates[:9])
    office.give(TailLost(heads[signed - 2]), TailLost(b"?" * 32))  # type: ignore[arg-type]
    assert office.notary.chain.height == 9, "it is signed"
    office.give(TailLost(heads[7]))
    assert office.notary.chain.height == 8
    office.open()
    assert office.notary.chain.head == heads[7], "also after a restart"
    office.show(B, stage.certificates)
    assert office.notary.chain.head == heads[-1], "somebody came back with it"


@pytest.mark.parametrize(("kept", "signed"), [(None, 8), (0, 5), (4, 5), (6, 6), (9, 8)])
def test_of_a_run_that_is_kept_nothing_is_signed_that_is_not_kept_unless_it_is_long_ago(
    stage: CertifiedStage, kept: int | None, signed: int
):
    heads = [each.head for each in stage.certificates]
    office = Office(every=2, kept=None if kept is None else lambda: heads[kept - 1] if kept else None)
    office.show(A, stage.certificates[:9])
    assert office.notary.checkpoint is not None
    assert office.notary.checkpoint.height == signed


def test_a_newer_word_signed_elsewhere_with_the_same_key_counts(office: Office, stage: CertifiedStage):
    office.show(A, stage.certificates[:6])
    other = CertifiedStage(first=2.0).rounds(4)
    word = sign_checkpoint(Checkpoint(STAGE, GENESIS.head, 4, 3, other.certificates[3].head, 10**15, False), OWNER.sign)
    office.give(OwnerVouched(word))
    said = len(office.vouched)
    stage.rounds(6)
    office.show(A, stage.certificates)
    assert len(office.vouched) == said, "nothing more for the chain that its own key has given up"
    office.show(B, other.certificates)
    assert office.notary.chain.head == other.certificates[-1].head
    office.open()
    assert office.notary.checkpoint == word


def test_once_begun_a_few_are_asked_at_a_time_and_strangers_do_not_crowd_out_the_roster(
    office: Office, stage: CertifiedStage
):
    office.show(A, stage.certificates[:4])
    office.give(*(PeerFound(PeerId(f"stranger{number:03d}")) for number in range(200)), *map(PeerFound, ROSTER))
    asked = []
    for _ in range(6):
        office.sent.clear()
        office.now += 10.0
        office.give(Tick())
        questions = [to for to, message in office.sent if isinstance(message, GetChain)]
        assert len(questions) <= 3
        asked += questions
    assert all(asked.count(peer) >= 3 for peer in ROSTER)
    assert len(set(asked)) == len(ROSTER) + 6, "and a stranger each time, not always the same"


# ---- what others send ------------------------------------------------------------------------------------------------


def test_hostile_pages_are_refused_and_named_and_change_nothing(office: Office, stage: CertifiedStage):
    office.show(A, stage.certificates[:4])
    log, head = office.log, office.notary.chain.head
    true = stage.certificates[4]
    place = genesis_of(MANIFEST, STAGE)
    unsigned = Certificate(STAGE, place.head, 1, 0, place.view_change([STRANGER]), ((STRANGER, bytes(72)),))
    for forged in (
        replaced(true, signatures=()),
        replaced(true, signatures=tuple((peer, bytes(72)) for peer, _ in true.signatures)),
        replaced(true, value=replaced(true.value, weight=10**6)),
        unsigned,  # a first roster of its own
    ):
        office.now += 2.0
        office.told.clear()
        office.show(STRANGER, [forged])
        assert [getattr(event, "peer", None) for event in office.said(MessageRefused)] == [STRANGER], forged
        assert (office.log, office.notary.chain.head) == (log, head)


def test_a_word_that_the_owner_has_not_signed_is_refused(office: Office, stage: CertifiedStage):
    office.show(A, stage.certificates[:4])
    before = office.notary.checkpoint
    for signer in (KEYS[B], OWNER):
        genesis = GENESIS.head if signer is not OWNER else stage.certificates[0].head  # of another run
        word = sign_checkpoint(Checkpoint(STAGE, genesis, 2, 1, stage.certificates[1].head, 10**15, True), signer.sign)
        office.now += 2.0
        office.give(Received(STRANGER, Vouch(STAGE, GENESIS.head, 0, word)), OwnerVouched(word), Tick())
    assert office.notary.checkpoint == before
    assert len(office.said(MessageRefused)) == 2


def test_made_up_peers_keep_no_member_from_being_asked(office: Office, stage: CertifiedStage):
    """Who is not asked is not heard, and of whom nothing is heard for long newcomers take the run over."""
    office.give(*(PeerFound(peer) for peer in (A, B, C)))
    office.show(A, stage.certificates[:4])
    strangers = [SigningKey(sha256(b"stranger", number.to_bytes(2, "big"))).peer_id for number in range(MAX_KNOWN + 8)]
    for stranger in strangers:
        office.now += 0.001
        office.give(PeerFound(stranger))
    office.sent.clear()
    for _ in range(4):
        office.now += POLL_S * 1.2
        office.give(Tick())
    assert {A, B, C} <= {peer for peer, message in office.sent if isinstance(message, GetChain)}
