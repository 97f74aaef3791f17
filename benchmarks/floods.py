"""Floods of every port of a live swarm, from fifty identities: what is left of training, what memory grows to, who is turned away.

    python benchmarks/floods.py [--seconds 120] [--identities 50] [--ports messages,halves,...] [--together] [--cores 1] [--pace 0.1]

A real bootstrap and three real peers (two of stage 0, one of stage 1) train on loopback. The flooders have the run's link and nothing
else; each has a p2pd and a PeerID of its own, and a link identity for linkd. Ports are flooded one after another, or all of them
--together:

    messages      40 a second of each, of 200 bytes that mean nothing
    large         of a MiB, two a second of each
    halves        messages that are begun and not ended: a MiB is announced, half of it sent, eight at once of each
    directory     pings and finds, 40 a second of each
    fetches       streams to every service with half a request, eight at once of each
    dial-back     asked for eight ports of the target's host, 10 a second of each
    connections   TCP connections to p2pd and linkd that say nothing or half a greeting of TLS, 5 a second of each
    links         handshakes with linkd, and frames before any greeting

Before, during and after each: tokens a second of all peers (from their own reports), memory of each process, processor time of the
swarm, of its p2pds and of the flooders with theirs, who was turned away. Ends
with 1 unless training kept 0.8 of before, was at 0.8 again within 10 s of the flood's end, nobody honest was turned away or hung up
on for good, and memory kept to SECURITY.md's bounds. The flooders and their p2pds share --cores at the lowest priority, as they would
have machines of their own; what they take of this one even so is counted against the swarm. All of 127.0.0.1 is one computer, where
no budget of ranges holds: fifty names are told apart, and have what strangers have in common. Where there are three cores more than
--cores the swarm has the others, and none of the flooders'. With --pace a micro-batch takes so many seconds, the computing of it included (paced.py):
where three peers that compute all day leave no processor for anything else, what a flood takes of the machine is all there is to be seen.
"""

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # where it is started by its path from elsewhere

import psutil
from fuzz import Looks
from strangers import Target
from swarm import WatchedSwarm, header, spread

from dilocox_peer.config import preset
from dilocox_peer.errors import RunUnreachable
from dilocox_peer.invitation import parse_invitation, parse_multiaddr
from dilocox_peer.model.partition import with_cut
from dilocox_peer.network.doorkeeper import DAEMON_BYTES

PORTS = ("messages", "large", "halves", "directory", "fetches", "dial-back", "connections", "links")
CALM_S = 20.0  # of looking before each flood
AFTER_S = 20.0
RECOVERED_WITHIN_S = 10.0
LEAST_SHARE = 0.8
WINDOW_S = 5.0
CORES_OF_THE_SWARM = 3  # at least, or it has what there is
SEND_S = 10.0
HOLD_S = 8.0
MOST_GROWTH = {"itself": 96 << 20, "linkd": 96 << 20, "p2pd": DAEMON_BYTES}
LINK_FLOODER = str(Path(__file__).with_name("link_flooder.py"))
SERVICES = ("dial-back", "store", "state", "backup", "hang-up")


@dataclass
class Tally:
    """What was sent, by port, and what became of it."""

    sent: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)


