"""What link.py and linkd.py have in common, without I/O: kinds of frames, cutting them out of bytes, who begins anew.

Two connections carry frames of frames.py: the socket pair between a peer and its linkd, and the streams between two
linkds. Their kinds share one table, so that a frame that strays from one to the other is refused.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, TypeVar

from dilocox_peer.errors import ProtocolError
from dilocox_peer.network.frames import MAX_HEADER_BYTES, PREFIX_BYTES, Buffer, Prefix, unpack_header, unpack_prefix

T = TypeVar("T")

MAX_OWNER_HEADER_BYTES = MAX_HEADER_BYTES - 1024  # what the owner of a link may put into a header; ours goes around it
SMALL_BODY_BYTES = 4096  # a body below this goes with the small frames, before large ones
FRAME_COST_BYTES = 256  # beside its bytes: what the objects of one frame in a queue take, about
MAX_UNPROVED_HEADER_BYTES = 8 * 1024  # of a frame on a link that has proved nothing: a greeting is smaller
MAX_UNPROVED_BYTES = 128 * 1024  # of its frames, that the parent has not taken
CREDIT_SHARE = (
    16  # linkd reports what it has written when it is this part of a queue: not every small frame is reported
)


class FrameKind(IntEnum):
    """What a frame says, and its header's keys."""

    # peer -> linkd
    CONFIG = 1  # everything in LinkSettings, and `ports` that were listened on before
    DIAL = 2  # n: link id, a: addresses
    HANG_UP = 3  # n
    PROVED = 5  # n: it has proved who it is; before that its link holds next to nothing
    PACE = 6  # r: bytes a second, of each connection; 0: no limit; h: also of those that stay in the network at home
    # both ways
    DATA = 4  # l: number of the link, h: the owner's header, from linkd also w: seconds on the wire; and the body
    # linkd -> peer
    READY = 16  # n: link id, a: addresses, p: ports listened on
    FAILED = 17  # reason; linkd ends
    LINKED = 18  # n, l: a number that no other link of this linkd had, h: it stays in the network at home
    UNLINKED = 19  # l, reason
    ROUND_TRIP = 20  # l, s: seconds
    FOUND = 21  # n, a
    CREDIT = 22  # l, b: cost in bytes of what has been written since the last one
    TRAFFIC = 23  # r, s: bytes received and sent over TCP since this linkd began
    # linkd <-> linkd
    HELLO = 32  # role: "control" or "bulk", g: generation; the first frame of a stream, answered on "control"
    REFUSED = 33  # reason; instead of the answer
    FRAME = 34  # h: the owner's header; and the body
    PING = 35  # i: number
    PONG = 36  # i: that of the ping


@dataclass(frozen=True, slots=True)
class Frame:
    kind: int
    header: dict[str, Any]
    parts: Sequence[Buffer]  # the body, in order; none if it is empty
    body_bytes: int


def frame_cost(header_bytes: int, body_bytes: int) -> int:
    """What one frame counts against a queue's bound, in bytes."""
    return FRAME_COST_BYTES + header_bytes + body_bytes


def rest_of(buffers: list[Buffer], num_bytes: int) -> list[Buffer]:
    """What is left of the buffers after num_bytes of them were written."""
    for index, buffer in enumerate(buffers):
        if num_bytes < len(buffer):
            return [memoryview(buffer)[num_bytes:], *buffers[index + 1 :]]
        num_bytes -= len(buffer)
    return []


