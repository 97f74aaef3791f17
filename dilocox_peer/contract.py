"""What every pure machine takes and gives: the time has come, this peer goes, tell the user.

What is of one machine alone stands in its own contract: pipeline/contract.py, peer/rounds/contract.py.
"""

from dataclasses import dataclass

from dilocox_peer.events import Event


@dataclass(frozen=True, slots=True)
class Tick:
    """The deadline that `deadline()` named has come (or any other time: ticking early does no harm)."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """This peer goes: it tells the others, and takes no further part."""


@dataclass(frozen=True, slots=True)
class Note:
    """Something worth telling the user."""

    event: Event
