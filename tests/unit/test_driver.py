"""The shell of the round machine, without its network."""

import asyncio
import errno
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dilocox_peer.contract import Note, Tick
from dilocox_peer.errors import MalformedBlob, PeerUnavailable, ProtocolError
from dilocox_peer.events import MessageRefused, Remark
from dilocox_peer.events_of_health import DiskRefused
from dilocox_peer.network.bulk import PeerGone, PeerSilent, RequestRefused, TransportDown
from dilocox_peer.peer.rounds import disk as disk_module
from dilocox_peer.peer.rounds import driver as driver_module
from dilocox_peer.peer.rounds.contract import (
    BlobHeld,
    BlobMissing,
    BlobPart,
    BlobRefused,
    Closed,
    FetchBlob,
    ForgetBlobs,
    PeerRefused,
    PeerUnreached,
    Persist,
    Received,
    RoundProgress,
    Send,
)
from dilocox_peer.peer.rounds.driver import MAX_INPUTS, RoundDriver
from dilocox_peer.peer.rounds.durable import Durable, Votes
from dilocox_peer.peer.rounds.holdings import Holdings
from dilocox_peer.peer.rounds.timing import Timing
from dilocox_peer.store.shelf import Shelf
from dilocox_peer.types import PeerId, sha256
from dilocox_peer.wire.chain import Entry
from dilocox_peer.wire.rounds import (
    MAX_LOCATOR,
    Carried,
    GetChain,
    Leave,
    Message,
    Offer,
    Passed,
    decode_message,
    encode_message,
)

NOTHING = cast("Any", None)


async def test_a_flood_of_messages_leaves_room_for_what_happens_here() -> None:
    driver = RoundDriver(
        NOTHING, transport=NOTHING, blobs=NOTHING, journal=NOTHING, disk=NOTHING, check_blob=NOTHING, max_blob_bytes=1,
        on_apply=NOTHING, on_fetch_state=NOTHING, on_change=NOTHING, listener=NOTHING,
    )  # fmt: skip
    for number in range(2 * MAX_INPUTS):  # sent while the machine waits for the disk
        driver.post(Received(PeerId("stranger"), Leave(0, sha256(b"head"), 1, number)))
        driver.post(RoundProgress(number))
    driver.post(BlobHeld(sha256(b"blob"), 4))
    assert driver.inputs.qsize() < MAX_INPUTS
    assert [driver.inputs.get_nowait() for _ in range(driver.inputs.qsize())][-1] == BlobHeld(sha256(b"blob"), 4)


async def test_a_flood_of_large_messages_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    handled: list[Any] = []

    class Machine:
        def handle(self, happened: Any, _now: float, **_: Any) -> list[Any]:
            handled.append(happened)
            return []

    driver = RoundDriver(
        cast("Any", Machine()), transport=NOTHING, blobs=NOTHING, journal=NOTHING, disk=NOTHING, check_blob=NOTHING,
        max_blob_bytes=1, on_apply=NOTHING, on_fetch_state=NOTHING, on_change=NOTHING, listener=NOTHING,
    )  # fmt: skip
    raw = encode_message(GetChain(0, sha256(b"head"), 1, (sha256(b"one"),) * MAX_LOCATOR))
    monkeypatch.setattr(driver_module, "MAX_QUEUED_BYTES", 10 * len(raw))
    for _ in range(100):
        driver.receive(PeerId("stranger"), raw)
    assert driver.inputs.qsize() == 10
    while not driver.inputs.empty():
        driver.handled(driver.inputs.get_nowait(), 1.0)
    driver.receive(PeerId("stranger"), raw)
    assert (len(handled), driver.inputs.qsize(), len(driver.sizes)) == (10, 1, 1)


