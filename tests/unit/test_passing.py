"""Messages between members without a path to one another: who hands them on, whom they count as from, and what hostile ones gain."""

import random
from dataclasses import dataclass, field

from dilocox_peer.contract import Note, Tick
from dilocox_peer.events import MessageRefused
from dilocox_peer.events_of_reach import HeardThrough
from dilocox_peer.peer.rounds.contract import Action, PeerRefused, PeerUnreached, Received, Send, StateComputed
from dilocox_peer.peer.rounds.durable import Durable, Votes
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.rounds.passing import BURST_BYTES, WINDOW
from dilocox_peer.types import PeerId, sha256
from dilocox_peer.wire.chain import Certificate, Plan, Value
from dilocox_peer.wire.declared import replaced
from dilocox_peer.wire.rounds import (
    MAX_PASSED_BYTES,
    Heartbeat,
    Leave,
    Message,
    Nack,
    Passed,
    decode_message,
    encode_message,
    passed_statement,
)
from tests.sim.world import TIMING, sign_as, verify

GENESIS = sha256(b"genesis")
PLAN = Plan("fp16", 0, 8)
A, B, X, OUTSIDER = PeerId("a"), PeerId("b"), PeerId("x"), PeerId("outsider")
ROSTER = (A, B, X)
START = Certificate(0, GENESIS, 1, 0, Value("epoch", 1, 0, 0, (), ROSTER, PLAN.next()), ())


@dataclass
class Table:
    """One machine of a stage of three, and what it does. linked: who talks with it directly."""

    me: PeerId
    now: float = 0.0
    machine: RoundMachine = field(init=False)

    def __post_init__(self) -> None:
        durable = Durable(0, (START,), Votes(START.head))
        self.machine = RoundMachine(
            me=self.me, incarnation=1000, stage=0, genesis=GENESIS, timing=TIMING, sign=sign_as(self.me), verify=verify,
            rng=random.Random(0), now=0.0, plan=PLAN, start_peers=1, max_peers=8, durable=durable, stored_states={START.head},
        )  # fmt: skip
        self.feed(StateComputed(START.head, sha256(b"state")))

    def feed(self, event: object, *, later: float = 0.0) -> list[Action]:
        self.now += later
        return self.machine.handle(event, self.now)  # type: ignore[arg-type]

    def hears(self, sender: PeerId, message: Message | None = None) -> list[Action]:
        return self.feed(Received(sender, message or beat()))


def beat(incarnation: int = 7) -> Heartbeat:
    return Heartbeat(0, START.head, 1, incarnation, 1, 0, 0, 1, 0, True, b"")


def envelope(origin: PeerId, to: PeerId, number: int = 1, message: Message | None = None) -> Passed:
    raw = encode_message(message or beat())
    return Passed(0, START.head, 1, origin, to, number, raw, sign_as(origin)(passed_statement(origin, to, number, raw)))


def sent(actions: list[Action], kind: type) -> list[tuple[PeerId, Message]]:
    return [(each.to, each.message) for each in actions if isinstance(each, Send) and isinstance(each.message, kind)]


def refused(actions: list[Action]) -> list[tuple[PeerId, str]]:
    events = [each.event for each in actions if isinstance(each, Note)]
    return [(each.peer, each.reason) for each in events if isinstance(each, MessageRefused)]


def test_what_goes_to_a_member_that_cannot_be_reached_goes_by_another_too() -> None:
    table = Table(A)
    table.hears(X)
    assert not sent(table.feed(Tick(), later=1.2), Passed)
    table.feed(PeerUnreached(B))
    table.hears(X)
    actions = table.feed(Tick(), later=1.2)
    assert (B, Heartbeat) in [(to, type(message)) for to, message in sent(actions, Heartbeat)], "a path may be back"
    [(to, passed)] = sent(actions, Passed)
    assert to == X
    assert isinstance(passed, Passed)
    assert (passed.origin, passed.to) == (A, B)
    assert verify(A, passed_statement(A, B, passed.number, passed.raw), passed.signature)
    assert isinstance(decode_message(passed.raw, A), Heartbeat)
    table.hears(B)
    assert not sent(table.feed(Tick(), later=1.2), Passed), "it was heard directly"


def test_nothing_goes_by_members_that_are_not_heard_or_for_peers_that_are_none() -> None:
    table = Table(A)
    table.feed(PeerUnreached(B))
    assert not sent(table.feed(Tick(), later=1.2), Passed)
    table.hears(OUTSIDER)
    table.hears(X)
    table.feed(PeerUnreached(OUTSIDER))
    told = {message.to for _, message in sent(table.feed(Tick(), later=1.2), Passed) if isinstance(message, Passed)}
    assert told <= {B}


