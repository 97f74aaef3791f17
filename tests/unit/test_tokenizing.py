"""Shards: the same whoever makes them and however often that is interrupted; each whole, under the hash of its bytes."""

import dataclasses
import errno
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox_peer.cli.flags import InitFlags, TokenizeFlags
from dilocox_peer.cli.init import write_run_file
from dilocox_peer.cli.tokenize import run_tokenize
from dilocox_peer.config import read_signed_manifest
from dilocox_peer.data.allotment import Stretch
from dilocox_peer.data.catalogue import CATALOGUE_FILE, UNIT_TOKENS, catalogue_of, read_catalogue
from dilocox_peer.data.row import UnitRow
from dilocox_peer.data.shards import ShardFolders, held_out_of
from dilocox_peer.data.sources import documents_of
from dilocox_peer.data.tokenizer import ByteTokenizer, JsonTokenizer
from dilocox_peer.data.tokenizing import PROGRESS_FILE, Order, make_shards
from dilocox_peer.errors import ConfigError, DiskTakesNothing
from tests.tokenizers_made import EOS, bpe_file

TEXTS = [f"document {number}: " + "the value of the argument\n" * (1 + number % 90) for number in range(300)]


@pytest.fixture
def source(tmp_path):
    (tmp_path / "source.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return tmp_path / "source.jsonl"


def order(source, out, **changed):
    wanted: dict[str, Any] = {"tokenizer": bpe_file(), "bos": "", "eos": EOS, "shard_tokens": 20_000} | changed
    return Order((source,), out, **wanted)


def made(*arguments, **changed):
    return make_shards(order(*arguments, **changed), refused=pytest.fail)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_shards_hold_each_document_once_and_are_named_by_their_hash(tmp_path, source):
    catalogue = made(source, tmp_path / "out")
    assert read_catalogue(tmp_path / "out")[0] == catalogue
    assert len(catalogue.train) > 3
    folders = ShardFolders(catalogue, [tmp_path / "out"])
    plain = tokenizers.Tokenizer.from_str(bpe_file().decode())
    found = []
    for shard in catalogue.shards:
        assert hashlib.sha256((tmp_path / "out" / shard.file_name).read_bytes()).hexdigest() == shard.sha256
        opened = folders.find(shard)
        assert opened is not None
        assert len(opened.starts(shard.tokens)) == shard.documents
        found += [ids.tolist() for ids in np.split(opened.tokens(0, shard.tokens), opened.starts(shard.tokens)[1:])]
        assert [opened.unit(number) for number in range(shard.units)][-1][1] == shard.tokens
    end = plain.token_to_id(EOS)
    assert sorted(found) == sorted([*plain.encode(text, add_special_tokens=False).ids, end] for text in TEXTS)
    assert sum(shard.text_bytes for shard in catalogue.shards) == sum(map(len, TEXTS))


def test_units_hold_each_document_whole_and_once(tmp_path, source):
    catalogue = made(source, tmp_path / "out", tokenizer=None, eos="", shard_tokens=200_000)
    shard = max(catalogue.train, key=lambda each: each.tokens)
    opened = ShardFolders(catalogue, [tmp_path / "out"]).find(shard)
    assert opened is not None
    spans = [opened.unit(number) for number in range(shard.units)]
    assert len(spans) > 5
    assert spans[0][0] == 0
    assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))
    starts = opened.starts(shard.tokens)
    assert all(first in starts and abs(first - number * UNIT_TOKENS) < 3000 for number, (first, _) in enumerate(spans))


