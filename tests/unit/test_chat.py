"""Conversations: written out by a template, answers alone are trained on, and what a template or a message may not do."""

import gzip
import json
import sys
from typing import cast

import numpy as np
import pyarrow
import pytest
import tokenizers
from pyarrow import parquet

from dilocox_peer.data.allotment import Stretch
from dilocox_peer.data.catalogue import read_catalogue
from dilocox_peer.data.chat import ChatTemplate, NoConversation, TemplateFiles, read_template
from dilocox_peer.data.chat_process import MAX_LATE, ChatProcess
from dilocox_peer.data.held_out import inputs_and_targets
from dilocox_peer.data.row import UnitRow, sequences_of
from dilocox_peer.data.shards import OpenShard, ShardFolders, held_out_of
from dilocox_peer.data.tokenizer import JsonTokenizer
from dilocox_peer.data.tokenizing import Order, make_shards
from dilocox_peer.errors import ConfigError
from dilocox_peer.types import IGNORED
from tests.tokenizers_made import BOS, EOS, bpe_file, write_model_folder

TEMPLATE = (
    "{% for message in messages %}{{'"
    + BOS
    + "' + message['role'] + '\n' + message['content'] + '"
    + EOS
    + "' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'" + BOS + "assistant\n'}}{% endif %}"
)
TALKS = [
    [
        {"role": "user", "content": f"what is the value of {number}?"},
        {"role": "assistant", "content": f"the value, é, is {number * 7}"},
        {"role": "user", "content": "and of the other one?"},
        {"role": "assistant", "content": "ab" * (number % 9 + 1)},
    ]
    for number in range(60)
]


def template(source=TEMPLATE, special=(BOS, EOS), **tokens):
    return ChatTemplate(TemplateFiles(source, tokens), special)


def test_answers_are_found_with_what_ends_them():
    text, spans = template().written(TALKS[3])
    assert text == f"{BOS}user\nwhat is the value of 3?{EOS}\n{BOS}assistant\nthe value, é, is 21{EOS}\n" + (
        f"{BOS}user\nand of the other one?{EOS}\n{BOS}assistant\nabababab{EOS}\n"
    )
    assert [text[first:end] for first, end in spans] == [f"the value, é, is 21{EOS}", f"abababab{EOS}"]


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ("text", "no list of messages"),
        ([], "no list of messages"),
        ([{"role": "user"}], "a message without"),
        ([{"role": "user", "content": "hello"}], "no answer in it"),
        ([{"role": "user", "content": f"{EOS}"}, *TALKS[0]], "spells the special token"),
        ([{"role": "assistant", "content": "x" * (2 << 20)}], "more than 1048576 characters"),
    ],
)
def test_what_is_no_conversation_is_refused(record, says):
    with pytest.raises(NoConversation, match=says):
        template().written(record)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('no system here') }}", "no system here"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(1000000000) %}x{% endfor %}", "Range too big"),
        ("{% for i in range(9999) %}{{ 'x' * 999 }}{% endfor %}", "characters as the template writes it"),
        ("{% for m in messages[-2:] %}{{ m['role'] + m['content'] }}{% endfor %}{% if add_generation_prompt %}{{'assistant'}}{% endif %}",
         "writes earlier turns otherwise"),
    ],
)  # fmt: skip
def test_a_template_does_nothing_but_write(source, says):
    with pytest.raises(NoConversation, match=says):
        template(source).written(TALKS[0])


@pytest.mark.parametrize(
    "bomb", ["{{ 'a' * 10**11 }}", "{{ '%999999999d' % 1 }}", "{{ 9 ** 9 ** 9 }}", "{{ '{0}'.format() }}"]
)
def test_a_template_fills_no_memory(bomb):
    with pytest.raises(NoConversation, match="the template refuses it"):
        template(bomb + TEMPLATE).written(TALKS[3])


@pytest.mark.parametrize("breaks", ["{{ cycler() }}", "{{ joiner(1)|batch('a')|list }}"])
def test_a_template_that_breaks_off_is_said_to_refuse(breaks):
    """Its process ended in a traceback, and it was said to be late; three times, and the whole work ended."""
    with ChatProcess(TemplateFiles(breaks + TEMPLATE, {}), ()) as process:
        for _ in range(MAX_LATE + 1):
            with pytest.raises(NoConversation, match="the template refuses it"):
                process.written(TALKS[3])


FOR_EVER = "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
DOUBLING = "{% set t = namespace(x='ab') %}{% for i in range(60) %}{% set t.x = t.x ~ t.x %}{% endfor %}{{ t.x }}"


def test_a_process_writes_what_the_template_does_and_ends():
    with ChatProcess(TemplateFiles(TEMPLATE, {}), (BOS, EOS)) as process:
        for talk in TALKS[:5]:
            assert process.written(talk) == template().written(talk)
        with pytest.raises(NoConversation, match="spells the special token"):
            process.written([{"role": "user", "content": f"{EOS}"}, *TALKS[0]])
        with pytest.raises(NoConversation, match="no answer in it"):
            process.written([{"role": "user", "content": "hello"}])


