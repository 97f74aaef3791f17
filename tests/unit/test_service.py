"""`service`: what it writes systemd and launchd read as it was meant, and says what could not be started."""

import os
import plistlib
import resource
import shlex
import shutil
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer

from dilocox_peer.cli.main import app
from dilocox_peer.cli.service import plist, quoted, unit
from dilocox_peer.errors import ConfigError
from dilocox_peer.invitation import Invitation, format_invitation
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import RunId

PEER = SigningKey(bytes(32)).peer_id
LINK = format_invitation(Invitation(RunId("ab" * 32), (f"/ip4/127.0.0.1/tcp/4711/p2p/{PEER}",)))


def run(
    tmp_path: Path, *arguments: str, most_bytes: int | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """With a --home, unless a variable says where that is. most_bytes: of a file that it writes, as on a full disk."""
    home = [] if "XDG_DATA_HOME" in variables else ["--home", str(tmp_path / "home")]
    limited = (
        partial(resource.setrlimit, resource.RLIMIT_FSIZE, (most_bytes, most_bytes)) if most_bytes is not None else None
    )
    return subprocess.run(
        [sys.executable, "-m", "dilocox_peer", "service", *arguments, *home],
        capture_output=True, text=True, timeout=60, preexec_fn=limited,
        env={**os.environ, "XDG_CONFIG_HOME": str(tmp_path), **variables},
    )  # fmt: skip


def started(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """What `join` is given by the unit, and the variables that it has."""
    lines = path.read_text().replace("%%", "%").splitlines()
    [line] = [line for line in lines if line.startswith("ExecStart=")]
    words = shlex.split(line.removeprefix("ExecStart=").replace("$$", "$"))
    assert Path(words[0]).is_absolute()
    join = words[words.index("join") + 1 :]
    group: Any = typer.main.get_command(app)
    variables = [shlex.split(line.partition("=")[2]) for line in lines if line.startswith("Environment=")]
    environment = dict(each.split("=", 1) for [each] in variables)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        given = group.commands["join"].make_context("join", join).params
    return given, environment


@pytest.mark.skipif(sys.platform == "darwin", reason="launchd's agents are written there")
def test_it_writes_a_unit_that_starts_this_program_and_takes_it_away(tmp_path):
    done = run(tmp_path, "install", LINK, "--no-start", "--name", "a")
    assert done.returncode == 0, done.stderr
    path = tmp_path / "systemd" / "user" / "dilocox-peer-a.service"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "an invitation is a secret"
    assert (
        "systemctl --user enable dilocox-peer-a.service && systemctl --user restart dilocox-peer-a.service"
        in done.stdout
    )
    given, variables = started(path)
    assert variables == {"DILOCOX_LINK": LINK, "XDG_CONFIG_HOME": str(tmp_path)}
    assert "dilocox://" not in path.read_text().partition("ExecStart=")[2], "`ps` shows arguments to everybody"
    assert (given["link"], given["name"], given["plain"], given["home"]) == (LINK, "a", True, tmp_path / "home")
    assert path.read_text() in run(tmp_path, "show", "--name", "a").stdout
    if shutil.which("systemd-analyze"):
        found = subprocess.run(
            ["systemd-analyze", "verify", "--user", str(path)], capture_output=True, text=True, timeout=60
        )
        assert [line for line in found.stderr.splitlines() if path.name in line] == []
    assert run(tmp_path, "uninstall", "--name", "a").returncode == 0
    assert not path.exists()


@pytest.mark.skipif(sys.platform == "darwin", reason="launchd's agents are written there")
def test_the_service_has_the_home_and_the_settings_of_who_installs_it(tmp_path):
    settings = tmp_path / "my settings $1.toml"
    settings.write_text("")
    done = run(
        tmp_path, "install", LINK, "--no-start", DILOCOX_CONFIG=str(settings), XDG_DATA_HOME=str(tmp_path / "data")
    )
    assert done.returncode == 0, done.stderr
    given, variables = started(tmp_path / "systemd" / "user" / "dilocox-peer-default.service")
    assert given["home"] == tmp_path / "data" / "dilocox-peer"
    assert variables == {"DILOCOX_LINK": LINK, "DILOCOX_CONFIG": str(settings)}


@pytest.mark.skipif(sys.platform == "darwin", reason="of systemd")
def test_the_commands_that_it_names_find_the_peer_from_any_shell(tmp_path):
    systemctl = tmp_path / "bin" / "systemctl"
    systemctl.parent.mkdir()
    systemctl.write_text('#!/bin/sh\n[ "$2" != disable ]\n')
    systemctl.chmod(0o700)
    on_path = f"{systemctl.parent}{os.pathsep}{os.environ['PATH']}"
    done = run(tmp_path, "install", LINK, "--name", "a", PATH=on_path)
    assert f"`dilocox-peer status --name a --home {tmp_path / 'home'}`" in done.stdout, done.stderr
    done = run(tmp_path, "uninstall", "--name", "a", PATH=on_path, XDG_DATA_HOME=str(tmp_path / "my data"))
    assert f"`dilocox-peer leave --name a --home '{tmp_path / 'my data' / 'dilocox-peer'}'`" in done.stderr


@pytest.mark.skipif(sys.platform == "darwin", reason="launchd's agents are written there")
def test_on_a_full_disk_the_unit_that_was_there_stays(tmp_path):
    path = tmp_path / "systemd" / "user" / "dilocox-peer-a.service"
    arguments = ("install", LINK, "--no-start", "--name", "a")
    done = run(tmp_path, *arguments, most_bytes=0)
    assert done.returncode == 2
    assert (len(done.stderr.splitlines()), "cannot be written" in done.stderr) == (1, True), done.stderr
    assert list(path.parent.iterdir()) == [], "an empty unit starts nothing"
    path.write_text("mine")
    path.chmod(0o644)
    assert run(tmp_path, *arguments, most_bytes=0).returncode == 2
    assert path.read_text() == "mine"
    assert run(tmp_path, *arguments).returncode == 0
    assert LINK in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.skipif(sys.platform == "darwin", reason="launchd's agents are written there")
def test_a_link_that_a_mail_has_wrapped_is_written_on_one_line(tmp_path):
    both = format_invitation(
        Invitation(RunId("ab" * 32), tuple(f"/ip4/127.0.0.1/tcp/{port}/p2p/{PEER}" for port in (1, 2)))
    )
    assert run(tmp_path, "install", f"<{both.replace(',', f',{chr(10)}')}>", "--no-start").returncode == 0
    written = (tmp_path / "systemd" / "user" / "dilocox-peer-default.service").read_text()
    assert [line for line in written.splitlines() if both in line], written


@pytest.mark.parametrize("argument", ["/a\nExecStart=/bin/sh", "/a\x1b[2J", "/a\udcff"])
def test_what_would_be_another_line_is_refused(argument):
    for written in (unit, plist):
        with pytest.raises(ConfigError, match="no service's file can hold") as refused:
            written("a", ["join", argument], {})
        with pytest.raises(ConfigError, match="no service's file can hold"):
            written("a", ["join"], {"DILOCOX_CONFIG": argument})
        assert str(refused.value).isprintable()


def test_what_cannot_be_done_is_one_line(tmp_path):
    for arguments, said in (
        (("install",), "give the link"),
        (("install", "no link"), "dilocox://"),
        (("uninstall",), "no service of 'default' is installed"),
        (("show",), "does not exist"),
        (("explode",), "use install, uninstall or show"),
    ):
        done = run(tmp_path, *arguments)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
        assert said in done.stderr


@pytest.mark.skipif(sys.platform == "darwin", reason="of systemd")
def test_where_nothing_can_be_started_it_says_so_and_how(tmp_path):
    environment = {
        **os.environ,
        "XDG_CONFIG_HOME": str(tmp_path),
        "XDG_RUNTIME_DIR": str(tmp_path),
        "DBUS_SESSION_BUS_ADDRESS": "unix:path=/nowhere",
    }
    done = subprocess.run(
        [sys.executable, "-m", "dilocox_peer", "service", "install", LINK],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert done.returncode == 2
    assert "it is written, and not started" in done.stderr
    assert (
        "systemctl --user enable dilocox-peer-default.service && systemctl --user restart dilocox-peer-default.service"
        in done.stderr
    )


def test_an_agent_of_launchd_has_the_same_words():
    found = plistlib.loads(plist("a", ["/bin/dilocox-peer", "join", LINK], {"DILOCOX_CONFIG": "/a"}))
    assert found["ProgramArguments"] == ["/bin/dilocox-peer", "join", LINK]
    assert found["EnvironmentVariables"] == {"DILOCOX_CONFIG": "/a"}
    assert found["Label"] == "org.dilocox.peer.a"
    assert found["KeepAlive"] == {"SuccessfulExit": False}
    assert found["RunAtLoad"] is True


@pytest.mark.parametrize("argument", ["/a b/c", 'say "x"', "100%", "$HOME", "back\\slash", "é"])
def test_nothing_that_is_typed_is_read_otherwise_by_systemd(argument):
    words = shlex.split(quoted(argument))
    assert [word.replace("%%", "%").replace("$$", "$") for word in words] == [argument]
    assert quoted(argument) in unit("a", [argument], {})
