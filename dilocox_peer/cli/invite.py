"""`invite` and `revoke`: what the owner of a run that is not open says of who may come in.

Both sign with the owner's key, which a bootstrap on this machine may be using at the same time. An invitation is written down
nowhere: the link is the invitation. What is revoked is (peer/desk.py): the bootstrap of this home reads it again and again.
"""

import asyncio
import re
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dilocox_peer.admission import Gate, Grant, Revocations, Right, owner_of, when
from dilocox_peer.cli.flags_of_owner import InviteFlags, RevokeFlags
from dilocox_peer.cli.home import PeerHome, default_home, owner_key_path
from dilocox_peer.config import read_signed_manifest
from dilocox_peer.errors import ConfigError, DiskTakesNothing
from dilocox_peer.invitation import SCHEME, Invitation, format_invitation, parse_invitation, parse_multiaddrs
from dilocox_peer.manifest import Manifest
from dilocox_peer.peer.control import ControlRefused, NotRunning, ask, socket_path
from dilocox_peer.peer.identity import read_key
from dilocox_peer.signing import SigningKey, public_key_of
from dilocox_peer.types import PeerId
from dilocox_peer.wire.records import GRANT_ID_BYTES

if TYPE_CHECKING:
    from dilocox_peer.peer.desk import OwnerRecords

_DURATION = re.compile(r"([1-9][0-9]{0,4})([mhdw])")
_UNIT_S = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}
MAX_DAYS = 3660
BOOTSTRAP = "bootstrap"  # the name that one has unless it is given another


def run_invite(flags: InviteFlags) -> None:
    """Prints the link, alone, and on standard error what it is good for. Raises ConfigError."""
    manifest, owner = owned(flags.path, flags.owner_key, flags.home)
    if manifest.admission.mode == "open":
        raise ConfigError(
            f"run {manifest.run.name!r} needs no invitations, everybody may join: "
            f'set admission.mode = "invite" in {flags.path} and sign it'
        )
    if flags.for_peer is not None and flags.uses is not None:
        raise ConfigError("--for and --uses both say for whom it is: pass one of them")
    from dilocox_peer.peer.desk import OwnerRecords

    now, issued_ms = time.time(), int(time.time() * 1000)
    records = OwnerRecords(flags.home or default_home(), manifest.run_id)
    with suppress(ConfigError):  # of records that cannot be read nobody says when
        revoked = records.revocations(run_id=manifest.run_id, owner=owner.peer_id)
        issued_ms = max(issued_ms, revoked.number + 1)  # who was put out while this clock was ahead is let in by it
    grant = Grant(
        run_id=manifest.run_id,
        grant_id=secrets.token_bytes(GRANT_ID_BYTES),
        rights=frozenset({_right(flags.rights)}),
        issued_ms=issued_ms,
        expires_s=int(now) + seconds_of(flags.expires),
        peer=None if flags.for_peer is None else peer_named(flags.for_peer, "--for"),
        uses=0 if flags.for_peer is not None else (flags.uses or 1),
    ).signed_by(owner)
    addresses = _addresses(flags, manifest)
    with suppress(ConfigError, DiskTakesNothing):  # by its id it can be taken back all the same
        records.note_issued(issued_ms)
    typer.echo(format_invitation(Invitation(manifest.run_id, addresses, grant)))
    typer.echo(f"{described(grant)}; `dilocox-peer revoke {flags.path} {grant.grant_id.hex()}` takes it back", err=True)


def run_revoke(flags: RevokeFlags) -> None:
    """Takes an invitation back, or puts a peer out; with a link the run is told at once. Raises ConfigError, RunUnreachable."""
    from dilocox_peer.peer.desk import OwnerRecords

    manifest, owner = owned(flags.path, flags.owner_key, flags.home)
    gate = Gate.of(manifest)
    if gate is None:
        raise ConfigError(f"run {manifest.run.name!r} is open: nobody was invited, and nobody can be put out")
    run = None if flags.link is None else of_run(flags.link, manifest)
    what, taken_back = _target(flags.target, manifest)
    records = OwnerRecords(flags.home or default_home(), manifest.run_id)
    gate.take(records.revocations(run_id=manifest.run_id, owner=owner.peer_id))
    if run is None:
        _write_down(what, gate, None, records, owner)
    else:
        asyncio.run(_revoke_in(run, what, gate, records, owner))
    typer.echo(
        f"revoked {taken_back}; written to {records.folder}, which a bootstrap with this --home reads every 30 s"
    )
    if run is not None:
        typer.echo(f"told to run {manifest.run_id[:12]}; its peers look every minute or two")


def seconds_of(text: str, flag: str = "--expires", most_days: int = MAX_DAYS) -> int:
    """Of a duration like 90m, 12h, 7d or 4w. Raises ConfigError, which names the flag."""
    found = _DURATION.fullmatch(text)
    seconds = int(found[1]) * _UNIT_S[found[2]] if found else 0
    if not 0 < seconds <= most_days * 86_400:
        raise ConfigError(f"{flag} {text!r}: write a time like 90m, 12h, 7d or 4w, at most {most_days}d")
    return seconds