def test_several_processes_make_the_same_files(tmp_path, source):
    made(source, tmp_path / "one")
    made(source, tmp_path / "two", processes=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


class Interrupted(Exception):
    pass


def test_an_interrupted_work_is_gone_on_with_and_gives_the_same(tmp_path, source, monkeypatch):
    made(source, tmp_path / "whole")
    monkeypatch.setattr("dilocox_peer.data.tokenizing._BATCH_BYTES", 10_000)
    seen = []

    def interrupt(made):
        if made.shards > made.resumed + 1:
            raise Interrupted

    for _ in range(20):
        try:
            make_shards(order(source, tmp_path / "out"), refused=pytest.fail, progress=interrupt)
            break
        except Interrupted:
            seen.append(len(json.loads((tmp_path / "out" / PROGRESS_FILE).read_text())["written"]))
    assert seen == sorted(set(seen))
    assert len(seen) > 1
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def interrupted(wanted, shards):
    """Works until there are more shards than that."""

    def interrupt(made):
        if made.shards > shards:
            raise Interrupted

    with pytest.raises(Interrupted):
        make_shards(wanted, refused=pytest.fail, progress=interrupt)


def test_documents_without_tokens_and_equal_shards_are_counted_when_it_goes_on(tmp_path, monkeypatch):
    """A document of what the normalizer takes away has no tokens where no eos stands behind it; equal texts fill equal shards."""
    monkeypatch.setattr("dilocox_peer.data.tokenizing._BATCH_BYTES", 5_000)
    stripping = json.loads(bpe_file()) | {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}
    texts = [f"{number:04} " + "one value of four " * 100 for number in range(40)]
    texts = (
        [each for text in texts for each in (text, "  " + " " * (len(text) % 7))]
        + ["the same text " * 400] * 20
        + texts
    )
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    wanted = {"tokenizer": json.dumps(stripping).encode(), "eos": "", "shard_tokens": 2000}
    made(source, tmp_path / "whole", **wanted)
    for shards in (1, 4, 12):
        interrupted(order(source, tmp_path / "out", **wanted), shards)
    made(source, tmp_path / "out", **wanted)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:-8])])
def test_a_shard_that_is_gone_or_cut_short_is_made_again(tmp_path, source, damage, monkeypatch):
    monkeypatch.setattr("dilocox_peer.data.tokenizing._BATCH_BYTES", 10_000)
    made(source, tmp_path / "whole", shard_tokens=5000)
    interrupted(order(source, tmp_path / "out", shard_tokens=5000), 4)
    listed = json.loads((tmp_path / "out" / PROGRESS_FILE).read_text())["written"]
    damage(tmp_path / "out" / f"{listed[2][0]['sha256']}.shard")
    made(source, tmp_path / "out", shard_tokens=5000)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("number", "says"), [(signal.SIGKILL, "has died"), (signal.SIGSTOP, "has not answered for 1 s")]
)
def test_a_process_that_is_killed_or_hangs_ends_the_work_in_one_line(tmp_path, source, number, says, monkeypatch):
    monkeypatch.setattr("dilocox_peer.data.tokenizing._BATCH_BYTES", 10_000)
    monkeypatch.setattr("dilocox_peer.data.encoders.ENCODE_S", 60.0 if number == signal.SIGKILL else 1.0)

    def hit(made):
        for child in multiprocessing.active_children():
            assert child.pid is not None
            os.kill(child.pid, number)

    with pytest.raises(ConfigError, match=says) as raised:
        make_shards(order(source, tmp_path / "out", processes=2), refused=pytest.fail, progress=hit)
    assert "\n" not in str(raised.value)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_text_that_the_tokenizer_has_no_tokens_for_is_told_whichever_process_finds_it(tmp_path, source, processes):
    model = {"type": "WordLevel", "vocab": {"known": 0}, "unk_token": "[UNK]"}
    file = {**json.loads(bpe_file()), "model": model, "pre_tokenizer": {"type": "Whitespace"}, "added_tokens": []}
    wanted = order(source, tmp_path / "out", tokenizer=json.dumps(file).encode(), eos="", processes=processes)
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot cut this text"):
        make_shards(wanted, refused=pytest.fail)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_at_any_moment_it_goes_on_and_gives_the_same(tmp_path, source):
    source.write_text(source.read_text() * 2)
    (tmp_path / "tokenizer.json").write_bytes(bpe_file())
    command = [sys.executable, "-m", "dilocox_peer", "tokenize", str(source), "--tokenizer", str(tmp_path), "--shard-tokens", "20000",
               "--processes", "2", "--out"]  # fmt: skip
    subprocess.run([*command, str(tmp_path / "whole")], check=True, timeout=100)
    out, kills = tmp_path / "out", 0
    while not (out / CATALOGUE_FILE).exists():  # which may have been written at the very moment of a kill
        with subprocess.Popen([*command, str(out)]) as process:
            wanted = len(list(out.glob("*.shard"))) + 2 if out.exists() else 1
            while process.poll() is None and (not out.exists() or len(list(out.glob("*.shard"))) < wanted):
                time.sleep(0.01)
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
        assert process.returncode in (0, -signal.SIGKILL)
    assert kills > 1
    (out / PROGRESS_FILE).unlink(missing_ok=True)  # the last thing that goes
    assert contents(out) == contents(tmp_path / "whole")


