"""Who makes room where all places are taken."""

import random
from collections import Counter

from dilocox_peer.network.crowding import to_give_up


def test_whoever_holds_most_gives_up_its_oldest_to_one_that_has_fewer() -> None:
    held = {1: "house", 2: "neighbour", 3: "house", 4: "house"}
    assert to_give_up(held, "newcomer") == 1
    assert to_give_up(held, "neighbour") == 1, "two each then"
    assert to_give_up(held, "house") is None, "nobody holds more than it would"
    assert to_give_up({1: "house", 2: "neighbour"}, "newcomer") is None
    assert to_give_up({}, "newcomer") is None


def test_places_come_to_even_parts_whoever_asks_most() -> None:
    rng, held = random.Random(1), dict[int, str]()
    for number in range(4000):
        holder = rng.choices(["flood", "a", "b", "c"], weights=[100, 1, 1, 1])[0]
        if len(held) == 64:
            if (oldest := to_give_up(held, holder)) is None:
                continue
            del held[oldest]
        held[number] = holder
    assert set(Counter(held.values()).values()) <= {15, 16, 17}
