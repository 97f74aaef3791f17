"""Shards in a real swarm: one peer has the data, the others get it from it, and no document is trained on twice in an epoch."""

import asyncio
import http.server
import json
import random
import signal
import string
import subprocess
import sys
import sysconfig
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dilocox_peer.config import preset
from dilocox_peer.data.catalogue import read_catalogue
from dilocox_peer.data.row import UnitRow
from dilocox_peer.model.partition import with_cut
from tests.swarm.watched import Watched
from tests.tokenizers_made import BOS, EOS, write_model_folder

LONG_S = 400
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def library_packages() -> list[str]:
    """The modules of Python's library, without its tests."""
    return sorted(str(path) for path in Path(sysconfig.get_path("stdlib")).glob("*.py") if path.stat().st_size)


def shards_of_the_library(tmp_path):
    out = tmp_path / "shards"
    command = [sys.executable, "-m", "dilocox_peer", "tokenize", *library_packages(), "--shard-tokens", "300000",
               "--validation", "0.05", "--processes", "1", "--out", str(out)]  # fmt: skip
    subprocess.run(command, check=True, timeout=300)
    return out


def run_of(out, **sections):
    """A manifest of a run with two stages on the shards in out."""
    catalogue, name = read_catalogue(out)
    assert len(catalogue.train) > 5
    inner, rounds = {"micro_batch": 4, "accumulate": 8}, {"total": 10_000, "inner_steps": 4, "start_peers": 1}
    data = {"source": "shards", "catalogue": name}
    manifest = preset("tiny", stages={"count": 2}, inner=inner, rounds=rounds, data=data, **sections)
    return with_cut(manifest), catalogue


def trained(swarm: Watched, labels: list[str]) -> Counter[tuple[int, int]]:
    counts: Counter[tuple[int, int]] = Counter()
    for label in labels:
        for record in swarm.of(label, "DataTaken"):
            counts.update(
                (record["epoch"], place) for place in range(record["first"], record["first"] + record["count"])
            )
    return counts


def test_no_document_is_trained_twice_over_kills_and_a_join(tmp_path):
    out = shards_of_the_library(tmp_path)
    manifest, catalogue = run_of(out)

    async def scenario() -> dict[str, Any]:
        async with Watched(manifest) as swarm:
            await swarm.start_bootstrap()
            owner = await swarm.start_peer("owner", stage=1, more=["--data", str(out)])
            heads = [await swarm.start_peer(f"head{index}", stage=0) for index in range(3)]
            labels = ["head0", "head1", "head2", "joined"]

            def reached(goal: int, *whom: str) -> bool:
                return min(swarm.round_of(label) for label in whom) >= goal

            await swarm.until(lambda: reached(4, "head0", "head1", "head2"), [owner, *heads], LONG_S)
            heads[1].process.send_signal(signal.SIGKILL)
            at = swarm.round_of("head0")
            await swarm.until(lambda: reached(at + 4, "head0", "head2"), [owner, heads[0], heads[2]], LONG_S)
            heads[1] = await swarm.start_peer("head1", stage=0)  # its disk is there still
            joined = await swarm.start_peer("joined", stage=0)
            at = swarm.round_of("head0")
            await swarm.until(lambda: reached(at + 4, "head0", "head1", "joined"), [owner, *heads, joined], LONG_S)
            heads[2].process.send_signal(signal.SIGKILL)
            at = swarm.round_of("head0")
            await swarm.until(lambda: reached(at + 6, "head0", "head1", "joined"), [owner, *heads[:2], joined], LONG_S)
            return {
                "counts": trained(swarm, labels),
                "fetched": {label: len(swarm.of(label, "ShardFetched")) for label in labels},
                "rounds": {label: swarm.round_of(label) for label in labels},
                "failed": [record for label in labels for record in swarm.of(label, "Failed")],
            }

    found = asyncio.run(scenario())
    first_epoch = {place: number for (epoch, place), number in found["counts"].items() if epoch == 0}
    print(json.dumps({key: found[key] for key in ("fetched", "rounds", "failed")}), len(first_epoch), "units")
    handed_out = UnitRow(catalogue, 0).row.to_hand_out
    ours = [number for place, number in first_epoch.items() if place < handed_out]
    commons = [number for place, number in first_epoch.items() if place >= handed_out]
    print(
        f"{len(ours)} units handed out, each trained {max(ours)} time; {len(commons)} of the commons, {sum(n > 1 for n in commons)} twice"
    )
    assert len(ours) > 20
    assert max(ours) == 1, "no document twice in the first epoch"
    assert all(found["fetched"][label] > 0 for label in ("head0", "head1", "joined"))


