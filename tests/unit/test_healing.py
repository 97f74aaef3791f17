"""How a newcomer takes in a long chain: page by page, in a time that grows with it, and what the owner's word spares it."""

from dataclasses import dataclass, field

import pytest

from dilocox_peer.peer.planning.plan import ANY_PLAN, PlanBounds
from dilocox_peer.peer.rounds.chain import Chain
from dilocox_peer.peer.rounds.contract import Send
from dilocox_peer.peer.rounds.forks import Forks
from dilocox_peer.peer.rounds.founding import FOUNDED_FROM
from dilocox_peer.peer.rounds.healing import (
    LEAST_PAGE,
    LOOKED_AT_A_S,
    LOOKED_AT_ONCE,
    MAX_WAITING,
    PAGE_SIGNATURES,
    WEIGHED_FROM,
    Healing,
)
from dilocox_peer.peer.rounds.telling import BURST_S, NAME_BYTES, TOLD_BYTES_PER_S
from dilocox_peer.peer.rounds.timing import Timing
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import Certificate
from dilocox_peer.wire.declared import replaced
from dilocox_peer.wire.rounds import MAX_PAGE, ChainPage, GetChain
from tests.unit.test_forks import GENESIS, A, B, Branch, C, D, checkpoint_of, verify

LATE = 2**52
DONOR, LIAR = PeerId("donor"), PeerId("liar")


