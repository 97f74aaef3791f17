"""A disk that is full or read-only when something starts: the exit code says that trying again may help, as it does not for a mistake."""

import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dilocox_peer.cli import main as main_module
from dilocox_peer.cli.home import PeerHome
from dilocox_peer.cli.service import unit
from dilocox_peer.errors import ConfigError, DiskTakesNothing, not_written
from dilocox_peer.peer.identity import Identity
from tests.shell.commands import RUN, link_to

PASSES = [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO]


def refusing(number: int) -> Callable[..., None]:
    def fails(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), "/somewhere")

    return fails


@pytest.mark.parametrize("number", PASSES)
def test_what_may_pass_is_told_with_what_to_do_about_the_disk(number: int) -> None:
    error = not_written("x cannot be made", OSError(number, os.strerror(number)), "pass another --home")
    assert (type(error), error.exit_code) == (DiskTakesNothing, 5)
    assert re.fullmatch(f"x cannot be made: {os.strerror(number)}; [a-z ,]+", str(error))
    assert "--home" not in str(error)


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOTDIR, errno.ENAMETOOLONG])
def test_a_mistake_is_still_one(number: int) -> None:
    error = not_written("x cannot be made", OSError(number, os.strerror(number)), "pass another --home")
    assert (type(error), error.exit_code) == (ConfigError, 2)
    assert str(error).endswith("; pass another --home")


@pytest.mark.parametrize("number", PASSES)
def test_what_a_start_makes_first_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    home = PeerHome.at(tmp_path, "a")
    with monkeypatch.context() as full:
        full.setattr(Path, "mkdir", refusing(number))
        with pytest.raises(DiskTakesNothing, match="cannot be made"):
            home.make()
    home.make()
    with monkeypatch.context() as full:
        full.setattr(os, "open", refusing(number))
        with pytest.raises(DiskTakesNothing, match="cannot be made"), home.owned():
            pass
        with pytest.raises(DiskTakesNothing, match=r"identity\.key cannot be made"):
            Identity.open(home.identity_path)


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, 5), (errno.EROFS, 5), (errno.EACCES, 2)])
def test_a_path_that_nobody_has_looked_after_has_the_code_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, code: int
) -> None:
    monkeypatch.setattr(main_module, "app", refusing(number))
    monkeypatch.setattr(sys, "argv", ["dilocox-peer", "join"])
    with pytest.raises(SystemExit) as ended:
        main_module.main()
    assert ended.value.code == code
    assert capsys.readouterr().err == f"dilocox-peer: /somewhere: {os.strerror(number).lower()}\n"


@pytest.mark.parametrize(
    ("patch", "code", "said"),
    [
        ("checks.free_bytes = lambda folder: 0", 5, "disk: 0 MB free"),
        ("checks.free_bytes = lambda folder: 2_000_000", 5, "disk: 2 MB free"),
        ("checks.is_read_only = lambda folder: True", 5, "is on a disk that is read-only"),
        ("checks.free_bytes = lambda folder: 0; checks.judge_python = no_python", 2, "no python; disk: 0 MB free"),
    ],
    ids=["full", "room for another run's alone", "read-only", "full, and a mistake"],
)
def test_join_ends_with_a_code_that_is_tried_again(tmp_path: Path, patch: str, code: int, said: str) -> None:
    home = PeerHome.at(tmp_path, "default")
    home.make()
    another = home.folder / "runs" / "another" / "stage0" / "rounds.log"
    another.parent.mkdir(parents=True)
    another.touch()
    with Identity.open(home.identity_path):
        pass
    script = (
        "import sys\n"
        "from dilocox_peer.cli import checks\n"
        "no_python = lambda *_: checks.Check('python', 'fail', 'no python')\n"
        f"{patch}\n"
        f"sys.argv = ['dilocox-peer', 'join', {link_to(1, RUN)!r}, '--home', {str(tmp_path)!r}, '--plain']\n"
        "from dilocox_peer.cli.main import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, len(done.stderr.splitlines())) == (code, 1), done.stderr
    assert "joining failed at checking this machine" in done.stderr
    assert said in done.stderr


def test_no_unit_of_systemd_gives_up_for_it() -> None:
    units = Path(__file__).parents[2] / "deploy" / "systemd"
    for text in (unit("a", ["join"], {}), *(each.read_text() for each in units.glob("*.service"))):
        prevented = re.findall(r"^RestartPreventExitStatus=(.*)$", text, re.MULTILINE)
        assert [each.split() for each in prevented] == [["2", "4"]]
        assert re.findall(r"^Restart=(.*)$", text, re.MULTILINE) == ["on-failure"]
