from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.admission import Grant, Revocations
from dilocox_peer.compression.codec import uniform_policy
from dilocox_peer.compression.contribution import decode_contribution, encode_contribution
from dilocox_peer.dht.records import (
    BUCKETS,
    Lease,
    ManifestRecord,
    bucket_of,
    decode_word,
    dht_id,
    encode_word,
    lease_key,
    slots,
)
from dilocox_peer.manifest import MAX_MANIFEST_BYTES
from dilocox_peer.peer.links.greeting import Greeter, Hello, hello_statement
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import Layout, LinkId, PeerId, RunId, canonical
from dilocox_peer.wire.declared import MAX_COUNT
from dilocox_peer.wire.records import KEEPERS, MAX_LEASE_BYTES, MAX_PUBLIC_NAME, MAX_STAGES

PEER = SigningKey(bytes(32)).peer_id
OTHER = SigningKey(bytes(31) + b"\1").peer_id
RUN = RunId("ab" * 32)
LEASE = Lease(
    peer=PEER,
    stage=3,
    incarnation=1_795_000_000_000,
    addresses=(f"/ip4/203.0.113.5/tcp/31337/p2p/{PEER}",),
    protocol=1,
    tokens_per_s=1234.5,
    memory_bytes=8 << 30,
    reachability="direct",
    round=7,
    expires_s=100.0,
)

addresses = st.builds(
    lambda port, relayed: (
        f"/ip4/203.0.113.5/tcp/{port}" + (f"/p2p/{OTHER}/p2p-circuit" if relayed else "") + f"/p2p/{PEER}"
    ),
    st.integers(1, 65535),
    st.booleans(),
)
leases = st.builds(
    Lease,
    peer=st.just(PEER),
    stage=st.integers(0, KEEPERS),
    incarnation=st.integers(0, MAX_COUNT),
    addresses=st.lists(addresses, max_size=8).map(tuple),
    protocol=st.integers(0, 2**16),
    tokens_per_s=st.floats(0, 1e12),
    memory_bytes=st.integers(0, MAX_COUNT),
    reachability=st.sampled_from(["direct", "relayed"]),
    round=st.integers(0, MAX_COUNT),
    has_left=st.booleans(),
    is_paused=st.booleans(),
    public_name=st.text(max_size=MAX_PUBLIC_NAME),
    expires_s=st.floats(0, 1e10),
).filter(lambda lease: not (lease.has_left and lease.is_paused))  # who has left holds nothing any more


@given(leases)
def test_a_lease_survives_its_bytes_and_the_largest_fits(lease: Lease) -> None:
    raw = lease.to_bytes()
    assert len(raw) <= MAX_LEASE_BYTES
    assert Lease.from_bytes(raw, peer=PEER, expires_s=lease.expires_s) == lease


@given(
    st.one_of(
        st.binary(max_size=300),
        st.recursive(st.none() | st.integers(-9, 9) | st.text(max_size=4), st.lists).map(msgpack.packb),
    )
)
def test_other_bytes_raise_only_value_error(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"lease"):
        Lease.from_bytes(raw, peer=PEER, expires_s=0.0)


def test_each_field_is_checked() -> None:
    good = msgpack.unpackb(LEASE.to_bytes())
    wrong: list[tuple[int, object]] = [
        (0, "word"), (1, 2), (1, True), (2, -1), (2, KEEPERS + 1), (2, "0"), (2, True), (3, 1.5), (3, MAX_COUNT + 1),
        (4, "x"), (4, ["x"]), (4, [b"x"]), (4, [LEASE.addresses[0]] * 9), (4, [LEASE.addresses[0].replace(PEER, OTHER)]),
        (5, -1), (6, 1), (6, -1.0), (6, float("nan")), (6, float("inf")), (7, None), (8, "nearby"), (9, -1), (10, 1),
    ]  # fmt: skip
    for position, value in wrong:
        fields = list(good)
        fields[position] = value
        with pytest.raises(ValueError, match=r"."):
            Lease.from_bytes(msgpack.packb(fields), peer=PEER, expires_s=0.0)
    for other in (good[:-1], [*good, 1], {"lease": 1}, "lease"):
        with pytest.raises(ValueError, match=r"a lease: Expected `array`"):
            Lease.from_bytes(msgpack.packb(other), peer=PEER, expires_s=0.0)


def test_an_oversized_lease_is_refused_before_it_is_read() -> None:
    with pytest.raises(ValueError, match="at most"):
        Lease.from_bytes(bytes(MAX_LEASE_BYTES + 1), peer=PEER, expires_s=0.0)
    with pytest.raises(ValueError, match="at most"):
        ManifestRecord.from_bytes(bytes(MAX_MANIFEST_BYTES + 1))


def golden() -> dict[str, bytes]:
    """What the code wrote before these were declared."""
    lines = (Path(__file__).parent / "golden" / "records.txt").read_text().splitlines()
    return {name: bytes.fromhex(raw) for name, _, raw in (line.partition(" ") for line in lines)}


