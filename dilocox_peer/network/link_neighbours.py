"""The neighbours of a linkd: whom it dials, who dials it, and the links that come of it.

A link to a neighbour is one TLS connection with two streams: `control` for small frames, pings and pongs, and `bulk` for
bodies, so that a small frame waits for one chunk of a body, not for the body. The side that dials opens both. When both sides dial
at once, both connections are read and each side writes to the one it had first (link_frames.judge). A link is lost as a
whole: when a connection ends, a frame is malformed, a neighbour is silent, or a write does not end, all its connections
are closed, the parent is told, and a neighbour that we dial is dialled again. What runs inside a link is link_streams.py.
"""

import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import trio

from dilocox_peer.network.frames import pack_header
from dilocox_peer.network.link_frames import (
    MAX_UNPROVED_HEADER_BYTES,
    Backoff,
    ChunkReader,
    FrameKind,
    Verdict,
    header_field,
    judge,
)
from dilocox_peer.network.link_host import Host, abort, wire_of
from dilocox_peer.network.link_streams import (
    READ_BYTES,
    LinkLost,
    LinkStreams,
    ParentQueue,
    StreamPair,
    first_frame,
    new_generation,
    one_line,
    say,
    write_whole,
)

IDLE_S = 15.0  # a connection that has not become part of a link by then is closed
DIAL_TIMEOUT_S = 10.0
STAGGER_S = 0.5  # between the attempts at a neighbour's addresses
OPEN_TIMEOUT_S = 10.0
REDIAL_FIRST_S, REDIAL_MOST_S = 0.5, 15.0
FRESH_S = 2.0  # a link that has not proved whose it is keeps its place for so long
MAX_STREAMS = 4  # of our protocol, opened by others on one connection at once; a link has two
STRANGER_LINES_PER_MINUTE = 20  # of the log


@dataclass(frozen=True)
class Config:
    """What the parent wants (linkd_process.LinkSettings), as it comes in its first frame."""

    key_seed: bytes
    listen: list[str]
    ports: list[int]
    protocol: str
    max_body_bytes: int
    max_neighbours: int
    max_unproved: int | None
    queue_bytes: int
    mdns: bool
    ping_s: float
    dead_s: float


@dataclass(eq=False)
class Neighbour:
    link_id: str
    generation: int
    link: LinkStreams | None = None
    linked: trio.Event = field(default_factory=trio.Event)  # replaced when a link ends
    addresses: list[str] = field(default_factory=list)
    dialling: trio.CancelScope | None = None
    dial_now: trio.Event = field(default_factory=trio.Event)


