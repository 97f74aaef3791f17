"""The command line: names, help and exit codes. The flags are declared in flags.py; what each command does is in its own file,
imported when it runs, so that `--help` loads neither torch nor hivemind.

Exit codes: 0 done, 1 failed or lacking something for now, 2 wrong usage or settings, 3 cannot reach the run, 4 refused by the run, 5 the disk is full or read-only now,
130 interrupted.
Every flag has an environment variable: DILOCOX_<COMMAND>_<FLAG>, e.g. DILOCOX_JOIN_NAME; DILOCOX_LINK is the link that is joined. `_` may stand for `-` in flags.
"""

import errno
import io
import os
import sys
from typing import Annotated

import typer

from dilocox_peer import __version__
from dilocox_peer.cli.command import PREFIX, Commands, command
from dilocox_peer.cli.config_file import read_config
from dilocox_peer.cli.flags import (
    BootstrapFlags,
    DemoFlags,
    DoctorFlags,
    EvaluateFlags,
    ExportFlags,
    GenerateFlags,
    InitFlags,
    JoinFlags,
    LeaveFlags,
    LedgerFlags,
    PauseFlags,
    PeerFlags,
    PlanFlags,
    RecoverFlags,
    ReplayFlags,
    ServiceFlags,
    SignFlags,
    StatusFlags,
    TokenizeFlags,
)
from dilocox_peer.cli.flags_of_owner import InviteFlags, OwnerFlags, RevokeFlags
from dilocox_peer.cli.home import config_path
from dilocox_peer.errors import ConfigError, DilocoxError, DiskTakesNothing, disk_remedy


def with_dashes(flag: str) -> str:
    """--initial_peers as --initial-peers: hivemind's and Petals' users type underscores."""
    return flag.replace("_", "-")


app = typer.Typer(
    name="dilocox-peer",
    cls=Commands,
    help="Train one language model together with others, over ordinary internet links.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "auto_envvar_prefix": PREFIX,
        "token_normalize_func": with_dashes,
    },
)

PROGRAM = "dilocox-peer"
CANNOT_WRITE = {errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
MAX_ERROR_CHARS = 4000  # of a line; a reason may come from a stranger


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"{PROGRAM} {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        # A script may keep a version in DILOCOX_VERSION.
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Show the version and stop.",
            allow_from_autoenv=False,
        ),
    ] = False,
) -> None:
    """Train one language model together with others, over ordinary internet links."""


@command(app)
def init(flags: InitFlags) -> None:
    """Write a commented run.toml, signed with the owner's key."""
    from dilocox_peer.cli.init import write_run_file

    write_run_file(flags)


@command(app)
def sign(flags: SignFlags) -> None:
    """Sign run.toml again after a change. The run id changes: it is another run."""
    from dilocox_peer.cli.init import sign_run_file

    sign_run_file(flags)


@command(app)
def tokenize(flags: TokenizeFlags) -> None:
    """Cut text into tokens ahead of time: shards and their catalogue, for `init --data`."""
    from dilocox_peer.cli.tokenize import run_tokenize

    run_tokenize(flags)


@command(app)
def bootstrap(flags: BootstrapFlags) -> None:
    """Run the entry point of a run, or of several: DHT node and manifest. Prints the line with which others join."""
    if flags.health:
        from dilocox_peer.cli.health import show_health

        show_health(flags)
    from dilocox_peer.cli.bootstrap import run_bootstrap

    run_bootstrap(flags)


@command(app)
def invite(flags: InviteFlags) -> None:
    """Print a link that lets its reader into a run with admission "invite". Whoever has the link has the invitation."""
    from dilocox_peer.cli.invite import run_invite

    run_invite(flags)


@command(app)
def revoke(flags: RevokeFlags) -> None:
    """Take an invitation back, with every pass made of it, or put a peer out: the others hear it no more."""
    from dilocox_peer.cli.invite import run_revoke

    run_revoke(flags)


@command(app)
def owner(flags: OwnerFlags) -> None:
    """Say what the run's owner wants of it: pause, resume, stop, extend, rate, require, ban, unban, say. Without a word: how it stands."""
    from dilocox_peer.cli.owner import run_owner

    run_owner(flags)


@command(app)
def join(flags: JoinFlags) -> None:
    """Join a run and train: paste the link, nothing else is needed. Ctrl-C leaves; the same command comes back."""
    from dilocox_peer.cli.join import run_join

    run_join(flags)


@command(app)
def pause(flags: PauseFlags) -> None:
    """Have a running peer of this machine stop training and stay: it votes, fetches and serves on."""
    from dilocox_peer.cli.operate import send_pause

    send_pause(flags)


@command(app)
def resume(flags: PeerFlags) -> None:
    """Have a paused peer of this machine train again."""
    from dilocox_peer.cli.operate import send

    send("resume", flags)


@command(app)
def leave(flags: LeaveFlags) -> None:
    """Have a running peer of this machine leave in order, as Ctrl-C there does."""
    from dilocox_peer.cli.operate import send

    send("finish" if flags.finish else "leave", flags)


@command(app)
def service(flags: ServiceFlags) -> None:
    """Have a peer start with your session and again after a crash, without root: systemd's user manager, launchd."""
    from dilocox_peer.cli.service import run_service

    run_service(flags)


