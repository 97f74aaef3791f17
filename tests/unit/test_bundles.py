"""Small things go together, and whatever a donor answers is what was asked for or nothing."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from dilocox_peer.errors import ProtocolError
from dilocox_peer.network.bulk import PeerSilent, RequestRefused
from dilocox_peer.store.bundles import ABSENT, BUNDLED_BYTES, MAX_BUNDLED, PLACE_S, Bundles, names_in
from dilocox_peer.types import Digest, PeerId, sha256

A, B = PeerId("a"), PeerId("b")
THINGS = [bytes((number,)) * (100 + number) for number in range(40)]
NAMES = [sha256(thing) for thing in THINGS]
Answer = Callable[[list[Digest]], tuple[dict[str, Any], bytes]]


def honest(has: list[bytes]) -> Answer:
    here = {sha256(thing): thing for thing in has}

    def answer(names: list[Digest]) -> tuple[dict[str, Any], bytes]:
        given = [here.get(name) for name in names]
        return {"sizes": [ABSENT if raw is None else len(raw) for raw in given]}, b"".join(raw or b"" for raw in given)

    return answer


class Donors:
    """In place of a transport. asked: names, request by request."""

    def __init__(self, **answers: Answer) -> None:
        self._answers = answers
        self.asked: list[tuple[str, list[Digest]]] = []
        self.at_once = self.most_at_once = 0

    async def fetch(self, peer: PeerId, kind: str, header: dict[str, Any], **bounds: Any) -> Any:
        assert kind == "store"
        names = names_in(header["names"])
        assert names is not None
        self.asked.append((peer, names))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0.01)
        self.at_once -= 1
        said, body = self._answers[peer](names)
        if len(body) > bounds["max_body_bytes"]:
            raise ProtocolError(peer, "a body of more than was asked for")
        return said, bytearray(body)


class Fetching:
    def __init__(self, donors: Donors, at_once: int = 4, place_s: float = PLACE_S) -> None:
        self.tasks = set[asyncio.Task[None]]()
        self.failed: list[tuple[PeerId, bool]] = []
        self.bundles = Bundles(
            donors, self._start, at_once=at_once, stall_s=1.0, place_s=place_s,
            on_failed=lambda donor, _why, lied: self.failed.append((donor, lied)),
        )  # fmt: skip

    def _start(self, ask: Any, _name: str) -> None:
        task = asyncio.create_task(ask)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def get(self, numbers: range, *donors: PeerId) -> list[bytes | None]:
        async with asyncio.timeout(10):
            return list(await asyncio.gather(*(self.bundles.get(NAMES[each], donors, 1000) for each in numbers)))


async def test_what_is_wanted_of_a_donor_at_once_goes_together() -> None:
    donors = Donors(a=honest(THINGS))
    assert await Fetching(donors).get(range(40), A) == THINGS
    assert [len(names) for _, names in donors.asked] == [MAX_BUNDLED, MAX_BUNDLED, 40 - 2 * MAX_BUNDLED]
    assert donors.most_at_once == 1


async def test_what_the_first_has_not_the_next_gives() -> None:
    donors = Donors(a=honest(THINGS[:3]), b=honest(THINGS[2:5]))
    fetching = Fetching(donors)
    assert await fetching.get(range(6), A, B) == [*THINGS[:5], None]
    assert [who for who, _ in donors.asked] == [A, B]
    assert not fetching.failed, "that a thing is not there is no fault"


def swapped(names: list[Digest]) -> tuple[dict[str, Any], bytes]:
    return honest(THINGS)(names[::-1])


def too_much(names: list[Digest]) -> tuple[dict[str, Any], bytes]:
    said, body = honest(THINGS)(names)
    return said, body + b"!"


def too_little(names: list[Digest]) -> tuple[dict[str, Any], bytes]:
    said, body = honest(THINGS)(names)
    return said, body[:-1]


def with_sizes(sizes: Any) -> Answer:
    return lambda names: ({"sizes": sizes}, honest(THINGS)(names)[1])


LIES: list[Answer] = [
    swapped, too_much, too_little, with_sizes(None), with_sizes([]), with_sizes([1 << 60] * 3), with_sizes([-2] * 3),
    with_sizes(["100", 101, 102]), with_sizes([True, 101, 102]), with_sizes([-1.0] * 3), lambda _names: ({}, b""),
    lambda _names: ({"sizes": [ABSENT] * 3}, b"not asked for"), lambda _names: ({"sizes": [0, 0, 0]}, b""),
]  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
async def test_a_lie_is_nothing_and_another_is_asked(lie: Answer) -> None:
    fetching = Fetching(Donors(a=lie, b=honest(THINGS)))
    assert await fetching.get(range(3), A, B) == THINGS[:3]
    assert fetching.failed == [(A, True)]


async def test_who_is_busy_is_asked_again_the_next_time() -> None:
    is_busy = True

    def answer(names: list[Digest]) -> tuple[dict[str, Any], bytes]:
        if is_busy:
            raise RequestRefused(A, "busy: at most 4 fetches at once for one peer")
        return honest(THINGS)(names)

    fetching = Fetching(Donors(a=answer))
    assert await fetching.get(range(3), A) == [None] * 3
    is_busy = False
    assert await fetching.get(range(3), A) == THINGS[:3]
    assert fetching.failed == [(A, False)]


async def test_a_silent_donor_is_nothing_and_a_fault_is_told_to_who_asked() -> None:
    def silent(_names: list[Digest]) -> tuple[dict[str, Any], bytes]:
        raise PeerSilent(A, "nothing for 1 s")

    def broken(_names: list[Digest]) -> tuple[dict[str, Any], bytes]:
        raise ZeroDivisionError

    fetching = Fetching(Donors(a=silent, b=broken))
    assert await fetching.get(range(3), A) == [None] * 3
    assert fetching.failed == [(A, False)]
    with pytest.raises(ZeroDivisionError):
        await fetching.get(range(3), B)
    assert not fetching.tasks


async def test_so_many_donors_are_asked_at_once_and_what_nobody_waits_for_is_not_asked_for() -> None:
    donors = Donors(**{name: honest(THINGS) for name in "abcdef"})
    fetching = Fetching(donors, at_once=2)
    gone = asyncio.create_task(fetching.get(range(7, 8), A))
    await asyncio.sleep(0)
    gone.cancel()
    found = await asyncio.gather(*(fetching.get(range(3), PeerId(name)) for name in "abcdef"))
    assert found == [THINGS[:3]] * 6
    assert donors.most_at_once == 2
    assert all(NAMES[7] not in names for _, names in donors.asked)


async def test_donors_that_say_nothing_do_not_have_all_places() -> None:
    class Silent(Donors):
        async def fetch(self, peer: PeerId, kind: str, header: dict[str, Any], **bounds: Any) -> Any:
            if peer != A:
                begun.release()
                await asyncio.Event().wait()
            return await super().fetch(peer, kind, header, **bounds)

    begun, donors = asyncio.Semaphore(0), Silent(a=honest(THINGS))
    fetching = Fetching(donors, at_once=2, place_s=0.1)
    silent = [asyncio.create_task(fetching.get(range(3), PeerId(name))) for name in "bcdef"]
    async with asyncio.timeout(30.0):
        await begun.acquire()
        await begun.acquire()  # all places are theirs
        for _ in range(5):
            assert await fetching.get(range(3), A) == THINGS[:3]
    others = [asyncio.create_task(fetching.get(range(3), A)) for _ in range(2)]
    assert await asyncio.gather(*others) == [THINGS[:3]] * 2
    assert not any(each.done() for each in silent), "what is late goes on"
    for task in (*silent, *fetching.tasks):
        task.cancel()


@pytest.mark.parametrize("packed", [b"", b"x" * 31, b"x" * 33, b"x" * 32 * (MAX_BUNDLED + 1)])
def test_what_names_nothing_is_no_request(packed: bytes) -> None:
    assert names_in(packed) is None


def test_a_bundle_is_bounded() -> None:
    assert MAX_BUNDLED * BUNDLED_BYTES <= 1 << 20, "as much as one chunk of a thing that is fetched alone"
