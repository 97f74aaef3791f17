"""Real round machines, each with a real outer loop (peer/training/outer_loop.py) and a real round book over a toy trainer.

world.py's peers close and merge by a rule of its own. Here the very object that a peer runs decides: its certificates reach it
later than the round machine (the journal is flushed first), its closes and merges take time in one queue, as in the trainer's
threads, and a volunteer pauses now and then. What a micro-batch makes is a unit of pseudo-gradient, so what is merged twice, lost or
closed on the wrong anchor shows in I4 and I5. Beside those:

O1 one piece of work at a time, none while a state is adopted. O2 a contribution is closed on the anchor that its base names.
O3 phases move as MOVES says. O4 training that may go on is not held. O5 the end is said at the run's last head and nowhere else.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from dilocox_peer.config import preset
from dilocox_peer.peer.planning.timetable import Timetable
from dilocox_peer.peer.rounds.contract import Action, Apply, FetchState, Input, StateInstalled, StateMissing
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.training.book import RoundBook
from dilocox_peer.peer.training.outer_contract import (
    AdoptionBegun,
    AdoptionOver,
    AnchorMoved,
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
    OuterAction,
    OuterInput,
    Pulse,
    Readings,
    RoundEncoded,
    StateAdopted,
    ToListener,
    ToRounds,
    WithdrawOffer,
)
from dilocox_peer.peer.training.outer_loop import MOVES, OuterLoop, OuterPhase
from dilocox_peer.types import PeerId, sha256
from dilocox_peer.wire.chain import Certificate

from .invariants import Violation
from .world import (
    CHECKPOINT_EVERY,
    MAX_APPLY_S,
    ROUND_S,
    Anchor,
    Node,
    Unit,
    World,
    blob_of,
)

OVERLAPS = ("arrival", "arrival", "one-step", "none")
PULSE_S = 0.5  # the shell's is shorter; it changes nothing but how many events there are
MAX_FLUSH_S = 0.2  # of the journal: a certificate reaches the outer loop after it, and what that says the round machine
GLANCE_S = 0.05  # changes of so long are looked at together
UNIT_BATCHES = 4  # micro-batches to a unit of pseudo-gradient, done together
MAX_ENCODE_S = 6.0  # of a disk that is slow for once

OuterType = type[OuterLoop]


@dataclass
class _Call:
    """One of the trainer's: what it does at once when its turn comes, and at its end."""

    seconds: float
    begin: Callable[[], None]
    end: Callable[[], None]