@dataclass
class Newcomer:
    """At genesis, with what it reads of others. verified: signatures that it has looked at. founded_from: height of the owner's word from
    which on it keeps nothing of the chain below."""

    timing: Timing = field(default_factory=Timing)
    max_peers: int = 16
    plans: PlanBounds = ANY_PLAN
    founded_from: int = FOUNDED_FROM
    verified: int = 0
    refused: list[tuple[PeerId, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chain = Chain(GENESIS)
        self.forks = Forks(self.chain, max_back=None)
        self.healing = Healing(self, self.chain, self.forks, is_stranger=lambda peer: peer == LIAR)
        self.healing.founded_from = self.founded_from
        self.now = 0.0

    def verify(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        self.verified += 1
        return verify(peer, message, signature)

    @property
    def known(self) -> int:
        """Certificates of the path."""
        return 0 if self.healing.path is None else len(self.healing.path.certificates)

    def read(self, peer: PeerId, branch: Branch, pages: int = 1000, *, ends: int | None = None) -> int:
        """Asks peer for the chain that it shows, of which it says that it ends after so many pages; how many were read."""
        self.now += 10.0
        questions, read = self.healing.heard_of(peer, branch.certificates[-1].head, self.now), 0
        while questions and read < pages:
            page = page_of(branch, questions[0])
            read += 1
            more = page.more if ends is None else read < ends
            questions, reason = self.healing.on_page(peer, page.certificates, more=more, now=self.now)
            if reason is not None:
                self.refused.append((peer, reason))
        return read


def page_of(branch: Branch, question: Send) -> ChainPage:
    """As an honest peer answers."""
    chain = Chain(GENESIS, branch.certificates)
    reader = Newcomer()
    healing = Healing(reader, chain, Forks(chain, max_back=None))
    assert isinstance(question.message, GetChain)
    page = healing.page_after(question.message.locator)
    assert page is not None
    return page


def rounds(count: int, *signers: PeerId, first: int = 2) -> Branch:
    branch = Branch().start(*signers)
    for order in range(first, first + count):
        branch.round(*signers, order=order)
    return branch


def unsigned(certificate: Certificate) -> Certificate:
    return replaced(certificate, signatures=tuple((peer, b"x" * 40) for peer, _ in certificate.signatures))


LONG = rounds(400, A, B, C)
FORGED = rounds(400, A, B, D)  # of another first roster
TIP: Digest = LONG.certificates[-1].head


def test_a_long_chain_is_read_to_its_end_and_weighed_now_and_then_only() -> None:
    newcomer = Newcomer()
    assert newcomer.read(DONOR, LONG) == len(LONG.certificates) // MAX_PAGE + 1
    assert newcomer.healing.path is not None
    assert newcomer.healing.path.tip == TIP
    assert newcomer.verified == 1 + 400 * 3, "every signature once"


def test_a_donor_that_dies_half_way_costs_what_came_of_it_no_second_time() -> None:
    newcomer = Newcomer()
    newcomer.read(DONOR, LONG, pages=5)
    assert WEIGHED_FROM <= newcomer.known <= 5 * MAX_PAGE
    before = newcomer.verified
    newcomer.read(PeerId("another"), LONG)
    assert newcomer.known == 401
    assert newcomer.verified == 1 + 400 * 3
    assert before == 1 + 3 * (5 * MAX_PAGE - 1)


def test_what_the_owner_has_signed_needs_no_other_signature() -> None:
    newcomer = Newcomer()
    newcomer.forks.checkpoint = checkpoint_of(LONG, 390)
    newcomer.read(DONOR, LONG)
    assert newcomer.healing.path is not None
    assert newcomer.healing.path.tip == TIP
    assert newcomer.verified <= 11 * 3 + 3


@pytest.mark.parametrize(
    ("signed_from", "why"),
    [
        (380, "a chain that parts from the one that the run's owner has signed"),
        (401, "a signature that does not verify"),
    ],
)
def test_a_chain_that_does_not_lead_to_the_owners_word_is_refused_and_the_next_one_at_its_first_page(
    signed_from: int, why: str
) -> None:
    newcomer = Newcomer()
    newcomer.forks.checkpoint = checkpoint_of(LONG, 390)
    below, above = FORGED.certificates[1:signed_from], FORGED.certificates[signed_from:]
    forged = Branch([FORGED.certificates[0], *map(unsigned, below), *above])
    newcomer.read(LIAR, forged)
    assert newcomer.refused == [(LIAR, why)]
    assert newcomer.known == 0
    assert newcomer.read(PeerId("second liar"), Branch(forged.certificates[:399])) == 1
    assert newcomer.refused[1] == (PeerId("second liar"), "a signature that does not verify")
    newcomer.read(DONOR, LONG)
    assert newcomer.known == 401


def test_somebody_who_is_behind_the_owners_word_is_read_by_the_signatures() -> None:
    newcomer = Newcomer()
    newcomer.forks.checkpoint = checkpoint_of(LONG, 390)
    behind = Branch(LONG.certificates[:200])
    newcomer.read(DONOR, behind)
    assert newcomer.known == 200
    assert newcomer.verified >= 3 * 199


def test_first_pages_that_nobody_asked_for_undo_nothing() -> None:
    newcomer = Newcomer()
    newcomer.read(DONOR, LONG, pages=5)
    newcomer.healing.on_page(LIAR, tuple(FORGED.certificates[:8]), more=True, now=newcomer.now)
    newcomer.healing.on_page(LIAR, tuple(LONG.certificates[:8]), more=True, now=newcomer.now)
    assert newcomer.read(DONOR, LONG) == len(LONG.certificates) // MAX_PAGE + 1 - 5


def test_a_page_has_as_many_certificates_as_can_be_looked_at_at_once() -> None:
    few, many = rounds(100, A), rounds(100, *(PeerId(f"peer{number:02d}") for number in range(16)))
    ask = Send(DONOR, GetChain(0, GENESIS.head, 0, (GENESIS.head,)))
    assert len(page_of(few, ask).certificates) == MAX_PAGE
    page = page_of(many, ask).certificates
    assert LEAST_PAGE <= len(page) < MAX_PAGE
    assert sum(len(each.signatures) for each in page) <= PAGE_SIGNATURES


# ---- a long chain that the owner has signed: nothing of it is kept in memory (founding.py) ----------------------------


def newcomer_with_word(height: int = 390) -> Newcomer:
    newcomer = Newcomer(founded_from=64)
    newcomer.forks.checkpoint = checkpoint_of(LONG, height)
    return newcomer


def moved(newcomer: Newcomer) -> None:
    """As adoption.py does it."""
    assert newcomer.healing.founded is not None
    newcomer.chain.become(newcomer.healing.founded)
    newcomer.healing.founded = None
    newcomer.healing.rebase()


def test_a_newcomers_chain_becomes_what_the_owner_has_signed_and_goes_on_from_there() -> None:
    newcomer = newcomer_with_word()
    newcomer.read(DONOR, LONG)
    assert newcomer.healing.founded is not None
    assert newcomer.healing.founded.head == LONG.certificates[388].head, "the one before what is signed"
    assert newcomer.verified == newcomer.known == 0
    moved(newcomer)
    newcomer.read(PeerId("another"), LONG)
    assert newcomer.healing.path is not None
    assert (newcomer.healing.path.ancestor, newcomer.healing.path.tip) == (389, TIP)


def test_a_page_that_comes_unasked_keeps_nobody_from_founding() -> None:
    newcomer = newcomer_with_word()
    newcomer.healing.on_page(PeerId("notary"), LONG.certificates[:MAX_PAGE], more=True, now=newcomer.now)
    assert newcomer.known == 0
    newcomer.now += 10.0
    newcomer.read(DONOR, LONG)
    assert newcomer.healing.founded is not None
    assert newcomer.verified == 0


def test_a_founding_goes_on_with_another_donor_and_outlives_a_newer_word() -> None:
    newcomer = newcomer_with_word()
    newcomer.read(DONOR, LONG, pages=3)
    newcomer.forks.checkpoint = checkpoint_of(LONG, 398)
    newcomer.healing.reconsider()
    read = newcomer.read(PeerId("another"), LONG)
    assert read == len(LONG.certificates) // MAX_PAGE + 1 - 3
    assert newcomer.healing.founded is not None
    assert newcomer.healing.founded.height == 397


@pytest.mark.parametrize("cut", [400, 391, 390])
def test_what_does_not_lead_to_the_owners_word_founds_nothing(cut: int) -> None:
    newcomer = newcomer_with_word()
    forged = Branch([FORGED.certificates[0], *map(unsigned, FORGED.certificates[1:cut])])
    newcomer.read(LIAR, forged)
    assert newcomer.healing.founded is None
    assert newcomer.known == 0
    assert newcomer.refused[0][0] == LIAR
    assert newcomer.chain.store.size_bytes == 0, "nothing of it stays on the disk"
    newcomer.read(DONOR, LONG)
    assert newcomer.known == 401, "by its signatures now"
    assert newcomer.verified >= 1 + 400 * 3


@pytest.mark.parametrize("cut", [389, 100, 1])
def test_a_made_up_chain_that_ends_below_the_word_keeps_nobody_from_founding(cut: int) -> None:
    newcomer = newcomer_with_word()
    forged = Branch([FORGED.certificates[0], *map(unsigned, FORGED.certificates[1:cut])])
    newcomer.read(LIAR, forged)
    assert newcomer.healing.founded is None
    newcomer.read(DONOR, LONG)
    assert newcomer.healing.founded is not None
    assert newcomer.healing.founded.head == LONG.certificates[388].head
    assert newcomer.verified == 0


def test_somebody_else_in_between_costs_a_founding_nothing() -> None:
    newcomer = newcomer_with_word()
    newcomer.read(DONOR, LONG, pages=4)
    newcomer.read(LIAR, FORGED)
    newcomer.read(PeerId("behind"), Branch(LONG.certificates[:150]))
    assert newcomer.read(DONOR, LONG) == len(LONG.certificates) // MAX_PAGE + 1 - 4
    assert newcomer.healing.founded is not None
    assert newcomer.verified == 0


def test_a_donor_that_is_behind_the_word_is_followed_by_its_signatures() -> None:
    newcomer, behind = newcomer_with_word(), Branch(LONG.certificates[:300])
    newcomer.read(DONOR, behind)
    newcomer.read(PeerId("one more"), behind)
    assert newcomer.known == newcomer.verified == 0, "another may have what follows"
    newcomer.read(DONOR, behind)
    newcomer.read(DONOR, behind)
    assert newcomer.healing.founded is None
    assert newcomer.known == 300


def test_a_donor_that_has_not_come_far_costs_a_founding_nothing() -> None:
    newcomer = newcomer_with_word()
    newcomer.read(DONOR, Branch(LONG.certificates[:200]))
    newcomer.read(PeerId("one that is further"), LONG)
    assert newcomer.healing.founded is not None
    assert newcomer.verified == 0


def test_a_word_for_another_branch_begins_a_founding_anew() -> None:
    newcomer = newcomer_with_word()
    newcomer.read(DONOR, LONG, pages=4)
    newcomer.forks.checkpoint = checkpoint_of(FORGED, 100)
    newcomer.healing.reconsider()
    newcomer.read(PeerId("heir"), FORGED)
    newcomer.read(PeerId("heir"), FORGED)
    assert newcomer.healing.founded is not None
    assert newcomer.healing.founded.head == FORGED.certificates[98].head


def test_a_peer_that_has_a_chain_founds_none() -> None:
    newcomer = newcomer_with_word()
    newcomer.chain.append(LONG.certificates[0])
    newcomer.read(DONOR, LONG)
    assert newcomer.healing.founded is None
    assert newcomer.known == 400


def test_what_was_only_worse_than_a_path_is_read_again_once_that_one_leads_nowhere() -> None:
    """Found by slicing seed 6406: nobody had the state of what the owner had seen, and those who waited for it refused for ever what the
    only one that had gone on showed them."""
    held, gone = Branch().start(A).round(A, order=2), Branch().start(A)
    went_on = gone.fork().view(B, order=3).round(B, order=4)
    newcomer = Newcomer()
    newcomer.read(PeerId("owner"), held)
    newcomer.read(DONOR, went_on)
    assert newcomer.healing.path is not None
    assert newcomer.healing.path.tip == held.certificates[-1].head
    assert newcomer.read(DONOR, went_on) == 0, "it is known to be worse"
    newcomer.healing.shun(newcomer.now)
    assert newcomer.read(DONOR, went_on) == 1
    assert newcomer.healing.path is not None
    assert newcomer.healing.path.tip == went_on.certificates[-1].head
    assert not newcomer.refused, "it was nobody's fault"


def test_a_branch_that_is_worse_or_held_back_is_elsewhere_and_what_nobody_has_looked_at_is_not() -> None:
    ours = Branch().start(A, B, C, D)
    worse = ours.fork().view(D, order=3)
    newcomer = Newcomer()
    for certificate in ours.round(A, B, C, order=2).certificates:
        newcomer.chain.append(certificate)
    newcomer.healing.rebase()
    healing = newcomer.healing
    assert not healing.is_elsewhere(worse.place.head), "not known yet"
    newcomer.read(DONOR, worse)
    assert healing.is_elsewhere(worse.place.head)
    assert not any(healing.is_elsewhere(certificate.head) for certificate in ours.certificates)
    above = ours.fork().view(C, D, order=LATE).round(C, D, order=LATE + 1)
    newcomer.read(LIAR, above)
    assert healing.is_elsewhere(above.place.head), "whether or not it is followed"


def test_a_page_of_many_signatures_is_looked_at_in_parts_and_one_that_nobody_asked_for_is_asked_for() -> None:
    """Anybody can make 64 keys, and sign 64 certificates with each; messages of others wait until they were looked at."""
    many = [PeerId(f"m{number}") for number in range(16)]
    newcomer, chain = Newcomer(), rounds(60, *many)
    page = tuple(chain.certificates[:MAX_PAGE])
    questions, reason = newcomer.healing.on_page(LIAR, page, more=False, now=1.0)
    assert (newcomer.verified, reason) == (0, None)
    [question] = questions
    assert isinstance(question.message, GetChain)
    verified: list[int] = []
    while questions:
        before = newcomer.verified
        heads = [GENESIS.head, *(each.head for each in page)]
        start = next(heads.index(head) for head in question.message.locator if head in heads)
        questions, reason = newcomer.healing.on_page(LIAR, page[start:], more=False, now=1.0)
        assert reason is None
        verified.append(newcomer.verified - before)
        for question in questions:
            assert isinstance(question.message, GetChain)
    assert max(verified) <= PAGE_SIGNATURES
    assert newcomer.known == len(page)
    assert newcomer.verified == 1 + 60 * len(many), "every signature once"


def test_strangers_that_say_they_have_something_and_show_nothing_do_not_keep_us_from_those_who_have_it() -> None:
    """Seventy of them took every turn, for as long as they went on."""
    newcomer, now = Newcomer(), 0.0
    strangers = [(PeerId(f"s{number}"), Digest(bytes([number]) * 32)) for number in range(MAX_WAITING + 6)]
    while not newcomer.known and now < 3600.0:
        now += 0.5
        beats = [*strangers, *strangers, (DONOR, TIP)] if now % 1.0 else strangers
        for peer, head in beats:
            for question in newcomer.healing.heard_of(peer, head, now):
                if question.to == DONOR:
                    page = page_of(LONG, question)
                    newcomer.healing.on_page(DONOR, page.certificates, more=False, now=now)
    assert newcomer.known
    assert now <= 3 * MAX_WAITING * newcomer.timing.sync_wait_s


def test_what_strangers_show_unasked_is_looked_at_as_far_as_its_budget_goes() -> None:
    """Twelve messages a second of 64 signatures each, by keys of their own, took a tenth of a core; a hundred all of it."""
    many = [PeerId(f"m{number}") for number in range(16)]
    start = Branch().start(*many)
    again = start.place.view_change(many)
    newcomer, forged = Newcomer(), [start.fork().add(again, many, view, order=2).certificates for view in range(2, 302)]
    told = Newcomer()
    for certificates in forged:
        newcomer.healing.on_page(LIAR, certificates, more=False, now=1.0)
        told.healing.on_page(DONOR, certificates, more=False, now=1.0)
    assert newcomer.verified <= LOOKED_AT_ONCE + LOOKED_AT_A_S
    assert told.verified > 4 * LOOKED_AT_ONCE, "what voters show is looked at at once"
    [question] = newcomer.healing.heard_of(LIAR, forged[-1][-1].head, 10.0)
    _, reason = newcomer.healing.on_page(LIAR, forged[-1], more=False, now=10.0)
    assert (question.to, reason) == (LIAR, None), "a stranger may have it: it is asked in turn"


def test_strangers_are_told_of_our_chain_as_much_as_there_is_time_for_and_voters_all_that_they_ask_for() -> None:
    """A question of 74 bytes brings 250 kB of a run of 64 members; a hundred and fifty a second, which strangers may ask, took the loop."""
    teller, other = Newcomer(), PeerId("another")
    healing = Healing(
        teller,
        Chain(GENESIS, rounds(200, A, B, C, D).certificates),
        teller.forks,
        is_stranger=lambda peer: peer in (LIAR, other),
    )
    asked = 20_000
    first, second = (
        sum(healing.answer(peer, [GENESIS.head], 1.0) is not None for _ in range(asked)) for peer in (LIAR, other)
    )
    page = healing.page_after([GENESIS.head])
    assert page is not None
    names = sum(len(each.signatures) + len(each.value.entries) + len(each.value.roster) for each in page.certificates)
    most = BURST_S * TOLD_BYTES_PER_S / NAME_BYTES
    assert most < first * names <= most + names, "as long as nobody else asks"
    assert second == 0
    assert all(healing.answer(DONOR, [GENESIS.head], 1.0) == page for _ in range(1000))
    assert healing.answer(LIAR, [GENESIS.head], 2.0) is None, "another has asked in vain"
    assert healing.answer(other, [GENESIS.head], 2.0) == page
    assert healing.answer(LIAR, [GENESIS.head], 2.5) == page, "later there is more"


def seconds_among(newcomer: Newcomer, shown: Branch, *honest: PeerId) -> float:
    """Until it has the chain that the honest show, where LIAR is heard first and shows its own by single certificates, each at the end of the time
    that there is for it. All are heard each second."""
    healing, now, answers = newcomer.healing, 0.0, list[tuple[float, Send]]()
    peers = (LIAR, *honest)
    while now < 2000.0 and healing.founded is None and (healing.path is None or healing.path.tip != TIP):
        if round(10 * now) % 10 == 0:
            for peer in peers:
                tip = (shown if peer == LIAR else LONG).certificates[-1].head
                asked = healing.heard_of(peer, tip, now)
                answers += [(now + (SLOW_S if each.to == LIAR else QUICK_S), each) for each in asked]
        for due, question in [each for each in answers if each[0] <= now]:
            answers.remove((due, question))
            page = page_of(shown if question.to == LIAR else LONG, question)
            some = page.certificates[:1] if question.to == LIAR else page.certificates
            more = page.more or len(some) < len(page.certificates)
            asked, _ = healing.on_page(question.to, some, more=more, now=now)
            answers += [(now + (SLOW_S if each.to == LIAR else QUICK_S), each) for each in asked]
        now += 0.1
    return now


SLOW_S, QUICK_S = 3.9, 0.3  # of an answer; sync_wait_s is 4


@pytest.mark.parametrize("shown", [LONG, FORGED])
@pytest.mark.parametrize("founded_from", [256, FOUNDED_FROM])
def test_who_shows_its_chain_by_single_certificates_holds_a_newcomer_up_for_a_turn(
    shown: Branch, founded_from: int
) -> None:
    newcomer = Newcomer(founded_from=founded_from)
    newcomer.forks.checkpoint = checkpoint_of(LONG, 390)
    assert seconds_among(newcomer, shown, DONOR, PeerId("another")) < 30.0


def test_so_it_does_where_the_owner_has_signed_nothing() -> None:
    assert seconds_among(Newcomer(), LONG, DONOR) < 30.0
