"""linkd's bytes through a stream of a real p2pd."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import cast

from dilocox_peer.network.daemon import OnStream
from dilocox_peer.network.relaying import Relay
from dilocox_peer.network.reservations import reserve
from dilocox_peer.network.transport import Transport
from dilocox_peer.network.tunnels import (
    DOOR_S,
    KNOCKS_AT_ONCE,
    MAX_DOORS,
    MAX_STREAMS,
    MAX_STREAMS_PER_PEER,
    Tunnels,
    own_door,
)
from dilocox_peer.types import PeerId
from tests.shell.commands import free_port
from tests.shell.conftest import MakeTransport

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def echo(taken: list[asyncio.StreamWriter]) -> AsyncIterator[tuple[str, int]]:
    """In linkd's place: says what it hears."""

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taken.append(writer)
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(say, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[:2]
    finally:
        server.close()


async def through(door: str) -> Stream:
    return await asyncio.open_connection("127.0.0.1", int(door.rpartition("/")[2]))


async def test_what_goes_in_at_a_door_comes_out_at_the_neighbours_linkd(make_transport: MakeTransport) -> None:
    far, _ = await make_transport("far")
    near, _ = await make_transport("near")
    theirs, ours = Tunnels(far), Tunnels(near)
    taken: list[asyncio.StreamWriter] = []
    async with echo(taken) as where, asyncio.timeout(60):
        await theirs.serve(lambda: where)
        door = await ours.towards(far.peer_id, far.addresses)
        assert door is not None
        assert await ours.towards(far.peer_id, far.addresses) == door
        reader, writer = await through(door)
        sent = bytes(range(256)) * 8192  # 2 MiB
        writing = asyncio.create_task(_write(writer, sent))
        assert await reader.readexactly(len(sent)) == sent
        await writing
        taken[0].close()  # linkd hangs up there
        assert await reader.read() == b""
        writer.close()
        ours.close()
        theirs.close()


class StreamsOfMany:
    """In a transport's place: peers that nobody has to start."""

    def __init__(self) -> None:
        self.neighbours: set[str] = set()
        self.of_range: Callable[[str], str] = str

        async def holder(peer: PeerId) -> str:
            return self.of_range(peer)

        keeper = SimpleNamespace(keep=lambda _is_one: None, is_stranger=lambda peer: peer not in self.neighbours)
        self.doors = SimpleNamespace(keeper=keeper, holder=holder)
        self._take: OnStream
        self._writers: list[asyncio.StreamWriter] = []  # one that is forgotten closes its stream

    async def take_streams(self, _kind: str, take: OnStream, *, right: object) -> None:
        self._take = take

    async def opened_by(self, peer: str) -> asyncio.StreamReader:
        near, far = socket.socketpair()
        task = asyncio.ensure_future(self._take(PeerId(peer), *await asyncio.open_connection(sock=far)))
        reader, writer = await asyncio.open_connection(sock=near)
        task.add_done_callback(lambda _task: writer.close())
        self._writers.append(writer)
        return reader


async def test_strangers_with_many_streams_keep_no_neighbour_out() -> None:
    streams = StreamsOfMany()
    ours = Tunnels(cast("Transport", streams))
    taken: list[asyncio.StreamWriter] = []
    async with echo(taken) as where, asyncio.timeout(60):
        await ours.serve(lambda: where)
        names = [f"stranger {number % (MAX_STREAMS // MAX_STREAMS_PER_PEER)}" for number in range(MAX_STREAMS)]
        strangers = [await streams.opened_by(name) for name in names]
        while len(taken) < MAX_STREAMS:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await streams.opened_by("neighbour")
        assert await strangers[0].read() == b"", "the first of who has most"
        while len(taken) < MAX_STREAMS + 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert await (await streams.opened_by(names[0])).read() == b"", "it has no more than the others"
        for writer in taken:
            writer.close()


async def test_a_range_of_addresses_cannot_use_up_what_our_linkd_lets_in() -> None:
    """It counts all that comes from this computer together, so that a stranger's streams left a neighbour a quarter of its dials."""
    streams = StreamsOfMany()
    streams.of_range = lambda peer: "8.8.8.0/24" if peer.startswith("stranger") else peer
    ours = Tunnels(cast("Transport", streams))
    taken: list[asyncio.StreamWriter] = []
    async with echo(taken) as where, asyncio.timeout(60):
        await ours.serve(lambda: where)
        refused = 0
        for number in range(3 * int(KNOCKS_AT_ONCE)):
            reader = await streams.opened_by(f"stranger {number}")
            with suppress(TimeoutError):
                async with asyncio.timeout(0.02):
                    refused += await reader.read() == b""
        assert refused > KNOCKS_AT_ONCE
        before = len(taken)
        await streams.opened_by("neighbour")
        while len(taken) == before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        streams.neighbours.add("stranger 0")
        await streams.opened_by("stranger 0")
        while len(taken) == before + 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for writer in taken:
            writer.close()


async def test_a_neighbour_opens_a_few_at_most_and_none_to_who_is_gone(make_transport: MakeTransport) -> None:
    far, _ = await make_transport("far")
    near, _ = await make_transport("near")
    theirs, ours = Tunnels(far), Tunnels(near)
    taken: list[asyncio.StreamWriter] = []
    async with echo(taken) as where, asyncio.timeout(60):
        await theirs.serve(lambda: where)
        door = await ours.towards(far.peer_id, far.addresses)
        assert door is not None
        held = []
        for _ in range(MAX_STREAMS_PER_PEER):
            reader, writer = await through(door)
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
            held.append(writer)
        reader, writer = await through(door)
        assert await _rest(reader, writer) == b""
        held[0].close()
        await far.close()
        reader, writer = await through(door)
        assert await _rest(reader, writer) == b""
        for each in held:
            each.close()
        ours.close()


async def test_made_up_neighbours_do_not_have_all_doors_for_good(make_transport: MakeTransport) -> None:
    transport, _ = await make_transport("near")
    now = [0.0]
    ours = Tunnels(transport, lambda: now[0])
    listed = [*(PeerId(f"made up {number}") for number in range(2 * MAX_DOORS)), PeerId("neighbour")]
    had = set[PeerId]()
    for _ in range(4):
        await ours.open_doors(dict.fromkeys(listed, ()), str)
        here = {peer for peer in listed if ours.door_of(peer) is not None}
        assert len(here) == MAX_DOORS
        await ours.open_doors(dict.fromkeys(listed, ()), str)
        assert here == {peer for peer in listed if ours.door_of(peer) is not None}, "each for a while"
        had |= here
        now[0] += DOOR_S
    assert had == set(listed)
    ours.close()


async def test_names_that_are_new_at_each_look_do_not_keep_a_neighbour_from_a_second_door(
    make_transport: MakeTransport,
) -> None:
    """It was away while it had its first: ever new ones had had fewer."""
    transport, _ = await make_transport("near")
    now, neighbour = [0.0], PeerId("neighbour")
    ours = Tunnels(transport, lambda: now[0])
    has_door = list[bool]()
    for look in range(8):
        made_up = [PeerId(f"made up {look} {number}") for number in range(2 * MAX_DOORS)]
        await ours.open_doors(dict.fromkeys([neighbour, *made_up[: MAX_DOORS if look == 0 else None]], ()), len)
        has_door.append(ours.door_of(neighbour) is not None)
        now[0] += DOOR_S
    assert has_door[0], "the shortest name"
    assert any(has_door[2:]), has_door
    ours.close()


async def test_a_door_that_leads_to_its_neighbour_stays(make_transport: MakeTransport) -> None:
    far, _ = await make_transport("far")
    near, _ = await make_transport("near")
    now = [0.0]
    theirs, ours = Tunnels(far), Tunnels(near, lambda: now[0])
    taken: list[asyncio.StreamWriter] = []
    made_up: dict[PeerId, tuple[str, ...]] = {PeerId(f"made up {number}"): () for number in range(2 * MAX_DOORS)}
    async with echo(taken) as where, asyncio.timeout(60):
        await theirs.serve(lambda: where)
        door = await ours.towards(far.peer_id, far.addresses)
        assert door is not None
        reader, writer = await through(door)
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        for _ in range(4):
            now[0] += DOOR_S
            await ours.open_doors({**made_up, far.peer_id: far.addresses}, str)
            assert ours.door_of(far.peer_id) == door
        writer.close()
        ours.close()


async def test_a_linkd_that_is_not_there_ends_the_stream(make_transport: MakeTransport) -> None:
    far, _ = await make_transport("far")
    near, _ = await make_transport("near")
    theirs, ours = Tunnels(far), Tunnels(near)
    async with asyncio.timeout(60):
        await theirs.serve(lambda: own_door(()))
        door = await ours.towards(far.peer_id, far.addresses)
        assert door is not None
        reader, writer = await through(door)
        assert await _rest(reader, writer) == b""
        ours.close()


async def test_what_a_relay_passes_on_is_made_anew_once_there_is_a_better_way(make_transport: MakeTransport) -> None:
    nowhere = ("/ip4/127.0.0.1/tcp/1",)  # announced by who is not to be dialled
    between, _ = await make_transport("between")
    relay = Relay(between, 1e9, is_open=lambda: True)
    await relay.serve()
    listening = f"/ip4/127.0.0.1/tcp/{free_port()}"
    far, _ = await make_transport(
        "far", initial_peers=between.addresses, host_maddrs=(listening,), announce_maddrs=nowhere
    )
    near, _ = await make_transport("near", initial_peers=between.addresses, announce_maddrs=nowhere)
    theirs, ours = Tunnels(far), Tunnels(near)
    taken: list[asyncio.StreamWriter] = []
    async with echo(taken) as where, asyncio.timeout(60):
        await theirs.serve(lambda: where)
        assert (await reserve(far, between.peer_id, between.addresses))[1] == ""
        door = await ours.towards(far.peer_id, [f"{between.addresses[0]}/p2p-circuit/p2p/{far.peer_id}"])
        assert door is not None
        reader, writer = await through(door)
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        assert (await near.paths())[far.peer_id] == "relayed"
        ours.reached([between.peer_id])
        writer.write(b"y")
        assert await reader.readexactly(1) == b"y", "another peer's way is no reason"
        ours.reached([far.peer_id])
        assert await _rest(reader, writer) == b""
        await near.hang_up(far.peer_id)
        await near.connect(far.peer_id, [f"{listening}/p2p/{far.peer_id}"])
        assert (await near.paths())[far.peer_id] == "direct"
        reader, writer = await through(door)
        writer.write(b"z")
        assert await reader.readexactly(1) == b"z"
        ours.reached([far.peer_id])
        writer.write(b"z")
        assert await reader.readexactly(1) == b"z", "it is on the better way already"
        writer.close()
        ours.close()
        theirs.close()
        await relay.close()


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()


async def _rest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """What still comes; a reset counts as the end."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()
