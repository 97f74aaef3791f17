"""SECURITY.md names tests and bounds; they are there, and are what the code has."""

import re
from pathlib import Path

from dilocox_peer.dht import entry
from dilocox_peer.network.frames import MAX_HEADER_BYTES, MAX_HEADER_DEPTH, MAX_HEADER_ITEMS
from dilocox_peer.network.serving import TransportLimits
from dilocox_peer.network.transport import MAX_MESSAGE_BYTES
from dilocox_peer.network.tunnels import MAX_DOORS
from dilocox_peer.network.tunnels import MAX_STREAMS_PER_PEER as OF_A_DOOR
from dilocox_peer.peer.dialback import ALL_PORTS, ALL_PORTS_PER_S, MAX_RANGES, RANGE_PORTS, RANGE_PORTS_PER_S
from dilocox_peer.peer.rounds.conduct import MAX_PROVEN, MAX_REMEMBERED

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text()


def test_every_threat_names_tests_that_are_there() -> None:
    rows = [line for line in PAGE.splitlines() if re.match(r"\| (stranger|donor|member) ", line)]
    assert len(rows) > 12
    for row in rows:
        named = re.findall(r"`((?:tests|benchmarks)/[\w/]+\.py)`", row.split("|")[4])
        assert named, row
        for name in named:
            assert (ROOT / name).is_file(), name


def test_the_bounds_are_those_of_the_code() -> None:
    limits = TransportLimits()
    for told in (
        f"{MAX_MESSAGE_BYTES >> 20} MiB; {limits.messages_per_s:.0f} a second of one peer, {limits.messages_burst:.0f} at once",
        f"{limits.streams} at once, {limits.streams_waiting} more waiting, {limits.streams_per_peer} of one peer",
        f"{MAX_HEADER_BYTES >> 10} KiB, depth {MAX_HEADER_DEPTH}, {MAX_HEADER_ITEMS:,} items",
        f"{entry.MAX_RECORDS} a key, {entry.MAX_BYTES_OF_KEY >> 10} KiB a key, {entry.MAX_STORED_BYTES >> 20} MiB in all; "
        f"{entry.MAX_AT_ONCE} requests at once, {entry.MAX_AT_ONCE_OF_PEER} of one peer; {entry.MAX_NODES:,} nodes",
        f"{RANGE_PORTS:.0f} at once and {60 * RANGE_PORTS_PER_S:.0f} a minute of a range of addresses (/24, /48), {ALL_PORTS:.0f} at once "
        f"and {ALL_PORTS_PER_S:.0f} a second in all; {MAX_RANGES:,} ranges",
        f"{MAX_DOORS}, 64 streams, {OF_A_DOOR} of one peer",
        f"{MAX_REMEMBERED}, and {MAX_PROVEN} proofs",
    ):
        assert told in PAGE, told
