"""Micro-batches of shards: each token once, what is spoiled named and passed over, and nothing begun anew after a kill."""

import errno
import json
import math
import os
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.data import feed as feed_module
from dilocox_peer.data import taken as taken_module
from dilocox_peer.data.allotment import Handout, Stretch
from dilocox_peer.data.catalogue import UNIT_TOKENS
from dilocox_peer.data.feed import Feed, Handed
from dilocox_peer.data.row import UnitRow, sequences_and_rest, sequences_of
from dilocox_peer.data.shards import ShardFolders
from dilocox_peer.data.taken import Taken
from dilocox_peer.data.tokenizing import Order, make_shards
from dilocox_peer.events_of_data import DataTaken, ShardRefused
from dilocox_peer.store.shelf import Shelf
from dilocox_peer.types import Digest, PeerId

BATCH, CONTEXT, SEED = 2, 64, 3


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Shards of documents that each spell their number, and their catalogue."""
    folder = tmp_path_factory.mktemp("shards")
    lines = [json.dumps({"text": f"<{number:05}>" * 700}) for number in range(120)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    order = Order((folder / "a.jsonl",), folder / "out", None, "", "", shard_tokens=120_000, validation=0.1)
    return make_shards(order, refused=pytest.fail), folder / "out"


class Fed:
    """A feed, and what it told. shelf: has the shards, and no folder."""

    def __init__(self, made, tmp_path, folder=None, shelf=None):
        catalogue, out = made
        self.told: list[object] = []
        self.row = UnitRow(catalogue, SEED)
        self.shards = ShardFolders(catalogue, [folder or out] if shelf is None else [], kept=shelf)
        self.feed = Feed(
            self.row, self.shards, Taken(tmp_path / "taken.json"), seed=SEED, peer=PeerId("p"), incarnation=1,
            batch=BATCH, context=CONTEXT, listener=self.told.append,
        )  # fmt: skip

    def __enter__(self):
        self.feed.hand(Handed(0, (Stretch(0, 0, self.row.row.to_hand_out),)))
        self.feed.start()
        return self

    def __exit__(self, *_):
        self.feed.stop()

    def draw(self):
        return self.feed.train_batch(
            seed=SEED, peer=PeerId("p"), incarnation=1, round_number=1, index=0, batch=BATCH, context=CONTEXT
        )  # fmt: skip

    def taken(self):
        return [
            place
            for each in self.told
            if isinstance(each, DataTaken)
            for place in range(each.first, each.first + each.count)
        ]


def test_batches_are_consecutive_tokens_with_targets_one_ahead(made, tmp_path):
    with Fed(made, tmp_path) as fed:
        for _ in range(20):
            inputs, targets = fed.draw()
            assert inputs.shape == targets.shape == (BATCH, CONTEXT)
            assert (inputs[:, 1:] == targets[:, :-1]).all()
        assert fed.feed.is_ready


def test_each_token_of_a_stretch_is_a_target_at_most_once(made):
    catalogue, out = made
    row, folders = UnitRow(catalogue, SEED), ShardFolders(catalogue, [out])

    def opened(shard):
        found = folders.find(shard)
        assert found is not None
        return found

    stretch = Stretch(0, 0, row.row.to_hand_out)
    sequences = sequences_of(row.units(stretch), opened, context=CONTEXT, seed=SEED, stretch=stretch)
    tokens = sum(shard.tokens for shard in catalogue.train)
    spans = [opened(unit.shard).unit(unit.number) for unit in row.units(stretch)]
    assert len(sequences) == (sum(end - first for first, end in spans) - 1) // CONTEXT
    assert sum(end - first for first, end in spans) > 0.9 * tokens
    assert sorted({(unit.shard.sha256, unit.number) for unit in row.units(stretch)}) == sorted(
        (unit.shard.sha256, unit.number) for unit in row.units(stretch)
    )
    again = sequences_of(row.units(stretch), opened, context=CONTEXT, seed=SEED, stretch=stretch)
    assert np.array_equal(sequences, again)


def test_what_is_left_of_a_chunk_goes_before_the_next(made):
    """A unit holds no sequence of a context beyond it: of units taken one by one, as of the commons, nothing was ever trained on."""
    catalogue, out = made
    row, folders = UnitRow(catalogue, SEED), ShardFolders(catalogue, [out])
    rest, counts, tokens = np.empty(0, np.int64), [], 0
    for place in range(12):
        stretch = Stretch(0, place, 1)
        units = row.units(stretch)
        opened = folders.find(units[0].shard)
        assert opened is not None
        first, end = opened.unit(units[0].number)
        tokens += end - first
        sequences, rest = sequences_and_rest(
            units, {units[0].shard: opened}.__getitem__, context=2 * UNIT_TOKENS, seed=SEED, stretch=stretch,
            packing="concatenate", before=rest,
        )  # fmt: skip
        counts.append(len(sequences))
        assert len(rest) <= 2 * UNIT_TOKENS
    assert max(counts) == 1
    assert sum(counts) == (tokens - 1) // (2 * UNIT_TOKENS)
    assert sum(counts) * 2 * UNIT_TOKENS + len(rest) == tokens


def test_started_again_it_takes_nothing_that_it_took_before(made, tmp_path):
    seen: list[int] = []
    for _ in range(3):
        with Fed(made, tmp_path) as fed:
            fed.draw()
        assert fed.taken()
        seen += fed.taken()
    assert len(seen) == len(set(seen))


def test_what_lies_ready_at_a_stop_is_trained_on_by_the_next_start(made, tmp_path):
    """Up to 32 micro-batches were written down as taken, and lost at each stop."""
    fed, second = Fed(made, tmp_path), threading.Event()

    def heard(event):
        fed.told.append(event)
        if len(filled()) == 2:
            second.set()

    def filled():
        return [each for each in fed.told if isinstance(each, DataTaken) and each.tokens]

    fed.feed = Feed(
        fed.row, fed.shards, Taken(tmp_path / "taken.json"), seed=SEED, peer=PeerId("p"), incarnation=1,
        batch=BATCH, context=CONTEXT, listener=heard,
    )  # fmt: skip
    with fed:
        fed.draw()
        for _ in range(filled()[0].tokens // CONTEXT // BATCH - 2):
            fed.draw()
        assert second.wait(60)
    with pytest.raises(RuntimeError):
        fed.draw()
    assert filled()[-1].first == fed.taken()[-1]
    assert Taken(tmp_path / "taken.json").rest_of(Stretch(0, 0, 9), 1) == Stretch(0, filled()[-1].first, 1)
    with Fed(made, tmp_path) as again:
        again.draw()
    assert again.taken()[0] == filled()[-1].first


def test_what_was_drawn_in_part_is_not_given_back(made, tmp_path):
    with Fed(made, tmp_path) as fed:
        fed.draw()
    drawn = next(each.first for each in fed.told if isinstance(each, DataTaken) and each.tokens)
    assert Taken(tmp_path / "taken.json").rest_of(Stretch(0, 0, 9), 1) == Stretch(0, drawn + 1, 1)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(1, 9)), max_size=8))
def test_what_is_given_back_is_free_and_nothing_else(tmp_path_factory, stretches):
    path = tmp_path_factory.mktemp("t") / "taken.json"
    taken, free = (
        Taken(path),
        {(epoch, place) for epoch, first, count in stretches for place in range(first, first + count)},
    )
    for epoch in range(3):
        taken.take(Stretch(epoch, 0, 40))
    taken.give_back([Stretch(*each) for each in stretches])
    for known in (taken, Taken(path)):
        found = {
            (epoch, place)
            for epoch in range(3)
            for place in range(40)
            if known.rest_of(Stretch(epoch, place, 1), 1) is not None
        }
        assert found == free


def test_where_a_round_is_as_long_as_an_epoch_it_takes_what_it_was_handed(made, tmp_path):
    """Two peers of which each works through half of the data a round: what the first was handed is of epochs before those of the second, and was
    taken to be over."""
    fed = Fed(made, tmp_path)
    handout = Handout(fed.row.row)
    peers = [PeerId("p"), PeerId("q")]
    handed = handout.take(peers, tokens_a_round=fed.row.row.to_hand_out // 2 * UNIT_TOKENS, reported={})[peers[0]]
    assert max(each.epoch for each in handed) < handout.epoch - 1
    fed.feed.hand(Handed(handout.epoch, handed))
    fed.feed.start()
    try:
        for _ in range(3000):
            fed.draw()
    finally:
        fed.feed.stop()
    taken = [each for each in fed.told if isinstance(each, DataTaken)]
    assert {each.epoch for each in taken} <= {each.epoch for each in handed}
    assert max(fed.taken()) < fed.row.row.to_hand_out


def full(*_arguments, **_options):
    raise OSError(errno.ENOSPC, "no space left on device")


def test_on_a_full_disk_it_goes_on_to_what_it_has_not_taken(made, tmp_path, monkeypatch):
    """One chunk came for ever; where that held less than a sequence, nothing did."""
    monkeypatch.setattr(taken_module, "replace_file", full)
    with Fed(made, tmp_path) as fed:
        while len(fed.taken()) < 3:
            fed.draw()
    assert len(fed.taken()) == len(set(fed.taken()))


def test_a_shard_that_makes_room_between_two_looks_is_looked_for_again(made, tmp_path, monkeypatch):
    """The thread ended on it, and the training with the thread. Nothing is marked as taken that was not read."""
    found, looks = ShardFolders.find, []

    def find(folders, shard):
        looks.append(shard)
        return None if len(looks) in (2, 5) else found(folders, shard)

    monkeypatch.setattr(ShardFolders, "find", find)
    with Fed(made, tmp_path) as fed:
        while set(fed.taken()) < set(range(3)):
            fed.draw()
    assert len(fed.taken()) == len(set(fed.taken()))


def test_what_a_full_disk_did_not_keep_is_kept_with_what_is_taken_later(tmp_path, monkeypatch):
    taken = Taken(tmp_path / "taken.json")
    with monkeypatch.context() as patched:
        patched.setattr(taken_module, "replace_file", full)
        with pytest.raises(OSError, match="no space left"):
            taken.take(Stretch(0, 0, 2))
    assert taken.rest_of(Stretch(0, 0, 3), 3) == Stretch(0, 2, 1)
    taken.take(Stretch(0, 2, 1))
    assert Taken(tmp_path / "taken.json").rest_of(Stretch(0, 0, 4), 4) == Stretch(0, 3, 1)


def spoiled(made, folder, bad):
    """A folder of the shards, those in `bad` with one bit turned over."""
    catalogue, out = made
    folder.mkdir()
    for shard in catalogue.shards:
        raw = bytearray((out / shard.file_name).read_bytes())
        if shard in bad:
            raw[5] ^= 1
        (folder / shard.file_name).write_bytes(raw)
    return folder


def test_a_spoiled_shard_is_named_once_and_all_that_is_sound_is_trained_on(made, tmp_path):
    catalogue, _ = made
    bad = catalogue.train[1]
    with Fed(made, tmp_path, spoiled(made, tmp_path / "spoiled", [bad])) as fed:
        units = fed.row.units(Stretch(0, 0, fed.row.row.to_hand_out))
        sound = {place for place, unit in enumerate(units) if unit.shard != bad}
        assert 0 < len(sound) < len(units)
        while set(fed.taken()) != sound:
            fed.draw()
        assert len(fed.taken()) == len(sound)
        refused = [each for each in fed.told if isinstance(each, ShardRefused)]
        assert len(refused) == 1
        assert "its sha256 is" in refused[0].reason


def test_a_shard_that_becomes_shorter_while_it_is_used_is_damaged_and_ends_nothing(made, tmp_path, monkeypatch):
    """A copy of the folder made again in its place. What was mapped and is gone ended the process by a signal."""
    catalogue, out = made
    folder = tmp_path / "again"
    folder.mkdir()
    for shard in catalogue.train:
        (folder / shard.file_name).write_bytes((out / shard.file_name).read_bytes())
    monkeypatch.setattr(feed_module, "READY", 1)
    with Fed(made, tmp_path, folder) as fed:
        units = fed.row.units(Stretch(0, 0, fed.row.row.to_hand_out))
        cut = units[5].shard
        assert cut == units[4].shard == units[8].shard, "in the middle of it"
        while len(fed.taken()) < 5:
            fed.draw()
        os.truncate(folder / cut.file_name, 4096)
        while not any(isinstance(each, ShardRefused) for each in fed.told):
            fed.draw()
        for _ in range(50):
            fed.draw()
        refused = [each for each in fed.told if isinstance(each, ShardRefused)]
        assert [each.where for each in refused] == [str(folder / cut.file_name)]
        assert "bytes instead of" in refused[0].reason


def test_a_missing_shard_of_any_number_of_units_is_passed_over(made, tmp_path, monkeypatch):
    """Units were counted: a shard of the usual 512 at the front of what was handed out ended training."""
    monkeypatch.setattr(feed_module, "MAX_PASSED_OVER", 3)
    fed = Fed(made, tmp_path)
    units = fed.row.units(Stretch(0, 0, fed.row.row.to_hand_out))
    missing = list(dict.fromkeys(unit.shard for unit in units))[:2]
    assert units[2].shard in missing, "more of them than shards that are passed over"
    with Fed(made, tmp_path, spoiled(made, tmp_path / "spoiled", missing)) as fed:
        fed.draw()
        assert units[fed.taken()[0]].shard not in missing


def test_who_was_handed_nothing_that_is_sound_takes_from_the_commons(made, tmp_path, monkeypatch):
    catalogue, _ = made
    monkeypatch.setattr(feed_module, "IN_VAIN_S", 0.2)
    fed = Fed(made, tmp_path)
    first = fed.row.units(Stretch(0, 0, 1))[0].shard
    folder = spoiled(made, tmp_path / "spoiled", [shard for shard in catalogue.train if shard == first])
    fed = Fed(made, tmp_path, folder)
    fed.feed.hand(Handed(0, (Stretch(0, 0, 1),)))
    fed.feed.start()
    try:
        fed.draw()
    finally:
        fed.feed.stop()
    assert fed.taken()
    assert min(fed.taken()) >= fed.row.row.to_hand_out
    assert first not in {unit.shard for place in fed.taken() for unit in fed.row.units(Stretch(0, place, 1))}


def test_what_an_earlier_start_took_of_the_commons_hides_nothing_behind_it(made, tmp_path, monkeypatch):
    """A newcomer started again where all units that a look is at were taken found nothing for good."""
    monkeypatch.setattr(feed_module, "COMMONS_AFTER_S", 0.0)
    monkeypatch.setattr(feed_module, "TRY_AGAIN_S", 0.01)
    monkeypatch.setattr(feed_module, "MAX_LANES", 1)
    monkeypatch.setattr("dilocox_peer.data.allotment.Row.commons", 8)
    fed = Fed(made, tmp_path)
    free = fed.row.row.lane(0, PeerId("p"), 1, 6)
    taken = Taken(tmp_path / "taken.json")
    for number in range(8):
        if (lane := fed.row.row.lane(0, PeerId("p"), 1, number)) != free:
            taken.take(lane)
    fed = Fed(made, tmp_path)
    fed.feed.start()
    try:
        fed.draw()
    finally:
        fed.feed.stop()
    assert fed.taken() == [free.first]


def test_where_what_was_handed_out_holds_nothing_nobody_waits(made, tmp_path, monkeypatch):
    """As a unit in the midst of a long document does: the commons are taken from before their time."""
    monkeypatch.setattr(feed_module, "COMMONS_AFTER_S", 600.0)
    monkeypatch.setattr(feed_module, "WAIT_S", 20.0)
    fed = Fed(made, tmp_path)
    Taken(tmp_path / "taken.json").take(Stretch(0, 0, 1))
    fed.feed = Feed(
        fed.row, fed.shards, Taken(tmp_path / "taken.json"), seed=SEED, peer=PeerId("p"), incarnation=1,
        batch=BATCH, context=CONTEXT, listener=fed.told.append,
    )  # fmt: skip
    fed.feed.hand(Handed(0, (Stretch(0, 0, 1),)))
    fed.feed.start()
    try:
        fed.draw()
    finally:
        fed.feed.stop()
    assert min(fed.taken()) >= fed.row.row.to_hand_out


def test_what_is_not_here_is_wanted_and_comes(made, tmp_path):
    catalogue, out = made
    folder = tmp_path / "empty"
    folder.mkdir()
    with Fed(made, tmp_path, folder) as fed:
        wanted: set[str] = set()
        while not wanted:
            wanted = {shard.sha256 for shard in fed.feed.wanted}
        assert not fed.feed.is_ready
        for shard in catalogue.train:
            (folder / shard.file_name).write_bytes((out / shard.file_name).read_bytes())
        fed.feed.look_again()
        inputs, _ = fed.draw()
        assert len(inputs) == BATCH
        assert wanted <= {shard.sha256 for shard in catalogue.train}


def test_a_fault_of_the_thread_reaches_the_trainer_instead_of_a_wait(made, tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise MemoryError("no room for the units")

    fed = Fed(made, tmp_path)
    monkeypatch.setattr(fed.row, "units", fail)
    with fed, pytest.raises(RuntimeError, match="reading the data failed: MemoryError: no room for the units"):
        fed.draw()


@pytest.mark.parametrize("room", [1, 2, 3, None])
def test_whatever_a_disk_has_room_for_each_shard_is_fetched_once(made, tmp_path, monkeypatch, room):
    """What is fetched must not take the place of what is in use, or comes sooner."""
    monkeypatch.setattr(feed_module, "COMMONS_AFTER_S", math.inf)
    catalogue, out = made
    most_bytes = max(catalogue.shard_bytes(shard) for shard in catalogue.shards)
    shelf = Shelf(tmp_path / "shelf", quota_bytes=None if room is None else room * most_bytes)
    fetched: list[Any] = []
    deadline = time.monotonic() + 60
    with Fed(made, tmp_path, shelf=shelf) as fed:
        while len(fed.taken()) < fed.row.row.to_hand_out:
            assert time.monotonic() < deadline, fetched
            for shard in fed.feed.wanted[:1]:
                if Digest(bytes.fromhex(shard.sha256)) not in shelf:
                    fetched.append(shard.sha256)
                    shelf.add(out / shard.file_name)
                    fed.feed.look_again()
            if fed.feed.is_ready:
                fed.draw()
    assert len(catalogue.train) > 4
    assert len(fetched) == len(set(fetched)) == len(catalogue.train)
