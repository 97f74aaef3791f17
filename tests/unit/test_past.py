"""A chain whose older certificates lie in blocks is the same chain; and its log outlives a kill at any point."""

import gc
import os
import random
import signal
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from dilocox_peer.peer.rounds import journal as journal_module
from dilocox_peer.peer.rounds.chain import Chain, Place
from dilocox_peer.peer.rounds.durable import Durable, Votes, base_of, encode_record, load_log
from dilocox_peer.peer.rounds.index import Index
from dilocox_peer.peer.rounds.journal import BlockFile, Journal, read_log
from dilocox_peer.peer.rounds.past import (
    MOST_IN_BLOCK,
    BlocksInMemory,
    BlockStore,
    blocks_in,
    read_block,
    write_blocks,
)
from dilocox_peer.peer.rounds.seats import SeatTerms
from dilocox_peer.types import Digest, PeerId, sha256
from dilocox_peer.wire.chain import Certificate, Entry, Plan, Report, Result

PLAN = Plan("fp16", 0, 8)
NAMES = tuple(PeerId(name) for name in "abcd")
GENESIS = Place.genesis(0, sha256(b"genesis"), PLAN, terms=SeatTerms(contributions=2, work_us=5))


def grown(place: Place, seed: int) -> Certificate:
    """Some certificate after place: rosters change, and now and then it is a view change."""
    rng = random.Random(seed)
    roster = tuple(sorted(rng.sample(NAMES, rng.randint(2, 4))))
    if place.is_genesis or seed % 7 == 3:
        stay = tuple(peer for peer in roster if peer in place.roster) or roster
        return Certificate(
            0, place.head, place.view + 1, 0, place.view_change(stay), tuple((each, b"12345678s") for each in stay)
        )
    entries = [
        Entry(peer, 1, sha256(peer.encode(), seed.to_bytes(8, "big")), 10, 4, b"", Report(step_us=3))
        for peer in place.roster
    ]
    value = place.round_value(entries, roster)
    votes = tuple((peer, seed.to_bytes(8, "big") + b"s") for peer in place.voters)
    return Certificate(0, place.head, place.view, 0, value, votes)


def extended(chain: Chain, count: int, seed: int = 0) -> Chain:
    for number in range(count):
        chain.append(grown(chain.place, 1000 * seed + number))
    return chain


@pytest.mark.parametrize("seed", range(6))
def test_a_sealed_chain_answers_as_one_that_is_all_in_memory(seed: int) -> None:
    rng, plain, sealed = random.Random(seed), Chain(GENESIS), Chain(GENESIS)
    for step in range(40):
        match rng.randrange(4):
            case 0 if plain.height:
                height = rng.randint(max(0, plain.height - 150), plain.height)
                assert sealed.truncate(height) == plain.truncate(height)
            case 1:
                sealed.seal_all_but(rng.randint(1, 40))
            case _:
                for _ in range(rng.randint(1, 60)):
                    certificate = grown(plain.place, rng.randrange(10**6))
                    plain.append(certificate)
                    sealed.append(certificate)
        height, start = rng.randint(0, plain.height), rng.randint(0, plain.height)
        assert (sealed.head, sealed.height, sealed.place) == (plain.head, plain.height, plain.place), step
        assert sealed.place_at(height) == plain.place_at(height)
        assert sealed.place_at(height).seats == plain.place_at(height).seats
        assert sealed.head_at(height) == plain.head_at(height)
        assert sealed.height_of(plain.head_at(height)) == height
        assert list(sealed.certificates[start:height]) == list(plain.certificates[start:height])
        assert sealed.votes_since(start) == plain.votes_since(start)
        assert sealed.locator() == plain.locator()
        if plain.height:
            assert sealed.certificates[height - 1] == plain.certificates[height - 1]
    assert list(sealed.certificates) == list(sealed.as_it_is()) == list(plain.certificates)
    assert len(sealed.certificates) == plain.height


def test_what_was_sealed_is_not_in_memory() -> None:
    chain = extended(Chain(GENESIS), 300)
    view = chain.as_it_is()
    chain.seal_all_but(10)
    assert chain.blocks[-1].stop == 290
    assert list(view) == list(chain.certificates)


@pytest.mark.parametrize("slices", [0, 16])
def test_memory_of_a_member_hardly_grows_with_the_rounds(tmp_path: Path, slices: int) -> None:
    """With certificates of results too, of which a block has few, and the place where one begins has all."""
    place = Place.genesis(0, sha256(b"genesis"), PLAN, terms=SeatTerms(contributions=2, work_us=5), slices=slices)
    chain = Chain(place, store=BlockFile.at(tmp_path / "rounds.past"))

    def bytes_after(rounds: int) -> int:
        while chain.height < rounds:
            number = chain.height.to_bytes(4, "big")
            entries = [Entry(peer, 1, sha256(peer.encode(), number), 10, 4, b"", Report(step_us=3)) for peer in NAMES]
            results = tuple(
                Result(
                    sha256(b"mean", number), 9, b"", sha256(number, bytes([each])), ((NAMES[0], b"x"), (NAMES[1], b"y"))
                )
                for each in range(slices)
            )
            value = chain.place.round_value(entries, NAMES, results=results)
            chain.append(Certificate(0, chain.head, chain.place.view, 0, value, ((NAMES[0], number + b"1234s"),)))
            chain.seal_all_but(100)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before, after = bytes_after(400), bytes_after(400 + 24 * MOST_IN_BLOCK)  # as many in memory
    finally:
        tracemalloc.stop()
    assert (after - before) / (24 * MOST_IN_BLOCK) < 30, (
        "bytes a round: a head and its height alone would be over a hundred"
    )
    assert all(chain.height_of(chain.head_at(height)) == height for height in range(0, chain.height, 37))


