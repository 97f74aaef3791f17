import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.admission import Grant, Right
from dilocox_peer.errors import ConfigError, RunRefused
from dilocox_peer.invitation import (
    Invitation,
    format_invitation,
    parse_invitation,
    parse_multiaddr,
    parse_multiaddrs,
    visible_at,
    with_any_port,
)
from dilocox_peer.signing import SigningKey, public_key_of
from dilocox_peer.types import PeerId, RunId

PEER = SigningKey(bytes(32)).peer_id
OTHER = SigningKey(bytes(31) + b"\1").peer_id
RUN = RunId("ab" * 32)
ADDRESS = f"/ip4/203.0.113.5/tcp/31337/p2p/{PEER}"
LINK = f"dilocox://{RUN}@{ADDRESS}"

peers = st.binary(min_size=32, max_size=32).map(lambda seed: SigningKey(seed).peer_id)
hosts = st.one_of(
    st.ip_addresses(v=4).filter(lambda ip: not ip.is_unspecified).map(lambda ip: f"/ip4/{ip}"),
    st.ip_addresses(v=6).filter(lambda ip: not ip.is_unspecified).map(lambda ip: f"/ip6/{ip}"),
    st.sampled_from(["/dns4/example.org", "/dns6/a-b.example", "/dns4/localhost"]),
)
addresses = st.builds(lambda host, port, peer: f"{host}/tcp/{port}/p2p/{peer}", hosts, st.integers(1, 65535), peers)


GRANT = Grant(RUN, bytes(16), frozenset({Right.JOIN}), 1, 2, OTHER, 0).signed_by(SigningKey(bytes(32)))


@given(places=st.lists(addresses, min_size=1, max_size=8))
def test_a_link_with_an_invitation_parses_to_itself(places: list[str]) -> None:
    invitation = Invitation(RUN, tuple(places), GRANT)
    assert parse_invitation(invitation.link) == invitation
    assert parse_invitation(f" <{invitation.link}> ") == invitation


def test_a_link_of_full_length_with_an_invitation_is_read() -> None:
    longest = ",".join(f"/dns4/{'a' * 63}.{'b' * 63}.example.org/tcp/31337/p2p/{PEER}" for _ in range(16))
    assert parse_invitation(f"dilocox://{RUN}@{longest}#invite={GRANT.to_text()}").grant == GRANT


@given(st.text(max_size=400))
def test_no_end_of_a_link_raises_anything_but_what_is_told(end: str) -> None:
    with contextlib.suppress(ConfigError, RunRefused):
        parse_invitation(f"{LINK}#{end}")
    with contextlib.suppress(ConfigError, RunRefused):
        parse_invitation(f"{LINK}#invite={end}")


def test_an_invitation_to_another_run_is_refused_before_anything_is_dialled() -> None:
    elsewhere = f"dilocox://{'cd' * 32}@{ADDRESS}#invite={GRANT.to_text()}"
    with pytest.raises(RunRefused, match=r"is for run abababababab, the link is to run cdcdcdcdcdcd"):
        parse_invitation(elsewhere)


@given(
    run=st.binary(min_size=32, max_size=32).map(lambda raw: RunId(raw.hex())),
    places=st.lists(addresses, min_size=1, max_size=8),
)
def test_a_formatted_invitation_parses_to_itself(run: RunId, places: list[str]) -> None:
    invitation = Invitation(run, tuple(places))
    assert parse_invitation(format_invitation(invitation)) == invitation
    assert invitation.link == format_invitation(invitation)


@given(st.text(max_size=200))
def test_no_text_raises_anything_but_a_one_line_config_error(text: str) -> None:
    for parse in (
        parse_invitation,
        lambda t: parse_invitation(f"dilocox://{t}"),
        lambda t: parse_invitation(f"{LINK},{t}"),
    ):
        message = ""
        try:
            parse(text)
        except ConfigError as error:
            message = str(error)
        assert "\n" not in message


@given(cut=st.integers(0, len(LINK) - 1))
def test_every_truncation_of_a_link_is_refused(cut: int) -> None:
    with pytest.raises(ConfigError, match=r"link|copy|multiaddress|PeerID|port|address"):
        parse_invitation(LINK[:cut])


def test_a_link_pasted_with_decoration_is_understood() -> None:
    for text in (
        f"  {LINK}\n",
        f"<{LINK}>",
        f"'{LINK}'",
        LINK.replace("dilocox", "DiLoCoX", 1),
        LINK.replace(RUN, RUN.upper()),
    ):
        assert parse_invitation(text) == Invitation(RUN, (ADDRESS,))


