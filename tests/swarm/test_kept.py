"""A run whose peers have all gone to bed goes on where it was, from who keeps it: real processes, all of them killed now and then."""

import asyncio
import os
import shutil
import signal
import sys

import psutil
import pytest

from dilocox_peer.cli.children import Child
from dilocox_peer.config import preset
from tests.swarm.watched import LONG_S, Watched

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROUNDS = {"total": 10_000, "inner_steps": 4, "checkpoint_every": 4}


async def kill(*children: Child) -> None:
    """As a power cut would; their helpers notice and end."""
    helpers = [each for child in children for each in psutil.Process(child.process.pid).children(recursive=True)]
    for child in children:
        os.kill(child.process.pid, signal.SIGKILL)
    for child in children:
        await child.process.wait()
        assert child.reader is not None
        await child.reader
    _, alive = await asyncio.to_thread(psutil.wait_procs, helpers, 15)
    assert not alive


async def leave(*children: Child) -> None:
    for child in children:
        child.process.terminate()
    for child in children:
        await child.process.wait()
        assert child.reader is not None
        await child.reader


def rounds_of(swarm: Watched, label: str) -> list[int]:
    """Those that it trained in; what it takes over from before is certified here too."""
    return [each["round"] for each in swarm.of(label, "RoundClosed")]


def tip(swarm: Watched, *labels: str) -> int:
    """The newest round that one of them certified."""
    return max(swarm.round_of(label) for label in labels)


def kept(swarm: Watched, label: str = "bootstrap") -> int:
    return max((each["round"] for each in swarm.of(label, "RunKept")), default=0)


