"""A port that is taken is told in one line, with the reason in the system's words, once."""

import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from http.client import HTTPConnection

import pytest

from dilocox_peer.cli import metrics
from dilocox_peer.cli.metrics import MAX_SCRAPES, metrics_server
from dilocox_peer.cli.observer import Observer
from dilocox_peer.cli.page import check_port
from dilocox_peer.config import preset
from dilocox_peer.errors import ConfigError
from dilocox_peer.web.document import RunPage
from dilocox_peer.web.server import PageServer


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def serve_page(host: str, port: int) -> None:
    manifest = preset("tiny")
    with PageServer({manifest.run_id: RunPage(manifest)}, host=host, port=port, listener=print):
        pytest.fail("it listens there")


def serve_metrics(host: str, port: int) -> None:
    with metrics_server(Observer(), host, port):
        pytest.fail("it listens there")


@pytest.mark.parametrize("listen", [check_port, serve_page, serve_metrics])
def test_the_reason_is_told_once(listen: Callable[[str, int], None], taken: int) -> None:
    """It said: (address already in use (while attempting to bind on address ('127.0.0.1', 4711)))."""
    with pytest.raises(ConfigError) as told:
        listen("127.0.0.1", taken)
    assert "cannot listen on 127.0.0.1" in str(told.value)
    assert "(address already in use): pass another one" in str(told.value)
    assert str(told.value).count(str(taken)) == 1


@pytest.mark.parametrize("host", ["x" * 300, "127.0.0.1.1.1"])
def test_a_host_that_is_none_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"--web-port: cannot listen on {host} port 0 \([a-z ]+\): pass another one"):
        check_port(host, 0)


@pytest.fixture
def free() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def scraped(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return bytes(answer.read())


def scraped_as(name: str, port: int) -> tuple[int, bytes]:
    with closing(HTTPConnection("127.0.0.1", port, timeout=10)) as asking:
        asking.request("GET", "/metrics", headers={"Host": f"{name}:{port}"})
        answer = asking.getresponse()
        return answer.status, answer.read()


def test_metrics_on_loopback_are_not_for_a_name_that_somebody_resolved_to_it(free: int) -> None:
    """A page in the volunteer's browser read them, as a page of the same origin."""
    with metrics_server(Observer(), "127.0.0.1", free):
        assert scraped_as("evil.example", free) == (421, b"Ask for it by its address, or as localhost.\n")
        for name in ("127.0.0.1", "localhost", "[::1]"):
            status, text = scraped_as(name, free)
            assert status == 200, name
            assert b"dilocox_is_well" in text, name


def test_metrics_for_a_network_are_for_whatever_name_prometheus_has(free: int) -> None:
    with metrics_server(Observer(), "0.0.0.0", free):
        for name in ("peer", "peer.example", "192.168.1.7"):  # of a container's service, of DNS
            assert scraped_as(name, free)[0] == 200, name


def test_silent_visitors_hold_a_bounded_number_of_threads_for_a_bounded_time(
    free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics.ScrapeHandler, "timeout", 2.0)
    with metrics_server(Observer(), "127.0.0.1", free), ExitStack() as silent:
        assert b"dilocox_is_well" in scraped(free)

        def visit() -> socket.socket:
            return silent.enter_context(closing(socket.create_connection(("127.0.0.1", free), timeout=10)))

        held = [visit() for _ in range(MAX_SCRAPES)]
        assert visit().recv(1) == b"", "hung up on"
        assert [each.recv(1) for each in held] == [b""] * MAX_SCRAPES, "each has an end"
        assert b"dilocox_is_well" in scraped(free)


def test_visitors_that_send_a_byte_now_and_then_are_hung_up_on_too(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of their bytes came in time: eight of them had all places for as long as they liked."""
    monkeypatch.setattr(metrics.ScrapeHandler, "timeout", 600.0)
    monkeypatch.setattr(metrics, "VISIT_S", 1.0)
    with metrics_server(Observer(), "127.0.0.1", free), ExitStack() as slow:
        held = [
            slow.enter_context(closing(socket.create_connection(("127.0.0.1", free), timeout=10)))
            for _ in range(MAX_SCRAPES)
        ]
        deadline = time.monotonic() + 60.0
        while held and time.monotonic() < deadline:
            held = [each for each in held if not _is_hung_up_on(each)]
        assert not held
        assert b"dilocox_is_well" in scraped(free)


def _is_hung_up_on(visitor: socket.socket) -> bool:
    # Not before it is connected: five wait at once to be taken, and the others ask again after a second.
    visitor.settimeout(0.1)
    try:
        visitor.sendall(b"G")
        return visitor.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True
