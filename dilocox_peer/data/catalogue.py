"""The catalogue of a run's data: which shards there are, by hash, and what each holds. Its own hash is in the manifest.

A shard is a file of tokens, little-endian, of 1, 2 or 4 bytes each, padded to a multiple of 8 bytes; behind them where each
document starts, 4 bytes each, and of conversations a bit for each token, whether it is trained on. Its name is its sha256. A
shard holds documents to train on, or such as are held out.
"""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dilocox_peer.complaints import first_error
from dilocox_peer.data.tokenizer import id_type
from dilocox_peer.errors import ConfigError

CATALOGUE_FILE = "catalogue.json"
MAX_CATALOGUE_BYTES = 64 << 20
MAX_SHARD_TOKENS = 1 << 30
MAX_DOCUMENT_TOKENS = 4 << 20
"""Of a document in a shard: what is drawn at a time is in memory. `tokenize` cuts texts long before that."""

UNIT_TOKENS = 16384
"""What is drawn at a time: the documents that start within so many tokens of a shard."""

MAX_TIMES = 1000
MAX_GONE_OVER = 1 << 22  # shards an epoch, each as often as it is gone over: a peer has their order in memory

_Count = Annotated[int, Field(ge=0, le=2**48)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Shard(_Frozen):
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    tokens: int = Field(gt=0, le=MAX_SHARD_TOKENS)
    documents: int = Field(gt=0, le=MAX_SHARD_TOKENS)
    text_bytes: _Count = Field(description="of its documents before they were cut into tokens")
    held_out: bool
    times: int = Field(1, ge=1, le=MAX_TIMES, description="how often an epoch goes over it")

    @property
    def file_name(self) -> str:
        return f"{self.sha256}.shard"

    @property
    def units(self) -> int:
        return -(-self.tokens // UNIT_TOKENS)


class Catalogue(_Frozen):
    """tokenizer, bos, eos: as a manifest's data section has them. vocab_size: ids are below it. answers: the documents are
    conversations, of which the answers alone are trained on."""

    format: Literal[1] = 1
    tokenizer: str = Field(pattern=r"^(bytes|[0-9a-f]{64})$")
    bos: str = Field(max_length=128)
    eos: str = Field(max_length=128)
    vocab_size: int = Field(gt=0, le=2**31)
    answers: bool = False
    shards: tuple[Shard, ...] = Field(strict=False, max_length=1 << 20)

    @model_validator(mode="after")
    def _has_both_sides(self) -> Self:
        if {shard.held_out for shard in self.shards} != {True, False}:
            raise ValueError("shards: some have to be held out, and some not")
        if len({shard.sha256 for shard in self.shards}) < len(self.shards):
            raise ValueError("shards: one is listed twice")
        if sum(shard.times for shard in self.train) > MAX_GONE_OVER:
            raise ValueError(f"shards: an epoch goes over more than {MAX_GONE_OVER} of them, each time counted")
        return self

    @property
    def dtype(self) -> "np.dtype[np.unsignedinteger]":
        return id_type(self.vocab_size)

    @property
    def train(self) -> tuple[Shard, ...]:
        return tuple(shard for shard in self.shards if not shard.held_out)

    @property
    def held_out(self) -> tuple[Shard, ...]:
        return tuple(shard for shard in self.shards if shard.held_out)

    def shard_bytes(self, shard: Shard) -> int:
        """Of its file."""
        return shard_bytes(shard, self.dtype, answers=self.answers)

    def to_bytes(self) -> bytes:
        return json.dumps(self.model_dump(), separators=(",", ":"), sort_keys=True).encode() + b"\n"


def shard_bytes(shard: Shard, dtype: "np.dtype[np.unsignedinteger]", *, answers: bool) -> int:
    """How large the file of a shard is, with tokens of that type, and a bit for each or none."""
    return padded(shard.tokens * dtype.itemsize) + 4 * shard.documents + (-(-shard.tokens // 8) if answers else 0)


def padded(size_bytes: int) -> int:
    return -(-size_bytes // 8) * 8


def catalogue_of(content: bytes, *, source: str) -> Catalogue:
    """Takes seconds for the largest; call it from a worker thread, which lets others run. Raises ConfigError, with `source` for its name."""
    try:
        # Shard by shard, each by a function of Python's: in one call of pydantic's or json's all other threads would wait for all of it.
        return Catalogue.model_validate(json.loads(content.decode(), object_hook=_shard_or_as_it_is))
    except ValidationError as error:
        reason = first_error(error)
    except (ValueError, RecursionError) as error:  # no JSON, or brackets in brackets
        reason = str(error)
    raise ConfigError(f"{source} is no catalogue: {reason}; make it with `dilocox-peer tokenize`")


def _shard_or_as_it_is(values: dict[str, Any]) -> Any:
    """Raises ValueError."""
    if "sha256" not in values:
        return values
    try:
        return Shard.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"shard {str(values['sha256'])[:16]!r}: {first_error(error)}") from None


def read_catalogue(folder: Path, *, wanted: str | None = None) -> tuple[Catalogue, str]:
    """(the catalogue in a folder that `tokenize` wrote, its sha256). wanted: the sha256 it must have. Raises ConfigError."""
    path = folder / CATALOGUE_FILE
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CATALOGUE_BYTES + 1)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"{path}: {reason}; name a folder that `dilocox-peer tokenize` wrote") from None
    if len(content) > MAX_CATALOGUE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_CATALOGUE_BYTES >> 20} MB: make fewer and larger shards")
    found = hashlib.sha256(content).hexdigest()
    if wanted is not None and found != wanted:
        raise ConfigError(f"{path} is of other data: its sha256 is {found[:16]}, the run wants {wanted[:16]}")
    return catalogue_of(content, source=str(path)), found


def has_catalogue(folder: Path) -> bool:
    return (folder / CATALOGUE_FILE).is_file()
