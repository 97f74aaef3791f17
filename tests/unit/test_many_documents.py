"""A shard may have as many documents as tokens, and be a stranger's: what is looked at of it takes a block of memory, not the file's size."""

import hashlib
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from dilocox_peer.data.catalogue import UNIT_TOKENS, Catalogue, Shard, padded
from dilocox_peer.data.shards import OpenShard, ShardFolders

MANY = 4 << 20
BLOCK = 1 << 20  # starts that are looked at together


def shard_of(folder: Path, starts: np.ndarray, tokens: int, *, held_out: bool = False) -> Shard:
    """The file of a shard with these starts, whatever they are."""
    raw = bytes([held_out]) * tokens
    content = raw + bytes(padded(tokens) - tokens) + starts.astype("<u4").tobytes()
    name = hashlib.sha256(content).hexdigest()
    (folder / f"{name}.shard").write_bytes(content)
    return Shard(sha256=name, tokens=tokens, documents=len(starts), text_bytes=tokens, held_out=held_out)


def opened(folder: Path, starts: np.ndarray, tokens: int) -> tuple[OpenShard | None, ShardFolders]:
    listed = shard_of(folder, starts, tokens), shard_of(folder, np.zeros(1), 1, held_out=True)
    folders = ShardFolders(Catalogue(tokenizer="bytes", bos="", eos="", vocab_size=256, shards=listed), [folder])
    return folders.find(listed[0]), folders


def test_a_document_a_token_takes_no_memory_by_its_number(tmp_path):
    found: OpenShard | None
    shard = shard_of(tmp_path, np.arange(MANY), MANY)
    listed = shard, shard_of(tmp_path, np.zeros(1), 1, held_out=True)
    folders = ShardFolders(Catalogue(tokenizer="bytes", bos="", eos="", vocab_size=256, shards=listed), [tmp_path])
    tracemalloc.start()
    try:
        found = folders.find(shard)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found is not None
    assert kept < MANY / 4, "four bytes a document were kept"
    assert peak < 12 * MANY, "it was 26 bytes a document"
    last = shard.units - 1
    assert found.unit(last) == (last * UNIT_TOKENS, MANY)
    assert len(found.documents(last)) == UNIT_TOKENS


@pytest.mark.parametrize(
    ("changed", "to"), [(BLOCK, BLOCK - 1), (BLOCK, 0), (5, 5 + BLOCK), (0, 1), (BLOCK + 9, 2**32 - 1)]
)
def test_documents_that_overlap_are_found_wherever_a_block_ends(tmp_path, changed, to):
    starts = np.arange(BLOCK + 10)
    starts[changed] = to
    found, folders = opened(tmp_path, starts, BLOCK + 10)
    assert found is None
    assert list(folders.faults.values()) == ["its documents overlap"]


def test_units_and_starts_are_what_they_are_in_one_piece(tmp_path):
    rng = np.random.default_rng(7)
    tokens = 40 * UNIT_TOKENS + 100
    starts = np.concatenate([[0], np.sort(rng.choice(np.arange(1, tokens), 50, replace=False))])
    found, _ = opened(tmp_path, starts, tokens)
    assert found is not None
    bounds = [*starts.tolist(), tokens]
    for number in range(found.shard.units):
        first, end = (bounds[int(np.searchsorted(starts, each * UNIT_TOKENS))] for each in (number, number + 1))
        assert found.unit(number) == (first, end)
        assert sum(map(len, found.documents(number))) == end - first
    for before in (0, 1, UNIT_TOKENS, UNIT_TOKENS + 1, tokens - 1, tokens):
        assert found.starts(before).tolist() == starts[starts < before].tolist()
