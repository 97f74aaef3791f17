"""Nobody trains on what another has: over joins, deaths, restarts and forks, within the bound that allotment.py states."""

import itertools
import random
from collections import Counter, deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.data.allotment import (
    AHEAD,
    FASTEST,
    KEPT,
    LEAST_UNITS,
    REMEMBERED,
    Handout,
    Row,
    Stretch,
    shard_order,
    unit_order,
)
from dilocox_peer.data.catalogue import UNIT_TOKENS
from dilocox_peer.data.taken import Taken
from dilocox_peer.types import PeerId

ROUND = 3 * UNIT_TOKENS
A, B = PeerId("a"), PeerId("b")


def places(stretches):
    return [(each.epoch, place) for each in stretches for place in range(each.first, each.first + each.count)]


class SimulatedPeer:
    """Takes what it is handed, else from the commons; restarted it goes on from what it wrote down."""

    def __init__(self, name, folder, incarnation):
        self.name, self.incarnation = PeerId(name), incarnation
        self.taken = Taken(folder / f"{name}.json")
        self.trained: list[tuple[int, int]] = []
        self.starved = self.lane = 0

    def train(self, row, epoch, handed, units):
        """Works through so many units; gives back how many."""
        for _ in range(units):
            piece = next((rest for each in handed if (rest := self.taken.rest_of(each, 1)) is not None), None)
            if piece is None:
                self.starved += 1
                lane = row.lane(epoch, self.name, self.incarnation, self.lane)
                piece = self.taken.rest_of(lane, 1)
                if piece is None:
                    self.lane += 1
                    continue
            self.taken.take(piece)
            self.trained += places([piece])


class Swarm:
    """Peers on one chain: rosters change, some peers fall silent, some come back with another incarnation."""

    def __init__(self, seed, folder, num_units):
        self.rng = random.Random(seed)
        self.row = Row(num_units)
        self.handout = Handout(self.row)
        self.folder = folder
        self.peers: dict[str, SimulatedPeer] = {}
        self.gone: list[SimulatedPeer] = []
        self.handed: dict[PeerId, list[Stretch]] = {}
        self.roster: list[PeerId] = []
        self.incarnations = itertools.count(1)
        for number in range(self.rng.randint(1, 4)):
            self.join(f"p{number}")
        self.roster = [peer.name for peer in self.peers.values()]
        self.certify({})

    def join(self, name):
        self.peers[name] = SimulatedPeer(name, self.folder, next(self.incarnations))

    def certify(self, reported):
        handed = self.handout.take(self.roster, tokens_a_round=ROUND, reported=reported)
        for peer, stretches in handed.items():
            self.handed.setdefault(peer, []).extend(stretches)

    def round(self, *, fickle=True):
        speed = {name: self.rng.choice([1, 2, 3, 3, 4, 6]) for name in self.peers}
        for name, peer in self.peers.items():
            peer.train(self.row, self.handout.epoch, self.handed.get(peer.name, []), speed[name])
        self.certify({peer.name: speed[name] * UNIT_TOKENS for name, peer in self.peers.items()})
        self.roster = sorted(peer.name for peer in self.peers.values())
        if not fickle:
            return
        if self.rng.random() < 0.15:
            self.join(f"p{len(self.peers) + len(self.gone)}x{self.rng.random()}")
        if self.rng.random() < 0.15 and len(self.peers) > 1:
            name = self.rng.choice(sorted(self.peers))
            peer = self.peers.pop(name)
            self.gone.append(peer)
            if self.rng.random() < 0.5:  # killed and started again
                self.join(name)
            elif self.rng.random() < 0.5:
                self.handout.part([*self.roster, peer.name], self.roster)

    def counts(self):
        """Of each place, how often it was trained on in its epoch: those handed out, and those of the commons."""
        seen = Counter(place for peer in [*self.peers.values(), *self.gone] for place in peer.trained)
        ours = {place: number for place, number in seen.items() if place[1] < self.row.to_hand_out}
        return ours, {place: number for place, number in seen.items() if place not in ours}


