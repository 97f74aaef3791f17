"""Which stage a peer claims."""

import random
from dataclasses import replace

import pytest

from dilocox_peer.dht.assignment import (
    PATIENCE_S,
    UNLINKED_S,
    Claimant,
    EmptyStages,
    ScantStages,
    better_stage,
    choose_stage,
    doubtful,
    is_full,
    nearest,
    no_place,
    stage_that_waits,
    take_over,
    to_ask,
    where_they_are,
    why_full,
    without,
)
from dilocox_peer.dht.records import Lease
from dilocox_peer.types import PeerId


def lease(name: str, stage: int, *, tokens_per_s: float = 100.0, incarnation: int = 1) -> Lease:
    return Lease(PeerId(name), stage, incarnation, (), 1, tokens_per_s, 0, "direct", 0)


def claimant(name: str = "me", fits=(0, 1, 2, 3), *, is_dialable: bool = True) -> Claimant:
    return Claimant(PeerId(name), fits, is_dialable)


def test_an_empty_stage_is_needed_most():
    stages = {0: [lease("a", 0)], 1: [], 2: [lease("b", 2, tokens_per_s=1.0)]}
    assert choose_stage(stages, claimant())[0] == 1


def test_the_stage_with_the_least_throughput_is_chosen():
    stages = {0: [lease("a", 0, tokens_per_s=50), lease("b", 0, tokens_per_s=60)], 1: [lease("c", 1, tokens_per_s=200)]}
    stage, why = choose_stage(stages, claimant())
    assert stage == 0
    assert "110 tokens/s" in why


def test_a_peer_of_unknown_speed_counts_as_the_average_one():
    stages = {0: [lease("a", 0, tokens_per_s=0)], 1: [lease("b", 1, tokens_per_s=10), lease("c", 1, tokens_per_s=10)]}
    assert choose_stage(stages, claimant())[0] == 0


def test_a_stage_does_not_stand_still_by_one_peer_s_word():
    stages = {
        0: [lease("a", 0, tokens_per_s=1e12)],
        1: [lease(name, 1, tokens_per_s=100) for name in ("b", "c", "d", "e", "f")],
    }
    assert choose_stage(stages, claimant())[0] == 0


def test_who_cannot_be_dialled_becomes_a_origin():
    stages = {0: [lease("a", 0)], 1: []}
    assert choose_stage(stages, claimant(is_dialable=False))[0] == 0
    stage, why = choose_stage(stages, claimant(is_dialable=False, fits=(1,)))
    assert stage is None
    assert "cannot dial" in why


def test_memory_decides_what_is_eligible():
    stages = {0: [lease("a", 0)], 1: []}
    assert choose_stage(stages, claimant(fits=(0,)))[0] == 0
    assert choose_stage(stages, claimant(fits=()))[0] is None


def full(stage: int, count: int = 4) -> list[Lease]:
    return [lease(f"{stage}-{number}", stage, tokens_per_s=1.0) for number in range(count)]


def capped(name: str = "me", fits=(0, 1), *, is_dialable: bool = True, held: int | None = None) -> Claimant:
    return Claimant(PeerId(name), fits, is_dialable, held, most=4)


def test_a_full_stage_is_not_chosen_however_little_it_does():
    stages = {0: full(0), 1: [lease("fast", 1, tokens_per_s=1e6)]}
    assert choose_stage(stages, capped())[0] == 1


def test_who_finds_every_stage_full_is_told_what_to_do_instead():
    stage, why = choose_stage({0: full(0), 1: full(1)}, capped())
    assert stage is None
    assert "each of the 2 stages that fit here has its 4 peers" in why
    assert "try again when one of them has left, or join another run" in why


def test_who_insists_on_a_full_stage_hears_which_has_room():
    stages = {0: full(0), 1: full(1, 3), 2: []}
    assert is_full(stages, capped(), 0)
    assert "there is room in stage 1: pass --stage 1" in why_full(stages, capped(), [0])
    alone = why_full(stages, capped(is_dialable=False), [0])
    assert "room in stage" not in alone, "stage 1 would be dialled, and this peer cannot be"


@pytest.mark.parametrize(("mode", "is_out"), [("open", False), ("invite", True), ("list", True)])
def test_a_full_stage_keeps_out_where_leases_are_of_who_was_let_in(mode, is_out):
    stages = {0: full(0), 1: full(1)}
    kept_out, words = no_place(stages, capped(), [0], mode=mode)
    assert kept_out == is_out
    assert ("asks for a place all the same" in words) != is_out


