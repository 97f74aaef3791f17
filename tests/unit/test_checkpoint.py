"""Anchor states on disk: whole or refused."""

import hashlib
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from dilocox_peer.compression.reader import PIECE
from dilocox_peer.errors import StateCorrupt
from dilocox_peer.peer.state.checkpoint import (
    GrowingCheckpoint,
    load_newest,
    path_of,
    prune,
    read_checkpoint,
    read_head,
    stored_content,
    write_checkpoint,
)
from dilocox_peer.peer.training.anchor_state import AnchorState
from dilocox_peer.types import Digest, Layout, RunId

LAYOUT = Layout.of([("a.weight", (4, 3)), ("b", (5,))])
RUN = RunId("ab" * 32)


def state_at(round_number):
    generator = torch.Generator().manual_seed(round_number)
    parts = [torch.randn(LAYOUT.num_elements, generator=generator).numpy().tobytes() for _ in range(2)]
    head = Digest(hashlib.sha256(bytes([round_number])).digest())
    return AnchorState.of(LAYOUT, head=head, round_number=round_number, anchor=parts[0], momentum=parts[1])


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_is_read_back(tmp_path):
    write_checkpoint(tmp_path / "new", RUN, state_at(7))
    loaded = load_newest(tmp_path / "new", RUN, LAYOUT)
    assert loaded.state == state_at(7)
    assert loaded.damaged == ()


def test_the_last_three_are_kept(tmp_path):
    for round_number in (1, 2, 3, 10):
        write_checkpoint(tmp_path, RUN, state_at(round_number))
    assert names(tmp_path) == [f"anchor-{number:08}.safetensors" for number in (2, 3, 10)]
    assert load_newest(tmp_path, RUN, LAYOUT).state == state_at(10)


def test_a_branch_with_fewer_rounds_takes_the_place_of_the_one_given_up(tmp_path):
    for round_number in (28, 29, 30):
        write_checkpoint(tmp_path, RUN, state_at(round_number))
    for written, kept in [(25, (25, 29, 30)), (26, (25, 26, 30)), (27, (25, 26, 27))]:
        path = write_checkpoint(tmp_path, RUN, state_at(written))
        assert read_checkpoint(path, RUN, LAYOUT) == state_at(written)
        assert names(tmp_path) == [f"anchor-{number:08}.safetensors" for number in kept]


def test_the_newest_of_some_heads_alone_is_found(tmp_path):
    for round_number in (25, 29, 30):
        write_checkpoint(tmp_path, RUN, state_at(round_number))
    among = {state_at(24).head, state_at(25).head}
    assert load_newest(tmp_path, RUN, LAYOUT, among=among).state == state_at(25)
    assert load_newest(tmp_path, RUN, LAYOUT, among={state_at(24).head}).state is None


def test_no_checkpoint_is_no_error(tmp_path):
    assert load_newest(tmp_path / "nowhere", RUN, LAYOUT).state is None


def test_a_file_torn_anywhere_is_reported_and_the_next_older_used(tmp_path):
    write_checkpoint(tmp_path, RUN, state_at(1))
    path = write_checkpoint(tmp_path, RUN, state_at(2))
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        loaded = load_newest(tmp_path, RUN, LAYOUT)
        assert loaded.state == state_at(1)
        assert len(loaded.damaged) == 1
        assert path.name in loaded.damaged[0]


def test_no_flipped_bit_gets_another_state_in(tmp_path):
    path = write_checkpoint(tmp_path, RUN, state_at(2))
    whole = path.read_bytes()
    for position in range(0, len(whole), 5):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x10]) + whole[position + 1 :])
        try:
            state = read_checkpoint(path, RUN, LAYOUT)
        except StateCorrupt:
            continue
        assert (state.anchor, state.momentum) == (state_at(2).anchor, state_at(2).momentum)


def test_a_half_written_file_is_not_looked_at(tmp_path):
    write_checkpoint(tmp_path, RUN, state_at(1))
    (tmp_path / "anchor-00000009.partial").write_bytes(b"half")
    assert load_newest(tmp_path, RUN, LAYOUT).damaged == ()