def test_other_files_or_settings_do_not_go_on_with_it(tmp_path, source):
    made(source, tmp_path / "out")
    with pytest.raises(ConfigError, match="holds a catalogue: pass --force"):
        made(source, tmp_path / "out")

    def interrupt(made):
        raise Interrupted

    out = tmp_path / "begun"
    with pytest.raises(Interrupted):
        make_shards(order(source, out, shard_tokens=1024), refused=pytest.fail, progress=interrupt)
    with pytest.raises(
        ConfigError, match="holds unfinished shards of other files or settings, or of an older version: pass --force"
    ):
        made(source, out)
    make_shards(order(source, out), refused=pytest.fail, force=True)
    assert contents(out) == contents(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "is_first_closed"),
    [("b.jsonl", True), ("b.jsonl", False), ("c.jsonl", False)],
    ids=["comes back", "goes", "the last goes"],
)
def test_work_begun_on_other_documents_is_not_gone_on_with(tmp_path, monkeypatch, name, is_first_closed):
    """A file that cannot be read is left out. Where that changed in between, other documents were passed over than those in the shards:
    some came into none, others into two."""
    monkeypatch.setattr("dilocox_peer.data.tokenizing._BATCH_BYTES", 5_000)
    paths = tuple(tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl"))
    for number, path in enumerate(paths):
        texts = TEXTS[100 * number :][:100]
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    closed = {tmp_path / name} if is_first_closed else set[Path]()
    monkeypatch.setattr(
        "dilocox_peer.data.tokenizing.documents_of",
        lambda files, reading: iter(()) if closed & set(files) else documents_of(files, reading),
    )
    work = dataclasses.replace(
        order(paths[0], tmp_path / "out", tokenizer=None, eos="", shard_tokens=8_000), paths=paths
    )
    interrupted(work, 28 if name == "c.jsonl" else 12)
    closed ^= {tmp_path / name}
    with pytest.raises(ConfigError, match=r"holds unfinished shards of other documents \(a file could be read now or"):
        make_shards(work, refused=pytest.fail)
    make_shards(work, refused=pytest.fail, force=True)
    make_shards(dataclasses.replace(work, out=tmp_path / "whole"), refused=pytest.fail)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_shards_begun_without_the_hash_of_their_documents_are_not_gone_on_with(tmp_path, source, monkeypatch):
    monkeypatch.setattr("dilocox_peer.data.tokenizing._BATCH_BYTES", 10_000)
    interrupted(order(source, tmp_path / "out"), 2)
    path = tmp_path / "out" / PROGRESS_FILE
    state = json.loads(path.read_text())
    path.write_text(json.dumps(state | {"written": [each[:2] for each in state["written"]]}))
    with pytest.raises(
        ConfigError, match="holds unfinished shards of other files or settings, or of an older version: pass --force"
    ):
        made(source, tmp_path / "out")


@pytest.mark.parametrize("validation", [0.0001, 0.5])
def test_of_two_documents_one_is_held_out_whatever_the_share(tmp_path, validation):
    for number in (2, 3):  # whose hashes are both between these shares
        (tmp_path / f"{number}.txt").write_text(f"document {number}")
    texts = Order(
        tuple(tmp_path.glob("*.txt")), tmp_path / "out", tokenizer=bpe_file(), bos="", eos=EOS, validation=validation
    )
    catalogue = make_shards(texts, refused=pytest.fail)
    assert [sum(each.documents for each in of) for of in (catalogue.train, catalogue.held_out)] == [1, 1]
    whole = contents(tmp_path / "out")
    make_shards(texts, refused=pytest.fail, force=True)
    assert contents(tmp_path / "out") == whole


def test_too_few_documents_and_a_full_disk_are_told_in_one_line(tmp_path, source, monkeypatch):
    (tmp_path / "one.txt").write_text("one document")
    with pytest.raises(ConfigError, match="1 document is too few to train on some and hold one out: give more, or"):
        made(tmp_path / "one.txt", tmp_path / "few")
    assert not (tmp_path / "few").exists()
    left = [4]  # of the first shard and of what is done

    def full(*_):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskTakesNothing, match="no space left on device; what is done stays in"):
        made(source, tmp_path / "out")
    assert (tmp_path / "out" / PROGRESS_FILE).exists()
    with pytest.raises(DiskTakesNothing, match="no space left on device; mend it, or pass another --out"):
        made(source, tmp_path / "new" / "out")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("ends", ["too few", "full disk", "interrupted"])
