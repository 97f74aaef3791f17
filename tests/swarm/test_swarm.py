"""Real peers in real processes: they learn, agree to the bit, lose members without noticing, and leave nothing behind."""

import asyncio
import json
import os
import signal
from collections import defaultdict

import pytest

from dilocox_peer.config import preset
from tests.swarm.watched import LONG_S, Watched, assert_gone, demo, family

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SHORT = {"total": 6, "inner_steps": 8}


@pytest.mark.parametrize("overlap", ["arrival", "one-step", "none"])
def test_a_demo_agrees_to_the_bit_and_reports_it(tmp_path, overlap):
    report_file = tmp_path / "report.json"
    running = demo(
        "--stages",
        "1",
        "--replicas",
        "2",
        "--rounds",
        "4",
        "--inner-steps",
        "8",
        "--overlap",
        overlap,
        "--report",
        report_file,
    )
    out, _ = running.communicate(timeout=250)
    assert running.returncode == 0, out
    report = json.loads(report_file.read_text())
    assert len(set(report["heads"].values())) == 1
    assert len(report["heads"]) == 2
    assert len(set(report["anchor_digests"]["0"].values())) == 1
    assert [row["round"] for row in report["rounds"]] == [1, 2, 3, 4]
    assert report["final_val_loss"] < report["initial_val_loss"]
    assert report["errors"] == []


def test_a_killed_peer_is_not_waited_for_and_takes_part_again_when_it_comes_back():
    async def scenario() -> None:
        rounds = {"total": 10_000, "inner_steps": 8, "start_peers": 3}
        async with Watched(preset("tiny", rounds=rounds)) as swarm:
            await swarm.start_bootstrap()
            peers = [await swarm.start_peer(f"peer{index}") for index in range(3)]
            survivors = peers[:2]
            await swarm.until(lambda: swarm.round_of("peer2") >= 3, peers, LONG_S)

            victim = peers[2].process
            helpers = family(victim.pid)
            victim.send_signal(signal.SIGKILL)
            killed_at = swarm.round_of("peer0")
            await swarm.until(lambda: swarm.round_of("peer0") >= killed_at + 5, survivors, LONG_S)
            assert_gone(helpers)
            await swarm.until(
                lambda: len(swarm.of("peer0", "RoundCertified")[-1]["contributors"]) == 2, survivors, LONG_S
            )

            back = await swarm.start_peer("peer2")
            peer_id = swarm.of("peer2", "PeerStarted")[-1]["peer"]
            assert peer_id == swarm.of("peer2", "PeerStarted")[0]["peer"], "the identity survives"

            def counts_again() -> bool:
                return peer_id in swarm.of("peer0", "RoundCertified")[-1]["contributors"]

            await swarm.until(counts_again, [*survivors, back], LONG_S)
            await swarm.until(lambda: _same_anchor_somewhere(swarm, "peer0", "peer2"), [*survivors, back], LONG_S)

    asyncio.run(scenario())


def _same_anchor_somewhere(swarm: Watched, one: str, other: str) -> bool:
    """Whether both report the same round after the return, and then with equal bits."""
    returned = swarm.of(other, "PeerStarted")[-1]["time"]
    digests: dict[int, set[str]] = defaultdict(set)
    counts: dict[int, set[str]] = defaultdict(set)
    for label in (one, other):
        for record in swarm.of(label, "RoundCertified"):
            if record["time"] > returned:
                digests[record["round"]].add(record["anchor_digest"])
                counts[record["round"]].add(label)
    shared = [number for number, labels in counts.items() if len(labels) == 2]
    assert all(len(digests[number]) == 1 for number in shared)
    return len(shared) >= 2


def test_a_frozen_peer_holds_nobody_up_for_good():
    async def scenario() -> None:
        rounds = {"total": 10_000, "inner_steps": 8, "start_peers": 3}
        async with Watched(preset("tiny", rounds=rounds)) as swarm:
            await swarm.start_bootstrap()
            peers = [await swarm.start_peer(f"peer{index}") for index in range(3)]
            await swarm.until(lambda: swarm.round_of("peer2") >= 3, peers, LONG_S)
            frozen = peers[2].process
            frozen.send_signal(signal.SIGSTOP)
            try:
                stopped_at = swarm.round_of("peer0")
                await swarm.until(lambda: swarm.round_of("peer0") >= stopped_at + 5, peers[:2], LONG_S)
            finally:
                frozen.send_signal(signal.SIGCONT)
            goal = swarm.round_of("peer0") + 3
            await swarm.until(lambda: swarm.round_of("peer2") >= goal, peers, LONG_S)

    asyncio.run(scenario())


