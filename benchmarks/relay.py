"""What a relay's budget lets through, and who gets it: peers that only a relay connects, on this machine.

    python benchmarks/relay.py                  5, 20 and 100 Mbit/s; then one fetch beside a flood of others
    python benchmarks/relay.py --seconds 10

Real p2pds on loopback, in one process; the peers announce an address that nobody can dial. A share is of the budget, of a contribution's
bytes, while one fetch goes on after another; libp2p's own bytes count against it.
"""

import argparse
import asyncio
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from swarm import header

from dilocox_peer.errors import DilocoxError
from dilocox_peer.network.relaying import Relay
from dilocox_peer.network.reservations import reserve
from dilocox_peer.network.transport import Reply, Transport
from dilocox_peer.peer.identity import Identity
from dilocox_peer.types import PeerId, RunId

RUN = RunId("ce" * 32)
NOWHERE = ("/ip4/127.0.0.1/tcp/1",)
BODY = bytes(1 << 20)
FLOODERS = 4


class Line:
    """A relay with that budget, a peer behind it, and who fetches of it."""

    def __init__(self, stack: AsyncExitStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder

    async def transport(self, name: str, **options: Any) -> Transport:
        identity = self._stack.enter_context(Identity.open(self._folder / name / "identity.key"))
        made = await Transport.create(
            identity.path, identity.peer_id, namespace=RUN, runtime_dir=self._folder / name / "run", **options
        )
        self._stack.push_async_callback(made.close)
        return made

    async def open(self, bytes_per_s: float) -> Relay:
        self.at = await self.transport("relay")
        relay = Relay(self.at, bytes_per_s, is_open=lambda: True)
        self._stack.push_async_callback(relay.close)
        await relay.serve()
        return relay

    async def behind(self, name: str) -> Transport:
        """A peer with a place at the relay that serves BODY."""
        peer = await self.transport(name, initial_peers=self.at.addresses, announce_maddrs=NOWHERE)

        async def answer(_peer: PeerId, _header: dict[str, Any]) -> Reply:
            return Reply({}, [BODY])

        await peer.serve("thing", answer)
        _, reason = await reserve(peer, self.at.peer_id, self.at.addresses)
        assert not reason, reason
        return peer

    async def fetch(self, peer: Transport, of: PeerId, until: float) -> int:
        """Bytes of bodies that came by then."""
        got = 0

        async def take(piece: bytes) -> bool:
            nonlocal got
            got += len(piece)
            return time.monotonic() < until

        await peer.connect(of, [f"{self.at.addresses[0]}/p2p-circuit/p2p/{of}"])
        while time.monotonic() < until:
            try:
                await peer.fetch(of, "thing", {}, max_body_bytes=len(BODY), timeout_s=600, take=take)
            except DilocoxError:
                await asyncio.sleep(0.2)
        return got


async def alone(mbit_s: float, seconds: float) -> None:
    with tempfile.TemporaryDirectory(prefix="dilocox-relay-") as folder:
        async with AsyncExitStack() as stack:
            line = Line(stack, Path(folder))
            relay = await line.open(mbit_s * 1e6 / 8)
            private = await line.behind("private")
            stranger = await line.transport("stranger", announce_maddrs=NOWHERE)
            await line.fetch(stranger, private.peer_id, time.monotonic() + 3.0)  # windows have grown
            began, before = time.monotonic(), relay.num_bytes
            got = await line.fetch(stranger, private.peer_id, began + seconds)
            took = time.monotonic() - began
            passed = relay.num_bytes - before
            print(
                f"{mbit_s:g} Mbit/s: passed on {passed * 8e-6 / took:.2f} Mbit/s ({passed * 8e-6 / took / mbit_s:.2f} of the budget), "
                f"of bodies {got * 8e-6 / took:.2f} ({got * 8e-6 / took / mbit_s:.2f}), {took:.1f} s"
            )


async def beside_a_flood(mbit_s: float, seconds: float) -> None:
    """One peer sends to another, and a third has several fetch of it at the same time, through the same relay."""
    with tempfile.TemporaryDirectory(prefix="dilocox-relay-") as folder:
        async with AsyncExitStack() as stack:
            line = Line(stack, Path(folder))
            await line.open(mbit_s * 1e6 / 8)
            honest, flood = await line.behind("honest"), await line.behind("flood")
            takers = [await line.transport(f"taker{each}", announce_maddrs=NOWHERE) for each in range(1 + FLOODERS)]
            until = time.monotonic() + 4.0 + seconds
            found = await asyncio.gather(
                line.fetch(takers[0], honest.peer_id, until),
                *(line.fetch(taker, flood.peer_id, until) for taker in takers[1:]),
            )
            total = sum(found)
            print(
                f"{mbit_s:g} Mbit/s, one circuit of one sender beside {FLOODERS} of another: the first has {found[0] / total:.2f} of "
                f"{total * 8e-6 / (4.0 + seconds):.2f} Mbit/s"
            )


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--seconds", type=float, default=8.0)
    args = cli.parse_args()
    print(header())
    for mbit_s in (5.0, 20.0, 100.0):
        asyncio.run(alone(mbit_s, args.seconds))
    asyncio.run(beside_a_flood(20.0, args.seconds))


if __name__ == "__main__":
    main()
