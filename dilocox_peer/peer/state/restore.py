"""Taking over what nobody of a stage holds any more, from who has kept it: a keeper of the run, a peer of another stage, our own disk.

Asked at every start, and again while the rounds wait for the run's state. Whoever of the stage is as far knows more: then nothing is
taken over. When somebody of it comes back later the better chain wins, as after any partition (peer/rounds/forks.py). What is
said of a copy decides nothing but whom to ask first: chains are fetched, verified and judged before a state is. With a state come
the contributions to the rounds since, as far as they are kept: the rounds make the newest state of them.

Anybody may say that it keeps the run, and can write a view change of its own and sign rounds after it up to the run's end. So
a view change that no quorum signed is believed of a keeper that the run's link names, which has waited before it believed it; of
others only what the owner has signed. Where that leads nowhere, no such keeper answers and nobody of the stage is here, one
that some voter signed is believed too: it is the word of the last who stayed. That the run is over nobody is believed like this.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any

from dilocox_peer.compression.sizes import blob_limits
from dilocox_peer.dht.directory import Directory
from dilocox_peer.dht.records import Lease
from dilocox_peer.dht.turns import known_first
from dilocox_peer.errors import PeerUnavailable, ProtocolError, ThingUnavailable
from dilocox_peer.events import Failed, Listener
from dilocox_peer.events_of_states import StageRestored, StateFetchFailed
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.architecture import layout_of
from dilocox_peer.network.endpoint import Endpoint
from dilocox_peer.peer.rounds.copying import LONG_LOOK_S, LOOK_S, CopyPace, Farthest
from dilocox_peer.peer.rounds.durable import Durable
from dilocox_peer.peer.rounds.founding import FOUNDED_FROM
from dilocox_peer.peer.rounds.patience import Patience
from dilocox_peer.peer.state.backup import Annals, Backup
from dilocox_peer.peer.state.backup_exchange import Summary, fetch_chain, fetch_summary, trusted_first
from dilocox_peer.peer.state.backup_store import BackupStore
from dilocox_peer.peer.state.keeper import Keeper
from dilocox_peer.peer.state.statesync import Agreed, Copying, fetch_state
from dilocox_peer.peer.training.anchor_state import AnchorState
from dilocox_peer.signing import verify
from dilocox_peer.store.shelf import PartialFile, Shelf
from dilocox_peer.store.store import Store
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import Certificate

ASK_S = 5.0
MAX_ASKED = 32
AHEAD = 2  # rounds: somebody of the stage who is this near is at work, and was asked a moment earlier
MAX_FETCHED = 8  # chains read, of those who claim the most
CHAIN_TIMEOUT_S = 60.0  # for one of them
GRACE_S = 5.0  # for the others, once somebody's who is named by the run's link has been read
RESTORE_TIMEOUT_S = 3600.0
BLOB_TIMEOUT_S = 600.0
BLOBS_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Own:
    """What is on our own disk of the stage: its chain, a state on it, and where contributions lie."""

    chain: Sequence[Certificate]
    state: AnchorState | None
    blobs: Shelf

    @classmethod
    def of(cls, keeper: Keeper) -> "Own":
        durable: Durable | None = keeper.durable
        chain = durable.appended if durable is not None else ()
        return cls(chain, None if keeper.is_empty else keeper.state, keeper.blobs)

    @property
    def round(self) -> int:
        """That we can go on from: as far as the contributions since our state are here; none, where a long chain is here and its state never
        came."""
        if not self.chain or (self.state is None and len(self.chain) >= FOUNDED_FROM - 1):
            return 0
        reached = self.chain[-1].value.round
        for certificate in reversed(self.chain):
            if self.state is not None and certificate.head == self.state.head:
                break
            if any(name not in self.blobs for name in certificate.value.blobs):
                reached = certificate.value.round - 1
        return reached


@dataclass(frozen=True, slots=True)
class Restoration:
    """backup: to go on from; None: nothing that is newer than ours. complete: the run is over, by its certificates: its last round and
    head; None: it is not, as far as anybody there knows."""

    backup: Backup | None
    complete: tuple[int, Digest] | None = None


@dataclass(frozen=True, slots=True)
class _Source:
    """A peer that has a copy; lease None: our own disk."""

    summary: Summary
    lease: Lease | None
    is_named: bool = False  # by the run's link

    def rank(self) -> tuple[bool, int, bool]:
        """Lowest first: who is named, so that no number of others keeps it from being asked; by the round it leads to as claimed; what
        costs no transfer."""
        return not self.is_named, -self.summary.reached, self.lease is not None


@dataclass(frozen=True, slots=True)
class _Read:
    """A source and its own chain, as far as it was read and is believed."""

    source: _Source
    annals: Annals

    def rank(self, best: Annals) -> tuple[bool, int, bool, bool]:
        """Lowest first: on the best chain; by the round it can lead to on its own; who is named; what costs no transfer."""
        leads_to = min(self.source.summary.reached, self.annals.place.round)
        is_off = not best.holds(self.annals.place.head)
        return is_off, -leads_to, not self.source.is_named, self.source.lease is not None


class _TooSlow(Exception):
    """A state does not come, and there are others to be asked for theirs."""


async def find_backup(
    manifest: Manifest,
    stage: int,
    copy: BackupStore,
    own: Own,
    *,
    endpoint: Endpoint,
    directory: Directory,
    listener: Listener,
    is_waiting: bool = False,
) -> Restoration:
    """The best that somebody keeps of the stage, that verifies, and that is newer than what we have; none where somebody of the stage
    is as far, or if it has not begun.

    copy: our own of a stage that we did not train, if there is one. is_waiting: the rounds have looked for the state among the
    stage's peers, and nobody has it: what these say of themselves is not asked. Raises RunUnreachable, OSError.
    """
    of_stage = [] if is_waiting else await directory.peers(stage)
    rng = random.Random(endpoint.incarnation)
    keepers = trusted_first(await directory.keepers(), endpoint.transport, rng)
    others = await _of_others(stage, manifest.stages.count, directory)
    asked = known_first(others, endpoint.transport, rng)[:MAX_ASKED]
    living, said = await asyncio.gather(
        _summaries(endpoint, of_stage, stage), _summaries(endpoint, [*keepers, *asked], stage)
    )
    named = endpoint.transport.named
    sources = [
        _Source(summary, lease, lease.peer in named)
        for summary, lease in zip(said, [*keepers, *asked], strict=True)
        if summary is not None
    ]
    kept = await asyncio.to_thread(copy.load)
    if kept is not None:
        newest = kept.chain[-1].value
        sources.append(_Source(Summary(newest.height, kept.state.round, newest.weight, kept.round), None))
    alive = max((summary.reached for summary in living if summary is not None), default=-1)
    newest_here = max(own.round, alive + AHEAD if alive >= 0 else -1)
    newer = [source for source in sources if source.summary.reached > newest_here]
    newer = sorted(newer, key=_Source.rank)[:MAX_FETCHED]
    for patience_s in (inf, 0.0):
        judged = await _judged(manifest, stage, newer, kept, own, endpoint, directory, listener, patience_s=patience_s)
        complete = next((each.annals for each in judged if each.annals.is_over), None)
        if patience_s and complete is not None and not own.round:
            return Restoration(None, (complete.place.round, complete.place.head))
        left, slow = deque(judged), list[_Read]()
        farthest = Farthest(await asyncio.to_thread(_begun_of, judged, copy.arrivals) if judged else {})
        while left:
            each = left.popleft()
            if alive >= 0 and each.source.lease and not each.source.is_named and each.annals.place.round <= newest_here:
                continue  # it says that it has more than its chain leads to, and the stage lives: we would wait for what may never come
            source, donors = each.source, [other.source.lease.peer for other in judged if other.source.lease]
            if source.lease is not None:
                donors = [source.lease.peer, *(donor for donor in donors if donor != source.lease.peer)]
            is_pressed = bool(left) and each not in slow
            try:
                backup = await _fetch(
                    donors,
                    source,
                    each.annals,
                    copy,
                    kept,
                    own,
                    manifest,
                    endpoint,
                    listener,
                    farthest,
                    is_pressed=is_pressed,
                )
            except _TooSlow:  # after the others, and then to its end: our own line may be as slow
                slow.append(each)
                left.append(each)
                continue
            if backup is not None and backup.round > own.round:
                donor = endpoint.me if source.lease is None else source.lease.peer
                await asyncio.to_thread(copy.arrivals.drop_begun)  # its checkpoint takes room now
                listener(StageRestored(stage, backup.round, donor, backup.state.size_bytes))
                return Restoration(backup)
        if alive >= 0 or any(each.source.is_named for each in judged):
            break
    if others and not own.round and alive < 0 and not sources and await _has_begun(endpoint, asked):
        listener(Failed(f"stage {stage}", "nobody holds its state any more, nobody kept a copy: it begins anew"))
    return Restoration(None)


def _begun_of(judged: Sequence[_Read], arrivals: Shelf) -> dict[Digest, float]:
    """Which of their states something has come of, with the share of each that is here. Raises OSError."""
    proven = [each.annals.proven_at(each.source.summary.round) for each in judged]
    wanted = {digest for each in proven if each is not None for _, digest in [each]}
    resumed = {name: PartialFile(arrivals, name).resumed() for name in arrivals.begun() if name in wanted}
    return {name: len(here[1]) / max(1, len(here[0].chunks)) for name, here in resumed.items() if here is not None}


async def newest_kept(stage: int, *, endpoint: Endpoint, directory: Directory, besides: Sequence[Lease] = ()) -> int:
    """The newest round that a keeper, or one of the others besides, says it has of the stage; 0: none. Where one that the run's link names
    answers, others are not believed. Raises RunUnreachable."""
    keepers = trusted_first(await directory.keepers(), endpoint.transport, random.Random(endpoint.incarnation))
    asked = [*keepers, *besides]
    said = await _summaries(endpoint, asked, stage)
    answers = [(lease.peer, each.reached) for lease, each in zip(asked, said, strict=True) if each is not None]
    named = [reached for peer, reached in answers if peer in endpoint.transport.named]
    return max(named or [reached for _, reached in answers], default=0)


async def newest_copied(stage: int, *, num_stages: int, endpoint: Endpoint, directory: Directory) -> int:
    """The same, also of what peers of other stages have copied. Raises RunUnreachable."""
    others = await _of_others(stage, num_stages, directory)
    asked = known_first(others, endpoint.transport, random.Random())[:MAX_ASKED]
    return await newest_kept(stage, endpoint=endpoint, directory=directory, besides=asked)


async def _of_others(stage: int, num_stages: int, directory: Directory) -> list[Lease]:
    """The peers of the other stages. Raises RunUnreachable."""
    return [lease for other in range(num_stages) if other != stage for lease in await directory.peers(other)]


async def _judged(
    manifest: Manifest,
    stage: int,
    sources: Sequence[_Source],
    kept: Backup | None,
    own: Own,
    endpoint: Endpoint,
    directory: Directory,
    listener: Listener,
    *,
    patience_s: float,
) -> list[_Read]:
    """The sources whose chains verify and go on from ours, the best first. patience_s: with view changes of a minority, of sources
    that are not named."""
    if not sources:
        return []
    word = await directory.word(stage)
    checkpoint = None if word is None else word[0]

    async def read(source: _Source) -> _Read | None:
        is_ours = source.lease is None or source.is_named
        annals = Annals(manifest, stage, verify, checkpoint, None if is_ours else Patience(patience_s))
        try:
            if source.lease is not None:
                await fetch_chain(endpoint.transport, source.lease.peer, annals, CHAIN_TIMEOUT_S)
            elif kept is not None:
                await asyncio.to_thread(annals.take, kept.chain)
        except (PeerUnavailable, ProtocolError) as error:
            listener(StateFetchFailed(source.lease.peer if source.lease is not None else endpoint.me, str(error)))
            return None
        if own.chain and not annals.holds(own.chain[-1].head):
            return None  # another branch than ours: the rounds weigh the two
        return _Read(source, annals)

    found = [each for each in await _within_grace(sources, read) if each is not None]
    best = Annals(manifest, stage, verify, checkpoint)
    for each in found:
        with suppress(ProtocolError):  # of a branch that counts less
            await asyncio.to_thread(best.take, each.annals.certificates)
    return sorted(found, key=lambda each: each.rank(best))


async def _within_grace(
    sources: Sequence[_Source], read: Callable[[_Source], Coroutine[Any, Any, _Read | None]]
) -> list[_Read | None]:
    """What is read of each, all at once. Once a source that is named has been read, the others have GRACE_S more."""
    reading = {asyncio.create_task(read(source)): source for source in sources}
    try:
        pending, deadline = set(reading), inf
        clock = asyncio.get_running_loop().time
        while pending and (left_s := deadline - clock()) > 0:
            done, pending = await asyncio.wait(
                pending, timeout=None if left_s == inf else left_s, return_when=asyncio.FIRST_COMPLETED
            )
            if any(reading[task].is_named and task.result() is not None for task in done):
                deadline = min(deadline, clock() + GRACE_S)
        return [task.result() for task in reading if task.done()]
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


async def _fetch(
    donors: Sequence[PeerId],
    source: _Source,
    annals: Annals,
    copy: BackupStore,
    kept: Backup | None,
    own: Own,
    manifest: Manifest,
    endpoint: Endpoint,
    listener: Listener,
    farthest: Farthest,
    *,
    is_pressed: bool,
) -> Backup | None:
    """The state that a certificate of annals names, from all who kept the same one, or ours where that leads on; and what follows it. is_pressed: there
    are others to ask: raises _TooSlow where the state does not come."""
    layout = layout_of(manifest, annals.stage)
    if source.lease is None:
        state = kept.state if kept is not None else None
    elif own.state is not None and annals.holds(own.state.head) and own.state.round >= source.summary.round:
        state = own.state
    else:
        proven = annals.proven_at(source.summary.round)
        if proven is None:
            return None
        copying, agreed = Copying(), Agreed(source.summary.round, *proven)
        fetching = fetch_state(
            endpoint.transport, donors, agreed, layout=layout, timeout_s=RESTORE_TIMEOUT_S, listener=listener,
            shelf=copy.arrivals, copying=copying, spared=farthest.digest,
        )  # fmt: skip
        try:
            state = await (_while_it_comes(fetching, copying) if is_pressed else fetching)
        finally:
            farthest.left(Digest(agreed.digest), copying.share)
    if state is None or not annals.holds(state.head):
        return None
    following = annals.since(state.head) if source.summary.reached > state.round else ()
    await asyncio.to_thread(_take_over, following, copy.contributions, own.blobs)
    since = await _with_contributions(following, donors, own.blobs, blob_limits(layout)[1], endpoint)
    return Backup(annals.up_to(state.head), state, since)


async def _while_it_comes(fetching: Coroutine[Any, Any, AnchorState | None], copying: Copying) -> AnchorState | None:
    """Raises _TooSlow: whoever claims the most, and lets a byte come now and then, would keep us from all others for all the time that a state has."""
    clock = asyncio.get_running_loop().time
    task, pace = asyncio.create_task(fetching), None
    try:
        while not (await asyncio.wait({task}, timeout=LOOK_S))[0]:
            if copying.began_s is None:  # our own disk is looked at before
                continue
            pace = pace or CopyPace(copying.began_s, look_s=LONG_LOOK_S)
            pace.came(copying.share, clock())
            if pace.is_late(clock(), copying.began_s + RESTORE_TIMEOUT_S):
                raise _TooSlow
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _take_over(certificates: Sequence[Certificate], kept: Shelf, blobs: Shelf) -> None:
    """The contributions to these that were kept with our copy. Raises OSError."""
    for certificate in certificates:
        for name in certificate.value.blobs:
            if name not in blobs and (path := kept.path(name)) is not None:
                blobs.add(path)


async def _with_contributions(
    certificates: Sequence[Certificate], donors: Sequence[PeerId], blobs: Shelf, max_bytes: int, endpoint: Endpoint
) -> tuple[Certificate, ...]:
    """As many of the certificates, from the first on, as the contributions to are on our disk now."""
    store, slots = Store(endpoint.transport, [blobs]), asyncio.Semaphore(BLOBS_AT_ONCE)

    async def is_here(name: Digest) -> bool:
        async with slots:
            with suppress(ThingUnavailable, TimeoutError):
                await store.fetch(name, donors=donors, max_bytes=max_bytes, timeout_s=BLOB_TIMEOUT_S)
                return True
            return False

    had: list[Certificate] = []
    for certificate in certificates:
        if not all(await asyncio.gather(*(is_here(name) for name in certificate.value.blobs))):
            break
        had.append(certificate)
    return tuple(had)


async def _has_begun(endpoint: Endpoint, leases: Sequence[Lease]) -> bool:
    """Whether some of them have certified a round of their own stage."""
    own = await asyncio.gather(*(_summary(endpoint, lease, lease.stage) for lease in leases))
    return any(summary is not None and summary.round > 0 for summary in own)


async def _summaries(endpoint: Endpoint, leases: Sequence[Lease], stage: int) -> list[Summary | None]:
    return await asyncio.gather(*(_summary(endpoint, lease, stage) for lease in leases))


async def _summary(endpoint: Endpoint, lease: Lease, stage: int) -> Summary | None:
    """What one peer says that it has of the stage; None also when it does not answer in time."""
    if lease.peer == endpoint.me:
        return None
    try:
        await endpoint.transport.connect(lease.peer, lease.addresses, ASK_S)
        return await fetch_summary(endpoint.transport, lease.peer, stage, ASK_S)
    except (PeerUnavailable, ProtocolError):
        return None
