"""What is on its way to a peer, over lines of any speed: they are kept busy, and no message waits long behind it."""

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from dilocox_peer.network.flow import LEAST_BYTES, START_BYTES, TRICKLE_S, URGENT_S, Flow, Flows, Uplink
from dilocox_peer.types import PeerId


@dataclass
class Line:
    """A first-in first-out line; what is acknowledged is heard there_and_back_s later. sent: of each flow; waits: of what was sent."""

    bytes_per_s: float
    there_and_back_s: float
    flows: Sequence[Flow]
    jitter_s: float = 0.0
    late_s: float = 0.0  # two of three answers, at most
    sent: list[int] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    def run(self, seconds: float, *, measured_from: float) -> None:
        rng = random.Random(1)
        free_at = now = 0.0
        answers: list[tuple[float, int, int, float]] = []
        self.sent = [0] * len(self.flows)
        while now < seconds:
            for which, flow in enumerate(self.flows):
                while flow.may_send(flow.piece_bytes, now, of_stream=flow.in_flight):
                    size = flow.piece_bytes
                    flow.sent(size, now)
                    free_at = max(free_at, now) + size / self.bytes_per_s
                    late = self.there_and_back_s + self.jitter_s * rng.random()
                    late += self.late_s * rng.random() if rng.random() < 2 / 3 else 0.0
                    heapq.heappush(answers, (free_at + late, which, size, now))
                    if now >= measured_from:
                        self.sent[which] += size
                        self.waits.append(free_at - now)
            now, which, size, sent_at = heapq.heappop(answers)
            self.flows[which].acknowledged(size, now - sent_at, now)


def urgent(uplink: Uplink | None = None) -> Flow:
    return Flow(uplink or Uplink(), is_urgent=True)


def background(uplink: Uplink | None = None) -> Flow:
    return Flow(uplink or Uplink(), is_urgent=False)


@pytest.mark.parametrize("mbit", [0.2, 2.3, 20.0, 100.0])
@pytest.mark.parametrize("rtt_s", [0.002, 0.05, 0.3])
def test_a_line_is_busy_and_its_queue_short(mbit: float, rtt_s: float) -> None:
    line = Line(mbit / 8 * 1e6, rtt_s, [urgent()], jitter_s=0.01)
    line.run(60.0, measured_from=30.0)
    assert line.sent[0] > 0.9 * 30.0 * line.bytes_per_s
    assert max(line.waits) < 2 * URGENT_S + 2 * LEAST_BYTES / line.bytes_per_s, "so long would a heartbeat wait"


def test_what_no_round_waits_for_gives_way() -> None:
    line = Line(2.3 / 8 * 1e6, 0.02, [background(), urgent()])
    line.run(60.0, measured_from=20.0)
    rest, needed = line.sent
    assert needed > 4 * rest
    alone = Line(2.3 / 8 * 1e6, 0.02, [background()])
    alone.run(60.0, measured_from=20.0)
    assert alone.sent[0] > 0.9 * 40.0 * alone.bytes_per_s


@pytest.mark.parametrize("flow", ["urgent", "background"])
def test_a_computer_that_is_busy_is_no_slow_line(flow: str) -> None:
    """Two of three answers come late, as their tasks wait for a processor."""
    line = Line(20 / 8 * 1e6, 0.02, [urgent() if flow == "urgent" else background()], late_s=0.2)
    line.run(30.0, measured_from=10.0)
    assert line.sent[0] > 0.9 * 20.0 * line.bytes_per_s


def test_flows_to_several_peers_share_a_line_with_one_short_queue() -> None:
    line = Line(2.3 / 8 * 1e6, 0.02, [urgent() for _ in range(4)])
    line.run(120.0, measured_from=60.0)
    assert sum(line.sent) > 0.9 * 60.0 * line.bytes_per_s
    assert min(line.sent) > 0.05 * sum(line.sent), "they finish one after another; none waits for nothing"
    assert max(line.waits) < 4 * URGENT_S


def test_a_window_that_limits_nothing_does_not_grow() -> None:
    flow = urgent()
    for second in range(100):
        assert flow.may_send(1000, float(second), of_stream=0)
        flow.sent(1000, float(second))
        flow.acknowledged(1000, 0.01, float(second))
    assert flow.window == START_BYTES


