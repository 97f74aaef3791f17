"""`bootstrap`: the entry point of one run or several. It holds their DHTs and manifests, trains nothing, and may be restarted.

Where the owner's key is here too it does the owner's part unattended (peer/registrar.py): it signs each stage's first roster
and checkpoints. Without the key it serves all the same.

Each run has a network daemon and a directory of its own, so that no run's records need another run's peers; the first
listens where it is told, each further one a port higher. All have the same identity. Every BEAT_S each is tried and its
manifest renewed; `--health` asks over the control socket how that went (health.py).
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dilocox_peer.cli.eventlog import event_printer
from dilocox_peer.cli.health import RunHealth, report
from dilocox_peer.cli.home import PeerHome
from dilocox_peer.cli.lifetime import Stop, interruptible, run_until_stopped
from dilocox_peer.config import read_signed_manifest
from dilocox_peer.errors import ConfigError, PeerUnavailable, RunUnreachable
from dilocox_peer.events import BootstrapReady, Failed, Left, Listener, Remark
from dilocox_peer.invitation import Invitation, format_invitation, parse_multiaddr, parse_multiaddrs, with_port_raised
from dilocox_peer.manifest import Manifest
from dilocox_peer.peer.control import ControlRefused, Controls, ControlServer, socket_path
from dilocox_peer.peer.identity import Identity, read_owner_key
from dilocox_peer.peer.network.p2pd import check_listenable
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import PeerId

if TYPE_CHECKING:
    from dilocox_peer.dht.directory import Directory
    from dilocox_peer.peer.network.transport import Transport
    from dilocox_peer.peer.registrar import Registrar

DEFAULT_PORT = 4711
BEAT_S = 30.0  # the manifest record expires after four
MAX_LINK_ADDRESSES = 4
MAX_RUNS = 16


@dataclass(frozen=True, slots=True)
class BootstrapRequest:
    """The flags of `bootstrap`, as given; port and addresses are of the first run."""

    paths: tuple[Path, ...]
    home: PeerHome
    port: int | None
    host_maddrs: tuple[str, ...]
    announce_maddrs: tuple[str, ...]
    initial_peers: tuple[str, ...]
    json_log: bool
    until_stdin_closes: bool
    owner_key: Path | None = None  # given; else the first of usual_owner_keys that belongs to a run
    usual_owner_keys: tuple[Path, ...] = ()

    @property
    def listen(self) -> tuple[str, ...]:
        return self.host_maddrs or (f"/ip4/0.0.0.0/tcp/{DEFAULT_PORT if self.port is None else self.port}",)


@dataclass(frozen=True)
class _Owned:
    """What this process may sign with. keys: of the runs' owners that are here, by their PeerIDs."""

    identity: Identity
    keys: Mapping[PeerId, SigningKey]


@dataclass
class _Served:
    """One run, and how it did at the last beat."""

    manifest: Manifest
    transport: "Transport"
    directory: "Directory"
    beaten_at: float  # monotonic; of the last beat that went well
    connections: int = 0
    trouble: str = ""
    failed: "asyncio.Task[str]" = field(init=False)

    def __post_init__(self) -> None:
        self.failed = asyncio.create_task(self.transport.wait_for_failure())

    @property
    def link(self) -> str:
        return format_invitation(Invitation(self.manifest.run_id, self.transport.addresses[:MAX_LINK_ADDRESSES]))

    async def beat(self) -> str:
        """Tries network daemon and directory, and renews the manifest. What is wrong, empty if nothing."""
        try:
            self.connections = len(await self.transport.connected_peers())
            await self.directory.publish_manifest(self.manifest)
        except (PeerUnavailable, RunUnreachable) as error:
            self.trouble = str(error)
        except (TimeoutError, OSError) as error:
            self.trouble = f"the network daemon does not answer {error}".strip()
        else:
            self.beaten_at, self.trouble = time.monotonic(), ""
        return self.trouble

    def health(self) -> RunHealth:
        return RunHealth(
            run=self.manifest.run_id,
            run_name=self.manifest.run.name,
            link=self.link,
            nodes=self.directory.num_known_nodes,
            connections=self.connections,
            beat_age_s=round(time.monotonic() - self.beaten_at, 1),
            trouble=self.trouble,
        )


