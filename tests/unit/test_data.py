"""Training and validation data: reproducible draws, a split that never leaks, errors that say what to do."""

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import dilocox_peer.data.corpus as corpus_module
import dilocox_peer.data.sources as sources
from dilocox_peer.data.corpus import Corpus, load_corpus
from dilocox_peer.data.sources import Document
from dilocox_peer.errors import ConfigError
from dilocox_peer.types import PeerId


def file(name, content):
    return Document(name, np.frombuffer(content, dtype=np.uint8))


def numbered(count, size=400):
    """Files whose every byte is the file's number: a sequence shows where it came from."""
    return [file(f"f{index:03}.txt", bytes([index]) * size) for index in range(count)]


def draw(corpus, **changed):
    arguments = {
        "seed": 0,
        "peer": PeerId("p"),
        "incarnation": 5,
        "round_number": 1,
        "index": 0,
        "batch": 4,
        "context": 8,
    }
    return corpus.train_batch(**(arguments | changed))


@pytest.fixture
def corpus():
    rng = np.random.default_rng(0)
    return Corpus([file("one.txt", rng.bytes(50_000))], name="test", validation=0.1)


def test_targets_are_the_next_bytes(corpus):
    inputs, targets = draw(corpus)
    assert inputs.shape == targets.shape == (4, 8)
    assert inputs.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_a_draw_is_a_function_of_its_arguments(corpus):
    assert torch.equal(draw(corpus)[0], draw(corpus)[0])


@pytest.mark.parametrize(
    "changed", [{"seed": 1}, {"peer": PeerId("q")}, {"incarnation": 6}, {"round_number": 2}, {"index": 1}]
)
def test_every_argument_makes_another_draw(corpus, changed):
    assert not torch.equal(draw(corpus)[0], draw(corpus, **changed)[0])


def test_held_out_documents_are_never_trained_on():
    corpus = Corpus(numbered(200), name="test", validation=0.1)
    held_out = {
        int(byte) for batch in corpus.validation_batches(10**9, batch=64, context=8) for byte in batch[0].flatten()
    }
    trained = {int(byte) for index in range(300) for byte in draw(corpus, index=index)[0].flatten()}
    assert 5 < len(held_out) < 50
    assert held_out.isdisjoint(trained)
    assert corpus.split == f"{len(held_out)} of 200 documents"
    assert corpus.train_tokens + corpus.validation_tokens == 200 * 400


def test_a_document_is_held_out_by_its_key_alone():
    """So what one peer holds out, no peer trains on, whatever other documents it has."""
    few = Corpus(numbered(100), name="few", validation=0.2)
    many = Corpus(numbered(200), name="many", validation=0.2)
    assert {int(byte) for byte in np.unique(few.validation)} <= {int(byte) for byte in np.unique(many.validation)}


def test_one_file_is_split_by_blocks_and_says_so(corpus):
    assert corpus.split == "blocks of 2048 tokens, as there are few documents"
    assert 0 < corpus.validation_tokens < 10_000
    training = corpus.train[0].tobytes()
    for start in range(0, corpus.validation_tokens - 64, 64):
        assert corpus.validation[start : start + 32].tobytes() not in training


def test_validation_batches_are_always_the_same_and_within_the_limit(corpus):
    first = list(corpus.validation_batches(2000, batch=16, context=8))
    second = list(corpus.validation_batches(2000, batch=16, context=8))
    assert sum(targets.numel() for _, targets in first) == 2000
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, second, strict=True))
    everything = sum(targets.numel() for _, targets in corpus.validation_batches(10**9, batch=16, context=8))
    assert corpus.validation_tokens - 9 < everything <= corpus.validation_tokens


def test_entropies_of_a_text_whose_next_byte_is_certain():
    corpus = Corpus([file("ab.txt", b"ab" * 20_000)], name="test", validation=0.1)
    assert corpus.unigram_entropy() == pytest.approx(math.log(2), abs=1e-3)
    assert corpus.bigram_entropy() == pytest.approx(0.0, abs=1e-3)


def test_the_standard_library_is_there_on_every_machine():
    corpus = load_corpus("stdlib", [], validation=0.05)
    assert corpus.train_tokens > 4_000_000
    assert 100_000 < corpus.validation_tokens < corpus.train_tokens / 5
    assert 2.9 < corpus.unigram_entropy() < 3.4
    assert 2.2 < corpus.bigram_entropy() < 2.6


def test_files_folders_and_jsonl_are_read(tmp_path):
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "folder" / "deep" / "a.txt").write_bytes(b"a" * 9000)
    (tmp_path / "folder" / ".hidden").write_bytes(b"h" * 9000)
    lines = [json.dumps({"text": "j" * 5000}), "", json.dumps({"text": "j" * 5000, "more": 1})]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    corpus = load_corpus("files", [tmp_path / "folder", tmp_path / "b.jsonl"], validation=0.1)
    assert corpus.train_tokens + corpus.validation_tokens == 9001 + 2 * 5001
    assert {chr(byte) for segment in corpus.train for byte in segment} == {"a", "j", "\n"}


