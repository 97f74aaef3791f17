"""The first frame over a link, each way: who speaks, signed by the peer's key for this link and this receiver alone."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from dilocox_peer.admission import Admission, Right
from dilocox_peer.errors import ProtocolError
from dilocox_peer.signing import SigningKey, verify
from dilocox_peer.types import LinkId, PeerId, RunId
from dilocox_peer.wire.declared import encode
from dilocox_peer.wire.records import GREETING
from dilocox_peer.wire.versions import HELLO


@dataclass(frozen=True, slots=True)
class Hello:
    """The peer that speaks over a link."""

    peer: PeerId
    stage: int
    incarnation: int


class Greeter:
    """Writes our greetings and checks those of others."""

    def __init__(
        self,
        key: SigningKey,
        run_id: RunId,
        link: Callable[[], LinkId],
        stage: int,
        incarnation: int,
        admission: Admission | None = None,
    ) -> None:
        """link: our own, once linkd has told it. admission: of a run that is not open; a greeting carries our pass then."""
        self._key = key
        self._me = key.peer_id
        self._run_id = run_id
        self._link = link
        self._stage = stage
        self._incarnation = incarnation
        self._admission = admission
        self.banned: Collection[PeerId] = ()  # by the run's owner

    def hello(self, to: LinkId) -> bytes:
        statement = hello_statement(self._run_id, self._link(), to, self._stage, self._incarnation)
        shown = [] if self._admission is None else [self._admission.own_pass]
        return encode((HELLO, self._me, self._stage, self._incarnation, self._key.sign(statement), *shown))

    def checked(self, link: LinkId, raw: bytes) -> Hello:
        """The peer that greets over this link. Raises ProtocolError."""
        said = GREETING.hear(raw, None)
        peer = said.peer
        statement = hello_statement(self._run_id, link, self._link(), said.stage, said.incarnation)
        if not verify(peer, statement, said.signature):
            raise ProtocolError(None, f"a greeting that {peer!r} did not sign")
        if (reason := self._why_not(peer, said.shown)) is not None:
            raise ProtocolError(peer, f"{peer} is not admitted: {reason}")
        return Hello(peer, said.stage, said.incarnation)

    def _why_not(self, peer: PeerId, shown: bytes) -> str | None:
        if peer in self.banned:
            return "the run's owner has banned it"
        if self._admission is None:
            return None
        gate, now = self._admission.gate, time.time()
        return (gate.show(peer, shown, now) if shown else None) or gate.refusal(peer, Right.JOIN, now)


def hello_statement(run_id: RunId, sender: LinkId, receiver: LinkId, stage: int, incarnation: int) -> bytes:
    """What a peer signs to say: this link is mine. Named for its receiver, so nobody can pass it on."""
    return encode(("dilocox-hello", run_id, sender, receiver, stage, incarnation))