def test_what_is_lost_with_its_stream_takes_no_room() -> None:
    flow = urgent()
    flow.opened()
    flow.sent(flow.window, 0.0)
    assert not flow.may_send(1, 0.0, of_stream=flow.window)
    assert flow.may_send(1, 0.0, of_stream=0), "one piece of each stream may always be on its way"
    flow.closed(flow.window)
    assert flow.may_send(flow.window, 0.0, of_stream=1)


def test_beside_what_is_urgent_the_rest_takes_a_tenth_of_it() -> None:
    """Also where the line carries so little that the least windows fill it."""
    uplink = Uplink(lambda: 0.0)  # all that it carries is urgent
    line = Line(0.2 / 8 * 1e6, 0.02, [background(uplink), urgent(uplink)])
    line.flows[1].opened()
    line.run(120.0, measured_from=20.0)
    rest, needed = line.sent
    assert 0.05 * needed < rest < 0.15 * needed
    assert max(line.waits) < 1.5


def test_the_rest_is_not_silent_while_what_is_urgent_stands_still() -> None:
    uplink = Uplink(lambda: 0.0)  # all that it carries is urgent
    rest, needed = background(uplink), urgent(uplink)
    needed.opened()
    rest.sent(100, 10.0)
    assert not rest.may_send(100, 10.0 + TRICKLE_S / 2, of_stream=0)
    assert rest.may_send(100, 10.0 + TRICKLE_S, of_stream=0)
    needed.closed(0)
    assert rest.may_send(100, 10.1, of_stream=0)


@pytest.mark.parametrize("mbit", [1.0, 2.3, 5.0])
def test_a_line_that_nobody_has_measured_is_not_taken_for_a_fast_one(mbit: float) -> None:
    """Four newcomers' states left what a round waits for 0.06 to 0.34 of it."""
    uplink = Uplink()
    line = Line(mbit / 8 * 1e6, 0.03, [urgent(uplink), *(background(uplink) for _ in range(4))], jitter_s=0.01)
    for flow in line.flows:
        flow.opened()
    line.run(90.0, measured_from=30.0)
    assert line.sent[0] > 0.85 * 60.0 * line.bytes_per_s


def test_a_member_that_reads_slowly_does_not_keep_the_line() -> None:
    """At 100 kB/s it left a newcomer's state 10 kB/s, of a line that stood idle; one that took 1 kB/s on purpose 3."""
    uplink = Uplink(lambda: 500_000.0)
    rest, needed = background(uplink), urgent(uplink)
    needed.opened()
    rest.opened()
    sent, now = 0, 0.0
    while now < 10.0:
        if round(now * 100) % 10 == 0:
            needed.sent(1000, now)
            needed.acknowledged(1000, 0.1, now)
        if rest.may_send(1000, now, of_stream=0):
            rest.sent(1000, now)
            rest.acknowledged(1000, 0.01, now)
            sent += 1000
        now += 0.002
    assert sent / 10.0 > 150_000


def test_what_is_urgent_and_fills_the_line_leaves_a_tenth() -> None:
    uplink = Uplink(lambda: 500_000.0)
    rest, needed = background(uplink), urgent(uplink)
    needed.opened()
    sent, now = 0, 0.0
    while now < 20.0:
        needed.sent(1000, now)
        if rest.may_send(1000, now, of_stream=0):
            rest.sent(1000, now)
            sent += 1000 if now > 5.0 else 0
        now += 0.002
    assert 0.08 * 500_000 < sent / 15.0 < 0.13 * 500_000


def test_flows_are_remembered_by_peer_and_bounded() -> None:
    flows = Flows()
    first = flows.to(PeerId("a"), is_urgent=True)
    assert flows.to(PeerId("a"), is_urgent=True) is first
    assert flows.to(PeerId("a"), is_urgent=False) is not first
    for number in range(2000):
        flows.to(PeerId(f"p{number}"), is_urgent=True)
    assert flows.to(PeerId("a"), is_urgent=True) is not first
