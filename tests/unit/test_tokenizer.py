"""Tokens as the library `tokenizers` makes them, borders that only we set, and one line for what does not fit."""

import hashlib
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.cli.flags import InitFlags, SignFlags
from dilocox_peer.cli.home import tokenizers_folder
from dilocox_peer.cli.init import sign_run_file, write_run_file
from dilocox_peer.config import preset, read_signed_manifest
from dilocox_peer.data.corpus import load_corpus
from dilocox_peer.data.tokenizer import BYTE_TOKENIZER, JsonTokenizer, bounded, id_type, tokenizer_of_run
from dilocox_peer.data.tokenizer_files import (
    bounds_beside,
    find_tokenizer,
    keep_tokenizer,
    kept_files,
    read_tokenizer_file,
)
from dilocox_peer.errors import ConfigError
from tests.tokenizers_made import BOS, EOS, bpe_file, write_model_folder

HASH = hashlib.sha256(bpe_file()).hexdigest()


def section(**changed):
    return preset("tiny", data={"source": "files", "tokenizer": HASH, "bos": BOS, "eos": EOS} | changed).data


@pytest.fixture(scope="module")
def tokenizer():
    return JsonTokenizer(bpe_file(), bos=BOS, eos=EOS)


@given(st.lists(st.text(), max_size=4))
def test_tokens_are_those_of_the_library_used_plainly(tokenizer, texts):
    plain = tokenizers.Tokenizer.from_str(bpe_file().decode())
    expected = [plain.encode(text.encode(errors="replace").decode(), add_special_tokens=False).ids for text in texts]
    found = tokenizer.encode([text.encode(errors="replace") for text in texts])
    assert [ids.tolist() for ids in found] == expected
    assert all(ids.dtype == np.dtype("<u2") for ids in found)


@given(st.text())
def test_text_comes_back_whole_character_by_character(tokenizer, text):
    ids = tokenizer.encode([text.encode(errors="replace")])[0]
    pieces = list(tokenizer.text_of(iter(ids.tolist())))
    assert "".join(pieces) == text.encode(errors="replace").decode()
    assert not any(piece == "" for piece in pieces)
    assert tokenizer.num_bytes(ids) == len(text.encode(errors="replace"))


def test_a_text_that_spells_a_special_token_ends_nothing(tokenizer):
    ids = tokenizer.encode([f"a{EOS}b".encode()])[0]
    assert tokenizer.eos not in ids
    assert "".join(tokenizer.text_of(iter(ids.tolist()))) == f"a{EOS}b"


def test_documents_stand_between_bos_and_eos(tokenizer):
    ids = tokenizer.encode([b"one"])[0]
    whole = bounded(tokenizer, ids)
    assert whole.tolist() == [tokenizer.bos, *ids.tolist(), tokenizer.eos]
    assert whole.dtype == ids.dtype
    assert tokenizer.num_bytes(whole) == 3
    assert bounded(JsonTokenizer(bpe_file(), eos=EOS), ids).tolist() == [*ids.tolist(), tokenizer.eos]
    assert bounded(BYTE_TOKENIZER, ids) is ids


def test_truncation_and_padding_of_the_file_do_not_count():
    changed = tokenizers.Tokenizer.from_str(bpe_file().decode())
    changed.enable_truncation(2)
    changed.enable_padding(length=8)
    text = b"the value of the argument"
    [ids] = JsonTokenizer(changed.to_str().encode()).encode([text])
    assert ids.tolist() == JsonTokenizer(bpe_file()).encode([text])[0].tolist()


def test_ids_take_the_narrowest_type():
    assert [id_type(size).itemsize for size in (256, 257, 65536, 65537)] == [1, 2, 2, 4]


