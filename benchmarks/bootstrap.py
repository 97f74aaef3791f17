"""Memory of a real bootstrap that knows many peers: their leases in its directory, their connections at its daemon.

    python benchmarks/bootstrap.py [--peers 0 100 500] [--samples 5]

The leases are signed each by a key of its own and stored through the DHT by three real nodes, so the bootstrap's validator
checks all of them, and it is among the holders of every one, which is the worst that can happen to it. The connections are
libp2p connections (TLS, yamux) of as many identities, all from one process. PSS of the bootstrap and its p2pd; a peer of a
run has the same. Expected beforehand: a lease is at most 4 KB and some Python objects around it, 500 of them some MB; a
connection costs a Go daemon some 100 KB: 250 MB for Python and p2pd, and 50 MB for 500 peers.
"""

import argparse
import asyncio
import logging
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psutil

from dilocox_peer.types import RunId

DIAL_BATCH = 25
SETTLE_S = 3.0
START_S = 300.0


def dial_many(address: str, count: int) -> None:
    """The process with the connections: says when they are there, and ends with its standard input."""
    import trio

    from dilocox_peer.network.link_host import Host

    where, _, peer = address.rpartition("/p2p/")

    logging.disable(logging.CRITICAL)

    async def hold() -> None:
        async with AsyncExitStack() as stack:
            for start in range(0, count, DIAL_BATCH):
                for _ in range(min(DIAL_BATCH, count - start)):
                    host = Host(secrets.token_bytes(32), "/dilocox/benchmark", max_connections=4)
                    await stack.enter_async_context(host.run([]))
                    with trio.fail_after(20):
                        await host.dial(peer, where)
            print("ready", flush=True)
            await trio.to_thread.run_sync(sys.stdin.read)

    trio.run(hold)


@contextmanager
def connected(address: str, count: int) -> Iterator[None]:
    command = [sys.executable, __file__, "--dial", address, "--count", str(count)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n", "the connections were not made"
        yield
    finally:
        child.kill()
        child.communicate()


@asynccontextmanager
async def nodes(link: str, count: int) -> AsyncIterator[list[Any]]:
    """Real nodes of the run's directory."""
    from dilocox_peer.cli.visit import visit
    from dilocox_peer.invitation import parse_invitation

    async with AsyncExitStack() as stack:
        yield [(await stack.enter_async_context(visit(parse_invitation(link)))).directory for _ in range(count)]


async def announce(directories: list[Any], run_id: RunId, count: int, stages: int) -> float:
    """Stores the leases of so many peers; seconds it took."""
    from dilocox_peer.dht.directory import Directory
    from dilocox_peer.dht.records import Lease
    from dilocox_peer.dht.validators import RecordValidator
    from dilocox_peer.signing import SigningKey
    from dilocox_peer.wire.records import MAX_ADDRESSES

    started = time.monotonic()
    for number in range(count):
        through = directories[number % len(directories)]
        key = SigningKey(number.to_bytes(32, "big"))
        node, transport = through.node, through.transport
        validator = RecordValidator(run_id, key, time.time)
        own, node.protocol.record_validator = node.protocol.record_validator, validator
        try:
            peer = Directory(
                node=node, transport=transport, run_id=run_id, key=key, initial_peers=(), validator=validator, clock=time.time,
            )  # fmt: skip
            addresses = tuple(
                f"/ip4/203.0.113.{index}/tcp/{4000 + number}/p2p/{key.peer_id}" for index in range(MAX_ADDRESSES)
            )
            await peer.announce(
                Lease(
                    peer=key.peer_id, stage=number % stages, incarnation=1, addresses=addresses, protocol=1,
                    tokens_per_s=1000.0, memory_bytes=0, reachability="direct", round=1,
                )
            )  # fmt: skip
        finally:
            node.protocol.record_validator = own
    return time.monotonic() - started


async def held(directory, stages: int) -> int:
    """Leases that can be read from the directory."""
    return sum([len(await directory.peers(stage, 30.0)) for stage in range(stages)])


def num_connections(pid: int) -> int:
    """Open TCP connections of its daemons."""
    daemons = psutil.Process(pid).children(recursive=True)
    return sum(each.status == psutil.CONN_ESTABLISHED for daemon in daemons for each in daemon.net_connections("tcp"))


def pss_mb(pid: int) -> tuple[float, float]:
    """(Python, its daemons)."""
    process = psutil.Process(pid)
    daemons = sum(child.memory_full_info().pss for child in process.children(recursive=True))
    return process.memory_full_info().pss / 1e6, daemons / 1e6


async def measure(peers: int, samples: int) -> None:
    from swarm import WatchedSwarm, spread

    from dilocox_peer.config import preset

    stages = 4
    manifest = preset("tiny", model={"layers": stages}, stages={"count": stages, "blocks": [1] * stages})
    async with WatchedSwarm(manifest) as swarm:
        child = await swarm.start_bootstrap()
        [ready] = swarm.of("bootstrap", "BootstrapReady")
        with connected(ready["addresses"][0], peers):
            async with nodes(swarm.link, 3) as directories:
                seconds = await announce(directories, swarm.manifest.run_id, peers, stages)
                await asyncio.sleep(SETTLE_S)
                found = await held(directories[0], stages)
                sizes = []
                for _ in range(samples):
                    sizes.append(pss_mb(child.process.pid))
                    await asyncio.sleep(1.0)
                connections = num_connections(child.process.pid)
        python, daemon = zip(*sizes, strict=True)
        both = [sum(each) for each in sizes]
        print(
            f"{peers:>5}  {found:>6}  {connections:>11}  {seconds:>8.1f}   {spread(python, '.0f'):<18} {spread(daemon, '.0f'):<18} {spread(both, '.0f')}",
            flush=True,
        )


async def main(arguments: argparse.Namespace) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    from swarm import header

    print(header())
    print("PSS in MB, min / median / max; stored: seconds for the leases\n")
    print("peers  leases  connections    stored   Python             p2pd               both")
    for peers in arguments.peers:
        async with asyncio.timeout(START_S):
            await measure(peers, arguments.samples)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, nargs="+", default=[0, 100, 500])
    parser.add_argument("--samples", type=int, default=5, help="a second apart")
    parser.add_argument("--dial", help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.dial:
        dial_many(chosen.dial, chosen.count)
    else:
        asyncio.run(main(chosen))
