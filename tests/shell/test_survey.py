"""A live run read by somebody who takes no part in it, over real networks: whom it believes, and when it says that it is over."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dilocox_peer.cli import evaluate
from dilocox_peer.cli.flags import EvaluateFlags
from dilocox_peer.events import Event, MessageRefused, Remark, RunComplete
from dilocox_peer.events_of_data import Evaluated
from dilocox_peer.events_of_states import StateFetchFailed
from dilocox_peer.peer.identity import encode_key
from dilocox_peer.peer.state import survey as survey_module
from dilocox_peer.peer.state.survey import Survey, common_tip, fetch_all, newest_common, surveys
from dilocox_peer.peer.training.anchor_state import AnchorState
from dilocox_peer.wire.declared import replaced
from tests.certified_stage import MANIFEST, ROSTER, CertifiedStage
from tests.cut_runs import corpus
from tests.shell.conftest import until
from tests.shell.test_backup import MakeNode, Node, make_node

__all__ = ["make_node"]

ROUNDS = MANIFEST.rounds.total
assert ROUNDS is not None
MakeMember = Callable[[int], Awaitable[Node]]


def forged(state: AnchorState) -> AnchorState:
    """Other values at the same head."""
    zeros = bytes(len(state.anchor))
    return AnchorState.of(state.layout, head=state.head, round_number=state.round, anchor=zeros, momentum=zeros)


@pytest.fixture(autouse=True)
def the_directory_is_read_at_every_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey_module, "DIRECTORY_EVERY_S", 0.0)


@pytest.fixture
async def make_member(make_node: MakeNode, tmp_path: Path) -> MakeMember:
    """A node with the key of the roster's peer of that number; each is of one stage."""

    async def make(number: int) -> Node:
        key = tmp_path / f"member{number}" / "identity.key"
        key.parent.mkdir()
        key.touch(mode=0o600)
        key.write_bytes(encode_key(bytes([number + 1]) * 32))
        node = await make_node(f"member{number}")
        assert node.presence.me == ROSTER[number]
        return node

    return make


async def survey_of(node: Node) -> Sequence[Survey]:
    await node.directory.publish_manifest(MANIFEST)
    found = surveys(MANIFEST, transport=node.presence.transport, directory=node.directory, listener=node.events.append)
    for survey in found:
        await survey.look()
    return found


async def test_the_newest_round_that_all_stages_name_is_had_whatever_a_donor_says(make_node: MakeNode) -> None:
    reader, first, liar, second = [await make_node(name) for name in ("reader", "first", "liar", "second")]
    one, two = CertifiedStage(stage=0).rounds(5), CertifiedStage(stage=1).rounds(4)
    await first.hold(one, lambda: one.states[3])
    await second.hold(two, lambda: two.states[3])
    await liar.hold(two, lambda: forged(two.states[3]))
    found = await survey_of(reader)
    wanted = newest_common(found)
    assert wanted is not None
    assert [each.round for each in wanted] == [3, 3]
    for _ in range(10):  # the donors are asked in any order
        states = await fetch_all(found, wanted)
        assert states == (one.states[3], two.states[3])
    failed = [(event.donor, event.reason) for event in reader.told(StateFetchFailed)]  # type: ignore[attr-defined]
    assert {donor for donor, _ in failed} <= {liar.presence.me}, failed


async def test_one_member_cannot_tell_a_reader_that_the_run_is_over(
    make_member: MakeMember, make_node: MakeNode
) -> None:
    reader, honest, traitor = await make_node("reader"), await make_member(0), await make_member(1)
    stage, alone = CertifiedStage().rounds(4), CertifiedStage().rounds(4).seized(ROSTER[1]).rounds(ROUNDS - 4)
    await traitor.hold(alone, lambda: alone.states[-1])
    survey = (await survey_of(reader))[1]
    assert survey.annals.place == stage.place, "as far as the quorum went"
    assert not survey.annals.is_over
    await honest.hold(stage.round(), lambda: stage.states[-1])
    await survey.look()
    assert survey.annals.place == stage.place, "which goes on"
    assert not survey.annals.is_over


async def test_what_does_not_verify_is_told_once_with_its_sender(make_node: MakeNode) -> None:
    reader, stranger, honest = [await make_node(name) for name in ("reader", "stranger", "honest")]
    stage, other = CertifiedStage().rounds(3), CertifiedStage(stage=1).rounds(2)
    worthless = replaced(other.certificates[0], signatures=())
    await honest.hold(stage, lambda: stage.states[-1])
    other.certificates[:] = [worthless]
    await stranger.hold(other, lambda: other.states[-1])
    survey = (await survey_of(reader))[1]
    for _ in range(3):
        await survey.look()
    assert survey.annals.place == stage.place
    assert {event.peer for event in reader.told(MessageRefused)} <= {stranger.presence.me}  # type: ignore[attr-defined]


