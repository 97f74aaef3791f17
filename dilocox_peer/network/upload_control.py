"""How fast this peer sends where its owner has said nothing: 0.8 of what its line was measured to carry, and less while others on the line
would wait for it. Pure: what the kernel tells of our connections in, a rate out.

What waits in the home's router is seen in the round trips of the packets of all our connections: it is how much longer they take
than at least in the last minutes (as in LEDBAT, RFC 6817; the least of all connections that send counts, as what is slow beyond our line slows only some). While that is short the
rate grows, slowly near what the line carries, so that it is found full now and then; when it is long, what arrived lately, if the rate
was in use for a second, is what the line carries, and we go on with 0.8 of it. Those who receive may have been slower than our line (in a round
all send and receive at once), so the most of three such measurements is taken for it in the end, and a rate below the part of it that two would have grows sooner. Where it stays long it is others who fill the line, and we give way further,
down to a tenth of it. Where it is long even then the line may be another by now, ten times as slow (a telephone's in place of a cable): for a moment we go below that
tenth. If the wait ends, the line is measured anew when it is full the next time, and that alone counts; else it is others, and the tenth is ours again.

Several peers behind one line come to even parts: all are lowered by the same share at once, and grow with the square root of their
rates, the smaller one by the greater share (binomial congestion control, Bansal and Balakrishnan, INFOCOM 2001: k = -1/2, l = 1). So that it is the same share, a small rate, whose
round trips forget what waited more slowly, is held for longer before it is lowered again; and who once had the line alone does not grow sooner for that.
"""

import math
from collections import deque
from dataclasses import dataclass

SHARE = 0.8  # of what the line carries
LONG_S, SHORT_S = 0.02, 0.01  # of waiting: lower the rate; do not raise it
START_BYTES_PER_S = 125_000.0  # a line of 1 Mbit/s up is not hurt by it for longer than a few looks
LEAST_BYTES_PER_S, LEAST_SHARE = 16_000.0, 0.1  # a peer goes on, whatever others on its line do
SEARCHING = 1.1  # growth a second while waits have never been long
CREEPING, DOUBLES_S = (
    0.01,
    8.0,
)  # growth a second after they were, and twice that after each so many seconds in which they are not
EVEN_BYTES_PER_S = 1e6  # a rate that grows so; a smaller one by a greater share
FAR_BELOW = 0.3  # of what the line carries: less than each of two that share it has
RECOVERING = 4  # times as soon, below that
MEASUREMENTS = 3  # the newest; what the line carries is the most of them
WINDOW_S, MEASURED_S = (
    1.0,
    0.4,
)  # over which is told whether the rate is in use; over which what arrives of a full line is measured
FARTHEST = 0.7  # of a rate, at one lowering
DOUBTED_S = 5.0  # of long waits at LEAST_SHARE of a line: it may have become slower than that
TELLING_BYTES_PER_S = 48_000.0  # down to which we go then: of less, no look tells how long it waits
CARRIED = 0.7  # of what we let go at LEAST_SHARE: where less comes through, others give way as little as we do
IN_A_ROW = 2  # doubts in which it does not: in one a crowd of others may have begun at that moment, and whoever comes after it fills the line alone
BELIEVED_S = 60.0  # before the next doubt, where going below it was no help
SUSPECTED_S = 20.0  # where too little of ours came through, but not yet IN_A_ROW
HOLD_S = 0.4  # after a lowering, before the next: what waits has to drain
FORGETS_BYTES = 16 * 1448  # in which a smoothed round trip, by an eighth a packet, has come down from what waited
IN_USE = 0.8  # of the rate: less, and it is not the rate that limits us
BEGUN_S = 1.0  # since we began to send: what all of a round let go at once waits in their lines; by then what arrives is measured too (WINDOW_S)
MAX_LOOK_S = 1.0  # what was seen longer ago says nothing of now
ACKED_LATE_S = 0.03  # most systems acknowledge a packet that comes alone up to 40 ms late (RFC 1122, 4.2.3.2), which looks like a wait
ALONE_BYTES_PER_S = 2 * 1448 / 0.04  # below it packets come alone


def waiting_of(rtt_s: float, least_rtt_s: float, bytes_per_s: float) -> float:
    """How long a packet waits in our line, by the round trips of a connection that carries so much. Of one that carries little what may be a late
    acknowledgement is left out: who once was slow would take it for a full line, and stay slow."""
    late_s = ACKED_LATE_S if bytes_per_s < ALONE_BYTES_PER_S else 0.0
    return max(0.0, rtt_s - least_rtt_s - late_s)


@dataclass(frozen=True, slots=True)
class _Look:
    seconds: float
    allowed: float  # bytes
    let_go: int
    arrived: int


