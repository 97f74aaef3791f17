"""Commands that look at or steer what runs: `pause`, `resume`, `leave`, `status`, `dashboard`.

A peer of this machine is reached by its control socket; a run, by reading the announcements in its directory.
"""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from dilocox_peer.cli.demo_table import size as size_of
from dilocox_peer.cli.eventlog import read_event
from dilocox_peer.cli.flags import LeaveFlags, PauseFlags, PeerFlags, StatusFlags
from dilocox_peer.cli.health import ROLE, judge
from dilocox_peer.cli.home import PeerHome
from dilocox_peer.cli.observer import Observer
from dilocox_peer.cli.onlooker import Onlooker
from dilocox_peer.cli.screen import View
from dilocox_peer.cli.terminal import Dashboard, ScreenFailed, Terminal, is_interactive, print_picture
from dilocox_peer.cli.visit import visit
from dilocox_peer.durations import duration
from dilocox_peer.events import SeenPeer, SwarmSeen, short
from dilocox_peer.events_of_costs import needs_words
from dilocox_peer.events_of_rounds import why_it_weighs_less
from dilocox_peer.invitation import Invitation, format_invitation, parse_invitation
from dilocox_peer.manifest import Manifest
from dilocox_peer.peer.control import NotRunning, ask, follow, is_answered, socket_path
from dilocox_peer.peer.planning.plan import adapts_inner_steps
from dilocox_peer.peer.planning.told import quarter
from dilocox_peer.peer.rates import upload_words
from dilocox_peer.peer.status import Status, printable, stage_words
from dilocox_peer.plain_json import plain_json
from dilocox_peer.types import PeerId
from dilocox_peer.wire.directives import NOTHING_MORE

WATCH_PEER_S, WATCH_RUN_S = 1.0, 10.0
SEEN_FROM_OUTSIDE = (
    "standing",
    "why",
    "loss",
    "tokens",
    "tokens_per_s",
    "eta_s",
    "times_less",
    "counted_share",
    "troubles",
    "owner_wants",
    "owner_says",
)
NO_COSTS = {"memory_bytes": None}
LEAST_MBIT_S = 0.01  # that a share of is told
MOST_AHEAD = 2  # rounds of a peer before those that are certified; one more came with what was read meanwhile
MAX_NAMED = 8  # of those doubted, and of those refused: the newest


def send(command: str, flags: PeerFlags | LeaveFlags) -> None:
    """One command to the peer of this home; prints what it says. Raises NotRunning, ControlRefused."""
    answer = asyncio.run(ask(_socket(flags.peer_home, of_peer=True), command))
    typer.echo(answer["said"])


def send_pause(flags: PauseFlags) -> None:
    """As `send`, of a pause that may end by itself. Raises ConfigError too."""
    from dilocox_peer.cli.invite import seconds_of

    seconds = None if flags.duration is None else seconds_of(flags.duration, "--for", 366)
    answer = asyncio.run(
        ask(_socket(flags.peer_home, of_peer=True), "pause" if seconds is None else f"pause {seconds}")
    )
    typer.echo(answer["said"])


def show_status(flags: StatusFlags) -> None:
    """Prints the status of the run that the link names, or of the peer of this home. Raises NotRunning, ControlRefused, ConfigError, RunUnreachable,
    RunRefused."""
    if flags.link is None:
        asyncio.run(_show_peer(flags.peer_home, as_json=flags.as_json, watch=flags.watch))
    else:
        asyncio.run(_show_run(parse_invitation(flags.link), as_json=flags.as_json, watch=flags.watch))


def _socket(home: PeerHome, *, of_peer: bool = False) -> Path:
    """Where the peer of this home answers. Raises NotRunning naming those beside it that run, if it alone does not. of_peer: a bootstrap is
    not named, which neither pauses nor is meant by somebody who leaves a run."""
    path = socket_path(home.folder)
    if not is_answered(path):
        running = [name for name in home.names_beside() if is_answered(socket_path(home.folder.parent / name))]
        running = [name for name in running if not of_peer or name != ROLE]
        if running:
            names = " or ".join(f"--name {name}" for name in running)
            raise NotRunning(f"no peer is running here as {home.folder.name!r}: pass {names}, which does")
    return path


MAX_LINE_CHARS = 4096  # a link with many addresses is one line

# ---- a peer of this machine ------------------------------------------------------------------------------------------


async def _show_peer(home: PeerHome, *, as_json: bool, watch: bool) -> None:
    """How the peer does, once or again and again."""
    path = _socket(home)
    while True:
        status = (await ask(path, "status"))["status"]
        typer.echo(plain_json(status) if as_json else "\n".join(peer_lines(status, home.folder.name)))
        if not watch:
            return
        await asyncio.sleep(WATCH_PEER_S)


