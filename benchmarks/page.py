"""What the run's page costs whoever serves it: size, time a refresh, memory; how soon it is painted; what an attack on its port does.

    python benchmarks/page.py [--peers 500] [--rounds 5000] [--stages 2] [--repeats 20] [--browser] [--attack] [--bootstrap] [--fresh]

The run is made up (tests/simulated_run.py): that many peers announce themselves, a roster of 16 a stage contributes, nothing is signed. A
refresh is all that the server's thread does for one look: fold, sections, JSON; with a new round of every stage each time, and
with none. --browser: the first paint in a headless Chromium. --attack: the page's server in this process beside a loop that stands for the
bootstrap's, whose lateness is measured while others open 200 connections, send headers byte by byte, huge ones and pipelined requests.
--bootstrap: the same attack on a real bootstrap's page, and how late its own loop was, by its own measure.
--fresh: a real run of two peers; from a round's certificate at the first of them to the page's stream that tells it.
Expected beforehand: 1,024 points of 9 columns are 70 KB, 500 peers 100 KB, as many contributors 80 KB; a fold of one round some
microseconds, JSON of 250 KB 5 ms.
"""

import argparse
import asyncio
import gc
import gzip
import json
import multiprocessing
import random
import resource
import socket
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from dilocox_peer.types import RunId
from dilocox_peer.web.document import RunPage
from dilocox_peer.web.facts import RunFacts
from dilocox_peer.web.server import PageServer
from tests.simulated_run import simulated_facts, simulated_manifest

ATTACK_S = 12.0
FRESH_ROUNDS = 20
WINDOW_S = 30.0  # of the bootstrap's own measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--browser", action="store_true")
    parser.add_argument("--attack", action="store_true")
    parser.add_argument("--bootstrap", action="store_true")
    parser.add_argument("--fresh", action="store_true")
    flags = parser.parse_args()
    print(f"load {psutil.getloadavg()[0]:.1f}, {' '.join(sys.argv)}")
    manifest = simulated_manifest(2 * flags.rounds, flags.stages)
    page = RunPage(manifest)
    before = private_bytes()
    facts = simulated_facts(manifest, peers=flags.peers, rounds=flags.rounds + flags.repeats)
    chains = private_bytes() - before
    fold(page, facts, flags.rounds, flags.repeats, chains)
    if flags.browser:
        asyncio.run(first_paint(manifest.run_id, RunPage(manifest), facts, flags.repeats))
    if flags.attack:
        asyncio.run(attack(manifest.run_id, RunPage(manifest), facts))
    if flags.bootstrap:
        asyncio.run(attack_bootstrap())
    if flags.fresh:
        asyncio.run(freshness())


def fold(page: RunPage, facts: RunFacts, rounds: int, repeats: int, chains: int) -> None:
    from dilocox_peer.web.server import Shown

    before = private_bytes()
    shown = Shown(page)
    short = [tuple(stage.certificates[: rounds + 1]) for stage in facts.stages]

    def at(number: int) -> RunFacts:
        """The run that many rounds later."""
        stages = [
            replace(stage, certificates=(*chain, *stage.certificates[len(chain) : len(chain) + number]))
            for stage, chain in zip(facts.stages, short, strict=True)
        ]
        return replace(facts, stages=stages, at_s=facts.at_s + number)

    def refresh(looked: RunFacts) -> None:
        shown.put(page.take(looked))

    first = timed(partial(refresh, at(0)))
    new = [timed(partial(refresh, at(number + 1))) for number in range(repeats)]
    last = at(repeats)
    same = [timed(partial(refresh, last)) for _ in range(repeats)]
    print(
        f"document: {len(shown.raw) / 1e3:.0f} kB, gzip {len(gzip.compress(shown.raw, 5)) / 1e3:.0f} kB; of it "
        + ", ".join(f"{name} {len(text) / 1e3:.0f}" for name, (_, text) in shown.sections.items())
    )
    print(f"first look, all rounds: {1e3 * first:.0f} ms")
    print(f"refresh with a new round of every stage, ms: {spread(new)}")
    print(f"refresh without: {spread(same)}")
    print(
        f"memory: {(private_bytes() - before) / 1e6:.1f} MB of the page (fold and document); the chains themselves {chains / 1e6:.0f} MB; in all {private_bytes() / 1e6:.0f} MB"
    )


