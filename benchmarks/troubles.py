"""How soon each of thirteen troubles is named, by whom, and in which words.

    python benchmarks/troubles.py [--only paused,frozen] [--json FILE]

Real processes on loopback: bootstraps with a page, peers with the control socket. Each trouble is injected into a run in training; then
every peer's own events, the page (/api/state) and `status` of one peer are watched until all of them name the trouble by its kind. All have to
say the same words, and no process may write a traceback. What is injected: a head paused, stopped (SIGSTOP), killed; its linkd killed; its
disk full (a tmpfs of 260 MB, which takes root); the bootstrap killed; a peer whose clock is 60 s ahead, and one 60 s behind, which cannot
join and has to be told why; a member that signs two things (tests/hostile/member.py); one behind 0.1 Mbit/s; one with damaged shards; a
run that waits for its second peer; and a stage with one peer. Seconds are from the injection; of the peer that cannot join from when its
libraries are loaded and it begins to reach the run, which is printed apart. They are wall seconds of real processes: say what else ran beside it.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from dilocox_peer.cli.eventlog import read_event
from dilocox_peer.cli.local_swarm import ChildEnded, LocalSwarm
from dilocox_peer.config import preset
from dilocox_peer.data.catalogue import read_catalogue
from dilocox_peer.events_of_health import Trouble, TroublesSeen
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.partition import with_cut
from dilocox_peer.peer.control import ask, socket_path
from dilocox_peer.peer.identity import Identity
from dilocox_peer.peer.startup import StartupStep
from dilocox_peer.types import PeerId, canonical, sha256
from tests.hostile.machines import TURNED

OFF_S = -60.0
NAMED_S, OVER_S = 60.0, 90.0  # given to it; the bar is 10 s
LONG_S = 240.0
TMPFS_MB = 260  # join asks for 200 MB
PAGE = "the page"
CLOCK_OFF = str(Path(__file__).parent / "testbed" / "clock_off.py")
ROUNDS = {"total": 100_000, "inner_steps": 8, "start_peers": 1}


@dataclass
class Named:
    """A trouble that was injected. seconds: by who named it. words: of all of them."""

    what: str
    kind: str
    seconds: dict[str, float] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    status: str = ""


class Troubled(LocalSwarm):
    """A swarm with a page, and what each of its processes says is wrong."""

    def __init__(self, manifest: Manifest, data: Sequence[Path] = ()) -> None:
        self.said: dict[str, tuple[Trouble, ...]] = {}
        self.records: dict[str, list[dict[str, Any]]] = {}
        super().__init__(manifest, self._keep, data=data)
        self.port = free_port()
        self.mounts: list[Path] = []

    async def __aexit__(self, *exc: object) -> None:
        try:
            await self.children.stop()
            await asyncio.to_thread(self._unmount)
        finally:
            await super().__aexit__(*exc)

    def _unmount(self) -> None:
        for path in self.mounts:
            subprocess.run(["umount", str(path)], check=False)

    def mount(self, path: Path) -> None:
        """A small file system of its own there. Takes root."""
        options = f"size={TMPFS_MB}m,mode=700"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], check=True)
        self.mounts.append(path)

    def _keep(self, label: str, record: dict[str, Any]) -> None:
        self.records.setdefault(label, []).append(record)
        match read_event(record):
            case (TroublesSeen(troubles), _):
                self.said[label] = troubles

    def round_of(self, label: str) -> int:
        return max(
            (each["round"] for each in self.records.get(label, ()) if each["event"] == "RoundCertified"), default=0
        )

    def peer(self, label: str) -> PeerId:
        return PeerId([each["peer"] for each in self.records[label] if each["event"] == "PeerStarted"][-1])

    def process(self, label: str) -> psutil.Process:
        return psutil.Process(self.children[label].process.pid)

    async def control(self, label: str, command: str) -> dict[str, Any]:
        return await ask(socket_path(self.folder / "peers" / label), command)

    def tracebacks(self) -> list[str]:
        return [
            f"{label}: {line}" for label in self.records for line in self.children[label].tail if "Traceback" in line
        ]

    async def page(self) -> list[dict[str, Any]] | None:
        def read() -> list[dict[str, Any]] | None:
            with (
                suppress(OSError, ValueError),
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/state", timeout=5) as answer,
            ):
                return list(json.load(answer)["now"]["troubles"])
            return None

        return await asyncio.to_thread(read)

    async def watch(
        self, what: str, kind: str, labels: Sequence[str], began: float, *, with_page: bool = True, about: str = ""
    ) -> Named:
        """Until all name it. about: a piece of the cause, to tell it from others of the kind."""
        found, wanted = Named(what, kind), {*labels, *([PAGE] if with_page else [])}
        causes: dict[str, str] = {}
        while (missing := wanted - set(found.seconds)) and time.monotonic() - began < NAMED_S:
            for label in missing - {PAGE}:
                for each in self.said.get(label, ()):
                    if each.kind == kind and about in each.cause:
                        found.seconds[label], causes[label] = time.monotonic() - began, each.cause
            if PAGE in missing:
                for shown in await self.page() or ():
                    if shown["kind"] == kind and about in shown["cause"]:
                        found.seconds[PAGE], causes[PAGE] = time.monotonic() - began, shown["cause"]
                        found.words.append(f"{shown['cause']}: {shown['next']}")
            await self.next_change(0.2)
        found.missing = sorted(wanted - set(found.seconds))
        found.words = sorted({*causes.values()}) + found.words
        if labels and labels[0] in found.seconds:
            status = (await self.control(labels[0], "status"))["status"]
            found.status = next((each["cause"] for each in status["troubles"] if each["kind"] == kind), "")
        return found

    async def over(self, kind: str, labels: Sequence[str]) -> None:
        """Until none of them names it any more."""
        async with asyncio.timeout(OVER_S):
            while any(each.kind == kind for label in labels for each in self.said.get(label, ())):
                await self.next_change(0.5)

    async def until_round(self, labels: Sequence[str], number: int) -> None:
        await self.until(lambda: all(self.round_of(label) >= number for label in labels), [], LONG_S)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def fill(path: Path) -> None:
    """Until there is no room left."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 12))


