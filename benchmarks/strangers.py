"""The strangers of fuzz.py: transports, links and bare sockets that send mutated bytes to a swarm. Not run by hand."""

import asyncio
import secrets
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # where it is started by its path from elsewhere

from mutations import METHODS, Mutations

from dilocox_peer.invitation import parse_invitation, parse_multiaddr
from dilocox_peer.network.message_frames import ANSWER_HEAD_BYTES, read_answer_head, split_answer
from dilocox_peer.types import RunId

DIRECTORY_PER_S, BATCHES_PER_S, STREAMS_PER_S, BARE_PER_S = 90, 60, 20, 5  # of one stranger, to one target
# Ticks; requests at once. A thousand at once are the end of the sender's own p2pd: it answers nothing from then on.
BURST_EVERY, BURST = 50, 60
TICK_S = 0.1
SEND_TIMEOUT_S = 10.0
ANSWER_S = 1.0  # to a batch of messages that is broken
MAX_UNDER_WAY = 24  # of a kind, from one stranger to one target
LINK_FRAMES = 24  # on a link before the next one


@dataclass
class Fire:
    """What was sent, and what became of it."""

    goal: int
    until: float  # monotonic
    sent: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)  # of us, by the swarm's nodes

    unanswered: int = 0  # may have got no farther than the sender's p2pd, so they do not count

    @property
    def total(self) -> int:
        return self.sent.total() + self.asked.total() - self.unanswered

    @property
    def is_over(self) -> bool:
        return self.total >= self.goal or time.monotonic() > self.until


@dataclass
class Target:
    label: str
    peer: Any  # PeerID
    addresses: list[str]
    serves: tuple[str, ...]
    link: tuple[str, list[str]] | None = None


