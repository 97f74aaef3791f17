"""One voter of a few, in a run whose newcomers vote at once, that writes more names into the rosters where it leads: the others vote for none that
they have not met, and who is honest comes in."""

from collections.abc import Collection
from functools import partial

import msgspec
import pytest

from dilocox_peer.peer.rounds.contract import PeerFound, PeerRefused
from dilocox_peer.peer.rounds.drafting import Drafts
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.rounds.membership import name_of
from dilocox_peer.types import PeerId
from dilocox_peer.wire.chain import Entry, Result, Value
from dilocox_peer.wire.rounds import Message, Nack, Propose

from .test_takeover import machine_with
from .test_withheld import Withholding

JOINER = PeerId("p99")


class Names:
    """Of whom the hostile one seats: all of them once each has sat in a roster, until then so many of the others a turn."""

    def __init__(self, hostile: str, names: Collection[PeerId], num_a_turn: int = 1) -> None:
        self._hostile = PeerId(hostile)
        self._names = names
        self._num_a_turn = num_a_turn
        self._seated: set[PeerId] = set()
        self.num_led = 0

    def watch(self, world: Withholding, seconds: float) -> set[PeerId]:
        """The names that have sat in a roster after so long."""
        for _ in range(int(seconds)):
            world.run(world.now + 1.0)
            self._seated.update(peer for each in world.chain() for peer in each.value.roster if peer in self._names)
        return self._seated

    def more(self, me: PeerId, roster: tuple[PeerId, ...]) -> tuple[PeerId, ...]:
        """The roster that a leader writes."""
        if me != self._hostile:
            return roster
        self.num_led += 1
        missing = [peer for peer in self._names if peer not in self._seated]
        names = missing[: self._num_a_turn] or self._names
        return tuple(dict.fromkeys((*roster, *names)))

    def machine(self) -> type[RoundMachine]:
        more = self.more

        class Seats(Drafts):
            def _value(self, entries: list[Entry], now: float, results: tuple[Result, ...] = ()) -> Value:  # type: ignore[override]
                value = super()._value(entries, now, results)
                return msgspec.structs.replace(value, roster=more(self._seat.me, value.roster))

        return machine_with(Seats)