@pytest.mark.parametrize(
    ("first_seed", "seeds"),
    [
        (0, 40),
        *[
            pytest.param(first, 100, marks=[pytest.mark.slow, pytest.mark.timeout(600)])
            for first in range(0, 1000, 100)
        ],
    ],
)
def test_no_unit_is_trained_twice_in_an_epoch(tmp_path_factory, first_seed, seeds, monkeypatch):
    """1,000 seeds of joins, deaths and restarts; the slow ones are all of them."""
    disk: dict[str, bytes] = {}
    monkeypatch.setattr(
        "dilocox_peer.data.taken.replace_file", lambda path, parts, **_: disk.update({str(path): b"".join(parts)})
    )
    monkeypatch.setattr("pathlib.Path.read_bytes", lambda path: disk[str(path)] if str(path) in disk else _absent())
    folder = tmp_path_factory.mktemp("taken")
    met = commons = 0
    for seed in range(first_seed, first_seed + seeds):
        disk.clear()
        swarm = Swarm(seed, folder, num_units=random.Random(seed).choice([40, 300, 3000]))
        for _ in range(25):
            swarm.round()
        ours, others = swarm.counts()
        assert max(ours.values(), default=0) <= 1, f"seed {seed}"
        met += sum(number > 1 for number in others.values())
        commons += len(others)
    assert met <= 0.2 * commons


def _absent():
    raise FileNotFoundError


def branches_of(seed, *, num_units, certificates):
    """(places that each branch of a fork hands out, those still free where they part, members of the roster there). The members part
    into two or three groups, each of which goes on alone; one of them perhaps without a view change."""
    rng = random.Random(seed)
    peers = [PeerId(f"p{number}") for number in range(rng.randint(2, 6))]
    groups: list[list[PeerId]] = [[] for _ in range(rng.randint(2, min(3, len(peers))))]
    for number, peer in enumerate(rng.sample(peers, len(peers))):
        groups[number % len(groups)].append(peer)
    steady = rng.randrange(len(groups)) if rng.random() < 0.5 else None
    so_far = rng.randint(1, 6)
    handed, free = [], 0
    for number, roster in enumerate(groups):
        branch = Handout(Row(num_units))
        before = [branch.take(peers, tokens_a_round=ROUND, reported=dict.fromkeys(peers, ROUND)) for _ in range(so_far)]
        taken = places(stretch for each in before for stretches in each.values() for stretch in stretches)
        free = branch.row.to_hand_out - len(taken)
        if number != steady:
            branch.part(peers, sorted(roster))
        found = [
            branch.take(roster, tokens_a_round=ROUND, reported=dict.fromkeys(roster, ROUND))
            for _ in range(certificates)
        ]
        handed.append(places(stretch for each in found for stretches in each.values() for stretch in stretches))
    return handed, free, len(peers)


@pytest.mark.parametrize(("num_units", "certificates"), [(300, 3), (1000, 6), (5000, 20)])
def test_branches_of_a_fork_hand_out_nothing_twice_before_one_has_had_its_part(num_units, certificates):
    """As allotment.py states it. 300 seeds each."""
    within = 0
    for seed in range(300):
        handed, free, members = branches_of(seed, num_units=num_units, certificates=certificates)
        part = free / (members + 1) - 1
        own = [set(branch[: max(0, int(part))]) for branch in handed]
        assert len(set.union(*own)) == sum(map(len, own)), f"seed {seed}"
        within += all(len(branch) <= part for branch in handed)
        everything = [place for branch in handed for place in branch]
        if all(len(branch) <= part for branch in handed):
            assert len(everything) == len(set(everything)), f"seed {seed}"
    assert within > 30, "the bound is met in earnest"


