"""What a fetch wants done: the actions that store/fetch.py gives and store/pull.py carries out."""

from dataclasses import dataclass

from dilocox_peer.store.outline import Outline
from dilocox_peer.types import PeerId


@dataclass(frozen=True, slots=True)
class AskOutline:
    donor: PeerId


@dataclass(frozen=True, slots=True)
class AskRange:
    """For the bytes from start up to stop."""

    donor: PeerId
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Shorten:
    """The range that was asked for ends here; bytes from stop on are not to be told of. stop may be where it is: hang up."""

    donor: PeerId
    stop: int


@dataclass(frozen=True, slots=True)
class CheckChunk:
    """All its bytes have arrived: answer with `checked`. number: of this check; one may be out of date when it is done."""

    index: int
    number: int


@dataclass(frozen=True, slots=True)
class CheckWhole:
    """All chunks are as this outline says: answer with `checked_whole`."""

    outline: Outline


@dataclass(frozen=True, slots=True)
class Accused:
    donor: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The thing is here."""


@dataclass(frozen=True, slots=True)
class GaveUp:
    reason: str


FetchAction = AskOutline | AskRange | Shorten | CheckChunk | CheckWhole | Accused | Finished | GaveUp
