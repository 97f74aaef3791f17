"""Bodies leave in order, each when the limits let it, and not when nobody wants it any more."""

from dilocox_peer.peer.links.body_queue import BodyQueue
from dilocox_peer.types import PeerId
from dilocox_peer.wire.hops import Grad, MicroBatchId, Step

UP, DOWN, GONE = PeerId("up"), PeerId("down"), PeerId("gone")
LINKED = {UP, DOWN}
BODY = bytes(10)


def step(index: int) -> Step:
    return Step(*MicroBatchId(UP, 1, index), index, 1, 4)


def grad(index: int) -> Grad:
    return Grad(*MicroBatchId(UP, 1, index), index, 1.0, 0)


class Limits:
    """A queue whose bodies wait a second each, and what it asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.queue = BodyQueue(self.pace("out", 1.0), self.pace("in", 0.5), answer_bytes=7)

    def pace(self, way: str, seconds: float):
        def ask(num_bytes: int) -> float:
            self.asked.append((way, num_bytes))
            return seconds

        return ask

    def add(self, *messages: Step | Grad, peer: PeerId = DOWN) -> None:
        for message in messages:
            self.queue.add(peer, message, BODY)

    def take(self, now: float) -> Step | Grad | None:
        taken = self.queue.take(now, LINKED)
        return None if taken is None else taken[1]


def test_each_asks_once_when_it_is_first_and_goes_when_its_time_has_come():
    limits = Limits()
    limits.add(step(0), grad(1))
    assert limits.queue.opens_at <= 0.0
    assert [limits.take(now) for now in (0.0, 0.5, 0.9)] == [None] * 3
    assert limits.queue.opens_at == 1.0
    assert limits.asked == [("in", 7), ("out", 10)]
    assert [limits.take(now) for now in (1.0, 1.5, 2.5)] == [step(0), None, grad(1)]
    assert limits.asked == [("in", 7), ("out", 10), ("out", 10)]
    assert limits.queue.opens_at == float("inf")


def test_what_is_left_of_a_wait_goes_by_the_rate_of_now():
    """At the rate that a peer begins with, 4 MB wait 32 s; after three of them the line was known to carry thirty times as much."""
    rate: list[float | None] = [10.0]
    queue = BodyQueue(lambda num_bytes: 8 * num_bytes / 10, lambda _: 5.0, answer_bytes=1, rate=lambda: rate[0])
    queue.add(DOWN, grad(0), BODY)
    queue.add(DOWN, grad(1), BODY)
    queue.add(DOWN, step(2), BODY)
    assert queue.take(0.0, LINKED) is None
    assert queue.opens_at == 8.0
    rate[0] = 60.0
    assert queue.take(2.0, LINKED) is None
    assert queue.opens_at == 3.0
    assert queue.take(3.0, LINKED) is not None
    assert queue.take(3.0, LINKED) is None
    rate[0] = 30.0
    assert queue.take(5.0, LINKED) is None
    assert queue.opens_at == 17.0, "slower too"
    rate[0] = None
    assert queue.take(5.0, LINKED) is not None
    rate[0] = 10.0
    assert queue.take(6.0, LINKED) is None
    rate[0] = None
    assert queue.take(10.0, LINKED) is None, "its answer comes in as fast as before"
    assert queue.take(11.0, LINKED) is not None


def test_what_stays_at_home_waits_for_no_upload():
    limits = Limits()
    limits.add(step(0), grad(1))
    limits.queue.add(UP, grad(2), BODY, at_home=True)
    limits.queue.add(UP, step(3), BODY, at_home=True)
    assert limits.take(0.0) == grad(2)
    assert limits.asked == []
    assert limits.take(0.0) is None
    assert limits.asked == [("in", 7), ("in", 7), ("out", 10)], "its answer has to come in all the same"
    assert limits.queue.opens_at == 0.5
    assert limits.take(0.5) == step(3)
    limits.queue.add(DOWN, step(0), BODY, at_home=True)  # its link is another one now
    assert [limits.take(now) for now in (1.0, 1.5, 2.0)] == [None, step(0), grad(1)]


def test_what_is_dropped_leaves_its_place_to_the_next_of_its_kind():
    limits = Limits()
    limits.add(step(0), step(1), grad(2))
    assert limits.take(0.0) is None
    limits.queue.drop(DOWN, step(0).id, 0)
    assert limits.take(1.0) == step(1)
    assert limits.asked == [("in", 7), ("out", 10)]
    limits.add(step(3))
    assert limits.take(1.0) is None
    limits.queue.drop(DOWN, grad(2).id, 2)
    assert [limits.take(now) for now in (2.0, 2.9, 3.0)] == [None, None, step(3)]
    assert limits.asked.count(("in", 7)) == 2


def test_a_place_outlives_an_empty_queue_that_asks_for_no_attention():
    limits = Limits()
    limits.add(step(0))
    assert limits.take(0.0) is None
    limits.queue.drop(DOWN, step(0).id, 0)
    assert limits.take(5.0) is None
    assert limits.queue.opens_at == float("inf")
    limits.add(step(1))
    assert limits.take(5.0) == step(1)


def test_other_calls_are_not_dropped():
    limits = Limits()
    limits.add(step(0), step(1))
    for peer, id_, call in ((UP, step(0).id, 0), (DOWN, step(1).id, 0), (DOWN, step(0).id, 1)):
        limits.queue.drop(peer, id_, call)
    assert [limits.take(now) for now in (0.0, 1.0, 1.0, 2.0)] == [None, step(0), None, step(1)]


def test_an_answer_asked_for_again_while_it_waits_is_sent_once():
    limits = Limits()
    limits.add(grad(0), grad(1), grad(0))
    assert [limits.take(now) for now in (0.0, 1.0, 1.0, 2.0, 9.0)] == [None, grad(0), None, grad(1), None]


def test_bodies_of_peers_that_are_gone_wait_for_nothing():
    limits = Limits()
    limits.add(step(0), peer=GONE)
    assert limits.take(0.0) is None
    assert limits.asked == []
    assert limits.queue.opens_at == float("inf")
