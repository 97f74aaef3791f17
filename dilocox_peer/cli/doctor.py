"""`doctor`: looks at everything a peer needs, here and on the way to the run, and says what to do about what is wrong.

The judging is in checks.py. Here are the checks that take their time, in the order in which a join would meet what they
look at; every one has a deadline. A later one that cannot be made because an earlier one failed is skipped and says so.
"""

import asyncio
import json
import random
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import typer
from rich.console import Console

from dilocox_peer.admission import Gate
from dilocox_peer.cli import checks
from dilocox_peer.cli.checks import Check, within
from dilocox_peer.cli.expected import Expected
from dilocox_peer.cli.findings import render, report, summary
from dilocox_peer.cli.flags import DoctorFlags
from dilocox_peer.cli.home import PeerHome
from dilocox_peer.cli.lifetime import INTERRUPTED, end
from dilocox_peer.errors import ConfigError, DilocoxError, LackedForNow
from dilocox_peer.invitation import Invitation, format_invitation, parse_invitation, parse_multiaddr, parse_multiaddrs
from dilocox_peer.model.architecture import prepare
from dilocox_peer.model.memory import StageSize, size
from dilocox_peer.peer.disk_room import stage_needs
from dilocox_peer.peer.footprint import available_memory
from dilocox_peer.peer.identity import read_key
from dilocox_peer.peer.planning.disk import least_allowed_gb
from dilocox_peer.peer.planning.upkeep import StageNeeds, first_disk

if TYPE_CHECKING:
    from dilocox_peer.cli.visit import Visit
    from dilocox_peer.dht.records import Lease
    from dilocox_peer.manifest import Manifest

T = TypeVar("T")

DIAL_S = 4.0
DIRECTORY_S = 30.0  # p2pd's start and the first answer of the directory, on a busy machine
RECORD_S = 15.0
TORCH_S = 60.0  # importing it from a cold disk
LINKD_S = 30.0
QUICK_S = 10.0
MEASURE_S = 2.0
STEP_OPERATIONS = 3e11  # of one measured step on a processor: some seconds on a slow one
VISIT_CHECKS = ("directory", "manifest", "admission", "peers", "clock", "direct or relayed", "DHT round trip")
NO_LINK = "needs the run's link: dilocox-peer doctor LINK"


def run_doctor(flags: DoctorFlags) -> None:
    """Prints what was found; ends the process with 1 when something failed, with 130 after Ctrl-C. Raises ConfigError for a link that is none."""
    home, invitation = flags.peer_home, parse_invitation(flags.link) if flags.link else None
    parse_multiaddrs(flags.host_maddrs, "listen")
    console = Console(highlight=False)
    errors = Console(stderr=True)
    try:
        with errors.status("looking") as status:
            found = examine(flags, home, invitation, on_start=lambda what: status.update(f"looking at {what}"))
    except KeyboardInterrupt:
        # A thread may be at work in torch, which aborts the process if the interpreter is taken apart meanwhile.
        end(INTERRUPTED)
    if flags.as_json:
        typer.echo(json.dumps(report(found), indent=2))
    else:
        console.print(render(found, console.width))
        console.print(summary(found))
    end(checks.exit_code(found))


