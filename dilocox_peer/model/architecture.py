"""What a stage is to everything that trains it, whoever wrote its layers: its range, its layout, its flat vectors.

Two implementations: `LlamaStage` (transformer.py), this project's own, which needs torch alone, and `PublishedStage`
(published.py), a slice of any decoder that `transformers` knows and that can be cut (families.py). Passes, inner
optimizer and outer loop see the protocol, never one of the two. What is asked of a manifest here is a pure function of it.

Shape letters: B sequences, T tokens, D hidden size, V vocabulary, N parameters.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from dilocox_peer.manifest import Manifest, ModelSection, PublishedSection
from dilocox_peer.model.partition import Costs, cut_of
from dilocox_peer.types import Layout

if TYPE_CHECKING:
    from torch import Tensor

    from dilocox_peer.model.frozen import FrozenBase, FrozenLayout


GOOD_STEPS = 2000
MAX_FACTOR = 2.0**24


@dataclass(frozen=True, slots=True)
class LayerRange:
    """The layers first..last (both included) of a model; which of the outer parts come with them."""

    first: int
    last: int
    is_first_stage: bool
    is_last_stage: bool

    @property
    def is_whole(self) -> bool:
        return self.is_first_stage and self.is_last_stage

    @classmethod
    def of(
        cls, section: ModelSection | PublishedSection, *, first_layer: int = 0, last_layer: int | None = None
    ) -> "LayerRange":
        last = section.layers - 1 if last_layer is None else last_layer
        if not 0 <= first_layer <= last < section.layers:
            raise ValueError(f"layers {first_layer}..{last} of a model with {section.layers}")
        return cls(first_layer, last, first_layer == 0, last == section.layers - 1)


@dataclass(slots=True)
class GradientScale:
    """How many times too large the gradients of a stage are that computes in float16 (precision.py), which its optimizer adapts."""

    factor: float = 65536.0
    good_steps: int = 0
    proven: float = 1.0
    """The largest factor at which a step was made."""
    not_finite: "Tensor | None" = None
    """(), bool: whether something that is not finite left a backward since `judge` was asked last."""

    def judge(self) -> bool:
        """Whether the backward since the last call came to nothing for what its micro-batch is, and not for the factor, at which steps were made
        before. It is smaller then all the same, as gradients may have grown."""
        not_finite, self.not_finite = self.not_finite, None
        if not_finite is None or not bool(not_finite) or self.factor > self.proven:
            return False
        self.overflowed()
        return True

    def overflowed(self) -> None:
        self.factor, self.good_steps = max(self.factor / 2, 1.0), 0

    def stepped(self) -> None:
        self.proven = max(self.proven, self.factor)
        self.good_steps += 1
        if self.good_steps >= GOOD_STEPS:
            self.factor, self.good_steps = min(self.factor * 2, MAX_FACTOR), 0


class StageModel(Protocol):
    """A stage's layers with their parameters and gradients, one flat float32 vector each, in the order of `layout`.

    In-place changes of `flat_N` between a forward and its backward are refused by autograd (the parameters share its
    version counter): step and shift only between two micro-batches, or give the new weights to another `version`.
    """

    @property
    def layers(self) -> LayerRange: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def context(self) -> int:
        """Tokens a sequence may have."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def across(self) -> Collection[str]:
        """Names of the matrices that lie (in, out), as those of GPT-2 do; all others lie (out, in)."""
        ...

    @property
    def flat_N(self) -> "Tensor": ...
    @property
    def flat_grad_N(self) -> "Tensor": ...

    @property
    def scale(self) -> GradientScale | None:
        """How many times too large the gradients are; None: they are as they should be."""
        ...

    def forward(self, x: "Tensor", starts_BT: "Tensor | None" = None) -> "Tensor":
        """Output of the stage. x: (B, T) int64 tokens at the first stage, else (B, T, D) float32; out: (B, T, D), or at
        the last stage logits (B, T, V). starts_BT: bool, where documents begin that see nothing before them (borders.py); None:
        a sequence is one."""
        ...

    def hidden(self, x: "Tensor", starts_BT: "Tensor | None" = None) -> "Tensor":
        """The same up to what the head takes: (B, T, D) at every stage."""
        ...

    def logits(self, hidden_BTD: "Tensor") -> "Tensor":
        """(B, T, V) of what `hidden` gave at the last stage, or of some of its tokens."""
        ...

    def zero_grad(self) -> None: ...

    def load(self, layout: Layout, flat_N: "Tensor") -> None:
        """Copies the tensors of another layout, that of one of our stages, into ours of the same names."""
        ...

    def version(self) -> Self:
        """Other weights, zeros as yet, for the same stage: with a flat_N of their own and our flat_grad_N."""
        ...


