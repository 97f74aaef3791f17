"""What a training loop's book says of its rounds, its loss and its speed."""

import math

import torch

from dilocox_peer.config import preset
from dilocox_peer.peer.timetable import Timetable
from dilocox_peer.peer.training import LOSS_WINDOW, RoundBook

FLAT_N = torch.zeros(1)


class Desk:
    """A book, and the time it goes by."""

    def __init__(self) -> None:
        self.now = 0.0
        self.book = RoundBook(preset("tiny"), lambda: self.now, Timetable(preset("tiny")))

    def work(self, *losses: float, seconds: float = 1.0) -> None:
        """A micro-batch for each loss, one after the other, computing all the time."""
        for loss in losses:
            self.now += seconds
            self.book.done(loss, seconds)

    @property
    def train_loss(self) -> float:
        return self.book.progress(is_training=True).train_loss


def test_a_loss_that_a_callee_does_not_tell_is_left_out_of_what_is_shown_and_of_the_rounds():
    desk = Desk()
    desk.work(3.0, math.nan, 5.0)
    assert desk.train_loss == 4.0
    snapshot = desk.book.close(FLAT_N)
    assert (snapshot.round_micro_batches, snapshot.train_loss) == (3, 4.0)
    desk.work(math.nan)
    desk.book.move(0)  # not certified: the closed round goes on
    desk.work(7.0)
    snapshot = desk.book.close(FLAT_N)
    assert (snapshot.round_micro_batches, snapshot.train_loss) == (5, 5.0)


def test_a_loss_that_is_never_finite_is_shown():
    """Training that diverges must not show the last loss before that for ever."""
    desk = Desk()
    desk.work(3.0, *[math.nan] * LOSS_WINDOW)
    assert math.isnan(desk.train_loss)
    desk.book.close(FLAT_N)
    desk.work(math.inf)
    desk.book.move(1)
    assert math.isnan(desk.book.close(FLAT_N).train_loss)