def examine(
    flags: DoctorFlags,
    home: PeerHome,
    invitation: Invitation | None,
    *,
    on_start: Callable[[str], None] = lambda _what: None,
) -> list[Check]:
    """Every check, in order. Takes as long as the slowest parts: about ten seconds when all is well."""
    on_start("this machine")
    found = asyncio.run(_quick(lambda: checks.quick_checks(home.folder, home.identity_path, flags.host_maddrs)))
    device = asyncio.run(within("device", TORCH_S, lambda: abandonable(lambda: look_at_device(flags.device))))
    found.append(device)
    on_start("linkd")
    found.append(look_at_linkd())
    manifest: Manifest | None = None
    outside = Outside([])
    if invitation is None:
        found += [Check(name, "skipped", NO_LINK) for name in ("bootstrap", *VISIT_CHECKS)]
    else:
        on_start("the run")
        outside = asyncio.run(look_at_run(invitation, flags.host_maddrs, home))
        found += outside.found
        manifest = outside.manifest
    on_start("memory and speed")
    if manifest is None:
        why = NO_LINK if invitation is None else "the run's settings are not known"
        found.append(Check("memory", "skipped", f"{size(available_memory())} free; {why}"))
    else:
        found += look_at_memory(manifest, flags)
        least_gb = least_allowed_gb(
            stage_needs(manifest) if flags.stage is None else stage_needs(manifest)[flags.stage :][:1]
        )
        disk = checks.look_at_disk(home.folder, disk_need(manifest, flags.stage, outside.peers), least_gb)
        found = [disk if check.name == "disk" else check for check in found]
    speed: list[float] = []  # of this machine, once it is measured
    if device.status == "fail":
        found.append(Check("throughput", "skipped", "the device cannot be used"))
    else:

        def look() -> Check:
            speed.append(speed_of(manifest, flags))
            return judge_speed(manifest, speed[0], outside.speeds)

        found.append(asyncio.run(within("throughput", TORCH_S, lambda: abandonable(look))))
    found.append(look_at_costs(manifest, flags, outside, speed))
    return found


async def _quick(look: Callable[[], list[Check]]) -> list[Check]:
    try:
        async with asyncio.timeout(QUICK_S):
            return await abandonable(look)
    except TimeoutError:
        return [Check("this machine", "fail", f"no answer within {QUICK_S:g} s", "is --home on a disk that hangs?")]


async def abandonable(work: Callable[[], T]) -> T:
    """What work returns, from a thread that nobody waits for when we are cancelled: a driver or a disk that hangs cannot
    be interrupted, and must not keep the process from ending. (Executors' threads do.)"""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(cast("T", result))

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # task boundary: told to who waits
            error = raised
        with suppress(RuntimeError):  # the loop has ended: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="look", daemon=True).start()
    return await outcome


# -- this machine ---------------------------------------------------------------------------------------------------


def look_at_device(device: str) -> Check:
    """Whether torch computes there."""
    try:
        from dilocox_peer.peer.device import AUTO, chosen_device, chosen_devices, name_of

        all_chosen, best = chosen_devices(device), chosen_device(AUTO)
    except (ConfigError, LackedForNow) as error:
        found, _, remedy = str(error).rpartition(": ")
        return Check("device", "fail", found, remedy)
    except ImportError as error:
        return Check("device", "fail", f"torch is not installed ({error})", "run `make setup` again")
    if all_chosen == ("cpu",) and best != "cpu":
        return Check("device", "warn", f"cpu, though there is {best}: {name_of(best)}", f"pass --device {best}")
    return Check(
        "device", "ok", ", ".join(each if each == "cpu" else f"{each}: {name_of(each)}" for each in all_chosen)
    )


def look_at_linkd() -> Check:
    """Whether the process that carries activations between stages starts. From the main thread, as linkd demands."""
    name = "linkd"
    try:
        from dilocox_peer.network.link import Link
        from dilocox_peer.network.linkd_process import LinkSettings
    except ImportError as error:
        return Check(name, "skipped", f"this version has none ({error})")
    started = time.monotonic()
    settings = LinkSettings(
        key_seed=secrets.token_bytes(32),
        listen=("/ip4/127.0.0.1/tcp/0",),
        protocol="/dilocox/link/doctor",
        max_body_bytes=1 << 16,
        queue_bytes=1 << 20,
    )
    last_line = ""

    def keep(line: str) -> None:
        nonlocal last_line
        last_line = line

    link = Link(settings, on_log=keep)
    try:
        link.start(LINKD_S)
        seconds = time.monotonic() - started
        return Check(name, "ok", f"listens after {seconds:.1f} s at {', '.join(link.addresses)}")
    except (DilocoxError, OSError) as error:
        return Check(
            name, "fail", f"it does not start: {error}",
            "run `make setup` again; py-libp2p needs a C compiler and libgmp's headers when it is installed",
        )  # fmt: skip
    finally:
        link.close(5.0)


