"""SECURITY.md names tests and bounds; they are there, and are what the code has."""

import re
from pathlib import Path

from dilocox_peer.cli import metrics
from dilocox_peer.dht import bounds, entry, room
from dilocox_peer.network import doorkeeper, lead_budget, link_gate, message_streams
from dilocox_peer.network.doorkeeper import ALLOWED, Budgeted, Trespass
from dilocox_peer.network.frames import MAX_HEADER_BYTES, MAX_HEADER_DEPTH, MAX_HEADER_ITEMS
from dilocox_peer.network.link_frames import MAX_UNPROVED_BYTES, MAX_UNPROVED_HEADER_BYTES
from dilocox_peer.network.message_frames import MAX_BATCH, MAX_MESSAGE_BYTES
from dilocox_peer.network.serving import TransportLimits
from dilocox_peer.network.tunnels import MAX_DOORS
from dilocox_peer.network.tunnels import MAX_STREAMS_PER_PEER as OF_A_DOOR
from dilocox_peer.peer.dialback import (
    ALL_ASKED,
    ALL_ASKED_PER_S,
    ALL_PORTS,
    ALL_PORTS_PER_S,
    ASKED,
    ASKED_PER_S,
    MAX_BUDGETS,
    PLACE_ASKED,
    PLACE_ASKED_PER_S,
    RANGE_PORTS,
    RANGE_PORTS_PER_S,
)
from dilocox_peer.peer.links.conveyor import MAX_UNPROVED
from dilocox_peer.peer.rounds.conduct import MAX_PROVEN, MAX_REMEMBERED
from dilocox_peer.peer.rounds.driver import MAX_QUEUED_BYTES
from dilocox_peer.web import guard
from dilocox_peer.web.server import MAX_STREAMS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text()


def test_every_threat_names_tests_that_are_there() -> None:
    rows = [
        line
        for line in PAGE.splitlines()
        if re.match(r"\| (stranger|donor|member|leader|fewer than half of the members) ", line)
    ]
    assert len(rows) > 12
    for row in rows:
        named = re.findall(r"`((?:tests|benchmarks)/[\w/]+\.py)`", row.split("|")[4])
        assert named, row
        for name in named:
            assert (ROOT / name).is_file(), name


def _rates(kind: Budgeted) -> str:
    each = ALLOWED[kind]
    return (
        f"a member {each.member.per_s:.0f} ({each.member.burst:,.0f} at once); a stranger {each.stranger.per_s:.0f} ({each.stranger.burst:,.0f}), "
        f"a range {each.place.per_s:.0f} ({each.place.burst:,.0f}), all strangers {each.strangers.per_s:.0f} ({each.strangers.burst:,.0f})"
    )


def _mib(kind: Budgeted) -> str:
    member, stranger, place, strangers = (
        f"{each.per_s / (1 << 20):g}"
        for each in (ALLOWED[kind].member, ALLOWED[kind].stranger, ALLOWED[kind].place, ALLOWED[kind].strangers)
    )
    return f"a member {member} MiB; a stranger {stranger}, a range {place}, all strangers {strangers}"


