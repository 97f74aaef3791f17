"""`evaluate`: follows a run and evaluates the anchors of its rounds. Takes no part in it and stops no training peer.

Two tasks: one keeps asking for the newest round (the answer waits until there is one) of all stages, one evaluates the
newest that is here; so rounds that come faster than they can be evaluated are passed over, and the last one never is. The
anchors of one evaluation are always of one round: a stage that has gone further serves it from its checkpoints.
"""

import asyncio
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import typer

from dilocox_peer.admission import Right
from dilocox_peer.cli.eventlog import event_printer
from dilocox_peer.cli.home import PeerHome
from dilocox_peer.cli.lifetime import Stop, run_until_stopped
from dilocox_peer.errors import PeerUnavailable, RunUnreachable
from dilocox_peer.events import DataMeasured, Evaluated, Event, Failed, Left, Listener, RunComplete, StateFetched
from dilocox_peer.invitation import Invitation, parse_invitation, parse_multiaddrs
from dilocox_peer.manifest import Manifest
from dilocox_peer.peer.identity import Identity
from dilocox_peer.types import PeerId

ROUND_BYTES = 64 * 1024  # evaluated after a round, always the same ones
FINAL_BYTES = 256 * 1024  # and after the last
BATCH = 32
ASK_S = 15.0
RETRY_S = 0.5
NICENESS = 5  # training goes first

Batch = tuple[Any, Any]


def run_evaluator(
    link: str,
    *,
    home: PeerHome,
    data: Sequence[Path],
    host_maddrs: Sequence[str],
    json_log: bool,
    until_stdin_closes: bool,
    average: float | None = None,
) -> None:
    """Evaluates until the run's last round is, or until stopped. average: decay a round of a running average of the
    anchors that is evaluated beside them; it is this process's own, and costs the swarm nothing. Raises ConfigError, RunUnreachable, RunRefused."""
    invitation = parse_invitation(link)
    parse_multiaddrs(host_maddrs, "listen")
    home.make()
    os.nice(NICENESS)
    listener = event_printer(as_json=json_log)
    with Identity.open(home.identity_path) as identity:
        evaluator = _Evaluator(invitation, home, identity, tuple(data), tuple(host_maddrs), listener, average)
        code = run_until_stopped(evaluator.run, until_stdin_closes=until_stdin_closes)
    raise typer.Exit(code)


