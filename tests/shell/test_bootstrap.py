"""A real bootstrap: several runs, its health asked for from outside, and the same links after kill -9."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dilocox_peer.cli import bootstrap
from dilocox_peer.cli.flags import BootstrapFlags
from dilocox_peer.cli.lifetime import Stop
from dilocox_peer.config import read_signed_manifest
from dilocox_peer.events import Event, Left
from dilocox_peer.peer.identity import Identity
from tests.shell.commands import assert_refused, free_port, peer
from tests.shell.conftest import PutRuns, stands_still, until

pytestmark = pytest.mark.timeout(180)

START_S = 60.0


class Bootstrap:
    """A running one; `links` when it has printed as many as it has runs."""

    def __init__(self, home: Path, port: int, files: list[Path], *more: str) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "dilocox_peer", "bootstrap", *map(str, files), "--home", str(home),
                "--host-maddrs", f"/ip4/127.0.0.1/tcp/{port}", *more,
            ],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        too_late = threading.Timer(START_S, self.process.kill)
        too_late.start()
        said = ""
        while len(links := re.findall(r"dilocox://\S+", said)) < len(files):
            line = self.process.stdout.readline()
            assert line, said
            said += line
        too_late.cancel()
        self.links = links
        self.said = said

    def kill(self) -> None:
        """As a power cut would; its network daemons notice and end."""
        helpers = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait(10)
        _gone, alive = psutil.wait_procs(helpers, timeout=15)
        assert not alive, alive
        self.close()

    def close(self) -> None:
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def runs(tmp_path: Path, put_runs: PutRuns) -> list[Path]:
    return put_runs(tmp_path, ["one.toml", "--run-name", "one"], ["two.toml", "--run-name", "two"])


@pytest.fixture
def started() -> Iterator[list[Bootstrap]]:
    running: list[Bootstrap] = []
    yield running
    for each in running:
        if each.process.poll() is None:
            each.process.send_signal(signal.SIGCONT)
            each.kill()
        each.close()


def health(home: Path) -> tuple[int, str]:
    done = peer(home, "bootstrap", "--health")
    assert done.stderr == ""
    [line] = done.stdout.splitlines()
    return done.returncode, line


@pytest.mark.slow
def test_two_runs_their_health_and_the_same_links_after_a_power_cut(tmp_path, runs, started):
    port = free_port(neighbours=1)
    code, line = health(tmp_path)
    assert (code, "no bootstrap answers" in line) == (1, True)

    started.append(Bootstrap(tmp_path, port, runs))
    links = started[0].links
    assert [f"/tcp/{port + index}/" in link for index, link in enumerate(links)] == [True, True]
    assert len({link.split("@")[0] for link in links}) == 2
    assert len({link.split("/p2p/")[1] for link in links}) == 1
    for file, link in zip(runs, links, strict=True):
        done = peer(tmp_path, "status", link, "--name", "me")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"{file.stem} (")
    code, line = health(tmp_path)
    assert code == 0
    assert line.startswith("well: one (")
    assert "; two (" in line
    assert_refused(peer(tmp_path, "pause", "--name", "bootstrap"), 1, "trains nothing")

    started[0].kill()
    assert health(tmp_path)[0] == 1
    started.append(Bootstrap(tmp_path, port, runs))
    assert started[1].links == links
    assert health(tmp_path)[0] == 0
    assert peer(tmp_path, "leave", "--name", "bootstrap").returncode == 0
    assert started[1].process.wait(20) == 0


@pytest.mark.slow
def test_without_the_owners_key_it_serves_and_says_what_is_missing(tmp_path, runs, started):
    key = tmp_path / "owner.key"
    started.append(Bootstrap(tmp_path, 0, runs[:1]))
    assert "no owner's key" not in started[0].said
    started[0].kill()
    key.chmod(0o644)
    assert_refused(peer(tmp_path, "bootstrap", str(runs[0])), 2, "chmod 600")
    key.chmod(0o600)
    key.rename(tmp_path / "elsewhere.key")
    started.append(Bootstrap(tmp_path, 0, runs[:1]))
    assert "no owner's key here: the first roster of run 'one'" in started[1].said
    assert started[1].links[0].split("@")[0] == started[0].links[0].split("@")[0]
    other = tmp_path / "other.toml"
    assert peer(tmp_path, "init", str(other), "--owner-key", str(tmp_path / "other.key")).returncode == 0
    refused = peer(tmp_path, "bootstrap", str(other), "--name", "b", "--owner-key", str(tmp_path / "elsewhere.key"))
    assert_refused(refused, 2, "signed none of these runs")


@pytest.mark.slow
def test_a_second_bootstrap_serves_what_it_has_served_when_the_first_is_gone(tmp_path, runs, started):
    """It did not start, just when what it keeps is all that there is."""
    run, port = runs[:1], free_port()
    started.append(Bootstrap(tmp_path, port, run))
    second = ("--name", "second", "--initial-peers", re.sub(r".*@|,.*", "", started[0].links[0]))
    started[0].kill()
    where = ("--host-maddrs", "/ip4/127.0.0.1/tcp/0")
    assert_refused(peer(tmp_path, "bootstrap", str(run[0]), *second, *where), 3, "no peer of the run answers")
    started.append(Bootstrap(tmp_path, port, run))
    started.append(Bootstrap(tmp_path, 0, run, *second))
    assert "nobody of the run answers" not in started[2].said
    for each in started[1:]:
        each.kill()
    started.append(Bootstrap(tmp_path, 0, run, *second))
    assert "nobody of the run answers at the one known address" in started[3].said
    assert peer(tmp_path, "status", started[3].links[0], "--name", "me").returncode == 0


@pytest.mark.slow
async def test_a_bootstrap_that_stands_still_is_not_well(tmp_path, runs, started):
    started.append(Bootstrap(tmp_path, 0, runs[:1]))
    assert health(tmp_path)[0] == 0
    pid = started[0].process.pid
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: stands_still(pid))
    assert health(tmp_path)[0] == 1


def test_the_same_run_twice_is_refused(tmp_path, runs):
    assert_refused(peer(tmp_path, "bootstrap", str(runs[0]), str(runs[0])), 2, "is the same run as")


def test_a_port_beyond_the_last_is_refused(tmp_path, runs):
    done = peer(tmp_path, "bootstrap", *map(str, runs), "--host-maddrs", "/ip4/127.0.0.1/tcp/65535")
    assert_refused(done, 2, "65536")


def test_a_port_beside_addresses_is_refused_not_dropped(tmp_path, runs):
    done = peer(tmp_path, "bootstrap", str(runs[0]), "--port", "4800", "--host-maddrs", "/ip4/127.0.0.1/tcp/0")
    assert_refused(done, 2, "--port", "--host-maddrs")


def test_a_taken_port_has_another_port_as_its_remedy(tmp_path, runs):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = peer(tmp_path, "bootstrap", str(runs[0]), "--port", str(taken.getsockname()[1]))
    assert_refused(done, 2, "in use", "pass another --port")


async def test_a_bootstrap_that_is_stopped_while_it_starts_announces_nothing(tmp_path, runs, monkeypatch):
    flags = BootstrapFlags(paths=tuple(runs[:1]), home=tmp_path, host_maddrs=("/ip4/127.0.0.1/tcp/0",))
    stop, said = Stop(until_stdin_closes=False), list[Event]()
    ended = asyncio.Event()

    async def never(*_: object) -> None:
        stop.ask("interrupted", 130)
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr(bootstrap, "open_run", never)
    with Identity.open(tmp_path / "identity.key") as identity:
        async with asyncio.timeout(60):
            await bootstrap.serve_runs([read_signed_manifest(runs[0])], {}, identity, flags, said.append, stop)
    assert said == [Left("interrupted")]
    assert ended.is_set()