def peer_lines(status: Mapping[str, Any], name: str = "") -> list[str]:
    """A peer's summary (peer/summary.py), or a bootstrap's (health.py), for a person: what strangers wrote in it is text. name: that its
    user gave it, which stands where its PeerID is not known yet."""
    return [printable(line, MAX_LINE_CHARS) for line in _peer_lines(status, name)]


def _peer_lines(status: Mapping[str, Any], name: str) -> list[str]:
    if status.get("role") == ROLE:
        return [
            f"bootstrap {short(PeerId(status['peer']))}  {judge(status)[1]}",
            *(f"  {each['link']}" for each in status["runs"]),
        ]
    who = short(PeerId(status["peer"])) if status["peer"] else name
    lines = [
        f"{status['run_name'] or 'no run yet'}  {who}  {status['why'] if status['phase'] in status['why'] else status['phase'] + ': ' + status['why']}"
    ]
    if status["round"] is not None:
        lines.append(
            f"  {stage_words(status['stage'], status['stages'])}, round {status['round']}/{status['total_rounds']}, "
            f"{status['tokens_per_s']:,.0f} tokens/s, busy {status['busy']:.0%}, loss {_loss(status['train_loss'])}"
            + ("" if status["eta_s"] is None else f", about {duration(status['eta_s'])} left")
        )
        more = status["link_overhead"]
        if max(status["up_bytes_per_s"], status["down_bytes_per_s"]) * 8e-6 < LEAST_MBIT_S:
            more = None  # of next to nothing: small talk
        lines.append(
            f"  up {_mbit_s(status['up_bytes_per_s'])}, down {_mbit_s(status['down_bytes_per_s'])}"
            + (f"; the links carry {more:.1%} more" if more is not None else "")
        )
        if status["upload_bps"] is not None:
            words = upload_words(status["upload_bps"], status["line_bps"] or 0, status["queueing_ms"])
            lines.append(f"  upload {words} on this line")
        if status["daemon_up_bytes_per_s"] is not None:
            daemon = [_mbit_s(status[f"daemon_{way}_bytes_per_s"]) for way in ("up", "down")]
            lines.append(f"  p2pd over TCP: up {daemon[0]}, down {daemon[1]}, with the rounds' part of the above")
    lines += [*cost_lines(status["costs"]), *owner_lines(status), *trouble_lines(status["troubles"])]
    lines += [
        stage_line(
            each["stage"],
            [peer["here"] is not False for peer in each["peers"]],
            each["tokens_per_s"],
            is_whole=each["is_whole_speed"],
            is_thin=each["thin"],
        )
        for each in status["swarm"]
    ]
    for each in status["doubted"][-MAX_NAMED:]:
        how = "proven hostile" if each["proven"] else "not waited for"
        lines.append(f"  {short(PeerId(each['peer']))} is {how}: {each['reason']}")
    for each in status["refused"][-MAX_NAMED:]:
        lines.append(
            f"  {short(PeerId(each['peer']))} was refused {_times(each['times'])}, the last time: {each['reason']}"
        )
    for each in status["contributions_refused"][-MAX_NAMED:]:
        lines.append(
            f"  {short(PeerId(each['peer']))} had contributions refused {_times(each['times'])}, last in round {each['round']}: {each['reason']}"
        )
    for each in status["contributions_clipped"][-MAX_NAMED:]:
        word, why = why_it_weighs_less(*(_number(each[name]) for name in ("norm", "median_norm", "factor")))
        lines.append(
            f"  {short(PeerId(each['peer']))} had contributions {word} {_times(each['times'])}, last in round {each['round']}: {why}"
        )
    for copy in status["copies"]:
        lines.append(f"  keeps a copy of stage {copy['stage']}, of round {copy['round']}, should nobody of it be left")
    last = status["last_round"]
    if last is not None:
        lines.append(
            f"  round {last['round']}: {last['contributors']} contribution{'' if last['contributors'] == 1 else 's'}, loss {_loss(last['train_loss'])}, "
            f"{size_of(last['bytes_sent'])} sent"
        )
    share, missed = status["contributions_counted"], status["contributions_missed"]
    if share is not None and share < 1 and missed is not None:
        named = "; ".join(f"{short(PeerId(each['peer']))} {each['why']}" for each in missed["peers"][:MAX_NAMED])
        lines.append(
            f"  {share:.0%} of the contributions to the last rounds counted; round {missed['round']} went without {named}"
        )
    return lines


