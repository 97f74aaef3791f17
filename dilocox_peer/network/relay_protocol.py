"""Circuit relay v2 as bytes, both sides of it: how a peer asks a relay for a reservation, and what a relay answers, and asks. Pure.

With a reservation the relay passes on to us whoever dials `RELAY/p2p-circuit/p2p/US`. p2pd would ask by itself, but minutes late and
never again after the relay has restarted [m]; so we ask, over a stream that it opens for us, and it takes the circuits. The relay's
part (relaying.py) is ours too: p2pd's own has no limit of rate.
Source: https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md. The messages are protobuf; what is read of them
is a number here and there, so no generated code.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

PROTOCOL: Final = "/libp2p/circuit/relay/0.2.0/hop"  # of who asks a relay
STOP_PROTOCOL: Final = "/libp2p/circuit/relay/0.2.0/stop"  # of a relay that passes somebody on
RESERVE: Final = b"\x02\x08\x00"  # length, field 1 (type): 0 (RESERVE)
MAX_ANSWER_BYTES: Final = 4096  # relays answer with some 300: their addresses and a signed voucher
MAX_LENGTH_BYTES: Final = 2
MAX_ID_BYTES: Final = 64  # of a PeerID in binary; those of RSA keys have 34, of Ed25519 keys 38

_STATUS, _OK = 2, 100  # a type of message, a status
_STOP_STATUS = 1


class RelayStatus(IntEnum):
    """What a relay answers."""

    OK = 100
    REFUSED = 200  # a reservation
    FULL = 201
    DENIED = 202
    NOT_REACHED = 203
    NO_RESERVATION = 204
    MALFORMED = 400


_REASONS = {
    200: "it refuses reservations",
    201: "it has no room for more",
    202: "it does not let this peer",
    400: "it calls the request malformed",
    401: "it did not expect the request",
}


@dataclass(frozen=True, slots=True)
class RelayLimit:
    """Of one circuit. 0: none."""

    num_bytes: int  # each way
    seconds: int


def length_of(prefix: bytes) -> int | None:
    """How long the answer is that begins with this prefix; None if the prefix is not whole. Raises ValueError."""
    if prefix and prefix[-1] < 128:
        length, _ = _varint(prefix, 0)
        if length > MAX_ANSWER_BYTES:
            raise ValueError(f"an answer of {length} bytes, at most {MAX_ANSWER_BYTES}")
        return length
    if len(prefix) >= MAX_LENGTH_BYTES:
        raise ValueError("an answer without a length")
    return None


def read_answer(raw: bytes) -> tuple[RelayLimit | None, str]:
    """(limit of each circuit, "") of a reservation, or (None, why there is none). Raises ValueError for what is no answer.

    When the reservation expires is not read: it is renewed long before, and relays' clocks may be wrong.
    """
    fields = dict(_fields(raw))
    if fields.get(1) != _STATUS:
        raise ValueError("not a status")
    status = fields.get(5)
    if status != _OK:
        return None, _REASONS.get(status, f"status {status}") if isinstance(status, int) else "no status"
    limit = fields.get(4, b"")
    if not isinstance(limit, bytes):
        raise ValueError("a limit that is a number")
    of_circuit = dict(_fields(limit))
    return RelayLimit(num_bytes=_number(of_circuit.get(2, 0)), seconds=_number(of_circuit.get(1, 0))), ""


# ---- the relay's part --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskPlace:
    """Somebody asks for a reservation."""


@dataclass(frozen=True, slots=True)
class AskCircuit:
    """Somebody asks to be passed on. target: a PeerID in binary, which may be none at all."""

    target: bytes


def read_request(raw: bytes) -> AskPlace | AskCircuit:
    """What somebody asks of a relay, without its length. Raises ValueError."""
    fields = dict(_fields(raw))
    if fields.get(1) == 0:
        return AskPlace()
    if fields.get(1) != 1:
        raise ValueError("neither a reservation nor a connection is asked for")
    peer = fields.get(2)
    target = dict(_fields(peer)).get(1) if isinstance(peer, bytes) else None
    if not isinstance(target, bytes) or not 0 < len(target) <= MAX_ID_BYTES:
        raise ValueError("a connection with nobody")
    return AskCircuit(target)


def reserved_until(unix_s: int) -> bytes:
    """The answer to who has a reservation, which is without limits of its own: the relay's budget is for all circuits together."""
    return _with_length(_number_field(1, _STATUS) + _bytes_field(3, _number_field(1, unix_s)) + _number_field(5, _OK))


def answered(verdict: RelayStatus) -> bytes:
    """Any other answer of a relay."""
    return _with_length(_number_field(1, _STATUS) + _number_field(5, verdict))


def passed_on(source: bytes) -> bytes:
    """What a relay says to whom it passes source on, a PeerID in binary."""
    return _with_length(_number_field(1, 0) + _bytes_field(2, _bytes_field(1, source)))


def is_taken(raw: bytes) -> bool:
    """Whether the peer takes whom a relay has passed on, by its answer to that, without its length. Raises ValueError."""
    fields = dict(_fields(raw))
    if fields.get(1) != _STOP_STATUS:
        raise ValueError("not a status")
    return fields.get(4) == _OK


def _with_length(message: bytes) -> bytes:
    return _varint_of(len(message)) + message


def _number_field(field: int, value: int) -> bytes:
    return _varint_of(field << 3) + _varint_of(value)


def _bytes_field(field: int, value: bytes) -> bytes:
    return _varint_of(field << 3 | 2) + _varint_of(len(value)) + value


def _varint_of(value: int) -> bytes:
    raw = b""
    while value > 127:
        raw, value = raw + bytes([value & 127 | 128]), value >> 7
    return raw + bytes([value])


def _number(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("a number was expected")
    return value


def _fields(raw: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protobuf message, numbers as such, everything else as bytes. Raises ValueError."""
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        match tag & 7:
            case 0:
                number, at = _varint(raw, at)
                yield tag >> 3, number
                continue
            case 1:
                length = 8
            case 2:
                length, at = _varint(raw, at)
            case 5:
                length = 4
            case kind:
                raise ValueError(f"a field of kind {kind}")
        if length > len(raw) - at:
            raise ValueError("a field that is cut off")
        yield tag >> 3, raw[at : at + length]
        at += length


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """(number, where it ends). Raises ValueError."""
    number = 0
    for shift in range(0, 64, 7):
        if at >= len(raw):
            raise ValueError("a number that is cut off")
        number |= (raw[at] & 127) << shift
        at += 1
        if raw[at - 1] < 128:
            return number, at
    raise ValueError("a number of more than nine bytes")
