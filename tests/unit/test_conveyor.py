"""What the pipeline's thread takes in from a link, without linkd below it; with it: tests/shell/test_conveyor.py."""

from collections.abc import Iterator

import pytest

from dilocox_peer.events import Event, Failed, NeighbourLinked, NeighbourUnlinked
from dilocox_peer.peer.conveyor import _HELLO_VERSION, HELLO, Conveyor, hello_statement
from dilocox_peer.pipeline.link import Arrived, Linked, LinkId, Unlinked
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import canonical
from tests.cut_runs import manifest_of

LINK = LinkId("theirs")


class Peer:
    """A conveyor that was not started, and what it told."""

    def __init__(self, stage: int, num_stages: int) -> None:
        self.events: list[Event] = []
        self.manifest = manifest_of(num_stages, schedule="carry")
        self.conveyor = Conveyor(
            self.manifest, stage, key=SigningKey(b"\1" * 32), run_id=self.manifest.run_id, incarnation=1,
            link_seed=b"\2" * 32, listen=("/ip4/127.0.0.1/tcp/0",), listener=self.events.append, on_failure=lambda _: None,
        )  # fmt: skip

    def greet(self, seed: int, *, stage: int) -> None:
        """A greeting over LINK by the peer of that key."""
        key = SigningKey(seed.to_bytes(32, "big"))
        statement = hello_statement(self.manifest.run_id, LINK, self.conveyor.link_id, stage, 5)
        hello = canonical([_HELLO_VERSION, key.peer_id, stage, 5, key.sign(statement)])
        self.conveyor._take(Arrived(LINK, HELLO + hello, memoryview(b""), 0.0))


@pytest.fixture
def head() -> Iterator[Peer]:
    peer = Peer(0, 2)
    yield peer
    peer.conveyor._link.close(0.0)


def test_one_link_greets_for_one_peer(head: Peer):
    """Else each greeting adds a callee, and all but the last stay when the link ends: a head would wait for them."""
    head.conveyor._take(Linked(LINK))
    for seed in range(10, 15):
        head.greet(seed, stage=1)
    assert sum(isinstance(event, NeighbourLinked) for event in head.events) == 1
    assert any("a second greeting" in event.line() for event in head.events if isinstance(event, Failed))
    head.conveyor._take(Unlinked(LINK, "gone"))
    assert sum(isinstance(event, NeighbourUnlinked) for event in head.events) == 1
    assert head.conveyor._scheduler.linked_callees == ()
    assert head.conveyor.status().linked == {}


def test_a_new_link_may_greet_again(head: Peer):
    for _ in range(2):
        head.conveyor._take(Linked(LINK))
        head.greet(10, stage=1)
        assert len(head.conveyor._scheduler.linked_callees) == 1
        head.conveyor._take(Unlinked(LINK, "gone"))
    assert head.conveyor._scheduler.linked_callees == ()
