"""Documents out of every format alike; what is no text is refused by name, with the remedy."""

import errno
import gzip
import json
import os
import random
import struct
import time
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard

from dilocox_peer.data.corpus import load_corpus
from dilocox_peer.data.sources import CUT_BYTES, Reading, documents_of
from dilocox_peer.data.tokenizer import BYTE_TOKENIZER, JsonTokenizer
from dilocox_peer.errors import ConfigError
from dilocox_peer.types import PeerId
from tests.tokenizers_made import EOS, bpe_file

TEXTS = [f"document {number}\n" + "the value of the argument, é 日本 🙂\n" * (number % 7) for number in range(60)]


def write_all(folder, texts=TEXTS, column="text"):
    """The same documents in every format; the path of each."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({column: text, "other": 1}) + "\n" for text in texts).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "a.jsonl.zst").write_bytes(zstandard.compress(lines[:1000]) + zstandard.compress(lines[1000:]))
    table = pyarrow.table({"other": list(range(len(texts))), column: texts})
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=7)
    with pyarrow.ipc.new_stream(folder / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=11)
    (folder / "texts").mkdir()
    for number, text in enumerate(texts):
        (folder / "texts" / f"{number:05}.txt").write_text(text)
    return sorted(folder.iterdir())


def read(path, **reading):
    return [document.data.tobytes().decode() for document in documents_of([path], Reading(**reading))]


def test_every_format_gives_the_same_documents(tmp_path):
    paths = write_all(tmp_path)
    assert len(paths) == 6
    assert [read(path) for path in paths] == [TEXTS] * 6
    assert read(tmp_path, column="text") == TEXTS * 6


@pytest.mark.parametrize(
    ("name", "other"),
    [("a.jsonl", "A.JSONL"), ("a.jsonl", "a.ndjson"), ("a.jsonl.gz", "a.ndjson.gz"), ("a.jsonl.zst", "a.Ndjson.ZST"), ("a.parquet", "a.Parquet")],
)  # fmt: skip
def test_a_suffix_is_the_same_in_any_case_and_ndjson_is_jsonl(tmp_path, name, other):
    write_all(tmp_path)
    (tmp_path / name).rename(tmp_path / other)
    assert read(tmp_path / other) == TEXTS


def test_another_column_is_read_when_it_is_named(tmp_path):
    for path in write_all(tmp_path, TEXTS[:3], column="content"):
        assert read(path, column="content") == TEXTS[:3]


@pytest.mark.parametrize("tokenizer", [BYTE_TOKENIZER, JsonTokenizer(bpe_file(), eos=EOS)], ids=["bytes", "bpe"])
def test_the_same_documents_give_the_same_draws_and_the_same_held_out_tokens(tmp_path, tokenizer):
    seen = set()
    for path in write_all(tmp_path):
        corpus = load_corpus("files", [path], validation=0.1, tokenizer=tokenizer)
        draw = corpus.train_batch(
            seed=1, peer=PeerId("p"), incarnation=1, round_number=1, index=0, batch=4, context=32
        )  # fmt: skip
        held_out = [inputs.numpy().tobytes() for inputs, _ in corpus.validation_batches(10**6, batch=4, context=32)]
        seen.add((draw[0].numpy().tobytes(), *held_out))
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.txt", gzip.compress(b"text", mtime=0), "is gzip, no text; unpack it first, or call it .jsonl.gz"),
        ("a.txt", zstandard.compress(b"text"), "is zstd, no text; unpack it first"),
        ("a.txt", b"PAR1....", "is parquet, no text; call it .parquet"),
        ("a.png", b"\x89PNG\r\n\x1a\n", "is a PNG image, no text; take it out"),
        ("a.jpg", b"\xff\xd8\xff\xe0", "is a JPEG image"),
        ("a.pdf", b"%PDF-1.7", "is a PDF document, no text; take it out, or convert it"),
        ("a.txt", "text".encode("utf-16"), "is UTF-16, no text; convert it: `iconv"),
        ("a.bin", b"text\x00text", "has NUL bytes, so it is no text"),
        ("a.jsonl", b'{"text": 1}\n', 'a.jsonl:1: field "text" holds no string; --column names'),
        ("a.jsonl", b'{"text": "a"}\n[1]\n', "a.jsonl:2: no object; every line of a .jsonl file is one"),
        (
            "a.jsonl",
            b'{"text": null}\n{"body": "a"}\n{"text": ""}\n',
            'no line has text in its field "text"; --column names',
        ),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "' + random.Random(0).randbytes(500).hex().encode() + b'"}', mtime=0)[:100],
            "damaged gzip",
        ),
        ("a.jsonl.zst", b"nonsense", "damaged zstd"),
        ("a.parquet", b"PAR1nonsensePAR1", "damaged or no such table"),
        ("a.arrow", b"nonsense", "damaged or no such table"),
    ],
)
def test_what_is_no_text_is_refused_by_name(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        read(tmp_path / name)
    assert str(raised.value).startswith(str(tmp_path / name))
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"body": ["a"]}, "no column 'text'; --column names one of body"),
        ({"text": [1]}, "column 'text' holds int64, no text; --column names another"),
        ({"text": ["", None]}, "column 'text' is empty"),
    ],
)
def test_a_table_without_text_is_refused(tmp_path, columns, reason):
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet: ") as raised:
        read(tmp_path / "a.parquet")
    assert reason in str(raised.value)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_table_whose_text_is_no_utf8_is_refused(tmp_path, name):
    """Nothing checks that when such a column is written; reading it was a traceback, and no other file was read."""
    parts = [None, pyarrow.py_buffer(struct.pack("<3i", 0, 2, 4)), pyarrow.py_buffer(b"ab\xff\xfe")]
    table = pyarrow.table({"text": pyarrow.Array.from_buffers(pyarrow.string(), 2, parts)})
    if name.endswith("parquet"):
        pyarrow.parquet.write_table(table, tmp_path / name)
    else:
        with pyarrow.ipc.new_stream(tmp_path / name, table.schema) as stream:
            stream.write_table(table)
    (tmp_path / "b.txt").write_text("sound")
    told: list[str] = []
    assert read(tmp_path, refused=told.append)[-1] == "sound"
    assert told == [f"{tmp_path / name}: column 'text' has text that is no UTF-8; convert it, or take it out; left out"]


def test_few_rows_of_long_documents_are_in_memory_at_a_time(tmp_path):
    """256 of them were, and as text of Python's as well: 2.2 GB for documents of 4 MB, of a file of 100 kB."""
    with pyarrow.parquet.ParquetWriter(tmp_path / "a.parquet", pyarrow.schema({"text": pyarrow.string()})) as writer:
        for number in range(8):
            texts = [f"{number} {each} " + "x" * (1 << 20) for each in range(12)]
            writer.write_table(pyarrow.table({"text": texts}))
    before, most, count = pyarrow.total_allocated_bytes(), 0, 0
    for _ in documents_of([tmp_path / "a.parquet"], Reading()):
        count, most = count + 1, max(most, pyarrow.total_allocated_bytes() - before)
    assert count == 96
    assert most < 48 << 20, most