class Stranger:
    """A transport of its own, and a node of the directory that answers with garbage."""

    def __init__(self, transport: Any, mutations: Mutations, targets: list[Target], fire: Fire) -> None:
        self._transport, self._mutations, self._targets, self._fire = transport, mutations, targets, fire
        self._client = transport.p2p._client
        self._lines: dict[str, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}  # of messages, to each target

    async def prepare(self) -> None:
        for method in METHODS:

            async def answer(_raw: bytes, _remote: Any, method: str = method) -> bytes:
                self._fire.asked[f"answer to {method}"] += 1
                return self._mutations.answer(method)

            await self._client.add_unary_handler(f"DHTProtocol.{method}", answer)
        for target in self._targets:
            await self._transport.connect(str(target.peer), target.addresses, 10.0)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for target in self._targets:
                tasks.create_task(self._keep_on(target, "directory", DIRECTORY_PER_S, self._directory))
                tasks.create_task(self._messages(target))
                tasks.create_task(self._keep_on(target, "stream", STREAMS_PER_S, self._stream))
                tasks.create_task(self._keep_on(target, "bare bytes", BARE_PER_S, self._bare))

    async def _keep_on(self, target: Target, what: str, per_s: float, send: Callable[[Target], Any]) -> None:
        ticks, owed = 0, 0.0
        async with asyncio.TaskGroup() as tasks:
            running: set[asyncio.Task[None]] = set()
            while not self._fire.is_over:
                ticks += 1
                owed = min(owed + per_s * TICK_S, 2.0 * per_s)
                is_burst = what == "directory" and ticks % BURST_EVERY == 0
                count = BURST if is_burst else max(0, min(int(owed), MAX_UNDER_WAY - len(running)))
                owed -= 0 if is_burst else count
                for _ in range(count):
                    task = tasks.create_task(self._counted(target, what, send))
                    running.add(task)
                    task.add_done_callback(running.discard)
                await asyncio.sleep(TICK_S)

    async def _counted(self, target: Target, what: str, send: Callable[[Target], Any]) -> None:
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                outcome = await send(target)
        except TimeoutError:
            outcome = "no answer in time"
            self._fire.unanswered += 1
        except Exception as error:
            outcome = " ".join(f"{type(error).__name__}: {error}".split())
        self._fire.sent[f"{what} to {target.label}"] += 1
        self._fire.outcomes[f"{what}: {_class_of(outcome or 'taken')}"] += 1

    async def _directory(self, target: Target) -> None:
        method = self._mutations.rng.choice(METHODS)
        await self._client.call_unary_handler(
            target.peer, f"DHTProtocol.{method}", self._mutations.drawn(method, lambda: self._mutations.request(method))
        )

    async def _messages(self, target: Target) -> None:
        """One batch after the other, as peers send them: they would wait for one another on their one stream."""
        while not self._fire.is_over:
            await self._counted(target, "message", self._message)
            await asyncio.sleep(1 / BATCHES_PER_S)

    async def _message(self, target: Target) -> str:
        """A batch of them, on the one stream that stays open: of more than two from a peer the older ones are ended."""
        stream = self._lines.pop(target.label, None)
        if stream is None:
            protocol = self._transport.message_protocol
            stream = await self._transport.daemon.open_stream(str(target.peer), protocol, SEND_TIMEOUT_S)
        reader, writer = stream
        count, raw, is_whole = self._mutations.batch()
        try:
            writer.write(raw)
            await writer.drain()
            try:
                async with asyncio.timeout(None if is_whole else ANSWER_S):
                    _, num_bytes = read_answer_head(await reader.readexactly(ANSWER_HEAD_BYTES))
                    reasons = split_answer(count, await reader.readexactly(num_bytes)) if num_bytes else [""] * count
            except TimeoutError:  # it says that it is longer than it is
                writer.transport.abort()
                return "a batch without its end"
        except BaseException:
            writer.transport.abort()
            raise
        self._lines[target.label] = stream
        for reason in reasons[1:]:
            self._fire.sent[f"message to {target.label}"] += 1
            self._fire.outcomes[f"message: {_class_of(reason or 'taken')}"] += 1
        return reasons[0]

    async def _stream(self, target: Target) -> str | None:
        service = self._mutations.rng.choice(target.serves)
        protocol = self._transport.fetch_protocol(service)
        reader, writer = await self._transport.daemon.open_stream(str(target.peer), protocol, SEND_TIMEOUT_S)
        try:
            writer.write(self._mutations.fetch_request(service))
            await writer.drain()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._mutations.rng.choice((0.0, 0.1, 0.5))):
                    return f"answered {len(await reader.read(100)) > 0}"
            return "left"
        finally:
            writer.transport.abort()

    async def _bare(self, target: Target) -> None:
        """To a TCP port, p2pd's or linkd's, below all protocols."""
        rng = self._mutations.rng
        text = rng.choice([*target.addresses, *(target.link[1] if target.link else [])])
        address = parse_multiaddr(text, "lease")
        _, writer = await asyncio.open_connection(address.host, address.port)
        try:
            hello = rng.choice(
                (b"", b"\x13/multistream/1.0.0\n", b"\x13/multistream/1.0.0\n\x0b/tls/1.0.0\n\x16\x03\x01")
            )
            writer.write(self._mutations.broken(hello) + rng.randbytes(rng.choice((0, 10, 2000))))
            await writer.drain()
        finally:
            writer.close()


def _class_of(outcome: str) -> str:
    """Without what differs from one to the next."""
    return "".join("N" if each.isdigit() else each for each in outcome)[:60].replace("NN", "N").replace("NN", "N")