class UploadControl:
    """`take` at every look; then `rate`.

    rate: bytes a second. line: bytes a second that the line carries, as measured; 0: not yet. waiting_s: of a packet, anybody's, in our line.
    """

    def __init__(self) -> None:
        self.rate = START_BYTES_PER_S
        self.line = 0.0
        self._least_of = 0.0  # what the line carries, for the least rate: less than line, where that is in doubt
        self.waiting_s = 0.0
        self._looks: deque[_Look] = deque()
        self._carried_before: deque[float] = deque(maxlen=MEASUREMENTS)  # when the line was full
        self._at_s: float | None = None
        self._was_long = False  # at the last look
        self._is_full = False  # waits are long since before the last lowering
        self._lowered_s = float("-inf")
        self._clean_s = 0.0  # in use, and waits short, since then
        self._at_least_s = 0.0  # that waits have been long at the least rate; below 0: until that is counted again
        self._let_go_at_least = self._arrived_at_least = 0  # bytes meanwhile
        self._is_doubted = False  # whether the line is what was measured
        self._not_carried = 0  # doubts in a row in which too little came through

    def take(self, num_let_go: int, num_arrived: int, waiting_s: float | None, now_s: float) -> None:
        """num_let_go: bytes under this rate since the last look; num_arrived: that others acknowledged, over the line. waiting_s: how
        much longer than at least in the last minutes a round trip takes, the least of the connections that sent something since then; None: none did."""
        seconds = now_s - self._at_s if self._at_s is not None else 0.0
        self._at_s = now_s
        if not 0.0 < seconds <= MAX_LOOK_S:
            self._looks.clear()
            self._was_long = False
            return
        self._looks.append(_Look(seconds, self.rate * seconds, num_let_go, num_arrived))
        while self._looked_s - self._looks[0].seconds >= WINDOW_S:
            self._looks.popleft()
        is_long = waiting_s is not None and waiting_s > LONG_S
        # A single long one may be a peer that acknowledges late.
        self.waiting_s = min(waiting_s or 0.0, LONG_S) if not self._was_long else waiting_s or 0.0
        if is_long and self._was_long:
            self._doubt(seconds)
            self._lower(now_s)
        elif not is_long:
            self._is_full = False
            if waiting_s is not None:
                self._settle(seconds)
            if (waiting_s is None or waiting_s < SHORT_S) and self._is_in_use:
                self._raise(seconds)
        self._was_long = is_long

    @property
    def _looked_s(self) -> float:
        """Seconds, without a pause, that the looks are of; no more than a look above WINDOW_S."""
        return sum(look.seconds for look in self._looks)

    @property
    def _is_in_use(self) -> bool:
        return sum(look.let_go for look in self._looks) >= IN_USE * sum(look.allowed for look in self._looks)

    def _carried(self) -> float:
        """Bytes a second that arrived lately."""
        seconds = arrived = 0.0
        for look in reversed(self._looks):
            seconds, arrived = seconds + look.seconds, arrived + look.arrived
            if seconds >= MEASURED_S:
                break
        return arrived / seconds

    def _doubt(self, seconds: float) -> None:
        """Waits are long."""
        if not self._is_in_use:  # what we send does not fill it
            return
        if self._is_doubted and self.rate <= TELLING_BYTES_PER_S:  # less of ours was no help: others fill it
            self._is_doubted = False
            self._believe_less()
            self._at_least_s = -(SUSPECTED_S if 0 < self._not_carried < IN_A_ROW else BELIEVED_S)
            self.rate = self._least
        elif not self._is_doubted and self.rate <= self._least:
            if self._at_least_s <= 0.0:
                self._let_go_at_least = self._arrived_at_least = 0
            self._at_least_s += seconds
            self._let_go_at_least += self._looks[-1].let_go
            self._arrived_at_least += self._looks[-1].arrived
            self._is_doubted = self._at_least_s >= DOUBTED_S

    def _believe_less(self) -> None:
        """Others fill the line. Where it did not carry even our tenth of it they are like us, each with a tenth of what the line once carried: none of
        them alone makes room enough to find that out. Whoever gives way to us, as others' programs do, lets that through."""
        through = self._arrived_at_least / max(self._let_go_at_least, 1)
        self._not_carried = self._not_carried + 1 if through < CARRIED else 0
        if self._not_carried >= IN_A_ROW or self._least_of < self.line:
            self._least_of *= SHARE * min(through, 1.0)
            self._carried_before.clear()

    def _settle(self, seconds: float) -> None:
        """Waits are not long."""
        if self._is_doubted:
            # It was we who filled it, or others end by chance: what the line is says the next time that we fill it.
            self._is_doubted, self._at_least_s, self._not_carried = False, 0.0, 0
            self._least_of = self._carried()
            self._carried_before.clear()
        self._at_least_s = max(self._at_least_s - seconds, min(self._at_least_s, 0.0))

    @property
    def _least(self) -> float:
        """A rate."""
        least = max(LEAST_BYTES_PER_S, LEAST_SHARE * self._least_of)
        return min(least, TELLING_BYTES_PER_S) if self._is_doubted else least

    def _lower(self, now_s: float) -> None:
        hold_s = HOLD_S + 2 * self.waiting_s
        if self._is_full:  # what is still long may be what waited before
            hold_s += FORGETS_BYTES / self.rate
        if now_s - self._lowered_s < hold_s or self._looked_s < BEGUN_S:
            return
        carried = self._carried()
        is_known = self._looked_s >= WINDOW_S and self._is_in_use  # what has arrived says how much the line carries
        if not self._is_full and is_known and carried >= IN_USE * SHARE * self.rate:  # it is we who fill it
            self._carried_before.append(carried)
            self.line = self._least_of = max(self._carried_before)
            self.rate = min(self.rate, max(SHARE * carried, FARTHEST * self.rate))
        else:
            self.rate *= SHARE
        self.rate = max(self.rate, self._least)
        self._lowered_s, self._clean_s, self._is_full = now_s, 0.0, True

    def _raise(self, seconds: float) -> None:
        self._clean_s += seconds * (RECOVERING if self.rate < FAR_BELOW * self.line else 1)
        growth = SEARCHING
        if self._lowered_s > float("-inf"):
            creeping = CREEPING * math.sqrt(EVEN_BYTES_PER_S / self.rate)
            growth = min(SEARCHING, creeping * 2 ** (self._clean_s / DOUBLES_S))
        self.rate *= 1 + growth * seconds