def test_who_has_the_state_of_a_full_stage_comes_back_to_it():
    stages = {0: full(0), 1: full(1)}
    assert choose_stage(stages, capped(held=1))[0] == 1


def test_an_earlier_lease_of_its_own_takes_nobody_a_place():
    stages = {0: full(0), 1: full(1)}
    assert not is_full(stages, capped(name="0-1"), 0)


def test_only_the_newest_moves_and_never_the_last():
    stages = {0: [lease("a", 0, incarnation=1), lease("b", 0, incarnation=2)], 1: []}
    assert better_stage(stages, claimant("b"), 0)[0] == 1
    assert better_stage(stages, claimant("a"), 0)[0] is None
    assert better_stage({0: [lease("a", 0)], 1: []}, claimant("a"), 0)[0] is None


def test_a_stage_with_too_few_peers_to_begin_gets_one_that_another_can_spare():
    three = [lease("a", 0, incarnation=1), lease("b", 0, incarnation=2), lease("c", 0, incarnation=3)]
    waits = replace(lease("d", 1), round=1)  # in training
    stages = {0: three, 1: [waits]}
    stage, turn, why = stage_that_waits(stages, claimant("c"), 0, 2)
    assert (stage, turn, why) == (1, 0, "it begins with 2 peers and has 1, where stage 0 has 3")
    assert stage_that_waits(stages, claimant("b"), 0, 2)[:2] == (1, 1), "the newest first"
    assert stage_that_waits(stages, claimant("c"), 0, 1)[0] is None, "it has enough"
    assert stage_that_waits({0: three[1:], 1: [lease("d", 1)]}, claimant("c"), 0, 2)[0] is None, "none to spare"
    assert stage_that_waits({0: three, 1: []}, claimant("c"), 0, 2)[0] is None, "an empty one is looked at for longer"
    begun = {0: three, 1: [replace(lease("d", 1), round=7)]}
    assert stage_that_waits(begun, claimant("c"), 0, 2)[0] is None, "it has begun, and goes on with fewer"


def test_where_the_newest_does_not_go_the_next_does_and_no_two_at_once():
    """It had come with --stage, or was nothing but a lease, and the run never began."""
    forged = [lease(f"forged{number}", 0, incarnation=2**53 - 1 - number) for number in range(2)]
    names = ["a", "b", "c"]
    at = dict.fromkeys(names, 0)
    looks = {name: ScantStages() for name in names}
    moved: list[tuple[str, float]] = []
    for now in range(0, 1000, 15):
        for number, name in enumerate(names):
            if at[name] or name == "c":  # its volunteer says --stage 0
                continue
            here = [lease(other, 0, incarnation=order) for order, other in enumerate(names) if not at[other]]
            there = [lease(other, 1, incarnation=order) for order, other in enumerate(names) if at[other]]
            stages = {0: [*forged, *here], 1: [replace(lease("d", 1), round=1), *there]}
            stage, _ = looks[name].to_fill(stages, claimant(name), 0, 2, now + number, linked=())
            if stage is not None:
                at[name] = stage
                moved.append((name, float(now)))
    assert [name for name, _ in moved] == ["b"]
    assert 3 * PATIENCE_S <= moved[0][1] <= 4 * PATIENCE_S, "two leases that nobody is behind, and one that stays"


def test_a_peer_that_was_killed_and_came_back_elsewhere_leaves_its_stage_empty():
    stages = {0: [lease("a", 0), lease("b", 0)], 1: [lease("c", 1, incarnation=5)], 2: [lease("c", 2, incarnation=6)]}
    assert where_they_are(stages) == {**stages, 1: []}


def test_a_difference_of_one_is_left_alone():
    stages = {0: [lease("a", 0), lease("b", 0)], 1: [lease("c", 1)]}
    assert better_stage(stages, claimant("b"), 0)[0] is None


@pytest.mark.parametrize("seed", range(20))
def test_simultaneous_joiners_settle_evenly(seed: int):
    """All choose from the same empty directory, then look again, one after another in any order."""
    rng = random.Random(seed)
    count, peers = rng.randint(1, 5), rng.randint(1, 20)
    names = [f"peer{index}" for index in range(peers)]
    fits = tuple(range(count))
    at = {name: choose_stage({stage: [] for stage in fits}, claimant(name, fits))[0] for name in names}

    def stages():
        return {
            stage: [lease(name, stage, incarnation=index) for index, name in enumerate(names) if at[name] == stage]
            for stage in fits
        }

    for _ in range(peers * count):
        moved = False
        for name in rng.sample(names, len(names)):
            here = at[name]
            assert here is not None
            better, _why = better_stage(stages(), claimant(name, fits), here)
            if better is not None:
                at[name], moved = better, True
        if not moved:
            break
    sizes = [len(leases) for leases in stages().values()]
    assert max(sizes) - min(sizes) <= 1


