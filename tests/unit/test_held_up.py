"""What a few that send nothing, or next to nothing, cost others: places for streams, for large batches and for replies, looks and copies.

Each is a real object on a virtual clock, with streams in memory.
"""

import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import base58
import pytest

from dilocox_peer.dht.records import Lease
from dilocox_peer.events import Event
from dilocox_peer.events_of_states import StageCopied
from dilocox_peer.network import relay_protocol
from dilocox_peer.network.bandwidth import Bandwidth
from dilocox_peer.network.bulk import REQUEST, PeerSilent, Reply, RequestRefused
from dilocox_peer.network.frames import PREFIX_BYTES, pack_header, unpack_prefix
from dilocox_peer.network.message_frames import join_batch
from dilocox_peer.network.message_packing import Packer
from dilocox_peer.network.message_streams import LARGE_AT_ONCE, MessageIntake
from dilocox_peer.network.relaying import MAX_REQUESTS, Relay
from dilocox_peer.network.serving import Serving, TransportLimits
from dilocox_peer.peer.state.backup import Annals
from dilocox_peer.peer.state.backup_exchange import BACKUP_SERVICE, BackupServer
from dilocox_peer.peer.state.guardian import Guardian
from dilocox_peer.peer.state.survey import CHAIN_S, GRACE_S, Survey
from dilocox_peer.signing import SigningKey, verify
from dilocox_peer.types import PeerId
from tests.certified_stage import MANIFEST, ROSTER, STAGE, CertifiedStage
from tests.virtual_loop import run_virtually

ME, HONEST = PeerId("me"), PeerId("honest")
BODY = bytes(4 << 20)


def _range_of(peer: PeerId) -> str:
    return "198.41.0.0/24" if peer == HONEST else "203.0.113.0/24"


async def _range_soon(peer: PeerId) -> str:
    return _range_of(peer)


class _Writer:
    """Of a stream in memory; it is its own transport."""

    def __init__(self) -> None:
        self.raw, self.is_gone, self.changed = bytearray(), False, asyncio.Event()
        self.transport = self

    def write(self, data: bytes) -> None:
        self.raw += data
        self.changed.set()

    async def drain(self) -> None:
        pass

    def abort(self) -> None:
        self.is_gone = True
        self.changed.set()

    close = abort


def _stream(said: bytes = b"") -> tuple[asyncio.StreamReader, Any]:
    reader = asyncio.StreamReader(limit=1 << 30)
    reader.feed_data(said)
    return reader, _Writer()


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _asked_for(target: PeerId) -> bytes:
    """A request for a circuit, as it is sent (specs/relay/circuit-v2.md)."""
    name: bytes = base58.b58decode(target)
    message = b"\x08\x01\x12" + bytes([len(name) + 2]) + b"\x0a" + bytes([len(name)]) + name
    return bytes([len(message)]) + message


MUTE = SigningKey(b"m" * 32).peer_id


