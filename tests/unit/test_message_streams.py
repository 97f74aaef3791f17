"""Messages between two ends of a stream, here a socket pair, and how they are framed."""

import asyncio
import random
import socket
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

import pytest

from dilocox_peer.errors import ProtocolError
from dilocox_peer.network import message_streams
from dilocox_peer.network.bulk import PeerGone, PeerSilent
from dilocox_peer.network.message_answers import ANSWERED_AT_ONCE, NOTHING_TOLD, UNASKED
from dilocox_peer.network.message_frames import (
    ANSWER_HEAD_BYTES,
    BATCH_BYTES,
    HEAD_BYTES,
    MAX_BATCH,
    MAX_DEFLATED_BYTES,
    MAX_MESSAGE_BYTES,
    NUMBERS,
    BatchHead,
    BatchPacking,
    Told,
    join_batch,
    num_in_batch,
    pack_answer,
    pack_head,
    read_answer_head,
    read_head,
    split_answer,
    split_batch,
)
from dilocox_peer.network.message_packing import Packer, Unpacker
from dilocox_peer.network.message_streams import MAX_AWAITED, MAX_STREAMS_OF_STRANGERS, MessageIntake, MessageLines
from dilocox_peer.types import PeerId

ME = PeerId("me")


def _nothing(_peer: PeerId) -> Told:
    return NOTHING_TOLD


def _ignored(_peer: PeerId) -> None:
    pass


def packed(packer: Packer, messages: Sequence[bytes]) -> bytes:
    return packer.pack(len(messages), join_batch(messages))


@pytest.mark.parametrize("seed", range(20))
def test_a_batch_and_its_answer_come_out_as_they_went_in(seed: int) -> None:
    rng = random.Random(seed)
    messages = [rng.randbytes(rng.choice([0, 1, 200, 5000])) for _ in range(rng.randrange(1, MAX_BATCH + 1))]
    packer, unpacker = Packer(), Unpacker()
    for batch in (messages, messages[:1], messages[::-1]):
        raw = packed(packer, batch)
        head = read_head(raw[:HEAD_BYTES])
        assert head.num_packed == len(raw) - HEAD_BYTES
        assert unpacker.unpack(head, raw[HEAD_BYTES:]) == batch
    count = len(messages)
    reasons = [rng.choice(["", "busy", "not ready"]) for _ in messages]
    answer = pack_answer(7, reasons)
    assert read_answer_head(answer[:ANSWER_HEAD_BYTES]) == (7, len(answer) - ANSWER_HEAD_BYTES)
    assert split_answer(count, answer[ANSWER_HEAD_BYTES:]) == reasons


def test_what_goes_into_one_batch_is_bounded() -> None:
    assert num_in_batch([MAX_MESSAGE_BYTES, 1]) == 1
    assert num_in_batch([1] * 100) == MAX_BATCH
    assert num_in_batch([BATCH_BYTES - 1, 1, 1]) == 2
    join_batch([bytes(MAX_MESSAGE_BYTES)])
    for too_much in ([], [b""] * (MAX_BATCH + 1), [bytes(MAX_MESSAGE_BYTES), b"x"]):
        with pytest.raises(ValueError, match="at most"):
            join_batch(too_much)


def test_what_is_said_again_takes_little_room() -> None:
    rng = random.Random(0)
    proposal, news = rng.randbytes(7000), rng.randbytes(300)
    packer = Packer()
    first, again, after = packed(packer, [proposal]), packed(packer, [news, proposal]), packed(packer, [b"x"])
    assert len(first) < 7000 + 40
    assert len(again) < 300 + 110 + HEAD_BYTES
    assert len(after) < 15 + HEAD_BYTES


def test_what_is_large_goes_as_it_is_and_leaves_the_rest_together() -> None:
    packer, unpacker, large = Packer(), Unpacker(), bytes(MAX_DEFLATED_BYTES)
    for batch, packing in (
        ([b"a" * 500], BatchPacking.BEGINS), ([large], BatchPacking.NONE), ([b"a" * 500], BatchPacking.GOES_ON), ([large], BatchPacking.NONE),
    ):  # fmt: skip
        raw = packed(packer, batch)
        head = read_head(raw[:HEAD_BYTES])
        assert head.packing is packing
        assert unpacker.unpack(head, raw[HEAD_BYTES:]) == batch


