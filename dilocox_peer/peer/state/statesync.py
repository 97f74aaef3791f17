"""Whole anchor states between peers: serving ours, fetching another's, verified before it is used.

A request names a head, and wants the state there or its digest alone. What is served is immutable: the newest merged state,
else a checkpoint on disk.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any

from dilocox_peer.errors import PeerUnavailable, ProtocolError, StateCorrupt
from dilocox_peer.events import Listener, StateFetched, StateFetchFailed
from dilocox_peer.network.transport import Reply, Transport
from dilocox_peer.peer.state.being_sent import BeingSent
from dilocox_peer.peer.state.checkpoint import read_head
from dilocox_peer.peer.training.outer import AnchorState
from dilocox_peer.types import DIGEST_BYTES, Digest, Layout, PeerId, RunId

STATE_SERVICE = "state"
STALL_S = 30.0


class StateServer:
    """Serves states."""

    def __init__(
        self, *, current: Callable[[], AnchorState], checkpoints: Path, run_id: RunId, layout: Layout, disk: Executor
    ) -> None:
        self._current = current
        self._checkpoints = checkpoints
        self._run_id = run_id
        self._layout = layout
        self._disk = disk
        self._being_sent = BeingSent()

    async def serve(self, _peer: PeerId, header: dict[str, Any]) -> Reply:
        """The reply to a request {head: bytes}; an empty one when we have it not. With {want: "digest"} without the
        body, and of the newest state alone: no disk is read for it."""
        match header:
            case {"head": bytes(head), "want": "digest"} if len(head) == DIGEST_BYTES:
                state = self._current()
                return Reply(state.header() if state.head == head else {}, [])
            case {"head": bytes(head)} if len(head) == DIGEST_BYTES:
                return await self._at(Digest(head))
            case _:
                raise ProtocolError(_peer, "a request for state that names no head")

    async def _at(self, head: Digest) -> Reply:
        state = self._current()
        if state.head == head:
            return _reply(state)

        async def reply() -> Reply:
            read = partial(read_head, self._checkpoints, self._run_id, self._layout, head)
            return _reply(await asyncio.get_running_loop().run_in_executor(self._disk, read))

        return await self._being_sent.reply(head, reply)


def _reply(state: AnchorState | None) -> Reply:
    return Reply({}, []) if state is None else Reply(state.header(), list(state.parts()))


async def fetch_digest(transport: Transport, peer: PeerId, head: Digest, timeout_s: float) -> bytes:
    """The digest that peer says its state at head has, b"" when it has none. Raises PeerUnavailable, ProtocolError."""
    request = {"head": head, "want": "digest"}
    header, _ = await transport.fetch(peer, STATE_SERVICE, request, max_body_bytes=0, timeout_s=timeout_s)
    match header:
        case {"head": bytes(said), "digest": bytes(digest)} if said == head and len(digest) == DIGEST_BYTES:
            return digest
        case _:
            return b""


async def fetch_state(
    transport: Transport,
    donors: Sequence[PeerId],
    request: dict[str, Any],
    *,
    layout: Layout,
    expected: bytes,
    timeout_s: float,
    listener: Listener,
    round_number: int | None = None,
) -> AnchorState | None:
    """The first donor's state that verifies: its own digest, and `expected` (the certified digest) when it is known.

    round_number: of the state asked for, as the certificates say; no digest covers what the donor says of it.

    None when no donor has one. A wrong one is reported and the next donor asked. Cancelled: nothing is kept.
    """
    size_bytes = 2 * 4 * layout.num_elements
    for donor in donors:
        started = time.monotonic()
        try:
            header, body = await transport.fetch(
                donor, STATE_SERVICE, request, max_body_bytes=size_bytes, timeout_s=timeout_s, stall_timeout_s=STALL_S
            )
            if not header:
                continue
            state = await asyncio.to_thread(AnchorState.parse, layout, header, body)
            if expected and state.digest != expected:
                raise StateCorrupt(f"state {state.digest.hex()[:12]} where {expected.hex()[:12]} was certified")
            if request.get("head", state.head) != state.head:
                raise StateCorrupt("state of another head than asked for")
            if round_number is not None and state.round != round_number:
                raise StateCorrupt(f"state said to be of round {state.round} where round {round_number} was certified")
        except (PeerUnavailable, ProtocolError, StateCorrupt) as error:
            listener(StateFetchFailed(donor, str(error)))
            continue
        listener(StateFetched(state.round, donor, len(body), round(time.monotonic() - started, 3)))
        return state
    return None
