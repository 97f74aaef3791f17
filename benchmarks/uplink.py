"""What training does to the others on a family's line: `python benchmarks/uplink.py [--stages 2] [--fetches]`.

A home with 10 Mbit/s up and a router that holds 200 ms of it, two peers of the run outside, and another computer at the home that pings a
public host ten times a second: first while nobody trains, then while the peer at home does with no limit of upload (`--max-upload 1000000`),
as it is without a flag, and with `--max-upload 8`. Real processes in network namespaces (testbed/natlab.py): needs root, iproute2 and nftables.
With --fetches nobody trains: the two outside fetch contributions of 1.4 MB of the home, one after another, so that its line and not its
processor limits them. With --stages 2 the home computes the first of two stages: activations and contributions share its line.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swarm import header
from testbed import line_peer, pinger
from testbed.home_swarm import BOOTSTRAP, HomeSwarm
from testbed.natlab import NatLab, missing

from dilocox_peer.config import preset
from dilocox_peer.manifest import Manifest

UP, DOWN, BUFFER_MS = 10e6, 100e6, 200
HOME, FAMILY, OUTSIDE = "home", "tablet", ("p", "q")
PINGED = "31.0.0.9"
MEET_S = 150.0
LACKS = 77
CASES: dict[str, tuple[str, ...]] = {
    "no limit": ("--max-upload", "1000000"),
    "no flag": (),
    "--max-upload 8": ("--max-upload", "8"),
}


@dataclass
class UplinkSeen:
    """pings: ms, sorted; lost ones are not in it. queueing: what the peer said of it, ms. sent_mbit_s: that left the router."""

    pings: list[float]
    num_lost: int
    round_s: float = 0.0
    counted: float = 0.0  # contributions a round
    queueing: Sequence[float] = ()
    upload_mbit_s: Sequence[float] = ()
    sent_mbit_s: float = 0.0
    got_mbit_s: float = 0.0  # of contributions, outside; of --fetches
    tokens_per_s: float = 0.0

    def ping(self, share: float) -> float:
        return self.pings[min(len(self.pings) - 1, int(share * len(self.pings)))] if self.pings else float("nan")


def manifest(stages: int) -> Manifest:
    """Rounds that a line of 10 Mbit/s limits: 1.4 MB to each of two others (of half of the model each, with two stages)."""
    steps = dict.fromkeys(("inner_steps", "min_inner_steps", "max_inner_steps"), 4)
    model = {"hidden_size": 256, "layers": 4, "heads": 4, "kv_heads": 2, "mlp_size": 640}
    return preset(
        "tiny",
        model=model,
        rounds={"total": 100_000, "start_peers": 3 if stages == 1 else 1, **steps},
        compression={"codec": "int4", "adapt": "off"},
        stages={"count": stages},
    )


async def pinged(lab: NatLab, seconds: float) -> UplinkSeen:
    """What the other computer at the home sees meanwhile."""
    ping = await asyncio.create_subprocess_exec(
        *lab.command(FAMILY, [sys.executable, pinger.__file__, PINGED, f"{seconds:g}", "0.1"]),
        stdout=asyncio.subprocess.PIPE,
    )
    lines = (await ping.communicate())[0].decode().split()
    times = sorted(float(line) for line in lines if line != "lost")
    return UplinkSeen(times, len(lines) - len(times))


def build(lab: NatLab) -> None:
    """The home with its family, a bootstrap, and two peers outside."""
    lab.public(BOOTSTRAP, 9)
    for number, name in enumerate(OUTSIDE):
        lab.public(name, 20 + number)
    lab.home(HOME, 1)
    lab.guest(FAMILY, HOME)
    lab.start()
    lab.set_rate(HOME, up=UP, down=DOWN, queue_ms=BUFFER_MS)


async def play(stages: int, flags: Sequence[str], *, delay_ms: float, warm_s: float, seconds: float) -> UplinkSeen:
    with NatLab(delay_ms=delay_ms) as lab:
        build(lab)
        async with HomeSwarm(lab, manifest(stages)) as swarm:
            await swarm.start_bootstrap(more=("--no-keep",))
            await asyncio.gather(
                swarm.join(HOME, *flags, *(("--stage", "0") if stages > 1 else ())),
                *(
                    swarm.join(name, *(("--stage", str(number)) if stages > 1 else ()))
                    for number, name in enumerate(OUTSIDE)
                ),
            )
            most = 3 if stages == 1 else 2

            def has_begun() -> bool:
                return any(len(record["contributors"]) == most for _, record in swarm.rounds(HOME))

            if not await swarm.until(has_begun, MEET_S):
                raise SystemExit("they did not meet")
            await asyncio.sleep(warm_s)
            began, sent = time.monotonic(), lab.bytes_sent(HOME)
            seen = await pinged(lab, seconds)
            took = time.monotonic() - began
            seen.sent_mbit_s = (lab.bytes_sent(HOME) - sent) * 8e-6 / took
            rounds = [record for at_s, record in swarm.rounds(HOME) if at_s >= began]
            seen.round_s = took / max(1, len(rounds))
            seen.counted = sum(HOME in map(swarm.names().get, each["contributors"]) for each in rounds) / max(
                1, len(rounds)
            )
            progress = [record for at_s, record in swarm.told[HOME].of("TrainingProgress") if at_s >= began]
            seen.queueing = [each["queueing_ms"] for each in progress]
            seen.upload_mbit_s = [each["upload_bps"] / 1e6 for each in progress]
            seen.tokens_per_s = statistics.median(each["tokens_per_s"] for each in progress)
            return seen


async def fetches(flags: Sequence[str], *, delay_ms: float, warm_s: float, seconds: float) -> UplinkSeen:
    with NatLab(delay_ms=delay_ms) as lab, tempfile.TemporaryDirectory(prefix="dilocox-line-") as folder:
        build(lab)
        last: dict[str, dict[str, Any]] = {}
        use: list[dict[str, Any]] = []
        reading: list[asyncio.Task[None]] = []

        async def start(name: str, *more: str) -> None:
            process = await asyncio.create_subprocess_exec(
                *lab.command(name, [sys.executable, line_peer.__file__, f"{folder}/{name}", *more]),
                stdout=asyncio.subprocess.PIPE,
            )
            running.append(process)

            async def read() -> None:
                assert process.stdout is not None
                while line := await process.stdout.readline():
                    last[name] = json.loads(line)
                    if name == HOME:
                        use.append(last[name])

            reading.append(asyncio.create_task(read()))
            async with asyncio.timeout(60):
                while name not in last:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)

        running: list[asyncio.subprocess.Process] = []
        try:
            for name in OUTSIDE:
                await start(name)
            there = [text for name in OUTSIDE for text in last[name]["addresses"] if text.startswith("/ip4/31.")]
            await start(HOME, *flags, *(flag for text in there for flag in ("--to", text)))
            await asyncio.sleep(warm_s)
            use.clear()
            sent, got, began = lab.bytes_sent(HOME), sum(last[name]["got"] for name in OUTSIDE), time.monotonic()
            seen = await pinged(lab, seconds)
            took = time.monotonic() - began
            seen.sent_mbit_s = (lab.bytes_sent(HOME) - sent) * 8e-6 / took
            seen.got_mbit_s = (sum(last[name]["got"] for name in OUTSIDE) - got) * 8e-6 / took
            seen.queueing = [each["waiting_ms"] for each in use]
            seen.upload_mbit_s = [(each["rate"] or 0.0) * 8e-6 for each in use]
            return seen
        finally:
            for process in running:
                if process.returncode is None:
                    process.terminate()
            await asyncio.gather(*(process.wait() for process in running))
            await asyncio.gather(*reading)


async def idle(delay_ms: float, seconds: float) -> UplinkSeen:
    with NatLab(delay_ms=delay_ms) as lab:
        lab.public(BOOTSTRAP, 9)
        lab.home(HOME, 1)
        lab.guest(FAMILY, HOME)
        lab.start()
        lab.set_rate(HOME, up=UP, down=DOWN, queue_ms=BUFFER_MS)
        return await pinged(lab, seconds)


def row(name: str, seen: UplinkSeen) -> str:
    pings = " / ".join(f"{seen.ping(share):.0f}" for share in (0.5, 0.95, 0.99, 1.0))
    said = [statistics.median(each) if each else 0.0 for each in (seen.queueing, seen.upload_mbit_s)]
    head = f"{name:15} ping {pings} ({len(seen.pings)}, {seen.num_lost} lost); "
    tail = f"it said {said[0]:.0f} ms, at most {said[1]:.1f} Mbit/s"
    if not seen.round_s:
        return f"{head}{seen.got_mbit_s:.2f} Mbit/s of contributions came, {seen.sent_mbit_s:.2f} left; {tail}"
    return (
        f"{head}a round {seen.round_s:.2f} s, its own in {seen.counted:.2f} of them, "
        f"{seen.tokens_per_s:,.0f} tokens/s; {seen.sent_mbit_s:.2f} Mbit/s left; {tail}"
    )


async def main() -> int:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--stages", type=int, default=1, choices=(1, 2))
    cli.add_argument("--fetches", action="store_true", help="contributions alone, without training")
    cli.add_argument("--delay", type=float, default=10.0, help="ms, one way, of each of a packet's two links")
    cli.add_argument("--warm", type=float, default=20.0, help="seconds after the first round with everybody")
    cli.add_argument("--seconds", type=float, default=60.0, help="of pings")
    cli.add_argument("--only", choices=tuple(CASES), action="append", help="this case; again for others")
    args = cli.parse_args()
    if (lack := missing()) is not None:
        print(f"skipped: {lack}", file=sys.stderr)
        return LACKS
    print(header())
    print(f"ping: ms, median / 95 % / 99 % / longest of {args.seconds:.0f} s")
    print(row("nobody trains", await idle(args.delay, args.seconds / 3)), flush=True)
    for name in args.only or CASES:
        timing = {"delay_ms": args.delay, "warm_s": args.warm, "seconds": args.seconds}
        seen = await (fetches(CASES[name], **timing) if args.fetches else play(args.stages, CASES[name], **timing))
        print(row(name, seen), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
