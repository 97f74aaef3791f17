"""A stage of a published decoder: the modules of `transformers`, with only the stage's layers in them.

The model's own class is built empty; layers of other stages are replaced in place by modules that pass on what they get,
so that every index (`layer_idx`, `layer_types[i]`) keeps its meaning. One that stands before the stage's first layer gives
what arrived from the stage before, whatever the embedding's part has made of its input; one behind its last layer ends
the forward. Parameters of the stage are views into one flat vector, those of other stages are zeros that take no memory.
There is no dropout: a forward is run again where activations are not kept, and must give the same.

Shape letters: B sequences, T tokens, D hidden size, V vocabulary, N parameters.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from dilocox_peer.errors import ConfigError
from dilocox_peer.manifest import PublishedSection
from dilocox_peer.model.adapters import Lora, adapter_layout, freeze, halved_names
from dilocox_peer.model.architecture import LayerRange
from dilocox_peer.model.borders import positions_of
from dilocox_peer.model.families import Family, build_empty, config_from, family_of, layer_list, library, tiny_tokens
from dilocox_peer.model.flat_stage import FlatStage
from dilocox_peer.model.frozen import Frozen, FrozenBase, FrozenLayout
from dilocox_peer.model.partition import Costs
from dilocox_peer.model.stand_ins import (
    AsTuple,
    Capture,
    Captured,
    Checkpointed,
    CheckpointedFirst,
    Headless,
    Inject,
    OnceAdded,
    PassOn,
)
from dilocox_peer.types import Layout, ParameterRole, TensorSpec

_SAME = 1e-5  # of a tiny copy's logits and gradients, cut against whole, relative to the largest


@dataclass(frozen=True)
class Design:
    """What a stage is built from: the library's config object, where its family is cut, the tokens of a sequence, and in a run
    of adapters what those are."""

    config: Any
    family: Family
    context: int
    lora: Lora | None = None

    @property
    def is_tied(self) -> bool:
        """Embedding and head are one matrix."""
        return bool(getattr(self.config, "tie_word_embeddings", False))


def design_of(section: PublishedSection) -> Design:
    """Raises ConfigError where this machine's transformers cannot build the model, or cannot cut it, and where the section does
    not say what its config.json says."""
    design = design_from(section.config, num_stages=len(section.genesis), context=section.context)
    for name, said, found in (
        ("layers", section.layers, design.config.num_hidden_layers),
        ("hidden_size", section.hidden_size, design.config.hidden_size),
        ("vocab_size", section.vocab_size, design.config.vocab_size),
    ):
        if said != found:
            raise ConfigError(
                f"model.{name} is {said}, its config.json has {found}: `dilocox-peer init --from` makes it anew"
            )
    return replace(design, lora=lora_of(section))


def lora_of(section: PublishedSection) -> Lora | None:
    """What its adapters are; None where all parameters are trained."""
    if not section.lora_rank:
        return None
    return Lora(section.lora_rank, section.lora_alpha, section.lora_targets, section.base_dtype)


def design_from(config_json: str, *, num_stages: int, context: int) -> Design:
    """Tied embeddings are tied where one stage holds both ends; over several stages they are two matrices that start equal."""
    changes = {"use_cache": False, **({"tie_word_embeddings": False} if num_stages > 1 else {})}
    return Design(config_from(config_json, **changes), family_of(config_json), context)


@cache
def published_layout(section: PublishedSection, layers: LayerRange) -> Layout:
    """Names and shapes of a stage's parameters, matrices first. Raises ConfigError when this machine's transformers makes
    another model of the config than the run's owner's did."""
    design, empty = _checked(section)
    return _trained_layout(design, layers, empty)


@cache
def frozen_layout(section: PublishedSection, layers: LayerRange) -> FrozenLayout:
    """What a stage keeps beside the parameters it trains; nothing where it trains all. Raises what published_layout does."""
    design, empty = _checked(section)
    return _frozen_layout(design, layers, empty)


@cache
def published_buffers(section: PublishedSection, layers: LayerRange) -> tuple[int, int]:
    """Bytes of the buffers that a stage's modules keep, and of the largest: masks and positions of as many tokens as config.json says.
    Raises what published_layout does."""
    design, empty = _checked(section)
    name, _ = layer_list(empty, design.config)
    sizes = [
        buffer.numel() * buffer.element_size()
        for path, buffer in empty.named_buffers(remove_duplicate=False)
        if (index := _layer_of(path, name)) is None or layers.first <= index <= layers.last
    ]
    return sum(sizes), max(sizes, default=0)


@cache
def _checked(section: PublishedSection) -> tuple[Design, Any]:
    """The design and an empty model of it, whose parameters are the run's."""
    design = design_of(section)
    empty = build_empty(design.config)
    if _layout(design, LayerRange.of(section), empty).digest().hex() != section.layout:
        raise ConfigError(
            f"transformers {library().__version__} here gives {design.config.model_type} other parameters than the run has: "
            "install the version that the run's owner used"
        )
    return design, empty