@pytest.mark.parametrize(
    ("num_peers", "slices", "hostile"),
    [(3, 0, "p00"), (3, 0, "p02"), (4, 0, "p03"), (5, 0, "p03"), (5, 4, "p03"), (8, 0, "p03")],
)
def test_keys_that_a_leader_makes_up_are_seated_neither_at_once_nor_one_after_another(
    num_peers: int, slices: int, hostile: str
) -> None:
    """A third of a roster might be newcomers of whom nobody had heard, and who had sat in one counted as known. When as many keys as there are voters had, all were seated at once, and with
    them it signed all that followed: from round 22 on of four, 28 of five and of eight; of three with one key, from round 5 on."""
    names = Names(hostile, [PeerId(f"z{number:02d}") for number in range(num_peers)], max(1, num_peers // 3))
    world = Withholding(num_peers, slices, names.machine())
    before = len(world.chain())
    assert not names.watch(world, 60.0)
    assert names.num_led
    assert len(world.chain()) - before >= 8, "its turns cost the others no more than a leader's that proposes nothing"


@pytest.mark.parametrize("says_goodbye", [False, True])
def test_who_was_put_out_of_the_run_is_seated_by_no_leader(says_goodbye: bool) -> None:
    """It had been heard, and so it counted as known: an accomplice that the owner had put out had its vote again."""
    gone = PeerId("p04")
    names = Names("p03", [gone])
    world = Withholding(5, 0, names.machine())
    node = world.nodes[gone]
    if says_goodbye:
        world.leave(node)
        world.run(world.now + 1.0)
    node.gone_for_good = True
    node.crash()
    for other in world.up():
        other.feed(PeerRefused(gone, is_out=True))
    assert world.run(world.now + 30.0, stop=lambda: gone not in world.chain()[-1].value.roster)
    before, led = len(world.chain()), names.num_led
    world.run(world.now + 60.0)
    assert names.num_led > led
    rosters = [each.value.roster for each in world.chain()[before:]]
    assert len(rosters) >= 8
    assert not any(gone in roster for roster in rosters)


@pytest.mark.parametrize(("num_peers", "reached"), [(3, 1), (4, 1), (8, 3), (3, 2), (5, 3)])
def test_a_joiner_that_most_members_do_not_hear_comes_in_as_discovery_names_it(num_peers: int, reached: int) -> None:
    """A home whose line leads to the first of them alone, in a run without relays. Where a quorum hears it nobody has to name it."""
    world = Withholding(num_peers, 0)
    members = sorted(world.nodes)
    is_heard = 2 * reached > num_peers
    world.network.gaps = {frozenset((JOINER, peer)) for peer in members[reached:]}
    joiner = world.add_node(JOINER)
    joiner.slowness = 1.0
    joiner.start(members)
    for peer in () if is_heard else members:
        world.nodes[peer].feed(PeerFound(JOINER))
    assert world.run(world.now + 15.0, stop=lambda: JOINER in world.chain()[-1].value.roster)
    world.run(world.now + 30.0)
    assert any(entry.peer == JOINER for each in world.chain() for entry in each.value.entries)
    assert not world.doubted


def test_a_joiner_that_neither_a_quorum_hears_nor_discovery_names_waits_and_holds_nobody_up() -> None:
    """Until they look into the directory, a minute or two later."""
    world = Withholding(4, 0)
    members = sorted(world.nodes)
    world.network.gaps = {frozenset((JOINER, peer)) for peer in members[1:]}
    world.add_node(JOINER).start(members)
    assert world.rounds_in(40.0) >= 6
    assert not any(JOINER in each.value.roster for each in world.chain())
    for peer in members:
        world.at(world.now, partial(world.nodes[peer].feed, PeerFound(JOINER)))
    assert world.run(world.now + 60.0, stop=lambda: JOINER in world.chain()[-1].value.roster)


def _rounds_in(world: Withholding, seconds: float) -> int:
    """Rounds of the longest chain."""
    before = world.chain()[-1].value.round
    world.run(world.now + seconds)
    return world.chain()[-1].value.round - before


@pytest.mark.parametrize(
    ("num_peers", "greeted"),
    [(4, (1, 1, 1, 1)), (5, (2, 2, 1)), (8, (3,))],
    ids=["each one", "all between them", "a few"],
)
@pytest.mark.parametrize("slices", [0, 4])
def test_newcomers_that_greet_less_than_a_quorum_each_hold_nobody_up(
    num_peers: int, greeted: tuple[int, ...], slices: int
) -> None:
    """They are let in, and write no lease: whoever they had greeted named them where it led, and the others refused that for good. Of four and of five no round was made."""
    world = Withholding(num_peers, slices)
    members = sorted(world.nodes)
    begin = 0
    for number, count in enumerate(greeted):
        newcomer = PeerId(f"q{number:02d}")
        known, begin = members[begin : begin + count], begin + count
        world.network.gaps |= {frozenset((newcomer, peer)) for peer in members if peer not in known}
        world.add_node(newcomer).start(known)
    assert _rounds_in(world, 60.0) >= 8
    assert not world.doubted


def test_one_member_alone_talks_no_newcomer_out_of_a_roster() -> None:
    """By NACKs that name whoever is in the roster."""
    world = Withholding(5, 0)
    deliver = world.deliver

    def refuse(sender: PeerId, to: PeerId, message: Message) -> None:
        if to == "p03" and isinstance(message, Propose):
            at = (message.stage, message.head, message.view, message.ballot, message.ballot)
            deliver(PeerId("p03"), sender, Nack(*at, tuple(map(name_of, message.value.roster))))
            return
        deliver(sender, to, message)

    world.deliver = refuse  # type: ignore[method-assign]
    world.add_node(JOINER).start(sorted(world.nodes))
    assert world.run(world.now + 20.0, stop=lambda: JOINER in world.chain()[-1].value.roster)