async def first_paint(run: RunId, page: RunPage, facts: RunFacts, repeats: int) -> None:
    from tests.browser.chromium import chromium

    painted, drawn = [], []
    with PageServer({run: page}, host="127.0.0.1", port=0, listener=print) as served:
        served.show(run, facts)
        async with chromium() as browser:
            for _ in range(repeats):
                tab = await browser.tab()
                await tab.look_like()
                await tab.open(served.url)
                await tab.until("document.querySelector('#curve canvas') !== null")
                painted.append(
                    await tab.run("performance.getEntriesByName('first-contentful-paint')[0].startTime / 1000")
                )
                drawn.append(await tab.run("performance.now() / 1000"))
                await tab.open("about:blank")  # a browser has six connections to one server at most, streams among them
    print(f"first contentful paint, ms: {spread(painted)}; curve drawn at most after: {spread(drawn)}")


async def attack(run: RunId, page: RunPage, facts: RunFacts) -> None:
    with PageServer({run: page}, host="127.0.0.1", port=0, listener=print) as served:
        served.show(run, facts)
        assert await asyncio.to_thread(answers, served.port, 100), "it never answers"
        gc.freeze()  # as the bootstrap does
        before = private_bytes()
        quiet = await lateness(served, run, facts, asyncio.sleep(ATTACK_S))
        attackers = multiprocessing.get_context("spawn").Process(target=attack_port, args=(served.port,))
        await asyncio.to_thread(attackers.start)
        attacked = await lateness(served, run, facts, asyncio.to_thread(attackers.join))
        print(
            f"the other loop late, p50 / p99 / max ms over {ATTACK_S:.0f} s: refreshes alone {quiet[0]}, under attack {attacked[0]}; "
            f"memory {(attacked[1] - before) / 1e6:+.0f} MB at most; processor time of this process {quiet[2]:.1f} and {attacked[2]:.1f} s"
        )
        began = time.perf_counter()
        does = await asyncio.to_thread(answers, served.port, 100)
        print(
            f"afterwards the page {'answers' if does else 'does NOT answer'} within {1e3 * (time.perf_counter() - began):.0f} ms"
        )


async def attack_bootstrap() -> None:
    from dilocox_peer.cli.local_swarm import LocalSwarm
    from dilocox_peer.config import preset
    from dilocox_peer.peer.control import ask, socket_path

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with LocalSwarm(preset("tiny"), lambda _label, _record: None) as swarm:
        child = await swarm.start_bootstrap("--web-port", str(port), "--evaluate")
        assert await asyncio.to_thread(answers, port, 100), "its page never answers"

        async def seen() -> tuple[str, int]:
            status = (await ask(socket_path(swarm.folder / "peers" / "bootstrap"), "status"))["status"]
            memory = await asyncio.to_thread(psutil.Process(child.process.pid).memory_full_info)
            return f"p99 {status['lag_ms_p99']:.1f}, max {status['lag_ms_max']:.1f} ms", memory.uss

        await asyncio.sleep(WINDOW_S)
        quiet, before = await seen()
        attackers = multiprocessing.get_context("spawn").Process(target=attack_port, args=(port, WINDOW_S))
        attackers.start()
        await asyncio.to_thread(attackers.join)
        attacked, after = await seen()
        does = await asyncio.to_thread(answers, port, 100)
    print(
        f"a real bootstrap's loop late over {WINDOW_S:.0f} s: {quiet} quiet, {attacked} under attack; memory {before / 1e6:.0f} MB, "
        f"{(after - before) / 1e6:+.0f} MB after; its page {'answers' if does else 'does NOT answer'} afterwards"
    )


