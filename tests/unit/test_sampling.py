"""Text from a model: reproducible, within its context, and whole characters."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.cli.generate import prompt_ids
from dilocox_peer.cli.sampling_of_run import EVERY_S, REST, TOKENS, RunSampler, harmless
from dilocox_peer.data.tokenizer import BYTE_TOKENIZER
from dilocox_peer.manifest import ModelSection
from dilocox_peer.model.architecture import LayerRange
from dilocox_peer.model.sampling import Sampling, choose, continuation
from dilocox_peer.model.transformer import LlamaStage, initial_parameters

SECTION = ModelSection(layers=1, hidden_size=16, heads=2, kv_heads=1, mlp_size=16, context=8, vocab_size=300)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model():
    model = LlamaStage(SECTION, LayerRange.of(SECTION))
    with torch.no_grad():
        model.flat_N.copy_(20 * initial_parameters(model.layout, SECTION, 3))
    return model


def text(model, prompt=b"abc", *, num_bytes=30, seed=0, **sampling):
    drawn = continuation(model, prompt, Sampling(**sampling), num_tokens=num_bytes, num_ids=256, seed=seed)
    return bytes(drawn)


def test_equal_seeds_give_equal_bytes_and_others_do_not(model):
    assert text(model, seed=1) == text(model, seed=1) != text(model, seed=2)


def test_only_the_last_context_counts(model):
    assert text(model, b"x" * 100 + b"12345678") == text(model, b"12345678")


def test_no_forward_is_longer_than_the_context(model, monkeypatch):
    lengths = []
    forward = model.forward

    def watched(x):
        lengths.append(x.shape[1])
        return forward(x)

    monkeypatch.setattr(model, "forward", watched)
    text(model, b"abcdef", num_bytes=6)
    assert lengths == [6, 7, 8, 8, 8, 8]


def test_an_empty_prompt_of_bytes_is_a_new_line(model):
    assert prompt_ids(BYTE_TOKENIZER, b"") == [ord("\n")]
    assert prompt_ids(BYTE_TOKENIZER, b"ab") == list(b"ab")
    assert text(model, num_bytes=0) == b""


def test_a_text_ends_where_its_last_token_is_drawn(model):
    drawn = text(model, num_bytes=200)
    ended = continuation(model, b"abc", Sampling(), num_tokens=200, num_ids=256, seed=0, last=drawn[20])
    assert bytes(ended) == drawn[: drawn.index(drawn[20])]


def test_temperature_0_and_top_1_take_the_likeliest(model):
    greedy = text(model, temperature=0.0)
    assert greedy == text(model, temperature=0.0, seed=9) == text(model, temperature=5.0, top_k=1)


@pytest.mark.parametrize("temperature", [1e-3, 1e-40, 1e-300, 5e-324])
@pytest.mark.parametrize("top_k", [0, 2, 40])
def test_a_temperature_near_0_takes_the_likeliest(model, temperature, top_k):
    assert text(model, temperature=temperature, top_k=top_k) == text(model, temperature=0.0)


def test_the_highest_temperature_makes_all_alike():
    logits_V = torch.tensor([3e38, -3e38, 0.0])
    generator = torch.Generator().manual_seed(0)
    drawn = [choose(logits_V, Sampling(1e308, 0), generator) for _ in range(100)]
    assert set(drawn) == {0, 1, 2}


def test_ids_that_the_tokenizer_has_not_are_never_drawn(model):
    assert len(set(text(model, num_bytes=300, temperature=50.0, top_k=0))) > 150  # any of 256, or bytes() raises


def test_top_k_draws_among_the_k_likeliest_in_their_shares():
    logits_V = torch.full((256,), -5.0)
    logits_V[[10, 20, 30]] = torch.tensor([2.0, 1.0, 0.0])
    generator = torch.Generator().manual_seed(0)
    drawn = [choose(logits_V, Sampling(1.0, 2), generator) for _ in range(4000)]
    assert set(drawn) == {10, 20}
    assert drawn.count(10) / len(drawn) == pytest.approx(1 / (1 + math.exp(-1)), abs=0.03)


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -1}])
def test_nonsense_is_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Sampling(**bad)


@given(st.text())
def test_characters_come_whole_and_unharmed(written):
    pieces = list(BYTE_TOKENIZER.text_of(iter(written.encode())))
    assert "".join(pieces) == written
    assert all(pieces)


@given(st.binary())
def test_any_bytes_become_text(raw):
    assert "".join(BYTE_TOKENIZER.text_of(iter(raw))) == raw.decode(errors="replace")


def test_a_character_cut_off_by_the_end_is_replaced_there_only():
    whole = "aé".encode()
    assert list(BYTE_TOKENIZER.text_of(iter(whole[:-1]))) == ["a", "�"]
    assert list(BYTE_TOKENIZER.text_of(iter(whole))) == ["a", "é"]


def test_a_model_cannot_steer_the_terminal():
    assert harmless("a\x1b[2Jb\x07\r\n\té") == "a�[2Jb��\n\té"


def test_text_of_a_run_is_drawn_now_and_then_and_no_longer_than_allowed(model):
    now = 0.0
    sampler = RunSampler(BYTE_TOKENIZER, clock=lambda: now)
    batch = torch.tensor([[~ord("a"), *b"bc def "]]), torch.zeros(1, 8)
    first = sampler.sample(model, [batch], 7)
    assert first is not None
    assert (first.round, first.prompt) == (7, "abc def ")
    assert 0 < len(first.text) <= TOKENS
    assert first == sampler.sample(model, [batch], 7), "what differs from round to round is the model"
    assert not sampler.is_due()
    now += EVERY_S
    assert sampler.is_due()
    assert sampler.sample(model, [], 7) is None

    def slow() -> float:
        nonlocal now
        now += 1.0
        return now

    slower = RunSampler(BYTE_TOKENIZER, clock=slow)
    cut = slower.sample(model, [batch], 7)
    assert cut is not None
    assert len(cut.text) < TOKENS / 2, "as far as it came"
    began = now
    while not slower.is_due():
        pass
    assert now - began > REST * 15
