"""`bootstrap`: the entry point of one run or several. It holds their DHTs and manifests, trains nothing, and may be restarted.

Where the owner's key is here too it does the owner's part unattended (peer/registrar.py): it signs each stage's first roster
and checkpoints. Without the key it serves all the same.

Each run has a network daemon and a directory of its own, so that no run's records need another run's peers; the first
listens where it is told, each further one a port higher. All have the same identity. Every BEAT_S each is tried and its
manifest renewed; `--health` asks over the control socket how that went (health.py). Where it has the owner's key it redeems the
invitations of runs that are not open, and it tells their peers what was revoked (peer/desk.py).
"""

import asyncio
import gc
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dilocox_peer.admission import Gate
from dilocox_peer.cli.eventlog import event_printer
from dilocox_peer.cli.flags import BootstrapFlags
from dilocox_peer.cli.health import RunHealth, newest_round, report
from dilocox_peer.cli.home import default_home, owner_key_path
from dilocox_peer.cli.lifetime import Stop, end, interruptible, run_until_stopped
from dilocox_peer.cli.page import check_port, page_of
from dilocox_peer.config import read_signed_manifest
from dilocox_peer.errors import ConfigError, DiskTakesNothing, PeerUnavailable, RunUnreachable
from dilocox_peer.events import BootstrapReady, Failed, Left, Listener, Remark
from dilocox_peer.events_of_reach import NobodyToEnterBy
from dilocox_peer.invitation import Invitation, format_invitation, parse_multiaddr, parse_multiaddrs, with_port_raised
from dilocox_peer.manifest import Manifest
from dilocox_peer.network.lasting import ended, lasting
from dilocox_peer.network.p2pd import check_listenable
from dilocox_peer.peer.control import ControlRefused, Controls, ControlServer, socket_path
from dilocox_peer.peer.identity import Identity, read_key
from dilocox_peer.peer.lag import LoopLag
from dilocox_peer.peer.settings import relay_bytes_per_s
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import RunId

if TYPE_CHECKING:
    from dilocox_peer.dht.directory import Directory
    from dilocox_peer.dht.records import Lease
    from dilocox_peer.network.transport import Transport
    from dilocox_peer.peer.archivist import Archivist
    from dilocox_peer.peer.desk import Desk
    from dilocox_peer.peer.lookout import Lookout
    from dilocox_peer.peer.registrar import Registrar
    from dilocox_peer.peer.reunion import Reunion

DEFAULT_PORT = 4711
BEAT_S = 30.0  # the manifest record expires after four
MAX_LINK_ADDRESSES = 4
MAX_RUNS = 16


@dataclass
class _Served:
    """One run, and how it did at the last beat."""

    manifest: Manifest
    transport: "Transport"
    directory: "Directory"
    desk: "Desk | None"  # of a run that is not open
    beaten_at: float  # monotonic; of the last beat that went well
    archivist: "Archivist | None" = None  # with --keep
    lookout: "Lookout | None" = None  # for what is kept
    registrar: "Registrar | None" = None  # with the owner's key
    connections: int = 0
    trouble: str = ""
    failed: "asyncio.Task[str]" = field(init=False)

    def __post_init__(self) -> None:
        self.failed = asyncio.create_task(self.transport.wait_for_failure())

    def link(self) -> str:
        return format_invitation(Invitation(self.manifest.run_id, self.transport.addresses[:MAX_LINK_ADDRESSES]))

    async def beat(self) -> str:
        """Tries network daemon and directory, and renews the manifest and what is revoked. What is wrong, empty if nothing."""
        try:
            self.connections = len(await self.transport.paths())
            await self.directory.publish_manifest(self.manifest)
            if self.desk is not None:
                await self.desk.beat(self.directory)
        except (PeerUnavailable, RunUnreachable, ConfigError, DiskTakesNothing) as error:
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
            link=self.link(),
            nodes=self.directory.num_known_nodes,
            connections=self.connections,
            beat_age_s=round(time.monotonic() - self.beaten_at, 1),
            trouble=self.trouble,
            directive=None if self.registrar is None else self.registrar.directed,
            round=newest_round(self.archivist, self.registrar),
        )


