"""Shards that a peer serves from a person's own folders, and those that it fetches."""

import asyncio
import importlib
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dilocox_peer.data.catalogue import CATALOGUE_FILE, Catalogue, Shard
from dilocox_peer.errors import ConfigError, DilocoxError, ThingUnavailable
from dilocox_peer.peer.reading import ShardRoom
from dilocox_peer.peer.seeding import PEERS_S, ShardFetcher, SharedFolders, fetch_catalogue
from dilocox_peer.peer.web_folder import NothingCame
from dilocox_peer.store.outline import CHUNK_BYTES, outline_of
from dilocox_peer.types import PeerId, sha256
from tests.virtual_loop import run_virtually

RAW = os.urandom(2 * CHUNK_BYTES + 99) + b"!"
BYTES = {"tokenizer": "bytes", "bos": "", "eos": "", "vocab_size": 256}


def shard_of(raw, *, held_out=False):
    return Shard(sha256=sha256(raw).hex(), tokens=len(raw), documents=1, text_bytes=len(raw), held_out=held_out)


SHARD = shard_of(RAW)
CATALOGUE = Catalogue(shards=(SHARD, shard_of(b"x" * 8, held_out=True)), **BYTES)  # type: ignore[arg-type]


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_file_is_read_in_chunks_and_stays_open_no_longer_than_it_is_used(tmp_path, monkeypatch):
    path = tmp_path / SHARD.file_name
    path.write_bytes(RAW)
    folders = SharedFolders([tmp_path], CATALOGUE, "ab" * 32)
    monkeypatch.setattr("pathlib.Path.read_bytes", lambda _: pytest.fail("read whole"))
    before = open_files()
    content = folders.content(sha256(RAW))
    assert content is not None
    assert content.outline == outline_of([RAW])
    assert content.chunk(2) == RAW[2 * CHUNK_BYTES :]
    assert open_files() == before + 1
    del content
    assert open_files() == before
    assert folders.content(sha256(RAW)) is not None
    path.write_bytes(RAW[:-1] + b"?")
    os.utime(path, ns=(1, 1))
    assert folders.content(sha256(RAW)) is None, "changed since"


def test_a_file_that_is_too_large_for_what_is_asked_is_not_looked_through(tmp_path, monkeypatch):
    (tmp_path / SHARD.file_name).write_bytes(RAW)
    folders = SharedFolders([tmp_path], CATALOGUE, "ab" * 32)
    assert folders.is_unread(sha256(RAW))
    assert not folders.is_unread(sha256(b"another")), "nothing of that name is to be looked through"
    with monkeypatch.context() as context:
        context.setattr("pathlib.Path.open", lambda *_, **__: pytest.fail("read"))
        assert folders.content(sha256(RAW), len(RAW) - 1) is None
    assert folders.content(sha256(RAW), len(RAW)) is not None
    assert not folders.is_unread(sha256(RAW))


class Fed:
    def __init__(self):
        self.wanted = (SHARD,)
        self.looked = asyncio.Event()

    def look_again(self):
        self.looked.set()


class Stored:
    """A store whose shelf has it already, though the feed has not noticed."""

    def __init__(self, path):
        self.at = path
        self.fetched = 0

    async def path(self, name):
        return self.at

    async def fetch(self, name, **_):
        self.fetched += 1
        self.at = Path("here")
        return self.at


async def nobody():
    return []


@pytest.mark.parametrize(("here", "events"), [(Path("here"), 0), (None, 1)])
def test_what_is_here_is_not_said_to_be_fetched(here, events):
    fed: Any = Fed()
    stored: Any = Stored(here)
    told: list[object] = []

    async def scenario():
        running = asyncio.create_task(ShardFetcher(fed, stored, CATALOGUE, nobody, told.append).run())
        await asyncio.wait_for(fed.looked.wait(), 10.0)
        running.cancel()

    asyncio.run(scenario())
    assert len(told) == stored.fetched == events


class Trickled:
    """A store of which the peers that say they have a thing never finish it."""

    def __init__(self):
        self.at: Path | None = None

    async def path(self, name):
        return self.at

    async def fetch(self, name, *, timeout_s, **_):
        if self.at is None:
            await asyncio.sleep(timeout_s + 0.01)  # as a timeout is never early
            raise TimeoutError
        return self.at