def test_who_stays_whole_parts_with_nobody():
    peers = [PeerId("a"), PeerId("b")]
    handout = Handout(Row(300))
    before = places(handout.take(peers, tokens_a_round=ROUND, reported={})[peers[0]])
    handout.part(peers, peers[::-1])
    after = places(handout.take([*peers, PeerId("c")], tokens_a_round=ROUND, reported={})[PeerId("c")])
    assert after[0][1] == 2 * len(before), "right behind"


def test_a_branch_hands_out_each_unit_once_wherever_it_began():
    handout, peer = Handout(Row(320)), PeerId("p")
    seen: list[tuple[int, int]] = []
    for number in range(300):
        if number % 7 == 3:
            handout.part([PeerId("q"), PeerId("r"), peer], [peer] if number % 2 else [PeerId(f"n{number}")])
        seen += places(handout.take([peer], tokens_a_round=ROUND, reported={peer: ROUND}).get(peer, ()))
    assert len(seen) == len(set(seen))
    assert {place for epoch, place in seen if epoch == 0} == set(range(310))
    assert max(epoch for epoch, _ in seen) > 1


def test_a_peer_in_the_roster_has_work_in_hand_whatever_its_speed(tmp_path):
    swarm = Swarm(1, tmp_path, num_units=100_000)
    for _ in range(40):
        swarm.round(fickle=False)
    assert all(peer.starved == 0 for peer in swarm.peers.values())


def test_a_peer_is_handed_some_units_however_short_its_rounds_are():
    """One in two holds no document's beginning where documents are long."""
    handed = Handout(Row(4096)).take([A, B], tokens_a_round=512, reported={})
    assert {peer: sum(each.count for each in stretches) for peer, stretches in handed.items()} == {
        A: LEAST_UNITS,
        B: LEAST_UNITS,
    }
    handout = Handout(Row(4096))
    later = [handout.take([A], tokens_a_round=512, reported={A: 512}).get(A, ()) for _ in range(64)][1:]
    assert sum(each.count for stretches in later for each in stretches) <= 64 // REMEMBERED, "the first time alone"
    few = Handout(Row(20)).take([A, B], tokens_a_round=512, reported={})
    assert {peer: sum(each.count for each in stretches) for peer, stretches in few.items()} == {A: 2, B: 2}
    none = Handout(Row(3)).take([A, B], tokens_a_round=512, reported={})
    assert {peer: sum(each.count for each in stretches) for peer, stretches in none.items()} == {A: 1, B: 1}


def test_an_epoch_hands_out_everything_but_the_commons_before_the_next_begins():
    row = Row(320)
    handout = Handout(row)
    peer = PeerId("p")
    seen: list[tuple[int, int]] = []
    while handout.epoch < 2:
        handed = handout.take([peer], tokens_a_round=ROUND, reported={peer: ROUND})
        seen += places(handed.get(peer, ()))
    first = [place for epoch, place in seen if epoch == 0]
    assert first == list(range(310))
    assert len(seen) == len(set(seen))


def test_who_reports_too_much_is_not_handed_all():
    handout = Handout(Row(10**6))
    roster = [PeerId("p"), PeerId("q")]
    handed = handout.take(roster, tokens_a_round=ROUND, reported={roster[0]: 2**40})
    assert sum(each.count for each in handed[roster[0]]) <= AHEAD * FASTEST * 3


@pytest.mark.parametrize("size", [8, 32, 64])
def test_a_claim_takes_no_more_data_than_of_the_fastest(size: int) -> None:
    """64 times the work, which votes let pass, had half of all units of an epoch handed to one member of 64."""
    roster = [PeerId(f"peer {number:02}") for number in range(size)]
    handout = Handout(Row(10**6))
    counts = dict.fromkeys(roster, 0)
    for _ in range(40):
        handed = handout.take(roster, tokens_a_round=ROUND, reported={**dict.fromkeys(roster, ROUND), roster[0]: 10**9})
        for peer, stretches in handed.items():
            counts[peer] += sum(each.count for each in stretches)
    assert counts[roster[0]] / sum(counts.values()) < 1.2 * FASTEST / (FASTEST + size - 1)


