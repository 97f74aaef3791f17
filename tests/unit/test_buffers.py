"""What a published model's modules keep beside its parameters is reckoned before a stage is claimed."""

import gc
import json

import pytest
import torch

from dilocox_peer.manifest import Manifest, PublishedSection, StagesSection
from dilocox_peer.model.architecture import LayerRange, build_model, layers_of
from dilocox_peer.model.memory import StageSize
from dilocox_peer.model.published import design_from, design_layout

pytest.importorskip("transformers")

LAYERS, CONTEXT = 4, 32


def gpt_neo(positions: int, stages: int) -> Manifest:
    """A run of a family whose layers keep a mask each, of positions by positions."""
    config_json = json.dumps(
        {"model_type": "gpt_neo", "num_layers": LAYERS, "num_heads": 2, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 300,
         "max_position_embeddings": positions, "window_size": 16, "attention_types": [[["global", "local"], LAYERS // 2]]}
    )  # fmt: skip
    design = design_from(config_json, num_stages=stages, context=CONTEXT)
    section = PublishedSection(
        source="made up", layers=LAYERS, hidden_size=16, context=CONTEXT, vocab_size=300, dtype="float32",
        layout=design_layout(design, LayerRange(0, LAYERS - 1, is_first_stage=True, is_last_stage=True)).digest().hex(),
        genesis=("0" * 64,) * stages, files=(), config=config_json,
    )  # fmt: skip
    return Manifest(model=section, stages=StagesSection(count=stages, blocks=(LAYERS // stages,) * stages))


def masks() -> int:
    """Bytes of all masks that there are."""
    gc.collect()
    found = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    return sum(each.numel() for each in found if each.dtype == torch.bool and each.device.type == "cpu")


@pytest.mark.parametrize("stages", [1, 2])
def test_masks_of_positions_by_positions_are_reckoned_as_the_stage_has_them(stages: int) -> None:
    """30,000 positions took 3.8 GB where 740 MB were told."""
    manifest = gpt_neo(512, stages)
    size, before = StageSize.of(manifest, 0), masks()
    versions = [build_model(manifest.model, layers_of(manifest, 0))]
    versions += [versions[0].version()] if stages > 1 else []
    assert masks() - before == size.buffer_bytes == LAYERS * 512 * 512


def test_where_there_is_no_room_for_the_masks_the_stage_does_not_fit() -> None:
    few, many = (StageSize.of(gpt_neo(positions, 1), 0) for positions in (64, 4096))
    one = 4096**2 - 64**2
    kept, made = LAYERS * one, 3 * one
    assert many.host_bytes() - few.host_bytes() >= kept + made
    assert many.device_bytes() - few.device_bytes() >= kept
    assert made <= many.host_bytes(on_cpu=False) - few.host_bytes(on_cpu=False) < kept + made, (
        "made in the machine, kept on the card"
    )
