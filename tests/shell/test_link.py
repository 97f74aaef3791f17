"""Real linkd processes on loopback: what arrives, what is reported when one dies, and what strangers can do."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest

from dilocox_peer.network.link import Arrived, LinkdEnded, LinkDown, LinkdTraffic, LinkEvent, LinkPing, LinkUp
from dilocox_peer.network.link import Link as _Link
from dilocox_peer.network.linkd_process import LinkFailed, LinkSettings
from tests.shell.commands import free_port
from tests.shell.conftest import PATIENCE_S, is_running, stands_still
from tests.shell.plain_host import PLAIN_HOST

MB = 1 << 20
ANY_PORT = ("/ip4/127.0.0.1/tcp/0",)
REDIAL_FIRST_S = 0.5  # of link_neighbours, which cannot be imported beside hivemind
PROTOCOL = "/dilocox/link/1/0123456789abcdef"


def content(size_bytes: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


class Link(_Link):
    """A link that remembers its events and what linkd said."""

    def __init__(self, settings: LinkSettings) -> None:
        self.said: list[str] = []
        self.seen: list[LinkEvent] = []
        super().__init__(settings, on_log=self.said.append)

    def poll(self, timeout_s: float) -> list[LinkEvent]:
        events = super().poll(timeout_s)
        self.seen += events
        return events

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.seen if isinstance(event, kind)]

    @property
    def is_linked(self) -> bool:
        return len(self.of(LinkUp)) > len(self.of(LinkDown))

    @property
    def linkd(self) -> int:
        assert self._linkd is not None
        return self._linkd.process.pid


class MakeLink(Protocol):
    def __call__(self, name: str, *, start_s: float = PATIENCE_S, **settings: Any) -> Link: ...


@pytest.fixture
def make_link(no_process_left: None) -> Iterator[MakeLink]:
    made: list[Link] = []

    def make(name: str, *, start_s: float = PATIENCE_S, **settings: Any) -> Link:
        defaults: dict[str, Any] = {
            "key_seed": content(32, ord(name)),
            "listen": (f"/ip4/127.0.0.1/tcp/{free_port()}",),  # linkd comes back at the same
            "protocol": PROTOCOL,
            "max_body_bytes": 2 * MB,
            "queue_bytes": 32 * MB,
            "ping_s": 0.2,
        }
        link = Link(LinkSettings(**(defaults | settings)))
        made.append(link)
        link.start(start_s)
        return link

    yield make
    for link in made:
        link.close(5)


def until(condition: Callable[[], bool], *links: Link, timeout_s: float = PATIENCE_S) -> None:
    """Polls the links until the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, [(link.seen[-3:], link.said[-3:]) for link in links]
        for link in links:
            link.poll(0.01)


def linked_pair(make_link: MakeLink, **settings: Any) -> tuple[Link, Link]:
    """Two links, of which the first has dialled the second."""
    one, two = make_link("a", **settings), make_link("b", **settings)
    one.dial(two.link_id, two.addresses)
    until(lambda: one.is_linked and two.is_linked, one, two)
    return one, two


def check_traffic(one: Link, two: Link) -> None:
    """A new frame each way arrives."""
    before = len(one.of(Arrived)), len(two.of(Arrived))
    assert one.send(two.link_id, b"there", content(5000, 1))
    assert two.send(one.link_id, b"back")
    until(lambda: (len(one.of(Arrived)), len(two.of(Arrived))) == (before[0] + 1, before[1] + 1), one, two)
    assert (one.of(Arrived)[-1].header, two.of(Arrived)[-1].header) == (b"back", b"there")


