"""Whose connections the run's page keeps where there are too many."""

import asyncio
from typing import Any

from dilocox_peer.web.guard import Guard

MOST = 8


class Line(asyncio.Transport):
    def __init__(self, host: str) -> None:
        super().__init__({"peername": (host, 1)})
        self.is_cut = False

    def abort(self) -> None:
        self.is_cut = True

    def set_write_buffer_limits(self, high: Any = None, low: Any = None) -> None: ...


async def connect(guards: set[Guard], host: str) -> Line:
    line = Line(host)
    Guard(asyncio.Protocol, guards, MOST).connection_made(line)
    return line


async def test_one_range_of_addresses_keeps_nobody_out() -> None:
    """192 idle connections from one address, for 15 s each and again, took the page down for everybody."""
    guards: set[Guard] = set()
    crowd = [await connect(guards, f"8.8.8.{number}") for number in range(MOST)]
    assert not any(line.is_cut for line in crowd)
    assert (await connect(guards, "8.8.8.99")).is_cut, "one more of the same"
    visitors = [await connect(guards, host) for host in ("9.9.9.9", "1.1.1.1", "4.4.4.4")]
    assert not any(line.is_cut for line in visitors)
    assert sum(line.is_cut for line in crowd) == len(visitors)
    assert len(guards) == MOST


async def test_behind_a_proxy_all_are_alike() -> None:
    guards: set[Guard] = set()
    lines = [await connect(guards, "127.0.0.1") for _ in range(MOST + 2)]
    assert [line.is_cut for line in lines] == [False] * MOST + [True] * 2
