"""Where nobody's home folder is known (a container's user that the system does not list) what needs none works, and the rest says so in one line."""

import os
import pwd
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dilocox_peer.cli.home import PeerHome, config_path, default_home
from dilocox_peer.errors import ConfigError
from dilocox_peer.paths import expanded, with_tilde
from dilocox_peer.peer.identity import Identity, read_key

UNKNOWN = "no home folder is known here: set HOME, or pass --home"
VARIABLES = ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "DILOCOX_CONFIG")


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    def unlisted(_uid: int) -> None:
        raise KeyError

    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unlisted)
    return monkeypatch


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The program, for a user that the system does not list."""
    script = "import pwd; pwd.getpwuid = {}.__getitem__; from dilocox_peer.__main__ import main; main()"
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**kept, **variables},
    )


def test_what_needs_no_home_folder_works_without_one(tmp_path):
    assert command("--version").returncode == 0
    done = command("init", str(tmp_path / "run.toml"), "--home", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "owner.key").exists()


def test_what_needs_one_says_what_to_pass():
    done = command("status")
    assert (done.returncode, done.stderr) == (2, f"dilocox-peer: {UNKNOWN}\n")
    done = command("--version", DILOCOX_CONFIG="~nobody-of-that-name/config.toml")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "~nobody-of-that-name/config.toml: no user of that name" in done.stderr


def test_a_file_of_settings_that_nobody_named_is_not_looked_for(homeless, tmp_path):
    assert config_path() == (None, False)
    homeless.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert config_path() == (tmp_path / "dilocox-peer" / "config.toml", False)
    homeless.setenv("DILOCOX_CONFIG", "~/config.toml")
    with pytest.raises(ConfigError, match=UNKNOWN):
        config_path()


def test_keys_and_state_need_a_folder_that_is_known(homeless, tmp_path):
    for of_nobody in (default_home, lambda: PeerHome.at(None, "a"), lambda: Identity.open("~/a.key"),
                      lambda: read_key("~/a.key", flag="--owner-key"), lambda: expanded("~")):  # fmt: skip
        with pytest.raises(ConfigError, match=UNKNOWN):
            of_nobody()
    assert PeerHome.at(tmp_path, "a").folder == tmp_path / "peers" / "a"
    homeless.setenv("XDG_DATA_HOME", "~nobody-of-that-name")
    with pytest.raises(ConfigError, match="~nobody-of-that-name: no user of that name has a home folder here"):
        default_home()


def test_an_empty_home_is_none_and_not_the_root_of_all_files(homeless, tmp_path):
    homeless.setenv("HOME", "")
    for of_nobody in (default_home, lambda: expanded("~"), lambda: expanded("~/a")):
        with pytest.raises(ConfigError, match=UNKNOWN):
            of_nobody()
    assert with_tilde(Path("/elsewhere")) == "/elsewhere"
    assert expanded("") == Path()
    for listed in ("", "relative"):
        homeless.setattr(pwd, "getpwuid", lambda _uid, listed=listed: SimpleNamespace(pw_dir=listed))
        with pytest.raises(ConfigError, match=UNKNOWN):
            default_home()
    homeless.setattr(pwd, "getpwuid", lambda _uid: SimpleNamespace(pw_dir=str(tmp_path)))
    assert default_home() == tmp_path / ".local" / "share" / "dilocox-peer"
    assert with_tilde(tmp_path / "log") == "~/log"


def test_a_path_is_shown_with_a_tilde_where_a_home_folder_is_known(homeless, tmp_path):
    assert with_tilde(tmp_path / "log") == str(tmp_path / "log")
    homeless.setenv("HOME", str(tmp_path))
    assert with_tilde(tmp_path / "log") == "~/log"
    assert with_tilde(Path("/elsewhere")) == "/elsewhere"


def test_a_relative_home_takes_no_key(homeless, tmp_path):
    """The owner's key lay in another folder for each that the program was started in."""
    homeless.setenv("HOME", "relative")
    with pytest.raises(ConfigError, match="HOME is 'relative', no whole path: set it, or pass --home"):
        default_home()
    assert config_path() == (None, False)
    assert with_tilde(tmp_path) == str(tmp_path)
    done = command("init", str(tmp_path / "run.toml"), HOME="relative")
    assert done.returncode == 2, done.stderr
    assert list(tmp_path.iterdir()) == []
    homeless.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_home() == tmp_path / "dilocox-peer"
