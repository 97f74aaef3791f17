"""Peers met before are found again without a bootstrap."""

from dilocox_peer.peer.acquaintances import MAX_KEPT, read_acquaintances, write_acquaintances
from dilocox_peer.signing import SigningKey

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
