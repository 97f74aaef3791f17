"""What follows from the usual inputs waits for the last of a crowd, and for nothing else."""

import pytest

from dilocox_peer.contract import Tick
from dilocox_peer.peer.rounds.contract import BlobHeld, BlobRefused, Closed, Input, Received
from dilocox_peer.peer.rounds.crowds import MAX_IN_A_ROW, Crowds
from dilocox_peer.types import PeerId, sha256
from dilocox_peer.wire.chain import Entry
from dilocox_peer.wire.rounds import Gathered, GetChain

A, HEAD = PeerId("a"), sha256(b"head")
GATHERED = Received(A, Gathered(0, HEAD, 1, (sha256(b"table"),)))
HELD = BlobHeld(sha256(b"blob"), 4)


@pytest.mark.parametrize("usual", [GATHERED, HELD])
def test_only_the_last_of_a_crowd_is_gone_on_from(usual: Input) -> None:
    crowds = Crowds()
    assert [crowds.waits(usual, more=more) for more in (True, True, False)] == [True, True, False]


@pytest.mark.parametrize(
    "event",
    [
        Tick(),
        Received(A, GetChain(0, HEAD, 1, (HEAD,))),
        BlobRefused(sha256(b"blob"), "malformed"),
        Closed(HEAD, Entry(A, 1, sha256(b"blob"), 4, 1, b"")),
    ],
)
def test_what_is_not_usual_waits_for_nothing(event: Input) -> None:
    assert not Crowds().waits(event, more=True)


def test_a_flood_stops_nothing() -> None:
    crowds = Crowds()
    waited = [crowds.waits(GATHERED, more=True) for _ in range(3 * (MAX_IN_A_ROW + 1))]
    assert waited == 3 * [*MAX_IN_A_ROW * [True], False]
