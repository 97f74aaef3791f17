"""Real peers that average in slices: they learn, agree to the bit, and lose whoever averages a slice in mid-round without stopping."""

import asyncio
import signal
from collections import defaultdict

import pytest

from dilocox_peer.config import preset
from dilocox_peer.peer.rounds.durable import load_log
from dilocox_peer.wire.chain import Certificate
from tests.swarm.watched import LONG_S, Watched

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SLICES = 8


def test_who_averages_a_slice_and_is_killed_in_mid_round_costs_a_detour_and_comes_back():
    async def scenario() -> None:
        rounds = {"total": 10_000, "inner_steps": 8, "start_peers": 5, "averaging": "slices", "slices": SLICES}
        settings = preset("tiny", rounds=rounds, compression={"codec": "int4", "adapt": "off"})
        async with Watched(settings) as swarm:
            await swarm.start_bootstrap()
            labels = [f"peer{index}" for index in range(5)]
            peers = [await swarm.start_peer(label) for label in labels]
            await swarm.until(lambda: min(map(swarm.round_of, labels)) >= 4, peers, LONG_S)
            before = _chain(swarm, "peer0")
            assert all(len(each.value.results) == SLICES for each in before if each.value.entries), (
                "rounds have results"
            )
            ids = {swarm.of(label, "PeerStarted")[-1]["peer"]: label for label in labels}
            owner = ids[before[-1].value.results[0].by[0][0]]

            # In mid-round: the others have closed it, and what they offer is being averaged.
            closed = {label: len(swarm.of(label, "RoundClosed")) for label in labels}
            await swarm.until(lambda: len(swarm.of(owner, "RoundClosed")) > closed[owner], peers, LONG_S)
            victim = peers[labels.index(owner)]
            victim.process.send_signal(signal.SIGKILL)
            survivors = [label for label in labels if label != owner]
            here = [peer for peer in peers if peer is not victim]
            reached = max(map(swarm.round_of, survivors))
            await swarm.until(lambda: min(map(swarm.round_of, survivors)) >= reached + 4, here, LONG_S)

            assert all(len(each) == 1 for each in _digests(swarm, labels).values()), "equal to the bit"
            after = _chain(swarm, survivors[0])[len(before) :]
            sliced = [each.value for each in after if each.value.results]
            assert sliced, "rounds go on in slices"
            dead = swarm.of(owner, "PeerStarted")[-1]["peer"]
            last = sliced[-1]
            assert dead not in {peer for result in last.results for peer, _ in result.by}

            # It comes back with what it holds, replays results, and counts again.
            back = await swarm.start_peer(owner)

            def counts_again() -> bool:
                return dead in swarm.of(survivors[0], "RoundCertified")[-1]["contributors"]

            await swarm.until(counts_again, [*here, back], LONG_S)
            goal = swarm.round_of(survivors[0]) + 1
            await swarm.until(lambda: swarm.round_of(owner) >= goal, [*here, back], LONG_S)
            assert all(len(each) == 1 for each in _digests(swarm, labels).values()), "equal to the bit"
            # Whoever keeps the run follows it by results too.
            await swarm.until(lambda: _kept(swarm) > reached, [*here, back], LONG_S)
            losses = [record["train_loss"] for record in swarm.of(survivors[0], "RoundClosed")]
            assert losses[-1] < losses[0]

    asyncio.run(scenario())


def test_on_narrow_lines_a_leaner_codec_is_planned_and_rounds_go_on_equal_to_the_bit():
    async def scenario() -> None:
        rounds = {
            "total": 10_000, "inner_steps": 8, "max_inner_steps": 8, "start_peers": 4, "averaging": "slices", "slices": SLICES,
        }  # fmt: skip
        settings = preset("tiny", rounds=rounds, compression={"codec": "none", "adapt": "link"})
        async with Watched(settings) as swarm:
            await swarm.start_bootstrap("--no-keep")
            labels = [f"peer{index}" for index in range(4)]
            peers = [await swarm.start_peer(label, more=["--max-upload", "2"]) for label in labels]

            def planned() -> list[str]:
                return [each.value.plan.codec for each in _chain(swarm, "peer0") if each.value.results]

            await swarm.until(lambda: swarm.round_of("peer0") >= 4, peers, LONG_S)
            assert planned()[0] == "none"
            await swarm.until(lambda: planned()[-1] != "none", peers, LONG_S)
            reached = swarm.round_of("peer0")
            await swarm.until(lambda: min(map(swarm.round_of, labels)) >= reached + 5, peers, LONG_S)
            before, after = (
                [each.value for each in _chain(swarm, "peer0") if each.value.results and each.value.plan.codec == codec]
                for codec in ("none", planned()[-1])
            )
            largest = [max(result.size_bytes for result in values[-1].results) for values in (before, after)]
            assert largest[1] < largest[0] / 2, "results are leaner too"
            assert len(after[-1].entries) == 4, "all are counted"
            assert all(len(each) == 1 for each in _digests(swarm, labels).values()), "equal to the bit"

    asyncio.run(scenario())


def _kept(swarm: Watched) -> int:
    return max((record["round"] for record in swarm.of("bootstrap", "RunKept")), default=0)


def _digests(swarm: Watched, labels: list[str]) -> dict[int, set[str]]:
    """Of each round the anchors that peers came to."""
    digests: dict[int, set[str]] = defaultdict(set)
    for label in labels:
        for record in swarm.of(label, "RoundCertified"):
            digests[record["round"]].add(record["anchor_digest"])
    return digests


def _chain(swarm: Watched, label: str) -> list[Certificate]:
    """The certificates that a peer has on its disk."""
    (log,) = swarm.folder.glob(f"**/{label}/**/stage0/rounds.log")
    loaded = load_log(log.read_bytes(), swarm.manifest.genesis(0))
    assert loaded.durable is not None
    return list(loaded.durable.appended)