def test_large_files_are_mapped_and_drawn_from(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MMAP_FROM_BYTES", 10_000)
    (tmp_path / "large.txt").write_bytes(b"L" * 40_000)
    (tmp_path / "small.txt").write_bytes(b"s" * 5_000)
    corpus = load_corpus("files", [tmp_path], validation=0.1)
    assert any(isinstance(segment, np.memmap) for segment in corpus.train)
    seen = {int(byte) for index in range(50) for byte in draw(corpus, index=index)[0].flatten()}
    assert seen == {ord("L"), ord("s")}


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("missing.txt", None, "missing.txt: no such file or folder: check the path"),
        ("empty.txt", "", "empty.txt: the file is empty"),
        ("short.txt", "short", "6 bytes are too few"),
        ("bad.jsonl", '{"text": "x"}\nnonsense\n', r"bad.jsonl:2: not JSON"),
        ("bad.jsonl", '{"body": "x"}\n', r'bad.jsonl: no line has text in its field "text"'),
        ("bad.jsonl", "[1]\n", r"bad.jsonl:1: no object"),
    ],
)
def test_unusable_data_are_named_with_the_remedy(tmp_path, name, content, reason):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=reason):
        load_corpus("files", [tmp_path / name], validation=0.1)


def test_an_empty_folder_and_no_path_at_all_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no text in it"):
        load_corpus("files", [tmp_path], validation=0.1)
    with pytest.raises(ConfigError, match="with --data"):
        load_corpus("files", [], validation=0.1)


def test_files_given_to_a_run_on_the_library_are_refused_not_ignored(tmp_path):
    with pytest.raises(ConfigError, match="leave --data out"):
        load_corpus("stdlib", [tmp_path], validation=0.1)


def test_what_may_not_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "secret.txt").write_text("x" * 9000)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ConfigError, match=r"secret.txt: Permission denied; check that you may read it"):
        load_corpus("files", [tmp_path], validation=0.1)


def test_a_mapped_file_that_becomes_shorter_is_named_before_it_is_touched(tmp_path, monkeypatch):
    """A signal ended the peer."""
    monkeypatch.setattr(sources, "MMAP_FROM_BYTES", 10_000)
    path = tmp_path / "log.txt"
    path.write_bytes(b"L" * 400_000)
    corpus = load_corpus("files", [path], validation=0.1)
    draw(corpus)
    path.write_bytes(b"L" * 399_999)
    with pytest.raises(ConfigError, match=r"log\.txt has become shorter since it was read: give --data a file that"):
        draw(corpus)


def test_however_many_documents_are_joined_a_few_thousand_at_a_time(tmp_path, monkeypatch):
    """At once a million of them held the interpreter for a second, and with it the event loop."""
    texts = [f"{number:05}" for number in range(3 * corpus_module.PIECES_AT_ONCE)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sizes, concatenate = list[int](), np.concatenate

    def noted(pieces, *arguments, **options):
        sizes.append(len(pieces))
        return concatenate(pieces, *arguments, **options)

    monkeypatch.setattr("numpy.concatenate", noted)
    corpus = load_corpus("files", [tmp_path / "a.jsonl"], validation=0.1)
    assert max(sizes) == corpus_module.PIECES_AT_ONCE
    found = b"".join(each.tobytes() for each in (*corpus.train, corpus.validation)).decode().split()
    assert sorted(found) == texts


def test_files_of_one_name_in_two_folders_are_both_read(tmp_path):
    for folder, letter in (("one", "1"), ("two", "2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.txt").write_text(letter * 9000)
    corpus = load_corpus("files", [tmp_path / "one", tmp_path / "two"], validation=0.1)
    assert corpus.train_tokens + corpus.validation_tokens == 18_002


def test_text_shorter_than_a_sequence_is_refused(corpus):
    with pytest.raises(ConfigError, match="sequences need 100001"):
        corpus.require_context(100_000)


def test_more_text_than_fits_is_refused_as_bytes_too(tmp_path, monkeypatch):
    """A small compressed file can hold any amount of it."""
    monkeypatch.setattr("dilocox_peer.data.corpus.MAX_LIVE_BYTES", 1 << 20)
    with gzip.open(tmp_path / "bomb.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": f"{number} " * 1000}) + "\n" for number in range(400))
    with pytest.raises(ConfigError, match="make shards of it with"):
        load_corpus("files", [tmp_path / "bomb.jsonl.gz"], validation=0.1)