def cost_lines(costs: Mapping[str, Any]) -> list[str]:
    """What taking part costs (peer/costs.py), a line each."""
    lines, month = [], costs["month"]
    if costs["memory_bytes"] is not None:
        a_day = a_day_words(costs)
        lines.append(
            f"  takes up to {needs_words(costs['memory_bytes'], costs.get('card_bytes') or 0, costs['disk_bytes'])}"
            + (f"; {a_day}" if a_day else "")
        )
    if month is not None:
        of = "" if month["allowed"] is None else f", of {month['allowed'] / 1e9:g} GB"
        moved = f"{size_of(month['sent'])} sent and {size_of(month['received'])} received"
        lines.append(f"  in {month['month']} so far {moved}{of}")
    return lines


def a_day_words(costs: Mapping[str, Any]) -> str:
    """Traffic at the pace of now; empty where none is known."""
    if costs["sent_bytes_a_day"] is None:
        return ""
    return f"{size_of(costs['sent_bytes_a_day'])} up and {size_of(costs['received_bytes_a_day'])} down a day"


def owner_lines(known: Mapping[str, Any]) -> list[str]:
    """What the run's owner wants of it beyond its settings, and says."""
    if known["owner_wants"] is None:
        return []
    said = f'; says: "{known["owner_says"]}"' if known["owner_says"] else ""
    if known["owner_wants"] == NOTHING_MORE:
        return [f"  the run's owner {said[2:]}"] if said else []
    return [f"  the run's owner has it: {known['owner_wants']}{said}"]