def run_bootstrap(request: BootstrapRequest) -> None:
    """Serves until it is told to stop. Raises ConfigError, RunUnreachable; nothing is started before all is checked."""
    if request.port is not None and request.host_maddrs:
        raise ConfigError("--port and --host-maddrs both say where to listen: pass one of them")
    manifests = _manifests(request.paths)
    parse_multiaddrs(request.initial_peers, "peer")
    for index in range(len(manifests)):
        for address in _addresses(request, index)[0]:
            check_listenable(
                parse_multiaddr(address, "listen"), flag="--host-maddrs" if request.host_maddrs else "--port"
            )
    keys = _owner_keys(request, manifests)
    request.home.make()
    listener = event_printer(as_json=request.json_log)
    with Identity.open(request.home.identity_path) as identity:
        with interruptible():  # not in the loop, where hivemind's import would keep Ctrl-C waiting
            from dilocox_peer.peer.network.daemon import quiet_hivemind

            quiet_hivemind()

        async def work(stop: Stop) -> None:
            await _serve(manifests, _Owned(identity, keys), request, listener, stop)

        code = run_until_stopped(work, until_stdin_closes=request.until_stdin_closes)
    raise typer.Exit(code)


def _manifests(paths: Sequence[Path]) -> list[Manifest]:
    if len(paths) > MAX_RUNS:
        raise ConfigError(f"{len(paths)} runs are too many for one bootstrap: at most {MAX_RUNS}, start another")
    by_run: dict[str, Path] = {}
    manifests = []
    for path in paths:
        manifest = read_signed_manifest(path)
        other = by_run.setdefault(manifest.run_id, path)
        if other is not path:
            raise ConfigError(f"{path} is the same run as {other}: name each run once")
        manifests.append(manifest)
    return manifests


def _owner_keys(request: BootstrapRequest, manifests: Sequence[Manifest]) -> dict[PeerId, SigningKey]:
    """The keys of the runs' owners that are here. Raises ConfigError for one that was named and owns none of them."""
    if request.owner_key is not None:
        key = read_owner_key(request.owner_key)
        if key is None:
            raise ConfigError(f"--owner-key {request.owner_key} does not exist: pass the key that signed the run file")
        if all(manifest.owner_peer != key.peer_id for manifest in manifests):
            raise ConfigError(
                f"--owner-key {request.owner_key} has not signed {request.paths[0]}: pass the one that has"
            )
        return {key.peer_id: key}
    found = [read_owner_key(path) for path in request.usual_owner_keys]
    return {key.peer_id: key for key in found if key is not None}


