"""How often the directory is read, so that what is written there again by whoever looks is not forgotten meanwhile."""

import random

import pytest

from dilocox_peer.dht.records import MAX_TTL_S
from dilocox_peer.peer.discovery import REWRITE_S, usual_pause_s


@pytest.mark.parametrize("num_peers", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 32, 64])
def test_the_owner_s_word_is_written_again_in_time_by_one_of_those_who_look(num_peers: int) -> None:
    rng = random.Random(num_peers)
    looks = [usual_pause_s(num_peers, rng) for _ in range(num_peers)]
    written, forgotten_s, hours = 0.0, 0.0, 40
    while (now := min(looks)) < hours * 3600:
        if now - written > MAX_TTL_S - REWRITE_S:
            forgotten_s += max(0.0, now - written - MAX_TTL_S)
            written = now
        looks[looks.index(now)] = now + usual_pause_s(num_peers, rng)
    assert forgotten_s / (hours * 3600) < 1e-3
    assert num_peers > 4 or forgotten_s == 0