def name_drawn_to(swarm: LocalSwarm, stage: int) -> str:
    """A name whose key draws that stage where all are alike (dht/assignment.choose_stage)."""
    for number in range(64):
        name = f"mover{number}"
        folder = swarm.folder / "peers" / name
        folder.mkdir(parents=True)
        with Identity.open(folder / "identity.key") as identity:
            draws = [sha256(canonical(["claim", identity.peer_id, each])) for each in range(2)]
        if draws.index(min(draws)) == stage:
            return name
    raise AssertionError("64 draws alike")


# ---- the runs -----------------------------------------------------------------------------------------------------------


async def of_a_head(wanted: Callable[[str], bool]) -> list[Named]:
    """Two stages: a head alone, and two peers behind it."""
    found = []
    async with Troubled(with_cut(preset("tiny", stages={"count": 2}, rounds=ROUNDS))) as swarm:
        head_folder = swarm.folder / "peers" / "head"
        head_folder.mkdir(parents=True)
        if wanted("disk"):
            await asyncio.to_thread(swarm.mount, head_folder)
        await swarm.start_bootstrap("--web-port", str(swarm.port))
        mover = name_drawn_to(swarm, 1)
        await swarm.start_peer("head", stage=0)
        await swarm.start_peer("later", stage=1)
        await swarm.start_peer(mover)
        began, everybody = time.monotonic(), ["head", "later", mover]
        others = ["later", mover]
        found.append(await swarm.watch("thin stage", "thin", everybody, began))
        await swarm.until_round(everybody, 3)
        is_at = [each["stage"] for each in swarm.records[mover] if each["event"] == "PeerStarted"]
        print(f"# {mover} is at stage {is_at[-1]}", flush=True)
        if wanted("paused"):
            began = time.monotonic()
            await swarm.control("head", "pause")
            found.append(await swarm.watch("only head paused", "paused", everybody, began))
            await swarm.control("head", "resume")
            await swarm.over("paused", everybody)
        if wanted("frozen"):
            began = time.monotonic()
            swarm.process("head").send_signal(signal.SIGSTOP)
            found.append(await swarm.watch("only head stopped", "frozen", others, began))
            swarm.process("head").send_signal(signal.SIGCONT)
            await swarm.over("frozen", everybody)
        if wanted("links"):
            began = time.monotonic()
            killing = asyncio.create_task(_kill_linkd(swarm, "head", times=3))
            found.append(await swarm.watch("linkd killed", "links", everybody, began))
            await killing
            await swarm.over("links", everybody)
        if wanted("disk"):
            filler = head_folder / "filler"
            began = time.monotonic()
            await asyncio.to_thread(fill, filler)
            found.append(await swarm.watch("disk full", "disk", everybody, began))
            filler.unlink()
            await swarm.over("disk", everybody)
        if wanted("clock"):
            began = time.monotonic()
            await swarm.start_peer("ahead", stage=1, program=[CLOCK_OFF, "60"])
            print(f"# started after {time.monotonic() - began:.1f} s", flush=True)
            began = time.monotonic()
            found.append(await swarm.watch("clock 60 s ahead", "clock", [*everybody, "ahead"], began, about="ahead of"))
            await swarm.control("ahead", "leave")
            await asyncio.wait_for(swarm.children["ahead"].process.wait(), 30.0)
            found.append(await _refused_clock(swarm))
            await swarm.over("clock", everybody)
        if wanted("empty"):
            was = swarm.round_of("later")
            began = time.monotonic()
            swarm.process("head").kill()
            found.append(await swarm.watch("only head killed", "empty", others, began))
            with suppress(TimeoutError):
                await swarm.until(lambda: swarm.round_of("later") >= was + 3, [], 120.0)
                print(f"# certified again {time.monotonic() - began:.1f} s after the kill", flush=True)
        if wanted("bootstrap"):
            began = time.monotonic()
            swarm.process("bootstrap").kill()
            found.append(await swarm.watch("bootstrap killed", "bootstrap", others, began, with_page=False))
        tell_tracebacks(swarm)
    return found


