"""A run's shards on a web server, as the manifest's data.url names it: for what no peer has, or not yet.

What lies there is the folder that `tokenize` wrote. Nothing of it is believed but by its hash: a shard of the wrong size ends at
its first byte too many. Over https, and from outside alone: a run's owner may be a stranger, who chooses nothing that is asked of this
machine or its network. Those, and plain http of this machine, are for runs of the volunteer's own. Blocking: call it from a worker thread.
"""

import math
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from dilocox_peer.errors import DilocoxError
from dilocox_peer.peer.outside import dial_outside, inside, outside_places
from dilocox_peer.store.shelf import Shelf
from dilocox_peer.types import Digest

STALL_S = 10.0  # leaving may have to wait as long
SLOWEST_BYTES_PER_S = 10_000  # over all of a file
GRACE_S = 60.0
_PIECE_BYTES = 64 * 1024


class NotOnTheWeb(DilocoxError):
    """One line: what was asked of which server, and what came."""


class NothingCame(NotOnTheWeb):
    """Not a byte of the file, and that soon: it costs next to nothing to ask again."""


class WebFolder:
    """url: ends with the folder's name. bytes_per_s: at most, None: no limit. is_own: the volunteer says that it may be inside."""

    def __init__(self, url: str, bytes_per_s: float | None = None, *, is_own: bool = False) -> None:
        self._url = url.rstrip("/")
        self._bytes_per_s = bytes_per_s
        self._is_own = is_own
        self._opener = urllib.request.build_opener(_Redirects(), *_handlers(self._connected, is_own=is_own))
        self._is_stopped = False
        self._socket: socket.socket | None = None
        self._reads_since: float | None = None

    def stop(self) -> None:
        """What is under way ends. From any thread."""
        self._is_stopped = True
        self._cut()

    def _connected(self, connection: socket.socket) -> None:
        self._socket = connection

    def _cut(self) -> None:
        """A server that sends a byte now and then would hold a read for days: whoever reads finds the connection ended."""
        if (connection := self._socket) is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def fetch(self, file_name: str, name: Digest, shelf: Shelf, *, max_bytes: int, is_exact: bool) -> None:
        """Puts a file whose sha256 is `name` on the shelf. is_exact: it has max_bytes. Raises NotOnTheWeb, OSError of the disk."""
        url = f"{self._url}/{file_name}"
        if not self._is_own and (parts := urlsplit(url)).scheme != "https":
            raise NotOnTheWeb(f"{url}: {inside(parts.hostname or '')}")
        request = urllib.request.Request(url, headers={"Accept-Encoding": "identity", "User-Agent": "dilocox-peer"})
        before, began, has_begun = shelf.held, time.monotonic(), False
        shelf.make_room_for(max_bytes if is_exact else 0)
        try:
            with self._answer(request) as reply:
                has_begun = True
                found = shelf.write(lambda take: self._read(reply, take, url, max_bytes, is_exact))
        except urllib.error.HTTPError as error:
            error.close()  # it holds the connection
            raise _failure(began, f"{url}: {error.code} {_one_line(error.reason)}"[:300]) from None
        except (urllib.error.URLError, TimeoutError, ConnectionError, HTTPException, ValueError) as error:
            reason = _one_line(getattr(error, "reason", error))[:300] or type(error).__name__
            raise _failure(-math.inf if has_begun else began, f"{url}: {reason}") from None
        if found != name:
            if found not in before:
                shelf.forget(found)
            raise NotOnTheWeb(f"{url}: its sha256 is {found.hex()[:16]}, the catalogue says {name.hex()[:16]}")

    @contextmanager
    def _answer(self, request: urllib.request.Request) -> Iterator[Any]:
        """What the server answers, after its headers, which have GRACE_S to come, as has each piece that is read of it then."""
        is_over = threading.Event()
        self._reads_since = time.monotonic()
        threading.Thread(target=self._watch, args=(is_over,), name="web", daemon=True).start()
        try:
            with self._opener.open(request, timeout=STALL_S) as reply:
                self._reads_since = None
                yield reply
        finally:
            is_over.set()
            self._socket = None

    def _watch(self, is_over: threading.Event) -> None:
        """One read takes all lines that come between the chunks of a body, and behind the last, each as slowly as its sender likes."""
        while not is_over.wait(GRACE_S / 4):
            since = self._reads_since
            if since is not None and time.monotonic() - since > GRACE_S:
                self._cut()

    def _read(self, reply: Any, take: Callable[[bytes], object], url: str, max_bytes: int, is_exact: bool) -> None:
        size, started = 0, time.monotonic()
        while piece := self._piece(reply, min(_PIECE_BYTES, max_bytes - size + 1), url):
            size += len(piece)
            if self._is_stopped:
                raise NotOnTheWeb(f"{url}: we are leaving")
            if size > max_bytes:
                raise NotOnTheWeb(f"{url}: larger than {max_bytes} bytes")
            take(piece)
            elapsed_s = time.monotonic() - started
            if elapsed_s > GRACE_S + size / SLOWEST_BYTES_PER_S:
                raise NotOnTheWeb(f"{url}: {size} bytes in {elapsed_s:.0f} s, which is too slow")
            if self._bytes_per_s is not None:
                time.sleep(max(0.0, size / self._bytes_per_s - elapsed_s))
        if is_exact and size != max_bytes:
            raise NotOnTheWeb(f"{url}: {size} bytes instead of {max_bytes}")

    def _piece(self, reply: Any, most: int, url: str) -> bytes:
        """The next bytes. Raises NotOnTheWeb, also for what is an OSError as those of the disk are: broken TLS, a way that is gone."""
        self._reads_since = time.monotonic()
        try:
            piece: bytes = reply.read1(most)
        except OSError as error:
            reason = _one_line(error.strerror or error)[:200]
            raise NotOnTheWeb(f"{url}: {reason or type(error).__name__}") from None
        finally:
            self._reads_since = None
        return piece


