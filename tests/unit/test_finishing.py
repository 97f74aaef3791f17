"""`leave --finish`: a peer goes when what it has trained counts, and does not wait for what cannot come."""

from dilocox_peer.cli.finishing import ROUNDS_MORE, Finishing
from tests.unit.dashboard_data import certified, progress


def asked() -> tuple[Finishing, list[str]]:
    reasons: list[str] = []
    return Finishing(reasons.append), reasons


def test_it_goes_with_the_certificate_that_has_its_contribution():
    finishing, reasons = asked()
    finishing.take(progress(0, round_number=32))
    assert "leaves once round 32 is certified" in finishing.begin()
    finishing.take(certified(31))
    finishing.take(certified(32, own_included=False))
    assert reasons == []
    finishing.take(certified(33))
    finishing.take(certified(34))
    assert reasons == ["finished round 33"]


def test_it_does_not_wait_for_ever_for_a_contribution_that_is_left_out():
    finishing, reasons = asked()
    finishing.take(progress(0, round_number=5))
    finishing.begin()
    for number in range(5, 5 + ROUNDS_MORE + 1):
        assert reasons == []
        finishing.take(certified(number, own_included=False))
    assert reasons == [f"finished round {5 + ROUNDS_MORE}"]


def test_with_nothing_under_way_it_goes_at_once():
    for given in ((), (progress(0, is_training=False),), (progress(0, micro_batches=0),)):
        finishing, reasons = asked()
        for event in given:
            finishing.take(event)
        assert finishing.begin().startswith("leaving in order")
        assert len(reasons) == 1


def test_a_round_that_is_closed_and_not_certified_is_waited_for():
    finishing, reasons = asked()
    finishing.take(certified(31))
    finishing.take(progress(0, round_number=33, micro_batches=0))
    assert "leaves once round 32 is certified" in finishing.begin()
    finishing.take(certified(32))
    assert reasons == ["finished round 32"]


def test_without_being_asked_nobody_goes():
    finishing, reasons = asked()
    finishing.take(progress(0))
    finishing.take(certified(40))
    assert reasons == []
