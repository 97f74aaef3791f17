"""Admission to a run: invitations that the run's owner signed, what they allow, and which of them were taken back. Pure.

A `Grant` is an invitation. One that names a peer is at once its pass: what it shows to the others. One for many names how
many; whoever holds the owner's key makes a pass of it for each peer that asks, and counts (`PassMaker`). A pass has the id
of the grant that it was made of, so that taking back the grant takes back all its passes. `Revocations` is the owner's list
of what was taken back. A `Gate` is what a peer asks before it hears another: it knows the passes that were shown to it.

Everything that is decoded here may come from a stranger: exact types, caps before memory, and ValueError for all of it.
"""

import base64
import binascii
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, Self

from dilocox_peer.manifest import Manifest
from dilocox_peer.signing import SigningKey, peer_id_of, public_key_of, verify
from dilocox_peer.types import PeerId, RunId
from dilocox_peer.wire.declared import encode
from dilocox_peer.wire.records import GRANT, GRANT_ID_BYTES, MAX_REVOKED, REVOCATIONS
from dilocox_peer.wire.versions import GRANT as GRANT_VERSION

MAX_GRANT_CHARS = 344  # of as many bytes, as text
MAX_PASSES = 4096  # known to a gate; each was signed by the owner, so strangers take no room here
MAX_TIME_MS = 2**53
OWN_PASS_S = 10 * 365 * 86_400  # longer than a process runs

NOTHING_SHOWN: Final = "has shown no invitation"
"""Part of what a gate says of a peer that it has seen no pass of; who hears it and has one, shows it and tries again."""


class Right(StrEnum):
    """join: train, vote and read. read: fetch chains and states, no more."""

    JOIN = "join"
    READ = "read"


_RIGHTS_BITS: Final[Mapping[Right, int]] = {Right.READ: 1, Right.JOIN: 2}


@dataclass(frozen=True, slots=True)
class Grant:
    """An invitation to a run. peer: whom it is for, None for the first `uses` that come. expires_s: wall clock; from then on
    neither it nor a pass made of it is worth anything. issued_ms: when the owner signed the invitation; a peer's revocation
    takes back what was issued before it."""

    run_id: RunId
    grant_id: bytes
    rights: frozenset[Right]
    issued_ms: int
    expires_s: int
    peer: PeerId | None
    uses: int  # 0 of a pass
    signature: bytes = b""

    @property
    def is_pass(self) -> bool:
        return self.peer is not None

    def allows(self, right: Right) -> bool:
        """A right to join is one to read: a newcomer fetches the others' state first."""
        return right in self.rights or (right is Right.READ and Right.JOIN in self.rights)

    def signed_by(self, owner: SigningKey) -> "Grant":
        return replace(self, signature=owner.sign(self._signed_bytes()))

    def is_signed_by(self, owner: PeerId) -> bool:
        return verify(owner, self._signed_bytes(), self.signature)

    def pass_for(self, peer: PeerId, owner: SigningKey) -> "Grant":
        """The pass that peer gets of it. It keeps the time of issue: a peer that was put out since does not get in by it."""
        return replace(self, peer=peer, uses=0).signed_by(owner)

    def to_bytes(self) -> bytes:
        return encode([*self._fields(), self.signature])

    @classmethod
    def from_bytes(cls, raw: bytes) -> "Grant":
        """Well formed; whether it is worth anything, why_not says. Raises ValueError with what is wrong."""
        form = GRANT.read(raw)
        rights = frozenset(right for right, bit in _RIGHTS_BITS.items() if form.rights & bit)
        peer = peer_id_of(form.key) if form.key else None
        run = RunId(form.run.hex())
        return cls(run, form.grant_id, rights, form.issued_ms, form.expires_s, peer, form.uses, form.signature)

    def to_text(self) -> str:
        """As a link carries it."""
        return base64.urlsafe_b64encode(self.to_bytes()).rstrip(b"=").decode()

    @classmethod
    def from_text(cls, text: str) -> "Grant":
        """Raises ValueError with what is wrong."""
        if len(text) > MAX_GRANT_CHARS:
            raise ValueError(f"an invitation has at most {MAX_GRANT_CHARS} characters, this has {len(text)}")
        try:
            raw = base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
        except (UnicodeEncodeError, binascii.Error):
            raise ValueError("it has a character that no invitation has, or one too few") from None
        return cls.from_bytes(raw)

    def _fields(self) -> list[Any]:
        bits = sum(_RIGHTS_BITS[right] for right in self.rights)
        key = public_key_of(self.peer) if self.peer is not None else b""
        run = bytes.fromhex(self.run_id)
        return [GRANT_VERSION, run, self.grant_id, bits, self.issued_ms, self.expires_s, key, self.uses]

    def _signed_bytes(self) -> bytes:
        return encode(["dilocox-grant", *self._fields()])


