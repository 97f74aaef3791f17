"""Shards from a web server: believed by their hash alone, in their size and their time."""

import contextlib
import errno
import http.server
import io
import os
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dilocox_peer.cli.flags import InitFlags
from dilocox_peer.cli.init import write_run_file
from dilocox_peer.config import preset
from dilocox_peer.errors import ConfigError
from dilocox_peer.peer import outside, web_folder
from dilocox_peer.peer.outside import Inside, dial_outside, is_outside, why_not_asked
from dilocox_peer.peer.web_folder import NothingCame, NotOnTheWeb, WebFolder, is_allowed
from dilocox_peer.store.shelf import Shelf
from dilocox_peer.types import sha256

RAW = os.urandom(300_000)
NAME = sha256(RAW)


class Files(http.server.BaseHTTPRequestHandler):
    """What a path gives: `says` of its length, and the bytes."""

    def do_GET(self) -> None:
        match self.path:
            case "/run/right":
                self.give(RAW)
            case "/run/wrong":
                self.give(RAW[:-1] + bytes((RAW[-1] ^ 1,)))  # another byte than any that may stand there
            case "/run/short":
                self.give(RAW[:1000])
            case "/run/broken":
                self.give(RAW[:1000], length=len(RAW))
            case "/run/endless":
                self.send_response(200)
                self.end_headers()
                for _ in range(100):
                    self.wfile.write(RAW)
            case "/run/dripping":
                self.send_response(200)
                self.end_headers()
                self.drip()
            case "/run/dripping-headers":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Endless: ")
                self.drip()
            case "/run/dripping-chunk":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                self.drip(b"0")
            case "/run/dripping-trailers":
                self.wfile.write(
                    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3e8\r\n" + RAW[:1000] + b"\r\n0\r\n"
                )
                self.drip(b"a: b\r\n")
            case "/run/moved-much":
                self.send_response(302)
                self.send_header("Location", "/run/right")
                self.end_headers()
                with contextlib.suppress(OSError):
                    while True:
                        self.wfile.write(RAW)
            case "/run/in-circles":
                self.send_response(302)
                self.send_header("Location", "/run/in-circles")
                self.end_headers()
            case "/run/moved":
                self.send_response(302)
                self.send_header("Location", "ftp://elsewhere/right")
                self.end_headers()
            case "/run/moved-here":
                self.send_response(302)
                self.send_header("Location", "/run/right")
                self.end_headers()
            case _:
                self.send_error(404, "not here")

    def give(self, raw: bytes, length: int | None = None) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(length or len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def drip(self, piece: bytes = b"x") -> None:
        """A byte now and then, for longer than any test takes."""
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(piece)
                time.sleep(0.02)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """A reader that hangs up."""

    with Server(("127.0.0.1", 0), Files) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/run/"
        server.shutdown()
        thread.join(10.0)


@pytest.mark.parametrize("path", ["right", "moved-here", "moved-much"])
def test_a_file_of_the_right_hash_is_on_the_shelf_then(tmp_path, url, path):
    shelf = Shelf(tmp_path)
    WebFolder(url, is_own=True).fetch(path, NAME, shelf, max_bytes=len(RAW), is_exact=True)
    assert shelf.get(NAME) == RAW
    WebFolder(url, is_own=True).fetch(path, NAME, shelf, max_bytes=len(RAW) + 5000, is_exact=False)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("wrong", "its sha256 is"),
        ("short", "1000 bytes instead of 300000"),
        ("broken", "1000 bytes instead of 300000|IncompleteRead"),
        ("endless", "larger than 300000 bytes"),
        ("moved", "which is not https"),
        ("missing", "404 not here"),
        ("in-circles", "302 .*infinite loop"),
    ],
)
def test_what_is_not_the_file_is_said_in_one_line_and_not_kept(tmp_path, url, path, says):
    shelf = Shelf(tmp_path)
    with pytest.raises(NotOnTheWeb, match=says) as raised:
        WebFolder(url, is_own=True).fetch(path, NAME, shelf, max_bytes=len(RAW), is_exact=True)
    assert "\n" not in str(raised.value)
    assert isinstance(raised.value, NothingCame) == (path in {"moved", "missing", "in-circles"})
    assert shelf.held == frozenset()
    assert not [each for each in tmp_path.rglob("*") if each.is_file()]


