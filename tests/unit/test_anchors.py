"""One same round of all stages, on a disk."""

from dataclasses import replace

import numpy as np
import pytest

from dilocox_peer.config import preset
from dilocox_peer.errors import ConfigError, StateCorrupt
from dilocox_peer.peer.state.anchors import keep_manifest, kept_manifest, load_from_disk
from dilocox_peer.peer.state.checkpoint import write_checkpoint
from dilocox_peer.peer.training.anchor_state import AnchorState
from dilocox_peer.peer.training.outer import initial_state
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import sha256

MANIFEST = preset("tiny", stages={"count": 2}).signed_by(SigningKey(b"o" * 32))


def state_of(stage, round_number, branch=""):
    """A state of a stage; every (stage, round, branch) has values and a head of its own."""
    layout = initial_state(MANIFEST, stage).layout
    head = sha256(f"{stage} {round_number} {branch}".encode())
    rng = np.random.default_rng(list(head[:8]))
    parts = [rng.standard_normal(layout.num_elements, np.float32).tobytes() for _ in range(2)]
    return AnchorState.of(layout, head=head, round_number=round_number, anchor=parts[0], momentum=parts[1])


def save(folder, stage, *rounds, branch=""):
    for round_number in rounds:
        path = write_checkpoint(
            folder / f"stage{stage}" / "checkpoints", MANIFEST.run_id, state_of(stage, round_number, branch)
        )
    return path


def tensor(model, stage):
    name = "model.embed_tokens.weight" if stage == 0 else "lm_head.weight"
    return model.tensors[name]


def tensor_in(state, stage):
    name = "model.embed_tokens.weight" if stage == 0 else "lm_head.weight"
    spec, start, stop = next(span for span in state.layout.spans() if span[0].name == name)
    return state.anchor_N().numpy()[start:stop].reshape(spec.shape)


# -- from a disk


def test_the_newest_round_of_all_stages_is_taken(tmp_path):
    save(tmp_path, 0, 3, 4, 5)
    save(tmp_path, 1, 2, 3, 4)
    loaded = load_from_disk([tmp_path], MANIFEST)
    assert loaded.model.origin.round == 4
    assert loaded.remarks == ()
    assert np.array_equal(tensor(loaded.model, 1), tensor_in(state_of(1, 4), 1))


def test_stages_may_lie_in_different_folders_of_the_disk(tmp_path):
    save(tmp_path / "a", 0, 4)
    save(tmp_path / "b", 1, 4)
    assert load_from_disk([tmp_path / "a", tmp_path / "b"], MANIFEST).model.origin.round == 4


def test_a_damaged_newer_file_is_named_and_an_older_round_taken(tmp_path):
    save(tmp_path, 0, 3, 4)
    path = save(tmp_path, 1, 3, 4)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    loaded = load_from_disk([tmp_path], MANIFEST)
    assert loaded.model.origin.round == 3
    assert len(loaded.remarks) == 1
    assert str(path) in loaded.remarks[0]


def test_one_state_that_was_certified_twice_is_one(tmp_path):
    """A view change writes a round's certificate anew, and the anchor stays as it was."""
    for stage in range(2):
        save(tmp_path / "a", stage, 4, branch="parted")
        for folder, head in (("b", "before the view change"), ("c", "after it")):
            state = replace(state_of(stage, 4), head=sha256(f"{stage} {head}".encode()))
            write_checkpoint(tmp_path / folder / f"stage{stage}" / "checkpoints", MANIFEST.run_id, state)
    loaded = load_from_disk([tmp_path / "b", tmp_path / "c"], MANIFEST)
    assert loaded.remarks == ()
    loaded = load_from_disk([tmp_path / name for name in "abc"], MANIFEST)
    assert np.array_equal(tensor(loaded.model, 1), tensor_in(state_of(1, 4), 1))
    assert "stage 0 has 2 different states of round 4" in loaded.remarks[0]


def test_missing_stages_are_named(tmp_path):
    save(tmp_path, 0, 4)
    with pytest.raises(ConfigError, match=r"no checkpoint of stage 1 \(of 2\)"):
        load_from_disk([tmp_path], MANIFEST)
    with pytest.raises(ConfigError, match=r"no checkpoint of stages 0, 1"):
        load_from_disk([tmp_path / "empty"], MANIFEST)


def test_no_common_round_is_said_with_the_rounds_there_are(tmp_path):
    save(tmp_path, 0, 4)
    save(tmp_path, 1, 6)
    with pytest.raises(ConfigError, match=r"stage 0: \[4\]; stage 1: \[6\]"):
        load_from_disk([tmp_path], MANIFEST)


def test_nothing_but_damage_is_corrupt(tmp_path):
    save(tmp_path, 0, 4)
    save(tmp_path, 1, 4).write_bytes(b"torn")
    with pytest.raises(StateCorrupt, match="no whole checkpoint"):
        load_from_disk([tmp_path], MANIFEST)


def test_a_checkpoint_of_another_run_is_not_used(tmp_path):
    save(tmp_path, 0, 4)
    save(tmp_path, 1, 4)
    other = preset("tiny", stages={"count": 2}, run={"seed": 9}).signed_by(SigningKey(b"o" * 32))
    with pytest.raises(StateCorrupt, match="of run"):
        load_from_disk([tmp_path], other)


def test_where_folders_disagree_most_win_and_it_is_said(tmp_path):
    for folder, branch in (("a", "parted"), ("b", ""), ("c", "")):
        save(tmp_path / folder, 0, 4, branch=branch)
    save(tmp_path / "a", 1, 4)
    loaded = load_from_disk([tmp_path / "a", tmp_path / "b", tmp_path / "c"], MANIFEST)
    assert np.array_equal(tensor(loaded.model, 0), tensor_in(state_of(0, 4), 0))
    assert "2 different states of round 4" in loaded.remarks[0]


# -- the manifest beside them


def test_the_manifest_is_kept_once_and_checked_when_read(tmp_path):
    assert kept_manifest(tmp_path) is None
    keep_manifest(tmp_path / "run", MANIFEST)
    keep_manifest(tmp_path / "run", MANIFEST)
    assert kept_manifest(tmp_path / "run") == MANIFEST
    path = tmp_path / "run" / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"seed":0', b'"seed":1'))
    with pytest.raises(StateCorrupt, match="--manifest"):
        kept_manifest(tmp_path / "run")
    path.write_text("not JSON")
    with pytest.raises(StateCorrupt, match="damaged"):
        kept_manifest(tmp_path / "run")
