"""The shell of the outer loop: carries out what outer_loop.py decides, with the trainer and the disk. Decides nothing.

It alone calls the trainer's close and merge. It waits for the trainer and the disk, never for another peer: what has to come
from others arrives as certificates in `on_apply`.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import assert_never

from dilocox_peer.compression.lengths import Squares
from dilocox_peer.events import Listener
from dilocox_peer.manifest import Manifest
from dilocox_peer.peer.planning.timetable import Timetable
from dilocox_peer.peer.rounds.contract import Apply, Input
from dilocox_peer.peer.rounds.disk import until_written
from dilocox_peer.peer.training.outer_contract import (
    AdoptionBegun,
    AdoptionOver,
    AgreedRounds,
    BranchDropped,
    CloseRound,
    ContributionsLoaded,
    EndRun,
    Glance,
    HoldTraining,
    KeepState,
    LoadContributions,
    MergeRound,
    OfferBack,
    Origins,
    OuterInput,
    OuterWork,
    Pulse,
    Readings,
    RoundEncoded,
    StateAdopted,
    ToListener,
    ToRounds,
    WithdrawOffer,
)
from dilocox_peer.peer.training.outer_loop import PULSE_S, OuterLoop
from dilocox_peer.peer.training.trainer import Trainer
from dilocox_peer.store.shelf import Shelf
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import Certificate


class Conductor:
    """`run` returns when the run's last round is merged."""

    def __init__(
        self,
        *,
        me: PeerId,
        incarnation: int,
        manifest: Manifest,
        rounds: AgreedRounds,
        trainer: Trainer,
        blobs: Shelf,
        disk: Executor,
        squares_of: Callable[[Digest], Squares | None] = lambda _blob: None,
        raw_bytes: int,
        post: Callable[[Input], None],
        bytes_sent: Callable[[], int],
        uplink_bps: Callable[[], float],
        timetable: Timetable,
        on_merged: Callable[[], None],
        listener: Listener,
        origins: Callable[[], Origins] | None = None,
        is_paused: Callable[[], bool] = lambda: False,
    ) -> None:
        """In the loop that it runs in. squares_of: of a contribution, where they are known. post: to the round machine. on_merged: the anchor has moved. origins: of a later stage.
        is_paused: the volunteer's wish; a paused peer merges what the others certify, and closes what it had trained before."""
        self._trainer = trainer
        self._rounds = rounds
        self._blobs = blobs
        self._disk = disk
        self._squares_of = squares_of
        self._post = post
        self._bytes_sent = bytes_sent
        self._uplink_bps = uplink_bps
        self._on_merged = on_merged
        self._listener = listener
        self._origins = origins
        self._is_paused = is_paused
        self._changed = asyncio.Event()
        self._work: OuterWork | None = None  # what is to be done next
        self._loaded: list[memoryview] = []  # the contributions of the certificate at hand
        self._new_of_ours: set[Digest] = set()
        """Written first by the last close. A slice that is nothing, or that nobody has trained, is alike at all: what was here before is others' too."""
        self._is_over = False
        self._loop = asyncio.get_running_loop()
        self.outer = OuterLoop(
            me=me, incarnation=incarnation, manifest=manifest, rounds=rounds, timetable=timetable, raw_bytes=raw_bytes,
            now=self._loop.time(),
        )  # fmt: skip

    def on_apply(self, action: Apply) -> None:
        """A certificate whose blobs are all here, in chain order."""
        self._happened(action)

    def on_change(self) -> None:
        """Something that a decision may depend on has changed; looked at soon, once for all that comes until then."""
        self._changed.set()

    def begin_adoption(self) -> None:
        """Another's state is being fetched: nothing is closed or merged until `end_adoption`."""
        self._happened(AdoptionBegun())

    def drop_branch(self) -> bool:
        """The anchor becomes another one whole. Whether a contribution of ours was in what waited to be merged."""
        settles_ours = self.outer.waits_for_ours
        self._happened(BranchDropped())
        return settles_ours

    def on_state_installed(self, head: Digest, round_number: int) -> None:
        self._happened(StateAdopted(head, round_number))

    def end_adoption(self) -> None:
        self._happened(AdoptionOver())

    async def run(self) -> None:
        """Works until the last round is merged. Cancelled: the trainer keeps its last merged state."""
        self._happened(Glance())
        while not self._is_over:
            if (work := self._work) is not None:
                self._work = None
                self._happened(await self._do(work))
            else:
                self._changed.clear()
                try:
                    async with asyncio.timeout(PULSE_S):
                        await self._changed.wait()
                except TimeoutError:
                    self._happened(Pulse())
                else:
                    self._happened(Glance())

    def _happened(self, happened: OuterInput) -> None:
        if self._is_over:
            return
        for action in self.outer.handle(happened, self._loop.time(), self._see()):
            match action:
                case HoldTraining(hold):
                    (self._trainer.hold if hold else self._trainer.resume)()
                case CloseRound() | WithdrawOffer() | LoadContributions() | MergeRound():
                    assert self._work is None, "one piece of work is out at a time"
                    self._work = action
                    self._changed.set()
                case KeepState():
                    self._on_merged()
                case ToRounds(told):
                    self._post(told)
                case ToListener(event):
                    self._listener(event)
                case EndRun():
                    self._is_over = True
                case _:
                    assert_never(action)

    def _see(self) -> Readings:
        progress = self._trainer.progress()
        lost = self.outer.lost
        return Readings(
            progress.round,
            progress.micro_batches,
            progress.tokens,
            is_paused=self._is_paused(),
            uplink_bps=self._uplink_bps(),
            bytes_sent=self._bytes_sent(),
            origins=self._origins() if self._origins is not None else None,
            has_lost_back=lost is not None and lost in self._blobs.held,
            wall_s=time.time(),
        )

    async def _do(self, work: OuterWork) -> OuterInput:
        match work:
            case CloseRound():
                closed = self._trainer.close(sliced=self._rounds.is_sliced)
                offer, train_loss = await asyncio.wrap_future(closed)
                written = (*offer.slices, offer.blob)
                lasts = (
                    not offer.slices
                )  # nobody signs that they hold it, and its results are what the round goes on with

                def put() -> list[Digest]:
                    before = self._blobs.held
                    names = [self._blobs.put(blob, durable=lasts) for blob in written]
                    self._new_of_ours.update(name for name in names if name not in before)
                    return names

                self._new_of_ours.clear()

                digests = await until_written(
                    lambda: self._loop.run_in_executor(self._disk, put),
                    "our contribution",
                    self._listener,
                )
                return RoundEncoded(
                    digests[-1],
                    sum(map(len, written)),
                    offer.raw_bytes,
                    offer.micro_batches,
                    train_loss,
                    offer.lost,
                    tuple(digests[:-1]),
                    bytes(offer.blob) if offer.slices else b"",
                )
            case WithdrawOffer(forget):
                await asyncio.wrap_future(self._trainer.withdraw())
                for name in self._new_of_ours.intersection(forget):
                    await self._loop.run_in_executor(self._disk, self._blobs.forget, name)
                return OfferBack()
            case LoadContributions(certificate):
                loaded = await self._loop.run_in_executor(self._disk, self._read, certificate)
                if isinstance(loaded, bytes):  # the shelf drops what is damaged, and keeps what it cannot open for now
                    return ContributionsLoaded(loaded, for_now=loaded in self._blobs.held)
                self._loaded = loaded
                return ContributionsLoaded(None)
            case MergeRound(certificate, own):
                value, blobs, self._loaded = certificate.value, self._loaded, []
                return await asyncio.wrap_future(
                    self._trainer.merge(
                        blobs,
                        [entry.micro_batches for entry in value.entries],
                        squares=() if value.results else [self._squares_of(entry.blob) for entry in value.entries],
                        are_results=bool(value.results),
                        own=own,
                        round_number=value.round,
                        head=certificate.head,
                        inner_steps=value.plan.inner_steps,
                    )
                )
            case _:
                assert_never(work)

    def _read(self, certificate: Certificate) -> list[memoryview] | Digest:
        """The blobs, in order and memory-mapped, or the name of one that is not there any more."""
        blobs = []
        for name in certificate.value.blobs:
            blob = self._blobs.mapped(name)
            if blob is None:
                return name
            blobs.append(blob)
        return blobs
