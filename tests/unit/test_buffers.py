"""What a published model's modules keep beside its parameters is reckoned before a stage is claimed."""

import gc

import pytest
import torch

from dilocox_peer.model.architecture import build_model, layers_of
from dilocox_peer.model.memory import StageSize
from tests.tiny_models import gpt_neo

pytest.importorskip("transformers")

LAYERS = 4


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
    few, many = (StageSize.of(gpt_neo(positions), 0) for positions in (64, 4096))
    one = 4096**2 - 64**2
    kept, made = LAYERS * one, 3 * one
    assert many.host_bytes() - few.host_bytes() >= kept + made
    assert many.device_bytes() - few.device_bytes() >= kept
    assert made <= many.host_bytes(on_cpu=False) - few.host_bytes(on_cpu=False) < kept + made, (
        "made in the machine, kept on the card"
    )
