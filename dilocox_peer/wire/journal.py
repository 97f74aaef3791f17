"""A record of rounds.log, as it lies on disk. What records add up to is peer/rounds/durable.py."""

from typing import Annotated

from msgspec import Meta

from dilocox_peer.wire import versions
from dilocox_peer.wire.chain import Certificate, Value
from dilocox_peer.wire.checkpoints import Checkpoint
from dilocox_peer.wire.declared import Declared, Hash, Number, Parser
from dilocox_peer.wire.rounds import Accepted

MAX_RECORD_BYTES = 1 << 30  # a whole chain rewritten in one record; a million rounds of eight peers fit
MAX_LEFT = 64  # heads left for another branch that are remembered


class LogRecord(Declared, frozen=True, tag=versions.LOG):
    """durable.Durable, with its votes flat: from `voted_at`, the head they were given at, to `view_change`."""

    keep: Number
    appended: tuple[Certificate, ...]
    voted_at: Hash
    promised: Number
    accepted: Accepted | None
    view_change_signed: Number
    view_change: Value | None
    checkpoint: Checkpoint | None
    left: Annotated[tuple[Hash, ...], Meta(max_length=MAX_LEFT)]


class LogBase(Declared, frozen=True, tag=versions.PAGED):
    """That the chain's first `count` certificates, of which the last has this head, are those in the first past_bytes of the blocks
    beside the log (peer/rounds/past.py). It comes before all records."""

    count: Number
    past_bytes: Number
    head: Hash


LOG_BASE = Parser[LogBase](LogBase, "a log's beginning", 256, version=versions.PAGED)

# A log of before has accepted values without signature and promises; a checksum stands beside each record.
LOG_RECORD = Parser[LogRecord](LogRecord, "a record", MAX_RECORD_BYTES, version=versions.LOG, is_canonical=False)
