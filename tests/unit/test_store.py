"""The store: shelves on a real disk, and fetches between stores over a loopback that breaks, lies and stalls as it is told."""

import asyncio
import errno
import hashlib
import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dilocox_peer.errors import PeerUnavailable, ProtocolError, StateCorrupt, ThingUnavailable
from dilocox_peer.files import PART, replace_file
from dilocox_peer.network.bulk import PeerGone, RequestRefused
from dilocox_peer.store.bundles import ABSENT
from dilocox_peer.store.outline import CHUNK_BYTES, MAX_THING_BYTES, Outline, outline_of
from dilocox_peer.store.partials import MAX_PARTIALS
from dilocox_peer.store.shelf import Shelf
from dilocox_peer.store.store import Store
from dilocox_peer.types import Digest, PeerId, sha256

BIG = random.Random(1).randbytes(5 * CHUNK_BYTES + 1000)
ME = PeerId("me")


class Loopback:
    """What a Transport is to stores, for all of one test. breaks: peer -> bytes of bodies after which it is gone. wrongs: peer ->
    what it makes of a piece. asked: who, for what."""

    def __init__(self) -> None:
        self.handlers: dict[PeerId, Any] = {}
        self.breaks: dict[PeerId, int] = {}
        self.wrongs: dict[PeerId, Callable[[bytes], bytes]] = {}
        self.asked: list[tuple[PeerId, dict[str, Any]]] = []
        self.bytes_of: dict[PeerId, int] = {}
        self._passed = asyncio.Event()
        self._until = 0

    def count(self, peer: PeerId, num_bytes: int) -> None:
        self.bytes_of[peer] = self.bytes_of.get(peer, 0) + num_bytes
        if sum(self.bytes_of.values()) >= self._until:
            self._passed.set()

    async def passed(self, num_bytes: int) -> None:
        """Returns when so many bytes have been fetched by all."""
        self._until = num_bytes
        self._passed.clear()
        await self._passed.wait()

    def at(self, peer: PeerId) -> Any:
        return _End(self, peer)


class _End:
    def __init__(self, loopback: Loopback, peer: PeerId) -> None:
        self._loopback = loopback
        self.peer_id = peer

    async def serve(self, _kind: str, handler: Any, **_right: Any) -> None:
        self._loopback.handlers[self.peer_id] = handler

    async def fetch(self, peer: PeerId, _kind: str, header: dict[str, Any], **options: Any) -> Any:
        net, take = self._loopback, options.get("take")
        net.asked.append((peer, header))
        if peer not in net.handlers or net.breaks.get(peer) == 0:
            raise PeerGone(peer, "gone")
        try:
            reply = await net.handlers[peer](self.peer_id, header)
        except PeerUnavailable as error:
            raise RequestRefused(peer, error.reason) from None
        assert reply.body_bytes <= options["max_body_bytes"]
        body = bytearray()
        async for part in reply.parts():
            for start in range(0, len(part), 100_000):
                await asyncio.sleep(0)
                piece = net.wrongs.get(peer, bytes)(bytes(part[start : start + 100_000]))
                if (left := net.breaks.get(peer)) is not None:
                    if left == 0:
                        raise PeerGone(peer, "the stream ended")
                    piece = piece[:left]
                    net.breaks[peer] -= len(piece)
                net.count(peer, len(piece))
                if take is None:
                    body += piece
                elif not await take(piece):
                    return reply.header, body
        return reply.header, body


class Swarm:
    """Peers with a store each; `me` has nothing."""

    def __init__(self, tmp_path: Path) -> None:
        self.net, self.accused = Loopback(), list[tuple[PeerId, str]]()
        self._folder = tmp_path
        self.shelf = Shelf(tmp_path / "me")
        self.me = Store(self.net.at(ME), [self.shelf], on_accused=lambda *said: self.accused.append(said))

    async def donor(self, name: str, *things: bytes) -> PeerId:
        shelf, peer = Shelf(self._folder / name), PeerId(name)
        for thing in things:
            shelf.put(thing)
        await Store(self.net.at(peer), [shelf]).serve()
        return peer

    async def fetch(self, thing: bytes, *donors: PeerId) -> bytes:
        path = await self.me.fetch(sha256(thing), donors=donors, max_bytes=1 << 30, timeout_s=60)
        return path.read_bytes()

    @property
    def body_bytes(self) -> int:
        return sum(self.net.bytes_of.values())