async def test_a_message_is_encoded_once_for_all_who_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, sent, encoded = asyncio.get_running_loop(), list[tuple[str, bytes]](), list[Any]()
    first, second = (Leave(0, sha256(b"head"), 1, number) for number in (1, 2))
    wanted = [[Send(PeerId(name), message) for message in (first, second) for name in "abc"]]

    def encode(message: Any) -> bytes:
        encoded.append(message)
        return encode_message(message)

    monkeypatch.setattr(driver_module, "encode_message", encode)
    all_sent = asyncio.Event()

    class Wire:
        async def send_all(self, peer: PeerId, messages: Sequence[bytes], _timeout_s: float) -> list[str]:
            sent.extend((peer, raw) for raw in messages)
            if len(sent) == 6:
                all_sent.set()
            return [""] * len(messages)

    machine = SimpleNamespace(
        handle=lambda happened, now, more: wanted.pop(0) if wanted else [], deadline=lambda: loop.time() + 60.0
    )
    driver = RoundDriver(
        cast("Any", machine), transport=cast("Any", Wire()), blobs=NOTHING, journal=NOTHING, disk=NOTHING,
        check_blob=NOTHING, max_blob_bytes=1, on_apply=NOTHING, on_fetch_state=NOTHING, on_change=lambda: None,
        listener=NOTHING,
    )  # fmt: skip
    running = asyncio.create_task(driver.run())
    async with asyncio.timeout(10):
        await all_sent.wait()
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    assert encoded == [first, second]
    assert sorted(sent) == sorted((name, encode_message(each)) for each in (first, second) for name in "abc")


async def test_nobody_speaks_for_a_peer_that_was_put_out_of_the_run_or_never_let_in() -> None:
    """A leader seats keys that it has made up, as newcomers that others have not heard of yet: its words for them made them voters."""
    transport = cast(
        "Any",
        SimpleNamespace(
            why_out=lambda peer: "revoked" if peer == "out" else None,
            why_not_in=lambda peer: "no" if peer in ("out", "made up") else None,
        ),
    )
    driver = RoundDriver(
        NOTHING, transport=transport, blobs=NOTHING, journal=NOTHING, disk=NOTHING, check_blob=NOTHING,
        max_blob_bytes=1, on_apply=NOTHING, on_fetch_state=NOTHING, on_change=NOTHING, listener=NOTHING,
    )  # fmt: skip
    for origin, to in (("out", "me"), ("a", "out"), ("made up", "me"), ("a", "me")):
        envelope = Passed(0, sha256(b"head"), 1, PeerId(origin), PeerId(to), 1, b"raw", b"s" * 64)
        driver.receive(PeerId("via"), encode_message(envelope))
    assert [each.message.origin for each in (driver.inputs.get_nowait() for _ in range(driver.inputs.qsize()))] == ["a"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("error", "is_out", "told"),
    [
        (PeerSilent, False, [PeerUnreached]),
        (PeerGone, False, [PeerRefused, PeerUnreached]),  # a router may refuse us, and another member hear it
        (RequestRefused, False, []),
        (TransportDown, False, []),
        (PeerGone, True, [PeerRefused]),
    ],
)
async def test_the_machine_is_told_whom_messages_do_not_reach(error: Any, is_out: bool, told: list[type]) -> None:
    loop, peer, handled = asyncio.get_running_loop(), PeerId("a"), list[Any]()
    has_failed = asyncio.Event()

    class Wire:
        def why_out(self, _peer: PeerId) -> str | None:
            return "revoked" if is_out else None

        async def send_all(self, peer: PeerId, _messages: Sequence[bytes], _timeout_s: float) -> list[str]:
            has_failed.set()
            raise error(peer, "as a test wants it")

    def handle(happened: Any, _now: float, **_: Any) -> list[Any]:
        handled.append(happened)
        return [Send(peer, Leave(0, sha256(b"head"), 1, 1))] if len(handled) == 1 else []

    machine = SimpleNamespace(handle=handle, deadline=lambda: loop.time() + 60.0)
    driver = RoundDriver(
        cast("Any", machine), transport=cast("Any", Wire()), blobs=NOTHING, journal=NOTHING, disk=NOTHING,
        check_blob=NOTHING, max_blob_bytes=1, on_apply=NOTHING, on_fetch_state=NOTHING, on_change=lambda: None,
        listener=NOTHING,
    )  # fmt: skip
    running = asyncio.create_task(driver.run())
    async with asyncio.timeout(10):
        await has_failed.wait()
        await driver.drained()
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    assert handled == [Tick(), *(kind(peer) for kind in told)]