def test_after_a_batch_that_was_not_looked_at_the_next_begins_anew() -> None:
    packer, unpacker = Packer(), Unpacker()
    first, second = packed(packer, [b"one"]), packed(packer, [b"two"])
    unpacker.forget()  # instead of unpacking the first
    assert unpacker.is_lost(read_head(second[:HEAD_BYTES]))
    packer.forget()
    third = packed(packer, [b"three"])
    head = read_head(third[:HEAD_BYTES])
    assert not unpacker.is_lost(head)
    assert unpacker.unpack(head, third[HEAD_BYTES:]) == [b"three"]
    assert first != third


@pytest.mark.parametrize("said", [0, 1, 20_000, 30_003, 30_005])
def test_no_more_comes_of_deflated_bytes_than_was_said(said: int) -> None:
    raw = packed(Packer(), [bytes(30_000)])
    head = read_head(raw[:HEAD_BYTES])
    assert head.num_bytes == 30_004
    with pytest.raises(ProtocolError, match=f"other than the {said} bytes"):
        Unpacker().unpack(head._replace(num_bytes=said), raw[HEAD_BYTES:])


@pytest.mark.parametrize("packed", [b"\xff" * 9, zlib.compress(bytes(9))[2:-4], b""])
def test_what_does_not_inflate_is_refused(packed: bytes) -> None:
    with pytest.raises(ProtocolError):
        Unpacker().unpack(BatchHead(BatchPacking.BEGINS, 1, 9, len(packed), *ANSWERED_AT_ONCE), packed)


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (b"\x00\x00" + bytes(11), "0 messages"),
        (b"\x01\x21" + bytes(11), "33 messages"),
        (b"\x01\x01" + bytes(3) + b"\xff\xff\xff\xff" + bytes(4), "4294967295 bytes"),
        (b"\x83\x01" + bytes(11), "in way 3"),
        (b"\x01\x01" + bytes(3) + b"\0\1\x10\1" + bytes(4), "deflated messages of 69633 bytes"),
        (b"\x00\x01" + bytes(3) + b"\0\0\0\x05" + b"\0\0\0\x04", "of 5 bytes packed into 4"),
        (b"\x01\x01" + bytes(3) + b"\0\0\0\x05" + b"\0\0\x04\x06", "of 5 bytes packed into 1030"),
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
        self.came = asyncio.Event()
        self.refused: dict[bytes, str] = {}
        self.turned_away = ""
        self.blamed: list[bool] = []
        self.num_opened = self.num_asked = 0
        self.strangers = True
        self.intake = MessageIntake(
            self.admit,
            self.take,
            lambda _peer: self.strangers,
            lambda _peer, is_oversize: self.blamed.append(is_oversize),
            lambda num_bytes: None,
            lambda peer, told: self.lines.taken(peer, told),
        )
        self.lines = MessageLines(self.open, self.intake.tell, self.intake.tell_again)
        self.tasks: set[asyncio.Task[None]] = set()
        self._stack = stack
        self._writers: list[asyncio.StreamWriter] = []  # one that is forgotten closes its stream

    async def send(self, messages: Sequence[bytes]) -> list[str]:
        return (await self.lines.send(ME, messages, 10))[0]

    def admit(self, _peer: PeerId, _count: int, _bytes: int) -> str | None:
        self.num_asked += 1
        return self.turned_away or None

    def take(self, _peer: PeerId, raw: bytes) -> str:
        self.got.append(raw)
        self.came.set()
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
    found = await asyncio.gather(*(ends.send([str(number).encode()]) for number in range(50)))
    assert ends.got == [str(number).encode() for number in range(50)]
    assert [reasons for reasons in found if reasons != [""]] == [["no such message"]]
    assert found[17] == ["no such message"]
    assert ends.num_opened == 1


async def test_an_answer_nobody_waits_for_is_not_another_ones(ends: Ends) -> None:
    ends.refused[b"first"] = "refused"
    await ends.send([b"opened"])
    first = asyncio.ensure_future(ends.send([b"first"]))
    await asyncio.sleep(0)
    first.cancel()
    assert await ends.send([b"second"]) == [""]