def test_a_new_work_that_fails_leaves_what_was_there(tmp_path, source, monkeypatch, ends):
    out, other = tmp_path / "out", tmp_path / "other.jsonl"
    made(source, out)
    before = contents(out)
    lines = source.read_text().splitlines(keepends=True)
    other.write_text(lines[0] if ends == "too few" else "".join(lines[::2]))

    def full(path, *_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    def interrupt(so_far):
        if so_far.shards > 1:
            raise Interrupted

    again = order(other, out, shard_tokens=5_000)
    with monkeypatch.context() as patch:
        if ends == "full disk":
            patch.setattr("dilocox_peer.data.tokenizing.write_shard", full)
        with pytest.raises({"interrupted": Interrupted, "full disk": DiskTakesNothing}.get(ends, ConfigError)):
            make_shards(again, refused=pytest.fail, force=True, progress=interrupt)
    assert before.items() <= contents(out).items()
    if ends != "interrupted":
        assert contents(out) == before
        return
    make_shards(again, refused=pytest.fail, force=True)
    make_shards(order(other, tmp_path / "whole", shard_tokens=5_000), refused=pytest.fail)
    assert contents(out) == contents(tmp_path / "whole"), "of what was there before nothing stays once the new is whole"


@pytest.mark.parametrize("fails", range(1, 14))
def test_a_disk_that_is_full_at_any_file_leaves_a_catalogue_with_its_own_tokenizer(
    tmp_path, source, monkeypatch, fails
):
    """The new tokenizer.json lay beside the old catalogue once the new one found no room."""
    out, fsync, left = tmp_path / "out", os.fsync, fails
    make_shards(order(source, out, tokenizer=bpe_file(300)), refused=pytest.fail)
    anew = order(source, out, shard_tokens=1_000_000)

    def full(handle):
        nonlocal left
        left -= 1
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        try:
            make_shards(anew, refused=pytest.fail, force=True)
        except DiskTakesNothing:
            assert not list(out.glob(".part-*"))
        else:
            assert left > 0
    catalogue, _ = read_catalogue(out)
    assert hashlib.sha256((out / "tokenizer.json").read_bytes()).hexdigest() == catalogue.tokenizer
    assert all((out / each.file_name).exists() for each in catalogue.shards)


@pytest.mark.parametrize("where", ["run.toml", "run.toml/below", "/proc/new/shards"])
def test_a_folder_that_cannot_be_made_is_told_and_nothing_is_said_to_be_done(tmp_path, source, where):
    (tmp_path / "run.toml").write_text("kept")
    with pytest.raises(ConfigError) as told:
        made(source, tmp_path / where)
    assert str(told.value).endswith("; mend it, or pass another --out")
    assert "\n" not in str(told.value)
    assert (tmp_path / "run.toml").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.toml", "source.jsonl"]


def test_a_text_that_cannot_be_read_is_no_fault_of_the_folder_for_shards(tmp_path, source, monkeypatch):
    def closed(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(source))

    monkeypatch.setattr("dilocox_peer.data.tokenizing.documents_of", closed)
    with pytest.raises(ConfigError, match=r"source\.jsonl: permission denied; mend it and call this again"):
        made(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="permission denied"):
        made(source, tmp_path / "out")
    assert (tmp_path / "out").is_dir(), "it was there"


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda raw: raw[:-4], "bytes instead of"),
        (lambda raw: raw[:100] + bytes([raw[100] ^ 1]) + raw[101:], "its sha256 is"),
    ],
)
def test_a_shard_that_is_not_what_the_catalogue_says_is_not_read(tmp_path, source, spoil, fault):
    catalogue = made(source, tmp_path / "out")
    shard = catalogue.shards[0]
    path = tmp_path / "out" / shard.file_name
    path.write_bytes(spoil(path.read_bytes()))
    folders = ShardFolders(catalogue, [tmp_path / "out"])
    assert folders.find(shard) is None
    assert fault in folders.faults[str(path)]
    assert folders.find(catalogue.shards[1]) is not None


