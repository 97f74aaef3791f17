"""What a neighbour may say on a link besides frames."""

from collections.abc import Callable

import pytest
import trio

from dilocox_peer.network.frames import pack_header
from dilocox_peer.network.link_frames import ChunkReader, FrameKind
from dilocox_peer.network.link_streams import MOST_BEATS, LinkStreams, ParentQueue, StreamPair


class Said:
    """A stream on which this comes, and then nothing more."""

    def __init__(self, *chunks: bytes) -> None:
        self._chunks = list(chunks)

    async def read(self, _n: int) -> bytes:
        await trio.sleep(0.01)
        if self._chunks:
            return self._chunks.pop(0)
        await trio.sleep_forever()
        raise AssertionError

    async def write(self, _data: object) -> None:
        await trio.lowlevel.checkpoint()

    async def close(self) -> None: ...


class Told(ParentQueue):
    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[FrameKind] = []

    def tell(self, kind: FrameKind, header: dict[str, object]) -> None:
        self.kinds.append(kind)


def ended(*chunks: bytes, outbox: ParentQueue, meanwhile: Callable[[LinkStreams], None] = lambda _link: None) -> str:
    """Why the link with a neighbour that says this ended, empty: it did not within a second."""

    async def run() -> str:
        pair = StreamPair(None, lambda: None)
        pair.add("control", Said(*chunks), ChunkReader(0, max_header_bytes=8192), [])
        pair.add("bulk", Said(), ChunkReader(0), [])
        link = LinkStreams(1, 1, pair, queue_bytes=1 << 20, outbox=outbox, is_proved=False)
        meanwhile(link)
        with trio.move_on_after(1.0) as scope:
            await link.run()
        return "" if scope.cancelled_caught else link.reason

    return trio.run(run)


@pytest.mark.parametrize("kind", [FrameKind.PING, FrameKind.PONG])
def test_pings_without_end_end_the_link(kind: FrameKind) -> None:
    """Before any proof: a megabyte of them took 0.22 s, and one read of them kept all neighbours' frames waiting for 0.1 s."""
    said = pack_header(kind, {"i": 1}, 0)
    assert "pings a second" in ended(said * 1000, outbox=Told())
    assert ended(said * int(MOST_BEATS), outbox=Told()) == ""


def test_a_ping_of_ours_is_answered_once() -> None:
    """Each of its answers was a frame for the trainer's process, which reads them under its GIL."""
    outbox = Told()
    pong = pack_header(FrameKind.PONG, {"i": 1}, 0)
    assert ended(*[pong] * 20, outbox=outbox, meanwhile=lambda link: link.ping()) == ""
    assert outbox.kinds.count(FrameKind.ROUND_TRIP) == 1
