"""The shell of the round machine, without its network."""

from typing import Any, cast

from dilocox_peer.peer.contract import BlobHeld, Progress, Received
from dilocox_peer.peer.driver import MAX_INPUTS, RoundDriver
from dilocox_peer.peer.messages import Leave
from dilocox_peer.types import PeerId, sha256

NOTHING = cast("Any", None)


async def test_a_flood_of_messages_leaves_room_for_what_happens_here() -> None:
    driver = RoundDriver(
        NOTHING, transport=NOTHING, blobs=NOTHING, journal=NOTHING, disk=NOTHING, check_blob=NOTHING, max_blob_bytes=1,
        on_apply=NOTHING, on_fetch_state=NOTHING, on_change=NOTHING, listener=NOTHING,
    )  # fmt: skip
    for number in range(2 * MAX_INPUTS):  # sent while the machine waits for the disk
        driver.post(Received(PeerId("stranger"), Leave(0, sha256(b"head"), 1, number)))
        driver.post(Progress(number))
    driver.post(BlobHeld(sha256(b"blob")))
    assert driver._inputs.qsize() < MAX_INPUTS
    assert [driver._inputs.get_nowait() for _ in range(driver._inputs.qsize())][-1] == BlobHeld(sha256(b"blob"))