class BufferReader:
    """Frames out of a socket that is read with recv_into: a body is received where it stays, in a bytearray of its own.

    `space` is where to receive next, `take` says how many bytes came there and returns the frames that are complete.
    Raises ProtocolError as unpack_prefix and unpack_header do; nothing after that is defined.
    """

    _BATCH_BYTES = 8 * 1024  # received at once where no body is due: so much of a body, at most, is copied

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._staging = bytearray(PREFIX_BYTES + MAX_HEADER_BYTES + self._BATCH_BYTES)
        self._start = 0  # staging[start:end] is received and not yet taken
        self._end = 0
        self._prefix: Prefix | None = None
        self._header: dict[str, Any] | None = None  # of the frame whose body is being received
        self._body = bytearray()
        self._filled = 0

    def space(self) -> memoryview:
        if self._header is not None:
            return memoryview(self._body)[self._filled :]
        if self._start:
            rest = self._staging[self._start : self._end]
            self._staging[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        due = PREFIX_BYTES + (self._prefix.header_bytes if self._prefix else 0)
        return memoryview(self._staging)[self._end : max(due, self._end + self._BATCH_BYTES)]

    def take(self, num_bytes: int) -> list[Frame]:
        if self._header is not None:
            self._filled += num_bytes
            return [self._finish()] if self._filled == len(self._body) else []
        self._end += num_bytes
        return list(self._cut())

    def _cut(self) -> Iterator[Frame]:
        while True:
            if self._prefix is None:
                if self._end - self._start < PREFIX_BYTES:
                    return
                raw = bytes(self._staging[self._start : self._start + PREFIX_BYTES])
                self._prefix = unpack_prefix(raw, max_body_bytes=self._max_body_bytes)
            body_start = self._start + PREFIX_BYTES + self._prefix.header_bytes
            if self._end < body_start:
                return
            self._header = unpack_header(bytes(self._staging[self._start + PREFIX_BYTES : body_start]))
            self._body = bytearray(self._prefix.body_bytes)
            self._filled = min(self._end - body_start, len(self._body))
            self._body[: self._filled] = self._staging[body_start : body_start + self._filled]
            self._start = body_start + self._filled
            if self._filled < len(self._body):
                return
            yield self._finish()

    def _finish(self) -> Frame:
        assert self._prefix is not None
        assert self._header is not None
        frame = Frame(self._prefix.kind, self._header, [self._body] if self._body else [], len(self._body))
        self._prefix, self._header, self._body = None, None, bytearray()
        return frame


ALONE_BYTES = 4096  # a piece of a body that is as long is kept as it came


class ChunkReader:
    """Frames out of a stream that gives bytes: a body is the list of the pieces it came in; large ones are not copied.

    Raises ProtocolError like BufferReader. `in_frame`: the bytes so far end inside a frame.
    """

    def __init__(self, max_body_bytes: int, *, max_header_bytes: int = MAX_HEADER_BYTES) -> None:
        self.max_body_bytes = max_body_bytes  # may be raised: holds for the frames that begin after that
        self.max_header_bytes = max_header_bytes  # as well
        self._head = bytearray()  # prefix and header of the frame that is arriving, as far as they are here
        self._prefix: Prefix | None = None
        self._header: dict[str, Any] | None = None
        self._parts: list[Buffer] = []
        self._missing = 0  # bytes of its body

    @property
    def in_frame(self) -> bool:
        return bool(self._head) or self._header is not None

    def feed(self, data: bytes) -> Iterator[Frame]:
        view = memoryview(data)
        while view or (self._header is not None and not self._missing):
            if self._header is None:
                view = self._take_head(view)
                continue
            if self._missing:
                part = view[: self._missing]
                # The caps count bytes of bodies. So a small piece must not keep a large buffer alive, and small ones are joined: a neighbour
                # that sends a byte at a time would have each kept as an object of a hundred times its size.
                last = self._parts[-1] if self._parts else None
                if len(part) >= ALONE_BYTES:
                    self._parts.append(part if 2 * len(part) >= len(data) else bytes(part))
                elif isinstance(last, bytearray):
                    last += part
                else:
                    self._parts.append(bytearray(part))
                self._missing -= len(part)
                view = view[len(part) :]
            if not self._missing:
                assert self._prefix is not None
                yield Frame(self._prefix.kind, self._header, self._parts, self._prefix.body_bytes)
                self._prefix, self._header, self._parts = None, None, []

    def _take_head(self, view: memoryview) -> memoryview:
        due = PREFIX_BYTES + (self._prefix.header_bytes if self._prefix else 0)
        taken = due - len(self._head)
        self._head += view[:taken]
        if len(self._head) == due and self._prefix is None:
            self._prefix = unpack_prefix(bytes(self._head), max_body_bytes=self.max_body_bytes)
            if self._prefix.header_bytes > self.max_header_bytes:
                raise ProtocolError(
                    None, f"header of {self._prefix.header_bytes} bytes, at most {self.max_header_bytes}"
                )
            due += self._prefix.header_bytes
        if len(self._head) == due and self._prefix is not None:
            self._header = unpack_header(bytes(self._head[PREFIX_BYTES:]))
            self._head.clear()
            self._missing = self._prefix.body_bytes
        return view[taken:]


class Verdict(Enum):
    JOIN = "one more connection of the same link"
    ANEW = "the other side has given the link up and begins another one"
    STALE = "a connection of a link that the other side has given up"


def judge(linked_with: int | None, offered: int) -> Verdict:
    """What a hello with generation `offered` means to a link that was made with `linked_with` (None: there is no link).

    A side takes a larger generation whenever it loses or gives up a link, over restarts too (it is a time). So two
    connections dialled at once, one from each side, carry the same pair of generations and make one link; and a side that
    still believes in a dead link learns of it from the other side's next hello.
    """
    if linked_with is None or offered > linked_with:
        return Verdict.ANEW
    return Verdict.JOIN if offered == linked_with else Verdict.STALE


class Backoff:
    """Waits between attempts: `first_s`, doubling to `most_s`, each times 0.75 to 1.25 so that peers do not march in step."""

    def __init__(self, first_s: float, most_s: float, rng: random.Random) -> None:
        self._first_s, self._most_s, self._rng = first_s, most_s, rng
        self._next_s = first_s

    def next_s(self) -> float:
        wait_s = self._next_s
        self._next_s = min(2 * wait_s, self._most_s)
        return wait_s * self._rng.uniform(0.75, 1.25)

    def reset(self) -> None:
        self._next_s = self._first_s


def header_field(header: dict[str, Any], key: str, kind: type[T]) -> T:
    """header[key], which must be of the type. Raises ProtocolError."""
    value = header.get(key)
    if type(value) is not kind:
        raise ProtocolError(None, f"a frame whose header has no {kind.__name__} {key!r}")
    return value