class Hung:
    """A web folder. raw: what it has; None: nothing that is whole."""

    def __init__(self, stored, path, raw):
        self.stored, self.at, self.raw = stored, path, raw
        self.asked: list[str] = []

    async def fetch(self, file_name, name, **_):
        self.asked.append(file_name)
        if self.raw is None:
            raise DilocoxError("it is not there")
        self.at.write_bytes(self.raw)
        self.stored.at = self.at


def test_a_catalogue_that_peers_only_trickle_comes_from_the_web(tmp_path, monkeypatch):
    raw = CATALOGUE.model_dump_json().encode()
    stored: Any = Trickled()
    web = Hung(stored, tmp_path / "catalogue", raw)
    found, path = run_virtually(fetch_catalogue(stored, sha256(raw).hex(), nobody, web), monkeypatch)
    assert (found, path) == (CATALOGUE, web.at)
    assert web.asked == [CATALOGUE_FILE]


class Noted:
    """Calls through, and notes in which thread."""

    def __init__(self, call):
        self.call = call
        self.threads: set[threading.Thread] = set()

    def __call__(self, *arguments, **options):
        self.threads.add(threading.current_thread())
        return self.call(*arguments, **options)


def noted(monkeypatch, name):
    module, _, call = name.rpartition(".")
    found = Noted(getattr(importlib.import_module(module), call))
    monkeypatch.setattr(name, found)
    return found


@pytest.mark.parametrize("is_own", [True, False])
def test_what_takes_as_long_as_a_catalogue_does_not_hold_up_the_event_loop(tmp_path, monkeypatch, is_own):
    """Of its own folder, or fetched: a third of a second for 30,000 shards, in which nobody was answered."""
    (tmp_path / CATALOGUE_FILE).write_bytes(CATALOGUE.to_bytes())
    monkeypatch.setattr("dilocox_peer.peer.reading.Store", lambda *_: Stored(None))
    monkeypatch.setattr("dilocox_peer.peer.reading.shard_quota", lambda *_: None)
    monkeypatch.setattr(Stored, "fetch", fetched_from(tmp_path / CATALOGUE_FILE))
    work = [noted(monkeypatch, "dilocox_peer.peer.reading.UnitRow")]
    if is_own:
        work += [
            noted(monkeypatch, f"dilocox_peer.peer.reading.{each}") for each in ("read_catalogue", "SharedFolders")
        ]
    else:
        work += [noted(monkeypatch, "dilocox_peer.peer.seeding.catalogue_of")]
    room: Any = ShardRoom(
        cast("Any", SimpleNamespace(
            data=SimpleNamespace(catalogue=sha256(CATALOGUE.to_bytes()).hex(), url="", packing="concatenate"), run=SimpleNamespace(seed=1),
            inner=SimpleNamespace(micro_batch=2), model=SimpleNamespace(context=64, vocab_size=256), stages=SimpleNamespace(count=0),
        )),
        cast("Any", SimpleNamespace(
            choices=SimpleNamespace(data=[tmp_path] if is_own else []), run_folder=tmp_path, at_most=None)),
        0, cast("Any", SimpleNamespace(me="me", transport=None, incarnation=1)), cast("Any", None), cast("Any", pytest.fail),
    )  # fmt: skip
    asyncio.run(room.open())
    assert room.feed is not None
    for each in work:
        assert each.threads, "it was not done at all"
        assert threading.main_thread() not in each.threads


def fetched_from(path):
    async def fetch(_stored, _name, **_options):
        return path

    return fetch


@pytest.mark.parametrize("has_web", [True, False])
def test_a_catalogue_that_nobody_has_whole_is_given_up(tmp_path, monkeypatch, has_web):
    stored: Any = Trickled()
    web = Hung(stored, tmp_path / "catalogue", None) if has_web else None
    with pytest.raises(ConfigError, match="nobody in the run has its catalogue"):
        run_virtually(fetch_catalogue(stored, "ab" * 32, nobody, web), monkeypatch)


def test_a_catalogue_that_the_disk_has_changed_is_fetched_again(tmp_path, monkeypatch):
    """A digit of it may change and it still reads as one: of another row, on which this peer would have trained alone."""
    raw, path = CATALOGUE.to_bytes(), tmp_path / "catalogue"
    path.write_bytes(raw.replace(b'"vocab_size":256', b'"vocab_size":356'))
    assert path.read_bytes() != raw
    forgotten = []

    class Stored:
        async def fetch(self, _name, **_):
            return path

        async def forget(self, name):
            forgotten.append(name)
            path.write_bytes(raw)

    stored: Any = Stored()
    found, _ = run_virtually(fetch_catalogue(stored, sha256(raw).hex(), nobody), monkeypatch)
    assert found == CATALOGUE
    assert forgotten == [sha256(raw)]


