"""How much of others' asking is taken, whom it costs its place, and that nobody pays for another."""

import random
from collections.abc import Iterable

from dilocox_peer.invitation import place_of
from dilocox_peer.network.doorkeeper import (
    ALLOWED,
    BANNED_AT,
    CROWD,
    DAEMON_BYTES,
    FADE_PER_S,
    FIRST_BAN_S,
    LONGER,
    MAX_KNOWN,
    MAX_STRANGERS,
    MAX_STRANGERS_BY_RELAYS,
    MAX_STRANGERS_OF_PLACE,
    MOST_BAN_S,
    PLACE_BANNED_AT,
    POINTS,
    PROVE_S,
    SETTLING,
    Budgeted,
    Doorkeeper,
    Trespass,
)
from dilocox_peer.types import PeerId

ME, MEMBER, STRANGER = PeerId("me"), PeerId("member"), PeerId("stranger")
MESSAGE = (Budgeted.MESSAGES, 1.0)


def settled(now: float = 0.0) -> Doorkeeper:
    """Of a peer that is in a roster with another."""
    keeper = Doorkeeper(now)
    keeper.befriend({ME, MEMBER}.__contains__)
    keeper.set_settled(lambda: True)
    return keeper


def names(count: int, of: str = "stranger") -> list[PeerId]:
    return [PeerId(f"{of} {number}") for number in range(count)]


def connect(keeper: Doorkeeper, peers: Iterable[PeerId], now: float, host: str = "127.0.0.1") -> dict[PeerId, str]:
    return keeper.seen([(peer, [host]) for peer in peers], now)


def taken(keeper: Doorkeeper, peer: PeerId, count: int, now: float) -> int:
    return sum(keeper.refusal(peer, now, MESSAGE) is None for _ in range(count))


# -- budgets ----------------------------------------------------------------------------------------------------------


def test_a_member_and_a_stranger_have_what_was_allowed_them_and_no_more() -> None:
    keeper, allowed = settled(), ALLOWED[Budgeted.MESSAGES]
    assert taken(keeper, MEMBER, 1000, 0.0) == allowed.member.burst
    assert taken(keeper, STRANGER, 1000, 0.0) == allowed.stranger.burst
    assert taken(keeper, MEMBER, 1000, 1.0) == allowed.member.per_s


def test_fifty_names_of_one_place_get_no_more_than_it() -> None:
    keeper, allowed = settled(), ALLOWED[Budgeted.MESSAGES]
    crowd = names(50)
    connect(keeper, crowd, 0.0, host="8.8.4.4")
    assert sum(taken(keeper, peer, 50, 0.0) for peer in crowd) == allowed.place.burst


def test_strangers_of_everywhere_together_leave_members_alone() -> None:
    keeper, allowed = settled(), ALLOWED[Budgeted.MESSAGES]
    crowd = names(200)
    keeper.seen([(peer, [f"8.8.{number}.1"]) for number, peer in enumerate(crowd)], 0.0)
    assert sum(taken(keeper, peer, 50, 0.0) for peer in crowd) == allowed.strangers.burst
    assert taken(keeper, MEMBER, 100, 0.0) == 100
    assert not keeper.new_bans(), "what they have in common and is spent is nobody's doing"


def test_a_newcomer_that_knows_nobody_takes_a_long_chain_of_one_peer() -> None:
    """It has no roster yet: who sends it pages is a stranger to it."""
    keeper = Doorkeeper(0.0)
    keeper.befriend(lambda _peer: False)
    page = (MESSAGE, (Budgeted.MESSAGE_BYTES, 1024.0 * 1024))
    assert [keeper.refusal(STRANGER, number / 10, *page) for number in range(100)] == [None] * 100
    shared = ALLOWED[Budgeted.MESSAGES].strangers.burst * SETTLING
    assert sum(taken(keeper, peer, 300, 10.0) for peer in names(50)) <= shared


