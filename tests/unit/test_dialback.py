"""Whom a peer dials for somebody who asks, and what follows from the answers."""

import itertools

import pytest

from dilocox_peer.invitation import Address, parse_multiaddr
from dilocox_peer.peer.arrival import where_to_listen
from dilocox_peer.peer.dialback import (
    ALL_ASKED,
    ALL_ASKED_PER_S,
    ALL_PORTS,
    ASKED,
    ASKED_PER_S,
    MAX_BUDGETS,
    MAX_DIALLED,
    RANGE_PORTS,
    RANGE_PORTS_PER_S,
    Answer,
    DialBudget,
    Opinion,
    for_most,
    may_dial,
    verdict,
)
from dilocox_peer.peer.settings import ANY_PORT
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import PeerId

PEER = SigningKey(b"x" * 32).peer_id


def at(host: str, port: int = 4712, kind: str = "ip4") -> Address:
    return parse_multiaddr(f"/{kind}/{host}/tcp/{port}/p2p/{PEER}", "lease")


def test_only_the_host_that_the_asker_comes_from_is_dialled():
    mine, other = at("198.51.100.7"), at("203.0.113.9")
    assert may_dial([other, mine], ["198.51.100.7"])[0] == (mine,)
    assert may_dial([other], ["198.51.100.7"])[0] == ()
    assert may_dial([mine], [])[0] == ()


def test_a_name_and_a_relay_are_not_dialled():
    relayed = parse_multiaddr(f"/ip4/8.8.8.8/tcp/1/p2p/{PEER}/p2p-circuit/p2p/{PEER}", "lease")
    assert may_dial([at("example.org", kind="dns4"), relayed], ["8.8.8.8"])[0] == ()


@pytest.mark.parametrize(
    ("addresses", "counts"),
    [
        (["/ip4/127.0.0.1/tcp/1"], True),  # all of the run is on this computer
        (["/ip4/31.0.0.9/tcp/1"], True),
        (["/ip4/127.0.0.1/tcp/1", "/ip6/2a01:100::9/tcp/1"], False),
        (["/ip4/31.0.0.9/tcp/1", "/ip6/2a01:100::9/tcp/1"], True),
        (["/dns4/example.org/tcp/1"], True),
        ([], True),
    ],
)
def test_who_is_dialled_over_ipv6_alone_is_not_dialled_by_most(addresses: list[str], counts: bool):
    assert for_most(True, addresses) is counts
    assert for_most(False, addresses) is False
    assert for_most(None, addresses) is None


@pytest.mark.parametrize(
    ("own", "listened"),
    [
        (["192.168.1.2"], ANY_PORT),
        (["192.168.1.2", "2a01:100::9"], ANY_PORT),
        (["2a01:100::9"], (*ANY_PORT, "/ip6/::/tcp/0")),
        ([], ANY_PORT),
    ],
)
def test_a_computer_with_ipv6_alone_listens_there(own: list[str], listened: tuple[str, ...]):
    assert where_to_listen(ANY_PORT, own) == listened
    assert where_to_listen(("/ip4/0.0.0.0/tcp/4712",), own) == ("/ip4/0.0.0.0/tcp/4712",)


def test_a_few_ports_at_most():
    many = [at("127.0.0.1", port) for port in range(4000, 4100)]
    assert may_dial(many, ["127.0.0.1"])[0] == tuple(many[:MAX_DIALLED])


@pytest.mark.parametrize(
    ("seen_at", "answer"),
    [("8.8.8.8", Answer.NO), ("192.168.1.5", Answer.UNKNOWN), ("127.0.0.1", Answer.UNKNOWN)],
)
def test_who_comes_from_outside_and_announces_nothing_there_cannot_be_dialled(seen_at, answer):
    assert may_dial([at("10.0.0.2")], [seen_at]) == ((), answer)


def test_one_who_got_through_is_enough_and_who_cannot_tell_does_not_count():
    for is_named, from_outside in itertools.product((False, True), repeat=2):
        yes, no, unknown = (Opinion(each, is_named, from_outside) for each in (Answer.YES, Answer.NO, Answer.UNKNOWN))
        assert verdict([no, yes, unknown]) is True
        assert verdict([no, unknown]) is False
        assert verdict([unknown]) is None
    assert verdict([]) is None


