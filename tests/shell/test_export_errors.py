"""export, generate and doctor, given what they cannot use: one line, the documented exit code, nothing written."""

import json

import pytest

from dilocox_peer.config import preset, to_toml
from dilocox_peer.peer.state.anchors import keep_manifest
from dilocox_peer.peer.state.checkpoint import write_checkpoint
from dilocox_peer.peer.training.anchor_state import AnchorState
from dilocox_peer.peer.training.outer import initial_state
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import sha256
from tests.shell.commands import assert_refused, files_in, free_port, link_to, peer

MANIFEST = preset("tiny", stages={"count": 2}).signed_by(SigningKey(b"o" * 32))


def run_folder(home, name="a", manifest=MANIFEST):
    return home / "peers" / name / "runs" / manifest.run_id[:16]


def save(home, stage, *, name="a", round_number=3):
    start = initial_state(MANIFEST, stage)
    state = AnchorState.of(
        start.layout,
        head=sha256(bytes([stage])),
        round_number=round_number,
        anchor=start.anchor,
        momentum=start.momentum,
    )
    write_checkpoint(run_folder(home, name) / f"stage{stage}" / "checkpoints", MANIFEST.run_id, state)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out" / "model"


def test_nothing_to_export_from_names_where_it_looked(tmp_path, out):
    assert_refused(peer(tmp_path, "export", "--out", str(out)), 2, str(tmp_path / "peers"), "--run-folder")
    assert files_in(tmp_path) == set()


def test_a_stage_that_is_not_on_this_disk_is_named(tmp_path, out):
    save(tmp_path, 0)
    run = tmp_path / "run.toml"
    run.write_text(to_toml(MANIFEST))
    before = files_in(tmp_path)
    done = peer(tmp_path, "export", "--manifest", str(run), "--out", str(out))
    assert_refused(done, 2, "no checkpoint of stage 1 (of 2)", "link")
    assert files_in(tmp_path) == before


def test_a_folder_without_the_runs_settings_asks_for_them(tmp_path, out):
    save(tmp_path, 0)
    assert_refused(peer(tmp_path, "export", "--out", str(out)), 2, "--manifest run.toml")


def test_with_both_stages_and_the_manifest_beside_them_nothing_more_is_needed(tmp_path, out):
    save(tmp_path, 0, name="a")
    save(tmp_path, 1, name="b")
    keep_manifest(run_folder(tmp_path, "b"), MANIFEST)
    done = peer(tmp_path, "export", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "after round 3" in done.stdout
    assert_refused(peer(tmp_path, "export", "--out", str(out)), 2, "exists", "--force")
    alone = peer(tmp_path, "export", "--name", "a", "--out", str(tmp_path / "alone"))
    assert_refused(alone, 2, "does not hold the run's settings")
    written = peer(tmp_path, "generate", "abc", "--model", str(out), "--tokens", "5", "--seed", "1")
    assert (written.returncode, written.stdout[:3]) == (0, "abc")


def test_a_precision_that_a_run_from_a_seed_is_not_written_in_is_refused(tmp_path, out):
    save(tmp_path, 0, name="a")
    save(tmp_path, 1, name="a")
    keep_manifest(run_folder(tmp_path, "a"), MANIFEST)
    assert_refused(peer(tmp_path, "export", "--out", str(out), "--dtype", "bfloat16"), 2, "--dtype bfloat16", "seed")
    assert not out.exists()
    assert peer(tmp_path, "export", "--out", str(out), "--dtype", "float32").returncode == 0


def test_two_runs_on_a_disk_have_to_be_chosen_between(tmp_path, out):
    save(tmp_path, 0)
    other = tmp_path / "peers" / "b" / "runs" / ("0" * 16)
    run_folder(tmp_path).parent.parent.joinpath("copy").mkdir()
    other.parent.mkdir(parents=True)
    run_folder(tmp_path).rename(other)
    save(tmp_path, 0)
    assert_refused(peer(tmp_path, "export", "--out", str(out)), 2, "2 runs", "0" * 16, MANIFEST.run_id[:16])


def test_a_folder_that_is_no_export_is_never_overwritten(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    done = peer(tmp_path, "export", link_to(free_port()), "--out", str(tmp_path / "mine"), "--force")
    assert_refused(done, 2, "notes.txt")
    assert files_in(tmp_path) == {"mine/notes.txt"}


@pytest.mark.parametrize("command", [["export"], ["generate", "abc"], ["doctor"]])
def test_a_link_that_is_none_is_refused(tmp_path, command):
    assert_refused(peer(tmp_path, *command, "hello"), 2, "no invitation link")
    assert files_in(tmp_path) == set()


def test_a_run_that_nobody_serves_is_exit_code_3(tmp_path, out):
    port = free_port()
    assert_refused(peer(tmp_path, "export", link_to(port), "--out", str(out)), 3, f"127.0.0.1/tcp/{port}")
    assert not out.parent.exists()


def test_two_sources_are_one_too_many(tmp_path):
    done = peer(tmp_path, "generate", "abc", link_to(1), "--model", str(tmp_path))
    assert_refused(done, 2, "LINK and --model")


def test_doctor_says_who_does_not_answer_and_ends_with_1(tmp_path):
    port = free_port()
    done = peer(tmp_path, "doctor", link_to(port), "--json")
    assert done.returncode == 1
    told = json.loads(done.stdout)
    status = {check["name"]: check for check in told["checks"]}
    assert status["bootstrap"]["status"] == "fail"
    assert str(port) in status["bootstrap"]["found"]
    assert status["bootstrap"]["remedy"]
    assert status["DHT round trip"]["status"] == "skipped"
    assert files_in(tmp_path) == set()