def test_a_refused_kind_keeps_later_ones_whole() -> None:
    keeper = settled()
    taken(keeper, STRANGER, int(ALLOWED[Budgeted.MESSAGES].stranger.burst), 0.0)
    for _ in range(50):
        assert keeper.refusal(STRANGER, 0.0, MESSAGE, (Budgeted.MESSAGE_BYTES, 1e6)) is not None
    most = ALLOWED[Budgeted.MESSAGE_BYTES].stranger.burst
    assert keeper.refusal(STRANGER, 0.0, (Budgeted.MESSAGE_BYTES, most)) is None


def test_what_an_answer_came_to_is_paid_off_before_the_next_and_members_have_their_own() -> None:
    keeper, asked, allowed = settled(), (Budgeted.REQUEST_BYTES, 1.0), ALLOWED[Budgeted.REQUEST_BYTES]
    assert keeper.refusal(STRANGER, 0.0, asked) is None
    keeper.charged(STRANGER, Budgeted.REQUEST_BYTES, allowed.stranger.burst + allowed.stranger.per_s, 0.0)
    assert keeper.refusal(STRANGER, 0.9, asked) is not None
    assert keeper.refusal(STRANGER, 1.1, asked) is None
    for name in names(9):
        keeper.charged(name, Budgeted.REQUEST_BYTES, allowed.stranger.burst, 2.0)
    assert "busy" in str(keeper.refusal(PeerId("another"), 2.0, asked))
    assert keeper.refusal(MEMBER, 2.0, asked) is None


def test_what_is_remembered_is_bounded() -> None:
    keeper = settled()
    for number, peer in enumerate(names(3 * MAX_KNOWN)):
        keeper.seen([(peer, [f"9.{number % 200}.{number // 200}.1"])], float(number))
        keeper.refusal(peer, float(number), MESSAGE)
        for _ in range(10):
            keeper.blamed(peer, Trespass.OVERSIZE, float(number))
    assert len(keeper.banned(3.0 * MAX_KNOWN)) <= 2 * MAX_KNOWN


# -- faults and bans --------------------------------------------------------------------------------------------------


def test_a_flood_is_turned_away_with_its_reason_and_for_longer_each_time() -> None:
    keeper = settled()
    now, seconds = 0.0, []
    for _ in range(5):
        while not (bans := keeper.new_bans()):
            taken(keeper, STRANGER, 100, now)
            now += 0.1
        [ban] = bans
        assert (ban.who, ban.until) == (STRANGER, now - 0.1 + ban.seconds)
        assert Trespass.FLOOD.value in ban.reason
        seconds.append(ban.seconds)
        assert keeper.refusal(STRANGER, ban.until - 1, MESSAGE) == "turned away for 1 s"
        now = ban.until + 1
        assert keeper.refusal(STRANGER, now, MESSAGE) is None
    assert seconds == [min(MOST_BAN_S, FIRST_BAN_S * LONGER**number) for number in range(5)]


def test_a_peer_of_ours_is_never_turned_away() -> None:
    """Rounds do not depend on what one of us thinks of another: its budget holds, and no more."""
    keeper = settled()
    assert taken(keeper, MEMBER, 100_000, 0.0) == ALLOWED[Budgeted.MESSAGES].member.burst
    assert keeper.points(MEMBER, 0.0) > 100 * BANNED_AT
    assert (keeper.new_bans(), keeper.banned(0.0)) == ([], [])
    assert connect(keeper, [MEMBER], 1.0) == {}


def test_faults_fade() -> None:
    keeper = settled()
    every_s = 1.01 * POINTS[Trespass.MALFORMED] / FADE_PER_S  # of another version, say, and now and then
    for number in range(1000):
        keeper.blamed(STRANGER, Trespass.MALFORMED, number * every_s)
    assert keeper.new_bans() == []
    for _ in range(int(BANNED_AT / POINTS[Trespass.MALFORMED]) + 1):
        keeper.blamed(STRANGER, Trespass.MALFORMED, 1000 * every_s)
    assert [ban.who for ban in keeper.new_bans()] == [STRANGER]


