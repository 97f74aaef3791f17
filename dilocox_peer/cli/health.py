"""`bootstrap --health`: one line and an exit code for who supervises a bootstrap. The judgement is pure.

It asks the running process over its control socket. That answers only while its loop runs; and what it answers is how the
last tries of each run's network daemon and directory went.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import typer

from dilocox_peer.cli.flags import BootstrapFlags
from dilocox_peer.peer.control import ControlRefused, NotRunning, ask, socket_path
from dilocox_peer.peer.lag import LoopLag
from dilocox_peer.peer.status import printable
from dilocox_peer.types import PeerId

if TYPE_CHECKING:
    from dilocox_peer.peer.archivist import Archivist
    from dilocox_peer.peer.registrar import Registrar

STALE_S = 100.0  # three tries in vain, 30 s apart
ROLE = "bootstrap"


@dataclass(frozen=True, slots=True)
class RunHealth:
    """Of one run at a bootstrap. beat_age_s: since all of it was last found well. nodes: in its routing table. directive: as Registrar
    has `directed`; None where the owner's key is not. round: the newest that is known here of any stage; None while others may know newer ones."""

    run: str
    run_name: str
    link: str
    nodes: int
    connections: int
    beat_age_s: float
    trouble: str = ""
    directive: int | None = None
    round: int | None = None


def report(peer: PeerId, runs: Sequence[RunHealth], lag: LoopLag) -> dict[str, Any]:
    """The bootstrap's `status`."""
    return {
        "role": ROLE,
        "peer": peer,
        "runs": [asdict(each) for each in runs],
        "lag_ms_p99": round(lag.p99_ms, 2),
        "lag_ms_max": round(lag.max_ms, 2),
    }


def newest_round(*knowing: "Archivist | Registrar | None") -> int | None:
    known = [each.newest_round for each in knowing if each is not None]
    return max((each for each in known if each is not None), default=None)


def judge(status: Mapping[str, Any]) -> tuple[bool, str]:
    """(whether it is well, one line) of what a bootstrap reports."""
    if status.get("role") != ROLE:
        return False, "another peer runs under this name: pass the bootstrap's --name and --home"
    ill = [each for each in status["runs"] if each["beat_age_s"] > STALE_S]
    if ill:
        why = "; ".join(
            f"{each['run_name']} ({each['run'][:12]}) for {each['beat_age_s']:.0f} s: {each['trouble'] or 'no try ended'}"
            for each in ill
        )
        return False, f"not well: {why}"
    return True, "well: " + "; ".join(run_line(each) for each in status["runs"])


def run_line(each: Mapping[str, Any]) -> str:
    nodes, connections = each["nodes"], each["connections"]
    return (
        f"{each['run_name']} ({each['run'][:12]}), {nodes} node{'' if nodes == 1 else 's'} known, "
        f"{connections} connection{'' if connections == 1 else 's'}"
    )


def show_health(flags: BootstrapFlags) -> None:
    """Prints the line; ends with 0 or 1."""
    home = flags.peer_home
    try:
        is_well, line = judge(asyncio.run(ask(socket_path(home.folder), "status"))["status"])
    except NotRunning:
        is_well, line = (
            False,
            f"no bootstrap answers at {socket_path(home.folder)}: does it run, by this --name and --home?",
        )
    except ControlRefused as error:
        is_well, line = False, str(error)
    typer.echo(printable(line, most=1000))
    raise typer.Exit(0 if is_well else 1)
