"""How much memory a stage takes, and what is said when there is no room for it."""

from typing import Any

import pytest

from dilocox_peer.compression.ladder import LADDER, LOW_RANK
from dilocox_peer.compression.names import codec_names
from dilocox_peer.compression.sizes import blob_limits
from dilocox_peer.config import preset
from dilocox_peer.model.architecture import layout_of
from dilocox_peer.model.memory import BASE_BYTES, CARD_BASE_BYTES, READ_ELEMENTS, Room, StageSize
from dilocox_peer.model.partition import cut_into

GB = 10**9
NEEDS = [4 * GB, 2 * GB, 4 * GB]


def size_of(**changes) -> StageSize:
    values: dict[str, Any] = {
        "parameters": 1_000_000, "largest": 0, "layers": 10, "in_flight": 3, "layer_bytes": 7_000, "input_bytes": 500,
        "logits_bytes": 0, "is_alone": True, "base_bytes": BASE_BYTES,
    }  # fmt: skip
    return StageSize(**{**values, **changes})


def test_a_stage_takes_what_the_table_says():
    large, read = {"layer_bytes": 0, "parameters": 100_000_000}, 8 * READ_ELEMENTS
    assert size_of(**large).host_bytes() == BASE_BYTES + 2_500_000_000 + read
    assert size_of(**large, is_alone=False).host_bytes() == BASE_BYTES + 2_900_000_000 + read
    assert size_of(**large, largest=1_000).host_bytes() == BASE_BYTES + 2_500_016_000 + read + 8_000
    beyond = (8 << 20) + 1
    assert size_of(**large, largest=beyond).host_bytes() == BASE_BYTES + 2_500_000_000 + read + 16 * beyond


def test_a_small_state_is_read_whole_and_the_heap_keeps_two_of_its_vectors():
    assert size_of(layer_bytes=0).host_bytes() == BASE_BYTES + (25 + 8 + 8) * 1_000_000
    kept, given_back = (size_of(layer_bytes=0, parameters=count).host_bytes() for count in (8 << 20, (8 << 20) + 1))
    assert kept - given_back == 8 * (8 << 20) - 25, (
        "a vector beyond 32 MiB goes back at once; the state is read a part at a time"
    )


def test_half_precision_takes_what_the_table_says():
    halved = cut_into(preset("tiny", inner={"moments": "bfloat16"}, compression={"residual": "bfloat16"}), 2)
    plain = cut_into(preset("tiny"), 2)
    for stage in range(2):
        less, more = (StageSize.of(each, stage) for each in (halved, plain))
        assert more.host_bytes() - less.host_bytes() == 6 * more.parameters
        assert more.device_bytes() - less.device_bytes() == 4 * more.parameters


@pytest.mark.parametrize("codec", [*LADDER, LOW_RANK])
def test_a_contribution_takes_twice_its_bytes_and_those_that_are_leaner_than_int4_what_it_takes(codec):
    manifest = preset("small", compression={"codec": codec})
    stage, layout = StageSize.of(manifest, 0), layout_of(manifest)
    _, most = blob_limits(layout, codec_names(codec, rank=64))
    assert stage.contribution_bytes >= 0.96 * 2 * most / layout.num_elements
    assert stage.contribution_bytes in {1, round(2 * most / layout.num_elements)}
    plain = StageSize.of(preset("small", compression={"codec": "int4"}), 0)
    assert stage.host_bytes() - plain.host_bytes() == (stage.contribution_bytes - 1) * stage.parameters