@pytest.mark.parametrize(
    ("content", "changed", "vocab_size", "reason"),
    [
        (b"{}", {"tokenizer": hashlib.sha256(b"{}").hexdigest()}, 320, "is no tokenizer.json"),
        (b"\x00", {"tokenizer": hashlib.sha256(b"\x00").hexdigest()}, 320, "is no tokenizer.json"),
        (bpe_file(321), {}, 321, "is not the run's tokenizer: its sha256 is"),
        (bpe_file(), {}, 319, "has 320 tokens, the run's model knows 319: its owner has to raise model.vocab_size"),
        (bpe_file(), {"eos": "<|nowhere|>"}, 320, "data.eos is '<|nowhere|>', which is no token of"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(content, changed, vocab_size, reason):
    with pytest.raises(ConfigError, match=re.escape("tokenizer.json")) as raised:
        tokenizer_of_run(section(**changed), vocab_size, content)
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_extra_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"`pip install 'tokenizers>=0\.20'`"):
        JsonTokenizer(bpe_file())


def test_a_file_given_once_is_kept_for_good(tmp_path):
    given_folder, kept = write_model_folder(tmp_path / "model"), tmp_path / "kept"
    with pytest.raises(ConfigError, match=f"pass --tokenizer with the tokenizer.json whose sha256 is {HASH[:16]}"):
        find_tokenizer(section(), 320, given=None, kept=kept)
    for each in (given_folder, given_folder / "tokenizer.json", None):
        found = find_tokenizer(section(), 320, given=each, kept=kept)
        assert (found.name, found.bos, found.eos) == (HASH, 318, 319)
    assert kept_files(kept, found).keys() == {"tokenizer.json", "tokenizer_config.json"}
    (kept / HASH / "tokenizer.json").write_bytes(b"spoiled")
    with pytest.raises(ConfigError, match="not here"):
        find_tokenizer(section(), 320, given=None, kept=kept)
    keep_tokenizer(kept, given_folder)
    assert read_tokenizer_file(kept / HASH) == bpe_file()
    assert [each.name for each in kept.iterdir()] == [HASH]


def test_bytes_take_no_tokenizer(tmp_path):
    plain = preset("tiny").data
    assert find_tokenizer(plain, 256, given=None, kept=tmp_path) is BYTE_TOKENIZER
    with pytest.raises(ConfigError, match="leave --tokenizer out"):
        find_tokenizer(plain, 256, given=tmp_path, kept=tmp_path)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, ("", "")),  # names that no published tokenizer has
        ({}, ("", EOS)),  # named, and not said to be put before texts
        ({"add_bos_token": True}, (BOS, EOS)),
        ({"add_bos_token": True, "bos_token": {"content": BOS}, "eos_token": {"content": "gone"}}, (BOS, "")),
        ({"add_bos_token": True, "bos_token": EOS}, ("", EOS)),  # one token for both parts documents once
    ],
)
def test_what_stands_around_documents_is_read_from_beside_the_file(tmp_path, config, expected):
    folder = write_model_folder(tmp_path, **(config or {}))
    if config is None:
        (folder / "tokenizer_config.json").unlink()
    assert bounds_beside(folder, bpe_file()) == expected


def test_without_a_config_the_common_names_are_looked_for(tmp_path):
    content = json.dumps(
        {"added_tokens": [{"id": 0, "content": "<|endoftext|>"}, {"id": 1, "content": "<s>"}]}
    ).encode()
    assert bounds_beside(tmp_path / "tokenizer.json", content) == ("<s>", "<|endoftext|>")


def test_a_corpus_of_tokens_is_cut_at_its_documents(tmp_path, tokenizer):
    lines = [json.dumps({"text": f"document {number} of the others"}) for number in range(200)]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    corpus = load_corpus("files", [tmp_path / "d.jsonl"], validation=0.1, tokenizer=tokenizer)
    assert corpus.split.endswith("of 200 documents")
    assert corpus.unit == "token"
    for inputs, targets in corpus.validation_batches(10**6, batch=4, context=8):
        assert inputs.max() < 320
        text = "".join(tokenizer.text_of(iter(targets.flatten().tolist())))
        assert corpus.num_bytes(targets) == len(text)
    assert 0 < corpus.bigram_entropy() < corpus.unigram_entropy()


def test_init_names_the_tokenizer_and_keeps_it(tmp_path, capsys):
    folder = write_model_folder(tmp_path / "model")
    flags = InitFlags(path=tmp_path / "run.toml", tokenizer=folder, home=tmp_path / "home")
    write_run_file(flags)
    manifest = read_signed_manifest(tmp_path / "run.toml")
    assert (manifest.data.tokenizer, manifest.data.bos, manifest.data.eos) == (HASH, "", EOS)
    assert manifest.model.vocab_size == 320
    assert (tmp_path / "tokenizer.json").read_bytes() == bpe_file()
    assert f"320 tokens, nothing before and {EOS} behind each document" in capsys.readouterr().out
    kept = tokenizers_folder(tmp_path / "home")
    assert find_tokenizer(manifest.data, 320, given=None, kept=kept).name == HASH


