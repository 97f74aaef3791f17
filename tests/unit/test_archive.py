"""What a keeper lets go of, and what it must not."""

from collections.abc import Iterator
from pathlib import Path

import pytest

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
    sink = kept.stage.arrivals.partial(sha256(b"state"), alone=True)
    sink.begin(Outline(4096, (sha256(b"state"),)))
    sink.close()
    kept.archive.close()
    again = Archive(tmp_path, MANIFEST, lambda _event: None)
    assert again.arriving_bytes() == 4096
    assert again.size_bytes() - again.arriving_bytes() == whole_bytes
    again.close()