def test_where_no_speed_is_known_peers_are_counted():
    stages = {0: [lease("a", 0, tokens_per_s=0), lease("b", 0, tokens_per_s=0)], 1: [lease("c", 1, tokens_per_s=0)]}
    assert choose_stage(stages, claimant()) == (1, "it has the fewest peers (1 peer)")


def test_the_newest_that_can_be_dialled_moves_where_a_newer_one_cannot():
    relayed = replace(lease("c", 0, incarnation=3), reachability="relayed")
    stages = {0: [lease("a", 0, incarnation=1), lease("b", 0, incarnation=2), relayed], 1: [lease("d", 1)]}
    assert better_stage(stages, claimant("b"), 0)[0] == 1
    assert better_stage(stages, claimant("c", is_dialable=False), 0)[0] is None


def test_who_is_passed_on_to_by_a_relay_moves_like_any_other():
    relay = "/ip4/203.0.113.1/tcp/1/p2p/R/p2p-circuit/p2p/c"
    relayed = replace(lease("c", 0, incarnation=3), reachability="relayed", addresses=(relay,))
    stages = {0: [lease("a", 0, incarnation=1), lease("b", 0, incarnation=2), relayed], 1: [lease("d", 1)]}
    assert better_stage(stages, claimant("c"), 0)[0] == 1
    assert better_stage(stages, claimant("b"), 0)[0] is None


def test_the_newest_of_the_fullest_stage_goes_first_to_a_stage_that_was_left():
    stages = {
        0: [lease("a", 0, incarnation=1), lease("b", 0, incarnation=5)],
        1: [],
        2: [lease("c", 2, incarnation=1), lease("d", 2, incarnation=3), lease("e", 2, incarnation=2)],
    }
    turns = {
        name: take_over(stages, claimant(name), stage) for name, stage in zip("abcde", (0, 0, 2, 2, 2), strict=True)
    }
    assert turns == {"d": (1, 0), "e": (1, 1), "b": (1, 2), "a": (None, 0), "c": (None, 0)}
    assert take_over(stages, claimant("d", fits=(0, 2)), 2) == (None, 0), "no room for it"
    assert take_over(stages, claimant("d", is_dialable=False), 2) == (None, 0)
    assert take_over({**stages, 1: [lease("f", 1)]}, claimant("d"), 2) == (None, 0), "nothing is empty"
    assert take_over(stages, claimant("stranger"), 2) == (None, 0), "its own lease is not seen"


def test_of_two_stages_that_were_left_each_gets_one_and_who_cannot_be_dialled_stays():
    relayed = replace(lease("r", 0, incarnation=9), reachability="relayed")
    stages = {0: [relayed, *(lease(name, 0, incarnation=n) for n, name in enumerate("abc"))], 1: [], 2: []}
    found = {name: take_over(stages, claimant(name), 0) for name in "abc"}
    assert found == {"c": (1, 0), "b": (2, 0), "a": (1, 1)}, "r stays, so a may go too"
    assert take_over(stages, claimant("r", is_dialable=False), 0) == (None, 0)


def test_a_stage_that_fills_in_time_or_is_linked_is_not_taken_over():
    pair, empty = [lease("a", 0), lease("b", 0, incarnation=2)], EmptyStages()

    def look(now: float, *, linked: tuple[int, ...] = (), later: tuple[Lease, ...] = ()) -> int | None:
        return empty.to_take_over({0: pair, 1: later}, claimant("b"), 0, linked=linked, now=now)

    assert look(0.0) is None
    assert look(PATIENCE_S - 1, later=(lease("c", 1),)) is None
    assert look(PATIENCE_S) is None, "it was held meanwhile: the patience begins anew"
    assert look(2 * PATIENCE_S, linked=(1,)) is None
    assert look(2 * PATIENCE_S + 1) is None
    assert look(3 * PATIENCE_S + 1) == 1


@pytest.mark.parametrize("made_up", [10, 500])
def test_leases_of_nobody_hold_no_stage_empty_for_hours(made_up: int):
    """Each cost a turn: with 500 of them an empty stage stopped the run for six hours."""
    honest = [lease(f"honest{number}", 0, incarnation=1000 + number) for number in range(4)]
    stages = {0: honest + [lease(f"fake{number}", 0, incarnation=2000 + number) for number in range(made_up)], 1: []}
    moves = []
    for each in honest[1:]:  # the oldest stays
        empty = EmptyStages()
        times = (
            now
            for now in range(0, 3600, 15)
            if empty.to_take_over(stages, claimant(each.peer), 0, linked=(), now=now) == 1
        )
        moves.append(next(times))
    assert all(5 * PATIENCE_S <= at <= 9 * PATIENCE_S for at in moves), moves
    assert len(set(moves)) > 1, "not all at once"


