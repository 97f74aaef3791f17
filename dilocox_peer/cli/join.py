"""`join`: checks what the volunteer gave, then runs a session until the run is complete or the volunteer leaves.

Around the session: the dashboard or plain lines, the control socket, the log file, the metrics, the hours.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import typer

from dilocox_peer.cli.checks import Check, one_line, quick_checks
from dilocox_peer.cli.detaching import detached
from dilocox_peer.cli.disk_watch import keep_within
from dilocox_peer.cli.eventlog import EventFile, event_printer
from dilocox_peer.cli.finishing import Finishing
from dilocox_peer.cli.flags import JoinFlags
from dilocox_peer.cli.home import PeerHome
from dilocox_peer.cli.hours import Hours, keep_hours
from dilocox_peer.cli.idle import keep_idle, read_usage
from dilocox_peer.cli.lifetime import Stop, end, interruptible, run_until_stopped
from dilocox_peer.cli.mains import keep_mains
from dilocox_peer.cli.month_kept import MonthKept, run_within
from dilocox_peer.cli.observer import Observer
from dilocox_peer.cli.pausing import Operator
from dilocox_peer.cli.sinks import sink_of
from dilocox_peer.cli.telling_costs import CostsTeller
from dilocox_peer.cli.terminal import Dashboard, Terminal, errors_as_events, is_interactive
from dilocox_peer.errors import ConfigError, DiskTakesNothing
from dilocox_peer.events import Failed, Remark
from dilocox_peer.flags import check_base_bits
from dilocox_peer.invitation import parse_invitation, parse_multiaddrs
from dilocox_peer.network.autogroup import giving_way
from dilocox_peer.network.lasting import lasting
from dilocox_peer.peer.control import Controls, ControlServer, socket_path
from dilocox_peer.peer.identity import Identity
from dilocox_peer.peer.settings import (
    Choices,
    OnBattery,
    SessionSettings,
    cards,
    check_device,
    relay_bytes_per_s,
)
from dilocox_peer.peer.startup import StartUp, StartupStep
from dilocox_peer.types import RunId
from dilocox_peer.wire.declared import MAX_SITE_CHARS, SITE
from dilocox_peer.wire.records import MAX_PUBLIC_NAME

if TYPE_CHECKING:
    from dilocox_peer.peer.planning.upkeep import Upkeep
    from dilocox_peer.peer.session import Session

MIN_MBIT_S = 0.1  # below, a reply's pieces would come later than a fetcher waits
LAST_WORDS = 5


def run_join(flags: JoinFlags) -> None:
    """Trains until the run is complete or somebody stops it. Raises ConfigError, RunUnreachable, RunRefused,
    DiskTakesNothing."""
    home, choices = flags.peer_home, flags.choices
    invitation = parse_invitation(flags.link)
    more_peers = parse_multiaddrs(choices.initial_peers, "peer")
    parse_multiaddrs(choices.host_maddrs, "listen")
    parse_multiaddrs(choices.announce_maddrs, "announce")
    parse_multiaddrs(choices.link_maddrs, "listen")
    if len(choices.public_name) > MAX_PUBLIC_NAME or not choices.public_name.isprintable():
        raise ConfigError(f"--public-name: at most {MAX_PUBLIC_NAME} characters, all of which can be seen")
    if len(choices.site) > MAX_SITE_CHARS or not re.match(SITE, choices.site):
        raise ConfigError(f"--site {choices.site!r}: at most {MAX_SITE_CHARS} letters, digits, . _ -")
    for path in choices.data:
        if not path.exists():
            raise ConfigError(f"--data {path} does not exist: pass a text file, a JSONL file or a folder of them")
    if choices.gpus and choices.device != "cpu":
        raise ConfigError("--gpus and --device both say where to compute: take one of them")
    if choices.gpus:
        cards(choices.gpus)
    check_device(choices.device)
    check_base_bits(choices.base_bits)
    hours = Hours.parse(flags.hours) if flags.hours is not None else None
    for flag, mbit_s, without in (
        ("--max-upload", flags.at_most.max_upload, "0.8 of what your line carries"),
        ("--max-download", flags.at_most.max_download, "no limit"),
    ):
        if mbit_s is not None and not MIN_MBIT_S <= mbit_s <= 1e6:
            raise ConfigError(f"{flag} {mbit_s:g}: at least {MIN_MBIT_S:g} Mbit/s; leave it out for {without}")
    relay_bytes_per_s(flags.at_most.relay)
    if flags.only_idle:
        read_usage()  # or the system cannot tell
    if flags.detach:
        detached(home, has_log_file=flags.log_file is not None)
        return
    warnings = _check_machine(home, invitation.run_id, choices.host_maddrs)
    home.make()
    observer = Observer()
    on_screen = not (flags.plain or flags.log.is_json or flags.until_stdin_closes) and is_interactive()
    with ExitStack() as stack:
        stack.enter_context(giving_way(flags.nice))
        if flags.log_file is not None:
            file = EventFile(flags.log_file, max_bytes=int(flags.log_file_size * 1e6), keep=flags.log_file_count)
            observer.add(stack.enter_context(file))
        identity = stack.enter_context(Identity.open(home.identity_path))
        stack.enter_context(home.owned())
        for wish in flags.log_to:
            sink = sink_of(wish, run=invitation.run_id[:16], peer=flags.name, tell=observer)
            observer.add(stack.enter_context(sink))
        if flags.metrics_port is not None:
            from dilocox_peer.cli.metrics import metrics_server

            stack.enter_context(metrics_server(observer, flags.metrics_host, flags.metrics_port))
        if on_screen:
            typer.echo(f"{StartupStep.LOADING} ...")
        else:
            how = f"`dilocox-peer leave{home.name_flag}` ends it"
            gone = Failed("standard output", f"nobody reads it any more; the peer goes on, {how}")
            observer.add(event_printer(as_json=flags.log.is_json, on_closed=lambda: observer(gone)))
        # Only now the heavy imports: a typing error in a flag should not take two seconds to be told. And not in the loop,
        # where hivemind's would keep Ctrl-C waiting.
        with interruptible():
            StartUp(StartupStep.LOADING, observer)
            from dilocox_peer.network.hivemind_parts import load_hivemind
            from dilocox_peer.peer.session import Session

            load_hivemind()
            choices, uncompiled = _compiled_or_not(_on_cards(choices))

        settings = SessionSettings(
            run_id=invitation.run_id,
            link=invitation.link,
            initial_peers=(*invitation.addresses, *more_peers),
            grant=invitation.grant,
            runtime_dir=home.runtime,
            identity_path=home.identity_path,
            run_folder=home.run_folder(invitation.run_id),
            tokenizers=home.tokenizers,
            choices=choices,
            at_most=flags.at_most,
        )
        session = Session(settings, identity, observer)
        for remark in (one_line(warnings) if warnings else "", uncompiled):
            if remark:
                observer(Remark(remark))

        async def work(stop: Stop) -> None:
            await _stay(session, stop, observer, flags, hours, on_screen=on_screen)

        code = run_until_stopped(work, until_stdin_closes=flags.until_stdin_closes)
    end(code)


def _on_cards(choices: Choices) -> Choices:
    """With --gpus as --device says it. Raises ConfigError."""
    if not choices.gpus:
        return choices
    from dilocox_peer.peer.device import chosen_cards

    return replace(choices, device=chosen_cards(choices.gpus))


def _compiled_or_not(choices: Choices) -> tuple[Choices, str]:
    """Without --compile where it does not work, and what to say of that."""
    if not choices.compile:
        return choices, ""
    from dilocox_peer.peer.device import why_not_compiled

    if not (reason := why_not_compiled(choices.device)):
        return choices, ""
    return replace(choices, compile=False), f"--compile does not work here, layers run as they are: {reason}"


def _check_machine(home: PeerHome, run: RunId, host_maddrs: Sequence[str]) -> list[Check]:
    """The doctor's quick checks, before anything is made or started: warnings come back. Raises ConfigError;
    DiskTakesNothing where all that fails may pass by itself.

    Takes some 0.1 s. Before the key is locked, or the check would find it in use.
    """
    with StartUp(StartupStep.MACHINE).named():
        found = quick_checks(home.folder, home.identity_path, host_maddrs, home.run_folder(run).name)
        failed = [check for check in found if check.status == "fail"]
        if failed:
            kind = DiskTakesNothing if all(check.may_pass for check in failed) else ConfigError
            raise kind(one_line(failed))
    return [check for check in found if check.status == "warn" and check.name != "key file"]  # opening it says more


async def _stay(
    session: "Session", stop: Stop, observer: Observer, flags: JoinFlags, hours: Hours | None, *, on_screen: bool
) -> None:
    """The session, and everything that looks at it or steers it."""

    counted = MonthKept(flags.peer_home.folder, flags.at_most.max_gb_month, observer)

    def away() -> str:
        return counted.words() if counted.is_used_up else ""

    operator = Operator(session, flags.peer_home.name_flag, asyncio.get_running_loop().call_later, away)

    def leave() -> str:
        stop.ask("asked to leave")
        return "leaving in order"

    finishing = Finishing(stop.ask)
    observer.add(finishing.take)

    def look() -> tuple["Upkeep | None", float | None]:
        now = observer.clock()
        return observer.read(lambda status: (status.costs.upkeep(status.rounds), status.time_left_s(now)))

    observer.add(CostsTeller(look, observer).take)
    controls = Controls(
        status=observer.summary,
        pause=operator.pause,
        resume=operator.resume,
        leave=leave,
        finish=finishing.begin,
    )
    async with AsyncExitStack() as stack:
        stack.callback(operator.close)
        server = await stack.enter_async_context(
            ControlServer(socket_path(flags.peer_home.folder), controls, clock=observer.clock)
        )
        observer.add(server.tell)
        if on_screen:
            stack.enter_context(_screen(observer, controls))
        if hours is not None:
            keep_task(stack, lambda: keep_hours(hours, session), "--hours", observer)
        if flags.only_idle:
            keep_task(stack, lambda: keep_idle(session), "--only-idle", observer)
        if flags.on_battery is OnBattery.PAUSE:
            keep_task(stack, lambda: keep_mains(session), "--on-battery", observer)
        if (max_gb := flags.at_most.max_disk) is not None:
            folder, give_up = flags.peer_home.folder, partial(_leave_for, stop)
            keep_task(stack, lambda: keep_within(folder, max_gb, give_up, observer), "--max-disk", observer)
        observer.add(counted.take)
        await run_within(counted, session, stop.wait, observer)


def _leave_for(stop: Stop, why: str) -> None:
    stop.ask(why, ConfigError.exit_code)


def keep_task(stack: AsyncExitStack, work: Callable[[], Awaitable[None]], flag: str, observer: Observer) -> None:
    """Runs it until the stack is left; should it fail, the log says so, and it begins anew: a limit that a volunteer has set holds."""
    task = asyncio.create_task(lasting(work, flag, observer), name=flag)
    stack.callback(task.cancel)


@contextmanager
def _screen(observer: Observer, controls: Controls) -> Iterator[None]:
    """The dashboard until the block ends; then the last lines of the log, on the screen as it was before. If it fails, lines as with --plain."""
    loop, failures = asyncio.get_running_loop(), list[str]()

    def go_on(reason: str) -> None:
        failures.append(reason)
        observer.add(event_printer(as_json=False))
        observer(Failed("screen", f"{reason}; the peer goes on, Ctrl-C leaves"))

    def soon(act: Callable[[], str]) -> None:
        loop.call_soon_threadsafe(act)

    try:
        with (
            Terminal() as terminal,
            errors_as_events(observer),
            Dashboard(
                observer,
                terminal,
                on_quit=lambda: soon(controls.leave),
                on_failure=go_on,
                on_pause=lambda wanted: soon((lambda: controls.pause(None)) if wanted else controls.resume),
            ),
        ):
            yield
    finally:
        last = observer.read(lambda status: [line.text for line in list(status.log)[-LAST_WORDS:]])
        for text in last if not failures else ():  # they were written when they came
            typer.echo(text)