async def test_more_than_may_be_unanswered_wait_in_order_and_those_given_up_are_in_nobodys_way(ends: Ends) -> None:
    await ends.send([b"first"])
    many = [asyncio.create_task(ends.send([str(number).encode()])) for number in range(3 * MAX_AWAITED)]
    await asyncio.sleep(0)
    for call in many[: 2 * MAX_AWAITED]:
        call.cancel()
    assert await ends.send([b"last"]) == [""]
    await asyncio.gather(*many, return_exceptions=True)
    assert [call.result() for call in many[2 * MAX_AWAITED :]] == [[""]] * MAX_AWAITED
    numbers = [int(raw) for raw in ends.got if raw.isdigit()]
    assert numbers == sorted(numbers)
    assert numbers[-MAX_AWAITED:] == list(range(2 * MAX_AWAITED, 3 * MAX_AWAITED))


async def test_who_is_turned_away_is_told_and_the_stream_goes_on(ends: Ends) -> None:
    ends.turned_away = "busy"
    assert await ends.send([bytes(300_000), b"x"]) == ["busy", "busy"]
    ends.turned_away = ""
    assert await ends.send([b"y"]) == [""]
    assert ends.got == [b"y"]
    assert ends.num_opened == 1


async def test_a_line_that_broke_is_opened_again_and_the_message_comes(ends: Ends) -> None:
    await ends.send([b"one"])
    for task in ends.tasks:
        task.cancel()
    await asyncio.wait(ends.tasks)
    assert await ends.send([b"two"]) == [""]
    assert ends.got == [b"one", b"two"]
    assert ends.num_opened == 2


async def test_on_another_path_what_is_under_way_is_answered_and_the_next_goes_on_a_new_stream(ends: Ends) -> None:
    await ends.send([b"one"])
    under_way = asyncio.ensure_future(ends.send([bytes(300_000)]))
    await asyncio.sleep(0)
    ends.lines.renew([ME, PeerId("nobody")])
    assert await ends.send([b"two"]) == [""]
    assert await under_way == [""]
    assert (ends.num_opened, len(ends.got)) == (2, 3)
    old = next(iter(ends.tasks))
    ends.lines.renew([ME])
    await asyncio.wait_for(asyncio.gather(*ends.tasks), 10)
    assert old.done()


async def test_a_stream_that_ends_at_once_is_not_opened_for_ever(ends: Ends) -> None:
    ends.intake.end()
    with pytest.raises(PeerGone):
        await ends.send([b"x"])
    assert ends.num_opened == 1


async def test_who_never_answers_is_silent_and_its_line_given_up(ends: Ends) -> None:
    async def deaf(_peer: PeerId) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        near, far = socket.socketpair()
        _, far_writer = await asyncio.open_connection(sock=far)
        reader, writer = await asyncio.open_connection(sock=near)
        opened.append(far_writer)
        return reader, writer

    opened: list[asyncio.StreamWriter] = []
    lines = MessageLines(deaf, _nothing, _ignored)
    for _ in range(2):
        with pytest.raises(PeerSilent, match=r"no answer within 0.05 s"):
            await lines.send(ME, [b"x"], 0.05)
    assert len(opened) == 2
    for writer in opened:
        writer.transport.abort()
    await asyncio.gather(*lines.close())


async def test_what_waits_beside_one_that_is_not_answered_in_time_is_told_of_silence_too() -> None:
    """Not that nobody is there: that would count as a process that has ended."""
    opened: list[asyncio.StreamWriter] = []

    async def deaf(_peer: PeerId) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        near, far = socket.socketpair()
        _, far_writer = await asyncio.open_connection(sock=far)
        opened.append(far_writer)
        return await asyncio.open_connection(sock=near)

    lines = MessageLines(deaf, _nothing, _ignored)
    sent = [asyncio.create_task(lines.send(ME, [b"x"], timeout_s)) for timeout_s in (0.2, 10, 10, 10)]
    for each in sent:
        with pytest.raises(PeerSilent):
            await asyncio.wait_for(each, 5)
    assert len(opened) == 1
    opened[0].transport.abort()
    await asyncio.gather(*lines.close())


async def test_a_line_without_use_is_closed_at_both_ends(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_streams, "IDLE_S", 0.05)
    await ends.send([b"x"])
    await asyncio.wait_for(asyncio.gather(*ends.tasks), 10)