def design_layout(design: Design, layers: LayerRange) -> Layout:
    """What these layers of a design train."""
    return _trained_layout(design, layers, build_empty(design.config))


def frozen_design_layout(design: Design, layers: LayerRange) -> FrozenLayout:
    """What they keep beside it."""
    return _frozen_layout(design, layers, build_empty(design.config))


@cache
def costs_of_published(section: PublishedSection) -> Costs:
    """What a cut of it is chosen by. Of a layer's experts those count as compute that a token goes through."""
    return costs_of_design(design_of(section))


def costs_of_design(design: Design) -> Costs:
    config, family = design.config, design.family
    model = build_empty(config)
    _, layers = layer_list(model, config)
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    experts = [sum(each.numel() for each in layer.parameters() if each.dim() == 3) for layer in layers]
    block, of_experts = max(sizes), max(experts)
    share = _share_of_experts(config)
    shapes = {each: parameter.shape for each, parameter in model.named_parameters(remove_duplicate=False)}
    return Costs(
        layers=len(layers),
        block=block,
        block_compute=int(block - of_experts + of_experts * share) + design.context * config.hidden_size,
        embedding=sum(shapes[each].numel() for each in family.before),
        head_compute=shapes[family.head].numel(),
        kept=10 * int(config.hidden_size) + 4 * _mlp_width(config),
    )


def _mlp_width(config: Any) -> int:
    """Values a token inside the MLP, of all experts that it goes through."""
    dense = _count(config, "intermediate_size") or 4 * int(config.hidden_size)
    experts = _count(config, "num_experts_per_tok")
    if not experts:
        return dense
    return experts * (_count(config, "moe_intermediate_size") or dense)


def _share_of_experts(config: Any) -> float:
    used = _count(config, "num_experts_per_tok")
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if used and (count := _count(config, name)):
            return min(1.0, used / count)
    return 1.0


def _count(config: Any, name: str) -> int:
    """0 where it says none, or something else: a family that does not use it has not looked at it."""
    found = getattr(config, name, None)
    return found if isinstance(found, int) and found > 0 else 0


