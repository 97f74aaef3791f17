"""What a keeper lets go of, and what it must not."""

import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from dilocox_peer.errors import ConfigError
from dilocox_peer.events import Event
from dilocox_peer.peer.state.archive import Archive
from dilocox_peer.peer.state.checkpoint import stored_checkpoints
from dilocox_peer.store.outline import Outline
from dilocox_peer.types import sha256
from dilocox_peer.wire.checkpoints import Checkpoint
from tests.certified_stage import MANIFEST, ROSTER, STAGE, CertifiedStage


class Kept:
    """A run's folder, in which one stage is followed."""

    def __init__(self, folder: Path) -> None:
        self.archive = Archive(folder, MANIFEST, lambda _event: None)
        self.stage = self.archive.stages[STAGE]

    def follow(self, certified: CertifiedStage, number: int) -> None:
        """The chain as it is, its contributions, and the state of that round."""
        self.stage.annals.take(certified.certificates)
        for each in certified.certificates:
            for entry in each.value.entries:
                if entry.blob not in self.archive.contributions:
                    self.archive.contributions.put(entry.peer.encode())
        self.stage.save(certified.states[number])
        self.archive.let_go(*self.archive.spare())

    @property
    def rounds(self) -> list[int]:
        """Of the states on the disk."""
        return sorted(int(path.stem.split("-")[1]) for path in stored_checkpoints(self.stage.checkpoints))


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    found = Kept(tmp_path)
    yield found
    found.archive.close()


def test_of_a_chain_that_its_voters_certify_the_newest_state_is_enough(kept: Kept) -> None:
    certified = CertifiedStage()
    for number in range(1, 6):
        kept.follow(certified.rounds(2), 2 * number - 1)
    assert kept.rounds == [9]
    assert len(kept.stage.wanted[1]) == 1


def test_the_last_state_that_surely_is_the_runs_stays_however_long_somebody_goes_on_alone(
    kept: Kept, tmp_path: Path
) -> None:
    certified = CertifiedStage().rounds(6)
    kept.follow(certified, 4)
    certified.seized(ROSTER[1])
    for number in range(6, 20, 2):
        kept.follow(certified.rounds(2), number + 2)
        assert kept.rounds == [4, number + 1]
        heads = {each.head for each in kept.stage.wanted[1]}
        assert {each.head for each in certified.certificates[5:7]} < heads, "rounds 5 and 6"
    assert sha256(ROSTER[0].encode()) in kept.archive.contributions, "of rounds before it was alone"

    growth = kept.stage.log.unwritten()
    assert growth is not None
    kept.stage.log.write(growth)
    kept.archive.close()
    again = Kept(tmp_path)
    assert again.stage.newest == (certified.certificates[20].head, 19)
    again.follow(certified.rounds(2), 22)
    assert again.rounds == [4, 21], "after a restart too"
    again.archive.close()


def test_once_the_owner_has_vouched_for_the_branch_the_newest_is_enough(kept: Kept) -> None:
    certified = CertifiedStage().rounds(6)
    kept.follow(certified, 4)
    kept.follow(certified.seized(ROSTER[1]).rounds(4), 10)
    assert kept.rounds == [4, 9]
    place = certified.certificates[9]
    kept.stage.annals.hear(Checkpoint(STAGE, MANIFEST.genesis(STAGE), 10, place.value.round, place.head, 1, False))
    kept.follow(certified.rounds(2), 12)
    assert kept.rounds == [11]


def test_what_comes_while_others_are_let_go_of_stays(kept: Kept) -> None:
    """Of rounds certified meanwhile: a leaving peer had been told that they are here."""
    certified = CertifiedStage().rounds(4)
    kept.follow(certified, 4)
    spare = kept.archive.spare()
    certified.rounds(1)
    kept.stage.annals.take(certified.certificates[len(kept.stage.annals.certificates) :])
    for entry in certified.certificates[-1].value.entries:
        kept.archive.contributions.put(entry.peer.encode())
    kept.archive.let_go(*spare)
    assert kept.archive.missing(STAGE) == []


def test_a_keeper_that_starts_again_has_the_contributions_that_lead_on_from_its_state(
    kept: Kept, tmp_path: Path
) -> None:
    """It forgot those, and no others: where the peers had gone meanwhile, the rounds since the state were lost."""
    certified = CertifiedStage().rounds(4)
    kept.follow(certified, 2)
    reached = kept.stage.reached(kept.archive.contributions)
    assert reached == (certified.certificates[-1].head, 4)
    unwanted = kept.archive.contributions.put(b"to a round before that state")
    growth = kept.stage.log.unwritten()
    assert growth is not None
    kept.stage.log.write(growth)
    kept.archive.close()
    again = Kept(tmp_path)
    assert again.archive.missing(STAGE) == []
    assert again.stage.reached(again.archive.contributions) == reached
    assert unwanted not in again.archive.contributions
    again.archive.close()


