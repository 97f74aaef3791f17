"""A live swarm under a stranger's fire: mutated messages at every entry that p2pd and linkd serve.

    python benchmarks/fuzz.py [--messages 1000000] [--minutes 600] [--seed 1] [--strangers 4] [--pace 0.05]

A real bootstrap and two real peers (a pipeline of two stages) train while strangers, who have the invitation link and
nothing else, send mutated requests to the directory, messages, fetch streams, link frames and bare bytes to the TCP ports;
strangers are nodes of the directory too and answer with garbage when they are asked. Ends with 1 unless bootstrap and peers
are the processes they were, answer their control sockets, go on certifying rounds, and have grown by at most 64 MB since the
warm-up. Standstills of the event loops are what the product itself measures (lag_ms_max), the worst of half a minute each.
The strangers share one core at the lowest priority: on machines of their own they would take no processor time from the swarm.
The peers compute at a pace (--pace) that leaves them the other one, else a million messages take an hour.
Its doorkeeper is told to let everybody in (open_doors.py): else strangers would be turned away before the decoders have seen much.
Expected beforehand: nothing ends; a peer takes 100 directory requests and 200 messages a second of each stranger, so four
strangers reach the decoders of two targets 2000 times a second at most; what is refused costs 0.1 ms of the loop.
"""

import argparse
import asyncio
import json
import os
import secrets
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from dilocox_peer.types import RunId

sys.path.insert(0, str(Path(__file__).parent))  # where it is started by its path from elsewhere

from mutations import METHODS, SERVICES, Mutations
from swarm import WatchedSwarm, header, spread

from dilocox_peer.config import preset
from dilocox_peer.invitation import parse_invitation, parse_multiaddr
from dilocox_peer.model.partition import with_cut
from dilocox_peer.peer.control import ask, socket_path

DIRECTORY_PER_S, MESSAGES_PER_S, STREAMS_PER_S, BARE_PER_S = 90, 180, 20, 5  # of one stranger, to one target
# Ticks; messages at once. A thousand at once are the end of the sender's own p2pd: it answers nothing from then on.
BURST_EVERY, BURST = 50, 60
TICK_S = 0.1
SEND_TIMEOUT_S = 10.0
MAX_UNDER_WAY = 24  # of a kind, from one stranger to one target
LOOK_S = 2.0
MOST_GROWTH_BYTES = 64 * 1024 * 1024
WARM_UP_S = 20.0
LINK_FRAMES = 24  # on a link before the next one


@dataclass
class Fire:
    """What was sent, and what became of it."""

    goal: int
    until: float  # monotonic
    sent: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)  # of us, by the swarm's nodes

    unanswered: int = 0  # may have got no farther than the sender's p2pd, so they do not count

    @property
    def total(self) -> int:
        return self.sent.total() + self.asked.total() - self.unanswered

    @property
    def is_over(self) -> bool:
        return self.total >= self.goal or time.monotonic() > self.until


@dataclass
class Target:
    label: str
    peer: Any  # PeerID
    addresses: list[str]
    serves: tuple[str, ...]
    link: tuple[str, list[str]] | None = None


@dataclass
class Looks:
    """What was seen of one process from time to time."""

    pid: int
    resident: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    lag_ms_max: list[float] = field(default_factory=list)
    lag_ms_p99: list[float] = field(default_factory=list)
    answer_ms: list[float] = field(default_factory=list)
    unanswered: int = 0

    def look(self) -> None:
        process = psutil.Process(self.pid)
        self.resident["itself"].append(process.memory_info().rss)
        for child in process.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                command = " ".join(child.cmdline())
                name = "linkd" if "linkd" in command else "p2pd" if "p2pd" in command else "other"
                self.resident[name].append(child.memory_info().rss)


# -- strangers --------------------------------------------------------------------------------------------------------


