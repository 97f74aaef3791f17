"""The transformer, as the slice of layers that one stage owns.

Decoder-only: RMSNorm, rotary positions, grouped-query attention, SwiGLU, untied head; tensor names and the rotary
convention are those of Llama in Hugging Face's layout, so that export only copies. All parameters of a stage are views
into one flat float32 vector in the order of its `Layout`, all gradients views into a second one: optimizer, clipping,
snapshot and shift are each one operation on a vector. No training here (stage.py), no optimizer (inner.py).

Shape letters: B sequences, T tokens, D hidden size, H query heads, K head size, F MLP size, V vocabulary;
X rows or heads of several tensors that are used together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dilocox_peer.manifest import ModelSection
from dilocox_peer.model.architecture import LayerRange
from dilocox_peer.model.borders import as_addend, positions_of, seen_by
from dilocox_peer.model.flat_stage import FlatStage
from dilocox_peer.model.stage_layout import EMBEDDING, FINAL_NORM, LM_HEAD, stage_layout
from dilocox_peer.types import Layout, TensorSpec, canonical, sha256

EMBEDDING_STD = 0.5
HEAD_STD = 0.02
_KNOWS_GROUPS = "enable_gqa" in (F.scaled_dot_product_attention.__doc__ or "")  # torch 2.5


def initial_parameters(layout: Layout, section: ModelSection, seed: int) -> Tensor:
    """The flat float32 vector that training starts from, equal bits on every machine.

    Each tensor is a function of (seed, its name, its shape) alone, so any split of the layers gives the same values.
    Uniform, not normal: uniform numbers are made from random bits by exact arithmetic, logarithms and cosines differ
    in the last bit between processors.
    """
    flat_N = torch.empty(layout.num_elements)
    for spec, start, stop in layout.spans():
        flat_N[start:stop] = _initial_values(spec, section, seed)
    return flat_N


class LlamaStage(FlatStage):
    """A StageModel (architecture.py)."""

    def __init__(
        self,
        section: ModelSection,
        layers: LayerRange,
        *,
        device: str | torch.device = "cpu",
        flat_grad_N: Tensor | None = None,
        checkpointing: bool = False,
        compiled: bool = False,
    ) -> None:
        """flat_grad_N: the gradient vector of another version of the same stage, to be shared with it."""
        super().__init__(layers, stage_layout(section, layers), device=device, flat_grad_N=flat_grad_N)
        self.section = section
        self._checkpointing = checkpointing
        self._compiled = compiled
        self._run = torch.compile(self._block) if compiled else self._block
        self._embedding_VD = self._weight(EMBEDDING) if layers.is_first_stage else None
        self._layers = [self._layer(f"model.layers.{index}.") for index in range(layers.first, layers.last + 1)]
        self._final_norm_D = self._weight(FINAL_NORM) if layers.is_last_stage else None
        self._head_VD = self._weight(LM_HEAD) if layers.is_last_stage else None
        self._cos_T1K, self._sin_T1K = _rotary_tables(section, self.flat_N.device)

    @property
    def context(self) -> int:
        return self.section.context

    @property
    def vocab_size(self) -> int:
        return self.section.vocab_size

    def forward(self, x: Tensor, starts_BT: Tensor | None = None) -> Tensor:
        hidden_BTD = self.hidden(x, starts_BT)
        return self.logits(hidden_BTD) if self.layers.is_last_stage else hidden_BTD

    def hidden(self, x: Tensor, starts_BT: Tensor | None = None) -> Tensor:
        sight = self._sight(x.shape[1], starts_BT)
        for index in range(len(self._layers)):
            if self._checkpointing and torch.is_grad_enabled():
                x = checkpoint(self._step, index, x, sight, use_reentrant=False, preserve_rng_state=False)
            else:
                x = self._step(index, x, sight)
        return x

    def _step(self, index: int, x: Tensor, sight: "_Sight") -> Tensor:
        """A layer, the first with the embedding before it and the last with the norm behind it: checkpointed in one with them, what they give is not
        kept either."""
        if index == 0 and self._embedding_VD is not None:
            x = F.embedding(x, self._embedding_VD)
        x = self._run(self._layers[index], x, sight)
        if index == len(self._layers) - 1 and self._final_norm_D is not None:
            x = self._norm(x, self._final_norm_D)
        return x

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        assert self._head_VD is not None, "logits are the last stage's"
        return F.linear(hidden_BTD, self._head_VD)

    def version(self) -> "LlamaStage":
        return LlamaStage(
            self.section,
            self.layers,
            device=self.flat_N.device,
            flat_grad_N=self.flat_grad_N,
            checkpointing=self._checkpointing,
            compiled=self._compiled,
        )

    def _weight(self, *names: str) -> Tensor:
        """A leaf over the named tensors, which lie one behind the other and have equal rows; its gradient is a view
        into flat_grad_N."""
        start, stop, shape = self._spans[names[0]]
        rows = shape[0]
        for name in names[1:]:
            next_start, next_stop, next_shape = self._spans[name]
            assert (next_start, next_shape[1:]) == (stop, shape[1:]), f"{name} does not follow {names[0]}"
            stop, rows = next_stop, rows + next_shape[0]
        fused_shape = (rows, *shape[1:])
        weight = self.flat_N[start:stop].view(fused_shape).requires_grad_()
        weight.grad = self.flat_grad_N[start:stop].view(fused_shape)
        return weight

    def _layer(self, prefix: str) -> "_Layer":
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        return _Layer(
            attention_norm_D=self._weight(prefix + "input_layernorm.weight"),
            qkv_XD=self._weight(*(f"{attention}{part}_proj.weight" for part in "qkv")),
            out_DD=self._weight(attention + "o_proj.weight"),
            mlp_norm_D=self._weight(prefix + "post_attention_layernorm.weight"),
            gate_up_XD=self._weight(mlp + "gate_proj.weight", mlp + "up_proj.weight"),
            down_DF=self._weight(mlp + "down_proj.weight"),
        )

    def _sight(self, tokens: int, starts_BT: Tensor | None) -> "_Sight":
        if starts_BT is None:
            return _Sight(self._cos_T1K[:tokens], self._sin_T1K[:tokens], None)
        positions_BT = positions_of(starts_BT)
        return _Sight(self._cos_T1K[positions_BT], self._sin_T1K[positions_BT], as_addend(seen_by(starts_BT)))

    def _block(self, layer: "_Layer", hidden_BTD: Tensor, sight: "_Sight") -> Tensor:
        hidden_BTD = hidden_BTD + self._attention(layer, self._norm(hidden_BTD, layer.attention_norm_D), sight)
        return hidden_BTD + _swiglu(layer, self._norm(hidden_BTD, layer.mlp_norm_D))

    def _norm(self, x_BTD: Tensor, weight_D: Tensor) -> Tensor:
        return F.rms_norm(x_BTD, weight_D.shape, weight_D, self.section.norm_eps)

    def _attention(self, layer: "_Layer", x_BTD: Tensor, sight: "_Sight") -> Tensor:
        heads, kv_heads = self.section.heads, self.section.kv_heads
        qkv_BTXK = F.linear(x_BTD, layer.qkv_XD).view(*x_BTD.shape[:2], heads + 2 * kv_heads, -1)
        qk_BTXK, v_BTXK = qkv_BTXK.split_with_sizes([heads + kv_heads, kv_heads], 2)
        q_BTHK, k_BTXK = _rotated(qk_BTXK, sight).split_with_sizes([heads, kv_heads], 2)  # queries and keys in one go
        q_BHTK = q_BTHK.transpose(1, 2)
        mixed_BHTK = _attended(q_BHTK, k_BTXK.transpose(1, 2), v_BTXK.transpose(1, 2), sight)
        return F.linear(mixed_BHTK.transpose(1, 2).flatten(2), layer.out_DD)


@dataclass(frozen=True, slots=True)
class _Sight:
    """cos, sin: of each token's position, (T, 1, K/2), or with a dimension B before them. seen_B1TT: what is added where (borders.py); None: it sees all before
    it."""

    cos: Tensor
    sin: Tensor
    seen_B1TT: Tensor | None


def _rotated(x_BTXK: Tensor, sight: _Sight) -> Tensor:
    """Rotary positions, halves convention (dimension i turns with i + K/2)."""
    first, second = x_BTXK.chunk(2, -1)
    return torch.cat((first * sight.cos - second * sight.sin, second * sight.cos + first * sight.sin), -1)


def _attended(q_BHTK: Tensor, k_BXTK: Tensor, v_BXTK: Tensor, sight: _Sight) -> Tensor:
    """Keys and values serve several query heads each. On processors the kernel does that, in a sixth less time and a third less memory; not all of
    other devices' do, and get them once for every head."""
    given: dict[str, Any] = {"attn_mask": sight.seen_B1TT, "is_causal": sight.seen_B1TT is None}
    queries_each = q_BHTK.shape[1] // k_BXTK.shape[1]
    if queries_each > 1 and q_BHTK.device.type == "cpu" and _KNOWS_GROUPS:
        given["enable_gqa"] = True
    elif queries_each > 1:
        k_BXTK, v_BXTK = (each.repeat_interleave(queries_each, 1) for each in (k_BXTK, v_BXTK))
    return F.scaled_dot_product_attention(q_BHTK, k_BXTK, v_BXTK, **given)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one block."""

    attention_norm_D: Tensor
    qkv_XD: Tensor
    out_DD: Tensor
    mlp_norm_D: Tensor
    gate_up_XD: Tensor
    down_DF: Tensor


def _swiglu(layer: _Layer, x_BTD: Tensor) -> Tensor:
    gate_BTF, up_BTF = F.linear(x_BTD, layer.gate_up_XD).chunk(2, -1)
    return F.linear(F.silu(gate_BTF) * up_BTF, layer.down_DF)


def _rotary_tables(section: ModelSection, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, (context, 1, K/2) each. In float64 on the CPU first: exact to float32 everywhere."""
    head_size = section.hidden_size // section.heads
    exponents = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
    angles = torch.arange(section.context, dtype=torch.float64)[:, None] * section.rope_theta**-exponents
    cos_T1K, sin_T1K = (table.float().unsqueeze(1).to(device) for table in (angles.cos(), angles.sin()))
    return cos_T1K, sin_T1K