@pytest.mark.parametrize("offsets", [(0, 2**30, 2**30), (0, -(2**31), 4), (3, 1, 4), (-(2**30), 2, 4)])
def test_a_table_whose_texts_lie_outside_the_file_ends_no_process(tmp_path, offsets):
    """Three bytes that a disk had changed ended `tokenize` and peers by a signal, or in a traceback."""
    sound = pyarrow.table({"text": ["ab", "cd"]})
    with pyarrow.ipc.new_stream(tmp_path / "a.arrow", sound.schema) as stream:
        stream.write_table(sound)
    raw, right = (tmp_path / "a.arrow").read_bytes(), struct.pack("<3i", 0, 2, 4)
    assert raw.count(right) == 1
    (tmp_path / "a.arrow").write_bytes(raw.replace(right, struct.pack("<3i", *offsets)))
    (tmp_path / "b.txt").write_text("sound")
    told: list[str] = []
    assert read(tmp_path, refused=told.append) == ["sound"]
    assert len(told) == 1
    assert "damaged or no such table" in told[0]


def test_a_table_with_a_damaged_page_is_one_line(tmp_path):
    write_all(tmp_path)
    raw = bytearray((tmp_path / "a.parquet").read_bytes())
    raw[50:200] = bytes(150)
    (tmp_path / "a.parquet").write_bytes(raw)
    told: list[str] = []
    read(tmp_path, refused=told.append)
    assert len(told) == 1
    assert "\n" not in told[0]


def test_a_truncated_table_ends_nothing_where_others_are_sound(tmp_path):
    write_all(tmp_path)
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "texts" / "00000.txt").write_bytes(b"\x00")
    told: list[str] = []
    documents = read(tmp_path, refused=told.append)
    assert documents == TEXTS * 4 + TEXTS[1:]
    assert len(told) == 2
    assert all(line.endswith("; left out") for line in told)


def test_folders_that_cannot_be_read_and_links_that_are_not_followed_are_told_once(tmp_path, monkeypatch):
    """Half of a corpus could be missing without a line."""
    corpus, closed = tmp_path / "corpus", tmp_path / "corpus" / "closed"
    for folder in (corpus, closed, tmp_path / "elsewhere"):
        folder.mkdir()
        (folder / "a.txt").write_text("text")
    (corpus / "link").symlink_to(tmp_path / "elsewhere")
    (corpus / "lost.txt").symlink_to(tmp_path / "nowhere")
    (corpus / "linked.txt").symlink_to(tmp_path / "elsewhere" / "a.txt")
    scandir = os.scandir

    def refusing(path):
        if str(path) == str(closed):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    monkeypatch.setattr("os.scandir", refusing)
    told: list[str] = []
    assert read(corpus, refused=told.append) == ["text", "text"]
    assert sorted(told) == [
        f"{closed}: permission denied; left out",
        f"{corpus / 'link'}: a link to a folder is not followed, name that folder too; left out",
        f"{corpus / 'lost.txt'}: a link that leads to no file; left out",
    ]
    with pytest.raises(PermissionError):
        read(corpus)


