"""Messages between two ends of a stream, here a socket pair, and how they are framed."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from dilocox_peer.errors import ProtocolError
from dilocox_peer.network import message_streams
from dilocox_peer.network.bulk import PeerGone, PeerSilent
from dilocox_peer.network.message_frames import (
    BATCH_BYTES,
    HEAD_BYTES,
    MAX_BATCH,
    MAX_MESSAGE_BYTES,
    num_in_batch,
    pack_answer,
    pack_batch,
    read_answer_head,
    read_head,
    split_answer,
    split_batch,
)
from dilocox_peer.network.message_streams import MAX_AWAITED, MAX_STREAMS_OF_STRANGERS, MessageIntake, MessageLines
from dilocox_peer.types import PeerId

ME = PeerId("me")


@pytest.mark.parametrize("seed", range(20))
def test_a_batch_and_its_answer_come_out_as_they_went_in(seed: int) -> None:
    rng = random.Random(seed)
    messages = [rng.randbytes(rng.choice([0, 1, 200, 5000])) for _ in range(rng.randrange(1, MAX_BATCH + 1))]
    raw = pack_batch(messages)
    count, num_bytes = read_head(raw[:HEAD_BYTES])
    assert num_bytes == len(raw) - HEAD_BYTES
    assert split_batch(count, raw[HEAD_BYTES:]) == messages
    reasons = [rng.choice(["", "busy", "not ready"]) for _ in messages]
    answer = pack_answer(reasons)
    assert read_answer_head(answer[:2]) == len(answer) - 2
    assert split_answer(count, answer[2:]) == reasons


def test_what_goes_into_one_batch_is_bounded() -> None:
    assert num_in_batch([MAX_MESSAGE_BYTES, 1]) == 1
    assert num_in_batch([1] * 100) == MAX_BATCH
    assert num_in_batch([BATCH_BYTES - 1, 1, 1]) == 2
    pack_batch([bytes(MAX_MESSAGE_BYTES)])
    for too_much in ([], [b""] * (MAX_BATCH + 1), [bytes(MAX_MESSAGE_BYTES), b"x"]):
        with pytest.raises(ValueError, match="at most"):
            pack_batch(too_much)


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (b"\x00" + bytes(4), "0 messages"),
        (b"\x21" + bytes(4), "33 messages"),
        (b"\x01\xff\xff\xff\xff", "4294967295 bytes"),
    ],
)
def test_a_head_that_asks_for_too_much_is_refused(head: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        read_head(head)


@pytest.mark.parametrize(
    "body", [b"", bytes(7), b"\0\0\0\1a" + b"\0\0\0\2a", b"\0\0\0\1a" + b"\0\0\0\1ab", b"\xff" * 12]
)
def test_lengths_that_do_not_fit_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        split_batch(2, body)


class Ends:
    """MessageLines whose streams lead to an intake in the same loop."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.got: list[bytes] = []
        self.refused: dict[bytes, str] = {}
        self.turned_away = ""
        self.blamed: list[bool] = []
        self.num_opened = 0
        self.strangers = True
        self.intake = MessageIntake(
            lambda _peer, _count, _bytes: self.turned_away or None,
            self.take,
            lambda _peer: self.strangers,
            lambda _peer, is_oversize: self.blamed.append(is_oversize),
        )
        self.lines = MessageLines(self.open)
        self.tasks: set[asyncio.Task[None]] = set()
        self._stack = stack
        self._writers: list[asyncio.StreamWriter] = []  # one that is forgotten closes its stream

    def take(self, _peer: PeerId, raw: bytes) -> str:
        self.got.append(raw)
        return self.refused.get(raw, "")

    async def open(self, peer: PeerId) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self.num_opened += 1
        near, far = socket.socketpair()
        far_reader, far_writer = await asyncio.open_connection(sock=far)
        task = asyncio.ensure_future(self.intake.on_stream(peer, far_reader, far_writer))
        self.tasks.add(task)
        reader, writer = await asyncio.open_connection(sock=near)
        self._writers.append(writer)
        self._stack.callback(writer.transport.abort)
        return reader, writer


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    async with AsyncExitStack() as stack:
        ends = Ends(stack)
        yield ends
        over = ends.lines.close() | ends.intake.end()
        if over:
            await asyncio.wait(over, timeout=10)
        await asyncio.wait_for(asyncio.gather(*ends.tasks), 10)


async def test_what_is_sent_at_once_comes_in_order_on_one_stream(ends: Ends) -> None:
    ends.refused[b"17"] = "no such message"
    found = await asyncio.gather(*(ends.lines.send(ME, [str(number).encode()], 10) for number in range(50)))
    assert ends.got == [str(number).encode() for number in range(50)]
    assert [reasons for reasons in found if reasons != [""]] == [["no such message"]]
    assert found[17] == ["no such message"]
    assert ends.num_opened == 1


async def test_an_answer_nobody_waits_for_is_not_another_ones(ends: Ends) -> None:
    ends.refused[b"first"] = "refused"
    await ends.lines.send(ME, [b"opened"], 10)
    first = asyncio.ensure_future(ends.lines.send(ME, [b"first"], 10))
    await asyncio.sleep(0)
    first.cancel()
    assert await ends.lines.send(ME, [b"second"], 10) == [""]


