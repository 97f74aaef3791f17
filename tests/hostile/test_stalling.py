"""Real processes: one member of four turns hostile, and the three honest ones go on, name it, and agree to the bit.

How fast is printed, beside a swarm in which nobody turns, and not asserted: benchmarks/stalling.py measures it.
"""

import asyncio
import itertools
import statistics
from collections import defaultdict
from typing import Any

import pytest

from dilocox_peer.config import preset
from tests.swarm.watched import LONG_S, Watched

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]

TURN_AFTER = 4
SETTLED_ROUNDS = 5
MEASURED_ROUNDS = 12
HONEST = ("honest0", "honest1", "honest2")


async def play(mode: str) -> Watched:
    """A swarm of three honest peers and one that turns, until enough rounds are certified after it has."""
    rounds = {"total": 10_000, "inner_steps": 16, "start_peers": 4}
    async with Watched(preset("tiny", rounds=rounds)) as swarm:
        await swarm.start_bootstrap()
        program = ("-m", "tests.hostile.member", mode, str(TURN_AFTER))
        peers = await asyncio.gather(
            *(swarm.start_peer(label) for label in HONEST), swarm.start_peer("hostile", program=program)
        )
        last = TURN_AFTER + SETTLED_ROUNDS + MEASURED_ROUNDS
        await swarm.until(lambda: all(swarm.round_of(label) >= last for label in HONEST), peers, 2 * LONG_S)
        return swarm


def measured(swarm: Watched) -> list[dict[str, Any]]:
    """The rounds that count, as the first honest peer saw them."""
    return [each for each in swarm.of(HONEST[0], "RoundCertified") if each["round"] > TURN_AFTER + SETTLED_ROUNDS]


def peer_of(swarm: Watched, label: str) -> str:
    return str(swarm.of(label, "PeerStarted")[0]["peer"])


def told(mode: str, swarm: Watched) -> None:
    rows = measured(swarm)
    honest = {peer_of(swarm, label) for label in HONEST}
    seconds = [later["time"] - earlier["time"] for earlier, later in itertools.pairwise(rows)]
    for what, numbers in (
        ("seconds a round", seconds),
        ("honest contributions", [len(honest & set(each["contributors"])) for each in rows]),
        ("kB sent", [each["bytes_sent"] / 1000 for each in rows]),
    ):
        print(f"{mode:15} {what:21} {min(numbers):.2f} / {statistics.median(numbers):.2f} / {max(numbers):.2f}")


def assert_no_fork(swarm: Watched) -> None:
    heads: dict[int, set[str]] = defaultdict(set)
    digests: dict[int, set[str]] = defaultdict(set)
    for label in HONEST:
        for each in swarm.of(label, "RoundCertified"):
            heads[each["round"]].add(each["head"])
            digests[each["round"]].add(each["anchor_digest"])
    assert all(len(each) == 1 for each in heads.values()), heads
    assert all(len(each) == 1 for each in digests.values()), digests


def test_three_honest_peers_and_one_that_never_turns() -> None:
    swarm = asyncio.run(play("honest"))
    told("honest", swarm)
    assert_no_fork(swarm)
    assert not [each for label in HONEST for each in swarm.of(label, "EquivocationProved")]


@pytest.mark.parametrize("mode", ["offers nothing", "plans astray", "claims", "outbids"])
def test_one_of_four_that_turns_hostile_costs_no_contribution_and_is_named(mode: str) -> None:
    swarm = asyncio.run(play(mode))
    told(mode, swarm)
    assert_no_fork(swarm)
    honest, hostile = {peer_of(swarm, label) for label in HONEST}, peer_of(swarm, "hostile")
    rows = measured(swarm)
    contributions = [len(honest & set(each["contributors"])) for each in rows]
    assert sum(contributions) >= 0.9 * len(honest) * len(rows), contributions
    for label in HONEST:
        assert hostile in {each["peer"] for each in swarm.of(label, "MemberDoubted")}, f"{label} names it"
    if mode == "plans astray":
        assert "none" not in {each["codec"] for each in rows}
    if mode == "claims":
        assert max(each["micro_batches"] for each in rows) < 2**31
