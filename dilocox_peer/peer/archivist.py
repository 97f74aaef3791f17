"""The keeper of a whole run, that trains none of it: the part of a bootstrap that is there when everybody has gone to bed.

It follows every stage's chain as any reader does (state/survey.py), keeps what state/keeping.py says, and serves all of it like a
peer: chains, states, contributions. Others find it in the directory. It decides nothing in the run; several may keep one, and
none is needed. Nothing is kept before certificates have proved it.
"""

import asyncio
import gc
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dilocox_peer.admission import Right
from dilocox_peer.compression.sizes import blob_limits
from dilocox_peer.dht.directory import Directory
from dilocox_peer.dht.records import PROTOCOL_VERSION, Lease
from dilocox_peer.errors import ProtocolError, RunUnreachable, StateCorrupt, ThingUnavailable
from dilocox_peer.events import Event, Failed, Listener
from dilocox_peer.events_of_data import Evaluated, TextSampled
from dilocox_peer.events_of_states import KeepingStopped, RunKept
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.architecture import prepare
from dilocox_peer.network.transport import Reply, Transport
from dilocox_peer.peer.state.archive import Archive, StageArchive, usual_bytes
from dilocox_peer.peer.state.backup_exchange import BACKUP_SERVICE, BackupServer, Kept
from dilocox_peer.peer.state.keeping import (
    LOOK_LEAST_S,
    Allowance,
    Keeping,
    KeepNext,
    LookPace,
    StageAccount,
    TailAccount,
    Tails,
)
from dilocox_peer.peer.state.statesync import STATE_SERVICE, Agreed, States
from dilocox_peer.peer.state.survey import Survey, look_at_all
from dilocox_peer.store.store import Store
from dilocox_peer.types import DIGEST_BYTES, Digest, PeerId
from dilocox_peer.wire.chain import Certificate
from dilocox_peer.wire.records import KEEPERS

FIND_S = 5.0
LOOKS_AT_ONCE = 16
PATIENCE_S = 60.0  # with view changes of a minority, and with voters that are not heard
LEASE_S = 30.0
RETRY_S = 5.0
BLOB_S = 600.0
BLOBS_AT_ONCE = 4
MAX_EVALUATIONS = 10_000
FREEZE_EVERY = 512  # certificates


class KeptStage:
    """A stage as others in the process read it."""

    def __init__(self, archive: StageArchive, survey: Survey) -> None:
        self._archive = archive
        self._survey = survey

    @property
    def stage(self) -> int:
        return self._archive.stage

    @property
    def certificates(self) -> Sequence[Certificate]:
        """All that are known, from the first on, as of now."""
        return self._archive.annals.as_it_is()

    @property
    def roster(self) -> Sequence[PeerId]:
        """Those who contribute to the next round."""
        return self._archive.annals.place.roster

    @property
    def is_over(self) -> bool:
        """Whether the run's last round is certified."""
        return self._archive.annals.is_over

    @property
    def leases(self) -> Sequence[Lease]:
        """Of who announces to hold it, as the directory had them when it was last read."""
        return self._survey.leases

    @property
    def was_read(self) -> bool:
        """Whether the directory was, for these."""
        return self._survey.has_looked

    @property
    def reached(self) -> Collection[PeerId]:
        """Those of them that there was a connection with then."""
        return self._survey.reached

    @property
    def state_round(self) -> int | None:
        """That the newest whole state here is of; None: there is none."""
        newest = self._archive.newest
        return None if newest is None else newest[1]

    @property
    def num_parameters(self) -> int:
        return self._archive.layout.num_elements