def test_a_stage_beside_ours_whose_leases_are_of_nobody_is_taken_over():
    stages = {0: [lease("a", 0), lease("b", 0, incarnation=2)], 1: [lease("squatter", 1)]}
    empty = EmptyStages()

    def look(now: float, linked: tuple[int, ...] = ()) -> int | None:
        return empty.to_take_over(stages, claimant("b"), 0, linked=linked, beside=(1,), now=now)

    assert [look(now) for now in (0.0, UNLINKED_S - 1)] == [None, None]
    assert look(UNLINKED_S, linked=(1,)) is None
    began = UNLINKED_S + 1
    assert [look(began + after) for after in (0.0, UNLINKED_S, UNLINKED_S + PATIENCE_S - 1)] == [None, None, None]
    assert look(began + UNLINKED_S + PATIENCE_S) == 1


@pytest.mark.parametrize("seed", range(50))
def test_peers_that_see_the_leases_late_fill_every_stage_and_empty_none(seed):
    """Each looks now and then at what the others announced a while ago."""
    rng = random.Random(seed)
    count, late_s = rng.randint(2, 4), 10.0
    peers = [f"p{number}" for number in range(count + rng.randint(0, 6))]
    lost = rng.randrange(count)
    left = [stage for stage in range(count) if stage != lost]
    held = {name: rng.choice(left) for name in peers} | dict(
        zip(peers, left, strict=False)
    )  # each of those has somebody
    moves = [(0.0, name, stage) for name, stage in held.items()]
    views = {name: EmptyStages() for name in peers}
    now = 0.0
    while now < 1200.0:
        now += 1.0
        for _number, name in enumerate(peers):
            if rng.random() > 1 / 18:
                continue
            seen = {other: stage for at, other, stage in moves if at <= now - (0.0 if other == name else late_s)}
            stages = {
                stage: [lease(other, stage, incarnation=peers.index(other)) for other in seen if seen[other] == stage]
                for stage in range(count)
            }
            target = views[name].to_take_over(stages, claimant(name), held[name], linked=(), now=now)
            if target is not None:
                held[name] = target
                moves.append((now, name, target))
        for stage in set(range(count)) - {lost}:
            assert stage in held.values(), f"stage {stage} was emptied"
    if len(peers) >= count:
        assert lost in held.values()
    assert sum(1 for at, *_ in moves if at > 0) <= 2, "hardly more than one moved"


def test_of_stages_with_as_few_peers_the_one_that_near_peers_lack_is_chosen():
    stages = {
        0: [lease("here0", 0), lease("there0", 0)],
        1: [lease("there1", 1), lease("there2", 1, tokens_per_s=900.0)],
    }
    near_first = replace(claimant(), near=(PeerId("here0"),))
    assert choose_stage(stages, near_first) == (1, "the fewest of the peers near here hold it")
    assert choose_stage(stages, claimant())[0] == 0, "by need alone"
    assert choose_stage({0: stages[0][:1], 1: stages[1]}, near_first)[0] == 0, (
        "a difference of two would be mended again"
    )
    assert choose_stage({0: stages[0], 1: []}, replace(near_first, near=(PeerId("there0"),)))[0] == 1, "nobody holds it"


def test_who_is_near_by_the_way_there_and_back():
    near, far, farther = PeerId("near"), PeerId("far"), PeerId("farther")
    assert nearest({near: 0.002, far: 0.06, farther: 0.2}) == {near}
    assert nearest({far: 0.06, farther: 0.15}) == set(), "all alike"
    assert nearest({near: 0.0001, far: 0.005}) == set(), "too short to tell apart"
    assert nearest({}) == set()


