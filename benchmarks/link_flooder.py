"""Handshakes with a linkd, and frames before any greeting, again and again: `python benchmarks/link_flooder.py LINK_ID ADDRESS RUN_ID IDENTITIES`.

floods.py starts it; py-libp2p and hivemind cannot be imported into one process. Until its input ends. Prints how many links it tried.
"""

import logging
import secrets
import sys
import time
from contextlib import suppress

import trio

from dilocox_peer.network.frames import pack_header
from dilocox_peer.network.link_frames import FrameKind
from dilocox_peer.network.link_host import Host, abort

TRY_S = 10.0
HOLD_S = 8.0
OPEN_S = 5


class LinkFlooder:
    """Some identities against one linkd."""

    def __init__(self, link_id: str, address: str, run_id: str) -> None:
        self._link_id, self._address = link_id, address
        self._protocol = f"/dilocox/link/1/{run_id[:16]}"
        self._tried = 0

    async def run(self, count: int) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(self._forever, secrets.token_bytes(32))
            await trio.to_thread.run_sync(sys.stdin.read)
            nursery.cancel_scope.cancel()

    async def _forever(self, seed: bytes) -> None:
        while True:
            with suppress(Exception, BaseExceptionGroup):
                await self._once(seed)
            await trio.sleep(0.5)

    async def _once(self, seed: bytes) -> None:
        host = Host(seed, self._protocol, max_connections=4)
        async with host.run([]):
            with trio.move_on_after(TRY_S), suppress(Exception):
                conn = await host.dial(self._link_id, self._address)
                try:
                    streams = {role: await host.open_stream(conn, timeout_s=OPEN_S) for role in ("control", "bulk")}
                    for role, stream in streams.items():
                        await stream.write(pack_header(FrameKind.HELLO, {"role": role, "g": time.time_ns()}, 0))
                    for _ in range(200):  # before any greeting
                        await streams["control"].write(pack_header(FrameKind.FRAME, {"h": bytes(4000)}, 0))
                    await streams["bulk"].write(pack_header(FrameKind.FRAME, {"h": b""}, 1 << 20) + bytes(1 << 16))
                    await trio.sleep(HOLD_S)
                finally:
                    abort(conn)
        self._tried += 1
        print(self._tried, flush=True)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    with suppress(Exception, BaseExceptionGroup):
        trio.run(LinkFlooder(*sys.argv[1:4]).run, int(sys.argv[4]))
