"""A log of rounds that is damaged, or that another version wrote: what was there stays, and of what is left as much is used as can be proved."""

import errno
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from dilocox_peer.errors import ConfigError
from dilocox_peer.peer.rounds import journal as journal_module
from dilocox_peer.peer.rounds.durable import LOST_VOTES_VIEWS, Durable, Votes
from dilocox_peer.peer.rounds.genesis import genesis_of
from dilocox_peer.peer.rounds.journal import read_log
from dilocox_peer.peer.state.keeper import Keeper
from dilocox_peer.wire.chain import Certificate
from tests.unit.test_keeper import MANIFEST, chain_of, opened, state_at

HEIGHT = 300
ROUNDS = (295, 297, 299)  # of the states


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "COMPACT_BYTES", 4096)
    monkeypatch.setattr(journal_module, "KEPT", 20)


@pytest.fixture
def chain() -> list[Certificate]:
    return list(chain_of(HEIGHT))


def grow(keeper: Keeper, chain: list[Certificate], start: int, stop: int) -> None:
    for at in range(start, stop, 20):
        part = chain[at : min(at + 20, stop)]
        keeper.chain.seal(keeper.journal.write(Durable(at, tuple(part), Votes(part[-1].head))))


def save(keeper: Keeper, chain: list[Certificate], *rounds: int) -> None:
    for number in rounds:
        keeper.save(state_at(chain[number].head, number)).result()


@pytest.fixture
def log(tmp_path: Path, chain: list[Certificate]) -> Path:
    """Of a peer that has trained long enough to have older certificates in blocks."""
    keeper = opened(tmp_path)
    grow(keeper, chain, 0, HEIGHT)
    save(keeper, chain, *ROUNDS)
    keeper.close()
    path = tmp_path / "stage0" / "rounds.log"
    assert path.with_suffix(".past").stat().st_size > 1000
    return path


def whole(folder: Path) -> dict[str, bytes]:
    """All files, but for those that every start makes."""
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def set_aside(path: Path) -> list[bytes]:
    return [each.read_bytes() for each in sorted(path.parent.glob(f"{path.name}.damaged-*"))]


def rounds_of(keeper: Keeper) -> list[int]:
    return sorted(int(path.name[7:15]) for path in keeper.checkpoints.iterdir())


def flip(path: Path, at: int) -> bytes:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)
    return bytes(raw)


def started(folder: Path) -> tuple[Keeper, list[Certificate], list[str]]:
    """A start that ends at once, the certificates that it had, and what it told."""
    told: list[Any] = []
    keeper = Keeper(folder, MANIFEST, 0, told.append)
    certificates = list(keeper.chain.certificates)
    keeper.close()
    return keeper, certificates, [event.line() for event in told]


@pytest.mark.parametrize("at", [0, 5, 8, 9, 20], ids=["length", "checksum", "type", "version", "payload"])
def test_a_damaged_beginning_that_named_the_blocks_is_known_from_the_rest(
    tmp_path: Path, log: Path, chain: list[Certificate], at: int
) -> None:
    damaged = flip(log, at)
    keeper, certificates, told = started(tmp_path)
    assert certificates == chain
    assert keeper.state == state_at(chain[299].head, 299)
    assert keeper.durable is not None
    assert keeper.durable.votes.view_change_signed == chain[-1].view + LOST_VOTES_VIEWS, "as after any damage"
    assert set_aside(log) == [damaged]
    assert [f"{log} was damaged" in line and "300 certificates" in line for line in told] == [True]
    assert started(tmp_path)[1:] == (chain, [])
    assert set_aside(log) == [damaged]


def test_who_only_reads_such_a_log_reads_all_of_it_and_writes_nothing(
    tmp_path: Path, log: Path, chain: list[Certificate]
) -> None:
    flip(log, 20)
    before = whole(tmp_path)
    durable = read_log(log, genesis_of(MANIFEST, 0)).durable
    assert durable is not None
    assert list(durable.appended) == chain
    assert whole(tmp_path) == before


