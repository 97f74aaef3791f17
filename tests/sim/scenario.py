"""What happens in a seed: how many peers, which faults and when; then quiet, in which everything must heal.

I7: within `share_bound_s` of the last fault all connected peers share one head, and within `_join_s` all are in its roster.
I8: from then on rounds go on, each certified within as many ballots as the roster has members (invariants.py) and, taken
together, no slower than the slowest peer trains.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.rounds.seats import SeatTerms
from dilocox_peer.types import PeerId

from .invariants import Violation
from .world import MAX_APPLY_S, MAX_FETCH, MAX_TRAIN, ROUND_S, Network, Node, World

SIZES = (1, 2, 2, 3, 3, 3, 4, 4, 5, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)
FEW = (1, 2, 2, 3, 3, 3, 4, 4, 5, 5, 6, 7, 8, 3, 4, 5, 2, 3, 4, 10, 16)


@dataclass(frozen=True)
class Length:
    """How long a history is. faulty_s: of faults, at least and at most. go_on_s: of quiet that is watched, once all is healed. sizes: of the
    swarm, seed by seed."""

    faulty_s: tuple[float, float]
    go_on_s: float
    sizes: tuple[int, ...]


WHOLE = Length((25.0, 45.0), 12 * ROUND_S, SIZES)
BRIEF = Length((12.0, 24.0), 4 * ROUND_S, FEW)
"""A quarter of the events of a whole one, and beginnings that whole ones seldom have: faults that end before the first round."""

WHOLE_EVERY = 16


def length_of(seed: int) -> Length:
    """In `make test`, where one in so many is whole: `make test-all` plays all of them whole, too."""
    return BRIEF if seed % WHOLE_EVERY else WHOLE


MachineOf = Callable[[PeerId], type[RoundMachine]]


@dataclass(frozen=True)
class Outcome:
    """What a seed came to."""

    seed: int
    peers: int
    rounds: int
    share_s: float  # from the last fault until all share one head
    heal_s: float  # and until all are in one roster, or the run is over
    max_ballot: int
    max_quiet_ballots: int
    events: int
    num_events: int


def run_seed(
    seed: int,
    *,
    machine: type[RoundMachine] = RoundMachine,
    trace: Callable[[str], None] | None = None,
    length: Length = WHOLE,
    crowded: bool = False,
) -> Outcome:
    """Plays a seed to its end; raises Violation, with the seed in it, when an invariant breaks."""
    world = World(seed, length.sizes[seed % len(length.sizes)], machine=machine)
    world.encode_messages = seed % 10 == 0
    world.tracing, world.is_crowded = trace, crowded
    try:
        return play(world, length)
    except Violation as violation:
        brief = (" --brief" if length is BRIEF else "") + (" --crowded" if crowded else "")
        raise Violation(
            f"seed {seed} at {world.now:.3f} s: {violation}  (python -m tests.sim.replay {seed}{brief} --trace)"
        ) from violation


def play(world: World, length: Length = WHOLE) -> Outcome:
    """A world as it was built, to its end."""
    rng, num_peers = world.rng, len(world.nodes)
    stop_at = rng.uniform(*length.faulty_s)
    world.start_peers = rng.choice((1, 1, max(1, num_peers // 2), num_peers))
    world.drift_rate = rng.choice((0.0, 0.0, 0.0, 0.02))
    world.total_rounds = rng.choice((None, None, None, None, rng.randrange(3, 9)))
    world.network = Network(
        vote_loss=rng.choice((0.0, 0.0, 0.0, 0.5, 0.8)),
        loss=rng.choice((0.0, 0.0, 0.02, 0.05, 0.1, 0.2)), duplicates=rng.choice((0.0, 0.05)),
        latency_s=rng.choice((0.01, 0.05, 0.2)), spread_s=rng.choice((0.02, 0.2, 1.0)),
        fetch_failures=rng.choice((0.0, 0.0, 0.1, 0.4)), blob_s=rng.choice((0.05, 0.3, 1.0)),
        state_s=rng.choice((0.5, 1.5, 5.0)),
    )  # fmt: skip
    if rng.random() < 0.15:
        rng.choice(list(world.nodes.values())).malformed = num_peers > 2
    if world.seed % 3 == 0:
        world.seat(SeatTerms(contributions=2, window=4))
    if world.seed % 4:
        world.be_owned()
        schedule_owner(world, stop_at)
    for node in world.nodes.values():
        late = rng.random() < 0.2
        world.at(rng.random() * (15.0 if late else 1.5), starter(world, node))
    _schedule_crashes(world, stop_at)
    _schedule_partitions(world, stop_at)
    _schedule_comings_and_goings(world, stop_at)
    world.run(stop_at)
    return _heal(world, stop_at, length.go_on_s)


def schedule_owner(world: World, stop_at: float) -> None:
    """The owner is late, away for a while, or gone for good once the run has begun."""
    rng, owner = world.rng, world.owner
    assert owner is not None

    def start() -> None:
        if not owner.is_up:
            owner.start()

    def end(*, for_good: bool) -> Callable[[], None]:
        def act() -> None:
            if owner.is_up and world.faulty:
                owner.crash()
                world.owner_is_gone = for_good

        return act

    world.at(rng.random() * rng.choice((1.0, 1.0, 8.0)), start)
    for _ in range(rng.choice((0, 0, 1, 2))):
        moment = rng.uniform(6.0, stop_at)
        world.at(moment, end(for_good=False))
        world.at(moment + rng.uniform(0.5, 15.0), lambda: None if world.owner_is_gone else start())
    if rng.random() < 0.3:
        world.at(rng.uniform(8.0, stop_at), end(for_good=True))


def starter(world: World, node: Node) -> Callable[[], None]:
    def start() -> None:
        if not node.is_up and not node.gone_for_good:
            node.start(sorted(world.nodes))

    return start


def _schedule_crashes(world: World, stop_at: float) -> None:
    rng = world.rng
    rate = rng.choice((0.0, 0.02, 0.05, 0.1))
    if rng.random() < 0.15:  # everyone at once
        moment = rng.uniform(8.0, stop_at)
        for node in world.nodes.values():
            world.at(moment + rng.random() * 0.2, crasher(world, node, back_after=rng.random() * 5.0, actions=None))
    time = 3.0
    while rate and time < stop_at:
        time += rng.expovariate(rate * len(world.nodes) ** 0.5 * 2)
        node = rng.choice(list(world.nodes.values()))
        # Between two actions of a list, the next list that is long enough; or between two events.
        actions = rng.randrange(6) if rng.random() < 0.7 else None
        world.at(
            time, crasher(world, node, back_after=rng.choice((0.2, 3.0, 15.0)) * (0.5 + rng.random()), actions=actions)
        )


def crasher(world: World, node: Node, *, back_after: float, actions: int | None) -> Callable[[], None]:
    def crash() -> None:
        if not node.is_up or not world.faulty:
            return
        if actions is None:
            node.crash()
        else:
            node.crash_after = actions
        world.at(world.now + back_after + 0.5, starter(world, node))

    return crash


def _schedule_partitions(world: World, stop_at: float) -> None:
    rng, time = world.rng, 5.0
    if len(world.nodes) < 2 or rng.random() < 0.4:
        return
    while time < stop_at:
        time += rng.expovariate(1 / 10.0)
        length = rng.choice((1.0, 5.0, 20.0)) * (0.5 + rng.random())
        groups = rng.choice((2, 2, 2, 3))
        world.at(time, partitioner(world, groups))
        time += length
        world.at(time, lambda: world.network.group_of.clear())


def partitioner(world: World, groups: int) -> Callable[[], None]:
    def partition() -> None:
        if not world.faulty:
            return
        world.network.group_of = {peer: world.rng.randrange(groups) for peer in world.nodes}
        world.trace(f"partition {world.network.group_of}")

    return partition


def _schedule_comings_and_goings(world: World, stop_at: float) -> None:
    rng = world.rng
    nodes = list(world.nodes.values())
    for node in nodes[1:]:
        chance = rng.random()
        if chance < 0.08:
            world.at(rng.uniform(5.0, stop_at), partial(world.leave, node))
        elif chance < 0.14:
            world.at(rng.uniform(5.0, stop_at), _lose(node))


def _lose(node: Node) -> Callable[[], None]:
    def lose() -> None:
        node.gone_for_good = True
        if node.is_up:
            node.crash()

    return lose


def _heal(world: World, stop_at: float, go_on_s: float) -> Outcome:
    """No more faults: everyone connected, who is not gone for good is back, little is lost."""
    world.trace("faults stop")
    world.faulty = False
    world.network.group_of.clear()
    world.network.loss = min(world.network.loss, 0.02)
    world.network.fetch_failures = 0.0
    world.network.vote_loss = 0.0
    world.network.spread_s = min(world.network.spread_s, 0.2)
    world.network.latency_s = min(world.network.latency_s, 0.05)
    world.drift_rate = 0.0
    for node in world.nodes.values():
        node.malformed = False
    if all(node.gone_for_good for node in world.nodes.values()):
        next(iter(world.nodes.values())).gone_for_good = False
    for node in world.nodes.values():
        node.crash_after = None
        starter(world, node)()
    world.start_peers = min(world.start_peers, len(world.up()))
    if world.owner is not None and not has_begun(world):  # anew, as it too waits for so many peers
        world.owner.crash()
        world.owner.start()
    elif world.owner is not None and not world.owner.is_up and not world.owner_is_gone:
        world.owner.start()
    if not _can_start(world):
        return _outcome(world, 0.0, 0.0)
    if not world.run(stop_at + share_bound_s(world), stop=world.shares_one_head):
        raise Violation(f"I7: no common head {share_bound_s(world):.1f} s after the faults: {shown_heads(world)}")
    share_s = world.now - stop_at
    if world.total_rounds is not None:
        return _finish(world, stop_at, share_s)
    if not world.run(stop_at + _join_s(world), stop=_all_in_one_roster(world)):
        if _waits_for_who_is_gone(world):
            return _outcome(world, share_s, 0.0)
        raise Violation(f"I7: not in one roster {_join_s(world):.1f} s after the faults: {shown_heads(world)}")
    healed_at, view, forks, has_drifted = world.now, _view(world), world.checks.forks, _states_differ(world)
    world.checks.quiet()
    least, rounds = int(world.at_least * go_on_s / _longest_round_s(world)), _rounds_in(world, go_on_s)
    if rounds < least and _view(world) > view:
        rounds = _rounds_in(world, go_on_s)  # what the faults had spoilt was given up only meanwhile
    if rounds < least:
        raise Violation(f"I8: {rounds} rounds in {go_on_s} s of quiet: {shown_heads(world)}")
    # Hostile ones fork in quiet, too: who went along fetches a state. So does a peer whose state the faults had made another, once voters name theirs.
    back_s = _copy_s(world) if world.checks.forks > forks or has_drifted else 0.0
    if not world.run(world.now + _longest_round_s(world) + back_s, stop=world.shares_one_head):
        raise Violation(f"I7: no common head in quiet: {shown_heads(world)}")
    return _outcome(world, share_s, healed_at - stop_at)


def _states_differ(world: World) -> bool:
    held = {(node.anchor_head, node.anchor.digest) for node in world.up() if node.anchor is not None}
    return len({head for head, _ in held}) < len(held)


def share_bound_s(world: World) -> float:
    """I7's bound, T_d + 2 rounds, and what the faults leave behind: one copy of a whole state on top, as a peer may have
    to fetch one that was made only when the others had agreed again, and the contributions of a round certified meanwhile. Where votes
    are earned, a peer that changed sides counts where it was, for who knows no better, until it has earned one again. Half of T_d more, as those
    who are more than have gone on along a view change of a minority write their own first (decision 29). A ballot more, as a round of few waits for
    others to lead (decision 28): seed 160 in slices takes 31.5 s."""
    earning_s = world.seats.contributions * ROUND_S
    few_s = world.timing.ballot_start_s
    return 1.5 * world.timing.degrade_s + 2 * ROUND_S + earning_s + _copy_s(world) + few_s + world.hindered_s


def _copy_s(world: World) -> float:
    """A whole state, and the contributions of a round certified meanwhile."""
    return MAX_FETCH * (world.network.state_s + world.network.blob_s) + MAX_APPLY_S


def _join_s(world: World) -> float:
    """One round more: the next certificate's roster takes in who shares the head."""
    return share_bound_s(world) + _longest_round_s(world)


