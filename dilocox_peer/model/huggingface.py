"""A whole model as a Hugging Face folder, written whole or not at all, and read back.

The model is a Llama (tensor names, rotary convention, RMSNorm), so this only copies. The tokenizer is the run's own files as
they are, or bytes: ids 0..255 are the bytes of the text's UTF-8, nothing else; in the `tokenizers` library's terms a
byte-level BPE without merges. It takes neither `transformers` nor `tokenizers` to write the folder. Read back is only
what was written here of a run's own Llama; published models are read by weights.py.
"""

import ctypes
import fcntl
import glob
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dilocox_peer.complaints import first_error
from dilocox_peer.errors import ConfigError, StateCorrupt, not_written
from dilocox_peer.manifest import NUM_BYTES, DataSection, ModelSection, PublishedSection
from dilocox_peer.model.adapters import PEFT_FILES
from dilocox_peer.model.weights import CONFIG, INDEX, SMALL_FILES, WEIGHTS, Precision
from dilocox_peer.model.whole import Origin, WholeModel, union

FORMAT, FORMAT_OF_PUBLISHED = "dilocox-export-1", "dilocox-published-1"
MARK = "dilocox"
"""The field of a safetensors header that says one of them: without it a folder is not ours to replace."""
SUFFIX = ".safetensors"
FILES = frozenset(
    {WEIGHTS, CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
)
_FILES_OF_SOME = frozenset({"chat_template.jinja"})
_MAX_JSON_BYTES = 1 << 20
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux's renameat2
_NEW_S = 60.0
# config.json's names of our fields; the rotary base stands apart, as transformers 5 moved it.
_CONFIG_NAMES = {
    "layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "mlp_size": "intermediate_size",
    "context": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedTokenizer:
    """files: name -> content, a tokenizer.json among them. bos, eos: ids of what stands around its documents."""

    files: Mapping[str, bytes]
    data: DataSection
    bos: int | None
    eos: int | None


def config_of(section: ModelSection, *, bos: int | None = None, eos: int | None = None) -> dict[str, Any]:
    """config.json, for transformers 4 and 5."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{theirs: getattr(section, ours) for ours, theirs in _CONFIG_NAMES.items()},
        "head_dim": section.hidden_size // section.heads,
        "hidden_act": "silu",
        "rope_theta": section.rope_theta,  # transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": section.rope_theta},  # transformers 5
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        # Of bytes no token is special; left out, Llama's own defaults (1 and 2, ordinary bytes here) would end a text.
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": None,
        "torch_dtype": "float32",
        "use_cache": True,
    }


def tokenizer_of() -> dict[str, Any]:
    """tokenizer.json: every byte of the UTF-8 text is one token, its value the id."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: byte for byte, character in enumerate(_byte_characters())},
            "merges": [],
        },
    }


def json_file(content: dict[str, Any]) -> bytes:
    """As exports write their small files."""
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def small_files(section: ModelSection, tokenizer: PublishedTokenizer | None = None) -> dict[str, dict[str, Any]]:
    """The JSON files of the folder by name, but for those that a published tokenizer brings itself."""
    bos, eos = (None, None) if tokenizer is None else (tokenizer.bos, tokenizer.eos)
    files: dict[str, dict[str, Any]] = {
        CONFIG: config_of(section, bos=bos, eos=eos),
        "generation_config.json": {
            "do_sample": True,
            "temperature": 0.8,
            "top_k": 40,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": None,
        },
        "tokenizer.json": tokenizer_of(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": section.context,
            "clean_up_tokenization_spaces": False,
            "add_prefix_space": False,
        },
        "special_tokens_map.json": {},
    }
    if tokenizer is None:
        return files
    data = tokenizer.data
    special = {name: token for name, token in (("bos_token", data.bos), ("eos_token", data.eos)) if token}
    files["tokenizer_config.json"] |= special
    files["special_tokens_map.json"] |= special
    return {name: content for name, content in files.items() if name not in tokenizer.files}