@pytest.mark.parametrize("stages", ["1", "2"])
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_or_killed_demo_leaves_no_process(signal_number, stages):
    running = demo("--stages", stages, "--replicas", "2", "--rounds", "1000", start_new_session=True)
    assert running.stdout is not None
    line = next(line for line in running.stdout if line.startswith("round"))
    assert "1/1000" in line
    below = family(running.pid)
    assert len(below) >= 6, "bootstrap, two peers and their network daemons, and more"
    os.kill(running.pid, signal_number)
    running.communicate(timeout=60)
    if signal_number == signal.SIGINT:
        assert running.returncode == 130
    assert_gone(below)


def test_a_bootstrap_that_is_killed_is_not_missed():
    async def scenario() -> None:
        rounds = {"total": 10_000, "inner_steps": 8, "start_peers": 2}
        async with Watched(preset("tiny", rounds=rounds)) as swarm:
            bootstrap = await swarm.start_bootstrap()
            peers = [await swarm.start_peer(f"peer{index}") for index in range(2)]
            await swarm.until(lambda: swarm.round_of("peer0") >= 2, peers, LONG_S)
            bootstrap.process.send_signal(signal.SIGKILL)
            goal = swarm.round_of("peer0") + 5
            await swarm.until(lambda: all(swarm.round_of(f"peer{index}") >= goal for index in (0, 1)), peers, LONG_S)

    asyncio.run(scenario())


def test_a_bootstrap_that_starts_again_finds_the_peers_that_it_had_met():
    async def scenario() -> None:
        rounds = {"total": 10_000, "inner_steps": 8, "start_peers": 2}
        async with Watched(preset("tiny", rounds=rounds)) as swarm:
            bootstrap = await swarm.start_bootstrap()
            peers = [await swarm.start_peer(f"peer{index}") for index in range(2)]
            await swarm.until(lambda: bool(list(swarm.folder.glob("peers/bootstrap/runs/*/peers"))), peers, LONG_S)
            await swarm.until(lambda: swarm.round_of("peer0") >= 2, peers, LONG_S)
            bootstrap.process.send_signal(signal.SIGKILL)
            await bootstrap.process.wait()
            before = len(swarm.events["bootstrap"])
            bootstrap = await swarm.start_bootstrap()
            newcomer = await swarm.start_peer("newcomer")
            name = swarm.of("newcomer", "PeerStarted")[0]["peer"]

            def counts() -> bool:
                return any(name in record["contributors"] for record in swarm.of("peer0", "RoundCertified"))

            await swarm.until(counts, [*peers, newcomer, bootstrap], LONG_S)
            told = [record for record in swarm.events["bootstrap"][before:] if record["event"] == "TroubleBegan"]
            assert not [each for each in told if each["trouble"]["kind"] == "empty"], "its stages are not empty"

    asyncio.run(scenario())


def test_a_peer_whose_network_daemon_is_killed_starts_it_again_and_goes_on():
    async def scenario() -> None:
        rounds = {"total": 10_000, "inner_steps": 8, "start_peers": 2}
        async with Watched(preset("tiny", rounds=rounds)) as swarm:
            await swarm.start_bootstrap()
            peers = [await swarm.start_peer(f"peer{index}") for index in range(2)]
            await swarm.until(lambda: swarm.round_of("peer0") >= 3, peers, LONG_S)
            daemons = [process for process in family(peers[1].process.pid) if "p2pd" in process.name()]
            assert len(daemons) == 1
            daemons[0].send_signal(signal.SIGKILL)
            await swarm.until(lambda: len(swarm.of("peer1", "PeerStarted")) == 2, peers, LONG_S)
            assert any("starting it again" in str(each) for each in swarm.of("peer1", "Failed"))
            names = {swarm.of(label, "PeerStarted")[0]["peer"] for label in ("peer0", "peer1")}
            since = len(swarm.of("peer0", "RoundCertified"))

            def both_count() -> bool:
                later = swarm.of("peer0", "RoundCertified")[since:]
                return any(set(record["contributors"]) == names for record in later)

            await swarm.until(both_count, peers, LONG_S)

    asyncio.run(scenario())


def test_a_swarm_that_was_killed_whole_goes_on_where_it_was():
    async def scenario() -> None:
        rounds = {"total": 10_000, "inner_steps": 8, "start_peers": 2}
        async with Watched(preset("tiny", rounds=rounds)) as swarm:
            await swarm.start_bootstrap()
            peers = [await swarm.start_peer(f"peer{index}") for index in range(2)]
            await swarm.until(lambda: swarm.round_of("peer0") >= 4, peers, LONG_S)
            for peer in peers:
                peer.process.send_signal(signal.SIGKILL)
            for peer in peers:
                await peer.process.wait()
                assert peer.reader is not None
                await peer.reader
            reached = min(swarm.round_of(f"peer{index}") for index in range(2))
            swarm.events.clear()
            again = [await swarm.start_peer(f"peer{index}") for index in range(2)]
            await swarm.until(lambda: bool(swarm.of("peer0", "RoundCertified")), again, LONG_S)
            assert swarm.of("peer0", "RoundCertified")[0]["round"] >= reached

    asyncio.run(scenario())