@pytest.mark.parametrize("said", [b"", _asked_for(MUTE)], ids=["nothing", "for a circuit to one that says nothing"])
def test_a_relay_answers_beside_streams_on_which_nothing_comes_of_it(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a few names of one range of addresses; the second shut a relay to everybody."""

    async def main() -> None:
        class Transport:
            doors = SimpleNamespace(
                keeper=SimpleNamespace(keep=lambda _is_kept: None),
                tell=lambda _event: None,
                holder_of=_range_of,
                holder=_range_soon,
            )
            reached = 0

            async def paths(self) -> dict[PeerId, str]:
                return {MUTE: "direct"}

            async def open_stream(self, *_: Any) -> tuple[asyncio.StreamReader, Any]:
                self.reached += 1
                return _stream()

            async def take_protocol(self, _protocol: str, on_stream: Any, right: Any) -> None:
                self.on_stream = on_stream

            async def seen_at(self, _peer: PeerId) -> list[str]:
                return ["10.0.0.2"]

        transport: Any = Transport()
        relay = Relay(transport, 1e6, is_open=lambda: True)
        await relay.serve()
        reader, writer = _stream(relay_protocol.RESERVE)
        reader.feed_eof()
        await transport.on_stream(MUTE, reader, writer)
        assert writer.raw, "it has a place"

        async def floods(number: int) -> None:
            while True:
                stream = transport.on_stream(SigningKey(bytes([number % 12]) * 32).peer_id, *_stream(said))
                await asyncio.wait({asyncio.create_task(stream)})
                await asyncio.sleep(0.05)

        flooders = [asyncio.create_task(floods(number)) for number in range(MAX_REQUESTS + 8)]
        await asyncio.sleep(3.0)
        answered = 0
        for _ in range(20):
            reader, writer = _stream(relay_protocol.RESERVE)
            reader.feed_eof()
            asking = asyncio.create_task(transport.on_stream(HONEST, reader, writer))
            await asyncio.sleep(8.0)
            answered += bool(writer.raw)
            await _end([asking])
        assert answered == 20
        assert bool(transport.reached) == bool(said)
        await _end(flooders)
        await relay.close()

    run_virtually(main(), monkeypatch)


def test_large_batches_come_in_beside_those_that_are_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        intake = MessageIntake(
            lambda _peer, _count, _size: None, lambda _peer, _raw: "", lambda _peer: True, lambda _peer, _reason: None,
            lambda _count: None, lambda _peer, _told: None,
        )  # fmt: skip

        async def holds(number: int) -> None:
            while True:
                reader, writer = _stream(Packer().pack(1, join_batch([bytes(100_000)]))[:100])
                stream = intake.on_stream(PeerId(f"hostile {number // 2}"), reader, writer)
                await asyncio.wait({asyncio.create_task(stream)})

        holders = [asyncio.create_task(holds(number)) for number in range(LARGE_AT_ONCE)]
        await asyncio.sleep(0.5)
        for number in range(10):
            reader, writer = _stream(Packer().pack(1, join_batch([bytes([number]) * 100_000])))
            sending = asyncio.create_task(intake.on_stream(HONEST, reader, writer))
            async with asyncio.timeout(5.0):
                await writer.changed.wait()
            assert writer.raw
            await _end([sending])
        await _end([*holders, *intake.end()])

    run_virtually(main(), monkeypatch)


async def _fetches(serving: Serving, peer: PeerId, pause_s: float) -> float:
    """Asks for BODY and acknowledges after each pause what has come. Seconds until it is whole."""
    loop = asyncio.get_running_loop()
    began, told = loop.time(), 0

    async def handler(_peer: PeerId, _header: dict[str, Any]) -> Reply:
        return Reply({}, [BODY], True)

    reader, writer = _stream(pack_header(REQUEST, {}, 0))
    task = asyncio.create_task(serving.serve(peer, "store", handler, None, reader, writer))
    try:
        while told < len(BODY):
            await writer.changed.wait()
            writer.changed.clear()
            assert not writer.is_gone
            await asyncio.sleep(pause_s)
            prefix = unpack_prefix(bytes(writer.raw[:PREFIX_BYTES]), max_body_bytes=1 << 40)
            come = min(len(writer.raw) - PREFIX_BYTES - prefix.header_bytes, len(BODY))
            if come > told:
                told = come
                reader.feed_data(told.to_bytes(8, "big"))
    finally:
        await _end([task])
    return loop.time() - began


@pytest.mark.parametrize(("num_members", "num_strange"), [(4, 16), (8, 0)])
def test_members_that_hardly_read_make_room_too(
    num_members: int, num_strange: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        serving = Serving(
            TransportLimits(), Bandwidth(None, None), lambda _peer, _right: None, lambda _peer: None,
            lambda _peer: None, lambda _peer: False,
        )  # fmt: skip
        serving.set_members(lambda peer: not peer.startswith("stranger"))
        slow = [
            asyncio.create_task(_fetches(serving, PeerId(f"{kind} {number // 4}"), 25.0))
            for kind, count in (("member", 4 * num_members), ("stranger", num_strange))
            for number in range(count)
        ]
        await asyncio.sleep(60.0)
        assert await _fetches(serving, HONEST, 0.02) < 5.0
        await _end(slow)

    run_virtually(main(), monkeypatch)


def test_one_range_of_addresses_does_not_shut_newcomers_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty names with four streams each, read just fast enough, had all the places that strangers have at a donor."""

    async def main() -> None:
        crowd = [PeerId(f"name {number // 4}") for number in range(80)]

        async def holder(peer: PeerId) -> str:
            return "203.0.113" if peer in crowd else str(peer)

        serving = Serving(
            TransportLimits(), Bandwidth(None, None), lambda _peer, _right: None, lambda _peer: None,
            lambda _peer: None, lambda _peer: False, holder,
        )  # fmt: skip
        serving.set_members(lambda peer: peer.startswith("member"))

        async def keep(peer: PeerId) -> None:
            while True:
                with suppress(AssertionError):
                    await _fetches(serving, peer, 0.5)
                await asyncio.sleep(0.1)

        slow = [asyncio.create_task(keep(peer)) for peer in crowd]
        await asyncio.sleep(60.0)
        async with asyncio.timeout(20.0):
            assert await _fetches(serving, HONEST, 0.02) < 15.0
        await _end(slow)

    run_virtually(main(), monkeypatch)


class _Net:
    """Peers of a stage that all have the same rounds; of those that trickle a byte comes every 14 s."""

    named, heard, addresses, peer_id = frozenset[PeerId](), dict[PeerId, float](), (), ME

    def __init__(self, stage: CertifiedStage, trickling: Sequence[PeerId], *, chains_too: bool) -> None:
        self._trickling, self._chains_too = trickling, chains_too
        self._states = {state.digest: state for state in stage.states[-3:]}
        self._server = BackupServer(STAGE, certificates=lambda: stage.certificates, kept={})

    async def connect(self, _peer: PeerId, _addresses: Sequence[str], timeout_s: float = 10.0) -> None:
        await asyncio.sleep(0.05)

    async def serve(self, *_args: Any, **_options: Any) -> None:
        pass

    async def fetch(
        self, peer: PeerId, kind: str, header: dict[str, Any], *, max_body_bytes: int, timeout_s: float,
        stall_timeout_s: float = 15.0, take: Any = None,
    ) -> tuple[dict[str, Any], bytearray]:  # fmt: skip
        try:
            async with asyncio.timeout(timeout_s):
                return await self._answer(peer, kind, header, take)
        except TimeoutError:
            raise PeerSilent(peer, f"not complete within {timeout_s:g} s") from None

    async def _answer(
        self, peer: PeerId, kind: str, header: dict[str, Any], take: Any
    ) -> tuple[dict[str, Any], bytearray]:
        is_slow = peer in self._trickling
        await asyncio.sleep(0.05)
        if kind == BACKUP_SERVICE:
            if is_slow and self._chains_too:
                await asyncio.sleep(1e9)
            reply = await self._server.serve(ME, header)
            assert isinstance(reply.body, Sequence)
            return reply.header, bytearray(b"".join(map(bytes, reply.body)))
        state = self._states.get(header["name"])
        if state is None:
            raise RequestRefused(peer, "not here")
        if header.get("want") == "outline":
            return {"size": state.outline.size_bytes}, bytearray(state.outline.packed())
        raw, at, stop = bytes(state.anchor) + bytes(state.momentum), header["start"], header["stop"]
        while at < stop:
            piece = raw[at : min(at + (1 if is_slow else 65536), stop)]
            await asyncio.sleep(14.0 if is_slow else len(piece) / 2e6)
            at += len(piece)
            if not await take(piece):
                break
        return {}, bytearray()


def _leases(peers: Sequence[PeerId]) -> list[Lease]:
    return [
        Lease(
            peer=peer, stage=STAGE, incarnation=1, addresses=("/ip4/10.0.0.1/tcp/1",), protocol=1, tokens_per_s=0.0,
            memory_bytes=0, reachability="direct", round=4,
        )
        for peer in peers
    ]  # fmt: skip


class _Book:
    def __init__(self, peers: Sequence[PeerId]) -> None:
        self._peers = peers

    async def peers(self, stage: int, timeout_s: float = 10.0) -> list[Lease]:
        return _leases(self._peers) if stage == STAGE else []

    leases = peers

    async def keepers(self, timeout_s: float = 10.0) -> list[Lease]:
        return []

    async def word(self, _stage: int, timeout_s: float = 10.0) -> None:
        return None


def test_a_look_waits_for_a_chain_that_trickles_once_and_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    strangers = [PeerId("stranger 0"), PeerId("stranger 1")]

    async def main() -> None:
        stage = CertifiedStage().rounds(4)
        net: Any = _Net(stage, strangers, chains_too=True)
        book: Any = _Book([*ROSTER, *strangers])
        survey = Survey(
            MANIFEST, STAGE, transport=net, directory=book, listener=lambda _event: None, rng=random.Random(1),
            annals=Annals(MANIFEST, STAGE, verify), find_every_s=5.0,
        )  # fmt: skip
        took = []
        for _ in range(3):
            began = asyncio.get_running_loop().time()
            await survey.look()
            took.append(asyncio.get_running_loop().time() - began)
            await asyncio.sleep(2.0)
        assert survey.annals.place.height == stage.place.height
        assert took[0] < 2 * GRACE_S + 2.0 < CHAIN_S
        assert max(took[1:]) < 4.0

    run_virtually(main(), monkeypatch)


def test_a_copy_is_not_held_up_by_a_state_that_trickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trickling = [PeerId(f"trickling {number}") for number in range(3)]

    async def main() -> None:
        net: Any = _Net(CertifiedStage().rounds(4), trickling, chains_too=False)
        loop = asyncio.get_running_loop()
        for incarnation in range(8):
            said: list[Event] = []
            endpoint: Any = SimpleNamespace(me=ME, transport=net, incarnation=incarnation)
            book: Any = _Book([*trickling, PeerId("honest 0"), PeerId("honest 1")])
            guardian = Guardian(
                endpoint, 0, manifest=MANIFEST, count=1, run_folder=tmp_path / str(incarnation), directory=book,
                certificates=tuple, listener=said.append,
            )  # fmt: skip
            async with AsyncExitStack() as stack:
                await guardian.serve(stack)
                running = asyncio.create_task(guardian.run())
                began = loop.time()
                while not any(isinstance(event, StageCopied) for event in said):
                    await asyncio.sleep(1.0)
                    assert loop.time() - began < 60.0
                    assert not running.done()
                await _end([running])

    run_virtually(main(), monkeypatch)
