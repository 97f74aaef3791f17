"""`owner`: what the run's owner wants of it, from now on. Each call signs the whole of it anew, with the next number
(wire/directives.py): written to the owner's home, from where the bootstrap there takes it within seconds, and with a link
into the run's directory.

What was said before is read where it is written, as the bootstrap there keeps it up to date, and with a link in the directory
too: a word that follows on old records takes back whatever was said elsewhere since.
"""

import asyncio
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import typer

from dilocox_peer.cli.flags_of_owner import OwnerFlags
from dilocox_peer.cli.home import PeerHome, default_home
from dilocox_peer.cli.invite import BOOTSTRAP, of_run, owned, peer_named, run_here
from dilocox_peer.errors import ConfigError, DilocoxError, RunUnreachable
from dilocox_peer.invitation import Invitation
from dilocox_peer.manifest import Manifest
from dilocox_peer.peer.identity import read_key
from dilocox_peer.signing import SigningKey
from dilocox_peer.wire.declared import replaced
from dilocox_peer.wire.directives import (
    MAX_BANNED,
    MAX_SAID,
    MOST_RATE,
    UNCHANGED,
    Directive,
    lost_words,
    newest_first,
    sign_directive,
)

if TYPE_CHECKING:
    from dilocox_peer.dht.directory import Directory
    from dilocox_peer.peer.desk import OwnerRecords

AHEAD = 4  # rounds that `stop` without a number leaves: all stages hear of it before
LOOK_S = 5.0

Change = Callable[[Directive, OwnerFlags, Manifest, int | None], dict[str, Any]]


def run_owner(flags: OwnerFlags) -> None:
    """Raises ConfigError, RunUnreachable."""
    from dilocox_peer.peer.desk import OwnerRecords

    if flags.what not in CHANGES and flags.what != "show":
        raise ConfigError(f"owner {flags.what[:40]!r}: write one of show, {', '.join(CHANGES)}")
    if flags.what == "show":
        _no_value(flags)
    if flags.cool_down and flags.what != "stop":
        raise ConfigError("--cool-down belongs to `owner stop`: it is the last rounds before it")
    if flags.force and flags.what not in ("stop", "extend"):
        raise ConfigError("--force belongs to `owner stop` and `owner extend`: they may end the run at once")
    manifest, key = owned(flags.run_file, flags.owner_key, flags.home)
    run = None if flags.link is None else of_run(flags.link, manifest)
    records = OwnerRecords(flags.home or default_home(), manifest.run_id)
    if run is None:
        here = run_here(PeerHome.at(flags.home, BOOTSTRAP), manifest) or {}
        least, newest_round = _number(here, "directive"), _number(here, "round")
        if least is None:
            typer.echo(
                f"no bootstrap with the owner's key answers in this home: {records.folder} may be old, and the next word takes back"
                " what was said elsewhere since; --link asks the run",
                err=True,
            )
        said = _say(flags, manifest, key, records, (), newest_round, least or 0)
    else:
        said = asyncio.run(_say_in(run, flags, manifest, key, records))
    if said is None:
        typer.echo("nothing is said: the run goes as its settings say")
        return
    typer.echo(f"directive {said.number}: {said.words()}" + (f'; you say: "{said.said}"' if said.said else ""))
    for peer in said.banned:
        typer.echo(f"banned: {peer}")
    if flags.what != "show":
        typer.echo(
            f"written to {records.folder}, from where a bootstrap with this --home tells it within seconds"
            + ("; told to the run" if run is not None else "")
        )
        typer.echo(
            "it comes with the next round's certificate, and training goes by it from the round after next"
            + ("" if run is not None else "; a run that is over takes none (with --link that is looked up)")
        )


def _number(here: Mapping[str, Any], what: str) -> int | None:
    """That of the newest directive, or round, that the bootstrap of this home knows; it writes each directive into the records. None: there is none,
    or it cannot ask the run."""
    number = here.get(what)
    return number if isinstance(number, int) else None


def _say(
    flags: OwnerFlags,
    manifest: Manifest,
    key: SigningKey,
    records: "OwnerRecords",
    found: Sequence[Directive],
    newest_round: int | None,
    least: int = 0,
) -> Directive | None:
    """found: what the run knows; it may have been said from another machine. newest_round: None where it is not known. least: what number there
    is at least."""
    if flags.what == "show":
        known = _known(manifest, records, found, least)
        if known is not None and found:
            try:
                records.take_directive(known, key.peer_id)
            except DilocoxError as error:  # a key on a stick that is read-only shows what the run knows all the same
                typer.echo(f"not written down here: {error.line}", err=True)
        return known
    with records.alone():
        known = _known(manifest, records, found, least)
        before = known or Directive(manifest.digest, 1)
        changed = CHANGES[flags.what](before, flags, manifest, newest_round)
        number = 1 if known is None else known.number + 1
        try:
            unsigned = replaced(before, number=number, signature=b"", **changed)
        except ValueError as error:
            raise ConfigError(f"owner {flags.what}: {error}") from None
        said = sign_directive(unsigned, key.sign)
        records.write_directive(said)
        return said