def test_a_computer_of_the_same_house_and_a_stranger_do_not_gainsay_the_bootstrap():
    """A home that nobody could dial asked no relay: another computer there had got through, or a liar said so."""
    bootstrap, unsure = Opinion(Answer.NO, True, True), Opinion(Answer.UNKNOWN, True, True)
    housemate, stranger = Opinion(Answer.YES, False, False), Opinion(Answer.YES, False, True)
    assert verdict([bootstrap, housemate, stranger]) is False
    assert verdict([unsure, housemate]) is True, "nobody outside can tell"
    assert verdict([unsure, housemate, Opinion(Answer.NO, False, True)]) is False
    assert verdict([unsure, stranger, Opinion(Answer.NO, False, True)]) is True
    bootstrap_at_home = Opinion(Answer.YES, True, False)
    assert verdict([bootstrap_at_home]) is True, "a run within one house"
    assert verdict([bootstrap_at_home, Opinion(Answer.NO, False, True)]) is False


def test_a_few_strangers_that_say_yes_leave_no_home_without_relays():
    yes, no = Opinion(Answer.YES, False, True), Opinion(Answer.NO, False, True)
    unsure = Opinion(Answer.UNKNOWN, True, True)
    assert verdict([unsure, yes, no, no]) is False
    assert verdict([no] * 5 + [yes] * 4) is False
    assert verdict([no] * 4 + [yes] * 4) is True
    named_yes, named_no = Opinion(Answer.YES, True, True), Opinion(Answer.NO, True, True)
    assert verdict([named_no, named_no, named_yes, no]) is True, "of those that the link names one is enough"


def test_nobody_looks_for_open_ports_behind_a_shared_address_this_way():
    """With as many identities as it likes, from one host or from its neighbours, for an hour."""
    budget = DialBudget(0.0)
    tried = sum(
        budget.may_dial([at(f"8.8.8.{second % 250}", port) for port in range(1, 1 + MAX_DIALLED)], float(second))
        * MAX_DIALLED
        for second in range(3600)
    )
    assert RANGE_PORTS <= tried <= RANGE_PORTS + 3600 * RANGE_PORTS_PER_S
    assert budget.may_dial([at("9.9.9.9")], 3600.0), "others are dialled meanwhile"


def test_many_ranges_at_once_have_us_try_so_many_ports_and_no_more():
    budget = DialBudget(0.0)
    tried = sum(
        budget.may_dial([at(f"{first}.8.8.8")], 0.0) for first in range(11, 99) for _ in range(9) if first != 10
    )
    assert tried == ALL_PORTS
    assert not budget.may_dial([at("9.9.9.9")], 0.0)


def test_peers_of_one_house_or_machine_are_bounded_together_alone():
    budget = DialBudget(0.0)
    assert sum(budget.may_dial([at("127.0.0.1", port)], 0.0) for port in range(4000, 5000)) == ALL_PORTS
    assert budget.may_dial([], 0.0), "who asks for nothing costs nothing"


def test_a_peer_that_asks_again_and_again_is_looked_at_now_and_then_and_all_together_so_often():
    budget, seconds = DialBudget(0.0), 600
    of_one = sum(budget.may_ask(PeerId("one"), "one", at / 10) for at in range(10 * seconds))
    assert ASKED <= of_one <= ASKED + seconds * ASKED_PER_S
    assert budget.may_ask(PeerId("another"), "another", float(seconds))
    names = [PeerId(f"p{number}") for number in range(2 * MAX_BUDGETS)]
    of_all = sum(budget.may_ask(name, name, seconds + index / 10) for index, name in enumerate(names * 3))
    assert of_all <= ALL_ASKED + 3 * len(names) / 10 * ALL_ASKED_PER_S + 1


def test_many_names_of_one_range_keep_no_home_elsewhere_from_being_looked_at():
    budget, looked_at = DialBudget(0.0), 0
    for second in range(300):
        for number in range(12):
            budget.may_ask(PeerId(f"name {second} {number}"), "8.8.4.0/24", second + number / 12)
        if second % 3 == 0:  # twenty homes, each once a minute
            looked_at += budget.may_ask(PeerId(f"home {second % 60}"), f"9.9.{second % 60}.0/24", second + 0.99)
    assert looked_at == 100
