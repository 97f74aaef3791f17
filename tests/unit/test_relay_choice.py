"""At which relays a peer asks, when, and what it announces."""

from itertools import pairwise

from dilocox_peer.network.relay_choice import (
    ADDRESSES_EACH,
    ENOUGH_BYTES,
    GONE_RETRY_S,
    MAX_CANDIDATES,
    MAX_RETRY_S,
    REFUSED_RETRY_S,
    RENEW_S,
    WANTED,
    RelayChoice,
)
from dilocox_peer.network.relay_protocol import RelayLimit
from dilocox_peer.types import PeerId

ME = PeerId("me")
LARGE, SMALL = RelayLimit(ENOUGH_BYTES, 1800), RelayLimit(128 << 10, 120)


def at(name: str) -> list[str]:
    return [f"/ip4/203.0.113.1/tcp/1/p2p/{name}"]


def choice(*names: str) -> RelayChoice:
    made = RelayChoice(ME)
    made.offer({PeerId(name): at(name) for name in names})
    return made


def asked(of: RelayChoice, now: float) -> list[str]:
    return [peer for peer, _ in of.due(now)]


def through(name: str) -> str:
    return f"/ip4/203.0.113.1/tcp/1/p2p/{name}/p2p-circuit/p2p/me"


def test_the_first_relays_are_asked_and_announced_once_they_have_us():
    relays = choice("a", "b", "c")
    assert asked(relays, 0.0) == ["a", "b"]
    assert not relays.addresses
    relays.reserved(PeerId("b"), LARGE, 0.1)
    assert relays.addresses == (through("b"),)
    relays.reserved(PeerId("a"), LARGE, 0.2)
    assert list(relays.addresses) == [through("a"), through("b")]
    assert asked(relays, 1.0) == []


def test_nobody_is_asked_twice_at_once():
    relays = choice("a")
    assert asked(relays, 0.0) == ["a"]
    assert asked(relays, 100.0) == []


def test_a_relay_that_is_lost_is_asked_at_once_and_one_that_does_not_have_us_when_its_turn_comes():
    relays = choice("a", "b")
    relays.due(0.0)
    relays.reserved(PeerId("a"), LARGE, 0.0)
    relays.refused(PeerId("b"), 0.0)
    for name in ("a", "b", "c"):
        relays.lost(PeerId(name), 1.0)
    assert asked(relays, 1.0) == ["a"]
    relays.lost(PeerId("a"), 1.5)
    assert asked(relays, 1.5) == [], "it is being asked"


def test_a_reservation_is_renewed():
    relays = choice("a")
    relays.due(0.0)
    relays.reserved(PeerId("a"), LARGE, 0.0)
    assert relays.wait_s(0.0) == RENEW_S
    assert asked(relays, RENEW_S) == ["a"]


def test_a_relay_that_went_is_announced_until_another_has_us():
    """It may come back where it was, and a lease without addresses helps nobody."""
    relays = choice("a", "b")
    relays.due(0.0)
    relays.reserved(PeerId("a"), LARGE, 0.0)
    relays.failed(PeerId("b"), 0.0)
    assert asked(relays, RENEW_S) == ["a", "b"]
    relays.failed(PeerId("a"), RENEW_S)
    relays.failed(PeerId("b"), RENEW_S)
    assert relays.held == ()
    assert relays.addresses == (through("a"),)
    assert "b" in asked(relays, RENEW_S + MAX_RETRY_S)
    relays.reserved(PeerId("b"), LARGE, 2 * RENEW_S)
    assert relays.addresses == (through("b"),)


def test_a_relay_that_failed_is_tried_again_soon_and_then_more_seldom():
    relays, now, pauses = choice("a"), 0.0, []
    for _ in range(8):
        while not asked(relays, now):
            now += relays.wait_s(now)
        relays.failed(PeerId("a"), now)
        before = now
        while not asked(relays, now):
            now += relays.wait_s(now)
        pauses.append(round(now - before, 2))
        relays.failed(PeerId("a"), now)
    assert pauses[0] <= 1.5
    assert max(pauses) <= MAX_RETRY_S + 0.5
    assert pauses == sorted(pauses)


def test_one_that_refuses_makes_room_for_the_next():
    relays = choice("a", "b", "c")
    relays.due(0.0)
    relays.refused(PeerId("a"), 0.0)
    relays.reserved(PeerId("b"), LARGE, 0.0)
    assert asked(relays, 0.1) == ["c"]
    relays.reserved(PeerId("c"), LARGE, 0.1)
    assert relays.held == ("b", "c")
    assert "a" not in asked(relays, REFUSED_RETRY_S)


def test_a_small_relay_is_the_last_resort():
    relays = choice("a", "b", "c")
    relays.due(0.0)
    relays.reserved(PeerId("a"), SMALL, 0.0)
    relays.failed(PeerId("b"), 0.0)
    assert relays.addresses == (through("a"),)
    assert "c" in asked(relays, 0.1)
    relays.reserved(PeerId("c"), LARGE, 0.1)
    assert relays.addresses == (through("c"),)
    assert WANTED == 2
    assert "b" in asked(relays, RENEW_S - 1)


def test_who_can_be_dialled_needs_none():
    relays = choice("a")
    relays.due(0.0)
    relays.reserved(PeerId("a"), LARGE, 0.0)
    assert relays.need(False)
    assert not relays.need(False)
    assert relays.addresses == ()
    assert asked(relays, 1000.0) == []
    assert relays.wait_s(1000.0) == RENEW_S