def _known(manifest: Manifest, records: "OwnerRecords", found: Sequence[Directive], least: int) -> Directive | None:
    """What counts of the records and of found; what is lost by it is told."""
    assert manifest.owner_peer is not None
    recorded = records.directive(run=manifest.digest, owner=manifest.owner_peer)
    newest = newest_first([*found, *([] if recorded is None else [recorded])])
    number = newest[0].number if newest else 0
    if number < least:
        raise ConfigError(
            f"the bootstrap of this home knows directive {least}, and {records.folder} has {number or 'none'}: try again in some"
            " seconds, or pass --link; the bootstrap's log says why it is not written"
        )
    for lost in newest[1:]:
        typer.echo(
            f"said in two places with number {number}; this is lost unless you say it anew: {lost_words(lost, newest[0])}"
        )
    return newest[0] if newest else None


async def _say_in(
    invitation: Invitation, flags: OwnerFlags, manifest: Manifest, key: SigningKey, records: "OwnerRecords"
) -> Directive | None:
    from dilocox_peer.cli.visit import visit

    async with visit(Invitation(invitation.run_id, invitation.addresses)) as open_visit:
        directory = open_visit.directory
        await open_visit.settings()
        found = await directory.directives()
        if flags.what != "show" and await _is_over(directory, manifest.stages.count):
            raise ConfigError(
                f"owner {flags.what}: the run is over, and its last certificate stands; `dilocox-peer export LINK` and then"
                " `dilocox-peer init --from FOLDER` begin another run that goes on from its model"
            )
        said = _say(flags, manifest, key, records, found, await _newest_round(directory, manifest.stages.count))
        if said is not None and flags.what != "show":
            await directory.publish_directive(said)
        return said


async def _is_over(directory: "Directory", num_stages: int) -> bool:
    """Whether the owner has signed the last round of every stage."""
    with suppress(RunUnreachable):
        words = await asyncio.gather(*(directory.word(stage, LOOK_S) for stage in range(num_stages)))
        return all(word is not None and word[0].is_last for word in words)
    return False


async def _newest_round(directory: "Directory", num_stages: int) -> int | None:
    """As leases and the owner's own words say; None where there are neither."""
    rounds = []
    with suppress(RunUnreachable):
        for stage in range(num_stages):
            word = await directory.word(stage, LOOK_S)
            rounds += [] if word is None else [word[0].round]
            rounds += [lease.round for lease in await directory.peers(stage, LOOK_S)]
    return max(rounds, default=None)


# ---- what changes ----------------------------------------------------------------------------------------------------


def _pause(_before: Directive, flags: OwnerFlags, _manifest: Manifest, _round: int | None) -> dict[str, Any]:
    _no_value(flags)
    return {"paused": True}


def _resume(_before: Directive, flags: OwnerFlags, _manifest: Manifest, _round: int | None) -> dict[str, Any]:
    _no_value(flags)
    return {"paused": False}


def _stop(_before: Directive, flags: OwnerFlags, manifest: Manifest, newest_round: int | None) -> dict[str, Any]:
    if flags.value == "never":
        return {"stop_after": 0, "cool_rounds": 0}
    if flags.value is not None:
        after = _whole(flags, "a round")
        _heed_past(after, flags, manifest, newest_round)
    elif newest_round and flags.link is not None:  # what a bootstrap keeps may be rounds old
        after = newest_round + max(AHEAD, flags.cool_down)
    else:
        raise ConfigError(
            "owner stop: write after which round (`owner stop 40`), or pass --link, which tells where it is"
        )
    return {"stop_after": after, "cool_rounds": flags.cool_down}


def _extend(before: Directive, flags: OwnerFlags, manifest: Manifest, newest_round: int | None) -> dict[str, Any]:
    rounds = _whole(flags, "how many rounds the run is to have, each as long as in its settings")
    if rounds < manifest.rounds.total:
        raise ConfigError(
            f"owner extend {rounds}: the run has {manifest.rounds.total} rounds; `owner stop` ends it earlier"
        )
    total_steps = rounds * manifest.rounds.inner_steps
    if total_steps < before.total_steps:  # less than it was extended to
        _heed_past(rounds, flags, manifest, newest_round)
    return {"total_steps": total_steps}


