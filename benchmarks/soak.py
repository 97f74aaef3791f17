"""A swarm left alone for long, with a trouble every half minute: what goes wrong, what grows.

    python benchmarks/soak.py [--minutes 30] [--peers 4] [--stages 2] [--averaging all|slices] [--every 25] [--seed 0]

Real peers of the tiny preset on loopback and a bootstrap that keeps the run. One trouble after the other, drawn by the seed, each at one
process: a peer killed (-9) and started again on its disk, or leaving (SIGINT) and back, or stopped for 20 to 60 s as a laptop that sleeps (SIGSTOP, with its
daemons); its p2pd killed, its linkd killed; the bootstrap killed and started again. The next one comes when the one before is mended
and `--every` seconds, half to one and a half times, have passed. One peer of each stage is left alone throughout.

Printed: rounds a minute of each stage by quarters of the time; rounds of which two peers name different heads; how long each kind of trouble took until its
peer had certified three rounds more (min/median/max); what failed, by its words; for each stay of five minutes and more of a process the memory of it and its daemons (RSS, MB), open files and threads, after a tenth, four and
seven tenths of the stay and at its end; bytes on each peer's disk at half time and at the end. Expected: no different heads, nobody ends on its own, memory and files flat.
"""

import argparse
import asyncio
import json
import random
import signal
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from swarm import WatchedSwarm, header, spread

from dilocox_peer.cli.children import Child
from dilocox_peer.config import preset
from dilocox_peer.manifest import Manifest

MENDED_S = 240.0  # the most that a trouble may last
SAMPLED_S = 5.0
LONG_S = 300.0  # stays shorter than this say nothing of growth
ASLEEP_S = (20.0, 60.0)
AWAY_S = (3.0, 30.0)


@dataclass
class Sample:
    """A process with its daemons at one time: seconds since the soak began, bytes, open files, threads."""

    at: float
    rss: int
    files: int
    threads: int


@dataclass
class Stay:
    """What was seen of one process of a peer."""

    label: str
    samples: list[Sample] = field(default_factory=list)


