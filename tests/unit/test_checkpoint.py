"""Anchor states on disk: whole or refused."""

import hashlib

import pytest
import torch

from dilocox_peer.errors import StateCorrupt
from dilocox_peer.peer.state.checkpoint import load_newest, read_checkpoint, read_head, write_checkpoint
from dilocox_peer.peer.training.outer import AnchorState
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


def test_a_state_on_the_wire_is_verified():
    state = state_at(1)
    body = b"".join(state.parts())
    assert AnchorState.parse(LAYOUT, state.header(), body) == state
    for header, raw, reason in [
        (state.header() | {"digest": bytes(32)}, body, "announced as 000000000000"),
        (state.header() | {"layout": bytes(32)}, body, "another layout"),
        (state.header() | {"head": b"short"}, body, "head of 5 bytes"),
        (state.header() | {"round": "1"}, body, "not a state's"),
        ({}, body, "not a state's"),
        (state.header(), body[:-1], "bytes of state"),
        (state.header(), body[:-4] + b"\xff\xff\xff\x7f", "not finite"),
    ]:
        with pytest.raises(StateCorrupt, match=reason):
            AnchorState.parse(LAYOUT, header, raw)