LINES = [json.dumps({"text": text}).encode() for text in TEXTS[:9]]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_lines_that_are_no_documents_take_no_others_with_them(tmp_path, name):
    bad = [b"nonsense", b"[1]", b'{"text": 1}', b'"a', b'{"text": ["a"]}']
    raw = b"\n".join([*LINES[:3], *bad[:3], b'{"text": null}', b'{"other": 1}', *LINES[3:6], *bad[3:], *LINES[6:]])
    packs: dict[str, Any] = {"a.jsonl": bytes, "a.jsonl.gz": gzip.compress, "a.jsonl.zst": zstandard.compress}
    path = tmp_path / name
    path.write_bytes(packs[name](raw))
    told: list[str] = []
    assert read(path, refused=told.append) == TEXTS[:9]
    assert [line.split(" (")[0] for line in told] == [
        f"{path}:4: not JSON",
        f"{path}:5: no object; every line of a .jsonl file is one; left out",
        f'{path}:6: field "text" holds no string; --column names another; left out',
        f'{path}: 2 lines have nothing in a field "text"; --column names another; left out',
        f"{path}: 5 lines in all were left out",
    ]


def test_a_file_without_a_line_of_text_names_the_option(tmp_path):
    path = tmp_path / "a.jsonl"
    for raw, lines in ((b'{"body": "a"}\n' * 9, 1), (b'{"text": 1}\n' * 9, 4), (b"\n\n", 0)):
        path.write_bytes(raw)
        told: list[str] = []
        assert read(path, refused=told.append) == []
        assert len(told) == lines
        assert all("--column names another; left out" in line for line in told)


def test_what_breaks_in_the_middle_of_a_file_says_what_came_before(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    lines = [json.dumps({"text": random.Random(number).randbytes(2000).hex()}) for number in range(900)]
    path.write_bytes(gzip.compress("\n".join(lines).encode())[:-100_000])
    told: list[str] = []
    count = len(read(path, refused=told.append))
    assert 0 < count < 900
    assert len(told) == 1
    assert told[0].startswith(f"{path}: damaged gzip (")
    assert told[0].endswith(f"; fetch it again; {count} documents before that came in, the rest is left out")


def test_long_documents_are_cut_at_lines_alike(tmp_path):
    text = "".join(f"line {number} of a long text\n" for number in range(400)) + "x" * 3000
    paths = write_all(tmp_path, [text])
    pieces = [read(path, cut_bytes=1000) for path in paths]
    assert pieces == [pieces[0]] * 6
    assert "".join(pieces[0]) == text
    assert all(0 < len(piece) <= 1000 for piece in pieces[0])
    assert sum(piece.endswith("\n") for piece in pieces[0]) == len(pieces[0]) - 3
    assert pieces[0][0].endswith("text\n")


def test_a_document_of_a_table_is_cut_in_time_that_grows_with_it_alone(tmp_path):
    """Of one of 256 MB what was left was copied for each MB of it: 38 s, and four times that for twice as much."""
    path = tmp_path / "long.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a line of text\n" * 800_000]}), path)
    began = time.process_time()
    pieces = [each.data for each in documents_of([path], Reading(cut_bytes=1000))]
    assert time.process_time() - began < 3.0
    assert sum(map(len, pieces)) == 12_000_000
    assert all(piece.tobytes().endswith(b"text\n") for piece in pieces)


@pytest.mark.parametrize("first", [b"R", b""])
def test_what_is_no_utf8_is_cut_all_the_same(tmp_path, first):
    """Silence of eight bits (raw sound) is a run of 0x80, and has no NUL."""
    path = tmp_path / "silence.raw"
    path.write_bytes(first + b"\x80" * (2 * CUT_BYTES))
    parts = [each.data for each in documents_of([path], Reading(cut_bytes=CUT_BYTES))]
    assert sum(map(len, parts)) == 2 * CUT_BYTES + len(first)


def zstd_of(count):
    lines = (json.dumps({"text": f"text {number} " * 20}).encode() + b"\n" for number in range(count))
    return zstandard.ZstdCompressor().compress(b"".join(lines))


@pytest.mark.parametrize("count", [3, 5000])
def test_a_zstd_file_that_was_cut_short_is_damaged(tmp_path, count):
    """A download that broke off is not less text, of which nobody is told."""
    path = tmp_path / "part.jsonl.zst"
    path.write_bytes(zstd_of(count)[:-5])
    with pytest.raises(ConfigError, match="damaged zstd"):
        list(documents_of([path], Reading()))


def test_frames_of_zstd_are_read_one_after_the_other(tmp_path):
    path, frame = tmp_path / "several.jsonl.zst", zstd_of(2000)
    path.write_bytes(frame * 3)
    assert len(list(documents_of([path], Reading()))) == 6000
    for damaged in (b"", frame + b"junkjunk"):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError):
            list(documents_of([path], Reading()))
