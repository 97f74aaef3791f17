"""What is typed wrongly ends in one line that names it, and exit code 2; never in a traceback. So does, with 1, what cannot be written."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dilocox_peer.cli.main import main

LONG = "a" * 300


def say(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["dilocox-peer", *words])
    with pytest.raises(SystemExit) as left:
        main()
    return left.value.code


LINK = f"dilocox://{'0' * 64}@/ip4/127.0.0.1/tcp/1/p2p/12D3KooWMzZeB3V7nirEpriWV7DVBSh53f51CkWLdzkaUCykbUtZ"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["plan", LONG], "too long"),
        (["init", LONG, "--home", "HOME"], "too long"),
        (["recover", "--home", "HOME", "--run", "/"], "--run"),
        (["recover", "--home", "HOME", "--run", "**x"], "--run"),
        (["export", "--home", "HOME", "--name", "**x"], "**x"),
        (["demo", "--report", "HOME"], "--report"),
        (["demo", "--seed", "99999999999999999999"], "run.seed"),
        (
            ["evaluate", "HOME/nope", "--data", "HOME/late"],
            "there is no folder 'HOME/nope', and it is no dilocox:// link",
        ),
        (["evaluate", "HOME/late"], "there is no folder 'HOME/late', and it is no dilocox:// link"),
        (["evaluate", "<dilocox://ab>"], "the invitation link ends before '@'"),
        (["export", "HOME"], "'HOME' is a folder, no dilocox:// link"),
        (["generate", "Once", "HOME"], "'HOME' is a folder, no dilocox:// link"),
        (["generate", "Once", "HOME/nope"], "is no invitation link"),
        (["replay", "HOME/late"], "late"),
        (["replay", "HOME/never"], "never"),
        (["join", "dilocox://x", "--max-disk", "inf"], "--max-disk"),
        (["join", LINK, "--max-upload", "0"], "leave it out for 0.8 of what your line carries"),
        (["join", "dilocox://x", "--max-memory", "inf"], "--max-memory"),
        (["join", "dilocox://x", "--max-gb-month", "1e300"], "--max-gb-month"),
        (["bootstrap", "HOME/run.toml", "--keep-disk", "inf"], "--keep-disk"),
        (["init", "HOME/run.toml", "--lora-alpha", "nan"], "--lora-alpha"),
        (["plan", "tiny", "--tokens-per-s", "1000", "--memory", "inf"], "--memory"),
        (["plan", "tiny", "--tokens-per-s", "1000", "--rtt", "inf"], "--rtt"),
        (["plan", "tiny", "--tflops", "inf"], "--tflops"),
        (["plan", "tiny", "--tokens_per_s=inf"], "--tokens-per-s"),
        (["replay", "--", "--my_log"], "--my_log"),
        (["export", "--home", "HOME", "--name", "--my_peer*"], "--my_peer*"),
    ],
)
def test_it_is_named_in_one_line(
    words: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "late").write_text('{"time": 1e300, "event": "Left", "reason": "x"}\n')
    (tmp_path / "never").write_text('{"time": NaN, "event": "Left", "reason": "x"}\n')
    assert say([word.replace("HOME", str(tmp_path)) for word in words], monkeypatch) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert named.replace("HOME", str(tmp_path)) in line


def test_settings_nested_without_end_are_no_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (settings := tmp_path / "config.toml").write_text("a=" + "[" * 5000 + "]" * 5000)
    monkeypatch.setenv("DILOCOX_CONFIG", str(settings))
    assert say(["plan", "tiny"], monkeypatch) == 2
    assert "is no TOML" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device here that is always full")
@pytest.mark.parametrize("words", [["plan", "tiny", "--tokens-per-s", "1000"], ["--version"], ["plan", "--help"]])
@pytest.mark.parametrize("buffered", ["", "1"])
def test_a_full_disk_behind_standard_output_is_told_in_one_line(words: list[str], buffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "dilocox_peer", *words],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
            env={**os.environ, "PYTHONUNBUFFERED": buffered},
        )  # fmt: skip
    assert done.stderr == "dilocox-peer: cannot write: no space left on device\n"
    assert done.returncode == 1


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_stream_that_is_closed_is_one_that_takes_everything(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`generate >&-` asked None whether it is a terminal."""
    monkeypatch.setattr(sys, name, None)
    assert say(["replay", str(tmp_path / "missing")], monkeypatch) == 2
    with getattr(sys, name) as stream:
        assert not stream.isatty()


def test_what_ends_tasks_that_belong_together_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_plan(flags: object) -> None:
        full = OSError(errno.ENOSPC, "No space left on device", "/home/x/rounds.log")
        raise ExceptionGroup("tasks", [ExceptionGroup("tasks", [full])])

    monkeypatch.setattr("dilocox_peer.cli.plan.run_plan", run_plan)
    assert say(["plan", "tiny"], monkeypatch) == 5
    assert capsys.readouterr().err == "dilocox-peer: /home/x/rounds.log: no space left on device\n"


def test_a_fault_of_ours_among_tasks_is_shown_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_plan(flags: object) -> None:
        raise ExceptionGroup("tasks", [OSError(errno.ENOSPC, "full"), KeyError("ours")])

    monkeypatch.setattr("dilocox_peer.cli.plan.run_plan", run_plan)
    monkeypatch.setattr(sys, "argv", ["dilocox-peer", "plan", "tiny"])
    with pytest.raises(ExceptionGroup):
        main()


def test_a_reader_of_standard_output_that_has_gone_is_no_word_worth() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(
        [sys.executable, "-m", "dilocox_peer", "plan", "tiny", "--tokens-per-s", "1000"],
        stdout=writes, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
    )  # fmt: skip
    os.close(writes)
    assert (done.returncode, done.stderr) == (1, "")