def test_the_bytes_are_those_of_an_earlier_version() -> None:
    before = golden()
    full = replace(
        LEASE, link=LINK, link_addresses=(f"/ip4/203.0.113.5/tcp/9/p2p/{LINK}",), has_left=True, admission=b"pass", public_name="Ada",
        reachability="relayed", site="lab.2",
    )  # fmt: skip
    for name, lease in (("lease", LEASE), ("lease_full", full)):
        assert lease.to_bytes() == before[name]
        assert Lease.from_bytes(before[name], peer=PEER, expires_s=100.0) == lease
    assert encode_word(decode_word(before["word"])) == before["word"]
    for name in ("pass", "invitation"):
        grant = Grant.from_bytes(before[name])
        assert grant.to_bytes() == before[name]
        assert grant.is_signed_by(SigningKey(bytes([1]) * 32).peer_id)
    owner, me = SigningKey(bytes([1]) * 32), SigningKey(bytes([2]) * 32)
    run = Grant.from_bytes(before["pass"]).run_id
    revocations = Revocations.from_bytes(before["revocations"], run_id=run, owner=owner.peer_id)
    assert revocations.to_bytes() == before["revocations"]
    links = (LinkId("link1"), LinkId("link2"))
    assert hello_statement(run, *links, 3, 1_700_000_000_000) == before["statement"]
    assert Greeter(me, run, lambda: links[0], 3, 1_700_000_000_000).hello(links[1]) == before["hello"]
    heard = Greeter(owner, run, lambda: links[1], 2, 1).checked(links[0], before["hello"])
    assert heard == Hello(me.peer_id, 3, 1_700_000_000_000)
    layout = Layout.of([("a", (2, 3)), ("b", (4,))])
    contribution = encode_contribution(layout, torch.arange(10.0), uniform_policy("none"))
    assert contribution == before["contribution"]
    out = torch.zeros(10)
    decode_contribution(before["contribution"], layout, out)
    assert torch.equal(out, torch.arange(10.0))
    assert canonical(["x", 1, -1, 2**40, 1.5, None, True, b"y", ["z", (1, 2)]]) == before["canonical"]


def test_a_lease_of_a_newer_format_says_who_is_old() -> None:
    fields = msgpack.unpackb(LEASE.to_bytes())
    fields[1] = 2
    with pytest.raises(ValueError, match="a lease of version 2, this peer speaks 1: this peer must update"):
        Lease.from_bytes(msgpack.packb(fields), peer=PEER, expires_s=0.0)


def test_a_tombstone_is_the_same_lease_that_has_left() -> None:
    left = replace(LEASE, has_left=True)
    assert Lease.from_bytes(left.to_bytes(), peer=PEER, expires_s=100.0) == left


def test_keys_of_a_run_are_distinct_and_no_other_run_has_them() -> None:
    keys = [slot.key for slot in slots(RUN)]
    assert len(set(keys)) == len(keys) == 3 + MAX_STAGES * (1 + BUCKETS) + BUCKETS
    assert not set(keys) & {slot.key for slot in slots(RunId("cd" * 32))}
    assert {dht_id(key) for key in keys}.isdisjoint(dht_id(lease_key(RUN, KEEPERS + 1, b)) for b in range(BUCKETS))


def test_peers_spread_over_the_buckets() -> None:
    counts = [0] * BUCKETS
    for number in range(64):
        counts[bucket_of(PeerId(f"peer-{number}"))] += 1
    assert min(counts) >= 8
    assert max(counts) <= 28


LINK = SigningKey(bytes(30) + b"\1\1").peer_id


@pytest.mark.parametrize(
    "link_addresses", [(), (f"/ip4/203.0.113.5/tcp/9/p2p/{LINK}", f"/ip4/10.0.0.1/tcp/9/p2p/{LINK}")]
)
def test_a_lease_names_the_link_of_its_peer(link_addresses: tuple[str, ...]):
    lease = replace(LEASE, link=LINK, link_addresses=link_addresses)
    assert Lease.from_bytes(lease.to_bytes(), peer=PEER, expires_s=100.0) == lease


@pytest.mark.parametrize(
    "broken",
    [
        replace(LEASE, link=PeerId("nobody")),
        replace(LEASE, link=LINK, link_addresses=(f"/ip4/203.0.113.5/tcp/9/p2p/{PEER}",)),
        replace(LEASE, link=LINK, link_addresses=(f"/ip4/203.0.113.5/tcp/9/p2p/{LINK}",) * 9),
        replace(LEASE, link=None, link_addresses=(f"/ip4/203.0.113.5/tcp/9/p2p/{LINK}",)),
    ],
)
def test_a_link_that_is_not_its_own_is_refused(broken: Lease):
    with pytest.raises(ValueError, match=r"link|address|`array` of length <= 8"):
        Lease.from_bytes(broken.to_bytes(), peer=PEER, expires_s=100.0)


@pytest.mark.parametrize(
    ("addresses", "links", "is_closed"),
    [
        (["/ip4/31.0.0.9/tcp/1"], ["/ip4/31.0.0.9/tcp/2"], False),
        (["/ip4/31.0.0.9/tcp/1"], ["/ip4/192.168.1.2/tcp/2"], True),
        (["/ip4/31.0.0.9/tcp/1"], [], True),
        (["/ip4/192.168.1.2/tcp/1"], ["/ip4/192.168.1.2/tcp/2"], False),  # all are on one network
        ([f"/ip4/31.0.0.9/tcp/1/p2p/{OTHER}/p2p-circuit"], ["/ip4/192.168.1.2/tcp/2"], False),  # a relay's host
    ],
)
def test_a_link_is_closed_where_p2pd_is_dialled_from_outside_and_linkd_is_not(
    addresses: list[str], links: list[str], is_closed: bool
):
    lease = replace(
        LEASE,
        addresses=tuple(f"{text}/p2p/{PEER}" for text in addresses),
        link=OTHER,
        link_addresses=tuple(f"{text}/p2p/{OTHER}" for text in links),
    )
    assert lease.is_link_closed is is_closed
    assert not replace(lease, link=None, link_addresses=()).is_link_closed
