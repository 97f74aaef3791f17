"""A live swarm under a stranger's fire: mutated messages at every entry that p2pd and linkd serve.

    python benchmarks/fuzz.py [--messages 1000000] [--minutes 600] [--seed 1] [--strangers 4] [--pace 0.05]

A real bootstrap and two real peers (a pipeline of two stages) train while strangers, who have the invitation link and
nothing else, send mutated requests to the directory, messages, fetch streams, link frames and bare bytes to the TCP ports;
strangers are nodes of the directory too and answer with garbage when they are asked. Ends with 1 unless bootstrap and peers
are the processes they were, answer their control sockets, go on certifying rounds, and have grown by at most 64 MB since the
warm-up. Standstills of the event loops are what the product itself measures (lag_ms_max), the worst of half a minute each.
The strangers share one core at the lowest priority: on machines of their own they would take no processor time from the swarm.
The peers compute at a pace (--pace) that leaves them the other one, else a million messages take an hour.
Its doorkeeper is told to let everybody in (open_doors.py): else strangers would be turned away before the decoders have seen much.
Expected beforehand: nothing ends; a peer takes 100 directory requests and 200 messages a second of each stranger, so four
strangers reach the decoders of two targets 2000 times a second at most; what is refused costs 0.1 ms of the loop.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))  # where it is started by its path from elsewhere

from mutations import SERVICES
from strangers import Fire, Target, link_strangers, strangers
from swarm import WatchedSwarm, header, spread

from dilocox_peer.config import preset
from dilocox_peer.invitation import parse_invitation, parse_multiaddr
from dilocox_peer.model.partition import with_cut
from dilocox_peer.peer.control import ask, socket_path

LOOK_S = 2.0
MOST_GROWTH_BYTES = 64 * 1024 * 1024
WARM_UP_S = 20.0


@dataclass
class Looks:
    """What was seen of one process from time to time."""

    pid: int
    resident: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    lag_ms_max: list[float] = field(default_factory=list)
    lag_ms_p99: list[float] = field(default_factory=list)
    answer_ms: list[float] = field(default_factory=list)
    unanswered: int = 0

    def look(self) -> None:
        process = psutil.Process(self.pid)
        self.resident["itself"].append(process.memory_info().rss)
        for child in process.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                command = " ".join(child.cmdline())
                name = "linkd" if "linkd" in command else "p2pd" if "p2pd" in command else "other"
                self.resident[name].append(child.memory_info().rss)


# -- the swarm --------------------------------------------------------------------------------------------------------


async def find_targets(swarm: WatchedSwarm) -> list[Target]:
    from hivemind.p2p import PeerID

    from dilocox_peer.cli.visit import visit

    invitation = parse_invitation(swarm.link)
    first = parse_multiaddr(invitation.addresses[0], "peer").peer
    targets = [Target("bootstrap", PeerID.from_base58(str(first)), list(invitation.addresses), ("dial-back",))]
    async with visit(invitation) as open_visit, asyncio.timeout(60):
        leases: list[Any] = []
        while len(leases) < 2:
            leases = [lease for stage in range(2) for lease in await open_visit.directory.peers(stage)]
    names = {swarm.of(label, "PeerStarted")[-1]["peer"]: label for label in ("peer0", "peer1")}
    for lease in leases:
        link = (str(lease.link), list(lease.link_addresses)) if lease.link else None
        targets.append(
            Target(names[lease.peer], PeerID.from_base58(str(lease.peer)), list(lease.addresses), SERVICES, link)
        )
    return targets


async def watch(swarm: WatchedSwarm, looks: dict[str, Looks], fire: Fire) -> None:
    told_at = time.monotonic()
    while True:
        for label, look in looks.items():
            try:
                look.look()
                asked_at = time.monotonic()
                status = (await ask(socket_path(swarm.folder / "peers" / label), "status"))["status"]
                look.answer_ms.append(1000 * (time.monotonic() - asked_at))
                for key, values in (("lag_ms_max", look.lag_ms_max), ("lag_ms_p99", look.lag_ms_p99)):
                    found = status.get(key, (status.get("progress") or {}).get(key))
                    if found is not None:
                        values.append(found)
            except Exception as error:
                look.unanswered += 1
                print(f"# {label} gives no answer: {error!r}", file=sys.stderr)
        if time.monotonic() - told_at > 30:
            told_at = time.monotonic()
            print(
                f"# {fire.total} messages, round {len(swarm.of('peer0', 'RoundCertified'))}",
                file=sys.stderr,
                flush=True,
            )
        await asyncio.sleep(LOOK_S)


async def fuzz(arguments: argparse.Namespace) -> dict[str, Any]:
    manifest = with_cut(
        preset(
            "tiny",
            model={"layers": 2},
            stages={"count": 2},
            inner={"micro_batch": 4, "accumulate": 8},
            rounds={"total": 1_000_000, "inner_steps": 4},
        )
    )
    fire = Fire(arguments.messages, until=float("inf"))
    async with WatchedSwarm(manifest) as swarm:
        program: tuple[str, ...] = (str(Path(__file__).with_name("open_doors.py")),)
        children = {"bootstrap": await swarm.start_bootstrap(program=program)}
        program += ("--pace", str(arguments.pace)) if arguments.pace else ()
        for stage in range(2):
            children[f"peer{stage}"] = await swarm.start_peer(f"peer{stage}", stage=stage, program=program)
        needed = list(children.values())

        def rounds() -> int:
            return len(swarm.of("peer0", "RoundCertified"))

        await swarm.until(lambda: rounds() >= 3, needed, 120)
        looks = {label: Looks(child.process.pid) for label, child in children.items()}
        watching = asyncio.create_task(watch(swarm, looks, fire))
        await asyncio.sleep(arguments.calm)
        calm = {label: (list(look.lag_ms_max), list(look.lag_ms_p99)) for label, look in looks.items()}
        targets = await find_targets(swarm)
        fire.until = time.monotonic() + 60 * arguments.minutes
        began_at, warm_from = time.monotonic(), 0
        rounds_before = rounds()
        run_id = str(swarm.manifest.run_id)
        # Strangers have processors of their own. Here they share one core, which the swarm may use as well; on the others they
        # take nothing. A lower priority alone does not do: it counts within a session, and the kernel shares by session.
        os.nice(19)
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[-1:])
        async with (
            strangers(swarm.link, arguments.strangers, arguments.seed, targets, fire) as made,
            link_strangers(targets, run_id, arguments.seed, fire),
            asyncio.TaskGroup() as tasks,
        ):
            fires = [tasks.create_task(stranger.run()) for stranger in made]
            await asyncio.sleep(min(WARM_UP_S, arguments.messages / 1000))
            warm_from = len(looks["peer0"].resident["itself"])
            await asyncio.wait(fires)
            took_s = time.monotonic() - began_at
        alive = {label: child.process.returncode is None for label, child in children.items()}
        rounds_under_fire = rounds() - rounds_before
        goal = rounds() + 3
        goes_on = True
        try:
            await swarm.until(lambda: rounds() >= goal, needed, 120)
        except Exception as error:
            goes_on = False
            print(f"# {error!r}", file=sys.stderr)
        await asyncio.sleep(2 * LOOK_S)
        watching.cancel()
        events = {
            label: dict(Counter(record["event"] for record in swarm.events[label]).most_common(30))
            for label in children
        }
        failed = [record for label in children for record in swarm.of(label, "Failed")]
        tails = {label: list(child.tail)[-12:] for label, child in children.items()}
    growth = {
        label: {
            name: max(values[min(warm_from, len(values) - 1) :]) - values[min(warm_from, len(values) - 1)]
            for name, values in look.resident.items()
        }
        for label, look in looks.items()
    }
    return {
        "seed": arguments.seed, "messages": fire.total, "seconds": took_s, "rate": fire.total / took_s, "alive": alive,
        "goes_on": goes_on, "rounds_under_fire": rounds_under_fire, "growth": growth,
        "well": all(alive.values()) and goes_on
        and all(each.get("itself", 0) <= MOST_GROWTH_BYTES for each in growth.values()),
        "looks": looks, "calm": calm, "sent": fire.sent, "asked": fire.asked, "outcomes": fire.outcomes, "events": events, "unanswered": fire.unanswered,
        "failed": failed[-10:], "num_failed": len(failed), "tails": tails,
    }  # fmt: skip


def show(report: dict[str, Any]) -> None:
    print(header())
    print(f"# seed {report['seed']}")
    print(f"{report['messages']} messages in {report['seconds']:.0f} s ({report['rate']:.0f}/s)")
    for what, number in sorted({**report["sent"], **report["asked"]}.items()):
        print(f"    {number:8d}  {what}")
    print(f"of these {report['unanswered']} had no answer and are not counted; what became of all, the most frequent:")
    for what, number in report["outcomes"].most_common(40):
        print(f"    {number:8d}  {what}")
    print(
        f"alive: {report['alive']}; rounds certified under fire: {report['rounds_under_fire']}; goes on: {report['goes_on']}"
    )
    print("process        resident MB min / median / max          grown since the warm-up, MB")
    for label, look in report["looks"].items():
        for name, values in look.resident.items():
            mb = [value / 2**20 for value in values]
            print(f"{label:10s} {name:7s} {spread(mb, '.1f'):36s} {report['growth'][label][name] / 2**20:8.1f}")
    print("loop: standstill of half a minute, ms; 99th percentile, ms; answer of the control socket, ms; unanswered")
    for label, look in report["looks"].items():
        calm_max, _ = report["calm"][label]
        print(
            f"{label:10s} {spread(look.lag_ms_max or [0.0], '.0f')} (calm {spread(calm_max or [0.0], '.0f')});"
            f" {spread(look.lag_ms_p99 or [0.0], '.0f')}; {spread(look.answer_ms or [0.0], '.0f')}; {look.unanswered}"
        )
    for label, events in report["events"].items():
        print(f"events of {label}: {events}")
    print(f"failures told: {report['num_failed']}")
    for record in report["failed"]:
        print(f"    {json.dumps(record)[:300]}")
    for label, lines in report["tails"].items():
        for line in lines:
            print(f"    {label}: {line[:300]}")
    print("well" if report["well"] else "NOT WELL")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=600.0, help="at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--strangers", type=int, default=4)
    parser.add_argument(
        "--pace", type=float, default=0.05, help="seconds a peer takes for a micro-batch; 0: as fast as it computes"
    )
    parser.add_argument("--calm", type=float, default=10.0, help="seconds of looking before the first message")
    arguments = parser.parse_args()
    report = asyncio.run(fuzz(arguments))
    show(report)
    sys.exit(0 if report["well"] else 1)


if __name__ == "__main__":
    main()
