"""How much memory a stage takes at a peer, and which stages there is room for. Pure arithmetic, for the claim of a stage.

    bytes a parameter                                       where the training computes   in the machine's memory
    weight, gradient                                          8
    AdamW's two moments, in bfloat16 half of that             8
    a second version of the weights, of several stages        4
    residual, in bfloat16 half of that                                                      4
    pseudo-gradient of an offer that is out, then the shift                                 4
    its contribution, as int4 or leaner                                                     1
      in a run that begins with int8, fp16 or none (float32)                                2, 4, 8

Together 25 of a model in one stage, 29 of several, 6 less with both in bfloat16: the peak, from a close to its merge; 5 less between
rounds. The anchor and the
outer momentum lie in a file, and what a merge reads of it stays in memory for a moment, READ_ELEMENTS of each; with 8 bytes a parameter
more the system need not read them from the disk again. Vectors that are short lie in the heap, and what is freed of it stays for a while. Beside them vectors of the largest tensor while it is encoded, or of a slice while it is averaged, and what a forward keeps for its backward: of every micro-batch that is under way, a
layer's values for each layer, or with checkpointing a layer's input for each and the values of one. In a run of adapters all
this is of the adapters' parameters; the others take what they take on the disk, 2 or 4 bytes each, once. Modules of a published
model keep buffers as well (masks of positions by positions in some families), those of each version.
benchmarks/memory.py measures it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from dilocox_peer.manifest import Manifest
from dilocox_peer.model.partition import Costs, usual_window

TRAINED_BYTES: Final = 8
MOMENT_BYTES: Final = {"float32": 8, "bfloat16": 4}
SECOND_VERSION_BYTES: Final = 4
RESIDUAL_BYTES: Final = {"float32": 4, "bfloat16": 2}
OFFER_BYTES: Final = 4
CONTRIBUTION_BYTES: Final = {"none": 8, "fp16": 4, "int8": 2}
"""By the codec that a run begins with, twice its payload: 50.9 M parameters took 2.04 GB with int4, 2.16 with fp16 and 2.39 with none. A run that adapts goes to
no codec that takes more (peer/planning/adaptive_planner.py)."""
BASE_BYTES: Final = 550_000_000
"""What does not grow with the stage: interpreter, torch, hivemind, the text, p2pd. Peers of headline.py held 460 to 472 MB at most beside what
is reckoned here by their parameters, 40 to 50 of them since their first minute, and p2pd 77 to 89; pages of libraries counted whole,
as a peer has them that is alone on its machine."""
CARD_BASE_BYTES: Final = 950_000_000
"""On a card what does not grow: the driver's context and kernels, 787 MB on an H100 with torch 2.11, and 152 that the allocator kept beyond what was
in use at most."""
LINKD_BYTES: Final = 110_000_000
"""The process that a run of several stages has beside, with py-libp2p imported: 97 at its start, 110 with bodies of 266 kB on their way."""
LIBRARY_BYTES: Final = 160_000_000
"""`transformers`, of a run of a published model."""

GB: Final = 1e9
_SCRATCH_VECTORS: Final = 4
"""As long as the largest tensor, while it is encoded: what is sent, its payload, positions, one of the optimizer. As long as a slice, while it is
averaged, at another time and one after another: the residual, the mean, a contribution decoded, what encoding lost."""
_FLOAT_BYTES: Final = 4
LOGITS_BYTES: Final = 128 * 1024 * 1024
"""Logits that are computed at once (loss.py)."""
_MASK_BYTES: Final = 6  # for two tokens of a sequence: 4 that are added to scores, and what those are made of
_HOLES: Final = 0.55
_HOLES_OF_OTHERS: Final = 0.15
"""Short-lived vectors of many sizes lie among those that are kept, and what the C library's allocator cannot use between them
comes to so much of a micro-batch's, of the others under way less (measured beside adapters: one of 128 and of 512 tokens 0.70 and 0.42, eight
0.22; `small` in one stage took a fifth more than was told without it). Where all of a published model is trained, the peak is the merge, and
what is told with no holes is 3 to 5 % more than it took."""
_HEAP_BLOCK: Final = 32 << 20
"""Larger ones glibc gives back at once. Of a smaller one that was freed it keeps twice the size free at the end of its heap."""
READ_ELEMENTS: Final = 16 << 19
"""So much of the anchor, and as much of the momentum, was measured to be mapped in memory while a merge reads them; tensors are let go of as they were read
(outer_step.py)."""
_MAKING: Final = 3
"""As long as the largest buffer, while the library makes it in the machine's memory: ones, what is cut out of them, that without what a window
leaves out. GPT-Neo's of 30,000 positions took 1.7."""
_WIDEST: Final = 4  # inputs of a layer, that its widest value takes
_LOGITS_COPIES: Final = 3  # logits, their log-softmax, their gradient


