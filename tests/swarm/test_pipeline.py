"""Real peers of several stages in real processes: they learn, survive the loss of a stage's peer and of linkd, and agree."""

import asyncio
import json
import signal

import psutil
import pytest

from dilocox_peer.cli.home import PeerHome
from dilocox_peer.config import preset
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.partition import with_cut
from dilocox_peer.peer.arrival import STAGE_FILE, held_stage
from tests.swarm.watched import LONG_S, Watched, assert_gone, demo, family

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def manifest_of(stages: int, *, layers: int = 2, **rounds: int) -> Manifest:
    return with_cut(
        preset(
            "tiny",
            model={"layers": layers},
            stages={"count": stages},
            inner={"micro_batch": 4, "accumulate": 8},
            rounds={"total": 10_000, "inner_steps": 4, **rounds},
        )
    )


@pytest.mark.parametrize(
    ("stages", "replicas", "more"),
    [(2, 1, ["--schedule", "flush"]), (2, 1, ["--overlap", "none"]), (2, 2, ["--overlap", "one-step"]), (2, 3, []), (3, 1, []), (4, 2, [])],
)  # fmt: skip
def test_a_demo_of_any_layout_agrees_to_the_bit_in_every_stage(tmp_path, stages, replicas, more):
    report_file = tmp_path / "report.json"
    running = demo(
        "--stages", str(stages), "--replicas", str(replicas), "--rounds", "4", "--inner-steps", "4", *more,
        "--report", report_file,
    )  # fmt: skip
    out, _ = running.communicate(timeout=390)
    assert running.returncode == 0, out
    report = json.loads(report_file.read_text())
    assert report["errors"] == []
    assert len(report["anchor_digests"]) == stages
    for digests in report["anchor_digests"].values():
        assert len(digests) == replicas
        assert len(set(digests.values())) == 1
    assert [row["round"] for row in report["rounds"]] == [1, 2, 3, 4]
    assert report["final_val_loss"] < 0.8 * report["initial_val_loss"]


def test_a_killed_peer_of_a_later_stage_is_not_missed_upstream_and_comes_back():
    async def scenario() -> None:
        async with Watched(manifest_of(2, start_peers=2)) as swarm:
            await swarm.start_bootstrap()
            later = [await swarm.start_peer(f"later{index}", stage=1) for index in range(2)]
            heads = [await swarm.start_peer(f"head{index}", stage=0) for index in range(2)]
            peers = [*later, *heads]
            await swarm.until(lambda: swarm.round_of("head0") >= 3 and swarm.round_of("later1") >= 3, peers, LONG_S)

            victim = later[1].process
            helpers = family(victim.pid)
            victim.send_signal(signal.SIGKILL)
            killed_at = swarm.round_of("head0")
            alive = [later[0], *heads]
            await swarm.until(
                lambda: min(swarm.round_of(label) for label in ("head0", "head1", "later0")) >= killed_at + 4,
                alive,
                LONG_S,
            )
            assert_gone(helpers)
            for label in ("head0", "head1"):
                upstream = lambda: swarm.of(label, "RoundCertified")[-1]["contributors"]  # noqa: E731, B023
                await swarm.until(lambda: len(upstream()) == 2, alive, LONG_S)  # noqa: B023
                assert swarm.of(label, "NeighbourUnlinked")

            back = await swarm.start_peer("later1", stage=1)
            peer_id = swarm.of("later1", "PeerStarted")[-1]["peer"]

            def counts_again() -> bool:
                return peer_id in swarm.of("later0", "RoundCertified")[-1]["contributors"]

            await swarm.until(counts_again, [*alive, back], LONG_S)

    asyncio.run(scenario())


