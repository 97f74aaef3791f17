"""What `--max-disk` leaves a peer: a stage, copies of others, shards; and what happens beyond it."""

import asyncio
import os
from typing import Any

import pytest

from dilocox_peer.cli.disk_watch import drop_left, folder_bytes, keep_within
from dilocox_peer.config import preset
from dilocox_peer.model.partition import cut_into
from dilocox_peer.peer.claim import fitting_stages
from dilocox_peer.peer.disk_room import copies_kept, shard_quota, stage_needs
from dilocox_peer.peer.planning.disk import DiskAllowed, DiskUse, copy_bytes, disk_bytes, least_allowed_gb
from dilocox_peer.peer.planning.sent import AveragedKept
from dilocox_peer.peer.settings import AtMost, Wish

RUN = cut_into(preset("small"), 3)
NEEDS = stage_needs(RUN)
BLOCK = 1 << 16  # that fills whole ones of any disk


def test_only_stages_that_fit_are_taken_and_the_others_say_what_to_allow():
    least = NEEDS.index(min(NEEDS))
    tight = DiskAllowed(NEEDS[least])
    assert tight.fitting(NEEDS) == [least]
    other = (least + 1) % 3
    assert f"--stage {least}" in tight.why_not(other, NEEDS)
    assert tight.why_not(least, NEEDS) == ""
    none = DiskAllowed(10**6)
    assert none.fitting(NEEDS) == []
    allow = float(none.why_not(0, NEEDS).rsplit("allow ", 1)[1])
    assert DiskAllowed(int(allow * 1e9)).fitting(NEEDS[:1]) == [0]
    assert allow * 1e9 < NEEDS[0] + 10**7


@pytest.mark.parametrize(("need", "gb"), [(10_090_000, 0.01), (1_004_000_000, 1.0), (10_000_001, 0.01)])
def test_what_a_stage_needs_is_not_said_to_be_what_is_allowed(need, gb):
    """It said: needs 0.01 GB of disk, --max-disk allows 0.01."""
    needs, allows = f"needs {gb + 0.01:.2f} GB of disk", f"--max-disk allows {gb:g}: allow {gb + 0.01:g}"
    assert DiskAllowed(int(gb * 1e9)).why_not(0, [need]) == f"stage 0 {needs}, {allows}"


def test_the_least_that_is_told_is_enough():
    least = least_allowed_gb(NEEDS)
    assert DiskAllowed(int(least * 1e9)).fitting(NEEDS)
    assert not DiskAllowed(int((least - 0.01) * 1e9)).fitting(NEEDS)


def test_the_claim_heeds_it():
    assert fitting_stages(RUN, Wish(None, "cpu", None)) == [0, 1, 2]
    assert fitting_stages(RUN, Wish(None, "cpu", None, 0, 10**6)) == []


def test_a_copy_of_another_stage_is_kept_where_there_is_room_for_it():
    size = copy_bytes(max(each.num_elements for each in _layouts()[1:]))
    for gb, copies in ((NEEDS[0] / 1e9 + 1e-3, 0), ((NEEDS[0] + size) / 1e9 + 1e-3, 1), (1000.0, 1), (None, 1)):
        assert copies_kept(RUN, 0, AtMost(max_disk=gb)) == copies
    assert copies_kept(RUN, 0, AtMost(backup_stages=2)) == 2
    assert copies_kept(RUN, 0, AtMost(backup_stages=0, max_disk=1000.0)) == 0


def _layouts():
    from dilocox_peer.model.architecture import layout_of

    return [layout_of(RUN, stage) for stage in range(3)]


def test_shards_get_what_is_left_and_nothing_where_nothing_is():
    assert shard_quota(RUN, 0, AtMost()) is None
    size = copy_bytes(max(each.num_elements for each in _layouts()[1:]))
    assert shard_quota(RUN, 0, AtMost(max_disk=10.0)) == 10 * 10**9 - NEEDS[0] - size
    assert shard_quota(RUN, 0, AtMost(max_disk=NEEDS[0] / 1e9 / 2)) == 0
    alone = preset("tiny")
    assert shard_quota(alone, 0, AtMost(max_disk=1.0)) == 10**9 - stage_needs(alone)[0]


def test_a_copy_comes_on_top_of_the_stage():
    assert disk_bytes(1000, AveragedKept(20, 0), copied=500) - disk_bytes(1000, AveragedKept(20, 0)) == copy_bytes(500)


