"""Documents packed into sequences: each in one, each token a target once, and none that sees another document."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.config import preset
from dilocox_peer.data.allotment import Stretch
from dilocox_peer.data.catalogue import read_catalogue
from dilocox_peer.data.held_out import HeldOut, inputs_and_targets
from dilocox_peer.data.packing import BEGINS, packed
from dilocox_peer.data.row import UnitRow, sequences_of
from dilocox_peer.data.shards import ShardFolders, held_out_of
from dilocox_peer.data.tokenizer import BYTE_TOKENIZER
from dilocox_peer.data.tokenizing import Order, make_shards
from dilocox_peer.errors import ConfigError
from dilocox_peer.manifest import ModelSection
from dilocox_peer.model.activations import BodyFormat
from dilocox_peer.model.architecture import LayerRange, layers_of
from dilocox_peer.model.borders import parted, positions_of, seen_by
from dilocox_peer.model.loss import loss_of, train_on
from dilocox_peer.model.passes import Passes
from dilocox_peer.model.stage import Stage
from dilocox_peer.model.transformer import LlamaStage, initial_parameters
from dilocox_peer.types import IGNORED

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(0, 40), max_size=30)


def numbered(lengths):
    """Documents whose every token is another number."""
    ends = np.cumsum(lengths)
    return [np.arange(end - length, end, dtype=np.int64) for end, length in zip(ends, lengths, strict=True)]


@given(LENGTHS, st.integers(2, 16))
def test_each_token_but_the_first_of_a_document_is_a_target_once_behind_the_one_before(lengths, length):
    documents = numbered(lengths)
    sequences = packed(documents, length)
    assert sequences.shape[1] == length
    inputs, targets = inputs_and_targets(sequences)
    counted = targets != IGNORED
    assert sorted(targets[counted].tolist()) == sorted(token for each in documents for token in each[1:].tolist())
    tokens, _ = parted(inputs)
    assert (tokens[counted] + 1 == targets[counted]).all()
    assert not (counted[:, :-1] & (inputs[:, 1:] < 0)).any(), "no target lies in another document"


@given(LENGTHS, st.integers(2, 16))
def test_a_document_that_fits_lies_in_one_piece(lengths, length):
    begun = packed(numbered(lengths), length)
    tokens = np.where(begun < 0, ~begun, begun)
    pieces = int(((tokens >= BEGINS) & (tokens != BEGINS)).sum())
    assert pieces in (wanted := sum(max(1, -(-(each - 1) // (length - 1))) for each in lengths if each > 1), wanted - 1)
    # One less: token 0 that begins a document looks like what fills up.


def test_the_longest_first_each_where_it_leaves_least_free():
    rooms = [3, 5, 8, 2, 6]
    sequences = packed(numbered(rooms), 8)
    assert len(sequences) == 3  # 8; 6 and 2; 5 and 3
    assert (inputs_and_targets(sequences)[1] != IGNORED).sum() == sum(rooms) - len(rooms)


def test_what_does_not_count_in_a_conversation_stays_so():
    talk = np.array([5, ~6, ~7, 8, 9], np.int64)
    _, targets = inputs_and_targets(packed([talk, ~talk[:2]], 8))
    assert targets.tolist() == [[IGNORED, IGNORED, 8, 9, IGNORED, 6, IGNORED]] or sorted(
        targets[targets != IGNORED].tolist()
    ) == [6, 8, 9]


SECTION = ModelSection(layers=3, hidden_size=16, heads=4, kv_heads=2, mlp_size=24, context=12)


def build():
    model = LlamaStage(SECTION, LayerRange.of(SECTION))
    model.flat_N.copy_(initial_parameters(model.layout, SECTION, 1))
    return model


def test_positions_restart_and_nobody_sees_another_document():
    starts = torch.tensor([[True, False, False, True, False], [False, True, True, False, False]])
    assert positions_of(starts).tolist() == [[0, 1, 2, 0, 1], [0, 0, 0, 1, 2]]
    seen = seen_by(starts)[:, 0].int().tolist()
    assert seen[0] == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]


def test_packed_documents_give_the_logits_that_each_alone_gives():
    model = build()
    one, two = (
        torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(length)) for length in (5, 7)
    )
    starts = torch.zeros(1, 12, dtype=torch.bool)
    starts[0, [0, 5]] = True
    together = model.forward(torch.cat([one, two], 1), starts)
    assert torch.allclose(together[:, :5], model.forward(one), atol=1e-5)
    assert torch.allclose(together[:, 5:], model.forward(two), atol=1e-5)
    assert not torch.allclose(model.forward(torch.cat([one, two], 1))[:, 5:], model.forward(two), atol=1e-3)


def test_stages_tell_each_other_where_documents_begin():
    """Loss and gradient over two stages are those of the whole model, borders and all."""
    manifest = preset(
        "tiny", model=SECTION.model_dump(), stages={"count": 3, "activations": "fp32"}, inner={"micro_batch": 2},
        data={"source": "shards", "catalogue": "ab" * 32, "packing": "best-fit"},
    )  # fmt: skip
    documents = [np.random.default_rng(number).integers(0, 256, number).astype(np.int64) for number in (5, 8, 9, 4)]
    inputs, targets = inputs_and_targets(packed(documents, 13))
    assert inputs.shape == (2, 12)
    whole = build()
    tokens, starts = parted(inputs)
    assert starts is not None
    expected = train_on(whole, tokens, targets, starts_BT=starts)
    stages = []
    for number in range(3):
        stage = LlamaStage(SECTION, layers_of(manifest, number))
        stage.flat_N.copy_(initial_parameters(stage.layout, SECTION, 1))
        stages.append(stage)
    body = BodyFormat.of(manifest)
    passes = [Passes(body) for _ in stages]
    sent = passes[0].begin("a", stages[0], inputs, targets)
    assert body.why_not(sent, is_step=True) is None
    sent = passes[1].forward("a", stages[1], sent)
    assert body.why_not(sent, is_step=True) is None
    gradient, loss = passes[2].turn(stages[2], sent)
    assert loss == pytest.approx(expected, abs=1e-5)
    back = passes[1].backward("a", gradient)
    assert back is not None
    passes[0].backward("a", back)
    for stage in stages:
        for spec, start, stop in stage.layout.spans():
            (first, last) = next((a, b) for other, a, b in whole.layout.spans() if other.name == spec.name)
            assert torch.allclose(stage.flat_grad_N[start:stop], whole.flat_grad_N[first:last], atol=1e-5), spec.name


def test_shards_are_packed_with_little_left_free(tmp_path):
    rng = np.random.default_rng(3)
    lines = [json.dumps({"text": "word " * int(rng.lognormal(4, 1))}) for _ in range(1500)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    catalogue = make_shards(
        Order((tmp_path / "a.jsonl",), tmp_path / "out", None, "", "", shard_tokens=200_000, validation=0.1),
        refused=pytest.fail,
    )
    folders, row = ShardFolders(catalogue, [tmp_path / "out"]), UnitRow(catalogue, 1)

    def opened(shard):
        found = folders.find(shard)
        assert found is not None
        return found

    stretch = Stretch(0, 0, row.row.num_units)
    sequences = sequences_of(
        row.units(stretch), opened, context=512, seed=1, stretch=stretch, packing="best-fit"
    )  # fmt: skip
    _, targets = inputs_and_targets(sequences)
    documents = sum(shard.documents for shard in catalogue.train)
    tokens = sum(shard.tokens for shard in catalogue.train)
    assert int((targets != IGNORED).sum()) == tokens - documents
    free = 1 - tokens / sequences.size
    assert free < 0.02, f"{free:.1%} of the sequences is free"


def whole_stage(context):
    section = SECTION.model_copy(update={"context": context})
    model = LlamaStage(section, LayerRange.of(section))
    model.flat_N.copy_(initial_parameters(model.layout, section, 1))
    return Stage(model)


def alone(model, documents, context):
    """(loss, tokens) of documents one by one, without this project's packing: what `evaluate FOLDER` measures."""
    total, count = 0.0, 0
    for document in documents:
        for start in range(0, len(document) - 1, context):
            ids = torch.from_numpy(document[start : start + context + 1].astype(np.int64))
            loss, targets = loss_of(model, ids[None, :-1], ids[None, 1:])
            total, count = total + loss, count + targets
    return total / count, count


