"""A run's config.json is built in a process of its own before it is built here."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from dilocox_peer.cli.doctor import look_at_memory
from dilocox_peer.cli.flags import DoctorFlags, SourceFlags
from dilocox_peer.cli.source import load_model, source_of
from dilocox_peer.errors import ConfigError, DilocoxError
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.architecture import prepare
from dilocox_peer.model.dry_run import PASSED, DryRunBounds, dry_run
from dilocox_peer.peer.state.anchors import keep_manifest
from dilocox_peer.signing import SigningKey
from tests.tiny_models import gpt_neo

pytest.importorskip("transformers")

TOO_MUCH = r"the run's model is refused: .*'gpt_neo'.* takes more than 537 MB of memory.*its owner has to take the file"


@pytest.fixture(scope="module")
def many() -> Manifest:
    """A manifest of 2 kB whose constructor makes a list of 10^8 kinds of layers."""
    return gpt_neo(attention_types=[[["global"], 10**8]]).signed_by(SigningKey(bytes(32)))


def test_a_config_that_has_the_library_fill_the_memory_is_refused_wherever_a_link_leads(
    many: Manifest, tmp_path: Path
) -> None:
    """11.8 kB had `join` and `doctor` take all memory before anything was reckoned."""
    with pytest.raises(ConfigError, match=TOO_MUCH) as told:
        prepare(many, tmp_path)
    assert "\n" not in str(told.value)
    assert not (tmp_path / PASSED).exists()
    with pytest.raises(ConfigError, match=TOO_MUCH):
        look_at_memory(many, DoctorFlags())
    keep_manifest(tmp_path / "run", many)
    with pytest.raises(ConfigError, match=TOO_MUCH):
        load_model(source_of(SourceFlags(run_folder=(tmp_path / "run",))))


def test_a_config_that_has_the_library_build_for_too_long_is_refused() -> None:
    # Nothing at all, 10^10 times.
    endless = gpt_neo(attention_types=[[[], 10**10], [["global", "local"], 2]])
    with pytest.raises(ConfigError, match=r"'gpt_neo'.* takes more than 1 s of a processor"):
        dry_run(endless, bounds=DryRunBounds(cpu_s=1))


def test_how_long_the_library_takes_to_load_is_not_the_run_s_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A machine on which Python alone takes as long as the model may."""
    (tmp_path / "sitecustomize.py").write_text("import time\nwhile time.process_time() < 4: pass\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    dry_run(gpt_neo(), bounds=DryRunBounds(cpu_s=4))


@pytest.mark.parametrize("wall_s", [0.0, 299.0])
def test_what_cannot_be_tried_for_now_is_no_wrong_setting(
    wall_s: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its process was too slow or killed, as where memory is short: a service that ended with ConfigError's code would not start again."""
    (tmp_path / "sitecustomize.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    if wall_s:
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(DilocoxError, match=r"cannot be tried: .*: try again when the machine has less to do") as told:
        dry_run(gpt_neo(), bounds=DryRunBounds(wall_s=wall_s))
    assert told.value.exit_code == DilocoxError.exit_code


def test_where_the_system_heeds_no_limit_its_memory_is_looked_at() -> None:
    with pytest.raises(ConfigError, match="of memory"):
        dry_run(gpt_neo(), bounds=DryRunBounds(most_bytes=1 << 26))


def test_what_cannot_be_built_is_told_in_the_words_of_before() -> None:
    with pytest.raises(ConfigError, match=r"^model type 'no_such' is not known to transformers"):
        dry_run(gpt_neo(model_type="no_such"))


def test_a_file_that_its_reader_named_is_tried_in_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bootstrap of 512 MB has no room for two libraries."""

    def start(*_: object, **__: object) -> None:
        pytest.fail("a process was started")

    monkeypatch.setattr(subprocess, "Popen", start)
    prepare(gpt_neo(), is_own=True)


AGAIN = """
import importlib.metadata, subprocess, sys
from pathlib import Path
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.dry_run import dry_run
def start(*_, **__): raise OSError(12, "none today")
subprocess.Popen = start
if sys.argv[3:]: importlib.metadata.version = lambda name: sys.argv[3]
dry_run(Manifest.model_validate_json(Path(sys.argv[1]).read_bytes()), Path(sys.argv[2]))
"""


def test_what_came_through_is_not_tried_again_until_the_library_is_another(tmp_path: Path) -> None:
    manifest, file, remembered = gpt_neo(), tmp_path / "manifest.json", tmp_path / "runs" / "x" / PASSED
    file.write_bytes(manifest.to_bytes())
    dry_run(manifest, remembered)

    def later(*version: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", AGAIN, str(file), str(remembered), *version]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    assert later().returncode == 0, later().stderr
    assert "to try the run's model in (none today): try again" in later("99.0").stderr


def test_a_parent_that_is_killed_takes_the_process_with_it() -> None:
    reading, writing = os.pipe()
    start = "import os, subprocess, sys; print(subprocess.Popen([sys.executable, '-m', sys.argv[1], str(os.getpid())], stdin=int(sys.argv[2])).pid, flush=True); input()"
    parent = subprocess.Popen(
        [sys.executable, "-c", start, dry_run.__module__, str(reading)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(reading,), text=True,
    )  # fmt: skip
    with parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    try:
        # Its input is still open here: nothing else has it end.
        assert psutil.wait_procs([child], timeout=60)[1] == []
    finally:
        os.close(reading)
        os.close(writing)
        if child.is_running():
            child.kill()
