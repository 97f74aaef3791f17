"""What a peer's connections, as the kernel knows them, make of its upload."""

import asyncio
import socket
from dataclasses import replace

import pytest

from dilocox_peer.network.bandwidth import LEAST_CHUNK_BYTES, MOST_PACED_BYTES, Bandwidth
from dilocox_peer.network.bulk import CHUNK_BYTES
from dilocox_peer.network.tcp_traffic import Connection
from dilocox_peer.network.upload_control import START_BYTES_PER_S
from dilocox_peer.network.upload_watch import UploadWatch


def connection(
    there: str, sent: int = 0, waiting_s: float = 0.0, *, here: str = "192.168.1.2", cookie: int = 1
) -> Connection:
    family = socket.AF_INET6 if ":" in there else socket.AF_INET
    ends = (socket.inet_pton(family, here), socket.inet_pton(family, there))
    return Connection(cookie, cookie, sent, 0, 0.04 + waiting_s, 0.04, ends)


@pytest.mark.parametrize(
    ("there", "here", "leaves"),
    [
        ("31.0.0.9", "192.168.1.2", True),
        ("100.64.3.2", "192.168.1.2", True),  # a carrier's
        ("127.0.0.1", "127.0.0.1", False),
        ("192.168.1.7", "192.168.1.2", False),
        ("10.1.2.3", "10.1.2.4", False),
        ("169.254.1.1", "169.254.1.2", False),
        ("31.0.0.9", "31.0.0.9", False),  # two processes of a computer that has it
        ("::1", "::1", False),
        ("fe80::1", "fe80::2", False),
        ("2a01:100::9", "2a01:100:1:1::2", True),
        ("2a01:100:1:1::3", "2a01:100:1:1::2", False),  # of the same network
        ("::ffff:31.0.0.9", "::ffff:192.168.1.2", True),
        ("::ffff:192.168.1.7", "::ffff:192.168.1.2", False),
    ],
)
def test_what_leaves_the_network_at_home(there: str, here: str, leaves: bool) -> None:
    assert connection(there, here=here).leaves is leaves


def watched(upload: float | None = None) -> tuple[Bandwidth, UploadWatch]:
    bandwidth = Bandwidth(upload, None)
    return bandwidth, UploadWatch(bandwidth, lambda: None)


def test_within_one_network_there_is_no_limit() -> None:
    bandwidth, watch = watched()
    for second in range(3):
        watch.take(
            [connection("127.0.0.1", 10**8 * second), connection("192.168.1.7", 10**8 * second, cookie=2)], second
        )
    assert bandwidth.upload_rate is None
    assert watch.use.rate is None
    assert bandwidth.chunk_bytes() == CHUNK_BYTES


def test_over_the_line_it_begins_slowly_and_is_paced_on_when_nobody_is_there() -> None:
    bandwidth, watch = watched()
    watch.take([connection("31.0.0.9")], 0.0)
    assert bandwidth.upload_rate == START_BYTES_PER_S
    watch.take([], 2.0)
    assert bandwidth.upload_rate == START_BYTES_PER_S


def test_the_least_wait_of_those_that_send_counts() -> None:
    """A slow peer's line is not ours."""
    _, watch = watched()
    for look in range(1, 4):
        sent = 20_000 * look
        watch.take(
            [
                connection("31.0.0.9", sent, 0.3),
                connection("31.0.0.8", sent, 0.004, cookie=2),
                connection("31.0.0.7", look, 0.0, cookie=3),
            ],
            0.2 * look,
        )
    assert watch.use.waiting_s == pytest.approx(0.004)


def test_a_late_acknowledgement_of_a_packet_that_came_alone_is_no_wait() -> None:
    """At 21 kB/s a third of all packets come alone; a peer that had come down to so little stayed there, on a line that was hardly used."""
    for num_bytes, waiting_s, told_s in ((4_200, 0.035, 0.005), (4_200, 0.1, 0.07), (40_000, 0.035, 0.035)):
        _, watch = watched()
        for look in range(1, 5):
            watch.take([connection("31.0.0.9", num_bytes * look, waiting_s)], 0.2 * look)
        assert watch.use.waiting_s == pytest.approx(told_s)


