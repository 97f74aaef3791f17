"""What strangers say to a real linkd before they speak its protocol, by hand: frames of yamux below the streams of libp2p."""

import subprocess
import sys
from pathlib import Path

import psutil

from dilocox_peer.network.link import LinkdEnded
from tests.shell.plain_host import PLAIN_HOST
from tests.shell.test_link import MB, PROTOCOL, Link, MakeLink, check_traffic, linked_pair, make_link, until

__all__ = ["make_link"]  # the fixture

STRANGER = (
    PLAIN_HOST
    + """
import struct

HEAD = struct.Struct("!BBHII")
DATA, SYN = 0, 1
BEGIN = b"\\x13/multistream/1.0.0\\n"

async def say(muxed, number, *pieces):
    "On a stream of that number, which the first piece opens."
    for place, piece in enumerate(pieces):
        await muxed._write_frame(HEAD.pack(0, DATA, 0 if place else SYN, number, len(piece)) + piece)

async def no_text(muxed):
    await say(muxed, 1001, BEGIN + b"\\x03\\xff\\xfe\\n")
    await say(muxed, 1003, b"\\x03\\xff\\xfe\\n")

async def endless_line(muxed):
    piece = bytes(1 << 16)
    await say(muxed, 1001, BEGIN + b"\\xff\\xff\\xff\\xff\\x0f", *[piece] * 1600)

async def long_line(muxed):
    await say(muxed, 1001, BEGIN + b"\\xff\\xff\\xff\\xff\\x0f", bytes(1 << 16))

async def streams(muxed):
    for number in range(20000):
        await say(muxed, 1001 + 2 * number, BEGIN)

async def unread(muxed):
    piece, name = bytes(1 << 16), sys.argv[4].encode() + b"\\n"
    hello = pack_header(FrameKind.HELLO, {"role": "control", "g": 1}, 0)
    await say(muxed, 1001, BEGIN + bytes([len(name)]) + name + hello)
    await trio.sleep(0.5)  # from here on the stream waits for its other half
    for _ in range(1600):
        await muxed._write_frame(HEAD.pack(0, DATA, 0, 1001, len(piece)) + piece)

async def identify(muxed):
    stream = await muxed.open_stream()
    await stream.write(BEGIN)
    heard = b""
    for name in (b"/ipfs/id/1.0.0", b"/ipfs/id/push/1.0.0", b"/ipfs/ping/1.0.0"):
        await stream.write(bytes([len(name) + 1]) + name + b"\\n")
        while heard.count(b"na") + heard.count(b"ipfs") == 0:
            heard += await stream.read(1024)
        print(heard, flush=True)
        heard = b""

async def main(how, address):
    host = plain_host()
    info = info_from_p2p_addr(Multiaddr(address))
    async with host.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]):
        await host.connect(info)
        muxed = host.get_network().get_connections(info.peer_id)[0].muxed_conn
        with trio.move_on_after(float(sys.argv[3])):
            try:
                await globals()[how](muxed)
            except Exception:
                pass  # it was ended
            await muxed.event_closed.wait()
            print("ended")

trio.run(main, sys.argv[1], sys.argv[2])
"""
)


def attack(
    how: str, victim: Link, *others: Link, seconds: float = 5.0, said: list[str] | None = None
) -> tuple[int, bool]:
    """Has a stranger do that to the victim's linkd; the most bytes of memory that it had beside what it had before, and whether the
    connection was ended. said: gets what it printed."""
    linkd = psutil.Process(victim.linkd)
    before: int = linkd.memory_info().rss
    most = before
    command = [sys.executable, "-W", "ignore", "-c", STRANGER, how, victim.addresses[0], str(seconds), PROTOCOL]
    cwd, pipe = Path(__file__).parents[2], subprocess.PIPE
    stranger = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=cwd)
    printed = ""
    try:

        def is_over() -> bool:
            nonlocal most
            assert not victim.of(LinkdEnded)
            most = max(most, linkd.memory_info().rss)
            return stranger.poll() is not None

        until(is_over, victim, *others, timeout_s=60)
        assert stranger.stderr is not None
        assert stranger.returncode == 0, stranger.stderr.read()
    finally:
        stranger.kill()
        printed, _ = stranger.communicate()
    if said is not None:
        said.append(printed)
    return most - before, "ended" in printed


def test_a_name_of_a_protocol_that_is_no_text_does_not_end_linkd(make_link: MakeLink):
    one, two = linked_pair(make_link)
    attack("no_text", two, one, seconds=2.0)
    check_traffic(one, two)


def test_a_line_without_an_end_is_not_kept(make_link: MakeLink):
    one, two = linked_pair(make_link)
    num_bytes, _ = attack("endless_line", two, one)
    assert num_bytes < 30 * MB
    check_traffic(one, two)


def test_a_line_that_is_too_long_ends_its_stream_alone(make_link: MakeLink):
    one, two = linked_pair(make_link)
    _, is_ended = attack("long_line", two, one)
    assert not is_ended, "it was within the stream's window"
    check_traffic(one, two)


def test_a_connection_has_few_streams(make_link: MakeLink):
    one, two = linked_pair(make_link)
    num_bytes, is_ended = attack("streams", two, one, seconds=12.0)
    assert num_bytes < 10 * MB
    assert is_ended
    check_traffic(one, two)


def test_no_more_is_kept_of_a_stream_than_its_window(make_link: MakeLink):
    one, two = linked_pair(make_link)
    num_bytes, is_ended = attack("unread", two, one, seconds=8.0)  # after 10 s a half of a link is ended anyway
    assert num_bytes < 40 * MB, "16 MiB are a window, at most"
    assert is_ended
    check_traffic(one, two)


def test_what_strangers_say_of_themselves_is_not_heard(make_link: MakeLink):
    """libp2p's host keeps what each tells in its identify protocol, for as long as it runs."""
    one, two = linked_pair(make_link)
    said: list[str] = []
    attack("identify", two, one, seconds=5.0, said=said)
    assert said[0].count("na") == 3, said
    assert "ipfs" not in said[0]
    check_traffic(one, two)
