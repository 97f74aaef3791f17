"""What routers cost a pipeline: two stages of two peers over lines of 20 Mbit/s, with none, one, two and all four of them undialable.

    python benchmarks/undialable.py                        all on one host, 0, 1, 2 and 4 homes whose routers keep ports, and 4 whose linkd all reach
                                                           through p2pd's own connections, as through a hole; three times in turn
    python benchmarks/undialable.py --compute 0.1 --accumulate 8 --warm 20      micro-batches that are slept through, eight a step: neither the processors,
                                                           which all share here, nor the way there and back limit anybody
    python benchmarks/undialable.py --relay 1 --turns 1    beside these: all four behind symmetric routers, a relay of 1 Mbit/s alone between them

Real processes in network namespaces (testbed/natlab.py): needs root, iproute2 and nftables. tokens/s are those of all micro-batches that were
done while it was watched; CPU: processor time of the peers, their p2pd and linkd, for a thousand tokens; by the relay: bytes that left the
bootstrap's host for each token, of which a relayed one has all its activations and gradients, and a direct one none. The relay's budget
allows as many tokens as it has bytes for, at those of a micro-batch's two bodies; contributions, frames and encryption are on top.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from swarm import header, spread
from testbed.home_swarm import BOOTSTRAP, HomeSwarm
from testbed.natlab import NatLab, Router, missing

from dilocox_peer.config import preset
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.activations import BodyFormat

MEET_S = 150.0
LACKS = 77
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
ONE_HOST = "one host"
FORWARDED = 4712
EMULATED = str(Path(__file__).with_name("emulated_member.py"))


@dataclass
class Case:
    """homes: of the four; the others are public. is_one_host: all at the bootstrap's, over loopback. is_forwarded: routers lead one port to
    p2pd, and none to linkd."""

    name: str
    homes: int = 0
    router: Router = Router.RESTRICTED
    relay: float | None = None  # Mbit/s of the bootstrap's
    is_one_host: bool = False
    is_forwarded: bool = False


@dataclass
class Seen:
    """Of one turn of a case. paths: how often a peer sees another of its stage so. cpu_s: a thousand tokens."""

    tokens_per_s: float
    rounds: int
    full_rounds: int  # with both contributions
    relayed_bytes: float  # a token
    cpu_s: float
    links: int  # of the four there should be, that are up in the end
    paths: dict[str, int] = field(default_factory=dict)


def manifest(accumulate: int = 0) -> Manifest:
    """accumulate: micro-batches a step, 0: the preset's; then a step's are under way together, and the next one's behind them."""
    inner, stages = ({"accumulate": accumulate}, {"schedule": "carry"}) if accumulate else ({}, {})
    rounds = {"total": 100_000, "start_peers": 2}
    return preset("tiny", rounds=rounds, inner=inner, stages={"count": 2, **stages})


def allowed(mbit_s: float) -> float:
    """tokens/s."""
    form = BodyFormat.of(manifest())
    return mbit_s * 1e6 / 8 * form.rows / (form.step_bytes + form.hidden_bytes)


def cpu_s(pids: Sequence[int]) -> float:
    total = 0
    for pid in pids:
        with suppress(OSError):  # it has ended
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / TICKS_PER_S


async def play(
    case: Case,
    *,
    line: float,
    warm_s: float,
    seconds: float,
    delay_ms: float,
    compute_s: float,
    accumulate: int,
    log: Path | None,
) -> Seen:
    with NatLab(delay_ms=delay_ms) as lab:
        lab.public(BOOTSTRAP, 9)
        names = [f"h{number}" for number in range(4)]
        if not case.is_one_host:
            for number, name in enumerate(names):
                if number < 4 - case.homes:
                    lab.public(name, 20 + number)
                else:
                    lab.home(name, 1 + number, case.router, forwards=FORWARDED if case.is_forwarded else None)
        lab.start()
        if not case.is_one_host:
            for name in names:
                lab.set_rate(name, up=line, down=line)
        hosts = [BOOTSTRAP] if case.is_one_host else names
        async with HomeSwarm(lab, manifest(accumulate)) as swarm:
            more = () if case.relay is None else ("--relay", f"{case.relay:g}")
            await swarm.start_bootstrap(more=("--no-keep", *more))
            program = ["-m", "dilocox_peer"] if not compute_s else [EMULATED, str(compute_s), "honest", "1000000"]
            apart = list(lab.pids(BOOTSTRAP)) if case.is_one_host else []
            for number, name in enumerate(names):
                stage: tuple[str, ...] = ("--stage", str(number % 2))
                if case.is_forwarded:
                    there = f"/ip4/31.0.{1 + number}.1/tcp/{FORWARDED}"
                    stage += ("--host-maddrs", f"/ip4/0.0.0.0/tcp/{FORWARDED}", "--announce-maddrs", there)
                await swarm.join(name, *stage, at=BOOTSTRAP if case.is_one_host else None, program=program)

            def has_begun() -> bool:
                return all(any(len(each["contributors"]) == 2 for _, each in swarm.rounds(name)) for name in names)

            if not await swarm.until(has_begun, MEET_S):
                raise SystemExit(f"{case.name}: they did not meet")
            await asyncio.sleep(warm_s)
            pids = [pid for host in hosts for pid in lab.pids(host) if pid not in apart]
            began, cpu, sent = time.monotonic(), cpu_s(pids), lab.bytes_sent(BOOTSTRAP)
            done = _done(swarm, names)
            await asyncio.sleep(seconds)
            tokens = _done(swarm, names) - done
            took = time.monotonic() - began
            rounds = [each for name in names for at_s, each in swarm.rounds(name) if at_s >= began]
            seen = Seen(
                tokens_per_s=tokens / took,
                rounds=len(rounds),
                full_rounds=sum(len(each["contributors"]) == 2 for each in rounds),
                relayed_bytes=(lab.bytes_sent(BOOTSTRAP) - sent) / max(1, tokens),
                cpu_s=1000 * (cpu_s(pids) - cpu) / max(1, tokens),
                links=_links(swarm, names),
            )
            stage_of = {swarm.told[name].peer: number % 2 for number, name in enumerate(names)}
            for number, name in enumerate(names):
                for each in swarm.told[name].of("SwarmSeen")[-1][1]["peers"]:
                    peer, how = each["peer"], each["reachability"]
                    if peer != swarm.told[name].peer and stage_of.get(peer) == number % 2:
                        seen.paths[how] = seen.paths.get(how, 0) + 1
            if log is not None:
                _write_log(swarm, log)
            return seen


