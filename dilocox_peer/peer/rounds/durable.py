"""What a peer must not forget: its chain and its votes at the chain's head. One append-only log, one record a Persist.

What the shell does (nothing else is needed):
- `Persist(durable)`: append `encode_record(durable)` to `rounds.log`, fsync, only then go on with the action list.
- At start: refuse a log of `another_version`, untouched. Else `loaded = load_log(raw, genesis)`; hand `loaded.durable` to RoundMachine.
  Before that, if `loaded.reason` is not empty: write `encode_record(loaded.durable)` (nothing for None) to a new file, fsync, rename it
  over the old one, fsync the folder. Cutting the file instead is enough for a torn last
  record and not for damage: the votes that stand in for the lost ones must be durable before the damage is gone. What `is_damaged`
  is kept beside first: it may be the only copy, and more may be made of it than is read here.
- When the file has grown: older certificates go into blocks beside it (past.py), flushed; then the file is replaced by one that begins
  with `encode_base`, which names them, and one record of the rest. Killed before the rename the old file counts, and what was
  appended to the blocks is nobody's.

A record says: keep the chain up to height `keep`, append these certificates, replace the votes. So a vote costs one
small record, and a branch switch one larger one. A record is length (4 bytes), CRC-32 (4 bytes), msgpack payload.
A torn last record, or zeros where it was to be, is a Persist that never finished: nothing after it in its list was carried out, so
dropping it is right. Damage before the last record is not: votes may be lost with it; what is left is loaded with
votes that give none in this view change nor in the next LOST_VOTES_VIEWS.
"""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from dilocox_peer.peer.rounds.chain import Chain
from dilocox_peer.types import Digest
from dilocox_peer.wire.chain import Certificate, Value
from dilocox_peer.wire.checkpoints import Checkpoint
from dilocox_peer.wire.declared import encode
from dilocox_peer.wire.journal import LOG_BASE, LOG_RECORD, MAX_LEFT, LogBase, LogRecord
from dilocox_peer.wire.rounds import Accepted
from dilocox_peer.wire.versions import LOG, PAGED, version_of_list

LOST_VOTES_VIEWS = 1024  # views skipped when votes may be lost: whatever was signed before is below
_HEADER = struct.Struct(">II")
_BASE_STARTS = b"\x94" + bytes([PAGED])
_PAYLOAD_STARTS = b"\x9a" + bytes([LOG])  # a list of 10 fields, of which the first is the version


@dataclass(frozen=True, slots=True)
class Votes:
    """What this peer has promised at `head`; another head, another Votes.

    promised: lowest ballot it still votes in. view_change_signed: highest view it has signed here (0: none), with its value;
    from then on it votes in no ballot of head's own view.
    """

    head: Digest
    promised: int = 0
    accepted: Accepted | None = None
    view_change_signed: int = 0
    view_change: Value | None = None


def sealed_votes(head: Digest, view: int) -> Votes:
    """Votes of a peer that no longer knows how it voted at head: none in this view, nor in the next LOST_VOTES_VIEWS."""
    return Votes(head=head, view_change_signed=view + LOST_VOTES_VIEWS)


def newest_left(left: tuple[Digest, ...], also: tuple[Digest, ...]) -> tuple[Digest, ...]:
    """The heads left for another branch that are remembered, each once."""
    return tuple(dict.fromkeys((*also[::-1], *left[::-1])))[:MAX_LEFT][::-1]


