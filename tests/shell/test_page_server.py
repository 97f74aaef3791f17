"""The server of the run's page, by real sockets: what it answers, and what those who mean it ill get."""

import asyncio
import gzip
import json
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace

import pytest

from dilocox_peer.errors import ConfigError
from dilocox_peer.events import Event
from dilocox_peer.web import guard, server
from dilocox_peer.web.document import RunPage
from dilocox_peer.web.guard import MAX_CONNECTIONS, MAX_HEAD_BYTES
from dilocox_peer.web.own_host import is_own_host
from dilocox_peer.web.server import ASSETS, PageServer
from tests.shell.conftest import until
from tests.simulated_run import simulated_facts, simulated_manifest

MANIFEST = simulated_manifest(50, 2)
FACTS = simulated_facts(MANIFEST, peers=4, rounds=6)
RUN = MANIFEST.run_id


class Served:
    """A server with one document."""

    def __init__(self, page: PageServer, told: list[Event]) -> None:
        self.page, self.told = page, told

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.page.port), timeout=10)

    def send(self, raw: bytes) -> bytes:
        """All that comes until it is closed."""
        with closing(self.connect()) as connection:
            try:
                connection.sendall(raw)
                return b"".join(iter(lambda: connection.recv(65536), b""))
            except ConnectionError:
                return b""

    def get(self, path: str, *headers: str, host: str = "localhost") -> tuple[int, str, bytes]:
        """Status, head, body."""
        lines = [f"GET {path} HTTP/1.1", f"Host: {host}", *headers, "", ""]
        head, _, body = self.send("\r\n".join(lines).encode()).partition(b"\r\n\r\n")
        return int(head.split()[1]), head.decode(), body


@pytest.fixture
def served() -> Iterator[Served]:
    told: list[Event] = []
    with PageServer({RUN: RunPage(MANIFEST)}, host="127.0.0.1", port=0, listener=told.append) as page:
        known = Served(page, told)
        page.show(RUN, FACTS)
        while known.get("/api/state")[0] == 503:
            pass
        yield known
        assert not told


def test_the_state_is_the_document_zipped_or_not(served: Served) -> None:
    _, head, raw = served.get("/api/state")
    assert "application/json" in head
    document = json.loads(raw)
    assert document["run"]["id"] == RUN
    assert document["now"]["round"] == 6
    status, head, zipped = served.get(f"/api/state?run={RUN[:12]}", "Accept-Encoding: gzip, br")
    assert (status, "Content-Encoding: gzip" in head) == (200, True)
    assert gzip.decompress(zipped) == raw
    for refusal in ("identity", "gzip;q=0", "br, gzip; Q=0.000", "x-gzip-not"):
        assert served.get("/api/state", f"Accept-Encoding: {refusal}")[2] == raw
    for wish in ("br;q=0.9, GZIP;q=0.1", "gzip;q=nonsense"):
        assert served.get("/api/state", f"Accept-Encoding: {wish}")[2] == zipped
    with urllib.request.urlopen(f"{served.page.url}metrics") as answer:
        assert f'dilocox_run_round{{name="simulated",run="{RUN[:12]}"}} 6.0' in answer.read().decode()


def test_of_several_runs_each_has_its_document() -> None:
    other = simulated_manifest(9, 1, "other")
    pages = {RUN: RunPage(MANIFEST), other.run_id: RunPage(other)}
    with PageServer(pages, host="127.0.0.1", port=0, listener=print) as page:
        known = Served(page, [])
        page.show(RUN, FACTS)
        page.show(other.run_id, simulated_facts(other, peers=2, rounds=3))
        for run, name in ((RUN, "simulated"), (other.run_id, "other")):
            while known.get(f"/api/state?run={run}")[0] == 503:
                pass
            document = json.loads(known.get(f"/api/state?run={run[:12]}")[2])
            assert document["run"]["name"] == name
            assert [each["name"] for each in document["runs"]] == ["simulated", "other"]
        assert json.loads(known.get("/api/state")[2])["run"]["id"] == RUN
        for wrong in ("", "ab", "0" * 64, "%00", other.run_id + "0"):
            assert known.get(f"/api/state?run={wrong}")[0] == 404
        assert known.get("/metrics")[2].count(b"dilocox_run_round{") == 2


def test_every_answer_forbids_what_is_not_the_pages_own(served: Served) -> None:
    for path in (*ASSETS, "/api/state", "/metrics", "/nothing"):
        _, head, _ = served.get(path)
        policy = next(line for line in head.splitlines() if line.startswith("Content-Security-Policy:"))
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "X-Content-Type-Options: nosniff" in head
        assert "Access-Control" not in head


def test_the_pages_own_files_hold_no_inline_script_and_ask_nobody_else(served: Served) -> None:
    html = served.get("/")[2].decode()
    assert html.count("<script") == html.count("<script src=") == 2
    assert not any(f" on{kind}=" in html for kind in ("click", "load", "error"))
    assert "style=" not in html
    for path in ASSETS:
        text = served.get(path)[2].decode()
        assert "innerHTML" not in text or path == "/uplot.min.js"
        addresses = {
            part.split('"')[0].split("'")[0] for part in text.split("http")[1:] if part.startswith(("://", "s://"))
        }
        assert all("w3.org" in each or "github.com" in each for each in addresses), addresses