def test_two_heads_that_are_killed_one_after_the_other_train_on_nothing_twice(tmp_path):
    """Four peers, of which one tail has the data: the head that is left goes on alone each time, and the other comes back to it."""
    out = shards_of_the_library(tmp_path)
    manifest, catalogue = run_of(out)

    async def scenario() -> dict[str, Any]:
        async with Watched(manifest) as swarm:
            await swarm.start_bootstrap()
            tails = [await swarm.start_peer("owner", stage=1, more=["--data", str(out)])]
            heads = [await swarm.start_peer(f"head{index}", stage=0) for index in range(2)]
            tails.append(await swarm.start_peer("tail", stage=1))
            labels = ["head0", "head1", "joined"]

            async def reach(more: int, *alive: Any) -> None:
                whom = [each.label for each in alive if each not in tails]
                goal = max(swarm.round_of(label) for label in whom) + more
                await swarm.until(
                    lambda: min(swarm.round_of(label) for label in whom) >= goal, [*alive, *tails], LONG_S
                )

            await reach(4, *heads)
            heads[1].process.send_signal(signal.SIGKILL)
            await reach(4, heads[0])
            heads[1] = await swarm.start_peer("head1", stage=0)
            await reach(4, *heads)
            heads[0].process.send_signal(signal.SIGKILL)
            joined = await swarm.start_peer("joined", stage=0)
            await reach(6, heads[1], joined)
            return {
                "counts": trained(swarm, labels),
                "rounds": {label: swarm.round_of(label) for label in labels},
            }

    found = asyncio.run(scenario())
    first_epoch = {place: number for (epoch, place), number in found["counts"].items() if epoch == 0}
    handed_out = UnitRow(catalogue, 0).row.to_hand_out
    twice = sorted(place for place, number in first_epoch.items() if number > 1)
    print(f"{len(first_epoch)} of {handed_out} units trained on, twice: {twice}; rounds {found['rounds']}")
    assert not [place for place in twice if place < handed_out]


def test_two_heads_on_branches_of_their_own_train_on_nothing_twice_but_by_chance(tmp_path):
    """Both vote, and each goes on alone from a round that both had: two branches, of which one is given up when they meet."""
    out = shards_of_the_library(tmp_path)
    manifest, catalogue = run_of(out, admission={"votes_after": 0})

    async def scenario() -> dict[str, Any]:
        async with Watched(manifest) as swarm:
            await swarm.start_bootstrap(
                "--no-keep"
            )  # or who comes back goes on with the other's rounds, and there are no branches
            tails = [await swarm.start_peer("owner", stage=1, more=["--data", str(out)])]
            heads = [await swarm.start_peer(f"head{index}", stage=0) for index in range(2)]
            tails.append(await swarm.start_peer("tail", stage=1))

            async def reach(goal: int, *alive: Any) -> None:
                labels = [each.label for each in alive]
                await swarm.until(
                    lambda: min(swarm.round_of(label) for label in labels) >= goal, [*alive, *tails], LONG_S
                )

            await reach(4, *heads)
            at = swarm.round_of("head1")
            heads[1].process.send_signal(signal.SIGKILL)
            await reach(swarm.round_of("head0") + 6, heads[0])  # alone, after a view change
            heads[0].process.send_signal(signal.SIGKILL)
            heads[1] = await swarm.start_peer("head1", stage=0)  # knows nothing of those rounds
            await reach(at + 8, heads[1])
            forked = [swarm.round_of("head0"), swarm.round_of("head1"), at]
            heads[0] = await swarm.start_peer("head0", stage=0)
            switched = lambda: [each for label in ("head0", "head1") for each in swarm.of(label, "BranchSwitched")]  # noqa: E731
            await swarm.until(lambda: switched() != [], [*heads, *tails], LONG_S)
            await reach(max(forked) + 6, *heads)
            return {
                "counts": trained(swarm, ["head0", "head1"]),
                "forked": forked,
            }

    found = asyncio.run(scenario())
    first_epoch = {place: number for (epoch, place), number in found["counts"].items() if epoch == 0}
    handed_out = UnitRow(catalogue, 0).row.to_hand_out
    twice = sorted(place for place, number in first_epoch.items() if number > 1)
    print(f"{len(first_epoch)} of {handed_out} units, twice: {twice}; rounds {found['forked']}")
    assert not [place for place in twice if place < handed_out]


