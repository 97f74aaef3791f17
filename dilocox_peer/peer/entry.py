"""How a peer comes in to a run that is not open: by the pass it kept, or by the invitation in its link.

An invitation for many is turned into a pass by a bootstrap that holds the owner's key (desk.py). The pass stays in the run's
folder, so that the next start needs neither the invitation nor that bootstrap.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dilocox_peer.admission import Admission, Gate, Grant, Revocations, Right, age, told_to_itself
from dilocox_peer.dht.directory import Directory
from dilocox_peer.errors import PeerUnavailable, ProtocolError, RunRefused, RunUnreachable, not_written
from dilocox_peer.files import replace_file
from dilocox_peer.invitation import parse_multiaddr
from dilocox_peer.manifest import Manifest
from dilocox_peer.network.transport import Transport
from dilocox_peer.types import PeerId
from dilocox_peer.wire.records import MAX_GRANT_BYTES, MAX_REVOCATIONS_BYTES

ADMIT_SERVICE: Final = "admit"
ADMIT_S = 15.0  # for one bootstrap to answer; it writes to its disk before
REVOCATIONS_S = 10.0
PASS_FILE, REVOCATIONS_FILE = "pass", "revocations"


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A peer that asks to be let in. grant: of its link. folder: of the run, where the pass is kept."""

    me: PeerId
    grant: Grant | None
    folder: Path
    right: Right = Right.JOIN


async def come_in(
    newcomer: Newcomer, manifest: Manifest, *, transport: Transport, directory: Directory
) -> Admission | None:
    """What lets newcomer in, from here on guarding its own door too; None where the run is open.

    Raises RunRefused in one line: no invitation, or why it is worth nothing; RunUnreachable: nobody there can redeem it;
    ConfigError: the pass cannot be kept.
    """
    gate = Gate.of(manifest)
    if gate is None:
        return None
    directory.set_gate(gate)
    _take_kept_revocations(gate, newcomer.folder)
    with suppress(RunUnreachable):  # nobody has published any, or they are slow: the others know them
        if (found := await directory.fetch_revocations(REVOCATIONS_S)) is not None:
            gate.take(found)
            keep_revocations(gate, newcomer.folder)
    own = None
    is_listed = newcomer.me in gate.members or newcomer.me == gate.owner
    if not is_listed or gate.refusal(newcomer.me, newcomer.right, time.time()) is not None:
        own = await _own_pass(newcomer, gate, manifest.run.name, transport)
    admission = Admission(gate, b"" if own is None else own.to_bytes())
    if own is not None:
        gate.show(newcomer.me, admission.own_pass, time.time())  # what look_again asks for
    await transport.guard(admission)
    return admission


async def look_again(
    admission: Admission,
    newcomer: Newcomer,
    run_name: str,
    directory: Directory,
    on_out: Callable[[PeerId], None],
) -> None:
    """Goes by what the owner has revoked meanwhile. on_out: for each peer that had a right in the run and has none any more, at every look. Raises
    RunRefused when that is newcomer, or its invitation has expired: the others hear it no more; RunUnreachable."""
    gate = admission.gate
    found = await directory.fetch_revocations(REVOCATIONS_S)
    if found is not None and gate.take(found):
        await asyncio.to_thread(keep_revocations, gate, newcomer.folder)
    if (reason := gate.refusal(newcomer.me, newcomer.right, time.time())) is not None:
        raise RunRefused(_refused(run_name, reason))
    for peer in gate.out(time.time()):
        on_out(peer)


def keep_revocations(gate: Gate, folder: Path) -> None:
    """For the next start, where nobody may tell of them. Best effort."""
    with suppress(OSError):
        _write(folder / REVOCATIONS_FILE, gate.revocations.to_bytes())