class Stranger:
    """A transport of its own, and a node of the directory that answers with garbage."""

    def __init__(self, transport: Any, mutations: Mutations, targets: list[Target], fire: Fire) -> None:
        self._transport, self._mutations, self._targets, self._fire = transport, mutations, targets, fire
        self._client = transport.p2p._client

    async def prepare(self) -> None:
        for method in METHODS:

            async def answer(_raw: bytes, _remote: Any, method: str = method) -> bytes:
                self._fire.asked[f"answer to {method}"] += 1
                return self._mutations.answer(method)

            await self._client.add_unary_handler(f"DHTProtocol.{method}", answer)
        for target in self._targets:
            await self._transport.connect(str(target.peer), target.addresses, 10.0)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for target in self._targets:
                tasks.create_task(self._keep_on(target, "directory", DIRECTORY_PER_S, self._directory))
                tasks.create_task(self._keep_on(target, "message", MESSAGES_PER_S, self._message))
                tasks.create_task(self._keep_on(target, "stream", STREAMS_PER_S, self._stream))
                tasks.create_task(self._keep_on(target, "bare bytes", BARE_PER_S, self._bare))

    async def _keep_on(self, target: Target, what: str, per_s: float, send: Callable[[Target], Any]) -> None:
        ticks, owed = 0, 0.0
        async with asyncio.TaskGroup() as tasks:
            running: set[asyncio.Task[None]] = set()
            while not self._fire.is_over:
                ticks += 1
                owed = min(owed + per_s * TICK_S, 2.0 * per_s)
                is_burst = what in ("directory", "message") and ticks % BURST_EVERY == 0
                count = BURST if is_burst else max(0, min(int(owed), MAX_UNDER_WAY - len(running)))
                owed -= 0 if is_burst else count
                for _ in range(count):
                    task = tasks.create_task(self._counted(target, what, send))
                    running.add(task)
                    task.add_done_callback(running.discard)
                await asyncio.sleep(TICK_S)

    async def _counted(self, target: Target, what: str, send: Callable[[Target], Any]) -> None:
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                outcome = await send(target)
        except TimeoutError:
            outcome = "no answer in time"
            self._fire.unanswered += 1
        except Exception as error:
            outcome = " ".join(f"{type(error).__name__}: {error}".split())
        self._fire.sent[f"{what} to {target.label}"] += 1
        self._fire.outcomes[f"{what}: {_class_of(outcome or 'taken')}"] += 1

    async def _directory(self, target: Target) -> None:
        method = self._mutations.rng.choice(METHODS)
        await self._client.call_unary_handler(
            target.peer, f"DHTProtocol.{method}", self._mutations.drawn(method, lambda: self._mutations.request(method))
        )

    async def _message(self, target: Target) -> None:
        await self._client.call_unary_handler(
            target.peer, self._transport.message_protocol, self._mutations.drawn("message", self._mutations.message)
        )

    async def _stream(self, target: Target) -> str | None:
        service = self._mutations.rng.choice(target.serves)
        protocol = self._transport.fetch_protocol(service)
        reader, writer = await self._transport.daemon.open_stream(str(target.peer), protocol, SEND_TIMEOUT_S)
        try:
            writer.write(self._mutations.fetch_request(service))
            await writer.drain()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._mutations.rng.choice((0.0, 0.1, 0.5))):
                    return f"answered {len(await reader.read(100)) > 0}"
            return "left"
        finally:
            writer.transport.abort()

    async def _bare(self, target: Target) -> None:
        """To a TCP port, p2pd's or linkd's, below all protocols."""
        rng = self._mutations.rng
        text = rng.choice([*target.addresses, *(target.link[1] if target.link else [])])
        address = parse_multiaddr(text, "lease")
        _, writer = await asyncio.open_connection(address.host, address.port)
        try:
            hello = rng.choice(
                (b"", b"\x13/multistream/1.0.0\n", b"\x13/multistream/1.0.0\n\x0b/tls/1.0.0\n\x16\x03\x01")
            )
            writer.write(self._mutations.broken(hello) + rng.randbytes(rng.choice((0, 10, 2000))))
            await writer.drain()
        finally:
            writer.close()


def _class_of(outcome: str) -> str:
    """Without what differs from one to the next."""
    return "".join("N" if each.isdigit() else each for each in outcome)[:60].replace("NN", "N").replace("NN", "N")