def _done(swarm: HomeSwarm, names: Sequence[str]) -> int:
    """Tokens of all micro-batches so far, at their origins."""
    last = [swarm.told[name].of("TrainingProgress")[-1:] for name in names[::2]]
    return sum(each[0][1]["tokens"] for each in last if each)


def _links(swarm: HomeSwarm, names: Sequence[str]) -> int:
    up = 0
    for name in names[::2]:
        is_up: dict[str, bool] = {}
        for _, record in swarm.told[name].events:
            if record["event"] in ("NeighbourLinked", "NeighbourUnlinked"):
                is_up[record["peer"]] = record["event"] == "NeighbourLinked"
        up += sum(is_up.values())
    return up


def _write_log(swarm: HomeSwarm, path: Path) -> None:
    lines = sorted((at_s, label, record) for label, told in swarm.told.items() for at_s, record in told.events)
    with path.open("w") as file:
        for at_s, label, record in lines:
            file.write(f"{at_s - lines[0][0]:8.3f} {label:5} {record}\n")
        for label in [*swarm.told]:
            for line in swarm.child(label).tail:
                file.write(f"{label}: {line}\n")


def row(name: str, turns: Sequence[Seen], first: float | None) -> str:
    speeds = [each.tokens_per_s for each in turns]
    share = f" ({spread([speed / first for speed in speeds], '.2f')})" if first else ""
    paths: dict[str, int] = {}
    for each in turns:
        for how, num in each.paths.items():
            paths[how] = paths.get(how, 0) + num
    how = ", ".join(f"{num} {how}" for how, num in sorted(paths.items()))
    full = sum(each.full_rounds for each in turns) / max(1, sum(each.rounds for each in turns))
    return (
        f"| {name} | {spread(speeds, ',.0f')}{share} | {spread([each.cpu_s for each in turns], '.2f')} | "
        f"{spread([each.relayed_bytes for each in turns], '.0f')} | {full:.2f} | {min(each.links for each in turns)} | {how} |"
    )


async def main() -> int:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--line", type=float, default=20.0, help="Mbit/s of each peer's line, each way")
    cli.add_argument(
        "--relay",
        type=float,
        action="append",
        default=[],
        help="Mbit/s of a relay that passes all on; again for others",
    )
    cli.add_argument("--only", action="append", default=[], help="cases whose names begin so")
    cli.add_argument("--turns", type=int, default=3)
    cli.add_argument("--seconds", type=float, default=30.0, help="watched, after the first round with everybody")
    cli.add_argument(
        "--warm",
        type=float,
        default=5.0,
        help="seconds before that: copies of other stages' states are taken meanwhile",
    )
    cli.add_argument(
        "--compute", type=float, default=0.0, help="seconds that a stage sleeps for a micro-batch; 0: it computes"
    )
    cli.add_argument(
        "--accumulate", type=int, default=0, help="micro-batches a step, all under way at once; 0: the preset's"
    )
    cli.add_argument("--delay", type=float, default=0.0, help="ms, one way, of each of a packet's two links")
    cli.add_argument("--log", type=Path, help="write every event of the last case there")
    cli.add_argument("--json", action="store_true", help="the same once more, as the last line")
    args = cli.parse_args()
    if (lack := missing()) is not None:
        print(f"skipped: {lack}", file=sys.stderr)
        return LACKS
    cases = [
        Case(ONE_HOST, is_one_host=True),
        *(Case(f"{homes} at home", homes) for homes in (0, 1, 2, 4)),
        Case("4 through p2pd", 4, is_forwarded=True),
        *(Case(f"relay of {relay:g} Mbit/s", 4, Router.SYMMETRIC, relay) for relay in args.relay),
    ]
    if args.only:
        cases = [case for case in cases if any(case.name.startswith(text) for text in args.only)]
    print(header())
    seen: dict[str, list[Seen]] = {case.name: [] for case in cases}
    for _ in range(args.turns):
        for case in cases:
            timing = {"warm_s": args.warm, "seconds": args.seconds, "delay_ms": args.delay}
            work = {"compute_s": args.compute, "accumulate": args.accumulate}
            seen[case.name].append(await play(case, line=args.line * 1e6, log=args.log, **timing, **work))
            print(f"# {case.name}: {seen[case.name][-1]}", flush=True)
    print(
        "\n| | tokens/s (of one host's) | CPU s a thousand | bytes by the relay, a token | rounds with both | links | paths within a stage |"
    )
    print("|---|---|---|---|---|---|---|")
    base = sorted(each.tokens_per_s for each in seen.get(ONE_HOST, []))
    first = base[len(base) // 2] if base else None
    for case in cases:
        print(row(case.name, seen[case.name], first))
    for relay in args.relay:
        print(f"\na relay of {relay:g} Mbit/s allows {allowed(relay):,.0f} tokens/s")
    if args.json:
        print(json.dumps({name: [asdict(each) for each in turns] for name, turns in seen.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
