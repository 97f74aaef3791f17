"""Tokens a second over links that homes have, beside what else one would train with over them.

    sudo python benchmarks/headline.py [--regimes 32 358] [--peers 2 4] [--who limit ddp powersgd diloco hivemind peers] [--rounds 8]
    sudo python benchmarks/headline.py --layouts sites homes         # two stages of two peers each
    sudo python benchmarks/headline.py --who limit peers             # all cases, of others what was measured before: 16 minutes

Real processes in network namespaces (testbed/natlab.py; needs root, iproute2 and nftables), every line shaped both ways. Compute is
emulated: a micro-batch sleeps and leaves a gradient of full size; all else is real (headline_worker.py says who is who). A regime is
named by 1 + rho: how much longer a step takes with an all-reduce of float32 than without; the lines are as fast as that takes for so
many peers. Lines are slow from the start for peers; the others warm up before, and only measured steps cross slow lines.

    limit       the peer's own training loop without a network: what the shares are of
    averaged    contributions that certificates count, of those that could have been in them (hivemind: by the groups that formed), of the
                stage where it is least
    effective H inner steps that peers made over contributions that count, beside the H that was planned
    plan told   what `dilocox-peer plan` reckons for as many such peers and lines, with the limit's tokens a second, beside what was
                measured, and a ! where it is more than 15 % off: tokens a second; an exchange; the memory of the peer that took most,
                all of its processes (peer, p2pd, linkd, helpers; peaks.py); seconds of a micro-batch at an origin, and of its way
                through two stages and back. Memory without what forwards keep for backwards, as emulated compute keeps nothing:
                predictions.py has whole peers that really compute
    B/token     bytes that left the interfaces, frames and all, over tokens trained

--dilation 2: emulated compute and lines both half as fast (1 + rho is the same), so that what all peers do on this machine's processors is
half as much of the time: each has a machine of its own in the world. Its results belong into another --into.

Layouts of two stages: `sites` has both stages of a replica at one place, and a line of 2.4 Mbit/s between the two places; `homes` has
each of the four peers behind its own line of 100 Mbit/s. Their limit is arithmetic: no peer ever waits. What is measured goes into
--into as headline.json, with what earlier runs measured of other cases, and from there into headline.md and headline.png.
Expected beforehand: peers at 0.95 of the limit or more with 0.95 of the contributions averaged and H within 10 %; 0.90 with two stages.
"""

import argparse
import asyncio
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from headline_table import (
    EXTREME,
    HEAD,
    LAYOUTS,
    OF_STAGES,
    REGIMES,
    TOKENS,
    WHO,
    Measured,
    Regime,
    limit_of,
    read_results,
    row,
    why_missed,
    write_results,
)
from headline_worker import Settings
from peaks import held, peaks_of, processor_of
from swarm import header
from testbed.home_swarm import BOOTSTRAP, HomeSwarm
from testbed.natlab import NatLab, missing

from dilocox_peer.model.memory import StageSize
from dilocox_peer.peer.planning.forecast import Peers, busiest_share, forecast

WORKER = str(Path(__file__).with_name("headline_worker.py"))
WARM_UP = 3  # rounds
LACKS = 77
ROUND_TRIP_S = 0.001  # of these lines: they have no delay of their own
START_S = 120.0
NEAR = 0.15  # what plan tells may be so far off


def settings_of(regime: Regime, peers: int, *, units: int, adapt: str = "off", stages: int = 1) -> Settings:
    accumulate = 8 if stages > 1 else 1
    return Settings(regime.batch_s, regime.inner_steps, regime.codec, adapt, peers, stages, accumulate, units)


def lab_of(hosts: list[str], *, boot: bool) -> NatLab:
    lab = NatLab()
    lab.__enter__()
    if boot:
        lab.public(BOOTSTRAP, 9)
    for number, host in enumerate(hosts):
        lab.public(host, 20 + number)
    lab.start()
    return lab


def shape(lab: NatLab, hosts: list[str], mbit: float) -> None:
    for host in hosts:
        lab.set_rate(host, up=mbit * 1e6, down=mbit * 1e6)


