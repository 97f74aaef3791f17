"""What the owner's directives say, who believes them, and when they apply."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from dilocox_peer.peer.planning.plan import PlanBounds
from dilocox_peer.peer.planning.timetable import Timetable
from dilocox_peer.peer.rounds.chain import Chain, Place
from dilocox_peer.peer.rounds.directing import PATIENT_FOR, Authority, Directing
from dilocox_peer.peer.rounds.schedule import Schedule, ends_run
from dilocox_peer.peer.steering import why_unwelcome
from dilocox_peer.types import PeerId, sha256
from dilocox_peer.wire.chain import Certificate, Plan, Value
from dilocox_peer.wire.declared import Parser, encode, replaced
from dilocox_peer.wire.directives import (
    MAX_DIRECTIVE_BYTES,
    MAX_SAID,
    Directive,
    lost_words,
    newest_first,
    read_directive,
    settled,
    sign_directive,
)
from dilocox_peer.wire.rounds import Directed, Message, Propose, decode_message, encode_message
from dilocox_peer.wire.versions import DIRECTIVE
from tests.certified_stage import MANIFEST

OWNER, A, B, C = (PeerId(name) for name in ("owner", "a", "b", "c"))
RUN = sha256(b"run")
PLAN = Plan("fp16", 0, 8)


def verify(peer: PeerId, message: bytes, signature: bytes) -> bool:
    return signature == sha256(peer.encode(), message)


AUTHORITY = Authority(OWNER, RUN, verify)


def said(number: int, **wants: object) -> Directive:
    unsigned = Directive(RUN, number, **wants)  # type: ignore[arg-type]
    return sign_directive(unsigned, lambda message: sha256(OWNER.encode(), message))


FULL = said(
    7,
    paused=True,
    stop_after=40,
    cool_rounds=5,
    total_steps=800,
    rate_permille=500,
    least_version="0.2",
    banned=(B, C),
    said="hello",
)
CARRIES = Propose(0, RUN, 1, 0, Value(FULL, 4, 3, 6, (), (A,), PLAN), b"s" * 72, ())


def place() -> Place:
    genesis = Place.genesis(0, sha256(b"genesis"), PLAN.next(), authority=AUTHORITY)
    return replace_roster(genesis, (A, B, C))


def replace_roster(genesis: Place, roster: tuple[PeerId, ...]) -> Place:
    return replace(genesis, roster=roster, voters=roster, view=1)


def test_a_value_without_a_directive_has_the_bytes_it_always_had() -> None:
    value = Value("round", 1, 1, 0, (), (A,), PLAN)
    assert encode(value)[:7] == b"\x98\xa5round"  # eight fields, the first of them the kind
    parser = Parser[Value](Value, "a value", 10_000)
    assert parser.read(encode(value)) == value
    with_one = Value(said(3), 1, 1, 0, (), (A,), PLAN)
    assert parser.read(encode(with_one)) == with_one
    assert (with_one.kind, with_one.directive) == ("round", said(3))
    assert with_one.digest() != value.digest()


def test_the_largest_directive_is_read_and_a_larger_one_refused() -> None:
    names = tuple(sorted(f"12D3KooW{number:044d}" for number in range(64)))
    largest = said(
        2**53,
        banned=names,
        said="\u20ac" * MAX_SAID,
        total_steps=2**31,
        stop_after=2**53,
        least_version="9999.9999.9999",
    )
    assert read_directive(largest.to_bytes()) == largest
    with pytest.raises(ValueError, match="at most"):
        read_directive(bytes(MAX_DIRECTIVE_BYTES + 1))


@pytest.mark.parametrize(
    ("wants", "match"),
    [
        ({"said": "two\nlines"}, "cannot be shown"),
        ({"said": "right to left \u202e"}, "cannot be shown"),
        ({"banned": ("b", "a")}, "in order"),
        ({"banned": ("a", "a")}, "in order"),
        ({"stop_after": 3, "cool_rounds": 4}, "cool-down"),
        ({"rate_permille": 0}, "rate_permille|>= 1"),
        ({"least_version": "1.x"}, "regex"),
        ({"said": "x" * (MAX_SAID + 1)}, "length"),
    ],
)
def test_what_nobody_may_say_is_refused(wants: dict[str, object], match: str) -> None:
    raw = encode((DIRECTIVE, RUN, 1, *_fields(wants)))
    with pytest.raises(ValueError, match=match):
        read_directive(raw)


def _fields(wants: dict[str, object]) -> list[object]:
    usual = Directive(RUN, 1)
    names = [name for name in usual.__struct_fields__ if name not in ("run", "number")]
    return [wants.get(name, getattr(usual, name)) for name in names]


def test_only_the_owners_signature_for_this_run_counts() -> None:
    directing = Directing(AUTHORITY)
    forged = replaced(said(1), paused=True)
    assert directing.hear(forged, None) == (False, "a directive that the run's owner has not signed")
    of_another = sign_directive(Directive(sha256(b"another"), 1), lambda message: sha256(OWNER.encode(), message))
    assert directing.hear(of_another, None) == (False, "a directive for another run")
    assert Directing(None).hear(said(1), None)[1] == "a directive in a run without an owner"
    assert directing.newest(None) is None
    for value in (forged, of_another):
        reason = place().why_not(place().round_value((), (A, B, C), directive=value), 1, 16)
        assert reason is not None


def test_the_higher_number_counts_and_an_old_one_replayed_is_nothing() -> None:
    directing = Directing(AUTHORITY)
    assert directing.hear(said(2), None) == (True, None)
    assert directing.hear(said(1), None) == (False, None)
    assert directing.hear(said(2), None) == (False, None)
    assert directing.newest(None) == said(2)
    assert directing.newest(said(5)) == said(5)
    assert directing.hear(said(5), said(5)) == (False, None)
    told, reason = directing.hear(said(5, paused=True), said(5))
    assert not told
    assert reason == "another directive 5 than the one known here, both signed by the run's owner"


def test_a_chain_takes_each_number_once_and_in_order() -> None:
    before = place()
    with_three = place_after(before, said(3))
    assert with_three.directed == 3
    for number in (1, 3):
        reason = with_three.why_not(with_three.round_value((), (A, B, C), directive=said(number)), 1, 16)
        assert reason == f"directive {number} after directive 3"
    assert with_three.why_not(with_three.round_value((), (A, B, C), directive=said(9)), 1, 16) is None


def test_nobody_who_is_banned_is_in_a_roster_from_the_certificate_that_says_so() -> None:
    before, ban = place(), said(1, banned=(B,))
    assert before.why_not(before.round_value((), (A, B, C)), 1, 16) is None
    assert "whom the run's owner has banned" in str(
        before.why_not(before.round_value((), (A, B, C), directive=ban), 1, 16)
    )
    after = place_after(before, ban, roster=(A, C))
    assert "banned" in str(after.why_not(after.round_value((), (A, C, B)), 1, 16))
    assert "banned" in str(after.why_not(after.view_change((B,)), 2, 16))
    again = place_after(after, said(2), roster=(A, C))
    assert again.why_not(again.round_value((), (A, C, B)), 1, 16) is None


def place_after(before: Place, directive: Directive, roster: tuple[PeerId, ...] = (A, B, C)) -> Place:
    return before.then(_certified(before, directive, roster))


def _certified(before: Place, directive: Directive | None, roster: tuple[PeerId, ...] = (A, B, C)) -> Certificate:
    value = before.round_value((), roster, directive=directive)
    return Certificate(0, before.head, 1, 0, value, ((A, b"x" * 9),))


def test_members_insist_on_a_directive_they_have_known_for_some_rounds() -> None:
    directing = Directing(AUTHORITY)
    directing.hear(said(4), None)
    assert directing.to_carry(None) == said(4)
    assert directing.why_withheld(None, None) is None
    for _ in range(PATIENT_FOR):
        directing.certified()
    assert "leaves out directive 4" in str(directing.why_withheld(None, None))
    assert "leaves out directive 4" in str(directing.why_withheld(said(3), None))
    assert directing.why_withheld(said(4, paused=True), None) is None  # another of the same number: as good
    assert directing.why_withheld(None, said(4)) is None


def test_each_directive_is_told_when_it_is_heard_and_when_it_applies() -> None:
    directing = Directing(AUTHORITY)
    directing.hear(said(1, said="hello"), None)
    [heard] = directing.news(None)
    assert "comes with one of the next rounds" in heard.line()
    assert directing.news(None) == []
    [applies] = directing.news(said(1, said="hello"))
    assert (
        applies.line() == "directive 1 of the run's owner applies: as the run's settings say; the owner says: \"hello\""
    )
    assert directing.news(said(1, said="hello")) == []


def chain_of(*directives: Directive | None, total_steps: int = 80) -> tuple[Chain, Schedule, PlanBounds]:
    genesis = place()
    chain = Chain(genesis)
    for directive in directives:
        chain.append(_certified(chain.place, directive))
    bounds = PlanBounds(total_steps=total_steps)
    return chain, Schedule(chain, bounds, PLAN), bounds


def test_training_goes_by_a_directive_from_the_round_after_next() -> None:
    _, schedule, _ = chain_of(None, None, said(1, rate_permille=500), None, None)
    assert [schedule.directive_for(number) for number in (3, 4)] == [None, None]
    assert schedule.directive_for(5) == schedule.directive_for(7) == said(1, rate_permille=500)


def test_a_stop_ends_the_run_after_its_round_and_not_before() -> None:
    stop = said(1, stop_after=4)
    for rounds, is_over in ((3, False), (4, True), (5, True)):
        chain, schedule, bounds = chain_of(stop, *[None] * (rounds - 1))
        assert schedule.is_over == is_over
        assert ends_run(chain, chain.height, bounds) == is_over
    _, schedule, _ = chain_of(stop, None)
    assert (schedule.last_round, schedule.expected_rounds) == (4, 4)


def test_a_run_can_be_made_longer_before_its_end() -> None:
    chain, schedule, bounds = chain_of(said(1, total_steps=160), *[None] * 9)
    assert schedule.total_steps == 160
    assert not schedule.is_over
    assert not ends_run(chain, chain.height, bounds)
    assert schedule.expected_rounds == 20
    chain, schedule, bounds = chain_of(*[None] * 10)
    assert schedule.is_over
    assert ends_run(chain, chain.height, bounds)


def test_the_learning_rate_is_scaled_and_cools_down_to_nothing_at_the_stop() -> None:
    directive = said(1, rate_permille=500, stop_after=20, cool_rounds=10)
    assert directive.rate(10, 1.0) == 0.5
    assert directive.rate(11, 0.0) == 0.5
    assert directive.rate(13, 0.5) == pytest.approx(0.5 * (1 - math.sqrt(0.25)))
    assert directive.rate(20, 1.0) == 0.0
    assert directive.rate(21, 0.5) == 0.0


def test_a_timetable_holds_and_scales_the_rounds_it_learns_of() -> None:
    timetable = Timetable(MANIFEST)
    paused = said(1, paused=True, rate_permille=2000)
    total = MANIFEST.rounds.total * MANIFEST.rounds.inner_steps
    timetable.learn_directives({3: None, 4: paused}, total, is_lifted=False)
    assert [timetable.is_held(number) for number in (2, 3, 4, 5)] == [False, False, True, True]
    assert [timetable.rate(number, 0.5) for number in (3, 4)] == [1.0, 2.0]
    timetable.learn_directives({3: None, 4: paused}, total, is_lifted=True)
    assert not timetable.is_held(4), "a run that is paused makes no certificate that could say go on"
    timetable.learn_directives({5: said(2, stop_after=6)}, 2 * total, is_lifted=True)
    assert [timetable.is_after_last(number) for number in (6, 7)] == [False, True]


def test_a_program_that_is_banned_or_too_old_is_told_why() -> None:
    assert why_unwelcome(said(1), A) is None
    banned = str(why_unwelcome(said(1, banned=(A,)), A))
    assert "banned this peer" in banned
    assert "ask the owner" in banned
    for least, version, is_old in (
        ("0.2", "0.1.9", True),
        ("0.2", "0.2.0", False),
        ("1", "0.9", True),
        ("", "0.0.1", False),
    ):
        reason = why_unwelcome(said(1, least_version=least), A, version)
        assert (reason is not None) == is_old


def test_what_carries_a_directive_has_the_bytes_it_had() -> None:
    """In this version: golden/directed.txt was written when there were directives for the first time."""
    lines = (Path(__file__).parent / "golden" / "directed.txt").read_text().splitlines()
    messages: tuple[Message, ...] = (Directed(0, RUN, 1, FULL), CARRIES)
    for line, message in zip(lines, messages, strict=True):
        raw = bytes.fromhex(line)
        assert encode_message(message) == raw
        assert decode_message(raw, A) == message


def sign(message: bytes) -> bytes:
    return sha256(OWNER.encode(), message)


def test_of_two_words_with_one_number_everybody_takes_the_same_and_the_next_number_says_it_again() -> None:
    ban, hello, stop = said(3, banned=(B,)), said(3, said="hello", paused=True), said(3, stop_after=9)
    old = said(2, banned=(A, B, C))
    for order in ([ban, hello, stop, old, ban], [old, stop, hello, ban]):
        newest = newest_first(order)
        assert newest[0] == ban, "whichever bans most"
        assert len(newest) == 3
        assert settled(newest, sign) == said(4, banned=(B,))
    assert newest_first([stop, hello]) == newest_first([hello, stop])
    assert newest_first([ban, settled(newest, sign), hello]) == [said(4, banned=(B,))], "and then there is one"
    assert settled([old], sign) is old
    assert newest_first([]) == []


def test_what_is_lost_is_told_so_that_it_can_be_said_anew() -> None:
    ban, other = said(3, banned=(B,), said="hello"), said(3, banned=(C,), paused=True, said="hello")
    assert lost_words(other, ban) == "paused, 1 banned, banned c"
    assert lost_words(said(3, banned=(B,), said="bye"), ban) == '1 banned, "bye"'
