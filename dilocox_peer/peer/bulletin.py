"""What a peer tells of itself: where it joined, and once a second how far it is, who is in its stage, how its pipeline goes.

Everything that shows or writes down a peer (screen, log, metrics) reads these events.
"""

import asyncio
from collections.abc import Callable
from dataclasses import asdict

from dilocox_peer.events import Listener, PipelineProgress, RunJoined, StageSeen, TrainingProgress
from dilocox_peer.events_of_costs import NeedsReckoned
from dilocox_peer.events_of_rounds import Credited
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.architecture import frozen_layout_of, layout_of
from dilocox_peer.network import tcp_traffic
from dilocox_peer.network.transport import Transport
from dilocox_peer.peer.device import is_in_machine_memory
from dilocox_peer.peer.footprint import resident_bytes
from dilocox_peer.peer.links.conveyor import Conveyor
from dilocox_peer.peer.planning.upkeep import StageNeeds, first_disk
from dilocox_peer.peer.rounds.ledger import Ledger
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.tally import Tally
from dilocox_peer.peer.training.book import Progress
from dilocox_peer.types import PeerId

PROGRESS_S = 1.0
MEMORY_EVERY = 10  # of the progress reports, one measures memory
TRAFFIC_EVERY = 2  # and one what p2pd sends and receives


class Bulletin:
    """`run` tells; nothing of it waits for another peer."""

    def __init__(
        self,
        tally: Tally,
        *,
        me: PeerId,
        stage: int,
        manifest: Manifest,
        transport: Transport,
        machine: RoundMachine,
        progress: Callable[[], Progress],
        bytes_sent: Callable[[], int],
        conveyor: Conveyor | None,
        listener: Listener,
    ) -> None:
        """bytes_sent: in messages and contributions. conveyor: of a run with several stages; it is told how many we are."""
        self._tally = tally
        self._me = me
        self._stage = stage
        self._micro_batch_tokens = manifest.inner.micro_batch * manifest.model.context
        self._transport = transport
        self._machine = machine
        self._progress = progress
        self._bytes_sent = bytes_sent
        self._conveyor = conveyor
        self._listener = listener
        self._memory_bytes = 0

    async def run(self) -> None:
        """Tells once a second until cancelled."""
        ticks = 0
        while True:
            await asyncio.sleep(PROGRESS_S)
            if ticks % MEMORY_EVERY == 0:
                self._memory_bytes = await asyncio.to_thread(resident_bytes)
            if ticks % TRAFFIC_EVERY == 0:
                found = await asyncio.to_thread(tcp_traffic.look, self._transport.daemon_pid)
                self._tally.daemon_traffic.take(found)
            ticks += 1
            progress = self._progress()
            self._listener(self._training(progress))
            self._tell_stage()
            if self._conveyor is not None:
                self._conveyor.bench.set_replicas(len(self._machine.roster))
                self._listener(_pipeline_progress(self._conveyor, progress))

    def tell_credit(self) -> None:
        """What our chain counts of this peer by now."""
        ledger, tokens = Ledger.of(self._machine.chain), self._micro_batch_tokens
        mine = ledger.by_peer.get(self._me)
        if mine is None:
            self._listener(Credited(self._stage, 0, 0, 0.0, has_trained=self._progress().tokens > 0))
        else:
            share = ledger.share_of(self._me)
            self._listener(Credited(self._stage, mine.rounds, mine.micro_batches * tokens, share))

    def _training(self, progress: Progress) -> TrainingProgress:
        line = self._transport.line.use
        return TrainingProgress(
            round=progress.round,
            micro_batches=progress.micro_batches,
            tokens=progress.tokens,
            tokens_per_s=round(progress.tokens_per_s, 1),
            train_loss=progress.train_loss,
            bytes_sent=self._bytes_sent(),
            bytes_received=self._transport.bandwidth.bytes_received,
            lag_ms_p99=round(self._tally.lag.p99_ms, 2),
            busy=round(progress.busy, 3),
            memory_bytes=self._memory_bytes,
            is_training=progress.is_training,
            share=progress.share,
            daemon_bytes_sent=self._tally.daemon_traffic.sent,
            daemon_bytes_received=self._tally.daemon_traffic.received,
            lag_ms_max=round(self._tally.lag.max_ms, 2),
            upload_bps=round(8 * (line.rate or 0.0)),
            line_bps=round(8 * line.line),
            queueing_ms=round(1000 * line.waiting_s, 1),
        )

    def _tell_stage(self) -> None:
        """Only when it has changed."""
        machine, now = self._machine, asyncio.get_running_loop().time()
        here = machine.alive(now)
        idle = here - machine.working(now)
        seen = StageSeen(self._stage, machine.roster, tuple(sorted(here)), tuple(sorted(idle)), machine.leader)
        if seen != self._tally.stage_seen:
            self._tally.stage_seen = seen
            self._listener(seen)


def run_joined(manifest: Manifest, me: PeerId, stage: int, *, device: str, threads: int) -> RunJoined:
    """The event that tells what this peer is part of."""
    inner, rounds, compression = manifest.inner, manifest.rounds, manifest.compression
    frozen = frozen_layout_of(manifest, stage)
    return RunJoined(
        run=manifest.run_id,
        run_name=manifest.run.name,
        peer=me,
        stage=stage,
        stages=manifest.stages.count,
        total_rounds=rounds.total,
        inner_steps=rounds.inner_steps,
        share=rounds.inner_steps * inner.accumulate,
        micro_batch_tokens=inner.micro_batch * manifest.model.context,
        num_parameters=layout_of(manifest, stage).num_elements,
        codec=compression.codec,
        rank=compression.rank if compression.codec.startswith("lowrank") else 0,
        overlap=manifest.outer.overlap,
        device=device,
        threads=threads,
        num_frozen=0 if frozen is None else frozen.num_elements,
    )


def needs_reckoned(
    manifest: Manifest, stage: int, device: str, *, checkpointing: bool, base_bits: int
) -> NeedsReckoned:
    """The event that tells what the stage takes of this machine."""
    on_cpu = is_in_machine_memory(device)
    needs = StageNeeds.of(manifest, stage, on_cpu=on_cpu, checkpointing=checkpointing, base_bits=base_bits)
    return NeedsReckoned(disk_bytes=first_disk(manifest, needs, 0), **asdict(needs))


def _pipeline_progress(conveyor: Conveyor, progress: Progress) -> PipelineProgress:
    status = conveyor.status()
    counts = status.micro_batches
    return PipelineProgress(
        linked=len(status.linked),
        busy=round(progress.busy, 3),
        in_flight=counts.in_flight,
        waiting=counts.waiting,
        window=counts.window,
        resent=counts.resent,
        duplicates=counts.duplicates,
        bytes_sent=status.bytes_sent,
        bytes_received=status.bytes_received,
        wire_bytes_sent=status.wire_bytes_sent,
        wire_bytes_received=status.wire_bytes_received,
    )