@pytest.mark.parametrize("by", [-1, 1], ids=["older", "newer"])
@pytest.mark.parametrize("is_long", [True, False], ids=["with blocks", "without"])
def test_a_log_of_another_version_is_refused_and_nothing_on_the_disk_is_touched(
    tmp_path: Path, log: Path, chain: list[Certificate], by: int, is_long: bool
) -> None:
    if not is_long:
        log.unlink()
        log.with_suffix(".past").unlink()
        keeper = opened(tmp_path)
        grow(keeper, chain, 0, 5)
        keeper.close()
    raw = log.read_bytes()
    length = struct.unpack(">I", raw[:4])[0]
    payload = bytearray(raw[8 : 8 + length])
    payload[1] += by
    log.write_bytes(struct.pack(">II", length, zlib.crc32(payload)) + payload + raw[8 + length :])
    before = whole(tmp_path)
    words = "a newer dilocox-peer .*: update this one" if by > 0 else "an older dilocox-peer .*: go on with that one"
    with pytest.raises(ConfigError, match=f"{log} was written by {words}"):
        opened(tmp_path)
    with pytest.raises(ConfigError, match="nothing was changed"):
        read_log(log, genesis_of(MANIFEST, 0))
    assert whole(tmp_path) == before


def test_where_no_certificate_is_left_the_states_of_later_rounds_stay(tmp_path: Path, chain: list[Certificate]) -> None:
    keeper = opened(tmp_path)
    keeper.journal.write(Durable(0, tuple(chain[:10]), Votes(chain[9].head)))
    keeper.journal.write(Durable(10, tuple(chain[10:30]), Votes(chain[29].head)))
    save(keeper, chain, 25, 27, 29)
    keeper.close()
    log = tmp_path / "stage0" / "rounds.log"
    damaged = flip(log, 100)
    keeper, _, told = started(tmp_path)
    assert keeper.is_empty
    assert set_aside(log) == [damaged]
    assert ["0 certificates could be read" in line for line in told] == [True]
    keeper = opened(tmp_path)
    grow(keeper, chain, 0, 8)
    save(keeper, chain, 1, 2, 3, 4)
    assert rounds_of(keeper) == [2, 3, 4, 25, 27, 29]
    keeper.close()
    keeper = opened(tmp_path)
    assert keeper.state.round == 4
    save(keeper, chain, 5)
    keeper.tidy(state_at(chain[5].head, 5))
    keeper.writer.submit(lambda: None).result()
    assert rounds_of(keeper) == [3, 4, 5, 25, 27, 29], "after another restart too"
    grow(keeper, chain, 8, 40)
    save(keeper, chain, 26, 30, 31, 32)
    assert rounds_of(keeper) == [30, 31, 32], "what the run has come to again is not kept for ever"
    keeper.close()


def test_a_log_of_one_record_that_is_as_long_as_it_says_was_not_cut_short(
    tmp_path: Path, chain: list[Certificate]
) -> None:
    keeper = opened(tmp_path)
    keeper.journal.write(Durable(0, tuple(chain[:20]), Votes(chain[19].head)))
    keeper.close()
    log = tmp_path / "stage0" / "rounds.log"
    damaged = flip(log, 100)
    started(tmp_path)
    assert set_aside(log) == [damaged]


@pytest.mark.parametrize("left_bytes", [200, 5])
def test_a_first_record_that_a_crash_cut_short_is_as_if_it_had_never_been_written(
    tmp_path: Path, chain: list[Certificate], left_bytes: int
) -> None:
    keeper = opened(tmp_path)
    keeper.journal.write(Durable(0, tuple(chain[:3]), Votes(chain[2].head)))
    keeper.close()
    log = tmp_path / "stage0" / "rounds.log"
    os.truncate(log, left_bytes)
    keeper, _, told = started(tmp_path)
    assert keeper.durable is None
    assert ["cut short by a crash" in line for line in told] == [True]
    assert set_aside(log) == []


def test_without_any_log_the_states_that_lie_there_stay(tmp_path: Path, log: Path, chain: list[Certificate]) -> None:
    log.unlink()
    keeper = opened(tmp_path)
    grow(keeper, chain, 0, 8)
    save(keeper, chain, 1, 2, 3, 4)
    keeper.close()
    assert rounds_of(keeper) == [2, 3, 4, *ROUNDS]


def test_of_blocks_that_are_damaged_all_is_kept_and_what_is_written_after_them_is_found_again(
    tmp_path: Path, log: Path, chain: list[Certificate]
) -> None:
    keeper = opened(tmp_path)
    first, second = keeper.chain.blocks[:2]
    keeper.close()
    past, log_before = log.with_suffix(".past"), log.read_bytes()
    damaged = flip(past, second.at + 40)
    _, certificates, told = started(tmp_path)
    assert certificates == chain[: first.stop]
    assert (set_aside(log), set_aside(past)) == ([log_before], [damaged])
    assert len(told) == 1
    keeper = opened(tmp_path)
    grow(keeper, chain, first.stop, HEIGHT)
    keeper.close()
    assert started(tmp_path)[1:] == (chain, [])


