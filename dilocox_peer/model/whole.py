"""A whole model at one round: every tensor under its Hugging Face name, and where it comes from.

The stages of a run hold disjoint tensors, so the whole is their union. Pure: who brings the tensors is peer/state/anchors.py
(from a run) or model/huggingface.py (from an exported folder).
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from dilocox_peer import __version__
from dilocox_peer.errors import StateCorrupt
from dilocox_peer.manifest import DataSection, ModelSection, PublishedSection
from dilocox_peer.model.architecture import LayerRange, StageModel, build_model, stage_layout_of
from dilocox_peer.types import Layout

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Origin:
    """Which run's model this is, after which round. heads: of every stage's chain, hex, first stage first. contributors: peers
    and the micro-batches of theirs that the first stage's certificates count, most first; empty where they are not known.
    data: whose tokens it knows. adapters: what was trained, where that was not all; for people. cut: layers of each stage of the run; ()
    where it is not known."""

    run_name: str
    run_id: str
    round: int
    heads: tuple[str, ...]
    data: DataSection = field(default_factory=DataSection)
    contributors: tuple[tuple[str, int], ...] = ()
    adapters: str = ""
    cut: tuple[int, ...] = ()

    @property
    def metadata(self) -> dict[str, str]:
        """For the header of a safetensors file."""
        return {
            "format": "pt",  # transformers refuses a file that does not say so
            "version": __version__,
            "run_name": self.run_name,
            "run": self.run_id,
            "round": str(self.round),
            "heads": ",".join(self.heads),
            "tokenizer": self.data.tokenizer,
            "bos": self.data.bos,
            "eos": self.data.eos,
        }


@dataclass(frozen=True)
class WholeModel:
    """tensors: float32, exactly those that a Llama of this section has. Built by `union`."""

    section: ModelSection | PublishedSection
    origin: Origin
    tensors: Mapping[str, Array]

    @property
    def num_parameters(self) -> int:
        return sum(tensor.size for tensor in self.tensors.values())

    def build(self, *, device: str = "cpu") -> StageModel:
        """The model, ready to run forward. Of a run of adapters: what merging.py makes of it."""
        assert not isinstance(self.section, PublishedSection) or not self.section.lora_rank, "merge the adapters first"
        model = build_model(self.section, device=device)
        flat_N = np.concatenate([self.tensors[spec.name].ravel() for spec in model.layout.tensors])
        with torch.no_grad():
            model.flat_N.copy_(torch.from_numpy(flat_N))
        return model


def tensor_over(array: Array) -> torch.Tensor:
    """The array as a tensor, not copied: not to be written to, and alive as long as the array is. torch knows no tensors that
    must not be written to, and warns of arrays that say so."""
    if not array.size:
        return torch.zeros(array.shape)
    pointer = ctypes.cast(array.ctypes.data, ctypes.POINTER(ctypes.c_float))
    return torch.from_numpy(np.ctypeslib.as_array(pointer, shape=array.shape))


def tensors_of(layout: Layout, vector: memoryview | bytes) -> dict[str, Array]:
    """name -> tensor, as views into a flat float32 vector of this layout."""
    flat_N = np.frombuffer(vector, dtype="<f4")
    assert len(flat_N) == layout.num_elements, (len(flat_N), layout.num_elements)
    return {spec.name: flat_N[start:stop].reshape(spec.shape) for spec, start, stop in layout.spans()}


def union(section: ModelSection | PublishedSection, origin: Origin, parts: Sequence[Mapping[str, Array]]) -> WholeModel:
    """The model whose tensors are those of all parts. Raises StateCorrupt when they are not exactly a whole one."""
    tensors: dict[str, Array] = {}
    for part in parts:
        for name, tensor in part.items():
            if name in tensors:
                raise StateCorrupt(f"two stages hold {name}")
            tensors[name] = tensor
    wanted = {spec.name: spec.shape for spec in stage_layout_of(section, LayerRange.of(section)).tensors}
    missing, foreign = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing:
        raise StateCorrupt(f"{len(missing)} tensors are missing, {missing[0]} among them")
    if foreign:
        raise StateCorrupt(f"{len(foreign)} tensors are not of this model, {foreign[0]} among them")
    for name, shape in wanted.items():
        if tensors[name].shape != shape or tensors[name].dtype != np.float32:
            raise StateCorrupt(f"{name} is {tensors[name].dtype} {tensors[name].shape}, expected float32 {shape}")
    return WholeModel(section, origin, {name: tensors[name] for name in wanted})