@pytest.mark.parametrize("seed", range(4))
def test_the_index_of_blocks_is_as_a_table_of_all_heads(seed: int) -> None:
    rng, index, heads, starts = random.Random(seed), Index(BlocksInMemory()), list[Digest](), list[int]()
    for step in range(60):
        if starts and rng.random() < 0.3:
            left = rng.randint(0, len(starts))
            gone = heads[starts[left] :] if left < len(starts) else []
            index.cut(left)
            del heads[len(heads) - len(gone) :], starts[left:]
            assert all(index.height_of(head) is None for head in gone)
        else:
            starts.append(len(heads))
            heads += (block := [sha256(bytes([seed, step]), bytes([each])) for each in range(rng.randint(1, 200))])
            index.add(block, bytes([step]) * step)
        assert [index.head_at(height) for height in range(len(heads))] == heads
        assert [index.height_of(head) for head in heads] == list(range(len(heads)))
        assert index.height_of(sha256(bytes([step]))) is None
        for number in range(len(starts)):
            assert len(start := index.start(number)) == (start[0] if start else 0)


def test_a_block_moves_few_heights_of_a_table_that_is_full_and_all_are_found_meanwhile() -> None:
    """All at once they were read and entered anew: 67 ms of 100,000, each time that the table doubled."""

    class Counting(BlocksInMemory):
        read_bytes = 0

        def read(self, at: int, size_bytes: int) -> bytes:
            Counting.read_bytes += size_bytes
            return super().read(at, size_bytes)

        def aside(self) -> BlockStore:
            return Counting()

    index, heads, most = Index(Counting()), list[Digest](), 0
    for number in range(400):
        block = [sha256(number.to_bytes(2, "big"), bytes([each])) for each in range(40)]
        before = Counting.read_bytes
        index.add(block, b"")
        most = max(most, Counting.read_bytes - before)
        heads += block
        sought = range(number % 7, len(heads), 97)
        assert [index.height_of(heads[height]) for height in sought] == list(sought)
    assert 32 * len(block) < most <= 32 * 4 * len(block)


def test_a_disk_that_takes_no_index_leaves_all_in_memory_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = extended(Chain(GENESIS), 300)
    certificates, blocks = list(chain.certificates), write_blocks(chain.store, 0, list(chain.certificates[:200]))
    real = BlocksInMemory.append
    with monkeypatch.context() as broken:
        broken.setattr(
            BlocksInMemory, "append", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        )
        assert chain.seal(blocks)
        assert not chain.blocks
    assert BlocksInMemory.append is real
    assert chain.seal(blocks)
    assert chain.blocks[-1].stop == 200
    assert list(chain.certificates) == certificates


def test_blocks_of_another_branch_seal_nothing() -> None:
    chain, other = extended(Chain(GENESIS), 100), extended(Chain(GENESIS), 100, seed=1)
    blocks = write_blocks(BlocksInMemory(), 0, list(other.certificates))
    assert not chain.seal(blocks)
    assert not chain.blocks


def test_a_damaged_block_is_not_read() -> None:
    store, chain = BlocksInMemory(), extended(Chain(GENESIS), 100)
    blocks = write_blocks(store, 0, list(chain.certificates))
    size_bytes = blocks[-1].at + blocks[-1].size_bytes
    assert [each for _, held in blocks_in(store, size_bytes) for each in held] == list(chain.certificates)
    whole = store.read(0, size_bytes)
    for at in random.Random(0).sample(range(blocks[0].size_bytes), 50):
        damaged = BlocksInMemory()
        damaged.append(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ValueError, match="block"):
            read_block(damaged, blocks[0])


# ---- the log --------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "COMPACT_BYTES", 4096)
    monkeypatch.setattr(journal_module, "KEPT", 20)


def written(journal: Journal, chain: Chain, count: int, seed: int = 0) -> None:
    for number in range(count):
        certificate = grown(chain.place, 1000 * seed + number)
        chain.append(certificate)
        blocks = journal.write(Durable(chain.height - 1, (certificate,), Votes(chain.head)))
        assert not blocks or chain.seal(blocks)


