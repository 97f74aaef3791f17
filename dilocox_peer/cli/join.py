"""`join`: checks what the volunteer gave, then runs a session until the run is complete or the volunteer leaves."""

from dataclasses import dataclass
from pathlib import Path

import typer

from dilocox_peer.cli.eventlog import event_printer
from dilocox_peer.cli.home import PeerHome
from dilocox_peer.cli.lifetime import Stop, run_until_stopped
from dilocox_peer.errors import ConfigError
from dilocox_peer.invitation import parse_invitation, parse_multiaddrs
from dilocox_peer.peer.identity import Identity


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """The flags of `join`, as given."""

    link: str
    home: PeerHome
    data: tuple[Path, ...]
    stage: int | None
    device: str
    threads: int
    initial_peers: tuple[str, ...]
    host_maddrs: tuple[str, ...]
    announce_maddrs: tuple[str, ...]
    link_maddrs: tuple[str, ...]
    trace: bool
    json_log: bool
    until_stdin_closes: bool


def run_join(request: JoinRequest) -> None:
    """Trains until the run is complete or somebody stops it. Raises ConfigError, RunUnreachable, RunRefused."""
    invitation = parse_invitation(request.link)
    more_peers = parse_multiaddrs(request.initial_peers, "peer")
    parse_multiaddrs(request.host_maddrs, "listen")
    parse_multiaddrs(request.announce_maddrs, "announce")
    parse_multiaddrs(request.link_maddrs, "listen")
    for path in request.data:
        if not path.exists():
            raise ConfigError(f"--data {path} does not exist: pass a text file, a JSONL file or a folder of them")
    request.home.make()
    listener = event_printer(as_json=request.json_log)
    with Identity.open(request.home.identity_path) as identity:
        # Only now the heavy imports: a typing error in a flag should not take two seconds to be told.
        from dilocox_peer.peer.session import Session, SessionSettings

        settings = SessionSettings(
            run_id=invitation.run_id,
            initial_peers=(*invitation.addresses, *more_peers),
            host_maddrs=request.host_maddrs,
            announce_maddrs=request.announce_maddrs,
            runtime_dir=request.home.runtime,
            identity_path=request.home.identity_path,
            run_folder=request.home.run_folder(invitation.run_id),
            data=request.data,
            stage=request.stage,
            device=request.device,
            threads=request.threads,
            link_maddrs=request.link_maddrs,
            trace=request.trace,
        )

        async def work(stop: Stop) -> None:
            await Session(settings, identity, listener).run(stop.wait())

        code = run_until_stopped(work, until_stdin_closes=request.until_stdin_closes)
    raise typer.Exit(code)
