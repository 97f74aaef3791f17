"""Has our p2pd know the address at which its connections come out on the Internet: starts whisper.py when that is due."""

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from dilocox_peer.invitation import parse_multiaddr
from dilocox_peer.types import PeerId

AGAIN_S = 420.0  # p2pd forgets what it was told after ten minutes
RETRY_S = 60.0
SETTLE_S = 6.0  # until p2pd looks whether it has such an address, which it does every five seconds
TELL_S = 45.0  # its start, on a busy machine, and its life


class OutsideAddress:
    """`tell` as often as one likes: it does nothing while p2pd knows."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._told = ""
        self._due_at = float("-inf")
        self.known: str | None = None  # to p2pd

    async def tell(self, address: str | None, own: Sequence[str]) -> bool:
        """Has p2pd know that address; None: it has none any more. own: where p2pd listens. Whether that is news to it."""
        now = asyncio.get_running_loop().time()
        if address is None:
            self.known = None
            return False
        port = loopback_port(own)
        if port is None or (address == self._told and now < self._due_at):
            return False
        is_new, self._told = address != self._told or self.known is None, address
        self._due_at = now + RETRY_S
        if not await self._whisper(port, address):
            return False
        if is_new:
            await asyncio.sleep(SETTLE_S)
        self.known, self._due_at = address, now + AGAIN_S
        return is_new

    async def _whisper(self, port: int, address: str) -> bool:
        command = [sys.executable, "-m", "dilocox_peer.network.whisper", str(port), self._me, address, str(os.getpid())]
        nowhere = asyncio.subprocess.DEVNULL
        process = None
        try:
            async with asyncio.timeout(TELL_S):
                process = await asyncio.create_subprocess_exec(
                    *command, stdin=nowhere, stdout=asyncio.subprocess.PIPE, stderr=nowhere, start_new_session=True
                )
                said, _ = await process.communicate()
                return said.strip().isdigit() and int(said) > OBSERVED_BY
        except OSError:  # TimeoutError is one
            return False
        finally:
            if process is not None and process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()


OBSERVED_BY = 3  # p2pd believes one more


def loopback_port(own: Sequence[str]) -> int | None:
    """Where this machine dials p2pd at 127.0.0.1; None: it does not listen there."""
    parsed = [parse_multiaddr(text, "lease") for text in own]
    return next((each.port for each in parsed if each.host == "127.0.0.1" and not each.is_relayed), None)