async def test_the_last_state_is_the_one_that_most_voters_name(make_member: MakeMember, make_node: MakeNode) -> None:
    """No certificate names it. Those who are in no roster have no say, however many they are."""
    reader = await make_node("reader")
    stage = CertifiedStage().rounds(ROUNDS)
    lie = forged(stage.states[-1])
    survey = (await survey_of(reader))[1]
    for name in ("x", "y", "z"):
        await (await make_node(name)).hold(stage, lambda: lie)
    members = [await make_member(number) for number in range(3)]
    await members[0].hold(stage, lambda: lie)
    await survey.look()
    assert survey.annals.is_over
    await members[1].hold(stage, lambda: stage.states[-1])
    await survey.look()
    assert await survey.tip() is None, "one against one"
    await members[2].hold(stage, lambda: stage.states[-1])
    await survey.look()
    tip = await survey.tip()
    assert tip is not None
    assert (tip.round, tip.digest) == (ROUNDS, stage.states[-1].digest)
    assert await survey.fetch(tip) == stage.states[-1]


async def followed(node: Node, monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """What the evaluator tells until it has come to the end."""
    monkeypatch.setattr("dilocox_peer.data.corpus.load_corpus", lambda *_, **__: corpus())
    monkeypatch.setattr(evaluate, "ROUND_BYTES", 512)
    monkeypatch.setattr(evaluate, "FINAL_BYTES", 512)
    monkeypatch.setattr(evaluate, "LOOK_S", 0.05)
    monkeypatch.setattr(evaluate, "OVER_S", 0.5)
    unused: Any = None
    evaluator = evaluate.Evaluator(EvaluateFlags(link=""), unused, unused, node.events.append)
    await node.directory.publish_manifest(MANIFEST)
    async with asyncio.timeout(60):
        await evaluator.follow(node.presence.transport, node.directory, MANIFEST)
    return node.events


def evaluated(told: Sequence[Event]) -> list[int]:
    return [event.round for event in told if isinstance(event, Evaluated)]


async def test_the_evaluator_goes_with_the_rounds_to_the_end(
    make_member: MakeMember, make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = await make_node("reader")
    stages = [CertifiedStage(stage=number).rounds(4) for number in (0, 1)]
    for number, stage in enumerate(stages):
        await (await make_member(number)).hold(stage, lambda stage=stage: stage.states[len(stage.states) - 1])  # type: ignore[misc]

    async def train() -> None:
        await until(lambda: 0 in evaluated(reader.events))
        for stage in stages:
            stage.rounds(ROUNDS - 4)

    training = asyncio.create_task(train())
    told = await followed(reader, monkeypatch)
    await training
    rounds = evaluated(told)
    assert (rounds[0], rounds[-1]) == (0, ROUNDS)
    assert rounds == sorted(set(rounds))
    assert [(event.round, event.anchor_digest) for event in told if isinstance(event, RunComplete)] == [
        (ROUNDS, stage.states[-1].digest.hex()) for stage in stages
    ]


async def test_an_end_whose_model_nobody_holds_is_told(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, donor = await make_node("reader"), await make_node("donor")
    stage = CertifiedStage(stage=0).rounds(ROUNDS)
    other = CertifiedStage(stage=1).rounds(ROUNDS)
    await donor.hold(stage, lambda: stage.states[0])
    await (await make_node("other")).hold(other, lambda: other.states[0])
    told = await followed(reader, monkeypatch)
    assert not [event for event in told if isinstance(event, RunComplete)]
    assert ["nobody who holds its final model" in event.line() for event in told if isinstance(event, Remark)] == [True]


async def test_both_stages_tips_are_of_one_round(make_member: MakeMember, make_node: MakeNode) -> None:
    reader = await make_node("reader")
    stages = [CertifiedStage(stage=number).rounds(4 + number) for number in (0, 1)]
    for number, stage in enumerate(stages):
        await (await make_member(number)).hold(stage, lambda stage=stage: stage.states[-1])  # type: ignore[misc]
    found = await survey_of(reader)
    assert await common_tip(found) is None
    stages[0].round()
    for survey in found:
        await survey.look()
    tips = await common_tip(found)
    assert tips is not None
    assert [tip.round for tip in tips] == [5, 5]
