"""A seeded world of real round machines: one heap of (time, event), a lossy network, disks that survive crashes.

Toy training stands in for the trainer: a peer makes pseudo-gradient units; a contribution names the units it carries; an
anchor is a hash over what was applied and the set of units inside. So a unit applied twice, or lost without being
counted, shows at once (invariants.py). Everything random comes from one generator: a seed is a run.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import msgpack

from dilocox_peer.contract import Leaving, Note, Tick
from dilocox_peer.peer.planning.plan import PlanBounds
from dilocox_peer.peer.rounds.chain import Place
from dilocox_peer.peer.rounds.contract import (
    Action,
    Apply,
    AverageSlice,
    BlobHeld,
    BlobMissing,
    BlobPart,
    BlobRefused,
    Closed,
    FetchBlob,
    FetchState,
    ForgetBlobs,
    Input,
    PeerFound,
    PeerRefused,
    PeerUnreached,
    Persist,
    Received,
    Send,
    SliceAveraged,
    StateComputed,
    StateInstalled,
    StateMissing,
)
from dilocox_peer.peer.rounds.directing import Authority
from dilocox_peer.peer.rounds.durable import encode_record, load_log
from dilocox_peer.peer.rounds.fetch_slots import FetchSlots
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.rounds.notary import Notary, NotaryTerms
from dilocox_peer.peer.rounds.seats import SeatTerms
from dilocox_peer.peer.rounds.timing import WANTED_S, Timing
from dilocox_peer.types import Digest, PeerId, canonical, sha256
from dilocox_peer.wire.chain import Certificate, Entry, Plan, Report, SliceOutcome
from dilocox_peer.wire.rounds import (
    Ack,
    Cert,
    ChainPage,
    Message,
    Nack,
    Promise,
    Propose,
    decode_message,
    encode_message,
)
from tests.sim.clockwork import Clockwork

from .invariants import Invariants, Violation

OWNER = PeerId("owner")
VOUCHED_EVERY = 4  # rounds between two checkpoints of the owner
GENESIS = sha256(b"genesis of the simulated stage")
PLAN = Plan("fp16", 0, 8)
TIMING = Timing(
    heartbeat_s=1.0, settle_s=2.0, genesis_patience_s=4.0, offer_wait_start_s=3.0, offer_wait_cap_s=6.0, ballot_floor_s=1.5, ballot_start_s=3.0,
    ballot_cap_s=8.0, degrade_refused_s=3.0, degrade_s=8.0, view_wait_s=1.5, view_turn_s=1.5, blob_retry_s=1.0,
    state_retry_s=1.0, state_patience_s=30.0, shun_s=5.0, sync_wait_s=2.0, keep_rounds=8, replay_limit=6,
)  # fmt: skip
RUN = sha256(b"the simulated run")  # digest of its manifest
MAX_BACK = 16  # rounds taken back without the owner's word
CHECKPOINT_EVERY = 3  # rounds between two anchors on disk
ROUND_S = 4.0
MAX_TRAIN = 1.2  # training takes 0.8 to 1.2 times its typical time,
MAX_FETCH = 1.7  # a fetch 0.3 to 1.7 times,
UNREACHED_S = 2.0  # until it is known that a message could not be delivered
CROWDED, MAX_LATE_S = 0.8, 0.3  # of inputs, behind which others wait; that ticks are late
MAX_APPLY_S = 0.3  # and applying a certificate up to this

_VOTES = (Ack, Nack, Promise, Propose, Cert, ChainPage)

Unit = tuple[str, int, int]  # peer, incarnation, number


@dataclass(frozen=True)
class Anchor:
    """digest: over what was applied; units: the pseudo-gradient inside."""

    digest: Digest
    units: frozenset[Unit]

    def after(self, blobs: Iterable[bytes]) -> "Anchor":
        parts = list(blobs)
        if not parts:
            return self
        if any(kind_of(part) == "lie" for part in parts):
            raise Violation("a certified result that is no mean")
        if kind_of(parts[0]) == "result":
            if len({frozenset(units_of(part)) for part in parts}) != 1:
                raise Violation("results of other contributions in one certificate")
            if [slice_of(part) for part in parts] != list(range(len(parts))):
                raise Violation("a slice that is there twice, or not at all")
        units = set(self.units)
        for part in parts[:1] if kind_of(parts[0]) == "result" else parts:
            carried = units_of(part)  # also of a malformed one: a quorum that refuses none of its own may certify it
            if units & carried:
                raise Violation(f"I4: pseudo-gradient applied twice: {sorted(units & carried)[:3]}")
            units |= carried
        return Anchor(sha256(self.digest, *parts), frozenset(units))


FIRST_ANCHOR = Anchor(sha256(b"first anchor"), frozenset())


def blob_of(units: Iterable[Unit], malformed: bool) -> bytes:
    # "movement": another word is another hash, and with it another order of leaders: each seed would play another history.
    return canonical(["bad" if malformed else "movement", [list(unit) for unit in sorted(units)]])


def slices_of(units: Iterable[Unit], count: int, malformed: bool) -> tuple[bytes, list[bytes]]:
    """The table of a contribution in slices, and these."""
    shown = [list(unit) for unit in sorted(units)]
    slices = [canonical(["slice", shown, index]) for index in range(count)]
    return canonical(["bad" if malformed else "table", shown, [sha256(each) for each in slices]]), slices


def kind_of(blob: bytes) -> str:
    kind: str = msgpack.unpackb(blob)[0]
    return kind


def units_of(blob: bytes) -> set[Unit]:
    """The units a contribution carries, or a slice of it, or a result."""
    units = msgpack.unpackb(blob)[1]
    return {(unit[0], unit[1], unit[2]) for unit in units}


def slice_of(blob: bytes) -> int:
    """Of a slice or a result."""
    index: int = msgpack.unpackb(blob)[2]
    return index


def parts_of(blob: bytes) -> tuple[Digest, ...]:
    """The slices that a table names."""
    unpacked = msgpack.unpackb(blob)
    return tuple(map(Digest, unpacked[2])) if unpacked[0] in ("table", "bad") and len(unpacked) > 2 else ()


def why_unfit(blob: bytes, part: BlobPart | None) -> str | None:
    """What the check of a blob that is wanted as this part says of it."""
    kind = kind_of(blob)
    if kind == "bad":
        return "malformed"
    if part is None:
        return None if kind == "movement" else f"a {kind} for a contribution"
    is_right = kind == part.kind or (kind == "lie" and part.kind == "result")
    if not is_right or (part.kind in ("result", "residual", "slice") and slice_of(blob) != part.slice):
        return f"a {kind} for a {part.kind} {part.slice}"
    return None


def sign_as(peer: PeerId) -> Callable[[bytes], bytes]:
    return lambda message: sha256(peer.encode(), message)[:8]


def verify(peer: PeerId, message: bytes, signature: bytes) -> bool:
    return signature == sha256(peer.encode(), message)[:8]


@dataclass
class Disk:
    """What survives a crash."""

    log: bytearray = field(default_factory=bytearray)
    blobs: dict[Digest, bytes] = field(default_factory=dict)
    anchors: dict[Digest, Anchor] = field(default_factory=lambda: {GENESIS: FIRST_ANCHOR})


@dataclass
class Network:
    """What may go wrong on the way; the scenario changes it while the world runs."""

    loss: float = 0.0
    vote_loss: float = (
        0.0  # of ACKs, NACKs, promises, proposals and certificates, on top: half-accepted values, many ballots
    )
    duplicates: float = 0.0
    latency_s: float = 0.05
    spread_s: float = 0.1
    fetch_failures: float = 0.0
    blob_s: float = 0.3
    state_s: float = 1.5
    group_of: dict[PeerId, int] = field(default_factory=dict)
    gaps: set[frozenset[PeerId]] = field(default_factory=set)  # pairs that find no path to one another

    def connected(self, one: PeerId, other: PeerId) -> bool:
        return frozenset((one, other)) not in self.gaps and self.group_of.get(one, 0) == self.group_of.get(other, 0)


class Node:
    """One peer: a machine, its shell and its toy trainer. `generation` ends what a dead process had under way."""

    def __init__(self, world: "World", peer: PeerId, slowness: float) -> None:
        self.world = world
        self.peer = peer
        self.slowness = slowness
        self.disk = Disk()
        self.machine: RoundMachine | None = None
        self.generation = 0
        self.incarnation = 0
        self.start_peers = 0  # that its process waits for
        self.malformed = False
        self.lies = False  # about what a slice comes to
        self.gone_for_good = False
        self.crash_after: int | None = None
        self.anchor: Anchor | None = None
        self.anchor_head: Digest | None = None
        self.pending: set[Unit] = set()
        self.produced: set[Unit] = set()
        self.orphaned: set[Unit] = set()
        self.offered: set[Unit] = set()
        self.kept_back: set[Digest] = set()  # what it holds and gives to nobody
        self.fetches: dict[Digest, int] = {}
        self.slots: FetchSlots | None = None
        self.is_looking = False  # at what takes long
        self.queue: deque[Apply] = deque()
        self.applying = False
        self.ticking_at, self.ticks = float("inf"), 0

    @property
    def is_hostile(self) -> bool:
        return False

    @property
    def is_up(self) -> bool:
        return self.machine is not None

    @property
    def offers_malformed(self) -> bool:
        """Where it votes alone nobody refuses what it offers, and nobody can follow what it certifies: there nothing is promised."""
        return self.malformed and self.machine is not None and len(self.machine.voters) > 1

    def gives(self, head: Digest) -> Anchor | None:
        """The state at head that others get here."""
        return self.anchor if self.anchor_head == head else None

    def start(self, friends: Iterable[PeerId]) -> None:
        """A new process on this node's disk."""
        world = self.world
        loaded = load_log(bytes(self.disk.log), GENESIS)
        del self.disk.log[loaded.valid_bytes :]
        self.generation += 1
        # Milliseconds, as in a peer: the orders of its votes begin there, and have to grow over a restart.
        self.incarnation = max(self.incarnation + 1, int(1000 * world.now)) + world.rng.randrange(3)
        self.start_peers = world.start_peers
        self.machine = world.machine_type(self.peer)(
            me=self.peer, incarnation=self.incarnation, stage=0, genesis=GENESIS, timing=world.timing,
            sign=sign_as(self.peer), verify=verify, rng=random.Random(world.rng.random()), now=world.now, plan=PLAN,
            start_peers=world.start_peers, max_peers=world.max_peers,
            plans=world.plans, planner=Restless(self.peer, world.plans),
            durable=loaded.durable, stored_states=set(self.disk.anchors), max_back=MAX_BACK, run_owner=OWNER if world.owner is not None else None,
            seats=world.seats, state_bytes=world.state_bytes, authority=world.authority, slices=world.slices,
        )  # fmt: skip
        self.anchor, self.anchor_head = (FIRST_ANCHOR, GENESIS) if self.machine.head == GENESIS else (None, None)
        self.pending, self.produced, self.orphaned, self.offered = set(), set(), set(), set()
        self.queue.clear()
        self.fetches.clear()
        self.slots, self.is_looking = FetchSlots() if world.has_slots else None, False
        self.applying = False
        self.crash_after = None
        self.ticking_at = float("inf")
        if not self.is_hostile:
            world.checks.started(self)
        self.later(0.0, lambda: self.feed(Tick()))
        for friend in friends:
            if friend != self.peer:
                self.later(world.rng.random(), partial(self.feed, PeerFound(friend)))
        self.train_on()
        if world.owner is not None and world.owner.is_up:
            world.owner.later(world.rng.random(), partial(world.owner.feed, PeerFound(self.peer)))

    def crash(self) -> None:
        """Everything not on disk is gone; what was being written last may be torn."""
        self.machine = None
        self.generation += 1
        if self.world.rng.random() < 0.3:
            self.disk.log += b"\x00\x00\x01\x00torn"
        self.world.trace(f"{self.peer} crashed")

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        """act, unless this process has died by then."""
        generation = self.generation

        def alive_act() -> None:
            if self.generation == generation and self.machine is not None:
                act()

        self.world.at(self.world.now + delay_s, alive_act)

    # ---- the shell ----

    def feed(self, happened: Input) -> None:
        machine, generation, world = self.machine, self.generation, self.world
        assert machine is not None
        if world.tracing and not isinstance(happened, Tick):
            world.trace(f"{self.peer} <- {_shown(happened)}")
        for action in machine.handle(happened, world.now, more=world.are_more_waiting()):
            if self.crash_after is not None:
                self.crash_after -= 1
                if self.crash_after < 0:
                    self.crash()
                    return
            self.carry_out(action)
            if self.generation != generation:
                return
        world.checks.after_event(self)
        deadline = machine.deadline()
        if deadline is not None and deadline < self.ticking_at:
            self.ticking_at, self.ticks = deadline, self.ticks + 1
            self.later(deadline - world.now + world.late_s(), partial(self._tick, self.ticks))

    def _tick(self, number: int) -> None:
        if self.world.is_crowded and number != self.ticks:
            return  # another was named since, and is on its way
        self.ticking_at = float("inf")
        self.feed(Tick())

    def carry_out(self, action: Action) -> None:
        world = self.world
        if world.tracing and not (isinstance(action, Send) and type(action.message).__name__ == "Heartbeat"):
            world.trace(f"{self.peer} -> {_shown(action)}")
        match action:
            case Send(to, message):
                world.checks.sends(self, message)
                world.deliver(self.peer, to, message)
            case Persist(durable):
                world.checks.persists(self, durable)
                self.disk.log += encode_record(durable)
            case FetchBlob():
                self.fetches[action.blob] = self.fetches.get(action.blob, 0) + 1
                if self.slots is None or (action.part is not None and action.part.kind == "table"):
                    self._fetch(action)
                else:
                    self._fetch_all(self.slots.ask(action, world.now))
            case AverageSlice():
                base = self._base_of(action.slice)
                here = self.disk.blobs.get(base) if base and not action.base and not self.is_hostile else None
                if here is not None and why_unfit(here, BlobPart("residual", action.slice)) is None:
                    raise Violation(f"slice {action.slice} goes on without the residual that is here")
                self.later(world.rng.random() * world.average_s, lambda: self._average(action))
            case Apply():
                self.queue.append(action)
                self._apply_next()
            case FetchState():
                self.fetch_state(action)
            case ForgetBlobs(blobs):
                for blob in blobs:
                    self.disk.blobs.pop(blob, None)
            case Note(event):
                world.checks.noted(self, event)

    def _base_of(self, index: int) -> Digest:
        """The residual that goes with the next mean of a slice, as the chain here has it."""
        assert self.machine is not None
        sharing = self.machine.sitting.seat.place.sharing
        return Digest(b"" if sharing is None else sharing.base(index))

    def _fetch_all(self, actions: list[FetchBlob]) -> None:
        for action in actions:
            self._fetch(action)
        if self.slots is not None and self.slots.is_anything_waiting and not self.is_looking:
            self.is_looking = True
            self.later(1.0, self._look)

    def _look(self) -> None:
        assert self.slots is not None
        self.is_looking = False
        self._fetch_all(self.slots.look(self.world.now))

    def _fetch(self, action: FetchBlob) -> None:
        world, serial = self.world, self.fetches[action.blob]
        delay_s = world.fetch_s(world.network.blob_s) + world.hang_s(self, action)
        if action.within_s is not None:
            delay_s = min(delay_s, action.within_s)
        self.later(delay_s, lambda: self.fetched_blob(action, serial))

    def fetched_blob(self, action: FetchBlob, serial: int) -> None:
        if self.fetches.get(action.blob) != serial:
            return  # it was asked for elsewhere since
        self._end_fetch(action)
        if self.slots is not None:
            has_come = action.blob in self.disk.blobs
            self._fetch_all(self.slots.ended(action.blob, self.world.now, has_come=has_come))

    def _end_fetch(self, action: FetchBlob) -> None:
        world = self.world
        del self.fetches[action.blob]
        blob = self.disk.blobs.get(action.blob)
        is_here = blob is not None
        for source in action.sources:
            if blob is None and (node := world.reachable(self.peer, source)) is not None:
                is_given = not world.fails() and action.blob not in node.kept_back
                blob = node.disk.blobs.get(action.blob) if is_given else None
        if blob is None:
            self.feed(BlobMissing(action.blob))
        elif (reason := why_unfit(blob, action.part)) is not None and not (
            is_here and kind_of(blob) == "bad"
        ):  # our own
            self.feed(BlobRefused(action.blob, reason, action.part))
        else:
            if not is_here:
                self.disk.blobs[action.blob] = blob
                self.world.checks.fetched(self, action, blob)
            self.feed(BlobHeld(action.blob, len(blob), parts_of(blob), action.part))

    def _average(self, action: AverageSlice) -> None:
        """As a peer does: with what is on its disk alone."""
        blobs = self.disk.blobs
        tables = [blobs.get(entry.blob) for entry in action.entries]
        slices = [blobs.get(parts_of(table)[action.slice]) for table in tables if table is not None]
        base = blobs.get(Digest(action.base)) if action.base else b""
        if None in tables or None in slices or base is None:
            raise Violation(f"{self.peer} is to average a slice that it does not hold")
        if base and why_unfit(base, BlobPart("residual", action.slice)) is not None:
            self.feed(SliceAveraged(action.inputs, action.slice, None))
            return
        units = sorted(unit for each in slices if each is not None for unit in units_of(each))
        kind = "lie" if self.lies else "result"
        shown = [list(unit) for unit in units]
        result = canonical([kind, shown, action.slice, sha256(base), self.peer if self.lies else ""])
        residual = canonical(["residual", [], action.slice, sha256(result)])
        for blob in (result, residual):
            blobs[sha256(blob)] = blob
        outcome = SliceOutcome(sha256(result), len(result), action.base, sha256(residual))
        self.world.checks.averaged(self, action)
        self.feed(SliceAveraged(action.inputs, action.slice, outcome))

    def fetch_state(self, action: FetchState) -> None:
        """A donor gives what it has when asked: a snapshot, however long the transfer takes."""
        world = self.world
        found = self.disk.anchors.get(action.head) if not action.donors else None
        given_by: Node | None = None
        for donor in action.donors:
            node = world.reachable(self.peer, donor)
            given = node.gives(action.head) if node is not None else None
            if found is not None or given is None:
                continue
            if action.state_digest in (b"", given.digest) and not world.fails():
                found, given_by = given, node
        generation = given_by.generation if given_by else 0
        delay_s = world.fetch_s(world.network.state_s) if given_by else 0.1

        def done() -> None:
            if is_over:
                return
            cut = given_by and (
                given_by.generation != generation or not world.network.connected(self.peer, given_by.peer)
            )
            is_over.append(True)
            self.fetched_state(action, None if cut else found)

        def look() -> None:
            if is_over:
                return
            share = min(1.0, (world.now - began_s) / delay_s) if found is not None else 0.0
            if self.machine is not None and not self.machine.copying(action.head, share):
                is_over.append(True)
                self.fetched_state(action, None)
                return
            self.later(WANTED_S, look)

        is_over, began_s = list[bool](), world.now
        self.later(delay_s, done)
        if action.donors:
            self.later(WANTED_S, look)

    def fetched_state(self, action: FetchState, anchor: Anchor | None) -> None:
        if anchor is None or (self.machine is not None and not self.machine.is_wanted(action.head)):
            self.feed(StateMissing(action.head))
            return
        mine = {unit for unit in self.produced if unit in anchor.units}
        before = self.anchor.units & self.produced if self.anchor is not None else frozenset()
        self.orphaned |= before - mine
        if not action.keep_pseudo_gradient:
            self.orphaned |= self.pending - mine
            self.pending.clear()
        self.orphaned -= mine
        self.anchor, self.anchor_head = anchor, action.head
        self.disk.anchors[action.head] = anchor
        self.queue.clear()
        self.offered.clear()
        self.feed(StateInstalled(action.head, anchor.digest))
        if self.machine is not None:
            self.train_on()

    def _apply_next(self) -> None:
        if not self.applying and self.queue:
            self.applying = True
            self.later(self.world.rng.random() * MAX_APPLY_S, self._applied)

    def _applied(self) -> None:
        self.applying = False
        if not self.queue:
            return
        action = self.queue.popleft()
        certificate = action.certificate
        if self.anchor is None or self.anchor_head != certificate.parent:
            raise Violation(f"{self.peer} is to apply a certificate that does not follow its anchor")
        blobs = []
        for name in certificate.value.blobs:
            if name not in self.disk.blobs:
                if not self.world.is_honest(self.peer):  # alone, it certified what it never had
                    self.gone_for_good = True
                    self.crash()
                    return
                raise Violation(f"{self.peer} is to apply a certificate without holding {name.hex()[:8]}")
            blobs.append(self.disk.blobs[name])
        self.anchor = self.anchor.after(blobs)
        self.anchor_head = certificate.head
        if action.own is not None:
            self.pending -= self.offered
        self.offered = set()
        if self.world.drifts():
            self.anchor = Anchor(sha256(b"drifted", self.anchor.digest), self.anchor.units)
        if certificate.value.round % CHECKPOINT_EVERY == 0:
            self.disk.anchors[certificate.head] = self.anchor
        self._apply_next()
        self.feed(StateComputed(certificate.head, self.anchor.digest))
        if self.machine is not None:
            self.train_on()

    # ---- the toy trainer ----

    def train_on(self) -> None:
        rng = self.world.rng
        head = self.anchor_head
        self.later(ROUND_S * self.slowness * (0.8 + (MAX_TRAIN - 0.8) * rng.random()), lambda: self._close(head))

    def _close(self, head: Digest | None) -> None:
        machine = self.machine
        assert machine is not None
        if head != self.anchor_head or self.queue or machine.head != head:
            return
        self.make_units()
        if not machine.is_ready or machine.has_offered or machine.schedule.is_over or self.anchor is None:
            self.train_on()
            return
        slices: list[bytes] = []
        if machine.is_sliced:
            blob, slices = slices_of(self.pending, self.world.slices, self.offers_malformed)
        else:
            blob = blob_of(self.pending, self.offers_malformed)
        digest = sha256(blob)
        for each in (blob, *slices):
            self.disk.blobs[sha256(each)] = each
        self.offered = set(self.pending)
        report = Report(step_us=self.world.step_us)
        entry = Entry(self.peer, self.incarnation, digest, len(blob), 8, self.anchor.digest, report)
        self.feed(Closed(machine.head, entry, tuple(map(sha256, slices))))
        self._train_on_after_close()

    def _train_on_after_close(self) -> None:
        self.later(ROUND_S / 2, self.make_units)

    def make_units(self) -> None:
        for _ in range(1 + self.world.rng.randrange(2)):
            unit = (str(self.peer), self.incarnation, len(self.produced))
            self.produced.add(unit)
            self.pending.add(unit)