@pytest.mark.parametrize(
    "error", [ssl.SSLError(1, "decryption failed or bad record mac"), OSError(errno.EHOSTUNREACH, "no route to host")]
)
def test_a_line_that_breaks_is_no_fault_of_the_disk(tmp_path, monkeypatch, error):
    """It was told as one, with the word to free some space, and ended who was joining."""

    class Reply(io.BytesIO):
        def read1(self, _most=-1):
            raise error

    monkeypatch.setattr(urllib.request.OpenerDirector, "open", lambda *_, **__: Reply())
    with pytest.raises(NotOnTheWeb, match=error.strerror):
        WebFolder("https://example.org/run").fetch("x", NAME, Shelf(tmp_path), max_bytes=len(RAW), is_exact=True)


def test_nobody_there_a_stop_and_a_quota(tmp_path, url):
    with pytest.raises(NothingCame, match="refused"):
        WebFolder("http://127.0.0.1:9/x", is_own=True).fetch(
            "right", NAME, Shelf(tmp_path), max_bytes=len(RAW), is_exact=True
        )
    leaving = WebFolder(url, is_own=True)
    leaving.stop()
    with pytest.raises(NotOnTheWeb, match="we are leaving"):
        leaving.fetch("right", NAME, Shelf(tmp_path), max_bytes=len(RAW), is_exact=True)
    with pytest.raises(OSError, match="quota"):
        WebFolder(url, is_own=True).fetch(
            "right", NAME, Shelf(tmp_path, quota_bytes=1000), max_bytes=len(RAW), is_exact=True
        )


DRIPPING = ["dripping", "dripping-headers", "dripping-chunk", "dripping-trailers"]


@pytest.mark.parametrize("path", DRIPPING)
def test_a_server_that_sends_a_byte_now_and_then_holds_nobody(tmp_path, url, path, monkeypatch):
    monkeypatch.setattr(web_folder, "GRACE_S", 0.3)
    with pytest.raises(NotOnTheWeb):
        WebFolder(url, is_own=True).fetch(path, NAME, Shelf(tmp_path), max_bytes=len(RAW), is_exact=True)


@pytest.mark.parametrize("path", DRIPPING)
def test_who_leaves_does_not_wait_for_it(tmp_path, url, path):
    folder = WebFolder(url, is_own=True)
    leaving = threading.Timer(0.2, folder.stop)
    leaving.start()
    with pytest.raises(NotOnTheWeb):
        folder.fetch(path, NAME, Shelf(tmp_path), max_bytes=len(RAW), is_exact=True)
    leaving.join()


def test_another_good_file_in_its_place_costs_neither(tmp_path, url):
    shelf, other = Shelf(tmp_path), sha256(b"another")
    held = shelf.write(lambda take: take(RAW))
    with pytest.raises(NotOnTheWeb, match="the catalogue says"):
        WebFolder(url, is_own=True).fetch("right", other, shelf, max_bytes=len(RAW), is_exact=True)
    assert held in shelf


def test_only_https_or_this_machine():
    assert is_allowed("https://example.org/x")
    assert is_allowed("http://localhost:80/x")
    assert not any(map(is_allowed, ["http://example.org/x", "file:///etc/passwd", "http://127.0.0.1.example.org/x"]))
    refused = ("http://example.org/x", "https://a b", "file:///x", "http://localhost.org/x")
    for url in (*refused, "https://example.org/x?confirm=yes&rest=", "http://127.0.0.1:80/x#"):
        with pytest.raises(ConfigError, match="url"):
            preset("tiny", data={"source": "shards", "catalogue": "ab" * 32, "url": url})
    with pytest.raises(ConfigError, match="url is for source"):
        preset("tiny", data={"url": "https://example.org/x"})