@asynccontextmanager
async def strangers(
    link: str, count: int, seed: int, targets: list[Target], fire: Fire
) -> AsyncIterator[list[Stranger]]:
    import tempfile

    from dilocox_peer.network.daemon import raw_peer
    from dilocox_peer.network.transport import Transport
    from dilocox_peer.peer.identity import Identity

    invitation = parse_invitation(link)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dilocox-fuzz-")))
        made = []
        for index in range(count):
            identity = stack.enter_context(Identity.open(folder / f"{index}" / "identity.key"))
            transport = await Transport.create(
                identity.path, identity.peer_id, namespace=invitation.run_id, initial_peers=invitation.addresses,
                runtime_dir=folder / f"{index}" / "runtime",
            )  # fmt: skip
            stack.push_async_callback(transport.close)
            mutations = Mutations(seed + index, invitation.run_id, identity.key, raw_peer(identity.peer_id))
            made.append(Stranger(transport, mutations, targets, fire))
            await made[-1].prepare()
        yield made


# -- links ------------------------------------------------------------------------------------------------------------


def fire_at_link(link_id: str, address: str, run_id: str, seed: int) -> None:
    """The process of a stranger with a libp2p of its own: says how many frames it has sent, and ends with its input."""
    import logging
    import threading

    import trio

    from dilocox_peer.network.frames import pack_header
    from dilocox_peer.network.link_frames import FrameKind
    from dilocox_peer.network.link_host import Host, abort
    from dilocox_peer.signing import SigningKey

    logging.disable(logging.CRITICAL)
    key = SigningKey(secrets.token_bytes(32))
    mutations = Mutations(seed, RunId(run_id), key, b"")
    rng, over, sent = mutations.rng, threading.Event(), 0

    async def one(host: Host) -> None:
        nonlocal sent
        with trio.move_on_after(SEND_TIMEOUT_S):
            conn = await host.dial(link_id, address)
            try:
                kind = rng.randrange(4)
                streams = [await host.open_stream(conn, timeout_s=5) for _ in range(12 if kind == 0 else 2)]
                for role, stream in zip(("control", "bulk"), streams, strict=False):
                    hello = pack_header(FrameKind.HELLO, {"role": role, "g": time.time_ns()}, 0)
                    await stream.write(
                        hello if kind > 1 else mutations.frame(FrameKind.HELLO, {"role": role, "g": mutations.value(1)})
                    )
                    sent += 1
                for _ in range(LINK_FRAMES):
                    await rng.choice(streams).write(mutations.link_frame())
                    sent += 1
                with trio.move_on_after(rng.choice((0.0, 0.2))):
                    await streams[0].read(1000)
            finally:
                abort(conn)

    async def main() -> None:
        while not over.is_set():
            host = Host(secrets.token_bytes(32), f"/dilocox/link/1/{run_id[:16]}", max_connections=64)
            async with host.run([]):
                for _ in range(20):
                    with suppress(Exception):
                        await one(host)
                    print(sent, flush=True)
                    await trio.sleep(0.02)
                    if over.is_set():
                        break

    def wait_for_end() -> None:
        sys.stdin.read()
        over.set()

    waiting = threading.Thread(target=wait_for_end, daemon=True)
    waiting.start()
    while not over.is_set():
        with suppress(Exception, BaseExceptionGroup):  # of our own libp2p, at what the other side made of it
            trio.run(main)


@asynccontextmanager
async def link_strangers(targets: list[Target], run_id: str, seed: int, fire: Fire) -> AsyncIterator[None]:
    children, readers = [], []

    async def count(child: asyncio.subprocess.Process, label: str) -> None:
        assert child.stdout is not None
        while line := await child.stdout.readline():
            with suppress(ValueError):
                fire.sent[f"link frame to {label}"] = int(line)

    for target in targets:
        if target.link is None:
            continue
        link_id, [address, *_] = target.link
        child = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--fire-at-link", link_id, address, run_id, str(seed),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        children.append(child)
        readers.append(asyncio.create_task(count(child, target.label)))
    try:
        yield
    finally:
        for child in children:
            child.kill()
            await child.wait()
        for reader in readers:
            reader.cancel()


# -- the swarm --------------------------------------------------------------------------------------------------------


