"""A file of settings says what flags say: every flag, with the same values, and what is no flag is refused in one line."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from dilocox_peer.cli.config_file import read_config
from dilocox_peer.cli.main import app
from dilocox_peer.errors import ConfigError

GROUP: Any = typer.main.get_command(app)
LINK = "dilocox://" + "ab" * 32 + "@127.0.0.1:1"


def typed(command: str, *arguments: str, settings: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a command would be given."""
    found = GROUP.commands[command].make_context(command, list(arguments), default_map=settings or {}).params
    return dict(found)


def settings_of(tmp_path: Path, text: str) -> dict[str, dict[str, Any]]:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return read_config(path, lambda: GROUP, is_named=True)


def test_a_file_is_as_good_as_flags(tmp_path):
    text = f"""
[join]
link = "{LINK}"
threads = 4
max-upload = 5
only_idle = true
hours = "mon-fri 22:00-07:00"
data = ["/a", "/b"]
log-file = "/tmp/log.jsonl"

[bootstrap]
keep = false
port = 0
"""
    settings = settings_of(tmp_path, text)
    flags = ("--threads", "4", "--max-upload", "5", "--only-idle", "--hours", "mon-fri 22:00-07:00", "--data", "/a", "--data", "/b",
             "--log-file", "/tmp/log.jsonl")  # fmt: skip
    assert typed("join", settings=settings["join"]) == typed("join", LINK, *flags)
    assert typed("bootstrap", settings=settings["bootstrap"]) == typed("bootstrap", "--no-keep", "--port", "0")


def test_what_is_typed_and_the_environment_count_before_the_file(tmp_path, monkeypatch):
    settings = settings_of(tmp_path, f'[join]\nlink = "{LINK}"\nthreads = 4\nnice = 3\n')["join"]
    assert typed("join", "--threads", "2", settings=settings)["threads"] == 2
    assert typed("join", LINK + "1", settings=settings)["link"] == LINK + "1"
    monkeypatch.setenv("DILOCOX_JOIN_NICE", "7")
    context = GROUP.commands["join"].make_context("join", [], default_map=settings, auto_envvar_prefix="DILOCOX_JOIN")
    assert context.params["nice"] == 7


@pytest.mark.parametrize("command", sorted(GROUP.commands))
def test_every_flag_of_every_command_may_stand_in_it(command, tmp_path):
    for parameter in GROUP.commands[command].params:
        if not parameter.opts[0].startswith("--") or parameter.name == "help":
            continue
        default = parameter.default
        value = (
            "true"
            if parameter.is_flag
            else f'"{getattr(default, "value", default)}"'
            if default not in (None, [], ())
            else None
        )
        if value is not None:
            name = parameter.opts[0].removeprefix("--")
            assert parameter.name in settings_of(tmp_path, f"[{command}]\n{name} = {value}\n")[command]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[joni]\nthreads = 1\n", r"\[joni\] is no command \(did you mean join\?\)"),
        ("threads = 4\n", r"\[threads\] is no command"),
        ("join = 3\n", r": join is a command, and no setting: write \[join\], and its settings below it"),
        ("[join]\nthread = 1\n", r"thread is no flag of `join` \(did you mean threads\?\)"),
        ('[join]\nthreads = "many"\n', r"threads = 'many'"),
        ("[join]\nnice = 99\n", "nice = 99"),
        ('[join]\ndata = "/x"\n', r"data = '/x': write a list, with brackets: data = \[\.\.\.\]"),
        ('[bootstrap]\npaths = "run.toml"\n', "paths = 'run.toml': write a list"),
        ("[join]\nmax-upload = nan\n", "max-upload = nan: give a number"),
        ("[join]\nmax-download = -inf\n", "max-download = -inf: give a number"),
        ("[join\n", "is no TOML"),
        (f"[join]\nthreads = {'9' * 5000}\n", "is no TOML"),
        (f"[join]\nthreads = 0x{'F' * 5000}\n", "threads: a number of thousands"),
        (f"[join]\ndata = [0x{'F' * 5000}]\n", "data: a number of thousands"),
        ("x" * (1 << 21), "more than"),
    ],
)
def test_what_is_no_setting_is_refused_with_where_it_stands(text, said, tmp_path):
    with pytest.raises(ConfigError, match=said) as error:
        settings_of(tmp_path, text)
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_a_mark_of_windows_editors_at_its_head_is_passed_over(tmp_path):
    assert settings_of(tmp_path, "\ufeff[join]\nthreads = 4\n") == {"join": {"threads": "4"}}


def test_a_version_in_the_environment_is_not_asked_for(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "dilocox_peer", "status", "--home", str(tmp_path)],
        capture_output=True, text=True, timeout=60, env={**os.environ, "DILOCOX_VERSION": "1.2"},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (3, "")


def test_a_file_that_nobody_named_may_be_missing(tmp_path):
    assert read_config(tmp_path / "none.toml", lambda: GROUP, is_named=False) == {}
    with pytest.raises(ConfigError, match="does not exist"):
        read_config(tmp_path / "none.toml", lambda: GROUP, is_named=True)


def test_a_file_that_nobody_named_and_cannot_be_looked_at_ends_no_command(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    assert read_config(tmp_path / "file" / "config.toml", lambda: GROUP, is_named=False) == {}
    assert capsys.readouterr().err == ""
    with pytest.raises(ConfigError, match="does not exist: DILOCOX_CONFIG names it"):
        read_config(tmp_path / "file" / "config.toml", lambda: GROUP, is_named=True)

    def refuse(*_: object) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)  # root is refused nothing
    assert read_config(tmp_path / "config.toml", lambda: GROUP, is_named=False) == {}
    assert "config.toml is not readable for this user, so no settings are taken from there" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="cannot be read: permission denied"):
        read_config(tmp_path / "config.toml", lambda: GROUP, is_named=True)


def test_the_program_reads_it(tmp_path, monkeypatch):
    path = tmp_path / "config.toml"
    path.write_text('[status]\nlink = "no link"\n')
    monkeypatch.setenv("DILOCOX_CONFIG", str(path))
    command = [sys.executable, "-m", "dilocox_peer", "status"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "dilocox://" in done.stderr
    path.write_text("[status]\nlnik = 1\n")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "did you mean link?" in done.stderr
