"""What is optional is installed by its own name, and nothing tells anybody to install the product by its: it is in no public index."""

import re
import tomllib
from pathlib import Path

import pytest

from dilocox_peer.extras import EXTRAS, pip_install

ROOT = Path(__file__).parents[2]


def test_the_messages_name_what_pyproject_does():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {name: list(packages) for name, packages in EXTRAS.items()} == {
        name: packages for name, packages in extras.items() if name != "dev"
    }


def test_a_command_names_all_of_an_extra_or_what_is_asked_for():
    assert pip_install("models") == "pip install 'transformers>=5.23,<6' 'tokenizers>=0.20'"
    assert pip_install("data", "zstandard", "jinja2") == "pip install 'zstandard>=0.22' 'jinja2>=3.1'"


@pytest.mark.parametrize("where", ["README.md", "docs", "dilocox_peer", "deploy", "scripts"])
def test_nobody_is_told_to_install_the_product_by_its_name(where):
    """A stranger may register it: --find-links adds to the index, and the higher version wins."""
    place = ROOT / where
    files = (
        [place] if place.is_file() else [each for each in place.rglob("*") if each.suffix in (".md", ".py", ".sh", "")]
    )
    told = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in files
        if path.is_file() and path.name != "extras.py"
        for line in path.read_text(errors="replace").splitlines()
        if re.search(r"(pip3? install|pipx install|pipx run|uv tool install)[^`]*\s['\"]?dilocox-peer\b", line)
        or (re.search(r"uvx\b", line) and "--from" not in line)
    ]
    assert told == []