@pytest.mark.parametrize("slices", [4, 64])
def test_a_slice_that_is_longer_than_every_tensor_takes_room_while_it_is_averaged(slices):
    plain, sliced = (
        StageSize.of(preset("small", rounds={"averaging": mode, "slices": slices}), 0)
        for mode in ("all-to-all", "slices")
    )
    longer = max(0, -(-plain.parameters // slices) - plain.largest)
    assert (longer > 0) == (slices == 4)
    assert sliced.host_bytes() - plain.host_bytes() == (4 + 2) * 4 * longer, (
        "four of it, and what the heap keeps of them"
    )


def test_packed_documents_take_a_mask_in_every_forward():
    packed = {"source": "shards", "catalogue": "ab" * 32, "packing": "best-fit"}
    manifest = preset("tiny", data=packed)
    size, plain = StageSize.of(manifest, 0), StageSize.of(preset("tiny"), 0)
    rows, tokens = manifest.inner.micro_batch, manifest.model.context
    assert size.host_bytes() - plain.host_bytes() == rows * tokens * tokens * 6


def test_checkpointing_keeps_inputs_and_one_layer():
    assert size_of().activation_bytes(checkpointing=False) == 3 * 10 * 7_000
    assert size_of().activation_bytes(checkpointing=True) == 3 * 10 * 500 + 7_000
    assert size_of(logits_bytes=100).activation_bytes(checkpointing=True) == 3 * 10 * 500 + 7_000 + 300


def test_the_heap_keeps_free_what_a_small_loss_took_and_what_lies_between_small_values():
    def beside(logits_bytes: int) -> int:
        sizes = (size_of(logits_bytes=logits_bytes, has_holes=holes) for holes in (False, True))
        plain, holes = (size.activation_bytes(checkpointing=False) for size in sizes)
        return holes - plain

    holes = beside(0)
    assert holes > 0
    assert beside(32 << 20) == holes + 2 * (32 << 20)
    assert beside((32 << 20) + 1) == holes, "a larger block goes back at once"


def test_activations_are_those_of_the_presets_as_measured():
    """71 KB a token and layer at 125m, 171 KB at 1.3b; 24 and 21 times less with checkpointing."""
    for name, layer_bytes in (("125m", 71e3), ("1.3b", 171e3)):
        manifest = preset(name)
        rows = manifest.inner.micro_batch * manifest.model.context
        stage = StageSize.of(manifest, 0)
        assert stage.layer_bytes / rows == pytest.approx(layer_bytes, rel=0.03)
        assert stage.input_bytes * 20 < stage.layer_bytes


def test_the_first_stage_holds_a_window_and_the_last_one_micro_batch():
    manifest = cut_into(preset("125m"), 2)
    first, last = (StageSize.of(manifest, stage) for stage in range(2))
    assert (first.in_flight, last.in_flight) == (8, 1)
    assert last.logits_bytes > 0 == first.logits_bytes


def test_values_that_are_too_large_for_the_heap_leave_no_holes_in_it():
    found = {name: StageSize.of(preset(name), 0).has_holes for name in ("tiny", "small", "125m")}
    assert found == {"tiny": True, "small": True, "125m": False}


def test_a_tiny_peer_is_reckoned_with_no_less_than_it_was_measured_to_take():
    assert 563e6 <= StageSize.of(preset("tiny"), 0).host_bytes() <= 600e6


def test_more_may_be_under_way_than_is_reckoned_with_only_where_half_of_what_is_free_holds_it():
    size = size_of(in_flight=3)
    one = size_of(in_flight=4).host_bytes() - size.host_bytes()
    for free, most in ((-GB, 3), (0, 3), (2 * one - 1, 3), (2 * one, 4), (20 * one, 13)):
        assert size.most_under_way(size.host_bytes() + free, on_cpu=True, checkpointing=False) == most
    told = size.device_bytes(checkpointing=True)
    assert size.most_under_way(told, on_cpu=False, checkpointing=True) == 3
    assert size.most_under_way(told + GB, on_cpu=False, checkpointing=True) > 3


@pytest.mark.parametrize("is_alone", [True, False])
def test_an_accelerator_takes_over_what_training_needs(is_alone):
    stage = size_of(is_alone=is_alone)
    assert stage.host_bytes(on_cpu=False) == BASE_BYTES + (9 + 8 + 8) * 1_000_000
    assert stage.host_bytes(on_cpu=False) + stage.device_bytes() == CARD_BASE_BYTES + stage.host_bytes()


def test_only_stages_with_enough_room_fit():
    assert Room(4 * GB).fitting(NEEDS) == [0, 1, 2]
    assert Room(4 * GB - 1).fitting(NEEDS) == [1]
    assert Room(2 * GB - 1).fitting(NEEDS) == []


def test_what_is_allowed_bounds_what_is_free_and_the_other_way_round():
    assert Room(8 * GB, 2 * GB).fitting(NEEDS) == [1]
    assert Room(2 * GB, 8 * GB).fitting(NEEDS) == [1]


def test_a_limit_that_is_too_low_is_named_with_what_would_do():
    assert Room(8 * GB, 3 * GB).why_not(1, NEEDS) == ""
    assert Room(8 * GB, 3 * GB).why_not(0, NEEDS) == (
        "stage 0 needs 4.0 GB of memory, --max-memory allows 3.0 GB: allow 4.0, or join with --stage 1, which needs 2.0 GB"
    )
    assert Room(8 * GB, 1 * GB).why_not(1, NEEDS).endswith("--max-memory allows 1.0 GB: allow 2.0")


def test_the_limit_that_is_advised_is_enough():
    needs = [2_340_000_001]
    advised = float(Room(8 * GB, GB).why_not(0, needs).split("allow ")[-1])
    assert Room(8 * GB, int(advised * GB)).why_not(0, needs) == ""


def test_a_machine_that_is_too_small_is_told_so():
    assert Room(GB, 8 * GB).why_not(0, NEEDS) == (
        "stage 0 needs 4.0 GB of memory, 1.0 GB are free: close other programs, or use a machine with more memory"
    )