def test_a_place_is_turned_away_for_what_many_names_of_it_did_and_its_members_stay() -> None:
    keeper = settled()
    crowd = names(60)
    hosts = dict.fromkeys([*crowd, MEMBER], "8.8.4.4")
    keeper.seen([(peer, [host]) for peer, host in hosts.items()], 0.0)
    each = int(BANNED_AT / POINTS[Trespass.MALFORMED]) // 2  # none of them enough to be turned away by itself
    for peer in crowd[: int(PLACE_BANNED_AT / (each * POINTS[Trespass.MALFORMED])) + 1]:
        for _ in range(each):
            keeper.blamed(peer, Trespass.MALFORMED, 0.0)
    assert [ban.who for ban in keeper.new_bans()] == [place_of("8.8.4.4")]
    assert keeper.refusal(crowd[-1], 1.0, MESSAGE) is not None, "another name is of no use"
    assert keeper.refusal(MEMBER, 1.0, MESSAGE) is None
    keeper.seen([(PeerId("elsewhere"), ["8.8.9.9"])], 1.0)
    assert keeper.refusal(PeerId("elsewhere"), 1.0, MESSAGE) is None


def test_peers_of_this_computer_and_of_one_house_do_not_share_a_ban() -> None:
    assert place_of("127.0.0.1") == place_of("::1") == place_of("a.name") == ""
    assert place_of("192.168.1.7") != place_of("192.168.1.8")
    assert place_of("8.8.4.4") == place_of("8.8.4.9") != place_of("8.8.5.4")


# -- connections ------------------------------------------------------------------------------------------------------


def test_a_few_may_stay_and_say_nothing() -> None:
    keeper = settled()
    for now in (0.0, 100.0, 1000.0):
        assert connect(keeper, names(CROWD), now) == {}


def test_of_a_crowd_who_says_nothing_goes_and_members_stay() -> None:
    keeper = settled()
    silent, speaking = names(30), names(5, of="newcomer")
    assert connect(keeper, [*silent, *speaking, MEMBER], 0.0) == {}
    for peer in speaking:
        assert keeper.refusal(peer, 1.0, MESSAGE) is None
    assert set(connect(keeper, [*silent, *speaking, MEMBER], PROVE_S + 1)) == set(silent)


def test_strangers_have_so_many_connections_and_those_heard_last_keep_theirs() -> None:
    keeper = settled()
    crowd = names(3 * MAX_STRANGERS)
    connect(keeper, [*crowd, MEMBER], 0.0)
    for number, peer in enumerate(crowd):
        keeper.proved(peer, 1.0 + number / 1000)
    out = connect(keeper, [*crowd, MEMBER], 2.0)
    assert set(out) == set(crowd[:-MAX_STRANGERS])


def test_a_place_has_so_many_connections() -> None:
    keeper = settled()
    crowd, other = names(MAX_STRANGERS_OF_PLACE + 10), PeerId("elsewhere")
    hosts = [(peer, ["8.8.4.4"]) for peer in crowd] + [(other, ["8.8.9.9"])]
    for peer in (*crowd, other):
        keeper.proved(peer, 0.0)
    out = keeper.seen(hosts, 0.0)
    assert len(out) == 10
    assert other not in out


def test_names_that_relays_pass_on_push_nobody_out_who_comes_directly() -> None:
    keeper = settled()
    honest = [(PeerId(f"honest {number}"), [f"8.8.{number}.1"]) for number in range(40)]
    crowd = [(peer, list[str]()) for peer in names(3 * MAX_STRANGERS)]
    for peer, _ in honest:
        keeper.proved(peer, 0.0)
    for peer, _ in crowd:
        keeper.proved(peer, 1.0)
    out = keeper.seen([*honest, *crowd], 2.0)
    assert not out.keys() & {peer for peer, _ in honest}
    assert len(out) == len(crowd) - MAX_STRANGERS_BY_RELAYS