def test_a_link_that_has_proved_nothing_holds_next_to_nothing(make_link: MakeLink):
    """Its greeting comes, and no body; once the parent knows whose it is, all that was agreed."""
    dialer, dialled = make_link("a"), make_link("b", max_unproved=2)
    dialer.dial(dialled.link_id, dialled.addresses)
    until(lambda: dialer.is_linked and dialled.is_linked, dialer, dialled)
    assert dialer.send(dialled.link_id, b"greeting")
    until(lambda: len(dialled.of(Arrived)) == 1, dialer, dialled)
    assert dialer.send(dialled.link_id, b"", content(5000, 1))
    until(lambda: len(dialled.of(LinkDown)) == 1, dialer, dialled)
    assert "5000 bytes" in dialled.of(LinkDown)[0].reason
    until(lambda: dialer.is_linked and dialled.is_linked, dialer, dialled)
    dialled.proved(dialer.link_id)
    check_traffic(dialer, dialled)


def test_a_link_that_has_proved_nothing_makes_room_for_the_next(make_link: MakeLink):
    dialled = make_link("z", max_unproved=2)
    dialers = [make_link(name) for name in "abc"]
    for number, dialer in enumerate(dialers[:2], 1):
        dialer.dial(dialled.link_id, dialled.addresses)
        until(lambda: dialer.is_linked and len(dialled.of(LinkUp)) == number, dialled, dialer)  # noqa: B023
    dialled.proved(dialers[1].link_id)
    dialers[2].dial(dialled.link_id, dialled.addresses)
    until(lambda: dialers[2].is_linked, dialled, *dialers)
    assert not dialled.of(LinkDown), "one of two has proved who it is: there is a place"
    late = make_link("d")
    late.dial(dialled.link_id, dialled.addresses)
    until(lambda: late.is_linked and bool(dialled.of(LinkDown)), dialled, late)
    lost = dialled.of(LinkDown)[0]  # it dials again, and may have made room for itself
    assert lost.neighbour == dialers[0].link_id
    assert "did not say who it is" in lost.reason


def test_frames_arrive_whole_both_ways(make_link: MakeLink):
    dialer, dialled = linked_pair(make_link)
    frames = [(b"small", b""), (b"", content(MB, 1)), (b"edge", content(4096, 2)), (b"h" * 60_000, content(2 * MB, 3))]
    for sender, receiver in ((dialer, dialled), (dialled, dialer)):
        for header, body in frames:
            assert sender.send(receiver.link_id, header, body)
    until(lambda: all(len(link.of(Arrived)) == len(frames) for link in (dialer, dialled)), dialer, dialled)
    for receiver, sender in ((dialer, dialled), (dialled, dialer)):
        arrived = receiver.of(Arrived)
        assert sorted((event.header, bytes(event.body)) for event in arrived) == sorted(frames)
        assert {event.neighbour for event in arrived} == {sender.link_id}
        assert all(event.wire_s >= 0 for event in arrived)
        assert not any(event.body.readonly for event in arrived if event.body)


def test_small_frames_overtake_bodies_and_each_kind_keeps_its_order(make_link: MakeLink):
    sender, receiver = linked_pair(make_link)
    for number in range(200):
        assert sender.send(receiver.link_id, b"s%d" % number)
        if number % 10 == 0:
            assert sender.send(receiver.link_id, b"b%d" % number, content(MB, number))
    until(lambda: len(receiver.of(Arrived)) == 220, sender, receiver)
    arrived = receiver.of(Arrived)
    assert [event.header for event in arrived if not event.body] == [b"s%d" % number for number in range(200)]
    bodies = [event for event in arrived if event.body]
    assert [event.header for event in bodies] == [b"b%d" % number for number in range(0, 200, 10)]
    assert all(event.body == content(MB, int(event.header[1:])) for event in bodies)
    assert not arrived[-1].header.startswith(b"s")


def test_round_trips_are_reported_to_both(make_link: MakeLink):
    one, two = linked_pair(make_link)
    until(lambda: bool(one.of(LinkPing) and two.of(LinkPing)), one, two)
    assert 0 < one.of(LinkPing)[0].seconds < 5