def test_a_catalogue_that_has_no_room_as_one_donor_says_is_asked_for_again(tmp_path, monkeypatch):
    """It may be a liar, and the only one that is there yet."""
    raw, tries = CATALOGUE.model_dump_json().encode(), []
    (tmp_path / "catalogue").write_bytes(raw)

    class Stored:
        async def fetch(self, _name, **_):
            tries.append(1)
            if len(tries) == 1:
                raise OSError("67108864 bytes are more than the quota has room for")
            return tmp_path / "catalogue"

    stored: Any = Stored()
    found, _ = run_virtually(fetch_catalogue(stored, sha256(raw).hex(), nobody), monkeypatch)
    assert found == CATALOGUE
    assert len(tries) == 2


def test_a_shard_that_peers_only_trickle_comes_from_the_web_within_minutes(tmp_path, monkeypatch):
    """One peer that trickles held each shard up for an hour, the next one too."""
    fed: Any = Fed()
    stored: Any = Trickled()
    web, told, asked = Hung(stored, tmp_path / "shard", RAW), list[Any](), list[Any]()

    async def donors():
        return [PeerId("trickles")]

    async def fetch(self, name, *, donors, timeout_s, **_):
        asked.append((list(donors), timeout_s))
        await asyncio.sleep(timeout_s + 0.01 if donors else 0.0)
        raise TimeoutError if donors else ThingUnavailable("nobody is left to ask")

    monkeypatch.setattr(Trickled, "fetch", fetch)

    async def scenario():
        running = asyncio.create_task(ShardFetcher(fed, stored, CATALOGUE, donors, told.append, web).run())
        await asyncio.wait_for(fed.looked.wait(), 4 * PEERS_S)
        fed.looked.clear()
        stored.at, fed.wanted = None, CATALOGUE.shards[1:]
        await asyncio.wait_for(fed.looked.wait(), PEERS_S)
        running.cancel()

    run_virtually(scenario(), monkeypatch)
    assert web.asked == [shard.file_name for shard in CATALOGUE.shards]
    assert [each.is_from_web for each in told] == [True, True]
    assert [peers for peers, _ in asked] == [[PeerId("trickles")], []]


def test_a_web_server_with_another_shard_is_asked_less_and_less_often(monkeypatch):
    """It was asked every five seconds, for the whole of it each time; peers are still."""
    fed: Any = Fed()
    fed.wanted = (SHARD,)
    told, asked, from_peers = list[Any](), list[float](), list[float]()

    class Lacking:
        async def path(self, _name):
            return None

        async def fetch(self, _name, **_):
            from_peers.append(asyncio.get_running_loop().time())
            raise ThingUnavailable("nobody has it")

    class Wrong:
        async def fetch(self, *_, **__):
            asked.append(asyncio.get_running_loop().time())
            raise DilocoxError("its sha256 is another")

    async def scenario():
        stored: Any = Lacking()
        running = asyncio.create_task(ShardFetcher(fed, stored, CATALOGUE, nobody, told.append, Wrong()).run())
        await asyncio.sleep(3600.0)
        running.cancel()

    run_virtually(scenario(), monkeypatch)
    assert 5 <= len(asked) <= 13
    assert len(told) == len(asked)
    assert len(from_peers) > 500


AWAY_S = 1260.0


def test_a_web_server_that_was_away_is_asked_again_within_a_minute(monkeypatch):
    """Of 21 minutes away it was asked nine and a half later, and nobody trained on the shard until then."""
    fed: Any = Fed()
    fed.wanted = (SHARD,)
    began, came = list[float](), list[float]()

    class Lacking:
        async def path(self, _name):
            return None

        async def fetch(self, _name, **_):
            raise ThingUnavailable("nobody has it")

    class Away:
        async def fetch(self, *_, **__):
            late_s = asyncio.get_running_loop().time() - began[0] - AWAY_S
            if late_s < 0.0:
                raise NothingCame("connection refused")
            came.append(late_s)
            await asyncio.Event().wait()

    async def scenario():
        began.append(asyncio.get_running_loop().time())
        stored: Any = Lacking()
        running = asyncio.create_task(ShardFetcher(fed, stored, CATALOGUE, nobody, lambda _: None, Away()).run())
        await asyncio.sleep(3600.0)
        running.cancel()

    run_virtually(scenario(), monkeypatch)
    assert len(came) == 1
    assert came[0] <= 66.0