def look_at_memory(manifest: "Manifest", flags: DoctorFlags) -> list[Check]:
    """Memory of the machine, and of the accelerator when there is one. Raises ConfigError where the run's model cannot be built here."""
    from dilocox_peer.peer.device import chosen_device, first_of, free_on, is_in_machine_memory

    prepare(manifest)
    sizes = _sizes(manifest, flags.stage)
    try:
        device = chosen_device(first_of(flags.device))
    except (ConfigError, LackedForNow):
        device = "cpu"  # the check of the device has said it
    on_cpu = is_in_machine_memory(device)
    needs = [each.host_bytes(on_cpu=on_cpu, checkpointing=True) for each in sizes]
    found = [checks.judge_memory(available_memory(), needs, where="machine")]
    if not on_cpu:
        try:
            free = free_on(device)
        except (RuntimeError, AssertionError) as error:
            return [*found, Check("memory (device)", "fail", str(error).splitlines()[0], "use --device cpu")]
        on_device = [each.device_bytes(checkpointing=True) for each in sizes]
        found.append(checks.judge_memory(free, on_device, where="device"))
    return found


def disk_need(manifest: "Manifest", stage: int | None, peers: int) -> int:
    """Bytes of the stage that takes most, or of the one that is meant. peers: of the fullest stage, besides this one."""
    return max(first_disk(manifest, StageNeeds.of(manifest, each), peers) for each in _stages(manifest, stage))


def look_at_costs(manifest: "Manifest | None", flags: DoctorFlags, outside: "Outside", speed: Sequence[float]) -> Check:
    """What taking part comes to. speed: tokens a second of a stage on this machine, if it was measured."""
    name = "costs"
    if manifest is None:
        return Check(name, "skipped", NO_LINK if flags.link is None else "the run's settings are not known")
    known = None if outside.document is None else Expected.at_its_pace(outside.document, flags.stage)
    if known is not None:
        return checks.judge_costs(known)
    if not speed:
        return Check(name, "skipped", "neither the run's pace nor this machine's speed is known")
    from dilocox_peer.peer.planning.forecast import busiest_share

    whole = speed[0] * busiest_share(manifest)
    return checks.judge_costs(Expected.reckoned(manifest, outside.all_peers + 1, whole, "like this machine"))


def _sizes(manifest: "Manifest", stage: int | None) -> list[StageSize]:
    """Of every stage, or of the one that is meant."""
    return [StageSize.of(manifest, each) for each in _stages(manifest, stage)]


def _stages(manifest: "Manifest", stage: int | None) -> Sequence[int]:
    if stage is not None and stage >= manifest.stages.count:
        raise ConfigError(f"--stage {stage}: the run has stages 0 to {manifest.stages.count - 1}")
    return range(manifest.stages.count) if stage is None else [stage]


def speed_of(manifest: "Manifest | None", flags: DoctorFlags) -> float:
    """Tokens a second of a stage of the run; of the tiny preset when no run is given."""
    from dilocox_peer.config import preset

    of, stage = (manifest, flags.stage) if manifest else (preset("tiny"), None)
    return measured_tokens_per_s(of, device=flags.device, threads=flags.threads, stage=stage)


def judge_speed(manifest: "Manifest | None", tokens_per_s: float, speeds: Sequence[float]) -> Check:
    """speeds: what others say of themselves."""
    from dilocox_peer.config import preset

    of = manifest or preset("tiny")
    tokens_per_round = of.rounds.inner_steps * of.inner.accumulate * of.inner.micro_batch * of.model.context
    check = checks.judge_throughput(tokens_per_s, tokens_per_round, speeds)
    if manifest is not None:
        return check
    return Check(check.name, check.status, f"{check.found} (of the tiny preset)", check.remedy)


