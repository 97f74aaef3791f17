"""A port that is taken is told in one line, with the reason in the system's words, once."""

import socket
from collections.abc import Callable, Iterator

import pytest

from dilocox_peer.cli.metrics import metrics_server
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
