"""Whether a run takes what peers are told that it takes: time, memory, bytes a day.

    python benchmarks/predictions.py [--rounds 60] [--peers 2] [--stages 1] [--preset tiny] [--inner-steps 8]
    python benchmarks/predictions.py --core             # what `init` reckons with: operations a second of processor time, by preset
    python benchmarks/predictions.py --preset 125m --rounds 6 --inner-steps 1 --micro-batch 1 --accumulate 1 --context 128

Memory: what each peer says when it has joined (NeedsReckoned), beside the most that its processes hold together (RSS, looked at every
half second; pages of libraries count in each, as for a peer alone on its machine). Bytes a day: what it says after six rounds
(UpkeepReckoned), beside what p2pd and linkd moved over TCP from then on, at the pace of the whole run.

A real run on loopback from its first round to its last. After every round from the fifth on each peer's status (peer/time_left.py) and the run's
page (web/document.py) are asked how long it still takes; when the run is over, that is compared with what it took. The last tenth of the
rounds is left out: seconds of a few seconds tell nothing. Expected beforehand: the pace of twelve
rounds is that of the next ones within some per cent where nothing else runs on the machine.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from dilocox_peer.cli.eventlog import read_event
from dilocox_peer.cli.local_swarm import LocalSwarm
from dilocox_peer.config import preset
from dilocox_peer.events import PipelineProgress, RoundCertified, TrainingProgress
from dilocox_peer.events_of_costs import NeedsReckoned, UpkeepReckoned
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.partition import cut_into
from dilocox_peer.peer.status import Status

FIRST = 5  # round from which it is asked
PAGE_S = 1.0
MEMORY_S = 0.5
CORE_TOKENS, CORE_STEPS = 256, 5
LEAST_S = 20.0  # of traffic that is measured
LONG_S = 3600.0


class Forecast(LocalSwarm):
    """A swarm whose peers' statuses are folded here, and asked after each round."""

    def __init__(self, manifest: Manifest) -> None:
        self.statuses: dict[str, Status] = {}
        self.told: dict[str, list[tuple[int, float, float]]] = {}  # by who: (round, when, seconds left)
        self.over_at: dict[str, float] = {}
        self.needs: dict[str, int] = {}  # bytes of memory, as told
        self.peaks: dict[str, int] = {}
        self.upkeep: dict[str, tuple[UpkeepReckoned, float, tuple[int, int]]] = {}  # when told, and what had been moved
        self.moved: dict[str, dict[str, tuple[int, int]]] = {}  # by counter: sent, received
        self.last_at: dict[str, float] = {}
        super().__init__(manifest, self._keep)

    def _keep(self, label: str, record: dict[str, Any]) -> None:
        found = read_event(record)
        if found is None or label == "bootstrap":
            return
        event, at_s = found
        status = self.statuses.setdefault(label, Status())
        status.take(event, at_s)
        match event:
            case NeedsReckoned():
                self.needs[label] = event.memory_bytes
            case TrainingProgress():
                moved = (event.daemon_bytes_sent, event.daemon_bytes_received)
                self.moved.setdefault(label, {})["rounds"], self.last_at[label] = moved, at_s
            case PipelineProgress():
                self.moved.setdefault(label, {})["links"] = (event.wire_bytes_sent, event.wire_bytes_received)
            case UpkeepReckoned():
                self.upkeep[label] = (event, at_s, self.all_moved(label))
        if isinstance(event, RoundCertified):
            self.over_at[label] = at_s
            left_s = status.time_left_s(at_s)
            if left_s is not None and event.round >= FIRST:
                self.told.setdefault(label, []).append((event.round, at_s, left_s))

    def all_moved(self, label: str) -> tuple[int, int]:
        counters = self.moved.get(label, {}).values()
        return sum(sent for sent, _ in counters), sum(received for _, received in counters)

    async def watch_memory(self) -> None:
        """Of every peer, its helpers included."""

        def look(label: str) -> None:
            with suppress(psutil.Error):
                me = psutil.Process(self.children[label].process.pid)
                taken = sum(each.memory_info().rss for each in (me, *me.children(recursive=True)))
                self.peaks[label] = max(self.peaks.get(label, 0), taken)

        while True:
            for label in list(self.needs):
                look(label)
            await asyncio.sleep(MEMORY_S)

    def tell_memory(self) -> None:
        for label, told in sorted(self.needs.items()):
            peak = self.peaks[label]
            print(
                f"{label:<9} memory: told {told / 1e6:.0f} MB, most {peak / 1e6:.0f} MB: {told / peak - 1:+.1%}",
                flush=True,
            )

    def tell_upkeep(self) -> None:
        for label, (told, at_s, before) in sorted(self.upkeep.items()):
            seconds = self.last_at[label] - at_s
            if seconds < LEAST_S:
                continue
            a_day = [86400 * (now - then) / seconds for now, then in zip(self.all_moved(label), before, strict=True)]
            for way, said, found in zip(
                ("sent", "received"), (told.sent_bytes_a_day, told.received_bytes_a_day), a_day, strict=True
            ):
                error = f"{said / found - 1:+.1%}" if found else "-"
                print(
                    f"{label:<9} {way} a day: told {said / 1e9:.2f} GB, {found / 1e9:.2f} GB at what was moved: {error}",
                    flush=True,
                )

    async def watch_page(self, port: int) -> None:
        def read() -> dict[str, Any] | None:
            with (
                suppress(OSError, ValueError),
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api/state", timeout=5) as answer,
            ):
                return dict(json.load(answer)["now"])
            return None

        last = 0
        while True:
            now = await asyncio.to_thread(read)
            if now is not None and now["eta_s"] is not None and now["round"] >= FIRST and now["round"] != last:
                last = now["round"]
                self.told.setdefault("the page", []).append((last, now["at_s"], now["eta_s"]))
            await asyncio.sleep(PAGE_S)


