"""README's picture is of what a real peer recorded, and as the dashboard draws it today."""

from xml.etree import ElementTree

from dilocox_peer.cli.eventlog import read_event_file
from dilocox_peer.events import NeighbourLost, PeerStarted, RoundCertified
from scripts.pictures import IMAGES, RECORDED, SIZE, svg_of

ROOT = IMAGES.parents[1]
PICTURE = IMAGES / f"dashboard-{SIZE.width}x{SIZE.height}.svg"


def words_of(svg: str) -> str:
    return "".join(ElementTree.fromstring(svg).itertext())


def test_the_picture_in_the_readme_is_drawn_from_the_recorded_log():
    assert str(PICTURE.relative_to(ROOT)) in (ROOT / "README.md").read_text()
    assert words_of(PICTURE.read_text()) == words_of(svg_of(RECORDED)), "draw it again: python scripts/pictures.py"


def test_the_log_is_a_peers_whole_stay_and_every_line_of_it_is_read():
    events = [event for event, _at_s in read_event_file(RECORDED)]
    assert len(events) == len(RECORDED.read_text().splitlines())
    certified = [event for event in events if isinstance(event, RoundCertified)]
    assert [event.round for event in certified] == list(range(1, len(certified) + 1))
    assert {PeerStarted, NeighbourLost} <= {type(event) for event in events}