class Neighbours:
    """links: by number, in the parent's words; a number is never used again."""

    def __init__(self, host: Host, config: Config, outbox: ParentQueue) -> None:
        self._host, self._config, self._outbox = host, config, outbox
        self._neighbours: dict[str, Neighbour] = {}
        self.links: dict[int, tuple[Neighbour, LinkStreams]] = {}
        self._num_links = 0
        self._halves: dict[Any, StreamPair] = {}  # of connections that others dialled, with one of two streams
        self._num_streams: Counter[Any] = Counter()  # of our protocol, by connection, that others opened
        self._seen_at: dict[Any, float] = {}  # connections without a link
        self._strangers_since = trio.current_time()
        self._num_strangers = 0
        self._rng = random.Random()
        self._nursery: trio.Nursery

    def start(self, nursery: trio.Nursery) -> None:
        """From here on strangers are let in and links watched, by tasks of the nursery."""
        self._nursery = nursery
        self._host.on_stream(self._on_stream)
        nursery.start_soon(self._watch)

    # Dialling

    def _neighbour(self, link_id: str) -> Neighbour:
        if link_id not in self._neighbours:
            self._neighbours[link_id] = Neighbour(link_id, new_generation(0))
        return self._neighbours[link_id]

    def _forget(self, neighbour: Neighbour) -> None:
        """Drops what nobody needs, so that strangers who come and go leave nothing behind."""
        if neighbour.link is None and neighbour.dialling is None:
            self._neighbours.pop(neighbour.link_id, None)

    def dial(self, link_id: str, addresses: list[str]) -> None:
        neighbour = self._neighbour(link_id)
        neighbour.addresses = addresses
        neighbour.dial_now.set()
        if neighbour.dialling is None:
            neighbour.dialling = trio.CancelScope()
            self._nursery.start_soon(self._keep_dialled, neighbour, neighbour.dialling)

    def proved(self, link_id: str) -> None:
        """The parent knows whose link this is."""
        neighbour = self._neighbours.get(link_id)
        if neighbour is not None and neighbour.link is not None:
            neighbour.link.prove(self._config.max_body_bytes)

    def hang_up(self, link_id: str) -> None:
        neighbour = self._neighbours.get(link_id)
        if neighbour is None:
            return
        if neighbour.dialling is not None:
            neighbour.dialling.cancel()
            neighbour.dialling = None
        if neighbour.link is not None:
            neighbour.link.end("hung up")
        self._forget(neighbour)

    async def _keep_dialled(self, neighbour: Neighbour, scope: trio.CancelScope) -> None:
        backoff = Backoff(REDIAL_FIRST_S, REDIAL_MOST_S, self._rng)
        said = ""
        with scope:
            while True:
                if neighbour.link is not None:
                    began_at = trio.current_time()
                    said = ""
                    await neighbour.link.over.wait()
                    if trio.current_time() - began_at < REDIAL_MOST_S:  # it may hang up on us every time
                        await self._pause(neighbour, backoff.next_s())
                        continue
                    backoff.reset()
                neighbour.dial_now = trio.Event()
                reasons: list[str] = []
                async with trio.open_nursery() as nursery:  # an address that swallows packets must not hold up others
                    for index, address in enumerate(neighbour.addresses):
                        nursery.start_soon(self._attempt, neighbour, address, index, reasons, nursery.cancel_scope)
                if neighbour.link is not None:
                    continue
                text = f"no link to {neighbour.link_id}: {'; '.join(reasons) or 'no address'}"
                if text != said:
                    say(text)
                    said = text
                await self._pause(neighbour, backoff.next_s())

    async def _pause(self, neighbour: Neighbour, seconds: float) -> None:
        """Returns then, or when a link came from the other side, or other addresses from the parent."""
        async with trio.open_nursery() as nursery:
            nursery.cancel_scope.deadline = trio.current_time() + seconds
            for event in (neighbour.linked, neighbour.dial_now):
                nursery.start_soon(_cancel_when, event, nursery.cancel_scope)

    async def _attempt(
        self, neighbour: Neighbour, address: str, index: int, reasons: list[str], all_attempts: trio.CancelScope
    ) -> None:
        """Tries one address, unless there is a link when its turn comes; adds why there is none."""
        await trio.sleep(index * STAGGER_S)
        if neighbour.link is None:
            try:
                await self._try(neighbour, address)
            except Exception as error:
                reasons.append(f"{address} {one_line(error)}")
                return
        all_attempts.cancel()

    async def _try(self, neighbour: Neighbour, address: str) -> None:
        """Makes a link over a connection to one address. Raises what went wrong; no connection stays then."""
        with trio.fail_after(DIAL_TIMEOUT_S):
            conn = await self._host.dial(neighbour.link_id, address)
        session = StreamPair(conn, partial(abort, conn))
        self._seen_at[conn] = trio.current_time()
        try:
            session.generation = neighbour.generation
            with trio.fail_after(OPEN_TIMEOUT_S):
                for role in ("control", "bulk"):
                    await self._open(session, role)
                answer, session.early["control"] = await first_frame(
                    session.streams["control"], session.readers["control"]
                )
            if answer.kind == FrameKind.REFUSED:
                raise LinkLost(f"refused: {header_field(answer.header, 'reason', str)}")
            if answer.kind != FrameKind.HELLO:
                raise LinkLost(f"answered with a frame of kind {answer.kind}")
            refusal = await self._admit(neighbour, session, header_field(answer.header, "g", int))
            if refusal:
                raise LinkLost(refusal)
        except BaseException:
            abort(conn)
            raise

    async def _open(self, session: StreamPair, role: str) -> None:
        stream = await self._host.open_stream(session.conn, timeout_s=int(OPEN_TIMEOUT_S))
        session.add(role, stream, ChunkReader(0, max_header_bytes=MAX_UNPROVED_HEADER_BYTES), [])
        await write_whole(stream, pack_header(FrameKind.HELLO, {"role": role, "g": session.generation}, body_bytes=0))

    # Being dialled

    async def _on_stream(self, net_stream: Any) -> None:
        """Handler of the host: reads the hello, and stays until the session is over."""
        conn = net_stream.swarm_conn
        self._num_streams[conn] += 1
        try:
            if self._num_streams[conn] > MAX_STREAMS:  # each could keep the bytes of a header here
                raise LinkLost(f"more than {MAX_STREAMS} streams on a connection")
            session = await self._greet(conn, net_stream)
            with trio.fail_after(OPEN_TIMEOUT_S):
                await session.is_decided.wait()
            await session.over.wait()
        except Exception as error:  # would end the host
            self._say_of_stranger(f"dropped a connection of {conn.muxed_conn.peer_id}: {one_line(error)}")
            abort(conn)
        finally:
            self._num_streams[conn] -= 1
            if not self._num_streams[conn]:
                del self._num_streams[conn]
            half = self._halves.pop(conn, None)
            if half is not None:  # its other handler need not wait
                half.is_decided.set()
                half.over.set()

    def _say_of_stranger(self, text: str) -> None:
        now = trio.current_time()
        if now - self._strangers_since > 60.0:
            self._strangers_since, self._num_strangers = now, 0
        self._num_strangers += 1
        if self._num_strangers <= STRANGER_LINES_PER_MINUTE:
            say(text)

    async def _greet(self, conn: Any, net_stream: Any) -> StreamPair:
        # The side that dials sends no body before our answer; what a stranger sends here, on any number of streams, is not kept.
        stream, reader = net_stream.muxed_stream, ChunkReader(0, max_header_bytes=MAX_UNPROVED_HEADER_BYTES)
        with trio.fail_after(OPEN_TIMEOUT_S):
            hello, early = await first_frame(stream, reader)
        if hello.kind != FrameKind.HELLO:
            raise LinkLost(f"a stream began with a frame of kind {hello.kind}")
        role, generation = header_field(hello.header, "role", str), header_field(hello.header, "g", int)
        session = self._halves.setdefault(conn, StreamPair(conn, partial(abort, conn)))
        if role not in ("control", "bulk") or role in session.streams:
            raise LinkLost(f"a second stream {role[:20]!r}")
        session.add(role, stream, reader, early)
        if session.is_complete:
            neighbour = self._neighbour(str(conn.muxed_conn.peer_id))
            try:
                refusal = self._why_not(neighbour) or await self._admit(neighbour, session, generation, answer=True)
            finally:
                self._forget(neighbour)
            session.is_decided.set()
            if refusal:
                await self._refuse(session, refusal)
        return session

    def _why_not(self, neighbour: Neighbour) -> str | None:
        if neighbour.link is not None or neighbour.dialling is not None:
            return None
        others = sum(other.dialling is None for other, _ in self.links.values())
        if others >= self._config.max_neighbours:
            return f"it has {others} neighbours already"
        if (refusal := self._make_room()) is not None:
            return refusal
        if self._outbox.cost_bytes > 2 * self._config.queue_bytes:  # or many in turn could each leave a queue behind
            return "it does not keep up with its neighbours"
        return None

    def _make_room(self) -> str | None:
        """Ends the link of others that has owed its proof for longest, if there are as many as may be; why not, if all are fresh."""
        most = self._config.max_unproved
        unproved = [link for other, link in self.links.values() if other.dialling is None and not link.is_proved]
        if most is None or len(unproved) < most:
            return None
        oldest = min(unproved, key=lambda link: link.began_at)
        if trio.current_time() - oldest.began_at < FRESH_S:
            return f"it has {len(unproved)} neighbours that have not said who they are"
        oldest.end("did not say who it is while others waited")
        return None

    async def _refuse(self, session: StreamPair, reason: str) -> None:
        """Says so, and lets the other side close: closing at once could overtake the reason."""
        control = session.streams["control"]
        await write_whole(control, pack_header(FrameKind.REFUSED, {"reason": reason}, 0))
        with trio.move_on_after(OPEN_TIMEOUT_S), suppress(Exception):
            while await control.read(READ_BYTES):
                pass
        session.abort()
        session.over.set()

    # Links

    async def _admit(
        self, neighbour: Neighbour, session: StreamPair, theirs: int, *, answer: bool = False
    ) -> str | None:
        """Makes the session a link, or part of the one there is; or says why not."""
        while True:
            verdict = judge(neighbour.link.theirs if neighbour.link else None, theirs)
            if verdict is Verdict.STALE:
                return str(verdict.value)
            if verdict is Verdict.JOIN or neighbour.link is None:
                break
            neighbour.link.end(verdict.value)
            await neighbour.link.over.wait()
        if answer:
            session.generation = neighbour.generation
            hello = pack_header(FrameKind.HELLO, {"role": "control", "g": session.generation}, 0)
            await write_whole(session.streams["control"], hello)
        if self._neighbours.setdefault(neighbour.link_id, neighbour) is not neighbour:
            return "a link was made meanwhile"
        if session.generation != neighbour.generation or (neighbour.link and neighbour.link.theirs != theirs):
            return "a link was lost meanwhile"
        is_proved = self._config.max_unproved is None if neighbour.link is None else neighbour.link.is_proved
        if is_proved:
            session.allow(self._config.max_body_bytes)
        self._seen_at.pop(session.conn, None)
        if neighbour.link is None:
            self._num_links += 1
            link = LinkStreams(
                self._num_links, theirs, session, queue_bytes=self._config.queue_bytes, outbox=self._outbox,
                is_proved=is_proved,
            )  # fmt: skip
            neighbour.link = link
            self.links[link.number] = (neighbour, link)
            neighbour.linked.set()
            header = {"n": neighbour.link_id, "l": link.number, "h": wire_of(session.conn).is_at_home}
            self._outbox.tell(FrameKind.LINKED, header)
            self._nursery.start_soon(self._run_link, neighbour, link)
        else:
            neighbour.link.join(session)
        return None

    async def _run_link(self, neighbour: Neighbour, link: LinkStreams) -> None:
        try:
            await link.run()
        finally:
            del self.links[link.number]
            neighbour.link = None
            neighbour.linked = trio.Event()
            neighbour.generation = new_generation(neighbour.generation)
            self._outbox.tell(FrameKind.UNLINKED, {"l": link.number, "reason": link.reason})
            link.over.set()
            self._forget(neighbour)

    # Watching

    async def _watch(self) -> None:
        """Pings, and ends what is silent, stuck or idle."""
        config = self._config
        tick_s = min(config.ping_s, config.dead_s / 4)
        last_at = trio.current_time()
        pinged_at = last_at
        while True:
            await trio.sleep(tick_s)
            now = trio.current_time()
            if now - last_at > tick_s + config.dead_s / 2:
                for _, link in self.links.values():
                    link.excuse(now)
            last_at = now
            is_ping_due = now - pinged_at >= config.ping_s - tick_s / 2
            if is_ping_due:
                pinged_at = now
                if self.links and not self._outbox.is_long:
                    traffic = self._host.traffic
                    self._outbox.tell(FrameKind.TRAFFIC, {"r": traffic.received, "s": traffic.sent})
            for _, link in list(self.links.values()):
                link.check(now, config.dead_s)
                if is_ping_due:
                    link.ping()
            self._end_idle(now)

    def _end_idle(self, now: float) -> None:
        used = {session.conn for _, link in self.links.values() for session in link.sessions}
        idle = [conn for conn in self._host.connections if conn not in used]
        self._seen_at = {conn: self._seen_at.get(conn, now) for conn in idle}
        for conn, seen_at in self._seen_at.items():
            if now - seen_at > IDLE_S:
                abort(conn)


async def _cancel_when(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()
