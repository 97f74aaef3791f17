"""Averaging in slices, and members that mean ill: what they withhold, contradict or make up costs a round some time, and no more."""

import random
from dataclasses import replace

import msgspec
import pytest

from dilocox_peer.events import Event, MemberDoubted
from dilocox_peer.peer.rounds.chain import vote_for
from dilocox_peer.peer.rounds.contract import Action, FetchBlob, Send
from dilocox_peer.peer.rounds.justified import promise_statement
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.rounds.slices import ranked
from dilocox_peer.types import Digest, PeerId, canonical, sha256
from dilocox_peer.wire.chain import Certificate, Entry, Result, SliceOutcome, Value, acceptance, average_statement
from dilocox_peer.wire.rounds import (
    Accepted,
    Average,
    Averages,
    Cert,
    Gathered,
    Inputs,
    Message,
    Offer,
    Prepare,
    Promise,
    Propose,
)

from .scenario import starter
from .world import Network, Node, World, blob_of, certificates_of, parts_of, sign_as

HOSTILE = PeerId("p03")


class Withholding(World):
    """Certain blobs are not to be had of certain members: those who hold them give them to nobody."""

    def __init__(self, num_peers: int, slices: int, machine: type[RoundMachine] = RoundMachine) -> None:
        super().__init__(1, num_peers, machine=machine)
        if slices:
            self.be_sliced(slices)
        self.start_peers = num_peers
        self.network = Network(latency_s=0.02, spread_s=0.05, blob_s=0.1)
        self.withheld: dict[Digest, set[PeerId]] = {}
        self.doubted: dict[PeerId, set[PeerId]] = {}
        told = self.checks.noted

        def noted(node: Node, event: Event) -> None:
            if isinstance(event, MemberDoubted):
                self.doubted.setdefault(event.peer, set()).add(node.peer)
            told(node, event)

        self.checks.noted = noted  # type: ignore[method-assign]
        for node in self.nodes.values():
            node.slowness = 1.0
            self._withhold_from(node)
            self.at(self.rng.random(), starter(self, node))
        self.run(20.0)

    def _withhold_from(self, node: Node) -> None:
        def fetched(action: FetchBlob, serial: int) -> None:
            misers = self.withheld.get(action.blob, set()) - {node.peer}
            givers = tuple(each for each in action.sources if each not in misers)
            fetch(replace(action, sources=givers), serial)

        fetch, node.fetched_blob = node.fetched_blob, fetched  # type: ignore[method-assign]

    def chain(self) -> list[Certificate]:
        return list(max((certificates_of(node) for node in self.up()), key=lambda each: len(list(each))))

    def doubted_but_by(self, hostile: set[PeerId]) -> set[PeerId]:
        """Whom the others doubt."""
        return {peer for peer, by in self.doubted.items() if by - hostile}

    def rounds_in(self, seconds: float) -> int:
        before = max(node.machine.round for node in self.up() if node.machine is not None)
        self.run(self.now + seconds)
        return min(node.machine.round for node in self.up() if node.machine is not None) - before

    def orders(self, peer: PeerId) -> tuple[tuple[PeerId, ...], ...]:
        machine = self.nodes[peer].machine
        assert machine is not None
        place = machine.sitting.seat.place
        assert place.sharing is not None
        return ranked(place.sharing, place.voters)


@pytest.mark.parametrize(("peers", "slices", "least"), [(5, 4, 12), pytest.param(9, 16, 8, marks=pytest.mark.slow)])
def test_one_that_gives_a_slice_of_its_own_to_nobody_is_left_out(peers: int, slices: int, least: int) -> None:
    """The slice is one that it averages itself, so that it can say that it holds it. It stopped the stage: 2 and 1 rounds in this time, by view changes."""
    world = Withholding(peers, slices)
    miser = world.nodes[HOSTILE]

    def withhold(action: Action) -> None:
        if isinstance(action, Send) and isinstance(action.message, Offer):
            index = next(index for index, order in enumerate(world.orders(HOSTILE)) if HOSTILE in order[:2])
            world.withheld[parts_of(miser.disk.blobs[action.message.entry.blob])[index]] = {HOSTILE}
        carry_out(action)

    carry_out, miser.carry_out = miser.carry_out, withhold  # type: ignore[method-assign]
    assert world.rounds_in(100.0) >= least
    assert world.doubted_but_by({HOSTILE}) == {HOSTILE}
    assert not any(HOSTILE in {entry.peer for entry in each.value.entries} for each in world.chain()[-4:])