class OwnerNode:
    """The run's owner: a notary and its disk."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.peer = OWNER
        self.log = bytearray()
        self.notary: Notary | None = None
        self.generation = 0

    @property
    def is_up(self) -> bool:
        return self.notary is not None

    def start(self) -> None:
        world = self.world
        loaded = load_log(bytes(self.log), GENESIS)
        del self.log[loaded.valid_bytes :]
        self.generation += 1
        terms = NotaryTerms(0, world.genesis(), world.start_peers, world.max_peers, world.plans, every=VOUCHED_EVERY)
        self.notary = Notary(
            terms, sign=sign_as(OWNER), verify=verify, timing=world.timing, rng=random.Random(world.rng.random()),
            now=world.now, wall_ms=int(1000 * world.now), durable=loaded.durable, patience_s=20.0,
        )  # fmt: skip
        for peer in sorted(world.nodes):
            self.later(world.rng.random(), partial(self.feed, PeerFound(peer)))
        self.later(0.0, self._tick)

    def crash(self) -> None:
        self.notary = None
        self.generation += 1
        self.world.trace("the owner crashed")

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        generation = self.generation

        def alive_act() -> None:
            if self.generation == generation and self.notary is not None:
                act()

        self.world.at(self.world.now + delay_s, alive_act)

    def _tick(self) -> None:
        assert self.notary is not None
        self.feed(Tick())
        self.later(max(self.notary.deadline() - self.world.now, 0.01), self._tick)

    def feed(self, happened: Input) -> None:
        assert self.notary is not None
        assert isinstance(happened, Tick | PeerFound | PeerRefused | Received)
        for action in self.notary.handle(happened, self.world.now):
            match action:
                case Send(to, message):
                    self.world.deliver(OWNER, to, message)
                case Persist(durable):
                    for certificate in durable.appended:
                        self.world.checks.certified(certificate)
                    if durable.checkpoint is not None:
                        self.world.checks.vouched(durable.checkpoint)
                    self.log += encode_record(durable)
                case Note(event):
                    self.world.trace(f"owner: {event}")
                case _:
                    raise AssertionError(action)


class Restless:
    """A planner that wishes something else all the time, and at every peer: what counts is what was certified. Those that see
    the same chain come within a step of each other, as peers of a real run do; nobody follows another (stalling.py)."""

    reason = ""
    is_exact = False

    def __init__(self, peer: PeerId, bounds: PlanBounds) -> None:
        self._peer = peer
        self._bounds = bounds

    def observe(self, certificate: Certificate, bounds: PlanBounds | None = None) -> None:
        """Whatever was certified, it does not settle."""

    def next(self, before: Plan) -> Plan:
        common, wish = (
            sha256(str(before.first_step).encode()),
            sha256(self._peer.encode(), str(before.first_step).encode()),
        )
        return self._bounds.after(
            before, codec=("fp16", "int8")[wish[0] % 2], rank=(64 + common[1] % 64) * (1 + wish[1] % 2),
            inner_steps=PLAN.inner_steps * (1 + common[2] % 2) * (1 + wish[2] % 2),
        )  # fmt: skip


class World(Clockwork):
    """Time, the network, the peers and the checks."""

    def __init__(self, seed: int, num_peers: int, *, machine: type[RoundMachine] = RoundMachine) -> None:
        super().__init__()
        self.seed = seed
        self.rng = random.Random(seed)
        self.network = Network()
        self.timing = TIMING
        self.start_peers = 1
        self.max_peers = 16
        self.total_rounds: int | None = None  # at most: rounds may grow
        self.drift_rate = 0.0
        self.faulty = True  # the scenario's faults stop when this is cleared
        self.hindered_s = 0.0  # that healing may take longer
        self.state_bytes = 0  # as the peers know it
        self.step_us = 0  # that an inner step takes, as all report; 0: nobody measured it
        self.at_least = 1.0  # of the rounds that quiet should bring
        self.encode_messages = False
        self.average_s = MAX_APPLY_S  # that averaging a slice takes at most
        self.slices = 0  # in which contributions are averaged; 0: all to all
        self.has_slots = False  # things are fetched a few at once, as a peer does
        self.is_crowded = False  # machines are busy: inputs wait together, and ticks come late
        self._crowd = random.Random(seed)  # beside rng: a seed's faults are the same in a crowd
        self._machine = machine
        self.checks = Invariants(GENESIS, PLAN.next(), verify, lambda: self.plans, self.is_honest, lambda: self.now)
        self.owner: OwnerNode | None = None
        self.owner_is_gone = False
        self.seats = SeatTerms()
        self.authority: Authority | None = None
        self.nodes: dict[PeerId, Node] = {}
        for number in range(num_peers):
            self.add_node(PeerId(f"p{number:02d}"))

    @property
    def plans(self) -> PlanBounds:
        total = self.total_rounds and self.total_rounds * PLAN.inner_steps
        return PlanBounds(("fp16", "int8", "topk"), 255, PLAN.inner_steps, 4 * PLAN.inner_steps, total)

    def add_node(self, peer: PeerId) -> Node:
        slowness = 1.0 if self.rng.random() < 0.8 else 1.0 + self.rng.random()
        node = self.nodes[peer] = Node(self, peer, slowness)
        return node

    def are_more_waiting(self) -> bool:
        """Whether another input waits behind one, as a busy peer's driver finds."""
        return self.is_crowded and self._crowd.random() < CROWDED

    def late_s(self) -> float:
        """By how much a tick is late."""
        return MAX_LATE_S * self._crowd.random() if self.is_crowded else 0.0

    def machine_type(self, peer: PeerId) -> type[RoundMachine]:
        return self._machine

    def hang_s(self, node: Node, action: FetchBlob) -> float:
        """How much longer a fetch takes than the network would have it."""
        return 0.0

    # ---- the network ----

    def deliver(self, sender: PeerId, to: PeerId, message: Message) -> None:
        network, rng = self.network, self.rng
        node = self._node(to)
        if node is None:
            return  # a name without a peer, which hostile ones make up
        if not network.connected(sender, to):
            origin = self.nodes.get(sender)
            if origin is not None and frozenset((sender, to)) in network.gaps:
                origin.later(UNREACHED_S, lambda: origin.feed(PeerUnreached(to)))
            return
        delay_s = network.latency_s + network.spread_s * rng.random() ** 3
        if not node.is_up:
            source = self._node(sender)
            assert source is not None
            source.later(delay_s, lambda: source.feed(PeerRefused(to)))
            return
        if rng.random() < network.loss:
            return
        if network.vote_loss and isinstance(message, _VOTES) and rng.random() < network.vote_loss:
            return
        if self.encode_messages:
            message = decode_message(encode_message(message), sender)
        received = Received(sender, message)
        node.later(delay_s, lambda: node.feed(received))
        if network.duplicates and rng.random() < network.duplicates:
            node.later(delay_s * (1 + 4 * rng.random()), lambda: node.feed(received))

    def _node(self, peer: PeerId) -> "Node | OwnerNode | None":
        return self.owner if peer == OWNER else self.nodes.get(peer)

    def is_honest(self, peer: PeerId) -> bool:
        node = self.nodes.get(peer)
        return peer == OWNER or (node is not None and not node.is_hostile)

    def be_owned(self) -> None:
        """The run has an owner, who is there from now on."""
        self.owner = OwnerNode(self)
        self.checks.begin(self.genesis())

    def seat(self, terms: SeatTerms) -> None:
        """Newcomers earn their votes."""
        self.seats = terms
        self.checks.begin(self.genesis())

    def genesis(self) -> Place:
        owner = OWNER if self.owner is not None else None
        return Place.genesis(0, GENESIS, PLAN.next(), owner, self.seats, self.authority, self.slices)

    def be_sliced(self, count: int) -> None:
        """The run averages in slices."""
        self.slices = count
        self.checks.begin(self.genesis())

    def be_directed(self) -> None:
        """The owner's directives apply, whether or not it is there."""
        self.authority = Authority(OWNER, RUN, verify)
        self.checks.begin(self.genesis())

    def reachable(self, peer: PeerId, source: PeerId) -> Node | None:
        node = self.nodes.get(source)
        return node if node is not None and node.is_up and self.network.connected(peer, source) else None

    def fetch_s(self, typical_s: float) -> float:
        return typical_s * (0.3 + (MAX_FETCH - 0.3) * self.rng.random())

    def fails(self) -> bool:
        return self.rng.random() < self.network.fetch_failures

    def drifts(self) -> bool:
        return self.drift_rate > 0 and self.rng.random() < self.drift_rate

    # ---- what the scenario looks at ----

    def up(self) -> list[Node]:
        """The honest ones that are there."""
        return [node for node in self.nodes.values() if node.is_up and not node.is_hostile]

    @property
    def longest_chain(self) -> int:
        return self.plans.longest_chain or 10**6

    def is_whole(self, roster: Iterable[PeerId]) -> bool:
        """Whether a roster is the one that everything comes to."""
        return set(roster) == {node.peer for node in self.up()}

    def leave(self, node: Node) -> None:
        node.gone_for_good = True
        if not node.is_up:
            return
        node.feed(Leaving())
        node.machine = None
        node.generation += 1

    def shares_one_head(self) -> bool:
        nodes = self.up()
        first = nodes[0].machine
        assert first is not None
        return all(
            node.machine is not None and node.machine.head == first.head and node.anchor_head == first.head
            for node in nodes
        )


def certificates_of(node: Node) -> list[Certificate]:
    assert node.machine is not None
    return list(node.machine.chain)


def _shown(thing: object) -> str:
    match thing:
        case Received(sender, message):
            return f"{sender}: {_message(message)}"
        case Send(to, message):
            return f"{to}: {_message(message)}"
        case _:
            return str(thing)[:160]


def _message(message: Message) -> str:
    shown = {name: getattr(message, name) for name in message.__struct_fields__ if name not in ("stage",)}
    parts = []
    for name, item in shown.items():
        text = item.hex()[:6] if isinstance(item, bytes) else str(item)
        parts.append(f"{name}={text[:120]}")
    return f"{type(message).__name__}({', '.join(parts)})"
