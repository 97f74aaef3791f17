"""LoRA as what a run trains: beside each of some frozen matrices W two small ones, so that it acts as W + alpha/r B A.

The adapters are a stage's flat vector, so everything that trains, averages and keeps vectors sees nothing new. A is random, B
zero: a run begins with exactly the published model. Names and files are those of the library peft, which is not needed here.
Source: LoRA (arXiv 2106.09685). Shape letters: R rank, I inputs, O outputs of a layer.
"""

import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dilocox_peer.errors import ConfigError
from dilocox_peer.model.frozen import WIDENED, Frozen, FrozenType
from dilocox_peer.model.transformer import uniform
from dilocox_peer.types import Layout, TensorSpec

_scratch = threading.local()
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
PEFT_FILES = ("adapter_config.json", "adapter_model.safetensors")
PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class Lora:
    """targets: last parts of the names of the layers that get adapters. base: how matrices that are frozen are kept."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    base: FrozenType

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def linear_names(model: nn.Module, inside: str) -> list[str]:
    """Last parts of the names of all linear layers below `inside`, each once."""
    found = (name for name, module in model.named_modules() if type(module) is nn.Linear)
    return list(dict.fromkeys(name.rpartition(".")[2] for name in found if name.startswith(inside + ".")))


def adapter_layout(lora: Lora, full: Layout, model: nn.Module, inside: str) -> Layout:
    """The adapters of a stage. full: of all its parameters. Raises ConfigError for a target that is no linear layer of it."""
    modules = dict(model.named_modules())
    specs: list[TensorSpec] = []
    names = linear_names(model, inside)
    if missing := set(lora.targets) - set(names):
        raise ConfigError(
            f"{min(missing)} is no linear layer of the model: adapters go to {', '.join(names) or 'none'}"
        )
    for spec in full.tensors:
        path, _, leaf = spec.name.rpartition(".")
        target = path.rpartition(".")[2]
        if leaf != "weight" or target not in lora.targets or not path.startswith(inside + "."):
            continue
        if type(modules[path]) is not nn.Linear:
            continue
        outputs, inputs = spec.shape
        specs += [TensorSpec(path + DOWN, (lora.rank, inputs)), TensorSpec(path + UP, (outputs, lora.rank))]
    if not specs:
        raise ConfigError(f"a stage has none of {', '.join(lora.targets)}: take fewer stages, or other targets")
    return Layout(tuple(specs))


def halved_names(full: Layout, model: nn.Module) -> frozenset[str]:
    """Parameters that may be kept in half precision: what uses them is known to compute in float32 all the same."""
    modules = dict(model.named_modules())
    return frozenset(
        spec.name
        for spec in full.tensors
        if spec.name.endswith(".weight")
        and type(modules[spec.name.removesuffix(".weight")]) in (nn.Linear, nn.Embedding)
    )


def first_adapters(layout: Layout) -> Tensor:
    """The flat float32 vector that adapters start from, equal bits on every machine: A uniform within 1/sqrt(I), B zero."""
    flat_N = torch.zeros(layout.num_elements)
    for spec, start, stop in layout.spans():
        if spec.name.endswith(DOWN):
            bound = spec.shape[1] ** -0.5
            flat_N[start:stop] = uniform(["dilocox-adapter", spec.name], spec.num_elements, bound=bound)
    return flat_N


def merged(base: Mapping[str, Tensor], adapters: Mapping[str, Tensor], lora: Lora) -> dict[str, Tensor]:
    """name -> float32 parameter with its adapter in it."""
    found = {}
    for name, tensor in base.items():
        path = name.removesuffix(".weight")
        if path + DOWN in adapters:  # rounded once, not at every step
            product = adapters[path + UP].double() @ adapters[path + DOWN].double()
            tensor = tensor.double() + lora.scale * product
        found[name] = tensor.float()
    return found


class _FrozenProduct(torch.autograd.Function):
    """x W^T with a W that has no gradient, in x's precision: what is kept for the backward is W as it lies, not widened."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Frozen) -> Tensor:
        ctx.weight_OI = weight_OI  # nobody changes it, and it is no tensor where it is quantized
        dtype = _computed_in(x)
        if not isinstance(weight_OI, Tensor) or weight_OI.dtype == dtype:
            return F.linear(x, weight_OI.to(dtype))
        x = x.to(dtype)
        y = x.new_empty(*x.shape[:-1], len(weight_OI))
        for rows, part_RI in _widened(weight_OI, dtype):
            y[..., rows] = F.linear(x, part_RI)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,), weight_OI = gradients, ctx.weight_OI
        if not isinstance(weight_OI, Tensor) or weight_OI.dtype == gradient.dtype:
            return gradient @ weight_OI.to(gradient.dtype), None
        found: Tensor | None = None
        for rows, part_RI in _widened(weight_OI, gradient.dtype):
            part = gradient[..., rows] @ part_RI
            found = part if found is None else found.add_(part)
        return found, None