async def test_who_opens_and_says_nothing_is_given_up(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_streams, "KEPT_S", 0.05)
    reader, _ = await ends.open(ME)
    assert await asyncio.wait_for(reader.read(), 10) == b""


async def test_who_stops_in_the_middle_is_given_up(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_streams, "STALL_S", 0.05)
    reader, writer = await ends.open(ME)
    writer.write(packed(Packer(), [b"whole"])[:-1])
    assert await asyncio.wait_for(reader.read(), 10) == b""
    assert not ends.got


@pytest.mark.parametrize(
    ("raw", "is_oversize"),
    [
        (b"\x00\x01" + b"\xff" * 11, True),
        (b"\x00\x02" + bytes(3) + b"\0\0\0\x05" * 2 + b"\0\0\0\1a", False),
        (b"\x01\x02" + bytes(3) + b"\0\0\0\x05" * 2 + b"\xff" * 5, False),
    ],
)
async def test_what_cannot_be_read_is_blamed_and_ends_the_stream(ends: Ends, raw: bytes, is_oversize: bool) -> None:
    reader, writer = await ends.open(ME)
    writer.write(raw)
    assert await asyncio.wait_for(reader.read(), 10) == b""
    assert ends.blamed == [is_oversize]


async def test_strangers_have_so_many_streams_and_the_idlest_makes_room(ends: Ends) -> None:
    readers = [(await ends.open(PeerId(f"peer {number}")))[0] for number in range(MAX_STREAMS_OF_STRANGERS)]
    await ends.send([b"in"])
    assert await asyncio.wait_for(readers[0].read(), 10) == b""
    assert not readers[1].at_eof()
    of_one = [(await ends.open(PeerId("peer 5")))[0] for _ in range(2)]
    assert await asyncio.wait_for(readers[5].read(), 10) == b""
    assert not of_one[0].at_eof()


async def test_after_a_refusal_messages_are_taken_again_on_the_same_stream(ends: Ends) -> None:
    assert await ends.send([b"one"]) == [""]
    ends.turned_away = "too many"
    assert await ends.send([b"two"]) == ["too many"]
    ends.turned_away = ""
    assert await ends.send([b"three"]) == [""]
    assert (ends.got, ends.num_opened, ends.blamed) == ([b"one", b"three"], 1, [])


async def test_who_is_refused_has_the_loop_for_one_batch_at_a_time(ends: Ends) -> None:
    """Thousands of them, without a message in them, fit into what is read of a stream at once."""
    _, writer = await ends.open(ME)
    ends.turned_away = "too many"
    writer.write(pack_head(BatchHead(BatchPacking.GOES_ON, 1, 0, 0, 0, False, NOTHING_TOLD)) * 5000)
    began, taken = asyncio.get_running_loop().time(), ends.num_asked
    turns = []  # batches that were looked at in each turn of the loop
    while asyncio.get_running_loop().time() - began < 0.3:
        await asyncio.sleep(0)
        turns.append(ends.num_asked - taken)
        taken = ends.num_asked
    assert taken > 0
    assert max(turns) == 1


async def test_what_goes_on_with_a_batch_that_was_refused_is_refused_and_nobody_is_blamed(ends: Ends) -> None:
    packer = Packer()
    reader, writer = await ends.open(ME)
    for refused in ("too many", ""):
        ends.turned_away = refused
        writer.write(packed(packer, [b"one"]))
        _, num_bytes = read_answer_head(await asyncio.wait_for(reader.readexactly(ANSWER_HEAD_BYTES), 10))
        answer = await asyncio.wait_for(reader.readexactly(num_bytes), 10)
        assert split_answer(1, answer) == [refused or "what this goes on with was not looked at"]
    assert (ends.got, ends.blamed) == ([], [])


async def test_a_lie_about_how_much_is_answered_ends_the_line(ends: Ends) -> None:
    async def lying(_peer: PeerId) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        near, far = socket.socketpair()
        _, far_writer = await asyncio.open_connection(sock=far)
        far_writer.write(b"\1\xff\xff" + bytes(100))
        reader, writer = await asyncio.open_connection(sock=near)
        opened.append(far_writer)
        return reader, writer

    opened: list[asyncio.StreamWriter] = []
    lines = MessageLines(lying, _nothing, _ignored)
    with pytest.raises(PeerGone):
        await lines.send(ME, [b"x"], 10)
    for writer in opened:
        writer.transport.abort()
    await asyncio.gather(*lines.close())