def test_a_member_hands_on_to_whom_it_hears_and_once() -> None:
    table = Table(X)
    table.hears(A)
    assert not sent(table.hears(A, envelope(A, B)), Passed), "nobody hears b"
    table.hears(B)
    original = envelope(A, B)
    assert sent(table.hears(A, original), Passed) == [(B, original)]
    forged = replaced(original, raw=encode_message(Leave(0, START.head, 1, 9)))
    table.now += 2.0
    actions = table.hears(A, forged)
    assert not sent(actions, Passed)
    assert refused(actions) == [(A, "wants passed on what it has not signed")]


def test_envelopes_do_not_go_through_two() -> None:
    table = Table(X)
    table.hears(A)
    table.hears(B)
    by_another = envelope(PeerId("c"), B)
    assert not sent(table.hears(A, by_another), Passed), "no member"
    fourth = Table(B)
    fourth.hears(X)
    actions = fourth.hears(X, envelope(A, X))
    assert not sent(actions, Passed)
    assert refused(actions) == [(X, f"passes on for {A} what is not for this peer")]


def test_what_is_passed_on_counts_as_its_origin_says_it() -> None:
    table = Table(B)
    table.hears(X)
    actions = table.hears(X, envelope(A, B))
    assert table.machine.alive(table.now) == {A, B, X}
    assert table.machine.passed_on == {A}
    assert [each.event for each in actions if isinstance(each, Note) and isinstance(each.event, HeardThrough)] == [
        HeardThrough(A, X)
    ]
    answers = table.feed(Tick(), later=1.2)
    assert [to for to, _ in sent(answers, Passed)] == [X], "by the same way, before a message of ours has failed"
    table.feed(PeerRefused(A))
    assert A in table.machine.alive(table.now), "a router refuses us; its process lives"
    table.feed(Tick(), later=TIMING.alive_s + 0.1)
    assert A not in table.machine.alive(table.now)


def test_nobody_speaks_for_another() -> None:
    table = Table(B)
    table.hears(X)
    forged = replaced(envelope(A, B), signature=sign_as(X)(b"whatever"))
    actions = table.hears(X, forged)
    assert refused(actions) == [(X, f"passes on what {A} has not signed")]
    table.hears(X, envelope(A, X, 3))
    elsewhere = replaced(envelope(A, X, 4), to=B)
    table.hears(X, elsewhere)
    assert A not in table.machine.alive(table.now), "it was signed for another"
    table.hears(OUTSIDER, envelope(A, B, 5))
    assert A not in table.machine.alive(table.now), "a stranger is no member"
    table.hears(X, envelope(OUTSIDER, B))
    assert OUTSIDER not in table.machine.alive(table.now)


def test_nothing_counts_twice_and_nothing_old() -> None:
    table = Table(B)
    table.hears(X)
    table.hears(X, envelope(A, B, WINDOW + 10))
    table.now += TIMING.alive_s + 0.1
    table.hears(X)
    for number in (WINDOW + 10, 10):
        table.hears(X, envelope(A, B, number))
        assert A not in table.machine.alive(table.now)
    table.hears(X, envelope(A, B, 11))
    assert A in table.machine.alive(table.now), "late, by a slower way"


def test_what_is_within_is_read_like_any_message() -> None:
    table = Table(B)
    table.hears(X)
    raw = b"\x00" * 40
    nonsense = Passed(0, START.head, 1, A, B, 1, raw, sign_as(A)(passed_statement(A, B, 1, raw)))
    [(blamed, _)] = refused(table.hears(X, nonsense))
    assert blamed == A, "who signed it"
    table.now += 2.0
    [(blamed, reason)] = refused(table.hears(X, envelope(A, B, 2, envelope(A, B, 3))))
    assert (blamed, reason) == (A, "an envelope within an envelope")
    assert A not in table.machine.alive(table.now)


def test_a_member_is_passed_on_for_within_a_budget_and_large_messages_not_at_all() -> None:
    table = Table(X)
    table.hears(A)
    table.hears(B)
    large = Nack(0, START.head, 1, 0, 0, tuple(sha256(bytes([index])) for index in range(64)))
    size = len(encode_message(large))
    through = sum(len(sent(table.hears(A, envelope(A, B, number, large)), Passed)) for number in range(1, 400))
    assert 0 < through <= BURST_BYTES / size + 1 < 399
    assert MAX_PASSED_BYTES > 25_000
