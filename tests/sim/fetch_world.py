"""A seeded world of one real Fetch and its donors: honest, slow, dying, flaky, mute, and liars of five kinds.

Bytes are not real: of each the world knows whether it is true, or of which false outline; so chunks of their real size cost
nothing. The promises of store/fetch.py are checked after every action, by their numbers.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf

from dilocox_peer.store.actions import (
    Accused,
    AskOutline,
    AskRange,
    CheckChunk,
    CheckWhole,
    FetchAction,
    Finished,
    GaveUp,
    Shorten,
)
from dilocox_peer.store.fetch import MAX_FAILURES_IN_ALL, Fetch
from dilocox_peer.store.outline import CHUNK_BYTES, Outline
from dilocox_peer.types import Digest, PeerId, sha256
from tests.sim.clockwork import Clockwork

from .invariants import Violation

RELIABLE = {"honest", "slow"}
HONEST = RELIABLE | {"dies", "flaky", "lacks", "silent", "mute", "fades"}  # what they send is true
TRICKLING = {"trickles", "hollow"}  # the second with an outline of its own that is false
OUTLINED = {"false outline", "hollow", "paces"}  # falsely; the last sends just so much that it is not called stuck
KINDS = (
    "honest", "honest", "slow", "dies", "flaky", "lacks", "silent", "mute", "false outline", "false chunk", "mixes", "trickles",
)  # fmt: skip
SILENT_S = 10.0  # until the caller calls a donor silent
GIVEN_UP_S = 300.0  # by the caller
PACED_S = 32.0  # by one with a false outline whose chunks come slowly, at most, and as much of the work so far
HELD_UP_S = 10.0  # by one that is mute or trickles, at most
FADES_BYTES = CHUNK_BYTES + 1  # of one that is as fast as it can be for so long, and then trickles
FEW, CROWD_S = 6, 1.5  # by each of a crowd of them beyond so many, at most
CROWDED = 0.05  # of the seeds: all that are in them come after a crowd
PACE_BYTES = CHUNK_BYTES // 3 + 1  # each nine seconds: a chunk in 27
BURST_BYTES = 64 * 1024  # of what is false, at once; then it trickles
NEVER_S = 20_000.0  # or twice what the best line of those that give takes alone: some carry 430 bytes a second
TRUE = 0


def digest_of(tag: int, index: int) -> Digest:
    """Of a chunk whose bytes are all of one kind: TRUE, or of a false outline."""
    return sha256(f"{tag} {index}".encode())


@dataclass
class Donor:
    """outline: that it claims, tag: whose bytes it has where that is not the true one. rate: bytes a second."""

    kind: str
    rate: float
    latency_s: float
    outline: Outline
    tag: int = TRUE
    dies_at: float = float("inf")
    range: list[int] = field(default_factory=list)  # at, stop; empty: none
    turn: int = 0  # of its ranges: what is under way of an older one is nothing any more
    left: int = 0  # of this range it still sends, a flaky one
    given: int = 0  # bytes, of all ranges
    first: int = 0  # byte of this range
    is_mute: bool = False  # has said nothing since it was asked

    def is_there(self, now: float) -> bool:
        return now < self.dies_at


@dataclass(frozen=True)
class Outcome:
    finished: bool
    accused: tuple[PeerId, ...]
    received: int
    seconds: float
    num_events: int


class FetchWorld(Clockwork):
    """Made of a seed; `play` it once."""

    def __init__(
        self, seed: int, machine: Callable[..., Fetch] = Fetch, trace: Callable[[str], None] | None = None
    ) -> None:
        super().__init__(trace)
        rng = self._rng = random.Random(seed)
        self._seed = seed
        self.size = rng.randrange(2 * CHUNK_BYTES, 40 * CHUNK_BYTES)
        self.truth = self._outline(self.size, set(), TRUE)
        is_root = rng.random() < 0.5
        kinds = rng.choice(
            (KINDS, KINDS[:8], ("honest", "dies", "flaky", "slow"), ("honest", "mute"), ("honest", "trickles"),
             ("honest", "hollow", "hollow"), ("honest", "paces"))
        )  # fmt: skip
        self.donors: dict[PeerId, Donor] = {}
        for number in range(rng.randint(1, 6)):
            kind = rng.choice(kinds)
            rate = rng.choice((2e6, 2e7, 1e8)) * rng.uniform(0.5, 1.5) / (50 if kind == "slow" else 1)
            donor = Donor(kind, rate, rng.uniform(0.001, 0.3), self.truth)
            if kind in OUTLINED:
                donor.tag = rng.randint(1, 2) if kind == "false outline" else 3 + number  # of one tag: of one mind
                false = random.Random(f"{seed} {donor.tag}")
                size = self.size if false.random() < 0.7 else false.randrange(2 * CHUNK_BYTES, 40 * CHUNK_BYTES)
                indices = {index for index in range(70) if false.random() < 0.5} | {0}
                donor.outline = self._outline(size, indices, donor.tag)
            if kind == "dies":
                donor.dies_at = rng.uniform(0, 2 * self.size / donor.rate)
            self.donors[PeerId(f"{kind} {number}")] = donor
        drawn = random.Random(f"crowd {seed}")
        if drawn.random() < CROWDED:
            kind, crowd = drawn.choice(("trickles", "mute", "silent", "fades")), range(drawn.randint(20, 60))
            first = {
                PeerId(f"{kind} of a crowd {each}"): Donor(kind, 1e6, drawn.uniform(0.001, 0.3), self.truth)
                for each in crowd
            }
            for donor in self.donors.values():  # such a crowd pays where lines are slow
                donor.rate /= drawn.choice((1, 50))
            self.donors = first | self.donors
        resumed = None
        if rng.random() < 0.3:
            held = frozenset(index for index in range(len(self.truth.chunks)) if rng.random() < 0.4)
            resumed = self.truth, held
        self.bytes_of = [[TRUE if resumed and index in resumed[1] else -1] for index in range(70)]  # tags in each chunk
        self.held_at_first = sum(stop - start for start, stop in map(self.truth.span, resumed[1])) if resumed else 0
        name = self.truth.root if is_root else sha256(b"the whole")
        self.fetch = machine(name, list(self.donors), is_root=is_root, resumed=resumed)
        self.received, self.result, self.accused = 0, "", list[PeerId]()

    def _outline(self, size: int, false: set[int], tag: int) -> Outline:
        count = -(-size // CHUNK_BYTES)
        return Outline(size, tuple(digest_of(tag if index in false else TRUE, index) for index in range(count)))

    def play(self) -> Outcome:
        self.at(0.0, lambda: self._carry_out(self.fetch.begin(self.now)))
        self.at(0.25, self._tick)
        rates = [donor.rate for donor in self.donors.values() if donor.kind in RELIABLE]
        never_s = max(NEVER_S, 2 * self.size / max(rates, default=inf))
        self.run(never_s if self._must_end else GIVEN_UP_S, stop=lambda: bool(self.result))
        self._check_end()
        return Outcome(self.result == "finished", tuple(self.accused), self.received, self.now, self.num_events)

    @property
    def _must_end(self) -> bool:
        """Else it ends at its caller's deadline, with nobody there but who trickles and who may fail."""
        kinds = {donor.kind for donor in self.donors.values()}
        return bool(RELIABLE & kinds) or not (TRICKLING | {"fades"}) & kinds

    def _tick(self) -> None:
        if self.fetch.deadline() <= self.now:
            self._carry_out(self.fetch.tick(self.now))
        self.at(self.now + 0.25, self._tick)

    # ---- what the fetch wants ----

    def _carry_out(self, actions: list[FetchAction]) -> None:
        for action in actions:
            self.trace(str(action))
            self._check(not self.result, "5: something comes after the end")
            match action:
                case AskOutline(peer):
                    self._ask_outline(peer)
                case AskRange(peer, start, stop):
                    self._ask_range(peer, start, stop)
                case Shorten(peer, stop):
                    donor = self.donors[peer]
                    self._check(bool(donor.range) and stop <= donor.range[1], "2: shortened to more")
                    donor.range[1] = stop
                    if donor.range[0] >= stop:
                        donor.range, donor.turn = [], donor.turn + 1
                case CheckChunk():
                    self.at(self.now + self._rng.uniform(0, 0.01), lambda check=action: self._checked(check))  # type: ignore[misc]
                case CheckWhole():
                    is_whole = self._is_whole()
                    wait_s = self._rng.choice((0.01, 0.5, 4.0))  # a large thing takes its time; much happens meanwhile
                    self.at(self.now + wait_s, partial(self._check_whole, action, is_whole))
                case Accused(peer, reason):
                    self._check(self.donors[peer].kind not in HONEST, f"3: {peer} is accused: {reason}")
                    self._check(peer not in self.accused, "3: accused twice")
                    self.accused.append(peer)
                case Finished():
                    self._check(self._is_whole(), "1: finished with bytes that are not true")
                    self.result = "finished"
                case GaveUp():
                    self.result = "gave up"

    def _ask_outline(self, peer: PeerId) -> None:
        self._check(peer not in self.accused, "4: asks who was accused")
        donor = self.donors[peer]

        def answer() -> None:
            if donor.kind == "lacks":
                self._carry_out(self.fetch.failed(peer, "lacks it", self.now, for_good=True))
            elif donor.kind == "silent" or not donor.is_there(self.now):
                self._carry_out(self.fetch.failed(peer, "silent", self.now))
            else:
                self._carry_out(self.fetch.outlined(peer, donor.outline, self.now))

        self.at(self.now + (SILENT_S if donor.kind == "silent" else 2 * donor.latency_s), answer)

    def _ask_range(self, peer: PeerId, start: int, stop: int) -> None:
        donor = self.donors[peer]
        self._check(peer not in self.accused, "4: asks who was accused")
        self._check(not donor.range, f"2: {peer} has a range already")
        self._check(start < stop <= donor.outline.size_bytes, "2: asks for what there is not")
        for other in self.donors.values():
            if other.range:
                self._check(
                    stop <= other.range[0] or start >= other.range[1], "2: a byte that is on its way is asked for"
                )
        donor.range, donor.turn, donor.first, donor.is_mute = [start, stop], donor.turn + 1, start, False
        donor.left = self._rng.randrange(stop - start + 1) if donor.kind in ("flaky", "mixes") else stop - start
        self.at(self.now + 2 * donor.latency_s, lambda turn=donor.turn: self._piece(peer, turn))  # type: ignore[misc]

    def _piece(self, peer: PeerId, turn: int) -> None:
        donor = self.donors[peer]
        if turn != donor.turn or self.result:
            return
        if not donor.is_there(self.now) or donor.left <= 0:
            donor.range, donor.turn = [], donor.turn + 1
            self._carry_out(self.fetch.failed(peer, "broke off", self.now))
            return
        if donor.kind == "mute":
            if donor.is_mute:
                donor.range, donor.turn, donor.is_mute = [], donor.turn + 1, False
                self._carry_out(self.fetch.failed(peer, "silent", self.now))
            else:
                donor.is_mute = True
                self.at(self.now + SILENT_S, lambda: self._piece(peer, turn))
            return
        (at, stop), has_faded = donor.range, False
        if donor.kind == "paces":
            num_bytes = min(PACE_BYTES, stop - at)
        elif has_faded := donor.kind == "fades" and donor.given >= FADES_BYTES:
            num_bytes = 1
        elif donor.kind in TRICKLING:  # whoever asks is content with a byte before it is silent for too long
            num_bytes = min(1 if at > donor.first else BURST_BYTES, stop - at)
        else:
            num_bytes = min(self._rng.randint(1, CHUNK_BYTES), 1 + int(donor.rate / 2), stop - at, donor.left)
        self._put(donor, at, num_bytes)
        donor.left -= num_bytes
        donor.given += num_bytes
        donor.range[0] += num_bytes
        self.received += num_bytes
        if donor.range[0] == stop:
            donor.range, donor.turn = [], donor.turn + 1
        actions = self.fetch.received(peer, num_bytes, self.now)
        turn = donor.turn
        self._carry_out(actions)
        if donor.turn == turn and donor.range:
            wait_s = 0.9 * SILENT_S if has_faded or donor.kind in TRICKLING | {"paces"} else num_bytes / donor.rate
            self.at(self.now + wait_s, lambda: self._piece(peer, turn))

    def _put(self, donor: Donor, at: int, num_bytes: int) -> None:
        end = at + num_bytes
        while at < end:
            index = at // CHUNK_BYTES
            start, stop = index * CHUNK_BYTES, min((index + 1) * CHUNK_BYTES, end)
            is_false = (
                donor.outline.chunks[index] != self.truth.chunks[index] if index < len(self.truth.chunks) else True
            )
            tag = donor.tag if is_false else TRUE
            if donor.kind in TRICKLING or (donor.kind in ("false chunk", "mixes") and self._rng.random() < 0.2):
                tag = 99
            if at == start:
                self.bytes_of[index] = []
            self.bytes_of[index].append(tag)
            at = stop

    def _checked(self, check: CheckChunk) -> None:
        tags = set(self.bytes_of[check.index])
        tag = tags.pop() if len(tags) == 1 else 98
        self._carry_out(self.fetch.checked(check, digest_of(tag, check.index), self.now))

    def _check_whole(self, check: CheckWhole, is_whole: bool) -> None:
        if self.result:
            return
        is_old = self.fetch.outline is not check.outline
        actions = self.fetch.checked_whole(check, is_whole, self.now)
        is_named = any(isinstance(each, Accused) for each in actions)
        self._check(is_whole or is_old or is_named, "3: nobody is named for a false outline")
        self._carry_out(actions)

    def _is_whole(self) -> bool:
        outline = self.fetch.outline
        if outline is None or outline.size_bytes != self.size:
            return False
        return all(set(self.bytes_of[index]) == {TRUE} for index in range(len(outline.chunks)))

    # ---- what must hold ----

    def _check(self, holds: bool, promise: str) -> None:
        if not holds:
            raise Violation(f"seed {self._seed}, {self.now:.3f} s: promise {promise}")

    def _check_end(self) -> None:
        kinds = [donor.kind for donor in self.donors.values()]
        if not self._must_end:
            return
        self._check(bool(self.result), "4: it never ends")
        if any(kind in RELIABLE for kind in kinds):
            self._check(self.result == "finished", "4: it gives up although an honest donor is there")
        liars = sum(kind not in HONEST for kind in kinds)
        needed = self.size - self.held_at_first
        if not liars and self.result == "finished":
            self._check(self.received == needed, f"2: {self.received} bytes came of {needed}")
        fast = [donor.rate for donor in self.donors.values() if donor.kind == "honest"]
        if fast and all(kind in HONEST or kind == "trickles" for kind in kinds):
            idlers = sum(kind in ("mute", "trickles", "silent", "fades") for kind in kinds)
            few = sum(kind in ("mute", "trickles") for kind in kinds[-FEW:])
            most_s = 2 * needed / max(fast) + SILENT_S + 10 + HELD_UP_S * few + CROWD_S * max(0, idlers - FEW)
            self._check(self.now < most_s, f"6: a slow donor holds up a fast one, by {self.now - most_s:.1f} s")
        if fast and set(kinds) <= {"honest", "paces"}:
            # Each outline has its turn, and the work done before it may be lost.
            most_s = 2 * needed / max(fast) + SILENT_S + 10 + 2 * PACED_S * kinds.count("paces")
            self._check(self.now < most_s, f"6: a false outline sets the pace, by {self.now - most_s:.1f} s")
        largest = max(donor.outline.size_bytes for donor in self.donors.values())
        outlines = len({donor.tag for donor in self.donors.values() if donor.tag})
        most = (1 + 2 * outlines) * largest + liars * (1 + MAX_FAILURES_IN_ALL) * CHUNK_BYTES
        self._check(self.received <= most, f"5: {self.received} bytes for a thing of {self.size}")


def run_fetch_seed(
    seed: int, machine: Callable[..., Fetch] = Fetch, trace: Callable[[str], None] | None = None
) -> Outcome:
    return FetchWorld(seed, machine, trace).play()