def described(grant: Grant) -> str:
    """An invitation in words."""
    if grant.peer is not None:
        whom = f"for {grant.peer}"
    else:
        whom = "for the first peer that comes" if grant.uses == 1 else f"for the first {grant.uses} peers that come"
    what = "join" if grant.allows(Right.JOIN) else "read, not to train"
    return f"invitation {whom} to {what}, until {when(grant.expires_s)}"


def owned(path: Path, owner_key: Path | None, home: Path | None) -> tuple[Manifest, SigningKey]:
    """The run of a signed file, and the key that signed it. Raises ConfigError."""
    manifest = read_signed_manifest(path)
    key_path = owner_key_path(owner_key, home)
    owner = read_key(key_path, flag="--owner-key")
    if owner.peer_id != owner_of(manifest):
        raise ConfigError(f"{key_path} is not the key that signed {path}: pass that one as --owner-key")
    return manifest, owner


def _right(text: str) -> Right:
    """A right to join is one to read, so `join,read` is `join`."""
    named = {part.strip() for part in text.split(",")}
    if not named <= {"join", "read"}:
        raise ConfigError(f"--rights {text!r}: write join or read")
    return Right.JOIN if "join" in named else Right.READ


def peer_named(text: str, what: str) -> PeerId:
    """Raises ConfigError, which calls it `what`."""
    try:
        public_key_of(PeerId(text))
    except ValueError:
        raise ConfigError(f"{what} {text[:80]!r} is no Ed25519 PeerID (12D3KooW...): copy it whole") from None
    return PeerId(text)


def _addresses(flags: InviteFlags, manifest: Manifest) -> tuple[str, ...]:
    """Where the run is entered: as given, or as the bootstrap on this machine says."""
    if flags.link is not None and flags.address:
        raise ConfigError("--link and --address both say where the run is entered: pass one of them")
    if flags.link is not None:
        return of_run(flags.link, manifest).addresses
    if flags.address:
        return parse_multiaddrs(flags.address, "peer")
    run = run_here(flags.peer_home, manifest)
    if run is not None:
        return parse_invitation(run["link"]).addresses
    raise ConfigError(
        f"no bootstrap of run {manifest.run.name!r} answers on this machine: pass the link that it printed as --link"
    )


def run_here(bootstrap: PeerHome, manifest: Manifest) -> dict[str, Any] | None:
    """What the bootstrap of this home says of the run (cli/health.py); None where none answers, or it serves others."""
    try:
        status = asyncio.run(ask(socket_path(bootstrap.folder), "status"))["status"]
    except (NotRunning, ControlRefused):
        return None
    return next((each for each in status.get("runs", ()) if each["run"] == manifest.run_id), None)


def of_run(link: str, manifest: Manifest) -> Invitation:
    """A link to this run. Raises ConfigError."""
    invitation = parse_invitation(link)
    if invitation.run_id != manifest.run_id:
        raise ConfigError(
            f"--link is to run {invitation.run_id[:12]}, the file is of run {manifest.run_id[:12]}: pass that one's link"
        )
    return invitation


def _target(text: str, manifest: Manifest) -> tuple[bytes, str]:
    """(what is written down, in words) of an invitation's id, a link with an invitation, or a peer."""
    if re.fullmatch(rf"[0-9a-f]{{{2 * GRANT_ID_BYTES}}}", text):
        return bytes.fromhex(text), f"invitation {text}, and every pass made of it"
    if text.lower().startswith(SCHEME):
        grant = parse_invitation(text).grant
        if grant is None:
            raise ConfigError(
                "the link has no invitation in it: pass the one that `invite` printed, its id, or a PeerID"
            )
        if grant.run_id != manifest.run_id:
            raise ConfigError(f"the link is to another run, {grant.run_id[:12]}: pass that one's run file")
        return grant.grant_id, f"invitation {grant.grant_id.hex()}, and every pass made of it"
    peer = peer_named(text, "what to revoke,")
    if peer == owner_of(manifest):
        raise ConfigError(f"{peer} is the run's owner, who cannot be put out")
    return public_key_of(peer), f"peer {peer}, whatever it was invited by until now"


def _write_down(what: bytes, gate: Gate, found: Revocations | None, records: "OwnerRecords", owner: SigningKey) -> None:
    """found: what the run knows; it may have been revoked from another machine."""
    if found is not None and found.number > gate.revocations.number:
        ours, found = found, gate.revocations
    else:
        ours = gate.revocations
    others = [] if found is None else found.entries
    now_ms = max(int(time.time() * 1000), records.newest_issued_ms())
    try:
        longer = ours.with_also(what, now_ms, others=others).signed_by(owner)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    records.write_revocations(longer)
    gate.take(longer)


async def _revoke_in(
    invitation: Invitation, what: bytes, gate: Gate, records: "OwnerRecords", owner: SigningKey
) -> None:
    """Into the run's directory as well, from where a bootstrap elsewhere and the peers take it."""
    from dilocox_peer.cli.visit import visit

    async with visit(Invitation(invitation.run_id, invitation.addresses)) as open_visit:
        open_visit.directory.set_gate(gate)
        await open_visit.settings()  # a clock that is off is told before a time of it is written down
        _write_down(what, gate, await open_visit.directory.fetch_revocations(), records, owner)
        await open_visit.directory.publish_revocations(gate.revocations)
