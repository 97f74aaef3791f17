"""`join --detach`: the peer goes on in the background, in a session of its own, and the terminal is free as soon as it is up."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import typer

from dilocox_peer.cli.home import PeerHome
from dilocox_peer.errors import ConfigError, DilocoxError
from dilocox_peer.paths import with_tilde
from dilocox_peer.peer.control import ask, is_answered, socket_path

UP_S = 60.0  # by then the peer is up, or has ended with a reason
LOOK_S = 0.1
LAST_WORDS = "last_words"  # in the peer's folder: what it said last on its standard error
LOG = "log.jsonl"  # in the peer's folder, if no other is named
FLAG = "--detach"
MAX_SAID = 2000


def detached(home: PeerHome, *, has_log_file: bool) -> None:
    """Starts what was typed once more, without the flag; returns when it has a stage, or still looks for one after UP_S. Raises ConfigError; a child
    that ends before that ends this process with its words and its exit code; Ctrl-C ends both."""
    if is_answered(socket_path(home.folder)):
        raise ConfigError(f"a peer runs here as {home.folder.name!r} already: pass another --name")
    home.make()
    arguments = arguments_of_child(sys.argv[1:], None if has_log_file else home.folder / LOG)
    with (home.folder / LAST_WORDS).open("w+b") as said:
        child = subprocess.Popen(
            [sys.executable, "-m", "dilocox_peer", *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True,
        )  # fmt: skip
        try:
            code = _wait(child, socket_path(home.folder))
        except KeyboardInterrupt:
            _terminate(child)
            raise
        if code is not None:
            said.seek(0)
            words = said.read(MAX_SAID).decode(errors="replace").rstrip()
            why = "" if has_log_file else f"; {with_tilde(home.folder / LOG)} says why"
            typer.echo(words or f"it has ended already, with exit code {code}{why}", err=True)
            raise typer.Exit(code)
    if not is_answered(socket_path(home.folder)):
        _terminate(child)
        raise ConfigError(
            f"the peer did not answer within {UP_S:.0f} s, and was ended: start it without {FLAG} to see why"
        )
    name = home.name_flag
    log = "" if has_log_file else f"; its log: {with_tilde(home.folder / LOG)}"
    typer.echo(f"in the background{log}. `dilocox-peer dashboard{name}` shows it, `dilocox-peer leave{name}` ends it")


def arguments_of_child(typed: Sequence[str], log: Path | None) -> list[str]:
    """What was typed, for a child that stays where it is. log: where it writes its log, if nothing that was typed says so."""
    at = typed.index("--") if "--" in typed else len(typed)  # behind it no word is a flag
    kept = [*(each for each in typed[:at] if each.replace("_", "-") != FLAG), *typed[at:]]
    own = ["--no-detach", "--plain", *([] if log is None else ["--log-file", str(log)])]
    after = kept.index("join") + 1
    return [*kept[:after], *own, *kept[after:]]


def _terminate(child: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):  # it may end just then
        os.killpg(child.pid, signal.SIGTERM)


def _wait(child: "subprocess.Popen[bytes]", path: Path) -> int | None:
    """Until it has a stage, or UP_S are over: None; or its exit code."""
    deadline = time.monotonic() + UP_S
    while time.monotonic() < deadline:
        if (code := child.poll()) is not None:
            return code
        if is_answered(path) and _has_stage(path):
            return None
        time.sleep(LOOK_S)
    return None


def _has_stage(path: Path) -> bool:
    try:
        return asyncio.run(ask(path, "status"))["status"]["stage"] is not None
    except DilocoxError:
        return False  # it is just starting, or ending
