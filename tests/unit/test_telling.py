"""Strangers are told of the chain as much as there is room for, in even parts, whatever they ask."""

import pytest

from dilocox_peer.peer.rounds.telling import BURST_S, LEAST_BURST_BYTES, MAX_TOLD, NAME_BYTES, Telling
from dilocox_peer.types import PeerId

NEWCOMER, MONTH_OF_50_GB = PeerId("newcomer"), 1929.0  # a tenth of it, bytes a second
SMALL, PAGE = 9, 576  # names in the newest certificate of three voters, and in 64 of them


def told(telling: Telling, seconds: float, asking: dict[PeerId, tuple[float, int]]) -> dict[PeerId, int]:
    """Bytes that each has, asking so often a second for so many names."""
    found, turns = dict.fromkeys(asking, 0), dict.fromkeys(asking, 0.0)
    for tick in range(int(seconds * 50)):
        now = tick / 50
        for each, (per_s, names) in asking.items():
            if now >= turns[each]:
                turns[each] = now + 1 / per_s
                if telling.may_tell(each, now):
                    telling.told(each, names, now)
                    found[each] += NAME_BYTES * names
    return found


@pytest.mark.parametrize("others", [[(1.0, SMALL)], [(5.0, SMALL)], [(25.0, PAGE)], [(25.0, PAGE)] * 3])
def test_no_question_keeps_a_newcomer_from_the_chain(others: list[tuple[float, int]]) -> None:
    """A stranger that asked for the newest certificate five times a second had all; a page of 66 kB never went."""
    telling = Telling()
    telling.bytes_per_s = lambda: MONTH_OF_50_GB
    asking = {PeerId(f"stranger {number}"): each for number, each in enumerate(others)}
    told(telling, 600.0, asking)
    found = told(telling, 3000.0, {**asking, NEWCOMER: (0.2, PAGE)})
    assert found[NEWCOMER] > 0.6 * 3000.0 * MONTH_OF_50_GB / (2 + len(others))
    assert sum(found.values()) < 3000.0 * MONTH_OF_50_GB + 2 * LEAST_BURST_BYTES


def test_a_page_longer_than_all_that_may_go_at_once_goes() -> None:
    """Of 64 members in 64 slices 16 certificates come to more; nobody could join where all members had a month's limit."""
    telling = Telling()
    telling.bytes_per_s = lambda: MONTH_OF_50_GB
    names = 2 * LEAST_BURST_BYTES // NAME_BYTES
    assert telling.may_tell(NEWCOMER, 0.0)
    telling.told(NEWCOMER, names, 0.0)
    assert not telling.may_tell(NEWCOMER, LEAST_BURST_BYTES / MONTH_OF_50_GB - 1.0)
    assert telling.may_tell(NEWCOMER, 4 * LEAST_BURST_BYTES / MONTH_OF_50_GB)


def test_many_names_of_one_range_have_the_part_of_one() -> None:
    telling = Telling()
    telling.place_of = lambda peer: "of one range" if peer != NEWCOMER else ""
    telling.bytes_per_s = lambda: MONTH_OF_50_GB
    crowd = {PeerId(f"name {number}"): (1.0, PAGE) for number in range(50)}
    found = told(telling, 3000.0, {**crowd, NEWCOMER: (0.2, PAGE)})
    assert found[NEWCOMER] > 0.25 * sum(found.values())


def test_what_is_remembered_is_bounded_and_what_is_forgotten_gives_no_more_than_all_may_have() -> None:
    telling = Telling()
    telling.bytes_per_s = lambda: MONTH_OF_50_GB
    asking = {PeerId(f"name {number}"): (0.5, PAGE) for number in range(3 * MAX_TOLD)}
    found = told(telling, 900.0, asking)
    most = 900.0 * MONTH_OF_50_GB + max(LEAST_BURST_BYTES, BURST_S * MONTH_OF_50_GB) + PAGE * NAME_BYTES
    assert 0 < sum(found.values()) < most
