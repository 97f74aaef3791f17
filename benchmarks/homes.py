"""Volunteers at home: peers behind NAT routers of several kinds, a public bootstrap, no flags but the link.

    python benchmarks/homes.py a          three homes (restricted, restricted, symmetric), one stage
    python benchmarks/homes.py b4         two stages of two peers, all four at home; b0, b1, b2: so many of them, the others public
    python benchmarks/homes.py c          a carrier's NAT, a network that lets out port 443 alone, a restricted home
    python benchmarks/homes.py d          as a; then the bootstrap with its relay is killed and started again
    python benchmarks/homes.py m          as a, and a public member; then the bootstrap is killed for good: the member passes on
    python benchmarks/homes.py o          as a, and no relay: nobody passes anybody on (--relay off)
    python benchmarks/homes.py g          a public member and two symmetric homes, and no relay: the homes have no path to one another
    python benchmarks/homes.py n          as a; then a home's line gets another address
    python benchmarks/homes.py z          as a; then a home sleeps, for --sleep seconds, and wakes in another network
    python benchmarks/homes.py 6          a restricted home whose line carries packets of 1,280 bytes, a symmetric one, and one with IPv6 alone
    python benchmarks/homes.py u          two stages of two peers; two homes whose routers open ports (UPnP, NAT-PMP: needs miniupnpd), two that do not
    python benchmarks/homes.py f          two stages of two peers; four homes whose routers lead one port to p2pd, and none to linkd
    python benchmarks/homes.py i          as a, with routers that forget a flow after 20 s without a packet

Real processes in network namespaces (testbed/natlab.py): needs root, iproute2 and nftables.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from swarm import header
from testbed.home_swarm import BOOTSTRAP, HomeSwarm
from testbed.natlab import IGD, NatLab, Opens, Router, missing

from dilocox_peer.config import preset
from dilocox_peer.manifest import Manifest

HOMES_MEET_S = 90.0
WATCH_S = 30.0  # after they have met
RELAY_AWAY_S = 3.0  # and as long as it takes to start, some 7 s
STEADY_S = 10.0  # between their meeting and a disturbance
APART_S = 60.0  # of o, that homes which cannot meet are watched for
SLEEP_S = 90.0
FORWARDED = 4712
LACKS = 77  # exit code where the machine cannot play it


@dataclass
class Outcome:
    """What came of a scenario. met_s: from the last join's start to the first round with a contribution of everybody, as the
    slowest of them heard of it; None: there was none. chains: digests of the last common round. counts: round -> contributors."""

    names: list[str]
    num_stages: int = 1
    met_s: float | None = None
    heads: dict[str, str] = field(default_factory=dict)
    counts: dict[str, dict[int, int]] = field(default_factory=dict)
    paths: dict[str, dict[str, str]] = field(default_factory=dict)
    reach: dict[str, str] = field(default_factory=dict)  # what each says of others that dial it
    stages: dict[str, int] = field(default_factory=dict)
    links: dict[str, list[str]] = field(default_factory=dict)  # of several stages: whom it is linked with
    tokens_per_s: float = 0.0  # of all origins, while it was watched
    again_s: float | None = None  # from the relay's return, or the disturbance, to the next round with everybody
    round_then: int = 0  # the last that may have been under way at a disturbance
    reserved_s: float | None = None  # of d: from there until the slowest home had a place at the relay
    away_s: float | None = None  # of d: from the relay's end to the last reservation
    opened: dict[str, list[int]] = field(default_factory=dict)  # ports that routers opened for linkd
    dialled: dict[str, int] = field(default_factory=dict)  # connections that are open to these ports
    num_lost: int = 0  # rounds that a home had certified and the chain does without

    @property
    def num_chains(self) -> int:
        """Of all stages together: as many as there are stages, if all is well."""
        return len({(self.stages.get(name), head) for name, head in self.heads.items()})

    @property
    def peers_per_stage(self) -> int:
        return len(self.names) // self.num_stages


def manifest(outcome: Outcome) -> Manifest:
    """Rounds of a second or two, without end."""
    rounds = {"total": 100_000, "start_peers": outcome.peers_per_stage}
    return preset("tiny", rounds=rounds, stages={"count": outcome.num_stages})


def homes(lab: NatLab, scenario: str) -> list[str]:
    lab.public(BOOTSTRAP, 9, ipv6=scenario == "6")
    if scenario.startswith("b"):
        kinds = [Router.RESTRICTED, Router.SYMMETRIC, Router.RESTRICTED, Router.RESTRICTED]
        num_homes = int(scenario[1:])
        for number in range(4 - num_homes):
            lab.public(f"p{number}", 20 + number)
        for number in range(num_homes):
            lab.home(f"h{number}", 1 + number, kinds[number])
        return [*(f"p{number}" for number in range(4 - num_homes)), *(f"h{number}" for number in range(num_homes))]
    idle_s = 20 if scenario == "i" else None
    if scenario == "6":
        lab.home("a", 1, Router.RESTRICTED)
        lab.set_mtu("a", 1280)
        lab.home("s", 5, Router.SYMMETRIC)
        lab.home("v", 6, ipv4=False, ipv6=True)
        return ["a", "s", "v"]
    if scenario == "f":
        for number in range(4):
            lab.home(f"h{number}", 1 + number, forwards=FORWARDED)
        return ["h0", "h1", "h2", "h3"]
    if scenario == "u":
        lab.home("h0", 1, opens=Opens.UPNP)
        lab.home("h1", 2, Router.SYMMETRIC)
        lab.home("h2", 3, opens=Opens.NAT_PMP)
        lab.home("h3", 4, Router.SYMMETRIC)
        return ["h0", "h1", "h2", "h3"]
    if scenario == "g":
        lab.public("p", 20)
        lab.home("s", 5, Router.SYMMETRIC)
        lab.home("t", 6, Router.SYMMETRIC)
        return ["p", "s", "t"]
    lab.home("a", 1, Router.RESTRICTED, idle_s=idle_s)
    if scenario == "c":
        lab.carrier("isp", 50)
        lab.home("c", 3, behind="isp")
        lab.home("e", 4, only_port=443)
        return ["a", "c", "e"]
    lab.home("b", 2, Router.RESTRICTED, idle_s=idle_s)
    lab.home("s", 5, Router.SYMMETRIC, idle_s=idle_s)
    if scenario == "m":
        lab.public("p", 20)
        return ["p", "a", "b", "s"]
    return ["a", "b", "s"]


async def play(
    scenario: str,
    *,
    log: Path | None = None,
    watch_s: float = WATCH_S,
    line: float | None = None,
    sleep_s: float = SLEEP_S,
    delay_ms: float = 0.0,
) -> Outcome:
    """The scenario, from the first process to the last."""
    with NatLab(delay_ms=delay_ms) as lab:
        names = homes(lab, scenario)
        lab.start()
        if line is not None:
            for name in names:
                lab.set_rate(name, up=line, down=line)
        outcome = Outcome(names, num_stages=2 if scenario[0] in "bfu" else 1)
        async with HomeSwarm(lab, manifest(outcome)) as swarm:
            ports = (4711, 443) if scenario == "c" else (4711,)
            await swarm.start_bootstrap(
                ports=ports,
                more=("--relay", "off") if scenario in ("g", "o") else (),
                host_6="2a01:100::9" if scenario == "6" else None,
            )
            for name in names:
                joined_at = time.monotonic()
                await swarm.join(name, *_flags(scenario, name))
            meet_s = APART_S if scenario == "o" else HOMES_MEET_S
            if await swarm.until(lambda: _all_in_one(swarm, outcome, 0.0) is not None, meet_s):
                met_at = _all_in_one(swarm, outcome, 0.0)
                assert met_at is not None
                outcome.met_s = met_at - joined_at
            watched_from = time.monotonic()
            if scenario == "d":
                await _restart_bootstrap(swarm, outcome)
            elif scenario in ("m", "n", "z"):
                await swarm.until(lambda: False, STEADY_S)
                await _disturb(lab, swarm, outcome, scenario, sleep_s)
            await swarm.until(lambda: False, watch_s)
            _look(swarm, outcome, watched_from)
            if log is not None:
                _write_log(swarm, log)
    return outcome


def _flags(scenario: str, name: str) -> tuple[str, ...]:
    """What its owner passes beside the link: of a router that leads a port to p2pd, or who wants to be no relay."""
    if scenario != "f":
        return ("--relay", "off") if scenario == "g" else ()
    there = f"/ip4/31.0.{1 + int(name[1:])}.1/tcp/{FORWARDED}"
    return ("--host-maddrs", f"/ip4/0.0.0.0/tcp/{FORWARDED}", "--announce-maddrs", there)


async def _restart_bootstrap(swarm: HomeSwarm, outcome: Outcome) -> None:
    bootstrap = swarm.child(BOOTSTRAP).process
    bootstrap.kill()
    await bootstrap.wait()
    killed_at = time.monotonic()
    await asyncio.sleep(RELAY_AWAY_S)
    await swarm.start_bootstrap()
    back_at = time.monotonic()
    if await swarm.until(lambda: _all_in_one(swarm, outcome, back_at) is not None, HOMES_MEET_S):
        again_at = _all_in_one(swarm, outcome, back_at)
        assert again_at is not None
        outcome.again_s = again_at - back_at
    told = [swarm.told[name].of("ReachChanged")[-1] for name in outcome.names]
    if all(record["reach"] == "relayed" and at_s > killed_at for at_s, record in told):
        outcome.reserved_s = max(at_s for at_s, _ in told) - back_at
        outcome.away_s = outcome.reserved_s + back_at - killed_at
    for name in outcome.names:
        kept = swarm.told[name].of("BranchKept")
        outcome.num_lost += sum(record["last_round"] - record["first_round"] + 1 for _, record in kept)


async def _disturb(lab: NatLab, swarm: HomeSwarm, outcome: Outcome, scenario: str, sleep_s: float) -> None:
    """m: the bootstrap is killed; n: the line of home a gets another address; z: it sleeps. How soon all contribute again."""
    match scenario:
        case "m":
            swarm.child(BOOTSTRAP).process.kill()
        case "n":
            lab.renumber("a", 77)
        case _:
            pids = lab.pids("a")
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            lab.cut("a")
            await swarm.until(lambda: False, sleep_s)
            lab.rehouse("a", 3)
            lab.renumber("a", 77)
            lab.plug_in("a")
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
    at = time.monotonic()
    known = max(record["round"] for name in outcome.names for _, record in swarm.rounds(name))
    outcome.round_then = known + 1  # under way: what was offered before may still be in it

    def again() -> float | None:
        return _all_in_one(swarm, outcome, at, after_round=known + 1)

    if await swarm.until(lambda: again() is not None, HOMES_MEET_S):
        outcome.again_s = (again() or at) - at
    for name in outcome.names:
        kept = swarm.told[name].of("BranchKept")
        outcome.num_lost += sum(record["last_round"] - record["first_round"] + 1 for _, record in kept)


def _all_in_one(swarm: HomeSwarm, outcome: Outcome, since: float, *, after_round: int = -1) -> float | None:
    """When the slowest of them had heard, after since, of a round, one after after_round, to which all of its stage contributed."""
    at = []
    for name in outcome.names:
        full = [
            at_s
            for at_s, record in swarm.rounds(name)
            if at_s > since and record["round"] > after_round and len(record["contributors"]) == outcome.peers_per_stage
        ]
        if not full:
            return None
        at.append(full[0])
    return max(at)


def _look(swarm: HomeSwarm, outcome: Outcome, since: float) -> None:
    named = swarm.names()
    by_round = {name: {record["round"]: record["head"] for _, record in swarm.rounds(name)} for name in outcome.names}
    for name in outcome.names:
        started = swarm.told[name].of("PeerStarted")  # again at another stage, where one was short of peers
        outcome.stages[name] = started[-1][1]["stage"] if started else -1
    for name in outcome.names:
        told = swarm.told[name].of("ReachChanged")
        outcome.reach[name] = told[-1][1]["reach"] if told else "unknown"
        of_stage = [other for other in outcome.names if outcome.stages[other] == outcome.stages[name]]
        common = set.intersection(*(set(by_round[other]) for other in of_stage))
        last = max(common, default=max(by_round[name], default=0))
        outcome.heads[name] = f"{last}:{by_round[name].get(last, 'none')[:12]}"
        outcome.counts[name] = dict(
            Counter(len(record["contributors"]) for at_s, record in swarm.rounds(name) if at_s > since)
        )
        links: dict[str, bool] = {}
        for _, record in swarm.told[name].events:
            if record["event"] in ("NeighbourLinked", "NeighbourUnlinked"):
                links[named.get(record["peer"], "?")] = record["event"] == "NeighbourLinked"
        outcome.links[name] = sorted(other for other, is_up in links.items() if is_up)
        progress = [record for at_s, record in swarm.told[name].of("TrainingProgress") if at_s > since]
        if progress and outcome.stages[name] == 0:
            outcome.tokens_per_s += median(record["tokens_per_s"] for record in progress)
        outcome.opened[name] = [record["port"] for _, record in swarm.told[name].of("PortOpened")]
        if outcome.opened[name]:
            outcome.dialled[name] = swarm.lab.connections(name, outcome.opened[name][-1])
        seen = swarm.told[name].of("SwarmSeen")
        if seen:
            outcome.paths[name] = {named.get(peer["peer"], "?"): peer["reachability"] for peer in seen[-1][1]["peers"]}


def _write_log(swarm: HomeSwarm, path: Path) -> None:
    lines = sorted((at_s, label, record) for label, told in swarm.told.items() for at_s, record in told.events)
    began = lines[0][0] if lines else 0.0
    with path.open("w") as file:
        for at_s, label, record in lines:
            file.write(f"{at_s - began:8.3f} {label:5} {record}\n")
        for label in [*swarm.told]:
            for line in swarm.child(label).tail:
                file.write(f"{label}: {line}\n")


def show(scenario: str, outcome: Outcome) -> None:
    print(f"scenario {scenario}: {', '.join(outcome.names)}")
    met = "never" if outcome.met_s is None else f"{outcome.met_s:.1f} s after the last join"
    print(f"  a round with everybody: {met}")
    print(f"  chains: {outcome.num_chains} ({', '.join(f'{name} {head}' for name, head in outcome.heads.items())})")
    print(f"  {outcome.tokens_per_s:,.0f} tokens/s")
    for name, counts in outcome.counts.items():
        rounds = ", ".join(f"{times} rounds of {count}" for count, times in sorted(counts.items(), reverse=True))
        paths = ", ".join(f"{other} {how}" for other, how in sorted(outcome.paths.get(name, {}).items()))
        links = f"; linked with {', '.join(outcome.links[name]) or 'nobody'}" if outcome.num_stages > 1 else ""
        stage = f" (stage {outcome.stages[name]})" if outcome.num_stages > 1 else ""
        print(f"  {name}{stage}: {rounds or 'no round'}; sees {paths or 'nobody'}{links}")
    for name, ports in outcome.opened.items():
        if ports:
            print(f"  {name}: the router has opened {ports}, {outcome.dialled[name]} connections come in there")
    if scenario in ("m", "n", "z"):
        again = "never" if outcome.again_s is None else f"{outcome.again_s:.1f} s"
        print(f"  from then to a round with everybody: {again}; rounds lost: {outcome.num_lost}")
    if scenario == "d":
        again = "never" if outcome.again_s is None else f"{outcome.again_s:.1f} s"
        reserved = "never" if outcome.reserved_s is None else f"{outcome.reserved_s:.1f} s"
        print(f"  the relay's return to the last reservation: {reserved}, to a round with everybody: {again}")
        away = "never" if outcome.away_s is None else f"{outcome.away_s:.1f} s"
        print(f"  rounds lost: {outcome.num_lost}, with nobody connected for {away}")


def main() -> int:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument(
        "scenario", choices=("6", "a", "b0", "b1", "b2", "b4", "c", "d", "f", "g", "i", "m", "n", "o", "u", "z")
    )
    cli.add_argument("--log", type=Path, help="write every event of every process there")
    cli.add_argument("--json", action="store_true", help="the same once more, as the last line")
    cli.add_argument("--line", type=float, help="Mbit/s of everybody's line but the bootstrap's, each way")
    cli.add_argument("--watch", type=float, default=WATCH_S, help="seconds, after they have met")
    cli.add_argument("--sleep", type=float, default=SLEEP_S, help="seconds, of z")
    cli.add_argument("--delay", type=float, default=0.0, help="ms, one way, of each of a packet's two links")
    args = cli.parse_args()
    if (lack := missing()) is not None:
        print(f"skipped: {lack}", file=sys.stderr)
        return LACKS
    if args.scenario == "u" and shutil.which(IGD) is None:
        print(f"skipped: needs {IGD} (Debian: miniupnpd-nftables)", file=sys.stderr)
        return LACKS
    print(header())
    line = args.line and args.line * 1e6
    outcome = asyncio.run(
        play(args.scenario, log=args.log, watch_s=args.watch, line=line, sleep_s=args.sleep, delay_ms=args.delay)
    )
    show(args.scenario, outcome)
    if args.json:
        print(json.dumps(asdict(outcome)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
