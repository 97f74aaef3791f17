"""Copies what a wheel is built of to a folder, with a version of its own: of two wheels with one version pip keeps the older.

    python scripts/stamped.py FOLDER

The version is that of the next minor release, as a development build of so many commits (0.2.0.dev812): PEP 440 sorts it behind the version in pyproject.toml
and before that release. Without git (an archive of the source) the version stays as it is. The tree itself is not touched.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILT_OF = ("pyproject.toml", "constraints.txt", "README.md", "LICENSE", "dilocox_peer")


def num_commits(root: Path = ROOT) -> int | None:
    if not (root / ".git").exists():  # the source may lie within another repository
        return None
    try:
        said = subprocess.run(
            ["git", "-C", str(root), "rev-list", "--count", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return int(said.stdout)


def stamp(folder: Path, commits: int | None, root: Path = ROOT) -> str:
    """Makes the copy in folder, which is there; its version."""
    for name in BUILT_OF:
        if (root / name).is_dir():
            shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(root / name, folder / name)
    project, package = folder / "pyproject.toml", folder / "dilocox_peer" / "__init__.py"
    found = re.search(r'^version = "((\d+)\.(\d+)\.\d+)"$', project.read_text(), re.MULTILINE)
    assert found is not None, "pyproject.toml has no version of three numbers"
    before = found[1]
    if commits is None:
        return before
    version = f"{found[2]}.{int(found[3]) + 1}.0.dev{commits}"
    for path, line in ((project, 'version = "{}"'), (package, '__version__ = "{}"')):
        text = path.read_text()
        assert text.count(line.format(before)) == 1, path
        path.write_text(text.replace(line.format(before), line.format(version)))
    return version


if __name__ == "__main__":
    commits = num_commits()
    print(
        f"version {stamp(Path(sys.argv[1]), commits)}"
        + ("" if commits is not None else ": no git here to count commits")
    )