def test_two_that_say_what_a_slice_came_to_and_give_it_to_nobody_are_stepped_in_for() -> None:
    """Of 7 the first and the deputy of a slice. Not one round was made."""
    world = Withholding(7, 4)
    pair = set(world.orders(HOSTILE)[0][:2])
    deliver = world.deliver

    def withhold(sender: PeerId, to: PeerId, message: Message) -> None:
        if sender in pair and isinstance(message, Averages):
            for average in message.averages:
                if set(world.orders(sender)[average.slice][:2]) == pair:
                    world.withheld[average.blob] = pair
        deliver(sender, to, message)

    world.deliver = withhold  # type: ignore[method-assign]
    assert world.rounds_in(100.0) >= 10
    assert pair <= world.doubted_but_by(pair)
    others = [by - pair for peer, by in world.doubted.items() if peer not in pair]
    assert all(len(by) <= 1 for by in others), "a leader that could not have it, by one that could"


@pytest.mark.parametrize("seed", [1, 3, 4])
def test_two_that_contradict_a_result_when_it_is_known_are_decided_against(seed: int) -> None:
    """They make up a result of each slice as soon as two have said another: 4 rounds were made in this time. seed: of the orders in which they tell the others: in
    some, an honest leader was struck for contributions that came when it had long named what is averaged."""
    world, orders = Withholding(5, 4), random.Random(seed)
    liars = [PeerId("p01"), HOSTILE]
    heard: dict[tuple[bytes, int], set[PeerId]] = {}
    deliver = world.deliver

    def contradict(message: Averages, average: Average) -> None:
        outcome = SliceOutcome(sha256(b"made up", message.inputs), 100, average.base, sha256(b"residual"))
        for liar in liars:
            signed = sign_as(liar)(
                average_statement(message.stage, message.head, message.inputs, average.slice, outcome)
            )
            said = Averages(
                message.stage, message.head, message.view, message.inputs, (Average(average.slice, *outcome, signed),)
            )
            others = orders.sample(sorted(set(world.nodes) - {liar}), 4)
            for peer in others:
                deliver(liar, peer, said)

    def listen(sender: PeerId, to: PeerId, message: Message) -> None:
        if isinstance(message, Averages):
            if sender in liars:
                return  # they say nothing else
            for average in message.averages if to == HOSTILE else ():
                by = heard.setdefault((message.inputs, average.slice), set())
                by.add(sender)
                if len(by) == 2:
                    world.at(world.now + 0.08, lambda average=average: contradict(message, average))  # type: ignore[misc]
        deliver(sender, to, message)

    world.deliver = listen  # type: ignore[method-assign]
    assert world.rounds_in(80.0) >= 8
    assert world.doubted_but_by(set(liars)) == set(liars)


@pytest.mark.parametrize("slices", [0, 4])
def test_a_leader_cannot_have_another_doubted_for_work_that_it_makes_up(slices: int) -> None:
    """The victim was waited for no more, led and averaged nothing for 32 rounds; the leader had no strike."""
    world = Withholding(5, slices)
    liar, victim = PeerId("p01"), PeerId("p02")
    deliver, made_up = world.deliver, dict[bytes, tuple[object, bytes]]()

    def overstate(sender: PeerId, to: PeerId, message: Message) -> None:
        if sender == liar and isinstance(message, Propose) and message.ballot == 0:
            entries = tuple(
                msgspec.structs.replace(each, micro_batches=2**31) if each.peer == victim else each
                for each in message.value.entries
            )
            value = msgspec.structs.replace(message.value, entries=entries)
            said = acceptance(message.stage, message.head, message.view, 0, value)
            vote = made_up.setdefault(message.head, (value, vote_for(said, int(1000 * world.now), sign_as(liar))))
            message = msgspec.structs.replace(message, value=vote[0], signature=vote[1])
        deliver(sender, to, message)

    world.deliver = overstate  # type: ignore[method-assign]
    world.rounds_in(80.0)
    assert made_up, "it led"
    assert world.doubted_but_by({liar}) == {liar}


