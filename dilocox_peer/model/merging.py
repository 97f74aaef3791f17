"""From a run of adapters to a model: the published weights with the adapters in them, as if all had been trained."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from dilocox_peer.errors import ConfigError
from dilocox_peer.manifest import ModelSection, PublishedSection
from dilocox_peer.model.adapters import merged
from dilocox_peer.model.architecture import LayerRange
from dilocox_peer.model.frozen import FrozenBase, FrozenLayout
from dilocox_peer.model.published import design_from, design_layout, design_of, frozen_layout, lora_of, published_layout
from dilocox_peer.model.weights import open_folder, place_of
from dilocox_peer.model.whole import WholeModel, tensor_over, union


def base_of(section: ModelSection | PublishedSection, given: Path | None, cut: Sequence[int] = ()) -> FrozenBase | None:
    """The weights beside a run's adapters, of the whole model, in memory; None of a run that trains all. given: the published
    model's folder. cut: layers of each stage of the run; (): one has them all. Raises ConfigError where it is not on this machine, or is
    another."""
    if not isinstance(section, PublishedSection) or not section.lora_rank:
        return None
    if (place := place_of(section, given)) is None:
        raise ConfigError(
            f"the weights beside this run's adapters are not on this machine: {section.source} has to be there; `--base` of generate "
            "and evaluate and `--model` of export take the place of its folder, and what export writes needs neither"
        )
    folder, layout = open_folder(place), frozen_layout(section, LayerRange.of(section))
    if folder.config_json != section.config:
        raise ConfigError(f"{place}: its config.json is not that of the run's model: take {section.source}")
    base = FrozenBase.read(folder, design_of(section), layout)
    if [base.digest_of(part).hex() for part in _parts(section, cut)] != list(section.base):
        raise ConfigError(
            f"{place}: its weights are not those that the run's adapters belong to: take {section.source}"
        )
    return base


def _parts(section: PublishedSection, cut: Sequence[int]) -> Iterator[FrozenLayout]:
    """What each stage keeps beside its adapters."""
    first = 0
    for count in cut or (section.layers,):
        yield frozen_layout(section, LayerRange.of(section, first_layer=first, last_layer=first + count - 1))
        first += count


def merge(model: WholeModel, given: Path | None = None) -> WholeModel:
    """The model without adapters that computes what it does with them; the same one where it has none. Raises as base_of."""
    section = model.section
    if not isinstance(section, PublishedSection) or (base := base_of(section, given, model.origin.cut)) is None:
        return model
    lora = lora_of(section)
    assert lora is not None, "a run of adapters"
    adapters = {name: tensor_over(tensor) for name, tensor in model.tensors.items()}
    tensors = {name: tensor.numpy() for name, tensor in merged(base.tensors(), adapters, lora).items()}
    plain = _without_adapters(section)
    wanted = published_layout(plain, LayerRange.of(plain)).tensors
    told = f"adapters of rank {lora.rank}, alpha {lora.alpha:g}, on {', '.join(lora.targets)}; merged into {lora.base} weights"
    return union(plain, replace(model.origin, adapters=told), [{spec.name: tensors[spec.name] for spec in wanted}])


def _without_adapters(section: PublishedSection) -> PublishedSection:
    """The section of the same model in one piece: what nobody has trained is tied as it was."""
    design = design_from(section.config, num_stages=1, context=section.context)
    layout = design_layout(design, LayerRange.of(section)).digest().hex()
    changes = {"lora_rank": 0, "lora_targets": (), "base": (), "genesis": section.genesis[:1], "layout": layout}
    return section.model_copy(update=changes)