def test_what_the_connections_carry_is_reported_and_little_more_than_the_bodies(make_link: MakeLink):
    one, two = linked_pair(make_link)
    until(lambda: bool(one.of(LinkdTraffic) and two.of(LinkdTraffic)), one, two)
    before = one.of(LinkdTraffic)[-1], two.of(LinkdTraffic)[-1]
    assert one.send(two.link_id, b"body", content(2 * MB, 1))
    until(lambda: bool(two.of(Arrived)), one, two)
    until(lambda: one.of(LinkdTraffic)[-1].sent >= before[0].sent + 2 * MB, one, two)
    until(lambda: two.of(LinkdTraffic)[-1].received >= before[1].received + 2 * MB, one, two)
    assert one.of(LinkdTraffic)[-1].sent - before[0].sent < 2.1 * MB
    assert two.of(LinkdTraffic)[-1].received - before[1].received < 2.1 * MB
    assert two.of(LinkdTraffic)[-1].sent - before[1].sent < 0.1 * MB


def test_a_neighbour_whose_linkd_is_killed_is_unlinked_and_linked_again(make_link: MakeLink):
    one, two = linked_pair(make_link)
    os.kill(two.linkd, signal.SIGKILL)
    until(lambda: bool(one.of(LinkDown)), one)
    assert one.of(LinkDown)[0].reason.startswith("the connection ended")
    assert not one.send(two.link_id, b"nobody there")
    until(lambda: bool(two.of(LinkdEnded)), two)
    two.restart(60)
    until(lambda: one.is_linked and two.is_linked, one, two)
    check_traffic(one, two)


def test_a_killed_linkd_is_restarted_beside_a_polling_owner(make_link: MakeLink):
    one, two = linked_pair(make_link, listen=ANY_PORT)
    addresses, is_over = one.addresses, threading.Event()
    port = int(addresses[0].split("/")[4])

    def own() -> None:
        while not is_over.is_set():
            one.poll(30)

    owner = threading.Thread(target=own)
    owner.start()
    try:
        os.kill(one.linkd, signal.SIGKILL)
        until(lambda: bool(one.of(LinkdEnded)), two)
        assert [type(event) for event in one.seen[-2:]] == [LinkDown, LinkdEnded]
        assert "SIGKILL" in one.of(LinkdEnded)[0].reason
        with socket.socket() as kept:
            # Bound and not listening: linkd may have the port, and the system gives it to nobody else.
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            kept.bind(("127.0.0.1", port))
            one.restart(60)
        until(lambda: one.is_linked and two.is_linked, two)
    finally:
        is_over.set()
        one.wake()
        owner.join(PATIENCE_S)
    assert one.addresses == addresses
    check_traffic(one, two)


def test_a_restarted_linkd_is_linked_by_who_dials_it(make_link: MakeLink):
    """The dialled side dies: it needs no address of its dialer, and writes over the connection it is given."""
    one, two = linked_pair(make_link)
    os.kill(two.linkd, signal.SIGKILL)
    until(lambda: bool(two.of(LinkdEnded)), one, two)
    two.restart(60)
    until(lambda: one.is_linked and two.is_linked, one, two)
    check_traffic(two, one)


def test_a_frozen_neighbour_is_unlinked_and_comes_back(make_link: MakeLink):
    one, two = linked_pair(make_link, dead_s=3.0)  # on a busy machine a process is silent for less than that
    check_traffic(one, two)
    frozen = two.linkd
    os.kill(frozen, signal.SIGSTOP)
    try:
        until(lambda: stands_still(frozen), one)
        assert one.send(two.link_id, b"stuck", content(2 * MB, 1))
        until(lambda: bool(one.of(LinkDown)), one)
        assert "silent for" in one.of(LinkDown)[0].reason
    finally:
        os.kill(frozen, signal.SIGCONT)
    until(lambda: bool(two.of(LinkDown)) and one.is_linked and two.is_linked, one, two)
    check_traffic(one, two)


