"""Documents in the files that a user names: what is read, in which order, and what is refused because it is no text.

    .txt, .md, .py ... (anything else)   a file is a document
    .jsonl, .jsonl.gz, .jsonl.zst        a line is a document: an object with the text in one of its fields; .ndjson is the same
    .parquet, .arrow                     a row is a document; .arrow is what `datasets` saves

Read piece by piece, in the order of their names, so equal folders give equal documents on every machine and no file is held
whole. The same documents give the same bytes whatever the format. gz, zst, parquet and arrow are told by their suffix and
refused by their first bytes under any other, as is everything that has bytes no text has.
"""

import gzip
import hashlib
import json
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dilocox_peer.data.chat import NoConversation, Spans, Writer
from dilocox_peer.errors import ConfigError
from dilocox_peer.extras import pip_install

Text = npt.NDArray[np.uint8]

_STDLIB_EXCLUDED = frozenset(
    {"test", "tests", "site-packages", "dist-packages", "encodings", "idlelib", "idle_test", "lib2to3", "ensurepip",
     "turtledemo", "pydoc_data", "msilib", "__pycache__"}
)  # fmt: skip
MMAP_FROM_BYTES = 64 * 1024 * 1024
_HEAD_BYTES = 65536
CUT_BYTES = 1 << 20
"""Longer documents are cut into several before they become tokens, so that memory is bounded, one piece of work does not hold the
interpreter for long, and a dump of everything in one file can be split."""

_ROWS = 256  # of a table at a time
_ROWS_BYTES = 16 << 20  # and about so much of their text
_TOLD = 3  # lines or conversations of a file that are left out with a line each
_BLOCK_BYTES = 1 << 20
_PACKED_BYTES = 1 << 12  # of zstd at a time: what it unpacks to is bounded by nothing else
_MAX_LINE_BYTES = 64 << 20
_BESIDE_TABLES = frozenset({"dataset_info.json", "dataset_dict.json", "state.json"})
_UNPACK, _CONVERT = "unpack it first", "take it out, or convert it to text"
_MAGIC = (
    (b"\x1f\x8b", "gzip", "unpack it first, or call it .jsonl.gz if that is what it holds"),
    (b"\x28\xb5\x2f\xfd", "zstd", "unpack it first, or call it .jsonl.zst if that is what it holds"),
    (b"PAR1", "parquet", "call it .parquet"),
    (b"ARROW1", "an arrow file", "save it as parquet"),
    (b"BZh", "bzip2", _UNPACK),
    (b"\xfd7zXZ", "xz", _UNPACK),
    (b"PK\x03\x04", "a zip archive (or an office document)", _UNPACK),
    (b"7z\xbc\xaf", "a 7z archive", _UNPACK),
    (b"\x89PNG", "a PNG image", "take it out"),
    (b"\xff\xd8\xff", "a JPEG image", "take it out"),
    (b"GIF8", "a GIF image", "take it out"),
    (b"%PDF", "a PDF document", _CONVERT),
    (b"\x7fELF", "a program", "take it out"),
    (b"\xff\xfe", "UTF-16", "convert it: `iconv -f UTF-16 -t UTF-8`"),
    (b"\xfe\xff", "UTF-16", "convert it: `iconv -f UTF-16 -t UTF-8`"),
)


@dataclass(frozen=True, slots=True)
class Document:
    """data: UTF-8. key: what its side of the split hangs on, so that a document held out by one peer is held out by all. answers: of
    a conversation, the stretches (in characters) that are trained on. times: how often an epoch goes over it."""

    key: str
    data: Text
    answers: Spans | None = None
    times: int = 1


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


LeftOut = Callable[[str], None]
"""Told of a file that is left out, or a part of one: one line with the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How files are read. column: the field of JSONL and parquet with the text. cut_bytes: longer documents are cut into several,
    at lines; None: large text files are mapped whole. refused: None raises ConfigError at the first file or line that is no text. chat: what
    writes conversations, in fields of JSONL, parquet or arrow files; those it cannot write are told to refused, a few of each file."""

    column: str = "text"
    cut_bytes: int | None = None
    refused: LeftOut | None = None
    chat: Writer | None = None


def documents_of(paths: Sequence[Path], reading: Reading = Reading()) -> Iterator[Document]:
    """The documents of files and folders, each read when it is asked for. Empty ones are left out, and so are hidden files.

    Raises ConfigError that names the file and the remedy, OSError for what cannot be read.
    """
    for path in files_of(paths, reading.refused):
        count = 0
        try:
            for document in _documents_in(path, reading):
                count += 1
                yield document
        except (ConfigError, OSError) as error:
            if reading.refused is None:
                raise
            reason = (
                str(error) if isinstance(error, ConfigError) else f"{path}: {(error.strerror or str(error)).lower()}"
            )
            before = f"{count:,} document{'s' if count > 1 else ''} before that came in, the rest is " if count else ""
            reading.refused(f"{' '.join(reason.split())}; {before}left out")  # pyarrow's end with a line break


