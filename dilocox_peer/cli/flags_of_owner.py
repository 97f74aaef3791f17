"""The flags of the commands with which a run's owner says who may come in and what it wants (invite, revoke, owner)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from dilocox_peer.cli.flags import Home, Name, OfPeer, OwnerKey, RunFile
from dilocox_peer.flags import Flag, Positional


@dataclass(frozen=True, slots=True, kw_only=True)
class InviteFlags(OfPeer):
    path: RunFile = Path("run.toml")
    for_peer: Annotated[
        str | None,
        Flag("Invite this peer alone; nobody has to redeem it.", name="for", metavar="PEERID", shown=False),
    ] = None
    uses: Annotated[int | None, Flag("Invite so many, whoever comes first.", shown="1", least=1, most=10_000)] = None
    expires: Annotated[str, Flag("After so long it is worth nothing, nor is who came in by it: 90m, 12h, 7d, 4w.")] = (
        "30d"
    )
    rights: Annotated[str, Flag("join: train and read; read: export, evaluate, generate alone.")] = "join"
    address: Annotated[
        tuple[str, ...],
        Flag("Multiaddr where the run is entered; may repeat.", shown="the bootstrap's on this machine"),
    ] = ()
    link: Annotated[str | None, Flag("The link that `bootstrap` printed, instead of --address.", shown=False)] = None
    owner_key: OwnerKey = None
    name: Name = "bootstrap"
    home: Home = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RevokeFlags:
    path: RunFile
    target: Annotated[
        str, Positional("An invitation's id, the link it is in, or the PeerID of who came in.", metavar="WHAT")
    ]
    link: Annotated[
        str | None, Flag("Tell the run at once, over its link; for a bootstrap on another machine.", shown=False)
    ] = None
    owner_key: OwnerKey = None
    home: Home = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerFlags:
    what: Annotated[
        str, Positional("show, pause, resume, stop, extend, rate, require, ban, unban or say.", metavar="WHAT")
    ] = "show"
    value: Annotated[
        str | None,
        Positional("A round (stop), rounds (extend), a factor (rate), a version, a PeerID or a text.", metavar="VALUE"),
    ] = None
    run_file: Annotated[Path, Flag("The run's signed file.")] = Path("run.toml")
    cool_down: Annotated[
        int, Flag("Of stop: rounds before it in which the learning rate falls to 0.", least=0, most=1_000_000)
    ] = 0
    force: Annotated[
        bool, Flag("Of stop and extend: also where the run may be past that round, and ends for good at once.")
    ] = False
    link: Annotated[
        str | None, Flag("Tell the run at once, over its link; for a bootstrap on another machine.", shown=False)
    ] = None
    owner_key: OwnerKey = None
    home: Home = None
