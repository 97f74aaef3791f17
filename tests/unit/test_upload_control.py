"""How fast a peer sends on a line of any speed, alone on it and beside others, in a small simulation of the line."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean, quantiles

import pytest

from dilocox_peer.network.upload_control import (
    ALONE_BYTES_PER_S,
    LEAST_BYTES_PER_S,
    LEAST_SHARE,
    LONG_S,
    SHARE,
    START_BYTES_PER_S,
    UploadControl,
    waiting_of,
)
from dilocox_peer.network.upload_shares import BURST_S
from dilocox_peer.network.upload_watch import IDLE_LOOK_S

MBIT = 1e6 / 8
LOOK_S, STEP_S = 0.2, 0.005


@dataclass
class HomeLine:
    """Carries so many bytes a second, first in, first out, and holds buffer_s of them. family: bytes a second that others on it send.
    wanted: that we would."""

    bytes_per_s: float
    family: Callable[[float], float] = lambda _: 0.0
    wanted: Callable[[float], float] = lambda _: float("inf")
    buffer_s: float = 0.2
    seed: int = 1
    burst_s: float = 0.0  # of the rate, at once, whenever there is something to send again
    control: UploadControl = field(default_factory=UploadControl)
    now: float = 0.0
    told: list[tuple[float, float, float]] = field(
        default_factory=list
    )  # (when, wait of a packet, bytes a second of ours)

    def run(self, until: float) -> None:
        rng = random.Random(self.seed)
        now = self.now
        queue = let_go = arrived = round_trip = 0.0
        look_at = now + LOOK_S
        while now < until:
            burst = self.burst_s * self.control.rate if self.wanted(now) > 0.0 == self.wanted(now - STEP_S) else 0.0
            ours, theirs = burst + min(self.control.rate, self.wanted(now)) * STEP_S, self.family(now) * STEP_S
            room = self.bytes_per_s * (self.buffer_s + STEP_S) - queue
            queue += min(ours + theirs, room)
            out = min(queue, self.bytes_per_s * STEP_S)
            queue -= out
            mine = out * ours / (ours + theirs) if ours else 0.0
            let_go, arrived = let_go + ours, arrived + mine
            wait_s = queue / self.bytes_per_s
            round_trip += 0.3 * (wait_s - round_trip)  # smoothed, as the kernel's
            self.told.append((now, wait_s, mine / STEP_S))
            now += STEP_S
            if now >= look_at + (IDLE_LOOK_S - LOOK_S if not let_go else 0.0):  # as upload_watch.py does
                look_at = now + LOOK_S * (1 + 0.3 * rng.random())
                late = 0.04 if rng.random() < 0.03 else 0.003 * rng.random()  # an acknowledgement that was held back
                self.control.take(int(let_go), int(arrived), round_trip + late if arrived > 4096 else None, now)
                let_go = arrived = 0.0
        self.now = now

    def share(self, since: float, until: float) -> float:
        return mean(rate for at, _, rate in self.told if since <= at < until) / self.bytes_per_s

    def waits(self, since: float, until: float) -> tuple[float, float]:
        """95 % of them are no longer, and the longest, s."""
        found = [wait for at, wait, _ in self.told if since <= at < until]
        return quantiles(found, n=20)[-1], max(found)


@pytest.mark.parametrize("mbit", [1.0, 10.0, 100.0, 1000.0])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_line_is_used_for_the_most_part_and_others_on_it_wait_little(mbit: float, seed: int) -> None:
    line = HomeLine(mbit * MBIT, seed=seed)
    line.run(90.0)
    usual, longest = line.waits(20.0, 90.0)
    assert usual < LONG_S
    assert longest < 0.05
    assert line.share(20.0, 90.0) > 0.8
    assert 0.8 < line.control.line / line.bytes_per_s < 1.05


def beside(line: HomeLine, other: UploadControl, until: float) -> tuple[float, float]:
    """Two peers behind one line that always have something to send; the bytes a second of each in the last third."""
    rng = random.Random(line.seed)
    controls, look_at, now = (line.control, other), [LOOK_S, 1.5 * LOOK_S], 0.0
    queued, let_go, arrived, total, round_trip = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], 0.0
    while now < until:
        now += STEP_S
        sent = [control.rate * STEP_S for control in controls]
        fits = min(1.0, (line.bytes_per_s * (line.buffer_s + STEP_S) - sum(queued)) / sum(sent))
        out = min(1.0, line.bytes_per_s * STEP_S / (sum(queued) + fits * sum(sent)))
        for index, control in enumerate(controls):
            queued[index] += fits * sent[index]
            let_go[index] += sent[index]
            arrived[index] += out * queued[index]
            total[index] += out * queued[index] if now > until * 2 / 3 else 0.0
            queued[index] *= 1 - out
            round_trip += 0.15 * (sum(queued) / line.bytes_per_s - round_trip)
            if now >= look_at[index]:
                look_at[index] = now + LOOK_S * (1 + 0.3 * rng.random())
                late = 0.04 if rng.random() < 0.03 else 0.003 * rng.random()
                carried = arrived[index] / (1.15 * LOOK_S)
                late += 0.04 * rng.random() if carried < ALONE_BYTES_PER_S else 0.0
                control.take(int(let_go[index]), int(arrived[index]), waiting_of(round_trip + late, 0.0, carried), now)
                let_go[index] = arrived[index] = 0.0
    return total[0] / (until / 3), total[1] / (until / 3)


@pytest.mark.parametrize("mbit", [2.4, 20.0, 100.0])
def test_two_behind_one_line_come_to_even_parts(mbit: float) -> None:
    """Within minutes, where one was there alone and the other begins with the least, of which every packet is acknowledged late. Rates that grow by
    equal shares would stay apart."""
    parts = []
    for seed in (1, 2, 3):
        line, late = HomeLine(mbit * MBIT, seed=seed), UploadControl()
        line.run(60.0)
        late.rate = LEAST_BYTES_PER_S
        first, second = beside(line, late, 360.0)
        assert first + second > 0.8 * line.bytes_per_s
        parts.append(second / first)
    assert mean(parts) > 0.6, parts


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_who_sends_for_a_while_and_then_nothing_keeps_its_rate(seed: int) -> None:
    """As rounds do. What leaves at once at their beginning waits in the line, and of what arrives in that moment the line was once
    taken for half of what it is."""
    bytes_per_s, round_s, exchange_s = 3.6 * MBIT, 12.5, 7.0
    line = HomeLine(
        bytes_per_s, wanted=lambda at: float("inf") if at % round_s < exchange_s else 0.0, seed=seed, burst_s=BURST_S
    )
    line.run(200.0)
    shares = [line.share(at + 1.0, at + exchange_s) for at in range(100, 200) if at % (2 * round_s) == 0]
    assert min(shares) > 0.65, shares
    assert 0.8 < line.control.line / bytes_per_s < 1.1


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_that_all_of_a_round_begin_at_once_makes_nobody_slower(seed: int) -> None:
    """What three let go at once takes a second to drain."""
    line = HomeLine(
        3.6 * MBIT, wanted=lambda at: float("inf") if at % 17.0 < 7.0 else 0.0, seed=seed, burst_s=3 * BURST_S
    )
    line.run(300.0)
    assert mean(line.share(at, at + 7.0) for at in range(102, 300, 17)) > 0.8


def test_what_was_never_full_is_not_known_and_not_used_up() -> None:
    line = HomeLine(1000 * MBIT, wanted=lambda _: 2 * MBIT)
    line.run(60.0)
    assert line.control.line == 0.0
    assert line.control.rate < 2 * 2 * MBIT, "a rate that limits nothing does not grow"


def test_it_gives_way_to_a_call() -> None:
    line = HomeLine(10 * MBIT, family=lambda at: 3 * MBIT if 30.0 < at < 60.0 else 0.0)
    line.run(120.0)
    usual, longest = line.waits(32.0, 60.0)
    assert usual < 0.03
    assert longest < 0.1
    assert line.share(32.0, 60.0) > 0.5
    assert line.share(90.0, 120.0) > 0.75, "and takes what is free again"


def test_beside_somebody_who_fills_the_line_it_goes_on_slowly_and_comes_back() -> None:
    line = HomeLine(10 * MBIT, family=lambda at: 15 * MBIT if 30.0 < at < 60.0 else 0.0)
    line.run(120.0)
    assert line.control.rate >= LEAST_SHARE * line.control.line
    assert 0.02 < line.share(40.0, 60.0) < 0.2
    assert line.share(90.0, 120.0) > 0.7


def test_a_line_that_has_become_slower_is_measured_again() -> None:
    line = HomeLine(10 * MBIT)
    line.run(60.0)
    line.bytes_per_s = 2 * MBIT
    line.run(120.0)
    assert 0.8 < line.control.line / line.bytes_per_s < 1.05
    assert line.waits(80.0, 120.0)[0] < LONG_S


@pytest.mark.parametrize(("before", "after"), [(10.0, 1.0), (100.0, 10.0), (100.0, 5.0), (50.0, 1.0)])
def test_a_line_that_has_become_ten_times_slower_and_more_is_measured_again(before: float, after: float) -> None:
    """A tenth of what the line once carried filled the new one for good, and all on it waited behind a full buffer."""
    line = HomeLine(before * MBIT)
    line.run(40.0)
    line.bytes_per_s = after * MBIT
    line.run(100.0)
    assert 0.8 < line.control.line / line.bytes_per_s < 1.05
    assert line.waits(70.0, 100.0)[0] < 0.03
    assert line.share(70.0, 100.0) > 0.7


@pytest.mark.parametrize("mbit", [9.3, 12.0])
def test_others_who_fill_the_line_for_minutes_are_not_taken_for_a_slower_one(mbit: float) -> None:
    line = HomeLine(10 * MBIT, family=lambda at: mbit * MBIT if 30.0 < at < 330.0 else 0.0)
    line.run(420.0)
    assert min(line.share(at, at + 60.0) for at in (30.0, 90.0, 150.0, 210.0, 270.0)) > 0.05
    assert line.share(360.0, 420.0) > 0.7
    assert 0.8 < line.control.line / line.bytes_per_s < 1.05


@pytest.mark.parametrize("wanted", [0.3 * MBIT, float("inf")])
@pytest.mark.parametrize("ends", [45.5, 47.0, 48.5])
def test_others_who_end_while_the_line_is_in_doubt_do_not_make_it_a_slow_one(wanted: float, ends: float) -> None:
    """What arrived in that moment was told as what the line carries, a fiftieth of it, until it was full again: for good, where little is sent."""
    line = HomeLine(
        10 * MBIT,
        family=lambda at: 15 * MBIT if 30.0 < at < ends else 0.0,
        wanted=lambda at: wanted if at > 30.0 else float("inf"),
    )
    line.run(ends + 10.0)
    assert 0.8 < line.control.line / line.bytes_per_s < 1.05


def test_one_late_acknowledgement_lowers_nothing_and_two_do() -> None:
    control = UploadControl()
    at = 0.0
    for waiting_s in (0.0, 0.0, 0.2, 0.0, 0.2, 0.0, 0.0):
        control.take(0, 0, waiting_s, at)
        at += LOOK_S
    assert control.rate == START_BYTES_PER_S
    assert control.waiting_s == 0.0
    for _ in range(2):
        control.take(0, 0, 0.2, at)
        at += LOOK_S
    assert control.rate == pytest.approx(SHARE * START_BYTES_PER_S), "others fill the line: we sent nothing"
    assert control.line == 0.0
    assert control.waiting_s == 0.2


def test_after_a_pause_what_was_seen_before_does_not_count() -> None:
    control = UploadControl()
    control.take(0, 0, None, 0.0)
    control.take(25_000, 25_000, 0.2, 0.2)
    control.take(25_000, 25_000, 0.2, 60.0)
    control.take(25_000, 25_000, 0.2, 60.2)
    assert control.rate == START_BYTES_PER_S, "the first of two that are long"
    control.take(25_000, 25_000, 0.2, 60.4)
    for at in (60.6, 60.8):
        control.take(25_000, 25_000, 0.2, at)
    assert control.rate == START_BYTES_PER_S, "what is let go at once waits for a moment"
    control.take(25_000, 25_000, 0.2, 61.0)
    assert control.rate == pytest.approx(SHARE * START_BYTES_PER_S)
    assert control.line == pytest.approx(START_BYTES_PER_S), "of what has arrived for a second"