async def test_a_flood_of_malformed_messages_is_told_once_a_second() -> None:
    told: list[Any] = []
    blamed: list[PeerId] = []
    transport = cast("Any", SimpleNamespace(doors=SimpleNamespace(malformed=blamed.append)))
    driver = RoundDriver(
        NOTHING, transport=transport, blobs=NOTHING, journal=NOTHING, disk=NOTHING, check_blob=NOTHING,
        max_blob_bytes=1, on_apply=NOTHING, on_fetch_state=NOTHING, on_change=NOTHING, listener=told.append,
    )  # fmt: skip
    for _ in range(100):
        driver.receive(PeerId("stranger"), b"junk")
    driver.receive(PeerId("another"), b"junk")
    assert [event.peer for event in told] == ["stranger", "another"]
    assert blamed == [*[PeerId("stranger")] * 100, PeerId("another")], "each counts at the door"


async def test_a_vote_is_on_disk_while_contributions_are_being_checked(tmp_path: Path) -> None:
    """A check takes seconds where stages are large, and a machine that waits for it sends no heartbeats."""
    blob = b"contribution"
    written, checking, go_on = asyncio.Event(), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    record = Durable(0, (), Votes(sha256(b"head")))
    wanted = [
        [FetchBlob(sha256(blob), (PeerId("source"),))], [ForgetBlobs((sha256(b"old"),)), Persist(record)]
    ]  # fmt: skip

    def check(_name, _blob: memoryview) -> None:
        loop.call_soon_threadsafe(checking.set)
        go_on.wait(10.0)

    async def fetch(*_arguments: Any, **_options: Any) -> tuple[dict[str, Any], bytearray]:
        return {"size": len(blob)}, bytearray(blob)

    machine = SimpleNamespace(
        handle=lambda happened, now, more: wanted.pop(0) if wanted else [], deadline=lambda: loop.time() + 60.0
    )
    blobs = Shelf(tmp_path)
    journal = SimpleNamespace(write=lambda state: loop.call_soon_threadsafe(written.set))
    with ThreadPoolExecutor(1) as disk:
        driver = RoundDriver(
            cast("Any", machine), transport=cast("Any", SimpleNamespace(fetch=fetch)), blobs=blobs,
            journal=cast("Any", journal), disk=disk, check_blob=check, max_blob_bytes=100, on_apply=NOTHING,
            on_fetch_state=NOTHING, on_change=lambda: None, listener=lambda event: None,
        )  # fmt: skip
        running = asyncio.create_task(driver.run())
        try:
            async with asyncio.timeout(5.0):
                await checking.wait()
                driver.post(Tick())
                await written.wait()
        finally:
            go_on.set()
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