def test_peers_that_dial_each_other_at_once_have_one_link(make_link: MakeLink):
    one, two = make_link("a"), make_link("b")
    one.dial(two.link_id, two.addresses)
    two.dial(one.link_id, one.addresses)
    until(lambda: one.is_linked and two.is_linked, one, two)
    check_traffic(one, two)
    for _ in range(3):  # the second connection has come by now, or never
        before = len(one.of(LinkPing))
        until(partial(lambda before: len(one.of(LinkPing)) > before, before), one, two)
    check_traffic(one, two)
    assert len(one.of(LinkUp)) - len(one.of(LinkDown)) == 1
    os.kill(two.linkd, signal.SIGKILL)
    until(lambda: not one.is_linked, one)
    until(lambda: bool(two.of(LinkdEnded)), two)
    two.restart(60)
    until(lambda: one.is_linked and two.is_linked, one, two)
    check_traffic(one, two)


def test_hanging_up_unlinks_both_and_is_for_good(make_link: MakeLink):
    one, two = linked_pair(make_link)
    one.hang_up(two.link_id)
    until(lambda: bool(one.of(LinkDown) and two.of(LinkDown)), one, two)
    assert one.of(LinkDown)[0].reason == "hung up"
    two.dial(one.link_id, one.addresses)
    until(lambda: one.is_linked and two.is_linked, one, two)
    check_traffic(one, two)


def test_who_hangs_up_every_time_is_dialled_with_pauses(make_link: MakeLink):
    dialer, refuser = make_link("a"), make_link("b")
    dialer.dial(refuser.link_id, refuser.addresses)
    began_at = time.monotonic()
    for times in range(1, 4):
        until(partial(lambda times: len(refuser.of(LinkUp)) == times, times), dialer, refuser)
        refuser.hang_up(dialer.link_id)
    assert time.monotonic() - began_at > 0.75 * (REDIAL_FIRST_S + 2 * REDIAL_FIRST_S)


def test_a_full_queue_refuses_until_there_is_room(make_link: MakeLink):
    one, two = linked_pair(make_link, queue_bytes=4 * MB, dead_s=60.0)
    frozen, body, num_sent = two.linkd, content(MB, 1), 0
    os.kill(frozen, signal.SIGSTOP)
    try:
        until(lambda: stands_still(frozen), one)
        while one.send(two.link_id, b"%d" % num_sent, body):
            num_sent += 1
            one.poll(0)
            assert num_sent < 50
    finally:
        os.kill(frozen, signal.SIGCONT)
    assert num_sent >= 3
    until(lambda: len(two.of(Arrived)) == num_sent, one, two)
    until(lambda: one.send(two.link_id, b"room", body), one)


def test_who_sends_more_than_is_taken_loses_the_link_and_others_do_not(make_link: MakeLink):
    flooder, other = make_link("a"), make_link("c")
    taker = make_link("b", queue_bytes=3 * MB)
    for link in (flooder, other):
        link.dial(taker.link_id, taker.addresses)
    until(lambda: flooder.is_linked and other.is_linked and len(taker.of(LinkUp)) == 2, flooder, other, taker)
    while flooder.is_linked:  # the taker's owner does not poll
        flooder.send(taker.link_id, b"more", content(2 * MB, 1))
        flooder.poll(0.01)
    until(lambda: len(taker.of(LinkDown)) == 1, taker, other)
    assert "wait to be taken" in taker.of(LinkDown)[0].reason
    assert other.is_linked
    check_traffic(other, taker)


def test_more_neighbours_than_agreed_are_refused_with_a_reason(make_link: MakeLink):
    one, two = linked_pair(make_link, max_neighbours=1)
    late = make_link("c")
    late.dial(two.link_id, two.addresses)
    until(lambda: any("it has 1 neighbours already" in line for line in late.said), one, two, late)
    check_traffic(one, two)
    one.hang_up(two.link_id)
    until(lambda: late.is_linked, one, two, late)


def test_a_neighbour_of_another_run_is_not_linked(make_link: MakeLink):
    one, other = make_link("a"), make_link("b", protocol="/dilocox/link/1/fedcba9876543210")
    one.dial(other.link_id, other.addresses)
    until(lambda: any(other.link_id in line for line in one.said), one, other)
    assert not one.seen
    assert not other.seen