class Soak(WatchedSwarm):
    """The swarm, its troubles and what was seen."""

    def __init__(self, manifest: Manifest, num_peers: int, seed: int) -> None:
        super().__init__(manifest)
        self.rng = random.Random(seed)
        self.stages = manifest.stages.count
        self.labels = [f"p{number}" for number in range(num_peers)]
        self.left_alone = set(self.labels[: self.stages])
        self.processes: dict[str, Child] = {}
        self.stays: list[Stay] = []
        self.took: dict[str, list[float]] = defaultdict(list)
        self.unmended: list[str] = []
        self.ended: list[str] = []
        self.disk: dict[str, list[int]] = defaultdict(list)
        self.began = time.monotonic()

    def stage_of(self, label: str) -> int:
        return int(self.of(label, "PeerStarted")[-1]["stage"])

    async def join(self, label: str, stage: int) -> None:
        self.processes[label] = await self.start_peer(label, stage=stage)
        self.stays.append(Stay(label))

    async def certifies(self, label: str, kind: str, began: float) -> None:
        """Until the peer has certified three rounds more."""
        before = 2 + len(self.of(label, "RoundCertified"))
        try:
            await self.until(lambda: len(self.of(label, "RoundCertified")) > before, [self.processes[label]], MENDED_S)
        except TimeoutError:
            self.unmended.append(f"{kind} of {label} at {began - self.began:.0f} s")
        self.took[kind].append(time.monotonic() - began)

    # ---- troubles ----

    async def killed(self, label: str, began: float) -> None:
        await self._again(label, signal.SIGKILL)

    async def left(self, label: str, began: float) -> None:
        await self._again(label, signal.SIGINT)

    async def _again(self, label: str, how: signal.Signals) -> None:
        child, stage = self.processes[label], self.stage_of(label)
        child.process.send_signal(how)
        await asyncio.wait_for(child.process.wait(), 30)
        await asyncio.sleep(self.rng.uniform(*AWAY_S))
        await self.join(label, stage)

    async def asleep(self, label: str, began: float) -> None:
        family = _family(self.processes[label].process.pid)
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        await asyncio.sleep(self.rng.uniform(*ASLEEP_S))
        for process in reversed(family):
            with suppress(psutil.NoSuchProcess):
                process.resume()

    async def without_p2pd(self, label: str, began: float) -> None:
        self._kill_daemon(label, "p2pd")

    async def without_linkd(self, label: str, began: float) -> None:
        self._kill_daemon(label, "linkd")

    def _kill_daemon(self, label: str, name: str) -> None:
        for process in _family(self.processes[label].process.pid)[1:]:
            with suppress(psutil.NoSuchProcess):
                if any(name in word for word in process.cmdline()):
                    process.kill()

    async def without_bootstrap(self, label: str, began: float) -> None:
        child = self.children["bootstrap"]
        child.process.kill()
        await child.process.wait()
        await asyncio.sleep(self.rng.uniform(*AWAY_S))
        await self.start_bootstrap()

    async def trouble(self, every_s: float, until: float) -> None:
        kinds: list[Callable[[str, float], Awaitable[None]]] = [
            self.killed, self.killed, self.left, self.asleep, self.without_p2pd, self.without_bootstrap,
        ]  # fmt: skip
        if self.stages > 1:
            kinds.append(self.without_linkd)
        while time.monotonic() < until:
            await asyncio.sleep(every_s * self.rng.uniform(0.5, 1.5))
            label = self.rng.choice([label for label in self.labels if label not in self.left_alone])
            kind, began = self.rng.choice(kinds), time.monotonic()
            await kind(label, began)
            await self.certifies(label, kind.__name__, began)

    # ---- what is seen ----

    async def sample(self) -> None:
        while True:
            await asyncio.sleep(SAMPLED_S)
            newest = {stay.label: stay for stay in self.stays}
            for label, child in list(self.processes.items()):
                if child.process.returncode is None:
                    with suppress(psutil.Error):
                        newest[label].samples.append(_sampled(child.process.pid, time.monotonic() - self.began))

    def keep_disk(self) -> None:
        for folder in sorted(self.folder.rglob("runs")):
            for home in folder.iterdir():
                self.disk[str(home.relative_to(self.folder))].append(
                    sum(path.stat().st_size for path in home.rglob("*") if path.is_file())
                )

    def forks(self) -> dict[int, int]:
        """Of each stage how many rounds have different heads at different peers."""
        heads: dict[tuple[int, int], set[str]] = defaultdict(set)
        for label in self.labels:
            stage = 0
            for record in self.events[label]:
                if record["event"] == "PeerStarted":
                    stage = int(record["stage"])
                elif record["event"] == "RoundCertified":
                    heads[stage, int(record["round"])].add(str(record["head"]))
        forks = Counter(stage for (stage, _), named in heads.items() if len(named) > 1)
        return {stage: forks[stage] for stage in range(self.stages)}


def _family(pid: int) -> list[psutil.Process]:
    """The process, then its daemons."""
    own = psutil.Process(pid)
    return [own, *own.children(recursive=True)]


def _sampled(pid: int, at: float) -> Sample:
    rss = files = threads = 0
    for process in _family(pid):
        with suppress(psutil.NoSuchProcess):
            rss += process.memory_info().rss
            files += process.num_fds()
            threads += process.num_threads()
    return Sample(at, rss, files, threads)