# ---- fetching ----


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
async def test_a_thing_of_any_size_arrives_and_is_on_the_shelf(tmp_path: Path, size: int) -> None:
    swarm, thing = Swarm(tmp_path), BIG[:size]
    donors = [await swarm.donor("a", thing), await swarm.donor("b", thing), await swarm.donor("c")]
    assert await swarm.fetch(thing, *donors) == thing
    assert bytes(await swarm.me.open(sha256(thing)) or b"") == thing
    asked = len(swarm.net.asked)
    assert await swarm.fetch(thing) == thing, "it is here: nobody is asked"
    assert len(swarm.net.asked) == asked
    assert not list((tmp_path / "me" / "partial").iterdir())


async def test_a_small_thing_is_asked_of_one_donor_alone(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    donors = [await swarm.donor(name, b"small") for name in "abc"]
    await swarm.fetch(b"small", *donors)
    assert len(swarm.net.asked) == 1


async def test_two_donors_share_the_work(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    assert await swarm.fetch(BIG, await swarm.donor("a", BIG), await swarm.donor("b", BIG)) == BIG
    assert min(swarm.net.bytes_of.values()) > CHUNK_BYTES
    assert swarm.accused == []


@pytest.mark.parametrize("after", [1, 100_001, 1_500_000])
async def test_a_donor_that_dies_in_mid_transfer_costs_no_byte_twice(tmp_path: Path, after: int) -> None:
    swarm = Swarm(tmp_path)
    donors = [await swarm.donor("a", BIG), await swarm.donor("b", BIG)]
    outlines = 2 * 32 * 6
    swarm.net.breaks[donors[0]] = after + outlines // 2
    assert await swarm.fetch(BIG, *donors) == BIG
    assert swarm.net.bytes_of[donors[0]] == after + outlines // 2
    assert swarm.body_bytes == len(BIG) + outlines


async def test_a_donor_that_lies_is_named_and_the_thing_comes_from_the_other(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    donors = [await swarm.donor("liar", BIG), await swarm.donor("honest", BIG)]
    swarm.net.wrongs[donors[0]] = lambda piece: piece if len(piece) < 1000 else b"\0" + piece[1:]
    assert await swarm.fetch(BIG, *donors) == BIG
    assert [peer for peer, _ in swarm.accused] == ["liar"]


async def test_all_who_claim_a_false_outline_are_named_and_the_thing_comes_from_who_does_not(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    other = BIG[: 2 * CHUNK_BYTES] + bytes(len(BIG) - 2 * CHUNK_BYTES)
    donors = [PeerId("liar 1"), PeerId("liar 2"), await swarm.donor("honest", BIG)]
    for liar in donors[:2]:
        shelf = Shelf(tmp_path / liar)
        name = shelf.put(other)
        store = Store(swarm.net.at(liar), [_Renamed(shelf, name)])  # type: ignore[list-item]
        await store.serve()
    assert await swarm.fetch(BIG, *donors) == BIG
    assert sorted(peer for peer, _ in swarm.accused) == ["liar 1", "liar 2"]


class _Renamed:
    """Gives one thing, whatever is asked for."""

    def __init__(self, shelf: Shelf, name: Digest) -> None:
        self._shelf, self._name = shelf, name

    def content(self, _name: Digest) -> object:
        return self._shelf.content(self._name)


async def test_a_small_thing_that_is_another_names_its_donor(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    donors = [await swarm.donor("liar", b"true"), await swarm.donor("honest", b"true")]
    swarm.net.wrongs[donors[0]] = lambda _piece: b"lies"
    assert await swarm.fetch(b"true", *donors) == b"true"
    assert [peer for peer, _ in swarm.accused] == ["liar"]


async def test_what_came_before_a_restart_is_not_fetched_again(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    donor = await swarm.donor("a", BIG)
    swarm.net.breaks[donor] = 3 * CHUNK_BYTES + 500
    with pytest.raises(ThingUnavailable, match="gone"):
        await swarm.fetch(BIG, donor)
    del swarm.net.breaks[donor]
    swarm.net.bytes_of.clear()
    swarm.me = Store(swarm.net.at(ME), [Shelf(tmp_path / "me")])
    assert await swarm.fetch(BIG, donor) == BIG
    assert swarm.body_bytes < len(BIG) - 2 * CHUNK_BYTES


async def test_nobody_who_has_it_and_more_than_is_allowed_are_one_line_each(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    donor = await swarm.donor("a", BIG)
    with pytest.raises(ThingUnavailable, match="it has it not"):
        await swarm.fetch(b"another", donor)
    with pytest.raises(ThingUnavailable, match="nobody to ask"):
        await swarm.fetch(b"another")
    with pytest.raises(ThingUnavailable, match="more than 1000 bytes"):
        await swarm.me.fetch(sha256(BIG), donors=[donor], max_bytes=1000, timeout_s=5)
    assert not list((tmp_path / "me" / "partial").iterdir())


async def test_callers_at_the_same_time_share_one_fetch(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    donor = await swarm.donor("a", BIG)
    assert await asyncio.gather(*(swarm.fetch(BIG, donor) for _ in range(3))) == [BIG] * 3
    assert swarm.body_bytes < len(BIG) + 1000


async def test_a_fetch_that_is_cancelled_leaves_nothing_running_and_what_came_stays(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    donor = await swarm.donor("a", BIG)
    fetching = asyncio.create_task(swarm.fetch(BIG, donor))
    await swarm.net.passed(3 * CHUNK_BYTES)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    at_the_end = swarm.body_bytes
    assert await swarm.fetch(BIG, donor) == BIG
    assert swarm.body_bytes - at_the_end < len(BIG)


async def test_a_fetch_that_takes_the_place_of_one_that_moves_its_file_in_has_what_that_one_brought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole gigabyte is flushed first, for seconds: the next fetch found the file of its own gone, and failed."""
    swarm, go_on = Swarm(tmp_path), threading.Event()
    loop, moving, move_in = asyncio.get_running_loop(), asyncio.Event(), swarm.shelf.take_in

    def take_in(*arguments: Any, **options: Any) -> Path:
        loop.call_soon_threadsafe(moving.set)
        go_on.wait(10.0)
        return move_in(*arguments, **options)

    monkeypatch.setattr(swarm.shelf, "take_in", take_in)
    donor, another = await swarm.donor("a", b"thing"), await swarm.donor("b", b"thing")
    first = asyncio.create_task(swarm.fetch(b"thing", donor))
    async with asyncio.timeout(10.0):
        await moving.wait()
        first.cancel()
        second = asyncio.create_task(swarm.fetch(b"thing", another))
        await asyncio.wait({first})
        moving.clear()
        with suppress(TimeoutError):  # it moves nothing in itself
            async with asyncio.timeout(0.5):
                await moving.wait()
        go_on.set()
        assert await second == b"thing"
    assert {peer for peer, _ in swarm.net.asked} == {donor}
    assert not list((tmp_path / "me" / "partial").iterdir())


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"name": b"short", "want": "outline"},
        {"name": bytes(32), "want": "all"},
        {"name": sha256(BIG), "start": 0, "stop": len(BIG) + 1},
        {"name": sha256(BIG), "start": 5, "stop": 5},
        {"name": sha256(BIG), "start": -1, "stop": 5},
        {"have": [bytes(32)]},
    ],
)
async def test_a_request_that_is_none_is_refused(tmp_path: Path, header: dict[str, Any]) -> None:
    swarm = Swarm(tmp_path)
    donor = await swarm.donor("a", BIG)
    with pytest.raises(ProtocolError):
        await swarm.net.handlers[donor](ME, header)


class Unread:
    """Folders with one large file, that is looked through for as long as the test wants."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.times = 0

    def is_unread(self, name: Digest) -> bool:
        return name == sha256(BIG) and not self.go_on.is_set()

    def content(self, name: Digest, most_bytes: int = MAX_THING_BYTES) -> None:
        if self.is_unread(name) and len(BIG) <= most_bytes:
            self.times += 1
            self.begun.set()
            assert self.go_on.wait(60.0)


async def test_while_a_large_file_is_looked_through_all_else_is_answered(tmp_path: Path) -> None:
    small, folders = b"a contribution", Unread()
    shelf, loopback = Shelf(tmp_path), Loopback()
    shelf.put(small)
    store = Store(loopback.at(ME), [shelf])
    store.also_serve([], [folders])
    await store.serve()
    ask = loopback.handlers[ME]
    strangers = [asyncio.create_task(ask(ME, {"name": sha256(BIG), "want": "outline"})) for _ in range(4)]
    await asyncio.to_thread(folders.begun.wait, 60.0)
    try:
        async with asyncio.timeout(30):  # for ever, if they had all threads
            assert (await ask(ME, {"name": sha256(small), "want": "outline"})).header == {"size": len(small)}
            reply = await ask(ME, {"names": sha256(BIG) + sha256(small)})
            assert reply.header == {"sizes": [ABSENT, len(small)]}, "a large one is not looked through for that"
    finally:
        folders.go_on.set()
        await asyncio.gather(*strangers)
    assert folders.times == 1, "it is looked through once for all"


# ---- shelves ----


def test_a_shelf_keeps_what_it_is_given_through_a_restart(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    (tmp_path / "file").write_bytes(BIG)
    names = [shelf.put(b"small"), shelf.put(b""), shelf.add(tmp_path / "file")]
    assert names == [sha256(b"small"), sha256(b""), hashlib.sha256(BIG).digest()]
    again = Shelf(tmp_path)
    assert again.held == set(names)
    assert [again.get(name) for name in names] == [b"small", b"", BIG]
    content = again.content(names[2])
    assert content is not None
    assert content.outline == outline_of([BIG])
    again.forget(names[2])
    assert again.get(names[2]) is None
    assert Shelf(tmp_path).held == set(names[:2])


def test_a_damaged_thing_is_a_missing_one_and_no_chunk_of_it_is_given(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    name = shelf.put(BIG)
    content, path = shelf.content(name), shelf.path(name)
    assert content is not None
    assert path is not None
    with path.open("r+b") as file:
        file.seek(CHUNK_BYTES + 5)
        file.write(b"xx")
    assert bytes(content.chunk(0)) == BIG[:CHUNK_BYTES]
    with pytest.raises(StateCorrupt, match="chunk 1"):
        content.chunk(1)
    assert shelf.get(name) is None
    assert name not in shelf.held


@pytest.mark.parametrize("size", [CHUNK_BYTES, 3 * CHUNK_BYTES])
async def test_a_thing_that_is_found_damaged_while_it_is_served_is_fetched_again(tmp_path: Path, size: int) -> None:
    """It stayed on its shelf, damaged, and nobody who asked for it got it."""
    swarm, thing = Swarm(tmp_path), BIG[:size]
    sound = await swarm.donor("sound", thing)
    await swarm.fetch(thing, sound)
    path = await swarm.me.path(sha256(thing))
    assert path is not None
    with path.open("r+b") as file:
        file.seek(CHUNK_BYTES // 2)
        file.write(b"xx")
    await swarm.me.serve()
    other = Store(swarm.net.at(PeerId("other")), [Shelf(tmp_path / "other")])
    with pytest.raises((ThingUnavailable, OSError)):  # the loopback throws at who asks what the donor's disk said
        await other.fetch(sha256(thing), donors=[ME], max_bytes=1 << 30, timeout_s=60)
    assert await swarm.fetch(thing, sound) == thing


@pytest.mark.parametrize("left", [b"", b"a sl\0\0\0"])
def test_a_thing_that_was_not_flushed_is_whole_or_missing_after_a_power_cut(left: bytes, tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    torn, whole = shelf.put(b"a slice", durable=False), shelf.put(b"another", durable=False)
    path = shelf.path(torn)
    assert path is not None
    path.write_bytes(left)  # as a disk has it that was told of the name before the bytes
    again = Shelf(tmp_path)
    assert again.held == {torn, whole}, "nobody has looked yet"
    assert again.mapped(torn) is None
    assert again.get(whole) == b"another"
    assert again.put(b"a slice", durable=False) == torn
    assert again.get(torn) == b"a slice"


@pytest.mark.parametrize("whole_files", [0, 1])
def test_a_thing_is_whole_or_missing_wherever_the_process_was_killed_while_it_was_put(
    whole_files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its outline it counted as here, was not put again, and went when it was read."""
    left = iter(range(whole_files))

    def killed(*arguments: Any, **options: Any) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        replace_file(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr("dilocox_peer.store.shelf.replace_file", killed)
        with pytest.raises(KeyboardInterrupt):
            Shelf(tmp_path).put(BIG)
    again = Shelf(tmp_path)
    assert again.held == set()
    name = again.put(BIG)
    assert bytes(again.mapped(name) or b"") == BIG


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM])
def test_what_cannot_be_read_for_now_stays_on_the_shelf(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger's streams can have a peer run out of file descriptors; contributions and weights were deleted for that."""
    shelf = Shelf(tmp_path)
    name = shelf.put(b"a contribution")

    def fails(*_arguments: object, **_options: object) -> None:
        raise OSError(number, "for now")

    with monkeypatch.context() as patched:
        for patch in ("stat", "read_bytes", "open"):
            patched.setattr(Path, patch, fails)
        assert (shelf.get(name), shelf.mapped(name), shelf.content(name)) == (None, None, None)
    assert shelf.get(name) == b"a contribution"


def test_a_thing_that_must_last_is_flushed_also_where_it_was_here_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf, flushed = Shelf(tmp_path), list[int]()
    name = shelf.put(b"the same bytes", durable=False)
    monkeypatch.setattr("os.fsync", flushed.append)
    shelf.put(b"the same bytes", durable=False)
    assert not flushed
    shelf.put(b"the same bytes")
    assert len(flushed) == 2, "the file, and its folder"
    shelf.flush(name)
    assert len(flushed) == 2
    shelf.forget(name)
    shelf.flush(name)


def test_what_a_killed_process_left_is_swept_away_and_what_it_was_fetching_kept(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    name = shelf.put(b"whole")
    torn = [tmp_path / folder / f"{PART}0123" for folder in (name.hex()[:2], "partial")]
    for path in torn:
        path.write_bytes(b"torn")
    old, new = tmp_path / "partial" / "old", tmp_path / "partial" / "new"
    for path in (old, new):
        path.write_bytes(b"some")
    os.utime(old, (0, 0))
    assert Shelf(tmp_path).held == {name}
    assert (old.exists(), new.exists()) == (False, True)
    assert not any(path.exists() for path in torn)


def test_of_beginnings_that_nobody_goes_on_with_the_newest_stay(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    names = [sha256(bytes([index])) for index in range(2 * MAX_PARTIALS + 5)]
    for index, name in enumerate(names):
        begun = shelf.partial(name)
        begun.begin(outline_of([BIG]))
        begun.close()
        os.utime(begun.path, ns=(index, index))
        os.utime(begun.path.with_name(begun.path.name + ".outline"), ns=(index, index))
    shelf.partial(sha256(b"another")).close()
    left = {path.name for path in (tmp_path / "partial").iterdir()}
    assert left == {name.hex() + tail for name in names[-MAX_PARTIALS:] for tail in ("", ".outline")}


def test_of_things_that_are_being_fetched_nothing_is_deleted_however_many_there_are(tmp_path: Path) -> None:
    shelf, under_way = Shelf(tmp_path), []
    for number in range(3 * MAX_PARTIALS):
        raw = number.to_bytes(4, "big") * (CHUNK_BYTES // 4 + 1)
        partial = shelf.partial(sha256(raw))
        partial.begin(outline_of([raw]))
        partial.write(0, raw)
        os.utime(partial.path, (number, number))
        under_way.append(partial)
    for partial in under_way:
        assert partial.is_whole()
        partial.finish()
    assert shelf.held == {partial.name for partial in under_way}


def test_the_least_lately_used_goes_when_the_quota_is_full_and_what_is_pinned_stays(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, quota_bytes=30)
    first, _, third = (shelf.put(bytes([number]) * 10) for number in range(3))
    assert shelf.get(first) is not None  # used: the next to go is the second
    fourth = shelf.put(b"4" * 10)
    assert shelf.held == {first, third, fourth}
    fifth = shelf.put(b"5" * 20)
    assert shelf.held == {fourth, fifth}
    shelf.pin([fourth])
    sixth = shelf.put(b"6" * 20)
    assert shelf.held == {fourth, sixth}
    with pytest.raises(OSError, match="quota"):
        shelf.put(b"6" * 31)
    assert shelf.size_bytes == 30


def test_the_same_thing_put_by_many_threads_at_once_is_there(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    raw = BIG * 2
    with ThreadPoolExecutor(8) as threads:
        names = {each.result(10.0) for each in [threads.submit(shelf.put, raw) for _ in range(16)]}
    assert names == {sha256(raw)}
    assert shelf.get(sha256(raw)) == raw
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(PART)]


def test_an_outline_is_of_as_many_chunks_as_its_size_has() -> None:
    outline = outline_of([BIG[:100], memoryview(BIG)[100:]])
    assert outline == outline_of([BIG])
    assert Outline.unpacked(len(BIG), outline.packed()) == outline
    assert outline.root != outline_of([BIG + b"x"]).root
    for size in (-1, len(BIG) - CHUNK_BYTES, 1 << 60):
        with pytest.raises(ValueError, match="outline"):
            Outline.unpacked(size, outline.packed())