def run_bootstrap(flags: BootstrapFlags) -> None:
    """Serves until it is told to stop. Raises ConfigError, RunUnreachable; nothing is started before all is checked."""
    if flags.port is not None and flags.host_maddrs:
        raise ConfigError("--port and --host-maddrs both say where to listen: pass one of them")
    if flags.web_port is not None:
        if not flags.keep:
            raise ConfigError("--web-port shows what is kept: leave --no-keep out")
        check_port(flags.web_host, flags.web_port)
    relay_bytes_per_s(flags.relay)
    manifests = _manifests(flags.paths)
    owner_keys = _owner_keys(flags, manifests)
    parse_multiaddrs(flags.initial_peers, "peer")
    for index in range(len(manifests)):
        for address in _addresses(flags, index)[0]:
            check_listenable(
                parse_multiaddr(address, "listen"), flag="--host-maddrs" if flags.host_maddrs else "--port"
            )
    flags.peer_home.make()
    listener = event_printer(as_json=flags.log.is_json)
    with Identity.open(flags.peer_home.identity_path) as identity:
        with interruptible():  # not in the loop, where hivemind's import would keep Ctrl-C waiting
            from dilocox_peer.network.hivemind_parts import load_hivemind

            load_hivemind()

        async def work(stop: Stop) -> None:
            await serve_runs(manifests, owner_keys, identity, flags, listener, stop)

        code = run_until_stopped(work, until_stdin_closes=flags.until_stdin_closes)
    end(code)


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


def _owner_keys(flags: BootstrapFlags, manifests: Sequence[Manifest]) -> dict[RunId, SigningKey]:
    """The owner's key, for the runs that it signed. Raises ConfigError where one was named that signed none of them, or where
    one is there and cannot be read."""
    beside = flags.peer_home.folder / "owner.key"
    path = owner_key_path(flags.owner_key, flags.home)
    if flags.owner_key is None and not path.exists() and beside.exists():
        path = beside
    try:
        key = read_key(path, flag="--owner-key")
    except ConfigError:
        if flags.owner_key is not None or path.exists():
            raise  # one that is there and cannot be read: without it no run begins, and that is not seen until hours later
        return {}
    signed = {manifest.run_id: key for manifest in manifests if manifest.owner_peer == key.peer_id}
    if flags.owner_key is not None and not signed:
        raise ConfigError(
            f"--owner-key {path} signed none of these runs: pass the key that `sign` used, or leave it out"
        )
    return signed