def _computed_in(x: Tensor) -> torch.dtype:
    """The precision of a product: autocast's, where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _widened(weight_OI: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Rows of a matrix in another precision, so many at a time, each time in the same place: a matrix widened whole and forgotten leaves
    holes between what is kept, a quarter more memory in all."""
    outputs, inputs = weight_OI.shape
    at_a_time = max(1, min(outputs, WIDENED // inputs))
    known, key = _scratch.__dict__, f"{weight_OI.device} {dtype}"  # of this thread
    if key not in known or known[key].numel() < at_a_time * inputs:
        known[key] = torch.empty(max(WIDENED, inputs), dtype=dtype, device=weight_OI.device)
    for start in range(0, outputs, at_a_time):
        stop = min(start + at_a_time, outputs)
        part_RI = known[key][: (stop - start) * inputs].view(stop - start, inputs)
        yield slice(start, stop), part_RI.copy_(weight_OI[start:stop])


class FrozenLinear(nn.Module):
    """In place of a linear layer: its weights are frozen; with an adapter beside them, if it is a target."""

    def __init__(self, weight_OI: Frozen, bias_O: Tensor | None, scale: float) -> None:
        super().__init__()
        self.weight = weight_OI
        self.bias = bias_O
        self.out_features, self.in_features = weight_OI.shape
        self._scale = scale
        self._adapter: tuple[Tensor, Tensor] | None = None

    def adapt(self, down_RI: Tensor, up_OR: Tensor) -> None:
        self._adapter = (down_RI, up_OR)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _FrozenProduct.apply(x, self.weight)  # type: ignore[no-untyped-call]
        if self.bias is not None:
            y = y + self.bias
        if self._adapter is None:
            return y
        down_RI, up_OR = self._adapter
        return y.add_(F.linear(F.linear(x, down_RI), up_OR), alpha=self._scale)


class FrozenEmbedding(nn.Module):
    """In place of an embedding: rows come out in float32."""

    def __init__(self, weight_VD: Tensor, padding_idx: int | None) -> None:
        super().__init__()
        self.weight = weight_VD
        self.num_embeddings, self.embedding_dim = weight_VD.shape
        self.padding_idx = padding_idx

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight).float()


def freeze(model: nn.Module, lora: Lora, adapters: Mapping[str, Tensor], quantized: Mapping[str, Frozen]) -> None:
    """Puts these in place of the model's linear layers and embeddings. adapters: parameters by name. quantized: matrices by name that the
    model's own parameters do not hold."""
    for path, module in list(model.named_modules()):
        owner, _, leaf = path.rpartition(".")
        if type(module) is nn.Linear:
            weight = quantized.get(path + ".weight", module.weight)
            new: nn.Module = FrozenLinear(weight, module.bias, lora.scale)
            if path + DOWN in adapters:
                new.adapt(adapters[path + DOWN], adapters[path + UP])  # type: ignore[operator]
        elif type(module) is nn.Embedding:
            new = FrozenEmbedding(module.weight, module.padding_idx)
        else:
            continue
        setattr(model.get_submodule(owner), leaf, new)


def peft_config(lora: Lora, source: str) -> dict[str, Any]:
    """adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
    }


def write_peft(folder: Path, lora: Lora, source: str, adapters: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Fills the folder, which is empty, with what peft loads."""
    from safetensors.torch import save_file

    config, weights = PEFT_FILES
    named = {PEFT_PREFIX + name: tensor.contiguous() for name, tensor in adapters.items()}
    save_file(named, folder / weights, metadata)
    (folder / config).write_text(json.dumps(peft_config(lora, source), indent=2) + "\n", encoding="utf-8")