async def test_a_contribution_is_bounded_by_what_is_possible_whatever_an_offer_says(tmp_path: Path) -> None:
    """Who offers another's blob with a wrong size would have the honest one refused, or cut short, by everybody."""
    blob, too_large = b"contribution", bytes(101)

    async def fetch(_source: PeerId, _kind: str, header: dict[str, Any], **_options: Any) -> Any:
        found = {sha256(each): each for each in (blob, too_large)}[header["name"]]
        return {"size": len(found)}, bytearray(found)

    blobs = Shelf(tmp_path)
    with ThreadPoolExecutor(1) as disk:
        driver = RoundDriver(
            NOTHING, transport=cast("Any", SimpleNamespace(fetch=fetch)), blobs=blobs, journal=NOTHING,
            disk=disk, check_blob=lambda name, raw: None, max_blob_bytes=100, on_apply=NOTHING, on_fetch_state=NOTHING,
            on_change=NOTHING, listener=lambda event: None,
        )  # fmt: skip
        offer = Entry(PeerId("liar"), 1, sha256(blob), 2**40, 8)  # the size of another's blob, as a stranger says it
        [wanted] = Holdings(Timing()).want(offer.blob, [offer.peer], round_number=1, now=0.0)
        assert await fetched(driver, wanted) == BlobHeld(offer.blob, len(blob))
        assert blobs.get(offer.blob) == blob
        too_much = FetchBlob(sha256(too_large), (PeerId("flooder"),))
        assert await fetched(driver, too_much) == BlobMissing(sha256(too_large))


async def fetched(driver: RoundDriver, wanted: FetchBlob) -> Any:
    return await driver.fetched(wanted)


async def test_a_fetch_that_takes_the_place_of_one_that_is_being_looked_at_has_what_that_one_brought(
    tmp_path: Path,
) -> None:
    """The look at 250 MB takes seconds, and goes on when the fetch is called off: the next one found its file gone, and the contribution was
    none that could be had."""
    blob, go_on = b"contribution", threading.Event()
    loop, looking, asked = asyncio.get_running_loop(), asyncio.Event(), []

    def check(_name: object, _blob: memoryview) -> None:
        loop.call_soon_threadsafe(looking.set)
        go_on.wait(10.0)

    async def fetch(source: PeerId, *_arguments: Any, **_options: Any) -> tuple[dict[str, Any], bytearray]:
        asked.append(source)
        return {"size": len(blob)}, bytearray(blob)

    blobs = Shelf(tmp_path)
    with ThreadPoolExecutor(1) as disk:
        driver = RoundDriver(
            NOTHING, transport=cast("Any", SimpleNamespace(fetch=fetch)), blobs=blobs, journal=NOTHING,
            disk=disk, check_blob=check, max_blob_bytes=100, on_apply=NOTHING, on_fetch_state=NOTHING,
            on_change=NOTHING, listener=lambda event: None,
        )  # fmt: skip
        first = asyncio.create_task(fetched(driver, FetchBlob(sha256(blob), (PeerId("one"),))))
        async with asyncio.timeout(5.0):
            await looking.wait()
            first.cancel()
            second = asyncio.create_task(fetched(driver, FetchBlob(sha256(blob), (PeerId("another"),))))
            await asyncio.wait({first})
            looking.clear()
            with suppress(TimeoutError):  # it does not look itself
                async with asyncio.timeout(0.3):
                    await looking.wait()
            go_on.set()
            assert await second == BlobHeld(sha256(blob), len(blob))
    assert asked == ["one"]


async def test_a_source_that_sends_something_else_is_named_and_the_next_one_is_asked(tmp_path: Path) -> None:
    blob, told = b"contribution", list[Any]()
    replies: dict[str, bytes | Exception] = {
        "liar": b"another", "flooder": ProtocolError(PeerId("flooder"), "a body of 2000 bytes, at most 100"),
        "gone": PeerUnavailable(PeerId("gone"), "dead"), "honest": blob,
    }  # fmt: skip

    async def fetch(source: PeerId, *_arguments: Any, **_options: Any) -> tuple[dict[str, Any], bytearray]:
        reply = replies[source]
        if isinstance(reply, Exception):
            raise reply
        return {"size": len(reply)}, bytearray(reply)

    blobs = Shelf(tmp_path)
    with ThreadPoolExecutor(1) as disk:
        driver = RoundDriver(
            NOTHING, transport=cast("Any", SimpleNamespace(fetch=fetch)), blobs=blobs, journal=NOTHING,
            disk=disk, check_blob=lambda name, raw: None, max_blob_bytes=100, on_apply=NOTHING, on_fetch_state=NOTHING,
            on_change=NOTHING, listener=told.append,
        )  # fmt: skip
        wanted = FetchBlob(sha256(blob), tuple(map(PeerId, replies)))
        assert await fetched(driver, wanted) == BlobHeld(sha256(blob), len(blob))
    said = "sent nothing of that name when asked for it"
    assert told == [
        MessageRefused(PeerId("liar"), f"{said}: what it sent is not the thing of that name"),
        MessageRefused(PeerId("flooder"), f"{said}: a body of 2000 bytes, at most 100"),
    ]


