"""Stages of published models: cut is whole, of the tensors of a stage alone, in the library's own terms."""

import itertools
import json

import pytest
import torch
from torch.nn.functional import cross_entropy

from dilocox_peer.errors import ConfigError
from dilocox_peer.manifest import InnerSection, ModelSection
from dilocox_peer.model.activations import BodyFormat
from dilocox_peer.model.architecture import LayerRange, build_model
from dilocox_peer.model.families import build_empty, check_cut, config_from, family_of, sees_across
from dilocox_peer.model.inner import InnerOptimizer
from dilocox_peer.model.loss import train_on
from dilocox_peer.model.passes import Passes
from dilocox_peer.model.precision import AutocastStage
from dilocox_peer.model.published import PublishedStage, costs_of_design, design_from, design_layout
from dilocox_peer.model.transformer import initial_parameters
from dilocox_peer.model.weights import open_folder
from tests.tiny_models import FAMILIES, tiny_json, tiny_model, write_folder

pytest.importorskip("transformers")

SEE_ACROSS = {"bloom", "falcon", "gpt_oss", "opt"}  # their masks do not follow from positions
FAST = ("llama", "gpt2", "qwen3_moe")
families = pytest.mark.parametrize(
    "family", [*FAST, *(pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES if each not in FAST)]
)
TOKENS, BATCH, STEPS = 16, 2, 5