@command(app)
def recover(flags: RecoverFlags) -> None:
    """Go back to rounds that this peer has left for a better supported branch. The peer must not be running."""
    from dilocox_peer.cli.recover import run_recover

    run_recover(flags)


@command(app)
def status(flags: StatusFlags) -> None:
    """Say how a run stands, from its peers' announcements and without joining, or how a peer of this machine does."""
    from dilocox_peer.cli.operate import show_status

    show_status(flags)


@command(app)
def dashboard(flags: PeerFlags) -> None:
    """Open the dashboard of a peer that runs on this machine, as `join` shows it. q closes it, the peer goes on."""
    from dilocox_peer.cli.operate import attach

    attach(flags)


@command(app)
def replay(flags: ReplayFlags) -> None:
    """Play a peer's event log in the dashboard. space: stop and go on, + and -: faster and slower, q: end."""
    from dilocox_peer.cli.replay import run_replay

    run_replay(flags)


@command(app)
def demo(flags: DemoFlags) -> None:
    """A whole swarm on this machine: real processes, real sockets, real training. Ends by itself."""
    from dilocox_peer.cli.demo import run_demo

    run_demo(flags)


@command(app)
def evaluate(flags: EvaluateFlags) -> None:
    """Loss and bits a byte of a model: of a folder on a text, or of a run's rounds, which are followed, on what is held out."""
    from pathlib import Path

    is_link = flags.link.startswith("dilocox:")
    if not is_link and not flags.is_run_folder and (folder := Path(flags.link)).is_dir():
        from dilocox_peer.cli.evaluate_folder import evaluate_folder

        evaluate_folder(folder, flags)
        return
    from dilocox_peer.cli.evaluate import run_evaluator

    run_evaluator(flags)


@command(app)
def ledger(flags: LedgerFlags) -> None:
    """Say what certificates count of each peer, from a live run or from this disk. Every signature is checked."""
    from dilocox_peer.cli.ledger import run_ledger

    run_ledger(flags)


@command(app)
def export(flags: ExportFlags) -> None:
    """Write the newest agreed model as a Hugging Face folder, from a live run or from this disk."""
    from dilocox_peer.cli.export import run_export

    run_export(flags)


@command(app)
def generate(flags: GenerateFlags) -> None:
    """Write text with the newest agreed model of a live run, of this disk, or of an export."""
    from dilocox_peer.cli.generate import run_generate

    run_generate(flags)


@command(app)
def plan(flags: PlanFlags) -> None:
    """Reckon what a run would be like: cut, memory, round, exchange, speed, cost, for so many peers on such lines."""
    from dilocox_peer.cli.plan import run_plan

    run_plan(flags)


@command(app)
def doctor(flags: DoctorFlags) -> None:
    """Check everything a peer needs, here and on the way to the run. Exit code 1 when something would fail."""
    from dilocox_peer.cli.doctor import run_doctor

    run_doctor(flags)


def main() -> None:
    """Carries out what was typed. Turns every expected failure into one line on standard error and its exit code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # `>&-`; no command has to think of that
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows ? where it must
    try:
        path, is_named = config_path()
        settings = {} if path is None else read_config(path, lambda: typer.main.get_command(app), is_named=is_named)
        try:
            # It exits by itself: 0, 2 for wrong usage, or what a command said.
            app(sys.argv[1:], prog_name=PROGRAM, default_map=settings)
        except ExceptionGroup as group:  # of tasks that belong together: a full disk ends one of them
            expected = _expected(group)
            if expected is None:
                raise
            raise expected from None
        except SystemExit:
            sys.stdout.flush()  # here, where it is told if it cannot be written
            raise
    except DilocoxError as error:
        from dilocox_peer.peer.status import printable_lines

        typer.echo(printable_lines(f"{PROGRAM}: {error.line}", MAX_ERROR_CHARS), err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.filename is None:
            sys.exit(_unwritten(error))
        from dilocox_peer.peer.status import printable_lines

        # Of a path that was given: one in a folder that is closed to us, a name that is too long. Path.exists() raises it too.
        reason = (error.strerror or str(error)).lower()
        typer.echo(printable_lines(f"{PROGRAM}: {error.filename}: {reason}", MAX_ERROR_CHARS), err=True)
        sys.exit(DiskTakesNothing.exit_code if disk_remedy(error) else ConfigError.exit_code)


def _expected(group: ExceptionGroup[Exception]) -> DilocoxError | OSError | None:
    """The first of a group of failures that are all told in a line, or None."""
    known, others = group.split((DilocoxError, OSError))
    if known is None or others is not None:
        return None
    first: Exception = known
    while isinstance(first, ExceptionGroup):
        first = first.exceptions[0]
    return first if isinstance(first, DilocoxError | OSError) else None


def _unwritten(error: OSError) -> int:
    """The exit code when standard output takes no more, which is told unless its reader has gone (`| head`). Raises any other error."""
    if error.errno not in CANNOT_WRITE:
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the rest is tried again at exit
    if error.errno != errno.EPIPE:
        typer.echo(f"{PROGRAM}: cannot write: {(error.strerror or str(error)).lower()}", err=True)
    return DilocoxError.exit_code
