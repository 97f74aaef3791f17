"""Has the kernel pace TCP connections of a process that we started (Linux): what it is given at once then leaves evenly.

p2pd has no such setting. Its sockets are borrowed for a moment (pidfd_getfd), which a system may refuse: then bursts leave as they come.
"""

import ctypes
import os
import re
import socket
import sys
from collections.abc import Iterable

from dilocox_peer.network.tcp_traffic import Connection

SO_MAX_PACING_RATE = 47  # the socket module has no name for it
NO_PACE = 0xFFFFFFFF
PIDFD_GETFD = 438  # of every architecture, since Linux 5.6
CHANGED = 0.05  # a rate that differs by less is left as it is
_INODE = re.compile(r"socket:\[(\d+)\]")


class KernelPace:
    """Of one process at a time. Not thread-safe."""

    def __init__(self) -> None:
        self._paced: dict[int, int] = {}  # rates, by connection
        self.is_possible = sys.platform == "linux" and hasattr(os, "pidfd_open")

    def pace(self, pid: int, connections: Iterable[Connection], bytes_per_s: float | None) -> None:
        """Each of these connections of the process sends no faster from now on; None: as fast as it can."""
        rate = NO_PACE if bytes_per_s is None else max(1, min(int(bytes_per_s), NO_PACE))
        there = {each.cookie: each for each in connections}
        self._paced = {cookie: paced for cookie, paced in self._paced.items() if cookie in there}
        due = {
            each.inode: cookie
            for cookie, each in there.items()
            if abs(self._paced.get(cookie, NO_PACE) - rate) > CHANGED * rate
        }
        if not due or not self.is_possible:
            return
        try:
            process = os.pidfd_open(pid)
        except OSError:
            return  # it has ended
        try:
            for inode, number in _descriptors(pid):
                if inode in due and _set(process, number, inode, rate):
                    self._paced[due[inode]] = rate
                elif inode in due and not os.path.exists(f"/proc/{pid}/fd/{number}"):
                    continue  # closed meanwhile
                elif inode in due:
                    self.is_possible = False
                    return
        except OSError:
            return  # it has ended
        finally:
            os.close(process)


def _descriptors(pid: int) -> Iterable[tuple[int, int]]:
    """(inode, file descriptor) of the sockets of a process. Raises OSError."""
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            match = _INODE.fullmatch(os.readlink(entry.path))
        except OSError:
            continue
        if match is not None:
            yield int(match[1]), int(entry.name)


def _set(process: int, number: int, inode: int, rate: int) -> bool:
    """Whether the kernel took it. The number may be another file's by now, which is left alone."""
    copy = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, process, number, 0)
    if copy < 0:
        return False
    with os.fdopen(copy, "rb", buffering=0) as file:
        if os.fstat(copy).st_ino != inode:
            return True
        try:
            sock = socket.socket(fileno=file.fileno())
        except OSError:
            return False
        try:
            sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate.to_bytes(4, sys.byteorder))
        except OSError:
            return False
        finally:
            sock.detach()  # the file closes it
    return True