@pytest.mark.parametrize(
    ("run", "layout", "reason"),
    [
        (RunId("cd" * 32), LAYOUT, "of run abababababab, not of cdcdcdcdcdcd"),
        (RUN, Layout.of([("other", (17,))]), "another layout"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(tmp_path, run, layout, reason):
    path = write_checkpoint(tmp_path, RUN, state_at(1))
    with pytest.raises(StateCorrupt, match=reason):
        read_checkpoint(path, run, layout)


def test_a_state_is_found_by_its_head(tmp_path):
    for round_number in (1, 2, 3):
        write_checkpoint(tmp_path, RUN, state_at(round_number))
    assert read_head(tmp_path, RUN, LAYOUT, state_at(2).head) == state_at(2)
    assert read_head(tmp_path, RUN, LAYOUT, state_at(9).head) is None


def test_safetensors_reads_what_is_written(tmp_path):
    path = write_checkpoint(tmp_path, RUN, state_at(3))
    with safe_open(path, framework="numpy") as file:
        assert sorted(file.keys()) == ["anchor.a.weight", "anchor.b", "momentum.a.weight", "momentum.b"]
        assert file.get_tensor("anchor.b").tobytes() == bytes(state_at(3).anchor[-20:])
        assert file.get_tensor("momentum.a.weight").tobytes() == bytes(state_at(3).momentum[:-20])


def test_a_state_is_served_from_its_file_and_a_damaged_one_is_not(tmp_path):
    path = write_checkpoint(tmp_path, RUN, state_at(3))
    content = stored_content(tmp_path, state_at(3).digest)
    assert content is not None
    assert content.outline == state_at(3).outline
    assert content.chunk(0) == b"".join(state_at(3).parts())
    assert stored_content(tmp_path, state_at(4).digest) is None
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    damaged = stored_content(tmp_path, state_at(3).digest)
    assert damaged is not None
    with pytest.raises(StateCorrupt, match="chunk 0"):
        damaged.chunk(0)


def grown(folder, state):
    """A file of state that was written in pieces, the last first."""
    growing = GrowingCheckpoint(folder, RUN, LAYOUT, state.head, state.round)
    for start in reversed(range(0, LAYOUT.num_elements, 5)):
        growing.write("momentum", start, state.momentum_N()[start : start + 5])
        growing.write("anchor", start, state.anchor_N()[start : start + 5])
    return growing


def test_a_state_that_grows_in_its_file_is_the_one_that_is_written_whole(tmp_path):
    state = state_at(3)
    whole = write_checkpoint(tmp_path / "whole", RUN, state).read_bytes()
    growing = grown(tmp_path / "grown", state)
    assert growing.chunk(0, torch.empty(PIECE)) == b"".join(state.parts())
    assert load_newest(tmp_path / "grown", RUN, LAYOUT).state is None  # it has no name yet
    assert growing.finish(state.outline) == state
    path = path_of(tmp_path / "grown", state)
    assert path is not None
    assert path.read_bytes() == whole
    assert names(tmp_path / "grown") == names(tmp_path / "whole")
    assert path_of(tmp_path / "grown", state_at(4)) is None


def test_of_a_state_that_does_not_come_to_be_nothing_is_left(tmp_path):
    grown(tmp_path, state_at(3)).discard()
    assert names(tmp_path) == []


def test_a_state_in_a_file_can_be_read_again_after_it_was_let_go(tmp_path):
    state = grown(tmp_path, state_at(3)).finish(state_at(3).outline)
    for start, stop in ((0, None), (3, 9)):
        state.let_go(start, stop)
        assert state == state_at(3)
    for path in tmp_path.iterdir():
        path.unlink()
    assert torch.equal(state.anchor_N(), state_at(3).anchor_N())


def test_the_one_that_outlives_a_power_cut_is_spared(tmp_path):
    for round_number in (1, 2, 3, 4):
        growing = grown(tmp_path, state_at(round_number))
        growing.finish(state_at(round_number).outline)
    first, last = (path_of(tmp_path, state_at(number)) for number in (1, 4))
    assert last is not None
    prune(last, spare=first)
    assert names(tmp_path) == [f"anchor-{number:08}.safetensors" for number in (1, 3, 4)]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_an_anchor_is_read_from_its_file_without_holding_it(tmp_path):
    """Else a peer that starts takes 8 bytes a parameter more for a moment: as it lies in the file, and as a vector."""

    def of_files():
        (kilobytes,) = re.findall(r"RssFile:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(kilobytes) * 1024

    layout = Layout.of([("a.weight", (9_000_001,))])
    parts = [torch.arange(layout.num_elements, dtype=torch.float32).numpy().tobytes() for _ in range(2)]
    state = AnchorState.of(layout, head=Digest(b"h" * 32), round_number=1, anchor=parts[0], momentum=parts[1])
    read = read_checkpoint(write_checkpoint(tmp_path, RUN, state), RUN, layout)
    read.let_go()
    read_N, before = torch.zeros(layout.num_elements), of_files()
    read.anchor_into(read_N)
    assert of_files() - before < len(parts[0]) / 4
    assert torch.equal(read_N, torch.arange(layout.num_elements, dtype=torch.float32))
