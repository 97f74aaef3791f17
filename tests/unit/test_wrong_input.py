"""What is typed wrongly ends in one line that names it, and exit code 2; never in a traceback."""

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


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["plan", LONG], "too long"),
        (["init", LONG, "--home", "HOME"], "too long"),
        (["recover", "--home", "HOME", "--run", "/"], "--run"),
        (["recover", "--home", "HOME", "--run", "**x"], "--run"),
        (["export", "--home", "HOME", "--name", "**x"], "**x"),
        (["demo", "--report", "HOME"], "--report"),
        (["replay", "HOME/late"], "late"),
        (["replay", "HOME/never"], "never"),
        (["join", "dilocox://x", "--max-disk", "inf"], "--max-disk"),
        (["join", "dilocox://x", "--max-memory", "inf"], "--max-memory"),
        (["join", "dilocox://x", "--max-gb-month", "1e300"], "--max-gb-month"),
        (["bootstrap", "HOME/run.toml", "--keep-disk", "inf"], "--keep-disk"),
        (["init", "HOME/run.toml", "--lora-alpha", "nan"], "--lora-alpha"),
        (["plan", "tiny", "--tokens-per-s", "1000", "--memory", "inf"], "--memory"),
        (["plan", "tiny", "--tokens-per-s", "1000", "--rtt", "inf"], "--rtt"),
        (["plan", "tiny", "--tflops", "inf"], "--tflops"),
    ],
)
def test_it_is_named_in_one_line(
    words: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "late").write_text('{"time": 1e300, "event": "Left", "reason": "x"}\n')
    (tmp_path / "never").write_text('{"time": NaN, "event": "Left", "reason": "x"}\n')
    assert say([word.replace("HOME", str(tmp_path)) for word in words], monkeypatch) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert named in line


def test_settings_nested_without_end_are_no_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (settings := tmp_path / "config.toml").write_text("a=" + "[" * 5000 + "]" * 5000)
    monkeypatch.setenv("DILOCOX_CONFIG", str(settings))
    assert say(["plan", "tiny"], monkeypatch) == 2
    assert "is no TOML" in capsys.readouterr().err
