"""Figures for TensorBoard and the like: what is written can be read, and what goes wrong stops the figures and not the peer."""

import math
import struct
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event as Record

from dilocox_peer.cli.sinks import PROGRESS_S, Figures, sink_of
from dilocox_peer.errors import ConfigError
from dilocox_peer.events import Event, Failed, RoundCertified, TrainingProgress
from dilocox_peer.events_of_data import Evaluated, ShardFetched
from tests.unit.dashboard_data import events


def progress(tokens, loss=2.5):
    return TrainingProgress(3, 4, tokens, 1000.0, loss, 10, 20, 0.5)


def unwanted(event: Event) -> None:
    pytest.fail(event.line())


def records(folder: Path) -> list[Record]:
    """Of a TFRecord file: length (8 bytes), its checksum (4), the record, its checksum (4)."""
    (path,) = folder.iterdir()
    raw, found, at = path.read_bytes(), [], 0
    while at < len(raw):
        (length,) = struct.unpack_from("<Q", raw, at)
        found.append(Record.FromString(raw[at + 12 : at + 12 + length]))
        at += 12 + length + 4
    return found


def test_what_tensorboard_reads_is_what_was_told(tmp_path):
    with sink_of(f"tensorboard:{tmp_path / 'log'}", run="run", peer="p", tell=unwanted) as listener:
        listener(progress(5000))
        listener(progress(6000))  # within ten seconds of it
        listener(Evaluated(7, 1.25, 100, bits_per_byte=1.5))
        listener(Failed("something", "else"))
    version, *found = records(tmp_path / "log")
    assert version.file_version == "brain.Event:2"
    values = {(value.tag, record.step): value.simple_value for record in found for value in record.summary.value}
    assert values["training/train_loss", 5000] == 2.5
    assert values["training/tokens_per_s", 5000] == 1000.0
    assert values["validation/val_loss", 7] == 1.25
    assert values["validation/bits_per_byte", 7] == 1.5
    assert {step for _, step in values} == {5000, 7}
    assert not any("average_loss" in tag for tag, _ in values), "not measured"


def test_rounds_have_their_numbers_and_the_rest_the_tokens_until_then():
    figures, seen = Figures(), set()
    told: list[tuple[Event, float]] = [(event, at_s) for at_s, event in events()]
    for event, at_s in told:
        if (found := figures.of(event, at_s)) is not None:
            values, step = found
            assert all(math.isfinite(value) for value in values.values())
            if isinstance(event, RoundCertified):
                assert step == event.round
                assert values["round/contributors"] == len(event.contributors)
            seen.add(type(event))
    assert {RoundCertified, TrainingProgress} <= seen
    figures = Figures()
    assert figures.of(progress(7, math.nan), 0.0) is not None
    assert figures.of(progress(8), PROGRESS_S - 1) is None
    assert figures.of(ShardFetched("ab" * 32, 100, 2.0), 1.0) == ({"data/shard_bytes_per_s": 50.0}, 8)


@pytest.mark.parametrize("wish", ["tensorboard", "tensorboard:", "elsewhere:x", "wandb:a/../b", ":x"])
def test_a_wish_that_names_nothing_is_refused_in_one_line(wish):
    with pytest.raises(ConfigError, match="--log-to") as raised, sink_of(wish, run="r", peer="p", tell=unwanted):
        pass
    assert "\n" not in str(raised.value)


def test_a_folder_that_cannot_be_written_is_named_and_a_full_disk_told_once(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match="name a folder that you may write"),
        sink_of(f"tensorboard:{tmp_path / 'file' / 'x'}", run="r", peer="p", tell=unwanted),
    ):
        pass
    told: list[Event] = []

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with sink_of(f"tensorboard:{tmp_path / 'log'}", run="r", peer="p", tell=told.append) as listener:
        monkeypatch.setattr("tensorboardX.event_file_writer.EventsWriter.write_event", full)
        for number in range(5):
            listener(Evaluated(number, 1.0, 100))
    (failed,) = told
    assert isinstance(failed, Failed)
    assert "No space left on device; nothing more is written there" in failed.line()
