"""The run's owner among its peers: one notary (rounds/notary.py) for each stage, in the process that holds the owner's key.

A thin shell. It finds the peers by their leases, passes messages on, keeps each notary's log, and publishes what was vouched
for. Every notary has a task of its own: one that fails is told and started anew from its log, and takes nobody with it. What
is decided, the notaries decide.
"""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from dilocox_peer.contract import Note, Tick
from dilocox_peer.dht.directory import Directory
from dilocox_peer.dht.records import Lease
from dilocox_peer.errors import (
    ConfigError,
    DiskTakesNothing,
    PeerUnavailable,
    ProtocolError,
    RunUnreachable,
    disk_remedy,
    first_failure,
)
from dilocox_peer.events import Failed, Listener, MessageRefused, Remark
from dilocox_peer.manifest import Manifest
from dilocox_peer.network.lasting import lasting
from dilocox_peer.network.transport import PeerGone, Transport
from dilocox_peer.peer.desk import OwnerRecords
from dilocox_peer.peer.dial_slots import DialSlots
from dilocox_peer.peer.planning.plan import plan_bounds
from dilocox_peer.peer.rounds.contract import (
    OwnerSpoke,
    OwnerVouched,
    PeerFound,
    PeerRefused,
    Persist,
    Received,
    Send,
    TailLost,
)
from dilocox_peer.peer.rounds.genesis import genesis_of
from dilocox_peer.peer.rounds.journal import Journal
from dilocox_peer.peer.rounds.notary import Notary, NotaryInput, NotaryTerms
from dilocox_peer.peer.rounds.outbox import Outbox
from dilocox_peer.peer.rounds.refusals import Refusals
from dilocox_peer.peer.rounds.timing import Timing
from dilocox_peer.signing import SigningKey, verify
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.checkpoints import Checkpoint
from dilocox_peer.wire.directives import Directive, lost_words, newest_first, settled
from dilocox_peer.wire.rounds import decode_message, encode_message

LOOK_FIRST_S = 1.0  # between two looks at a stage that has not begun
LOOK_S = 15.0
LOOKS_AT_ONCE = 16  # stages looked at in a second: of a run with very many, each waits longer
DIAL_S, DIAL_AGAIN_S = 5.0, 15.0
SEND_TIMEOUT_S = 5.0
MAX_INPUTS = 256  # waiting at one notary; beyond, messages are dropped: whoever asked asks again
RESTART_S = 5.0
PUBLISH_S = 30.0  # a word expires after four
RECORDS_S = 2.0  # between two looks at what the owner has written here


