"""A real peer steered from outside: paused within two seconds and resumed while the swarm goes on, and sent away; and its
dashboard in a real terminal, which is given back as it was."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from dilocox_peer.cli.local_swarm import LOOPBACK, ChildEnded
from dilocox_peer.config import preset
from dilocox_peer.model.memory import StageSize
from tests.swarm.test_pipeline import manifest_of
from tests.swarm.watched import LONG_S, Watched, assert_gone, family

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

COMMAND = [sys.executable, "-m", "dilocox_peer"]
SETTLE_S = 2.0  # a pause takes effect within


async def operate(swarm: Watched, *arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


def tokens_of(swarm: Watched, label: str) -> int:
    return max((record["tokens"] for record in swarm.of(label, "TrainingProgress")), default=0)


async def stands_still(swarm: Watched, label: str) -> bool:
    """Whether the peer, given its time to stop, completes nothing for three more seconds."""
    await asyncio.sleep(SETTLE_S + 1.0)  # its progress is told once a second
    before = tokens_of(swarm, label)
    await asyncio.sleep(3.0)
    return tokens_of(swarm, label) == before


@pytest.mark.parametrize("paused", ["head", "later"])
def test_a_peer_is_paused_resumed_and_sent_away(paused):
    async def scenario() -> None:
        async with Watched(manifest_of(2)) as swarm:
            home = ("--home", str(swarm.folder), "--name", paused)
            await swarm.start_bootstrap()
            peers = [await swarm.start_peer("later", stage=1), await swarm.start_peer("head", stage=0)]
            await swarm.until(lambda: swarm.round_of("head") >= 2, peers, LONG_S)

            code, said = await operate(swarm, "pause", *home)
            assert code == 0, said
            assert await stands_still(swarm, paused)
            code, said = await operate(swarm, "status", "--json", *home)
            assert json.loads(said)["phase"] == "paused", said

            code, said = await operate(swarm, "status", swarm.link, "--json")
            assert code == 0, said
            assert [len(stage["peers"]) for stage in json.loads(said)["stages"]] == [1, 1]

            was = swarm.round_of("head")
            assert (await operate(swarm, "resume", *home))[0] == 0
            await swarm.until(lambda: swarm.round_of("head") >= was + 2, peers, LONG_S)

            leaver = swarm.children[paused]
            helpers = family(leaver.process.pid)
            assert (await operate(swarm, "leave", *home))[0] == 0
            assert await asyncio.wait_for(leaver.process.wait(), LONG_S) == 0
            assert swarm.of(paused, "Left")[-1]["reason"] == "asked to leave"
            assert_gone(helpers)
            code, said = await operate(swarm, "pause", *home)
            assert code == 3
            assert "no peer is running" in said
            assert len(said.strip().splitlines()) == 1

    asyncio.run(scenario())


def test_others_do_not_wait_for_a_paused_head_and_it_comes_back():
    async def scenario() -> None:
        async with Watched(manifest_of(1, start_peers=2)) as swarm:
            await swarm.start_bootstrap()
            peers = [await swarm.start_peer(label) for label in ("a", "b")]
            await swarm.until(lambda: min(swarm.round_of("a"), swarm.round_of("b")) >= 6, peers, LONG_S)
            usual = sorted(record["wait_s"] for record in swarm.of("a", "RoundCertified")[1:])[2]

            assert (await operate(swarm, "pause", "--home", str(swarm.folder), "--name", "b"))[0] == 0
            assert await stands_still(swarm, "b")
            was = swarm.round_of("a")
            await swarm.until(lambda: swarm.round_of("a") >= was + 6 and swarm.round_of("b") >= was + 5, peers, LONG_S)
            alone = [record for record in swarm.of("a", "RoundCertified") if record["round"] > was + 1]
            assert all(len(record["contributors"]) == 1 for record in alone), "and b merges what a trained"
            assert sorted(record["wait_s"] for record in alone)[1] < 2 * usual + 1.0
            assert {len(record["roster"]) for record in alone} == {2}

            assert (await operate(swarm, "resume", "--home", str(swarm.folder), "--name", "b"))[0] == 0
            await swarm.until(lambda: len(swarm.of("a", "RoundCertified")[-1]["contributors"]) == 2, peers, LONG_S)
            heads = {swarm.of(label, "RoundCertified")[-1]["anchor_digest"] for label in ("a", "b")}
            assert heads

    asyncio.run(scenario())


def until_it_is_in_a_round(log: Path) -> None:
    """Behind its first certificate, with work that is in none yet: in a short round it may have just begun when it is asked to finish."""
    deadline = time.monotonic() + LONG_S
    while True:
        events = (
            [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")] if log.exists() else []
        )
        told = [each for each in events if each["event"] in ("RoundCertified", "TrainingProgress")]
        before, newest = told[:-2], told[-2:]
        if [each["event"] for each in newest] == ["TrainingProgress"] * 2 and before:
            was_certified = "RoundCertified" in {each["event"] for each in before}
            if was_certified and newest[0]["micro_batches"] < newest[1]["micro_batches"]:
                return
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_a_detached_peer_goes_on_without_its_terminal_and_is_sent_away():
    async def scenario() -> None:
        async with Watched(manifest_of(1, inner_steps=128)) as swarm:
            await swarm.start_bootstrap()
            home = ("--home", str(swarm.folder), "--name", "away")
            code, said = await operate(swarm, "join", swarm.link, "--detach", *home, "--host-maddrs", LOOPBACK)
            assert code == 0, said
            assert "`dilocox-peer leave --name away` ends it" in said
            code, again = await operate(swarm, "join", swarm.link, "--detach", *home, "--host-maddrs", LOOPBACK)
            assert code == 2
            assert "a peer runs here as 'away' already" in again
            log = swarm.folder / "peers" / "away" / "log.jsonl"
            await asyncio.to_thread(until_it_is_in_a_round, log)
            [peer] = [
                each
                for each in psutil.process_iter(["cmdline"])
                if "--no-detach" in (each.info["cmdline"] or []) and str(swarm.folder) in (each.info["cmdline"] or [])
            ]
            assert os.getsid(peer.pid) == peer.pid
            helpers = [peer, *family(peer.pid)]
            code, said = await operate(swarm, "leave", "--finish", *home)
            assert code == 0
            assert "leaves once round" in said
            psutil.wait_procs(helpers[:1], timeout=LONG_S)  # it has a round to finish
            assert_gone(helpers)
            assert "finished round" in [json.loads(line) for line in log.read_text().splitlines()][-1]["reason"]
            code, said = await operate(swarm, "join", "dilocox://x", "--detach", *home)
            assert code == 2
            assert len(said.splitlines()) == 1

    asyncio.run(scenario())


# ---- in a terminal ---------------------------------------------------------------------------------------------------


class Tmux:
    """One terminal of a tmux server of its own."""

    def __init__(self, folder: Path) -> None:
        self._socket = folder / "tmux"
        self._run("new-session", "-d", "-s", "it", "-x", "100", "-y", "30", "env PS1='prompt> ' sh")

    def type(self, *keys: str) -> None:
        self._run("send-keys", "-t", "it", *keys)

    @property
    def screen(self) -> str:
        return self._run("capture-pane", "-p", "-t", "it")

    def asks(self, what: str) -> str:
        return self._run("display-message", "-p", "-t", "it", what).strip()

    def until(self, condition: Callable[[str], bool], timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        while not condition(screen := self.screen):
            assert time.monotonic() < deadline, screen
            time.sleep(0.2)
        return screen

    def close(self) -> None:
        with suppress(subprocess.CalledProcessError):
            self._run("kill-server")

    def _run(self, *arguments: str) -> str:
        return subprocess.run(
            ["tmux", "-S", str(self._socket), "-f", "/dev/null", *arguments],
            check=True, capture_output=True, text=True, env={**os.environ, "TERM": "xterm-256color"},
        ).stdout  # fmt: skip


@pytest.fixture
def tmux(tmp_path) -> Iterator[Tmux]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not here")
    terminal = Tmux(tmp_path)
    yield terminal
    terminal.close()


def settings_of(terminal: Tmux, name: str, folder: Path) -> str:
    """stty's view of the terminal, asked from within it."""
    terminal.type(f"stty -g > {folder / name}; echo said-{name}", "Enter")
    terminal.until(lambda screen: f"\nsaid-{name}" in screen, 10.0)
    return (folder / name).read_text()


