"""Bytes that a process of ours moved over TCP, by the kernel's count (Linux, sock_diag): what p2pd does not tell.

Acknowledged and received bytes of its connections, TLS included, headers of TCP and IP not. Connections that open and close
between two looks are missed. The parsing and the adding up are pure; `look` asks the kernel, which walks its whole table: milliseconds of a
processor on a machine with much memory.
"""

import ipaddress
import os
import re
import socket
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

# The kernel walks its table once for each question: this one, older than that by family, asks of IPv4 and IPv6 at once.
TCPDIAG_GETSOCK, NLM_F_REQUEST_DUMP, NLMSG_ERROR, NLMSG_DONE = 18, 0x301, 2, 3
NETLINK_SOCK_DIAG, INET_DIAG_INFO = 4, 2
TIME_WAIT, LISTEN = 6, 10
# Those that count bytes: of a machine that is asked much, most others wait out their time.
STATES = 0xFFFFFFFF & ~(1 << TIME_WAIT | 1 << LISTEN)
HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port id
# inet_diag_req: family, lengths of addresses, extensions, a socket id; none of them narrows what is asked but the states.
REQUEST = struct.Struct("=BBBB48xII")
MESSAGE_BYTES, SOURCE_AT, TARGET_AT, COOKIE_AT, INODE_AT = 72, 8, 24, 44, 68  # of inet_diag_msg
RTT_AT, BYTES_AT, LEAST_RTT_AT = (
    68,
    120,
    148,
)  # of tcp_info, since Linux 4.6: microseconds; bytes acknowledged, then received
BUFFER_BYTES = 256 * 1024
TIMEOUT_S = 1.0
MAX_KNOWN = 4096  # connections that are not seen, of which what they had moved is kept in mind
HOME_RTT_S = 0.005  # beyond it nobody is taken for one of the network at home
UNKNOWN_RTT = 0xFFFFFFFF
_INODE = re.compile(r"socket:\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class Connection:
    """One of the kernel's, while it is open. cookie: no other has it. rtt_s: of its last packets; least_rtt_s: in five minutes; 0 before
    there is any."""

    cookie: int
    inode: int
    sent: int
    received: int
    rtt_s: float = 0.0
    least_rtt_s: float = 0.0
    ends: tuple[bytes, bytes] = (b"", b"")  # their addresses, 4 or 16 bytes each

    @property
    def host(self) -> str:
        """The other end's."""
        if not self.ends[1]:
            return ""
        remote = ipaddress.ip_address(self.ends[1])
        return str(getattr(remote, "ipv4_mapped", None) or remote)

    @property
    def leaves(self) -> bool:
        """For another network than this computer's own, over the line."""
        return leaves_home(*self.ends)


@dataclass(slots=True)
class Traffic:
    """The sum over all connections ever seen."""

    sent: int = 0
    received: int = 0
    _last: dict[int, tuple[int, int]] = field(default_factory=dict)  # of each, the latest seen last

    def take(self, found: Mapping[int, tuple[int, int]]) -> None:
        """found: (sent, received) of those open now, by cookie."""
        for cookie, (sent, received) in found.items():
            before = self._last.get(cookie, (0, 0))
            self.sent += max(0, sent - before[0])
            self.received += max(0, received - before[1])
        # A look may miss some, or fail: what they moved before is not to be counted again.
        self._last = {**{cookie: last for cookie, last in self._last.items() if cookie not in found}, **found}
        for cookie in list(self._last)[: -MAX_KNOWN - len(found)]:
            del self._last[cookie]


def connections_in(answer: bytes, inodes: Collection[int] | None = None) -> Iterator[Connection]:
    """Of one datagram of the kernel's answer; what has no byte counts is left out. inodes: those that are wanted; None: all."""
    at = 0
    while at + HEADER.size <= len(answer):
        length, kind, *_ = HEADER.unpack_from(answer, at)
        if length < HEADER.size:
            return
        if kind == TCPDIAG_GETSOCK:
            message = answer[at + HEADER.size : at + length]
            found = _connection(message) if inodes is None or _inode(message) in inodes else None
            if found is not None:
                yield found
        at += (length + 3) & ~3


def _inode(message: bytes) -> int:
    return struct.unpack_from("=I", message, INODE_AT)[0] if len(message) >= MESSAGE_BYTES else 0


def _connection(message: bytes) -> Connection | None:
    if len(message) < MESSAGE_BYTES:
        return None
    (cookie,), inode = struct.unpack_from("=Q", message, COOKIE_AT), _inode(message)
    at = MESSAGE_BYTES
    while at + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        if length < 4:
            return None
        if kind == INET_DIAG_INFO and length >= 4 + LEAST_RTT_AT + 4:
            info = at + 4
            acked, received = struct.unpack_from("=QQ", message, info + BYTES_AT)
            (rtt,), (least,) = (struct.unpack_from("=I", message, info + each) for each in (RTT_AT, LEAST_RTT_AT))
            known = least != UNKNOWN_RTT
            size = 16 if message[0] == socket.AF_INET6 else 4
            return Connection(
                cookie, inode, acked, received, rtt / 1e6 if known else 0.0, least / 1e6 if known else 0.0,
                (message[SOURCE_AT : SOURCE_AT + size], message[TARGET_AT : TARGET_AT + size]),
            )  # fmt: skip
        at += (length + 3) & ~3
    return None


def leaves_home(source: bytes, target: bytes) -> bool:
    """Whether a connection between these addresses, of 4 or 16 bytes, leaves the network at home."""
    if not target or source == target:
        return False
    remote = ipaddress.ip_address(target)
    if isinstance(remote, ipaddress.IPv6Address):
        if remote.ipv4_mapped is not None:
            remote = remote.ipv4_mapped
        elif source[:8] == target[:8]:
            return False
    return not (remote.is_private or remote.is_link_local or remote.is_unspecified)


def is_last(answer: bytes) -> bool:
    """Whether a datagram ends the answer."""
    at = 0
    while at + HEADER.size <= len(answer):
        length, kind, *_ = HEADER.unpack_from(answer, at)
        if kind in (NLMSG_DONE, NLMSG_ERROR) or length < HEADER.size:
            return True
        at += (length + 3) & ~3
    return False


def look(pid: int) -> dict[int, tuple[int, int]]:
    """(sent, received) of the TCP connections of a process, by cookie. Empty where the system does not say."""
    return {each.cookie: (each.sent, each.received) for each in connections_of([pid])}


def connections_of(pids: Iterable[int]) -> list[Connection]:
    """The TCP connections of these processes. Empty where the system does not say."""
    inodes: set[int] = set()
    for pid in pids:
        with suppress(OSError):  # it has ended
            inodes |= _inodes(pid)
    if not inodes:
        return []
    try:
        return list(_ask(inodes))
    except (OSError, AttributeError):  # another system, or not allowed
        return []


def _inodes(pid: int) -> set[int]:
    found = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            match = _INODE.fullmatch(os.readlink(entry.path))
        except OSError:
            continue  # closed meanwhile
        if match is not None:
            found.add(int(match[1]))
    return found


def _ask(inodes: Collection[int]) -> Iterator[Connection]:
    request = REQUEST.pack(socket.AF_UNSPEC, 0, 0, 1 << (INET_DIAG_INFO - 1), STATES, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(TIMEOUT_S)
        kernel.send(HEADER.pack(HEADER.size + len(request), TCPDIAG_GETSOCK, NLM_F_REQUEST_DUMP, 1, 0) + request)
        while True:
            answer = kernel.recv(BUFFER_BYTES)
            yield from connections_in(answer, inodes)
            if is_last(answer):
                return
