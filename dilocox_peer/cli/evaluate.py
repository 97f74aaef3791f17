"""`evaluate`: follows a run and evaluates the anchors of its rounds. Takes no part in it and stops no training peer.

Two tasks: one keeps looking for the newest round whose states certificates of all stages name, one evaluates the newest that is
here; so rounds that come faster than they can be evaluated are passed over, and the last one never is. That a round is the last
one the certificates say, no donor does.
"""

import asyncio
import math
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilocox_peer.admission import Right
from dilocox_peer.cli.eventlog import event_printer
from dilocox_peer.cli.flags import EvaluateFlags
from dilocox_peer.cli.lifetime import Stop, end, run_until_stopped
from dilocox_peer.cli.sampling_of_run import RunSampler
from dilocox_peer.errors import ConfigError, DilocoxError, RunUnreachable
from dilocox_peer.events import Event, Failed, Left, Listener, Remark, RunComplete
from dilocox_peer.events_of_data import DataMeasured, Evaluated
from dilocox_peer.events_of_states import StateFetched
from dilocox_peer.invitation import SCHEME, Invitation, parse_invitation, parse_multiaddrs
from dilocox_peer.manifest import SHARDS, Manifest
from dilocox_peer.peer.identity import Identity

if TYPE_CHECKING:
    from dilocox_peer.dht.directory import Directory
    from dilocox_peer.network.transport import Transport
    from dilocox_peer.peer.state.survey import Survey
    from dilocox_peer.peer.training.anchor_state import AnchorState

ROUND_BYTES = 64 * 1024  # evaluated after a round, always the same ones
FINAL_BYTES = 256 * 1024  # and after the last
BATCH = 32
LOOK_S = 0.5
READ_S = 2.0  # between two looks at a folder
OVER_S = 20.0  # of nobody with the final model before we go; fetches of it apart, which may be slow
NICENESS = 5  # training goes first

Batch = tuple[Any, Any]


def run_evaluator(flags: EvaluateFlags) -> None:
    """Evaluates until the run's last round is, or until stopped. The running average that --average asks for is this process's
    own, and costs the swarm nothing. Raises ConfigError, RunUnreachable, RunRefused."""
    listener = event_printer(as_json=flags.log.is_json)
    if flags.is_run_folder:
        os.nice(2 * NICENESS)
        reader = Evaluator(flags, None, None, listener)
        code = run_until_stopped(
            lambda stop: reader.follow_folder(Path(flags.link), stop), until_stdin_closes=flags.until_stdin_closes
        )
        end(code)
    if SCHEME not in flags.link.lower():
        raise ConfigError(
            f"there is no folder {flags.link[:200]!r}, and it is no {SCHEME} link: name a folder that is there, or paste the line that "
            "`bootstrap` printed"
        )
    invitation = parse_invitation(flags.link)
    parse_multiaddrs(flags.host_maddrs, "listen")
    flags.peer_home.make()
    os.nice(NICENESS)
    with Identity.open(flags.peer_home.identity_path) as identity:
        evaluator = Evaluator(flags, invitation, identity, listener)
        code = run_until_stopped(evaluator.run, until_stdin_closes=flags.until_stdin_closes)
    end(code)