def test_the_bounds_are_those_of_the_code() -> None:
    limits = TransportLimits()
    for told in (
        f"{MAX_MESSAGE_BYTES >> 20} MiB; the header is read",
        f"{MAX_QUEUED_BYTES >> 20} MiB as they came",
        f"{message_streams.MAX_STREAMS} at once, of strangers {message_streams.MAX_STREAMS_OF_STRANGERS}, of one peer "
        f"{message_streams.MAX_STREAMS_PER_PEER}; the longest idle stranger's makes room; without a message {message_streams.KEPT_S:.0f} s",
        f"{MAX_BATCH} messages or {MAX_MESSAGE_BYTES >> 20} MiB; of those beyond {message_streams.LARGE_BYTES >> 10} KiB "
        f"{message_streams.LARGE_AT_ONCE} at once of members",
        f"messages a second | {_rates(Budgeted.MESSAGES)}",
        f"bytes of messages a second | {_mib(Budgeted.MESSAGE_BYTES)}",
        f"bytes of requests to the directory, and of answers, a second | {_mib(Budgeted.REQUEST_BYTES)}",
        f"the run's page | {guard.MAX_CONNECTIONS} connections, {MAX_STREAMS} streams of events among them, "
        f"of which the range that has most gives one up to a range that has less; {guard.MAX_HEAD_BYTES >> 10} KiB of a request's head, "
        f"{guard.MAX_MORE_BYTES >> 10} KiB behind it that nobody reads; {guard.CONNECTION_S:.0f} s from the connection",
        f"{metrics.MAX_SCRAPES} visitors at once, one more is hung up on; {metrics.SCRAPE_S:.0f} s for the next bytes of each, {metrics.VISIT_S:.0f} s for all of a visit",
        f"streams a second | {_rates(Budgeted.STREAMS)}",
        f"requests to the directory | {_rates(Budgeted.REQUESTS).replace(' (400', ' a second (400', 1)}; {entry.MAX_AT_ONCE} at once, "
        f"{entry.MAX_AT_ONCE_OF_PEER} of one peer; {entry.MAX_BYTES_AT_ONCE >> 20} MiB at once, {entry.MAX_BYTES_AT_ONCE_OF_PEER >> 20} of one peer",
        f"{doorkeeper.MAX_STRANGERS}, {doorkeeper.MAX_STRANGERS_OF_PLACE} of a range, {doorkeeper.MAX_STRANGERS_BY_RELAYS} by relays; "
        f"of more than {doorkeeper.CROWD} those that say nothing for {doorkeeper.PROVE_S:.0f} s go",
        f"above {doorkeeper.DAEMON_BYTES >> 20} MiB all strangers",
        f"{link_gate.KNOCKS_PER_S:.0f} a second ({link_gate.KNOCKS:.0f} at once) of all, {link_gate.PLACE_KNOCKS_PER_S:.0f} "
        f"({link_gate.PLACE_KNOCKS:.0f}) of a range, {link_gate.MAX_OF_PLACE} connections of one",
        f"of which {MAX_UNPROVED} that have not proved who they are; those hold {MAX_UNPROVED_BYTES >> 10} KiB and take frames without bodies and "
        f"with headers of {MAX_UNPROVED_HEADER_BYTES >> 10} KiB",
        f"{doorkeeper.MAX_KNOWN:,} peers, {doorkeeper.MAX_KNOWN:,} ranges",
        f"A ban begins at {doorkeeper.BANNED_AT:.0f} points, which fade by one in {1 / doorkeeper.FADE_PER_S:.0f}".replace(
            "in 2", "in two"
        ),
        f"{doorkeeper.POINTS[Trespass.FLOOD]:.0f} for each thing asked beyond one's own budget, "
        f"{doorkeeper.POINTS[Trespass.MALFORMED]:.0f} for what cannot be read, {doorkeeper.POINTS[Trespass.OVERSIZE]:.0f} for what is larger",
        f"{limits.streams} at once, {limits.streams_waiting} more waiting, {limits.streams_per_peer} of one peer",
        f"{MAX_HEADER_BYTES >> 10} KiB, depth {MAX_HEADER_DEPTH}, {MAX_HEADER_ITEMS:,} items",
        f"{room.MAX_RECORDS} a key, {room.HANDED_ON} of them of one range that others hand on, {room.MAX_BYTES_OF_KEY >> 10} KiB a key, "
        f"{room.MAX_BYTES_OF_PLACE >> 20} MiB of a range, {room.MAX_STORED_BYTES >> 20} MiB in all; peers of no known range are as one; "
        f"{bounds.MAX_NODES:,} nodes",
        f"{RANGE_PORTS:.0f} at once and {60 * RANGE_PORTS_PER_S:.0f} a minute of a range of addresses (/24, /48), {ALL_PORTS:.0f} at once "
        f"and {ALL_PORTS_PER_S:.0f} a second in all; {MAX_BUDGETS:,} ranges",
        f"{ASKED:.0f} at once and {60 * ASKED_PER_S:.0f} a minute of one peer, {PLACE_ASKED:.0f} at once and "
        f"{60 * PLACE_ASKED_PER_S:.0f} a minute of a range, {ALL_ASKED:.0f} at once and {ALL_ASKED_PER_S:.0f} a second of all are looked into; {MAX_BUDGETS:,} peers",
        f"{lead_budget.OF_A_LEASE} of a range for one lease, {lead_budget.RANGE_LEADS:.0f} at once and "
        f"{60 * lead_budget.RANGE_LEADS_PER_S:.0f} a minute of a range for all; {lead_budget.MAX_RANGES:,} ranges",
        f"{MAX_DOORS}, 64 streams, {OF_A_DOOR} of one peer",
        f"{MAX_REMEMBERED}, and {MAX_PROVEN} proofs",
    ):
        assert told in PAGE, told
