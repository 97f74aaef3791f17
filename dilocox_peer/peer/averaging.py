"""A peer's part in the rounds of its stage: machine, driver and conductor, coupled with trainer, disk and network.

What the machine wants of states and contributions is done here: adopting another's state, serving ours. Decides nothing.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeVar

from dilocox_peer.admission import Right
from dilocox_peer.compression.sizes import raw_bytes
from dilocox_peer.events import Failed, Listener
from dilocox_peer.events_of_states import BranchKept
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.architecture import layout_of
from dilocox_peer.peer.links.conveyor import Conveyor
from dilocox_peer.peer.planning.adaptive_planner import planner_of
from dilocox_peer.peer.planning.plan import first_plan, plan_bounds
from dilocox_peer.peer.planning.timetable import Timetable
from dilocox_peer.peer.presence import Presence
from dilocox_peer.peer.rounds.contract import FetchState, PeerRefused, StateComputed, StateInstalled, StateMissing
from dilocox_peer.peer.rounds.driver import RoundDriver
from dilocox_peer.peer.rounds.genesis import authority_of
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.rounds.seats import seat_terms
from dilocox_peer.peer.rounds.timing import WANTED_S, Timing
from dilocox_peer.peer.state.keeper import Keeper
from dilocox_peer.peer.state.statesync import STATE_SERVICE, Agreed, Copying, States, fetch_state
from dilocox_peer.peer.training.anchor_state import AnchorState
from dilocox_peer.peer.training.conductor import Conductor
from dilocox_peer.peer.training.inner_reach import InnerReach
from dilocox_peer.peer.training.known_norms import KnownNorms, allowed_codecs
from dilocox_peer.peer.training.outer_contract import Origins
from dilocox_peer.peer.training.slice_desk import SliceDesk, contribution_layout
from dilocox_peer.peer.training.trainer import Trainer
from dilocox_peer.signing import verify
from dilocox_peer.store.store import Store
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import Certificate

T = TypeVar("T")

STATE_TIMEOUT_S = 3600.0


class Averaging:
    """`serve`, then run its driver and its conductor."""

    def __init__(
        self,
        presence: Presence,
        stage: int,
        *,
        manifest: Manifest,
        sign: Callable[[bytes], bytes],
        trainer: Trainer,
        timetable: Timetable,
        keeper: Keeper,
        conveyor: Conveyor | None,
        disk: Executor,
        is_paused: Callable[[], bool],
        listener: Listener,
    ) -> None:
        """In the loop it will run in. trainer: held, at the keeper's state. conveyor: of a run with several stages.
        disk: one thread; what is written there is written in order."""
        self._run_id = manifest.run_id
        self._transport = presence.transport
        self._trainer = trainer
        self._keeper = keeper
        self._disk = disk
        self._blob_bytes_served = 0  # of this stay, as the transport's counts are
        self._listener = listener
        self._layout = contribution_layout(manifest, stage)
        allowed = allowed_codecs(manifest)
        self._norms = KnownNorms(self._layout, allowed)
        self.machine = _machine(presence, stage, manifest, keeper, sign)
        self.machine.telling.place_of = self._transport.doors.holder_of
        self.machine.telling.bytes_per_s = lambda: self._transport.bandwidth.told_rate
        self._states = States(trainer.state, keeper.state_folders)
        self.store = Store(
            self._transport, [keeper.things, keeper.blobs], sources=[self._states], on_served=self._on_served,
            on_accused=lambda donor, reason: self.driver.accused(donor, reason),
            is_urgent=lambda peer, name: peer in self.machine.roster and name in keeper.blobs,
        )  # fmt: skip
        self.driver = RoundDriver(
            self.machine,
            transport=self._transport,
            blobs=keeper.blobs,
            journal=keeper.journal,
            disk=disk,
            check_blob=self._norms.check,
            max_blob_bytes=allowed.max_bytes(self._layout),
            on_apply=lambda action: self.conductor.on_apply(action),
            on_fetch_state=self.adopt_state,
            on_change=lambda: self.conductor.on_change(),
            listener=listener,
            slices=_slice_desk(manifest, stage, keeper),
        )
        self.conductor = Conductor(
            me=presence.me,
            incarnation=presence.incarnation,
            manifest=manifest,
            rounds=self.machine,
            trainer=trainer,
            blobs=keeper.blobs,
            disk=disk,
            squares_of=self._norms.get,
            raw_bytes=raw_bytes(self._layout),
            post=self.driver.post,
            bytes_sent=self.bytes_sent,
            uplink_bps=lambda: self._transport.bandwidth.uplink.bps,
            timetable=timetable,
            on_merged=self._on_merged,
            listener=listener,
            origins=_origins(conveyor) if conveyor is not None and stage > 0 else None,
            is_paused=is_paused,
        )

    def bytes_sent(self) -> int:
        """In messages and contributions."""
        return self._transport.message_bytes_sent + self._blob_bytes_served

    async def serve(self) -> None:
        """Takes messages and requests from here on; they are answered, or wait for the driver to run."""
        self._transport.set_message_handler(self.driver.receive)
        self._transport.set_bytes_handler(self.driver.bytes_came)
        self._transport.set_members(lambda peer: peer in self.machine.roster)
        await self._transport.serve(STATE_SERVICE, self._states.serve_digest, right=Right.READ)
        await self.store.serve()
        state = self._keeper.state
        self.driver.post(StateComputed(state.head, state.digest))

    def put_out(self, peer: PeerId) -> None:
        """It has no right in the run any more, as this peer's gate knows by now."""
        self.driver.post(PeerRefused(peer, is_out=True))

    def _on_merged(self) -> None:
        state = self._trainer.state()
        self._keeper.save(state, at_once=False)
        self._keeper.tidy(state)

    async def adopt_state(self, action: FetchState) -> None:
        """Fetches and installs the state at action.head; tells the machine how it went."""
        self.conductor.begin_adoption()
        try:
            if action.donors:
                copying = Copying()

                def goes_on() -> bool:
                    donors = self.machine.copying(action.head, copying.share)
                    copying.join(donors)
                    return bool(donors)

                fetching = fetch_state(
                    self._transport,
                    action.donors,
                    Agreed(action.round, action.head, action.state_digest),
                    layout=self._trainer.state().layout,
                    timeout_s=STATE_TIMEOUT_S,
                    listener=self._listener,
                    shelf=self._keeper.arrivals,
                    copying=copying,
                )
                state = await while_wanted(fetching, goes_on)
            else:
                state = await self._own_state(action.head)
            if state is None or not self.machine.is_wanted(action.head):
                self.driver.post(StateMissing(action.head))
                return
            # Not before: should no donor have it, our chain is still the certificates that wait.
            if action.leaves:
                await self._keep_branch(action.leaves)
            settles_ours = self.conductor.drop_branch()
            keep = action.keep_pseudo_gradient and not settles_ours
            await asyncio.wrap_future(self._trainer.install(state, keep_pseudo_gradient=keep))
            # On disk before the chain follows it: killed in between, with the donors gone, we would be at a head that nothing
            # here leads to. A disk that refuses is told, and what is in memory is still right.
            await asyncio.shield(asyncio.wrap_future(self._keeper.save(state)))
            self.conductor.on_state_installed(state.head, state.round)
            self.driver.post(StateInstalled(state.head, state.digest))
        finally:
            self.conductor.end_adoption()

    async def _keep_branch(self, leaves: Sequence[Certificate]) -> None:
        """What is dropped for a better chain stays on disk. A disk that refuses is told, and does not keep us from it."""
        chain, state = self.machine.history.as_it_is(), self._trainer.state()
        keep = partial(self._keeper.left.keep, self._run_id, chain, tuple(leaves), state)
        try:
            kept = await asyncio.get_running_loop().run_in_executor(self._disk, keep)
        except OSError as error:
            self._listener(Failed("keeping our branch", f"{error.strerror or error}: it cannot be gone back to"))
            return
        if kept is not None:
            self._listener(BranchKept(kept.first_round, kept.last_round, kept.tip))

    async def _own_state(self, head: Digest) -> AnchorState | None:
        return await asyncio.get_running_loop().run_in_executor(self._disk, self._keeper.stored, head)

    def _on_served(self, name: Digest, num_bytes: int) -> None:
        if name in self._keeper.blobs:
            self._blob_bytes_served += num_bytes