class Evaluator:
    """`run` it: joins as a reader and follows the rounds."""

    def __init__(
        self, flags: EvaluateFlags, invitation: Invitation | None, identity: Identity | None, listener: Listener
    ) -> None:
        """invitation, identity: None where a folder is followed."""
        self._flags = flags
        self._invitation = invitation
        self._home = flags.peer_home
        self._identity = identity
        self._listener = listener
        self._leaving = threading.Event()

    async def run(self, stop: Stop) -> None:
        async with AsyncExitStack() as stack:
            follow = asyncio.create_task(self._come_and_follow(stack), name="evaluate")
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait({follow, stopped}, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            self._leaving.set()
            if not follow.done():
                follow.cancel()
                with suppress(asyncio.CancelledError):
                    await follow
            else:
                follow.result()
            self._listener(Left(stop.reason or "the run is complete"))

    async def _come_and_follow(self, stack: AsyncExitStack) -> None:
        from dilocox_peer.dht.directory import Directory
        from dilocox_peer.model.architecture import prepare
        from dilocox_peer.network.transport import Transport
        from dilocox_peer.peer.arrival import settings_of
        from dilocox_peer.peer.entry import Newcomer, come_in

        assert self._invitation is not None
        assert self._identity is not None
        transport = await Transport.create(
            self._home.identity_path,
            self._identity.peer_id,
            namespace=self._invitation.run_id,
            initial_peers=self._invitation.addresses,
            host_maddrs=self._flags.host_maddrs,
            runtime_dir=self._home.runtime,
        )
        stack.push_async_callback(transport.close)
        directory = await Directory.create(transport, self._invitation.run_id, self._identity.key)
        stack.push_async_callback(directory.close)
        manifest = await settings_of(directory, transport)
        await asyncio.to_thread(prepare, manifest)
        newcomer = Newcomer(
            self._identity.peer_id,
            self._invitation.grant,
            self._home.run_folder(manifest.run_id),
            right=Right.READ,
        )
        await come_in(newcomer, manifest, transport=transport, directory=directory)
        await self.follow(transport, directory, manifest)

    async def follow(self, transport: "Transport", directory: "Directory", manifest: Manifest) -> None:
        """Evaluates until the last round is, or nobody has its states any more. Raises RunUnreachable."""
        from dilocox_peer.peer.state.survey import surveys

        found = surveys(manifest, transport=transport, directory=directory, listener=self._quiet)
        await self.evaluate(manifest, lambda anchors: self.keep_looking(found, anchors, transport))

    async def follow_folder(self, folder: Path, stop: Stop) -> None:
        """Evaluates what a keeper of the run writes into its folder, until it is stopped. Raises ConfigError, StateCorrupt."""
        from dilocox_peer.model.architecture import prepare
        from dilocox_peer.peer.state.anchors import kept_manifest

        manifest = kept_manifest(folder)
        assert manifest is not None, "looked for before"
        await asyncio.to_thread(prepare, manifest, is_own=True)
        work = self.evaluate(manifest, lambda anchors: keep_reading(folder, manifest, anchors))
        evaluating = asyncio.create_task(work, name="evaluate")
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({evaluating, stopped}, return_when=asyncio.FIRST_COMPLETED)
        self._leaving.set()
        stopped.cancel()
        if evaluating.done():
            evaluating.result()
        evaluating.cancel()
        with suppress(asyncio.CancelledError):
            await evaluating
        self._listener(Left(stop.reason))

    async def evaluate(self, manifest: Manifest, look: "Callable[[Anchors], Coroutine[Any, Any, None]]") -> None:
        """Evaluates what look puts into anchors, until it is the last. Raises what look does, as it is."""
        try:
            await self._evaluate_all(manifest, look)
        except ExceptionGroup as group:  # of the TaskGroup
            if (known := group.subgroup(DilocoxError)) is None:
                raise
            raise known.exceptions[0] from None

    async def _evaluate_all(self, manifest: Manifest, look: "Callable[[Anchors], Coroutine[Any, Any, None]]") -> None:
        from dilocox_peer.data.corpus import load_corpus
        from dilocox_peer.data.held_out import HeldOut
        from dilocox_peer.data.shards import held_out_of
        from dilocox_peer.data.sources import Reading
        from dilocox_peer.data.tokenizer_files import find_tokenizer
        from dilocox_peer.model.merging import base_of
        from dilocox_peer.model.partition import cut_of
        from dilocox_peer.model.stage import build_stage
        from dilocox_peer.model.weights import place_of
        from dilocox_peer.peer.training.average import AnchorAverage
        from dilocox_peer.peer.training.outer import initial_state

        section, flags = manifest.data, self._flags
        tokenizer = await asyncio.to_thread(
            find_tokenizer,
            section,
            manifest.model.vocab_size,
            given=flags.tokenizer,
            kept=self._home.tokenizers,
            beside=place_of(manifest.model, flags.base),
        )
        corpus: HeldOut
        if section.source == SHARDS:
            corpus = await asyncio.to_thread(
                held_out_of, flags.data, section.catalogue, tokenizer, packing=section.packing
            )
        else:
            reading = Reading(flags.column)
            corpus = await asyncio.to_thread(
                load_corpus,
                section.source,
                flags.data,
                validation=section.validation,
                tokenizer=tokenizer,
                reading=reading,
            )
        await asyncio.to_thread(corpus.require_context, manifest.model.context)
        entropies = corpus.unigram_entropy(), corpus.bigram_entropy()
        self._listener(DataMeasured(*entropies, corpus.validation_tokens, corpus.unit))
        base = await asyncio.to_thread(base_of, manifest.model, flags.base, cut_of(manifest))
        whole = await asyncio.to_thread(build_stage, manifest, base=base)
        stages = range(manifest.stages.count)
        begins_here = not manifest.model.starts_from_files  # a published model's weights need not be on this machine
        first = [await asyncio.to_thread(initial_state, manifest, stage) for stage in stages] if begins_here else []
        anchors = Anchors(first)
        averages: list[AnchorAverage] = []
        sampler = RunSampler(tokenizer) if flags.is_run_folder else None

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(look(anchors), name="look for states")
            while True:
                states, is_last = await anchors.next()
                if not states:
                    self._listener(Remark("the run is complete, and nobody who holds its final model is here"))
                    return
                limit = FINAL_BYTES if is_last else ROUND_BYTES

                if self._flags.average is not None:
                    averages = averages or [AnchorAverage(self._flags.average) for _ in states]
                    for average, state in zip(averages, states, strict=True):
                        average.take(state)

                def evaluate(vectors: list[tuple[Any, Any]]) -> tuple[float, int, int]:
                    for layout, flat_N in vectors:
                        whole.model.load(layout, flat_N)
                    batches = corpus.validation_batches(limit, batch=BATCH, context=manifest.model.context)  # noqa: B023
                    counted = Counted(self._until_leaving(batches), corpus.num_bytes)
                    return *whole.evaluate(counted), counted.num_bytes

                vectors = [(each.layout, each.anchor_N()) for each in states]
                loss, num_tokens, num_bytes = await asyncio.to_thread(evaluate, vectors)
                average_loss = None
                if averages:
                    mean = [(each.layout, average.mean_N()) for each, average in zip(states, averages, strict=True)]
                    average_loss, *_ = await asyncio.to_thread(evaluate, mean)
                bits = loss * num_tokens / max(num_bytes, 1) / math.log(2)
                number = states[0].round
                self._listener(Evaluated(number, loss, num_bytes, average_loss, bits, corpus.unit))
                if sampler is not None and number and not averages and (is_last or sampler.is_due()):
                    held_out = corpus.validation_batches(limit, batch=1, context=manifest.model.context)
                    found = await asyncio.to_thread(sampler.sample, whole.model, held_out, number)
                    if found is not None:
                        self._listener(found)
                if is_last:
                    for state in states:
                        self._listener(RunComplete(state.round, state.head.hex(), state.digest.hex()))
                    return

    async def keep_looking(self, found: "Sequence[Survey]", anchors: "Anchors", transport: "Transport") -> None:
        """Puts newer states into anchors until the last round's are in it, or nobody has them any more. Raises RunUnreachable
        when our own p2pd is gone."""
        from dilocox_peer.peer.state.survey import common_tip, fetch_newest, look_at_all, newest_common

        reached, over_since = 0, None
        while True:
            try:
                await look_at_all(found)
            except RunUnreachable as error:  # one slow answer in a run of days
                if transport.is_down:
                    raise
                self._listener(Failed("evaluation", str(error)))
            is_over = all(survey.annals.is_over for survey in found)
            tip = await common_tip(found) if is_over else None
            wanted = tip or newest_common(found)
            if wanted is not None and (tip is not None or wanted[0].round > reached):
                began = asyncio.get_running_loop().time()
                states = await fetch_newest(found, wanted)
                if over_since is not None:  # who loses a large state halfway has it tried again
                    over_since += asyncio.get_running_loop().time() - began
                if states is not None and (tip is not None or states[0].round > reached):
                    reached = states[0].round
                    anchors.put(states, is_last=tip is not None)
                    if tip is not None:
                        return
            now = asyncio.get_running_loop().time()
            over_since = (now if over_since is None else over_since) if is_over else None
            if over_since is not None and now - over_since > OVER_S:
                anchors.put((), is_last=True)
                return
            await asyncio.sleep(LOOK_S)

    def _until_leaving(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches; an error when we leave, as nobody can cancel a thread and the process waits for it."""
        for batch in batches:
            if self._leaving.is_set():
                raise InterruptedError("left in mid-evaluation")
            yield batch

    def _quiet(self, event: Event) -> None:
        """Passes on what is out of the ordinary only: the evaluator fetches a state every round."""
        if not isinstance(event, StateFetched):
            self._listener(event)


async def keep_reading(folder: Path, manifest: Manifest, anchors: "Anchors") -> None:
    """Puts newer states of a run's folder into anchors, as they come."""
    from dilocox_peer.peer.state.anchors import newest_states

    reached = 0
    while True:
        states = await asyncio.to_thread(newest_states, folder, manifest, reached)
        if states is not None:
            reached = states[0].round
            anchors.put(states, is_last=False)
        await asyncio.sleep(READ_S)


class Counted:
    """Batches, and how many bytes of text the targets of those that were taken stand for."""

    def __init__(self, batches: Iterable[Batch], num_bytes: Callable[[Any], int]) -> None:
        self._batches = batches
        self._count = num_bytes
        self.num_bytes = 0

    def __iter__(self) -> Iterator[Batch]:
        for inputs, targets in self._batches:
            self.num_bytes += self._count(targets)
            yield inputs, targets


class Anchors:
    """The newest states, for the one who evaluates them: older ones that it did not come to are passed over."""

    def __init__(self, states: "Sequence[AnchorState]") -> None:
        self._newest = tuple(states), False
        self._arrived = asyncio.Event()
        if states:
            self._arrived.set()

    def put(self, states: "Sequence[AnchorState]", *, is_last: bool) -> None:
        """is_last: nothing comes after these; no states: nor are the last ones to be had."""
        self._newest = tuple(states), is_last
        self._arrived.set()

    async def next(self) -> "tuple[tuple[AnchorState, ...], bool]":
        """Waits for states that were not given yet; and whether they are the last."""
        await self._arrived.wait()
        self._arrived.clear()
        return self._newest
