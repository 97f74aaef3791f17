"""A published model's folder: its config, its small files, and the weights in safetensors shards, read tensor by tensor.

The folder was downloaded from somewhere and is not trusted: every size is bounded before it is read, pickled weights are
never opened, code that lies beside them is never run. Shards are memory-mapped, and a stage reads its own tensors alone.
Names and shapes in a file may be others than the model has (experts one by one, older names): the library's own table of
conversions says which tensors of the file make which parameters.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dilocox_peer.errors import ConfigError
from dilocox_peer.manifest import MAX_CONFIG_CHARS, ModelSection, PublishedSection
from dilocox_peer.model.families import build_empty, library
from dilocox_peer.model.published import Design
from dilocox_peer.paths import expanded
from dilocox_peer.small_files import SmallFile
from dilocox_peer.types import Layout, sha256

CONFIG = "config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SMALL_FILES = (
    CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
    "LICENSE", "LICENSE.txt", "LICENSE.md",
)  # fmt: skip
"""What goes with a model, verbatim; README.md does not, as an export has a card of its own."""
MAX_SMALL_BYTES = 64 * 1024 * 1024
MAX_INDEX_BYTES = 32 * 1024 * 1024
MAX_SHARDS = 2048
_MAPPED_BYTES = 64 << 20

Precision = Literal["float32", "bfloat16", "float16"]
_PRECISIONS: Mapping[str, Precision] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of the files; pattern, conversion: of the library's table, None where it is the parameter as it is."""

    name: str
    pattern: str | None
    conversion: Any


@dataclass(frozen=True, slots=True)
class _Header:
    """What a shard's header says of a tensor; safetensors has checked that the file has bytes for all of them."""

    shard: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def precision(self) -> Precision | None:
        """None: nothing is trained from it. A mask that lies beside the weights may be so, a quantized weight is."""
        return _PRECISIONS.get(self.dtype)


class _Mapped:
    """Shards as they are mapped into memory, and let go from time to time: what was read of them counts as ours until then."""

    def __init__(self) -> None:
        self._files: dict[Path, Any] = {}
        self._bytes = 0

    def tensor(self, path: Path, name: str) -> Tensor:
        """Raises SafetensorError, OSError, ValueError."""
        if self._bytes > _MAPPED_BYTES:
            self._files.clear()
            self._bytes = 0
        if path not in self._files:
            self._files[path] = safe_open(path, framework="pt")
        tensor: Tensor = self._files[path].get_tensor(name)
        self._bytes += tensor.nbytes
        return tensor