class _Evaluator:
    def __init__(
        self,
        invitation: Invitation,
        home: PeerHome,
        identity: Identity,
        data: tuple[Path, ...],
        host_maddrs: tuple[str, ...],
        listener: Listener,
        average: float | None,
    ) -> None:
        self._invitation = invitation
        self._home = home
        self._identity = identity
        self._data = data
        self._host_maddrs = host_maddrs
        self._listener = listener
        self._average = average
        self._leaving = threading.Event()

    async def run(self, stop: Stop) -> None:
        from dilocox_peer.dht.directory import Directory
        from dilocox_peer.peer.entry import Newcomer, come_in
        from dilocox_peer.peer.network.transport import Transport

        async with AsyncExitStack() as stack:
            transport = await Transport.create(
                self._home.identity_path,
                self._identity.peer_id,
                namespace=self._invitation.run_id,
                initial_peers=self._invitation.addresses,
                host_maddrs=self._host_maddrs,
                runtime_dir=self._home.runtime,
            )
            stack.push_async_callback(transport.close)
            directory = await Directory.create(transport, self._invitation.run_id, self._identity.key)
            stack.push_async_callback(directory.close)
            manifest = await directory.fetch_manifest()
            newcomer = Newcomer(
                self._identity.peer_id,
                self._invitation.grant,
                self._home.run_folder(manifest.run_id),
                right=Right.READ,
            )
            await come_in(newcomer, manifest, transport=transport, directory=directory)
            follow = asyncio.create_task(self._follow(transport, directory, manifest), name="evaluate")
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

    async def _follow(self, transport: "Transport", directory: "Directory", manifest: Manifest) -> None:  # type: ignore[name-defined]  # noqa: F821
        from dilocox_peer.peer.training.average import AnchorAverage
        from dilocox_peer.peer.training.outer import initial_state
        from dilocox_peer.pipeline.data import load_corpus
        from dilocox_peer.pipeline.stage import build_stage

        corpus = await asyncio.to_thread(
            load_corpus, manifest.data.source, self._data, validation=manifest.data.validation
        )
        self._listener(DataMeasured(corpus.unigram_entropy(), corpus.bigram_entropy(), corpus.validation_bytes))
        whole = await asyncio.to_thread(build_stage, manifest)
        stages = range(manifest.stages.count)
        newest = [await asyncio.to_thread(initial_state, manifest, stage) for stage in stages]
        arrived = asyncio.Event()
        arrived.set()
        averages: list[AnchorAverage] = []

        async def ask() -> None:
            nonlocal newest
            reached = 0
            layouts = [state.layout for state in newest]
            is_final = False
            while not is_final:
                first = await self._state(transport, directory, 0, {"after": reached, "wait_s": ASK_S}, layouts[0])
                if first is None:
                    await asyncio.sleep(RETRY_S)
                    continue
                reached, is_final = first.round, first.is_final
                request = {"round": reached, "wait_s": ASK_S}
                others = [self._state(transport, directory, stage, request, layouts[stage]) for stage in stages[1:]]
                states = [first, *await asyncio.gather(*others)]
                if all(state is not None for state in states):
                    newest = states
                    arrived.set()
                elif is_final:
                    reached, is_final = reached - 1, False  # the last one is not given up
                    await asyncio.sleep(RETRY_S)  # its state of stage 0 is there at once, the other perhaps in minutes

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ask(), name="ask for states")
            while True:
                await arrived.wait()
                arrived.clear()
                states = newest
                is_last = states[0].is_final
                limit = FINAL_BYTES if is_last else ROUND_BYTES

                if self._average is not None:
                    averages = averages or [AnchorAverage(self._average) for _ in states]
                    for average, state in zip(averages, states, strict=True):
                        average.take(state)

                def evaluate(vectors: list[tuple[Any, Any]]) -> tuple[float, int]:
                    for layout, flat_N in vectors:
                        whole.model.load(layout, flat_N)
                    batches = corpus.validation_batches(limit, batch=BATCH, context=manifest.model.context)  # noqa: B023
                    return whole.evaluate(self._until_leaving(batches))

                loss, num_bytes = await asyncio.to_thread(evaluate, [(each.layout, each.anchor_N()) for each in states])
                average_loss = None
                if averages:
                    mean = [(each.layout, average.mean_N()) for each, average in zip(states, averages, strict=True)]
                    average_loss, _ = await asyncio.to_thread(evaluate, mean)
                self._listener(Evaluated(states[0].round, loss, num_bytes, average_loss))
                if is_last:
                    for state in states:
                        self._listener(RunComplete(state.round, state.head.hex(), state.digest.hex()))
                    return

    async def _state(self, transport, directory, stage: int, request: dict[str, Any], layout):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        """The state of a stage that any of its peers has, or None for now. Raises RunUnreachable when our own p2pd is gone."""
        from dilocox_peer.peer.state.statesync import fetch_state

        try:
            leases = await directory.peers(stage)
        except RunUnreachable as error:  # one slow answer in a run of days
            if transport.is_down:
                raise
            self._listener(Failed("evaluation", str(error)))
            return None
        donors: list[PeerId] = []
        for lease in leases:
            donors.append(lease.peer)
            with suppress(PeerUnavailable):
                await transport.connect(lease.peer, lease.addresses)
        return await fetch_state(
            transport, donors, request,
            layout=layout, expected=b"", timeout_s=60.0, listener=self._quiet,
        )  # fmt: skip

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