async def while_wanted(fetching: Coroutine[Any, Any, T], is_wanted: Callable[[], bool]) -> T | None:
    """What is fetched, as long as it is wanted: a better branch may be heard of while gigabytes come, or others who give a state. What has come
    stays for another try."""
    task = asyncio.ensure_future(fetching)
    try:
        while not task.done() and is_wanted():
            await asyncio.wait([task], timeout=WANTED_S)
        return await task if task.done() else None
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _machine(
    presence: Presence, stage: int, manifest: Manifest, keeper: Keeper, sign: Callable[[bytes], bytes]
) -> RoundMachine:
    return RoundMachine(
        me=presence.me,
        incarnation=presence.incarnation,
        stage=stage,
        genesis=manifest.genesis(stage),
        timing=Timing(overlaps=manifest.outer.overlap != "none", exchange_share=manifest.compression.exchange_share),
        sign=sign,
        verify=verify,
        rng=random.Random(f"{presence.me} {presence.incarnation}"),
        now=asyncio.get_running_loop().time(),
        plan=first_plan(manifest),
        start_peers=manifest.rounds.start_peers,
        max_peers=manifest.limits.max_peers,
        plans=plan_bounds(manifest),
        planner=planner_of(manifest, layout_of(manifest, stage)),
        durable=keeper.durable,
        chain=keeper.chain,
        stored_states=(keeper.state.head,),
        stored_blobs=keeper.blobs.held,
        run_owner=manifest.owner_peer,
        authority=authority_of(manifest),
        max_back=manifest.rounds.checkpoint_every,
        seats=seat_terms(manifest),
        state_bytes=layout_of(manifest, stage).state_bytes,
        slices=manifest.rounds.num_slices,
    )


def _slice_desk(manifest: Manifest, stage: int, keeper: Keeper) -> SliceDesk | None:
    if not (count := manifest.rounds.num_slices):
        return None
    return SliceDesk(
        layout_of(manifest, stage), count, norm_clip=manifest.limits.norm_clip, blobs=keeper.blobs, allowed=allowed_codecs(manifest),
        reach=InnerReach.of(manifest),
    )  # fmt: skip


def _origins(conveyor: Conveyor) -> Callable[[], Origins]:
    """What a peer of a later stage knows of stage 0, at any time."""
    return lambda: Origins(conveyor.bench.recent_origins, conveyor.bench.certified_at_stage_0)
