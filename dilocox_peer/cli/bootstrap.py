"""`bootstrap`: the entry point of a run. It holds the DHT and the manifest, trains nothing, and may be restarted."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import typer

from dilocox_peer.cli.eventlog import event_printer
from dilocox_peer.cli.home import PeerHome
from dilocox_peer.cli.lifetime import Stop, run_until_stopped
from dilocox_peer.config import read_signed_manifest
from dilocox_peer.errors import RunUnreachable
from dilocox_peer.events import BootstrapReady, Failed, Left, Listener
from dilocox_peer.invitation import Invitation, format_invitation, parse_multiaddrs
from dilocox_peer.manifest import Manifest
from dilocox_peer.peer.identity import Identity

REPUBLISH_S = 30.0  # of the manifest record, which expires like every record
MAX_LINK_ADDRESSES = 4


def run_bootstrap(
    path: Path,
    *,
    home: PeerHome,
    host_maddrs: Sequence[str],
    announce_maddrs: Sequence[str],
    initial_peers: Sequence[str],
    json_log: bool,
    until_stdin_closes: bool,
) -> None:
    """Serves until it is told to stop. Raises ConfigError, RunUnreachable; nothing is started before all is checked."""
    manifest = read_signed_manifest(path)
    parse_multiaddrs(host_maddrs, "listen")
    parse_multiaddrs(announce_maddrs, "announce")
    parse_multiaddrs(initial_peers, "peer")
    home.make()
    listener = event_printer(as_json=json_log)
    with Identity.open(home.identity_path) as identity:

        async def work(stop: Stop) -> None:
            await _serve(
                manifest, identity, home, listener, stop,
                host_maddrs=host_maddrs, announce_maddrs=announce_maddrs, initial_peers=initial_peers,
            )  # fmt: skip

        code = run_until_stopped(work, until_stdin_closes=until_stdin_closes)
    raise typer.Exit(code)


async def _serve(
    manifest: Manifest,
    identity: Identity,
    home: PeerHome,
    listener: Listener,
    stop: Stop,
    *,
    host_maddrs: Sequence[str],
    announce_maddrs: Sequence[str],
    initial_peers: Sequence[str],
) -> None:
    from dilocox_peer.dht.directory import Directory
    from dilocox_peer.peer.transport import Relay, Transport

    async with AsyncExitStack() as stack:
        transport = await Transport.create(
            home.identity_path,
            identity.peer_id,
            namespace=manifest.run_id,
            initial_peers=initial_peers,
            host_maddrs=host_maddrs,
            announce_maddrs=announce_maddrs,
            runtime_dir=home.runtime,
            relay=Relay(force_reachability="public"),  # peers behind a NAT are reached through it
        )
        stack.push_async_callback(transport.close)
        directory = await Directory.create(transport, manifest.run_id, identity.key)
        stack.push_async_callback(directory.close)
        await directory.publish_manifest(manifest)
        addresses = tuple(transport.addresses)
        link = format_invitation(Invitation(manifest.run_id, addresses[:MAX_LINK_ADDRESSES]))
        listener(BootstrapReady(identity.peer_id, manifest.run_id, link, addresses))
        stopped = asyncio.create_task(stop.wait())
        failed = asyncio.create_task(transport.wait_for_failure())
        try:
            while not stopped.done():
                await asyncio.wait({stopped, failed}, timeout=REPUBLISH_S, return_when=asyncio.FIRST_COMPLETED)
                if failed.done():
                    listener(Failed("network daemon", failed.result()))
                    raise typer.Exit(1)
                if not stopped.done():
                    try:
                        await directory.publish_manifest(manifest)
                    except RunUnreachable as error:
                        listener(Failed("manifest", f"{error}; trying again in {REPUBLISH_S:.0f} s"))
        finally:
            stopped.cancel()
            failed.cancel()
        listener(Left(stop.reason))
