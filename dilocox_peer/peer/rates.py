"""How fast this peer computes, and what it moves: rates over its last seconds, from its counters. Pure."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dilocox_peer.events import PipelineProgress, TrainingProgress

WINDOW_S = 5.0
MAX_SAMPLES = 64


@dataclass(frozen=True, slots=True)
class Sample:
    """Counters since the start of the process, at a time. sent, received: payload; daemon_*: of p2pd over TCP, 0 where the system
    does not say."""

    at_s: float
    tokens: int
    sent: int
    received: int
    daemon_sent: int
    daemon_received: int


class Rates:
    """Units a second; 0 when nothing moves."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)

    def clear(self) -> None:
        """What was counted until now counts no more."""
        self._samples.clear()

    def take(self, progress: TrainingProgress, link: PipelineProgress | None, at_s: float) -> None:
        sent, received = (link.bytes_sent, link.bytes_received) if link is not None else (0, 0)
        self._samples.append(
            Sample(
                at_s,
                progress.tokens,
                progress.bytes_sent + sent,
                progress.bytes_received + received,
                progress.daemon_bytes_sent,
                progress.daemon_bytes_received,
            )
        )

    def tokens_per_s(self) -> float:
        """Of our own training."""
        return self._rate(lambda sample: sample.tokens)

    def up_bytes_per_s(self) -> float:
        return self._rate(lambda sample: sample.sent)

    def down_bytes_per_s(self) -> float:
        return self._rate(lambda sample: sample.received)

    def daemon_bytes_per_s(self) -> tuple[float, float] | None:
        """(sent, received) over TCP by p2pd, payload of rounds included; None where the system does not say."""
        if not self._samples or not self._samples[-1].daemon_sent:
            return None
        return self._rate(lambda sample: sample.daemon_sent), self._rate(lambda sample: sample.daemon_received)

    def _rate(self, counter: Callable[[Sample], int]) -> float:
        if len(self._samples) < 2:
            return 0.0
        newest = self._samples[-1]
        oldest = next(sample for sample in self._samples if newest.at_s - sample.at_s <= WINDOW_S)
        seconds = newest.at_s - oldest.at_s
        return max(0.0, (counter(newest) - counter(oldest)) / seconds) if seconds > 0 else 0.0


def upload_words(upload_bps: int, line_bps: int, queueing_ms: float) -> str:
    """What leaves at most, and what that does to others on the line. line_bps: 0 where it is not measured, or does not matter."""
    of = f", {upload_bps / line_bps:.2f} of the {line_bps / 1e6:.2f} measured" if line_bps else ""
    return f"at most {upload_bps / 1e6:.2f} Mbit/s{of}, others wait {queueing_ms:.0f} ms"
