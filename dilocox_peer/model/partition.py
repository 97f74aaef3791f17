"""Which layers belong to which stage: the manifest's own cut, or one that makes the slowest stage as fast as can be.

A cut is a number of consecutive transformer blocks per stage; the embedding goes with the first stage, the final norm
and the output head with the last. Pure arithmetic on the manifest, so all peers agree on it without talking; `init`
writes the result into run.toml, where the owner may change it.
"""

from dataclasses import dataclass
from functools import cache

from dilocox_peer.manifest import Manifest, ModelSection, PublishedSection


@dataclass(frozen=True, slots=True)
class Costs:
    """What a cut is chosen by. block, block_compute: parameters of one transformer block, and multiplications a token in its
    forward pass: its matrices, and scores and mix of causal attention, whose mean length is half the context.
    embedding: parameters before the blocks; head_compute: the same of the output head. kept: values a token that a block keeps
    for its backward (measured, 125m and 1.3b: 10 of the width and 4 of the MLP's)."""

    layers: int
    block: int
    block_compute: int
    embedding: int
    head_compute: int
    kept: int

    @classmethod
    def of(cls, model: ModelSection | PublishedSection) -> "Costs":
        if isinstance(model, PublishedSection):
            from dilocox_peer.model.published import costs_of_published

            return costs_of_published(model)
        kv_size = model.kv_heads * (model.hidden_size // model.heads)
        attention = 2 * model.hidden_size * (model.hidden_size + kv_size)
        block = attention + 3 * model.hidden_size * model.mlp_size + 2 * model.hidden_size
        table = model.vocab_size * model.hidden_size
        kept = 10 * model.hidden_size + 4 * model.mlp_size
        return cls(model.layers, block, block + model.context * model.hidden_size, table, table, kept)


def choose_cut(costs: Costs, count: int) -> tuple[int, ...]:
    """Blocks of each of `count` stages: the least compute in the busiest stage, then the fewest parameters in the
    largest, then the evenest. Raises ValueError for more stages than blocks."""
    if not 1 <= count <= costs.layers:
        raise ValueError(f"{count} stages of {costs.layers} blocks: each stage needs at least one")
    if count == 1:
        return (costs.layers,)
    block, head = costs.block_compute, costs.head_compute

    @cache
    def best(stage: int, left: int) -> tuple[int, int, int, tuple[int, ...]]:
        """(busiest, largest, sum of squares, cut) of the stages from `stage` on, with `left` blocks for them."""
        if stage == count - 1:
            return left * block + head, left * costs.block + costs.embedding, left**2, (left,)
        options = []
        for mine in range(1, left - (count - 1 - stage) + 1):
            busiest, largest, squares, cut = best(stage + 1, left - mine)
            own = mine * costs.block + (costs.embedding if stage == 0 else 0)
            options.append((max(busiest, mine * block), max(largest, own), squares + mine**2, (mine, *cut)))
        return min(options)

    return best(0, costs.layers)[3]


def cut_of(manifest: Manifest) -> tuple[int, ...]:
    """Blocks of each stage of a run."""
    return manifest.stages.blocks or choose_cut(Costs.of(manifest.model), manifest.stages.count)


def with_cut(manifest: Manifest) -> Manifest:
    """The manifest, not signed, with its cut written out."""
    return manifest.model_copy(update={"stages": manifest.stages.model_copy(update={"blocks": cut_of(manifest)})})


def cut_into(manifest: Manifest, count: int) -> Manifest:
    """The manifest, not signed, cut into so many stages, and with enough micro-batches an inner step to keep all busy.

    A head has about 2 (S + 2) micro-batches under way, more where round trips are long, and never more than a step takes
    (`inner.accumulate`). They are made half as large, down to one sequence, so that a step does not grow as much.
    Raises ValueError for more stages than blocks.
    """
    choose_cut(Costs.of(manifest.model), count)
    stages = manifest.stages.model_copy(update={"count": count, "blocks": ()})
    inner = manifest.inner
    if count > 1 and inner.accumulate < usual_window(count):
        update = {"accumulate": usual_window(count), "micro_batch": max(1, inner.micro_batch // 2)}
        inner = inner.model_copy(update=update)
    return with_cut(manifest.model_copy(update={"stages": stages, "inner": inner}))


def usual_window(count: int) -> int:
    """Micro-batches that keep so many stages busy where a round trip takes about as long as a stage's work."""
    return 2 * (count + 2)


def idle_warning(manifest: Manifest) -> str | None:
    """What the owner should know of a run whose stages would wait for each other; None if there is nothing."""
    count, inner = manifest.stages.count, manifest.inner
    accumulate = inner.first_accumulate or inner.accumulate
    if count == 1 or accumulate >= usual_window(count) - 2:
        return None
    name = "first_accumulate" if inner.first_accumulate else "accumulate"
    return (
        f"inner.{name} {accumulate} lets {count} stages wait for each other: {usual_window(count)} keeps them busy "
        "(micro_batch may be smaller instead)"
    )
