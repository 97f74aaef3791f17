"""Places for dials: leases that lead nowhere hold up neither who was heard before nor who is seen elsewhere."""

import asyncio

from dilocox_peer.peer.dial_slots import KNOWN_AT_ONCE, OF_A_RANGE, STRANGERS_AT_ONCE, DialSlots
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import PeerId

PEER = SigningKey(b"p" * 32).peer_id


def address(number: int) -> list[str]:
    return [f"/ip4/203.0.{number}.7/tcp/9/p2p/{PEER}"]


class Dialled:
    """Dials that are under way until they are ended; `at` has those that have a place."""

    def __init__(self) -> None:
        self.slots = DialSlots()
        self.at: list[str] = []
        self.end = asyncio.Event()

    async def dial(self, name: str, addresses: list[str], *, is_known: bool = False) -> None:
        async with self.slots.slot(PeerId(name), addresses, is_known=is_known):
            self.at.append(name)
            await self.end.wait()


def under_way(dials: list[tuple[str, list[str], bool]]) -> list[str]:
    """Which of them have a place at once, when none ends; then all get theirs."""

    async def scenario() -> list[str]:
        dialled = Dialled()
        async with asyncio.TaskGroup() as tasks:
            for name, addresses, is_known in dials:
                tasks.create_task(dialled.dial(name, addresses, is_known=is_known))
            for _ in range(len(dials) + 2):
                await asyncio.sleep(0)
            found = list(dialled.at)
            dialled.end.set()
        assert sorted(dialled.at) == sorted(name for name, _, _ in dials)
        return found

    return asyncio.run(scenario())


def test_of_one_range_a_few_are_dialled_at_a_time_and_others_meanwhile() -> None:
    """Sixty-four leases of one silent socket held up an honest peer for forty seconds."""
    found = under_way(
        [*((f"silent{number}", address(1), False) for number in range(64)), ("honest", address(2), False)]
    )
    assert len(found) == OF_A_RANGE + 1
    assert "honest" in found


def test_whoever_was_heard_before_waits_for_no_stranger() -> None:
    strangers = [(f"silent{number}", address(number), False) for number in range(100)]
    found = under_way([*strangers, *((f"known{number}", address(1), True) for number in range(KNOWN_AT_ONCE + 2))])
    assert sum(name.startswith("known") for name in found) == KNOWN_AT_ONCE
    assert sum(name.startswith("silent") for name in found) == STRANGERS_AT_ONCE


def test_a_dial_that_is_cancelled_holds_no_place() -> None:
    async def scenario() -> list[str]:
        dialled = Dialled()
        waiting = [asyncio.create_task(dialled.dial(f"silent{number}", address(1))) for number in range(3 * OF_A_RANGE)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        dialled.at.clear()
        async with asyncio.TaskGroup() as tasks:
            for number in range(OF_A_RANGE):
                tasks.create_task(dialled.dial(f"next{number}", address(1)))
            for _ in range(3 * OF_A_RANGE):
                await asyncio.sleep(0)
            found = list(dialled.at)
            dialled.end.set()
        return found

    assert len(asyncio.run(scenario())) == OF_A_RANGE


def test_peers_without_an_address_are_of_one_range() -> None:
    assert len(under_way([(f"nowhere{number}", [], False) for number in range(10)])) == OF_A_RANGE