def test_several_fast_ones_are_believed() -> None:
    """Eight of 32 that do twenty times as much as the others lacked 57 % of their work."""
    roster = [PeerId(f"peer {number:02}") for number in range(32)]
    reported = {peer: (20 if number < 8 else 1) * ROUND for number, peer in enumerate(roster)}
    handout = Handout(Row(10**6))
    got = [handout.take(roster, tokens_a_round=ROUND, reported=reported).get(roster[0], ()) for _ in range(30)]
    assert sum(each.count for stretches in got[10:] for each in stretches) * UNIT_TOKENS >= 0.95 * 20 * 20 * ROUND


def test_a_fast_stage_is_believed() -> None:
    """What the plan expects may be far below what all of them do."""
    handout = Handout(Row(10**6))
    roster = [A, B, PeerId("c")]
    for _ in range(30):
        handed = handout.take(roster, tokens_a_round=ROUND, reported=dict.fromkeys(roster, 50 * ROUND))
    assert min(sum(each.count for each in handed[peer]) for peer in roster) * UNIT_TOKENS >= 50 * ROUND


def test_what_a_peer_did_not_report_is_made_good_again():
    """What it computed and threw away does not leave it without work for ever; one that does nothing takes little from the others."""
    handout = Handout(Row(10**6))
    handed = [
        sum(each.count for each in handout.take([A, B], tokens_a_round=ROUND, reported={B: ROUND}).get(A, ()))
        for _ in range(200)
    ]
    assert handed[0] == AHEAD * 3
    assert sum(handed[1:40]) >= 3, "a round of work"
    assert sum(handed[1:]) < 0.25 * 200 * 3


class Worker:
    """Works through the oldest of its newest shares; `lost`: of what it works through, the part that it does not report."""

    def __init__(self, speed, lost, rng):
        self.speed, self.lost, self.rng = speed, lost, rng
        self.shares: deque[list[float]] = deque(maxlen=KEPT)
        self.handed = self.wanted = self.done = 0.0

    def hand(self, units):
        if units:
            self.handed += units
            self.shares.append([units])

    def train(self, units_a_round, jitter):
        """Gives back what it reports."""
        wanted = self.speed * units_a_round * self.rng.uniform(1 - jitter, 1 + jitter)
        done = 0.0
        for share in self.shares:
            part = min(share[0], wanted - done)
            share[0] -= part
            done += part
        self.wanted, self.done = self.wanted + wanted, self.done + done
        return done * (1 - self.lost)

    @property
    def left(self):
        return sum(share[0] for share in self.shares)


class Bursty(Worker):
    """Three times as fast in one round of eight."""

    num_rounds = 0

    def train(self, units_a_round, jitter):
        self.num_rounds += 1
        return super().train(units_a_round * (3 if self.num_rounds % 8 == 0 else 1), jitter)


def worked(speeds, *, lost=0.0, jitter=0.1, units_a_round=20.0, certificates=400, late=1, kind=Worker):
    """Peers of these speeds in parts of what is expected. late: certificates that a report covers."""
    rng, handout = random.Random(1), Handout(Row(10**9))
    workers = {PeerId(f"p{number:02}"): kind(speed, lost, rng) for number, speed in enumerate(speeds)}
    pending = dict.fromkeys(workers, 0.0)
    for number in range(certificates):
        reported = {peer: int(units * UNIT_TOKENS) for peer, units in pending.items()} if number else {}
        due = [peer for rank, peer in enumerate(reported) if (number + rank) % late == 0]
        handed = handout.take(
            list(workers),
            tokens_a_round=int(units_a_round * UNIT_TOKENS),
            reported={peer: reported[peer] for peer in due},
        )
        pending.update(dict.fromkeys(due, 0.0))
        for peer, worker in workers.items():
            worker.hand(sum(each.count for each in handed.get(peer, ())))
            pending[peer] += worker.train(units_a_round, jitter)
    return list(workers.values())


