"""How a peer comes to its run: over the network, or, where nobody answers, from its own disk.

A peer that holds the run's settings and a state of it needs nobody to begin with: it opens the run's directory by itself, serves
what it has, and goes on looking for the others at all addresses it knows; they find it where it was, as it listens on the port that
it had before. So a run starts again from any disk, also when its bootstrap is gone for good.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilocox_peer.dht.directory import Directory
from dilocox_peer.dht.records import CLOCK_SKEW_S
from dilocox_peer.errors import ConfigError, PeerUnavailable, ProtocolError, RunUnreachable, StateCorrupt
from dilocox_peer.events import Listener, short
from dilocox_peer.events_of_reach import NobodyAnswers
from dilocox_peer.files import replace_file
from dilocox_peer.invitation import all_loopback, parse_multiaddr, parse_multiaddrs
from dilocox_peer.manifest import Manifest
from dilocox_peer.network.own_hosts import own_hosts
from dilocox_peer.network.p2pd import check_listenable
from dilocox_peer.network.transport import Transport, named_peers
from dilocox_peer.peer.acquaintances import read_acquaintances
from dilocox_peer.peer.identity import Identity
from dilocox_peer.peer.lookout import ask_how_it_is
from dilocox_peer.peer.settings import ANY_PORT, SessionSettings
from dilocox_peer.peer.startup import StartUp, StartupStep
from dilocox_peer.peer.state.anchors import kept_manifest

PORT_FILE = "port"
STAGE_FILE = "claimed"
AT_ONCE_S = 1.0  # in which settings come where clocks are right
SLOWLY_S = 3.0  # in which they still come over a slow line, where a clock is off by less than what their records live
GREET_S = 3.0  # between two tries of all known addresses, while nobody is there
LOOKS_ON_CONTACT, CONTACT_S = 10, 2.0  # at the directory, once somebody is: each writes its lease within half a minute


@dataclass(frozen=True, slots=True)
class Arrival:
    """Where it has come to. is_alone: nobody answered."""

    transport: Transport
    directory: Directory
    manifest: Manifest
    is_alone: bool


async def arrive(
    settings: SessionSettings,
    identity: Identity,
    acquaintances: Path,
    stack: AsyncExitStack,
    at: StartUp,
    listener: Listener,
) -> Arrival:
    """Raises RunUnreachable where nobody answers and too little is on this disk, ConfigError, ManifestMismatch."""
    known = (*settings.initial_peers, *read_acquaintances(acquaintances))
    manifest = await asyncio.to_thread(manifest_to_begin_with, settings.run_folder)
    try:
        transport, is_alone = await _transport(settings, identity, known), False
    except RunUnreachable:
        if manifest is None:
            raise
        transport, is_alone = await _transport(settings, identity, ()), True
        transport.initial_peers = tuple(
            text for text in parse_multiaddrs(known, "peer") if not text.endswith(f"/p2p/{identity.peer_id}")
        )
    stack.push_async_callback(transport.close)
    transport.doors.set_listener(listener)
    transport.named = named_peers(settings.initial_peers)  # whom we have met before is not
    await asyncio.to_thread(remember_port, settings.run_folder, transport.addresses)
    at.step = StartupStep.DIRECTORY
    try:
        directory = await Directory.create(transport, settings.run_id, identity.key, is_alone=is_alone)
    except RunUnreachable:
        if manifest is None:
            raise
        directory, is_alone = await Directory.create(transport, settings.run_id, identity.key, is_alone=True), True
    stack.push_async_callback(directory.close)
    at.step = StartupStep.SETTINGS
    try:
        fetched = await settings_of(directory, transport)
    except ClockOff:
        raise
    except RunUnreachable:
        if manifest is None:
            raise
        await directory.publish_manifest(manifest)
        fetched = manifest
    if is_alone:
        listener(NobodyAnswers(len(set(transport.initial_peers))))
    return Arrival(transport, directory, fetched, is_alone)


class ClockOff(RunUnreachable):
    """This computer's clock is why the run's records cannot be read."""


async def settings_of(directory: Directory, transport: Transport, timeout_s: float = 10.0) -> Manifest:
    """The run's settings, for whoever reads them first. Raises RunUnreachable, ManifestMismatch, ClockOff."""
    return await settings_or_why_not(directory.fetch_manifest(timeout_s), lambda: why_clock(transport))


async def settings_or_why_not(
    fetching: Coroutine[Any, Any, Manifest], why: Callable[[], Awaitable[str | None]]
) -> Manifest:
    """The run's settings. why: what to say of our clock, None: nothing; it is asked for when they do not come at once, as the directory of a
    clock that is off is tried in vain for long. Raises RunUnreachable, ClockOff."""
    fetched = asyncio.create_task(fetching, name="settings")
    under_way: list[asyncio.Future[Any]] = [fetched]
    try:
        await asyncio.wait({fetched}, timeout=AT_ONCE_S)
        if not fetched.done() or isinstance(fetched.exception(), RunUnreachable):
            asked = asyncio.ensure_future(why())
            under_way.append(asked)
            await asyncio.wait({fetched, asked}, return_when=asyncio.FIRST_COMPLETED)  # who is asked may be gone
            if not _came(fetched) and (reason := await asked) is not None:
                await asyncio.wait({fetched}, timeout=SLOWLY_S)
                if not _came(fetched):
                    raise ClockOff(reason)
        return await fetched
    finally:
        for each in under_way:
            each.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


