"""One end of contributions without training. Who has `--to ADDRESS` is at home: it connects there and serves; the others fetch, again and again.

    python line_peer.py FOLDER [--to ADDRESS ...] [--max-upload MBIT]

Real transports, as peers have them. Each says once a second its address, what it may send, and what it has fetched.
"""

import argparse
import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from dilocox_peer.errors import DilocoxError
from dilocox_peer.invitation import parse_multiaddr
from dilocox_peer.network.transport import Reply, Transport, TransportLimits
from dilocox_peer.peer.identity import Identity
from dilocox_peer.types import PeerId, RunId

RUN = RunId("ce" * 32)
BODY = bytes(1_400_000)


async def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("folder", type=Path)
    cli.add_argument("--to", action="append", default=[])
    cli.add_argument("--max-upload", type=float)
    args = cli.parse_args()
    async with AsyncExitStack() as stack:
        identity = stack.enter_context(Identity.open(args.folder / "identity.key"))
        transport = await Transport.create(
            identity.path,
            identity.peer_id,
            namespace=RUN,
            runtime_dir=args.folder / "run",
            host_maddrs=("/ip4/0.0.0.0/tcp/4711",),
            initial_peers=args.to,
            limits=TransportLimits(upload_bytes_per_s=args.max_upload and args.max_upload * 1e6 / 8),
        )
        stack.push_async_callback(transport.close)
        fetching: set[asyncio.Task[None]] = set()
        got = 0

        async def answer(_peer: PeerId, _header: dict[str, Any]) -> Reply:
            return Reply({}, [BODY], is_urgent=True)

        async def take(piece: bytes) -> bool:
            nonlocal got
            got += len(piece)
            return True

        async def fetch(of: PeerId) -> None:
            while True:
                try:
                    await transport.fetch(of, "thing", {}, max_body_bytes=len(BODY), timeout_s=600, take=take)
                except DilocoxError:
                    await asyncio.sleep(0.2)

        await transport.serve("thing", answer)
        transport.set_message_handler(lambda peer, _raw: fetching.add(asyncio.create_task(fetch(peer))))
        for text in args.to:
            peer = parse_multiaddr(text, "peer").peer
            assert peer is not None
            await transport.connect(peer, [text])
            await transport.send(peer, b"fetch", 10.0)
        while True:
            use = transport.line.use
            told = {"rate": use.rate, "line": use.line, "waiting_ms": 1000 * use.waiting_s, "got": got}
            print(json.dumps({"addresses": transport.addresses, **told}), flush=True)
            await asyncio.sleep(1.0)


if __name__ == "__main__":
    asyncio.run(main())