async def _kill_linkd(swarm: Troubled, label: str, times: int) -> None:
    """Again as soon as it is back."""
    killed: set[int] = set()
    async with asyncio.timeout(OVER_S):
        while len(killed) < times:
            if (ended := swarm.children[label]).process.returncode is not None:
                raise ChildEnded(ended)
            for child in swarm.process(label).children(recursive=True):
                with suppress(psutil.Error):
                    if child.pid not in killed and any("linkd" in word for word in child.cmdline()):
                        killed.add(child.pid)
                        child.kill()
            await asyncio.sleep(0.2)


async def _refused_clock(swarm: Troubled) -> Named:
    """A peer whose clock is behind cannot join: what it is told, and after how long."""
    began, wall = time.monotonic(), time.time()
    found = Named("clock 60 s behind", "clock")
    loaded_s = 0.0
    try:
        await swarm.start_peer("behind", stage=1, program=[CLOCK_OFF, f"{OFF_S:g}"])
    except ChildEnded as error:
        ended = time.monotonic() - began
        steps = [each for each in swarm.records.get("behind", ()) if each["event"] == "Starting"]
        reached = [each["time"] - OFF_S - wall for each in steps if each["step"] == StartupStep.NETWORK]
        loaded_s = reached[0] if reached else 0.0
        found.words = [line for line in error.tail if "clock" in line][-1:]
        found.seconds = {"behind": ended - loaded_s}
        print(f"# it ended {ended:.1f} s after its start, of which loading took {loaded_s:.1f} s", flush=True)
        if not found.words:
            found.missing = [*error.tail[-1:]]
        return found
    found = await swarm.watch("clock 60 s behind", "clock", ["behind"], time.monotonic(), about="behind")
    await swarm.control("behind", "leave")
    return found


async def of_a_beginning() -> list[Named]:
    async with Troubled(preset("tiny", rounds={**ROUNDS, "start_peers": 2})) as swarm:
        await swarm.start_bootstrap("--web-port", str(swarm.port))
        await swarm.start_peer("a")
        found = [await swarm.watch("waits for start_peers", "waiting", ["a"], time.monotonic())]
        tell_tracebacks(swarm)
    return found


async def of_a_liar() -> list[Named]:
    """Four of one stage, of which one signs two values in a ballot from round 6 on, once it leads."""
    async with Troubled(preset("tiny", rounds={**ROUNDS, "start_peers": 4})) as swarm:
        await swarm.start_bootstrap("--web-port", str(swarm.port))
        honest = ["a", "b", "c"]
        starting = [swarm.start_peer(label) for label in honest]
        starting.append(swarm.start_peer("liar", program=["-m", "tests.hostile.member", "equivocates", "6"]))
        await asyncio.gather(*starting)
        await swarm.until(lambda: any(each.get("text") == TURNED for each in swarm.records["liar"]), [], LONG_S)
        found = [await swarm.watch("a liar", "hostile", honest, time.monotonic())]
        tell_tracebacks(swarm)
    return found


