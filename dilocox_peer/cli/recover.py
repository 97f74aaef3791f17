"""`recover`: back to a branch that this peer has left for a better one. The peer must not run meanwhile.

With the owner's key it also signs a checkpoint for the branch: then the others follow it too, as soon as this peer is back.
"""

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dilocox_peer.cli.demo_table import size
from dilocox_peer.cli.flags import RecoverFlags
from dilocox_peer.cli.home import PeerHome, owner_key_path
from dilocox_peer.cli.visit import Say
from dilocox_peer.errors import ConfigError
from dilocox_peer.files import give_to_owner
from dilocox_peer.peer.control import is_answered, socket_path
from dilocox_peer.peer.identity import Identity, read_key
from dilocox_peer.signing import SigningKey, verify
from dilocox_peer.wire.checkpoints import Checkpoint, sign_checkpoint

if TYPE_CHECKING:
    from dilocox_peer.manifest import Manifest
    from dilocox_peer.peer.state.backup import Backup
    from dilocox_peer.peer.state.keeper import Keeper
    from dilocox_peer.peer.state.left import LeftBranch

AHEAD_MS = 3_600_000  # what a bootstrap signs before it hears of this word counts less; then it counts on from there


def run_recover(flags: RecoverFlags, say: Say = typer.echo) -> None:
    """Lists what is kept, or goes back to one. Raises ConfigError, StateCorrupt."""
    home = flags.peer_home
    kept = _kept(home, flags.run)
    if flags.tip is None:
        for folder, branch in kept:
            say(_line(folder, branch))
        if not kept:
            say(f"nothing is kept here: {home.folder} has never left a branch of its own")
        return
    chosen = [(folder, branch) for folder, branch in kept if branch.tip.startswith(flags.tip.lower())]
    if len(chosen) != 1:
        what = "no branch" if not chosen else f"{len(chosen)} branches"
        raise ConfigError(f"{what} of this peer begins with {flags.tip!r}: `dilocox-peer recover` lists them")
    if is_answered(socket_path(home.folder)):
        raise ConfigError(f"this peer is running: `dilocox-peer leave{home.name_flag}` first, then recover")
    try:
        with Identity.open(home.identity_path) as identity, home.owned():
            _go_back(*chosen[0], flags, identity, say)
    finally:
        give_to_owner(home.folder)  # root may call this at a service's home


def _kept(home: PeerHome, run: str) -> "list[tuple[Path, LeftBranch]]":
    """(run folder, branch), of each run the newest first."""
    from dilocox_peer.peer.state.left import LeftBranches

    if not re.fullmatch(r"[0-9a-f]{0,64}", run := run.lower()):
        raise ConfigError(f"--run {run[:80]!r}: write the beginning of the run's id, which is hexadecimal")
    folders = sorted((home.folder / "runs").glob(f"{run[:16]}*"))
    return [(folder, branch) for folder in folders for branch in LeftBranches(folder).found()]


def _line(folder: Path, branch: "LeftBranch") -> str:
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(branch.left_at_s))
    rounds = f"rounds {branch.first_round}-{branch.last_round}"
    return f"{branch.tip}  stage {branch.stage}, {rounds}, left {when}, {size(branch.size_bytes)}, run {folder.name}"


def _go_back(folder: Path, branch: "LeftBranch", flags: RecoverFlags, identity: Identity, say: Say) -> None:
    from dilocox_peer.peer.state.anchors import kept_manifest
    from dilocox_peer.peer.state.keeper import Keeper
    from dilocox_peer.peer.state.left import LeftBranches

    manifest = kept_manifest(folder)
    if manifest is None:
        raise ConfigError(f"{folder} has no settings of its run: join the run once, then recover")
    owner = _owner_key(flags, manifest)
    branches, done = LeftBranches(folder), "nothing was done"
    try:
        backup = branches.load(branch, manifest, verify)
        keeper = Keeper(folder, manifest, branch.stage, lambda event: say(event.line()))
        try:
            _keep_present(branches, keeper, manifest, backup, branch.tip, say)
            checkpoint = None if owner is None else _vouch(keeper, manifest, backup, owner)
            done = "it is done in part: make room, and run the same again"
            keeper.adopt(backup, me=identity.peer_id, checkpoint=checkpoint)
        finally:
            keeper.close()
    except OSError as error:
        raise ConfigError(f"{folder} cannot be used: {error.strerror}; {done}") from None
    say(
        f"back at round {backup.state.round} of stage {branch.stage} ({branch.tip}): the next `join` goes on from there"
    )
    if checkpoint is None:
        say("peers on a better supported branch will draw it back unless the owner signs: pass --owner-key")
    else:
        say("signed with the owner's key: the others follow when this peer is back; start it soon")


def _keep_present(
    branches: "LeftBranches",  # type: ignore[name-defined]  # noqa: F821
    keeper: "Keeper",
    manifest: "Manifest",
    backup: "Backup",
    spare: str,
    say: Say,
) -> None:
    """Where the peer is now can be gone back to as well."""
    if keeper.durable is None or not keeper.has_state:  # of a published model it may never have come, or be damaged
        return
    present = keeper.durable.appended
    taken = {certificate.head for certificate in backup.certificates}
    leaves = [certificate for certificate in present if certificate.head not in taken]
    kept = branches.keep(manifest.run_id, present, leaves, keeper.state, spare=spare)
    if kept is not None:
        say(f"where it was is kept: {kept.tip}, rounds {kept.first_round}-{kept.last_round}")


def _vouch(keeper: "Keeper", manifest: "Manifest", backup: "Backup", owner: SigningKey) -> Checkpoint:
    """The owner's word for the branch, newer than what this peer has heard of it."""
    from dilocox_peer.peer.planning.plan import plan_bounds
    from dilocox_peer.peer.rounds.chain import Chain
    from dilocox_peer.peer.rounds.genesis import genesis_of
    from dilocox_peer.peer.rounds.schedule import ends_run

    stage = backup.certificates[-1].stage
    chain = Chain(genesis_of(manifest, stage), backup.certificates)
    known = keeper.durable.checkpoint if keeper.durable is not None else None
    sequence = max(time.time_ns() // 1_000_000 + AHEAD_MS, 0 if known is None else known.sequence + 1)
    unsigned = Checkpoint(
        stage, manifest.genesis(stage), chain.height, chain.place.round, chain.head, sequence,
        ends_run(chain, chain.height, plan_bounds(manifest)),
    )  # fmt: skip
    return sign_checkpoint(unsigned, owner.sign)


def _owner_key(flags: RecoverFlags, manifest: "Manifest") -> SigningKey | None:
    path = owner_key_path(flags.owner_key, flags.home)
    if flags.owner_key is None and not path.exists():
        return None
    key = read_key(path, flag="--owner-key")
    if key.peer_id == manifest.owner_peer:
        return key
    if flags.owner_key is not None:
        raise ConfigError(f"--owner-key {path} has not signed run {manifest.run.name!r}: pass the key that has")
    return None
