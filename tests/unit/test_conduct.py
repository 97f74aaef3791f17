"""Who is waited for, and for how long not."""

from dilocox_peer.events import EquivocationProved, MemberDoubted
from dilocox_peer.peer.rounds.chain import ORDER_BYTES, Place
from dilocox_peer.peer.rounds.conduct import MAX_REMEMBERED, PUT_OFF_ROUNDS, Conduct
from dilocox_peer.types import Digest, PeerId, sha256
from dilocox_peer.wire.chain import Plan, acceptance
from dilocox_peer.wire.rounds import Contradiction, Statement

ME, A, B, C = (PeerId(name) for name in ("me", "a", "b", "c"))
ROSTER = (ME, A, B, C)


def blob(number: int) -> Digest:
    return sha256(number.to_bytes(4, "big"))


def rounds(conduct: Conduct, count: int, alive: tuple[PeerId, ...] = ROSTER, now: float = 0.0) -> None:
    for _ in range(count):
        conduct.round_certified(ROSTER, alive, now)


def test_a_contribution_that_fails_once_is_waited_for_the_next_time_and_then_no_more() -> None:
    conduct = Conduct(ME)
    conduct.undelivered(A, blob(1), due_at=9.0, waited_until=1.0, has_failed=True)
    assert A in conduct.waited_for(ROSTER)
    conduct.undelivered(A, blob(2), due_at=9.0, waited_until=1.0, has_failed=True)
    assert conduct.waited_for(ROSTER) == {ME, B, C}
    assert [type(event) for event in conduct.events] == [MemberDoubted]


def test_it_is_waited_for_again_when_it_has_delivered_for_a_while() -> None:
    conduct = Conduct(ME)
    for number in range(2):
        conduct.undelivered(A, blob(number), due_at=9.0, waited_until=1.0, has_failed=True)
    conduct.delivered(A)
    assert A in conduct.waited_for(ROSTER)
    for number in range(20):
        conduct.undelivered(A, blob(number), due_at=9.0, waited_until=1.0, has_failed=True)
    for _ in range(40):
        conduct.delivered(A)
    assert A in conduct.waited_for(ROSTER)


def test_a_late_contribution_counts_less_than_one_that_never_comes() -> None:
    conduct = Conduct(ME)
    for number in range(4):
        conduct.undelivered(A, blob(number), due_at=100.0, waited_until=1.0, has_failed=False)
        assert conduct.owes(A)
        conduct.came(blob(number), 50.0)
        conduct.delivered(A)
    assert A in conduct.waited_for(ROSTER)
    for number in range(2):
        conduct.undelivered(B, blob(number), due_at=10.0, waited_until=1.0, has_failed=False)
    rounds(conduct, 1, now=11.0)
    assert not conduct.owes(B)
    assert conduct.waited_for(ROSTER) == {ME, A, C}


def test_who_was_slow_for_a_while_and_is_not_waited_for_comes_back_by_being_in_time() -> None:
    """Nobody waits for it, so what it sends is never here in time: it was left out of all rounds from then on."""
    conduct = Conduct(ME)
    for number in range(8):
        conduct.undelivered(A, blob(number), due_at=100.0, waited_until=20.0, has_failed=False)
        conduct.came(blob(number), 50.0)
    assert A not in conduct.waited_for(ROSTER)
    conduct.undelivered(A, blob(8), due_at=100.0, waited_until=20.0, has_failed=False)
    conduct.came(blob(8), 19.0)
    assert A in conduct.waited_for(ROSTER)


def test_a_contribution_that_others_lack_counts_when_it_was_waited_for_to_the_end() -> None:
    conduct = Conduct(ME)
    conduct.undelivered_to_others(A, in_time=True)
    conduct.undelivered_to_others(A, in_time=False)
    assert A in conduct.waited_for(ROSTER)
    conduct.undelivered_to_others(A, in_time=False)
    assert A not in conduct.waited_for(ROSTER)
    conduct.undelivered_to_others(A, in_time=True)
    assert A in conduct.waited_for(ROSTER), "it comes back by being in time, though nobody waited"


def test_who_lets_fetches_hang_holds_two_rounds_up_not_six() -> None:
    conduct = Conduct(ME)
    for number in range(2):
        assert A in conduct.waited_for(ROSTER)
        conduct.undelivered(A, blob(number), due_at=1000.0, waited_until=1.0, has_failed=False)
    assert A not in conduct.waited_for(ROSTER)
    assert not conduct.events, "it may still come: nothing is said yet"
    conduct.came(blob(0), 50.0)
    assert A in conduct.waited_for(ROSTER), "a slow line is forgiven as soon as its bytes are here"


def test_who_trains_and_offers_nothing_is_waited_for_four_times() -> None:
    conduct = Conduct(ME)
    for _ in range(4):
        assert A in conduct.waited_for(ROSTER)
        conduct.silent(A)
    assert A not in conduct.waited_for(ROSTER)
    assert [event.reason for event in conduct.events if isinstance(event, MemberDoubted)] == [
        "it trains and offers no contribution in time"
    ]
    conduct.delivered(A)
    assert A in conduct.waited_for(ROSTER)