def _initial_values(spec: TensorSpec, section: ModelSection, seed: int) -> Tensor:
    """Flat values of one tensor: ones for norms, else uniform with the standard deviation of its kind."""
    if len(spec.shape) == 1:
        return torch.ones(spec.num_elements)
    bound = _standard_deviation(spec, section) * 3**0.5
    return uniform(["dilocox-init", seed, spec.name], spec.num_elements, bound=bound)


def uniform(key: Sequence[str | int], count: int, *, bound: float) -> Tensor:
    """(count,) float32 in [-bound, bound), a function of the key alone: equal bits on every machine."""
    words = np.frombuffer(sha256(canonical(list(key)))[:16], dtype="<u8")
    bits = np.random.Philox(key=words).random_raw(count) >> np.uint64(40)
    unit = torch.from_numpy(bits.astype(np.float32)) * 2.0**-24  # 24 bits: exact
    return (unit - 0.5) * float(2 * np.float32(bound))


def _standard_deviation(spec: TensorSpec, section: ModelSection) -> float:
    """1/sqrt(fan-in); what adds to the residual stream smaller by sqrt(2 layers), so that the sum stays of order 1."""
    if spec.name == EMBEDDING:
        return EMBEDDING_STD
    if spec.name == LM_HEAD:
        return HEAD_STD
    deviation: float = spec.shape[1] ** -0.5
    if spec.name.endswith(("o_proj.weight", "down_proj.weight")):
        deviation /= (2 * section.layers) ** 0.5
    return deviation