@pytest.mark.parametrize(
    "speeds", [[1], [1] * 4, [0.1, 0.3, 0.6, 3], [0.05, 0.05, 0.1, 0.2, 0.2, 0.4, 2, 5], [1 / 8] * 3]
)
@pytest.mark.parametrize("jitter", [0.0, 0.3])
def test_what_is_handed_out_is_trained_on_where_nobody_leaves(speeds, jitter):
    """A third was handed out for nothing, of unequal speeds 43 %, at the beginning of a batch ramp (an eighth of what is expected) four parts of five."""
    workers = worked(speeds, jitter=jitter)
    assert sum(each.done + each.left for each in workers) >= 0.97 * sum(each.handed for each in workers)
    assert sum(each.handed for each in workers) <= 1.2 * sum(each.done for each in workers)
    assert min(each.done / each.wanted for each in workers) >= 0.98


def test_a_peer_whose_speed_changes_is_not_taken_to_have_run_dry():
    """With the best of the newest reports beside their sum, 42 % was handed out for nothing."""
    workers = worked([1] * 4, kind=Bursty, certificates=600)
    assert sum(each.done + each.left for each in workers) >= 0.95 * sum(each.handed for each in workers)
    assert min(each.done / each.wanted for each in workers) >= 0.98


@pytest.mark.parametrize("late", [2, 3, 5])
def test_reports_of_several_rounds_at_once_have_nothing_handed_out_for_nothing(late):
    workers = worked([1] * 4, late=late, jitter=0.05)
    assert sum(each.done + each.left for each in workers) >= 0.97 * sum(each.handed for each in workers)
    assert min(each.done / each.wanted for each in workers) >= 0.98


@pytest.mark.parametrize(("lost", "at_least"), [(0.03, 0.999), (0.05, 0.999), (0.1, 0.97), (0.2, 0.95), (0.5, 0.45)])
@pytest.mark.parametrize("speed", [0.2, 1, 3])
def test_who_works_through_more_than_it_reports_has_work_in_hand(lost, at_least, speed):
    """Reports taken off the oldest share first, and nothing more, left half of its work to one that lost 3 %."""
    assert all(each.done >= at_least * each.wanted for each in worked([speed] * 3, lost=lost, certificates=800))


def test_a_view_change_says_nothing_of_anybodys_pace():
    """It has no contributions: a peer was taken to have fallen behind, or to do nothing."""
    counts = []
    for changes in (0, 5):
        handout, units = Handout(Row(10**6)), 0
        for _ in range(60):
            for reported in [{A: ROUND, B: ROUND}, *[{}] * changes]:
                handed = handout.take([A, B], tokens_a_round=ROUND, reported=reported)
                units += sum(each.count for stretches in handed.values() for each in stretches)
        counts.append(units)
    assert counts[1] <= 1.2 * counts[0]


def test_more_work_that_is_planned_is_handed_out_before_it_is_reported():
    """Rounds of four times as many steps: the plan comes two certificates before their work."""
    handout = Handout(Row(10**6))
    for _ in range(20):
        handout.take([A, B], tokens_a_round=ROUND, reported={A: ROUND, B: ROUND})
    handed = handout.take([A, B], tokens_a_round=4 * ROUND, reported={A: ROUND, B: ROUND})
    assert sum(each.count for each in handed[A]) * UNIT_TOKENS >= 3 * AHEAD * ROUND


def claims(seed):
    """What a liar claims, again and again: parts of the most that is believed."""
    rng = random.Random(seed)
    return [rng.choice([0, 0, 1, 2, 4, 8, 8, 8]) for _ in range(rng.randint(1, 40))]


