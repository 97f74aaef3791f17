"""The parameters of a slice of the transformer (transformer.py): names in Hugging Face's layout, shapes, and their order. Needs no torch."""

from dilocox_peer.manifest import ModelSection
from dilocox_peer.model.architecture import LayerRange
from dilocox_peer.types import Layout, TensorSpec

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


def stage_layout(section: ModelSection, layers: LayerRange) -> Layout:
    """Names and shapes of a stage's parameters, in order: all matrices, then all vectors.

    Matrices first, so that weight decay applies to one contiguous range; tensors that are multiplied with the same
    input stand together, so that one product serves them (`fused` in StageModel).
    """
    hidden, mlp = section.hidden_size, section.mlp_size
    kv_size = section.kv_heads * (hidden // section.heads)
    matrices: list[TensorSpec] = []
    vectors: list[TensorSpec] = []
    if layers.is_first_stage:
        matrices.append(TensorSpec(EMBEDDING, (section.vocab_size, hidden), "embedding"))
    for layer in range(layers.first, layers.last + 1):
        prefix = f"model.layers.{layer}."
        matrices += [
            TensorSpec(prefix + "self_attn.q_proj.weight", (hidden, hidden)),
            TensorSpec(prefix + "self_attn.k_proj.weight", (kv_size, hidden)),
            TensorSpec(prefix + "self_attn.v_proj.weight", (kv_size, hidden)),
            TensorSpec(prefix + "self_attn.o_proj.weight", (hidden, hidden)),
            TensorSpec(prefix + "mlp.gate_proj.weight", (mlp, hidden)),
            TensorSpec(prefix + "mlp.up_proj.weight", (mlp, hidden)),
            TensorSpec(prefix + "mlp.down_proj.weight", (hidden, mlp)),
        ]
        vectors += [
            TensorSpec(prefix + "input_layernorm.weight", (hidden,), "vector"),
            TensorSpec(prefix + "post_attention_layernorm.weight", (hidden,), "vector"),
        ]
    if layers.is_last_stage:
        matrices.append(TensorSpec(LM_HEAD, (section.vocab_size, hidden), "head"))
        vectors.append(TensorSpec(FINAL_NORM, (hidden,), "vector"))
    return Layout((*matrices, *vectors))
