"""What a fetch does with bytes as they come: the event loop goes on whatever a donor sends."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from dilocox_peer.errors import PeerUnavailable
from dilocox_peer.store.fetch import Fetch
from dilocox_peer.store.outline import CHUNK_BYTES, Outline
from dilocox_peer.store.pull import Pull
from dilocox_peer.store.shelf import Shelf
from dilocox_peer.types import Digest, PeerId, sha256

THING = random.Random(0).randbytes(200_000)
NAME = Digest(sha256(THING))
LARGER = Outline(2 * CHUNK_BYTES, (sha256(b"a"), sha256(b"b")))
HUGE = Outline(8 * CHUNK_BYTES, (sha256(bytes(CHUNK_BYTES)),) * 8)  # of zeros
LIAR, HONEST = PeerId("liar"), PeerId("honest")
PIECE = 16 * 1024


class Donors:
    """In the place of a transport, for the order in which things come: the liar says that the thing is larger and sends that; the honest donor's answer
    comes when `before` bytes of it are there."""

    def __init__(self, *, before: int, said: Outline = LARGER, until: Callable[[], bool] = lambda: True) -> None:
        """until: and once that is so."""
        self._before, self._said, self._until = before, said, until
        self._is_time = asyncio.Event()
        self.sent = 0

    async def fetch(
        self, peer: PeerId, _service: str, header: dict[str, Any], *, max_body_bytes: int,
        take: Callable[[bytes], Awaitable[bool]] | None = None, **_: object,
    ) -> tuple[dict[str, Any], bytearray]:  # fmt: skip
        if header.get("want") == "outline":
            if peer == LIAR:
                return {"size": self._said.size_bytes}, bytearray(self._said.packed())
            await self._is_time.wait()
            return {"size": len(THING)}, bytearray(THING)
        if peer == HONEST or take is None:
            raise PeerUnavailable(peer, "busy")
        try:
            for start in range(0, max_body_bytes, PIECE):
                size = min(PIECE, max_body_bytes - start)
                if not await take(bytes(size)):
                    break
                self.sent += size
                while self.sent >= self._before and not self._until():  # noqa: ASYNC110 a file tells nobody
                    await asyncio.sleep(0)
                if self.sent >= self._before:
                    self._is_time.set()
                await asyncio.sleep(0)
        finally:
            self._is_time.set()
        return {}, bytearray()


@pytest.mark.parametrize("before", [0, PIECE, 190_000, 200_000, 400_000, 900_000, CHUNK_BYTES - 1, CHUNK_BYTES])
async def test_a_donor_that_says_that_a_thing_is_larger_does_not_hold_the_loop(tmp_path: Path, before: int) -> None:
    donors, partial = Donors(before=before), Shelf(tmp_path).partial(NAME)
    pull = Pull(
        Fetch(NAME, [LIAR, HONEST]), partial, transport=donors, max_bytes=4 * CHUNK_BYTES, timeout_s=30.0,  # type: ignore[arg-type]
        finish=partial.finish, on_failed=lambda *_: None,
    )  # fmt: skip
    path = await pull.run()
    assert path.read_bytes() == THING
    assert donors.sent < 2 * CHUNK_BYTES, "it went on when the thing was there"


@pytest.mark.parametrize("quota", [4 * CHUNK_BYTES, 9 * CHUNK_BYTES])
async def test_a_donor_that_says_that_a_thing_is_larger_costs_nothing_that_is_kept(tmp_path: Path, quota: int) -> None:
    """Nor the thing itself, where there is no room for what it says."""
    shelf = Shelf(tmp_path, quota_bytes=quota)
    kept = [shelf.put(bytes([number]) * (CHUNK_BYTES // 2)) for number in range(4)]
    partial = shelf.partial(NAME)
    donors = Donors(before=CHUNK_BYTES, said=HUGE, until=partial.path.exists)  # or once it was hung up on
    accused: list[PeerId] = []
    pull = Pull(
        Fetch(NAME, [LIAR, HONEST]), partial, transport=donors, max_bytes=16 * CHUNK_BYTES, timeout_s=30.0,  # type: ignore[arg-type]
        finish=partial.finish, on_failed=lambda peer, _reason, is_lying: accused.append(peer) if is_lying else None,
    )  # fmt: skip
    path = await pull.run()
    assert path.read_bytes() == THING
    assert all(name in shelf for name in kept)
    assert accused == []


async def test_that_there_is_no_room_is_told_once_nobody_has_another(tmp_path: Path) -> None:
    partial = Shelf(tmp_path, quota_bytes=4 * CHUNK_BYTES).partial(NAME)
    pull = Pull(
        Fetch(NAME, [LIAR]), partial, transport=Donors(before=0, said=HUGE), max_bytes=16 * CHUNK_BYTES, timeout_s=30.0,  # type: ignore[arg-type]
        finish=partial.finish, on_failed=lambda *_: None,
    )  # fmt: skip
    with pytest.raises(OSError, match="more than the quota"):
        await pull.run()