async def test_a_table_comes_beside_its_offer_and_is_not_fetched(tmp_path: Path) -> None:
    loop, table, sent, done = asyncio.get_running_loop(), b"a table", list[Message](), list[Any]()
    author, stranger, part = PeerId("author"), PeerId("stranger"), BlobPart("table")
    offer = Offer(0, sha256(b"head"), 1, Entry(author, 1, sha256(table), 10, 1), b"s" * 64)
    has_come = asyncio.Event()

    async def send_all(_peer: PeerId, messages: Sequence[bytes], _timeout_s: float) -> list[str]:
        sent.extend(decode_message(raw, author) for raw in messages)
        return [""] * len(messages)

    async def fetch(*_arguments: Any, **_options: Any) -> Any:
        raise PeerGone(author, "nothing is fetched here")

    def handle(happened: Any, _now: float, *, more: bool) -> list[Any]:
        match happened:
            case Closed():
                return [Send(PeerId("other"), offer)]
            case Received(sender, Offer()):
                return [FetchBlob(sha256(table), (sender,), 10.0, False, part)]
            case BlobHeld() | BlobMissing():
                done.append(happened)
                has_come.set()
        return []

    machine = SimpleNamespace(handle=handle, deadline=lambda: loop.time() + 60.0, roster=(author,))
    transport = SimpleNamespace(send_all=send_all, fetch=fetch, why_out=lambda _peer: None)
    with ThreadPoolExecutor(1) as disk:
        driver = RoundDriver(
            cast("Any", machine), transport=cast("Any", transport), blobs=Shelf(tmp_path), journal=NOTHING, disk=disk,
            check_blob=NOTHING, max_blob_bytes=1, on_apply=NOTHING, on_fetch_state=NOTHING, on_change=lambda: None,
            listener=lambda _event: None,
            slices=cast("Any", SimpleNamespace(max_bytes=lambda _part: 1000, check=lambda _view, _part: ())),
        )  # fmt: skip
        running = asyncio.create_task(driver.run())
        async with asyncio.timeout(10):
            driver.post(Closed(offer.head, offer.entry, (sha256(b"slice"),), table))
            await driver.drained()
            assert sent == [Carried(0, offer.head, 1, table), offer]
            for sender in (stranger, author):  # a stranger's is not kept
                driver.receive(sender, encode_message(sent[0]))
                driver.receive(sender, encode_message(offer))
                await has_come.wait()
                has_come.clear()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
    assert done == [BlobMissing(sha256(table)), BlobHeld(sha256(table), len(table), (), part)]


async def test_a_contribution_that_is_none_is_refused_and_nothing_of_it_stays(tmp_path: Path) -> None:
    blob = b"contribution"

    async def fetch(*_arguments: Any, **_options: Any) -> tuple[dict[str, Any], bytearray]:
        return {"size": len(blob)}, bytearray(blob)

    def check(name, raw: memoryview) -> None:
        raise MalformedBlob(f"{len(raw)} bytes are none")

    blobs = Shelf(tmp_path)
    with ThreadPoolExecutor(1) as disk:
        driver = RoundDriver(
            NOTHING, transport=cast("Any", SimpleNamespace(fetch=fetch)), blobs=blobs, journal=NOTHING,
            disk=disk, check_blob=check, max_blob_bytes=100, on_apply=NOTHING, on_fetch_state=NOTHING,
            on_change=NOTHING, listener=NOTHING,
        )  # fmt: skip
        wanted = FetchBlob(sha256(blob), (PeerId("author"),))
        assert await fetched(driver, wanted) == BlobRefused(sha256(blob), "12 bytes are none")
    assert blobs.held == set()
    assert not list((tmp_path / "partial").iterdir())


