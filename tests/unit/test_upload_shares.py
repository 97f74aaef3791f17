"""Activations before rounds before states and what is relayed, and none of them stands still."""

import pytest

from dilocox_peer.network.upload_shares import ROUNDS_BESIDE, STATES_BESIDE, Upload, UploadShares

CHUNK = 16 * 1024
RATE = 1e6


def shares(rate: float | None = RATE) -> UploadShares:
    found = UploadShares(0.0)
    found.set_rate(rate, 0.0)
    while rate is not None and found.take(CHUNK, "rounds", 0.0) == 0.0:
        pass  # what is saved up
    return found


class Asker:
    """Asks for what is wanted, always, for some seconds. sent: bytes by kind."""

    def __init__(self, found: UploadShares, *kinds: Upload, body_bytes: int = 0) -> None:
        """body_bytes: of activations, one after another."""
        self.sent = dict.fromkeys((*kinds, "activations"), 0)
        self.longest_s = 0.0  # that a body of activations waited
        self.silent_s = 0.0  # the longest time between two chunks of a round
        self._found, self._kinds, self._body_bytes = found, kinds, body_bytes

    def run(self, seconds: float) -> None:
        now, activations_at, round_at = 0.0, 0.0, 0.0
        for kind in self._kinds:
            self._found.waits(kind)
        while now < seconds:
            if self._body_bytes and now >= activations_at:
                wait_s = self._found.reserve(self._body_bytes, now)
                activations_at = now + wait_s
                self.longest_s = max(self.longest_s, wait_s)
                self.sent["activations"] += self._body_bytes
            for kind in self._kinds:
                if self._found.take(CHUNK, kind, now) == 0.0:
                    self.sent[kind] += CHUNK
                    if kind == "rounds":
                        self.silent_s, round_at = max(self.silent_s, now - round_at), now
            now += 0.001


@pytest.mark.parametrize("kind", ["rounds", "states", "relayed"])
def test_each_has_the_whole_line_where_nothing_else_waits(kind: Upload) -> None:
    upload = Asker(shares(), kind)
    upload.run(20.0)
    assert upload.sent[kind] == pytest.approx(20.0 * RATE, rel=0.02)


def test_states_have_a_tenth_beside_rounds() -> None:
    upload = Asker(shares(), "states", "rounds")
    upload.run(20.0)
    assert sum(upload.sent.values()) == pytest.approx(20.0 * RATE, rel=0.02)
    assert upload.sent["states"] == pytest.approx(STATES_BESIDE * upload.sent["rounds"], rel=0.1)


def test_what_is_relayed_has_a_third_beside_our_rounds_and_the_line_else() -> None:
    """As many pieces of others as wait stood before each of ours: with 64 circuits a contribution had a hundredth of the line."""
    asker = Asker(shares(), "rounds", "relayed")
    asker.run(10.0)
    assert asker.sent["relayed"] == pytest.approx(RATE * 10 / 3, rel=0.1)
    assert asker.sent["rounds"] == pytest.approx(RATE * 20 / 3, rel=0.1)


def test_activations_go_first_and_leave_something() -> None:
    upload = Asker(shares(), "states", "rounds", body_bytes=100_000)
    upload.run(20.0)
    assert sum(upload.sent.values()) == pytest.approx(20.0 * RATE, rel=0.02)
    assert upload.sent["rounds"] == pytest.approx(ROUNDS_BESIDE * upload.sent["activations"], rel=0.1)
    assert upload.sent["states"] > 0
    assert upload.longest_s < 3 * 100_000 / RATE


@pytest.mark.parametrize("body_bytes", [100_000, 1_000_000, 4_000_000])
def test_rounds_have_their_part_and_are_never_silent_beside_bodies_of_any_size(body_bytes: int) -> None:
    upload = Asker(shares(), "rounds", body_bytes=body_bytes)
    upload.run(60.0)
    assert upload.sent["rounds"] == pytest.approx(ROUNDS_BESIDE * upload.sent["activations"], rel=0.15)
    assert upload.silent_s < 1.0


def test_a_body_of_activations_waits_for_a_chunk_and_not_for_all_who_ask() -> None:
    found = shares()
    for _ in range(32):
        found.waits("rounds")
        assert found.take(CHUNK, "rounds", 0.0) > 0
    assert found.reserve(1, 0.0) <= (CHUNK + 1) / RATE


def test_without_a_limit_nothing_waits_and_all_is_counted() -> None:
    found = shares(None)
    assert found.rate is None
    assert found.reserve(10**9, 0.0) == found.take(10**9, "states", 0.0) == 0.0
    assert found.num_bytes == 2 * 10**9


def test_another_rate_holds_for_what_is_owed_too() -> None:
    found = shares()
    found.reserve(CHUNK, 0.0)
    owed_s = found.take(CHUNK, "rounds", 0.0)
    found.set_rate(RATE / 4, 0.0)
    assert found.rate == RATE / 4
    assert found.take(CHUNK, "rounds", 0.0) == pytest.approx(4 * owed_s)
    found.set_rate(None, 0.0)
    assert found.take(CHUNK, "rounds", 0.0) == 0.0


def test_a_body_of_activations_is_let_go_as_it_is_paid_for() -> None:
    """At once when it is counted, a rate that limits one body after another seemed to be in use for a moment and then for seconds not."""
    shares = UploadShares(0.0)
    shares.set_rate(100_000.0, 0.0)
    before = shares.let_go(0.0)
    shares.reserve(300_000, 0.0)
    went = [shares.let_go(at / 2) - before for at in range(8)]
    saved = went[0]
    assert saved < 20_000, "what was saved up"
    assert went[1:6] == pytest.approx([saved + 50_000 * at for at in range(1, 6)])
    assert went[6:] == [300_000, 300_000]


def test_who_waits_behind_activations_asks_again_soon() -> None:
    """They owe 40 s at this rate, and a second at the one that the line turns out to carry."""
    found = shares(100e3)
    found.reserve(4_000_000, 0.0)
    for _ in range(200):
        wait_s = found.take(CHUNK, "states", 0.0)
        assert 0.0 < wait_s < 0.5
