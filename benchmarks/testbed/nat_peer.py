"""A peer's way to others and nothing else of it: p2pd, dial-back, reservations, the outside address, punching. Run by nat_matrix.py.

    python nat_peer.py FOLDER [--entry MULTIADDR]... [--listen MULTIADDR]... [--announce MULTIADDR]... [--bootstrap]

Tells in JSON lines what it has: {"peer", "addresses", "reach", "paths"}. Takes on standard input, a line each, the peers there are:
[{"peer", "addresses", "reachability"}, ...]. Ends with its standard input.
"""

import argparse
import asyncio
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from dilocox_peer.dht.records import PROTOCOL_VERSION, Lease
from dilocox_peer.network.own_hosts import own_hosts
from dilocox_peer.network.relaying import Relay
from dilocox_peer.network.transport import Transport
from dilocox_peer.peer import dialback
from dilocox_peer.peer.arrival import where_to_listen
from dilocox_peer.peer.dialback import DialbackVerdict
from dilocox_peer.peer.identity import Identity
from dilocox_peer.peer.presence import Presence
from dilocox_peer.peer.reaching import Reaching
from dilocox_peer.peer.settings import ANY_PORT
from dilocox_peer.types import PeerId, RunId

RUN = RunId("cd" * 32)
TELL_S = 1.0
RELAYED_BYTES_PER_S = 12.5e6


def leases(line: str) -> list[Lease]:
    return [
        Lease(
            peer=PeerId(each["peer"]), stage=0, incarnation=1, addresses=tuple(each["addresses"]), protocol=PROTOCOL_VERSION,
            tokens_per_s=0.0, memory_bytes=0, reachability=each["reachability"], round=0,
        )
        for each in json.loads(line)
    ]  # fmt: skip


async def main(args: argparse.Namespace) -> None:
    async with AsyncExitStack() as stack:
        identity = stack.enter_context(Identity.open(args.folder / "identity.key"))
        transport = await Transport.create(
            identity.path,
            identity.peer_id,
            namespace=RUN,
            runtime_dir=args.folder / "run",
            initial_peers=args.entry,
            host_maddrs=args.listen or where_to_listen(ANY_PORT, own_hosts()),
            announce_maddrs=args.announce,
            is_public=args.bootstrap,
        )
        stack.push_async_callback(transport.close)
        await dialback.serve(transport, right=None)
        reachability = DialbackVerdict(outgoing_only=False)
        reaching = Reaching(transport, reachability, look_now=asyncio.Event(), listener=lambda _event: None)
        if args.bootstrap:
            relay = Relay(transport, RELAYED_BYTES_PER_S, is_open=lambda: True)
            stack.push_async_callback(relay.close)
            await relay.serve()
        else:
            await reachability.ask_entries(transport)
            reaching.start(stack)
        presence = Presence(identity.peer_id, 1, transport, reachability, None, reaching.reservations)
        telling = asyncio.create_task(tell(presence, reaching))
        stack.callback(telling.cancel)
        reader = asyncio.StreamReader(limit=1 << 20)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            found = leases(line.decode())
            reaching.listed(found)
            reaching.found(found, lambda _peer, _range: None, lambda: None)


async def tell(presence: Presence, reaching: Reaching) -> None:
    while True:
        said: dict[str, Any] = {
            "peer": presence.me,
            "addresses": presence.addresses,
            "reach": presence.lease(0).reachability,
            "paths": dict(reaching.paths),
        }
        print(json.dumps(said), flush=True)
        await asyncio.sleep(TELL_S)


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("folder", type=Path)
    cli.add_argument("--entry", action="append", default=[])
    cli.add_argument("--listen", action="append", default=[])
    cli.add_argument("--announce", action="append", default=[])
    cli.add_argument("--bootstrap", action="store_true")
    asyncio.run(main(cli.parse_args()))
