"""Each build has a version of its own, the same in what pip reads and in what the program says."""

import runpy
import tomllib
from pathlib import Path

import pytest
from packaging.version import Version

from dilocox_peer import __version__

ROOT = Path(__file__).parents[2]
STAMPED = runpy.run_path(str(ROOT / "scripts" / "stamped.py"))


@pytest.mark.parametrize("commits", [None, 9, 10])
def test_a_build_is_newer_than_the_one_before_and_older_than_the_release(tmp_path, commits):
    version = STAMPED["stamp"](tmp_path, commits)
    said: dict[str, str] = {}
    exec((tmp_path / "dilocox_peer" / "__init__.py").read_text(), said)
    assert tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["version"] == version
    assert said["__version__"] == version
    if commits is None:
        assert version == __version__
        return
    this, release = Version(version), Version(version.partition(".dev")[0])
    assert Version(__version__) < this < release
    assert this < Version(f"{release}.dev{commits + 1}")


def test_source_without_git_counts_no_commits_of_what_it_lies_in(tmp_path):
    assert STAMPED["num_commits"](tmp_path) is None