def _addresses(flags: BootstrapFlags, index: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(listen, announce) of the run with that index. Raises ConfigError."""
    said = flags.host_maddrs or (f"/ip4/0.0.0.0/tcp/{DEFAULT_PORT if flags.port is None else flags.port}",)
    listen = with_port_raised(parse_multiaddrs(said, "listen"), "listen", index)
    return listen, with_port_raised(parse_multiaddrs(flags.announce_maddrs, "announce"), "announce", index)


async def serve_runs(
    manifests: Sequence[Manifest],
    owner_keys: Mapping[RunId, SigningKey],
    identity: Identity,
    flags: BootstrapFlags,
    listener: Listener,
    stop: Stop,
) -> None:
    """Starts and serves until it is told to stop, which it may be in mid-start: then nothing is announced."""
    async with AsyncExitStack() as stack:
        stopped = asyncio.create_task(stop.wait())
        stack.callback(stopped.cancel)
        starting = asyncio.create_task(
            _start(stack, manifests, owner_keys, identity, flags, listener, stop), name="start-up"
        )
        either: set[asyncio.Future[Any]] = {starting, stopped}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            runs = starting.result()
            for served in runs:
                addresses = tuple(served.transport.addresses)
                mode = served.manifest.admission.mode
                listener(BootstrapReady(identity.peer_id, served.manifest.run_id, served.link(), addresses, mode))
                if (remark := _on_admission(served, flags)) is not None:
                    listener(remark)
            if (page := _page(runs, flags, listener)) is not None:
                listener(Remark(f"the run's page: {await stack.enter_async_context(page)}"))
            gc.freeze()  # what imports made stays: collections of it held the loop for 80 to 300 ms
            await _keep(runs, listener, stopped)
        else:
            starting.cancel()
            with suppress(asyncio.CancelledError):
                await starting
        listener(Left(stop.reason))


async def _start(
    stack: AsyncExitStack,
    manifests: Sequence[Manifest],
    owner_keys: Mapping[RunId, SigningKey],
    identity: Identity,
    flags: BootstrapFlags,
    listener: Listener,
    stop: Stop,
) -> list[_Served]:
    """All runs, served. When cancelled, what was started is the stack's to end."""
    lag = LoopLag()
    watching = asyncio.create_task(lag.watch(), name="lag")
    stack.callback(watching.cancel)
    runs = [
        await open_run(stack, manifest, owner_keys.get(manifest.run_id), identity, flags, listener, index)
        for index, manifest in enumerate(manifests)
    ]
    await stack.enter_async_context(
        ControlServer(socket_path(flags.peer_home.folder), _controls(identity, runs, lag, stop), clock=time.time)
    )
    return runs


async def open_run(
    stack: AsyncExitStack,
    manifest: Manifest,
    owner_key: SigningKey | None,
    identity: Identity,
    flags: BootstrapFlags,
    listener: Listener,
    index: int,
) -> _Served:
    """One run at this bootstrap: its network daemon, directory, desk and keeper; what is opened goes on the stack."""
    from dilocox_peer.dht.directory import Directory
    from dilocox_peer.network.relaying import Relay
    from dilocox_peer.network.transport import Transport, named_peers
    from dilocox_peer.peer import dialback
    from dilocox_peer.peer.acquaintances import ACQUAINTANCES_FILE, Acquaintances
    from dilocox_peer.peer.desk import Desk, OwnerRecords
    from dilocox_peer.peer.reunion import Reunion

    listen, announce = _addresses(flags, index)
    gate, desk = Gate.of(manifest), None
    if gate is not None:
        desk = Desk.open(gate, OwnerRecords(flags.home or default_home(), manifest.run_id), owner_key)
        stack.callback(desk.close)
    folder = flags.peer_home.run_folder(manifest.run_id)
    acquaintances = Acquaintances(folder / ACQUAINTANCES_FILE)
    known = tuple(dict.fromkeys((*flags.initial_peers, *acquaintances.addresses)))

    async def network(initial_peers: Sequence[str]) -> Transport:
        return await Transport.create(
            flags.peer_home.identity_path,
            identity.peer_id,
            namespace=manifest.run_id,
            initial_peers=initial_peers,
            host_maddrs=listen,
            announce_maddrs=announce,
            runtime_dir=flags.peer_home.runtime_of(index),
            is_public=True,
        )

    async def node(*, is_alone: bool) -> Directory:
        return await Directory.create(
            transport, manifest.run_id, identity.key, initial_peers=known or None, is_alone=is_alone
        )

    has_served = folder.is_dir()  # else a mistyped address would begin a second directory
    is_alone = not flags.initial_peers and bool(known)
    try:
        transport = await network(flags.initial_peers)
    except RunUnreachable:
        if not has_served:
            raise
        transport, is_alone = await network(()), True
        transport.named = named_peers(flags.initial_peers)
    stack.push_async_callback(transport.close)
    transport.doors.set_listener(listener)
    try:
        directory = await node(is_alone=is_alone)
    except RunUnreachable:
        if is_alone or not has_served:
            raise
        directory, is_alone = await node(is_alone=True), True
    stack.push_async_callback(directory.close)
    if is_alone and flags.initial_peers:
        listener(NobodyToEnterBy(len(known)))
    if desk is not None:
        directory.set_gate(desk.gate)
        if (admission := desk.admission_of(identity.peer_id)) is not None:
            await transport.guard(admission)
        await desk.serve(transport)
        await desk.beat(directory)
    await directory.publish_manifest(manifest)
    await dialback.serve(transport, right=None)
    await dialback.serve_forgetting(transport, stack)
    relay = Relay(transport, relay_bytes_per_s(flags.relay), is_open=lambda: True)
    stack.push_async_callback(relay.close)
    await relay.serve()
    archivist = await _archivist(stack, manifest, transport, directory, flags, listener) if flags.keep else None
    registrar = _registrar(manifest, owner_key, transport, directory, flags, listener, archivist)
    if registrar is not None:
        if archivist is not None:
            archivist.on_tail_lost = registrar.tail_lost
        registering = asyncio.create_task(registrar.run(), name="notaries")
        stack.push_async_callback(ended, registering)
    look_now = archivist.look_soon if archivist is not None else lambda: None
    reunion = Reunion(directory, manifest.stages.count, acquaintances, look_now, transport.paths, is_alone=is_alone)
    looking = asyncio.create_task(lasting(reunion.run, "those met before", listener), name="those met before")
    stack.push_async_callback(ended, looking)
    lookout = await _lookout(stack, manifest, transport, archivist, reunion, listener)
    served = _Served(
        manifest, transport, directory, desk, beaten_at=time.monotonic(), archivist=archivist, lookout=lookout,
        registrar=registrar,
    )  # fmt: skip
    stack.callback(served.failed.cancel)
    return served


def _page(
    runs: Sequence[_Served], flags: BootstrapFlags, listener: Listener
) -> AbstractAsyncContextManager[str] | None:
    """The page of what is kept, while it is entered; its address. None: there is to be none."""
    kept = [
        (each.archivist, each.link, each.lookout)
        for each in runs
        if each.archivist is not None and each.lookout is not None
    ]
    if flags.web_port is None:
        return None
    if not kept:
        listener(Remark("no page: it shows what is kept, and no run is"))
        return None
    return page_of(kept, host=flags.web_host, port=flags.web_port, listener=listener)


def _on_admission(served: _Served, flags: BootstrapFlags) -> Remark | None:
    """What the owner of a run that is not open has to know, where invitations are not redeemed here."""
    if served.desk is None:
        return None
    if served.desk.can_redeem:
        return None
    name = served.manifest.run.name
    listed = f"the {len(served.desk.gate.members)} listed and " if served.desk.gate.members else ""
    path = owner_key_path(flags.owner_key, flags.home)
    return Remark(
        f"run {name!r} takes {listed}invited peers, and the owner's key is not at {path}: invitations for one peer work, others do not"
    )


def _registrar(
    manifest: Manifest,
    key: SigningKey | None,
    transport: "Transport",
    directory: "Directory",
    flags: BootstrapFlags,
    listener: Listener,
    archivist: "Archivist | None",
) -> "Registrar | None":
    """The owner's part in the run, if its key is here."""
    if key is None:
        listener(
            Remark(
                f"no owner's key here: the first roster of run {manifest.run.name!r} has to be signed by a bootstrap that has it"
            )
        )
        return None
    from dilocox_peer.peer.desk import OwnerRecords
    from dilocox_peer.peer.registrar import Registrar

    folder = flags.peer_home.run_folder(manifest.run_id)
    kept = None if archivist is None else archivist.head_of
    return Registrar(
        manifest, key, transport=transport, directory=directory, folder=folder, listener=listener, kept=kept,
        records=OwnerRecords(flags.home or default_home(), manifest.run_id),
    )  # fmt: skip


async def _archivist(
    stack: AsyncExitStack,
    manifest: Manifest,
    transport: "Transport",
    directory: "Directory",
    flags: BootstrapFlags,
    listener: Listener,
) -> "Archivist | None":
    """Keeps the run from here on, until the stack is left. None where its folder cannot be used, which is told."""
    from dilocox_peer.peer.archivist import Archivist, keeper_lease

    if manifest.admission.mode != "open" and transport.admission is None:
        listener(Remark(f"run {manifest.run.name!r} is not kept here: its peers answer who has the owner's key"))
        return None
    started_ms = time.time_ns() // 1_000_000

    def lease(number: int) -> "Lease":
        return keeper_lease(transport, started_ms, number)

    folder = flags.peer_home.run_folder(manifest.run_id)
    archivist = Archivist(
        manifest, transport=transport, directory=directory, folder=folder, quota_bytes=int(flags.keep_disk * 1e9),
        lease=lease, listener=listener,
    )  # fmt: skip
    try:
        await archivist.open()
    except OSError as error:
        listener(Failed("keeping the run", f"{folder} cannot be used: {error.strerror or error}; pass another --home"))
        return None
    await archivist.serve()
    keeping = asyncio.create_task(archivist.run(), name="keeper")
    stack.push_async_callback(archivist.leave)
    stack.push_async_callback(ended, keeping)
    if flags.evaluate:
        from dilocox_peer.cli.evaluation import Evaluation

        tokenizers = () if flags.home is None else ("--home", str(flags.home))
        evaluation = Evaluation(archivist, folder, tokenizers, listener)
        stack.push_async_callback(ended, asyncio.create_task(evaluation.run(), name="evaluation"))
    return archivist


async def _lookout(
    stack: AsyncExitStack,
    manifest: Manifest,
    transport: "Transport",
    archivist: "Archivist | None",
    reunion: "Reunion",
    listener: Listener,
) -> "Lookout | None":
    """Says that this bootstrap is there, and, where it keeps the run, tells what is wrong with that; who has just started again, and looks for
    those that it had met, does not tell that a stage is empty."""
    from dilocox_peer.peer.lookout import answer_who_asks, entry_health, lookout_of_keeper

    if archivist is None:
        await answer_who_asks(transport, entry_health)
        return None
    lookout = lookout_of_keeper(
        transport, manifest, kept_round=lambda: archivist.round, look_again=archivist.look_soon, listener=listener,
        is_over=lambda: all(kept.is_over for kept in archivist.stages),
        leases=lambda: {
            kept.stage: kept.leases
            for kept in archivist.stages
            if kept.was_read and (kept.leases or not reunion.is_looking)
        },
    )  # fmt: skip
    await lookout.serve()
    stack.push_async_callback(ended, asyncio.create_task(lookout.run(), name="health of the run"))
    return lookout


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


def _controls(identity: Identity, runs: Sequence[_Served], lag: LoopLag, stop: Stop) -> Controls:
    def refuse(*_: object) -> str:
        raise ControlRefused("a bootstrap trains nothing")

    def leave() -> str:
        stop.ask("asked to leave")
        return "leaving"

    def status() -> dict[str, Any]:
        return report(identity.peer_id, [served.health() for served in runs], lag)

    return Controls(status=status, pause=refuse, resume=refuse, leave=leave, finish=leave)