class Shelved:
    """Where fetched shards are."""

    def __init__(self, path):
        self.at = path
        self.forgotten = 0

    def path(self, name):
        return None if self.forgotten else self.at

    def forget(self, name):
        self.forgotten += 1

    def room_for(self, size_bytes):
        return None


@pytest.mark.parametrize(
    "spoil", [lambda path: path.unlink(), lambda path: path.write_bytes(b"0" * path.stat().st_size)]
)
def test_a_fetched_shard_that_is_gone_or_damaged_is_forgotten(tmp_path, source, spoil):
    catalogue = made(source, tmp_path / "out")
    shard = catalogue.train[0]
    shelved = Shelved(tmp_path / "out" / shard.file_name)
    spoil(shelved.at)
    folders = ShardFolders(catalogue, [], kept=shelved)
    assert folders.find(shard) is None
    assert not folders.has(shard)
    assert (shelved.forgotten, folders.is_hopeless(shard)) == (1, False)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM])
@pytest.mark.parametrize("call", ["hash_of", "os.open", "os.pread"])
def test_a_shard_that_cannot_be_read_for_now_is_neither_forgotten_nor_refused(
    tmp_path, source, monkeypatch, call, number
):
    """Sound ones were deleted for want of file descriptors, and fetched again."""
    catalogue = made(source, tmp_path / "out")
    shard = catalogue.train[0]
    shelved = Shelved(tmp_path / "out" / shard.file_name)
    folders = ShardFolders(catalogue, [], kept=shelved)
    with monkeypatch.context() as patched:
        patched.setattr(f"dilocox_peer.data.shards.{call}", fails_with(number))
        assert folders.find(shard) is None
    assert (shelved.forgotten, folders.faults) == (0, {})
    assert folders.find(shard) is not None


def test_what_is_held_out_and_cannot_be_read_for_now_is_not_to_be_made_anew(tmp_path, source, monkeypatch):
    made(source, tmp_path / "out")
    _, name = read_catalogue(tmp_path / "out")
    with monkeypatch.context() as patched:
        patched.setattr("dilocox_peer.data.shards.hash_of", fails_with(errno.EMFILE))
        with pytest.raises(ConfigError, match="for now, for want of file descriptors or of memory; try again"):
            held_out_of([tmp_path / "out"], name, ByteTokenizer())
    assert held_out_of([tmp_path / "out"], name, ByteTokenizer()).validation_tokens


def fails_with(number):
    def fails(*_arguments, **_options):
        raise OSError(number, os.strerror(number))

    return fails


def test_a_document_of_any_length_is_no_document_of_a_shard(tmp_path, source, monkeypatch):
    catalogue = made(source, tmp_path / "out")
    monkeypatch.setattr("dilocox_peer.data.shards.MAX_DOCUMENT_TOKENS", 100)
    shelved = Shelved(tmp_path / "out" / catalogue.train[0].file_name)
    folders = ShardFolders(catalogue, [], kept=shelved)
    assert folders.find(catalogue.train[0]) is None
    assert folders.is_hopeless(catalogue.train[0])  # and not fetched again for ever
    assert "a document of" in folders.faults[str(shelved.at)]


