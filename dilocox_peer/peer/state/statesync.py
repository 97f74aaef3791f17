"""Whole anchor states between peers: what of ours the store serves, fetching others'.

A state is asked for by its digest, which the certificates or most of the voters name: every chunk of it is checked against that
before it is used, whoever sends it, and several donors share the work. What round and head it is of say the certificates, too.
"""

import asyncio
import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilocox_peer.errors import ProtocolError, StateCorrupt, ThingUnavailable
from dilocox_peer.events import Listener
from dilocox_peer.events_of_states import StateFetched, StateFetchFailed
from dilocox_peer.network.transport import Reply, Transport
from dilocox_peer.peer.state.checkpoint import stored_content
from dilocox_peer.peer.training.anchor_state import AnchorState
from dilocox_peer.store.fetch import Fetch
from dilocox_peer.store.outline import Outline
from dilocox_peer.store.pull import Pull
from dilocox_peer.store.shelf import PartialFile, Shelf
from dilocox_peer.store.store import Content
from dilocox_peer.types import DIGEST_BYTES, Digest, Layout, PeerId

STATE_SERVICE = "state"


@dataclass(frozen=True, slots=True)
class Agreed:
    """A state to be had: the digest is what the stage's peers agreed on; round and head it has by the certificates."""

    round: int
    head: Digest
    digest: bytes


class States:
    """What a store serves of states: the newest, and those in folders of checkpoints."""

    def __init__(self, current: Callable[[], AnchorState] | None, folders: Sequence[Path]) -> None:
        """current: of the stage that this peer trains."""
        self._current = current
        self._folders = folders

    def content(self, name: Digest) -> Content | None:
        """From disk where it is there: a file that is open can be read to its end when newer ones have taken its place, and the
        memory of a state is free for the next one."""
        for folder in self._folders:
            if (found := stored_content(folder, name)) is not None:
                return found
        state = self._current() if self._current is not None else None
        return state if state is not None and state.digest == name else None

    async def serve_digest(self, peer: PeerId, header: dict[str, Any]) -> Reply:
        """The reply to {head}: the digest of the newest state, if it is at that head."""
        match header:
            case {"head": bytes(head)} if len(head) == DIGEST_BYTES:
                state = self._current() if self._current is not None else None
                return Reply({"head": head, "digest": state.digest} if state is not None and state.head == head else {})
            case _:
                raise ProtocolError(peer, "a request for a state's digest that names no head")


async def fetch_digest(transport: Transport, peer: PeerId, head: Digest, timeout_s: float) -> bytes:
    """The digest that peer says its state at head has, b"" when it has none. Raises PeerUnavailable, ProtocolError."""
    header, _ = await transport.fetch(peer, STATE_SERVICE, {"head": head}, max_body_bytes=0, timeout_s=timeout_s)
    match header:
        case {"head": bytes(said), "digest": bytes(digest)} if said == head and len(digest) == DIGEST_BYTES:
            return digest
        case _:
            return b""


class Copying:
    """A fetch of a state as others see it while it is under way. began_s: when others were first asked, by the loop's clock; None: not yet."""

    def __init__(self) -> None:
        self._pull: Pull | None = None
        self.began_s: float | None = None

    @property
    def share(self) -> float:
        """So much of it is here."""
        return 0.0 if self._pull is None else self._pull.share

    def join(self, donors: Sequence[PeerId]) -> None:
        """Those of them that are not asked yet are asked, too."""
        if self._pull is not None:
            self._pull.join(donors)

    def began(self, pull: Pull) -> None:
        self._pull, self.began_s = pull, asyncio.get_running_loop().time()


async def fetch_state(
    transport: Transport,
    donors: Sequence[PeerId],
    agreed: Agreed,
    *,
    layout: Layout,
    timeout_s: float,
    listener: Listener,
    shelf: Shelf | None = None,
    copying: Copying | None = None,
    spared: Digest | None = None,
) -> AnchorState | None:
    """The state of that digest, from all donors that have it at once; None if none of them gives it in time. Donors that fail or
    lie are told. shelf: what has come survives there until it is asked for again; None: it is put together in memory. copying: begins with it.
    spared: another state, of which what has come stays there if the disk has room for both.

    Cancelled: nothing goes on. Raises OSError when there is no room.
    """
    started = time.monotonic()
    digest, size_bytes = Digest(agreed.digest), layout.state_bytes
    sink: PartialFile | _Memory = _Memory()
    resumed = None
    if shelf is not None:
        sink = await asyncio.to_thread(shelf.partial, digest, size_bytes=size_bytes, spared=spared)
        resumed = await asyncio.to_thread(sink.resumed)
    fetch = Fetch(digest, donors, is_root=True, resumed=resumed)

    def finish() -> AnchorState:
        view, half = sink.mapped(), size_bytes // 2
        return AnchorState.of(
            layout, head=agreed.head, round_number=agreed.round, anchor=view[:half], momentum=view[half:],
            outline=fetch.outline,
        )  # fmt: skip

    pull = Pull(
        fetch, sink, transport=transport, max_bytes=size_bytes, timeout_s=timeout_s, finish=finish,
        on_failed=lambda donor, reason, _is_lying: listener(StateFetchFailed(donor, reason)),
    )  # fmt: skip
    if copying is not None:
        copying.began(pull)
    try:
        state: AnchorState = await pull.run()
    except (ThingUnavailable, TimeoutError):
        return None
    except StateCorrupt as error:  # as it was agreed on, and not of this layout or not finite
        listener(StateFetchFailed(donors[0], str(error)))
        return None
    seconds = round(time.monotonic() - started, 3)
    listener(StateFetched(state.round, tuple(fetch.givers), state.size_bytes, seconds))
    return state


class _Memory:
    """A sink of pages that are taken as they are written."""

    def begin(self, outline: Outline) -> None:
        self._pages = mmap.mmap(-1, outline.size_bytes)

    def write(self, start: int, raw: bytes | bytearray | memoryview) -> None:
        self._pages[start : start + len(raw)] = raw

    def is_whole(self) -> bool:
        raise AssertionError("a state's chunks are checked against its name")

    def mapped(self) -> memoryview:
        return memoryview(self._pages)

    def close(self) -> None:
        """Nothing to be kept."""