def _one_line(told: object) -> str:
    return " ".join(str(told).split())


def _failure(began: float, told: str) -> NotOnTheWeb:
    return (NothingCame if time.monotonic() - began < 2 * STALL_S else NotOnTheWeb)(told)


def _handlers(connected: Callable[[socket.socket], None], *, is_own: bool) -> list[urllib.request.BaseHandler]:
    """Of http and https, which say which socket they go over. is_own: it may lead inside."""

    class Plain(HTTPConnection):
        def connect(self) -> None:
            super().connect()
            connected(self.sock)

    class Secure(HTTPSConnection):
        def set_tunnel(self, host: str, port: int | None = None, headers: Any = None) -> None:
            self._behind_proxy = urlsplit(f"//{host}").hostname or ""
            super().set_tunnel(host, port, headers)

        def connect(self) -> None:
            if not is_own:
                # The volunteer's own proxy may be anywhere; what lies behind it is looked up here too, as far as that can be done.
                if behind := getattr(self, "_behind_proxy", ""):
                    with suppress(socket.gaierror):
                        outside_places(behind, 443)
                else:
                    self._create_connection = dial_outside
            super().connect()
            connected(self.sock)

    class OverPlain(urllib.request.HTTPHandler):
        def http_open(self, req: urllib.request.Request) -> Any:
            return self.do_open(Plain, req)

    class OverSecure(urllib.request.HTTPSHandler):
        def https_open(self, req: urllib.request.Request) -> Any:
            return self.do_open(Secure, req)

    return [OverPlain(), OverSecure()]


class _Redirects(urllib.request.HTTPRedirectHandler):
    """To https; from this machine also on this machine."""

    max_redirections = 5

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        fp.close()  # what comes with it would be read to its end, into memory
        if not is_allowed(newurl) or (urlsplit(newurl).scheme == "http" and urlsplit(req.full_url).scheme != "http"):
            raise urllib.error.URLError(f"sent on to {newurl[:200]}, which is not https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def is_allowed(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in ("localhost", "127.0.0.1"))