async def find_targets(swarm: WatchedSwarm) -> list[Target]:
    from hivemind.p2p import PeerID

    from dilocox_peer.cli.visit import visit

    invitation = parse_invitation(swarm.link)
    first = parse_multiaddr(invitation.addresses[0], "peer").peer
    targets = [Target("bootstrap", PeerID.from_base58(str(first)), list(invitation.addresses), ("dial-back",))]
    async with visit(invitation) as open_visit, asyncio.timeout(60):
        leases: list[Any] = []
        while len(leases) < 2:
            leases = [lease for stage in range(2) for lease in await open_visit.directory.peers(stage)]
    names = {swarm.of(label, "PeerStarted")[-1]["peer"]: label for label in ("peer0", "peer1")}
    for lease in leases:
        link = (str(lease.link), list(lease.link_addresses)) if lease.link else None
        targets.append(
            Target(names[lease.peer], PeerID.from_base58(str(lease.peer)), list(lease.addresses), SERVICES, link)
        )
    return targets


async def watch(swarm: WatchedSwarm, looks: dict[str, Looks], fire: Fire) -> None:
    told_at = time.monotonic()
    while True:
        for label, look in looks.items():
            try:
                look.look()
                asked_at = time.monotonic()
                status = (await ask(socket_path(swarm.folder / "peers" / label), "status"))["status"]
                look.answer_ms.append(1000 * (time.monotonic() - asked_at))
                for key, values in (("lag_ms_max", look.lag_ms_max), ("lag_ms_p99", look.lag_ms_p99)):
                    found = status.get(key, (status.get("progress") or {}).get(key))
                    if found is not None:
                        values.append(found)
            except Exception as error:
                look.unanswered += 1
                print(f"# {label} gives no answer: {error!r}", file=sys.stderr)
        if time.monotonic() - told_at > 30:
            told_at = time.monotonic()
            print(
                f"# {fire.total} messages, round {len(swarm.of('peer0', 'RoundCertified'))}",
                file=sys.stderr,
                flush=True,
            )
        await asyncio.sleep(LOOK_S)


async def fuzz(arguments: argparse.Namespace) -> dict[str, Any]:
    manifest = with_cut(
        preset(
            "tiny",
            model={"layers": 2},
            stages={"count": 2},
            inner={"micro_batch": 4, "accumulate": 8},
            rounds={"total": 1_000_000, "inner_steps": 4},
        )
    )
    fire = Fire(arguments.messages, until=float("inf"))
    async with WatchedSwarm(manifest) as swarm:
        program: tuple[str, ...] = (str(Path(__file__).with_name("open_doors.py")),)
        children = {"bootstrap": await swarm.start_bootstrap(program=program)}
        program += ("--pace", str(arguments.pace)) if arguments.pace else ()
        for stage in range(2):
            children[f"peer{stage}"] = await swarm.start_peer(f"peer{stage}", stage=stage, program=program)
        needed = list(children.values())

        def rounds() -> int:
            return len(swarm.of("peer0", "RoundCertified"))

        await swarm.until(lambda: rounds() >= 3, needed, 120)
        looks = {label: Looks(child.process.pid) for label, child in children.items()}
        watching = asyncio.create_task(watch(swarm, looks, fire))
        await asyncio.sleep(arguments.calm)
        calm = {label: (list(look.lag_ms_max), list(look.lag_ms_p99)) for label, look in looks.items()}
        targets = await find_targets(swarm)
        fire.until = time.monotonic() + 60 * arguments.minutes
        began_at, warm_from = time.monotonic(), 0
        rounds_before = rounds()
        run_id = str(swarm.manifest.run_id)
        # Strangers have processors of their own. Here they share one core, which the swarm may use as well; on the others they
        # take nothing. A lower priority alone does not do: it counts within a session, and the kernel shares by session.
        os.nice(19)
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[-1:])
        async with (
            strangers(swarm.link, arguments.strangers, arguments.seed, targets, fire) as made,
            link_strangers(targets, run_id, arguments.seed, fire),
            asyncio.TaskGroup() as tasks,
        ):
            fires = [tasks.create_task(stranger.run()) for stranger in made]
            await asyncio.sleep(min(WARM_UP_S, arguments.messages / 1000))
            warm_from = len(looks["peer0"].resident["itself"])
            await asyncio.wait(fires)
            took_s = time.monotonic() - began_at
        alive = {label: child.process.returncode is None for label, child in children.items()}
        rounds_under_fire = rounds() - rounds_before
        goal = rounds() + 3
        goes_on = True
        try:
            await swarm.until(lambda: rounds() >= goal, needed, 120)
        except Exception as error:
            goes_on = False
            print(f"# {error!r}", file=sys.stderr)
        await asyncio.sleep(2 * LOOK_S)
        watching.cancel()
        events = {
            label: dict(Counter(record["event"] for record in swarm.events[label]).most_common(30))
            for label in children
        }
        failed = [record for label in children for record in swarm.of(label, "Failed")]
        tails = {label: list(child.tail)[-12:] for label, child in children.items()}
    growth = {
        label: {
            name: max(values[min(warm_from, len(values) - 1) :]) - values[min(warm_from, len(values) - 1)]
            for name, values in look.resident.items()
        }
        for label, look in looks.items()
    }
    return {
        "seed": arguments.seed, "messages": fire.total, "seconds": took_s, "rate": fire.total / took_s, "alive": alive,
        "goes_on": goes_on, "rounds_under_fire": rounds_under_fire, "growth": growth,
        "well": all(alive.values()) and goes_on
        and all(each.get("itself", 0) <= MOST_GROWTH_BYTES for each in growth.values()),
        "looks": looks, "calm": calm, "sent": fire.sent, "asked": fire.asked, "outcomes": fire.outcomes, "events": events, "unanswered": fire.unanswered,
        "failed": failed[-10:], "num_failed": len(failed), "tails": tails,
    }  # fmt: skip


