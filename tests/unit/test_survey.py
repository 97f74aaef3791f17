"""Whom a reader of a run asks, and what it makes of their answers. Over real networks: shell/test_survey.py."""

import asyncio
import random
from typing import Any

import pytest

from dilocox_peer.errors import RunUnreachable
from dilocox_peer.peer.state.survey import MEMBERS_ASKED, OTHERS_ASKED, by_trust, look_at_all, most_named, to_ask
from dilocox_peer.types import PeerId, sha256

A, B, C, D, X, Y, Z = (PeerId(name) for name in "abcdxyz")
TRUE, FALSE = sha256(b"true"), sha256(b"false")


def test_the_roster_comes_first_and_those_that_failed_last() -> None:
    for seed in range(20):
        order = by_trust([X, A, Y, B], {A, B}, {A: 2, X: 1}, random.Random(seed))
        assert order == [B, A, Y, X]
    orders = {tuple(by_trust([X, Y, Z], (), {}, random.Random(seed))) for seed in range(100)}
    assert len(orders) == 6, "of equals nobody is always the first"


def test_others_are_asked_too_however_many_members_there_are() -> None:
    assert to_ask([A, B, C, D, X, Y, Z], {A, B, C, D}) == [A, B, C, X, Y]
    assert to_ask([A, X, Y, Z], {A}) == [A, X, Y, Z]
    many = [PeerId(f"{number}") for number in range(50)]
    assert len(to_ask(many, ())) == MEMBERS_ASKED + OTHERS_ASKED


@pytest.mark.parametrize(
    ("named", "expected"),
    [([TRUE, TRUE, FALSE], TRUE), ([TRUE, FALSE], b""), ([TRUE, b"", b"", b""], TRUE), ([b"", b""], b""), ([], b"")],
)
def test_more_than_half_of_those_that_name_one_must_name_the_same(named: list[bytes], expected: bytes) -> None:
    assert most_named(named) == expected


async def test_a_look_that_fails_leaves_no_other_behind() -> None:
    """One that went on unseen would take certificates in while the next look does."""
    ended: list[str] = []

    class Stage:
        def __init__(self, name: str, *, fails: bool) -> None:
            self.name, self.fails = name, fails

        async def look(self) -> None:
            if self.fails:
                raise RunUnreachable("the directory gave no answer")
            for _ in range(5):
                await asyncio.sleep(0)
            ended.append(self.name)

    found: Any = [Stage("first", fails=True), Stage("second", fails=False)]
    with pytest.raises(RunUnreachable):
        await look_at_all(found)
    assert ended == ["second"]