def test_what_is_offered_anew_keeps_what_has_us_and_no_more_than_a_few():
    relays = choice("a")
    relays.due(0.0)
    relays.reserved(PeerId("a"), LARGE, 0.0)
    relays.offer({PeerId(f"p{number}"): at("x") for number in range(100)})
    assert relays.held == ("a",)
    found: set[str] = set()
    for second in range(1, 200):
        for name in asked(relays, float(second)):
            found.add(name)
            relays.failed(PeerId(name), float(second))
    assert len(found) == MAX_CANDIDATES


def test_a_relay_at_another_address_is_asked_at_once():
    relays = choice("a")
    relays.due(0.0)
    relays.failed(PeerId("a"), 0.0)
    relays.offer({PeerId("a"): [f"/ip4/203.0.113.2/tcp/{port}/p2p/a" for port in range(1, 6)]})
    assert asked(relays, 0.0) == ["a"]
    relays.reserved(PeerId("a"), LARGE, 0.0)
    assert len(relays.addresses) == ADDRESSES_EACH


def test_we_are_no_relay_of_our_own():
    assert asked(choice("me"), 0.0) == []


def test_a_named_relay_that_is_back_has_us_again_whoever_took_its_place():
    """Strangers that say they have us, and may pass nobody on, were the only relays for good after one restart of the run's bootstrap."""
    relays, named = RelayChoice(ME), PeerId("named")
    relays.offer({PeerId(name): at(name) for name in ("named", "b", "c")}, {named})
    now, asked_while_away = 0.0, 0
    while now < 300.0:
        for name in asked(relays, now):
            is_away = name == named and 20.0 <= now < 200.0
            asked_while_away += is_away
            relays.failed(named, now) if is_away else relays.reserved(PeerId(name), LARGE, now)
        if now == 150.0:
            assert relays.held == ("b", "c")
        now += 0.5
    assert relays.held == ("named", "b")
    assert relays.addresses[0] == through("named")
    assert asked_while_away <= 180.0 / REFUSED_RETRY_S + 6, "nothing was lacking: it is asked now and then"


def test_a_named_relay_that_is_gone_for_good_is_asked_ever_more_seldom_until_one_is_lacking():
    relays, named, now, asked_at = RelayChoice(ME), PeerId("named"), 0.0, list[float]()
    relays.offer({PeerId(name): at(name) for name in ("named", "b", "c")}, {named})
    while now < 3600.0:
        for name in asked(relays, now):
            if name == named:
                asked_at.append(now)
                relays.failed(named, now)
            else:
                relays.reserved(PeerId(name), LARGE, now)
        now += 0.5
    pauses = [later - before for before, later in pairwise(asked_at)]
    assert pauses[:5] == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert pauses[-1] == GONE_RETRY_S
    now = asked_at[-1] + 1.0
    relays.failed(PeerId("b"), now)
    assert named in asked(relays, now + MAX_RETRY_S), "one is lacking"


def test_candidates_that_are_not_there_do_not_keep_the_others_out():
    """By so many made-up leases, or peers met before that are gone, no other relay was ever asked."""
    relays, named = RelayChoice(ME), PeerId("named")
    dead = [PeerId(f"dead {number}") for number in range(3 * MAX_CANDIDATES)]
    live = [PeerId(f"live {number}") for number in range(3)]
    now = 0.0
    while now < 600.0:
        if now % 30.0 == 0.0:
            relays.offer({peer: at(peer) for peer in (named, *dead, *live)}, {named})
        for name in asked(relays, now):
            if name in live:
                relays.reserved(PeerId(name), LARGE, now)
            elif int(now) % 2:
                relays.failed(PeerId(name), now)
            else:
                relays.refused(PeerId(name), now)
        now += 0.5
    assert len(relays.held) == WANTED
    assert set(relays.held) <= set(live)


def test_names_that_are_new_at_each_look_do_not_keep_out_a_relay_that_had_no_place_at_first():
    """32 leases that nobody answers for, each under another name every half minute: it was asked twice in an hour."""
    relays, relay, now = RelayChoice(ME), PeerId("relay"), 0.0
    while now < 600.0:
        if now % 30.0 == 0.0:
            made_up = [PeerId(f"made up {now} {number}") for number in range(2 * MAX_CANDIDATES)]
            relays.offer({peer: at(peer) for peer in (relay, *made_up)})
        for name in asked(relays, now):
            if name == relay and now >= 60.0:
                relays.reserved(relay, LARGE, now)
            else:
                relays.refused(PeerId(name), now)
        now += 0.5
    assert relays.held == (relay,)


def test_of_named_relays_one_is_enough_and_one_is_asked_at_a_time():
    relays = RelayChoice(ME)
    relays.offer({PeerId(name): at(name) for name in ("a", "b")})
    assert asked(relays, 0.0) == ["a", "b"]
    for name in ("a", "b"):
        relays.reserved(PeerId(name), LARGE, 0.0)
    named = {PeerId("c"), PeerId("d")}
    relays.offer({PeerId(name): at(name) for name in ("c", "d", "a", "b")}, named)
    assert asked(relays, 1.0) == ["c"]
    relays.failed(PeerId("c"), 1.0)
    assert asked(relays, 1.0) == ["d"]
    relays.reserved(PeerId("d"), LARGE, 1.0)
    assert relays.held == ("d", "a")
    assert "c" not in asked(relays, 100.0)