@dataclass(frozen=True, slots=True)
class StageSize:
    """A stage of a run as far as its memory goes. largest: elements of its largest tensor, or of a slice if that is longer. in_flight: micro-batches that it keeps
    values of at once. layer_bytes, input_bytes: what a forward of one micro-batch keeps of a layer, and what it takes in.
    mask_bytes: of what packed documents see of each other, in one forward. has_holes: memory that the allocator cannot use is told as well. moment_bytes,
    residual_bytes, contribution_bytes: a parameter. base_bytes: what does not grow with the stage. buffer_bytes: of all versions; making_bytes: while they
    are made. Of a run of adapters parameters are theirs alone; frozen_bytes: of the weights
    beside them, widened_bytes: of the largest of those while it is computed with."""

    parameters: int
    largest: int
    layers: int
    in_flight: int
    layer_bytes: int
    input_bytes: int
    logits_bytes: int
    is_alone: bool
    base_bytes: int
    frozen_bytes: int = 0
    widened_bytes: int = 0
    mask_bytes: int = 0
    buffer_bytes: int = 0
    making_bytes: int = 0
    has_holes: bool = False
    moment_bytes: int = MOMENT_BYTES["float32"]
    residual_bytes: int = RESIDUAL_BYTES["float32"]
    contribution_bytes: int = 1

    @classmethod
    def of(cls, manifest: Manifest, stage: int, *, base_bits: int = 0) -> "StageSize":
        """base_bits: of frozen matrices, as the volunteer wishes (quantized.py). Raises ConfigError where a published model cannot be built
        here."""
        from dilocox_peer.model.architecture import buffers_of, frozen_layout_of, layers_of, layout_of

        frozen = frozen_layout_of(manifest, stage)
        layout, layers, count = layout_of(manifest, stage), layers_of(manifest, stage), manifest.stages.count
        section, rows = manifest.model, manifest.inner.micro_batch * manifest.model.context
        input_bytes = rows * section.hidden_size * _FLOAT_BYTES
        buffers, longest = buffers_of(manifest, stage)
        turns_round = layers.is_last_stage  # forward and backward at once
        is_published = section.architecture == "transformers"
        base = BASE_BYTES + (0 if count == 1 else LINKD_BYTES) + (LIBRARY_BYTES if is_published else 0)
        return cls(
            parameters=layout.num_elements,
            largest=max(
                *(spec.num_elements for spec in layout.tensors), _slice_elements(manifest, layout.num_elements)
            ),
            layers=layers.last - layers.first + 1,
            in_flight=1 if turns_round else min(manifest.inner.accumulate, usual_window(count)),
            layer_bytes=rows * Costs.of(section).kept * _FLOAT_BYTES,
            input_bytes=input_bytes,
            logits_bytes=min(rows * section.vocab_size * _FLOAT_BYTES, LOGITS_BYTES) if turns_round else 0,
            is_alone=count == 1,
            base_bytes=base,
            frozen_bytes=0 if frozen is None else frozen.bytes_at(base_bits),
            widened_bytes=0 if frozen is None else frozen.widened_at(base_bits),
            mask_bytes=rows * section.context * _MASK_BYTES if manifest.data.packing == "best-fit" else 0,
            buffer_bytes=buffers if count == 1 else 2 * buffers,
            making_bytes=_MAKING * longest,
            has_holes=frozen is not None or (not is_published and _WIDEST * input_bytes <= _HEAP_BLOCK),
            moment_bytes=MOMENT_BYTES[manifest.inner.moments],
            residual_bytes=RESIDUAL_BYTES[manifest.compression.residual],
            contribution_bytes=contribution_bytes(manifest.compression.codec),
        )

    def activation_bytes(self, *, checkpointing: bool) -> int:
        """Kept for backwards, and of the loss, at most."""
        if checkpointing:
            kept = self.in_flight * self.layers * self.input_bytes + self.layer_bytes
        else:
            kept = self.in_flight * self.layers * self.layer_bytes
        if self.has_holes:
            one = kept // self.in_flight
            kept += int(_HOLES * one + _HOLES_OF_OTHERS * (kept - one))
            kept += 2 * self.logits_bytes if self.logits_bytes <= _HEAP_BLOCK else 0
        return kept + self.in_flight * self.mask_bytes + _LOGITS_COPIES * self.logits_bytes + self.widened_bytes

    @property
    def trained_bytes(self) -> int:
        """A parameter, where the training computes."""
        return TRAINED_BYTES + self.moment_bytes + (0 if self.is_alone else SECOND_VERSION_BYTES)

    def host_bytes(self, *, on_cpu: bool = True, checkpointing: bool = False) -> int:
        """At most, in the machine's memory."""
        each = self.residual_bytes + OFFER_BYTES + self.contribution_bytes + (self.trained_bytes if on_cpu else 0)
        activations = self.activation_bytes(checkpointing=checkpointing) if on_cpu else 0
        kept = self.frozen_bytes + self.buffer_bytes if on_cpu else 0
        scratch = _SCRATCH_VECTORS * _FLOAT_BYTES * self.largest
        return (
            self.base_bytes
            + self.parameters * each
            + kept
            + self.making_bytes
            + scratch
            + self._merge_bytes
            + activations
        )

    @property
    def _merge_bytes(self) -> int:
        """What a merge has read of the state's file, and what the heap keeps of the vectors that come and go with a round."""
        vector, scratch = _FLOAT_BYTES * self.parameters, _FLOAT_BYTES * self.largest
        in_heap = next((each for each in (vector, scratch) if each <= _HEAP_BLOCK), 0)
        return 2 * min(vector, _FLOAT_BYTES * READ_ELEMENTS) + 2 * in_heap

    def most_under_way(self, room_bytes: int, *, on_cpu: bool, checkpointing: bool) -> int:
        """Micro-batches that may be kept at once: in_flight, and as many more as half of what is free beside them has room for."""
        needs = [
            each.host_bytes(checkpointing=checkpointing) if on_cpu else each.device_bytes(checkpointing=checkpointing)
            for each in (self, replace(self, in_flight=self.in_flight + 1))
        ]
        return self.in_flight + max(0, room_bytes - needs[0]) // 2 // max(1, needs[1] - needs[0])

    def device_bytes(self, *, checkpointing: bool = False) -> int:
        """At most, in the memory of an accelerator that trains."""
        activations = self.activation_bytes(checkpointing=checkpointing)
        kept = self.frozen_bytes + self.buffer_bytes
        return CARD_BASE_BYTES + self.parameters * self.trained_bytes + kept + activations