@pytest.mark.parametrize(
    ("link", "says"),
    [
        ("hello", "no invitation link"),
        ("https://example.org", "no invitation link"),
        ("dilocox://" + RUN, "ends before '@'"),
        (f"dilocox://{RUN[:60]}@{ADDRESS}", "60 of 64 characters"),
        (f"dilocox://{'x' * 64}@{ADDRESS}", "not hexadecimal"),
        (f"dilocox://{RUN}@", "names no address"),
        (f"dilocox://{RUN}@/ip4/203.0.113.5/tcp/31337", "lacks /p2p/PEER-ID"),
        (f"dilocox://{RUN}@{ADDRESS},203.0.113.5:31337", "no multiaddress"),
        (f"dilocox://{RUN}@{ADDRESS[:-4]}", "no Ed25519 PeerID"),
        (f"dilocox://{RUN}@" + ",".join([ADDRESS] * 17), "17 addresses"),
        (LINK + "x" * 5000, "paste the link alone"),
    ],
)
def test_a_wrong_link_is_named_with_the_remedy(link: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_invitation(link)


@pytest.mark.parametrize(
    ("text", "role", "says"),
    [
        ("/ip4/300.0.0.1/tcp/1", "listen", "no IPv4"),
        ("/ip6/1.2.3.4/tcp/1", "listen", "no IPv6"),
        ("/ip4/1.2.3.4/udp/1/quic", "listen", "tcp"),
        ("/onion/abc/tcp/1", "listen", "use /ip4"),
        ("/ip4/1.2.3.4/tcp/65536", "listen", "0 to 65535"),
        ("/ip4/1.2.3.4/tcp/-1", "listen", "0 to 65535"),
        ("/ip4/1.2.3.4/tcp/0", "announce", "1 to 65535"),
        ("/ip4/0.0.0.0/tcp/5", "announce", "nobody can dial"),
        ("/ip6/::/tcp/5", "announce", "nobody can dial"),
        ("/dns4/example.org/tcp/5", "listen", "not a name"),
        ("/dns4/exa mple/tcp/5", "announce", "no host name"),
        ("/dns4/example.org\n/tcp/5", "announce", "no host name"),
        ("/ip6/fe80::1%eth0/tcp/5", "announce", "no IPv6"),
        (f"/ip6/fe80::1%\x1b[31m/tcp/5/p2p/{PEER}", "lease", "no IPv6"),
        (ADDRESS, "listen", "alone"),
        (ADDRESS, "announce", "alone"),
        (f"/ip4/1.2.3.4/tcp/5/p2p/{PEER}/p2p-circuit/p2p/{OTHER}", "peer", "goes on"),
        (f"/ip4/1.2.3.4/tcp/5/p2p/{PEER}/p2p-circuit", "lease", "goes on"),
        ("/ip4/1.2.3.4/tcp/5/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "peer", "no Ed25519"),
        ("/" * 600, "peer", "at most"),
    ],
)
def test_a_wrong_address_is_named_with_the_remedy(text: str, role: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_multiaddr(text, role)  # type: ignore[arg-type]


def test_an_address_is_taken_apart() -> None:
    address = parse_multiaddr(ADDRESS + "/", "peer")
    assert (address.text, address.host_kind, address.host, address.port) == (ADDRESS, "ip4", "203.0.113.5", 31337)
    assert (address.peer, address.is_relayed) == (PEER, False)
    assert parse_multiaddr("/ip4/0.0.0.0/tcp/0", "listen").port == 0


def test_a_relayed_address_belongs_to_the_peer_behind_the_relay() -> None:
    text = f"/ip4/1.2.3.4/tcp/5/p2p/{PEER}/p2p-circuit/p2p/{OTHER}"
    address = parse_multiaddr(text, "lease")
    assert (address.text, address.peer, address.is_relayed) == (text, PeerId(OTHER), True)


@pytest.mark.parametrize(
    ("text", "raw"),
    [
        (f"/ip4/127.0.0.1/tcp/5/p2p/{PEER}", "047f000001060005"),
        (f"/ip6/::1/tcp/65535/p2p/{PEER}", "29" + "00" * 15 + "0106ffff"),
        (f"/dns4/localhost/tcp/80/p2p/{PEER}", "3609" + b"localhost".hex() + "060050"),
        (f"/dns6/{'a.' * 100}b/tcp/80/p2p/{PEER}", "37c901" + (b"a." * 100 + b"b").hex() + "060050"),
        (
            f"/ip4/127.0.0.1/tcp/5/p2p/{OTHER}/p2p-circuit/p2p/{PEER}",
            "047f000001060005" + "a50326" + "002408011220" + public_key_of(OTHER).hex() + "a202",
        ),
    ],
)
def test_the_binary_form_is_libp2ps(text: str, raw: str) -> None:
    assert parse_multiaddr(text, "lease").dialled_bytes().hex() == raw


def test_repeated_addresses_are_kept_once_in_order() -> None:
    assert parse_multiaddrs(["/ip4/1.2.3.4/tcp/5", "/ip4/1.2.3.3/tcp/5", "/ip4/1.2.3.4/tcp/5"], "announce") == (
        "/ip4/1.2.3.4/tcp/5",
        "/ip4/1.2.3.3/tcp/5",
    )


def test_a_link_is_dialled_where_the_peer_is_seen_and_at_its_own_port():
    link = PEER
    seen = (f"/ip4/203.0.113.5/tcp/4711/p2p/{OTHER}", f"/ip4/10.0.0.1/tcp/4711/p2p/{OTHER}")
    assert visible_at([f"/ip4/0.0.0.0/tcp/9000/p2p/{link}"], seen, link) == (
        f"/ip4/203.0.113.5/tcp/9000/p2p/{link}",
        f"/ip4/10.0.0.1/tcp/9000/p2p/{link}",
    )


def test_the_hosts_of_relays_are_not_ours():
    relayed = f"/ip4/198.51.100.1/tcp/4711/p2p/{PEER}/p2p-circuit/p2p/{OTHER}"
    assert visible_at([f"/ip4/0.0.0.0/tcp/9000/p2p/{PEER}"], [relayed], PEER) == ()


def test_the_link_listens_on_the_same_hosts_at_any_port():
    maddrs = ("/ip4/0.0.0.0/tcp/4711", "/ip4/0.0.0.0/tcp/4712", "/ip6/::1/tcp/5")
    assert with_any_port(maddrs) == ("/ip4/0.0.0.0/tcp/0", "/ip6/::1/tcp/0")