@pytest.mark.parametrize(
    "path",
    [
        "/../pyproject.toml",
        "/..%2f..%2fetc/passwd",
        "/static/../../x",
        "//etc/passwd",
        "/page.js/..",
        "/%00",
        "/api",
        "/?x=%ff",
        "/.git/config",
    ],
)
def test_nothing_but_the_listed_paths_is_there(served: Served, path: str) -> None:
    status, _, body = served.get(path)
    assert status in {400, 404} or (path.startswith("/?") and status == 200)
    assert b"root:" not in body
    assert b"[project]" not in body


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("localhost:8080", True), ("127.0.0.1:1", True), ("[::1]:80", True), ("[::1]", True), ("192.168.1.7:80", True),
        ("page.example:9", True), ("evil.example", False), ("127.0.0.1.evil.example:80", False), ("", False), ("localhost.evil", False),
    ],
)  # fmt: skip
def test_a_name_that_somebody_resolved_to_us_is_refused(served: Served, host: str, is_own: bool) -> None:
    assert is_own_host(host, "page.example") == is_own
    if "page.example" not in host:
        assert served.get("/api/state", host=host)[0] == (200 if is_own else 421)


def test_only_reading_is_possible(served: Served) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"):
        raw = f"{method} /api/state HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{{}}".encode()
        answer = served.send(raw)
        assert not answer.startswith(b"HTTP/1.1 2"), method


def test_an_answer_to_head_has_no_body_and_is_no_stream(served: Served) -> None:
    for path, status in (("/", 200), ("/api/state", 200), ("/metrics", 200), ("/api/events", 405)):
        head, _, body = served.send(f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()).partition(b"\r\n\r\n")
        assert (int(head.split()[1]), body) == (status, b""), path
    assert served.page.num_streams == 0


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (2 * MAX_HEAD_BYTES) + b"\r\n\r\n",
        b"GET /" + b"x" * 4000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"x" * 200_000,
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n",
    ],
)
def test_what_is_no_request_gets_a_refusal_or_nothing(served: Served, raw: bytes) -> None:
    answer = served.send(raw)
    assert not answer or (answer.startswith(b"HTTP/1.") and b" 200 " not in answer[:20])
    assert served.get("/api/state")[0] == 200


def test_a_connection_is_one_request(served: Served) -> None:
    answer = served.send(b"GET /icon.svg HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"Connection: close" in answer


def test_who_asks_slowly_is_cut_off(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "CONNECTION_S", 0.05)
    monkeypatch.setattr(server, "WATCH_S", 0.05)
    assert served.send(b"GET / HTTP/1.1\r\nHost: local") == b""
    assert served.send(b"") == served.send(b"\r\n\r\n") == b""


def test_many_connections_are_bounded_and_the_page_is_there_again(served: Served) -> None:
    with ExitStack() as stack:
        idle = [stack.enter_context(closing(served.connect())) for _ in range(MAX_CONNECTIONS)]
        for connection in idle[:50]:
            connection.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert served.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") == b"", "one too many"
    while not served.send(b"GET /icon.svg HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        pass


async def test_a_stream_has_the_document_and_then_what_changed(served: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.page.port)
    writer.write(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")

    async def next_state() -> dict[str, object]:
        async with asyncio.timeout(60):
            while not (line := await reader.readline()).startswith(b"data: "):
                assert line
            known: dict[str, object] = json.loads(line.removeprefix(b"data: "))
            return known

    first = await next_state()
    assert {"run", "now", "stages", "history", "contributors", "runs"} <= set(first)
    served.page.show(RUN, replace(FACTS, at_s=FACTS.at_s + 2))
    assert set(await next_state()) == {"now"}
    fewer = [replace(FACTS.stages[0], holders=FACTS.stages[0].holders[:1]), FACTS.stages[1]]
    served.page.show(RUN, replace(FACTS, stages=fewer))
    assert set(await next_state()) == {"now", "stages"}
    writer.close()


async def test_who_does_not_take_updates_is_cut_off(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STREAM_WRITE_S", 0.1)
    deaf = served.connect()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    crowd = simulated_facts(MANIFEST, peers=400, rounds=6)
    await until(lambda: served.page.num_streams == 1)
    number = 0

    def is_cut() -> bool:
        nonlocal number
        number += 1
        holders = [replace(each, round=number) for each in crowd.stages[0].holders]
        served.page.show(
            RUN,
            replace(
                crowd, at_s=crowd.at_s + number, stages=[replace(crowd.stages[0], holders=holders), crowd.stages[1]]
            ),
        )
        return served.page.num_streams == 0 and number > 3

    await until(is_cut)
    deaf.close()


def test_one_range_of_addresses_does_not_hold_all_streams(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_STREAMS", 3)
    monkeypatch.setattr(guard, "place_of", str)  # of this computer all are of one range

    with ExitStack() as open_ones:

        def visit(address: str) -> socket.socket:
            visitor = socket.create_connection(("127.0.0.1", served.page.port), timeout=10, source_address=(address, 0))
            open_ones.enter_context(closing(visitor))
            visitor.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return visitor

        first = [visit("127.0.0.1") for _ in range(3)]
        assert all(b" 200 " in each.recv(64) for each in first)
        assert b" 503 " in visit("127.0.0.1").recv(64), "of this range there are no more places"
        assert b" 200 " in visit("127.9.0.1").recv(64)
        assert served.page.num_streams == 3
        with suppress(ConnectionError):
            while first[0].recv(65536):  # it has an end: the oldest of the range made room
                pass


def test_figures_are_made_once_for_all_who_ask(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    def exposition(documents: object) -> bytes:
        made.append(documents)
        return b"figures\n"

    monkeypatch.setattr(server, "exposition", exposition)
    assert [served.get("/metrics")[2] for _ in range(3)] == [b"figures\n"] * 3
    assert len(made) == 1


def test_a_port_that_is_taken_is_told_in_one_line(served: Served) -> None:
    with (
        pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {served.page.port} "),
        PageServer({RUN: RunPage(MANIFEST)}, host="127.0.0.1", port=served.page.port, listener=print),
    ):
        pass
