"""Serves the run's page: in a thread with a loop of its own, so that no visitor can hold the loop that serves the run.

What it serves is read-only and public. All that a visitor can cost is bounded: connections, their age and what is read of them
(guard.py), streams, and what waits for a slow one. A page of another site learns nothing: there are no CORS headers, and a name that
somebody has resolved to this address is refused by its Host header. Strangers' words reach the page as JSON alone, and its policy
lets no script in but its own.
"""

import asyncio
import gzip
import json
import logging
import re
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Final, Self

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from dilocox_peer.errors import ConfigError, why_not_bound
from dilocox_peer.events import Failed, Listener
from dilocox_peer.network.crowding import to_give_up
from dilocox_peer.types import RunId
from dilocox_peer.web.document import PageDocument, RunPage
from dilocox_peer.web.facts import RunFacts
from dilocox_peer.web.guard import Guard
from dilocox_peer.web.own_host import is_own_host
from dilocox_peer.web.prometheus import exposition

MAX_STREAMS = 96  # of the connections; one more takes the place of one of the range of addresses that has most, or asks for /api/state now and then
WATCH_S = 1.0  # between two looks for connections that take too long
STREAM_WRITE_S = 10.0  # who has not taken an update by then is cut off
QUIET_S = 15.0  # a comment keeps proxies from ending a stream
MAX_LINE_BYTES, MAX_FIELD_BYTES = 2048, 4096
BACKLOG = 64
START_S, STOP_S = 5.0, 5.0