def _addresses(request: BootstrapRequest, index: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(listen, announce) of the run with that index. Raises ConfigError."""
    listen = with_port_raised(parse_multiaddrs(request.listen, "listen"), "listen", index)
    return listen, with_port_raised(parse_multiaddrs(request.announce_maddrs, "announce"), "announce", index)


async def _serve(
    manifests: Sequence[Manifest], owned: _Owned, request: BootstrapRequest, listener: Listener, stop: Stop
) -> None:
    """Starts and serves until it is told to stop, which it may be in mid-start: then nothing is announced."""
    async with AsyncExitStack() as stack:
        stopped = asyncio.create_task(stop.wait())
        stack.callback(stopped.cancel)
        starting = asyncio.create_task(_start(stack, manifests, owned, request, listener, stop), name="start-up")
        either: set[asyncio.Future[Any]] = {starting, stopped}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            runs = starting.result()
            for served in runs:
                addresses = tuple(served.transport.addresses)
                listener(BootstrapReady(owned.identity.peer_id, served.manifest.run_id, served.link, addresses))
            await _keep(runs, listener, stopped)
        else:
            starting.cancel()
            with suppress(asyncio.CancelledError):
                await starting
        listener(Left(stop.reason))


async def _start(
    stack: AsyncExitStack,
    manifests: Sequence[Manifest],
    owned: _Owned,
    request: BootstrapRequest,
    listener: Listener,
    stop: Stop,
) -> list[_Served]:
    """All runs, served. When cancelled, what was started is the stack's to end."""
    runs = [await _open(stack, manifest, owned, request, listener, index) for index, manifest in enumerate(manifests)]
    await stack.enter_async_context(
        ControlServer(socket_path(request.home.folder), _controls(owned.identity, runs, stop), clock=time.time)
    )
    return runs


async def _open(
    stack: AsyncExitStack,
    manifest: Manifest,
    owned: _Owned,
    request: BootstrapRequest,
    listener: Listener,
    index: int,
) -> _Served:
    from dilocox_peer.dht.directory import Directory
    from dilocox_peer.peer import dialback
    from dilocox_peer.peer.network.transport import Relay, Transport

    listen, announce = _addresses(request, index)
    transport = await Transport.create(
        request.home.identity_path,
        owned.identity.peer_id,
        namespace=manifest.run_id,
        initial_peers=request.initial_peers,
        host_maddrs=listen,
        announce_maddrs=announce,
        runtime_dir=request.home.runtime_of(index),
        relay=Relay(force_reachability="public"),  # peers behind a NAT are reached through it
    )
    stack.push_async_callback(transport.close)
    directory = await Directory.create(transport, manifest.run_id, owned.identity.key)
    stack.push_async_callback(directory.close)
    await directory.publish_manifest(manifest)
    await dialback.serve(transport)
    registrar = _registrar(manifest, owned, transport, directory, request, listener)
    if registrar is not None:
        registering = asyncio.create_task(registrar.run(), name="notaries")
        stack.push_async_callback(_end, registering)
    served = _Served(manifest, transport, directory, beaten_at=time.monotonic())
    stack.callback(served.failed.cancel)
    return served


def _registrar(
    manifest: Manifest,
    owned: _Owned,
    transport: "Transport",
    directory: "Directory",
    request: BootstrapRequest,
    listener: Listener,
) -> "Registrar | None":
    """The owner's part in the run, if its key is here."""
    key = owned.keys.get(manifest.owner_peer) if manifest.owner_peer is not None else None
    if key is None:
        listener(
            Remark(
                f"no owner's key here: the first roster of run {manifest.run.name!r} has to be signed by a bootstrap that has it"
            )
        )
        return None
    from dilocox_peer.peer.registrar import Registrar

    folder = request.home.run_folder(manifest.run_id)
    return Registrar(manifest, key, transport=transport, directory=directory, folder=folder, listener=listener)


async def _end(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _keep(runs: Sequence[_Served], listener: Listener, stopped: "asyncio.Task[str]") -> None:
    """Until it is stopped; ends the process with 1 when a network daemon has ended: a supervisor starts it again."""
    waited_for: set[asyncio.Future[Any]] = {stopped, *(served.failed for served in runs)}
    while True:
        await asyncio.wait(waited_for, timeout=BEAT_S, return_when=asyncio.FIRST_COMPLETED)
        for served in runs:
            if served.failed.done():
                listener(Failed("network daemon", served.failed.result()))
                raise typer.Exit(1)
        if stopped.done():
            return
        for trouble in await asyncio.gather(*(served.beat() for served in runs)):
            if trouble:
                listener(Failed("manifest", f"{trouble}; trying again in {BEAT_S:.0f} s"))


def _controls(identity: Identity, runs: Sequence[_Served], stop: Stop) -> Controls:
    def refuse() -> str:
        raise ControlRefused("a bootstrap trains nothing")

    def leave() -> str:
        stop.ask("asked to leave")
        return "leaving"

    def status() -> dict[str, Any]:
        return report(identity.peer_id, [served.health() for served in runs])

    return Controls(status=status, pause=refuse, resume=refuse, leave=leave)
