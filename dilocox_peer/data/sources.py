"""Documents in the files that a user names: what is read, in which order, and what is refused because it is no text.

A text file is one document, a line of JSONL is one. Files are read in the order of their names, so equal folders give equal
documents on every machine.
"""

import hashlib
import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dilocox_peer.errors import ConfigError

Text = npt.NDArray[np.uint8]

_STDLIB_EXCLUDED = frozenset(
    {"test", "tests", "site-packages", "dist-packages", "encodings", "idlelib", "idle_test", "lib2to3", "ensurepip",
     "turtledemo", "pydoc_data", "msilib", "__pycache__"}
)  # fmt: skip
_MMAP_FROM_BYTES = 64 * 1024 * 1024
_HEAD_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Document:
    """data: UTF-8. key: what its side of the split hangs on, so that a document held out by one peer is held out by all."""

    key: str
    data: Text


def library_documents() -> list[Document]:
    """The modules of Python's own library by their names. Raises ConfigError where there is no source of it."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if _STDLIB_EXCLUDED.isdisjoint(parts) and not parts[0].startswith("config-"):
            data = _read(path)
            if len(data):
                files.append(Document("/".join(parts), data))
    if not files:
        raise ConfigError(
            f"{root}: no source of Python's standard library there (a zipped or stripped Python?); "
            "use a full Python, or a run whose data are files"
        )
    return sorted(files, key=lambda file: file.key)


def documents_of(paths: Sequence[Path]) -> Iterator[Document]:
    """The documents of files and folders, each read when it is asked for. Empty ones are left out, and so are hidden files.

    Raises ConfigError that names the file and the remedy, OSError for what cannot be read.
    """
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path}: no such file or folder; check --data")
        if path.is_dir():
            for file in _files_below(path):
                yield from _documents_in(file)
            continue
        is_empty = True
        for document in _documents_in(path):
            is_empty = False
            yield document
        if is_empty:
            raise ConfigError(f"{path}: the file is empty; name one with text in it")


def _files_below(folder: Path) -> list[Path]:
    """Sorted by name; what is hidden is left out."""
    files = [found for found in folder.rglob("*") if found.is_file()]
    visible = [(each.relative_to(folder).parts, each) for each in files]
    return [path for parts, path in sorted(visible) if not any(part.startswith(".") for part in parts)]


def _documents_in(path: Path) -> Iterator[Document]:
    texts = _jsonl(path) if path.suffix == ".jsonl" else [_read(path)]
    for text in texts:
        if len(text):
            yield Document(_key(text), text)


def _key(text: Text) -> str:
    """By length and beginning: a file of gigabytes is not read through for it."""
    return hashlib.sha256(len(text).to_bytes(8, "big") + text[:_HEAD_BYTES].tobytes()).hexdigest()[:32]


def _read(path: Path) -> Text:
    """The bytes of path; large files are mapped, not read."""
    if path.stat().st_size >= _MMAP_FROM_BYTES:
        return np.memmap(path, dtype=np.uint8, mode="r")
    return np.frombuffer(path.read_bytes(), dtype=np.uint8)


def _jsonl(path: Path) -> Iterator[Text]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                text = _text_of(line, where=f"{path}:{number}")
                yield np.frombuffer(text.encode(errors="replace"), dtype=np.uint8)


def _text_of(line: bytes, *, where: str) -> str:
    try:
        record: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON ({error}); every line of a .jsonl file is an object") from None
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ConfigError(f'{where}: no "text" field with a string; every line of a .jsonl file needs one')
    return text
