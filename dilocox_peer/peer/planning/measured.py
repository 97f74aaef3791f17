"""What a peer measures of its own rounds and reports with its contributions (plan.Report). Pure."""

import math

from dilocox_peer.wire.chain import MAX_QUANTITY, Report
from dilocox_peer.wire.declared import MAX_COUNT


class Measured:
    """Of one process, from its first close on."""

    def __init__(self) -> None:
        self._start: tuple[float, int] | None = None  # (when, tokens trained by then)
        self._exchange_ms = 0
        self._needed_rank = 0

    def on_idle(self, now_s: float, *, tokens: int) -> None:
        """Nothing is trained for now: the time since the last close says nothing of a step, what follows does."""
        if self._start is not None:
            self._start = (now_s, tokens)

    def on_close(
        self,
        now_s: float,
        *,
        tokens: int,
        tokens_a_step: int,
        lost: float,
        uplink_bps: float,
        train_loss: float = math.nan,
        wall_s: float = 0.0,
    ) -> Report:
        """The report that goes with a round closed now. tokens: trained in all. tokens_a_step: of an inner step, all its
        micro-batches together. lost: what the codec left out, a share.
        uplink_bps: bits a second, 0: not known. train_loss: nats a token, nan: not known. wall_s: the wall clock at the close.

        A step is measured since the last close, however many rounds ago: others may have certified some without us.
        """
        start, self._start = self._start, (now_s, tokens)
        step_us = 0
        if start is not None and tokens > start[1] and now_s > start[0]:
            step_us = _quantity(1e6 * (now_s - start[0]) * tokens_a_step / (tokens - start[1]))
        return Report(
            uplink_kbps=min(MAX_QUANTITY, max(0, round(uplink_bps / 1000))),
            step_us=step_us,
            exchange_ms=self._exchange_ms,
            lost_permille=min(1000, max(0, round(1000 * lost))),
            needed_rank=self._needed_rank,
            loss_micronats=_millionths(train_loss),
            closed_ms=min(MAX_COUNT, max(0, int(1000 * wall_s))),
        )

    def on_merge(self, exchange_s: float | None, *, needed_rank: int) -> None:
        """A round is merged. exchange_s: since we closed it, None if we had not."""
        if exchange_s is not None:
            self._exchange_ms = _quantity(1000 * exchange_s)
        self._needed_rank = needed_rank


def _millionths(value: float) -> int:
    """0 for what is no finite number above 0."""
    return _quantity(1e6 * value) if math.isfinite(value) and value > 0 else 0


def _quantity(value: float) -> int:
    """Of what was measured: more than others read would have all of them refuse the contribution that it goes with."""
    return min(MAX_QUANTITY, max(1, round(value)))
