"""What plans take of figures that peers tell of themselves: one liar of four, or two of eight, move none beyond what honest peers
tell. Pure.

Nobody can check another's uplink or the time of its steps. So a quarter at either end decides nothing: of uplinks the one above the
slowest quarter counts, of speeds the mean, with the quarter at each end taken to be as its nearest neighbour. Whoever tells the
truth and is much faster than all others is not counted in full either: rounds are then a little shorter than planned for. Below
four a quarter is nobody; then a speed counts as at most MOST_COUNTED times the median of the others, as work does in the mean
and in the clock of rounds. What only a minority has told is not known.
"""

import statistics
from collections.abc import Sequence

MOST_COUNTED = 4.0


def quarter(count: int) -> int:
    """How many of so many peers may lie."""
    return count // 4


def slow_link(uplinks_bps: Sequence[float]) -> float:
    """The link that a stage plans for."""
    return sorted(uplinks_bps)[quarter(len(uplinks_bps))]


def told_by_most(values: Sequence[int]) -> list[int]:
    """Those that are told, 0 is not; none where fewer than half of the peers tell."""
    told = [value for value in values if value]
    return told if 2 * len(told) >= len(values) else []


def usual_step_s(steps_us: Sequence[int]) -> float | None:
    """Seconds of an inner step by the speeds of all contributors together, who share a round's steps by them; None: not known.
    steps_us: microseconds of each contributor's, 0 for one that has not measured it."""
    speeds = sorted(1e6 / each for each in told_by_most(steps_us))
    if not speeds:
        return None
    ends = min(quarter(len(steps_us)), (len(speeds) - 1) // 2)
    least, most = speeds[ends], speeds[-1 - ends]
    if len(speeds) > 1 and not ends:
        most = min(most, MOST_COUNTED * statistics.median(speeds[:-1]))
    return 1.0 / statistics.fmean(min(max(each, least), most) for each in speeds)