def sent_by(lab: NatLab, host: str) -> int:
    text = subprocess.run(
        lab.command(host, ["cat", "/proc/net/dev"]), capture_output=True, text=True, check=True
    ).stdout
    return int(next(line.split(":")[1].split() for line in text.splitlines() if "eth0:" in line)[8])


# ---- the others, and the limit --------------------------------------------------------------------------------------


async def run_others(role: str, settings: Settings, mbit: float, timeout_s: float) -> tuple[list[dict[str, Any]], str]:
    """Each one's RESULT, and what else the first one said."""
    hosts = [f"n{number}" for number in range(settings.peers)]
    lab = lab_of(hosts, boot=False)
    processes: list[asyncio.subprocess.Process] = []
    try:
        with tempfile.TemporaryDirectory(prefix="dilocox-headline-") as folder:
            for rank, host in enumerate(hosts):
                env = {
                    "RANK": rank, "WORLD_SIZE": settings.peers, "NODE_IP": f"31.0.0.{20 + rank}", "MASTER_ADDR": "31.0.0.20",
                    "MASTER_PORT": 29500, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": 1, "MEETING": folder,
                }  # fmt: skip
                command = lab.command(
                    host, [sys.executable, "-W", "ignore", WORKER, role, json.dumps(asdict(settings))]
                )
                processes.append(
                    await asyncio.create_subprocess_exec(
                        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
                        env={**os.environ, **{name: str(value) for name, value in env.items()}}, limit=1 << 20,
                    )
                )  # fmt: skip
            said: list[list[str]] = [[] for _ in hosts]
            async with asyncio.timeout(START_S):
                await asyncio.gather(*(_until("READY", *each) for each in zip(processes, said, strict=True)))
            if role != "loop":
                shape(lab, hosts, mbit)
            _go_on(processes)
            async with asyncio.timeout(timeout_s):
                found = await asyncio.gather(*(_until("RESULT ", *each) for each in zip(processes, said, strict=True)))
            _go_on(processes)
            await asyncio.sleep(0.5)
            return [json.loads(line[len("RESULT ") :]) for line in found], "; ".join(said[0][-3:])
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        lab.__exit__()


def _go_on(processes: list[asyncio.subprocess.Process]) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"\n")


async def _until(word: str, process: asyncio.subprocess.Process, said: list[str]) -> str:
    assert process.stdout is not None
    while raw := await process.stdout.readline():
        line = raw.decode(errors="replace").rstrip()
        if line.startswith(word):
            return line
        said.append(line)
    raise RuntimeError(f"a process ended before {word!r}:\n" + "\n".join(said[-20:]))


def units_of(who: str, regime: Regime, rounds: int) -> int:
    """Steps to measure, of who averages in rounds so many of these. An all-reduce takes most of a minute where 1 + rho is large."""
    match who:
        case "limit":
            return round(20 / regime.batch_s)
        case "ddp":
            return max(3, round(6 / regime.batch_s / regime.inner_steps))
        case "powersgd":
            return max(10, round(8 / regime.batch_s / 4))
        case _:
            return max(2, min(rounds, round(25 / regime.batch_s / regime.inner_steps)))


async def measure_others(name: str, who: str, peers: int, rounds: int) -> Measured:
    regime = REGIMES[name]
    mbit = regime.mbit_of(peers)
    settings = settings_of(regime, peers, units=units_of(who, regime, rounds))
    results, said = await run_others("loop" if who == "limit" else who, settings, mbit, 900.0)
    seconds = max(each["seconds"] for each in results)
    tokens = sum(each["steps"] for each in results) * TOKENS
    averaged = None
    if who == "hivemind":
        groups = json.loads(said.rpartition("groups of ")[2].partition("]")[0] + "]")
        averaged = sum(groups) / (peers * len(groups))
    sent = sum(each["sent"] for each in results) / tokens
    more = f"{settings.units} {'rounds' if who in ('diloco', 'hivemind') else 'steps'} each"
    return Measured(name, who, peers, mbit, tokens / seconds, sent, averaged, more=more)


