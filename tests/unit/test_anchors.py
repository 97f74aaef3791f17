"""One same round of all stages: what to ask donors for, and what a disk holds."""

from types import SimpleNamespace

import numpy as np
import pytest

from dilocox_peer.config import preset
from dilocox_peer.errors import ConfigError, StateCorrupt
from dilocox_peer.peer.state.anchors import SameRound, assemble, keep_manifest, kept_manifest, load_from_disk
from dilocox_peer.peer.state.checkpoint import write_checkpoint
from dilocox_peer.peer.training.outer import AnchorState, initial_state
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import sha256

MANIFEST = preset("tiny", stages={"count": 2}).signed_by(SigningKey(b"o" * 32))
WAIT_S = 15.0


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


# -- from donors


def test_the_newest_of_every_stage_is_asked_for_first():
    same = SameRound(2)
    assert same.requests(WAIT_S) == {stage: {"after": 0, "wait_s": WAIT_S} for stage in (0, 1)}
    same.add(0, state_of(0, 5))
    assert same.requests(WAIT_S) == {1: {"after": 0, "wait_s": WAIT_S}}
    same.add(1, state_of(1, 5))
    assert same.requests(WAIT_S) == {}
    assert [state.round for state in same.found()] == [5, 5]


def test_a_stage_ahead_is_asked_once_for_the_round_of_the_one_behind():
    same = SameRound(2)
    same.add(0, state_of(0, 7))
    same.add(1, state_of(1, 5))
    assert same.requests(WAIT_S) == {0: {"round": 5, "wait_s": 0.0}}
    same.add(0, state_of(0, 5))
    assert [state.round for state in same.found()] == [5, 5]


def test_a_stage_behind_is_waited_for_when_the_other_has_forgotten_its_round():
    same = SameRound(2)
    same.add(0, state_of(0, 7))
    same.add(1, state_of(1, 5))
    same.requests(WAIT_S)  # stage 0 has not got round 5 any more
    assert same.requests(WAIT_S) == {1: {"round": 7, "wait_s": WAIT_S}}
    same.add(1, state_of(1, 8))  # it jumped past, and has forgotten round 7
    assert same.requests(WAIT_S) == {1: {"round": 7, "wait_s": 0.0}}
    assert same.requests(WAIT_S) == {0: {"round": 8, "wait_s": WAIT_S}}
    same.add(0, state_of(0, 8))
    assert [state.round for state in same.found()] == [8, 8]
    assert same.describe() == "stage 0: 8, stage 1: 8"


def test_three_stages_meet_whatever_each_has_forgotten():
    """Donors that go on while they are asked, and keep two rounds: the search ends within a few turns."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        now, same, turns = list(rng.integers(1, 4, 3)), SameRound(3), 0
        while same.found() is None:
            turns += 1
            assert turns < 60
            for stage, request in same.requests(WAIT_S).items():
                wanted = request.get("round")
                if wanted is not None and request["wait_s"]:
                    now[stage] = max(now[stage], wanted)
                if wanted is None:
                    same.add(stage, SimpleNamespace(round=int(now[stage])))
                elif now[stage] - 1 <= wanted <= now[stage]:
                    same.add(stage, SimpleNamespace(round=int(wanted)))
            now = [each + int(rng.random() < 0.3) for each in now]
            now = [min(each, min(now) + 2) for each in now]
        assert len({state.round for state in same.found()}) == 1


def test_the_whole_model_has_every_stages_tensors_and_says_where_it_is_from():
    states = [state_of(stage, 4) for stage in (0, 1)]
    model = assemble(MANIFEST, states)
    assert model.origin.round == 4
    assert model.origin.heads == tuple(state.head.hex() for state in states)
    assert model.num_parameters == sum(state.layout.num_elements for state in states)
    for stage, state in enumerate(states):
        assert np.array_equal(tensor(model, stage), tensor_in(state, stage))


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