STRANGER = (
    PLAIN_HOST
    + """
def hello(role):
    return pack_header(FrameKind.HELLO, {"role": role, "g": 1}, 0)

FIRST = {  # what is written to each of two streams, and to the second after an answer; which must then end
    "garbage": [b"GET / HTTP/1.1\\r\\n" * 100],
    "no hello": [pack_header(FrameKind.FRAME, {"h": b"x"}, 0)],
    "hello of wrong types": [pack_header(FrameKind.HELLO, {"role": 1, "g": "x"}, 0)],
    "hello with a body": [pack_header(FrameKind.HELLO, {"role": "bulk", "g": 1}, 1 << 20) + bytes(1 << 16)],
    "body before the answer": [hello("bulk") + pack_header(FrameKind.FRAME, {"h": b"x"}, 1 << 20) + bytes(1 << 16)],
    "two controls": [hello("control"), hello("control")],
    "oversize at once": [hello("control"), hello("bulk") + pack_header(FrameKind.FRAME, {"h": b"x"}, 2**40)],
    "oversize": [hello("bulk"), hello("control"), pack_header(FrameKind.FRAME, {"h": b"x"}, 2**40)],
    "order": [hello("bulk"), hello("control") + pack_header(FrameKind.DIAL, {"n": "x", "a": []}, 0)],
    "no header": [hello("bulk"), hello("control") + pack_header(FrameKind.FRAME, {}, 0)],
}

async def main(how, address):
    host = plain_host()
    info = info_from_p2p_addr(Multiaddr(address))
    async with host.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]):
        await host.connect(info)
        for first in FIRST[how][:2]:
            stream = await host.new_stream(info.peer_id, [TProtocol(sys.argv[1])])
            await stream.write(first)
        for more in FIRST[how][2:]:
            await stream.read(1024)  # the hello
            await stream.write(more)
        with trio.fail_after(8):
            try:
                while await stream.read(1024):
                    pass
            except Exception:
                pass
        await host.disconnect(info.peer_id)

for how in FIRST:
    trio.run(main, how, sys.argv[2])
"""
)


def test_a_stranger_that_breaks_the_protocol_loses_its_link_only(make_link: MakeLink):
    one, two = linked_pair(make_link)
    command = [sys.executable, "-W", "ignore", "-c", STRANGER, PROTOCOL, two.addresses[0]]
    stranger = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: stranger.poll() is not None, one, two, timeout_s=60)
        assert stranger.stderr is not None
        assert stranger.returncode == 0, stranger.stderr.read()
    finally:
        stranger.kill()
        stranger.communicate()
    until(lambda: len(two.of(LinkDown)) == 3, one, two)
    reasons = " ".join([event.reason for event in two.of(LinkDown)] + two.said)
    for reason in (
        "not a frame",
        "kind 34",
        "no str 'role'",
        "second stream 'control'",
        "at most 2097152",
        "body of 1048576 bytes, at most 0",
        "no bytes 'h'",
    ):
        assert reason in reasons
    assert "a frame of kind 2 on a link" in reasons
    assert not one.of(LinkDown)
    check_traffic(one, two)


def test_bytes_that_are_no_libp2p_harm_nobody(make_link: MakeLink):
    one, two = linked_pair(make_link)
    port = int(two.addresses[0].split("/")[4])
    for raw in (b"", random.Random(1).randbytes(5000), b"\x13/multistream/1.0.0\n" * 3):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(raw)
    check_traffic(one, two)


