"""What a peer knows to be wrong with itself, and for how long."""

from dilocox_peer.events import (
    EquivocationProved,
    Event,
    RoundCertified,
    RoundClosed,
    TrainingProgress,
)
from dilocox_peer.events_of_data import ShardRefused
from dilocox_peer.events_of_health import DiskRefused, LinkProcessEnded
from dilocox_peer.events_of_rounds import ContributionRefused, ContributionsMissed
from dilocox_peer.peer.ails import LATE_S, REFUSED_S, Ails
from dilocox_peer.types import PeerId
from dilocox_peer.wire.health import MAX_ACCUSED, Accusation

ME = PeerId("me")


def after(*events: Event) -> Ails:
    found = Ails(ME)
    for event in events:
        found.take(event, 0.0)
    return found


def test_a_full_disk_ails_until_all_that_waited_is_written():
    found = after(DiskRefused("rounds.log", "no space"), DiskRefused("contribution", "no space"))
    assert found.now(0.0) == ("disk",)
    found.take(DiskRefused("rounds.log", "no space", is_over=True), 1.0)
    assert found.now(1.0) == ("disk",)
    found.take(DiskRefused("contribution", "no space", is_over=True), 2.0)
    assert found.now(2.0) == ()


def test_linkd_ails_until_it_is_back_and_data_for_a_minute():
    assert after(LinkProcessEnded("killed")).now(0.0) == ("links",)
    assert after(LinkProcessEnded("killed"), LinkProcessEnded("", is_back=True)).now(0.0) == ()
    assert after(ShardRefused("x", "its hash is another")).now(0.0) == ("data",)
    assert after(ShardRefused("x", "its hash is another")).now(REFUSED_S + 1) == ()


def test_one_late_contribution_is_an_accident_and_two_within_a_minute_are_the_line():
    late = ContributionsMissed(3, ((ME, "came 2.0 s after the first here, too late for the leader"),))
    assert after(late).now(0.0) == ()
    assert after(late, late).now(0.0) == ("line",)
    assert after(late, late).now(LATE_S + 1) == ()
    assert after(ContributionsMissed(3, ((PeerId("other"), "came late"),)), late).now(0.0) == ()


def closing(
    found: Ails, blob_bytes: int, *, round_s: float, rounds: int, upload_bps: int, then: int = 2
) -> list[tuple[str, ...]]:
    """What ails it after each of `then` closes, one a round, once it has seen so many certified."""
    now, ailing = 0.0, list[tuple[str, ...]]()
    for _ in range(rounds):
        now += round_s
        found.take(certified(), now)
    for _ in range(then):
        found.take(progress(upload_bps), now)
        found.take(RoundClosed(1, 8, 2.0, blob_bytes, blob_bytes), now + 0.1)
        ailing.append(found.now(now + 0.1))
        now += round_s
        found.take(certified(), now)
    return ailing


def certified() -> RoundCertified:
    return RoundCertified(1, "h", 1, 1, (), (), 8, True, 0.0, 0, 0, 2.0, "d")


def progress(upload_bps: int) -> TrainingProgress:
    return TrainingProgress(1, 1, 1, 1.0, 2.0, 0, 0, 0.0, upload_bps=upload_bps)


def test_a_line_that_a_contribution_takes_two_rounds_for_is_named_before_it_is_late():
    assert closing(Ails(ME), 1_000_000, round_s=2.0, rounds=3, upload_bps=1_500_000) == [(), ("line",)]


def test_a_line_that_is_much_too_narrow_is_named_at_the_first_close():
    assert closing(Ails(ME), 1_000_000, round_s=2.0, rounds=3, upload_bps=100_000) == [("line",), ("line",)]


def test_a_line_that_is_wide_enough_or_not_known_is_not_named():
    for upload_bps in (0, 10_000_000):
        assert closing(Ails(ME), 1_000_000, round_s=2.0, rounds=3, upload_bps=upload_bps) == [(), ()]
    assert closing(Ails(ME), 1_000_000, round_s=600.0, rounds=3, upload_bps=100_000) == [(), ()], (
        "rounds are long there"
    )
    assert closing(Ails(ME), 1_000_000, round_s=2.0, rounds=0, upload_bps=100_000, then=1) == [()], (
        "the pace is not known"
    )


def test_a_line_that_has_become_wide_enough_is_named_no_more():
    found = Ails(ME)
    assert closing(found, 1_000_000, round_s=2.0, rounds=3, upload_bps=100_000)[-1] == ("line",)
    assert closing(found, 10_000, round_s=2.0, rounds=0, upload_bps=100_000, then=1) == [()]


def test_who_is_caught_is_named_for_good_and_whose_contributions_are_refused_for_a_while():
    found = after(EquivocationProved(PeerId("a"), "two votes"), ContributionRefused(PeerId("b"), 1, "not finite"))
    assert found.accused(0.0) == (Accusation(PeerId("a"), "proven"), Accusation(PeerId("b"), "refused"))
    assert found.accused(REFUSED_S + 1) == (Accusation(PeerId("a"), "proven"),)
    many = after(*(EquivocationProved(PeerId(f"p{number}"), "x") for number in range(100)))
    assert len(many.accused(0.0)) == MAX_ACCUSED