async def _own_pass(newcomer: Newcomer, gate: Gate, run_name: str, transport: Transport) -> Grant:
    me, grant = newcomer.me, newcomer.grant
    kept = kept_pass(newcomer.folder)
    why_not_kept = _why_not(gate, kept, newcomer) if kept is not None else None
    why_not_grant = _why_not(gate, grant, newcomer) if grant is not None else None
    # A later invitation that is good is a renewal; the one that this pass is of, an older one of a link that is still in use somewhere, or a bad one changes nothing.
    is_good = kept is not None and why_not_kept is None
    is_renewed = grant is not None and why_not_grant is None and (kept is None or age(grant) > age(kept))
    if kept is not None and is_good and not is_renewed:
        return kept
    if grant is None:
        if why_not_kept is None:
            if (reason := gate.is_out(me, time.time())) is not None:  # it is listed, and was put out
                raise RunRefused(_refused(run_name, reason))
            whom = f" for {me}" if newcomer.right is Right.JOIN else " to read"  # a visitor's key may be gone tomorrow
            raise RunRefused(
                f"run {run_name!r} takes {'listed and ' if gate.members else ''}invited peers only, and this link has no "
                f"invitation: ask its owner for one{whom}"
            )
        raise RunRefused(_refused(run_name, why_not_kept))
    if why_not_grant is not None:
        raise RunRefused(_refused(run_name, why_not_grant))
    try:
        own = grant if grant.is_pass else await redeem(grant, newcomer, gate, run_name, transport)
    except (RunRefused, RunUnreachable):
        if kept is None or not is_good:
            raise
        return kept
    try:
        _write(newcomer.folder / PASS_FILE, own.to_bytes())
    except OSError as error:
        raise not_written(f"{newcomer.folder} cannot be used", error, "pass another --home") from None
    return own


async def redeem(grant: Grant, newcomer: Newcomer, gate: Gate, run_name: str, transport: Transport) -> Grant:
    """The pass that a bootstrap of the link makes of grant, which is worth something: nobody else is shown it."""
    said = "none of the link's addresses answered"
    named = (
        peer for text in transport.initial_peers if (peer := parse_multiaddr(text, "peer").peer) in transport.named
    )
    for peer in dict.fromkeys(named):
        assert peer is not None
        try:
            header, _ = await transport.fetch(
                peer, ADMIT_SERVICE, {"grant": grant.to_bytes()}, max_body_bytes=0, timeout_s=ADMIT_S
            )
        except (PeerUnavailable, ProtocolError) as error:
            said = error.reason
            continue
        match header:
            case {"refused": str(reason)}:
                raise RunRefused(_refused(run_name, reason[:300]))
            case {"pass": bytes(raw)}:
                try:
                    own = Grant.from_bytes(raw)
                except ValueError as error:
                    said = str(error)
                    continue
                reason_not = _why_not(gate, own, newcomer) if own.is_pass else "it is no pass"
                if reason_not is None:
                    return own
                said = reason_not
    raise RunUnreachable(
        f"nobody there can redeem the invitation to run {run_name!r} ({said}): its bootstrap has to hold the owner's key; "
        "try again later, or ask the owner for an invitation for this peer alone"
    )


def _why_not(gate: Gate, grant: Grant, newcomer: Newcomer) -> str | None:
    return gate.why_not(grant, newcomer.me, newcomer.right, time.time(), check_signature=True)


def _refused(run_name: str, reason: str) -> str:
    """reason: of a gate or a bootstrap, which speak of the peer as "it"; here it is told of itself."""
    return (
        f"run {run_name!r} does not take this peer: {told_to_itself(reason)}; ask the run's owner for a new invitation"
    )


def kept_pass(folder: Path) -> Grant | None:
    """What is on disk, if it is a pass; a damaged file is none."""
    try:
        kept = Grant.from_bytes(_read(folder / PASS_FILE, MAX_GRANT_BYTES))
    except (OSError, ValueError):
        return None
    return kept if kept.is_pass else None


def _take_kept_revocations(gate: Gate, folder: Path) -> None:
    with suppress(OSError, ValueError):
        raw = _read(folder / REVOCATIONS_FILE, MAX_REVOCATIONS_BYTES)
        gate.take(Revocations.from_bytes(raw, run_id=gate.run_id, owner=gate.owner))


def _read(path: Path, max_bytes: int) -> bytes:
    with path.open("rb") as file:
        return file.read(max_bytes + 1)


def _write(path: Path, raw: bytes) -> None:
    """Whole or not at all; a pass is of use to its peer's key alone, and still nobody else's to read."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(path, [raw], mode=0o600)
