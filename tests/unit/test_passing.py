"""Messages between members without a path to one another: who hands them on, whom they count as from, and what hostile ones gain."""

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from dilocox_peer.contract import Note, Tick
from dilocox_peer.events import MemberDoubted, MessageRefused
from dilocox_peer.events_of_reach import HeardThrough
from dilocox_peer.peer.rounds.contract import (
    Action,
    BlobMissing,
    FetchBlob,
    PeerRefused,
    PeerUnreached,
    Received,
    Send,
    StateInstalled,
)
from dilocox_peer.peer.rounds.durable import Durable, Votes
from dilocox_peer.peer.rounds.holdings import Holdings
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.rounds.membership import Members
from dilocox_peer.peer.rounds.passing import BURST_BYTES, ENVELOPE_BYTES, WINDOW, Passing
from dilocox_peer.types import PeerId, sha256
from dilocox_peer.wire.chain import Certificate, Entry, Plan, Report, Value, offer_statement
from dilocox_peer.wire.declared import replaced
from dilocox_peer.wire.rounds import (
    MAX_PASSED_BYTES,
    Cert,
    Heartbeat,
    Leave,
    Message,
    Nack,
    Offer,
    Passed,
    decode_message,
    encode_message,
    passed_beat,
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
        self.feed(Tick())
        self.feed(StateInstalled(START.head, sha256(b"state")))  # from our disk

    def feed(self, event: object, *, later: float = 0.0) -> list[Action]:
        self.now += later
        return self.machine.handle(event, self.now)  # type: ignore[arg-type]

    def hears(self, sender: PeerId, message: Message | None = None) -> list[Action]:
        return self.feed(Received(sender, message or beat()))


def beat(incarnation: int = 7) -> Heartbeat:
    return Heartbeat(0, START.head, 1, incarnation, 1, 0, 0, 1, 0, True, b"")


def envelope(origin: PeerId, to: PeerId, number: int = 1, message: Message | None = None) -> Passed:
    raw = encode_message(message or beat())
    return Passed(
        0, START.head, 1, origin, to, number, raw, sign_as(origin)(passed_statement(GENESIS, origin, to, number, raw))
    )


def sent(actions: list[Action], kind: type) -> list[tuple[PeerId, Message]]:
    return [(each.to, each.message) for each in actions if isinstance(each, Send) and isinstance(each.message, kind)]


def fetches(actions: list[Action]) -> list[FetchBlob]:
    return [each for each in actions if isinstance(each, FetchBlob)]


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
    assert verify(A, passed_statement(GENESIS, A, B, passed.number, passed.raw), passed.signature)
    assert isinstance(decode_message(passed.raw, A), Heartbeat)
    table.hears(B)
    assert not sent(table.feed(Tick(), later=1.2), Passed), "it was heard directly"


def test_a_member_that_is_heard_is_slow_and_not_cut_off() -> None:
    table = Table(A)
    table.hears(X)
    table.hears(B)
    table.feed(PeerUnreached(B))
    assert not sent(table.feed(Tick(), later=1.2), Passed)


def test_nothing_goes_by_members_that_are_not_heard_or_for_peers_that_are_none() -> None:
    table = Table(A)
    table.hears(OUTSIDER)
    table.now += TIMING.alive_s + 0.1
    table.feed(PeerUnreached(B))
    table.feed(PeerUnreached(OUTSIDER))
    assert not sent(table.feed(Tick(), later=1.2), Passed), "nobody is heard"
    told = set()
    for _ in range(6):  # every fourth beat goes to those that are not heard
        table.hears(X)
        told |= {
            message.to for _, message in sent(table.feed(Tick(), later=1.2), Passed) if isinstance(message, Passed)
        }
    assert told == {B}


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
    assert sent(table.hears(A, envelope(A, B)), Passed), "of its origin"
    actions = table.hears(B, envelope(A, B, 2))
    assert not sent(actions, Passed), "of another"
    assert refused(actions) == [(B, f"passes on for {A} what is not for this peer")]
    assert not sent(table.hears(A, envelope(OUTSIDER, B, 3)), Passed), "of nobody that is a member"


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
    nonsense = Passed(0, START.head, 1, A, B, 1, raw, sign_as(A)(passed_statement(GENESIS, A, B, 1, raw)))
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
    assert 0 < through <= BURST_BYTES / (size + ENVELOPE_BYTES) + 1 < 399
    table.now += 60.0
    small = [len(sent(table.hears(A, envelope(A, B, number)), Passed)) for number in range(1000, 3000)]
    assert sum(small) <= BURST_BYTES / ENVELOPE_BYTES, "however small they are"


def alone(me: PeerId, heard: list[Message]) -> tuple[Passing, Members]:
    """Passing of a member that hears x, and nothing of b or a."""
    members = Members(me, TIMING)
    for peer in ROSTER:
        members.add(peer)
    members.linked(X, 0.0)
    owner = SimpleNamespace(peer=me, incarnation=1000, sign=sign_as(me), verify=verify)

    def hear(_peer: PeerId, message: Message) -> list[Action]:
        heard.append(message)
        return []

    return Passing(cast("Any", owner), GENESIS, members, hear=hear, refuse=lambda *_: []), members


def test_what_is_too_large_for_an_envelope_is_not_passed_on() -> None:
    passing, members = alone(A, [])
    members.cut(B, 0.0)
    many = tuple((PeerId(f"{number:060}"), b"s" * 64) for number in range(600))
    page = Cert(0, START.head, 1, replaced(START, signatures=many))
    assert len(encode_message(page)) > MAX_PASSED_BYTES
    actions = passing.through([Send(B, page), Send(B, beat())], ROSTER, 1.0)
    assert [type(each.message) for each in actions if isinstance(each, Send)] == [Cert, Heartbeat, Passed]


def test_envelopes_that_are_opened_have_a_budget_too() -> None:
    """However many hand them on: each costs the check of a signature."""
    heard: list[Message] = []
    passing, _ = alone(B, heard)
    for number in range(1, 2000):
        passing.receive(X, envelope(A, B, number), ROSTER, 1.0)
    assert 0 < len(heard) <= BURST_BYTES / ENVELOPE_BYTES


def test_nobody_uses_up_what_another_member_may_say() -> None:
    heard: list[Message] = []
    passing, _ = alone(B, heard)
    other = PeerId("y")
    for number in range(1, 2000):
        forged = replaced(envelope(A, B, number), signature=sign_as(X)(b"junk"))
        passing.receive(X, forged, (*ROSTER, other), 1.0)
    passing.receive(other, envelope(A, B, 5000), (*ROSTER, other), 1.0)
    assert len(heard) == 1


def test_of_heartbeats_in_envelopes_the_newest_is_known_by_the_same() -> None:
    assert passed_beat(envelope(A, B, 1)) == passed_beat(envelope(A, B, 2)) != b""
    assert passed_beat(envelope(A, B, 1)) != passed_beat(envelope(A, X, 1))
    assert passed_beat(envelope(A, B, 1, Leave(0, START.head, 1, 9))) == passed_beat(beat()) == b""


def test_a_contribution_that_nobody_has_for_hours_is_asked_for_seldom() -> None:
    holdings, blob, now = Holdings(TIMING), sha256(b"blob"), 0.0
    for _ in range(5000):
        assert holdings.want(blob, [X], round_number=1, now=now, early=True)
        assert not holdings.missing(blob, now), "nobody's failure"
        now += TIMING.blob_retry_s
    assert holdings.times_early(blob) == 5000


def test_a_contribution_of_a_member_that_is_cut_off_is_asked_for_until_somebody_has_it() -> None:
    table = Table(B)
    table.hears(X)
    entry = Entry(A, 7, sha256(b"blob"), 100, 8, sha256(b"state"), Report())
    offer = Offer(0, START.head, 1, entry, sign_as(A)(offer_statement(0, START.head, entry)))
    [fetch] = fetches(table.hears(X, envelope(A, B, 1, offer)))
    assert fetch.sources == (X,), "and not of its author, to whom there is no path"
    again, doubted, is_under_way = 0, list[Action](), True
    for _ in range(200):
        actions = [*(table.feed(BlobMissing(entry.blob)) if is_under_way else []), *table.hears(X)]
        actions += table.feed(Tick(), later=0.1)
        is_under_way = bool(fetches(actions))
        again += is_under_way
        doubted += [each for each in actions if isinstance(each, Note) and isinstance(each.event, MemberDoubted)]
    assert 10 <= again <= 30, "20 s, ever more seldom: every 0.25 s at first, every second or two at last"
    assert not doubted, "that nobody has it yet is nobody's fault"
    table.feed(BlobMissing(entry.blob))
    table.hears(A)
    table.now += 2 * TIMING.blob_retry_s
    [fetch] = fetches(table.hears(A, offer))
    assert fetch.sources == (A,), "it is heard again"