def test_what_a_copy_that_broke_off_has_left_is_told_apart_also_after_a_restart(kept: Kept, tmp_path: Path) -> None:
    kept.follow(CertifiedStage().rounds(2), 1)
    growth = kept.stage.log.unwritten()
    assert growth is not None
    kept.stage.log.write(growth)
    whole_bytes = kept.archive.size_bytes()
    sink = kept.stage.arrivals.partial(sha256(b"state"), size_bytes=1)
    sink.begin(Outline(4096, (sha256(b"state"),)))
    sink.close()
    kept.archive.close()
    again = Archive(tmp_path, MANIFEST, lambda _event: None)
    assert again.arriving_bytes() == 4096
    assert again.size_bytes() - again.arriving_bytes() == whole_bytes
    again.close()


def closed(kept: Kept) -> None:
    """With its chain on the disk, as after a look."""
    growth = kept.stage.log.unwritten()
    assert growth is not None
    kept.stage.log.write(growth)
    kept.archive.close()


def log_of(folder: Path) -> Path:
    return folder / f"stage{STAGE}" / "kept.log"


def test_a_keeper_whose_log_is_damaged_says_so_and_lets_nothing_go(kept: Kept, tmp_path: Path) -> None:
    """It had forgotten the chain in silence, and then all contributions that this names."""
    certified = CertifiedStage().rounds(4)
    kept.follow(certified, 2)
    held = set(kept.archive.contributions.held)
    assert held
    closed(kept)
    raw = bytearray(log_of(tmp_path).read_bytes())
    raw[20] ^= 1
    log_of(tmp_path).write_bytes(raw)
    for num_told in (1, 0):  # at the next start the log is whole, and short
        told: list[Event] = []
        archive = Archive(tmp_path, MANIFEST, told.append)
        said = f"what is kept of stage {STAGE}: {log_of(tmp_path)} was damaged"
        assert [said in event.line() for event in told] == [True] * num_told
        assert archive.contributions.held == held
        assert len(stored_checkpoints(archive.stages[STAGE].checkpoints)) == 1
        archive.close()
    assert [each.read_bytes() for each in log_of(tmp_path).parent.glob("kept.log.damaged-*")] == [bytes(raw)]

    again = Kept(tmp_path)
    again.stage.annals.take(certified.certificates)  # from peers that are still there
    assert again.stage.newest == (certified.certificates[2].head, 2)
    assert again.archive.missing(STAGE) == []
    again.follow(certified.rounds(2), 5)
    assert again.rounds == [5], "what the run has gone beyond goes as ever"
    again.archive.close()


def test_a_state_that_a_lost_chain_led_to_stays_where_the_run_has_begun_anew(kept: Kept, tmp_path: Path) -> None:
    kept.follow(CertifiedStage().rounds(6), 5)
    closed(kept)
    log_of(tmp_path).unlink()
    again = Kept(tmp_path)
    again.follow(CertifiedStage(first=2.0).rounds(3), 2)
    assert again.rounds == [2, 5]
    again.archive.close()


def test_a_record_that_a_crash_cut_short_costs_no_contributions_at_the_start(kept: Kept, tmp_path: Path) -> None:
    certified = CertifiedStage().rounds(2)
    kept.follow(certified, 1)
    growth = kept.stage.log.unwritten()
    assert growth is not None
    kept.stage.log.write(growth)
    certified.round(blobs={ROSTER[0]: kept.archive.contributions.put(b"to the last round")})
    kept.stage.annals.take(certified.certificates)
    closed(kept)
    log = log_of(tmp_path)
    log.write_bytes(log.read_bytes()[:-5])
    again = Kept(tmp_path)
    assert again.stage.annals.place.round == 2
    assert sha256(b"to the last round") in again.archive.contributions
    again.archive.close()


def test_a_keepers_log_of_another_version_is_refused_and_nothing_is_let_go(kept: Kept, tmp_path: Path) -> None:
    kept.follow(CertifiedStage().rounds(4), 2)
    closed(kept)
    raw = bytearray(log_of(tmp_path).read_bytes())
    raw[9] += 1
    length = int.from_bytes(raw[:4], "big")
    raw[4:8] = zlib.crc32(raw[8 : 8 + length]).to_bytes(4, "big")
    log_of(tmp_path).write_bytes(raw)
    before = {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()}
    with pytest.raises(ConfigError, match=r"kept\.log was written by a newer dilocox-peer"):
        Kept(tmp_path)
    assert {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()} == before