class PublishedStage(FlatStage):
    """A StageModel (architecture.py)."""

    def __init__(
        self,
        design: Design,
        layers: LayerRange,
        *,
        device: str | torch.device = "cpu",
        flat_grad_N: Tensor | None = None,
        checkpointing: bool = False,
        frozen: Mapping[str, Frozen] | None = None,
        compiled: bool = False,
    ) -> None:
        """flat_grad_N: the gradient vector of another version of the same stage, to be shared with it. frozen: of a run of adapters,
        all other parameters by name, on the device; None: zeros."""
        model = build_empty(design.config)
        super().__init__(layers, _trained_layout(design, layers, model), device=device, flat_grad_N=flat_grad_N)
        self.across = frozenset(
            f"{path}.weight" for path, module in model.named_modules() if type(module).__name__ == "Conv1D"
        )
        self._design = design
        if frozen is None and design.lora is not None:
            frozen = FrozenBase.zeros(_frozen_layout(design, layers, model)).kept(self.flat_N.device)
        self._frozen = frozen or {}
        self._checkpointing = checkpointing
        self._compiled = compiled
        self._inject, self._masks = Inject(), OnceAdded()
        self._given: Mapping[str, Tensor] = {}  # of the forward that is under way
        self._replace_layers(model)
        _fill_buffers(
            model, self.flat_N.device
        )  # before parameters are there: the library's initialization passes over empty ones
        self._fill_parameters(model)
        if design.lora is not None:
            quantized = {name: each for name, each in self._frozen.items() if not isinstance(each, Tensor)}
            freeze(model, design.lora, {spec.name: self._own(spec.name) for spec in self.layout.tensors}, quantized)
        self._wrap_layers(model)
        self._model = model
        owner, name = _base_of(model)
        self._base = Headless(getattr(owner, name))
        self._takes_positions = "position_ids" in inspect.signature(self._base.base.forward).parameters
        setattr(owner, name, self._base)

    @property
    def context(self) -> int:
        return self._design.context

    @property
    def vocab_size(self) -> int:
        return int(self._design.config.vocab_size)

    def forward(self, x: Tensor, starts_BT: Tensor | None = None) -> Tensor:
        hidden_BTD = self.hidden(x, starts_BT)
        return self.logits(hidden_BTD) if self.layers.is_last_stage else hidden_BTD

    def hidden(self, x: Tensor, starts_BT: Tensor | None = None) -> Tensor:
        given = {"input_ids": x} if self.layers.is_first_stage else {"inputs_embeds": x}
        if (
            starts_BT is not None and self._takes_positions
        ):  # of positions that restart the library makes the mask itself
            given["position_ids"] = positions_of(starts_BT)
        self._inject.hidden = None if self.layers.is_first_stage else x
        self._given = given
        try:
            return self._run(given)
        finally:
            self._inject.hidden = None

    def _run(self, given: Mapping[str, Tensor]) -> Tensor:
        try:
            output = self._base(**given, use_cache=False)
        except Captured as captured:
            return captured.hidden
        finally:
            self._masks.forget()
        hidden_BTD: Tensor = output.last_hidden_state
        return hidden_BTD

    @torch.no_grad()
    def _before_layers(self, given: Mapping[str, Tensor]) -> Tensor:
        """What the first layer takes in."""
        forward, self._first.forward = self._first.forward, Capture().forward
        try:
            return self._run(given)
        finally:
            self._first.forward = forward

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        assert self.layers.is_last_stage, "logits are the last stage's"
        with self._base.giving(hidden_BTD):
            logits_BTV: Tensor = self._model(inputs_embeds=hidden_BTD, use_cache=False).logits
        return logits_BTV

    def version(self) -> "PublishedStage":
        return PublishedStage(
            self._design,
            self.layers,
            device=self.flat_N.device,
            flat_grad_N=self.flat_grad_N,
            checkpointing=self._checkpointing,
            frozen=self._frozen,
            compiled=self._compiled,
        )

    def _replace_layers(self, model: Any) -> None:
        _, layers = layer_list(model, self._design.config)
        first, last = self.layers.first, self.layers.last
        for index, layer in enumerate(layers):
            if first <= index <= last:
                continue
            new: nn.Module = (
                self._inject
                if index == first - 1
                else Capture()
                if index == last + 1 and not self.layers.is_last_stage
                else PassOn()
            )
            if self._design.family.returns_tuple and not isinstance(new, Capture):
                new = AsTuple(new)
            for name, value in vars(layer).items():  # what the model reads of its layers: attention_type, layer_idx
                if isinstance(value, str | int) and not name.startswith("_") and name != "training":
                    setattr(new, name, value)
            layers[index] = new

    def _wrap_layers(self, model: Any) -> None:
        """The library's own switch for checkpointing works in training mode alone, where there is dropout."""
        _, layers = layer_list(model, self._design.config)
        self._first = layers[0]
        for layer in layers[self.layers.first : self.layers.last + 1]:
            if self._compiled:
                layer.forward = torch.compile(layer.forward)
            if self._checkpointing and self.layers.is_first_stage and layer is self._first:
                layer.forward = CheckpointedFirst(layer.forward, lambda: partial(self._before_layers, self._given))
            elif self._checkpointing:
                layer.forward = Checkpointed(layer.forward)
            layer.forward = self._masks.before(layer.forward)
        if (
            self._checkpointing and self.layers.is_last_stage
        ):  # the norm behind them keeps three times as much as a layer
            for path in {name.rpartition(".")[0] for name in self._design.family.behind - {self._design.family.head}}:
                norm = model.get_submodule(path)
                norm.forward = Checkpointed(norm.forward)

    def _fill_parameters(self, model: Any) -> None:
        modules = dict(model.named_modules())
        for name, parameter in list(model.named_parameters(remove_duplicate=False)):
            path, _, leaf = name.rpartition(".")
            setattr(modules[path], leaf, self._parameter(name, parameter.shape))
        if self._design.is_tied and self.layers.is_whole:
            family = self._design.family
            (head, _, leaf), (source, _, same) = family.head.rpartition("."), family.input_embedding.rpartition(".")
            setattr(modules[head], leaf, getattr(modules[source], same))

    def _parameter(self, name: str, shape: torch.Size) -> nn.Parameter:
        frozen = self._frozen.get(name)
        if isinstance(frozen, Tensor):
            return nn.Parameter(frozen, requires_grad=False)
        if name not in self._spans:
            return nn.Parameter(torch.zeros(1, device=self.flat_N.device).expand(shape), requires_grad=False)
        return self._own(name)

    def _own(self, name: str) -> nn.Parameter:
        start, stop, own_shape = self._spans[name]
        parameter = nn.Parameter(self.flat_N[start:stop].view(own_shape))
        parameter.grad = self.flat_grad_N[start:stop].view(own_shape)
        return parameter


