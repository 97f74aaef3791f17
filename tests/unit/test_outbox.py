"""What waits to be sent to a slow peer."""

import asyncio
from collections.abc import Sequence

import pytest

from dilocox_peer.errors import PeerUnavailable
from dilocox_peer.network.bulk import RequestRefused
from dilocox_peer.network.message_frames import BATCH_BYTES
from dilocox_peer.peer.rounds import outbox as outbox_module
from dilocox_peer.peer.rounds.outbox import LINGER_S, MAX_QUEUED, MAX_UNDER_WAY, Outbox
from dilocox_peer.types import PeerId

SLOW, OTHER = PeerId("slow"), PeerId("other")


async def test_what_is_repeated_while_it_waits_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a line where a message takes seconds its repetitions would else come before all that is new."""
    monkeypatch.setattr(outbox_module, "LINGER_S", 60.0)
    sent: list[tuple[PeerId, bytes]] = []
    gate = asyncio.Event()

    async def send(peer: PeerId, batch: Sequence[bytes]) -> list[str]:
        if peer == SLOW:
            await gate.wait()
        sent.extend((peer, raw) for raw in batch)
        return [""] * len(batch)

    async with asyncio.TaskGroup() as tasks:
        outbox = Outbox(tasks, send, _never)
        outbox.post(SLOW, b"first")
        await asyncio.sleep(0)  # it is on its way
        for second in range(20):
            outbox.post(SLOW, b"offer")
            outbox.post(SLOW, f"beat {second}".encode(), kind=b"heartbeat")
            outbox.post(OTHER, b"offer")
            await asyncio.sleep(0)
        outbox.post(SLOW, b"ack")
        gate.set()
        await outbox.drained()
        assert [raw for peer, raw in sent if peer == SLOW] == [b"first", b"offer", b"beat 19", b"ack"]
        assert len([raw for peer, raw in sent if peer == OTHER]) > 1, "what has gone out is said again"
        for number in range(2 * MAX_QUEUED):
            outbox.post(SLOW, str(number).encode())
        await outbox.drained()
        assert sent[-1] == (SLOW, str(2 * MAX_QUEUED - 1).encode())
        assert len(sent) < 4 + 21 + MAX_QUEUED + 2, "the oldest go when it is full"
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()


async def test_what_waits_goes_in_batches_and_one_refusal_is_told() -> None:
    batches: list[list[bytes]] = []
    told: list[PeerUnavailable] = []

    async def send(_peer: PeerId, batch: Sequence[bytes]) -> list[str]:
        batches.append(list(batch))
        return ["too late" if raw == b"bad" else "" for raw in batch]

    async with asyncio.TaskGroup() as tasks:
        outbox = Outbox(tasks, send, told.append)
        for raw in (b"one", bytes(BATCH_BYTES), b"two", b"bad", *(bytes([each]) for each in range(40))):
            outbox.post(OTHER, raw)
        await outbox.drained()
        assert [len(batch) for batch in batches] == [1, 1, 32]
        assert [error.reason for error in told] == ["too late"]
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()


async def test_few_batches_are_under_way_without_an_answer_and_the_rest_waits_together() -> None:
    batches: list[list[bytes]] = []
    gate, is_full = asyncio.Event(), asyncio.Event()

    async def send(_peer: PeerId, batch: Sequence[bytes]) -> list[str]:
        batches.append(list(batch))
        if len(batches) == MAX_UNDER_WAY:
            is_full.set()
        await gate.wait()
        return [""] * len(batch)

    async with asyncio.TaskGroup() as tasks:
        outbox = Outbox(tasks, send, _never)
        posting = 0
        while not is_full.is_set():
            outbox.post(SLOW, str(posting).encode())
            posting += 1
            await asyncio.sleep(LINGER_S / 4)
        outbox.post(SLOW, b"waits")
        await asyncio.sleep(2 * LINGER_S)
        outbox.post(SLOW, b"waits too")
        assert len(batches) == MAX_UNDER_WAY
        drained = asyncio.create_task(outbox.drained())
        await asyncio.sleep(0)
        gate.set()
        await drained
        assert len(batches) == MAX_UNDER_WAY + 1
        assert batches[-1][-2:] == [b"waits", b"waits too"]
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()


def _never(error: PeerUnavailable) -> None:
    raise AssertionError(error)


async def test_a_message_that_goes_with_a_batch_that_comes_to_nothing_leaves_no_empty_one() -> None:
    """Posted in the turn of the loop in which an earlier batch was refused: a batch of none was sent, and the peer died of it."""
    answered = asyncio.Event()
    sent: list[Sequence[bytes]] = []

    async def send(peer: PeerId, batch: Sequence[bytes]) -> list[str]:
        sent.append(batch)
        await answered.wait()
        raise RequestRefused(peer, "not now")

    async with asyncio.TaskGroup() as tasks:
        outbox = Outbox(tasks, send, lambda _error: None)
        outbox.post(SLOW, b"one")
        await asyncio.sleep(2 * LINGER_S)
        answered.set()
        outbox.post(SLOW, b"two")
        await asyncio.sleep(2 * LINGER_S)
        outbox.post(SLOW, b"three")
        await outbox.drained()
        assert sent == [[b"one"], [b"three"]]
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