@dataclass(frozen=True, slots=True)
class Revocations:
    """What the owner has taken back: ids of grants and public keys of peers, each with the time (wall clock, ms).

    number: higher is newer; the time it was written, so it grows even where the owner's records were lost.
    """

    run_id: RunId
    number: int
    entries: tuple[tuple[bytes, int], ...]
    signature: bytes = b""

    @property
    def by_target(self) -> dict[bytes, int]:
        return dict(self.entries)

    def with_also(self, target: bytes, now_ms: int, *, others: Iterable[tuple[bytes, int]] = ()) -> "Revocations":
        """Unsigned, with target taken back as of now. others: of a list that was written elsewhere. Raises ValueError when
        the list is full."""
        return self._with([*others, (target, now_ms)], now_ms)

    def covers(self, other: "Revocations") -> bool:
        """Whether whatever other takes back is taken back by this one too."""
        known = self.by_target
        return all(known.get(each, -1) >= revoked_ms for each, revoked_ms in other.entries)

    def joined(self, other: "Revocations") -> "Revocations":
        """Unsigned, newer than both, with what either takes back. Raises ValueError when the list is full."""
        return self._with(other.entries, other.number + 1)

    def _with(self, others: Iterable[tuple[bytes, int]], now_ms: int) -> "Revocations":
        entries = self.by_target
        for each, revoked_ms in others:  # who was put out twice was put out at the later time
            entries[each] = max(revoked_ms, entries.get(each, 0))
        if len(entries) > MAX_REVOKED:
            raise ValueError(f"{MAX_REVOKED} are revoked already, no more fit: a run with a new manifest starts afresh")
        return Revocations(self.run_id, max(self.number + 1, now_ms), tuple(sorted(entries.items())))

    def signed_by(self, owner: SigningKey) -> "Revocations":
        return replace(self, signature=owner.sign(self._signed_bytes()))

    def to_bytes(self) -> bytes:
        return encode([*self._fields(), self.signature])

    @classmethod
    def from_bytes(cls, raw: bytes, *, run_id: RunId, owner: PeerId) -> "Revocations":
        """The owner's. Raises ValueError with what is wrong."""
        form = REVOCATIONS.read(raw)
        if form.run.hex() != run_id:
            raise ValueError("a list of revocations of another run")
        found = cls(run_id, form.number, form.entries, form.signature)
        if not verify(owner, found._signed_bytes(), found.signature):
            raise ValueError("a list of revocations that the run's owner did not sign")
        return found

    def _fields(self) -> list[Any]:
        return [GRANT_VERSION, bytes.fromhex(self.run_id), self.number, [list(entry) for entry in self.entries]]

    def _signed_bytes(self) -> bytes:
        return encode(["dilocox-revocations", *self._fields()])