class Flooder:
    """One identity. port: what it floods now; empty: it rests."""

    def __init__(self, transport: Any, targets: list[Target], tally: Tally, seed: int) -> None:
        self._transport, self._targets, self._tally = transport, targets, tally
        self._rng = random.Random(seed)
        self.ports: tuple[str, ...] = ()

    async def meet(self) -> None:
        for target in self._targets:
            with suppress(Exception):
                await self._transport.connect(str(target.peer), target.addresses, 10.0)

    async def run(self) -> None:
        """Until it is cancelled."""
        do: dict[str, tuple[float, int, Callable[[Target], Awaitable[object]]]] = {
            "messages": (40.0, 8, self._message),
            "large": (2.0, 2, self._large),
            "halves": (8.0, 8, self._half),
            "directory": (40.0, 8, self._directory),
            "fetches": (8.0, 8, self._fetch),
            "dial-back": (10.0, 4, self._dial_back),
            "connections": (5.0, 5, self._connection),
        }
        async with asyncio.TaskGroup() as tasks:
            for port, (per_s, most, act) in do.items():
                tasks.create_task(self._keep_on(port, per_s, most, act))

    async def _keep_on(self, port: str, per_s: float, most: int, act: Callable[[Target], Awaitable[object]]) -> None:
        async with asyncio.TaskGroup() as tasks:
            running: set[asyncio.Task[None]] = set()
            while True:
                await asyncio.sleep((0.5 + self._rng.random()) / per_s if port in self.ports else 0.5)
                if port in self.ports and len(running) < most:
                    task = tasks.create_task(self._counted(port, act))
                    running.add(task)
                    task.add_done_callback(running.discard)

    async def _counted(self, port: str, act: Callable[[Target], Awaitable[object]]) -> None:
        target = self._rng.choice(self._targets)
        try:
            async with asyncio.timeout(SEND_S):
                await act(target)
            outcome = "taken"
        except TimeoutError:
            outcome = "no answer in time"
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            outcome = "".join("N" if each.isdigit() else each for each in text)[-60:]
        self._tally.sent[port] += 1
        self._tally.outcomes[f"{port}: {outcome}"] += 1

    async def _message(self, target: Target) -> None:
        await self._transport.send(str(target.peer), self._rng.randbytes(200), SEND_S)

    async def _large(self, target: Target) -> None:
        await self._transport.send(str(target.peer), bytes(1 << 20), SEND_S)

    async def _half(self, target: Target) -> None:
        from dilocox_peer.network.message_frames import join_batch
        from dilocox_peer.network.message_packing import Packer

        protocol = self._transport.message_protocol
        _, writer = await self._transport.daemon.open_stream(str(target.peer), protocol, SEND_S)
        try:
            writer.write(Packer().pack(1, join_batch([bytes(1 << 20)]))[: 1 << 19])
            await writer.drain()
            await asyncio.sleep(HOLD_S)
        finally:
            writer.transport.abort()

    async def _directory(self, target: Target) -> None:
        from hivemind.proto import dht_pb2

        if self._rng.random() < 0.5:
            method, request = "rpc_ping", dht_pb2.PingRequest()
        else:
            method, request = "rpc_find", dht_pb2.FindRequest(keys=[self._rng.randbytes(20) for _ in range(8)])
        await self._transport.p2p._client.call_unary_handler(
            target.peer, f"DHTProtocol.{method}", request.SerializeToString()
        )

    async def _fetch(self, target: Target) -> None:
        from dilocox_peer.network.frames import pack_header

        protocol = self._transport.fetch_protocol(self._rng.choice(SERVICES))
        _, writer = await self._transport.daemon.open_stream(str(target.peer), protocol, SEND_S)
        try:
            writer.write(pack_header(1, {"name": bytes(32), "more": bytes(1000)}, 0)[:600])
            await writer.drain()
            await asyncio.sleep(HOLD_S)
        finally:
            writer.transport.abort()

    async def _dial_back(self, target: Target) -> None:
        from dilocox_peer.peer.dialback import SERVICE

        me = self._transport.peer_id
        asked = [f"/ip4/127.0.0.1/tcp/{self._rng.randrange(1024, 65536)}/p2p/{me}" for _ in range(8)]
        await self._transport.fetch(str(target.peer), SERVICE, {"addresses": asked}, max_body_bytes=0, timeout_s=SEND_S)

    async def _connection(self, target: Target) -> None:
        text = self._rng.choice([*target.addresses, *(target.link[1] if target.link else [])])
        address = parse_multiaddr(text, "lease")
        _, writer = await asyncio.open_connection(address.host, address.port)
        try:
            writer.write(self._rng.choice((b"", b"\x13/multistream/1.0.0\n\x0b/tls/1.0.0\n\x16\x03\x01")))
            await writer.drain()
            await asyncio.sleep(HOLD_S)
        finally:
            writer.transport.abort()