def test_a_held_out_loss_of_packed_documents_is_that_of_each_alone(tmp_path):
    """Windows through joined documents measured what nobody trains: what lies before a document, and its first token."""
    rng = np.random.default_rng(5)
    lines = [
        json.dumps({"text": "".join(chr(97 + each) for each in rng.integers(0, 26, rng.integers(1, 60)))})
        for _ in range(60)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    order = Order((tmp_path / "a.jsonl",), tmp_path / "out", None, "", "", shard_tokens=1024, validation=0.5)
    catalogue = make_shards(order, refused=pytest.fail)
    _, name = read_catalogue(tmp_path / "out")
    stage, folders, documents = whole_stage(24), ShardFolders(catalogue, [tmp_path / "out"]), []
    for shard in catalogue.held_out:
        found = folders.find(shard)
        assert found is not None
        documents += np.split(found.tokens(0, shard.tokens), found.starts(shard.tokens)[1:])
    expected, count = alone(stage.model, documents, 24)
    packed_ones = held_out_of([tmp_path / "out"], name, BYTE_TOKENIZER, packing="best-fit")
    loss, tokens = stage.evaluate(packed_ones.validation_batches(10**6, batch=4, context=24))
    assert tokens == count == sum(len(each) - 1 for each in documents)
    assert loss == pytest.approx(expected, abs=1e-5)
    joined = held_out_of([tmp_path / "out"], name, BYTE_TOKENIZER)
    assert stage.evaluate(joined.validation_batches(10**6, batch=4, context=24))[0] != pytest.approx(loss, abs=1e-3)
    some = [targets for _, targets in packed_ones.validation_batches(200, batch=4, context=24)]
    assert 100 < sum(int((each != IGNORED).sum()) for each in some) < 400


@given(LENGTHS, st.integers(1, 16))
def test_what_is_measured_is_cut_as_what_is_packed(lengths, context):
    tokens = np.arange(sum(lengths), dtype=np.int64)
    starts = np.cumsum([0, *lengths[:-1]])[np.array(lengths) > 0] if lengths else np.empty(0, np.int64)
    held = HeldOut(tokens, name="held", tokenizer=BYTE_TOKENIZER, starts=starts)
    if not any(length > 1 for length in lengths):
        with pytest.raises(ConfigError, match="no document that is held out has two bytes"):
            held.require_context(context)
        return
    (found,) = held.validation_batches(10**6, batch=10**6, context=context)
    expected = inputs_and_targets(packed(numbered(lengths), context + 1))
    for one, other in zip(found, expected, strict=True):
        assert sorted(map(tuple, one.tolist())) == sorted(map(tuple, other.tolist()))


@pytest.mark.parametrize("starts", [None, np.arange(0, 4096, 16)])
def test_answers_that_are_rare_are_measured_wherever_they_are(starts):
    """Windows without one came first, and `evaluate` ended with an AssertionError."""
    counts = np.zeros(4096, np.bool_)
    counts[[3003, 3004, 4000]] = True
    held = HeldOut(np.zeros(4096, np.uint8), name="talks", tokenizer=BYTE_TOKENIZER, counts=counts, starts=starts)
    _, tokens = whole_stage(16).evaluate(held.validation_batches(64, batch=2, context=16))
    assert tokens == (2 if starts is not None else 3)
    none = HeldOut(
        np.zeros(4096, np.uint8), name="talks", tokenizer=BYTE_TOKENIZER, counts=~np.ones(4096, np.bool_), starts=starts
    )
    with pytest.raises(ConfigError, match=r"talks: in all 4,096 tokens that are held out nothing is an answer"):
        none.require_context(16)
