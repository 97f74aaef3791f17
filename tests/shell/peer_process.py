"""A peer in a process of its own, to be killed and frozen: a transport that serves "blob" and "never", and a directory.

Prints one JSON line {"peer", "addresses", "p2pd", "sockets"} when ready; runs until its standard input closes.
"""

import argparse
import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

from dilocox_peer.dht.directory import Directory
from dilocox_peer.network.transport import Reply, Transport, TransportLimits
from dilocox_peer.peer.identity import Identity
from dilocox_peer.types import PeerId, RunId


def blob(size_bytes: int) -> bytes:
    return random.Random(size_bytes).randbytes(size_bytes)


async def serve_blob(_peer: PeerId, header: dict[str, Any]) -> Reply:
    body = blob(header["size_bytes"])
    return Reply({"size_bytes": len(body)}, [body[:100], memoryview(body)[100:]])


async def serve_never(_peer: PeerId, _header: dict[str, Any]) -> Reply:
    await asyncio.Event().wait()
    raise AssertionError


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("home", type=Path)
    parser.add_argument("run_id", type=RunId)
    parser.add_argument("--initial-peers", nargs="*", default=[])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--upload-bytes-per-s", type=float)
    arguments = parser.parse_args()
    with Identity.open(arguments.home / "identity.key") as identity:
        async with (
            await Transport.create(
                identity.path,
                identity.peer_id,
                namespace=arguments.run_id,
                runtime_dir=arguments.home / "run",
                initial_peers=arguments.initial_peers,
                host_maddrs=[f"/ip4/127.0.0.1/tcp/{arguments.port}"],
                limits=TransportLimits(upload_bytes_per_s=arguments.upload_bytes_per_s),
            ) as transport,
            await Directory.create(transport, arguments.run_id, identity.key),
        ):
            transport.set_message_handler(lambda _peer, _raw: None)
            await transport.serve("blob", serve_blob)
            await transport.serve("never", serve_never)
            said = {
                "peer": identity.peer_id,
                "addresses": transport.addresses,
                "p2pd": transport.daemon_pid,
                "sockets": str(transport.daemon.folder),
            }
            print(json.dumps(said), flush=True)
            await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