def test_who_has_gone_meanwhile_is_not_to_blame() -> None:
    conduct = Conduct(ME)
    for number in range(4):
        conduct.undelivered(A, blob(number), due_at=10.0, waited_until=1.0, has_failed=False)
        conduct.failed(blob(number), alive=(ME, B))
    assert A in conduct.waited_for(ROSTER)


def test_if_most_others_fail_it_is_our_own_link() -> None:
    conduct = Conduct(ME)
    for number, peer in enumerate((A, A, B, B)):
        conduct.undelivered(peer, blob(number), due_at=9.0, waited_until=1.0, has_failed=True)
    assert conduct.waited_for(ROSTER) == set(ROSTER)
    assert conduct.waited_for((*ROSTER, PeerId("d"))) == {ME, C, PeerId("d")}


def test_a_turn_is_not_waited_for_twice_as_long_each_time() -> None:
    conduct = Conduct(ME)
    for times in range(3):
        conduct.strike(A, "led", "nothing came")
        conduct.strike(A, "led", "nothing came")
        rounds(conduct, (PUT_OFF_ROUNDS << times) - 1)
        assert not conduct.leads(A)
        rounds(conduct, 1)
        assert conduct.leads(A)
    assert [event.rounds for event in conduct.events if isinstance(event, MemberDoubted)] == [32, 64, 128]


def test_a_ballot_that_is_certified_makes_up_for_a_strike() -> None:
    conduct = Conduct(ME)
    conduct.strike(A, "led", "nothing came")
    conduct.led(A)
    assert conduct.leads(A)


def test_we_do_not_doubt_ourselves() -> None:
    conduct = Conduct(ME)
    conduct.strike(ME, "led", "nothing came")
    assert conduct.leads(ME)
    assert not conduct.events


def test_a_claim_is_measured_by_the_pace_of_the_others() -> None:
    conduct = Conduct(ME)
    assert conduct.most_work(A, ROSTER, since=0.0, now=10.0) is None
    for peer, micro_batches in ((ME, 50), (B, 10), (C, 40)):
        conduct.worked(peer, micro_batches, since=0.0, now=10.0)
    most = conduct.most_work(A, ROSTER, since=10.0, now=20.0)
    assert most is not None
    assert 200 * 50 < most < 2**20, "a GPU among CPUs is believed, two thousand million micro-batches are not"


def test_who_was_suspended_believes_what_the_others_did_meanwhile() -> None:
    """Of two members the one that had slept for three minutes left the other out, and was itself doubted for it."""
    conduct = Conduct(ME)
    conduct.worked(ME, 64, since=0.0, now=5.0)
    conduct.worked(A, 64, since=0.0, now=5.0)
    conduct.worked(ME, 1, since=5.0, now=190.0)
    for later in (190.1, 190.2):  # the rounds of these minutes, fetched
        conduct.worked(A, 64, since=190.0, now=later)
    most = conduct.most_work(A, [ME, A], since=190.0, now=195.0)
    assert most is not None
    assert most > 128
    for later in range(200, 400, 10):
        for peer in (ME, A):
            conduct.worked(peer, 1, since=later - 10.0, now=float(later))
    slow = conduct.most_work(A, [ME, A], since=400.0, now=405.0)
    assert slow is not None
    assert slow < 500, "who is slow now measures by that"


def test_an_accomplice_does_not_raise_the_bound() -> None:
    conduct = Conduct(ME)
    roster = [ME, *(PeerId(f"p{number}") for number in range(7))]
    for peer in roster[:-1]:
        conduct.worked(peer, 50, since=0.0, now=10.0)
    honest = conduct.most_work(A, roster, since=10.0, now=20.0)
    conduct.worked(roster[-1], 2**31, since=0.0, now=10.0)
    assert conduct.most_work(A, roster, since=10.0, now=20.0) == honest


def test_what_is_remembered_is_bounded() -> None:
    conduct = Conduct(ME)
    for number in range(3 * MAX_REMEMBERED):
        conduct.undelivered(PeerId(f"p{number}"), blob(number), due_at=9.0, waited_until=1.0, has_failed=False)
    assert conduct.num_remembered == MAX_REMEMBERED


def test_a_proof_is_told_once_and_kept() -> None:
    place = Place(0, sha256(b"head"), 3, 2, 5, 1, ROSTER, Plan("fp16", 0, 8))
    statements = [
        Statement(bytes(ORDER_BYTES) + acceptance(0, place.head, 1, 0, place.round_value([], roster)), b"good")
        for roster in (ROSTER, ROSTER[:2])
    ]
    conduct = Conduct(ME)

    def verify(peer: PeerId, message: bytes, signature: bytes) -> bool:
        return signature == b"good"

    assert not conduct.accuse(Contradiction(A, statements[0], statements[0]), 0, verify)
    assert conduct.accuse(Contradiction(A, statements[0], statements[1]), 0, verify)
    assert not conduct.accuse(Contradiction(A, statements[1], statements[0]), 0, verify)
    assert not conduct.accuse(Contradiction(ME, statements[0], statements[1]), 0, verify)
    assert [type(event) for event in conduct.events] == [EquivocationProved]
    assert conduct.is_proven(A)
    assert conduct.waited_for(ROSTER) == {ME, B, C}
    assert not conduct.leads(A)