@dataclass
class ModelFolder:
    """Opened by `open_folder`. stored: name of each tensor in the files -> its header. bytes_read: of tensors, so far."""

    path: Path
    config_json: str
    files: tuple[SmallFile, ...]
    stored: Mapping[str, _Header]
    precision: Precision
    bytes_read: int = field(default=0)

    def read_small(self, name: str) -> bytes:
        """The bytes of one of `files`. Raises ConfigError when they have changed since the folder was opened."""
        wanted = next(file for file in self.files if file.name == name)
        raw = _read_bounded(self.path / name, MAX_SMALL_BYTES)
        if sha256(raw) != wanted.digest:
            raise ConfigError(f"{self.path / name} was changed while it was read: begin again")
        return raw

    def stage_parameters(self, design: Design, layout: Layout, *, into: Tensor | None = None) -> Tensor:
        """The flat float32 vector of a stage, from its own tensors alone. into: where it is written. Raises ConfigError that names what
        is missing, damaged or of another shape."""
        shapes = {spec.name: spec.shape for spec in layout.tensors}
        self.check_shapes(design, shapes)  # a config.json may claim any size: memory is taken for what the files hold
        flat_N = torch.empty(layout.num_elements) if into is None else into
        spans = {spec.name: (start, stop) for spec, start, stop in layout.spans()}
        missing = set(spans)
        for name, tensor in self.parameters(design, shapes):
            start, stop = spans[name]
            flat_N[start:stop].detach().copy_(tensor.flatten())
            missing.discard(name)
        if missing:
            raise self.lacking(min(missing))
        if not torch.isfinite(flat_N).all():
            raise ConfigError(f"{self.path} holds weights that are not finite: download the model again")
        return flat_N

    def unused(self, design: Design) -> list[str]:
        """Tensors in the files that are no parameter of the model."""
        used = {
            source.name for sources in self._plan(design, build_empty(design.config)).values() for source in sources
        }
        return sorted(set(self.stored) - used)

    def check_shapes(self, design: Design, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises ConfigError where the files' headers say other shapes than these parameters have, or hold fewer values."""
        family, held, found = design.family, 0, set()
        plan = self._plan(design, build_empty(design.config))
        if family.is_tied and not design.is_tied and family.input_embedding in plan:
            plan[family.head] = plan[family.input_embedding]
        for target in shapes.keys() & plan.keys():
            sources = plan[target]
            shape = self.stored[sources[0].name].shape
            if sources[0].conversion is None and shape != shapes[target]:
                raise ConfigError(f"{self.path}: {target} is {shape}, its config.json asks for {shapes[target]}")
            held += sum(prod(self.stored[each.name].shape) for each in sources)
            found.add(target)
        if held < sum(map(prod, shapes.values())):
            raise self.lacking(min(shapes.keys() - found, default="values"))

    def lacking(self, name: str) -> ConfigError:
        """What to say where a parameter is not in the files; a quantized weight may lie there under other names, and in parts."""
        module = name.rpartition(".")[0] + "."
        for other, header in self.stored.items():
            if header.precision is None and other.startswith(module):
                return _is_quantized(self.path, other, header)
        return ConfigError(f"{self.path} lacks {name}: download the model again")

    def parameters(self, design: Design, wanted: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
        """(name, values) of these parameters, by name and shape, about in the order of their names. What is missing does not come.
        Raises ConfigError for what is damaged or of another shape."""
        for name, tensor in self._parameters(design, wanted):
            if tuple(tensor.shape) != wanted[name]:
                raise ConfigError(
                    f"{self.path}: {name} is {tuple(tensor.shape)}, its config.json asks for {wanted[name]}"
                )
            yield name, tensor

    def _parameters(self, design: Design, wanted: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        family = design.family
        copies = family.is_tied and not design.is_tied and family.head in wanted
        model = build_empty(design.config)
        opened = _Mapped()
        for target, sources in self._plan(design, model).items():
            if target not in wanted and not (copies and target == family.input_embedding):
                continue
            tensors = [self._read(source.name, opened) for source in sources]
            for name, tensor in _converted(target, sources, tensors, model).items():
                if name in wanted:
                    yield name, tensor
                if copies and name == family.input_embedding:
                    yield family.head, tensor

    def _read(self, name: str, opened: "_Mapped") -> Tensor:
        path = self.stored[name].shard
        try:
            tensor = opened.tensor(path, name)
        except (SafetensorError, OSError, ValueError) as error:
            raise ConfigError(f"{path} is damaged ({error}): download it again") from None
        self.bytes_read += tensor.nbytes
        return tensor

    def _plan(self, design: Design, model: Any) -> "dict[str, list[_Stored]]":
        """Parameter, the first one that a conversion gives -> the tensors of the files that it is made of. Raises ConfigError where one of them
        has a precision that is not trained from."""
        library()
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        conversions = get_model_conversion_mapping(model)
        renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
        converters = [each for each in conversions if isinstance(each, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        parameters = model.state_dict()
        weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        plan: dict[str, list[_Stored]] = {}
        for source in sorted(self.stored, key=dot_natural_key):
            target, pattern = rename_source_key(source, renamings, converters, model.base_model_prefix, parameters)
            if target not in parameters and source in parameters:
                target, pattern = source, None
            if target not in parameters or (target == design.family.head and design.family.is_tied):
                continue  # a tied head in the files is the embedding once more
            if (header := self.stored[source]).precision is None:
                if target in weights:
                    raise _is_quantized(self.path, source, header)
                continue  # a buffer, which the library makes itself
            conversion = None if pattern is None else by_pattern[pattern]
            plan.setdefault(target, []).append(_Stored(source, pattern, conversion))
        return plan


def place_of(section: ModelSection | PublishedSection, given: Path | None = None) -> Path | None:
    """Where this machine has a published model's files, as far as its manifest or a person says; None: nowhere."""
    if given is not None or not isinstance(section, PublishedSection):
        return given
    try:
        source = expanded(section.source)
    except ConfigError:  # nobody's home
        return None
    return source if source.is_absolute() and source.is_dir() else None


def open_folder(path: Path) -> ModelFolder:
    """Reads config, index and headers, no weights. Raises ConfigError with the remedy."""
    if not path.is_dir():
        raise ConfigError(
            f"{path} is no folder: download the model first (`hf download NAME --local-dir FOLDER`) and name that folder"
        )
    if not (path / CONFIG).is_file():
        raise ConfigError(f"{path} holds no {CONFIG}: name the folder of a published model")
    files = tuple(
        SmallFile(sha256(raw), len(raw), name)
        for name in SMALL_FILES
        if (path / name).is_file()
        for raw in [_read_bounded(path / name, MAX_SMALL_BYTES)]
    )
    config = _read_json(path / CONFIG, MAX_INDEX_BYTES)
    config_json = json.dumps(config, separators=(",", ":"), sort_keys=True)
    if len(config_json) > MAX_CONFIG_CHARS:
        raise ConfigError(f"{path / CONFIG} has {len(config_json)} characters: at most {MAX_CONFIG_CHARS} are read")
    stored = _headers(path)
    return ModelFolder(path, config_json, files, stored, _precision(path, stored))


def _headers(path: Path) -> dict[str, _Header]:
    if (path / INDEX).is_file():
        listed = _read_json(path / INDEX, MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
            raise ConfigError(f"{path / INDEX} names no shards: download it again")
        names = sorted(set(listed.values()))
    elif (path / WEIGHTS).is_file():
        names = [WEIGHTS]
    elif any(path.glob("*.bin")) or any(path.glob("*.pt*")):
        raise ConfigError(f"{path} holds pickled weights only, which are never opened: take the model's safetensors")
    else:
        raise ConfigError(f"{path} holds no {WEIGHTS}: download the model again")
    if len(names) > MAX_SHARDS:
        raise ConfigError(f"{path / INDEX} names {len(names)} shards: at most {MAX_SHARDS} are read")
    stored: dict[str, _Header] = {}
    for name in names:
        shard = path / name
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ConfigError(f"{path / INDEX} names {name[:80]!r}, which is no shard beside it")
        if not shard.is_file():
            raise ConfigError(f"{path} lacks {name}, which its index names: download it again")
        try:
            with safe_open(shard, framework="pt") as file:
                for tensor in file.keys():  # noqa: SIM118 - no mapping
                    found = file.get_slice(tensor)
                    stored[tensor] = _Header(shard, tuple(found.get_shape()), str(found.get_dtype()))
        except (SafetensorError, OSError, ValueError) as error:
            raise ConfigError(f"{shard} is damaged ({error}): download it again") from None
    return stored


def _is_quantized(path: Path, name: str, header: _Header) -> ConfigError:
    return ConfigError(
        f"{path}: {name} is {header.dtype}: quantized weights are not trained; take the full-precision ones"
    )


def _precision(path: Path, stored: Mapping[str, _Header]) -> Precision:
    """The precision that most of the weights have."""
    if not stored:
        raise ConfigError(f"{path} holds no weights: download the model again")
    counts = Counter(header.precision for header in stored.values() if header.precision is not None)
    if not counts:
        raise _is_quantized(path, *min(stored.items()))
    return counts.most_common(1)[0][0]


def _converted(target: str, sources: Sequence[_Stored], tensors: Sequence[Tensor], model: Any) -> dict[str, Tensor]:
    """name -> parameter: what the library's conversion makes of these tensors of the files."""
    if sources[0].conversion is None:
        return {target: tensors[0]}
    conversion = deepcopy(sources[0].conversion)
    try:
        for source, tensor in zip(sources, tensors, strict=True):
            conversion.add_tensor(target, source.name, source.pattern, tensor)
        made = conversion.convert(target, model=model, config=model.config)
    except Exception as error:  # the library's, at tensors of other shapes than its conversion expects
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{target} cannot be made of the files' tensors ({reason}): download the model again"
        ) from None
    return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}


def published_tensors(design: Design, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a whole model under the names and in the shapes in which models of its family are published."""
    library()
    from transformers.core_model_loading import revert_weight_conversion

    model = build_empty(design.config)
    return dict(revert_weight_conversion(model, dict(tensors)))


def _read_bounded(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(limit + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if len(raw) > limit:
        raise ConfigError(f"{path} has more than {limit} bytes: it is no such file of a model")
    return raw


def _read_json(path: Path, limit: int) -> dict[str, Any]:
    try:
        content = json.loads(_read_bounded(path, limit))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON ({error}): download it again") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is no JSON object: download it again")
    return content