def stages_of(config_json: str, count: int, tensors) -> list[PublishedStage]:
    """The model with these tensors, cut into `count` stages of about equally many layers."""
    design = design_from(config_json, num_stages=count, context=TOKENS)
    layers, stages = design.config.num_hidden_layers, []
    bounds = [layers * index // count for index in range(count + 1)]
    for first, stop in itertools.pairwise(bounds):
        stage = PublishedStage(design, LayerRange(first, stop - 1, first == 0, stop == layers))
        with torch.no_grad():
            stage.flat_N.copy_(torch.cat([tensors[spec.name].flatten() for spec in stage.layout.tensors]))
        stages.append(stage)
    return stages


def batches(vocab_size: int, count: int):
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        ids = torch.randint(0, vocab_size, (BATCH, TOKENS + 1), generator=generator)
        yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


@families
def test_two_stages_train_like_the_whole(family: str):
    config_json = tiny_json(family)
    check_cut(config_json)
    model = tiny_model(config_json)
    whole = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    first, last = stages_of(config_json, 2, dict(model.named_parameters()))
    inner = InnerSection(learning_rate=1e-3, weight_decay=0.0, clip_norm=1e9)
    optimizers = [InnerOptimizer(stage, inner) for stage in (first, last)]
    passes = [
        Passes(BodyFormat("fp32", BATCH, TOKENS, model.config.hidden_size, model.config.vocab_size)) for _ in "ab"
    ]
    for inputs_BT, targets_BT in batches(model.config.vocab_size, STEPS):
        whole.zero_grad()
        expected = cross_entropy(model(input_ids=inputs_BT, use_cache=False).logits.flatten(0, 1), targets_BT.flatten())
        torch.autograd.backward(expected)
        whole.step()
        body = passes[0].begin("a", first, inputs_BT, targets_BT)
        gradient, loss = passes[1].turn(last, body)
        passes[0].backward("a", gradient)
        for optimizer in optimizers:
            optimizer.step(micro_batches=1, share=1.0)
        assert loss == pytest.approx(float(expected.detach()), abs=1e-4)


@families
def test_a_stage_reads_its_own_tensors_from_the_published_files(family: str, tmp_path):
    config_json = tiny_json(family)
    model = write_folder(tmp_path, config_json)
    folder = open_folder(tmp_path)
    design = design_from(folder.config_json, num_stages=2, context=TOKENS)
    parameters, bytes_read = dict(model.named_parameters()), []
    for first, last in ((0, 1), (2, 3)):
        layout = design_layout(design, LayerRange(first, last, first == 0, last == 3))
        before = folder.bytes_read
        flat_N = folder.stage_parameters(design, layout)
        bytes_read.append(folder.bytes_read - before)
        assert bytes_read[-1] == 4 * layout.num_elements
        for spec, start, stop in layout.spans():
            assert torch.equal(flat_N[start:stop].view(spec.shape), parameters[spec.name]), spec.name
    assert sum(bytes_read) == 4 * sum(parameter.numel() for parameter in parameters.values())
    assert folder.unused(design) == []


def test_tied_ends_are_one_matrix_on_one_stage_and_begin_equal_on_two(tmp_path):
    config_json = tiny_json("llama", tie_word_embeddings=True)
    model = write_folder(tmp_path, config_json)
    folder = open_folder(tmp_path)
    (whole,) = stages_of(config_json, 1, dict(model.named_parameters()))
    assert "lm_head.weight" not in {spec.name for spec in whole.layout.tensors}
    inputs_BT, targets_BT = next(batches(model.config.vocab_size, 1))
    loss = train_on(whole, inputs_BT, targets_BT)
    expected = cross_entropy(model(input_ids=inputs_BT).logits.flatten(0, 1), targets_BT.flatten())
    torch.autograd.backward(expected)
    assert loss == pytest.approx(float(expected.detach()), abs=1e-6)
    spec, start, stop = whole.layout.spans()[0]
    assert spec.role == "embedding"
    assert torch.allclose(whole.flat_grad_N[start:stop].view(spec.shape), model.lm_head.weight.grad, atol=1e-6)

    design = design_from(config_json, num_stages=2, context=TOKENS)
    last = design_layout(design, LayerRange(2, 3, is_first_stage=False, is_last_stage=True))
    flat_N = folder.stage_parameters(design, last)
    head = next(
        flat_N[start:stop].view(spec.shape) for spec, start, stop in last.spans() if spec.name == "lm_head.weight"
    )
    assert torch.equal(head, model.model.embed_tokens.weight)


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # the second caps its logits behind the head
def test_a_loss_in_parts_is_the_loss(family: str):
    config_json = tiny_json(family)
    model = tiny_model(config_json)
    inputs_BT, targets_BT = next(batches(model.config.vocab_size, 1))
    targets_BT[0, :5] = -100
    at_once, in_parts = (stages_of(config_json, 1, dict(model.named_parameters()))[0] for _ in "ab")
    expected = train_on(at_once, inputs_BT, targets_BT)
    loss = train_on(in_parts, inputs_BT, targets_BT, logits_bytes=4 * 7 * model.config.vocab_size)
    assert loss == pytest.approx(expected, abs=1e-6)
    assert torch.allclose(in_parts.flat_grad_N, at_once.flat_grad_N, atol=1e-6)


def test_versions_share_their_gradient_and_a_change_under_a_forward_is_refused():
    config_json = tiny_json("llama")
    (stage,) = stages_of(config_json, 1, dict(tiny_model(config_json).named_parameters()))
    other = stage.version()
    other.load(stage.layout, stage.flat_N)
    inputs_BT, targets_BT = next(batches(96, 1))
    train_on(stage, inputs_BT, targets_BT)
    once = stage.flat_grad_N.clone()
    train_on(other, inputs_BT, targets_BT)
    assert torch.allclose(stage.flat_grad_N, 2 * once, atol=1e-7)
    logits = stage.forward(inputs_BT)
    stage.flat_N.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(logits.sum())


def test_experts_are_trained_by_both_optimizers():
    config_json = tiny_json("qwen3_moe")
    for name in ("adamw", "muon"):
        (stage,) = stages_of(config_json, 1, dict(tiny_model(config_json).named_parameters()))
        before = stage.flat_N.clone()
        optimizer = InnerOptimizer(stage, InnerSection(optimizer=name, learning_rate=1e-2))
        for inputs_BT, targets_BT in batches(96, 3):
            train_on(stage, inputs_BT, targets_BT)
            optimizer.step(micro_batches=1, share=1.0)
        for spec, start, stop in stage.layout.spans():
            assert not torch.equal(stage.flat_N[start:stop], before[start:stop]), (name, spec.name)
        assert any(len(spec.shape) == 3 for spec in stage.layout.tensors)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"model_type": "no_such"}, "'no_such' is not known to transformers"),
        ({"model_type": "t5"}, "no causal language model"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, "quantized"),
        (
            {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
            "LlamaForSequenceClassification",
        ),
        ({"model_type": "llama", "hidden_size": "wide"}, "config.json"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(config, complaint):
    with pytest.raises(ConfigError, match=complaint):
        check_cut(json.dumps(config))


@pytest.mark.parametrize("odd", [{"pad_token_id": 1_000_000}, {"num_attention_heads": -1}, {"vocab_size": -1}])
def test_sizes_that_make_no_model_are_told_in_one_line(odd):
    """An AssertionError or a RuntimeError of the library's ended a join."""
    text = json.dumps({**json.loads(tiny_json("llama")), **odd})
    with pytest.raises(
        ConfigError, match=r"llama: the model cannot be built.*take the file as it was published"
    ) as told:
        build_empty(config_from(text))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("odd", "complaint"),
    [
        ({"architectures": 5}, "those of a '5', not of a LlamaForCausalLM"),
        ({"architectures": {"a": 1}}, "not of a LlamaForCausalLM"),
        ({"rope_parameters": {"partial_rotary_factor": "x"}}, "llama cannot be cut"),
    ],
)
def test_words_in_place_of_lists_and_numbers_are_told_in_one_line(odd, complaint):
    with pytest.raises(ConfigError, match=complaint) as told:
        design_from(json.dumps({**json.loads(tiny_json("llama")), **odd}), num_stages=1, context=TOKENS)
    assert "\n" not in str(told.value)


def test_what_a_family_does_not_use_may_be_anything():
    text = tiny_json("llama")
    odd = json.dumps({**json.loads(text), "num_experts_per_tok": "x", "moe_intermediate_size": [1]})
    costs, same = (costs_of_design(design_from(each, num_stages=1, context=TOKENS)) for each in (text, odd))
    assert costs == same


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bamba", "rwkv", "zamba2", "deepseek_v3"])
def test_a_family_that_cannot_be_cut_is_refused_by_name(family: str):
    from dilocox_peer.model.families import library

    config = library().models.auto.configuration_auto.CONFIG_MAPPING[family]()
    with pytest.raises(ConfigError, match=family):
        check_cut(config.to_json_string(use_diff=False))


def test_a_config_chooses_no_code_of_the_library_and_no_endless_number_of_layers():
    for extra in ({"_experts_implementation": "deepgemm"}, {"attn_implementation": "someone/kernels"}):
        text = json.dumps({**json.loads(tiny_json("llama")), **extra})
        config = design_from(text, num_stages=1, context=8).config
        assert not set(extra.values()) & {value for value in vars(config).values() if isinstance(value, str)}
    text = json.dumps({**json.loads(tiny_json("llama")), "num_hidden_layers": 10**9})
    with pytest.raises(ConfigError, match="num_hidden_layers is 1000000000; 1 to 1024 are taken"):
        design_from(text, num_stages=1, context=8)
    inside = json.dumps({**json.loads(tiny_json("llama")), "text_config": {"num_hidden_layers": 10**9}})
    with pytest.raises(ConfigError, match="num_hidden_layers is 1000000000; 1 to 1024 are taken"):
        design_from(inside, num_stages=1, context=TOKENS)


def test_no_names_of_labels_are_made_that_no_language_model_has():
    """20 characters of a manifest took all memory."""
    values = {**json.loads(tiny_json("llama")), "num_labels": 1000}
    values.pop("id2label", None)
    assert len(config_from(json.dumps(values)).id2label) == 2


def test_code_in_a_folder_is_never_run():
    config = json.loads(tiny_json("llama"))
    config["auto_map"] = {"AutoModelForCausalLM": "evil--modeling.Evil", "AutoConfig": "evil.Config"}
    assert family_of(json.dumps(config)).class_name == "LlamaForCausalLM"


@families
def test_checkpointing_changes_no_bit(family: str):
    config_json = tiny_json(family)
    tensors = dict(tiny_model(config_json).named_parameters())
    (plain,) = stages_of(config_json, 1, tensors)
    saving = PublishedStage(design_from(config_json, num_stages=1, context=TOKENS), plain.layers, checkpointing=True)
    saving.load(plain.layout, plain.flat_N)
    inputs_BT, targets_BT = next(batches(plain.vocab_size, 1))
    starts_BT = torch.zeros_like(inputs_BT, dtype=torch.bool)
    starts_BT[:, [0, TOKENS // 3]] = True
    for starts in (None, *(() if family in SEE_ACROSS else (starts_BT,))):
        losses = [train_on(each, inputs_BT, targets_BT, starts_BT=starts) for each in (saving, plain)]
        assert losses[0] == losses[1]
        assert torch.equal(saving.flat_grad_N, plain.flat_grad_N)


def test_checkpointing_of_our_own_layers_changes_no_bit():
    section = ModelSection(layers=3, hidden_size=32, heads=4, kv_heads=2, mlp_size=48, context=TOKENS)
    models = [build_model(section, checkpointing=saves) for saves in (False, True)]
    inputs_BT, targets_BT = next(batches(256, 1))
    losses = []
    for model in models:
        model.flat_N.copy_(initial_parameters(model.layout, section, 3))
        losses.append(train_on(model, inputs_BT, targets_BT))
    assert losses[0] == losses[1]
    assert torch.equal(models[0].flat_grad_N, models[1].flat_grad_N)


def kept_bytes(model, x) -> int:
    """Between a forward and its backward."""
    model.hidden(x)  # the first makes what stays
    with torch.profiler.profile(profile_memory=True) as profiler:
        hidden_BTD = model.hidden(x)
    found = int(sum(each.self_cpu_memory_usage for each in profiler.key_averages()))
    assert found >= hidden_BTD.nbytes
    return found


def test_with_checkpointing_a_whole_model_keeps_a_layers_width_for_each_layer_and_little_more():
    """Neither the embedding's output nor what the last norm is made of."""
    section = ModelSection(layers=4, hidden_size=32, heads=4, kv_heads=2, mlp_size=48, context=TOKENS)
    tokens_BT = torch.zeros(2, TOKENS, dtype=torch.long)
    width_bytes = tokens_BT.numel() * 32 * 4
    assert kept_bytes(build_model(section, checkpointing=True), tokens_BT) == 4 * width_bytes
    design = design_from(tiny_json("llama"), num_stages=1, context=TOKENS)
    assert design.config.num_hidden_layers == 4
    layers = LayerRange(0, 3, is_first_stage=True, is_last_stage=True)
    published = kept_bytes(PublishedStage(design, layers, checkpointing=True), tokens_BT)
    positions = 2 * TOKENS * design.config.head_dim * 4  # sines and cosines
    assert published <= 5 * width_bytes + positions + 1000


def kept_masks(model, starts_BT) -> int:
    """How many vectors as large as a mask a forward keeps for its backward."""
    found = {}

    def pack(tensor):
        if tuple(tensor.shape[-2:]) == (TOKENS, TOKENS):
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.forward(next(batches(model.vocab_size, 1))[0], starts_BT)
    return len(found)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_packed_documents_see_is_kept_once_for_all_layers(precision: str):
    section = ModelSection(layers=3, hidden_size=32, heads=4, kv_heads=2, mlp_size=48, context=TOKENS)
    design = design_from(tiny_json("llama"), num_stages=1, context=TOKENS)
    published = PublishedStage(design, LayerRange(0, design.config.num_hidden_layers - 1, True, True))
    for model in (build_model(section), published):
        halved = model if precision == "float32" else AutocastStage(model, precision)
        starts_BT = torch.zeros_like(next(batches(256, 1))[0], dtype=torch.bool)
        starts_BT[:, [0, 3]] = True
        assert kept_masks(halved, None) == 0
        assert kept_masks(halved, starts_BT) == 1


@families
def test_packed_documents_see_nothing_of_each_other_but_where_it_is_said(family: str):
    """Over two stages: the logits of a document are those that it has alone."""
    assert sees_across(tiny_json(family)) == (family in SEE_ACROSS)
