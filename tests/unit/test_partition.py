"""How a model is cut into stages."""

import itertools

import pytest

from dilocox_peer.config import PRESETS, preset
from dilocox_peer.errors import ConfigError
from dilocox_peer.manifest import ModelSection
from dilocox_peer.model.architecture import LayerRange, layers_of, layout_of, stage_layout_of
from dilocox_peer.model.partition import (
    Costs,
    choose_cut,
    cut_into,
    cut_of,
    idle_warning,
    usual_window,
    with_cut,
)
from dilocox_peer.model.stage_layout import stage_layout


def every_cut(layers: int, count: int):
    for ends in itertools.combinations(range(1, layers), count - 1):
        bounds = (0, *ends, layers)
        yield tuple(stop - start for start, stop in itertools.pairwise(bounds))


def busiest(model: ModelSection, cut: tuple[int, ...]) -> int:
    costs = Costs.of(model)
    return max(
        *(blocks * costs.block_compute for blocks in cut[:-1]), cut[-1] * costs.block_compute + costs.head_compute
    )


@pytest.mark.parametrize("layers", [2, 3, 5, 8, 11])
@pytest.mark.parametrize("vocab_size", [256, 4096, 65536])
def test_no_cut_has_a_less_busy_stage(layers: int, vocab_size: int):
    model = ModelSection(layers=layers, vocab_size=vocab_size)
    for count in range(2, min(layers, 5) + 1):
        chosen = choose_cut(Costs.of(model), count)
        assert sum(chosen) == layers
        assert min(chosen) >= 1
        assert busiest(model, chosen) == min(busiest(model, cut) for cut in every_cut(layers, count))


def test_a_large_vocabulary_takes_blocks_from_the_last_stage():
    assert choose_cut(Costs.of(ModelSection(layers=8, vocab_size=65536)), 2)[1] < 4


def test_a_stage_without_a_block_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        choose_cut(Costs.of(ModelSection(layers=2)), 3)


def test_parameters_of_a_block_are_those_of_its_tensors():
    section = ModelSection(layers=3)
    middle = stage_layout(section, LayerRange.of(section, first_layer=1, last_layer=1))
    assert middle.num_elements == Costs.of(section).block


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("count", [1, 2])
def test_the_stages_hold_every_tensor_once(name: str, count: int):
    manifest = with_cut(preset(name, stages={"count": count}))
    whole = stage_layout_of(manifest.model, LayerRange.of(manifest.model))
    parts = [spec for stage in range(count) for spec in layout_of(manifest, stage).tensors]
    assert sorted(parts, key=lambda spec: spec.name) == sorted(whole.tensors, key=lambda spec: spec.name)


def test_the_manifest_has_the_last_word():
    manifest = preset("small", stages={"count": 2, "blocks": (1, 5)})
    assert cut_of(manifest) == (1, 5)
    assert layers_of(manifest, 1).first == 1


@pytest.mark.parametrize("blocks", [(3,), (3, 4), (6, 0), (1, 1, 4)])
def test_a_cut_that_does_not_fit_the_model_is_refused(blocks: tuple[int, ...]):
    with pytest.raises(ConfigError, match="blocks"):
        preset("small", stages={"count": 2, "blocks": blocks})


def test_a_run_that_is_cut_keeps_its_stages_busy():
    cut = cut_into(preset("small"), 3)
    assert cut.stages.blocks == cut_of(cut)
    assert len(cut.stages.blocks) == 3
    assert cut.inner.accumulate == usual_window(3)
    assert cut.inner.micro_batch == preset("small").inner.micro_batch // 2
    assert idle_warning(cut) is None


def test_a_run_with_enough_micro_batches_keeps_its_own_numbers():
    manifest = preset("small", inner={"accumulate": 64, "micro_batch": 3})
    assert cut_into(manifest, 2).inner == manifest.inner
    assert cut_into(preset("small"), 1).inner == preset("small").inner


def test_the_owner_is_told_of_stages_that_would_wait():
    assert "inner.accumulate 1" in str(idle_warning(preset("small", stages={"count": 2})))
    assert idle_warning(preset("small")) is None