def files_of(paths: Sequence[Path], refused: LeftOut | None) -> Iterator[Path]:
    """The files that documents are read from, in that order. refused: is told of links that lead to none and of folders that cannot be read; None:
    raises OSError at such a folder. Raises ConfigError for a path that is not there, or an empty file."""
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path}: no such file or folder: check the path")
        if path.is_dir():
            yield from _files_below(path, refused)
            continue
        if path.stat().st_size == 0:
            raise ConfigError(f"{path}: the file is empty; name one with text in it")
        yield path


def _files_below(folder: Path, refused: LeftOut | None) -> list[Path]:
    """Sorted by name; what is hidden is left out, and so is what `datasets` writes beside its tables."""

    def fails(error: OSError) -> None:
        if refused is None:
            raise error
        tell(error.filename, (error.strerror or str(error)).lower())

    def tell(path: str | Path, reason: str) -> None:
        if refused is not None:
            refused(f"{path}: {reason}; left out")

    found = []
    for where, folders, names in os.walk(folder, onerror=fails):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (Path(where, name) for name in folders):
            if path.is_symlink():
                tell(path, "a link to a folder is not followed, name that folder too")
        for path in (Path(where, name) for name in sorted(names)):
            if path.name.startswith(".") or path.name in _BESIDE_TABLES:
                continue
            if path.is_file():
                found.append((path.relative_to(folder).parts, path))
            elif path.is_symlink():
                tell(path, "a link that leads to no file")
    return [path for _, path in sorted(found)]


def _documents_in(path: Path, reading: Reading) -> Iterator[Document]:
    if reading.chat is not None:
        yield from _conversations(path, reading, reading.chat)
        return
    for text in _texts_in(path, reading):
        for part in [text] if reading.cut_bytes is None else _cut(text, reading.cut_bytes):
            if len(part):
                yield Document(_key(part), part)


class _LeftOutOf:
    """What is left out of a file, the file itself is not: the first few are told each with its reason, and how many they were in all."""

    def __init__(self, path: Path, what: str, refused: LeftOut | None) -> None:
        self._path, self._what, self._refused = path, what, refused
        self.count = 0

    def add(self, reason: str) -> None:
        """Raises ConfigError where nobody is to be told."""
        if self._refused is None:
            raise ConfigError(reason)
        self.count += 1
        if self.count <= _TOLD:
            self._refused(f"{reason}; left out")

    def tell_all(self) -> None:
        if self.count > _TOLD and self._refused is not None:
            self._refused(f"{self._path}: {self.count} {self._what} in all were left out")


def _conversations(path: Path, reading: Reading, chat: Writer) -> Iterator[Document]:
    left_out = _LeftOutOf(path, "conversations", reading.refused)
    for where, record in _records_in(path, reading.column, left_out, is_text=False):
        try:
            text, answers = chat.written(record)
        except NoConversation as error:
            left_out.add(f"{where}: {error}")
            continue
        data = _utf8(text)
        yield Document(_key(data), data, answers)
    left_out.tell_all()


def _suffixes(path: Path) -> list[str]:
    """The last two, whatever case they are written in."""
    return [suffix.lower() for suffix in path.suffixes[-2:]]


def _records_in(path: Path, column: str, left_out: _LeftOutOf, *, is_text: bool) -> Iterator[tuple[str, Any]]:
    """(where, what the column holds) of each record of a file that has some. Raises ConfigError for other files."""
    match _suffixes(path):
        case [*_, ".jsonl" | ".ndjson"]:
            with path.open("rb") as lines:
                yield from _jsonl(_lines(lines, path), path, column, left_out)
        case [*_, ".jsonl" | ".ndjson", ".gz"]:
            try:
                with gzip.open(path) as lines:
                    yield from _jsonl(_lines(lines, path), path, column, left_out)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise ConfigError(f"{path}: damaged gzip ({error}); fetch it again") from None
        case [*_, ".jsonl" | ".ndjson", ".zst"]:
            yield from _jsonl_zst(path, column, left_out)
        case [*_, ".parquet"]:
            yield from _tables(path, column, _parquet_columns, is_text=is_text)
        case [*_, ".arrow"]:
            yield from _tables(path, column, _arrow_columns, is_text=is_text)
        case _:
            raise ConfigError(f"{path}: conversations are read from .jsonl, .jsonl.gz, .jsonl.zst, .parquet and .arrow")