@pytest.mark.parametrize(
    ("address", "is_so"),
    [
        ("8.8.8.8", True), ("2606:4700::1111", True), ("::ffff:8.8.8.8", True), ("64:ff9b::808:808", True),
        ("127.0.0.1", False), ("10.1.2.3", False), ("192.168.1.1", False), ("100.64.0.1", False), ("169.254.169.254", False),
        ("0.0.0.0", False), ("224.0.0.1", False), ("::1", False), ("::", False), ("fe80::1%eth0", False), ("fd00::1", False),
        ("fec0::1", False), ("::ffff:127.0.0.1", False), ("::127.0.0.1", False), ("64:ff9b::7f00:1", False), ("2002:a00:1::1", False),
        ("localhost", False), ("", False),
    ],
)  # fmt: skip
def test_what_an_address_says_of_where_it_is(address, is_so):
    assert is_outside(address) == is_so


@pytest.fixture
def service(monkeypatch) -> Iterator[socket.socket]:
    """Something of the volunteer's that listens on this machine, and no proxy."""
    for name in ("https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        yield listening


def assert_left_alone(service: socket.socket) -> None:
    with pytest.raises(BlockingIOError):
        service.accept()


@pytest.mark.parametrize(
    "where", ["http://127.0.0.1", "http://localhost", "https://127.0.0.1", "https://localhost", "https://2130706433"]
)
def test_a_strangers_run_has_nothing_asked_of_this_machine(tmp_path, service, where):
    """A run's owner chose the path of a GET that each volunteer's peer sent to a service of the volunteer's."""
    url = f"{where}:{service.getsockname()[1]}/api"
    with pytest.raises(
        NotOnTheWeb, match=r"is this machine or in its network, .* pass --local-data-url if the run is yours"
    ) as raised:
        WebFolder(url).fetch("x", NAME, Shelf(tmp_path), max_bytes=len(RAW), is_exact=True)
    assert "\n" not in str(raised.value)
    assert_left_alone(service)
    assert "pass --local-data-url" in why_not_asked(url)


def test_what_a_name_stood_for_when_it_was_checked_is_dialled(monkeypatch):
    """It may stand for this machine the next time, or for both at once."""
    answers = iter([["127.0.0.1", "8.8.8.8"], ["127.0.0.1"]])
    dialled: list[Any] = []

    def look_up(_host, port, **_options):
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (each, port)) for each in next(answers)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "create_connection", lambda place, *_: dialled.append(place))
    dial_outside(("changes.example", 443), 1.0)
    assert dialled == [("8.8.8.8", 443)]
    with pytest.raises(Inside):
        dial_outside(("changes.example", 443), 1.0)


def test_a_name_of_thousands_of_addresses_holds_nobody(monkeypatch):
    """Each was dialled for ten seconds: of 3000 eight hours, in which no shard was fetched from anybody."""
    now, dialled = [0.0], list[Any]()

    def dial(place, timeout_s):
        dialled.append(place)
        now[0] += timeout_s
        raise TimeoutError("timed out")

    found = [
        (socket.AF_INET, socket.SOCK_STREAM, 0, "", (f"8.8.{each // 250}.{each % 250}", 443)) for each in range(3000)
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(socket, "create_connection", dial)
    monkeypatch.setattr(outside, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with pytest.raises(TimeoutError):
        dial_outside(("many.example", 443), 10.0)
    assert 3 <= len(dialled) <= 5


def test_a_proxy_of_the_volunteers_may_be_inside_and_what_lies_behind_it_may_not(tmp_path, service, monkeypatch):
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{service.getsockname()[1]}")
    with pytest.raises(NotOnTheWeb, match="--local-data-url"):
        WebFolder("https://127.0.0.1:9/x").fetch("x", NAME, Shelf(tmp_path), max_bytes=len(RAW), is_exact=True)
    assert_left_alone(service)
    heard: list[bytes] = []

    def answer() -> None:
        link, _ = service.accept()
        with link:
            heard.append(link.recv(1000))

    service.setblocking(True)
    proxy = threading.Thread(target=answer)
    proxy.start()
    with pytest.raises(NotOnTheWeb):
        WebFolder("https://8.8.8.8/x").fetch("x", NAME, Shelf(tmp_path), max_bytes=len(RAW), is_exact=True)
    proxy.join(10.0)
    assert heard[0].startswith(b"CONNECT 8.8.8.8:443")


def test_init_wants_the_folder_whose_shards_lie_there(tmp_path):
    with pytest.raises(ConfigError, match=r"--data-url .*: pass --data"):
        write_run_file(InitFlags(path=tmp_path / "run.toml", data_url="https://x.org/y", home=tmp_path))
