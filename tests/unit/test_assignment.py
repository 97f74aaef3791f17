"""Which stage a peer claims."""

import random
from dataclasses import replace

import pytest

from dilocox_peer.dht.assignment import Claimant, better_stage, choose_stage
from dilocox_peer.dht.records import Lease
from dilocox_peer.types import PeerId


def lease(name: str, stage: int, *, tokens_per_s: float = 100.0, incarnation: int = 1) -> Lease:
    return Lease(PeerId(name), stage, incarnation, (), 1, tokens_per_s, 0, "direct", 0)


def claimant(name: str = "me", fits=(0, 1, 2, 3), *, is_dialable: bool = True) -> Claimant:
    return Claimant(PeerId(name), fits, is_dialable)


def test_an_empty_stage_is_needed_most():
    stages = {0: [lease("a", 0)], 1: [], 2: [lease("b", 2, tokens_per_s=1.0)]}
    assert choose_stage(stages, claimant())[0] == 1


def test_the_stage_with_the_least_throughput_is_chosen():
    stages = {0: [lease("a", 0, tokens_per_s=50), lease("b", 0, tokens_per_s=60)], 1: [lease("c", 1, tokens_per_s=200)]}
    stage, why = choose_stage(stages, claimant())
    assert stage == 0
    assert "110 tokens/s" in why


def test_a_peer_of_unknown_speed_counts_as_the_average_one():
    stages = {0: [lease("a", 0, tokens_per_s=0)], 1: [lease("b", 1, tokens_per_s=10), lease("c", 1, tokens_per_s=10)]}
    assert choose_stage(stages, claimant())[0] == 0


def test_who_cannot_be_dialled_becomes_a_head():
    stages = {0: [lease("a", 0)], 1: []}
    assert choose_stage(stages, claimant(is_dialable=False))[0] == 0
    stage, why = choose_stage(stages, claimant(is_dialable=False, fits=(1,)))
    assert stage is None
    assert "cannot dial" in why


def test_memory_decides_what_is_eligible():
    stages = {0: [lease("a", 0)], 1: []}
    assert choose_stage(stages, claimant(fits=(0,)))[0] == 0
    assert choose_stage(stages, claimant(fits=()))[0] is None


def test_only_the_newest_moves_and_never_the_last():
    stages = {0: [lease("a", 0, incarnation=1), lease("b", 0, incarnation=2)], 1: []}
    assert better_stage(stages, claimant("b"), 0)[0] == 1
    assert better_stage(stages, claimant("a"), 0)[0] is None
    assert better_stage({0: [lease("a", 0)], 1: []}, claimant("a"), 0)[0] is None


def test_a_difference_of_one_is_left_alone():
    stages = {0: [lease("a", 0), lease("b", 0)], 1: [lease("c", 1)]}
    assert better_stage(stages, claimant("b"), 0)[0] is None


@pytest.mark.parametrize("seed", range(20))
def test_simultaneous_joiners_settle_evenly(seed: int):
    """All choose from the same empty directory, then look again, one after another in any order."""
    rng = random.Random(seed)
    count, peers = rng.randint(1, 5), rng.randint(1, 20)
    names = [f"peer{index}" for index in range(peers)]
    fits = tuple(range(count))
    at = {name: choose_stage({stage: [] for stage in fits}, claimant(name, fits))[0] for name in names}

    def stages():
        return {
            stage: [lease(name, stage, incarnation=index) for index, name in enumerate(names) if at[name] == stage]
            for stage in fits
        }

    for _ in range(peers * count):
        moved = False
        for name in rng.sample(names, len(names)):
            better, _why = better_stage(stages(), claimant(name, fits), at[name])
            if better is not None:
                at[name], moved = better, True
        if not moved:
            break
    sizes = [len(leases) for leases in stages().values()]
    assert max(sizes) - min(sizes) <= 1


def test_where_no_speed_is_known_peers_are_counted():
    stages = {0: [lease("a", 0, tokens_per_s=0), lease("b", 0, tokens_per_s=0)], 1: [lease("c", 1, tokens_per_s=0)]}
    assert choose_stage(stages, claimant()) == (1, "it has the fewest peers (1 peer)")


def test_the_newest_that_can_be_dialled_moves_where_a_newer_one_cannot():
    relayed = replace(lease("c", 0, incarnation=3), reachability="relayed")
    stages = {0: [lease("a", 0, incarnation=1), lease("b", 0, incarnation=2), relayed], 1: [lease("d", 1)]}
    assert better_stage(stages, claimant("b"), 0)[0] == 1
    assert better_stage(stages, claimant("c", is_dialable=False), 0)[0] is None
