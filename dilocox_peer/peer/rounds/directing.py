"""What the run's owner wants (wire/directives.py) and how it comes into the certificates of a stage. Pure.

A directive applies from the certificate of a round that carries it: who may be in the roster and where the run ends at once, what
training does from the round after next, as a plan does, so that all who have the chain do it in the same round. Whoever hears a
newer one hands it on, the next leader puts it in, and a member that has known it for some certificates signs none without it.
One that says "go on" is heeded as soon as it is heard: a run that is paused makes no certificates.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dilocox_peer.events_of_rounds import OwnerDirected
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.directives import Directive, why_not_directive

PATIENT_FOR = 2  # certificates made while a directive is known, in which a leader may not have heard of it


@dataclass(frozen=True, slots=True)
class Authority:
    """Whose directives apply to a run. run: digest of its manifest."""

    owner: PeerId
    run: Digest
    verify: Callable[[PeerId, bytes, bytes], bool]

    def why_not(self, directive: Directive) -> str | None:
        """Why directive is none of the owner's for this run, or None."""
        return why_not_directive(directive, run=self.run, owner=self.owner, verify=self.verify)


class Directing:
    """The newest directive that one peer of a stage knows, beside those in its chain."""

    def __init__(self, authority: Authority | None) -> None:
        self._authority = authority
        self._heard: Directive | None = None
        self._waited = 0  # certificates of ours that came without it
        self._told: tuple[int, bool] = (0, False)

    def hear(self, directive: Directive, in_chain: Directive | None) -> tuple[bool, str | None]:
        """Whether directive is news, to be handed on; or why it is refused. in_chain: the newest that our chain has."""
        known = self.newest(in_chain)
        if (known is not None and directive.number < known.number) or directive == known:
            return False, None  # an old one, whoever repeats it
        if self._authority is None:
            return False, "a directive in a run without an owner"
        if reason := self._authority.why_not(directive):
            return False, reason
        if known is not None and directive.number == known.number:
            return (
                False,
                f"another directive {directive.number} than the one known here, both signed by the run's owner",
            )
        self._heard, self._waited = directive, 0
        return True, None

    def newest(self, in_chain: Directive | None) -> Directive | None:
        """Of what was heard and what the chain has."""
        heard = self._heard
        return heard if heard is not None and (in_chain is None or heard.number > in_chain.number) else in_chain

    def to_carry(self, in_chain: Directive | None) -> Directive | None:
        """What our own proposal is to bring with it; None: the chain has it."""
        newest = self.newest(in_chain)
        return None if newest is in_chain else newest

    def news(self, in_chain: Directive | None) -> list[OwnerDirected]:
        """What is to be told: each directive when it is heard, and again when it applies."""
        newest = self.newest(in_chain)
        if newest is None or self._told >= (newest.number, newest is in_chain):
            return []
        self._told = (newest.number, newest is in_chain)
        return [OwnerDirected(newest.number, newest is in_chain, newest.words(), newest.said)]

    def certified(self) -> None:
        """Our chain has grown by a round."""
        self._waited += 1

    def why_withheld(self, carried: Directive | None, in_chain: Directive | None) -> str | None:
        """Why a value that brings `carried` gets no vote: it leaves out what everybody has had the time to hear of."""
        due = self.to_carry(in_chain)
        if due is None or self._waited < PATIENT_FOR or (carried is not None and carried.number >= due.number):
            return None
        return f"leaves out directive {due.number} of the run's owner, known here for {self._waited} rounds"