def layers_of(manifest: Manifest, stage: int) -> LayerRange:
    """The layers of a stage of a run."""
    cut = cut_of(manifest)
    assert 0 <= stage < len(cut), f"stage {stage} of a run with {len(cut)}"
    first = sum(cut[:stage])
    return LayerRange.of(manifest.model, first_layer=first, last_layer=first + cut[stage] - 1)


def layout_of(manifest: Manifest, stage: int = 0) -> Layout:
    """The layout of a stage of a run. Raises ConfigError where a published model needs a `transformers` that is not here."""
    return stage_layout_of(manifest.model, layers_of(manifest, stage))


def prepare(manifest: Manifest, folder: Path | None = None, *, is_own: bool = False) -> None:
    """Has ready what later calls ask of a published model: its library takes seconds to load, which no event loop may wait for. Comes before
    them all: whether a stranger's config.json can be built at all is tried in another process first (dry_run.py).

    folder: remembers that. is_own: the manifest is of a file that the caller's user named. Not in an event loop. Raises ConfigError where the
    model cannot be built here; DilocoxError where that cannot be told for now."""
    if isinstance(manifest.model, PublishedSection):
        from dilocox_peer.model.dry_run import PASSED, dry_run

        if not is_own:
            dry_run(manifest, None if folder is None else folder / PASSED)
        Costs.of(manifest.model)
        for stage in range(manifest.stages.count):
            layout_of(manifest, stage)


def stage_layout_of(section: ModelSection | PublishedSection, layers: LayerRange) -> Layout:
    """Names and shapes of the parameters of these layers, in order."""
    if isinstance(section, PublishedSection):
        from dilocox_peer.model.published import published_layout

        return published_layout(section, layers)
    from dilocox_peer.model.stage_layout import stage_layout

    return stage_layout(section, layers)


def frozen_layout_of(manifest: Manifest, stage: int = 0) -> "FrozenLayout | None":
    """What a stage of a run of adapters keeps beside them; None of a run that trains all parameters. Raises as layout_of."""
    section = manifest.model
    if not isinstance(section, PublishedSection) or not section.lora_rank:
        return None
    from dilocox_peer.model.published import frozen_layout

    return frozen_layout(section, layers_of(manifest, stage))


def buffers_of(manifest: Manifest, stage: int = 0) -> tuple[int, int]:
    """Bytes that a stage of a published model keeps of buffers, and those of the largest; (0, 0) of the own model. Raises as layout_of."""
    section = manifest.model
    if not isinstance(section, PublishedSection):
        return 0, 0
    from dilocox_peer.model.published import published_buffers

    return published_buffers(section, layers_of(manifest, stage))


def build_model(
    section: ModelSection | PublishedSection,
    layers: LayerRange | None = None,
    *,
    device: str = "cpu",
    checkpointing: bool = False,
    base: "FrozenBase | None" = None,
    precision: str = "float32",
    scale: GradientScale | None = None,
    compiled: bool = False,
) -> StageModel:
    """The stage of these layers (None: the whole model), its parameters zeros as yet. checkpointing: a forward keeps the inputs of
    its layers alone, and a backward computes each layer once more. base: of a run of adapters, what stays as it is (None: zeros).
    precision: float32, or bfloat16 or float16 for autocast (precision.py). scale: of float16, that of a stage to whose gradient ours is
    added. compiled: layers go through torch.compile at their first use; what it cannot do runs as it is."""
    model = _build(section, layers or LayerRange.of(section), device, checkpointing, base, compiled)
    if precision == "float32":
        return model
    from dilocox_peer.model.precision import AutocastStage

    return AutocastStage(model, precision, scale)


def _build(
    section: ModelSection | PublishedSection,
    layers: LayerRange,
    device: str,
    checkpointing: bool,
    base: "FrozenBase | None",
    compiled: bool,
) -> StageModel:
    if isinstance(section, PublishedSection):
        from dilocox_peer.model.published import PublishedStage, design_of

        frozen = None if base is None else base.kept(device)
        return PublishedStage(
            design_of(section), layers, device=device, checkpointing=checkpointing, frozen=frozen, compiled=compiled
        )
    from dilocox_peer.model.transformer import LlamaStage

    return LlamaStage(section, layers, device=device, checkpointing=checkpointing, compiled=compiled)