def test_init_overwrites_no_other_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text("another")
    flags = InitFlags(path=tmp_path / "run.toml", tokenizer=write_model_folder(tmp_path / "model"), home=tmp_path)
    with pytest.raises(ConfigError, match="exists and is another: pass --force"):
        write_run_file(flags)
    assert not flags.path.exists()


def test_init_that_cannot_sign_leaves_run_and_tokenizer_as_they_were(tmp_path, capsys):
    """The tokenizer.json of the run that was there was another one then, and its volunteers were given the wrong file."""
    folder = write_model_folder(tmp_path / "model")
    write_run_file(InitFlags(path=tmp_path / "run.toml", tokenizer=folder, home=tmp_path / "home"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.json").write_bytes(bpe_file(400))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    capsys.readouterr()
    (tmp_path / "bad" / "owner.key").mkdir(parents=True)
    flags = InitFlags(path=tmp_path / "run.toml", tokenizer=tmp_path / "other", home=tmp_path / "bad", force=True)
    with pytest.raises(ConfigError, match="is a directory; pass another --owner-key"):
        write_run_file(flags)
    with pytest.raises(ConfigError):
        write_run_file(replace(flags, path=tmp_path / "model" / ".." / "empty" / "run.toml"))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert "wrote" not in capsys.readouterr().out


def test_init_to_standard_output_leaves_its_name_as_it_is(tmp_path, capfd):
    """With a tokenizer, and into a file, /dev/stdout itself became a file of the system's."""
    folder, name = write_model_folder(tmp_path / "model"), tmp_path / "run.toml"
    with (tmp_path / "real").open("wb") as real:
        before = os.dup(1)
        os.dup2(real.fileno(), 1)
        try:
            name.symlink_to("/proc/self/fd/1")
            write_run_file(InitFlags(path=name, tokenizer=folder, home=tmp_path / "home", force=True))
        finally:
            os.dup2(before, 1)
            os.close(before)
    assert name.is_symlink()
    assert b"[model]" in (tmp_path / "real").read_bytes()
    assert (tmp_path / "tokenizer.json").read_bytes() == bpe_file()


@pytest.mark.parametrize("is_there", [True, False])
def test_init_and_sign_write_the_file_behind_a_link(tmp_path, is_there):
    """The link became a file of its own, and what it led to (of a repository of settings, say) stayed as it was."""
    (tmp_path / "kept").mkdir()
    run, tokenizer = tmp_path / "run.toml", tmp_path / "tokenizer.json"
    for each in (run, tokenizer):
        each.symlink_to(Path("kept") / each.name)
        if is_there:
            (tmp_path / "kept" / each.name).write_text("another")
    folder = write_model_folder(tmp_path / "model")
    write_run_file(InitFlags(path=run, tokenizer=folder, home=tmp_path / "home", force=is_there))
    assert (tmp_path / "kept" / "tokenizer.json").read_bytes() == bpe_file()
    settings = tmp_path / "kept" / "run.toml"
    settings.write_text(settings.read_text().replace("total = 1600 ", "total = 1500 "))
    sign_run_file(SignFlags(path=run, home=tmp_path / "home"))
    assert run.is_symlink()
    assert tokenizer.is_symlink()
    assert read_signed_manifest(settings).rounds.total == 1500


def test_init_in_the_place_of_links_that_lead_round_in_a_circle_writes_a_file(tmp_path):
    run, other = tmp_path / "run.toml", tmp_path / "other.toml"
    run.symlink_to(other)
    other.symlink_to(run)
    write_run_file(InitFlags(path=run, home=tmp_path / "home"))
    assert read_signed_manifest(run).rounds.total


def test_init_takes_no_link_that_leads_where_the_tokenizers_does(tmp_path):
    for name in ("run.toml", "tokenizer.json"):
        (tmp_path / name).symlink_to("one")
    folder = write_model_folder(tmp_path / "model")
    with pytest.raises(ConfigError, match="call the file run"):
        write_run_file(InitFlags(path=tmp_path / "run.toml", tokenizer=folder, home=tmp_path / "home", force=True))
    assert not (tmp_path / "one").exists()


def test_init_takes_no_name_that_is_the_tokenizers(tmp_path):
    """It said that it wrote both, and one was there: of the two the run's."""
    folder = write_model_folder(tmp_path / "model")
    flags = InitFlags(path=folder / "tokenizer.json", tokenizer=folder, home=tmp_path, force=True)
    with pytest.raises(ConfigError, match=r"call the file run\.toml"):
        write_run_file(flags)
    assert (folder / "tokenizer.json").read_bytes() == bpe_file()


def test_a_file_at_which_the_library_breaks_down_is_refused_in_one_line():
    """What it raises then is no Exception, and was a traceback of two languages."""
    file = {**json.loads(bpe_file()), "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}
    with pytest.raises(
        ConfigError, match=r"tokenizer\.json is no tokenizer\.json \(.*\): name one of a published model"
    ):
        JsonTokenizer(json.dumps(file).encode())


def test_a_file_whose_numbers_are_beyond_any_embedding_is_refused_in_one_line():
    """A count of each number's bytes took 16 GB."""
    model = {"type": "WordLevel", "vocab": {"known": 2**32 - 1}, "unk_token": "known"}
    file = {**json.loads(bpe_file()), "model": model, "added_tokens": []}
    with pytest.raises(ConfigError, match=r"a token of number 4,294,967,295, 16,777,216 is the limit"):
        JsonTokenizer(json.dumps(file).encode())


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40, "1,099,511,627,776"),
        ([{"type": "Replace", "pattern": {"Regex": "b*"}, "content": "c" * 99}], "100"),
        ([{"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "d" * 99}]}], "100"),
        ([{"type": "Prepend", "prepend": "_"}, {"type": "Replace", "pattern": {"String": " "}, "content": "_"}], ""),
        ([{"type": "Replace", "pattern": {"String": "``"}, "content": '"'}, {"type": "NFKD"}], ""),
    ],
)
def test_a_file_that_makes_far_more_text_of_a_text_is_refused_in_one_line(steps, told):
    """Forty steps that write each `a` twice had not done with one `a` after 15 s, in all the memory that there was."""
    file = json.loads(bpe_file())
    file["normalizer"] = {"type": "Sequence", "normalizers": steps}
    content = json.dumps(file).encode()
    if not told:
        assert JsonTokenizer(content).encode([b"a b"])
        return
    with pytest.raises(ConfigError, match=f"^tokenizer.json makes {told} characters of one .*, 64 is the limit: name "):
        JsonTokenizer(content)


def test_a_text_that_a_tokenizer_has_no_tokens_for_is_one_line():
    model = {"type": "WordLevel", "vocab": {"known": 0}, "unk_token": "[UNK]"}
    file = {**json.loads(bpe_file()), "model": model, "pre_tokenizer": {"type": "Whitespace"}, "added_tokens": []}
    tokenizer = JsonTokenizer(json.dumps(file).encode())
    assert tokenizer.encode([b"known"])[0].tolist() == [0]
    with pytest.raises(ConfigError, match="cannot cut this text"):
        tokenizer.encode([b"known other"])
    with pytest.raises(ConfigError, match="cannot cut this text"):
        tokenizer.encode_marked([(b"other", ((0, 5),))])


@pytest.mark.parametrize("listed", [5, ["a"], [None, []], {"a": 1}, [{"id": 0}]])
def test_added_tokens_that_are_none_break_nothing_before_the_file_is_refused(tmp_path, listed):
    """`tokenize` and `init` ask what stands around documents before the library has seen the file."""
    content = json.dumps({"added_tokens": listed, "model": {}}).encode()
    assert bounds_beside(tmp_path / "tokenizer.json", content) == ("", "")
    with pytest.raises(ConfigError, match=r"is no tokenizer\.json"):
        JsonTokenizer(content)


def test_a_deeply_nested_file_is_refused_in_one_line(tmp_path):
    content = b'{"added_tokens":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    assert bounds_beside(tmp_path / "tokenizer.json", content) == ("", "")
    with pytest.raises(ConfigError, match=r"is no tokenizer\.json") as raised:
        JsonTokenizer(content)
    assert "\n" not in str(raised.value)