@pytest.mark.parametrize("content", [b"{}", b"[]", b"\xff", b'{"format":2}', b"[" * 100_000])
def test_a_catalogue_that_is_none_is_refused(content):
    with pytest.raises(ConfigError, match="is no catalogue") as raised:
        catalogue_of(content, source="catalogue.json")
    assert "\n" not in str(raised.value)


def test_a_run_of_shards_names_catalogue_and_tokenizer(tmp_path, source):
    made(source, tmp_path / "out")
    write_run_file(InitFlags(path=tmp_path / "run.toml", data=tmp_path / "out", home=tmp_path / "home"))
    section = read_signed_manifest(tmp_path / "run.toml").data
    _, name = read_catalogue(tmp_path / "out")
    assert (section.source, section.catalogue, section.eos) == ("shards", name, EOS)
    assert section.tokenizer == hashlib.sha256(bpe_file()).hexdigest()


def test_init_says_who_needs_the_tokenizer(tmp_path, source, capsys):
    made(source, tmp_path / "out")
    write_run_file(InitFlags(path=tmp_path / "run.toml", data=tmp_path / "out", home=tmp_path / "home"))
    assert "volunteers do not need it: the shards are tokens already" in capsys.readouterr().out
    (tmp_path / "files").mkdir()
    write_run_file(InitFlags(path=tmp_path / "files" / "run.toml", tokenizer=tmp_path / "out", home=tmp_path / "home"))
    assert "stage 0 needs this file: join it once with --tokenizer" in capsys.readouterr().out


SMOLLM_LIKE = {"type": "Sequence", "pretokenizers": [
    {"type": "Digits", "individual_digits": True},
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
]}  # fmt: skip
QWEN_LIKE = {"type": "Sequence", "pretokenizers": [
    {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex":
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"}},
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
]}  # fmt: skip
PIECES = st.sampled_from(["the", "value", " ", "  ", "\n", "\n\n", "\t", "1", "23", "'s", "'S", "don't", "é", "日本", "…", "_x", "(", ".\n", "\x1c",
                          "\x85", "\u00a0", "²", "ſ", "<|end|>", "a b", "a b c d", "🙂"])  # fmt: skip


@pytest.mark.parametrize("splits", [None, SMOLLM_LIKE, QWEN_LIKE], ids=["gpt2", "smollm", "qwen"])
@given(pieces=st.lists(PIECES | st.text(max_size=3), max_size=40))
@settings(max_examples=150, deadline=None)
def test_word_by_word_gives_the_tokens_of_the_library(splits, pieces):
    file = json.loads(bpe_file())
    file["pre_tokenizer"] = splits or file["pre_tokenizer"]
    content = json.dumps(file).encode()
    text = "".join(pieces).encode(errors="replace").decode()
    plain = tokenizers.Tokenizer.from_str(content.decode())
    plain.encode_special_tokens = True
    tokenizer = JsonTokenizer(content)
    assert tokenizer.is_fast
    assert tokenizer.encode([text.encode()])[0].tolist() == plain.encode(text, add_special_tokens=False).ids


def test_long_texts_are_cut_where_words_begin():
    text = "".join(TEXTS) * 3
    assert len(text) > 500_000
    plain = tokenizers.Tokenizer.from_str(bpe_file().decode())
    expected = plain.encode(text, add_special_tokens=False).ids
    assert JsonTokenizer(bpe_file()).encode([text.encode()])[0].tolist() == expected
    spaceless = "é" + "x\n" * 100_000
    expected = plain.encode(spaceless, add_special_tokens=False).ids
    assert JsonTokenizer(bpe_file()).encode([spaceless.encode()])[0].tolist() == expected


@pytest.mark.parametrize(
    "changed",
    [
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}},
        {"added_tokens": [{"id": 0, "content": "  ", "single_word": False, "lstrip": False, "rstrip": False,
                           "normalized": True, "special": False}]},
    ],
)  # fmt: skip
def test_tokenizers_that_do_more_than_cut_words_are_used_plainly(changed):
    content = json.dumps(json.loads(bpe_file()) | changed).encode()
    tokenizer = JsonTokenizer(content)
    assert not tokenizer.is_fast
    plain = tokenizers.Tokenizer.from_str(content.decode())
    expected = plain.encode("the  value of é", add_special_tokens=False).ids
    assert tokenizer.encode(["the  value of é".encode()])[0].tolist() == expected