async def command(swarm: Watched, *arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dilocox_peer", *arguments, "--home", str(swarm.folder),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    async with asyncio.timeout(LONG_S):
        said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    return said.decode()


@pytest.mark.parametrize("stages", [1, 2])
def test_a_newcomer_goes_on_where_all_have_left_and_where_the_keeper_was_killed_too(stages: int) -> None:
    async def scenario() -> None:
        async with Watched(preset("tiny", rounds=ROUNDS, stages={"count": stages})) as swarm:
            bootstrap = await swarm.start_bootstrap()
            before = [0] * stages
            for era in range(3):
                labels = [f"era{era}-stage{stage}" for stage in range(stages)]
                stay = [
                    await swarm.start_peer(label, stage=stage if stages > 1 else None)
                    for stage, label in enumerate(labels)
                ]
                enough = max(before) + 6
                await swarm.until(
                    lambda labels=labels, enough=enough: min(map(swarm.round_of, labels)) >= enough,  # type: ignore[misc]
                    [bootstrap, *stay], LONG_S,
                )  # fmt: skip
                await swarm.until(lambda: kept(swarm) > 0, [bootstrap, *stay], LONG_S)
                assert [rounds_of(swarm, label)[0] for label in labels] == [number + 1 for number in before]
                await leave(*stay)
                before = list(map(swarm.round_of, labels))
                if era == 1:  # the keeper is killed, and restarted from its disk with nobody there
                    await kill(bootstrap)
                    bootstrap = await swarm.start_bootstrap()

    asyncio.run(scenario())


@pytest.mark.parametrize("stages", [1, 2])
def test_a_complete_run_is_told_with_the_line_that_gets_its_model_from_the_keeper_alone(stages: int) -> None:
    rounds = {"total": 4, "inner_steps": 4, "checkpoint_every": 2}

    async def scenario() -> None:
        async with Watched(preset("tiny", rounds=rounds, stages={"count": stages})) as swarm:
            bootstrap = await swarm.start_bootstrap("--evaluate")
            labels = [f"peer{stage}" for stage in range(stages)]
            stay = [
                await swarm.start_peer(label, stage=stage if stages > 1 else None) for stage, label in enumerate(labels)
            ]
            for child in stay:
                async with asyncio.timeout(LONG_S):
                    assert await child.process.wait() == 0
                assert child.reader is not None
                await child.reader
            await swarm.until(
                lambda: [each["is_last"] for each in swarm.of("bootstrap", "RunKept")][-1:] == [True],
                [bootstrap],
                LONG_S,
            )
            evaluated = lambda: [each["round"] for each in swarm.of("bootstrap", "Evaluated")]  # noqa: E731
            await swarm.until(lambda: evaluated()[-1:] == [4], [bootstrap], LONG_S)
            tips = {each["head"] for label in labels for each in swarm.of(label, "RunComplete")}

            late = await swarm.children.start("late", ["join", swarm.link, "--name", "late", *swarm.common])
            async with asyncio.timeout(LONG_S):
                assert await late.process.wait() == 0
            assert late.reader is not None
            await late.reader
            [told] = swarm.of("late", "RunIsOver")
            assert (told["round"], told["head"] in tips) == (4, True)
            assert swarm.of("late", "Left")[-1]["reason"] == "the run is complete"
            assert swarm.of("late", "PeerStarted") == []

            line = told["link"]
            assert line.startswith("dilocox://")
            for again in range(2):
                said = await command(swarm, "export", line, "--out", str(swarm.folder / f"model{again}"))
                assert "after round 4" in said
                assert f"stage {stages - 1}: round 4" in said
                if not again:  # the keeper remembers
                    await kill(bootstrap)
                    bootstrap = await swarm.start_bootstrap()
                    line = swarm.link
            said = await command(swarm, "evaluate", line)
            assert "round 4: validation loss" in said

    asyncio.run(scenario())


def test_a_keeper_that_is_killed_in_mid_run_is_not_missed() -> None:
    async def scenario() -> None:
        async with Watched(preset("tiny", rounds=ROUNDS)) as swarm:
            bootstrap = await swarm.start_bootstrap()
            peers = [await swarm.start_peer(label) for label in ("a", "b")]
            await swarm.until(lambda: kept(swarm) > 0 and swarm.round_of("b") > 3, [bootstrap, *peers], LONG_S)
            await kill(bootstrap)
            at = tip(swarm, "a", "b")
            await swarm.until(lambda: min(map(swarm.round_of, "ab")) >= at + 8, peers, LONG_S)
            changes = [each for label in "ab" for each in swarm.of(label, "ViewChanged") if each["view"] > 1]
            assert changes == [], "the roster stayed as it was"

    asyncio.run(scenario())


def test_who_waits_for_the_state_goes_on_when_a_keeper_comes_back() -> None:
    async def scenario() -> None:
        async with Watched(preset("tiny", rounds=ROUNDS)) as swarm:
            bootstrap = await swarm.start_bootstrap()
            peer = await swarm.start_peer("a")
            await swarm.until(
                lambda: kept(swarm) > 0 and len(swarm.of("bootstrap", "RoundVouched")) > 1, [bootstrap, peer], LONG_S
            )
            await leave(peer)
            before = swarm.round_of("a")
            await kill(bootstrap)
            bare = await swarm.start_bootstrap("--no-keep")  # it has signed checkpoints, and has no state
            newcomer = await swarm.start_peer("b")
            await swarm.until(lambda: swarm.of("b", "StateAwaited") != [], [bare, newcomer], LONG_S)
            assert rounds_of(swarm, "b") == []
            folders = [swarm.folder / "peers" / name for name in ("bootstrap", "second")]
            shutil.copytree(folders[0] / "runs", folders[1] / "runs")  # what the first one kept
            second = await swarm.children.start(
                "second",
                [
                    "bootstrap",
                    str(swarm.folder / "run.toml"),
                    "--name",
                    "second",
                    "--initial-peers",
                    swarm.link.split("@")[1],
                    *swarm.common,
                ],
            )
            await swarm.until(lambda: len(rounds_of(swarm, "b")) > 2, [bare, newcomer, second], LONG_S)
            assert rounds_of(swarm, "b")[0] == before + 1

    asyncio.run(scenario())


def test_a_run_starts_again_from_its_peers_disks_when_its_bootstrap_is_gone_for_good() -> None:
    async def scenario() -> None:
        async with Watched(preset("tiny", rounds=ROUNDS, stages={"count": 2})) as swarm:
            bootstrap = await swarm.start_bootstrap("--no-keep")
            labels = ("a0", "b0", "a1", "b1")
            stage_of = {label: int(label[1]) for label in labels}
            peers = [await swarm.start_peer(label, stage=stage_of[label]) for label in labels]
            everybody = lambda: min(map(swarm.round_of, labels))  # noqa: E731
            await swarm.until(lambda: everybody() >= 6, [bootstrap, *peers], LONG_S)
            link = swarm.link
            await kill(bootstrap, *peers)
            before = {stage: tip(swarm, *(label for label in labels if stage_of[label] == stage)) for stage in (0, 1)}
            counted = {label: len(rounds_of(swarm, label)) for label in labels}
            assert swarm.link == link
            began = asyncio.get_running_loop().time()
            again = [await swarm.start_peer(label) for label in labels]  # one after the other
            new = lambda label: rounds_of(swarm, label)[counted[label] :]  # noqa: E731
            await swarm.until(lambda: all(len(new(label)) >= 3 for label in labels), again, LONG_S)
            print(f"all train {asyncio.get_running_loop().time() - began:.1f} s after the first was started")
            assert swarm.of("a0", "NobodyAnswers") != []
            for stage, number in before.items():
                of_stage = [label for label in labels if stage_of[label] == stage]
                first = min(new(label)[0] for label in of_stage)
                # One may have been certified and not told yet when all were killed.
                assert number < first <= number + 2, f"stage {stage}: round {first} after {number}"
            founded = [each for label in labels for each in swarm.of(label, "FirstRosterSigned")]
            assert founded == []
            both = lambda: swarm.of("a0", "RoundCertified")[-1:] + swarm.of("b0", "RoundCertified")[-1:]  # noqa: E731
            await swarm.until(
                lambda: len({each["head"] for each in both()}) == 1 and len(both()[0]["roster"]) == 2, again, LONG_S
            )

    asyncio.run(scenario())


@pytest.mark.parametrize("has_keeper", [True, False])
def test_a_stage_all_of_whose_peers_are_killed_goes_on_from_the_keeper_or_from_the_others_copies(
    has_keeper: bool,
) -> None:
    async def scenario() -> None:
        rounds = ROUNDS | {"inner_steps": 16}  # who follows looks once a second at most
        async with Watched(preset("tiny", rounds=rounds, stages={"count": 2})) as swarm:
            bootstrap = await swarm.start_bootstrap(*([] if has_keeper else ["--no-keep"]))
            more = ("--backup-stages", "0" if has_keeper else "1")  # one or the other has it
            peers = {label: await swarm.start_peer(label, more=more) for label in ("a", "b", "c", "d")}
            stage_of = {label: swarm.of(label, "PeerStarted")[-1]["stage"] for label in peers}
            last = [label for label in peers if stage_of[label] == 1]
            assert len(last) == 2
            await swarm.until(lambda: tip(swarm, *last) >= 17, [bootstrap, *peers.values()], LONG_S)
            await kill(*(peers[label] for label in last))
            killed_at = asyncio.get_running_loop().time()
            before = tip(swarm, *last)
            came = [each for label in peers for each in swarm.of(label, "StageFollowed") if each["stage"] == 1]
            print(
                f"followed: {len(came)} looks, {sum(each['size_bytes'] for each in came) / 1e6:.2f} MB in {before} rounds"
            )
            left = [label for label in peers if label not in last]
            moved = lambda: [label for label in left if swarm.of(label, "PeerStarted")[-1]["stage"] == 1]  # noqa: E731
            await swarm.until(lambda: moved() != [], [bootstrap], LONG_S)
            mover = moved()[0]
            started = swarm.of(mover, "PeerStarted")[-1]["time"]

            def since() -> list[int]:
                return [each["round"] for each in swarm.of(mover, "RoundClosed") if each["time"] > started]

            await swarm.until(lambda: len(since()) >= 2, [bootstrap, peers[mover]], LONG_S)
            print(
                f"certified again after {asyncio.get_running_loop().time() - killed_at:.1f} s, from round {since()[0]}, {before} before"
            )
            assert before - 2 <= since()[0] - 1 <= before

    asyncio.run(scenario())


def test_rounds_whose_contributions_died_with_everybody_are_given_up_for_those_who_go_on() -> None:
    """All peers are killed at once, and the keeper just then knows of certificates that it lacks the contributions to."""

    async def scenario() -> None:
        async with Watched(preset("tiny", rounds=ROUNDS)) as swarm:
            bootstrap = await swarm.start_bootstrap()
            peers = [await swarm.start_peer(label) for label in ("a", "b")]
            await swarm.until(lambda: kept(swarm) > 0 and tip(swarm, "a", "b") > 8, [bootstrap, *peers], LONG_S)
            await kill(*peers)
            before = tip(swarm, "a", "b")
            newcomer = await swarm.start_peer("c")
            await swarm.until(lambda: len(rounds_of(swarm, "c")) > 2, [bootstrap, newcomer], LONG_S)
            first = rounds_of(swarm, "c")[0]
            assert 1 < first <= before + 1
            reached = kept(swarm)
            await swarm.until(lambda: kept(swarm) > max(reached, before), [bootstrap, newcomer], LONG_S)
            await leave(newcomer)
            last = swarm.round_of("c")
            second = await swarm.start_peer("d")
            await swarm.until(lambda: rounds_of(swarm, "d") != [], [bootstrap, second], LONG_S)
            assert rounds_of(swarm, "d")[0] == last + 1

    asyncio.run(scenario())
