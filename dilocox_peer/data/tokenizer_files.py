"""tokenizer.json files: the one a person names, what lies beside it, and where this machine keeps them by hash.

A file is kept as `<folder>/<sha256>/tokenizer.json` with the other files of a published tokenizer beside it, which say nothing
that a run depends on and go into its exports as they are.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dilocox_peer.data.tokenizer import FILE_NAME, Tokenizer, tokenizer_of_run
from dilocox_peer.errors import ConfigError, not_written
from dilocox_peer.manifest import BYTES, DataSection

MAX_TOKENIZER_BYTES = 64 * 1024 * 1024
"""The largest published ones, of vocabularies of 260,000, have 33 MB."""

COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""What belongs to a tokenizer.json in a published folder."""

_MAX_COMPANION_BYTES = 1 << 20
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<eos>", "</s>", "<|im_end|>", "[SEP]")
_BEGINS = ("<|begin_of_text|>", "<bos>", "<s>", "<|startoftext|>", "[CLS]")


def find_tokenizer(
    section: DataSection, vocab_size: int, *, given: Path | None, kept: Path, beside: Path | None = None
) -> Tokenizer:
    """The run's tokenizer: of bytes, or of the file given, or of one that is kept or lies in the folder `beside`.

    A file given is kept from now on. Raises ConfigError when it is not the run's, or none is here.
    """
    if section.tokenizer == BYTES:
        if given is not None:
            raise ConfigError(f"--tokenizer {given}: this run's tokens are bytes; leave --tokenizer out")
        return tokenizer_of_run(section, vocab_size, None)
    if given is not None:
        tokenizer = tokenizer_of_run(section, vocab_size, read_tokenizer_file(given), source=str(given))
        keep_tokenizer(kept, given)
        return tokenizer
    for folder in (kept / section.tokenizer, beside):
        if folder is None or not (folder / FILE_NAME).is_file():
            continue
        content = read_tokenizer_file(folder)
        if hashlib.sha256(content).hexdigest() == section.tokenizer:
            return tokenizer_of_run(section, vocab_size, content, source=str(folder / FILE_NAME))
    raise ConfigError(
        f"this run's text is cut by a tokenizer that is not here: pass --tokenizer with the {FILE_NAME} whose sha256 is "
        f"{section.tokenizer[:16]}..., which the run's owner has"
    )


def has_tokenizer(section: DataSection, *, given: Path | None, kept: Path, beside: Path | None = None) -> bool:
    """Whether find_tokenizer has a file to look at."""
    if section.tokenizer == BYTES or given is not None:
        return True
    folders = (kept / section.tokenizer, beside)
    return any(folder is not None and (folder / FILE_NAME).is_file() for folder in folders)


def read_tokenizer_file(path: Path) -> bytes:
    """The content of a tokenizer.json, or of the one in a folder. Raises ConfigError."""
    if path.is_dir():
        path = path / FILE_NAME
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TOKENIZER_BYTES + 1)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"--tokenizer {path}: {reason}; name a tokenizer.json or the folder of a model") from None
    if len(content) > MAX_TOKENIZER_BYTES:
        raise ConfigError(f"--tokenizer {path}: larger than {MAX_TOKENIZER_BYTES >> 20} MB: it is no tokenizer.json")
    return content


def bounds_beside(path: Path, content: bytes) -> tuple[str, str]:
    """(bos, eos) for the documents of a run with this tokenizer; empty: none.

    As the folder's tokenizer_config.json says (bos only where it is also put before texts), else by the names that such tokens
    have in published tokenizers. path: of the tokenizer.json or its folder.
    """
    folder = path if path.is_dir() else path.parent
    config = _small_json(folder / "tokenizer_config.json")
    listed = _part(content.decode(errors="replace"), "added_tokens")  # by a file that nobody has looked at yet
    known = {_content(each) for each in listed} - {""} if isinstance(listed, list) else set()
    eos = next((each for each in (_content(config.get("eos_token")), *_ENDS) if each in known), "")
    bos = _content(config.get("bos_token"))
    adds_bos = config.get("add_bos_token", None)
    if not config:
        bos, adds_bos = next((each for each in _BEGINS if each in known), ""), True
    elif adds_bos is None:
        adds_bos = bos in json.dumps(
            _part(content.decode(errors="replace"), "post_processor") or "", ensure_ascii=False
        )
    return (bos if adds_bos and bos in known and bos != eos else ""), eos


def companions_of(path: Path) -> dict[str, bytes]:
    """What lies beside a tokenizer.json of its own files, name -> content, as it is."""
    folder = path if path.is_dir() else path.parent
    found = {}
    for name in COMPANIONS:
        try:
            with (folder / name).open("rb") as file:
                content = file.read(_MAX_COMPANION_BYTES + 1)
        except OSError:
            continue
        if len(content) <= _MAX_COMPANION_BYTES:
            found[name] = content
    return found


def keep_tokenizer(folder: Path, path: Path) -> Path:
    """Copies a tokenizer.json and its companions to where `folder` keeps it, whole or not at all. Raises ConfigError."""
    content = read_tokenizer_file(path)
    target = folder / hashlib.sha256(content).hexdigest()
    if not _holds(target, content):
        _write_folder(target, {FILE_NAME: content, **companions_of(path)})
    return target


def kept_files(folder: Path, tokenizer: Tokenizer) -> dict[str, bytes]:
    """A tokenizer.json with its companions as `folder` keeps them, name -> content; none of bytes. Raises ConfigError."""
    if tokenizer.name == BYTES:
        return {}
    kept = folder / tokenizer.name
    return {FILE_NAME: read_tokenizer_file(kept), **companions_of(kept)}


def _holds(target: Path, content: bytes) -> bool:
    try:
        return (target / FILE_NAME).read_bytes() == content
    except OSError:
        return False


def _write_folder(target: Path, files: Mapping[str, bytes]) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name[:16]}."))
        try:
            for name, content in files.items():
                with (work / name).open("wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            work.chmod(0o755)
            shutil.rmtree(target, ignore_errors=True)
            try:
                work.rename(target)
            except OSError:
                if not _holds(target, files[FILE_NAME]):  # else another peer of this machine was quicker
                    raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise not_written(f"{target} cannot be written", error) from None


def _small_json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_MAX_COMPANION_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _part(text: str, name: str) -> Any:
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return whole.get(name) if isinstance(whole, dict) else None


def _content(token: object) -> str:
    """A token of tokenizer_config.json, which is a string or an object with one."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else ""