@pytest.mark.parametrize("kept_bytes", [30, 100, 1000])
def test_a_log_that_the_disk_has_cut_short_costs_no_blocks(
    tmp_path: Path, log: Path, chain: list[Certificate], kept_bytes: int
) -> None:
    """It was put there at once, with what its beginning names behind it: no crash of ours leaves that."""
    past = log.with_suffix(".past")
    blocks = past.read_bytes()
    os.truncate(log, kept_bytes)
    cut = log.read_bytes()
    _, certificates, told = started(tmp_path)
    assert set_aside(log) == [cut]
    assert ["was damaged" in line for line in told] == [True]
    assert certificates == chain[: len(certificates)]
    if kept_bytes == 30:  # also of the beginning there is a part alone, which says nothing of blocks
        assert set_aside(past) == [blocks]
    else:
        assert len(certificates) > 200
        assert past.read_bytes() == blocks


def test_a_record_that_a_crash_cut_short_is_dropped_as_ever(tmp_path: Path, log: Path) -> None:
    with log.open("ab") as file:
        file.write(b"\x00\x00\x01\x00torn")
    keeper, _, told = started(tmp_path)
    assert ["cut short by a crash" in line for line in told] == [True]
    assert keeper.state.round == 299
    assert set_aside(log) == []


def test_no_more_than_two_are_kept(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for second in range(4):
        monkeypatch.setattr("time.gmtime", lambda second=second: (2026, 11, 28, 12, 0, second, 5, 332, 0))
        last = flip(log, 20)
        opened(tmp_path).close()
    assert len(set_aside(log)) == 2
    assert set_aside(log)[-1] == last


def test_what_little_is_damaged_later_pushes_nothing_out_of_what_is_kept(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.with_suffix(".past").unlink()
    whole_log = log.read_bytes()
    for second in range(3):  # after the first there is nothing left
        monkeypatch.setattr("time.gmtime", lambda second=second: (2026, 11, 28, 12, 0, second, 5, 332, 0))
        opened(tmp_path).close()
        last = flip(log, 20)
    assert set_aside(log)[0] == whole_log
    monkeypatch.setattr("time.gmtime", lambda: (2026, 11, 28, 12, 1, 0, 5, 332, 0))
    opened(tmp_path).close()
    assert set_aside(log) == [whole_log, last]


def test_starts_that_cannot_replace_it_keep_it_once(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service is started again every quarter of a minute."""
    damaged = flip(log, 20)
    monkeypatch.setattr("dilocox_peer.peer.rounds.journal.replace_file", fails)
    for second in range(3):
        monkeypatch.setattr("time.gmtime", lambda second=second: (2026, 11, 28, 12, 0, second, 5, 332, 0))
        with pytest.raises(OSError, match="No space left"):
            opened(tmp_path)
    assert set_aside(log) == [damaged]


@pytest.mark.parametrize("is_there", [True, False], ids=["empty", "gone"])
def test_blocks_beside_a_log_that_is_empty_are_kept_and_told(
    tmp_path: Path, log: Path, chain: list[Certificate], is_there: bool
) -> None:
    past = log.with_suffix(".past")
    blocks = past.read_bytes()
    log.unlink()
    if is_there:
        log.touch()
    _, certificates, told = started(tmp_path)
    assert certificates == []
    assert set_aside(past) == [blocks]
    assert ["is empty, and certificates lie beside it" in line for line in told] == [True]
    keeper = opened(tmp_path)
    grow(keeper, chain, 0, HEIGHT)
    keeper.close()
    assert started(tmp_path)[1:] == (chain, [])
    assert set_aside(past) == [blocks]


def no_links(*_: object) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


def test_on_a_disk_without_links_it_is_copied(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.link", no_links)
    damaged = flip(log, 20)
    opened(tmp_path).close()
    assert set_aside(log) == [damaged]


def fails(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("what", ["os.link", "dilocox_peer.peer.rounds.journal.replace_file"])
@pytest.mark.parametrize("which", ["log", "past"])
def test_on_a_disk_that_takes_no_copy_nothing_is_rewritten(
    tmp_path: Path, log: Path, chain: list[Certificate], monkeypatch: pytest.MonkeyPatch, what: str, which: str
) -> None:
    path, at = (log, 20) if which == "log" else (log.with_suffix(".past"), 3000)
    flip(path, at)
    before = {each: each.read_bytes() for each in (log, log.with_suffix(".past"))}
    with monkeypatch.context() as full:
        full.setattr(what, fails)
        with pytest.raises(OSError, match="No space left"):
            opened(tmp_path)
    assert {each: each.read_bytes() for each in before} == before
    _, certificates, _ = started(tmp_path)
    assert certificates == chain[: len(certificates)]
    assert len(certificates) >= 40