def check_target(folder: Path, *, force: bool) -> None:
    """Raises ConfigError when folder may not be written: something is there that is not an export, or no force."""
    if not folder.exists() and not folder.is_symlink():
        return
    if not folder.is_dir() or folder.is_symlink():
        raise ConfigError(f"{folder} exists and is no folder: pass another --out")
    there = sorted(folder.iterdir())
    if not there:
        return
    if foreign := [entry.name for entry in there if not _is_ours(entry)]:
        raise ConfigError(f"{folder} holds {foreign[0]}, which no export wrote: pass another --out")
    weights = [entry for entry in there if entry.suffix == SUFFIX]
    if not weights or not all(_is_marked(each) for each in weights):
        raise ConfigError(f"{folder} holds a model that no export of ours wrote: pass another --out")
    if not force:
        raise ConfigError(f"{folder} exists: pass --force to replace the export in it, or another --out")


def _is_ours(entry: Path) -> bool:
    """Whether an export may have written a file of that name; folders and links none has."""
    name = entry.name
    if entry.is_symlink() or not entry.is_file():
        return False
    return (
        name in FILES
        or name in _FILES_OF_SOME
        or name in SMALL_FILES
        or name in ("README.md", INDEX, *PEFT_FILES)
        or re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", name) is not None
    )


def _is_marked(weights: Path) -> bool:
    """Whether the header says that we wrote it. Published models have the same files by the same names."""
    return _mark_of(weights) in (FORMAT, FORMAT_OF_PUBLISHED)


def is_of_published(folder: Path) -> bool:
    """Whether it holds a published model, or what an export made of one: `read_folder` is of a run's own Llama alone, or says
    what is wrong with a folder that has no weights or damaged ones."""
    has_others = (folder / INDEX).is_file() or any((folder / name).is_file() for name in PEFT_FILES)
    return has_others or _mark_of(folder / WEIGHTS) not in (FORMAT, None)


def _mark_of(weights: Path) -> str | None:
    """What the header says of who wrote it, "" where nothing; None where there is no header to be read."""
    try:
        with safe_open(weights, framework="numpy") as file:
            return str((file.metadata() or {}).get(MARK, ""))
    except (SafetensorError, OSError, ValueError):
        return None


def write_folder(
    folder: Path,
    model: WholeModel,
    *,
    force: bool = False,
    tokenizer: PublishedTokenizer | None = None,
    beside: Mapping[str, bytes] | None = None,
    precision: Precision | None = None,
) -> int:
    """Writes the export and returns its bytes. Whole or not at all; Raises ConfigError, DiskTakesNothing, and what was there stays. Of a run of adapters
    these alone: what they come to with the weights beside them is another model (merging.py).

    tokenizer: None for a run of bytes. Of a published model, beside: the source's small files by name; precision: of the weights, None: the source's.
    """
    check_target(folder, force=force)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep_killed(folder)
        work = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        held = _held(work)
        try:
            new = work / "new"
            new.mkdir()
            if isinstance(model.section, PublishedSection):
                from dilocox_peer.model.export import write_adapter, write_published

                precision = precision or model.section.dtype
                if model.section.lora_rank:
                    write_adapter(new, model, model.section, mark={MARK: FORMAT_OF_PUBLISHED})
                else:
                    mark = {MARK: FORMAT_OF_PUBLISHED}
                    write_published(new, model, model.section, beside=beside or {}, precision=precision, mark=mark)
            else:
                _write_files(new, model, model.section, tokenizer)
            size_bytes = _flush(new)
            if not (folder.exists() and _are_exchanged(new, folder)):
                _put_in_place(new, folder, old=work / "old")
        finally:
            shutil.rmtree(work, ignore_errors=True)
            if held is not None:
                os.close(held)
    except (OSError, SafetensorError) as error:
        raise not_written(f"{folder} cannot be written", _as_oserror(error), "pass another --out") from None
    return size_bytes


def _as_oserror(error: Exception) -> OSError:
    """The library of safetensors tells what the system said in words alone."""
    if isinstance(error, OSError):
        return error
    found = re.search(r"os error (\d+)", str(error))
    return OSError(int(found[1]), os.strerror(int(found[1]))) if found else OSError(str(error))


