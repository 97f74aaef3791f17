"""A fold over a chain that grows and forks comes to what a fold from the first certificate comes to."""

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dilocox_peer.peer.planning.folded import COPIED_EVERY, Folded


@dataclass
class Seen:
    heads: list[bytes] = field(default_factory=list)


def take(seen: Seen, certificate: Any, before: Any) -> None:
    assert (before.head if before is not None else None) == (seen.heads[-1] if seen.heads else None)
    seen.heads.append(certificate.head)


def certificate(head: str, members: int = 1) -> Any:
    return SimpleNamespace(head=head.encode(), value=SimpleNamespace(roster=("p",) * members))


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_chain_becomes_all_of_it_is_followed_once(seed: int) -> None:
    rng, chain, folded = random.Random(seed), list[Any](), Folded(Seen, take)
    for step in range(60):
        if chain and rng.random() < 0.3:
            del chain[max(0, len(chain) - rng.choice([1, 5, 100, 3000])) :]
        chain += [certificate(f"{step} {number}") for number in range(rng.choice([1, 3, 90, 400]))]
        most = rng.choice([None, 50])
        while not folded.follow(cast("Any", chain), most):
            assert most is not None
        assert folded.value.heads == [each.head for each in chain]
        assert folded.count == len(chain)


def test_going_back_a_little_does_not_begin_anew() -> None:
    taken = list[bytes]()
    folded = Folded[list[int]](list, lambda _, certificate, __: taken.append(certificate.head))
    chain = [certificate(str(number)) for number in range(2000)]
    folded.follow(chain)
    taken.clear()
    folded.follow([*chain[:1950], certificate("other")])
    assert 0 < len(taken) <= 51 + COPIED_EVERY


@pytest.mark.parametrize(("members", "certificates"), [(0, 50), (1, 50), (10, 5), (64, 1)])
def test_one_look_is_bounded_by_the_entries_of_rosters(members: int, certificates: int) -> None:
    """By certificates, those of a large roster held the event loop for 0.2 s."""
    chain, folded = [certificate(str(number), members) for number in range(200)], Folded(Seen, take)
    assert not folded.follow(chain, 50)
    assert folded.count == certificates
