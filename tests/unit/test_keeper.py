"""What of a peer survives a restart, where its parts disagree."""

import mmap
from typing import Any

from dilocox_peer.config import preset
from dilocox_peer.files import PART
from dilocox_peer.peer.planning.plan import first_plan
from dilocox_peer.peer.rounds.chain import Place
from dilocox_peer.peer.rounds.durable import Durable, Votes
from dilocox_peer.peer.state.keeper import Keeper
from dilocox_peer.peer.training.anchor_state import AnchorState
from dilocox_peer.peer.training.outer import initial_state
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import PeerId, sha256
from dilocox_peer.wire.chain import Certificate

MANIFEST = preset("tiny").signed_by(SigningKey(b"o" * 32))
ME = PeerId("me")


def chain_of(length):
    """Certificates from genesis: the view change that starts the run, then void rounds."""
    place, chain = Place.genesis(0, MANIFEST.genesis(0), first_plan(MANIFEST)), list[Any]()
    for number in range(length):
        value = place.view_change([ME]) if number == 0 else place.round_value([], [ME])
        chain.append(Certificate(0, place.head, 1, 0, value, ((ME, b"s"),)))
        place = place.then(chain[-1])
    return chain


def state_at(head, round_number):
    start = initial_state(MANIFEST)
    return AnchorState.of(
        start.layout, head=head, round_number=round_number, anchor=start.anchor, momentum=start.momentum
    )


def opened(folder):
    return Keeper(folder, MANIFEST, 0, lambda event: None)


def test_after_a_change_to_a_branch_with_fewer_rounds_a_restart_has_its_state(tmp_path):
    chain = chain_of(3)
    keeper = opened(tmp_path)
    for round_number in (7, 8, 9):  # of the branch that is given up
        keeper.save(state_at(sha256(bytes([round_number])), round_number))
        keeper.writer.submit(lambda: None).result()
    keeper.save(state_at(chain[-1].head, 2))
    keeper.journal.write(Durable(0, tuple(chain), Votes(chain[-1].head)))
    keeper.close()

    keeper = opened(tmp_path)
    keeper.close()
    assert (keeper.state.round, keeper.state.head) == (2, chain[-1].head)


def test_a_state_that_is_not_of_the_chain_is_not_taken_for_its_own(tmp_path):
    chain = chain_of(3)
    keeper = opened(tmp_path)
    keeper.save(state_at(sha256(b"elsewhere"), 9))
    keeper.journal.write(Durable(0, tuple(chain), Votes(chain[-1].head)))
    keeper.close()

    keeper = opened(tmp_path)
    keeper.close()
    assert keeper.state == initial_state(MANIFEST)


def test_who_waits_for_a_write_finds_it_on_disk(tmp_path):
    keeper = opened(tmp_path)
    states = [state_at(sha256(bytes([number])), number) for number in (1, 2, 3)]
    for written in [keeper.save(state) for state in states]:
        written.result()
    assert keeper.stored(states[-1].head) == states[-1]
    keeper.close()


def test_a_write_that_fails_is_told_and_ends_nobody(tmp_path):
    told: list[Any] = []
    keeper = Keeper(tmp_path, MANIFEST, 0, told.append)
    keeper.checkpoints.write_bytes(b"a file where the folder belongs")
    keeper.save(state_at(sha256(b"head"), 1)).result()
    keeper.close()
    assert [type(event).__name__ for event in told] == ["Failed"]


def grown(keeper, state):
    """What a merge gives: state, in its file."""
    growing = keeper.grow(state.head, state.round)
    growing.write("anchor", 0, state.anchor_N())
    growing.write("momentum", 0, state.momentum_N())
    return growing.finish(state.outline)


def test_a_state_that_has_grown_is_found_again_though_its_checkpoint_was_left_for_later(tmp_path):
    chain = chain_of(3)
    told: list[Any] = []
    keeper = Keeper(tmp_path, MANIFEST, 0, told.append)
    first, second = (state_at(certificate.head, number) for number, certificate in enumerate(chain[1:], 1))
    keeper.save(grown(keeper, first)).result()
    keeper.rest(3600.0)
    keeper.save(grown(keeper, second), at_once=False).result()
    keeper.journal.write(Durable(0, tuple(chain), Votes(chain[-1].head)))
    keeper.close()
    assert [event.round for event in told] == [1]

    keeper = opened(tmp_path)
    keeper.close()
    assert keeper.state == second


def test_what_a_killed_merge_left_is_gone_after_the_next_start(tmp_path):
    keeper = opened(tmp_path)
    grown(keeper, state_at(sha256(b"1"), 1))
    keeper.close()
    for folder in keeper.state_folders:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{PART}0123abcd-of another process").write_bytes(bytes(100))  # a name as files.py gives it
    keeper = opened(tmp_path)
    keeper.close()
    left = [path.name for folder in keeper.state_folders for path in folder.iterdir()]
    assert [name[:7] for name in left] == ["anchor-"]


def test_only_the_newest_files_and_the_one_on_disk_for_good_stay(tmp_path):
    keeper = opened(tmp_path)
    states = [grown(keeper, state_at(sha256(bytes([number])), number)) for number in (1, 2, 3, 4, 5)]
    keeper.save(states[1]).result()
    keeper.tidy(states[-1])
    keeper.close()
    assert sorted(int(path.name[7:15]) for path in keeper.checkpoints.iterdir()) == [2, 4, 5]


def test_a_disk_that_takes_no_more_is_told_and_the_state_grows_in_memory(tmp_path):
    told: list[Any] = []
    keeper = Keeper(tmp_path, MANIFEST, 0, told.append)
    keeper.checkpoints.write_bytes(b"a file where the folder belongs")
    state = state_at(sha256(b"head"), 1)
    assert grown(keeper, state) == state
    assert [type(event).__name__ for event in told] == ["Failed"]
    keeper.close()


def test_a_large_first_state_is_read_from_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("dilocox_peer.peer.state.keeper.LARGE_BYTES", 1)
    keeper = opened(tmp_path)
    assert keeper.state == initial_state(MANIFEST)
    assert isinstance(keeper.state.anchor.obj, mmap.mmap)
    keeper.close()
    assert keeper.is_empty


def test_a_certificate_that_moves_the_head_alone_writes_nothing(tmp_path):
    told: list[Any] = []
    keeper = Keeper(tmp_path, MANIFEST, 0, told.append)
    for number in (1, 2):
        keeper.rest(0.0)
        keeper.save(state_at(sha256(bytes([number])), 1), at_once=False).result()
    keeper.save(state_at(sha256(b"another branch"), 1)).result()
    keeper.close()
    assert len(told) == 2
    assert keeper.stored(sha256(b"another branch")) is not None