@pytest.mark.parametrize(
    "claimed", [[8], [0], [8, *[0] * 7], [8] * 3 + [0] * 5, [8] * 24 + [0] * 4, *map(claims, range(20))]
)
def test_no_claims_keep_data_from_others(claimed):
    """Of eight: as much as one that does what it says, and half of that; the others have what they would have without it."""
    roster = [PeerId(f"peer {number:02}") for number in range(8)]
    handout, counts = Handout(Row(10**7)), dict.fromkeys(roster, 0)
    for number in range(300):
        reported = {**dict.fromkeys(roster, ROUND), roster[0]: claimed[number % len(claimed)] * ROUND}
        for peer, stretches in handout.take(roster, tokens_a_round=ROUND, reported=reported).items():
            counts[peer] += sum(each.count for each in stretches)
    assert counts[roster[0]] <= 1.5 * FASTEST * 3 * 300
    assert (
        3 * 300 <= min(counts[peer] for peer in roster[1:]) <= max(counts[peer] for peer in roster[1:]) <= 1.1 * 3 * 300
    )


@given(st.integers(1, 10_000), st.integers(0, 3), st.integers(0, 200))
def test_a_lane_lies_in_the_commons(num_units, epoch, number):
    row = Row(num_units)
    lane = row.lane(epoch, PeerId("p"), 7, number)
    first = row.to_hand_out if row.commons else 0
    assert first <= lane.first < lane.first + lane.count <= max(num_units, first + 1)


def test_the_lanes_cover_the_commons_once():
    row = Row(64_000)
    lanes = {row.lane(0, PeerId("p"), 7, number) for number in range(row.commons)}
    assert sorted(place for _, place in places(lanes)) == list(range(row.to_hand_out, row.num_units))


def test_orders_are_permutations_that_every_machine_has_alike():
    assert sorted(shard_order(100, seed=1, epoch=0)) == list(range(100))
    assert shard_order(6, seed=1, epoch=0).tolist() == [3, 2, 5, 0, 4, 1]
    assert unit_order(6, seed=1, epoch=0, shard=2).tolist() == [2, 0, 3, 4, 5, 1]
    assert not np.array_equal(shard_order(100, seed=1, epoch=0), shard_order(100, seed=1, epoch=1))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(1, 9)), max_size=12), st.integers(1, 5))
def test_what_is_written_down_is_taken_once(tmp_path_factory, stretches, most):
    path = tmp_path_factory.mktemp("t") / "taken.json"
    taken, seen = Taken(path), []
    assert taken.is_new
    newest = 0
    for epoch, first, count in sorted(stretches):
        newest = max(newest, epoch)
        stretch = Stretch(epoch, first, count)
        while (rest := taken.rest_of(stretch, most)) is not None:
            assert rest.count <= most
            taken.take(rest)
            seen += places([rest])
            taken = Taken(path)  # killed, and started again
            assert not taken.is_new
    wanted = {place for each in stretches for place in places([Stretch(*each)])}
    assert sorted(seen) == sorted(wanted)


def test_what_is_in_hand_of_an_earlier_epoch_is_not_over(tmp_path):
    taken = Taken(tmp_path / "taken.json")
    taken.take(Stretch(0, 0, 2))
    taken.take(Stretch(9, 0, 1))  # of the commons, say
    assert Taken(tmp_path / "taken.json").rest_of(Stretch(0, 0, 3), 9) == Stretch(0, 2, 1)


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"a": 1}', b'{"1": [[1e999, 2]]}', b"[" * 9999, b"\xff"])
def test_a_damaged_record_is_an_empty_one(tmp_path, damage):
    (tmp_path / "taken.json").write_bytes(damage)
    taken = Taken(tmp_path / "taken.json")
    assert taken.is_new or damage == b""
    assert taken.rest_of(Stretch(0, 0, 2), 9) == Stretch(0, 0, 2)