def _longest_round_s(world: World) -> float:
    """A healthy round in which every time is at its longest: the slowest peer trains, all apply what was before, fetch
    its contribution, and the offer, the proposal, the ACK and the certificate each take their way."""
    slowest = max(node.slowness for node in world.up())
    network = world.network
    way_s = network.latency_s + network.spread_s
    longest_s = MAX_TRAIN * ROUND_S * slowest + MAX_APPLY_S + MAX_FETCH * network.blob_s + 4 * way_s
    if world.slices:  # the table, then slices, that they are here, the inputs, what they came to, and the results
        longest_s += MAX_APPLY_S + 2 * MAX_FETCH * network.blob_s + 3 * way_s + 2 * world.timing.retry_s
    return longest_s


def _finish(world: World, stop_at: float, share_s: float) -> Outcome:
    """A run of so many rounds ends, with everyone at its last head."""

    def all_finished() -> bool:
        return world.shares_one_head() and all(
            node.machine is not None and node.machine.schedule.is_over for node in world.up()
        )

    assert world.total_rounds is not None
    if not world.run(stop_at + _join_s(world) + world.total_rounds * _longest_round_s(world), stop=all_finished):
        if _waits_for_who_is_gone(world):
            return _outcome(world, share_s, 0.0)
        raise Violation(f"I7: the run does not end: {shown_heads(world)}")
    finished_at = world.now
    world.run(world.now + 5.0)
    if not all_finished():
        raise Violation(f"I7: the run went on after its end: {shown_heads(world)}")
    return _outcome(world, share_s, finished_at - stop_at)


