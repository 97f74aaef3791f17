"""What members that want rounds to stop cost the others: `PYTHONPATH=. python benchmarks/stalling.py [--peers 8] [--seconds 90] [--mode MODE] [--repeats 3] [--plan fixed] [--compute 0.05]`.

Real processes on loopback. One of four members, or two of eight, turns hostile after some rounds (tests/hostile); the honest
ones' rounds a minute, contributions a round and bytes a round are measured from five rounds later on, and compared
with a swarm of the same size, in the same run, in which nobody turns: `honest`. Only honest peers' contributions count.
`absent` is a swarm of the honest ones alone: a plan is made for so many contributors as there are, so with fewer of them its
rounds and codec are others, whatever became of the rest. CPU: of the honest peers for each micro-batch counted, all they do,
and processors that the hostile ones take: on one machine they take them from
the others, at home they do not: with --compute a micro-batch sleeps that long, and all of them have processors to spare.
"""

import argparse
import asyncio
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from swarm import WatchedSwarm, header, of_equal_rounds, spread

from dilocox_peer.config import preset
from dilocox_peer.manifest import Manifest
from tests.hostile.machines import MODES

TURN_AFTER = 30  # rounds, where nothing else is said: the plan has settled
SETTLED_ROUNDS = 5
PATIENCE_S = 300.0
ABSENT = "absent"
ATTACKS = (
    "offers nothing",
    "hangs",
    "silent",
    "plans astray",
    "claims",
    "outbids",
    "leads nothing",
    "omits",
    "equivocates",
)


@dataclass
class Measured:
    """Of honest peers, from SETTLED_ROUNDS after the turning on. named: peers doubted, by how many of the honest ones."""

    seconds: float
    rounds: int
    contributions: list[int] = field(default_factory=list)
    micro_batches: list[int] = field(default_factory=list)
    inner_steps: list[int] = field(default_factory=list)
    delays_s: list[float] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)  # why a plan changed
    bytes_a_round: list[float] = field(default_factory=list)
    named: dict[str, int] = field(default_factory=dict)
    wrongly_named: dict[str, int] = field(default_factory=dict)
    doubts_of_honest: list[str] = field(default_factory=list)  # who, why, and after which round
    cpu_s: float = 0.0  # of all honest peers
    hostile_cpu_s: float = 0.0

    @property
    def cpu_ms_a_micro_batch(self) -> float:
        """Of the honest peers' processors, all they do, for each micro-batch that was counted."""
        return 1000 * self.cpu_s / max(1, sum(self.micro_batches))

    @property
    def rounds_a_minute(self) -> float:
        return 60 * self.rounds / self.seconds

    @property
    def steps_a_minute(self) -> float:
        """Inner steps that certified rounds were planned with."""
        return 60 * sum(self.inner_steps) / self.seconds


def manifest_of(plan: str, *, start_peers: int) -> Manifest:
    """plan: "adapts", as a run does by default, or "fixed"."""
    if plan == "fixed":
        return of_equal_rounds(start_peers)
    rounds = {"total": 100_000, "inner_steps": 32, "start_peers": start_peers}
    return preset("tiny", rounds=rounds, limits={"max_peers": 16})


async def measure(
    mode: str,
    *,
    num_peers: int,
    num_hostile: int,
    seconds: float,
    plan: str,
    turn_after: int,
    compute_s: float,
) -> Measured:
    """One swarm, from its start to its end."""
    honest = [f"honest{index}" for index in range(num_peers - num_hostile)]
    hostile = [] if mode == ABSENT else [f"hostile{index}" for index in range(num_hostile)]
    async with WatchedSwarm(manifest_of(plan, start_peers=len(honest) + len(hostile))) as swarm:
        await swarm.start_bootstrap()
        started = await asyncio.gather(
            *(swarm.start_peer(label, program=program_of("honest", turn_after, compute_s)) for label in honest),
            *(swarm.start_peer(label, program=program_of(mode, turn_after, compute_s)) for label in hostile),
        )

        def highest() -> int:
            return max((each["round"] for label in honest for each in swarm.of(label, "RoundCertified")), default=0)

        await swarm.until(lambda: highest() >= turn_after + SETTLED_ROUNDS, started, PATIENCE_S)
        first = highest()
        loop = asyncio.get_running_loop()
        began = loop.time()
        pids = [child.process.pid for child in started]
        before = [cpu_s(pid) for pid in pids]
        while (left := began + seconds - loop.time()) > 0:
            await swarm.next_change(min(left, 1.0))
        took = loop.time() - began
        spent = [cpu_s(pid) - earlier for pid, earlier in zip(pids, before, strict=True)]
        names = {swarm.of(label, "PeerStarted")[0]["peer"] for label in honest}
        measured = Measured(took, highest() - first)
        measured.cpu_s, measured.hostile_cpu_s = sum(spent[: len(honest)]), sum(spent[len(honest) :])
        doubts: dict[str, set[str]] = {}
        seen: set[int] = set()
        for label in honest:
            for each in swarm.of(label, "RoundCertified"):
                if each["round"] > first:
                    measured.bytes_a_round.append(each["bytes_sent"])
                    if each["delay_s"] is not None:
                        measured.delays_s.append(each["delay_s"])
                if each["round"] > first and each["round"] not in seen:
                    seen.add(each["round"])
                    measured.contributions.append(len(names & set(each["contributors"])))
                    measured.micro_batches.append(each["micro_batches"])
                    measured.inner_steps.append(each["inner_steps"])
            at_round = 0
            for each in swarm.events[label]:
                if each["event"] == "RoundCertified":
                    at_round = each["round"]
                elif each["event"] in ("MemberDoubted", "EquivocationProved"):
                    doubts.setdefault(each["peer"], set()).add(label)
                    if mode == "honest" or each["peer"] in names:
                        measured.doubts_of_honest.append(
                            f"...{each['peer'][-4:]} {each['reason']}, after round {at_round}"
                        )
        measured.reasons = [
            f"round {each['round']}: H {each['inner_steps']} {each['codec']} ({each['reason']})"
            for each in swarm.of(honest[0], "PlanChanged")
        ]
        for peer, labels in doubts.items():
            is_honest = mode == "honest" or peer in names
            (measured.wrongly_named if is_honest else measured.named)[peer] = len(labels)
        return measured


