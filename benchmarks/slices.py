"""What a peer sends a round when a run averages in slices, beside all to all: real peers on this machine.

    python benchmarks/slices.py [--peers 4] [--rounds 12] [--codec int4] [--slices 16] [--keep] [--modes slices,all-to-all] [--slow 2]

A peer's bytes are those of its messages and of what it served (the RoundCertified event), without frames; of the rounds from the fourth
to the last but one, over all peers. On the interface: all that went over lo between the first peer's first certificate of these and its last, with frames, heartbeats, the directory and
whatever else this machine says to itself (in a namespace of its own, nothing: `unshare -n sh -c 'ip link set lo up; ...'`), by peers and rounds. The
bound in slices: 1.1 x (2 contributions + 1 result). Expected beforehand: (n - 1) / n of that bound's 2 contributions and 1 result, and
messages. seconds: between two rounds. CPU: of each peer's process and its network daemon, a round; of it what merging takes
(slices_worker.py), which is to be the same whatever n is. --keep: the bootstrap keeps the run, and
fetches a contribution, a result and now and then a state for that (docs/deployment.md). --slow: the first peer may send so many Mbit/s (--max-upload), all others what they like;
beside it how long one contribution takes at that rate. On the disk: what a peer has at the end of contributions, results and the like, beside what
doctor, plan and join reckon for it, which is reached once the run has had as many rounds as are kept (16, so --rounds 16 or more).
"""

import argparse
import asyncio
import itertools
import re
import statistics
import struct
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psutil
from headline_worker import sent_bytes
from swarm import WatchedSwarm, header

from dilocox_peer.config import preset
from dilocox_peer.peer.planning.disk import STATE_BYTES, disk_bytes
from dilocox_peer.peer.planning.sent import AveragedKept, contributions_kept
from dilocox_peer.peer.planning.upkeep import StageNeeds
from dilocox_peer.peer.rounds.durable import load_log

FIRST = 4
WORKER = str(Path(__file__).with_name("slices_worker.py"))