def has_begun(world: World) -> bool:
    return any(node.machine is not None and node.machine.chain for node in world.up())


def _waits_for_who_is_gone(world: World) -> bool:
    """Whether all that are here know that the run went on, and those who had its state have left for good: nobody begins it anew."""
    machines = [node.machine for node in world.up() if node.machine is not None]
    waiting = all(machine.waits_for(world.now) == "state" and machine.round == 0 for machine in machines)
    return waiting and any(node.gone_for_good for node in world.nodes.values())


def _can_start(world: World) -> bool:
    """Whether anybody is left, and there is a chain or there are enough of them for the first."""
    up = world.up()
    starting = max((node.start_peers for node in up), default=1)
    return len(up) >= starting or any(node.machine is not None and node.machine.chain for node in up)


def _all_in_one_roster(world: World) -> Callable[[], bool]:
    def together() -> bool:
        return world.shares_one_head() and world.is_whole(_roster(world))

    return together


def _roster(world: World) -> tuple[PeerId, ...]:
    machine = world.up()[0].machine
    assert machine is not None
    return machine.roster


def _view(world: World) -> int:
    return max(node.machine.view for node in world.up() if node.machine is not None)


def _rounds_in(world: World, seconds: float) -> int:
    before = round_of(world)
    world.run(world.now + seconds)
    return round_of(world) - before


def round_of(world: World) -> int:
    return max(node.machine.round for node in world.up() if node.machine is not None)


def shown_heads(world: World) -> str:
    shown = []
    for node in world.up():
        machine = node.machine
        assert machine is not None
        shown.append(
            f"{node.peer}: round {machine.round} view {machine.view} head {machine.head.hex()[:6]} roster {len(machine.roster)}"
        )
    return "; ".join(shown)


def _outcome(world: World, share_s: float, heal_s: float) -> Outcome:
    return Outcome(
        seed=world.seed, peers=len(world.nodes), rounds=world.checks.rounds, share_s=share_s, heal_s=heal_s,
        max_ballot=world.checks.max_ballot, max_quiet_ballots=world.checks.max_quiet_ballots, events=len(world.checks.events), num_events=world.num_events,
    )  # fmt: skip