@asynccontextmanager
async def strangers(
    link: str, count: int, seed: int, targets: list[Target], fire: Fire
) -> AsyncIterator[list[Stranger]]:
    import tempfile

    from dilocox_peer.network.daemon import raw_peer
    from dilocox_peer.network.transport import Transport
    from dilocox_peer.peer.identity import Identity

    invitation = parse_invitation(link)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dilocox-fuzz-")))
        made = []
        for index in range(count):
            identity = stack.enter_context(Identity.open(folder / f"{index}" / "identity.key"))
            transport = await Transport.create(
                identity.path, identity.peer_id, namespace=invitation.run_id, initial_peers=invitation.addresses,
                runtime_dir=folder / f"{index}" / "runtime", startup_timeout_s=60.0,
            )  # fmt: skip
            stack.push_async_callback(transport.close)
            mutations = Mutations(seed + index, invitation.run_id, identity.key, raw_peer(identity.peer_id))
            made.append(Stranger(transport, mutations, targets, fire))
            await made[-1].prepare()
        yield made


# -- links ------------------------------------------------------------------------------------------------------------


def fire_at_link(link_id: str, address: str, run_id: str, seed: int) -> None:
    """The process of a stranger with a libp2p of its own: says how many frames it has sent, and ends with its input."""
    import logging
    import threading

    import trio

    from dilocox_peer.network.frames import pack_header
    from dilocox_peer.network.link_frames import FrameKind
    from dilocox_peer.network.link_host import Host, abort
    from dilocox_peer.signing import SigningKey

    logging.disable(logging.CRITICAL)
    key = SigningKey(secrets.token_bytes(32))
    mutations = Mutations(seed, RunId(run_id), key, b"")
    rng, over, sent = mutations.rng, threading.Event(), 0

    async def one(host: Host) -> None:
        nonlocal sent
        with trio.move_on_after(SEND_TIMEOUT_S):
            conn = await host.dial(link_id, address)
            try:
                kind = rng.randrange(4)
                streams = [await host.open_stream(conn, timeout_s=5) for _ in range(12 if kind == 0 else 2)]
                for role, stream in zip(("control", "bulk"), streams, strict=False):
                    hello = pack_header(FrameKind.HELLO, {"role": role, "g": time.time_ns()}, 0)
                    await stream.write(
                        hello if kind > 1 else mutations.frame(FrameKind.HELLO, {"role": role, "g": mutations.value(1)})
                    )
                    sent += 1
                for _ in range(LINK_FRAMES):
                    await rng.choice(streams).write(mutations.link_frame())
                    sent += 1
                with trio.move_on_after(rng.choice((0.0, 0.2))):
                    await streams[0].read(1000)
            finally:
                abort(conn)

    async def main() -> None:
        while not over.is_set():
            host = Host(secrets.token_bytes(32), f"/dilocox/link/1/{run_id[:16]}", max_connections=64)
            async with host.run([]):
                for _ in range(20):
                    with suppress(Exception):
                        await one(host)
                    print(sent, flush=True)
                    await trio.sleep(0.02)
                    if over.is_set():
                        break

    def wait_for_end() -> None:
        sys.stdin.read()
        over.set()

    waiting = threading.Thread(target=wait_for_end, daemon=True)
    waiting.start()
    while not over.is_set():
        with suppress(Exception, BaseExceptionGroup):  # of our own libp2p, at what the other side made of it
            trio.run(main)


@asynccontextmanager
async def link_strangers(targets: list[Target], run_id: str, seed: int, fire: Fire) -> AsyncIterator[None]:
    children, readers = [], []

    async def count(child: asyncio.subprocess.Process, label: str) -> None:
        assert child.stdout is not None
        while line := await child.stdout.readline():
            with suppress(ValueError):
                fire.sent[f"link frame to {label}"] = int(line)

    for target in targets:
        if target.link is None:
            continue
        link_id, [address, *_] = target.link
        child = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--fire-at-link", link_id, address, run_id, str(seed),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        children.append(child)
        readers.append(asyncio.create_task(count(child, target.label)))
    try:
        yield
    finally:
        for child in children:
            child.kill()
            await child.wait()
        for reader in readers:
            reader.cancel()


if __name__ == "__main__":
    child, link_id, address, run_id, seed = sys.argv[1:]
    assert child == "--fire-at-link", "started by fuzz.py"
    fire_at_link(link_id, address, run_id, int(seed))
