"""One stay of a peer in a run: starts every part in order, watches over them, and ends them in order. Decides nothing itself.

Start-up goes network, directory, manifest, stage, data, state, training; what fails says so by its own name. Leaving: the
end of training and of a merge that is under way, beside it the goodbye to directory and roster (farewell.py), then the parts in the
reverse order of their start; each step has its deadline, five seconds together.
"""

import asyncio
import gc
import secrets
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

from dilocox_peer.admission import Admission
from dilocox_peer.dht.directory import Directory
from dilocox_peer.errors import DilocoxError, RunUnreachable, not_written
from dilocox_peer.events import Event, Listener, NeighbourUnlinked, PeerStarted, RunComplete
from dilocox_peer.events_of_states import RunIsOver
from dilocox_peer.invitation import with_any_port
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.architecture import prepare
from dilocox_peer.network.transport import Transport
from dilocox_peer.peer import dialback
from dilocox_peer.peer.acquaintances import ACQUAINTANCES_FILE
from dilocox_peer.peer.arrival import arrive, held_stage, keep_greeting, remember_stage
from dilocox_peer.peer.averaging import Averaging
from dilocox_peer.peer.bulletin import Bulletin, needs_reckoned, run_joined
from dilocox_peer.peer.claim import claim_stage, most_under_way, wants_checkpointing
from dilocox_peer.peer.device import chosen_devices
from dilocox_peer.peer.discovery import Discovery
from dilocox_peer.peer.disk_room import copies_kept
from dilocox_peer.peer.entry import Newcomer, come_in, look_again
from dilocox_peer.peer.farewell import Parting, say_goodbye
from dilocox_peer.peer.identity import Identity
from dilocox_peer.peer.lingering import linger
from dilocox_peer.peer.links.conveyor import Conveyor
from dilocox_peer.peer.lookout import Lookout, heeding, lookout_of_peer
from dilocox_peer.peer.pauses import Pauses
from dilocox_peer.peer.planning.timetable import Timetable
from dilocox_peer.peer.presence import Presence, Tenure
from dilocox_peer.peer.reaching import Reaching
from dilocox_peer.peer.reading import Data, open_data
from dilocox_peer.peer.rescue import Rescue, RunOver
from dilocox_peer.peer.rescue import over as run_over
from dilocox_peer.peer.rounds.contract import OwnerVouched, PeerFound
from dilocox_peer.peer.settings import SessionSettings, relay_bytes_per_s
from dilocox_peer.peer.startup import StartUp, StartupStep
from dilocox_peer.peer.state.backup_store import backup_store
from dilocox_peer.peer.state.beginning import begin, folder_of
from dilocox_peer.peer.state.guardian import Guardian
from dilocox_peer.peer.state.keeper import Keeper
from dilocox_peer.peer.state.restore import Own, find_backup
from dilocox_peer.peer.steering import OWNER, Steering, check_welcome
from dilocox_peer.peer.takeover import Move, Takeover, takeover_of
from dilocox_peer.peer.tally import Tally, line_told
from dilocox_peer.peer.training.trainer import Trainer
from dilocox_peer.peer.waiting import Waiting
from dilocox_peer.signing import SEED_BYTES

STOP_TRAINER_S, STOP_CONVEYOR_S = 1.5, 2.0
WORD_S = 5.0  # for the owner's newest checkpoint, before the first look


class NetworkLost(DilocoxError):
    """Our own network daemon ended; everything agreed is on disk, so another stay begins from there."""


@dataclass
class Resident:
    """The peer, and what outlives one stay of it. stage: None: to be claimed."""

    settings: SessionSettings
    identity: Identity
    tally: Tally
    pauses: Pauses
    reachability: dialback.DialbackVerdict
    listener: Listener
    stage: int | None = None
    is_waiting: bool = False  # the rounds have waited for the run's state, and somebody who keeps it has come
    rescues: int = 0


@dataclass(frozen=True)
class _Parts:
    """Everything that runs, once start-up is through."""

    transport: Transport
    directory: Directory
    trainer: Trainer
    averaging: Averaging
    conveyor: Conveyor | None  # of a run with several stages
    guardian: Guardian
    takeover: Takeover | None  # of a run with several stages, unless the volunteer chose the stage
    tenure: Tenure
    discovery: Discovery
    bulletin: Bulletin
    waiting: Waiting
    rescue: Rescue
    data: Data
    steering: Steering
    lookout: Lookout