SECURITY: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Content-Security-Policy": (
            "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-store",
        "Server": "dilocox-peer",
    }
)
ASSETS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "/": ("index.html", "text/html"),
        "/page.css": ("page.css", "text/css"),
        "/page.js": ("page.js", "text/javascript"),
        "/uplot.min.css": ("uplot.min.css", "text/css"),
        "/uplot.min.js": ("uplot.min.js", "text/javascript"),
        "/icon.svg": ("icon.svg", "image/svg+xml"),
    }
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Shown:
    """A run's document in the forms that it is asked for, made once for all who ask. sections: each as JSON, and the number of the
    document that it changed in. changed: set when there is a newer one."""

    page: RunPage
    document: PageDocument | None = None
    number: int = 0
    sections: dict[str, tuple[int, str]] = field(default_factory=dict)
    written: dict[str, object] = field(default_factory=dict)
    raw: bytes = b""
    zipped: bytes = b""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, document: PageDocument) -> None:
        self.number += 1
        for name, section in document.items():
            if name in self.written and self.written[name] is section:
                continue
            self.written[name] = section
            text = json.dumps(section, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
            if name not in self.sections or self.sections[name][1] != text:
                self.sections[name] = (self.number, text)
        self.document, self.raw, self.zipped = document, self.since(0).encode(), b""
        told, self.changed = self.changed, asyncio.Event()
        told.set()

    def since(self, number: int) -> str:
        """The sections that are newer than the document of that number, as one JSON object in one line."""
        newer = (f'"{name}":{text}' for name, (changed, text) in self.sections.items() if changed > number)
        return "{" + ",".join(newer) + "}"

    def gzipped(self) -> bytes:
        if not self.zipped:
            self.zipped = gzip.compress(self.raw, 5, mtime=0)
        return self.zipped


class PageServer:
    """`with PageServer(...)`: serves until the block ends; what `show` is given is what it shows."""

    def __init__(self, pages: Mapping[RunId, RunPage], *, host: str, port: int, listener: Listener) -> None:
        """pages: by run id; who names no run sees the first. listener: called in the server's thread. port 0: any."""
        assert pages, "a page of no run"
        self._shown = {run: Shown(page) for run, page in pages.items()}
        self._host = host
        self._wanted_port = port
        self._listener = listener
        self._assets = {
            path: ((files(__package__) / "static" / name).read_bytes(), kind) for path, (name, kind) in ASSETS.items()
        }
        self._guards: set[Guard] = set()
        self._streams: dict[Guard, str] = {}  # the oldest first, with the range of addresses
        self._metrics: tuple[tuple[int, ...], bytes] = ((), b"")  # of the documents of these numbers
        self._waiting: dict[RunId, RunFacts] = {}  # the newest look of each run that the thread has not come to
        self._lock = threading.Lock()
        self._started = threading.Event()
        self._trouble: OSError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="dilocox-page", daemon=True)
        self.port = port

    def __enter__(self) -> Self:
        """Raises ConfigError when it cannot listen."""
        self._thread.start()
        if not self._started.wait(START_S):
            self.__exit__()
            raise ConfigError(f"--web-port: the page has not started within {START_S:.0f} s: try again")
        if self._trouble is not None:
            raise ConfigError(
                f"--web-port: cannot listen on {self._host} port {self._wanted_port} ({why_not_bound(self._trouble)}): pass another one"
            )
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._loop is not None and self._stop is not None:
            with suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(STOP_S)

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}/"

    def show(self, run: RunId, facts: RunFacts) -> None:
        """What was seen of a run, from any thread; the document is made in the server's, of the newest look alone."""
        with self._lock:
            is_told, self._waiting[run] = run in self._waiting, facts
        if not is_told and self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._update, run)

    # ---- in the thread ----

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                runner.run(self._serve())
        except Exception as error:  # a task boundary: the process that serves the run goes on
            self._listener(Failed("the run's page", f"{type(error).__name__}: {error}; it is not served any more"))
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(middlewares=[self._guarded], client_max_size=1)
        for path in self._assets:
            app.router.add_get(path, self._give_asset)
        app.router.add_get("/api/state", self._give_state)
        # A HEAD of it would be a stream that nobody reads, with a body that an answer to HEAD must not have.
        app.router.add_get("/api/events", self._give_events, allow_head=False)
        app.router.add_get("/metrics", self._give_metrics)
        silent = logging.getLogger(f"{__name__}.silent")  # what strangers send wrongly is no news
        silent.disabled = True
        runner = web.AppRunner(
            app, handle_signals=False, access_log=None, logger=silent, keepalive_timeout=0.0, lingering_time=0.0,
            max_line_size=MAX_LINE_BYTES, max_field_size=MAX_FIELD_BYTES, shutdown_timeout=0.5,
        )  # fmt: skip
        await runner.setup()
        make: Any = runner.server
        try:
            server = await self._loop.create_server(
                lambda: Guard(make, self._guards), self._host, self._wanted_port, backlog=BACKLOG
            )
        except OSError as error:
            self._trouble = error
            await runner.cleanup()
            return
        self.port = server.sockets[0].getsockname()[1]
        for run in list(self._waiting):
            self._update(run)
        self._started.set()
        watching = asyncio.create_task(self._watch(), name="connections")
        try:
            await self._stop.wait()
        finally:
            watching.cancel()
            server.close()
            for guard in list(self._guards):
                guard.cut()
            await runner.cleanup()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            now = asyncio.get_running_loop().time()
            for guard in [each for each in self._guards if each.until_s < now]:
                guard.cut()

    def _update(self, run: RunId) -> None:
        with self._lock:
            facts = self._waiting.pop(run, None)
        if facts is None:
            return
        shown = self._shown[run]
        try:
            document = shown.page.take(facts)
            names = [{"id": each, "name": known.page.name} for each, known in self._shown.items()]
            shown.put({**document, "runs": names})
        except Exception as error:  # a task boundary: the page stays as it was
            self._listener(Failed("the run's page", f"{type(error).__name__}: {error}; it shows what was before"))

    # ---- answers ----

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not is_own_host(request.headers.get("Host", ""), self._host):
            answer: web.StreamResponse = _said(421, "Open this page by the address that the bootstrap printed.\n")
        else:
            try:
                answer = await handler(request)
            except web.HTTPException as error:
                answer = _said(error.status, f"{error.status}: {error.reason}\n")
        if not answer.prepared:
            answer.headers.update(SECURITY)
            answer.force_close()
        return answer

    async def _give_asset(self, request: web.Request) -> web.StreamResponse:
        body, kind = self._assets[request.path]
        return web.Response(body=body, content_type=kind, charset="utf-8")

    async def _give_state(self, request: web.Request) -> web.StreamResponse:
        shown = self._asked(request)
        if _takes_gzip(request.headers.get("Accept-Encoding", "")):
            headers = {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
            return web.Response(body=shown.gzipped(), content_type="application/json", headers=headers)
        return web.Response(body=shown.raw, content_type="application/json", headers={"Vary": "Accept-Encoding"})

    async def _give_metrics(self, _request: web.Request) -> web.StreamResponse:
        numbers = tuple(shown.number for shown in self._shown.values())
        if numbers != self._metrics[0]:  # made once for all who ask
            documents = {run: shown.document for run, shown in self._shown.items() if shown.document is not None}
            self._metrics = numbers, exposition(documents)
        return web.Response(body=self._metrics[1], headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _give_events(self, request: web.Request) -> web.StreamResponse:
        """The document, then each time it changes what did; ends when the visitor goes, or is too slow."""
        shown = self._asked(request)
        guard = request.transport.get_protocol() if request.transport is not None else None
        if not isinstance(guard, Guard):
            raise web.HTTPServiceUnavailable  # the visitor has gone
        if len(self._streams) >= MAX_STREAMS:
            if (crowding := to_give_up(self._streams, guard.place)) is None:
                return _said(503, "There are too many visitors for one more stream: ask for /api/state now and then.\n")
            del self._streams[crowding]
            crowding.cut()
        self._streams[guard] = guard.place
        try:
            return await self._stream(request, shown, guard)
        finally:
            self._streams.pop(guard, None)

    async def _stream(self, request: web.Request, shown: Shown, guard: Guard) -> web.StreamResponse:
        response = web.StreamResponse(headers={**SECURITY, "Content-Type": "text/event-stream"})
        response.force_close()
        guard.stay()
        sent = 0
        try:
            await response.prepare(request)
            while True:
                changed = shown.changed
                text = f"event: state\ndata: {shown.since(sent)}\n\n" if shown.number > sent else ": quiet\n\n"
                sent = shown.number
                async with asyncio.timeout(STREAM_WRITE_S):
                    await response.write(text.encode())
                with suppress(TimeoutError):
                    async with asyncio.timeout(QUIET_S):
                        await changed.wait()
        except TimeoutError:
            guard.cut()
        except ConnectionError:
            pass  # the visitor has gone
        return response

    def _asked(self, request: web.Request) -> Shown:
        """The run that is asked for, once there is a document of it. Raises HTTPException."""
        wanted = request.query.get("run")
        found = [
            shown
            for run, shown in self._shown.items()
            if wanted is None or (len(wanted) >= 8 and run.startswith(wanted))
        ]
        if not found:
            raise web.HTTPNotFound
        if found[0].document is None:
            raise web.HTTPServiceUnavailable
        return found[0]


def _said(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=text)


def _takes_gzip(accepted: str) -> bool:
    """accepted: an Accept-Encoding header (RFC 9110, section 12.5.3); a weight that is no number counts as 1."""
    for each in accepted.lower().split(","):
        coding, _, weight = each.replace(" ", "").partition(";q=")
        if coding == "gzip":
            return not re.fullmatch(r"0(\.0*)?", weight)
    return False