def program_of(mode: str, turn_after: int, compute_s: float) -> tuple[str, ...]:
    """What Python runs. compute_s: that a micro-batch sleeps, 0: it is computed."""
    if compute_s > 0:
        return (str(Path(__file__).with_name("emulated_member.py")), str(compute_s), mode, str(turn_after))
    return ("-m", "dilocox_peer") if mode == "honest" else ("-m", "tests.hostile.member", mode, str(turn_after))


def cpu_s(pid: int) -> float:
    """Processor seconds of a peer's process and those it has started."""
    process = psutil.Process(pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def row(mode: str, measured: Measured, undisturbed: Measured) -> str:
    def of(mine: Sequence[float], theirs: Sequence[float]) -> str:
        return f"{statistics.mean(mine) / max(statistics.mean(theirs), 1e-9):.2f}" if mine and theirs else "-"

    rate = measured.rounds_a_minute / undisturbed.rounds_a_minute
    steps = measured.steps_a_minute / undisturbed.steps_a_minute
    return (
        f"{mode:15} {measured.rounds_a_minute:5.1f} ({rate:.2f}) {measured.steps_a_minute:6.0f} ({steps:.2f})   {spread(measured.inner_steps or [0], '.0f'):14} "
        f"{spread(measured.delays_s or [0], '.2f'):18} {spread(measured.contributions or [0], '.0f'):9} "
        f"({of(measured.contributions, undisturbed.contributions)})  {spread([each / 1000 for each in measured.bytes_a_round] or [0], '.0f'):15} "
        f"({of(measured.bytes_a_round, undisturbed.bytes_a_round)})  {spread(measured.micro_batches or [0], '.0f'):15} "
        f"{measured.cpu_ms_a_micro_batch:4.0f} ({measured.cpu_ms_a_micro_batch / undisturbed.cpu_ms_a_micro_batch:.2f}) {measured.hostile_cpu_s / measured.seconds:5.2f}   "
        f"{len(measured.named)} by {max(measured.named.values(), default=0)}; wrongly {len(measured.wrongly_named)}"
    )


def show(mode: str, measured: Measured, undisturbed: Measured, has_reasons: bool) -> None:
    print(row(mode, measured, undisturbed), flush=True)
    for doubt, count in Counter(measured.doubts_of_honest).most_common():
        print(f"    wrongly doubted by {count}: {doubt}")
    for reason in measured.reasons if has_reasons else ():
        print(f"    {reason}")


async def run(arguments: argparse.Namespace) -> None:
    num_hostile = arguments.peers // 4
    print(header())
    print(
        f"# {num_hostile} of {arguments.peers} hostile from round {arguments.turn_after}; {arguments.seconds:.0f} s measured, of honest peers"
    )
    print(
        "mode            rounds/min   steps/min       H              delay, s           contributions    kB a round"
        "              micro-batches   CPU ms each, hostile  named"
    )
    options: dict[str, Any] = {
        "num_peers": arguments.peers,
        "num_hostile": num_hostile,
        "seconds": arguments.seconds,
        "plan": arguments.plan,
        "turn_after": arguments.turn_after,
        "compute_s": arguments.compute,
    }
    rates: dict[str, list[tuple[float, float]]] = {}
    for _ in range(arguments.repeats):
        undisturbed = await measure("honest", **options)
        show("honest", undisturbed, undisturbed, arguments.reasons)
        for mode in arguments.mode or (ABSENT, *ATTACKS):
            measured = await measure(mode, **options)
            show(mode, measured, undisturbed, arguments.reasons)
            rates.setdefault(mode, []).append(
                (
                    measured.rounds_a_minute / undisturbed.rounds_a_minute,
                    measured.steps_a_minute / undisturbed.steps_a_minute,
                )
            )
    for mode, pairs in rates.items():
        rounds, steps = zip(*pairs, strict=True)
        print(
            f"{mode:15} of undisturbed: rounds {spread(rounds, '.2f')}, inner steps {spread(steps, '.2f')}", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--turn-after", type=int, default=TURN_AFTER, help="rounds")
    parser.add_argument(
        "--compute", type=float, default=0.0, help="seconds that a micro-batch sleeps; 0: it is computed"
    )
    parser.add_argument("--plan", choices=("adapts", "fixed"), default="adapts")
    parser.add_argument("--reasons", action="store_true", help="print why plans changed")
    parser.add_argument("--mode", action="append", choices=(ABSENT, *MODES))
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