@asynccontextmanager
async def flooders(link: str, count: int, targets: list[Target], tally: Tally) -> AsyncIterator[list[Flooder]]:
    from dilocox_peer.network.transport import Transport
    from dilocox_peer.peer.identity import Identity

    invitation = parse_invitation(link)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dilocox-floods-")))
        made: list[Flooder] = []
        for index in range(count):
            identity = stack.enter_context(Identity.open(folder / f"{index}" / "identity.key"))
            for attempt in range(5):
                try:
                    transport = await Transport.create(
                        identity.path, identity.peer_id, namespace=invitation.run_id, initial_peers=invitation.addresses,
                        runtime_dir=folder / f"{index}" / "runtime", startup_timeout_s=60.0,
                    )  # fmt: skip
                    break
                except RunUnreachable:  # of a machine that has too much to do
                    if attempt == 4:
                        raise
            stack.push_async_callback(transport.close)
            made.append(Flooder(transport, targets, tally, index))
            await made[-1].meet()
        yield made


# -- links ------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def link_flooders(targets: list[Target], run_id: str, count: int, tally: Tally) -> AsyncIterator[None]:
    children: list[asyncio.subprocess.Process] = []
    readers = []

    async def read(child: asyncio.subprocess.Process) -> None:
        assert child.stdout is not None
        while await child.stdout.readline():
            tally.sent["links"] += 1

    linked = [target.link for target in targets if target.link is not None]
    for link_id, [address, *_] in linked:
        child = await asyncio.create_subprocess_exec(
            sys.executable, LINK_FLOODER, link_id, address, run_id, str(max(1, count // len(linked))),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        children.append(child)
        readers.append(asyncio.create_task(read(child)))
    try:
        yield
    finally:
        for child in children:
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()
        for reader in readers:
            reader.cancel()


# -- the swarm --------------------------------------------------------------------------------------------------------


def give_way(swarm: set[int], count: int) -> None:
    """Ourselves and our p2pds, which have processors of their own elsewhere: the last `count` cores here, at the lowest priority."""
    here = sorted(os.sched_getaffinity(0))
    others, ours = here[:-count], here[-count:]
    if len(others) >= CORES_OF_THE_SWARM:
        _keep_to(others, swarm)
    me = psutil.Process()
    _keep_to(ours, {me.pid, *(each.pid for each in me.children() if each.pid not in swarm)} - swarm, alone=True)


def _keep_to(cores: list[int], pids: set[int], *, alone: bool = False) -> None:
    """Those processes with all of their threads, each of which has a core and a priority of its own. alone: without their children,
    and at the lowest priority."""
    for pid in pids:
        with suppress(psutil.Error):
            parent = psutil.Process(pid)
            for process in (parent, *([] if alone else parent.children(recursive=True))):
                for thread in process.threads():
                    with suppress(OSError):  # it has ended
                        os.sched_setaffinity(thread.id, cores)
                        if alone:
                            os.setpriority(os.PRIO_PROCESS, thread.id, 19)
                if alone:  # processor time is shared among sessions first, and each p2pd is one of its own
                    with suppress(OSError):
                        Path(f"/proc/{process.pid}/autogroup").write_text("19")


def cpu_s(swarm: set[int]) -> dict[str, float]:
    """Processor time so far, of the swarm's own processes, of its p2pds, and of us with ours."""
    found = dict.fromkeys(("swarm", "p2pd", "flooders"), 0.0)
    me = psutil.Process()
    for each in (me, *me.children(recursive=True)):
        with suppress(psutil.Error):
            of_swarm = any(parent.pid in swarm for parent in (each, *each.parents()))
            name = "flooders" if not of_swarm else "p2pd" if each.name() == "p2pd" else "swarm"
            found[name] += sum(each.cpu_times()[:2])
    return found


def cores(before: dict[str, float], after: dict[str, float], seconds: float) -> str:
    return ", ".join(f"{name} {(after[name] - before[name]) / seconds:.2f}" for name in before)


PEERS = {"peer0": 0, "peer1": 0, "peer2": 1}


@dataclass
class Seen:
    """Of one flood. tokens: a second, of all peers together."""

    port: str
    before: float
    during: float
    recovered_s: float | None
    growth: dict[str, dict[str, int]]
    honest_turned_away: int
    turned_away: int

    @property
    def share(self) -> float:
        return self.during / self.before if self.before else 0.0

    @property
    def is_well(self) -> bool:
        kept = all(
            grown <= MOST_GROWTH.get(name, 96 << 20) for parts in self.growth.values() for name, grown in parts.items()
        )
        recovered = self.recovered_s is not None and self.recovered_s <= RECOVERED_WITHIN_S
        return self.share >= LEAST_SHARE and recovered and kept and not self.honest_turned_away

    def row(self) -> str:
        mb = {
            name: max((parts.get(name, 0) for parts in self.growth.values()), default=0) / 2**20
            for name in ("itself", "p2pd", "linkd")
        }
        recovered = "never" if self.recovered_s is None else f"{self.recovered_s:.1f} s"
        return (
            f"{self.port:12} {self.before:8.0f} {self.during:8.0f} {self.share:6.2f} {recovered:>8}   "
            f"{mb['itself']:6.1f} {mb['p2pd']:6.1f} {mb['linkd']:6.1f}   {self.turned_away:5d} {self.honest_turned_away:3d}"
            f"   {'well' if self.is_well else 'NOT WELL'}"
        )


class Watched:
    """What the swarm's events say of training, over time; the loop's clock."""

    def __init__(self, swarm: WatchedSwarm) -> None:
        self._swarm = swarm
        self.samples: list[tuple[float, int]] = []  # when, tokens of all peers so far

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            tokens = 0
            for label in PEERS:
                told = self._swarm.of(label, "TrainingProgress")
                tokens += told[-1]["tokens"] if told else 0
            self.samples.append((clock(), tokens))
            await asyncio.sleep(0.5)

    def rate(self, start: float, stop: float) -> float:
        within = [sample for sample in self.samples if start <= sample[0] <= stop]
        if len(within) < 2:
            return 0.0
        return (within[-1][1] - within[0][1]) / (within[-1][0] - within[0][0])


async def find_targets(swarm: WatchedSwarm) -> list[Target]:
    from hivemind.p2p import PeerID

    from dilocox_peer.cli.visit import visit

    invitation = parse_invitation(swarm.link)
    first = parse_multiaddr(invitation.addresses[0], "peer").peer
    targets = [Target("bootstrap", PeerID.from_base58(str(first)), list(invitation.addresses), SERVICES)]
    async with visit(invitation) as open_visit, asyncio.timeout(60):
        leases: list[Any] = []
        while len(leases) < len(PEERS):
            leases = [lease for stage in range(2) for lease in await open_visit.directory.peers(stage)]
    names = {swarm.of(label, "PeerStarted")[-1]["peer"]: label for label in PEERS}
    for lease in leases:
        link = (str(lease.link), list(lease.link_addresses)) if lease.link else None
        peer = PeerID.from_base58(str(lease.peer))
        targets.append(Target(names[lease.peer], peer, list(lease.addresses), SERVICES, link))
    return targets


async def flood(arguments: argparse.Namespace) -> tuple[list[Seen], Tally]:
    manifest = with_cut(
        preset(
            "tiny",
            model={"layers": 2},
            stages={"count": 2},
            rounds={"total": 1_000_000, "inner_steps": 16, "start_peers": 1},
        )
    )
    tally, found = Tally(), []
    clock = asyncio.get_running_loop().time
    async with WatchedSwarm(manifest) as swarm:
        children = {"bootstrap": await swarm.start_bootstrap()}
        paced = (str(Path(__file__).with_name("paced.py")), "--pace", str(arguments.pace))
        program = paced if arguments.pace else ("-m", "dilocox_peer")
        for label, stage in PEERS.items():
            children[label] = await swarm.start_peer(label, stage=stage, program=program)
        needed = list(children.values())
        await swarm.until(lambda: min(len(swarm.of(label, "RoundCertified")) for label in PEERS) >= 3, needed, 180)
        targets = await find_targets(swarm)
        honest = {str(target.peer) for target in targets}
        looks = {label: Looks(child.process.pid) for label, child in children.items()}
        watched = Watched(swarm)
        watching = asyncio.create_task(watched.run())
        own = {child.process.pid for child in children.values()}
        async with flooders(swarm.link, arguments.identities, targets, tally) as made, AsyncExitStack() as stack:
            give_way(own, arguments.cores)
            fire = [asyncio.create_task(each.run()) for each in made]
            stack.callback(lambda: [each.cancel() for each in fire])
            phases = [arguments.ports] if arguments.together else [(port,) for port in arguments.ports]
            for ports in phases:
                calm, calm_at = cpu_s(own), clock()
                await asyncio.sleep(CALM_S)
                for look in looks.values():
                    look.resident.clear()
                    look.look()
                known = {label: len(swarm.events[label]) for label in children}
                began, busy = clock(), cpu_s(own)
                in_calm = cores(calm, busy, began - calm_at)
                async with AsyncExitStack() as links:
                    if "links" in ports:
                        run_id = str(swarm.manifest.run_id)
                        await links.enter_async_context(link_flooders(targets, run_id, arguments.identities, tally))
                    for each in made:
                        each.ports = ports
                    while clock() - began < arguments.seconds:
                        await asyncio.sleep(1.0)
                        for look in looks.values():
                            look.look()
                    for each in made:
                        each.ports = ()
                ended = clock()
                in_flood = cores(busy, cpu_s(own), ended - began)
                await asyncio.sleep(AFTER_S)
                before, during = watched.rate(began - CALM_S, began), watched.rate(began, ended)
                recovered = next(
                    (
                        at / 2
                        for at in range(int(2 * (AFTER_S - WINDOW_S)) + 1)
                        if watched.rate(ended + at / 2, ended + at / 2 + WINDOW_S) >= LEAST_SHARE * before
                    ),
                    None,
                )
                turned = [
                    record["who"]
                    for label in children
                    for record in swarm.events[label][known[label] :]
                    if record["event"] == "TurnedAway"
                ]
                growth = {
                    label: {name: max(values) - values[0] for name, values in look.resident.items()}
                    for label, look in looks.items()
                }
                seen = Seen(
                    "all together" if arguments.together else ports[0], before, during, recovered, growth,
                    sum(who in honest for who in turned), len(turned),
                )  # fmt: skip
                found.append(seen)
                print(seen.row(), flush=True)
                print(f"#   cores before: {in_calm}; during: {in_flood}", flush=True)
        watching.cancel()
        alive = {label: child.process.returncode is None for label, child in children.items()}
        assert all(alive.values()), alive
        lags = {
            label: [record["lag_ms_max"] for record in swarm.of(label, "TrainingProgress") if "lag_ms_max" in record]
            for label in PEERS
        }
        for label, values in lags.items():
            if values:
                print(f"# {label}: standstill of the loop, ms, {spread(values, '.0f')}")
    return found, tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--identities", type=int, default=50)
    parser.add_argument("--ports", type=lambda text: tuple(text.split(",")), default=PORTS)
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--cores", type=int, default=1, help="that the flooders have")
    parser.add_argument(
        "--pace", type=float, default=0.0, help="seconds a micro-batch takes; 0: as long as it computes"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.ports) - set(PORTS):
        parser.error(f"no such port: {', '.join(sorted(unknown))}")
    print(header())
    print(
        "flood        tokens/s before, during, share, again after   grown MB: peer, p2pd, linkd   turned away, honest"
    )
    found, tally = asyncio.run(flood(arguments))
    for what, number in sorted(tally.sent.items()):
        print(f"# {number:8d}  {what}")
    for what, number in tally.outcomes.most_common(30):
        print(f"# {number:8d}  {what}")
    is_well = all(seen.is_well for seen in found)
    print("well" if is_well else "NOT WELL")
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()
