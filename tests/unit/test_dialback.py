"""Whom a peer dials for somebody who asks, and what follows from the answers."""

import pytest

from dilocox_peer.invitation import Address, parse_multiaddr
from dilocox_peer.peer.dialback import MAX_DIALLED, Answer, may_dial, verdict
from dilocox_peer.signing import SigningKey

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
    yes, no, unknown = Answer.YES, Answer.NO, Answer.UNKNOWN
    assert verdict([no, yes, unknown]) is True
    assert verdict([no, unknown]) is False
    assert verdict([unknown]) is None
    assert verdict([]) is None