class OuterNode(Node):
    """One peer: round machine, outer loop, book, and a toy trainer that carries calls out in order."""

    world: "OuterWorld"

    def start(self, friends: Iterable[PeerId]) -> None:
        self.outer: OuterLoop | None = None  # while the round machine starts
        super().start(friends)
        assert self.machine is not None
        world = self.world
        self.timetable = Timetable(world.manifest)
        self.book = RoundBook(world.manifest, lambda: world.now, self.timetable)
        self.book.begin(self.machine.round)
        self.book.hold(True, "rounds")
        self.calls: deque[_Call] = deque()
        self.is_calling = False
        self.applied_by = 0.0  # when the last certificate reaches the outer loop
        self.told_by = 0.0  # when the round machine hears of the last that it was told
        self.base_of_work: bytes | None = None
        self.at_work = False
        self.adopting = 0
        self.is_paused = False
        self.is_over = False
        self.glances = False
        self.taken: dict[bytes, set[Unit]] = {}
        self.outer = world.outer_type(
            me=self.peer, incarnation=self.incarnation, manifest=world.manifest, rounds=self.machine,
            timetable=self.timetable, raw_bytes=1, now=world.now,
        )  # fmt: skip
        self.later(0.0, lambda: self.tell(Glance()))
        self.later(PULSE_S * world.rng.random(), self._pulse)
        self.later(self._batch_s(), self._train)

    # ---- the shell of the round machine ----

    def feed(self, happened: Input) -> None:
        super().feed(happened)
        if self.machine is not None and self.outer is not None and not self.glances:
            self.glances = True
            self.later(GLANCE_S, self._glance)

    def _glance(self) -> None:
        self.glances = False
        self.tell(Glance())

    def carry_out(self, action: Action) -> None:
        if isinstance(action, Apply):
            # In order, however long each flush takes.
            self.applied_by = max(self.applied_by, self.world.now + MAX_FLUSH_S * self.world.rng.random() ** 3)
            self.later(self.applied_by - self.world.now, partial(self.tell, action))
            return
        super().carry_out(action)

    def fetch_state(self, action: FetchState) -> None:
        self.adopting += 1
        self.tell(AdoptionBegun())
        super().fetch_state(action)

    def fetched_state(self, action: FetchState, anchor: Anchor | None) -> None:
        assert self.machine is not None
        if anchor is None or not self.machine.is_wanted(action.head):
            self.feed(StateMissing(action.head))
            self._end_adoption()
            return
        assert self.outer is not None
        settles_ours = self.outer.waits_for_ours
        self.tell(BranchDropped())
        keep = action.keep_pseudo_gradient and not settles_ours

        def install() -> None:
            assert self.anchor is None or self.anchor_head is not None
            mine = {unit for unit in self.produced if unit in anchor.units}
            before = self.anchor.units & self.produced if self.anchor is not None else frozenset()
            self.orphaned |= before - mine
            if not keep:
                self.orphaned |= self.pending - mine
                self.pending.clear()
                self.book.restart(action.round)
            self.pending -= mine
            self.orphaned -= mine
            self.anchor, self.anchor_head = anchor, action.head
            self.disk.anchors[action.head] = anchor
            self.offered.clear()
            self.book.move(action.round)
            self.tell(StateAdopted(action.head, action.round))
            self.feed(StateInstalled(action.head, anchor.digest))
            self._end_adoption()

        self._call(_Call(0.05, lambda: None, install))

    def _end_adoption(self) -> None:
        if self.machine is not None:
            self.adopting -= 1
            self.tell(AdoptionOver())

    # ---- the shell of the outer loop ----

    def tell(self, happened: OuterInput) -> None:
        if self.is_over or self.machine is None or self.outer is None:
            return
        world, before = self.world, self.outer.phase
        if world.tracing and not isinstance(happened, Pulse | Glance):
            world.trace(f"{self.peer} <= {str(happened)[:120]}")
        actions = self.outer.handle(happened, world.now, self._readings())
        after = self.outer.phase
        if after is not before:
            world.moves[before, after] += 1
            if after not in MOVES[before]:
                raise Violation(f"O3: {self.peer} moves from {before.value} to {after.value}")
        for action in actions:
            if world.tracing:
                world.trace(f"{self.peer} => {str(action)[:120]}")
            self._do(action)
            if self.machine is None:
                return

    def _readings(self) -> Readings:
        assert self.outer is not None
        lost = self.outer.lost
        return Readings(
            self.book.round, self.book.in_round, self.book.completed, is_paused=self.is_paused, uplink_bps=0.0, bytes_sent=0,
            has_lost_back=lost is not None and lost in self.disk.blobs,
        )  # fmt: skip

    def _do(self, action: OuterAction) -> None:
        assert self.machine is not None
        match action:
            case HoldTraining(hold):
                self._call(_Call(0.0, lambda: None, lambda: self.book.hold(hold, "rounds")))
            case CloseRound() | WithdrawOffer() | LoadContributions() | MergeRound():
                if self.at_work:
                    raise Violation(f"O1: {self.peer} has two pieces of work out")
                if self.adopting and isinstance(action, CloseRound):
                    raise Violation(f"O1: {self.peer} closes a round while it adopts a state")
                self.at_work = True
                self._work(action)
            case KeepState():
                assert self.anchor is not None
                assert self.anchor_head is not None
                if self.world.is_kept(self.book.certified):
                    self.disk.anchors[self.anchor_head] = self.anchor
            case ToRounds(told):
                self.told_by = max(self.told_by, self.world.now + MAX_FLUSH_S * self.world.rng.random() ** 3)
                self.later(self.told_by - self.world.now, partial(self.feed, told))
            case ToListener():
                pass
            case EndRun():
                if not self.machine.schedule.is_over or self.anchor_head != self.machine.head:
                    raise Violation(f"O5: {self.peer} ends at round {self.book.certified}, not at the run's last head")
                self.is_over = True

    def _done(self, happened: OuterInput) -> None:
        self.at_work = False
        self.tell(happened)

    def _work(self, action: OuterAction) -> None:
        rng = self.world.rng
        match action:
            case CloseRound():
                assert self.machine is not None
                base, taken = self.machine.head, dict[str, Any]()

                def snapshot() -> None:
                    if self.anchor is None:
                        raise Violation(f"O2: {self.peer} closes a round without an anchor")
                    if self.anchor_head != base and self.machine is not None and self.machine.head == base:
                        raise Violation(f"O2: {self.peer} closes a round of another anchor than its base")
                    self.make_units()
                    try:
                        closed = self.book.close(None)  # type: ignore[arg-type]  # it only passes the parameters on
                    except RuntimeError as error:
                        raise Violation(f"O1: {self.peer}: {error}") from None
                    taken.update(weight=closed.new_micro_batches, units=set(self.pending))

                def encoded() -> None:
                    blob = blob_of(taken["units"], self.offers_malformed)
                    digest = sha256(blob)
                    self.disk.blobs[digest] = blob
                    self.offered = taken["units"]
                    self._done(RoundEncoded(digest, len(blob), 1, max(1, taken["weight"]), 1.0, 0.0))

                longest = MAX_ENCODE_S if self.world.faulty and rng.random() < 0.1 else MAX_APPLY_S
                self._call(_Call(longest * rng.random(), snapshot, encoded))
            case WithdrawOffer(forget):

                def back() -> None:
                    self.book.move(self.book.certified)
                    self.offered = set()
                    for name in forget:
                        self.disk.blobs.pop(name, None)
                    self._done(OfferBack())

                self._call(_Call(0.02, lambda: None, back))
            case LoadContributions(certificate):
                self.later(0.05 * rng.random(), partial(self._load, certificate))
            case MergeRound(certificate, own):
                self._call(_Call(MAX_APPLY_S * rng.random(), lambda: None, partial(self._merge, certificate, own)))
            case _:
                raise AssertionError(action)

    def _load(self, certificate: Certificate) -> None:
        for entry in certificate.value.entries:
            if entry.blob not in self.disk.blobs:
                self._done(ContributionsLoaded(entry.blob))
                return
        self._done(ContributionsLoaded(None))

    def _merge(self, certificate: Certificate, own: bool) -> None:
        if self.anchor is None or self.anchor_head != certificate.parent:
            raise Violation(f"O2: {self.peer} merges a certificate that does not follow its anchor")
        blobs = [self.disk.blobs[entry.blob] for entry in certificate.value.entries]
        self.anchor, self.anchor_head = self.anchor.after(blobs), certificate.head
        if own:
            self.pending -= self.offered
        self.offered = set()
        if self.world.drifts():
            self.anchor = Anchor(sha256(b"drifted", self.anchor.digest), self.anchor.units)
        self.book.move(certificate.value.round)
        ones = (1.0,) * len(blobs)
        self._done(AnchorMoved(self.anchor.digest, ones, ones, 0))

    # ---- the toy trainer ----

    def _call(self, call: _Call) -> None:
        self.calls.append(call)
        self._next_call()

    def _next_call(self) -> None:
        if self.is_calling or not self.calls:
            return
        call, self.is_calling = self.calls.popleft(), True
        call.begin()

        def end() -> None:
            self.is_calling = False
            call.end()
            if self.machine is not None:
                self._next_call()

        self.later(call.seconds, end)

    def train_on(self) -> None:
        """Not by world.py's rule."""

    def _batch_s(self) -> float:
        share = self.timetable.share(self.book.round)
        return ROUND_S * self.slowness * (0.9 + 0.2 * self.world.rng.random()) / share

    def _train(self) -> None:
        if self.book.may_train and not self.is_paused and self.anchor is not None:
            for _ in range(UNIT_BATCHES):
                self.book.done(1.0, 0.0)
            self.make_units()
        self.later(UNIT_BATCHES * self._batch_s(), self._train)

    def make_units(self) -> None:
        unit = (str(self.peer), self.incarnation, len(self.produced))
        self.produced.add(unit)
        self.pending.add(unit)

    def _pulse(self) -> None:
        self.tell(Pulse())
        if self.machine is None:
            return
        machine, outer = self.machine, self.outer
        assert outer is not None
        is_free = outer.phase is OuterPhase.IDLE and not self.calls and not self.is_calling and not self.is_over
        if is_free and self.book.held_by and machine.may_train and self.world.overlap == "arrival":
            last = machine.schedule.last_round
            if last is None or self.book.round <= last:
                raise Violation(f"O4: {self.peer} holds training in round {self.book.round} without a reason")
        if self.world.faulty and self.world.rng.random() < self.world.pause_rate:
            self.is_paused = not self.is_paused
        elif not self.world.faulty:
            self.is_paused = False
        self.later(PULSE_S, self._pulse)