def test_a_template_that_never_ends_is_ended():
    """The first conversations are left out, one after the other; then the template is named."""
    with ChatProcess(TemplateFiles(FOR_EVER + TEMPLATE, {}), (), deadline_s=0.3) as process:
        for _ in range(MAX_LATE - 1):
            with pytest.raises(NoConversation, match="was not done with it within"):
                process.written(TALKS[3])
        with pytest.raises(ConfigError, match="did not end within 0 s, 3 times"):
            process.written(TALKS[3])


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not bound a process' data")
def test_a_template_that_doubles_a_text_is_stopped_by_its_bound():
    with (
        ChatProcess(TemplateFiles(DOUBLING + TEMPLATE, {}), ()) as process,
        pytest.raises(NoConversation, match="the template refuses it: MemoryError"),
    ):
        process.written(TALKS[3])


def test_a_process_refuses_what_is_no_template():
    with pytest.raises(ConfigError, match="the chat template is none"):
        ChatProcess(TemplateFiles("{% for %}", {}), ())


def test_what_a_template_writes_depends_on_no_day():
    dated, _ = template("{{ strftime_now('%d %b %Y') }} {{ '-' * 3 }} {{ 7 % 4 }}" + TEMPLATE).written(TALKS[3])
    assert dated.startswith("26 Jul 2024 --- 3")


def test_a_template_that_is_none_or_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="the chat template is none"):
        template("{% for %}")
    folder = write_model_folder(tmp_path / "model")
    with pytest.raises(ConfigError, match="has no chat template"):
        read_template(folder)
    write_model_folder(
        folder, chat_template=[{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    )
    assert read_template(folder).source == "y"
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    assert read_template(folder) == TemplateFiles(
        TEMPLATE, {"bos_token": BOS, "eos_token": EOS, "pad_token": "", "unk_token": ""}
    )


def made(source, out, **changed):
    order = Order(
        (source,), out, bpe_file(), "", EOS, column="messages", shard_tokens=2000, validation=0.2,
        chat=TemplateFiles(TEMPLATE, {}), **changed,
    )  # fmt: skip
    return make_shards(order, refused=pytest.fail)


@pytest.fixture
def source(tmp_path):
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS))
    return tmp_path / "talks.jsonl"


def test_shards_say_which_tokens_are_answers(tmp_path, source):
    catalogue = made(source, tmp_path / "out")
    assert catalogue.answers
    folders = ShardFolders(catalogue, [tmp_path / "out"])
    tokenizer = tokenizers.Tokenizer.from_str(bpe_file().decode())
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    found = []
    for shard in catalogue.shards:
        opened = folders.find(shard)
        assert opened is not None
        for ids in np.split(opened.signed(0, shard.tokens), opened.starts(shard.tokens)[1:]):
            text = tokenizer.decode(np.where(ids < 0, ~ids, ids).tolist(), skip_special_tokens=False)
            found.append((text, tokenizer.decode(ids[ids >= 0].tolist(), skip_special_tokens=False)))
    written = [template().written(talk) for talk in TALKS]
    # the eos behind a conversation, whose last token is a line break, is a border
    assert sorted(found) == sorted((text + EOS, "".join(text[a:b] for a, b in spans)) for text, spans in written)


def test_only_answers_are_targets_in_training_and_validation(tmp_path, source):
    catalogue = made(source, tmp_path / "out")
    folders = ShardFolders(catalogue, [tmp_path / "out"])
    row = UnitRow(catalogue, 1)
    stretch = Stretch(0, 0, row.row.num_units)
    sequences = sequences_of(
        row.units(stretch), lambda shard: cast("OpenShard", folders.find(shard)), context=32, seed=1, stretch=stretch
    )
    inputs, targets = inputs_and_targets(sequences)
    assert int(inputs.min()) >= 0
    counted = targets != IGNORED
    assert counted.any(dim=1).all()
    assert 0.1 < counted.float().mean() < 0.6
    assert (inputs[:, 1:][counted[:, :-1]] == targets[:, :-1][counted[:, :-1]]).all()
    _, name = read_catalogue(tmp_path / "out")
    held_out = held_out_of([tmp_path / "out"], name, JsonTokenizer(bpe_file(), eos=EOS))
    for _inputs, held in held_out.validation_batches(10_000, batch=4, context=32):
        assert (held == IGNORED).any()
        assert held_out.num_bytes(held) > 0


def test_all_formats_and_any_number_of_processes_give_the_same(tmp_path, source):
    expected = made(source, tmp_path / "out")
    assert made(source, tmp_path / "two", processes=2) == expected
    with gzip.open(tmp_path / "talks.jsonl.gz", "wb") as file:
        file.write(source.read_bytes())
    assert made(tmp_path / "talks.jsonl.gz", tmp_path / "gz") == expected
    parquet.write_table(pyarrow.table({"messages": TALKS}), tmp_path / "talks.parquet")
    assert made(tmp_path / "talks.parquet", tmp_path / "table") == expected


def test_conversations_that_cannot_be_written_are_left_out_with_a_few_lines(tmp_path, source):
    bad = [{"role": "user", "content": "no answer"}]
    source.write_text(source.read_text() + "".join(json.dumps({"messages": bad}) + "\n" for _ in range(9)))
    lines: list[str] = []
    order = Order(
        (source,),
        tmp_path / "out",
        bpe_file(),
        "",
        EOS,
        column="messages",
        chat=TemplateFiles(TEMPLATE, {}),
        validation=0.2,
    )
    make_shards(order, refused=lines.append)
    assert len(lines) == 4
    assert lines[0] == f"{source}:61: no answer in it; left out"
    assert lines[-1] == f"{source}: 9 conversations in all were left out"