async def measure(mode: str, arguments: argparse.Namespace) -> str:
    rounds = {
        "total": 100_000, "inner_steps": arguments.inner_steps, "start_peers": arguments.peers, "averaging": mode,
        "slices": arguments.slices,
    }  # fmt: skip
    settings = preset("tiny", rounds=rounds, compression={"codec": arguments.codec, "adapt": "off"})
    labels = [f"peer{index}" for index in range(arguments.peers)]
    async with WatchedSwarm(settings) as swarm:
        await swarm.start_bootstrap(*([] if arguments.keep else ["--no-keep"]))
        merging = [swarm.folder / f"{label}.merging" for label in labels]
        limits = [
            ["--max-upload", str(arguments.slow)] if arguments.slow and label == labels[0] else [] for label in labels
        ]
        peers = [
            await swarm.start_peer(label, more=[*limit, "--threads", "1"], program=(WORKER, str(path)))
            for label, limit, path in zip(labels, limits, merging, strict=True)
        ]

        def reached(number: int) -> bool:
            return all(any(r["round"] >= number for r in swarm.of(label, "RoundCertified")) for label in labels)

        await swarm.until(lambda: reached(FIRST), peers, 900)
        before = [_cpu_s(peer.process.pid) for peer in peers]
        merged_before = [_seconds(path) for path in merging]
        first = max(swarm.of(labels[0], "RoundCertified")[-1]["round"], FIRST)
        samples: list[tuple[float, int]] = []
        sampling = asyncio.create_task(_sample(samples))
        await swarm.until(lambda: reached(first + arguments.rounds), peers, 1200)
        sampling.cancel()
        cpu = [(_cpu_s(peer.process.pid) - was) for peer, was in zip(peers, before, strict=True)]
        merge_s = [_seconds(path) - was for path, was in zip(merging, merged_before, strict=True)]
        at = {record["round"]: record["time"] for record in swarm.of(labels[0], "RoundCertified")}
        whole = [number for number in at if samples[0][0] <= at[number] <= samples[-1][0]]
        sent_meanwhile = _sent_by(samples, at[whole[-1]]) - _sent_by(samples, at[whole[0]])
        interface = sent_meanwhile / arguments.peers / (whole[-1] - whole[0])
        sent: list[int] = []
        gaps: list[float] = []
        missing = 0
        for label in labels:
            of_label = [r for r in swarm.of(label, "RoundCertified") if FIRST < r["round"] < first + arguments.rounds]
            sent += [record["bytes_sent"] for record in of_label]
            missing += sum(arguments.peers - len(record["contributors"]) for record in of_label)
            gaps += [b["time"] - a["time"] for a, b in itertools.pairwise(of_label)]
        stored = [
            _averaged_bytes(swarm.folder, label) for label in labels
        ]  # once: to look takes processor time from the peers
        whys = Counter(
            re.sub(r"[0-9.]+", "#", why)
            for label in labels
            for each in swarm.of(label, "ContributionsMissed")
            if FIRST < each["round"] < first + arguments.rounds
            for _, why in each["missed"]
        )
        contribution = statistics.median(r["blob_bytes"] for label in labels for r in swarm.of(label, "RoundClosed"))
        (log,) = swarm.folder.glob(f"**/{labels[0]}/**/stage0/rounds.log")
        durable = load_log(log.read_bytes(), swarm.manifest.genesis(0)).durable
        assert durable is not None
        results = [sum(each.size_bytes for each in c.value.results) for c in durable.appended if c.value.results]
        result = statistics.median(results) if results else 0.0
        digests = {(r["round"], r["anchor_digest"]) for label in labels for r in swarm.of(label, "RoundCertified")}
        assert len(digests) == len({number for number, _ in digests}), "anchors differ"
    parameters = StageNeeds.of(settings, 0).parameters
    kept = contributions_kept(arguments.peers, contribution, parameters, arguments.codec, is_sliced=mode == "slices")
    told = disk_bytes(parameters, kept) - disk_bytes(parameters, AveragedKept(0, 0)) + STATE_BYTES * parameters
    bound = 1.1 * (2 * contribution + result) if mode == "slices" else (arguments.peers - 1) * contribution
    mean = statistics.mean(sent)
    return (
        f"{mode:>10}  n={arguments.peers}  contribution {contribution / 1e3:.1f} kB, result {result / 1e3:.1f} kB; sent a peer and round: "
        f"mean {mean / 1e3:.1f} kB (median {statistics.median(sent) / 1e3:.1f}, most {max(sent) / 1e3:.1f}); "
        f"{'bound' if mode == 'slices' else 'n - 1 copies'} {bound / 1e3:.1f} kB; on the interface {interface / 1e3:.1f} kB; "
        f"round {statistics.median(gaps):.2f} s (most {max(gaps):.2f}); CPU a peer and round {statistics.mean(cpu) / arguments.rounds:.2f} s, "
        f"of it merging {statistics.mean(merge_s) / arguments.rounds * 1e3:.1f} ms (most {max(merge_s) / arguments.rounds * 1e3:.1f}); "
        f"on the disk after {first + arguments.rounds} rounds most {max(stored) / 1e6:.2f} MB (least of a peer {min(stored) / 1e6:.2f}), told {told / 1e6:.2f}; "
        f"{f'one contribution at {arguments.slow} Mbit/s: {8e-6 * contribution / arguments.slow:.2f} s; ' if arguments.slow else ''}contributions missing {missing} of {len(sent) * arguments.peers}"
        f"{''.join(f'; {count} x {why}' for why, count in whys.most_common())}"
    )


async def _sample(samples: list[tuple[float, int]]) -> None:
    """(time, bytes that have left over lo by then), until cancelled."""
    while True:
        samples.append((time.time(), sent_bytes("lo")))
        await asyncio.sleep(0.1)


def _averaged_bytes(folder: Path, label: str) -> int:
    return sum(_size(path) for here in folder.glob(f"**/{label}/**/stage0/contributions") for path in here.rglob("*"))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0  # it is forgotten meanwhile


def _sent_by(samples: Sequence[tuple[float, int]], at: float) -> float:
    """Bytes, between two samples."""
    (before, was), (after, then) = next(pair for pair in itertools.pairwise(samples) if pair[0][0] <= at <= pair[1][0])
    return was + (then - was) * (at - before) / (after - before)


def _cpu_s(pid: int) -> float:
    """Of a process and those below it."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _seconds(path: Path) -> float:
    """That slices_worker.py has counted."""
    return float(struct.unpack("d", path.read_bytes())[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--inner-steps", type=int, default=32)
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--slices", type=int, default=16)
    parser.add_argument("--slow", type=float, default=0.0, metavar="MBIT")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--modes", default="slices,all-to-all")
    arguments = parser.parse_args()
    print(header())
    for mode in arguments.modes.split(","):
        print(asyncio.run(measure(mode, arguments)), flush=True)


if __name__ == "__main__":
    main()
