"""A port that is taken is told in one line, with the reason in the system's words, once."""

import socket
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

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