def _came(fetched: "asyncio.Task[Manifest]") -> bool:
    """Whether the settings are there meanwhile."""
    return fetched.done() and fetched.exception() is None


async def why_clock(transport: Transport) -> str | None:
    """What to say of our clock, if it is so far from that of the peers which the link names that the run's records look as if they were
    of another time."""
    for peer in sorted(transport.named):
        try:
            _, ahead_s = await ask_how_it_is(transport, peer)
        except (PeerUnavailable, ProtocolError):
            continue
        if abs(ahead_s) > CLOCK_SKEW_S:
            side = "behind" if ahead_s > 0 else "ahead of"
            return (
                f"this computer's clock is {abs(ahead_s):.0f} s {side} that of the bootstrap {short(peer)}, so that the run's records "
                "look as if they were of another time: set it right (`timedatectl set-ntp true`) and try again; where it is right, the "
                "bootstrap's owner has to set that one's"
            )
    return None


async def keep_greeting(directory: Directory, look_now: Callable[[], object]) -> None:
    """Until somebody of the run answers at a known address; then has the directory looked at for a while. look_now: has that done."""
    while not directory.num_known_nodes:
        await directory.greet_initial_peers()
        await asyncio.sleep(GREET_S)
    for _ in range(LOOKS_ON_CONTACT):
        look_now()
        await asyncio.sleep(CONTACT_S)


async def _transport(settings: SessionSettings, identity: Identity, known: Sequence[str]) -> Transport:
    choices = settings.choices
    return await Transport.create(
        settings.identity_path,
        identity.peer_id,
        namespace=settings.run_id,
        initial_peers=known,
        host_maddrs=await asyncio.to_thread(
            on_the_port_of_before, where_to_listen(choices.host_maddrs, own_hosts()), settings.run_folder
        ),
        announce_maddrs=choices.announce_maddrs,
        runtime_dir=settings.runtime_dir,
        limits=settings.at_most.limits,
    )


# ---- our own disk ------------------------------------------------------------------------------------------------------


def manifest_to_begin_with(run_folder: Path) -> Manifest | None:
    """The run's settings, if they are on this disk together with a state of it."""
    if held_stage(run_folder) is None:
        return None
    try:
        return kept_manifest(run_folder)
    except StateCorrupt:
        return None


def held_stage(run_folder: Path) -> int | None:
    """The stage of which this disk has a state: the one claimed last, if there is one of that; else that of the newest file, which a clock that
    was off, or a copy of the folder, can have wrong."""
    found: list[tuple[float, int]] = []
    for path in run_folder.glob("stage*/checkpoints/anchor-*.safetensors"):
        number = path.parent.parent.name.removeprefix("stage")
        if number.isdecimal() and path.name != "anchor-00000000.safetensors":
            with suppress(OSError):
                found.append((path.stat().st_mtime, int(number)))
    if (claimed := _claimed(run_folder / STAGE_FILE)) in {stage for _, stage in found}:
        return claimed
    return max(found)[1] if found else None


def _claimed(path: Path) -> int | None:
    """None where there is no such file, or what is in it is no number."""
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            raw = file.read(8)
    except OSError:
        return None
    return int(raw) if raw.strip().isdigit() else None


def remember_stage(run_folder: Path, stage: int) -> None:
    """For the next start. Best effort: where it cannot be written nothing says another."""
    path = run_folder / STAGE_FILE
    if _claimed(path) == stage:
        return
    try:
        run_folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, [f"{stage}\n".encode()], mode=0o600)
    except OSError:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def where_to_listen(host_maddrs: Sequence[str], own: Sequence[str]) -> tuple[str, ...]:
    """As the volunteer says; who says nothing listens on IPv6 too where this computer has no other way out. own: addresses that it sends
    from. Beside IPv4 it does not: peers that have that alone are most, and to them an address of IPv6 is none."""
    if tuple(host_maddrs) == ANY_PORT and own and all(":" in each for each in own):
        return (*ANY_PORT, "/ip6/::/tcp/0")
    return tuple(host_maddrs)


def on_the_port_of_before(host_maddrs: Sequence[str], run_folder: Path) -> tuple[str, ...]:
    """The addresses to listen on, any port made the one of the last start, if it is still free: others remember it."""
    try:
        port = int((run_folder / PORT_FILE).read_text(encoding="ascii")[:8])
    except (OSError, ValueError):
        return tuple(host_maddrs)
    found = []
    for text in host_maddrs:
        address = parse_multiaddr(text, "listen")
        if address.port == 0 and 0 < port < 1 << 16:
            same = text.replace("/tcp/0", f"/tcp/{port}")
            try:
                check_listenable(parse_multiaddr(same, "listen"))
            except ConfigError:
                found.append(text)
            else:
                found.append(same)
        else:
            found.append(text)
    return tuple(found)


def remember_port(run_folder: Path, addresses: Sequence[str]) -> None:
    """Of our own addresses, for the next start. Best effort."""
    own = [text for text in addresses if not parse_multiaddr(text, "lease").is_relayed]
    here = [text for text in own if all_loopback([text])] or own  # not the one that a router has opened for it
    if not here:
        return
    with suppress(OSError):
        run_folder.mkdir(parents=True, exist_ok=True)
        port = parse_multiaddr(here[0], "lease").port
        replace_file(run_folder / PORT_FILE, [f"{port}\n".encode()], mode=0o600, durable=False)
