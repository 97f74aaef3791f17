"""Events survive their JSONL form; the file is rotated by size and count; a damaged one is read as far as it goes."""

import json
import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from dilocox_peer.cli.eventlog import EventFile, Queued, append_line, read_event, read_event_file
from dilocox_peer.cli.replay import Player
from dilocox_peer.errors import ConfigError
from dilocox_peer.events import Event, Failed, Remark, SeenPeer, SwarmSeen, TrainingProgress
from dilocox_peer.events_of_data import Evaluated
from dilocox_peer.events_of_rounds import ContributionClipped
from dilocox_peer.types import PeerId
from tests.unit.dashboard_data import events


def texts(timed: Iterable[tuple[Event, float]]) -> list[str]:
    return [event.text for event, _ in timed if isinstance(event, Remark)]


def test_every_event_comes_back_as_it_was():
    for event, at_s in ((event, at_s) for at_s, event in events()):
        assert read_event(json.loads(json.dumps(event.record(at_s)))) == (event, at_s)


@pytest.mark.parametrize("record", [{}, {"event": "Remark"}, {"event": "Remark", "time": 1, "text": [1]}, {"event": 7, "time": 1}, {"event": "Nonsense", "time": 1}])  # fmt: skip
def test_what_is_no_event_is_none(record):
    assert read_event(record) is None


RECORDS = {type(event).__name__: event.record(at_s) for at_s, event in events()}


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("RunJoined", "stages", 257), ("RunJoined", "stages", "1000000000"), ("RunJoined", "stage", 10**24), ("RunJoined", "stage", -1),
        ("SwarmSeen", "stages", [0, 10**9]), ("TrainingProgress", "tokens", 10**30), ("TrainingProgress", "tokens_per_s", float("inf")),
        ("RoundCertified", "wait_s", 1e308),
    ],
)  # fmt: skip
def test_an_event_with_a_number_that_cannot_be_is_none(kind, field, value):
    assert read_event(RECORDS[kind]) is not None
    assert read_event(RECORDS[kind] | {field: value}) is None


@pytest.mark.parametrize("loss", [float("inf"), float("nan"), 1e30])
def test_an_event_of_training_that_diverged_is_one(loss):
    assert read_event(RECORDS["RoundCertified"] | {"train_loss": loss}) is not None


