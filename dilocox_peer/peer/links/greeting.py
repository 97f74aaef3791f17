"""The first frame over a link, each way: who speaks, signed by the peer's key for this link and this receiver alone."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgpack

from dilocox_peer.admission import Admission, Right
from dilocox_peer.errors import ProtocolError
from dilocox_peer.network.link import LinkId
from dilocox_peer.signing import SIGNATURE_BYTES, SigningKey, verify
from dilocox_peer.types import PeerId, RunId, canonical

MAX_HELLO_BYTES = 768
_VERSION: Final = 1


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

    def hello(self, to: LinkId) -> bytes:
        statement = hello_statement(self._run_id, self._link(), to, self._stage, self._incarnation)
        shown = [] if self._admission is None else [self._admission.own_pass]
        return canonical([_VERSION, self._me, self._stage, self._incarnation, self._key.sign(statement), *shown])

    def checked(self, link: LinkId, raw: bytes) -> Hello:
        """The peer that greets over this link. Raises ProtocolError."""
        if len(raw) > MAX_HELLO_BYTES:
            raise ProtocolError(None, f"a greeting of {len(raw)} bytes, at most {MAX_HELLO_BYTES}")
        try:
            fields = msgpack.unpackb(raw, strict_map_key=True, max_array_len=8, max_map_len=0, max_ext_len=0)
        except (ValueError, msgpack.UnpackException) as error:
            raise ProtocolError(None, f"an unreadable greeting: {error}") from None
        match fields:
            case [int(version), str(peer), int(stage), int(incarnation), bytes(signature)]:
                shown = b""
            case [int(version), str(peer), int(stage), int(incarnation), bytes(signature), bytes(shown)]:
                pass
            case _:
                raise ProtocolError(None, "a greeting of another form")
        if version != _VERSION:
            raise ProtocolError(
                None, f"a greeting of version {version}, this peer speaks {_VERSION}: update the older of the two"
            )
        statement = hello_statement(self._run_id, link, self._link(), stage, incarnation)
        if len(signature) != SIGNATURE_BYTES or not verify(PeerId(peer), statement, signature):
            raise ProtocolError(None, f"a greeting that {peer[:64]!r} did not sign")
        if (reason := self._why_not(PeerId(peer), shown)) is not None:
            raise ProtocolError(PeerId(peer), f"{peer} is not admitted: {reason}")
        return Hello(PeerId(peer), stage, incarnation)

    def _why_not(self, peer: PeerId, shown: bytes) -> str | None:
        if self._admission is None:
            return None
        gate, now = self._admission.gate, time.time()
        return (gate.show(peer, shown, now) if shown else None) or gate.refusal(peer, Right.JOIN, now)


def hello_statement(run_id: RunId, sender: LinkId, receiver: LinkId, stage: int, incarnation: int) -> bytes:
    """What a peer signs to say: this link is mine. Named for its receiver, so nobody can pass it on."""
    return canonical(["dilocox-hello", run_id, sender, receiver, stage, incarnation])