def cut_differs(config: Any, family: Family, whole: Any) -> str:
    """What a tiny copy cut in two does otherwise than the whole one; empty when it gives the same logits and gradients."""
    design, count = Design(config, family, tiny_tokens().shape[1]), config.num_hidden_layers
    middle = count // 2
    ranges = [LayerRange(0, middle - 1, True, False), LayerRange(middle, count - 1, False, True)]
    tokens_BT = tiny_tokens()
    targets = tokens_BT.flatten()
    whole.zero_grad(set_to_none=True)
    expected_BTV = whole(input_ids=tokens_BT, use_cache=False).logits
    torch.autograd.backward(nn.functional.cross_entropy(expected_BTV.flatten(0, 1), targets))
    expected = dict(whole.named_parameters())
    try:
        stages = [PublishedStage(design, layers) for layers in ranges]
        for stage in stages:
            with torch.no_grad():
                stage.flat_N.copy_(torch.cat([expected[spec.name].flatten() for spec in stage.layout.tensors]))
        middle_BTD = stages[0].forward(tokens_BT)
        sent_BTD = middle_BTD.detach().requires_grad_()
        logits_BTV = stages[1].forward(sent_BTD)
        torch.autograd.backward(nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets))
        torch.autograd.backward(middle_BTD, sent_BTD.grad)
    except (RuntimeError, KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        return f"its pieces do not run ({(str(error).splitlines() or [type(error).__name__])[0][:160]})"
    if _differ(logits_BTV, expected_BTV):
        return "its pieces give other logits than the whole"
    for stage in stages:
        for spec, start, stop in stage.layout.spans():
            gradient = expected[spec.name].grad
            there = torch.zeros(spec.shape) if gradient is None else gradient
            if _differ(stage.flat_grad_N[start:stop].view(spec.shape), there):
                return f"its pieces give {spec.name} another gradient than the whole"
    return ""


@torch.no_grad()
def sees_across(config: Any, family: Family, whole: Any) -> bool:
    """Whether documents that are packed into one sequence see each other in a tiny copy of a model, cut in two."""
    tokens_BT = tiny_tokens()
    design, count = Design(config, family, tokens_BT.shape[1]), config.num_hidden_layers
    stages = [
        PublishedStage(design, layers)
        for layers in (LayerRange(0, count // 2 - 1, True, False), LayerRange(count // 2, count - 1, False, True))
    ]
    tensors = dict(whole.named_parameters())
    for stage in stages:
        stage.flat_N.copy_(torch.cat([tensors[spec.name].flatten() for spec in stage.layout.tensors]))
    begins = tokens_BT.shape[1] // 3
    starts_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
    starts_BT[:, [0, begins]] = True
    together = stages[1].forward(stages[0].forward(tokens_BT, starts_BT), starts_BT)
    alone = stages[1].forward(stages[0].forward(tokens_BT[:, begins:]))
    return _differ(together[:, begins:], alone)


def _differ(ours: Tensor, theirs: Tensor) -> bool:
    largest = float(theirs.detach().abs().max())
    return not float((ours - theirs).detach().abs().max()) <= _SAME * max(largest, 1e-6)


def _trained_layout(design: Design, layers: LayerRange, model: Any) -> Layout:
    full = _layout(design, layers, model)
    return full if design.lora is None else adapter_layout(design.lora, full, model, design.family.layers)


def _frozen_layout(design: Design, layers: LayerRange, model: Any) -> FrozenLayout:
    if design.lora is None:
        return FrozenLayout(())
    full = _layout(design, layers, model)
    halved, inside = halved_names(full, model), design.family.layers + "."
    return FrozenLayout.of(
        full, halved, design.lora.base, frozenset(each for each in halved if each.startswith(inside))
    )


def _layout(design: Design, layers: LayerRange, model: Any) -> Layout:
    family = design.family
    list_name, _ = layer_list(model, design.config)
    convolutions = {
        f"{path}.weight" for path, module in model.named_modules() if isinstance(module, nn.Conv1d | nn.Conv2d)
    }
    specs = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (index := _layer_of(name, list_name)) is not None:
            is_ours = layers.first <= index <= layers.last
        else:
            is_ours = (name in family.before and layers.is_first_stage) or (
                name in family.behind and layers.is_last_stage
            )
        if not is_ours or (name == family.head and design.is_tied and layers.is_whole):
            continue
        role: ParameterRole = "hidden"
        if parameter.dim() < 2 or name.endswith("bias") or name in convolutions:
            role = "vector"
        elif name in family.embeddings:
            role = "embedding"
        elif name == family.head:
            role = "head"
        specs.append(TensorSpec(name, tuple(parameter.shape), role))
    specs = list({spec.name: spec for spec in specs}.values())
    return Layout((*(spec for spec in specs if not spec.is_vector), *(spec for spec in specs if spec.is_vector)))


def _layer_of(name: str, list_name: str) -> int | None:
    """The layer that a tensor of this name is in; None of those before and behind them."""
    inside = list_name + "."
    return int(name.removeprefix(inside).split(".", 1)[0]) if name.startswith(inside) else None


def _base_of(model: Any) -> tuple[Any, str]:
    """What the head calls for hidden states, as an attribute of a module: the model without its head, in some families a
    decoder in that."""
    base = getattr(model, model.base_model_prefix)
    return (
        (base, "decoder") if isinstance(getattr(base, "decoder", None), nn.Module) else (model, model.base_model_prefix)
    )


def _fill_buffers(model: Any, device: torch.device) -> None:
    """Tables (of rotary positions, masks) that the library computes itself where a model was built empty."""
    with torch.no_grad():
        for module in model.modules():
            buffers = dict(module.named_buffers(recurse=False))
            if not buffers:
                continue
            for name, buffer in buffers.items():
                module.register_buffer(name, torch.empty_like(buffer, device=device), persistent=False)
            model._init_weights(module)