def measured_tokens_per_s(of: "Manifest", *, device: str, threads: int, stage: int | None = None) -> float:
    """Forward and backward of random micro-batches for MEASURE_S, of a stage; None: of the one with the most blocks.

    A large stage is measured on some of its blocks, and the rest reckoned by their multiplications.
    """
    import torch

    from dilocox_peer.model.architecture import LayerRange, build_model
    from dilocox_peer.model.loss import train_on
    from dilocox_peer.model.partition import Costs, cut_of
    from dilocox_peer.peer.device import chosen_device, first_of

    device = chosen_device(first_of(device))
    blocks = max(cut_of(of)) if stage is None else cut_of(of)[stage]
    costs = Costs.of(of.model)
    block, head = costs.block_compute, costs.head_compute
    limit = STEP_OPERATIONS if device == "cpu" else 100 * STEP_OPERATIONS
    measured, batch = checks.affordable(
        blocks, of.inner.micro_batch, context=of.model.context, block=block, head=head, limit=limit
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        some = LayerRange(0, measured - 1, is_first_stage=True, is_last_stage=True)
        model = build_model(of.model, some, device=device)
        with torch.no_grad():
            model.flat_N.normal_(std=0.02)
        generator = torch.Generator().manual_seed(0)
        inputs_BT = torch.randint(0, min(256, model.vocab_size), (batch, model.context), generator=generator).to(
            model.flat_N.device
        )

        def step() -> float:
            loss = train_on(model, inputs_BT, inputs_BT)  # waits for the device
            model.zero_grad()
            return loss

        step()  # the first one builds what later ones use
        started, count, seconds = time.monotonic(), 0, 0.0
        while seconds < MEASURE_S:
            step()
            count += 1
            seconds = time.monotonic() - started
    finally:
        torch.set_num_threads(before)
    share = (measured * block + head) / (blocks * block + head)
    return share * count * inputs_BT.numel() / seconds


# -- the run --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outside:
    """What was found of the run. speeds: tokens a second, as the peers say of themselves. peers: of the stage that has most.
    document: the run as its page has it, where its certificates can be read."""

    found: list[Check]
    manifest: "Manifest | None" = None
    speeds: tuple[float, ...] = ()
    peers: int = 0
    document: Mapping[str, Any] | None = None

    @property
    def all_peers(self) -> int:
        return len(self.speeds)


async def look_at_run(invitation: Invitation, host_maddrs: Sequence[str], home: PeerHome) -> Outside:
    """Dials, then visits the run as a peer would. Nothing of the visit is left there but a record of 2 minutes: the
    manifest, once more, under a key of the visit's own."""
    from dilocox_peer.cli.visit import visit

    bootstraps = await within("bootstrap", 2 * DIAL_S, lambda: _dial_all(invitation.addresses))
    found = [bootstraps]
    if bootstraps.status == "fail":
        return Outside(found + [Check(name, "skipped", "no bootstrap answers") for name in VISIT_CHECKS])
    async with AsyncExitStack() as stack:
        started = time.monotonic()
        open_visit: Visit | None = None

        async def enter() -> Check:
            nonlocal open_visit
            open_visit = await stack.enter_async_context(visit(invitation, host_maddrs=host_maddrs))
            return Check(
                "directory", "ok", f"answers {time.monotonic() - started:.1f} s after the network daemon's start"
            )

        found.append(await within("directory", DIRECTORY_S, enter))
        if open_visit is None:
            return Outside(found + [Check(name, "skipped", "no directory answers") for name in VISIT_CHECKS[1:]])
        return await _look_around(open_visit, invitation, home, found)


async def _look_around(open_visit: "Visit", invitation: Invitation, home: PeerHome, found: list[Check]) -> Outside:
    from dilocox_peer.cli.onlooker import document_of
    from dilocox_peer.peer.dialback import can_be_dialled
    from dilocox_peer.peer.entry import kept_pass

    manifest: Manifest | None = None
    leases: list[Lease] = []
    counts: list[int] = []

    async def look_at_manifest() -> Check:
        nonlocal manifest
        manifest = await open_visit.settings(RECORD_S)
        owner = manifest.owner.public_key[:12]
        return Check(
            "manifest", "ok", f"run {manifest.run.name!r}, signed by its owner {owner}…, is what the link names"
        )

    async def look_at_admission() -> Check:
        assert manifest is not None
        gate = Gate.of(manifest)
        if gate is None:
            return Check("admission", "ok", "open: everybody may join")
        open_visit.directory.set_gate(gate)  # ours, that learns what was revoked
        if (revocations := await open_visit.directory.fetch_revocations(RECORD_S)) is not None:
            gate.take(revocations)
        try:
            me = read_key(home.identity_path, flag="--identity-path").peer_id
        except ConfigError:
            me = None  # made when it first joins
        kept = kept_pass(home.run_folder(manifest.run_id))
        return checks.judge_admission(gate, me, kept=kept, grant=invitation.grant, now=time.time())

    async def look_at_peers() -> Check:
        assert manifest is not None
        for stage in range(manifest.stages.count):
            of_stage = await open_visit.directory.peers(stage, RECORD_S)
            counts.append(len(of_stage))
            leases.extend(of_stage)
        return checks.judge_stages(counts)

    async def store_and_get() -> Check:
        assert manifest is not None
        started = time.monotonic()
        await open_visit.directory.publish_manifest(manifest, RECORD_S)
        stored = time.monotonic()
        await open_visit.directory.peers(0, RECORD_S)  # asks every holder, which fetch_manifest does not
        return Check(
            "DHT round trip", "ok",
            f"a record stored in {1000 * (stored - started):.0f} ms, records read in "
            f"{1000 * (time.monotonic() - stored):.0f} ms, {open_visit.directory.num_known_nodes} nodes known",
        )  # fmt: skip

    async def be_dialled() -> Check:
        was_dialled = await can_be_dialled(open_visit.transport, leases, random.Random())
        return checks.judge_reachability(open_visit.transport.addresses, invitation.addresses, was_dialled)

    found.append(await within("manifest", RECORD_S, look_at_manifest))
    if manifest is None:
        found += [Check(name, "skipped", "the run's settings are not known") for name in VISIT_CHECKS[2:]]
        return Outside(found)
    found.append(await within("admission", RECORD_S, look_at_admission))
    found.append(await within("peers", RECORD_S, look_at_peers))
    now = time.time()
    found.append(checks.judge_clock([lease.expires_s - now for lease in leases]))
    found.append(await within("direct or relayed", 2 * RECORD_S, be_dialled))
    found.append(await within("DHT round trip", 2 * RECORD_S, store_and_get))
    document = await document_of(open_visit, manifest, format_invitation(invitation))
    return Outside(found, manifest, tuple(lease.tokens_per_s for lease in leases), max(counts, default=0), document)


async def _dial_all(addresses: Sequence[str]) -> Check:
    outcomes = await asyncio.gather(*(_dial(address) for address in addresses))
    return checks.judge_bootstraps(list(zip(addresses, outcomes, strict=True)))


async def _dial(text: str) -> float | str:
    """Seconds that a TCP connection took, or why there is none."""
    address = parse_multiaddr(text, "peer")
    started = time.monotonic()
    try:
        async with asyncio.timeout(DIAL_S):
            _, writer = await asyncio.open_connection(address.host, address.port)
    except TimeoutError:
        return f"does not answer within {DIAL_S:g} s (offline, or a firewall)"
    except OSError as error:
        return f"cannot be reached ({(error.strerror or str(error)).lower()})"
    writer.transport.abort()
    return time.monotonic() - started