async def test_more_than_may_be_unanswered_wait_in_order_and_those_given_up_are_in_nobodys_way(ends: Ends) -> None:
    await ends.lines.send(ME, [b"first"], 10)
    many = [asyncio.create_task(ends.lines.send(ME, [str(number).encode()], 10)) for number in range(3 * MAX_AWAITED)]
    await asyncio.sleep(0)
    for call in many[: 2 * MAX_AWAITED]:
        call.cancel()
    assert await ends.lines.send(ME, [b"last"], 10) == [""]
    await asyncio.gather(*many, return_exceptions=True)
    assert [call.result() for call in many[2 * MAX_AWAITED :]] == [[""]] * MAX_AWAITED
    numbers = [int(raw) for raw in ends.got if raw.isdigit()]
    assert numbers == sorted(numbers)
    assert numbers[-MAX_AWAITED:] == list(range(2 * MAX_AWAITED, 3 * MAX_AWAITED))


async def test_who_is_turned_away_is_told_and_the_stream_goes_on(ends: Ends) -> None:
    ends.turned_away = "busy"
    assert await ends.lines.send(ME, [bytes(300_000), b"x"], 10) == ["busy", "busy"]
    ends.turned_away = ""
    assert await ends.lines.send(ME, [b"y"], 10) == [""]
    assert ends.got == [b"y"]
    assert ends.num_opened == 1


async def test_a_line_that_broke_is_opened_again_and_the_message_comes(ends: Ends) -> None:
    await ends.lines.send(ME, [b"one"], 10)
    for task in ends.tasks:
        task.cancel()
    await asyncio.wait(ends.tasks)
    assert await ends.lines.send(ME, [b"two"], 10) == [""]
    assert ends.got == [b"one", b"two"]
    assert ends.num_opened == 2


async def test_on_another_path_what_is_under_way_is_answered_and_the_next_goes_on_a_new_stream(ends: Ends) -> None:
    await ends.lines.send(ME, [b"one"], 10)
    under_way = asyncio.ensure_future(ends.lines.send(ME, [bytes(300_000)], 10))
    await asyncio.sleep(0)
    ends.lines.renew([ME, PeerId("nobody")])
    assert await ends.lines.send(ME, [b"two"], 10) == [""]
    assert await under_way == [""]
    assert (ends.num_opened, len(ends.got)) == (2, 3)
    old = next(iter(ends.tasks))
    ends.lines.renew([ME])
    await asyncio.wait_for(asyncio.gather(*ends.tasks), 10)
    assert old.done()


async def test_a_stream_that_ends_at_once_is_not_opened_for_ever(ends: Ends) -> None:
    ends.intake.end()
    with pytest.raises(PeerGone):
        await ends.lines.send(ME, [b"x"], 10)
    assert ends.num_opened == 1


async def test_who_never_answers_is_silent_and_its_line_given_up(ends: Ends) -> None:
    async def deaf(_peer: PeerId) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        near, far = socket.socketpair()
        _, far_writer = await asyncio.open_connection(sock=far)
        reader, writer = await asyncio.open_connection(sock=near)
        opened.append(far_writer)
        return reader, writer

    opened: list[asyncio.StreamWriter] = []
    lines = MessageLines(deaf)
    for _ in range(2):
        with pytest.raises(PeerSilent, match=r"no answer within 0.05 s"):
            await lines.send(ME, [b"x"], 0.05)
    assert len(opened) == 2
    for writer in opened:
        writer.transport.abort()
    await asyncio.gather(*lines.close())


async def test_a_line_without_use_is_closed_at_both_ends(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_streams, "IDLE_S", 0.05)
    await ends.lines.send(ME, [b"x"], 10)
    await asyncio.wait_for(asyncio.gather(*ends.tasks), 10)


async def test_who_opens_and_says_nothing_is_given_up(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_streams, "KEPT_S", 0.05)
    reader, _ = await ends.open(ME)
    assert await asyncio.wait_for(reader.read(), 10) == b""


async def test_who_stops_in_the_middle_is_given_up(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_streams, "STALL_S", 0.05)
    reader, writer = await ends.open(ME)
    writer.write(pack_batch([b"whole"])[:-1])
    assert await asyncio.wait_for(reader.read(), 10) == b""
    assert not ends.got


@pytest.mark.parametrize(
    ("raw", "is_oversize"), [(b"\x01\xff\xff\xff\xff", True), (b"\x02" + b"\0\0\0\x05" + b"\0\0\0\1a", False)]
)
async def test_what_cannot_be_read_is_blamed_and_ends_the_stream(ends: Ends, raw: bytes, is_oversize: bool) -> None:
    reader, writer = await ends.open(ME)
    writer.write(raw)
    assert await asyncio.wait_for(reader.read(), 10) == b""
    assert ends.blamed == [is_oversize]


async def test_strangers_have_so_many_streams_and_the_idlest_makes_room(ends: Ends) -> None:
    readers = [(await ends.open(PeerId(f"peer {number}")))[0] for number in range(MAX_STREAMS_OF_STRANGERS)]
    await ends.lines.send(ME, [b"in"], 10)
    assert await asyncio.wait_for(readers[0].read(), 10) == b""
    assert not readers[1].at_eof()
    of_one = [(await ends.open(PeerId("peer 5")))[0] for _ in range(2)]
    assert await asyncio.wait_for(readers[5].read(), 10) == b""
    assert not of_one[0].at_eof()


async def test_a_lie_about_how_much_is_answered_ends_the_line(ends: Ends) -> None:
    async def lying(_peer: PeerId) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        near, far = socket.socketpair()
        _, far_writer = await asyncio.open_connection(sock=far)
        far_writer.write(b"\xff\xff" + bytes(100))
        reader, writer = await asyncio.open_connection(sock=near)
        opened.append(far_writer)
        return reader, writer

    opened: list[asyncio.StreamWriter] = []
    lines = MessageLines(lying)
    with pytest.raises(PeerGone):
        await lines.send(ME, [b"x"], 10)
    for writer in opened:
        writer.transport.abort()
    await asyncio.gather(*lines.close())
