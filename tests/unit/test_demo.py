"""What the demo is asked for and what is left of it at the end: of a recorded swarm, without a process."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from dilocox_peer.cli.demo import demo_manifest, run_demo
from dilocox_peer.cli.flags import DemoFlags
from dilocox_peer.cli.report import summary
from dilocox_peer.errors import ConfigError
from dilocox_peer.manifest import Manifest

RECORDED = Path(__file__).parent / "golden" / "demo.jsonl"


class Recorded:
    """A LocalSwarm in which all happens that happened in the recorded one, once all are there."""

    at_the_end: Callable[[], None]

    def __init__(self, manifest: Manifest, on_event: Callable[[str, dict[str, Any]], None], **_: object) -> None:
        self.manifest = manifest
        self._on_event = on_event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return

    async def start_bootstrap(self) -> SimpleNamespace:
        return self._child(None)

    async def start_peer(self, *_: object, **__: object) -> SimpleNamespace:
        return self._child(0)

    async def start_evaluator(self) -> SimpleNamespace:
        for line in RECORDED.read_text().splitlines():
            record = json.loads(line)
            self._on_event(record.pop("process"), record)
        type(self).at_the_end()
        return self._child(0)

    def _child(self, returncode: int | None) -> SimpleNamespace:
        reader = asyncio.get_running_loop().create_future()
        reader.set_result(None)
        return SimpleNamespace(process=SimpleNamespace(returncode=returncode), reader=reader)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> type[Recorded]:
    class OfThisTest(Recorded):
        at_the_end = staticmethod(lambda: None)

    monkeypatch.setattr("dilocox_peer.cli.demo.LocalSwarm", OfThisTest)
    return OfThisTest


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(*_: object, **__: object) -> None:
        pytest.fail("a swarm was begun")

    monkeypatch.setattr("dilocox_peer.cli.demo.LocalSwarm", begin)


def wish(**flags: Any) -> DemoFlags:
    return DemoFlags(rounds=3, inner_steps=4, **flags)


def test_report_and_timeline_are_written_and_the_summary_names_them(
    tmp_path: Path, recorded: type[Recorded], capsys: pytest.CaptureFixture[str]
) -> None:
    report, trace = tmp_path / "new" / "report.json", tmp_path / "other" / "trace.svg"
    run_demo(wish(report=report, trace=trace))
    assert json.loads(report.read_text())["stages"] == 2
    assert trace.read_text().startswith("<svg")
    told = capsys.readouterr().out
    for index in range(4):
        assert f"starting peer{index} ({index + 1} of 4) ..." in told
    assert told.index("starting the bootstrap ...") < told.index("starting peer0") < told.index("peer0 is up")
    assert told.index("time, start to end") < told.index(str(report)) < told.index(str(trace))


def test_a_report_that_cannot_be_written_at_the_end_costs_no_summary(
    tmp_path: Path, recorded: type[Recorded], capsys: pytest.CaptureFixture[str]
) -> None:
    recorded.at_the_end = staticmethod(lambda: shutil.rmtree(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"report\.json cannot be written"):
        run_demo(wish(report=tmp_path / "gone" / "report.json"))
    told = capsys.readouterr().out
    assert "validation loss of the anchor" in told
    assert "report.json" not in told


@pytest.mark.usefixtures("never")
@pytest.mark.parametrize("flag", ["report", "trace"])
@pytest.mark.parametrize(
    "where", ["/proc/self/new", "/proc/new/file.svg", "FOLDER", "FOLDER/file/below", "FOLDER/socket"]
)
def test_what_could_not_be_written_at_the_end_is_refused_at_the_start(flag: str, where: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    os.mknod(tmp_path / "socket", 0o140600)
    path = Path(where.replace("FOLDER", str(tmp_path)))
    with pytest.raises(ConfigError, match=f"--{flag} {path} "):
        run_demo(wish(**{flag: path}))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "socket"]


def test_nothing_of_what_is_there_is_touched_before_there_is_a_report(tmp_path: Path, recorded: type[Recorded]) -> None:
    """Neither a file, nor a pipe, which nobody may read before the end, nor a device."""
    (kept := tmp_path / "report.json").write_text("of yesterday")
    os.mkfifo(pipe := tmp_path / "pipe")

    def interrupt() -> None:
        assert kept.read_text() == "of yesterday"
        assert pipe.is_fifo()
        assert sorted(each.name for each in tmp_path.iterdir()) == ["pipe", "report.json"]
        raise KeyboardInterrupt

    recorded.at_the_end = staticmethod(interrupt)
    for path in (kept, pipe, Path("/dev/null")):
        with pytest.raises(KeyboardInterrupt):
            run_demo(wish(report=path))


def test_standard_output_under_another_name_is_written_on(tmp_path: Path) -> None:
    """`demo --report /dev/stdout > FILE`, as root, left a file of that name in /dev, and FILE without the report."""
    (other_name := tmp_path / "stdout").symlink_to("/proc/self/fd/1")
    program = (
        "import sys; from pathlib import Path; from dilocox_peer.cli.init import check_writable, write_whole\n"
        "path = Path(sys.argv[1]); check_writable(path, '--report')\n"
        "print('summary'); write_whole(path, b'report\\n'); print('timeline')\n"
    )
    with open(tmp_path / "file", "wb") as file:
        subprocess.run([sys.executable, "-c", program, other_name], stdout=file, timeout=60, check=True)
    assert (tmp_path / "file").read_text() == "summary\nreport\ntimeline\n"
    assert other_name.is_symlink()


@pytest.mark.parametrize("stages", [1, 2])
def test_a_schedule_that_does_not_exist_is_refused_also_where_there_is_one_stage(stages: int) -> None:
    with pytest.raises(ConfigError, match=r"stages\.schedule"):
        demo_manifest(DemoFlags(stages=stages, schedule="x"))
    assert demo_manifest(DemoFlags(stages=stages, schedule="flush")).stages.schedule == "flush"
    assert demo_manifest(DemoFlags(stages=stages)).stages.schedule == "carry"


@pytest.mark.parametrize(("all_reduce", "says"), [(0.0, False), (150.0, True)])
def test_one_peer_alone_is_not_compared_with_an_all_reduce_that_would_send_nothing(
    all_reduce: float, says: bool
) -> None:
    report = {
        "final_val_loss": None, "bigram_entropy": None, "unigram_entropy": None, "heads": {"me": "ab" * 32}, "tokens": 100,
        "tokens_per_second": 10.0, "outer_bytes_per_token": 1.5, "allreduce_bytes_per_token": all_reduce,
    }  # fmt: skip
    lines = summary(report, bytes_sent=150, elapsed_s=9.6)
    assert "  than float32 all-reduce      100 times fewer (150 bytes a token)" in lines or not says
    assert any("times fewer" in line for line in lines) == says
    assert lines[-2:] == [
        "heads and anchors              1 for 1 peers: abababababab",
        "time, start to end             10 s",
    ]