class Registrar:
    """`run` until cancelled, in the loop it was made in. Takes the transport's messages."""

    def __init__(
        self,
        manifest: Manifest,
        key: SigningKey,
        *,
        transport: Transport,
        directory: Directory,
        folder: Path,
        listener: Listener,
        kept: Callable[[int], Digest | None] | None = None,
        records: OwnerRecords | None = None,
    ) -> None:
        """key: of the run's owner. folder: of this run alone, for the notaries' logs. records: where its directives are. kept: of each stage the newest head that can be
        gone on from with what is kept here; None: nothing is."""
        assert key.peer_id == manifest.owner_peer, "a key that is not the owner's"
        self._transport = transport
        self._directory = directory
        self._listener = listener
        self._refusals = Refusals()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="dilocox-notary")
        self._news = asyncio.Event()  # somebody has vouched
        self._desks = [
            _Desk(
                _terms(manifest, stage),
                key,
                transport,
                folder,
                self._writer,
                self._news.set,
                listener,
                None if kept is None else partial(kept, stage),
            )
            for stage in range(manifest.stages.count)
        ]
        self._run, self._key, self._records = manifest.digest, key, records
        self._is_unread, self._unwritten = False, ""  # the records of directives, which is told once
        self._has_asked = False  # the directory for directives, when it was last tried
        self.directive: Directive | None = None
        """The newest of the owner's that is known here."""
        self._looked_at = [float("-inf")] * manifest.stages.count
        self._dialling = DialSlots()
        self._dial_again_at: dict[PeerId, float] = {}  # inf: it is being dialled
        self._trouble = ""

    @property
    def checkpoints(self) -> Mapping[int, Checkpoint]:
        """The newest checkpoint of each stage that has one."""
        return {desk.stage: desk.checkpoint for desk in self._desks if desk.checkpoint is not None}

    @property
    def directed(self) -> int | None:
        """The number of the newest directive of the owner's, 0: none is known; None while the directory cannot be asked."""
        if not self._has_asked:
            return None
        return 0 if self.directive is None else self.directive.number

    @property
    def newest_round(self) -> int | None:
        """The newest that any stage's notary has heard of; None while the directory cannot be asked."""
        return max((desk.round for desk in self._desks), default=0) if self._has_asked else None

    def tail_lost(self, stage: int, head: Digest) -> None:
        """Nobody has what follows head any more; in this loop."""
        self._desks[stage].post(TailLost(head))

    async def run(self) -> None:
        """Cancelled: what was signed is on disk."""
        self._transport.set_message_handler(self._receive)
        try:
            async with asyncio.TaskGroup() as tasks:
                for desk in self._desks:
                    tasks.create_task(desk.run(), name=f"notary of stage {desk.stage}")
                tasks.create_task(lasting(self._keep_looking, "notaries", self._listener), name="notaries' looks")
                tasks.create_task(lasting(self._keep_publishing, "notaries", self._listener), name="the owner's word")
                tasks.create_task(
                    lasting(self._keep_directing, "notaries", self._listener), name="the owner's directives"
                )
        finally:
            self._writer.shutdown(wait=False)

    def _receive(self, sender: PeerId, raw: bytes) -> None:
        try:
            message = decode_message(raw, sender)
        except ProtocolError as error:
            if self._refusals.is_due(sender, asyncio.get_running_loop().time()):
                self._listener(MessageRefused(sender, error.reason))
            return
        if message.stage < len(self._desks):
            self._desks[message.stage].post(Received(sender, message))

    async def _keep_looking(self) -> None:
        async with asyncio.TaskGroup() as dials:  # a look waits for none of them: anybody can be listed, and not answer
            await self._look_and_meet(dials)

    async def _look_and_meet(self, dials: asyncio.TaskGroup) -> None:
        while True:
            due = self._due(asyncio.get_running_loop().time())
            try:
                found = await asyncio.gather(*(self._directory.peers(stage) for stage in due))
            except RunUnreachable as error:
                if str(error) != self._trouble:  # told once, not every second
                    self._listener(Failed("looking for the peers of the run", f"{error}; trying again"))
                self._trouble = str(error)
            else:
                self._trouble = ""
                self._meet([lease for leases in found for lease in leases], dials)
                await self._recall([stage for stage, leases in zip(due, found, strict=True) if leases])
            await asyncio.sleep(LOOK_FIRST_S)

    async def _recall(self, stages: Sequence[int]) -> None:
        """What the peers of these stages know of the owner's word: our log may have been lost, or somebody has signed with
        the same key elsewhere (`recover`)."""
        for stage in stages:
            with suppress(RunUnreachable):
                found = await self._directory.word(stage)
                if found is not None and found[0].is_newer(self._desks[stage].checkpoint):
                    self._desks[stage].post(OwnerVouched(found[0]))

    async def _keep_publishing(self) -> None:
        """The checkpoints of all stages: each when it is new, and again before it expires."""
        published: dict[int, tuple[int, float]] = {}
        while True:
            self._news.clear()
            now = asyncio.get_running_loop().time()
            for stage, word in sorted(self.checkpoints.items()):
                sequence, at = published.get(stage, (0, 0.0))
                if sequence == word.sequence and now - at < 0.9 * PUBLISH_S:
                    continue
                with suppress(RunUnreachable):  # nobody is there to take it, or they know a newer one: again later
                    await self._directory.publish_word(word)
                published[stage] = (word.sequence, now)
            with suppress(TimeoutError):
                async with asyncio.timeout(PUBLISH_S):
                    await self._news.wait()

    async def _recorded(self) -> Directive | None:
        """The one in the owner's records; where they cannot be read that is told once, and the directory's is gone by."""
        if self._records is None:
            return None
        try:
            found = await asyncio.to_thread(self._records.directive, run=self._run, owner=self._key.peer_id)
        except ConfigError as error:
            if not self._is_unread:
                self._listener(Failed("the owner's directives", str(error)))
            self._is_unread = True
            return None
        self._is_unread = False
        return found

    async def _keep_directing(self) -> None:
        """The newest directive: as it lies in the owner's records, in the directory or in a chain, to the peers, and where it is not yet."""
        publish_at = 0.0
        while True:
            now = asyncio.get_running_loop().time()
            recorded = await self._recorded()
            chained = [desk.directive for desk in self._desks]
            here = [each for each in (recorded, self.directive, *chained) if each is not None]
            seen = [*here, *self._directory.directives_here()]
            if now >= publish_at:
                try:
                    seen += await self._directory.directives()
                    self._has_asked = True
                except RunUnreachable:
                    self._has_asked = False
            newest = self._settle(seen)
            if newest != self.directive:
                self.directive, publish_at = newest, 0.0
            await self._record(recorded)
            if self.directive is not None:
                for desk in self._desks:
                    desk.direct(self.directive)
            if now >= publish_at:
                publish_at = now + PUBLISH_S
                if self.directive is not None:
                    with suppress(RunUnreachable):  # nobody is there to take it, or they know a newer one: again later
                        await self._directory.publish_directive(self.directive)
            await asyncio.sleep(RECORDS_S)

    def _settle(self, seen: Sequence[Directive]) -> Directive | None:
        """What counts; that something is lost by it is told."""
        newest = newest_first(seen)
        if not newest:
            return None
        counts = settled(newest, self._key.sign)
        if lost := "; and ".join(lost_words(each, counts) for each in newest[1:]):
            reason = (
                f"said in two places with number {newest[0].number}: directive {counts.number} says the one again ({counts.words()}), "
                f"and the other is lost unless you say it anew ({lost})"
            )
            self._listener(Failed("the owner's directives", reason))
        return counts

    async def _record(self, recorded: Directive | None) -> None:
        """Writes what was said elsewhere into the owner's records, where the next word follows on it. recorded: what lies there."""
        records, said = self._records, self.directive
        if records is None or said is None or self._is_unread:
            return
        if recorded is not None and recorded.number >= said.number:
            return
        try:
            is_written = await asyncio.to_thread(records.take_directive, said, self._key.peer_id)
        except (ConfigError, DiskTakesNothing) as error:
            if str(error) != self._unwritten:
                self._listener(Failed("the owner's directives", str(error)))
            self._unwritten = str(error)
            return
        self._unwritten = ""
        if is_written:
            before = "" if recorded is None else f"; before, directive {recorded.number}: {lost_words(recorded, said)}"
            self._listener(Remark(f"directive {said.number} is in {records.folder} now: {said.words()}{before}"))

    def _due(self, now: float) -> list[int]:
        """The stages to look at now, those not looked at for longest first."""

        def is_due(stage: int) -> bool:
            pause_s = LOOK_S if self._desks[stage].has_begun else LOOK_FIRST_S
            return now - self._looked_at[stage] >= 0.9 * pause_s

        stages = sorted(filter(is_due, range(len(self._desks))), key=lambda stage: self._looked_at[stage])
        for stage in stages[:LOOKS_AT_ONCE]:
            self._looked_at[stage] = now
        return stages[:LOOKS_AT_ONCE]

    def _meet(self, leases: Sequence[Lease], dials: asyncio.TaskGroup) -> None:
        """Dials those that their notary does not know, and makes them known to it."""
        now = asyncio.get_running_loop().time()
        self._dial_again_at = {peer: at for peer, at in self._dial_again_at.items() if at > now}
        for lease in leases:
            if lease.peer not in self._dial_again_at and not self._desks[lease.stage].knows(lease.peer):
                self._dial_again_at[lease.peer] = float("inf")  # it is under way
                dials.create_task(self._dial(lease), name="dial")

    async def _dial(self, lease: Lease) -> None:
        is_known = lease.peer in self._transport.heard
        again_s = 0.0
        try:
            async with self._dialling.slot(lease.peer, lease.addresses, is_known=is_known):
                await self._transport.connect(lease.peer, lease.addresses, DIAL_S)
                addresses = await self._transport.range_of(lease.peer)
            self._desks[lease.stage].meet(lease.peer, addresses)
        except PeerUnavailable:
            again_s = DIAL_AGAIN_S
        finally:
            self._dial_again_at[lease.peer] = asyncio.get_running_loop().time() + again_s