class Gate:
    """What a process asks before it lets a peer in to a run that is not open. Of one process; what it says may differ from what others say for a while.

    Asked by the network's loop and by the pipeline's thread; every answer rests on one look-up of each table.
    """

    def __init__(self, run_id: RunId, owner: PeerId, members: Iterable[PeerId] = ()) -> None:
        """members: they need no invitation; the run's settings list them."""
        self.run_id = run_id
        self.owner = owner
        self.members = frozenset(members)
        self.passes: OrderedDict[PeerId, Grant] = OrderedDict()
        self._revoked: Mapping[bytes, int] = {}
        self.revocations = Revocations(run_id, 0, ())

    @classmethod
    def of(cls, manifest: Manifest) -> Self | None:
        """None: the run is open, nobody is asked."""
        if manifest.admission.mode == "open":
            return None
        return cls(manifest.run_id, owner_of(manifest), (PeerId(each) for each in manifest.admission.members))

    def refusal(self, peer: PeerId, right: Right, now: float) -> str | None:
        """Why peer may not do this, None if it may."""
        if peer == self.owner:
            return None
        put_out = self._key_revoked_ms(peer) is not None
        if peer in self.members and not put_out:
            return None
        shown = self.passes.get(peer)
        if shown is not None:
            return self.why_not(shown, peer, right, now)
        if put_out:
            return f"it was put out by the run's owner, and {NOTHING_SHOWN} that is newer"
        return f"it is not on the run's list, and {NOTHING_SHOWN}" if self.members else f"it {NOTHING_SHOWN}"

    def is_out(self, peer: PeerId, now: float) -> str | None:
        """Why peer has no right left that it had, None if it has some or never had any that is known here."""
        if peer in self.members or peer in self.passes:
            return self.refusal(peer, Right.READ, now)
        return None

    def out(self, now: float) -> list[PeerId]:
        """Those of whom `is_out` says why."""
        known = dict.fromkeys((*self.members, *self.passes))  # as they are now: another thread may show a pass
        return [peer for peer in known if self.is_out(peer, now) is not None]

    def show(self, peer: PeerId, raw: bytes, now: float) -> str | None:
        """Takes in peer's pass; why it is worth nothing, None if it is good. Of two good ones the later issued stays."""
        known = self.passes.get(peer)
        if known is not None and known.to_bytes() == raw:  # the signature was checked
            return self.why_not(known, peer, Right.READ, now, check_signature=False)
        try:
            shown = Grant.from_bytes(raw)
        except ValueError as error:
            return str(error)
        if not shown.is_pass:
            return "it shows an invitation for many, not its own pass"
        reason = self.why_not(shown, peer, Right.READ, now, check_signature=True)
        is_better = known is None or age(known) < age(shown) or self.why_not(known, peer, Right.READ, now) is not None
        if reason is None and is_better:
            self.passes[peer] = shown
            self.passes.move_to_end(peer)
            while len(self.passes) > MAX_PASSES:
                self.passes.popitem(last=False)
        return reason

    def why_not(
        self, grant: Grant, peer: PeerId, right: Right, now: float, *, check_signature: bool = False
    ) -> str | None:
        """Why grant does not let peer in, None if it does. Said of the peer: "it ...", "its invitation ..."."""
        if grant.run_id != self.run_id:
            return f"its invitation is for another run ({grant.run_id[:12]})"
        if grant.peer is not None and grant.peer != peer:
            return f"its invitation is for another peer ({grant.peer})"
        if check_signature and not grant.is_signed_by(self.owner):
            return "its invitation was not signed by the run's owner"
        if grant.expires_s <= now:
            return f"its invitation expired on {when(grant.expires_s)}"
        if grant.grant_id in self._revoked:
            return "its invitation was revoked by the run's owner"
        put_out_ms = self._key_revoked_ms(peer)
        if put_out_ms is not None and grant.issued_ms <= put_out_ms:
            return "it was put out by the run's owner"
        if not grant.allows(right):
            return "its invitation allows reading, not taking part"
        return None

    def take(self, revocations: Revocations) -> bool:
        """Goes by revocations, which the owner signed, from now on; False where what is known is as new."""
        if revocations.number <= self.revocations.number:
            return False
        self.revocations, self._revoked = revocations, revocations.by_target
        return True

    def _key_revoked_ms(self, peer: PeerId) -> int | None:
        if not self._revoked:
            return None
        try:
            return self._revoked.get(public_key_of(peer))
        except ValueError:  # no peer of ours has such an id
            return None