def make(folder, size, *, at):
    folder.mkdir(parents=True)
    (folder / "state").write_bytes(os.urandom(size))
    os.utime(folder, (at, at))


def test_what_a_peer_takes_is_all_its_files(tmp_path):
    make(tmp_path / "runs" / "a", 3 * BLOCK, at=1)
    (tmp_path / "log.jsonl").write_bytes(os.urandom(BLOCK))
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "runs" / "a" / "loop").symlink_to(tmp_path)
    assert folder_bytes(tmp_path) == 4 * BLOCK


@pytest.mark.parametrize("moved", ["runs", "runs/a", "home"])
def test_what_was_moved_to_another_disk_counts_where_it_is(tmp_path, moved):
    """Behind a link --max-disk saw nothing."""
    home, disk = tmp_path / "home", tmp_path / "disk"
    make(home / "runs" / "a" / "stage0", 3 * BLOCK, at=1)
    make(home / "runs" / "b", BLOCK, at=1)
    here = home if moved == "home" else home / moved
    here.rename(disk)
    here.symlink_to(disk)
    assert folder_bytes(home) == 4 * BLOCK
    make(home / "runs" / "a" / "left" / "old", 2 * BLOCK, at=1)
    assert drop_left(home) == 2 * BLOCK
    assert folder_bytes(home) == 4 * BLOCK


def test_a_partial_file_counts_as_what_has_come_of_it_and_one_of_two_names_once(tmp_path):
    make(tmp_path / "runs" / "a", BLOCK, at=1)
    os.truncate(tmp_path / "runs" / "a" / "state", 50 * 10**9)
    (tmp_path / "runs" / "a" / "kept").hardlink_to(tmp_path / "runs" / "a" / "state")
    assert folder_bytes(tmp_path) == BLOCK


def test_runs_that_lead_to_themselves_are_nothing(tmp_path):
    (tmp_path / "runs").symlink_to(tmp_path / "runs")
    assert folder_bytes(tmp_path) == 0


def test_the_oldest_branch_that_was_left_goes_first(tmp_path):
    assert drop_left(tmp_path) == 0
    make(tmp_path / "runs" / "a" / "left" / "new", BLOCK, at=200)
    make(tmp_path / "runs" / "b" / "left" / "old", 2 * BLOCK, at=100)
    assert drop_left(tmp_path) == 2 * BLOCK
    assert not (tmp_path / "runs" / "b" / "left" / "old").exists()
    assert (tmp_path / "runs" / "a" / "left" / "new").exists()


def test_a_branch_that_the_disk_keeps_is_not_counted_as_gone(tmp_path, monkeypatch):
    make(tmp_path / "runs" / "a" / "left" / "old", 500, at=100)
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)
    assert drop_left(tmp_path) == 0


def test_a_peer_goes_at_the_second_look_in_a_row_that_finds_too_much():
    use = DiskUse(DiskAllowed(1000))
    assert [use.take(taken) for taken in (1001, 1000, 1001, 1002)] == [False, False, False, True]
    free = DiskUse(DiskAllowed(None))
    assert not any(free.take(10**15) for _ in range(5))


async def test_beyond_it_branches_go_and_then_the_peer(tmp_path):
    make(tmp_path / "runs" / "a" / "left" / "old", 600_000, at=100)
    make(tmp_path / "runs" / "a" / "checkpoints", 900_000, at=100)
    reasons: list[Any] = []
    remarks: list[Any] = []

    def remark(event):
        remarks.append(event)
        (tmp_path / "runs" / "a" / "checkpoints" / "more").write_bytes(bytes(200_000))

    await asyncio.wait_for(keep_within(tmp_path, 0.001, reasons.append, remark, look_s=0.0), 30.0)
    assert len(remarks) == 1
    assert reasons[0].startswith("what it keeps takes 0.01 GB of disk, --max-disk allows 0.001: allow 0.01, ")


async def test_within_it_nothing_is_said(tmp_path, monkeypatch):
    looks = iter([900_000, 1_100_000, 900_000, 1_100_000])  # while a state is written there is one more

    said: list[Any] = []

    def look(_folder):
        for taken in looks:
            return taken
        raise LookupError("no more")

    monkeypatch.setattr("dilocox_peer.cli.disk_watch.folder_bytes", look)
    with pytest.raises(LookupError):
        await asyncio.wait_for(keep_within(tmp_path, 0.001, said.append, said.append, look_s=0.0), 30.0)
    assert said == []