@pytest.mark.parametrize("end", ["q", "C-c", "SIGTERM", "refused"])
def test_the_dashboard_takes_the_terminal_and_gives_it_back(tmux, tmp_path, end):
    async def scenario() -> None:
        async with Watched(manifest_of(1)) as swarm:
            await swarm.start_bootstrap()
            before = settings_of(tmux, "before", tmp_path)
            more = "" if end != "refused" else " --stage 7"
            tmux.type(
                f"{' '.join(COMMAND)} join '{swarm.link}' --name it --home {swarm.folder} --host-maddrs {LOOPBACK}{more}; "
                "echo ended-$?",
                "Enter",
            )
            if end == "refused":
                screen = await asyncio.to_thread(tmux.until, lambda screen: "\nended-" in screen, LONG_S)
                assert "ended-2" in screen
                assert "--stage 7: the run has stages 0 to 0" in screen
            else:
                await asyncio.to_thread(tmux.until, lambda screen: "my peer" in screen and "round 2" in screen, LONG_S)
                assert tmux.asks("#{alternate_on} #{cursor_flag}") == "1 0"
                tmux.type("p")
                await asyncio.to_thread(
                    tmux.until, lambda screen: "paused: asked to" in screen and "p resume" in screen, 5.0
                )
                tmux.type("p")
                await asyncio.to_thread(tmux.until, lambda screen: "p pause" in screen, 5.0)
                tmux.type("?")
                await asyncio.to_thread(tmux.until, lambda screen: "ring all-reduce" in screen, 5.0)
                if end == "SIGTERM":
                    (joined,) = psutil.Process(int(tmux.asks("#{pane_pid}"))).children()
                    joined.send_signal(signal.SIGTERM)
                else:
                    tmux.type(end)
                screen = await asyncio.to_thread(tmux.until, lambda screen: "\nended-" in screen, 15.0)
                assert {"q": "ended-0", "C-c": "ended-130", "SIGTERM": "ended-0"}[end] in screen
                assert "left: " in screen
            assert tmux.asks("#{alternate_on} #{cursor_flag}") == "0 1"
            assert settings_of(tmux, "after", tmp_path) == before

    asyncio.run(scenario())