# ---- peers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Of a peer: its machine, and its stage in a run of several."""

    name: str
    host: str
    stage: int | None = None


async def run_peers(
    case: str,
    regime: Regime,
    places: list[Place],
    mbit: float,
    *,
    rounds: int,
    adapt: str,
    log: Path | None,
    more: list[str],
) -> Measured:
    stages = 1 if places[0].stage is None else 2
    settings = settings_of(regime, len(places) // stages, units=0, adapt=adapt, stages=stages)
    hosts = list(dict.fromkeys(place.host for place in places))
    origins = [place.name for place in places if not place.stage]
    lab = lab_of(hosts, boot=True)
    try:
        shape(lab, hosts, mbit)
        async with HomeSwarm(lab, settings.manifest()) as swarm:
            await swarm.start_bootstrap(more=("--no-evaluate",))
            for place in places:
                program = [WORKER, "peer", json.dumps(asdict(settings)), str(swarm.folder / f"{place.name}.batches")]
                wish = [] if place.stage is None else ["--stage", str(place.stage)]
                await swarm.join(place.name, *wish, *more, at=place.host, program=program)

            def certified(name: str) -> list[dict[str, Any]]:
                return [record for _, record in swarm.rounds(name)]

            round_s = regime.inner_steps * regime.batch_s * settings.accumulate
            first = origins[0]
            patience_s = START_S + 4 * (WARM_UP + rounds) * round_s

            def ended() -> list[str]:
                return [
                    f"{place.name} ended: {' / '.join(list(swarm.child(place.name).tail)[-3:])}"
                    for place in places
                    if swarm.child(place.name).process.returncode is not None
                ]

            try:
                await swarm.until(lambda: len(certified(first)) >= WARM_UP or bool(ended()), patience_s)
                if ended() or len(certified(first)) < WARM_UP:
                    return Measured(case, "peers", settings.peers, mbit, 0.0, more="; ".join(ended()) or "no rounds")
                sent = [sent_by(lab, host) for host in hosts]
                pids = {BOOTSTRAP: swarm.child(BOOTSTRAP).process.pid}
                pids |= {place.name: swarm.child(place.name).process.pid for place in places}
                worked = {name: processor_of(pid) for name, pid in pids.items()}
                began = time.time()
                await swarm.until(lambda: len(certified(first)) >= WARM_UP + rounds, patience_s)
                closed = time.time()
                processor = {name: cores(worked[name], processor_of(pid), closed - began) for name, pid in pids.items()}
                memory = {place.name: peaks_of(swarm.child(place.name).process.pid) for place in places}
                sent_bytes = sum(sent_by(lab, host) for host in hosts) - sum(sent)
            finally:
                if log is not None:
                    write_log(swarm, log)
            ends = [
                moment
                for name in origins
                for (moment,) in struct.iter_unpack("d", (swarm.folder / f"{name}.batches").read_bytes())
            ]
            ways = [
                end - begin
                for name in origins
                if stages > 1
                for begin, end in struct.iter_unpack("dd", (swarm.folder / f"{name}.ways").read_bytes())
                if began <= end < closed
            ]
            seen = certified(first)[WARM_UP - 1 :]
            from_, to = seen[0]["time"], seen[-1]["time"]
            counted = [len(each["contributors"]) for each in seen[1:]]
            if not counted:
                return Measured(case, "peers", settings.peers, mbit, 0.0, more="no rounds")
            batches = sum(from_ <= moment < to for moment in ends)
            tokens = TOKENS * sum(began <= moment < closed for moment in ends)
            planned = sum(each["inner_steps"] for each in seen[1:]) / len(counted)
            most = max(memory, key=lambda name: held(memory[name]))
            numbers = {each["round"] for each in seen[1:]}
            delays: dict[int, list[float]] = {stage: [] for stage in range(stages)}
            of_stage = {
                place.stage or 0: [
                    len(each["contributors"]) for each in certified(place.name) if each["round"] in numbers
                ]
                for place in places
            }
            averaged = min(sum(each) / (settings.peers * max(len(each), 1)) for each in of_stage.values())
            for place in places:
                delays[place.stage or 0] += [
                    each["delay_s"]
                    for each in certified(place.name)
                    if each["round"] in numbers and each["delay_s"] is not None
                ]
            codecs = list(dict.fromkeys(f"{each['codec']}/H{each['inner_steps']}" for each in seen[1:]))
            missed = [record["missed"] for _, record in swarm.told[first].of("ContributionsMissed")]
            said = f"{', '.join(codecs)}; rounds of {' '.join(map(str, counted))}"
            if stages > 1:
                said += f"; stage 1: rounds of {' '.join(map(str, of_stage[1]))}"
                said += f"; exchanges by stage {' '.join(f'{median(each or [0.0]):.1f}' for each in delays.values())} s"
                if case == "sites":
                    said += f"; {crossed(swarm, places):.4f} of the micro-batches crossed"
            if missed:
                said += f"; went without {missed[-3:]}"
            said += f"; {most} held at most " + ", ".join(
                f"{name} {size / 1e6:.0f} MB" for name, size in memory[most].items()
            )
            said += f"; cores {most} {processor[most]}, bootstrap {processor[BOOTSTRAP]}"
            return Measured(
                case, "peers", settings.peers, mbit, TOKENS * batches / (to - from_), sent_bytes / max(tokens, 1),
                averaged, planned,
                batches / settings.accumulate / max(sum(counted), 1), said, exchange_s=max(median(each or [0.0]) for each in delays.values()),
                memory_bytes=held(memory[most]), micro_batch_s=len(origins) * (to - from_) / max(batches, 1),
                way_s=median(ways) if ways else None,
            )  # fmt: skip
    finally:
        lab.__exit__()


def cores(before: dict[str, float], after: dict[str, float], seconds: float) -> str:
    """What a peer's processes took of the processors meanwhile, in cores."""
    return " ".join(f"{name} {(now - before.get(name, 0.0)) / seconds:.3f}" for name, now in after.items())


def crossed(swarm: HomeSwarm, places: list[Place]) -> float:
    """Of what origins sent to the next stage, the share that went to another machine, from the first one on."""
    host_of = {swarm.told[place.name].peer: place.host for place in places}
    sent = [
        host_of.get(line) != place.host
        for place in places
        if not place.stage
        for line in (swarm.folder / f"{place.name}.routes").read_text().splitlines()
    ]
    return sum(sent) / max(len(sent), 1)


def write_log(swarm: HomeSwarm, path: Path) -> None:
    events = ((record["time"], label, record) for label, told in swarm.told.items() for _, record in told.events)
    lines = sorted(events, key=lambda each: each[0])
    with path.open("w") as file:
        for at, label, record in lines:
            file.write(f"{at - lines[0][0]:8.3f} {label:6} {record}\n")
        for label in swarm.told:
            for line in swarm.child(label).tail:
                file.write(f"{label}: {line}\n")


# ---- what `plan` tells ----------------------------------------------------------------------------------------------


def told_by_plan(each: Measured, limit: float) -> str:
    """Beside what was measured. limit: tokens a second of all peers, as in the table."""
    stages = 2 if each.case in LAYOUTS else 1
    regime = OF_STAGES if each.case in LAYOUTS else REGIMES[each.case]
    manifest = settings_of(regime, each.peers, units=0, stages=stages).manifest()
    # A stage sleeps for batch_s whatever its share; of the whole model a peer makes as much as its busiest stage's share allows.
    tokens_per_s = limit / each.peers * (busiest_share(manifest) if stages > 1 else 1.0)
    line = each.mbit * 1e6
    peers = Peers(stages * each.peers, line, line, ROUND_TRIP_S, tokens_per_s, by_site=each.case == "sites")
    told = forecast(manifest, peers)
    sizes = [StageSize.of(manifest, stage) for stage in range(stages)]
    memory = max(size.host_bytes() - size.activation_bytes(checkpointing=False) for size in sizes)
    compared = [
        ("tokens/s", told.tokens_per_s, each.tokens_per_s, ",.0f"),
        ("exchange s", told.exchange_s, each.exchange_s, ".1f"),
        ("memory MB", memory / 1e6, (each.memory_bytes or 0) / 1e6, ",.0f"),
        ("micro-batch s", told.micro_batch_s, each.micro_batch_s, ".4f"),
        ("way s", told.way_s, each.way_s, ".3f"),
    ]
    return "plan told " + "; ".join(
        f"{name} {plan:{form}}, was {was:{form}} ({plan / was - 1:+.1%}{'' if abs(plan / was - 1) <= NEAR else ' !'})"
        for name, plan, was, form in compared
        if was
    )


# ---- all of it ------------------------------------------------------------------------------------------------------


async def measure(args: argparse.Namespace, case: str, who: str, peers: int) -> Measured:
    if case in LAYOUTS:
        # In the order that pairs each origin with the stage at its own site only if the links are looked at.
        places = [
            Place(f"p{stage}{replica}", f"s{replica}" if case == "sites" else f"n{stage}{replica}", stage)
            for replica in range(2)
            for stage in range(2)
        ]
        return await run_peers(
            case, OF_STAGES, places, LAYOUTS[case], rounds=args.rounds, adapt="off", log=args.log, more=args.join
        )
    if who == "peers":
        regime = REGIMES[case]
        places = [Place(f"p{number}", f"n{number}") for number in range(peers)]
        return await run_peers(
            case,
            regime,
            places,
            regime.mbit_of(peers),
            rounds=args.rounds,
            adapt=args.adapt,
            log=args.log,
            more=args.join,
        )
    return await measure_others(case, who, peers, args.rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--regimes", nargs="*", choices=list(REGIMES), default=None)
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--who", nargs="+", choices=WHO, default=list(WHO))
    parser.add_argument("--layouts", nargs="*", choices=list(LAYOUTS), default=None)
    parser.add_argument("--rounds", type=int, default=8, help="to measure")
    parser.add_argument("--dilation", type=float, default=1.0, help="by which compute and lines of regimes are slower")
    parser.add_argument("--adapt", choices=("off", "link"), default="off", help="of the peers' plans")
    parser.add_argument("--join", nargs="*", default=[], help="more arguments of the peers")
    parser.add_argument("--log", type=Path, help="write every event of the last case of peers there")
    parser.add_argument("--into", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    if (lack := missing()) is not None:
        print(f"skipped: {lack}", file=sys.stderr)
        return LACKS
    print(header())
    REGIMES.update({name: regime.dilated(args.dilation) for name, regime in REGIMES.items()})
    everything = args.regimes is None and args.layouts is None
    cases = [
        (case, who, peers)
        for case in ([each for each in REGIMES if each not in EXTREME] if everything else args.regimes or [])
        for peers in args.peers
        for who in args.who
    ]
    cases += [(layout, "peers", 2) for layout in (list(LAYOUTS) if everything else args.layouts or [])]
    found = read_results(args.into / "headline.json")
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", flush=True)
    failed = False
    for case, who, peers in cases:
        measured = asyncio.run(measure(args, case, who, peers))
        who = "peers, adapting" if who == "peers" and args.adapt != "off" else who
        commit = header().splitlines()[0].rpartition(" ")[2]
        if args.dilation != 1.0:
            measured = replace(measured, more=f"{measured.more}; dilated {args.dilation:g} times")
        measured = replace(measured, who=who, at=f"commit {commit}, load {os.getloadavg()[0]:.1f}")
        if measured.exchange_s and measured.tokens_per_s and (limit := limit_of(found, measured)) is not None:
            measured = replace(measured, more=f"{measured.more}; {told_by_plan(measured, limit)}")
        found[f"{case} {peers} {who}"] = measured
        print(f"| {' | '.join(row(found, measured))} |", flush=True)
        for reason in why_missed(found, measured):
            failed = True
            print(f"MISSED: {reason}", flush=True)
        write_results(args.into, found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