class Archivist:
    """`open`, `serve`, then `run`. sampled: text of one of the newest rounds, where somebody draws some. stages: what is kept, once it is open. evaluations: of the newest rounds on the validation split,
    where somebody evaluates them."""

    def __init__(
        self,
        manifest: Manifest,
        *,
        transport: Transport,
        directory: Directory,
        folder: Path,
        quota_bytes: int,
        lease: Callable[[int], Lease],
        listener: Listener,
    ) -> None:
        """folder: of this run at this process. lease: ours, with the round that is kept. on_tail_lost: may be set; called again and
        again with a stage and a head after which nobody has anything any more."""
        self.on_tail_lost: Callable[[int, Digest], None] = lambda _stage, _head: None
        self._tails = Tails()
        self._given_up: dict[int, tuple[Digest, Digest]] = {}  # (where the chain was cut, its tip before)
        self.manifest = manifest
        self.stages: tuple[KeptStage, ...] = ()
        self.evaluations: deque[Evaluated] = deque(maxlen=MAX_EVALUATIONS)
        self.sampled: TextSampled | None = None
        self._transport = transport
        self._directory = directory
        self._folder = folder
        self._lease = lease
        self._listener = listener
        self._keeping = Keeping(quota_bytes)
        self._allowances: list[Allowance] = []  # of each stage
        self._quota_bytes = quota_bytes
        self._kept: dict[int, Kept] = {}
        self._tips: dict[int, Agreed] = {}  # of stages that are over, as their voters name the state
        self._broken: set[int] = set()
        self._copying: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._told_full = ""
        self._told_trouble = ""
        self._frozen = 0
        self._look_now = asyncio.Event()  # a peer that leaves has a newer round than is kept
        self._pace = LookPace()

    # ---- what others read ----

    @property
    def is_complete(self) -> bool:
        """Whether the run is over and its final model is here."""
        return bool(self.stages) and all(
            stage.annals.is_over and stage.newest is not None and stage.newest[1] == stage.annals.place.round
            for stage in self._archive.stages
        )

    @property
    def round(self) -> int:
        """The newest that all stages can be brought to; 0: none."""
        return min((kept.reached for kept in self._kept.values()), default=0)

    @property
    def newest_round(self) -> int | None:
        """The newest of any stage, as certificates say, and leases where there are none yet; None while the directory was not read."""
        if not self.stages or not all(kept.was_read for kept in self.stages):
            return None
        if certified := max(stage.annals.place.round for stage in self._archive.stages):
            return certified
        return max((lease.round for kept in self.stages for lease in kept.leases), default=0)

    def look_soon(self) -> None:
        """For somebody who wants news more often than keeping needs them."""
        self._look_now.set()

    # ---- start and end ----

    async def open(self) -> None:
        """Reads what is on disk. Raises OSError; ConfigError where another version wrote it."""
        await asyncio.to_thread(prepare, self.manifest, is_own=True)
        self._archive = await asyncio.to_thread(Archive, self._folder, self.manifest, self._listener)
        rng = random.Random(f"{self._transport.peer_id} keeps")
        self._surveys = [
            Survey(
                self.manifest, stage.stage, transport=self._transport, directory=self._directory, listener=self._on_survey,
                rng=rng, annals=stage.annals, patience_s=PATIENCE_S, find_every_s=FIND_S,
            )
            for stage in self._archive.stages
        ]  # fmt: skip
        self._allowances = [Allowance(stage.layout.state_bytes) for stage in self._archive.stages]
        self._note_kept()
        self.stages = tuple(
            KeptStage(stage, survey) for stage, survey in zip(self._archive.stages, self._surveys, strict=True)
        )

    async def serve(self) -> None:
        """Answers peers and readers from here on."""
        server = BackupServer(None, certificates=tuple, kept=self._kept, on_newer=self._come_now)
        states = States(None, [stage.checkpoints for stage in self._archive.stages])
        self._store = Store(self._transport, [self._archive.contributions], sources=[states])
        await self._transport.serve(BACKUP_SERVICE, server.serve, right=Right.READ)
        await self._transport.serve(STATE_SERVICE, self._serve_digest, right=Right.READ)
        await self._store.serve()

    async def run(self) -> None:
        """Keeps the run until cancelled; what fails is told and tried again."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                tasks.create_task(self._for_ever(self._announce, LEASE_S), name="keeper's lease")
                tasks.create_task(self._for_ever(self._look, None), name="keeper's looks")
        finally:
            await self.close()

    async def close(self) -> None:
        """What `open` has opened; `run` does it at its end."""
        for survey in self._surveys:
            survey.close()
        await asyncio.shield(asyncio.to_thread(self._archive.close))

    async def leave(self) -> None:
        """Takes our lease back. Best effort."""
        with suppress(RunUnreachable):
            await self._directory.leave(timeout_s=1.0)

    def _come_now(self, stage: int, is_member: bool) -> None:
        """A member may have its stage taken from at any rate; any reader may be about to leave, but its word costs others nothing."""
        if is_member:
            self._allowances[stage].leaving(time.monotonic())
        self._look_now.set()

    async def _serve_digest(self, peer: PeerId, header: dict[str, Any]) -> Reply:
        match header:
            case {"head": bytes(head)} if len(head) == DIGEST_BYTES:
                found = (stage.digests.get(Digest(head)) for stage in self._archive.stages)
                digest = next((each for each in found if each is not None), None)
                return Reply({} if digest is None else {"head": head, "digest": digest})
            case _:
                raise ProtocolError(peer, "a request for a state's digest that names no head")

    # ---- the loop ----

    async def _for_ever(self, work: Callable[[], Awaitable[float | None]], pause_s: float | None) -> None:
        while True:
            wait_s: float | None = None
            try:
                wait_s = await work()
                self._told_trouble = ""
            except RunUnreachable as error:
                self._tell_once(f"{error}; trying again")
            except OSError as error:
                self._tell_once(f"{error.strerror or error}: what is kept stays as it is; trying again")
            except Exception as error:  # a task boundary: the directory and other runs go on
                self._tell_once(f"{type(error).__name__}: {error}; trying again")
            if pause_s is not None:
                await asyncio.sleep(pause_s)
                continue
            await asyncio.sleep(LOOK_LEAST_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(max((wait_s or RETRY_S) - LOOK_LEAST_S, 0.0)):
                    await self._look_now.wait()
            self._look_now.clear()

    def _tell_once(self, trouble: str) -> None:
        if trouble != self._told_trouble:
            self._listener(Failed(f"keeping run {self.manifest.run.name!r}", trouble))
        self._told_trouble = trouble

    async def _announce(self) -> None:
        await self._directory.announce(self._lease(self.round))

    async def _look(self) -> float:
        """One look at all stages, and what follows from it. Seconds until the next."""
        await look_at_all(self._surveys, at_once=LOOKS_AT_ONCE)
        self._spare_collections()
        await self._write_chains()
        await self._ask_for_tips()
        self._give_up_tails()
        await self._go_on()
        tip = min(stage.annals.place.round for stage in self._archive.stages)
        is_alone = not any(survey.members_here for survey in self._surveys)
        return self._pace.pause_s(tip, time.monotonic(), is_complete=self.is_complete, is_alone=is_alone)

    def _spare_collections(self) -> None:
        """Certificates stay: to go over those of 5,000 rounds again and again would hold every thread for a quarter of a second."""
        known = sum(stage.annals.place.height for stage in self._archive.stages)
        if known >= self._frozen + FREEZE_EVERY:
            self._frozen = known
            gc.collect()  # what nobody needs would be frozen with the rest; it goes over what is new since the last time alone
            gc.freeze()

    async def _write_chains(self) -> None:
        for log in (stage.log for stage in self._archive.stages):
            if (growth := log.unwritten()) is not None:
                log.settle(await asyncio.to_thread(log.write, growth))

    async def _ask_for_tips(self) -> None:
        """Of stages that are over: no certificate names the digest of the last state, their voters do."""
        for survey, stage in zip(self._surveys, self._archive.stages, strict=True):
            newest = stage.newest
            if not stage.annals.is_over or (newest is not None and newest[0] == stage.annals.place.head):
                continue
            if (tip := await survey.tip()) is not None:
                self._tips[stage.stage] = tip

    def _give_up_tails(self) -> None:
        """Certificates after what is kept, when those who made them are gone and nobody has the contributions: newcomers go on from
        what is kept, and theirs would never follow."""
        now = time.monotonic()
        is_under_way = self._following is not None and not self._following.done()
        for survey, stage in zip(self._surveys, self._archive.stages, strict=True):
            number, annals = stage.stage, stage.annals
            reached, tip = stage.reached(self._archive.contributions), annals.place.head
            tail = TailAccount(
                is_there=reached is not None and reached[0] != tip,
                is_over=annals.is_over,
                is_tried=number in self._broken or not survey.donors,
                is_under_way=is_under_way,
                is_left=reached is not None and survey.is_left(reached[0]),
            )
            if self._tails.is_given_up(number, tail, now) and reached is not None:
                annals.give_up_after(reached[0])
                self._broken.discard(number)
                self._given_up[number] = reached[0], tip
            if (given_up := self._given_up.get(number)) is not None:
                if annals.holds(given_up[1]):
                    del self._given_up[number]
                else:
                    self.on_tail_lost(number, given_up[0])

    def head_of(self, stage: int) -> Digest | None:
        """The newest that can be gone on from with what is kept of the stage; None: there is none yet."""
        reached = self._archive.stages[stage].reached(self._archive.contributions)
        return None if reached is None else reached[0]

    async def _go_on(self) -> None:
        """Starts what is to be copied and fetched; a copy that takes an hour does not keep chains from being followed."""
        used_bytes = await asyncio.to_thread(self._archive.size_bytes)
        arriving_bytes = await asyncio.to_thread(self._archive.arriving_bytes)
        accounts = [self._account(stage) for stage in self._archive.stages]
        wanted = self._keeping.next(accounts, used_bytes, time.monotonic(), arriving_bytes=arriving_bytes)
        self._tell_full(wanted)
        if wanted.copy is not None and (self._copying is None or self._copying.done()):
            self._copying = self._tasks.create_task(
                self._guarded(self._copy(wanted.copy, wanted.lacking)), name="copy of states"
            )
        if wanted.follow and (self._following is None or self._following.done()):
            self._following = self._tasks.create_task(
                self._guarded(self._follow(wanted.follow, self._quota_bytes - used_bytes)), name="contributions kept"
            )
        self._note_kept()

    async def _guarded(self, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception as error:  # a task boundary: the looks go on
            self._keeping.failed(time.monotonic())
            self._tell_once(f"{type(error).__name__}: {error}; trying again")

    def _account(self, stage: StageArchive) -> StageAccount:
        annals, newest = stage.annals, stage.newest
        proven = {number for head, _ in annals.newest_proven() if (number := annals.round_at(head))}
        if newest is not None:
            proven.add(newest[1])
        if (tip := self._tips.get(stage.stage)) is not None and annals.holds(tip.head):
            proven.add(tip.round)
        allowance, is_here = self._allowances[stage.stage], self._surveys[stage.stage].members_here > 0
        count = annals.num_since(newest[0]) if newest is not None else 0
        number_of, usual = usual_bytes(annals.certificates, count) if count else (0, 0)
        missing = self._archive.missing(stage.stage) if newest is not None else []
        return StageAccount(
            stage.layout.state_bytes,
            frozenset(proven),
            is_over=annals.is_over,
            kept=None if newest is None else newest[1],
            following_bytes=number_of * usual,
            missing_bytes=len(missing) * usual,
            is_broken=stage.stage in self._broken,
            spare_bytes=allowance.spare_bytes(annals.certificates, time.monotonic()) if is_here else None,
        )

    # ---- what it does ----

    async def _copy(self, number: int, lacking: Sequence[int]) -> None:
        """The states of round `number`, of the stages that lack it."""
        began, size_bytes = time.monotonic(), 0
        for stage in lacking:
            agreed = self._agreed(stage, number)
            archive = self._archive.stages[stage]
            try:
                state = None if agreed is None else await self._surveys[stage].fetch(agreed, archive.arrivals)
                if state is not None and agreed is not None and archive.annals.holds(agreed.head):
                    await asyncio.to_thread(archive.save, state)
                    size_bytes += state.size_bytes
                    self._allowances[stage].taken(state.size_bytes)
                    continue
            except OSError as error:
                self._tell_stopped(f"{error.strerror or error}")
            except (RunUnreachable, StateCorrupt) as error:
                self._tell_once(f"{error}; trying again")
            self._keeping.failed(time.monotonic())
            return
        seconds = time.monotonic() - began
        self._keeping.copied(seconds, time.monotonic())
        is_first = not any(
            self._kept.get(stage, Kept(self._archive.stages[stage].annals, 0)).round for stage in lacking
        )
        with suppress(OSError):  # they cost room; the next copy tries again
            await asyncio.to_thread(self._archive.let_go, *self._archive.spare())
        self._broken.clear()
        self._note_kept()
        self._listener(
            RunKept(
                self.manifest.run.name,
                number,
                size_bytes,
                round(seconds, 3),
                is_first=is_first,
                is_last=self.is_complete,
            )
        )

    def _agreed(self, stage: int, number: int) -> Agreed | None:
        annals, tip = self._archive.stages[stage].annals, self._tips.get(stage)
        if (found := annals.proven_at(number)) is not None:
            return Agreed(number, *found)
        return tip if tip is not None and tip.round == number and annals.holds(tip.head) else None

    async def _follow(self, stages: Sequence[int], room_bytes: int) -> None:
        """The contributions that these stages lack, as far as there is room for what they really are."""
        slots, contributions = asyncio.Semaphore(BLOBS_AT_ONCE), self._archive.contributions
        most_bytes = contributions.size_bytes + room_bytes

        async def fetch(stage: int, name: Digest, max_bytes: int) -> None:
            async with slots:
                if stage in self._broken:
                    return  # without an older one it leads nowhere
                try:
                    left_bytes = max(0, most_bytes - contributions.size_bytes) // BLOBS_AT_ONCE
                    donors, allowed = self._surveys[stage].donors, min(max_bytes, left_bytes)
                    path = await self._store.fetch(name, donors=donors, max_bytes=allowed, timeout_s=BLOB_S)
                    self._allowances[stage].taken(path.stat().st_size)
                except (ThingUnavailable, TimeoutError):
                    self._broken.add(stage)
                except OSError as error:
                    self._tell_stopped(f"{error.strerror or error}")

        for stage in stages:
            if not self._surveys[stage].donors:
                continue
            max_bytes = blob_limits(self._archive.stages[stage].layout)[1]
            missing = self._archive.missing(stage)
            await asyncio.gather(*(fetch(stage, name, max_bytes) for name in missing))
        self._note_kept()

    def _reached(self, stage: int) -> int:
        reached = self._archive.stages[stage].reached(self._archive.contributions)
        return 0 if reached is None else reached[1]

    def _note_kept(self) -> None:
        """What is served from here on."""
        for stage in self._archive.stages:
            newest = stage.newest
            number = 0 if newest is None else newest[1]
            self._kept[stage.stage] = Kept(stage.annals, number, self._reached(stage.stage))

    def _tell_full(self, wanted: KeepNext) -> None:
        if wanted.full and not self._told_full:
            self._tell_stopped(wanted.full)
        self._told_full = wanted.full

    def _tell_stopped(self, why: str) -> None:
        self._listener(KeepingStopped(self.manifest.run.name, self.round, why))

    def _on_survey(self, event: Event) -> None:
        """Passes on what is out of the ordinary only."""
        if event.level == "warning":
            self._listener(event)


def keeper_lease(transport: Transport, started_ms: int, number: int) -> Lease:
    """Of who keeps the run up to round `number`. started_ms: wall clock."""
    return Lease(
        peer=transport.peer_id,
        stage=KEEPERS,
        incarnation=started_ms,
        addresses=transport.addresses,
        protocol=PROTOCOL_VERSION,
        tokens_per_s=0.0,
        memory_bytes=0,
        reachability="direct",
        round=number,
        admission=b"" if transport.admission is None else transport.admission.own_pass,
    )