async def run(flags: argparse.Namespace) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    rounds = {"total": flags.rounds, "inner_steps": flags.inner_steps, "start_peers": flags.peers}
    inner = {key: value for key in ("micro_batch", "accumulate") if (value := getattr(flags, key))}
    model = {"context": flags.context} if flags.context else {}
    manifest = preset(flags.preset, rounds=rounds, inner=inner, model=model, data={"source": "stdlib"})
    if flags.stages > 1:
        manifest = cut_into(manifest, flags.stages)
    async with Forecast(manifest) as swarm:
        await swarm.start_bootstrap("--web-port", str(port))
        places = [(f"s{stage}p{number}", stage) for number in range(flags.peers) for stage in range(flags.stages)]
        began = time.time()
        children = await asyncio.gather(*(swarm.start_peer(label, stage=stage) for label, stage in places))
        watching = asyncio.gather(swarm.watch_page(port), swarm.watch_memory())
        async with asyncio.timeout(LONG_S):
            await asyncio.gather(*(child.process.wait() for child in children))
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        over_at = max(swarm.over_at.values())
        print(f"# {flags.rounds} rounds in {over_at - began:.0f} s", flush=True)
        swarm.tell_memory()
        swarm.tell_upkeep()
        for who, told in sorted(swarm.told.items()):
            counted = [each for each in told if each[0] <= 0.9 * flags.rounds and each[1] < over_at]
            errors = [(number, left_s / (over_at - at_s) - 1) for number, at_s, left_s in counted]
            sizes = sorted(abs(error) for _, error in errors)
            if not sizes:
                continue
            first = ", ".join(f"r{number} {error:+.0%}" for number, error in errors[:3])
            print(
                f"{who:<9} {len(errors)} forecasts: off by {statistics.median(sizes):.1%} (median), {sizes[-1]:.1%} (most), "
                f"within 20 %: {sum(size <= 0.2 for size in sizes) / len(sizes):.0%}; the first: {first}",
                flush=True,
            )


def of_a_core() -> None:
    """Forward and backward on one thread. Of processor time, as other programs may run beside it."""
    import torch

    from dilocox_peer.model.architecture import build_model
    from dilocox_peer.model.loss import train_on
    from dilocox_peer.peer.planning.forecast import operations

    torch.set_num_threads(1)
    for name in ("tiny", "small", "125m"):
        manifest = preset(name)
        model = build_model(manifest.model)
        with torch.no_grad():
            model.flat_N.normal_(std=0.02)
        tokens_BT = torch.randint(0, 256, (1, min(manifest.model.context, CORE_TOKENS)))
        found = []
        for _ in range(1 + CORE_STEPS):
            began = time.process_time()
            train_on(model, tokens_BT, tokens_BT)
            model.zero_grad()
            found.append(tokens_BT.numel() / (time.process_time() - began))
        tokens_per_s = statistics.median(found[1:])
        print(
            f"{name:<6} {tokens_per_s:,.0f} tokens a second, {tokens_per_s * operations(manifest) / 1e9:.1f} G operations",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--core", action="store_true")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--peers", type=int, default=2, help="of each stage")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--inner-steps", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, help="the preset's, unless it is said")
    parser.add_argument("--accumulate", type=int)
    parser.add_argument("--context", type=int)
    flags = parser.parse_args()
    print(f"# load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    if flags.core:
        return of_a_core()
    asyncio.run(run(flags))


if __name__ == "__main__":
    main()