def test_a_stage_that_lost_its_only_peer_goes_on_from_the_copy_that_a_head_kept():
    async def scenario() -> None:
        async with Watched(manifest_of(2, start_peers=1)) as swarm:
            await swarm.start_bootstrap("--no-keep")
            later = await swarm.start_peer("later", stage=1)
            heads = [await swarm.start_peer(f"head{index}", stage=0) for index in range(2)]
            await swarm.until(lambda: bool(swarm.of("head0", "StageCopied")), [later, *heads], LONG_S)
            later.process.send_signal(signal.SIGKILL)
            killed_at = swarm.round_of("head0")
            newcomer = await swarm.start_peer("newcomer")  # with a disk of its own; the need tells it the stage
            victim = swarm.of("later", "PeerStarted")[0]["peer"]
            copies = [record for head in ("head0", "head1") for record in swarm.of(head, "StageCopied")]
            copied = max(record["round"] for record in copies if record["donor"] == victim)
            [restored] = [record["round"] for record in swarm.of("newcomer", "StageRestored")]
            assert copied <= restored, "from the copy, and the contributions that a head has followed it with"
            goal = killed_at + 20  # so it caught up with stage 0: no head is more than two rounds ahead
            await swarm.until(lambda: swarm.round_of("head0") >= goal, [newcomer, *heads], LONG_S)
            first = min(record["round"] for record in swarm.of("newcomer", "RoundCertified"))
            states = {record["round"] for record in copies if record["donor"] == victim}
            assert first - 1 in states, "from the state on it merges what the head has followed it with, and tells that"
            assert first <= restored + 1
            assert swarm.round_of("newcomer") >= goal - 2

    asyncio.run(scenario())


def test_when_the_only_peer_of_a_stage_leaves_one_of_the_other_moves_there():
    async def scenario() -> None:
        async with Watched(manifest_of(2, start_peers=1)) as swarm:
            await swarm.start_bootstrap()
            children = {label: await swarm.start_peer(label) for label in ("a", "b", "c")}
            stage_of = {label: swarm.of(label, "PeerStarted")[0]["stage"] for label in children}
            lonely = next(label for label in children if list(stage_of.values()).count(stage_of[label]) == 1)
            stage = stage_of[lonely]
            others = [label for label in children if label != lonely]
            stay = [children[label] for label in others]
            copied = lambda: any(swarm.of(label, "StageCopied") for label in others)  # noqa: E731
            await swarm.until(copied, list(children.values()), LONG_S)
            children[lonely].process.send_signal(signal.SIGINT)

            def movers() -> list[str]:
                return [label for label in others if swarm.of(label, "PeerStarted")[-1]["stage"] == stage]

            await swarm.until(lambda: bool(movers()), stay, LONG_S)
            assert swarm.of(movers()[0], "StageRestored"), "from a copy, its own perhaps"
            goal = max(swarm.round_of(label) for label in others) + 5
            await swarm.until(lambda: all(swarm.round_of(label) >= goal for label in others), stay, LONG_S)
            assert len(movers()) == 1, "the other one stayed"
            folder = PeerHome.at(swarm.folder, movers()[0], None).run_folder(swarm.manifest.run_id)
            assert held_stage(folder) == stage == int((folder / STAGE_FILE).read_text()), "where it comes back to"

    asyncio.run(scenario())


def test_a_killed_linkd_is_started_again_and_nobody_leaves():
    async def scenario() -> None:
        async with Watched(manifest_of(2, start_peers=1)) as swarm:
            await swarm.start_bootstrap()
            later = await swarm.start_peer("later", stage=1)
            head = await swarm.start_peer("head", stage=0)
            peers = [later, head]
            for victim in ("later", "head"):
                goal = swarm.round_of("head") + 2
                await swarm.until(lambda: swarm.round_of("head") >= goal, peers, LONG_S)  # noqa: B023
                pid = {"later": later, "head": head}[victim].process.pid
                linkds = [process for process in family(pid) if "dilocox_peer.network.linkd" in process.cmdline()]
                assert len(linkds) == 1
                linkds[0].send_signal(signal.SIGKILL)
                psutil.wait_procs(linkds, timeout=10)
                goal = swarm.round_of("head") + 4
                await swarm.until(lambda: swarm.round_of("head") >= goal, peers, LONG_S)  # noqa: B023
            assert swarm.of("head", "NeighbourUnlinked")

    asyncio.run(scenario())


def test_four_who_join_together_without_a_word_share_the_stages_out():
    async def scenario() -> None:
        async with Watched(manifest_of(2, start_peers=2)) as swarm:
            await swarm.start_bootstrap()
            more = [["--outgoing-only"], [], [], []]
            peers = await asyncio.gather(*(swarm.start_peer(f"peer{index}", more=more[index]) for index in range(4)))
            stages = [swarm.of(f"peer{index}", "PeerStarted")[0]["stage"] for index in range(4)]
            assert sorted(stages) == [0, 0, 1, 1], stages
            assert stages[0] == 0, "who cannot be dialled dials"
            await swarm.until(lambda: all(swarm.round_of(f"peer{index}") >= 2 for index in range(4)), peers, LONG_S)

    asyncio.run(scenario())
