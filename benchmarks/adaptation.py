"""What adaptation is worth on slow uplinks: whole swarms of real peers, each capped by --max-upload, same inner steps.

    python benchmarks/adaptation.py [--mbit 2] [--peers 4] [--steps 768]

Two plans to begin with, each kept (`off`) and adapted (`link`): the recipe's (topk, 8 steps), and one made for a fast network
(fp16, 8 steps). Prints seconds from the first certified round to the last, validation loss of the last anchor, bytes a peer
sent against all-reduce, and where the plans went. Expected beforehand: fp16 kept is bound by the link, 0.5 MB to each of three
others at 2 Mbit/s: 6 s a round of 8 steps, and training goes on meanwhile, so its rounds grow by themselves to many more
steps than planned and the run takes more tokens than it should; adapted it ends near the recipe.
"""

import argparse
import asyncio
from itertools import groupby
from statistics import fmean

from swarm import WatchedSwarm, header

from dilocox_peer.cli.report import build_report
from dilocox_peer.cli.swarm_view import SwarmView
from dilocox_peer.config import preset
from dilocox_peer.manifest import Manifest

LONG_S = 900.0
START_STEPS = 8
CASES = [("topk", "off"), ("topk", "link"), ("fp16", "off"), ("fp16", "link")]


async def run(manifest: Manifest, peers: int, mbit: float) -> SwarmView:
    view = SwarmView(manifest)
    async with WatchedSwarm(manifest) as swarm:
        await swarm.start_bootstrap()
        for index in range(peers):
            await swarm.start_peer(f"peer{index}", more=["--max-upload", f"{mbit:g}"])
        evaluator = await swarm.start_evaluator()
        await swarm.until(lambda: bool(swarm.of("evaluator", "RunComplete")), [evaluator], LONG_S)
        for label, records in swarm.events.items():
            for record in records:
                view.take(label, record)
    return view


def line(name: str, view: SwarmView, peers: int) -> str:
    report = build_report(view, stages=1, replicas=peers)
    rounds = [view.rounds[number] for number in sorted(view.rounds)]
    seconds = rounds[-1].first_seen_s - rounds[0].first_seen_s
    plans = " ".join(
        f"{len(list(group))}x{codec}/{inner_steps}"
        for (codec, inner_steps), group in groupby(rounds, key=lambda each: (each.codec, each.inner_steps))
    )
    fewer = report["allreduce_bytes_per_token"] / max(1e-9, report["outer_bytes_per_token"])
    share = fmean(
        fmean(each.delays_s) / row["seconds"]
        for each, row in zip(rounds, report["rounds"], strict=True)
        if each.delays_s and row["seconds"] and each.number > 1
    )
    return f"{name:10} {seconds:7.1f} {report['tokens']:10,} {report['final_val_loss']:8.4f} {fewer:8.0f} {share:8.0%}  {plans}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=2.0)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=768)
    arguments = parser.parse_args()
    print(header())
    print(f"# {arguments.peers} peers, {arguments.mbit:g} Mbit/s up each, {arguments.steps} inner steps planned")
    print("start           s     tokens val loss    fewer exchange  rounds x codec/H", flush=True)
    for codec, adapt in CASES:
        manifest = preset(
            "tiny",
            rounds={
                "total": arguments.steps // START_STEPS,
                "inner_steps": START_STEPS,
                "start_peers": arguments.peers,
            },
            compression={"codec": codec, "adapt": adapt},
        )
        view = asyncio.run(run(manifest, arguments.peers, arguments.mbit))
        print(line(f"{codec} {adapt}", view, arguments.peers), flush=True)


if __name__ == "__main__":
    main()
