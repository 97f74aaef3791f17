"""Real processes: whoever forges a branch, from outside the roster or from its minority, moves no honest peer, holds up no round,
and is named in everybody's log and status. The attackers are tests/hostile/forger.py (a stranger with the link) and traitor.py
(members with seats that they earned); the order of attacks is in fork_attacks.py. How fast rounds come is not asserted.

What is promised of a tie: as many votes on either side are decided by the lowest position in the roster, which also makes
half of a roster a quorum. So the honest half is here the one that has it. The other half would be a hostile quorum, against which only
the owner's checkpoints help (docs/protocol.md).
"""

import asyncio
from pathlib import Path

import pytest

from dilocox_peer.config import preset
from tests.hostile.attacked import PATIENCE_S, STRANGER, Attacked, Outcome
from tests.hostile.fork_attacks import HONEST, by_a_stranger, by_members, collect, record

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def judge(swarm: Attacked, outcome: Outcome) -> None:
    """One attack: nobody moved, nobody's rounds are forked, and the attacker is named by all (a donor: by those who asked it; after a partition: by who was away)."""
    print(outcome.row(), *sorted(outcome.reasons)[:4], sep="\n    ")
    mode = outcome.mode
    assert outcome.moved == (), f"{mode}: {outcome.moved} gave up certified rounds"
    forks = swarm.forks(outcome.honest)
    assert not forks, f"{mode}: {forks}"
    assert outcome.last_round > outcome.first_round, mode
    assert [label for label in outcome.honest if swarm.of(label, "RunComplete")] == [], f"{mode}: the run was ended"
    concerned = set(outcome.honest)
    if mode.startswith("donor"):
        served = {each["to"] for each in swarm.of(STRANGER, "StateServed")}
        concerned = {label for label in outcome.honest if swarm.peer_of(label) in served}
    elif mode == "partition":
        concerned = {HONEST[2]}  # who was away, and to whom alone it is shown
    assert concerned <= set(outcome.named), f"{mode}: {concerned - set(outcome.named)} did not name it"
    assert concerned <= set(outcome.in_status), f"{mode}: the status of {concerned - set(outcome.in_status)} does not"


def assert_it_learned(outcomes: list[Outcome]) -> None:
    losses = [each.loss_after for each in outcomes]
    assert losses[-1] < losses[0], losses


def test_a_stranger_moves_nobody(tmp_path: Path) -> None:
    """At genesis, from the tip (the attack that ended runs in 23 s), from the past, as an owner, with another run's certificates, at
    a joiner, as a donor, after a partition, and when the quorum has died."""

    async def scenario() -> None:
        recorded = tmp_path / "recorded"
        await record(recorded)
        outcomes = await collect(by_a_stranger(recorded), judge)
        assert len(outcomes) == 10, [each.mode for each in outcomes]
        assert_it_learned(outcomes)

    asyncio.run(scenario())


def test_a_minority_of_the_roster_moves_nobody() -> None:
    """One of five, two of five, and two of four against two with the lowest position; from the tip, and from one and two rounds ago."""

    async def scenario() -> None:
        outcomes = await collect(by_members(), judge)
        assert len(outcomes) == 9, [each.mode for each in outcomes]
        assert_it_learned(outcomes)

    asyncio.run(scenario())


def test_a_newcomer_after_all_have_left_begins_nothing_and_a_run_outlives_its_bootstrap() -> None:
    async def scenario() -> None:
        labels = ("peer0", "peer1")
        rounds = {"total": 10_000, "inner_steps": 8, "start_peers": 2, "checkpoint_every": 2}
        async with Attacked(preset("tiny", rounds=rounds)) as swarm:
            bootstrap = await swarm.start_bootstrap("--no-keep")  # else it has the state, and all go on at once
            peers = await asyncio.gather(*map(swarm.start_peer, labels))
            vouched = lambda: max((each["round"] for each in swarm.of("peer0", "RoundVouched")), default=0)  # noqa: E731
            await swarm.until(lambda: vouched() >= 2, [bootstrap, *peers], PATIENCE_S)
            for peer in peers:
                peer.process.terminate()
            await asyncio.gather(*(peer.process.wait() for peer in peers))
            reached = max(map(swarm.round_of, labels))

            newcomer = await swarm.start_peer("newcomer")
            await swarm.until(lambda: swarm.of("newcomer", "StateAwaited") != [], [bootstrap, newcomer], PATIENCE_S)
            assert swarm.of("newcomer", "RoundCertified") == []

            peers = await asyncio.gather(*map(swarm.start_peer, labels))
            everybody = ("newcomer", *labels)
            await swarm.until(
                lambda: min(map(swarm.round_of, everybody)) > reached, swarm.needed(everybody), PATIENCE_S
            )
            bootstrap.process.kill()
            await bootstrap.process.wait()
            goal = max(map(swarm.round_of, everybody)) + 5
            await swarm.until(lambda: min(map(swarm.round_of, everybody)) >= goal, swarm.needed(everybody), PATIENCE_S)
            assert not swarm.forks(everybody)
            assert min(each["round"] for each in swarm.of("newcomer", "RoundCertified")) > reached - 1, "it began anew"

    asyncio.run(scenario())
