"""Whom we believe where our connections come out, which a liar would like to say."""

import pytest

from dilocox_peer.network.outside_view import MAX_TELLERS, REMEMBERED_S, OutsideView
from dilocox_peer.types import PeerId

BOOT, OTHER_BOOT = PeerId("boot"), PeerId("boot2")
HERE, ELSEWHERE, OTHER_PORT = "/ip4/31.0.1.1/tcp/5000", "/ip4/31.0.9.9/tcp/443", "/ip4/31.0.1.1/tcp/61234"


def test_who_is_named_by_the_link_is_believed():
    view = OutsideView()
    assert view.believed(0.0) is None
    view.told(BOOT, HERE, 0.0, is_named=True)
    assert view.believed(1.0) == HERE
    assert view.believed(REMEMBERED_S + 1) is None


def test_one_stranger_is_not_believed_and_two_that_agree_are():
    view = OutsideView()
    view.told(PeerId("x"), ELSEWHERE, 0.0, is_named=False)
    assert view.believed(0.0) is None
    view.told(PeerId("x"), ELSEWHERE, 1.0, is_named=False)
    assert view.believed(1.0) is None
    view.told(PeerId("y"), ELSEWHERE, 1.0, is_named=False)
    assert view.believed(1.0) == ELSEWHERE


def test_strangers_change_nothing_of_what_a_named_one_tells():
    view = OutsideView()
    view.told(BOOT, HERE, 0.0, is_named=True)
    for number in range(MAX_TELLERS - 1):
        view.told(PeerId(f"x{number}"), ELSEWHERE, 0.0, is_named=False)
    assert view.believed(0.0) == HERE


def test_a_router_that_shows_everybody_another_port_has_no_address_to_dial():
    view = OutsideView()
    view.told(BOOT, HERE, 0.0, is_named=True)
    view.told(OTHER_BOOT, OTHER_PORT, 0.0, is_named=True)
    assert view.believed(0.0) is None


def test_an_address_that_changed_is_the_newest():
    view = OutsideView()
    view.told(BOOT, HERE, 0.0, is_named=True)
    view.told(BOOT, ELSEWHERE, 5.0, is_named=True)
    assert view.believed(5.0) == ELSEWHERE
    view.forget()
    assert view.believed(5.0) is None


@pytest.mark.parametrize(
    "address",
    [
        "",
        "nonsense",
        "/ip4/192.168.1.2/tcp/5000",
        "/ip4/127.0.0.1/tcp/5000",
        "/ip6/2a01:100::1/tcp/5000",
        "/dns4/example.org/tcp/5000",
        "/ip4/31.0.1.1/udp/5000/quic-v1",
        "/ip4/31.0.1.1/tcp/0",
        "/ip4/31.0.1.1/tcp/5000/p2p/12D3KooWQvzsR1M6kKvBGSKVbSsYbqLVoTbvrTyvHhnpCYpJGF7Q",
    ],
)
def test_what_is_no_address_on_the_internet_is_passed_over(address: str):
    view = OutsideView()
    view.told(BOOT, address, 0.0, is_named=True)
    assert view.believed(0.0) is None
