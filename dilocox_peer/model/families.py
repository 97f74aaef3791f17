"""Families of decoders that `transformers` knows: which of them can be cut into stages, and where.

A family is taken from config.json alone and built from the library's own classes; code that a folder brings along is never
run. What a model does between its layers cannot be seen from outside, so it is tried: a tiny copy of the same class, its
sizes shrunk, its switches as published, runs once to see which parameters are used before and which behind the layers,
and then in two pieces, whose logits and gradients must be those of the whole. A family that cannot be shrunk, that keeps
state between layers, shares parameters among them or holds buffers that training would have to keep is refused by name.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from dilocox_peer.errors import ConfigError
from dilocox_peer.extras import pip_install

TINY_LAYERS = 4
MAX_LAYERS = 1024
_MAX_TINY_ELEMENTS = 20_000_000
_CODE_PATHS = ("attn_implementation", "experts_implementation", "per_layer_config")
_TINY_WIDTH, _TINY_HEAD, _TINY_VOCABULARY, _TINY_TOKENS = 32, 8, 96, 12
_SIZES: Mapping[str, int] = {
    "hidden_size": _TINY_WIDTH, "n_embd": _TINY_WIDTH, "d_model": _TINY_WIDTH, "word_embed_proj_dim": _TINY_WIDTH,
    "embedding_size": _TINY_WIDTH, "intermediate_size": 48, "n_inner": 48, "ffn_dim": 48, "ffn_hidden_size": 48, "d_ff": 48,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "num_key_value_heads": 2, "head_dim": _TINY_HEAD,
    "rotary_dim": _TINY_HEAD, "num_hidden_layers": TINY_LAYERS, "n_layer": TINY_LAYERS, "n_layers": TINY_LAYERS,
    "num_layers": TINY_LAYERS, "vocab_size": _TINY_VOCABULARY, "max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24, "n_group": 1, "topk_group": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "sliding_window": 6,
    "attention_chunk_size": 6, "original_max_position_embeddings": 32, "multi_query_group_num": 2,
}  # fmt: skip
"""config.json's names of sizes -> what a tiny copy has."""
_TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "decoder_start_token_id")


@dataclass(frozen=True, slots=True)
class Family:
    """Where a family's models are cut.

    layers: the name of its list of layers. before, behind: parameters used before the first and behind the last of them.
    input_embedding, head: the two that a tied model shares. returns_tuple: what its layers give.
    """

    model_type: str
    class_name: str
    layers: str
    before: frozenset[str]
    behind: frozenset[str]
    embeddings: frozenset[str]
    input_embedding: str
    head: str
    returns_tuple: bool
    is_tied: bool


def library() -> Any:
    """The module `transformers`. Raises ConfigError where it is not installed."""
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            f"this run's model is a published one, and `transformers` is not installed: {pip_install('models')}"
        ) from None
    quiet: Any = transformers.logging.set_verbosity_error
    quiet()
    return transformers


def config_from(config_json: str, **changes: Any) -> Any:
    """The library's config object of a config.json. Raises ConfigError for a family that the library does not know."""
    transformers = library()
    values = {**json.loads(config_json), **changes}
    model_type = values.get("model_type")
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if not isinstance(model_type, str) or model_type not in known:
        raise ConfigError(
            f"model type {str(model_type)[:60]!r} is not known to transformers {transformers.__version__}: no code is taken from a "
            "model's folder; another version of transformers may know it"
        )
    if values.get("quantization_config"):
        raise ConfigError(f"{model_type}: these weights are quantized; take the full-precision ones of the same model")
    try:
        _leave_out(values, model_type)
        return known[model_type].from_dict(values)
    except ConfigError:
        raise
    except Exception as error:  # validators of a hundred families, each with its own exceptions
        raise ConfigError(f"{model_type}: transformers cannot use its config.json ({_line(error)})") from None


def _leave_out(values: dict[str, Any], model_type: str) -> None:
    """What would choose the library's code, or load some: the model is computed as the tiny copy was. And how many labels a classifier
    has, of each of which the library would make a name. Raises ConfigError for more layers than are taken, before lists of so many are
    made, and RecursionError."""
    for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        if isinstance(said := values.get(key), int | float) and not 0 < said <= MAX_LAYERS:
            raise ConfigError(f"{model_type}: {key} is {str(said)[:20]}; 1 to {MAX_LAYERS} are taken")
    for key in ("auto_map", "num_labels", *_CODE_PATHS, *(f"_{each}" for each in _CODE_PATHS)):
        values.pop(key, None)
    for value in values.values():
        if isinstance(value, dict):
            _leave_out(value, model_type)