def _held(work: Path) -> int | None:
    """A descriptor of that folder with its lock, which ends with the process. None: another has it, or it is on a disk that locks no folders."""
    try:
        handle = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _sweep_killed(folder: Path) -> None:
    """What exports to folder left beside it when they were killed: as large as a model each. One that may hold the only model (`_put_in_place`), or
    anything that we do not write, stays; and one of this minute, which may not have its lock yet."""
    for work in folder.parent.glob(f".{glob.escape(folder.name)}.????????"):
        held = _held(work)
        if held is None:
            continue
        with suppress(OSError):
            is_ours = {each.name for each in work.iterdir()} <= {"new"} and work.stat().st_uid == os.getuid()
            if is_ours and time.time() - work.stat().st_mtime > _NEW_S:
                shutil.rmtree(work, ignore_errors=True)
        os.close(held)


def _are_exchanged(one: Path, other: Path) -> bool:
    """Whether each has the other's name now, at one stroke: killed at any time, there is a whole folder of either name. False: not on
    this system or file system, and nothing has changed."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


def _put_in_place(new: Path, folder: Path, *, old: Path) -> None:
    """Killed between its two renames, there is no folder, and both are beside it in a hidden one. Raises OSError."""
    if folder.exists():
        folder.rename(old)
    try:
        new.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise


def read_folder(folder: Path) -> WholeModel:
    """The model in a folder that `write_folder` wrote. Raises ConfigError (no such folder), StateCorrupt (damaged)."""
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        raise ConfigError(f"{folder} holds no {CONFIG} and {WEIGHTS}: pass a folder that `dilocox-peer export` wrote")
    section = _section_of(_read_json(folder / CONFIG), folder)
    try:
        with safe_open(folder / WEIGHTS, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get(MARK) != FORMAT:
                raise ConfigError(f"{folder} was not written by `dilocox-peer export`: its tokens are not known here")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        data = DataSection(tokenizer=metadata["tokenizer"], bos=metadata["bos"], eos=metadata["eos"])
        heads = tuple(metadata["heads"].split(","))
        origin = Origin(metadata["run_name"], metadata["run"], int(metadata["round"]), heads, data)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise StateCorrupt(f"{folder / WEIGHTS} is damaged ({error}): export again") from None
    return union(section, origin, [tensors])


def _write_files(folder: Path, model: WholeModel, section: ModelSection, tokenizer: PublishedTokenizer | None) -> None:
    for name, verbatim in () if tokenizer is None else tokenizer.files.items():
        (folder / name).write_bytes(verbatim)
    for name, content in small_files(section, tokenizer).items():
        (folder / name).write_bytes(json_file(content))
    save_file(dict(model.tensors), folder / WEIGHTS, {**model.origin.metadata, MARK: FORMAT})


def _flush(folder: Path) -> int:
    """Bytes of the folder's files, which are on the disk then, readable by all."""
    size_bytes = 0
    for path in folder.iterdir():
        path.chmod(0o644)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        size_bytes += path.stat().st_size
    return size_bytes


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise StateCorrupt(f"{path} cannot be read ({error}): export again") from None
    if not isinstance(content, dict):
        raise StateCorrupt(f"{path} is no JSON object: export again")
    return content


def _section_of(config: Mapping[str, Any], folder: Path) -> ModelSection:
    try:
        fields = {ours: config[theirs] for ours, theirs in _CONFIG_NAMES.items()}
        return ModelSection(**fields, rope_theta=config["rope_theta"])
    except KeyError as error:
        raise ConfigError(f"{folder / CONFIG} lacks {error}: pass a folder that `dilocox-peer export` wrote") from None
    except ValidationError as error:
        raise ConfigError(f"{folder / CONFIG}: {first_error(error)}") from None


def _byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary: itself where it can be seen, else one of the
    characters from 256 on, in order (the table of GPT-2's tokenizer, which `tokenizers` has built in)."""
    visible = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters, next_free = [], NUM_BYTES
    for byte in range(NUM_BYTES):
        if byte in visible:
            characters.append(chr(byte))
        else:
            characters.append(chr(next_free))
            next_free += 1
    return characters
