"""Peers met before are found again without a bootstrap."""

import asyncio

from dilocox_peer.dht.records import Lease
from dilocox_peer.peer.acquaintances import (
    KEPT_OF_RANGE,
    MAX_KEPT,
    Acquaintances,
    read_acquaintances,
    write_acquaintances,
)
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import PeerId

PEER = SigningKey(b"p" * 32).peer_id


def address(port: int) -> str:
    return f"/ip4/127.0.0.1/tcp/{port}/p2p/{PEER}"


def test_what_was_written_is_read_newest_first_and_bounded(tmp_path):
    path = tmp_path / "peers"
    write_acquaintances(path, [address(port) for port in range(1, 40)] + [address(1)])
    assert read_acquaintances(path) == tuple(address(port) for port in range(1, MAX_KEPT + 1))


def test_a_missing_or_damaged_file_is_an_empty_one(tmp_path):
    assert read_acquaintances(tmp_path / "none") == ()
    damaged = tmp_path / "peers"
    damaged.write_bytes(b"\xff\x00nonsense\n" + address(7).encode() + b"\n/ip4/1.2.3.4/tcp/99999/p2p/x\n")
    assert read_acquaintances(damaged) == (address(7),)


def pid(number: int) -> PeerId:
    return SigningKey(bytes([number]) * 32).peer_id


def lease_at(peer: PeerId, incarnation: int, *addresses: str) -> Lease:
    return Lease(peer, 0, incarnation, addresses, 1, 1.0, 1, "direct", 5)


def test_among_homes_the_one_that_can_be_dialled_is_remembered(tmp_path):
    """Of homes the ways through relays were written down, which nobody can enter by, and the public member was not."""
    public, boot = pid(2), pid(1)
    leases = [lease_at(public, 1, f"/ip4/192.168.1.9/tcp/1/p2p/{public}", f"/ip4/8.8.8.8/tcp/31337/p2p/{public}")]
    for number in range(3, 12):
        relayed = f"/ip4/9.9.9.9/tcp/31337/p2p/{boot}/p2p-circuit/p2p/{pid(number)}"
        leases.append(lease_at(pid(number), 2000 + number, relayed, f"/ip4/192.168.1.{number}/tcp/1/p2p/{pid(number)}"))
    asyncio.run(Acquaintances(tmp_path / "peers").remember({0: leases}, 0, [public]))
    found = read_acquaintances(tmp_path / "peers")
    assert found[0] == f"/ip4/8.8.8.8/tcp/31337/p2p/{public}", "of its addresses the one from outside first"
    assert len(found) == 11
    assert not any("p2p-circuit" in each for each in found)


def test_made_up_leases_do_not_have_the_file(tmp_path):
    forged = [lease_at(pid(n), 2**53 - 1, f"/ip4/6.6.6.{n}/tcp/1/p2p/{pid(n)}") for n in range(100, 130)]
    honest = [lease_at(pid(n), n, f"/ip4/9.9.{n}.1/tcp/1/p2p/{pid(n)}") for n in range(1, 9)]
    kept = Acquaintances(tmp_path / "peers")
    for _ in range(3):
        asyncio.run(kept.remember({0: [*forged, *honest]}, 0, [pid(1), pid(2), pid(101)]))
    found = read_acquaintances(tmp_path / "peers")
    assert found[0] == forged[1].addresses[0], "we are connected with that one too, and it is the newest"
    assert found[1:3] == (honest[1].addresses[0], honest[0].addresses[0])
    assert sum("/6.6.6." in each for each in found) == KEPT_OF_RANGE
    assert all(lease.addresses[0] in found for lease in honest)


def test_a_look_while_our_line_is_down_forgets_nobody_for_made_up_leases(tmp_path):
    forged = [
        lease_at(pid(n), 2**53 - 1, *(f"/dns4/{host}{n}.example/tcp/1/p2p/{pid(n)}" for host in "gh"))
        for n in range(100, 130)
    ]
    honest = [lease_at(pid(n), n, f"/ip4/9.9.{n}.1/tcp/1/p2p/{pid(n)}") for n in range(1, 9)]
    kept = Acquaintances(tmp_path / "peers")
    for met in ([lease.peer for lease in honest], []):
        asyncio.run(kept.remember({0: [*forged, *honest]}, 0, met))
        found = read_acquaintances(tmp_path / "peers")
        assert {lease.addresses[0] for lease in honest} <= set(found)
        assert sum("/dns4/" in each for each in found) == KEPT_OF_RANGE
