"""Whole anchor states between peers: serving ours, fetching another's, verified before it is used.

Who asks names a head, or a round, or a round after which it wants the newest (then the answer waits for one: followers such
as the evaluator need no polling). What is served is immutable: the newest merged state, else a checkpoint on disk.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from dilocox_peer.errors import PeerUnavailable, ProtocolError, StateCorrupt
from dilocox_peer.events import Listener, StateFetched, StateFetchFailed
from dilocox_peer.peer.network.transport import Reply, Transport
from dilocox_peer.peer.state.being_sent import BeingSent
from dilocox_peer.peer.state.checkpoint import read_head, read_round
from dilocox_peer.peer.training.outer import AnchorState
from dilocox_peer.types import DIGEST_BYTES, Digest, Layout, PeerId, RunId

STATE_SERVICE = "state"
MAX_WAIT_S = 20.0  # below what the transport lets a handler take
STALL_S = 30.0


class StateServer:
    """Serves states; `on_merged` wakes those who wait for a newer one."""

    def __init__(
        self, *, current: Callable[[], AnchorState], checkpoints: Path, run_id: RunId, layout: Layout, disk: Executor
    ) -> None:
        self._current = current
        self._checkpoints = checkpoints
        self._run_id = run_id
        self._layout = layout
        self._disk = disk
        self._newer = asyncio.Event()
        self._being_sent = BeingSent()
        self._is_final: Callable[[AnchorState], bool] = lambda state: False

    def set_is_final(self, is_final: Callable[[AnchorState], bool]) -> None:
        """is_final: whether the run ends with a state; those who follow it need to know."""
        self._is_final = is_final

    def on_merged(self) -> None:
        newer, self._newer = self._newer, asyncio.Event()
        newer.set()

    async def serve(self, _peer: PeerId, header: dict[str, Any]) -> Reply:
        """The reply to a request {head: bytes}, {after: round, wait_s: seconds} or {round: round, wait_s: seconds}; an empty
        body when we have it not."""
        match header:
            case {"head": bytes(head)} if len(head) == DIGEST_BYTES:
                return await self._at(Digest(head))
            # A time that is no number would break the order of the event loop's timers, so: at least 0.
            case {"after": int(after), "wait_s": float(wait_s)} if after >= -1 and wait_s >= 0:
                return self._reply(await self._after(after, min(wait_s, MAX_WAIT_S)))
            case {"round": int(number), "wait_s": float(wait_s)} if number >= 0 and wait_s >= 0:
                return await self._of_round(number, min(wait_s, MAX_WAIT_S))
            case _:
                raise ProtocolError(_peer, "a request for state that names neither head nor round")

    def _reply(self, state: AnchorState | None) -> Reply:
        if state is None:
            return Reply({}, [])
        return Reply({**state.header(), "final": self._is_final(state)}, list(state.parts()))

    async def _at(self, head: Digest) -> Reply:
        state = self._current()
        if state.head == head:
            return self._reply(state)
        return await self._from_disk(head, lambda: read_head(self._checkpoints, self._run_id, self._layout, head))

    async def _of_round(self, number: int, wait_s: float) -> Reply:
        state = await self._after(number - 1, wait_s)
        if state is None or state.round == number:
            return self._reply(state)
        return await self._from_disk(number, lambda: read_round(self._checkpoints, self._run_id, self._layout, number))

    async def _from_disk(self, key: Digest | int, read: Callable[[], AnchorState | None]) -> Reply:
        async def reply() -> Reply:
            return self._reply(await asyncio.get_running_loop().run_in_executor(self._disk, read))

        return await self._being_sent.reply(key, reply)

    async def _after(self, after: int, wait_s: float) -> AnchorState | None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self._current().round <= after:
                    await self._newer.wait()
        state = self._current()
        return state if state.round > after else None


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