def test_a_log_that_grows_is_compacted_and_read_again(tmp_path: Path) -> None:
    path, plain = tmp_path / "rounds.log", Chain(GENESIS)
    journal = Journal(path, GENESIS)
    written(journal, journal.chain, 200)
    extended(plain, 200)
    assert base_of(path.read_bytes()) is not None
    assert path.stat().st_size < 30_000
    assert journal.chain.blocks
    for cut in (190, 60, 0):  # in memory, in blocks, all of it
        journal.chain.truncate(cut)
        plain.truncate(cut)
        written(journal, journal.chain, 90, seed=cut + 1)
        extended(plain, 90, seed=cut + 1)
        journal.close()
        assert list(read_log(path, GENESIS).durable.appended) == list(plain.certificates)  # type: ignore[union-attr]
        journal = Journal(path, GENESIS)
        assert not journal.loaded.reason
        assert list(journal.chain.certificates) == list(plain.certificates)
        assert journal.chain.place == plain.place
        assert journal.loaded.durable is not None
        assert journal.loaded.durable.votes == Votes(plain.head)
    journal.close()


def test_a_log_of_before_is_read_and_compacted(tmp_path: Path) -> None:
    path, chain = tmp_path / "rounds.log", extended(Chain(GENESIS), 120)
    path.write_bytes(encode_record(Durable(0, tuple(chain.certificates), Votes(chain.head, promised=7))))
    assert load_log(path.read_bytes(), GENESIS.head).durable is not None
    journal = Journal(path, GENESIS)
    assert journal.chain.blocks
    assert journal.loaded.durable is not None
    assert journal.loaded.durable.votes.promised == 7
    assert list(journal.loaded.durable.appended) == list(chain.certificates)
    journal.close()
    again = Journal(path, GENESIS)
    assert list(again.chain.certificates) == list(chain.certificates)
    again.close()


@pytest.mark.parametrize("breaks", ["write_blocks", "replace_file", "sync"])
def test_a_compaction_that_fails_leaves_the_log_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: str
) -> None:
    path = tmp_path / "rounds.log"
    journal, broken = Journal(path, GENESIS), [True]
    owner = journal_module.BlockFile if breaks == "sync" else journal_module
    real: Callable[..., object] = getattr(owner, breaks)

    def full(*arguments: object, **options: object) -> object:
        if broken[0]:
            raise OSError(28, "No space left on device")
        return real(*arguments, **options)

    monkeypatch.setattr(owner, breaks, full)
    written(journal, journal.chain, 60)
    assert not journal.chain.blocks
    broken[0] = False
    written(journal, journal.chain, 60, seed=1)
    assert journal.chain.blocks
    certificates = list(journal.chain.certificates)
    journal.close()
    assert list(read_log(path, GENESIS).durable.appended) == certificates  # type: ignore[union-attr]


def test_where_blocks_are_lost_the_peer_keeps_what_is_before_and_votes_no_more_there(tmp_path: Path) -> None:
    path = tmp_path / "rounds.log"
    journal = Journal(path, GENESIS)
    written(journal, journal.chain, 200)
    certificates, first = list(journal.chain.certificates), journal.chain.blocks[0]
    journal.close()
    with path.with_suffix(".past").open("r+b") as file:
        file.truncate(first.size_bytes + 5)
    again = Journal(path, GENESIS)
    assert "are here" in again.loaded.reason
    assert list(again.chain.certificates) == certificates[: first.stop]
    assert again.loaded.durable is not None
    assert again.loaded.durable.votes.view_change_signed > 1000
    again.close()
    mended = Journal(path, GENESIS)
    assert not mended.loaded.reason
    mended.close()


@pytest.mark.parametrize("seed", range(5))
def test_a_process_killed_at_any_point_leaves_all_that_it_had_promised(tmp_path: Path, seed: int) -> None:
    path, rng = tmp_path / "rounds.log", random.Random(seed)
    for life in range(3):
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                journal = Journal(path, GENESIS)
                for number in range(4000):
                    if number % 50 == 49:
                        journal.chain.truncate(rng.randint(0, journal.chain.height))
                    certificate = grown(journal.chain.place, 10_000 * life + number)
                    os.write(writes, b"?" + certificate.head)
                    journal.chain.append(certificate)
                    blocks = journal.write(Durable(journal.chain.height - 1, (certificate,), Votes(journal.chain.head)))
                    journal.chain.seal(blocks)
                    os.write(writes, b"!" + certificate.head)
            finally:
                os._exit(0)
        os.close(writes)
        wanted, got = 66 * rng.randint(30, 260), b""
        while len(got) < wanted and (more := os.read(reads, 66)):
            got += more
        os.kill(child, signal.SIGKILL)
        while more := os.read(reads, 4096):
            got += more
        os.waitpid(child, 0)
        os.close(reads)
        said = [(got[at : at + 1], got[at + 1 : at + 33]) for at in range(0, len(got), 33)]
        asked, done = (next(head for kind, head in reversed(said) if kind == each) for each in (b"?", b"!"))
        journal = Journal(path, GENESIS)  # what was being written may be there too
        assert not journal.loaded.reason or "torn" in journal.loaded.reason
        assert journal.chain.head in (asked, done)
        journal.close()