def settled(newcomers: int, shams: list[Lease], *, asks: bool) -> dict[int, int]:
    """How many honest peers each of two stages has, three each at first, after so many more came one by one. asks: whether they are there."""
    made_up, rng = {each.peer for each in shams}, random.Random(7)
    stages = {stage: [lease(f"{stage}-{number}", stage) for number in range(3)] for stage in (0, 1)}
    stages[1] += shams
    for number in range(newcomers):
        me = claimant(f"new{number}", (0, 1))
        asked = to_ask(stages, 16, rng) if asks else []
        doubted = doubtful(stages, {each.peer: each.peer not in made_up for each in asked}, rng, mode="open")
        seen = without(stages, doubted)
        stage, _ = choose_stage(seen, me)
        assert stage is not None
        mine = lease(str(me.peer), stage, incarnation=2 + number)
        seen[stage].append(mine)
        better, _ = better_stage(seen, me, stage)
        taken = stage if better is None else better
        stages[taken].append(replace(mine, stage=taken))
    return {stage: sum(each.peer not in made_up for each in leases) for stage, leases in stages.items()}


@pytest.mark.parametrize("incarnation", [0, 10**6])
def test_made_up_leases_keep_no_newcomers_from_a_stage(incarnation: int) -> None:
    """As many as one connection has room for. All twenty went to the other stage."""
    shams = [lease(f"sham{number}", 1, incarnation=incarnation) for number in range(32)]
    assert settled(20, [], asks=True) == {0: 13, 1: 13}
    assert settled(20, shams, asks=False)[1] == 3
    assert settled(20, shams, asks=True)[1] >= 9


def test_who_does_not_answer_is_not_counted_and_as_many_of_those_that_were_not_asked() -> None:
    stages = {0: [lease(f"a{number}", 0) for number in range(20)], 1: [lease("b", 1)]}
    answered = {PeerId(f"a{number}"): number < 2 for number in range(8)} | {PeerId("b"): True}
    found = doubtful(stages, answered, random.Random(1), mode="open")
    assert {f"a{number}" for number in range(2, 8)} <= found
    assert len(found) == 6 + 9
    assert not {"a0", "a1", "b"} & found


@pytest.mark.parametrize("mode", ["invite", "list"])
def test_where_only_who_was_let_in_has_a_lease_nobody_is_doubted(mode: str) -> None:
    stages = {0: [lease("a", 0)], 1: [lease("b", 1)]}
    answered = {PeerId("a"): True, PeerId("b"): False}
    assert doubtful(stages, answered, random.Random(1), mode="open") == {"b"}
    assert not doubtful(stages, answered, random.Random(1), mode=mode)


def test_where_nobody_answers_nobody_is_doubted() -> None:
    stages = {0: [lease("a", 0)], 1: [lease("b", 1)]}
    assert not doubtful(stages, {PeerId("a"): False, PeerId("b"): False}, random.Random(1), mode="open")
    assert not doubtful(stages, {}, random.Random(1), mode="open")


def test_as_many_of_each_stage_are_asked_and_none_that_nobody_can_dial() -> None:
    hidden = replace(lease("hidden", 0), reachability="relayed")
    stages = {0: [lease("a", 0), hidden], 1: [lease(f"b{number}", 1) for number in range(50)], 2: []}
    asked = to_ask(stages, 12, random.Random(1))
    assert {each.peer for each in asked if each.stage == 0} == {"a"}
    assert sum(each.stage == 1 for each in asked) == 4
    assert len(to_ask({stage: [lease(str(stage), stage)] for stage in range(40)}, 12, random.Random(1))) == 12


@pytest.mark.parametrize("sham", [None, lease("sham", 1), replace(lease("sham", 1), round=2)])
def test_a_made_up_lease_does_not_keep_a_stage_from_its_first_peers(sham: Lease | None) -> None:
    """It counted as the second peer of a stage that begins with two, or as one in training; nobody moved there, and no round was made."""
    crew = [lease(f"a{number}", 0, incarnation=number) for number in range(1, 5)]
    stages = {0: crew, 1: [lease("b", 1), *([] if sham is None else [sham])]}
    looks = {each.peer: ScantStages() for each in crew}
    moves = [
        (now, peer)
        for now in range(0, 1200, 15)
        for peer, look in looks.items()
        if look.to_fill(stages, claimant(str(peer), (0, 1)), 0, 2, float(now), linked={PeerId("b")}, beside=[1])[0]
    ]
    at, first = moves[0]
    assert first == "a4", "the newest"
    assert at <= 15 if sham is None else UNLINKED_S <= at <= UNLINKED_S + 30


def test_peers_that_are_linked_count_however_long_their_stage_waits() -> None:
    stages = {
        0: [lease(f"a{number}", 0, incarnation=number) for number in range(1, 5)],
        1: [lease("b", 1), lease("c", 1)],
    }
    look, linked = ScantStages(), [PeerId("b"), PeerId("c")]
    for now in range(0, 3600, 15):
        assert look.to_fill(stages, claimant("a4", (0, 1)), 0, 2, float(now), linked=linked, beside=[1])[0] is None