def model_class(config: Any) -> Any:
    """The class of causal language models of this config. Raises ConfigError when there is none, or the weights are of
    another class."""
    transformers = library()
    of_config = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in of_config:
        raise ConfigError(f"{config.model_type} is no causal language model in transformers {transformers.__version__}")
    found = of_config[type(config)]
    said = getattr(config, "architectures", None)
    named = said if isinstance(said, list) else [said]
    if said and found.__name__ not in named:
        raise ConfigError(
            f"{config.model_type}: its weights are those of a {str(named[0])[:60]!r}, not of a {found.__name__}"
        )
    return found


def build_empty(config: Any) -> Any:
    """The model with nothing in its tensors (device meta), in evaluation mode: no dropout. Raises ConfigError for sizes that make none."""
    cls = model_class(config)
    try:
        with torch.device("meta"):
            try:
                model = cls._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
            except (ValueError, ImportError):  # a family without SDPA
                model = cls._from_config(config, attn_implementation="eager", dtype=torch.float32)
        return model.eval()
    except Exception as error:  # the code of a hundred families, each with its own exceptions
        raise ConfigError(
            f"{config.model_type}: the model cannot be built from its config.json ({_line(error)}): its owner has to take the file as it "
            "was published, or another model"
        ) from None


def layer_list(model: nn.Module, config: Any) -> tuple[str, nn.ModuleList]:
    """Name and list of the layers. Raises ConfigError."""
    count = config.num_hidden_layers
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not found:
        raise ConfigError(f"{config.model_type} cannot be cut: it has no list of {count} layers")
    return min(found, key=lambda each: (each[0].count("."), len(each[0])))


@cache
def family_of(config_json: str) -> Family:
    """Where models of this config.json are cut. Raises ConfigError, with the reason, for those that cannot be."""
    return _Trial(config_json).family


def check_cut(config_json: str) -> None:
    """Raises ConfigError unless a tiny copy cut in two gives the logits and gradients of the whole one."""
    from dilocox_peer.model.published import cut_differs

    family = family_of(config_json)
    trial = _Trial(config_json)
    if reason := cut_differs(trial.config, family, trial.model):
        raise ConfigError(f"{family.model_type} cannot be cut: {reason}")


def sees_across(config_json: str) -> bool:
    """Whether documents packed into one sequence see each other: the attention of this family cannot be told where they begin."""
    from dilocox_peer.model import published

    trial = _Trial(config_json)
    return published.sees_across(trial.config, family_of(config_json), trial.model)


class _Trial:
    """A tiny copy with random weights, and what one run of it shows."""

    def __init__(self, config_json: str) -> None:
        model_type = config_from(config_json).model_type
        try:
            self.config = tiny_config(config_json)
            cls = model_class(self.config)
            with torch.device("meta"):
                empty = cls(self.config)
            size = sum(each.numel() for each in (*empty.parameters(), *empty.buffers()))
            if size > _MAX_TINY_ELEMENTS:  # a size that only this family has stayed as published
                raise ConfigError(f"{model_type} cannot be cut: a tiny copy of it has {size / 1e6:.0f} M parameters")
            with seeded(0):
                self.model = cls(self.config).float().eval()
            with torch.no_grad():
                for parameter in self.model.parameters():  # zeros and ones hide what is left out
                    parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.05)
            self.family = self._look()
        except ConfigError:
            raise
        except Exception as error:  # the code of a hundred families, each with its own exceptions
            raise ConfigError(f"{model_type} cannot be cut: a tiny copy of it does not run ({_line(error)})") from None

    def _look(self) -> Family:
        config, model = self.config, self.model
        name, layers = layer_list(model, config)
        persistent = set(model.state_dict()) - {each for each, _ in model.named_parameters(remove_duplicate=False)}
        if persistent:
            raise ConfigError(
                f"{config.model_type} cannot be cut: it has buffers that training would have to keep ({min(persistent)})"
            )
        used, returns_tuple = _use_of_parameters(model, layers)
        inside = {each for each, _ in model.named_parameters() if each.startswith(name + ".")}
        if shared := used["in"] - inside:
            raise ConfigError(f"{config.model_type} cannot be cut: its layers share {min(shared)}")
        before, behind = used["before"] - inside, used["behind"] - inside
        if both := before & behind:
            raise ConfigError(f"{config.model_type} cannot be cut: {min(both)} is used before and behind its layers")
        unused = {each for each, _ in model.named_parameters()} - inside - before - behind
        if unused:
            raise ConfigError(f"{config.model_type} cannot be cut: nobody uses {min(unused)}")
        of_module = {module: each for each, module in model.named_modules()}
        embeddings = {
            f"{of_module[module]}.weight" for module in model.modules() if isinstance(module, nn.Embedding)
        } & before
        source = json.loads(config.to_json_string(use_diff=False))
        return Family(
            model_type=config.model_type,
            class_name=type(model).__name__,
            layers=name,
            before=frozenset(before),
            behind=frozenset(behind),
            embeddings=frozenset(embeddings),
            input_embedding=f"{of_module[model.get_input_embeddings()]}.weight",
            head=f"{of_module[model.get_output_embeddings()]}.weight",
            returns_tuple=returns_tuple,
            is_tied=bool(source.get("was_tied", False)),
        )


