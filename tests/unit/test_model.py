"""The transformer as a slice of layers over one flat vector."""

import math

import pytest
import torch
import torch.nn.functional as F

from dilocox_peer.manifest import ModelSection
from dilocox_peer.model.architecture import LayerRange
from dilocox_peer.model.stage_layout import stage_layout
from dilocox_peer.model.transformer import LlamaStage, initial_parameters

SECTION = ModelSection(layers=3, hidden_size=16, heads=4, kv_heads=2, mlp_size=24, context=12)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(first=0, last=None, seed=1):
    model = LlamaStage(SECTION, LayerRange.of(SECTION, first_layer=first, last_layer=last))
    model.flat_N.copy_(initial_parameters(model.layout, SECTION, seed))
    return model


def tokens(seed=0, batch=2, length=12):
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


def parameters(model):
    return {spec.name: model.flat_N[start:stop].view(spec.shape) for spec, start, stop in model.layout.spans()}


def reference_logits(weights, x):
    """The same transformer, written plainly: per head, complex rotation, explicit softmax."""
    head_size = SECTION.hidden_size // SECTION.heads
    half = head_size // 2
    angle = torch.arange(x.shape[1])[:, None] / SECTION.rope_theta ** (torch.arange(half) * 2 / head_size)
    turn = torch.polar(torch.ones_like(angle), angle)

    def norm(h, weight):
        return h / (h.square().mean(-1, keepdim=True) + SECTION.norm_eps).sqrt() * weight

    def rotate(h):
        turned = torch.complex(h[..., :half].contiguous(), h[..., half:].contiguous()) * turn
        return torch.cat((turned.real, turned.imag), -1)

    hidden = weights["model.embed_tokens.weight"][x]
    mask = torch.full((x.shape[1], x.shape[1]), -math.inf).triu(1)
    for index in range(SECTION.layers):
        p = f"model.layers.{index}."
        h = norm(hidden, weights[p + "input_layernorm.weight"])
        q, k, v = (h @ weights[f"{p}self_attn.{part}_proj.weight"].T for part in "qkv")
        heads = []
        for head in range(SECTION.heads):
            group = head // (SECTION.heads // SECTION.kv_heads)
            take = slice(head * head_size, (head + 1) * head_size)
            shared = slice(group * head_size, (group + 1) * head_size)
            scores = rotate(q[..., take]) @ rotate(k[..., shared]).mT / math.sqrt(head_size) + mask
            heads.append(scores.softmax(-1) @ v[..., shared])
        hidden = hidden + torch.cat(heads, -1) @ weights[p + "self_attn.o_proj.weight"].T
        h = norm(hidden, weights[p + "post_attention_layernorm.weight"])
        gate, up = h @ weights[p + "mlp.gate_proj.weight"].T, h @ weights[p + "mlp.up_proj.weight"].T
        hidden = hidden + (gate * gate.sigmoid() * up) @ weights[p + "mlp.down_proj.weight"].T
    return norm(hidden, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def test_it_computes_what_the_plain_form_does():
    model = build()
    assert torch.allclose(model.forward(tokens()), reference_logits(parameters(model), tokens()), atol=1e-5)


def test_gradients_land_in_the_flat_vector_and_are_those_of_the_plain_form():
    model = build()
    weights = {name: value.clone().requires_grad_() for name, value in parameters(model).items()}
    torch.autograd.backward(F.cross_entropy(model.forward(tokens()).flatten(0, 1), tokens(1).flatten()))
    torch.autograd.backward(F.cross_entropy(reference_logits(weights, tokens()).flatten(0, 1), tokens(1).flatten()))
    expected = torch.cat([weights[spec.name].grad.flatten() for spec in model.layout.tensors])
    assert torch.allclose(model.flat_grad_N, expected, atol=1e-6)


def test_any_split_of_the_layers_is_the_same_model():
    whole, first, second = build(), build(0, 0), build(1, 2)
    with torch.no_grad():
        assert torch.equal(second.forward(first.forward(tokens())), whole.forward(tokens()))
    pieces = parameters(first) | parameters(second)
    assert pieces.keys() == parameters(whole).keys()
    assert all(torch.equal(pieces[name], value) for name, value in parameters(whole).items())


def test_a_stage_owns_nothing_but_its_layers():
    middle = stage_layout(SECTION, LayerRange.of(SECTION, first_layer=1, last_layer=1))
    assert {spec.name.split(".")[2] for spec in middle.tensors} == {"1"}


def test_initial_values_are_these_bits_on_every_machine():
    layout = stage_layout(SECTION, LayerRange.of(SECTION))
    flat = initial_parameters(layout, SECTION, 1)
    assert flat[:3].numpy().tobytes().hex() == "6f132ebf4f9938bfbc5435bf"
    assert torch.equal(flat, initial_parameters(layout, SECTION, 1))
    assert not torch.equal(flat, initial_parameters(layout, SECTION, 2))


def test_an_untrained_model_knows_nothing():
    loss = F.cross_entropy(build().forward(tokens()).flatten(0, 1), tokens(1).flatten())
    assert float(loss.detach()) == pytest.approx(math.log(256), abs=0.05)


def test_no_token_sees_a_later_one():
    changed = tokens()
    changed[:, 7] += 1
    changed %= 256
    model = build()
    with torch.no_grad():
        before, after = model.forward(tokens()), model.forward(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


def test_sequences_may_be_shorter_than_the_context():
    model = build()
    with torch.no_grad():
        assert torch.allclose(model.forward(tokens()[:, :5]), model.forward(tokens())[:, :5], atol=1e-5)


def test_changing_parameters_between_forward_and_backward_is_an_error():
    model = build()
    loss = model.forward(tokens()).sum()
    model.flat_N.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(loss)


def test_matrices_come_before_vectors():
    layout = stage_layout(SECTION, LayerRange.of(SECTION))
    dimensions = [len(spec.shape) for spec in layout.tensors]
    assert dimensions == sorted(dimensions, reverse=True)
    assert layout.num_matrix_elements == layout.num_elements - 7 * SECTION.hidden_size


def test_layers_outside_the_model_are_refused():
    with pytest.raises(ValueError, match=r"layers 1\.\.3 of a model with 3"):
        LayerRange.of(SECTION, first_layer=1, last_layer=3)