class OuterWorld(World):
    """World with outer loops. overlap: of the run; pause_rate: how often a volunteer changes its mind, a pulse."""

    def __init__(
        self, seed: int, num_peers: int, *, machine: type[RoundMachine] = RoundMachine, outer: OuterType = OuterLoop
    ) -> None:
        self.outer_type = outer
        self.moves: Counter[tuple[OuterPhase, OuterPhase]] = Counter()
        super().__init__(seed, num_peers, machine=machine)
        self.overlap = OVERLAPS[seed % len(OVERLAPS)]
        self.pause_rate = (0.0, 0.0, 0.02)[seed % 3]
        # What the shells of this world add to a round. With one-step a peer holds the state that it is at for the moment between a merge and
        # the next certificate alone, which is when it can come into a roster.
        self.hindered_s = 40.0 if self.overlap == "one-step" else 2.0
        rounds = {"inner_steps": 8, "min_inner_steps": 8, "max_inner_steps": 32, "total": 10_000}
        self.manifest = preset(
            "tiny",
            rounds=rounds,
            outer={"overlap": self.overlap},
            inner={"accumulate": 1},
            compression={"codec": "fp16"},
        )

    @property
    def total_rounds(self) -> int | None:
        """So many that nobody is through before the faults stop: a peer that ends leaves, and what becomes of two branches of
        which one has ended is the forks' affair."""
        return self._rounds_in_all

    @total_rounds.setter
    def total_rounds(self, rounds: int | None) -> None:
        self._rounds_in_all = None if rounds is None else rounds + 12

    def add_node(self, peer: PeerId) -> Node:
        slowness = 1.0 if self.rng.random() < 0.8 else 1.0 + self.rng.random()
        node = self.nodes[peer] = OuterNode(self, peer, slowness)
        return node

    def is_kept(self, round_number: int) -> bool:
        return round_number % CHECKPOINT_EVERY == 0

    def shares_one_head(self) -> bool:
        if self.overlap != "one-step":
            return super().shares_one_head()
        nodes = self.up()  # what is certified is merged a round later
        first = nodes[0].machine
        assert first is not None
        return all(node.machine is not None and node.machine.head == first.head for node in nodes)
