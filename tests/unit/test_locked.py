"""locked.txt is whole: a version and hashes for everything that an installation brings, as constraints.txt has it."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOCKED = (ROOT / "locked.txt").read_text()
EXTRAS = ("models", "data", "tensorboard", "quantized")


def _packages() -> dict[str, tuple[str, list[str]]]:
    """Name -> version, hashes; a package that has several versions, by system, the last."""
    found = {}
    for block in re.split(r"\n(?=[a-z0-9])", LOCKED):
        head = re.match(r"([a-z0-9._-]+)==([^ ;]+)", block)
        if head is not None:
            found[head[1]] = (head[2], re.findall(r"--hash=sha256:([0-9a-f]{64})\b", block))
    return found


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def test_every_package_has_a_version_and_hashes() -> None:
    packages = _packages()
    assert len(packages) > 50
    assert not [name for name, (_, hashes) in packages.items() if not hashes]


def test_all_that_the_project_asks_for_is_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {
        _name(each)
        for each in (
            *project["dependencies"],
            *(one for extra in EXTRAS for one in project["optional-dependencies"][extra]),
        )
    }
    assert wanted <= _packages().keys(), wanted - _packages().keys()


def test_versions_are_those_of_the_constraints() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    packages = _packages()
    for name, version in (line.split("==") for line in lines):
        if name in packages:
            assert packages[name][0] == version, name