async def of_a_line() -> list[Named]:
    """Three of one stage, of which one gets a line of 0.1 Mbit/s."""
    async with Troubled(preset("tiny", rounds=ROUNDS, compression={"codec": "none", "adapt": "off"})) as swarm:
        await swarm.start_bootstrap("--web-port", str(swarm.port))
        await asyncio.gather(*(swarm.start_peer(label) for label in "ab"))
        await swarm.start_peer("slow", more=["--max-upload", "0.1"])
        began = time.monotonic()
        found = [await swarm.watch("line saturated", "line", ["a", "b", "slow"], began)]
        tell_tracebacks(swarm)
    return found


def make_shards(folder: Path) -> tuple[Path, Path]:
    """Shards of Python's library, and the same with a bit of each that is trained on turned over."""
    good, bad = folder / "good", folder / "bad"
    packages = sorted(str(path) for path in Path(sysconfig.get_path("stdlib")).glob("*.py") if path.stat().st_size)
    command = [sys.executable, "-m", "dilocox_peer", "tokenize", *packages, "--shard-tokens", "300000", "--validation", "0.05",
               "--processes", "1", "--out", str(good)]  # fmt: skip
    subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL)
    shutil.copytree(good, bad)
    for shard in read_catalogue(good)[0].train:
        path = bad / shard.file_name
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
    return good, bad


async def of_data(folder: Path) -> list[Named]:
    """Two peers of a run on shards; a file of one of them is not what it should be."""
    good, bad = await asyncio.to_thread(make_shards, folder)
    _, name = read_catalogue(good)
    manifest = preset("tiny", rounds=ROUNDS, data={"source": "shards", "catalogue": name})
    async with Troubled(manifest) as swarm:
        await swarm.start_bootstrap("--web-port", str(swarm.port))
        await swarm.start_peer("a", more=["--data", str(good)])
        await swarm.start_peer("wrong", more=["--data", str(bad)])
        found = [await swarm.watch("wrong data", "data", ["a", "wrong"], time.monotonic())]
        tell_tracebacks(swarm)
    return found


def tell_tracebacks(swarm: Troubled) -> None:
    for line in swarm.tracebacks():
        print(f"# TRACEBACK {line}", flush=True)


def show(found: Sequence[Named]) -> None:
    for each in found:
        seconds = sorted(each.seconds.values())
        spread = f"{seconds[0]:5.1f} {statistics.median(seconds):5.1f} {seconds[-1]:5.1f} s" if seconds else "never"
        missing = f"  NOT NAMED by {', '.join(each.missing)}" if each.missing else ""
        print(f"{each.what:<22} {each.kind:<10} {spread}  by {len(seconds)}{missing}", flush=True)
        for words in each.words:
            print(f"    {words}", flush=True)


async def run(flags: argparse.Namespace, folder: Path) -> list[Named]:
    only = set(filter(None, flags.only.split(",")))

    def wanted(kind: str) -> bool:
        return not only or kind in only

    of_head = {"thin", "paused", "frozen", "links", "disk", "clock", "empty", "bootstrap"}
    jobs: list[tuple[bool, Callable[[], Awaitable[list[Named]]]]] = [
        (wanted("waiting"), of_a_beginning),
        (not only or bool(only & of_head), lambda: of_a_head(wanted)),
        (wanted("hostile"), of_a_liar),
        (wanted("line"), of_a_line),
        (wanted("data"), lambda: of_data(folder)),
    ]
    found: list[Named] = []
    for is_wanted, job in jobs:
        if is_wanted:
            new = await job()
            show(new)
            found += new
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="kinds, with commas between")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, default=None, help="for shards; a temporary one")
    flags = parser.parse_args()
    print(f"# load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    import tempfile

    with tempfile.TemporaryDirectory(prefix="dilocox-troubles-") as temporary:
        found = asyncio.run(run(flags, flags.folder or Path(temporary)))
    if flags.json is not None:
        flags.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
    late = [each.what for each in found if each.missing or max(each.seconds.values(), default=99.0) > 10.0]
    print(
        f"# {len(found)} troubles, {len(found) - len(late)} named by all within 10 s"
        + (f"; not: {', '.join(late)}" if late else "")
    )


if __name__ == "__main__":
    main()
