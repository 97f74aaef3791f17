"""What a peer says of itself to who asks how it is. Nothing is decided by it: it is shown.

That an answer comes at all is half of it: a process that has stopped gives none.
"""

from typing import Annotated, Literal

from msgspec import Meta

from dilocox_peer.wire import versions
from dilocox_peer.wire.declared import Declared, Number, Parser, PeerName
from dilocox_peer.wire.records import LeasedStage

MAX_HEALTH_BYTES = 1024
MAX_AILS, MAX_ACCUSED = 8, 8

Ail = Literal["disk", "links", "line", "data"]
"""What a peer knows to be wrong with itself: its disk refuses, linkd has ended, its line is full, its data are not the run's."""


class Accusation(Declared, frozen=True):
    """A peer of the speaker's stage: proven to have signed what no honest peer signs; or its contributions are refused."""

    peer: PeerName
    of: Literal["proven", "refused"]


class HealthForm(Declared, frozen=True, tag=versions.HEALTH):
    """stage: that it holds; KEEPERS: none. round: certified. at_ms: by its clock. moves: it takes a stage over that nobody holds."""

    stage: LeasedStage
    round: Number
    at_ms: Number
    is_paused: bool = False
    moves: bool = False
    ails: Annotated[tuple[Ail, ...], Meta(max_length=MAX_AILS)] = ()
    accused: Annotated[tuple[Accusation, ...], Meta(max_length=MAX_ACCUSED)] = ()


HEALTH = Parser[HealthForm](HealthForm, "a word of health", MAX_HEALTH_BYTES, version=versions.HEALTH)
