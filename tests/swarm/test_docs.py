"""The README's own commands, word for word, as an owner and three volunteers on this machine type them.

Where the README says LINK stands the link that `bootstrap` printed. Home and loopback come from the environment, as the
README says they may; nothing else is added but what makes the run short.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.swarm.watched import assert_gone, family

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

README = Path(__file__).parents[2] / "README.md"
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
START_S, ROUND_S, COMMAND_S = 90.0, 120.0, 150.0


def commands_of(heading: str) -> list[list[str]]:
    """Arguments of the dilocox-peer lines in the fences below a heading."""
    section = README.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    fences = re.findall(r"^```sh\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
    lines = [shlex.split(line, comments=True) for fence in fences for line in fence.splitlines()]
    return [words[1:] for words in lines if words and words[0] == "dilocox-peer"]


class Desk:
    """A folder to stand in, a home of its own, and the terminals in it; `close` ends every process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[subprocess.Popen[str]] = []
        self.link = "LINK"
        self._environment = {
            **os.environ,
            "XDG_DATA_HOME": str(folder / "data"),
            "DILOCOX_BOOTSTRAP_HOST_MADDRS": LOOPBACK,
            "DILOCOX_JOIN_HOST_MADDRS": LOOPBACK,
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": "200",
        }

    def start(self, arguments: list[str], label: str) -> subprocess.Popen[str]:
        """In a terminal of its own, so to speak: what it says is in LABEL.out."""
        with (self._folder / f"{label}.out").open("w") as out:
            process = subprocess.Popen(
                self._command(arguments), cwd=self._folder, env=self._environment, text=True,
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._running.append(process)
        return process

    def said(self, label: str) -> str:
        return (self._folder / f"{label}.out").read_text()

    def run(self, arguments: list[str]) -> str:
        """Its standard output; it ends with 0."""
        done = subprocess.run(
            self._command(arguments), cwd=self._folder, env=self._environment, text=True,
            stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_S,
        )  # fmt: skip
        assert done.returncode == 0, (arguments, done.returncode, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        return done.stdout

    def until(self, condition: Callable[[], bool], timeout_s: float, label: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.said(label)
            assert self._running[-1].poll() is None, self.said(label)
            time.sleep(0.2)

    def close(self) -> None:
        helpers = [each for process in self._running if process.poll() is None for each in family(process.pid)]
        for process in self._running:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self._running:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        assert_gone(helpers)

    def _command(self, arguments: list[str]) -> list[str]:
        filled = [self.link if each == "LINK" else each for each in arguments]
        return [sys.executable, "-m", "dilocox_peer", *filled]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    opened = Desk(tmp_path)
    yield opened
    opened.close()


def rounds_in(text: str) -> int:
    return max((int(number) for number in re.findall(r" round (\d+): \d+ contribution", text)), default=0)


@pytest.mark.parametrize("stages", [1, 2])
def test_the_readmes_commands_do_what_it_says(desk: Desk, tmp_path: Path, stages: int):
    owners = commands_of("An owner's ten minutes")
    init, sign, bootstrap, status_of_run, generate, ledger, export, generate_from_folder, plan = owners
    doctor, join, status, pause, resume, dashboard, leave, join_a, join_b = commands_of("A volunteer's ten minutes")

    # -- the owner
    assert "next: dilocox-peer bootstrap run.toml" in desk.run([*init, "--stages", str(stages)])
    run_file = tmp_path / "run.toml"
    edited = run_file.read_text()
    for setting, value in (("total", 10_000), ("inner_steps", 8)):
        edited, count = re.subn(rf"^{setting} = \d+", f"{setting} = {value}", edited, flags=re.MULTILINE)
        assert count == 1
    run_file.write_text(edited)
    assert "signed with" in desk.run(sign)
    desk.start(bootstrap, "bootstrap")
    pattern = r"^    dilocox-peer join (dilocox://\S+)$"
    desk.until(lambda: re.search(pattern, desk.said("bootstrap"), re.MULTILINE) is not None, START_S, "bootstrap")
    found = re.search(pattern, desk.said("bootstrap"), re.MULTILINE)
    assert found is not None
    desk.link = found[1]

    # -- three volunteers
    for arguments, label in ((join_a, "a"), (join_b, "b"), (join, "default")):
        mine = desk.start(arguments, label)
        desk.until(partial(lambda label: "started as 12D3KooW" in desk.said(label), label), START_S, label)
    desk.until(lambda: rounds_in(desk.said("default")) >= 2, ROUND_S, "default")
    assert "19 checks" in desk.run(doctor)

    assert f"stage {stages - 1}: " in desk.run(status)
    assert "paused" in desk.run(pause)
    assert json.loads(desk.run([*status, "--json"]))["phase"] == "paused"
    assert "training again" in desk.run(resume)
    before = rounds_in(desk.said("default"))
    desk.until(lambda: rounds_in(desk.said("default")) >= before + 2, ROUND_S, "default")
    picture = desk.run(dashboard)
    assert all(panel in picture for panel in ("my peer", "swarm", "rounds", "log"))

    # -- the owner looks and takes the model
    table = desk.run(status_of_run)
    assert len(re.findall(r"^    …\w{8}  direct ", table, flags=re.MULTILINE)) == 3, table
    assert desk.run(generate).startswith("import ")
    assert "rounds" in desk.run(ledger)
    assert "wrote model: run 'tiny' after round" in desk.run(export)
    assert {path.name for path in (tmp_path / "model").iterdir()} >= {"config.json", "model.safetensors"}
    assert desk.run(generate_from_folder).startswith("import ")
    assert "best: " in desk.run([*plan, "--tflops", "10"])

    # -- leaving and coming back
    helpers = family(mine.pid)
    assert "leaving in order" in desk.run(leave)
    assert mine.wait(15) == 0
    assert "left: asked to leave" in desk.said("default")
    assert_gone(helpers)
    identity = re.findall(r"started as (\S+)", desk.said("default"))
    again = desk.start(join, "again")
    desk.until(lambda: rounds_in(desk.said("again")) > before, START_S + ROUND_S, "again")
    assert re.findall(r"started as (\S+)", desk.said("again")) == identity
    again.send_signal(signal.SIGINT)  # Ctrl-C
    assert again.wait(15) == 130
