"""Shards that a peer serves from a person's own folders, and those that it fetches."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from dilocox_peer.data.catalogue import Catalogue, Shard
from dilocox_peer.peer.seeding import ShardFetcher, SharedFolders
from dilocox_peer.store.outline import CHUNK_BYTES, outline_of
from dilocox_peer.types import sha256

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