def test_a_peer_takes_the_stage_that_its_memory_allows_or_says_what_it_needs():
    async def scenario() -> None:
        manifest = preset("tiny", model={"layers": 4}, stages={"count": 2, "blocks": [3, 1]})
        large, small = (StageSize.of(manifest, stage).host_bytes(checkpointing=True) for stage in range(2))
        allowed = ["--max-memory", f"{(large + small) / 2e9:.6f}"]
        async with Watched(manifest) as swarm:
            await swarm.start_bootstrap()
            await swarm.start_peer("any", more=allowed)
            assert [record["stage"] for record in swarm.of("any", "StageClaimed")] == [1]
            with pytest.raises(ChildEnded, match=r"claiming a stage: stage 0 needs .*--max-memory allows"):
                await swarm.start_peer("insists", stage=0, more=allowed)
            assert swarm.children["insists"].process.returncode == 2

    asyncio.run(scenario())


def test_a_peer_that_nobody_can_dial_is_told_so_and_takes_stage_0():
    async def scenario() -> None:
        async with Watched(manifest_of(2)) as swarm:
            await swarm.start_bootstrap()
            head = await swarm.start_peer("head", stage=0)
            with socket.socket() as closed:  # a port that a router does not forward
                closed.bind(("127.0.0.1", 0))
                announced = f"/ip4/127.0.0.1/tcp/{closed.getsockname()[1]}"
                hidden = await swarm.start_peer("hidden", more=["--announce-maddrs", announced])
                assert [record["stage"] for record in swarm.of("hidden", "StageClaimed")] == [0]
                [said] = [record["text"] for record in swarm.of("hidden", "Remark") if "cannot dial" in record["text"]]
                assert "--announce-maddrs" in said
                other = await swarm.start_peer("open")
                assert [record["stage"] for record in swarm.of("open", "StageClaimed")] == [1]
                assert not [record for record in swarm.of("open", "Remark") if "cannot dial" in record["text"]]
                await swarm.until(lambda: swarm.round_of("hidden") >= 2, [head, hidden, other], LONG_S)

    asyncio.run(scenario())