def test_what_was_sent_before_the_first_look_is_not_of_it() -> None:
    _, watch = watched()
    watch.take([connection("31.0.0.9", 10**9, 0.3)], 0.0)
    watch.take([connection("31.0.0.9", 10**9, 0.3)], 0.2)
    watch.take([connection("31.0.0.9", 10**9, 0.3)], 0.4)
    assert watch.use.waiting_s == 0.0


def test_a_limit_of_the_owner_is_kept_and_what_it_does_to_others_is_told() -> None:
    bandwidth, watch = watched(1e6)
    for look in range(10):
        watch.take([connection("31.0.0.9", 200_000 * look, 0.15)], 0.2 * look)
    assert bandwidth.upload_rate == 1e6
    assert (watch.use.rate, watch.use.line) == (1e6, 0.0)
    assert watch.use.waiting_s == pytest.approx(0.15)


def test_what_the_line_carries_is_measured_and_not_what_its_owner_allows() -> None:
    """An owner's limit of 20 Mbit/s on a line of 2.3 left what rounds wait for 0.12 of it beside one newcomer."""
    bandwidth, watch = watched(2.5e6)
    assert bandwidth.carries is None
    watch.take([connection("192.168.1.7", 10**8)], 0.0)
    assert bandwidth.carries is None
    watch.take([connection("31.0.0.9", 1000)], 0.2)
    assert bandwidth.carries == START_BYTES_PER_S
    bandwidth, watch = watched(50_000.0)
    watch.take([connection("31.0.0.9", 1000)], 0.2)
    assert bandwidth.carries == 50_000.0


def test_chunks_are_a_moment_of_the_line() -> None:
    bandwidth = Bandwidth(None, None)
    sizes = []
    for rate in (16_000, 1e6, 1.25e6, 2e6, 12.5e6, 1e9):
        bandwidth.set_upload(rate)
        sizes.append(bandwidth.chunk_bytes())
    assert sizes == [LEAST_CHUNK_BYTES, 10_000, 12_500, MOST_PACED_BYTES, 25_000, CHUNK_BYTES]


def test_hosts_at_home_are_told_by_their_addresses_and_how_near_they_are() -> None:
    _, watch = watched()
    near = [
        connection(host, here=here)
        for host, here in (("192.168.1.7", "192.168.1.2"), ("::ffff:10.0.0.3", "::ffff:10.0.0.2"))
    ]
    watch.take([replace(each, least_rtt_s=0.001) for each in (*near, connection("31.0.0.9"))], 0.0)
    assert watch.home_hosts == {"192.168.1.7", "10.0.0.3"}
    tunnel, unknown = connection("10.9.0.1", here="10.9.0.2"), replace(near[0], least_rtt_s=0.0)
    watch.take([tunnel, unknown], 0.2)
    assert not watch.home_hosts


def test_bodies_that_stay_at_home_wait_for_the_owners_limit_alone() -> None:
    async def send(bandwidth: Bandwidth, *, at_home: bool) -> None:
        for _ in range(4):
            await bandwidth.pace_upload(10_000, "rounds", at_home=at_home)

    measured, owners = Bandwidth(None, None), Bandwidth(50_000.0, None)
    measured.set_upload(50_000.0)
    for bandwidth in (measured, owners):
        asyncio.run(send(bandwidth, at_home=True))
    assert (measured.bytes_let_go, measured.bytes_sent) == (0, 40_000)
    assert owners.bytes_let_go > 0
    assert owners.bytes_sent == 40_000
    asyncio.run(send(measured, at_home=False))
    assert measured.bytes_let_go > 0


def test_bodies_of_a_kind_go_in_the_order_in_which_they_asked() -> None:
    async def ask() -> list[int]:
        bandwidth = Bandwidth(10e6, None)
        gone: list[int] = []

        async def one(number: int) -> None:
            await bandwidth.pace_upload(100_000, "rounds")
            gone.append(number)

        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(one(number))
        return gone

    assert asyncio.run(ask()) == list(range(20))