def test_a_peer_alone_trains_on_shards_from_the_web(tmp_path):
    """Nobody has the data but a web server: catalogue and shards come from there."""
    out = shards_of_the_library(tmp_path)
    handler = partial(Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            url = f"http://127.0.0.1:{server.server_address[1]}/shards"
            _, name = read_catalogue(out)
            data = {"source": "shards", "catalogue": name, "url": url}
            manifest = preset("tiny", rounds={"total": 10_000, "inner_steps": 4}, data=data)

            async def scenario() -> list[dict[str, Any]]:
                async with Watched(manifest) as swarm:
                    await swarm.start_bootstrap()
                    peer = await swarm.start_peer("alone", more=["--local-data-url"])
                    await swarm.until(lambda: swarm.round_of("alone") >= 3, [peer], LONG_S)
                    return swarm.of("alone", "ShardFetched")

            fetched = asyncio.run(scenario())
        finally:
            server.shutdown()
            serving.join(10.0)
    assert fetched
    assert all(each["is_from_web"] for each in fetched)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def test_conversations_are_learned_over_two_stages(tmp_path):
    """The loss is of answers alone, which are all alike: it falls far below what the questions, made of noise, would allow."""
    rng = random.Random(1)
    lines = []
    for _ in range(3000):
        noise = "".join(rng.choices(string.ascii_letters, k=30))
        talk = [{"role": "user", "content": noise}, {"role": "assistant", "content": "the same answer"}]
        lines.append(json.dumps({"messages": talk}) + "\n")
    (tmp_path / "talks.jsonl").write_text("".join(lines))
    template = "{% for m in messages %}" + BOS + "{{ m['role'] }}\n{{ m['content'] }}" + EOS + "\n{% endfor %}"
    template += "{% if add_generation_prompt %}" + BOS + "assistant\n{% endif %}"
    write_model_folder(tmp_path / "model", chat_template=template)
    out = tmp_path / "shards"
    command = [sys.executable, "-m", "dilocox_peer", "tokenize", str(tmp_path / "talks.jsonl"), "--chat", "--tokenizer", str(tmp_path / "model"),
               "--shard-tokens", "50000", "--validation", "0.05", "--out", str(out)]  # fmt: skip
    subprocess.run(command, check=True, timeout=300)
    catalogue, name = read_catalogue(out)
    assert catalogue.answers
    manifest = with_cut(
        preset(
            "tiny",
            model={"vocab_size": catalogue.vocab_size},
            stages={"count": 2},
            inner={"micro_batch": 4, "accumulate": 2},
            rounds={"total": 10_000, "inner_steps": 8},
            data={
                "source": "shards",
                "catalogue": name,
                "tokenizer": catalogue.tokenizer,
                "eos": catalogue.eos,
                "packing": "best-fit",
            },
        )
    )

    async def scenario() -> list[float]:
        async with Watched(manifest) as swarm:
            await swarm.start_bootstrap()
            peers = [
                await swarm.start_peer(f"stage{stage}", stage=stage, more=["--data", str(out)]) for stage in range(2)
            ]
            await swarm.until(lambda: swarm.round_of("stage0") >= 12, peers, LONG_S)
            return [each["train_loss"] for each in swarm.of("stage0", "RoundCertified")]

    losses = asyncio.run(scenario())
    print(f"loss of answers by round: {[round(loss, 2) for loss in losses]}")
    assert losses[-1] < 1.5, "with the questions in it, 30 letters at random of some 60 tokens, it stays above 2"