def test_linkd_ends_with_a_killed_parent():
    script = (
        "import time\n"
        "from dilocox_peer.network.link import Link\nfrom dilocox_peer.network.linkd_process import LinkSettings\n"
        "link = Link(LinkSettings(bytes(32), ('/ip4/127.0.0.1/tcp/0',), '/x', 1000, 1000000))\n"
        "link.start(20); link.poll(0)\n"
        "print(link._linkd.process.pid, flush=True)\n"
        "while True: link.poll(30)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        linkd = int(parent.stdout.readline())
    assert os.getsid(linkd) == linkd, "a Ctrl-C in the terminal must not reach it"
    parent.kill()
    parent.wait()
    until(lambda: not is_running(linkd))


def test_a_port_in_use_is_one_clear_line(make_link: MakeLink):
    one = make_link("a")
    listen = (one.addresses[0].rsplit("/p2p/", 1)[0],)
    with pytest.raises(LinkFailed, match=rf"^cannot listen on {listen[0]} \(address already in use\)$"):
        make_link("b", listen=listen)


def test_a_restart_listens_elsewhere_when_its_port_is_taken(make_link: MakeLink):
    one, two = linked_pair(make_link, listen=ANY_PORT)
    port = int(one.addresses[0].split("/")[4])
    os.kill(one.linkd, signal.SIGKILL)
    until(lambda: bool(one.of(LinkdEnded)), one)
    with socket.create_server(("127.0.0.1", port)):
        one.restart(60)
    assert one.addresses[0].split("/")[4] != str(port)
    until(lambda: one.is_linked and two.is_linked, one, two)


def test_start_says_why_linkd_ended(make_link: MakeLink):
    with pytest.raises(LinkFailed, match=r"^[^\n]*not-a-multiaddr[^\n]*$"):
        make_link("a", listen=("not-a-multiaddr/tcp/0",))


def test_start_says_why_when_linkd_closes_its_socket_and_does_not_end(
    make_link: MakeLink, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    stuck = tmp_path / "python"
    stuck.write_text(
        f"#!{sys.executable} -IS\n"  # it has three seconds to start
        "import os, sys, time\n"
        "os.write(2, b'no memory for TLS\\n')\n"
        "os.close(int(sys.argv[4]))\n"
        "time.sleep(60)\n"
    )
    stuck.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(stuck))
    with pytest.raises(LinkFailed, match=r"^no memory for TLS$"):
        make_link("a", start_s=3.0)


def test_start_says_why_linkd_cannot_be_run(make_link: MakeLink, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(LinkFailed, match=r"^linkd cannot be run: .*No such file"):
        make_link("a")


@pytest.mark.skipif(sys.platform != "linux", reason="PDEATHSIG")
def test_the_thread_that_starts_linkd_is_the_one_it_dies_with(make_link: MakeLink):
    made: list[Link] = []
    thread = threading.Thread(target=lambda: made.append(make_link("a")))
    thread.start()
    thread.join()
    until(lambda: bool(made[0].of(LinkdEnded)), *made)
    assert "SIGKILL" in made[0].of(LinkdEnded)[0].reason
    made[0].restart(60)
    assert not made[0].poll(0)


def test_close_delivers_what_is_queued_and_leaves_no_process(make_link: MakeLink):
    one, two = linked_pair(make_link)
    linkd = one.linkd
    for number in range(8):
        assert one.send(two.link_id, b"%d" % number, content(MB, number))
    one.close(5)
    assert not is_running(linkd)
    assert not psutil.pid_exists(linkd)
    until(lambda: bool(two.of(LinkDown)), two)
    assert len(two.of(Arrived)) == 8
    assert one.poll(30) == []
    assert not one.send(two.link_id, b"closed")


def test_close_from_another_thread_ends_a_poll(make_link: MakeLink):
    one = make_link("a")
    closer = threading.Thread(target=one.close, args=(5,))
    closer.start()
    one.poll(60)
    closer.join()
    assert one.poll(60) == []


def test_mdns_that_may_not_work_here_harms_nobody(make_link: MakeLink):
    one, two = linked_pair(make_link, mdns=True)
    check_traffic(one, two)


def test_a_linkd_can_be_dialled_more_often_than_it_may_have_connections(make_link: MakeLink):
    """py-libp2p keeps the place of every connection that others made until the host ends."""
    one, two = make_link("a"), make_link("b", max_neighbours=1)  # 36 connections
    for times in range(1, 41):
        one.dial(two.link_id, two.addresses)
        until(partial(lambda times: len(one.of(LinkUp)) == times == len(two.of(LinkUp)), times), one, two)
        one.hang_up(two.link_id)
        until(partial(lambda times: len(one.of(LinkDown)) == times == len(two.of(LinkDown)), times), one, two)
