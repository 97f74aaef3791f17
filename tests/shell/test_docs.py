"""What README.md and docs/ tell people to type exists, what they quote is said, what they link to is there.

Commands are parsed by the real command line; nothing is executed. tests/swarm/test_docs.py executes the README's.
"""

import ast
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from dilocox_peer.cli import checks, doctor
from dilocox_peer.cli.main import app, with_dashes

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
TROUBLES = ROOT / "docs" / "troubleshooting.md"
COMPARISON = ROOT / "docs" / "comparison.md"
SHELL_FENCE = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
ANY_FENCE = re.compile(r"^```\w*\n.*?^```", re.MULTILINE | re.DOTALL)

USAGE_ERROR = typer.BadParameter.__mro__[1]  # click's, wherever typer has it from

every_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)


def command_lines(text: str) -> list[list[str]]:
    """The commands, as words, of all shell fences and of inline code that begins like one."""
    lines = [line for fence in SHELL_FENCE.findall(text) for line in fence.splitlines()]
    lines += re.findall(r"`((?:dilocox-peer|make|python) [^`]+)`", ANY_FENCE.sub("", text).replace("\n", " "))
    found = []
    for line in lines:
        for part in re.split(r"\s(?:&&|\|)\s", line):
            words = shlex.split(part.replace("…", ""), comments=True)
            while words and (re.fullmatch(r"[A-Z_]+=\S*", words[0]) or words[0] == "sudo"):
                words = words[1:]
            if words:
                found.append(words)
    return found


def parse(arguments: list[str]) -> None:
    """Raises USAGE_ERROR where the command line would. Nothing is carried out."""
    group: Any = typer.main.get_command(app)
    words = arguments
    if words[0].startswith("-"):
        assert words[0] in {flag for parameter in group.params for flag in parameter.opts} | {"--help", "-h"}, words
        return
    assert words[0] in group.commands, f"there is no command {words[0]}"
    command = group.commands[words[0]]
    # Help and version would be shown while it parses.
    rest = [each for each in words[1:] if each not in ("--help", "-h")]
    if len(rest) < len(words) - 1 and not rest:
        return
    command.make_context(words[0], rest, token_normalize_func=with_dashes)


def flags_of_all_commands() -> set[str]:
    group: Any = typer.main.get_command(app)
    parameters = [each for command in group.commands.values() for each in command.params]
    flags = {flag for each in parameters for flag in (*each.opts, *each.secondary_opts)}
    return flags | {"--help", "--version"}


def flags_of_scripts() -> set[str]:
    """Those of benchmarks, of the simulator and of what releases are made with."""
    programs = [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "tests" / "sim").glob("*.py")]
    declared = {
        flag for each in programs for flag in re.findall(r'add_argument\(\s*"(--[a-z][a-z-]+)"', each.read_text())
    }
    return declared | {"--check"}  # scripts/wheels.sh