def _told(soak: Soak, began_s: float, ended_s: float) -> None:
    quarter = (ended_s - began_s) / 4
    for stage in range(soak.stages):
        label = soak.labels[stage]
        times = [float(record["time"]) for record in soak.of(label, "RoundCertified")]
        rates = [
            sum(began_s + number * quarter <= at < began_s + (number + 1) * quarter for at in times) / quarter * 60
            for number in range(4)
        ]
        newest = max((int(record["round"]) for record in soak.of(label, "RoundCertified")), default=0)
        print(f"stage {stage}: round {newest}; rounds a minute {', '.join(f'{rate:.1f}' for rate in rates)}")
    print(f"rounds with different heads, by stage: {soak.forks()}")
    for kind, took in sorted(soak.took.items()):
        print(f"{kind}: {len(took)} times, until three rounds more {spread(took, '.0f')} s")
    print(f"not mended within {MENDED_S:.0f} s: {soak.unmended or 'none'}; ended on their own: {soak.ended or 'none'}")
    failures = Counter(
        f"{record['where']}: {record['reason']}"[:150]
        for label in [*soak.labels, "bootstrap"]
        for record in soak.of(label, "Failed")
    )
    for words, count in failures.most_common(20):
        print(f"failed {count} x {words}")
    kinds = Counter(record["event"] for label in soak.labels for record in soak.events[label])
    print("events:", ", ".join(f"{kind} {count}" for kind, count in kinds.most_common()))
    for stay in soak.stays:
        if stay.samples and stay.samples[-1].at - stay.samples[0].at >= LONG_S:
            seen = len(stay.samples)
            marks = [stay.samples[seen * tenths // 10 :][:5] for tenths in (1, 4, 7)] + [stay.samples[-5:]]
            grown = [
                f"{name} {' > '.join(f'{statistics.median(getattr(each, name) for each in mark) / unit:.0f}' for mark in marks)}"
                for name, unit in (("rss", 1e6), ("files", 1), ("threads", 1))
            ]
            print(f"{stay.label}, {stay.samples[0].at:.0f} to {stay.samples[-1].at:.0f} s: {', '.join(grown)}")
    for home, sizes in sorted(soak.disk.items()):
        print(f"disk {home}: {' > '.join(f'{size / 1e6:.2f}' for size in sizes)} MB")


def _manifest(arguments: argparse.Namespace) -> Manifest:
    sections: dict[str, Any] = {
        "rounds": {
            "total": 100_000,
            "start_peers": 1,
            **dict.fromkeys(("inner_steps", "min_inner_steps", "max_inner_steps"), arguments.inner_steps),
        },
        "stages": {"count": arguments.stages},
    }
    if arguments.averaging == "slices":
        sections["rounds"]["averaging"] = "slices"
    return preset("tiny", **sections)


async def soak(arguments: argparse.Namespace) -> None:
    async with Soak(_manifest(arguments), arguments.peers, arguments.seed) as swarm:
        await swarm.start_bootstrap()
        for number, label in enumerate(swarm.labels):
            await swarm.join(label, number % swarm.stages)
        swarm.began, began_s = time.monotonic(), time.time()
        sampling = asyncio.create_task(swarm.sample())
        until = swarm.began + arguments.minutes * 60
        try:
            await swarm.trouble(arguments.every, swarm.began + arguments.minutes * 30)
            swarm.keep_disk()
            await swarm.trouble(arguments.every, until)
        finally:
            sampling.cancel()
            swarm.keep_disk()
            swarm.ended = [
                f"{label}: {child.last_words}"
                for label, child in swarm.processes.items()
                if child.process.returncode is not None
            ]
            _told(swarm, began_s, time.time())
            if arguments.keep is not None:
                _kept(swarm, arguments.keep)


def _kept(swarm: Soak, folder: Path) -> None:
    """All events, a file a process."""
    folder.mkdir(parents=True, exist_ok=True)
    for label, records in swarm.events.items():
        (folder / f"{label}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--averaging", choices=("all", "slices"), default="all")
    parser.add_argument("--inner-steps", type=int, default=16)
    parser.add_argument("--every", type=float, default=25, help="seconds between troubles, in the mean")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for all events")
    print(header())
    asyncio.run(soak(parser.parse_args()))


if __name__ == "__main__":
    main()