async def freshness() -> None:
    from dilocox_peer.cli.local_swarm import LocalSwarm
    from dilocox_peer.config import preset

    certified: dict[int, float] = {}  # round -> wall clock at the first peer that has it

    def take(_label: str, record: dict[str, Any]) -> None:
        if record["event"] == "RoundCertified":
            certified.setdefault(record["round"], record["time"])

    told: dict[int, float] = {}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    manifest = preset("tiny", rounds={"start_peers": 2, "total": 10 * FRESH_ROUNDS}, compression={"adapt": "off"})
    async with LocalSwarm(manifest, take) as swarm:
        await swarm.start_bootstrap("--web-port", str(port))
        for label in "ab":
            await swarm.start_peer(label)
        assert await asyncio.to_thread(answers, port, 100), "its page never answers"
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
        writer.write(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(300):
            while max(told, default=0) < FRESH_ROUNDS:
                line = await reader.readline()
                assert line, "the stream has ended"
                if line.startswith(b"data: ") and (now := json.loads(line[6:]).get("now")):
                    for number in range(max(told, default=0) + 1, now["round"] + 1):
                        told[number] = time.time()
        writer.close()
    late = [told[number] - certified[number] for number in sorted(told) if number in certified]
    print(f"news of {len(late)} rounds, ms from the first peer's certificate to the page's stream: {spread(late)}")


async def lateness(served: PageServer, run: RunId, facts: RunFacts, ends: Awaitable[object]) -> tuple[str, int, float]:
    """How late this loop is until `ends` does, with a refresh every two seconds; the most memory; processor time."""
    late: list[float] = []
    most, began, worked = 0, time.monotonic(), time.process_time()
    ending = asyncio.ensure_future(ends)
    shown = began
    while not ending.done():
        due = time.monotonic() + 0.01
        await asyncio.sleep(0.01)
        late.append(time.monotonic() - due)
        if time.monotonic() > shown + 2.0:
            shown = time.monotonic()
            served.show(run, replace(facts, at_s=facts.at_s + shown))
            most = max(most, await asyncio.to_thread(private_bytes))
    late.sort()
    told = " / ".join(f"{1e3 * late[int(part * (len(late) - 1))]:.1f}" for part in (0.5, 0.99, 1.0))
    return told, most, time.process_time() - worked


def attack_port(port: int, seconds: float = ATTACK_S) -> None:
    """All at once, in a process of its own."""
    ended = threading.Event()
    threads = [threading.Thread(target=each, args=(port, ended)) for each in (hold, drip, flood, pipeline, swallow)]
    for each in threads:
        each.start()
    time.sleep(seconds)
    ended.set()
    for each in threads:
        each.join()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=2)


def hold(port: int, ended: threading.Event) -> None:
    """200 connections, half of them streams that nobody reads."""
    while not ended.is_set():
        with ExitStack() as stack, suppress(OSError):
            for number in range(200):
                each = stack.enter_context(closing(connect(port)))
                if number % 2:
                    each.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            ended.wait(3.0)


def drip(port: int, ended: threading.Event) -> None:
    """A byte of a header at a time."""
    while not ended.is_set():
        with suppress(OSError), closing(connect(port)) as each:
            for byte in b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * 100:
                each.sendall(bytes([byte]))
                if ended.wait(0.05):
                    return


def flood(port: int, ended: threading.Event) -> None:
    """Huge headers, and bytes that are no request."""
    while not ended.is_set():
        with suppress(OSError), closing(connect(port)) as each:
            each.sendall(b"GET /" + random.randbytes(4) * 250_000)
        ended.wait(0.005)


def pipeline(port: int, ended: threading.Event) -> None:
    """Many requests over one connection."""
    while not ended.is_set():
        with suppress(OSError), closing(connect(port)) as each:
            each.sendall(b"GET /api/state HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000)
        ended.wait(0.005)


def swallow(port: int, ended: threading.Event) -> None:
    """Asks for the state and reads nothing."""
    while not ended.is_set():
        with ExitStack() as stack, suppress(OSError):
            for _ in range(40):
                stack.enter_context(closing(connect(port))).sendall(
                    b"GET /api/state HTTP/1.1\r\nHost: localhost\r\n\r\n"
                )
            ended.wait(1.0)


def answers(port: int, times: int) -> bool:
    """Whether it gives its document, asked so often at most."""
    for _ in range(times):
        with suppress(OSError, IndexError), closing(connect(port)) as each:
            each.sendall(b"GET /api/state HTTP/1.1\r\nHost: localhost\r\n\r\n")
            raw = b"".join(iter(lambda: each.recv(1 << 16), b""))
            if raw.startswith(b"HTTP/1.1 200") and json.loads(raw.partition(b"\r\n\r\n")[2]):
                return True
        time.sleep(0.1)
    return False


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def spread(seconds: Sequence[float]) -> str:
    """min / median / max in ms."""
    return " / ".join(f"{1e3 * each:.1f}" for each in (min(seconds), statistics.median(seconds), max(seconds)))


def private_bytes() -> int:
    return int(psutil.Process().memory_full_info().uss)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    main()