def strict(line: str | bytes) -> dict[str, Any]:
    """As programs read it that know no NaN."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return dict(json.loads(line, parse_constant=refuse))


DIVERGED = [
    Evaluated(3, float("inf"), 100, average_loss=None),
    TrainingProgress(1, 10, 5120, 1000.0, float("nan"), 500, 400, 2.0),
    SwarmSeen((0,), (SeenPeer(PeerId("a"), 0, float("nan"), 3, "direct"), SeenPeer(PeerId("b"), 0, 5.0, 3, "direct"))),
    ContributionClipped(PeerId("a"), 3, float("inf"), 2.0, 0.0),
]


def test_what_diverged_is_null_in_the_file_and_comes_back_as_no_number(tmp_path):
    path = tmp_path / "log.jsonl"
    with EventFile(path, max_bytes=10_000, keep=0) as file:
        for event in DIVERGED:
            file(event)
    lines = [strict(line) for line in path.read_bytes().splitlines()]
    assert [
        lines[0]["val_loss"],
        lines[1]["train_loss"],
        lines[2]["peers"][0]["tokens_per_s"],
        lines[3]["norm"],
    ] == 4 * [None]
    came_back = [event for event, _at_s in read_event_file(path)]
    assert [type(event) for event in came_back] == [type(event) for event in DIVERGED]
    gaps = [re.sub(r"\b(inf|nan)\b", "nan", repr(event)) for event in DIVERGED]
    assert [repr(event) for event in came_back] == gaps


def test_a_log_that_was_written_with_nan_is_read_as_before():
    record = json.loads(json.dumps(DIVERGED[1].record(1.0)))
    assert "NaN" in json.dumps(record)
    event, _at_s = read_event(record) or pytest.fail("it is no event any more")
    assert isinstance(event, TrainingProgress)
    assert event.train_loss != event.train_loss


@pytest.mark.parametrize(
    ("field", "value"), [("bytes_sent", None), ("norms", None), ("train_loss", "null"), ("contributors", [None])]
)
def test_null_stands_for_a_number_alone(field, value):
    assert read_event(RECORDS["RoundCertified"] | {"train_loss": None}) is not None
    assert read_event(RECORDS["RoundCertified"] | {"train_loss": None, field: value}) is None


def test_lines_for_programs_are_json(tmp_path):
    code = (
        "from dilocox_peer.cli.eventlog import event_printer\n"
        "from dilocox_peer.events_of_data import Evaluated\n"
        "event_printer(as_json=True)(Evaluated(3, float('nan'), 100))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60).stdout
    assert strict(out)["val_loss"] is None


def test_the_file_is_rotated_and_old_ones_go(tmp_path):
    path = tmp_path / "log.jsonl"
    with EventFile(path, max_bytes=200, keep=2) as file:
        for index in range(20):
            file(Remark(f"number {index:03}"))
    names = sorted(each.name for each in tmp_path.iterdir())
    assert names == ["log.jsonl", "log.jsonl.1", "log.jsonl.2"]
    assert all(each.stat().st_size <= 200 for each in tmp_path.iterdir())
    assert texts(read_event_file(path))[-1] == "number 019"
    older = [text for name in names[::-1] for text in texts(read_event_file(tmp_path / name))]
    assert older == [f"number {index:03}" for index in range(20 - len(older), 20)]


def test_without_old_files_the_log_begins_anew(tmp_path):
    path = tmp_path / "log.jsonl"
    with EventFile(path, max_bytes=150, keep=0) as file:
        for index in range(9):
            file(Remark(str(index)))
    assert [each.name for each in tmp_path.iterdir()] == ["log.jsonl"]
    assert path.stat().st_size <= 150


def test_a_log_goes_on_where_it_ended(tmp_path):
    path = tmp_path / "log.jsonl"
    for text in ("before", "after"):
        with EventFile(path, max_bytes=10_000, keep=1) as file:
            file(Remark(text))
    assert texts(read_event_file(path)) == ["before", "after"]


@dataclass(frozen=True)
class Limited(Remark):
    """When it is written, in the thread that writes, this process gets at most so much of something: None, as much as it may have."""

    kind: int = 0
    most: int | None = None

    def record(self, wall_time_s):
        may_have = resource.getrlimit(self.kind)[1]
        resource.setrlimit(self.kind, (may_have if self.most is None else self.most, may_have))
        return Remark(self.text).record(wall_time_s)


@pytest.fixture
def limits_end():
    before = {kind: resource.getrlimit(kind) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)}
    yield
    for kind, limits in before.items():
        resource.setrlimit(kind, limits)


def lowest_free_descriptor():
    free = os.dup(0)
    os.close(free)
    return free


@pytest.mark.usefixtures("limits_end")
def test_a_log_that_cannot_be_opened_again_costs_no_older_ones(tmp_path):
    path = tmp_path / "log.jsonl"
    for number in (1, 2, 3):
        append_line(path.with_name(f"log.jsonl.{number}"), json.dumps(Remark(f"old {number}").record(1.0)).encode())
    descriptor = lowest_free_descriptor()  # the log's: from here on none is free when it has closed it
    with EventFile(path, max_bytes=100, keep=4) as file:
        file(Limited("newest", resource.RLIMIT_NOFILE, descriptor))
        for index in range(6):
            file(Remark(f"{index} " + "x" * 80))
        file(Limited("again", resource.RLIMIT_NOFILE))
    kept = [texts(read_event_file(path.with_name(f"log.jsonl.{number}"))) for number in (1, 2, 3, 4)]
    assert kept == [["newest"], ["old 1"], ["old 2"], ["old 3"]]
    assert texts(read_event_file(path)) == ["again"]


def test_a_log_that_cannot_be_moved_is_written_on(tmp_path):
    path = tmp_path / "log.jsonl"
    (path.with_name("log.jsonl.2") / "in the way").mkdir(parents=True)
    append_line(path.with_name("log.jsonl.1"), json.dumps(Remark("old").record(1.0)).encode())
    with EventFile(path, max_bytes=100, keep=2) as file:
        for index in range(9):
            file(Remark(f"number {index:03}"))
    assert texts(read_event_file(path)) == [f"number {index:03}" for index in range(9)]
    assert texts(read_event_file(path.with_name("log.jsonl.1"))) == ["old"]


def test_what_follows_a_line_that_was_cut_is_not_lost_with_it(tmp_path):
    path = tmp_path / "log.jsonl"
    line = json.dumps(Remark("cut").record(1.0)).encode()
    path.write_bytes(line + b"\n" + line[:20])
    with EventFile(path, max_bytes=10_000, keep=1) as file:
        file(Remark("first"))
    with path.open("ab") as file:
        file.write(line[:-1])
    append_line(path, line)
    assert texts(read_event_file(path)) == ["cut", "first", "cut"]


@pytest.mark.usefixtures("limits_end")
def test_what_follows_a_line_that_a_full_disk_cut_is_not_lost_with_it(tmp_path):
    path = tmp_path / "log.jsonl"
    with EventFile(path, max_bytes=10_000, keep=1) as file:
        file(Limited("cut", resource.RLIMIT_FSIZE, 20))
        file(Remark("lost"))
        file(Limited("first", resource.RLIMIT_FSIZE))
        file(Remark("second"))
    assert path.read_bytes()[20:21] == b"\n"
    assert texts(read_event_file(path)) == ["first", "second"]


def test_lines_that_are_no_events_are_passed_over(tmp_path):
    path = tmp_path / "log.jsonl"
    good = json.dumps(Remark("good").record(1.0))
    path.write_bytes(b"\xff\xfe\n[1]\n" + b"[" * 100_000 + b"\n" + good.encode() + b"\n" + good.encode()[:20])
    assert texts(read_event_file(path)) == ["good"]


def test_a_file_that_cannot_be_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_event_file(tmp_path / "none"))
    with pytest.raises(ConfigError, match="cannot be written"):
        EventFile(tmp_path / "no" / "where", max_bytes=1, keep=1)


@pytest.mark.timeout(20)
def test_a_pipe_that_nobody_reads_is_told_and_one_that_is_read_stays_a_pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=f"--log-file {path} is a pipe that nobody reads"):
        EventFile(path, max_bytes=100, keep=1)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with EventFile(path, max_bytes=100, keep=1) as file:
        for index in range(9):
            file(Remark(f"number {index:03}"))
    with os.fdopen(reader, "rb") as lines:
        assert [json.loads(line)["text"] for line in lines] == [f"number {index:03}" for index in range(9)]
    assert [each.name for each in tmp_path.iterdir()] == ["pipe"]


def test_a_device_is_not_moved_out_of_the_way(tmp_path):
    path = tmp_path / "null"
    path.symlink_to(os.devnull)
    with EventFile(path, max_bytes=100, keep=1) as file:
        for index in range(9):
            file(Remark(f"number {index:03}"))
    assert [each.name for each in tmp_path.iterdir()] == ["null"]


def test_a_player_gives_what_is_due_at_its_speed_and_stops_when_told():
    player = Player([(Remark("a"), 100.0), (Remark("b"), 101.0), (Remark("c"), 130.0)], speed=2.0)
    assert texts(player.advance(0.25)) == ["a"]
    assert texts(player.advance(0.25)) == ["b"]
    player.press(" ")
    assert player.advance(100.0) == []
    player.press(" ")
    player.press("+")
    assert str(player) == "replay 4x"
    assert texts(player.advance(10.0)) == ["c"]
    assert player.is_over


def test_a_player_stays_within_the_speeds_that_its_flag_takes():
    player = Player([(Remark("a"), 100.0), (Remark("b"), 101.0)], speed=10.0)
    for key, speed in (("+", 100_000.0), ("-", 0.01)):
        for _ in range(2000):
            player.press(key)
        assert player.speed == speed


def test_whoever_tells_does_not_wait_for_a_pipe_that_nobody_reads():
    """And what was lost is told when it is read again."""
    reads, writes = os.pipe()
    with os.fdopen(reads, "rb") as reader, os.fdopen(writes, "w") as writer:
        written = []

        def write(event, at_s):
            writer.write(json.dumps(event.record(at_s)) + "\n")
            writer.flush()
            written.append(event)

        queued = Queued(write, most=8)
        for index in range(400):  # each 1 kB: more than a pipe holds
            queued(Remark(f"{index:03}" + 1000 * "x"))
        assert len(written) < 400
        lines = threading.Thread(target=lambda: [json.loads(line) for line in iter(reader.readline, b"")])
        lines.start()
        queued.close(timeout_s=10)
        writer.close()
        lines.join(10)
    kept = [event.text[:3] for event in written if isinstance(event, Remark)]
    assert kept == sorted(kept)
    lost = [int(event.reason.split()[0]) for event in written if isinstance(event, Failed)]
    assert lost
    assert len(kept) + sum(lost) == 400


def test_the_end_of_a_command_does_not_lose_its_last_lines():
    code = (
        "from dilocox_peer.cli.eventlog import event_printer\n"
        "from dilocox_peer.events import Remark\n"
        "tell = event_printer(as_json=True)\n"
        "for number in range(1000): tell(Remark(str(number)))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60).stdout
    assert [json.loads(line)["text"] for line in out.splitlines()] == [str(number) for number in range(1000)]


@pytest.mark.parametrize("as_json", [True, False])
def test_who_stops_reading_does_not_end_what_it_read_of_and_that_is_told_once(as_json):
    """As `dilocox-peer join LINK | head -1` does."""
    code = (
        "import sys, time\n"
        "from dilocox_peer.cli.eventlog import event_printer\n"
        "from dilocox_peer.events import Remark\n"
        f"tell = event_printer(as_json={as_json}, on_closed=lambda: print('told', file=sys.stderr))\n"
        "tell(Remark('first'))\n"
        "sys.stdin.readline()\n"
        "for number in range(3): tell(Remark(str(number)))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin
    assert process.stdout
    assert process.stderr
    assert "first" in process.stdout.readline()
    process.stdout.close()
    process.stdin.write("\n")
    process.stdin.close()
    assert process.stderr.read().splitlines() == [
        "dilocox-peer: nobody reads standard output any more; the work goes on",
        "told",
    ]
    assert process.wait(60) == 0
    process.stderr.close()