def show(report: dict[str, Any]) -> None:
    print(header())
    print(f"# seed {report['seed']}")
    print(f"{report['messages']} messages in {report['seconds']:.0f} s ({report['rate']:.0f}/s)")
    for what, number in sorted({**report["sent"], **report["asked"]}.items()):
        print(f"    {number:8d}  {what}")
    print(f"of these {report['unanswered']} had no answer and are not counted; what became of all, the most frequent:")
    for what, number in report["outcomes"].most_common(40):
        print(f"    {number:8d}  {what}")
    print(
        f"alive: {report['alive']}; rounds certified under fire: {report['rounds_under_fire']}; goes on: {report['goes_on']}"
    )
    print("process        resident MB min / median / max          grown since the warm-up, MB")
    for label, look in report["looks"].items():
        for name, values in look.resident.items():
            mb = [value / 2**20 for value in values]
            print(f"{label:10s} {name:7s} {spread(mb, '.1f'):36s} {report['growth'][label][name] / 2**20:8.1f}")
    print("loop: standstill of half a minute, ms; 99th percentile, ms; answer of the control socket, ms; unanswered")
    for label, look in report["looks"].items():
        calm_max, _ = report["calm"][label]
        print(
            f"{label:10s} {spread(look.lag_ms_max or [0.0], '.0f')} (calm {spread(calm_max or [0.0], '.0f')});"
            f" {spread(look.lag_ms_p99 or [0.0], '.0f')}; {spread(look.answer_ms or [0.0], '.0f')}; {look.unanswered}"
        )
    for label, events in report["events"].items():
        print(f"events of {label}: {events}")
    print(f"failures told: {report['num_failed']}")
    for record in report["failed"]:
        print(f"    {json.dumps(record)[:300]}")
    for label, lines in report["tails"].items():
        for line in lines:
            print(f"    {label}: {line[:300]}")
    print("well" if report["well"] else "NOT WELL")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=600.0, help="at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--strangers", type=int, default=4)
    parser.add_argument(
        "--pace", type=float, default=0.05, help="seconds a peer takes for a micro-batch; 0: as fast as it computes"
    )
    parser.add_argument("--calm", type=float, default=10.0, help="seconds of looking before the first message")
    parser.add_argument("--fire-at-link", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.fire_at_link:
        link_id, address, run_id, seed = arguments.fire_at_link
        fire_at_link(link_id, address, run_id, int(seed))
        return
    report = asyncio.run(fuzz(arguments))
    show(report)
    sys.exit(0 if report["well"] else 1)


if __name__ == "__main__":
    main()
