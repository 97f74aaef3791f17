"""What a peer measures of its own rounds and reports with its contributions (plan.Report). Pure."""

from dilocox_peer.peer.plan import Report


class Measured:
    """accumulate: micro-batches an inner step (K)."""

    def __init__(self, accumulate: int) -> None:
        self._accumulate = accumulate
        self._closed_before_s: float | None = None
        self._exchange_ms = 0
        self._needed_rank = 0

    def on_close(self, now_s: float, *, micro_batches: int, lost: float, uplink_bps: float) -> Report:
        """The report that goes with a round closed now. micro_batches: done in it. lost: what the codec left out, a share.
        uplink_bps: bits a second, 0: not known."""
        before_s, self._closed_before_s = self._closed_before_s, now_s
        step_us = 0
        if before_s is not None and micro_batches and now_s > before_s:
            step_us = max(1, round(1e6 * (now_s - before_s) * self._accumulate / micro_batches))
        return Report(
            uplink_kbps=max(0, round(uplink_bps / 1000)),
            step_us=step_us,
            exchange_ms=self._exchange_ms,
            lost_permille=min(1000, max(0, round(1000 * lost))),
            needed_rank=self._needed_rank,
        )

    def on_merge(self, exchange_s: float | None, *, needed_rank: int) -> None:
        """A round is merged. exchange_s: since we closed it, None if we had not."""
        if exchange_s is not None:
            self._exchange_ms = max(1, round(1000 * exchange_s))
        self._needed_rank = needed_rank