@pytest.mark.parametrize("slices", [0, 4])
def test_a_leader_cannot_put_contributions_of_its_own_in_the_place_of_others(slices: int) -> None:
    """Two of five had been replaced: three fifths of the mean were its own, and the others signed that."""
    world = Withholding(5, slices)
    liar, victims = PeerId("p01"), [PeerId("p02"), PeerId("p03")]
    deliver, made_up = world.deliver, dict[bytes, tuple[Value, bytes]]()

    mine = [blob_of([(str(liar), 7, 1000 + number)], malformed=False) for number in range(2)]
    world.nodes[liar].disk.blobs.update({sha256(blob): blob for blob in mine})

    def replaced_in(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
        of_its_own = dict(zip(victims, mine, strict=True))
        return tuple(
            msgspec.structs.replace(each, blob=sha256(of_its_own[each.peer])) if each.peer in victims else each
            for each in entries
        )

    def put(sender: PeerId, to: PeerId, message: Message) -> None:
        if sender == liar and isinstance(message, Inputs):
            message = msgspec.structs.replace(message, entries=replaced_in(message.entries))
        elif sender == liar and isinstance(message, Propose) and message.ballot == 0:
            value = msgspec.structs.replace(message.value, entries=replaced_in(message.value.entries))
            said = acceptance(message.stage, message.head, message.view, 0, value)
            vote = made_up.setdefault(message.head, (value, vote_for(said, int(1000 * world.now), sign_as(liar))))
            message = msgspec.structs.replace(message, value=vote[0], signature=vote[1])
        deliver(sender, to, message)

    world.deliver = put  # type: ignore[method-assign]
    assert world.rounds_in(80.0) >= 4
    assert liar in world.doubted_but_by({liar})
    names = set(map(sha256, mine))
    assert not any(entry.blob in names for each in world.chain() for entry in each.value.entries)
    assert world.doubted_but_by({liar}) == {liar}


def test_an_acceptance_of_results_that_nobody_signed_binds_no_leader() -> None:
    """Of 4 the first of the roster, with one away: the next leader and it were a quorum, and its made-up mean was certified."""
    world = Withholding(4, 4)
    liar, gone = PeerId("p00"), PeerId("p03")
    node = world.nodes[liar]

    def is_its_turn() -> bool:
        machine = node.machine
        assert machine is not None
        return machine.roster[0] == liar == machine.leader and not machine.sitting.arrivals.offers

    while not is_its_turn():
        world.run(world.now + 0.05)
    assert node.machine is not None
    at, deliver, sent = node.machine.head, world.deliver, list[Promise]()

    def make_up() -> Accepted:
        assert node.machine is not None
        place, seat = node.machine.sitting.seat.place, node.machine.sitting.seat
        entries = list(node.machine.sitting.arrivals.offers.values())
        blobs = [canonical(["lie", [[str(liar), 0, 99]], index]) for index in range(4)]
        node.disk.blobs.update({sha256(blob): blob for blob in blobs})
        signed = tuple((PeerId(peer), b"garbage!") for peer in ("p01", "p02"))
        results = tuple(Result(sha256(blob), len(blob), b"", sha256(b"residual", blob), signed) for blob in blobs)
        value = place.round_value(entries, place.roster, seat.plan(), None, results)
        said = acceptance(place.stage, place.head, place.view, 0, value)
        return Accepted(0, value, vote_for(said, int(1000 * world.now), sign_as(liar)), ())

    def lie(sender: PeerId, to: PeerId, message: Message) -> None:
        if sender == liar and getattr(message, "head", None) == at:
            if isinstance(message, Inputs | Propose | Cert | Prepare):
                return
            if isinstance(message, Promise):
                accepted = sent[0].accepted if sent else make_up()
                assert accepted is not None
                statement = promise_statement((message.stage, at, message.view), message.ballot, accepted.named)
                message = msgspec.structs.replace(message, accepted=accepted, signature=sign_as(liar)(statement))
                sent.append(message)
        deliver(sender, to, message)

    world.deliver = lie  # type: ignore[method-assign]
    world.nodes[gone].crash()
    world.nodes[gone].gone_for_good = True
    world.run(world.now + 40.0)
    assert sent
    assert sent[0].accepted is not None
    assert sent[0].accepted.value not in [each.value for each in world.chain()]


@pytest.mark.parametrize(("peers", "slices", "least"), [(7, 4, 20), pytest.param(9, 16, 10, marks=pytest.mark.slow)])
def test_two_that_say_they_hold_what_one_keeps_from_all_others_and_average_nothing_hold_up_two_rounds(
    peers: int, slices: int, least: int
) -> None:
    """They are first and deputy of a slice of the one's contribution. A stage of seven made two rounds in two minutes, with view changes."""
    world = Withholding(peers, slices)
    miser, mates = world.nodes[HOSTILE], list[PeerId]()

    def withhold(action: Action) -> None:
        if isinstance(action, Send) and isinstance(action.message, Offer):
            for index, order in enumerate(world.orders(HOSTILE)):
                pair = set(order[:2])
                if HOSTILE in pair and (not mates or set(mates) < pair):
                    mates[:] = pair - {HOSTILE}
                    part = parts_of(miser.disk.blobs[action.message.entry.blob])[index]
                    world.withheld[part] = pair
                    world.nodes[mates[0]].disk.blobs[part] = miser.disk.blobs[part]
        carry_out(action)

    def keep_silent(sender: PeerId, to: PeerId, message: Message) -> None:
        if sender not in {HOSTILE, *mates} or not isinstance(message, Averages):
            deliver(sender, to, message)

    carry_out, miser.carry_out = miser.carry_out, withhold  # type: ignore[method-assign]
    deliver, world.deliver = world.deliver, keep_silent  # type: ignore[method-assign]
    assert world.rounds_in(150.0) >= least
    assert world.doubted_but_by({HOSTILE, *mates}) <= {HOSTILE, *mates}
    assert {each.value.kind for each in world.chain()[-10:]} == {"round"}, "without a view change"


@pytest.mark.parametrize("num_victims", [2, 5])
def test_one_that_says_it_lacks_what_others_contribute_has_nobody_left_out(num_victims: int) -> None:
    """It averages with each of the others. The victims were doubted, and of the rounds half went without them; nobody doubted the liar."""
    world = Withholding(6, 15)
    victims = sorted(set(world.nodes) - {HOSTILE})[:num_victims]

    def leave_out(sender: PeerId, to: PeerId, message: Message) -> None:
        machine = world.nodes[HOSTILE].machine
        if sender == HOSTILE and isinstance(message, Gathered) and machine is not None:
            offers = machine.sitting.arrivals.offers
            lacking = {offers[peer].blob for peer in victims if peer in offers}
            tables = tuple(table for table in message.tables if table not in lacking)
            message = msgspec.structs.replace(message, tables=tables)
        deliver(sender, to, message)

    deliver, world.deliver = world.deliver, leave_out  # type: ignore[method-assign]
    before = len(world.chain())
    rounds = world.rounds_in(80.0)
    counted = [entry.peer for each in world.chain()[before:] for entry in each.value.entries]
    assert rounds >= 10
    assert min(counted.count(peer) for peer in victims) >= rounds - 2
    assert not world.doubted_but_by({HOSTILE}) - {HOSTILE}


def test_of_five_two_with_slow_lines_are_stepped_in_for_and_nobody_is_doubted() -> None:
    """Two of the four who average are slow. Eight rounds were made, and of the leaders that were faster some were doubted, who named nothing."""
    world, slow = Withholding(5, 4), {PeerId("p01"), HOSTILE}
    hang_s = world.hang_s

    def slowly(node: Node, action: FetchBlob) -> float:
        is_slow = node.peer in slow and action.part is not None
        return hang_s(node, action) + (world.rng.uniform(1.0, 3.0) if is_slow else 0.0)

    world.hang_s = slowly  # type: ignore[method-assign]
    world.rng.seed(3)
    before = len(world.chain())
    rounds = world.rounds_in(100.0)
    counted = [entry.peer for each in world.chain()[before:] for entry in each.value.entries]
    assert rounds >= 10
    assert min(counted.count(peer) for peer in world.nodes) >= rounds - 2
    assert not world.doubted
