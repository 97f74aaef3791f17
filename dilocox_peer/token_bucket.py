"""A rate limit as a pure object: how long to wait before so much may pass. Time is a parameter, units are the caller's."""


class TokenBucket:
    """Lets `rate` units a second pass, and up to `burst` at once after a pause.

    A reservation larger than what is left is granted with a wait (the level goes below zero), so waiters are served in
    the order they came, each is delayed by exactly what is ahead of it, and an amount above `burst` passes too.
    """

    def __init__(self, rate: float, burst: float, now: float) -> None:
        if not rate > 0 or not burst > 0:
            raise ValueError(f"rate {rate} and burst {burst} must be positive")
        self.rate = rate
        self.burst = burst
        self._level = burst
        self._updated = now

    def change(self, rate: float, burst: float, now: float) -> None:
        """Another rate from now on; what is left, or owed, stays."""
        self._refill(now)
        self.rate, self.burst = rate, burst
        self._level = min(self._level, burst)

    def owed_s(self, now: float) -> float:
        """Seconds until nothing is owed any more of what was reserved."""
        self._refill(now)
        return max(0.0, -self._level / self.rate)

    def reserve(self, amount: float, now: float) -> float:
        """Seconds to wait before `amount` may pass; it counts as passed from now on."""
        self._refill(now)
        self._level -= amount
        return max(0.0, -self._level / self.rate)

    def try_take(self, amount: float, now: float) -> bool:
        """Whether `amount` may pass now; if not, nothing is taken."""
        self._refill(now)
        if amount > self._level:
            return False
        self._level -= amount
        return True

    def _refill(self, now: float) -> None:
        elapsed = max(0.0, now - self._updated)  # a clock that went back gives nothing
        self._level = min(self.burst, self._level + elapsed * self.rate)
        self._updated = max(self._updated, now)