def _texts_in(path: Path, reading: Reading) -> Iterator[Text]:
    match _suffixes(path):
        case [*_, ".jsonl" | ".ndjson" | ".parquet" | ".arrow"] | [*_, ".jsonl" | ".ndjson", ".gz" | ".zst"]:
            yield from _texts_of_records(path, reading)
        case _:
            _refuse_what_is_no_text(path)
            if reading.cut_bytes is None:
                yield _read(path)
            else:
                yield from _pieces(path, reading.cut_bytes)


def _texts_of_records(path: Path, reading: Reading) -> Iterator[Text]:
    left_out = _LeftOutOf(path, "lines", reading.refused)
    is_empty, has_text, missing = True, False, 0
    for where, text in _records_in(path, reading.column, left_out, is_text=True):
        is_empty = False
        if text is None:
            missing += 1
        elif not isinstance(text, str):
            left_out.add(f'{where}: field "{reading.column}" holds no string; --column names another')
        elif text:
            has_text = True
            yield _utf8(text)
    if not has_text and (left_out.count or not is_empty):
        raise ConfigError(f'{path}: no line has text in its field "{reading.column}"; --column names another')
    if missing and reading.refused is not None:
        told = f'{path}: {missing} lines have nothing in a field "{reading.column}"; --column names another; left out'
        reading.refused(told)
    left_out.tell_all()


def _refuse_what_is_no_text(path: Path) -> None:
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    for magic, name, remedy in _MAGIC:
        if head.startswith(magic):
            raise ConfigError(f"{path}: is {name}, no text; {remedy}")
    if b"\0" in head:
        raise ConfigError(f"{path}: has NUL bytes, so it is no text; take it out, or convert it to UTF-8")


def _key(text: Text) -> str:
    """By length and beginning: a file of gigabytes is not read through for it."""
    return hashlib.sha256(len(text).to_bytes(8, "big") + text[:_HEAD_BYTES].tobytes()).hexdigest()[:32]


def _read(path: Path) -> Text:
    """The bytes of path; large files are mapped, not read."""
    if path.stat().st_size >= MMAP_FROM_BYTES:
        return np.memmap(path, dtype=np.uint8, mode="r")
    return np.frombuffer(path.read_bytes(), dtype=np.uint8)


def _pieces(path: Path, cut_bytes: int) -> Iterator[Text]:
    """A text file in pieces of at most cut_bytes, cut at lines."""
    rest = b""
    with path.open("rb") as file:
        while more := file.read(cut_bytes):
            rest += more
            while len(rest) > cut_bytes:
                stop = _line_end(rest, cut_bytes)
                yield np.frombuffer(rest[:stop], np.uint8)
                rest = rest[stop:]
    yield np.frombuffer(rest, np.uint8)


def _cut(text: Text, cut_bytes: int) -> Iterator[Text]:
    """As `_pieces` cuts a file. What is left is not copied: of a document of a gigabyte that would be a thousand times half of it."""
    start = 0
    while len(text) - start > cut_bytes:
        stop = start + _line_end(text[start : start + cut_bytes + 1].tobytes(), cut_bytes)
        yield text[start:stop]
        start = stop
    yield text[start:]


def _line_end(text: bytes, most: int) -> int:
    """Where a line ends within the first `most` bytes, else a character."""
    stop = text.rfind(b"\n", 0, most) + 1
    if stop:
        return stop
    for stop in range(most, most - 4, -1):  # a character has four bytes at most
        if text[stop] & 0xC0 != 0x80:
            return stop
    return most  # no UTF-8


