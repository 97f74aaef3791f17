"""NAT port mapping protocol (RFC 6886), which many routers at home speak: its messages. Pure: bytes out, the router's bytes in."""

import ipaddress
import struct
from dataclasses import dataclass

PORT = 5351  # of the router, UDP
ASK_ADDRESS = b"\x00\x00"
MAX_ANSWER_BYTES = 64  # those that we ask for have 12 and 16
_MAP_TCP, _ANSWER = 2, 128
_REQUEST = struct.Struct("!BBHHHI")  # version, what, 0, our port, outside port, seconds
_ADDRESS = struct.Struct("!BBHI4s")  # version, what, result, seconds since its start, address
_MAPPING = struct.Struct("!BBHIHHI")  # ..., our port, outside port, seconds


@dataclass(frozen=True, slots=True)
class Mapped:
    """An outside port that leads to ours, for so many seconds."""

    port: int
    seconds: int


def ask_mapping(port: int, outside: int, seconds: int) -> bytes:
    """For a TCP port of ours. outside: the one wished for; seconds: 0 ends it."""
    return _REQUEST.pack(0, _MAP_TCP, 0, port, outside, seconds)


def read_address(answer: bytes) -> str | None:
    """The router's outside address. None: it does not tell, or that is no answer."""
    if len(answer) != _ADDRESS.size:
        return None
    version, what, result, _, address = _ADDRESS.unpack(answer)
    return str(ipaddress.IPv4Address(address)) if (version, what, result) == (0, _ANSWER, 0) else None


def read_mapping(answer: bytes, port: int) -> Mapped | None:
    """What is mapped to that port of ours, for 0 seconds if nothing is any more. None: nothing was, or that is no answer."""
    if len(answer) != _MAPPING.size:
        return None
    version, what, result, _, ours, outside, seconds = _MAPPING.unpack(answer)
    if (version, what, result, ours) != (0, _ANSWER + _MAP_TCP, 0, port) or (seconds and not outside):
        return None
    return Mapped(outside, seconds)