@dataclass(frozen=True, slots=True)
class Durable:
    """One change of what is durable: keep the chain up to height keep, append, these votes. A loaded one keeps what is in blocks.
    checkpoint: the newest of the run's owner; None: as it was. left: heads at which we voted and which we left for another
    branch; of a loaded one the newest MAX_LEFT. Should it come back to one, the peer votes there no more."""

    keep: int
    appended: Sequence[Certificate]
    votes: Votes
    checkpoint: Checkpoint | None = None
    left: tuple[Digest, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadedLog:
    """What a log says. durable: None for an empty log. reason: of what was dropped, "" if nothing was. is_damaged: it was more than a
    last record that a crash cut short."""

    durable: Durable | None
    valid_bytes: int
    reason: str
    is_damaged: bool = False


def encode_record(durable: Durable) -> bytes:
    """One record of the log."""
    votes = durable.votes
    payload = encode(
        LogRecord(
            durable.keep, tuple(durable.appended), votes.head, votes.promised, votes.accepted, votes.view_change_signed,
            votes.view_change, durable.checkpoint, durable.left,
        )
    )  # fmt: skip
    return _HEADER.pack(len(payload), zlib.crc32(payload)) + payload


def encode_base(count: int, past_bytes: int, head: Digest) -> bytes:
    """The beginning of a log whose first `count` certificates are in blocks."""
    payload = encode(LogBase(count, past_bytes, head))
    return _HEADER.pack(len(payload), zlib.crc32(payload)) + payload


def base_of(raw: bytes) -> LogBase | None:
    """What a log begins with, if older certificates are in blocks."""
    payload, _ = _payload_at(raw, 0)
    if payload is None or payload[: len(_BASE_STARTS)] != _BASE_STARTS:
        return None
    try:
        return LOG_BASE.read(payload)
    except ValueError:
        return None


def another_version(raw: bytes) -> tuple[int, int] | None:
    """(that of a whole record of a log which this program does not read, the one that it reads); None: there is none such."""
    start = 0
    while start < len(raw):
        payload, start = _payload_at(raw, start)
        if payload is None:
            return None
        ours = PAGED if payload[:1] == _BASE_STARTS[:1] else LOG
        if (theirs := version_of_list(payload)) is not None and theirs != ours:
            return theirs, ours
    return None


def rest_of(raw: bytes) -> tuple[int, int, Digest] | None:
    """Of a log whose first record cannot be read (where its next whole record starts, how many certificates are below that, the head of the last of
    them); None if there is none. The record names its parent by its hash: certificates that lead there are those that were lost."""
    if (start := _record_after(raw, 0)) is None or (payload := _payload_at(raw, start)[0]) is None:
        return None
    try:
        record = _decode_payload(payload)
    except ValueError:
        return None
    return start, record.keep, record.appended[0].parent if record.appended else record.votes.head


def load_log(raw: bytes, genesis: Digest, below: Chain | None = None) -> LoadedLog:
    """The chain and votes that the records in raw add up to. genesis: the head below the first certificate. below: the certificates
    that base_of(raw) says are in blocks, as far as they are there: `keep` of the durable says how many of them the records leave."""
    kept = below.height if below is not None else 0  # of those in blocks
    chain: list[Certificate] = []  # that follow
    votes: Votes | None = None
    checkpoint: Checkpoint | None = None
    left: tuple[Digest, ...] = ()
    start, reason, damaged = 0, "", False
    if (base := base_of(raw)) is not None:
        start = _payload_at(raw, 0)[1]
        if below is None or (below.height, below.head) != (base.count, base.head):
            reason, damaged = f"of {base.count} older certificates {kept} are here", True

    def head_at(height: int) -> Digest:
        if height > kept:
            return chain[height - kept - 1].head
        return below.head_at(height) if below is not None else genesis

    while start < len(raw) and not damaged:
        payload, stop = _payload_at(raw, start)
        if not payload:
            # After a power cut a file may have its new length and not its new bytes: zeros, which are a record of none with the right checksum.
            is_unwritten = start > 0 and not raw[start:].strip(b"\0")
            is_more = payload is not None or stop < len(raw) or _is_record_after(raw, start)
            damaged = not is_unwritten and (is_more or (not start and _is_no_first(raw, stop)))
            reason = f"record at byte {start} is torn or damaged"
            break
        try:
            record = _decode_payload(payload)
            has_come = record.keep <= kept + len(chain)
            heads = [head_at(record.keep), *(each.head for each in record.appended)] if has_come else []
            if not has_come or any(
                parent != child.parent for parent, child in zip(heads, record.appended, strict=False)
            ):
                raise ValueError("its certificates do not follow the chain")
        except ValueError as error:
            reason, damaged = f"record at byte {start}: {error}", True
            break
        if record.keep < kept:
            kept, chain = record.keep, []
        chain[record.keep - kept :] = record.appended
        votes, start = record.votes, stop
        checkpoint = record.checkpoint or checkpoint
        left = newest_left(left, record.left)
    if votes is None and base is not None:
        reason, damaged = reason or "nothing stands behind its beginning", True
    if votes is None and not damaged:
        return LoadedLog(None, start, reason)
    head = head_at(kept + len(chain))
    if damaged or votes is None or votes.head != head:
        view = chain[-1].view if chain else below.place_at(kept).view if below is not None else 0
        votes = sealed_votes(head, view)
    return LoadedLog(Durable(kept, tuple(chain), votes, checkpoint, left), start, reason, damaged)


def _payload_at(raw: bytes, start: int) -> tuple[bytes | None, int]:
    """The payload of the record at start (None if torn or damaged) and where the next one starts, or would."""
    if start + _HEADER.size > len(raw):
        return None, start + _HEADER.size
    length, checksum = _HEADER.unpack_from(raw, start)
    stop = start + _HEADER.size + length
    payload = raw[start + _HEADER.size : stop]
    if stop > len(raw) or zlib.crc32(payload) != checksum:
        return None, stop
    return payload, stop


def _is_no_first(raw: bytes, stop: int) -> bool:
    """Whether a first record that cannot be read, of which the next would start at stop, is none that a crash cut short: it has its length, and
    may be all that is known of a run, or it is a beginning that names blocks, which is written at once with a record behind it."""
    return stop <= len(raw) or raw.startswith(_BASE_STARTS, _HEADER.size)


def _is_record_after(raw: bytes, start: int) -> bool:
    """Whether there is one: then that at start is not a torn last one."""
    return _record_after(raw, start) is not None


def _record_after(raw: bytes, start: int) -> int | None:
    """Where the next whole record starts beyond the one at start, whose length is not to be believed."""
    payload_at = start + _HEADER.size
    while (payload_at := raw.find(_PAYLOAD_STARTS, payload_at + 1)) >= 0:
        if _payload_at(raw, payload_at - _HEADER.size)[0] is not None:
            return payload_at - _HEADER.size
    return None


def _decode_payload(payload: bytes) -> Durable:
    """Raises ValueError."""
    read = LOG_RECORD.read(payload)
    votes = Votes(read.voted_at, read.promised, read.accepted, read.view_change_signed, read.view_change)
    return Durable(read.keep, read.appended, votes, read.checkpoint, read.left)