def _heed_past(last: int, flags: OwnerFlags, manifest: Manifest, newest_round: int | None) -> None:
    """Raises ConfigError where a run with that last round may end at once: when it is over it takes no word that has it go on."""
    if flags.force:
        return
    if newest_round is None:
        remedy = (
            "--force says it all the same" if flags.link is not None else "--link asks, --force says it all the same"
        )
        raise ConfigError(
            f"owner {flags.what} {last}: a run that is past that round ends at once, for good, and which round this one is at is not"
            f" known here: {remedy}"
        )
    # Several stages hear of it one after another.
    least = newest_round + (AHEAD if manifest.stages.count > 1 else 0) + 1
    if last < least:
        raise ConfigError(
            f"owner {flags.what} {last}: the run is at round {newest_round} and would end at once, for good: name round {least} or a"
            " later one, or pass --force"
        )


def _rate(_before: Directive, flags: OwnerFlags, _manifest: Manifest, _round: int | None) -> dict[str, Any]:
    wanted = f"what the learning rate is multiplied by, 0.001 to {MOST_RATE}"
    text = _value(flags, wanted)
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 1 / UNCHANGED <= factor <= MOST_RATE:
        raise ConfigError(f"owner rate {text[:40]}: write {wanted}")
    return {"rate_permille": round(factor * UNCHANGED)}


def _require(_before: Directive, flags: OwnerFlags, _manifest: Manifest, _round: int | None) -> dict[str, Any]:
    from dilocox_peer import __version__

    version = _value(flags, "a version, like 0.2 (0: any)")
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,4}){0,2}", version):
        raise ConfigError(f"owner require {version[:40]!r}: write a version, like 0.2 (0: any)")
    asked = replaced(_before, least_version="" if version == "0" else version)
    if asked.least_version and asked.why_too_old(__version__) is not None:
        raise ConfigError(
            f"owner require {version}: this program itself is {__version__}; update it before you ask others to"
        )
    return {"least_version": asked.least_version}


def _ban(before: Directive, flags: OwnerFlags, manifest: Manifest, _round: int | None) -> dict[str, Any]:
    peer = peer_named(_value(flags, "a PeerID"), "owner ban")
    if peer == manifest.owner_peer:
        raise ConfigError(f"{peer} is the run's owner, who cannot be banned")
    if peer in _bootstraps(flags, manifest):
        raise ConfigError(
            f"owner ban: {peer} is a bootstrap of the run: banned it would neither keep the run nor vouch for it; stop it instead"
        )
    if len({*before.banned, peer}) > MAX_BANNED:
        raise ConfigError(
            f"owner ban: {MAX_BANNED} are banned, and no more can be; a run by invitation suits you better"
        )
    return {"banned": tuple(sorted({*before.banned, peer}))}


def _bootstraps(flags: OwnerFlags, manifest: Manifest) -> set[str]:
    """Those that are known here: of this home, and of the link."""
    known = () if flags.link is None else of_run(flags.link, manifest).addresses
    found = {address.rpartition("/p2p/")[2] for address in known}
    with suppress(ConfigError):  # none has run in this home
        found.add(read_key(PeerHome.at(flags.home, BOOTSTRAP).identity_path, flag="--home").peer_id)
    return found


def _unban(before: Directive, flags: OwnerFlags, _manifest: Manifest, _round: int | None) -> dict[str, Any]:
    peer = _value(flags, "a PeerID")
    if peer not in before.banned:
        raise ConfigError(f"owner unban: {peer[:80]!r} is not banned; `dilocox-peer owner` lists who is")
    return {"banned": tuple(each for each in before.banned if each != peer)}


def _message(_before: Directive, flags: OwnerFlags, _manifest: Manifest, _round: int | None) -> dict[str, Any]:
    text = (flags.value or "").strip()
    if len(text) > MAX_SAID or not text.isprintable():
        raise ConfigError(f"owner say: one line of at most {MAX_SAID} characters")
    return {"said": text}


CHANGES: Mapping[str, Change] = {
    "pause": _pause, "resume": _resume, "stop": _stop, "extend": _extend, "rate": _rate, "require": _require, "ban": _ban,
    "unban": _unban, "say": _message,
}  # fmt: skip


def _no_value(flags: OwnerFlags) -> None:
    if flags.value is not None:
        raise ConfigError(f"owner {flags.what} takes nothing behind it, not {flags.value[:40]!r}")


def _value(flags: OwnerFlags, what: str) -> str:
    if not flags.value:
        raise ConfigError(f"owner {flags.what}: write {what} behind it")
    return flags.value


def _whole(flags: OwnerFlags, what: str) -> int:
    text = _value(flags, what)
    if not re.fullmatch(r"[0-9]{1,7}", text) or not 0 < int(text) <= 1_000_000:
        raise ConfigError(f"owner {flags.what} {text[:40]}: write {what}, as a whole number")
    return int(text)