def tiny_config(config_json: str) -> Any:
    """The config of a copy that runs in milliseconds: sizes shrunk, untied, everything else as published."""
    original = config_from(config_json)
    values = original.to_dict()
    was_tied = bool(values.get("tie_word_embeddings", False))
    heads = values.get("num_attention_heads") or values.get("n_head") or 0
    grouped = values.get("num_key_value_heads")
    shrunk: dict[str, Any] = {
        key: _SIZES[key] for key, value in values.items() if key in _SIZES and isinstance(value, int) and value > 0
    }
    if grouped is not None and grouped == heads:
        shrunk["num_key_value_heads"] = 4
    elif grouped == 1:
        shrunk["num_key_value_heads"] = 1
    for key in _TOKEN_IDS:
        if values.get(key) is not None:
            shrunk[key] = 1
    for key, value in values.items():
        if isinstance(value, list) and len(value) == original.num_hidden_layers:
            shrunk[key] = _one_of_each(value)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(values.get(key), dict):
            shrunk[key] = _tiny_rope(values[key])
    for key in ("attn_pdrop", "resid_pdrop", "embd_pdrop", "attention_dropout", "hidden_dropout"):
        if key in values:
            shrunk[key] = 0.0
    # Of small models that are not the size they say: what a config asserts of the product is kept by both numbers.
    values = {**values, **shrunk, "tie_word_embeddings": False, "was_tied": was_tied, "use_cache": False}
    values.pop("dtype", None)
    values.pop("torch_dtype", None)
    return config_from(json.dumps(values))


def _one_of_each(value: list[Any]) -> list[Any]:
    """TINY_LAYERS elements in which every kind of layer of the original occurs, as far as there is room."""
    kinds = list(dict.fromkeys(json.dumps(each) for each in value))[:TINY_LAYERS]
    rest = [json.dumps(each) for each in value]
    return [json.loads(each) for each in (kinds + rest)[:TINY_LAYERS]]


def _tiny_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Factors a dimension are as many as half a head has; nested ones are a kind of layer each."""
    shrunk: dict[str, Any] = {}
    share = float(rope.get("partial_rotary_factor", 1.0) or 1.0)
    for key, value in rope.items():
        if isinstance(value, dict):
            shrunk[key] = _tiny_rope(value)
        elif key in ("short_factor", "long_factor") and isinstance(value, list):
            shrunk[key] = value[: int(_TINY_HEAD * share) // 2]
        elif key == "original_max_position_embeddings":
            shrunk[key] = _SIZES[key]
        else:
            shrunk[key] = value
    return shrunk


def _use_of_parameters(model: nn.Module, layers: nn.ModuleList) -> tuple[dict[str, set[str]], bool]:
    """Names of the parameters used before, in and behind the layers, in one run; whether a layer gives a tuple."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    used: dict[str, set[str]] = {"before": set(), "in": set(), "behind": set()}
    at, gives_tuple = "before", False

    def note(module: nn.Module, _arguments: Any) -> None:
        used[at].update(names[id(parameter)] for parameter in module.parameters(recurse=False))

    def enter(_module: nn.Module, _arguments: Any) -> None:
        nonlocal at
        at = "in"

    def leave(_module: nn.Module, _arguments: Any, output: Any) -> None:
        nonlocal at, gives_tuple
        at, gives_tuple = "behind", isinstance(output, tuple)

    hooks = [module.register_forward_pre_hook(note) for module in model.modules()]
    hooks += [layers[0].register_forward_pre_hook(enter), layers[-1].register_forward_hook(leave)]
    try:
        with torch.no_grad():
            model(input_ids=tiny_tokens(), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return used, gives_tuple


def tiny_tokens() -> Tensor:
    """(2, T) ids of the tiny copy's vocabulary."""
    generator = torch.Generator().manual_seed(2)
    return torch.randint(2, _TINY_VOCABULARY, (2, _TINY_TOKENS), generator=generator)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """torch's own generator seeded inside, as it was afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