def _jsonl(lines: Iterable[bytes], path: Path, column: str, left_out: _LeftOutOf) -> Iterator[tuple[str, Any]]:
    """A field that is not there is None."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            left_out.add(f"{where}: not JSON ({error}); every line of a .jsonl file is an object")
            continue
        if isinstance(record, dict):
            yield where, record.get(column)
        else:
            left_out.add(f"{where}: no object; every line of a .jsonl file is one")


def _utf8(text: str) -> Text:
    return np.frombuffer(text.encode(errors="replace"), dtype=np.uint8)


def _jsonl_zst(path: Path, column: str, left_out: _LeftOutOf) -> Iterator[tuple[str, Any]]:
    try:
        import zstandard
    except ImportError:
        raise ConfigError(f"{path}: `{pip_install('data', 'zstandard')}` brings what reads zstd") from None
    try:
        with path.open("rb") as file:
            yield from _jsonl(_lines(_Frames(file, zstandard.ZstdDecompressor()), path), path, column, left_out)
    except (EOFError, zstandard.ZstdError) as error:
        raise ConfigError(f"{path}: damaged zstd ({error}); fetch it again") from None


class _Frames:
    """What zstd's frames hold, one after the other. The library's own reader ends without a word where a file was cut short."""

    def __init__(self, file: Any, decompressor: Any) -> None:
        self._file, self._decompressor = file, decompressor
        self._frame: Any = None  # that is being read
        self._raw = b""

    def read(self, _size: int) -> bytes:
        """Some of it, b"" at the end. Raises EOFError, ZstdError."""
        while True:
            self._raw = self._raw or self._file.read(_PACKED_BYTES)
            if not self._raw and self._frame is None:
                return b""
            if not self._raw:
                raise EOFError("it ends before its end")
            self._frame = self._frame or self._decompressor.decompressobj()
            found: bytes = self._frame.decompress(self._raw)
            self._raw = b""
            if self._frame.eof:
                self._raw, self._frame = self._frame.unused_data, None
            if found:
                return found


def _lines(file: Any, path: Path) -> Iterator[bytes]:
    rest = b""
    while more := file.read(_BLOCK_BYTES):
        *whole, rest = (rest + more).split(b"\n")
        yield from whole
        if len(rest) > _MAX_LINE_BYTES:
            raise ConfigError(f"{path}: a line of more than {_MAX_LINE_BYTES >> 20} MB; every line is one document")
    yield rest


def _tables(path: Path, column: str, columns: "_Columns", *, is_text: bool) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
    except ImportError:
        raise ConfigError(f"{path}: `{pip_install('data', 'pyarrow')}` brings what reads parquet and arrow") from None
    is_empty = True
    try:
        for values in columns(pyarrow, path, column, is_text):
            for value in values.to_pylist():
                if value:
                    is_empty = False
                    yield str(path), value
    except pyarrow.ArrowException as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path}: damaged or no such table ({reason}); fetch it again") from None
    except UnicodeDecodeError:  # whoever wrote it said that these bytes are text, and nothing has checked that
        raise _no_utf8(path, column) from None
    if is_empty:
        raise ConfigError(f"{path}: column {column!r} is empty; --column names another")


def _no_utf8(path: Path, column: str) -> ConfigError:
    return ConfigError(f"{path}: column {column!r} has text that is no UTF-8; convert it, or take it out")


_Columns = Callable[[Any, Path, str, bool], Iterator[Any]]


def _parquet_columns(pyarrow: Any, path: Path, column: str, is_text: bool) -> Iterator[Any]:
    """The column, a few rows at a time; a row group is as large as its writer wished."""
    from pyarrow import parquet

    with parquet.ParquetFile(path, memory_map=True) as file:
        _require_column(pyarrow, file.schema_arrow, column, path, is_text=is_text)
        for group in range(file.num_row_groups):
            rows = _rows_at_once(file.metadata.row_group(group), column)
            for batch in file.iter_batches(rows, row_groups=[group], columns=[column], use_threads=False):
                yield batch.column(0)


def _rows_at_once(group: Any, column: str) -> int:
    """Fewer of long documents, as far as the file says how long they are."""
    parts = [group.column(index) for index in range(group.num_columns)]
    size: int = sum(
        each.total_uncompressed_size for each in parts if f"{each.path_in_schema}.".startswith(f"{column}.")
    )
    num_rows: int = group.num_rows
    return max(1, min(_ROWS, _ROWS_BYTES * num_rows // max(1, size)))


def _arrow_columns(pyarrow: Any, path: Path, column: str, is_text: bool) -> Iterator[Any]:
    from pyarrow import ipc

    with pyarrow.memory_map(str(path)) as file, ipc.open_stream(file) as reader:
        _require_column(pyarrow, reader.schema, column, path, is_text=is_text)
        for batch in reader:
            values = batch.column(reader.schema.get_field_index(column))
            try:
                # Where a value lies is read as the file has it: a damaged one would end the process by a signal.
                values.validate(full=True)
            except pyarrow.ArrowInvalid as error:
                raise _no_utf8(path, column) if "UTF8" in str(error) else error from None
            for start in range(0, batch.num_rows, _ROWS):
                yield values.slice(start, _ROWS)


def _require_column(pyarrow: Any, schema: Any, column: str, path: Path, *, is_text: bool) -> None:
    if column not in schema.names:
        raise ConfigError(f"{path}: no column {column!r}; --column names one of {', '.join(schema.names[:8])}")
    kind = schema.field(column).type
    if is_text and not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise ConfigError(f"{path}: column {column!r} holds {kind}, no text; --column names another")