@every_document
def test_every_command_line_parses(path: Path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for program, *rest in command_lines(path.read_text()):
        match program.rpartition("/")[2]:
            case "dilocox-peer":
                parse(rest)
            case "make":
                assert {each for each in rest if "=" not in each} <= targets, rest
            case "python" if rest[0] == "-m" and rest[1] != "venv" and rest[1] != "pytest":
                assert (ROOT / f"{rest[1].replace('.', '/')}.py").exists(), rest
            case "python" if rest[0].endswith(".py"):
                assert (ROOT / rest[0]).exists(), rest


def test_a_command_line_that_is_wrong_is_found():
    for words in (["jion", "LINK"], ["join", "LINK", "--nmae", "a"], ["join"], ["join", "LINK", "--threads", "x"]):
        with pytest.raises((AssertionError, USAGE_ERROR)):
            parse(words)
    assert command_lines("```sh\nX=1 dilocox-peer join LINK | cat  # why\n```") == [
        ["dilocox-peer", "join", "LINK"],
        ["cat"],
    ]


def test_the_readme_has_commands_of_both_roles():
    commands = {
        rest[0] for program, *rest in command_lines((ROOT / "README.md").read_text()) if program == "dilocox-peer"
    }
    assert commands >= {
        "init", "sign", "bootstrap", "join", "status", "pause", "resume", "leave", "dashboard", "export", "generate",
        "doctor", "demo",
    }  # fmt: skip


@every_document
def test_every_flag_and_variable_that_is_named_exists(path: Path):
    text = path.read_text()
    if path == COMPARISON:  # the others' flags are in the other columns
        text = "\n".join(line.split("|")[3] for line in text.splitlines() if line.count("|") == 4)
    code = " ".join(re.findall(r"`[^`\n]+`", ANY_FENCE.sub("", text)))
    named = {flag.replace("_", "-") for flag in re.findall(r"(?<![\w-])--[a-z][a-z_-]+", code)}
    foreign = {"--rm", "--user", "--find-links"}  # docker's, uvx's
    assert named - foreign - flags_of_scripts() <= flags_of_all_commands()
    group: Any = typer.main.get_command(app)
    for name in re.findall(r"DILOCOX_[A-Z]+_[A-Z_]*[A-Z]\b", path.read_text()):
        command, _, flag = name.removeprefix("DILOCOX_").lower().partition("_")
        opts = {each for parameter in group.commands[command].params for each in parameter.opts}
        assert f"--{flag.replace('_', '-')}" in opts, name


@every_document
def test_every_link_leads_somewhere(path: Path):
    text = ANY_FENCE.sub("", path.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), target
        assert there.is_relative_to(ROOT), target
        if anchor:
            assert anchor in headings_of(there), target


def headings_of(path: Path) -> set[str]:
    """Anchors as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", ANY_FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_document
def test_every_test_that_is_named_exists(path: Path):
    text = path.read_text()
    for name in re.findall(r"\btests/[\w/]+\.py\b", text):
        assert (ROOT / name).exists(), name
    for file, names in re.findall(r"`(?:tests/)?((?:unit|shell|sim|swarm|paper)/\w+\.py)`((?:\s*\([^)]*\))?)", text):
        source = (ROOT / "tests" / file).read_text()
        for name in re.findall(r"`(test_\w+)`", names):
            assert f"def {name}(" in source, (file, name)
    everywhere = "".join(each.read_text() for each in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in everywhere, name


def places(text: str) -> list[tuple[str, list[str]]]:
    """(file of the package, names in it) wherever the text has them as `room/file.py` (`name`, ...)."""
    found = re.findall(r"`([a-z_/0-9]+\.py)` \(((?:`\w+`(?:, )?)+)\)", text)
    return [(file, re.findall(r"`(\w+)`", names)) for file, names in found]


def test_a_newcomers_questions_are_answered_within_four_files_from_the_readme():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    section = text.partition("## Where a newcomer looks first")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ") and "?" in line]
    assert len(rows) == 6
    for row in rows:
        files = re.findall(r"`([a-z_/0-9]+\.py)`", row)
        assert 1 <= len(files) <= 2, f"README, ARCHITECTURE and at most two more: {row}"
        assert {file for file, _ in places(row)} == set(files), f"what to look for in each: {row}"
    way = section.partition("The files that decide something of a contribution")[2]
    assert len({file for file, _ in places(way)}) <= 17
    assert len(re.findall(r"`[A-Z]\w+`", way.partition("The records of its own are")[2].partition(";")[0])) == 6
    for file, names in places(section):
        source = (ROOT / "dilocox_peer" / file).read_text()
        for name in names:
            assert re.search(rf"^\s*(?:(?:async )?def|class) {name}\b|^{name}\b", source, re.MULTILINE), (file, name)


def test_the_help_says_the_defaults_of_flags():
    group: Any = typer.main.get_command(app)
    for command in group.commands.values():
        for parameter in command.params:
            text = getattr(parameter, "help", None) or ""
            assert "[" not in text, f"{parameter.name}: rich takes [...] for markup and shows nothing of it"
    done = subprocess.run(
        [sys.executable, "-m", "dilocox_peer", "join", "--help"], capture_output=True, text=True, timeout=60,
        env={**os.environ, "COLUMNS": "200", "TERM": "dumb"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for default in ("$XDG_DATA_HOME/dilocox-peer", "as the run says", "no limit", "what is free"):
        assert default in done.stdout, default


def test_every_flag_has_the_variable_of_its_name():
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        for parameter in command.params:
            flag = next((each for each in parameter.opts if each.startswith("--")), None)
            if flag is None or flag == "--help":
                continue
            variable = f"DILOCOX_{name}_{flag[2:].replace('-', '_')}".upper()
            assert variable in (parameter.envvar, f"DILOCOX_{name}_{parameter.name}".upper()), variable


# -- troubleshooting


def test_all_twenty_troubles_are_there():
    numbers = [int(each) for each in re.findall(r"^### (\d+)\.", TROUBLES.read_text(), re.MULTILINE)]
    assert numbers == list(range(1, 21))


def test_every_message_that_is_quoted_is_said():
    """`…` in the document stands where the program puts something in."""
    said = messages()
    text = TROUBLES.read_text()
    quoted = [line for fence in re.findall(r"^```text\n(.*?)^```", text, re.M | re.S) for line in fence.splitlines()]
    assert len(quoted) > 15
    for line in quoted:
        wanted = re.sub("…+", "…", line)
        assert any(wanted in message for message in said), line


@cache
def messages() -> tuple[str, ...]:
    """Every text in the program, with `…` for what is put into it."""
    found = []
    for path in (ROOT / "dilocox_peer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [each.value if isinstance(each, ast.Constant) else "…" for each in node.values]
                found.append(re.sub("…+", "…", "".join(map(str, parts))))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return tuple(found)


def test_every_check_that_is_named_is_made():
    source = Path(checks.__file__).read_text() + Path(doctor.__file__).read_text()
    sentences = re.findall(r"[Dd]octor\s+checks?\s+((?:`[^`]+`(?:,\s+|\s+and\s+)?)+)", TROUBLES.read_text())
    named = {name for sentence in sentences for name in re.findall(r"`([^`]+)`", sentence)}
    assert len(named) >= 8
    for name in named:
        assert f'"{name}"' in source, name


def test_no_path_of_one_machine_is_in_the_documents():
    for path in DOCUMENTS:
        assert not re.search(r"/(?:work|root|home/(?!me/))\b", path.read_text()), path
