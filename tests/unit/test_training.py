"""What a training loop's book says of its rounds, its loss and its speed."""

import math

import pytest
import torch

from dilocox_peer.config import preset
from dilocox_peer.peer.planning.timetable import Timetable
from dilocox_peer.peer.training.book import LOSS_WINDOW, RoundBook

FLAT_N = torch.zeros(1)


class Desk:
    """A book, and the time it goes by."""

    def __init__(self) -> None:
        self.now = 0.0
        self.each_s = 0.0  # of the last micro-batch
        self.book = RoundBook(preset("tiny"), lambda: self.now, Timetable(preset("tiny")))

    def work(self, *losses: float, seconds: float = 1.0) -> None:
        """A micro-batch for each loss, one after the other, computing all the time."""
        self.each_s = seconds
        for loss in losses:
            self.now += seconds
            self.book.done(loss, seconds)

    def speed(self) -> float:
        """Micro-batches a second, as shown now."""
        progress = self.book.progress(is_training=True).at(self.now)
        assert progress.busy == pytest.approx(progress.tokens_per_s / progress.micro_batch_tokens * self.each_s)
        return progress.tokens_per_s / progress.micro_batch_tokens

    @property
    def train_loss(self) -> float:
        return self.book.progress(is_training=True).train_loss


def test_a_loss_that_a_callee_does_not_tell_is_left_out_of_what_is_shown_and_of_the_rounds():
    desk = Desk()
    desk.work(3.0, math.nan, 5.0)
    assert desk.train_loss == 4.0
    snapshot = desk.book.close(FLAT_N)
    assert (snapshot.new_micro_batches, snapshot.train_loss) == (3, 4.0)
    desk.work(math.nan)
    desk.book.move(0)  # not certified: the closed round goes on
    desk.work(7.0)
    snapshot = desk.book.close(FLAT_N)
    assert (snapshot.new_micro_batches, snapshot.train_loss) == (2, 5.0)


def test_a_loss_that_is_never_finite_is_shown():
    """Training that diverges must not show the last loss before that for ever."""
    desk = Desk()
    desk.work(3.0, *[math.nan] * LOSS_WINDOW)
    assert math.isnan(desk.train_loss)
    desk.book.close(FLAT_N)
    desk.work(math.inf)
    desk.book.move(1)
    assert math.isnan(desk.book.close(FLAT_N).train_loss)


@pytest.mark.parametrize("each_s", [0.1, 7.0, 60.0])
def test_the_speed_of_steady_work_is_the_same_at_all_times(each_s: float):
    desk = Desk()
    for _ in range(300):
        desk.work(1.0, seconds=each_s)
        for _ in range(3):
            assert desk.speed() == pytest.approx(1 / each_s)
            desk.now += each_s / 4
        desk.now -= 3 * each_s / 4


def test_a_standstill_shows_as_soon_as_the_next_micro_batch_is_late():
    desk = Desk()
    desk.work(*[1.0] * 20, seconds=0.1)
    speeds = []
    for idle_s in (0.0, 0.1, 1.0, 5.0, 9.0, 11.0, 60.0, 3600.0):
        desk.now = 2.0 + idle_s
        speeds.append(desk.speed())
    assert speeds[:2] == pytest.approx([10.0, 10.0])
    assert speeds[2] == pytest.approx(21 / 3)
    assert speeds[1:] == sorted(speeds[1:], reverse=True)
    assert speeds[-2:] == pytest.approx([1 / 60, 1 / 3600])


def test_work_that_goes_on_after_a_standstill_has_its_speed_again():
    desk = Desk()
    desk.work(*[1.0] * 20, seconds=0.1)
    desk.now += 3600.0
    desk.work(*[1.0] * 3, seconds=0.1)
    assert desk.speed() == pytest.approx(10.0)


def test_only_a_peer_that_came_later_begins_with_small_steps():
    """A founder's rate was cut to half at the first certificate, where rounds have fewer steps than the ramp."""

    def shares(book: RoundBook, steps: int) -> float:
        return book.learning_rate_share(steps) / book.learning_rate_share(10**6)

    founder, late, installed = (Desk().book for _ in range(3))
    founder.begin(0)
    founder.move(1)
    assert shares(founder, 8) == 1.0
    late.begin(1)
    assert shares(late, 8) < 0.5
    installed.begin(0)
    installed.restart(3)
    assert shares(installed, 8) < 0.5
