"""What the run's owner wants of it, signed with the key that signed the manifest. Pure values.

A directive is the whole of it, not a change: the one with the highest number counts, and nothing of those before. So it does
not matter which of them a peer has missed, or in which order they came. peer/rounds/directing.py says when one applies.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated

from msgspec import Meta

from dilocox_peer.signing import SIGNATURE_BYTES
from dilocox_peer.types import PeerId
from dilocox_peer.wire import versions
from dilocox_peer.wire.declared import Declared, FromOne, Hash, Number, Parser, PeerName, astuple, encode, replaced

MAX_DIRECTIVE_BYTES = 6000
MAX_BANNED = 64
MAX_SAID = 200  # characters of a message of the day
UNCHANGED = 1000  # permille
MOST_RATE = 4
"""Times the learning rate: the reach of a contribution is measured by the manifest's rate, and honest work of ten times as much is clipped to 0.4."""
VERSION = r"^([0-9]{1,4}(\.[0-9]{1,4}){0,2})?\Z"

Steps = Annotated[int, Meta(ge=0, le=2**31)]
NOTHING_MORE = "as the run's settings say"


class Directive(Declared, frozen=True, tag=versions.DIRECTIVE):
    """run: digest of the manifest. number: of two the higher counts. paused: nobody trains. stop_after: the run's last round, 0: as
    planned; cool_rounds: of its last rounds, in which the learning rate falls to 0 as 1 - sqrt. total_steps: inner steps of the run,
    0: as the manifest says. rate_permille: of the learning rate. least_version: of the program, "": any. banned: peers that take
    no part, in order. said: to everybody."""

    run: Hash
    number: FromOne
    paused: bool = False
    stop_after: Number = 0
    cool_rounds: Annotated[int, Meta(ge=0, le=2**31)] = 0
    total_steps: Steps = 0
    rate_permille: Annotated[int, Meta(ge=1, le=MOST_RATE * UNCHANGED)] = UNCHANGED
    least_version: Annotated[str, Meta(pattern=VERSION)] = ""
    banned: Annotated[tuple[PeerName, ...], Meta(max_length=MAX_BANNED)] = ()
    said: Annotated[str, Meta(max_length=MAX_SAID)] = ""
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)] = b""  # none before it is signed

    def __post_init__(self) -> None:
        if list(self.banned) != sorted(set(self.banned)):
            raise ValueError("banned peers that are not in order, each once")
        if not self.said.isprintable():
            raise ValueError("a message with characters that cannot be shown")
        if self.cool_rounds > self.stop_after:
            raise ValueError("a cool-down of more rounds than there are until the stop")

    def signed_bytes(self) -> bytes:
        return encode(("dilocox-directive", *astuple(self)[:-1]))

    def to_bytes(self) -> bytes:
        return encode(self)

    def rate(self, round_number: int, fraction: float) -> float:
        """What the learning rate is multiplied by when `fraction` of a round is done."""
        scale = self.rate_permille / UNCHANGED
        if not self.cool_rounds:
            return scale
        cooled = (
            round_number - 1 + min(max(fraction, 0.0), 1.0) - (self.stop_after - self.cool_rounds)
        ) / self.cool_rounds
        return scale * (1.0 - math.sqrt(min(max(cooled, 0.0), 1.0)))

    def words(self) -> str:
        """What it asks for, in words."""
        said = [
            "paused" if self.paused else "",
            f"ends after round {self.stop_after}" if self.stop_after else "",
            f"cools down in its last {self.cool_rounds} rounds" if self.cool_rounds else "",
            f"lasts {self.total_steps} inner steps" if self.total_steps else "",
            f"learning rate x {self.rate_permille / UNCHANGED:g}" if self.rate_permille != UNCHANGED else "",
            f"version {self.least_version} or newer" if self.least_version else "",
            f"{len(self.banned)} banned" if self.banned else "",
        ]
        return ", ".join(part for part in said if part) or NOTHING_MORE

    def why_too_old(self, version: str) -> str | None:
        """Why a program of this version is asked not to take part, or None."""
        if _numbers(version) >= _numbers(self.least_version):
            return None
        return f"the run's owner asks for version {self.least_version} or newer, this is {version}: update this program"


_DIRECTIVE = Parser[Directive](Directive, "a directive", MAX_DIRECTIVE_BYTES, version=versions.DIRECTIVE)


def read_directive(raw: bytes) -> Directive:
    """Not verified yet. Raises ValueError."""
    return _DIRECTIVE.read(raw)


def sign_directive(unsigned: Directive, sign: Callable[[bytes], bytes]) -> Directive:
    """The directive with the signature of the owner's key."""
    return replaced(unsigned, signature=sign(unsigned.signed_bytes()))


def newest_first(found: Iterable[Directive]) -> list[Directive]:
    """Those of the highest number, each once; more than one where the owner spoke in two places that did not know of each other. The
    first counts: whichever bans most, then by signature, so that whoever knows the same takes the same."""
    known = set(found)
    newest = max((each.number for each in known), default=0)
    return sorted(
        (each for each in known if each.number == newest), key=lambda each: (-len(each.banned), each.signature)
    )


def settled(newest: Sequence[Directive], sign: Callable[[bytes], bytes]) -> Directive:
    """What to go by, of newest_first's: the only one, or the first said again with the next number. Chains may have any of them, and
    take no other with that number. Whoever holds the owner's key comes to the same bytes, as its signatures are."""
    first = newest[0]
    return first if len(newest) == 1 else sign_directive(replaced(first, number=first.number + 1), sign)


def lost_words(lost: Directive, counts: Directive) -> str:
    """What is lost where the other of the same number counts."""
    banned = [f"banned {peer}" for peer in lost.banned if peer not in counts.banned]
    said = [f'"{lost.said}"'] if lost.said != counts.said else []
    return ", ".join([lost.words(), *banned, *said])


def why_not_directive(
    directive: Directive, *, run: bytes, owner: PeerId, verify: Callable[[PeerId, bytes, bytes], bool]
) -> str | None:
    """Why it is none of owner's for this run, or None."""
    if directive.run != run:
        return "a directive for another run"
    if not verify(owner, directive.signed_bytes(), directive.signature):
        return "a directive that the run's owner has not signed"
    return None


def _numbers(version: str) -> tuple[int, ...]:
    """0.12.3 as (0, 12, 3): what is behind the third number, or is none, does not count."""
    found = [int(number) for number in re.findall(r"\d+", version)[:3]]
    return tuple(found + [0] * (3 - len(found)))
