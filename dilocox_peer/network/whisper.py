"""Tells our own p2pd its outside address, as observers would, so that it punches holes in routers.

    python -m dilocox_peer.network.whisper PORT PEER_ID ADDRESS PARENT     (started by outside_address.py, never by hand)

p2pd announces an address that it does not listen on, and tries to be reached there by dialling at the same moment as another (DCUtR), once
four peers with addresses of their own have seen it there. In a small run there are not so many. So five connect from this machine, which
has 127.0.0.2 and the next, and say in libp2p's identify protocol what others have seen.

A process of its own because py-libp2p cannot be imported beside hivemind. It ends by itself within LIFE_S.
"""

import ctypes
import logging
import os
import signal
import sys
from contextlib import suppress
from typing import Any

import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.identity.identify.identify import ID as IDENTIFY
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.peer.id import ID
from libp2p.security.tls.transport import PROTOCOL_ID as TLS_ID
from libp2p.security.tls.transport import TLSTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_ID
from libp2p.stream_muxer.yamux.yamux import Yamux
from libp2p.utils import encode_varint_prefixed
from multiaddr import Multiaddr

OBSERVERS = 5  # one more than p2pd wants
LIFE_S, AFTER_S = 25.0, 1.0  # in all; beside p2pd, once all have told it


async def whisper(port: int, peer: str, address: str) -> int:
    """How many of the observers were heard by the p2pd of that port and name."""
    heard = 0

    async def one(number: int) -> None:
        nonlocal heard
        key_pair = create_new_key_pair(os.urandom(32))
        host = new_host(
            key_pair=key_pair,
            sec_opt={TLS_ID: TLSTransport(key_pair)},
            muxer_opt={TProtocol(YAMUX_ID): Yamux},
        )
        asked = trio.Event()

        async def tell(stream: Any) -> None:
            seen = Identify(public_key=key_pair.public_key.serialize(), observed_addr=Multiaddr(address).to_bytes())
            await stream.write(encode_varint_prefixed(seen.SerializeToString()))
            await stream.close()
            asked.set()

        async with host.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]):
            host.set_stream_handler(IDENTIFY, tell)
            there = Multiaddr(f"/ip4/127.0.0.1/tcp/{port}")
            await host.get_network().dial_addr(there, ID.from_string(peer), (f"127.0.0.{number}", 0))
            await asked.wait()
            heard += 1
            while heard < OBSERVERS:  # noqa: ASYNC110
                await trio.sleep(0.05)
            await trio.sleep(AFTER_S)

    with trio.move_on_after(LIFE_S):
        async with trio.open_nursery() as nursery:
            for number in range(2, 2 + OBSERVERS):
                nursery.start_soon(one, number)
    return heard


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    port, peer, address, parent = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent is gone")
    logging.disable(logging.CRITICAL)
    with suppress(Exception):  # whatever goes wrong, no hole is punched, and relays pass on as before
        print(trio.run(whisper, port, peer, address), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