class Stay:
    """`run` once."""

    def __init__(self, resident: Resident, incarnation: int) -> None:
        self._resident = resident
        self._settings = resident.settings
        self._me = resident.identity.peer_id
        self._ails, self._listener = heeding(self._me, resident.listener)
        self._tally = resident.tally
        self._pauses = resident.pauses
        self._incarnation = incarnation
        self._acquaintances = resident.settings.run_folder / ACQUAINTANCES_FILE
        self._look_now = asyncio.Event()

    async def run(self, leaving: "asyncio.Future[str]") -> Move | None:
        """Start-up, work and leaving; where to stay next, if another stage needs this peer more.

        Raises NetworkLost when the network daemon died under it, and what Session.run does.
        """
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="dilocox-disk")
        self._startup = StartUp(StartupStep.NETWORK, self._listener)
        async with AsyncExitStack() as stack:
            stack.callback(self._disk.shutdown, wait=False)
            starting = asyncio.create_task(self._start(stack), name="start-up")
            either: set[asyncio.Future[Any]] = {starting, leaving}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                try:
                    with self._startup.named():
                        parts = starting.result()
                except RunOver as over:
                    self._listener(RunIsOver(over.round, 0, over.head.hex(), self._settings.link))
                    return None
                return await self._work(parts, leaving)
            starting.cancel()
            with suppress(asyncio.CancelledError):
                await starting
            return None

    # ---- start-up ----------------------------------------------------------------------------------------------------

    async def _start(self, stack: AsyncExitStack) -> _Parts:
        settings, choices = self._settings, self._settings.choices
        at = self._startup
        arrival = await arrive(settings, self._resident.identity, self._acquaintances, stack, at, self._listener)
        transport, directory, manifest = arrival.transport, arrival.directory, arrival.manifest
        line = line_told(self._tally.daemon_traffic, transport.daemon_pid, self._listener)
        is_started = await stack.enter_async_context(line)
        reaching = Reaching(transport, self._resident.reachability, look_now=self._look_now, listener=self._listener)
        self._reaching = reaching.start(stack)
        if arrival.is_alone:
            greeting = asyncio.create_task(keep_greeting(directory, self._look_now.set), name="looking for the others")
            stack.callback(greeting.cancel)
        await asyncio.to_thread(prepare, manifest, settings.run_folder)
        at.step = StartupStep.ADMISSION
        newcomer = Newcomer(self._me, settings.grant, settings.run_folder)
        admission = await come_in(newcomer, manifest, transport=transport, directory=directory)
        await check_welcome(directory, self._me)
        await reaching.pass_on(relay_bytes_per_s(settings.at_most.relay), stack)
        held = await asyncio.to_thread(held_stage, settings.run_folder)
        if held is None and (is_over := await run_over(directory, manifest.stages.count)) is not None:
            raise is_over
        at.step = StartupStep.CLAIM
        own_reach = (self._resident.reachability, admission, reaching.reservations, reaching.ports)
        presence = Presence(self._me, self._incarnation, transport, *own_reach, choices.public_name, choices.site)
        if self._resident.stage is None:  # else it is ours still: our network daemon died, or it is where we move
            self._resident.stage = await claim_stage(
                manifest, settings.wish, presence=presence, directory=directory, listener=self._listener, held=held
            )
        stage = self._resident.stage
        await asyncio.to_thread(remember_stage, settings.run_folder, stage)
        at.step = StartupStep.TEXT
        data = await open_data(manifest, settings, stage, presence, directory, self._from_thread(self._listener), stack)
        at.step = StartupStep.DEVICE
        lead, *_ = devices = chosen_devices(choices.device, choices.precision, stages=manifest.stages.count)
        at.step = StartupStep.DISK
        try:
            model = await asyncio.to_thread(folder_of, manifest, choices.model)
            keeper = await asyncio.get_running_loop().run_in_executor(
                self._disk, lambda: Keeper(settings.run_folder, manifest, stage, self._listener, model)
            )
        except OSError as error:
            raise not_written(f"{settings.run_folder} cannot be used", error, "pass another --home") from None
        stack.callback(keeper.close)
        at.step = StartupStep.RESTORE
        await self._restore(manifest, stage, presence, directory, keeper)
        lent = (model, presence.endpoint, directory, self._listener)
        base = await begin(manifest, stage, keeper, *lent, device=lead, bits=choices.base_bits)
        at.step = StartupStep.TRAINER
        on_failure = self._trainer_failed()
        conveyor = self._conveyor(manifest, stage, presence, on_failure)
        timetable, recomputes = Timetable(manifest), wants_checkpointing(manifest, stage, settings.wish)
        trainer = Trainer(
            manifest,
            peer=self._me,
            incarnation=self._incarnation,
            corpus=data.batches,
            stage=stage,
            bench=conveyor.bench if conveyor is not None else None,
            devices=devices,
            threads=choices.threads,
            on_failure=on_failure,
            timetable=timetable,
            checkpointing=recomputes,
            base=base,
            precision=choices.precision,
            compiled=choices.compile,
        )
        trainer.start(keeper.state, grow=keeper.grow)
        trainer.hold()  # until the rounds are at its head
        self._pauses.set_trainer(trainer)
        stack.callback(self._pauses.set_trainer, None)
        self._training = Parting(trainer.stop, STOP_TRAINER_S, "; it is not waited for", self._listener)
        stack.push_async_callback(asyncio.to_thread, trainer.give_up)  # when links, rounds and the bulletin have ended
        stack.push_async_callback(self._training.over)
        if conveyor is not None:
            conveyor.bench.set_on_work(trainer.nudge)
            stack.push_async_callback(Parting(conveyor.stop, STOP_CONVEYOR_S, "", self._listener).over)
            at.step = StartupStep.LINKD
            await asyncio.to_thread(conveyor.start)
        self._listener(run_joined(manifest, self._me, stage, device=", ".join(devices), threads=choices.threads))
        self._listener(needs_reckoned(manifest, stage, lead, checkpointing=recomputes, base_bits=choices.base_bits))
        at.step = StartupStep.ROUNDS
        averaging = Averaging(
            presence,
            stage,
            manifest=manifest,
            sign=self._resident.identity.key.sign,
            trainer=trainer,
            timetable=timetable,
            keeper=keeper,
            conveyor=conveyor,
            disk=self._disk,
            is_paused=lambda: self._pauses.is_paused,
            listener=self._listener,
        )
        parts = self._coupled(presence, reaching, stage, manifest, directory, trainer, averaging, conveyor, data)
        await averaging.serve()
        with suppress(RunUnreachable):  # it is read again with every look
            if (word := await directory.word(stage, timeout_s=WORD_S)) is not None:
                averaging.driver.post(OwnerVouched(word[0]))
        await dialback.serve(transport)
        await dialback.serve_forgetting(transport, stack)
        await parts.lookout.serve()
        await parts.guardian.serve(stack)
        averaging.store.also_serve([parts.guardian.contributions])
        await parts.tenure.announce()
        await is_started()
        gc.freeze()  # what start-up made stays: collections of it would hold every thread up for 10 ms
        self._listener(PeerStarted(self._me, manifest.run_id, stage, presence.addresses))
        return parts

    async def _restore(
        self, manifest: Manifest, stage: int, presence: Presence, directory: Directory, keeper: Keeper
    ) -> None:
        """Has the keeper go on from what somebody has kept of the stage, if nobody of it is as far. Raises RunOver."""
        folder = self._settings.run_folder
        found = await find_backup(
            manifest, stage, backup_store(folder, manifest, stage), Own.of(keeper), endpoint=presence.endpoint,
            directory=directory, listener=self._listener, is_waiting=self._resident.is_waiting,
        )  # fmt: skip
        self._resident.is_waiting = False
        if found.complete is not None:
            raise RunOver(*found.complete)
        if (backup := found.backup) is None:
            return
        try:
            await asyncio.get_running_loop().run_in_executor(self._disk, lambda: keeper.adopt(backup, me=self._me))
        except OSError as error:
            raise not_written(f"{folder} cannot be used", error, "pass another --home") from None

    def _coupled(
        self,
        presence: Presence,
        reaching: Reaching,
        stage: int,
        manifest: Manifest,
        directory: Directory,
        trainer: Trainer,
        averaging: Averaging,
        conveyor: Conveyor | None,
        data: Data,
    ) -> _Parts:
        """All that runs, also what tells of this peer and looks for others."""
        tenure = Tenure(
            presence,
            stage,
            directory=directory,
            manifest=manifest,
            progress=trainer.progress,
            conveyor=conveyor,
            pauses=self._pauses,
            is_leader=lambda: averaging.machine.leader == self._me,
            listener=self._listener,
        )
        discovery = Discovery(
            presence,
            stage,
            num_stages=manifest.stages.count,
            directory=directory,
            conveyor=conveyor,
            on_found=lambda peer, addresses: averaging.driver.post(PeerFound(peer, addresses)),
            on_word=lambda word: averaging.driver.post(OwnerVouched(word)),
            rounds=averaging.machine,
            look_now=self._look_now,
            reaching=reaching,
            acquaintances=self._acquaintances,
            look_at_admission=self._look_at_admission(presence.admission, manifest, directory, averaging),
            listener=self._listener,
        )
        bulletin = Bulletin(
            self._tally,
            me=self._me,
            stage=stage,
            manifest=manifest,
            transport=presence.transport,
            machine=averaging.machine,
            progress=trainer.progress,
            bytes_sent=averaging.bytes_sent,
            conveyor=conveyor,
            listener=self._listener,
        )
        guardian = Guardian(
            presence.endpoint,
            stage,
            manifest=manifest,
            count=copies_kept(manifest, stage, self._settings.at_most),
            run_folder=self._settings.run_folder,
            directory=directory,
            certificates=lambda: averaging.machine.chain,
            listener=self._listener,
            site=self._settings.choices.site,
        )
        machine, post = averaging.machine, averaging.driver.post
        takeover = None
        if conveyor is not None and self._settings.wish.stage is None:
            takeover = takeover_of(
                presence, stage, manifest, self._settings, directory, conveyor, self._pauses, machine
            )
        steering = Steering(
            self._me, machine=machine, post=post, directory=directory, pauses=self._pauses, conveyor=conveyor
        )
        waiting = Waiting(manifest, stage, self._me, machine, self._listener, self._settings.link)
        rescue = Rescue(
            presence.endpoint, stage, num_stages=manifest.stages.count, machine=machine, directory=directory, times=self._resident.rescues,
        )  # fmt: skip
        lookout = lookout_of_peer(
            presence.transport, stage, manifest, machine=machine, conveyor=conveyor, ails=self._ails, leases=lambda: discovery.seen,
            is_paused=lambda: bool(self._pauses.reasons.keys() - {OWNER}), moves=takeover is not None, look_again=self._look_now.set, listener=self._listener,
        )  # fmt: skip
        return _Parts(
            presence.transport, directory, trainer, averaging, conveyor, guardian, takeover, tenure, discovery, bulletin, waiting,
            rescue, data, steering, lookout,
        )  # fmt: skip

    def _look_at_admission(
        self, admission: Admission | None, manifest: Manifest, directory: Directory, averaging: Averaging
    ) -> Callable[[], Awaitable[None]] | None:
        if admission is None:
            return None
        newcomer = Newcomer(self._me, None, self._settings.run_folder)
        return lambda: look_again(admission, newcomer, manifest.run.name, directory, averaging.put_out)

    def _conveyor(
        self, manifest: Manifest, stage: int, presence: Presence, on_failure: Callable[[str], None]
    ) -> Conveyor | None:
        if manifest.stages.count == 1:
            return None
        settings, choices, transport = self._settings, self._settings.choices, presence.transport
        conveyor = Conveyor(
            manifest,
            stage,
            key=self._resident.identity.key,
            run_id=settings.run_id,
            incarnation=self._incarnation,
            link_seed=secrets.token_bytes(SEED_BYTES),
            listen=choices.link_maddrs or with_any_port(choices.host_maddrs),
            listener=self._from_thread(self._listener),
            on_failure=on_failure,
            trace=choices.trace, mdns=choices.mdns,
            pace=transport.bandwidth.reserve_upload,
            pace_in=transport.bandwidth.reserve_download,
            rate=lambda: transport.bandwidth.upload_rate,
            paces_home=transport.line.is_owners,
            admission=presence.admission, site=choices.site, most_under_way=most_under_way(manifest, stage, settings.wish),
        )  # fmt: skip
        transport.line.include(lambda: conveyor.linkd_pid)
        return conveyor

    def _from_thread(self, listener: Listener) -> Listener:
        """What other threads tell is told in the session's own, one after another."""
        loop = asyncio.get_running_loop()

        def tell(event: Event) -> None:
            if isinstance(event, NeighbourUnlinked):
                self._look_now.set()
            listener(event)

        def from_its_thread(event: Event) -> None:
            with suppress(RuntimeError):  # the loop has ended: nobody listens any more
                loop.call_soon_threadsafe(tell, event)

        return from_its_thread

    def _trainer_failed(self) -> Callable[[str], None]:
        """What the trainer's threads call when one gives up; it reaches the session in its own loop."""
        loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[str] = loop.create_future()

        def tell(reason: str) -> None:
            if not self._failed.done():
                self._failed.set_result(reason)

        def from_its_thread(reason: str) -> None:
            with suppress(RuntimeError):  # the loop has ended: a thread that was not waited for
                loop.call_soon_threadsafe(tell, reason)

        return from_its_thread

    # ---- work --------------------------------------------------------------------------------------------------------

    async def _work(self, parts: _Parts, leaving: "asyncio.Future[str]") -> Move | None:
        """Until the run is complete, somebody leaves, a part fails for good, or another stage needs us more: which."""
        tasks = {
            self._reaching,
            asyncio.create_task(parts.averaging.driver.run(), name="rounds"),
            asyncio.create_task(self._tally.lag.watch(), name="lag"),
            asyncio.create_task(self._pauses.keep(), name="pauses"),
            asyncio.create_task(parts.bulletin.run(), name="progress"),
            asyncio.create_task(parts.tenure.renew(), name="lease"),
            asyncio.create_task(parts.discovery.run(), name="discovery"),
            asyncio.create_task(parts.guardian.run(), name="copies of other stages"),
            asyncio.create_task(parts.steering.run(), name="directives"),
            asyncio.create_task(parts.lookout.run(), name="health of the run"),
            asyncio.create_task(
                parts.data.run(parts.averaging.machine, parts.averaging.store, parts.trainer.nudge), name="data"
            ),
        }
        conducting = asyncio.create_task(self._conduct(parts), name="conduct")
        waiting = asyncio.create_task(parts.waiting.run(), name="waiting")
        network = asyncio.create_task(parts.transport.wait_for_failure(), name="network")
        moving = asyncio.create_task(_next_move(parts.takeover), name="takeover")
        rescued = asyncio.create_task(parts.rescue.run(), name="rescue")
        everything: set[asyncio.Future[Any]] = {
            *tasks, conducting, waiting, network, moving, rescued, self._failed, leaving,
        }  # fmt: skip
        try:
            await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                raise DilocoxError(f"training failed: {self._failed.result()}")
            if network.done():
                raise NetworkLost(f"it ended: {network.result()}")
            for task in tasks:  # they end only by failing
                if task.done():
                    task.result()
                    raise DilocoxError(f"{task.get_name()} ended by itself")
            if conducting.done():
                conducting.result()
                await linger(parts.averaging, parts.conveyor, parts.transport, leaving)
            if waiting.done():
                waiting.result()
            is_over = leaving.done() or conducting.done() or waiting.done()
            move = moving.result() if moving.done() and not is_over else None
            if rescued.done() and not is_over and move is None:
                move, self._resident.is_waiting = rescued.result(), True
                self._resident.rescues += 1
            await self._say_goodbye(parts)
            return move
        finally:
            running: list[asyncio.Task[Any]] = [*tasks, conducting, waiting, network, moving, rescued]
            for each in running:
                each.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _conduct(self, parts: _Parts) -> None:
        await parts.averaging.conductor.run()
        state = parts.trainer.state()
        self._listener(RunComplete(state.round, state.head.hex(), state.digest.hex()))

    async def _say_goodbye(self, parts: _Parts) -> None:
        self._training.begin()  # its memory takes the system seconds, which pass while the others are told
        if parts.conveyor is not None:
            parts.conveyor.bench.leave()
        parts.bulletin.tell_credit()
        averaging = parts.averaging
        stage = self._resident.stage or 0
        await say_goodbye(stage, averaging.machine, averaging.driver, parts.transport, parts.directory)


async def _next_move(takeover: Takeover | None) -> Move:
    if takeover is None:
        await asyncio.Event().wait()  # never, until it is cancelled
        raise AssertionError
    return await takeover.run()