def test_a_mix_is_how_often_an_epoch_goes_over_each_source(tmp_path, monkeypatch):
    monkeypatch.setattr("dilocox_peer.data.tokenizing._BATCH_BYTES", 5_000)
    for name in "abc":
        lines = [json.dumps({"text": f"{name}{number:03} " * 200}) + "\n" for number in range(200)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    paths = tuple(tmp_path / f"{name}.jsonl" for name in "abc")
    mix = ((paths[0], 0.25), (paths[1], 3.0))
    wanted = Order(paths, tmp_path / "out", None, "", "", shard_tokens=20_000, mix=mix)
    catalogue = make_shards(wanted, refused=pytest.fail)
    folders = ShardFolders(catalogue, [tmp_path / "out"])
    row = UnitRow(catalogue, 1)
    assert row.row.num_units == sum(shard.units * shard.times for shard in catalogue.train)
    seen: Counter[str] = Counter()
    for unit in row.units(Stretch(0, 0, row.row.num_units)):
        opened = folders.find(unit.shard)
        assert opened is not None
        first, end = opened.unit(unit.number)
        seen.update(re.findall("[abc][0-9]{3}", opened.tokens(first, end).tobytes().decode()))
    often = {name: Counter(count // 200 for word, count in seen.items() if word[0] == name) for name in "abc"}
    assert set(often["a"]) == {1}
    assert 30 < often["a"][1] < 70  # a quarter of 200, but for what is held out
    assert set(often["b"]) == {3}
    assert set(often["c"]) == {1}
    assert often["b"][3] > 180
    assert often["c"][1] > 180
    assert {shard.times for shard in catalogue.held_out} == {1}
    again = dataclasses.replace(wanted, out=tmp_path / "again")
    for shards in (1, 4, 9):
        interrupted(again, shards)
    assert make_shards(again, refused=pytest.fail) == catalogue


@pytest.mark.parametrize("wish", ["a.txt", "a.txt=", "a.txt=0", "a.txt=1.5", "a.txt=-1", "b.txt=2", "a.txt=nan"])
def test_a_mix_that_says_nothing_is_refused(tmp_path, monkeypatch, wish):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("text")
    with pytest.raises(ConfigError, match="--mix"):
        run_tokenize(TokenizeFlags(paths=(Path("a.txt"),), mix=(wish,)))


def test_shards_do_not_go_where_text_is_read(tmp_path):
    """Made anew, they would be read as text, what is held out among it."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("text " * 1000)
    with pytest.raises(ConfigError, match="a folder beside it"):
        made(tmp_path / "data", tmp_path / "data" / "shards", tokenizer=None, eos="")
    assert not (tmp_path / "data" / "shards").exists()


def test_while_a_catalogue_is_read_other_threads_take_turns_at_each_shard():
    """They do where a function of Python's is entered; in one call of pydantic's the whole peer stood still for all of it."""
    shard = {"tokens": 5, "documents": 1, "text_bytes": 5, "held_out": False}
    shards = [{**shard, "sha256": hashlib.sha256(bytes([number])).hexdigest()} for number in range(100)]
    entered = 0

    def note(_frame, event, _argument):
        nonlocal entered
        entered += event == "call"

    broken_off = json.dumps({"format": 1, "shards": shards}).encode()[:-1]  # so that nothing but reading is done
    sys.setprofile(note)
    try:
        with pytest.raises(ConfigError, match="is no catalogue"):
            catalogue_of(broken_off, source="catalogue.json")
    finally:
        sys.setprofile(None)
    assert entered > len(shards)


def test_a_shard_of_a_catalogue_that_is_none_is_named():
    shard = {"sha256": "ab" * 32, "tokens": 0, "documents": 1, "text_bytes": 5, "held_out": False}
    with pytest.raises(ConfigError, match="shard 'abababababababab': tokens: input should be greater than 0"):
        catalogue_of(json.dumps({"format": 1, "shards": [shard]}).encode(), source="catalogue.json")