def trouble_lines(troubles: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is wrong with the run, a line each."""
    return [f"  {'!' if each['stops'] else '-'} {each['cause']}: {each['next']}" for each in troubles[:MAX_NAMED]]


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def stage_line(stage: int, here: Sequence[bool], tokens_per_s: float, *, is_whole: bool, is_thin: bool) -> str:
    """is_whole: the speed is of all who train there, not of some."""
    count = sum(here)
    if not count:
        return f"  stage {stage}: EMPTY, nobody holds it"
    speed = f"{'' if is_whole else 'at least '}{tokens_per_s:,.0f} tokens/s"
    if not is_whole and not tokens_per_s:
        speed = "speed not known yet"
    return f"  stage {stage}: {count} peer{'' if count == 1 else 's'}, {speed}{', thin' if is_thin else ''}"


def attach(flags: PeerFlags) -> None:
    """The dashboard of a peer that runs in another process. Raises NotRunning, ScreenFailed."""
    path = _socket(flags.peer_home)
    observer = Observer()

    def take(record: dict[str, Any]) -> None:
        event = read_event(record)
        if event is not None:
            observer.take(*event)

    async def show() -> None:
        loop, quitting, failures = asyncio.get_running_loop(), asyncio.Event(), list[str]()
        following = asyncio.create_task(follow(path, take), name="follow")

        def command(name: str) -> None:
            asyncio.run_coroutine_threadsafe(ask(path, name), loop)

        def quit_soon() -> None:
            loop.call_soon_threadsafe(quitting.set)

        def fail(reason: str) -> None:
            failures.append(reason)
            quit_soon()

        waiting = asyncio.create_task(quitting.wait())
        await asyncio.sleep(0)
        with (
            Terminal() as terminal,
            Dashboard(
                observer,
                terminal,
                on_quit=quit_soon,
                on_failure=fail,
                on_pause=lambda wanted: command("pause" if wanted else "resume"),
                view=View(quit_word="close"),
                note=lambda: "attached",
            ),
        ):
            await asyncio.wait({following, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if following.done():
            following.result()
            typer.echo("the peer has ended")
        else:
            following.cancel()
        if failures:
            raise ScreenFailed(f"{failures[0]}; the peer goes on")

    async def once() -> None:
        """Not a terminal: the picture as it is now."""
        async with asyncio.timeout(2.0):
            await follow(path, take)

    asyncio.run(ask(path, "status"))  # who is not there is told before the screen is taken
    if is_interactive():
        asyncio.run(show())
        return
    with suppress(TimeoutError):
        asyncio.run(once())
    print_picture(observer, time.time(), "close")


# ---- a run, without joining ------------------------------------------------------------------------------------------


async def _show_run(invitation: Invitation, *, as_json: bool, watch: bool) -> None:
    """Prints which peer holds which stage of a run, as announced."""
    async with visit(invitation) as open_visit:
        manifest = await open_visit.settings()
        onlooker = await Onlooker.of(open_visit, manifest, format_invitation(invitation))
        while True:
            known = None if onlooker is None else await onlooker.look()
            seen = [
                SeenPeer(lease.peer, stage, lease.tokens_per_s, lease.round, lease.reachability)
                for stage in range(manifest.stages.count)
                for lease in await open_visit.directory.peers(stage)
            ]
            summary = run_summary(manifest, seen, known)
            link = format_invitation(invitation)
            typer.echo(plain_json(summary) if as_json else "\n".join(run_lines(manifest, summary, link)))
            if not watch:
                return
            await asyncio.sleep(WATCH_RUN_S)


def run_status(manifest: Manifest, seen: Sequence[SeenPeer]) -> Status:
    """The status that these announcements make, of nobody's."""
    status = Status()
    status.take(SwarmSeen(tuple(range(manifest.stages.count)), tuple(seen)), 0.0)
    return status


def run_summary(manifest: Manifest, seen: Sequence[SeenPeer], known: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The JSON of `status LINK --json`. known: the run as its page has it, where it could be read."""
    status = run_status(manifest, seen)
    now: Mapping[str, Any] = {} if known is None else known["now"]
    total, newest = now.get("total_rounds") or manifest.rounds.total, _newest_round(seen, now.get("round"))
    costs = {} if known is None else {each["stage"]: each["costs"] for each in known["stages"]}
    return {
        "run": manifest.run_id,
        "run_name": manifest.run.name,
        "round": newest - (newest == total + 1),  # after the last, leases have one more
        "total_rounds": total,
        **{key: now.get(key) for key in SEEN_FROM_OUTSIDE},
        "stages": [
            {
                "stage": stage,
                "costs": costs.get(stage),
                "tokens_per_s": round(status.stage_speed(stage), 1),
                "is_whole_speed": status.stage_speed_is_whole(stage),
                "thin": _is_thin(status, stage, manifest.stages.count),
                "peers": [
                    {
                        "peer": peer.peer,
                        "tokens_per_s": peer.tokens_per_s,
                        "round": peer.round,
                        "reachability": peer.reachability,
                    }
                    for peer in status.of_stage(stage)
                ],
            }
            for stage in range(manifest.stages.count)
        ],
    }


def _newest_round(seen: Sequence[SeenPeer], certified: int | None) -> int:
    """What announcements say of it is anybody's word: no more than a peer can be ahead of what is certified, where that is known; else what a quarter
    of them say moves nothing. Those that have just come say none yet."""
    told = sorted((peer.round for peer in seen if peer.round), reverse=True)
    newest = told[quarter(len(told))] if told else 0
    return newest if certified is None else max(certified, min(newest, certified + MOST_AHEAD))


def run_lines(manifest: Manifest, summary: Mapping[str, Any], link: str = "LINK") -> list[str]:
    """The same for a person, who asked by this link."""
    about = " of about " if adapts_inner_steps(manifest) else "/"  # from outside only the settings are known
    lines = [f"{summary['run_name']} ({summary['run'][:12]})  round {summary['round']}{about}{summary['total_rounds']}"]
    if summary["standing"] is not None:
        left = "" if summary["eta_s"] is None else f", about {duration(summary['eta_s'])} left"
        lines += [
            f"  {summary['standing']}: {summary['why']}",
            f"  loss {_loss(summary['loss'])}, {summary['tokens']:,} tokens{left}",
        ]
    lines += [*owner_lines(summary), *trouble_lines(summary["troubles"] or ())]
    if summary["counted_share"] is not None and summary["counted_share"] < 1:
        lines.append(
            f"  {summary['counted_share']:.0%} of the contributions that the last rounds could have are in them"
        )
    if summary["standing"] == "complete":  # nobody has to hold a stage any more
        return [*lines, f"  its model: dilocox-peer export '{link}' --out model"]
    for each in summary["stages"]:
        here = [True] * len(each["peers"])
        lines.append(
            stage_line(each["stage"], here, each["tokens_per_s"], is_whole=each["is_whole_speed"], is_thin=each["thin"])
        )
        lines += [f"    a peer {line.lstrip()}" for line in cost_lines({"month": None, **(each["costs"] or NO_COSTS)})]
        lines += [
            f"    {short(peer['peer'])}  {peer['reachability']:<7}  {peer['tokens_per_s']:>10,.0f} tokens/s  round {peer['round']}"
            for peer in each["peers"]
        ]
    return lines


def _is_thin(status: Status, stage: int, count: int) -> bool:
    return not status.of_stage(stage) or (stage < min(count, status.num_stages) and status.is_thin(stage))


def _mbit_s(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8e-6:.2f} Mbit/s"


def _number(said: float | None) -> float:
    """null is one that was not finite."""
    return math.nan if said is None else said


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
