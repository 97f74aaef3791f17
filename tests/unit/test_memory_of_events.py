"""What a dashboard is told that attaches when much has happened since."""

from dilocox_peer.cli.eventlog import read_event
from dilocox_peer.events import Event, Paused, Remark, Resumed, SeenPeer, SwarmSeen
from dilocox_peer.peer.control import KEPT, Memory
from dilocox_peer.peer.status import Status
from dilocox_peer.types import PeerId
from tests.unit.dashboard_data import joined


def told_later(events: list[Event]) -> Status:
    memory, late = Memory(), Status()
    for at_s, event in enumerate(events, 1):
        memory.keep(event, event.record(float(at_s)))
    for record in memory.records():
        read = read_event(record)
        assert read is not None
        late.take(*read)
    return late


def seen(stage: int) -> SeenPeer:
    return SeenPeer(PeerId(f"peer of {stage}"), stage, 100.0, 1, "direct")


def test_a_look_at_one_stage_leaves_what_is_known_of_the_others() -> None:
    stages = (0, 1)
    whole = SwarmSeen(stages, tuple(map(seen, stages)))
    late = told_later([joined(stages=2), whole, *[SwarmSeen((0,), (seen(0),))] * 3])
    assert not late.empty_stages()


def test_a_pause_is_known_however_long_ago_it_began_and_an_end_of_it_too() -> None:
    since = [Remark(f"line {number}") for number in range(KEPT)]
    assert told_later([joined(), Paused("on battery"), *since]).paused == "on battery"
    assert not told_later([joined(), Paused("on battery"), Resumed("plugged in"), *since]).paused