def contribution_bytes(codec: str) -> int:
    """A parameter, of contributions while they are made and merged."""
    return CONTRIBUTION_BYTES.get(codec, 1)


def _slice_elements(manifest: Manifest, parameters: int) -> int:
    """0: of a run that averages all to all, each tensor of a contribution on its own."""
    count = manifest.rounds.num_slices
    return -(-parameters // count) if count else 0


@dataclass(frozen=True, slots=True)
class Room:
    """free_bytes: of the machine, with what this peer has taken already, or of a card; allowed_bytes: what --max-memory allows of the machine's.
    card: its name as a device, "" of the machine. whole_bytes: what there would be if nobody else took any."""

    free_bytes: int
    allowed_bytes: int | None = None
    card: str = ""
    whole_bytes: int = 0

    @property
    def most_bytes(self) -> int:
        return self.free_bytes if self.allowed_bytes is None else min(self.free_bytes, self.allowed_bytes)

    def fitting(self, needs: Sequence[int]) -> list[int]:
        """Of stages that need so many bytes each, those there is room for."""
        return [stage for stage, need in enumerate(needs) if need <= self.most_bytes]

    def may_come(self, need: int) -> bool:
        """Whether there is room for it once others have gone."""
        return need <= max(self.whole_bytes, self.free_bytes) and (
            self.allowed_bytes is None or need <= self.allowed_bytes
        )

    def why_not(self, stage: int, needs: Sequence[int]) -> str:
        """What is wrong with holding that stage and what to do about it; empty when it fits."""
        need = needs[stage]
        fitting = self.fitting(needs)
        if stage in fitting:
            return ""
        other = f", or join with --stage {fitting[0]}, which needs {size(needs[fitting[0]])}" if fitting else ""
        if self.allowed_bytes is not None and need > self.allowed_bytes:
            allowed = f"--max-memory allows {size(self.allowed_bytes)}"
            return f"stage {stage} needs {size(need)} of memory, {allowed}: allow {-(-need // 10**8) / 10:.1f}{other}"
        if self.card:
            other = other or ", or join with another --device, e.g. cpu"
            return f"stage {stage} needs {size(need)} of a card's memory, {size(self.free_bytes)} are free on {self.card}: close what uses it{other}"
        other = other or ", or use a machine with more memory"
        return (
            f"stage {stage} needs {size(need)} of memory, {size(self.free_bytes)} are free: close other programs{other}"
        )


def size(num_bytes: int) -> str:
    return f"{num_bytes / GB:.1f} GB" if num_bytes >= GB else f"{num_bytes / 1e6:.0f} MB"