def test_the_banned_are_hung_up_on_whenever_they_are_seen() -> None:
    keeper = settled()
    for _ in range(int(BANNED_AT / POINTS[Trespass.OVERSIZE]) + 1):
        keeper.blamed(STRANGER, Trespass.OVERSIZE, 0.0)
    assert list(connect(keeper, [STRANGER, MEMBER], 1.0)) == [STRANGER]
    assert list(connect(keeper, [STRANGER, MEMBER], FIRST_BAN_S - 1)) == [STRANGER]
    assert connect(keeper, [STRANGER, MEMBER], FIRST_BAN_S + 1) == {}


def test_when_p2pd_holds_too_much_all_strangers_go_but_those_who_are_passed_on() -> None:
    keeper = settled()
    guest = PeerId("guest of the relay")
    keeper.keep({guest}.__contains__)
    peers = [(peer, ["127.0.0.1"]) for peer in (STRANGER, MEMBER, guest)]
    assert keeper.seen(peers, 0.0, daemon_bytes=DAEMON_BYTES) == {}
    assert set(keeper.seen(peers, 0.0, daemon_bytes=DAEMON_BYTES + 1)) == {STRANGER}


def test_honest_newcomers_are_never_blamed_and_mostly_heard_whatever_fifty_flooders_do() -> None:
    """Two minutes: each flooder as much as it likes, from five ranges; a newcomer of another says a word a second."""
    rng = random.Random(1)
    keeper = settled()
    crowd, newcomer = names(50), PeerId("newcomer")
    hosts = {peer: f"8.8.{number % 5}.{number}" for number, peer in enumerate(crowd)} | {
        newcomer: "9.9.9.9",
        MEMBER: "7.7.7.7",
    }
    connected, heard, of_member = set(hosts), 0, 0
    for second in range(120):
        for peer in keeper.seen([(peer, [hosts[peer]]) for peer in connected], float(second)):
            connected.discard(peer)
        assert {newcomer, MEMBER} <= connected
        for tick in range(20):
            now = second + tick / 20
            for peer in rng.sample(sorted(connected - {newcomer, MEMBER}), k=min(20, len(connected) - 2)):
                taken(keeper, peer, 10, now)
        heard += taken(keeper, newcomer, 1, second + 0.97)
        of_member += taken(keeper, MEMBER, 5, second + 0.98)
        connected |= {peer for peer in crowd if rng.random() < 0.2}  # they come again
    assert of_member == 600
    assert heard >= 100
    assert not {newcomer, place_of("9.9.9.9")} & set(keeper.banned(120.0))


def test_who_spoke_before_its_connection_was_seen_is_not_silent() -> None:
    """The usual order: it dials, it asks at once, and connections are looked at every other second."""
    keeper = settled()
    assert keeper.refusal(STRANGER, 0.0, MESSAGE) is None
    crowd = names(CROWD + 1)
    connect(keeper, [STRANGER, *crowd], 1.0)
    out = connect(keeper, [STRANGER, *crowd], 1.0 + PROVE_S + 1.0)
    assert STRANGER not in out
    assert set(crowd) <= set(out)


def test_what_one_sends_that_is_turned_away_counts_against_nobody_beside_it() -> None:
    keeper, (bad, neighbour) = settled(), names(2)
    connect(keeper, [bad, neighbour], 0.0, host="8.8.4.4")
    for _ in range(10 * int(PLACE_BANNED_AT / POINTS[Trespass.OVERSIZE])):
        keeper.blamed(bad, Trespass.OVERSIZE, 1.0)
    assert keeper.banned(1.0) == [bad]
    assert keeper.refusal(neighbour, 1.0, MESSAGE) is None
