"""Two peers behind one line that send in rounds, packet by packet: what a connection's smoothed round trip forgets slowly shows here alone."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from statistics import mean

from dilocox_peer.network.upload_control import LEAST_BYTES_PER_S, SHARE, UploadControl, waiting_of

MBIT = 1e6 / 8
PACKET_BYTES = 1448.0
STEP_S, LOOK_S = 0.005, 0.2
BASE_S, BUFFER_S = 0.03, 0.2  # of a round trip with nothing that waits; that the router holds
TELLING_BYTES = 4096  # acknowledged, or a connection's round trip says nothing
ROUND_S, EXCHANGE_S = 12.5, 7.0


@dataclass
class Sender:
    """With one connection. round_trip: smoothed as the kernel's, an eighth an acknowledgement."""

    control: UploadControl = field(default_factory=UploadControl)
    credit: float = 0.0
    let_go: float = 0.0
    acked: float = 0.0
    total: float = 0.0
    round_trip: float = 0.0
    least: float = 9.0
    looked_at: float = 0.0
    look_at: float = LOOK_S

    def acknowledged(self, took_s: float) -> None:
        self.round_trip += (took_s - self.round_trip) / (8 if self.least < 9.0 else 1)
        self.least = min(self.least, took_s)
        self.acked += PACKET_BYTES
        self.total += PACKET_BYTES

    def look(self, now: float) -> None:
        seconds, self.looked_at = max(now - self.looked_at, LOOK_S), now
        waits = self.acked >= TELLING_BYTES
        waiting_s = waiting_of(self.round_trip, self.least, self.acked / seconds) if waits else None
        self.control.take(int(self.let_go), int(self.acked), waiting_s, now)
        self.let_go = self.acked = 0.0


def together(bytes_per_s: float, rates: tuple[float, float], until: float, seed: int) -> tuple[float, float]:
    """Bytes that each has sent in the last third."""
    first, second, _ = played(lambda _: bytes_per_s, rates, until, seed)
    return first, second


def played(
    line: Callable[[float], float], rates: tuple[float, float], until: float, seed: int, *, in_rounds: bool = True
) -> tuple[float, float, float]:
    """The same, of a line that may change, and for how long a packet waits there on average."""
    rng, order = random.Random(seed), count()
    senders, waits_s = [Sender(UploadControl()), Sender(UploadControl())], list[float]()
    for sender, rate in zip(senders, rates, strict=True):
        sender.control.rate, sender.look_at = rate, LOOK_S * (1 + rng.random())
    queue: deque[tuple[Sender, float]] = deque()
    under_way: list[tuple[float, int, Sender, float]] = []
    free = now = 0.0
    before = (0.0, 0.0)
    while now < until:
        now += STEP_S
        bytes_per_s = line(now)
        for sender in senders:
            burst = max(0.1 * sender.control.rate, 16384.0)
            sender.credit = min(sender.credit + sender.control.rate * STEP_S, burst)
            while (not in_rounds or now % ROUND_S < EXCHANGE_S) and sender.credit >= PACKET_BYTES:
                sender.credit -= PACKET_BYTES
                sender.let_go += PACKET_BYTES
                if len(queue) * PACKET_BYTES <= bytes_per_s * BUFFER_S + 20 * PACKET_BYTES:
                    queue.append((sender, now))
        free = min(free + bytes_per_s * STEP_S, bytes_per_s * STEP_S + PACKET_BYTES) if queue else 0.0
        while queue and free >= PACKET_BYTES:
            free -= PACKET_BYTES
            late_s = 0.04 if rng.random() < 0.01 else 0.002 * rng.random()
            heappush(under_way, (now + BASE_S + late_s, next(order), *queue.popleft()))
        while under_way and under_way[0][0] <= now:
            _, _, sender, sent_at = heappop(under_way)
            sender.acknowledged(now - sent_at)
        for sender in senders:
            if now >= sender.look_at:
                sender.look(now)
                sender.look_at = now + LOOK_S * (1 + 0.3 * rng.random())
        if now < until * 2 / 3:
            before = (senders[0].total, senders[1].total)
        else:
            waits_s.append(len(queue) * PACKET_BYTES / bytes_per_s)
    return senders[0].total - before[0], senders[1].total - before[1], mean(waits_s)


def test_who_was_alone_on_a_line_and_who_comes_later_send_evenly_in_rounds() -> None:
    """What the first has measured, the whole line, must not have it grow the sooner; nor must the other, whose few packets bring a long
    round trip down slowly, be lowered twice for one wait."""
    line, parts = 2.4 * MBIT, []
    for seed in (1, 2):
        first, second = together(line, (SHARE * line, LEAST_BYTES_PER_S), 300.0, seed)
        assert first + second > 0.7 * line * 100.0 * EXCHANGE_S / ROUND_S
        parts.append(second / first)
    assert mean(parts) > 0.7, parts


def test_two_who_once_had_a_fast_line_find_out_that_it_is_twenty_times_slower() -> None:
    """Each went on with a tenth of what it had, both in doubt at other times, and behind a full buffer for good."""
    slow = 1.0 * MBIT
    for seed in (1, 2):
        first, second, waits_s = played(
            lambda at: 20.0 * MBIT if at < 60.0 else slow, (1e6, 1e6), 300.0, seed, in_rounds=False
        )
        assert first + second > 0.8 * slow * 100.0
        assert 0.6 < second / first < 1.7
        assert waits_s < 0.04


def beside(others: Callable[[float], float], until: float) -> list[float]:
    """The rate after each minute of one peer, in parts of a line that all share by what each sends, as others send so many times what it carries."""
    control, line, rates, now = UploadControl(), 10.0 * MBIT, list[float](), 0.0
    while now < until:
        now += LOOK_S
        sent = control.rate + line * others(now)
        through = min(1.0, line / sent)
        control.take(
            int(control.rate * LOOK_S), int(control.rate * LOOK_S * through), BUFFER_S if sent > line else 0.0, now
        )
        if len(rates) < now // 60.0:
            rates.append(control.rate / line)
    return rates


def test_a_moment_in_which_many_send_does_not_take_its_tenth_from_a_peer_for_as_long_as_others_fill_the_line() -> None:
    """Of a tenth 0.4 came through once, and a seventh of it was left for hours."""
    for crowded_s in (15.0, 30.0, 40.0):
        rates = beside(lambda now: 0.0 if now < 60.0 else 2.5 if now < 60.0 + crowded_s else 1.0, 900.0)  # noqa: B023
        assert min(rates[4:]) > 0.03, crowded_s
        assert mean(rates[4:]) > 0.08, crowded_s
