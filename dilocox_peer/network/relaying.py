"""This peer as a relay for those that nobody can dial: circuit relay v2, served by ourselves over our own p2pd.

p2pd's relay has no limit of rate, limits of a circuit that depend on a race, and serves whoever asks, whatever it is told; so we
take its place, also where the owner wants none of it, and refuse. Here every byte that is passed
on goes through our hands, so that the owner's budget holds, counts as upload, and is shared fairly (relay_desk.py). What passes is
TLS between the two ends: it can be dropped or delayed here, and neither read nor changed. What is asked is a stranger's: bounded in
size, time and number, and in a run that is not open answered as its gate says.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import base58

from dilocox_peer.admission import Right
from dilocox_peer.errors import PeerUnavailable
from dilocox_peer.network import relay_protocol
from dilocox_peer.network.bulk import until_heard
from dilocox_peer.network.crowding import to_give_up
from dilocox_peer.network.lasting import lasting
from dilocox_peer.network.relay_desk import MOST_PIECE_BYTES, RESERVED_S, Circuit, RelayDesk, RelayTurns
from dilocox_peer.network.relay_protocol import AskCircuit, RelayStatus
from dilocox_peer.network.transport import Transport
from dilocox_peer.types import PeerId

ASK_S = 10.0  # for a request, and for what the target says to it
LEAST_BYTES_PER_S = 1.0
IDLE_S = 120.0  # of a circuit: what peers send to know of each other that they live comes four times as often
MAX_REQUESTS, MAX_REQUESTS_OF_PEER = 32, 4  # being answered at once; others are dropped unread
PATIENT_S = 1.0  # with a stream on which nothing is asked, when others wait

_CircuitEnd = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Relay:
    """`serve`, and `close` in the end."""

    def __init__(
        self,
        transport: Transport,
        bytes_per_s: float | None,
        *,
        is_open: Callable[[], bool],
        right: Right | None = Right.READ,
    ) -> None:
        """bytes_per_s: for all that it passes on; None: it takes nobody. is_open: whether others can dial us, as far as is known now. right: as Transport.serve."""
        self._transport = transport
        self._is_open = is_open if bytes_per_s is not None else lambda: False
        self._right = right
        self._desk = RelayDesk()
        self._turns = RelayTurns(bytes_per_s or LEAST_BYTES_PER_S, time.monotonic())
        self._waiting: dict[int, tuple[asyncio.Future[None], int]] = {}  # for the turn of a ticket, of so many bytes
        self._asked = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._requests: dict[asyncio.Task[None], PeerId] = {}
        self._passing: dict[Circuit, asyncio.Task[None]] = {}
        self._unread: dict[asyncio.Task[None], float] = {}  # since when, of those, the oldest first
        self._granting: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        """From here on. Raises PeerUnavailable, TimeoutError."""
        self._granting = asyncio.create_task(
            lasting(self._grant, "passing on", self._transport.doors.tell), name="relay"
        )
        self._transport.doors.keeper.keep(lambda peer: self._desk.has(peer, time.monotonic()))
        await self._transport.take_protocol(relay_protocol.PROTOCOL, self._on_stream, right=self._right)

    async def close(self) -> None:
        """Ends all circuits."""
        tasks = {*self._tasks, *([self._granting] if self._granting is not None else [])}
        self._granting = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def num_reserved(self) -> int:
        """Peers that have a place here."""
        return self._desk.num_reserved_at(time.monotonic())

    @property
    def num_circuits(self) -> int:
        return self._desk.num_circuits

    @property
    def num_bytes(self) -> int:
        """That were passed on."""
        return self._turns.num_bytes

    # ---- requests ----------------------------------------------------------------------------------------------------

    async def _on_stream(self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or self._granting is None or not self._has_room(peer):
            writer.transport.abort()
            return
        self._tasks.add(task)
        try:
            self._requests[task], self._unread[task] = peer, time.monotonic()
            try:
                async with asyncio.timeout(2 * ASK_S):
                    come_about = await self._answer(peer, reader, writer)
                    if come_about is None:
                        await until_heard(reader)
            finally:
                self._requests.pop(task, None)
                self._unread.pop(task, None)
            if come_about is not None:
                circuit, outside = come_about
                try:
                    await self._pass_on(peer, (reader, writer), circuit.target, outside)
                finally:
                    self._ended(circuit)
        except (OSError, asyncio.IncompleteReadError, ValueError, PeerUnavailable):  # TimeoutError is an OSError
            pass
        except asyncio.CancelledError:
            pass  # this is all that the task does, and Python 3.11 prints a traceback for a stream's cancelled handler
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    def _has_room(self, peer: PeerId) -> bool:
        """Whether one more request of the peer is read. For its sake one may have to go: the oldest of the range of addresses that has most, though it
        is being answered; else a stream on which nothing was said yet, of who has more than it would have, or the one silent longest."""
        held = Counter(self._requests.values())
        if held[peer] >= MAX_REQUESTS_OF_PEER:
            return False
        if len(self._requests) < MAX_REQUESTS:
            return True
        places = {task: self._transport.doors.holder_of(by) for task, by in self._requests.items()}
        if (crowding := to_give_up(places, self._transport.doors.holder_of(peer))) is not None:
            del self._requests[crowding]
            self._unread.pop(crowding, None)
            crowding.cancel()
            return True
        silent = max(self._unread, key=lambda task: held[self._requests[task]], default=None)  # the oldest of those
        if silent is None:
            return False
        if held[self._requests[silent]] <= held[peer] + 1:
            silent, since = next(iter(self._unread.items()))
            if time.monotonic() - since < PATIENT_S:
                return False
        del self._requests[silent], self._unread[silent]
        silent.cancel()
        return True

    async def _answer(
        self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[Circuit, _CircuitEnd] | None:
        """A circuit and what it leads to, if that was asked for and has come about; it counts at the desk then."""
        try:
            async with asyncio.timeout(ASK_S):
                request = relay_protocol.read_request(await _message(reader))
        except ValueError:
            await _say(writer, relay_protocol.answered(RelayStatus.MALFORMED))
            return None
        finally:
            task = asyncio.current_task()
            if task is not None:
                self._unread.pop(task, None)
        if not isinstance(request, AskCircuit):
            hosts = await self._transport.seen_at(peer)
            self._desk.is_open = self._is_open() and bool(hosts)  # one that comes through a relay is passed on by that
            host = "" if not hosts or hosts[0] in ("127.0.0.1", "::1") else hosts[0]
            verdict = self._desk.reserve(peer, host, time.monotonic())
            until = int(time.time() + RESERVED_S)
            is_in = verdict is RelayStatus.OK
            await _say(writer, relay_protocol.reserved_until(until) if is_in else relay_protocol.answered(verdict))
            return None
        target = PeerId(base58.b58encode(request.target).decode("ascii"))
        holder = await self._transport.doors.holder(peer)  # for as long as the circuit lasts
        circuit = self._desk.connect(peer, target, time.monotonic(), holder)
        for each in self._desk.take_given_up():
            if (passing := self._passing.pop(each, None)) is not None:
                passing.cancel()
        if isinstance(circuit, RelayStatus):
            await _say(writer, relay_protocol.answered(circuit))
            return None
        if task is not None:
            self._passing[circuit] = task
        outside: _CircuitEnd | None = None
        try:
            outside = await self._reach(peer, target)
            if outside is not None:
                await _say(writer, relay_protocol.answered(RelayStatus.OK))
                return circuit, outside
        except BaseException:
            if outside is not None:
                outside[1].transport.abort()
            self._ended(circuit)
            raise
        self._ended(circuit)
        await _say(writer, relay_protocol.answered(RelayStatus.NOT_REACHED))
        return None

    def _ended(self, circuit: Circuit) -> None:
        self._desk.ended(circuit)
        self._passing.pop(circuit, None)

    async def _reach(self, source: PeerId, target: PeerId) -> _CircuitEnd | None:
        """A stream to the target, which takes the source; None if it is not connected with us, or does not."""
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(ASK_S):
                if (await self._transport.paths()).get(target) != "direct":
                    return None  # p2pd would dial it, wherever somebody says that it is
                reader, writer = await self._transport.open_stream(target, relay_protocol.STOP_PROTOCOL, ASK_S)
                await _say(writer, relay_protocol.passed_on(base58.b58decode(source)))
                if relay_protocol.is_taken(await _message(reader)):
                    pair, writer = (reader, writer), None
                    return pair
        except (OSError, asyncio.IncompleteReadError, ValueError, PeerUnavailable):
            pass
        finally:
            if writer is not None:
                writer.transport.abort()
        return None

    # ---- bytes -------------------------------------------------------------------------------------------------------

    async def _pass_on(self, source: PeerId, one: _CircuitEnd, target: PeerId, other: _CircuitEnd) -> None:
        """Bytes both ways, until one of the two ends, or nothing passes for IDLE_S: the place is another's then."""
        passed = [0, 0]
        ways = [
            asyncio.ensure_future(self._copy(source, one[0], other[1], passed, 0)),
            asyncio.ensure_future(self._copy(target, other[0], one[1], passed, 1)),
        ]
        try:
            before = -1
            while sum(passed) != before:
                before = sum(passed)
                done, _ = await asyncio.wait(ways, timeout=IDLE_S, return_when=asyncio.FIRST_COMPLETED)
                if done:
                    break
        finally:
            for way in ways:
                way.cancel()
            for _, writer in (one, other):
                writer.transport.abort()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _copy(
        self, sender: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passed: list[int], way: int
    ) -> None:
        """passed: by way, bytes that were taken."""
        with suppress(OSError):
            while data := await reader.read(MOST_PIECE_BYTES):
                view = memoryview(data)
                while view:
                    piece, view = view[: (most := self._turns.piece_bytes())], view[most:]
                    await self._turn(sender, len(piece))
                    writer.write(piece)
                    await writer.drain()
                    passed[way] += len(piece)

    async def _turn(self, sender: PeerId, num_bytes: int) -> None:
        place = self._transport.doors.holder_of(sender)
        ticket = self._turns.ask(sender, num_bytes, place)
        turn = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = turn, num_bytes
        self._asked.set()
        try:
            await turn
        finally:
            del self._waiting[ticket]
            if not turn.done() or turn.cancelled():
                self._turns.withdraw(sender, ticket, place)

    async def _grant(self) -> None:
        while True:
            self._asked.clear()
            for ticket in self._turns.granted(time.monotonic()):
                if (waiting := self._waiting.get(ticket)) is None:
                    continue
                turn, num_bytes = waiting
                # The line too has one turn after the other: what waits there by itself has no order but that of coming.
                await self._transport.bandwidth.pace_upload(num_bytes, "relayed")
                if not turn.done():
                    turn.set_result(None)
            if (wait_s := self._turns.wait_s(time.monotonic())) is None:
                await self._asked.wait()
            else:
                await asyncio.sleep(wait_s)


async def _message(reader: asyncio.StreamReader) -> bytes:
    """Raises ValueError, IncompleteReadError, OSError."""
    prefix = b""
    while (length := relay_protocol.length_of(prefix)) is None:
        prefix += await reader.readexactly(1)
    return await reader.readexactly(length)


async def _say(writer: asyncio.StreamWriter, raw: bytes) -> None:
    writer.write(raw)
    await writer.drain()