class _Desk:
    """One notary at work: its log, what it is told, what it wants done."""

    def __init__(
        self,
        terms: NotaryTerms,
        key: SigningKey,
        transport: Transport,
        folder: Path,
        writer: ThreadPoolExecutor,
        on_vouched: Callable[[], None],
        listener: Listener,
        kept: Callable[[], Digest | None] | None,
    ) -> None:
        """writer: one thread. kept: as Notary has it."""
        self._kept = kept
        self._terms = terms
        self._key = key
        self._transport = transport
        self._on_vouched = on_vouched
        self._path = folder / f"stage-{terms.stage}.log"
        self._writer = writer
        self._listener = listener
        self._inputs: asyncio.Queue[NotaryInput] = asyncio.Queue(MAX_INPUTS)
        self._posted: set[PeerId] = set()  # and the notary has not been told yet
        self._directed = -1  # the number of the newest directive that the notary was told
        self._notary: Notary | None = None
        self._unwritten = ""  # why its log takes nothing, which is told once

    @property
    def stage(self) -> int:
        return self._terms.stage

    @property
    def has_begun(self) -> bool:
        return self._notary is not None and self._notary.chain.height > 0

    @property
    def checkpoint(self) -> Checkpoint | None:
        return self._notary.checkpoint if self._notary is not None else None

    @property
    def round(self) -> int:
        return self._notary.chain.place.round if self._notary is not None else 0

    @property
    def directive(self) -> Directive | None:
        """The newest that this stage's chain has."""
        return self._notary.chain.place.directive if self._notary is not None else None

    def knows(self, peer: PeerId) -> bool:
        """Whether there is nothing to tell the notary of it; one that it has forgotten for others is met again."""
        return peer in self._posted or (self._notary is not None and self._notary.knows(peer))

    def meet(self, peer: PeerId, addresses: str) -> None:
        if self.post(PeerFound(peer, addresses)):
            self._posted.add(peer)

    def direct(self, directive: Directive) -> None:
        """To be called now and then: a notary that began anew does not know it, and there may be no room for it now."""
        if self._directed < directive.number and self.post(OwnerSpoke(directive)):
            self._directed = directive.number

    def post(self, happened: NotaryInput) -> bool:
        """Whether there was room for it."""
        try:
            self._inputs.put_nowait(happened)
        except asyncio.QueueFull:
            return False
        return True

    async def run(self) -> None:
        while True:
            try:
                await self._work()
            except ConfigError as error:  # its log is another version's, and stays so: told once
                self._listener(Failed(f"notary of stage {self.stage}", f"it signs nothing: {error}"))
                return
            except Exception as error:  # a task boundary: the directory and the other stages go on
                self._tell_failed(first_failure(error))
            self._notary = None
            self._posted.clear()
            self._directed = -1
            await asyncio.sleep(RESTART_S)

    def _tell_failed(self, error: BaseException) -> None:
        """A disk that takes nothing is told once, not each time that its log is tried."""
        if not (isinstance(error, OSError) and (remedy := disk_remedy(error))):
            reason = f"{type(error).__name__}: {error}; started anew in {RESTART_S:.0f} s"
            self._listener(Failed(f"notary of stage {self.stage}", reason))
        elif self._unwritten != (
            reason := f"it signs nothing until its log can be written: {error.strerror}; {remedy}"
        ):
            self._unwritten = reason
            self._listener(Failed(f"notary of stage {self.stage}", reason))

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        journal = await loop.run_in_executor(self._writer, Journal, self._path, self._terms.genesis)
        try:
            notary = self._notary = self._make(journal)
            async with asyncio.TaskGroup() as tasks:
                outbox = Outbox(tasks, self._send, self._on_failure)
                happened: NotaryInput = Tick()
                while True:
                    await self._carry_out(notary, happened, journal, outbox)
                    happened = await self._next_input(notary)
        finally:
            await asyncio.shield(loop.run_in_executor(self._writer, journal.close))

    def _make(self, journal: Journal) -> Notary:
        if why := journal.damage or journal.loaded.reason:
            self._listener(Failed(f"notary of stage {self.stage}", f"its log: {why}"))
        return Notary(
            self._terms,
            sign=self._key.sign,
            verify=verify,
            timing=Timing(),
            rng=random.Random(f"{self._key.peer_id} {self.stage} {time.time_ns()}"),
            now=asyncio.get_running_loop().time(),
            wall_ms=time.time_ns() // 1_000_000,
            durable=journal.loaded.durable,
            chain=journal.chain,
            kept=self._kept,
        )

    async def _carry_out(self, notary: Notary, happened: NotaryInput, journal: Journal, outbox: Outbox) -> None:
        loop = asyncio.get_running_loop()
        actions = notary.handle(happened, loop.time())
        if isinstance(happened, PeerFound):
            self._posted.discard(happened.peer)
        for action in actions:
            match action:
                case Send(to, message):
                    outbox.post(to, encode_message(message))
                case Persist(state):
                    if blocks := await loop.run_in_executor(self._writer, journal.write, state):
                        notary.chain.seal(blocks)
                    if self._unwritten:
                        self._unwritten = ""
                        self._listener(Remark(f"notary of stage {self.stage}: its log can be written again"))
                    if state.checkpoint is not None:
                        self._on_vouched()
                case Note(event):
                    self._listener(event)
                case _:
                    raise AssertionError(f"a notary that wants {type(action).__name__}")

    async def _next_input(self, notary: Notary) -> NotaryInput:
        try:
            async with asyncio.timeout_at(notary.deadline()):
                return await self._inputs.get()
        except TimeoutError:
            return Tick()

    async def _send(self, peer: PeerId, messages: Sequence[bytes]) -> list[str]:
        return await self._transport.send_all(peer, messages, SEND_TIMEOUT_S)

    def _on_failure(self, error: PeerUnavailable) -> None:
        if isinstance(error, PeerGone):
            self._posted.discard(error.peer)
            self.post(PeerRefused(error.peer))


def _terms(manifest: Manifest, stage: int) -> NotaryTerms:
    return NotaryTerms(
        stage,
        genesis_of(manifest, stage),
        manifest.rounds.start_peers,
        manifest.limits.max_peers,
        plan_bounds(manifest),
        manifest.rounds.checkpoint_every,
    )