async def test_a_message_that_finds_a_fault_in_the_machine_costs_itself_and_nothing_else() -> None:
    told: list[Any] = []

    class Faulty:
        def handle(self, happened: Any, _now: float, **_: Any) -> list[Any]:
            if isinstance(happened, Received):
                raise ZeroDivisionError
            return [happened]

    driver = RoundDriver(
        cast("Any", Faulty()), transport=NOTHING, blobs=NOTHING, journal=NOTHING, disk=NOTHING, check_blob=NOTHING,
        max_blob_bytes=1, on_apply=NOTHING, on_fetch_state=NOTHING, on_change=NOTHING, listener=told.append,
    )  # fmt: skip
    assert driver.handled(Received(PeerId("stranger"), Leave(0, sha256(b"head"), 1, 1)), 1.0) == ()
    assert [(event.peer, event.reason) for event in told] == [("stranger", "ZeroDivisionError in handling it")]
    assert list(driver.handled(Tick(), 2.0)) == cast("Any", [Tick()])


async def test_a_disk_that_cannot_be_read_is_no_message_s_fault() -> None:
    """What has moved in memory is not in the log: the next record would not follow from it."""

    class Unreadable:
        def handle(self, _happened: Any, _now: float, **_: Any) -> list[Any]:
            raise OSError(5, "Input/output error")

    driver = RoundDriver(
        cast("Any", Unreadable()), transport=NOTHING, blobs=NOTHING, journal=NOTHING, disk=NOTHING, check_blob=NOTHING,
        max_blob_bytes=1, on_apply=NOTHING, on_fetch_state=NOTHING, on_change=NOTHING, listener=NOTHING,
    )  # fmt: skip
    with pytest.raises(OSError, match="Input/output"):
        driver.handled(Received(PeerId("stranger"), Leave(0, sha256(b"head"), 1, 1)), 1.0)


async def test_a_disk_without_room_is_told_once_and_holds_back_what_would_promise_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(disk_module, "DISK_RETRY_S", 0.001)
    told: list[Any] = []
    promised = asyncio.Event()
    state, tries = Durable(0, (), Votes(sha256(b"head"))), 0

    def tell(event: Any) -> None:
        told.append(event)
        if isinstance(event, Remark):
            promised.set()

    class Disk:
        def write(self, durable: Durable) -> None:
            nonlocal tries
            assert durable is state
            tries += 1
            if tries <= 5:
                raise OSError(errno.ENOSPC, "No space left on device")

    class Machine:
        def __init__(self) -> None:
            self.actions: list[Any] = [Persist(state), Note(Remark("promised"))]

        def handle(self, _happened: Any, _now: float, **_: Any) -> list[Any]:
            actions, self.actions = self.actions, []
            return actions

        def deadline(self) -> None:
            return None

    driver = RoundDriver(
        cast("Any", Machine()), transport=NOTHING, blobs=NOTHING, journal=cast("Any", Disk()), disk=NOTHING, check_blob=NOTHING,
        max_blob_bytes=1, on_apply=NOTHING, on_fetch_state=NOTHING, on_change=lambda: None, listener=tell,
    )  # fmt: skip
    running = asyncio.create_task(driver.run())
    async with asyncio.timeout(10):
        await promised.wait()
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    assert tries == 6
    assert [type(event) for event in told] == [DiskRefused, DiskRefused, Remark]
    assert "no space left on device" in told[0].line()
