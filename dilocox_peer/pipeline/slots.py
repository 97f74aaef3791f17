"""Slots: the right to send a micro-batch's body to a peer. Granted to who holds the fewest, among these first come, first served; nobody takes them all.

    slots = 2 * window * ceil(callers / replicas), at most max_slots

so bytes in flight are bounded on both ends. A quarter of them is kept for linked callers that hold none: one caller
that reserves without end cannot shut the others out. Callers of which no body has come yet hold half of them at most, where there are
others: many that reserve and send nothing shut out none that does. The window is how many micro-batches an origin keeps under way. `AnswerCache` keeps what was answered until the caller has it.
Pure: no time.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from dilocox_peer.types import PeerId
from dilocox_peer.wire.hops import MAX_WINDOW

CallKey = tuple[PeerId, int]  # caller, its number for the call
Replied = TypeVar("Replied")

KEPT_PART = 4  # one slot in so many is kept for callers that hold none
UNPROVEN_PART = 2  # one slot in so many may be held by callers of which no body has come


def num_slots(*, window: int, callers: int, replicas: int, max_slots: int) -> int:
    """Slots of a peer whose callers keep `window` micro-batches under way each; at least one a caller if possible."""
    wanted = 2 * window * -(-max(callers, 1) // max(replicas, 1))
    return max(1, min(max(wanted, callers), max_slots))


def origin_window(*, stations: float, way_s: float, slowest_s: float, accumulate: int) -> int:
    """Micro-batches that an origin keeps under way, with the schedule `carry`.

    stations: stages, or peers that work for it if those are more. way_s: round trips from it to the last stage. slowest_s: the longest that a
    stage works on one micro-batch; 0: not known. accumulate: micro-batches a step.
    """
    # Not 2 (stages + round trips / slowest), what one chain of stages would need: an origin counts all peers that work for
    # it, which with few origins or slow callees are more than the stages; and one on the way even where round trips take
    # no time (without that one, a 4x4 of mixed speeds took 100 s to come from .95 to 1.00 of the ideal).
    on_the_way = max(1, int(-(-way_s // slowest_s))) if slowest_s > 0 else 0
    return max(1, min(int(-(-2 * (stations + on_the_way) // 1)), accumulate, MAX_WINDOW))


@dataclass(slots=True)
class _Use:
    held: int = 0
    waiting: int = 0
    is_proven: bool = False  # a body of its has come for the last slot that was used or left unused


class Slots:
    """The micro-batches that hold a slot, and those that wait for one."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._held: set[CallKey] = set()
        self._waiting: OrderedDict[CallKey, None] = OrderedDict()
        self._places: dict[CallKey, int] | None = None  # of those that wait, while nobody moves
        self._uses: dict[PeerId, _Use] = {}

    @property
    def in_use(self) -> int:
        return len(self._held)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def outstanding(self, caller: PeerId) -> int:
        """Calls of caller that hold a slot or wait for one."""
        use = self._uses.get(caller)
        return 0 if use is None else use.held + use.waiting

    def used(self, caller: PeerId, *, is_used: bool) -> None:
        """A body has come for a slot of its, or none in the time that there is for it."""
        if (use := self._uses.get(caller)) is not None:
            use.is_proven = is_used

    def link(self, caller: PeerId) -> None:
        self._uses.setdefault(caller, _Use())

    def unlink(self, caller: PeerId) -> None:
        """Forgets a caller once it has nothing here."""
        use = self._uses.get(caller)
        if use is not None and use.held + use.waiting == 0:
            del self._uses[caller]

    def reserve(self, key: CallKey) -> None:
        """Gets in line; `grant` says when it is its turn, which may be at once."""
        assert key not in self._held, key
        assert key not in self._waiting, key
        self._waiting[key] = None
        self._places = None
        self._uses.setdefault(key[0], _Use()).waiting += 1

    def position(self, key: CallKey) -> int:
        """1 for the next in line; 0 for who is past it."""
        if self._places is None:  # once for all that ask while nobody moves: a frame may ask 64 times
            self._places = {waiting: place for place, waiting in enumerate(self._waiting, start=1)}
        return self._places.get(key, 0)

    def release(self, key: CallKey) -> None:
        """Gives back a slot, or the place in the line. Unknown keys do nothing."""
        use = self._uses.get(key[0])
        if use is None:
            return
        if key in self._held:
            self._held.remove(key)
            use.held -= 1
        elif key in self._waiting:
            del self._waiting[key]
            self._places = None
            use.waiting -= 1

    @property
    def can_grant(self) -> bool:
        """Whether somebody waits whose turn it is."""
        return bool(self._waiting) and self._next_in_line() is not None

    def grant(self, passes: Callable[[], bool] = lambda: True) -> list[CallKey]:
        """Those whose turn it is now, in order, as long as they may pass; they hold a slot from here on."""
        granted: list[CallKey] = []
        while self._waiting and (key := self._next_in_line()) is not None and passes():
            use = self._uses[key[0]]
            del self._waiting[key]
            self._places = None
            self._held.add(key)
            use.waiting -= 1
            use.held += 1
            granted.append(key)
        return granted

    def _next_in_line(self) -> CallKey | None:
        free = self.capacity - len(self._held)
        if free <= 0:
            return None
        without = sum(1 for use in self._uses.values() if use.held == 0)
        all_may = free > min(without, self.capacity // KEPT_PART)
        unproven = sum(use.held for use in self._uses.values() if not use.is_proven)
        is_known = any(use.is_proven for use in self._uses.values())
        may_begin = not is_known or unproven < max(self.capacity // UNPROVEN_PART, 1)
        found, fewest = None, self.capacity if all_may else 1
        for key in self._waiting:
            use = self._uses[key[0]]
            if use.held < fewest and (use.is_proven or may_begin):
                found, fewest = key, use.held
            if not fewest:
                break
        return found


class AnswerCache(Generic[Replied]):
    """Answers by call until acknowledged; the oldest goes when there are too many."""

    def __init__(self) -> None:
        self._answers: OrderedDict[Hashable, Replied] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def keep(self, key: Hashable, answer: Replied, *, at_most: int) -> None:
        self._answers[key] = answer
        self._answers.move_to_end(key)
        while len(self._answers) > max(at_most, 1):
            self._answers.popitem(last=False)

    def values(self) -> Collection[Replied]:
        return self._answers.values()

    def get(self, key: Hashable) -> Replied | None:
        return self._answers.get(key)

    def forget(self, key: Hashable) -> None:
        self._answers.pop(key, None)