class Pair:
    """Two ends that send to each other, the intake of each telling its own lines."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.here, self.there = Ends(stack), Ends(stack)
        for near, far in ((self.here, self.there), (self.there, self.here)):
            near.lines = MessageLines(far.open, near.intake.tell, near.intake.tell_again)
        self.alone = 0  # answers that did not ride

    async def say(self, ends: Ends, message: bytes) -> asyncio.Task[list[str]]:
        """On its way and taken."""
        other = self.there if ends is self.here else self.here
        other.came.clear()
        task = asyncio.create_task(ends.send([message]))
        await asyncio.wait_for(other.came.wait(), 10)
        return task


@pytest.fixture
async def pair(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    """Here no answer goes alone for want of a batch the other way."""
    monkeypatch.setattr(message_streams, "ANSWER_S", 60.0)
    async with AsyncExitStack() as stack:
        pair = Pair(stack)
        for ends in (pair.here, pair.there):
            await ends.send([b"opened"])
        yield pair
        over = {task for ends in (pair.here, pair.there) for task in ends.lines.close() | ends.intake.end()}
        await asyncio.wait(over, timeout=10)
        await asyncio.wait_for(asyncio.gather(*pair.here.tasks, *pair.there.tasks), 10)


async def test_an_answer_rides_on_what_is_said_the_other_way(pair: Pair) -> None:
    for number in range(2 * NUMBERS):
        question = await pair.say(pair.here, str(number).encode())
        assert not question.done()
        back = await pair.say(pair.there, b"back")
        assert await asyncio.wait_for(question, 10) == [""]
        await pair.say(pair.here, b"and again")
        assert await asyncio.wait_for(back, 10) == [""]
        await pair.say(pair.there, b"and again")


async def test_an_answer_goes_alone_where_nothing_goes_the_other_way(ends: Ends) -> None:
    await ends.send([b"opened"])
    assert await asyncio.wait_for(ends.send([b"alone"]), 10) == [""]


async def test_who_waits_for_several_answers_is_answered_at_once(pair: Pair) -> None:
    waiting = [await pair.say(pair.here, bytes([number])) for number in range(UNASKED)]
    assert not any(each.done() for each in waiting)
    assert await asyncio.wait_for(pair.here.send([b"one more"]), 10) == [""]
    assert [each.result() for each in waiting] == [[""]] * UNASKED


async def test_a_refusal_never_rides_and_nothing_behind_it_until_it_was_read(pair: Pair) -> None:
    pair.there.refused[b"bad"] = "no"
    good = await pair.say(pair.here, b"good")
    bad = await pair.say(pair.here, b"bad")
    behind = await pair.say(pair.here, b"behind")
    await pair.say(pair.there, b"back")
    assert [await asyncio.wait_for(each, 10) for each in (good, bad, behind)] == [[""], ["no"], [""]]
    after = await pair.say(pair.here, b"after")
    assert not after.done()
    await pair.say(pair.there, b"back again")
    assert await asyncio.wait_for(after, 10) == [""]


async def test_what_rode_on_a_line_that_broke_is_told_again(pair: Pair) -> None:
    question = await pair.say(pair.here, b"question")
    assert pair.there.intake.tell(ME) == Told(1, 2)  # goes along with what never comes
    pair.there.lines.drop([ME])
    assert await asyncio.wait_for(question, 10) == [""]


async def test_what_was_told_on_a_line_that_is_retired_counts_and_ends_it(pair: Pair) -> None:
    question = await pair.say(pair.here, b"question")
    pair.here.lines.renew([ME])
    await pair.say(pair.there, b"back")
    assert await asyncio.wait_for(question, 10) == [""]
    await asyncio.wait_for(asyncio.gather(*pair.there.tasks), 10)


async def test_counts_of_what_was_never_sent_change_nothing(pair: Pair) -> None:
    question = await pair.say(pair.here, b"question")
    for line in range(NUMBERS):
        for count in (0, 1, 3, 200):
            pair.here.lines.taken(ME, Told(line, count))
    assert not question.done()
    pair.here.lines.taken(ME, Told(1, 2))
    assert await asyncio.wait_for(question, 10) == [""]
