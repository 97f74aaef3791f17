"""How what this peer sends shares its upload: activations before rounds before states, and before what is passed on for others. Pure: times in, waits out.

Activations are counted at once and wait for what is owed by then. Bodies of rounds go when nothing is owed, those of states, and what is relayed, when besides
none of a round waits. So that none stands still for ever, each may take a part of what goes before it, beside it, spread over the time
that this takes.
"""

from typing import Literal

from dilocox_peer.token_bucket import TokenBucket

BURST_S, LEAST_BURST_BYTES = 0.1, 16 * 1024  # saved up while nothing is sent, or we were late: a busy computer is
ROUNDS_BESIDE = 3 / 7  # of the bytes of activations: they have 0.7 of a line that is too narrow (planning/forecast.py)
STATES_BESIDE = 0.1  # of the bytes of rounds
RELAYED_BESIDE = 0.5  # of the bytes of rounds: others' rounds are among it, and wait for it
MOST_BESIDE_BYTES = 256 * 1024  # no more is saved up, but for what goes beside a single body
LOOK_S, MOST_LOOK_S = 0.005, 0.25  # the least wait, and the longest: the rate may be another soon

Upload = Literal["rounds", "states", "relayed"]

SHARE: dict[Upload, float] = {
    "rounds": ROUNDS_BESIDE / (1 + ROUNDS_BESIDE), "states": STATES_BESIDE / (1 + STATES_BESIDE),
    "relayed": RELAYED_BESIDE / (1 + RELAYED_BESIDE),
}  # fmt: skip
"""Of a line, beside what goes before."""


class UploadShares:
    """One line's. num_bytes: that were let go so far, or are to go as soon as what is owed has gone."""

    def __init__(self, now_s: float) -> None:
        """Without a limit, until `set_rate`."""
        self.num_bytes = 0
        self._bucket: TokenBucket | None = None
        self._beside: dict[Upload, float] = dict.fromkeys(SHARE, 0.0)
        self._next_s: dict[Upload, float] = dict.fromkeys(SHARE, now_s)  # that may go beside
        self._num_waiting = 0  # of rounds

    @property
    def rate(self) -> float | None:
        """Bytes a second; None: no limit."""
        return self._bucket.rate if self._bucket is not None else None

    def let_go(self, now_s: float) -> float:
        """Bytes that were let go so far, without those that their turn has not come of: a body of activations counts as it is paid for."""
        owed = 0.0 if self._bucket is None else self._bucket.owed_s(now_s) * self._bucket.rate
        return self.num_bytes - owed

    def set_rate(self, rate: float | None, now_s: float) -> None:
        """Bytes a second from now on; what is owed stays owed. None: no limit."""
        if rate is None:
            self._bucket = None
        elif self._bucket is None:
            self._bucket = TokenBucket(rate, burst=max(rate * BURST_S, LEAST_BURST_BYTES), now=now_s)
        else:
            self._bucket.change(rate, burst=max(rate * BURST_S, LEAST_BURST_BYTES), now=now_s)

    def reserve(self, num_bytes: int, now_s: float) -> float:
        """Of activations: seconds to wait before they may go; they count as sent from now on."""
        self.num_bytes += num_bytes
        if self._bucket is None:
            return 0.0
        beside = ROUNDS_BESIDE * num_bytes
        self._save("rounds", beside, max(MOST_BESIDE_BYTES, beside))
        self._save("relayed", RELAYED_BESIDE * beside, MOST_BESIDE_BYTES)
        return self._bucket.reserve(num_bytes, now_s)

    def waits(self, kind: Upload) -> None:
        """A body of that kind waits from now on. Pair it with `waits_no_more`."""
        self._num_waiting += kind == "rounds"

    def waits_no_more(self, kind: Upload) -> None:
        self._num_waiting -= kind == "rounds"

    def take(self, num_bytes: int, kind: Upload, now_s: float) -> float:
        """Of a body: 0, and they have gone; or seconds after which to ask again."""
        bucket = self._bucket
        if bucket is not None:
            owed_s = bucket.owed_s(now_s)
            gives_way = kind != "rounds" and self._num_waiting > 0
            if owed_s > 0 or gives_way:
                if self._beside[kind] < num_bytes:
                    return max(LOOK_S, min(owed_s, MOST_LOOK_S))
                if (wait_s := self._next_s[kind] - now_s) > 0:
                    return max(LOOK_S, min(wait_s, MOST_LOOK_S))
                self._beside[kind] -= num_bytes
                self._next_s[kind] = max(self._next_s[kind], now_s - BURST_S) + num_bytes / (SHARE[kind] * bucket.rate)
            bucket.reserve(num_bytes, now_s)
            if kind == "rounds":
                self._save("states", STATES_BESIDE * num_bytes, MOST_BESIDE_BYTES)
                self._save("relayed", RELAYED_BESIDE * num_bytes, MOST_BESIDE_BYTES)
        self.num_bytes += num_bytes
        return 0.0

    def _save(self, kind: Upload, num_bytes: float, most: float) -> None:
        self._beside[kind] = max(self._beside[kind], min(self._beside[kind] + num_bytes, most))