@dataclass(frozen=True)
class Admission:
    """What a peer of a run that is not open carries: the gate, and the pass it shows (none if it is listed)."""

    gate: Gate
    own_pass: bytes


class PassMaker:
    """Makes passes of invitations for many, with the owner's key. Counts; who calls writes each new use to disk before the
    pass is handed out."""

    def __init__(self, gate: Gate, owner: SigningKey, used: Mapping[bytes, Iterable[PeerId]]) -> None:
        """used: what is on disk: which peers came in by which grant."""
        assert owner.peer_id == gate.owner, (owner.peer_id, gate.owner)
        self._gate = gate
        self._owner = owner
        self._used = {grant_id: set(peers) for grant_id, peers in used.items()}

    def refusal(self, grant: Grant, peer: PeerId, now: float) -> str | None:
        """Why peer gets no pass of grant, None if it does."""
        reason = self._gate.why_not(grant, peer, Right.READ, now, check_signature=True)
        if reason is not None:
            return reason
        used = self._used.get(grant.grant_id, set())
        if not grant.is_pass and peer not in used and len(used) >= grant.uses:
            return "its invitation is used up: it was for " + (f"{grant.uses} peers" if grant.uses > 1 else "one peer")
        return None

    def is_new(self, grant: Grant, peer: PeerId) -> bool:
        """Whether a pass of it for peer is one use more; one that has come in by it gets its pass again."""
        return not grant.is_pass and peer not in self._used.get(grant.grant_id, set())

    def joined(self, one: Revocations, other: Revocations) -> Revocations:
        """What either takes back: the newer one where it has all of it, else another, newer than both: peers go by numbers. Raises ValueError when the
        list is full."""
        older, newer = sorted((one, other), key=lambda each: each.number)
        return newer if newer.covers(older) else one.joined(other).signed_by(self._owner)

    def own_pass(self, peer: PeerId, now: float) -> Grant:
        """Key of the process that holds the owner's key. Written down nowhere: it makes itself another when it starts again."""
        unsigned = Grant(
            run_id=self._gate.run_id,
            grant_id=secrets.token_bytes(GRANT_ID_BYTES),
            rights=frozenset({Right.JOIN}),
            issued_ms=int(now * 1000),
            expires_s=int(now) + OWN_PASS_S,
            peer=peer,
            uses=0,
        )
        return unsigned.signed_by(self._owner)

    def redeem(self, grant: Grant, peer: PeerId) -> Grant:
        """peer's pass; counted. Ask `refusal` first, and write down what is new."""
        if grant.is_pass:
            return grant
        used = self._used.setdefault(grant.grant_id, set())
        used.add(peer)
        assert len(used) <= grant.uses, (len(used), grant.uses)
        return grant.pass_for(peer, self._owner)


def owner_of(manifest: Manifest) -> PeerId:
    """The owner's key, as a PeerId."""
    return peer_id_of(bytes.fromhex(manifest.owner.public_key))


def when(seconds: float) -> str:
    """A time on the wall clock, for people."""
    if not 0 <= seconds < 4e9:
        return "a day beyond reckoning"
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def told_to_itself(reason: str) -> str:
    """What a gate says of a peer, for that peer to read."""
    return reason.replace("its invitation", "the invitation", 1).replace("it was put out", "this peer was put out", 1)


def age(grant: Grant) -> tuple[int, int]:
    """By which the later of two is told."""
    return grant.issued_ms, grant.expires_s
