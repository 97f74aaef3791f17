"""What is wrong with a run, as every peer and the page see it: the cause by its name, who is meant, and what happens next."""

from itertools import pairwise
from pathlib import Path

import pytest

from dilocox_peer.cli.screen import Size, render
from dilocox_peer.cli.trouble_strip import trouble_strip
from dilocox_peer.dht.assignment import PATIENCE_S, REFUSED_S
from dilocox_peer.dht.records import LEASE_TTL_S, Lease
from dilocox_peer.errors import ProtocolError
from dilocox_peer.events import short
from dilocox_peer.events_of_health import (
    NOTES,
    DiskRefused,
    LinkProcessEnded,
    Trouble,
    TroubleBegan,
    TroubleKind,
    TroubleOver,
    TroublesSeen,
)
from dilocox_peer.peer.lookout import ANSWER_S
from dilocox_peer.peer.status import Status
from dilocox_peer.peer.swarm_health import (
    ASKS_A_LOOK,
    CLOCK_S,
    HEARD_EVERY_S,
    MOST_SELDOM,
    TAKE_OVER_LOOK_S,
    UNANSWERED_S,
    SwarmHealth,
)
from dilocox_peer.types import PeerId
from dilocox_peer.wire.declared import encode
from dilocox_peer.wire.health import HEALTH, Accusation, HealthForm
from dilocox_peer.wire.records import KEEPERS

ME, BOOT = PeerId("me"), PeerId("boot")
WALL = 1_000_000.0  # of the wall when the other clock shows 0


def lease(name: str, stage: int, *, incarnation: int = 1, speed: float = 100.0, left_s: float = LEASE_TTL_S) -> Lease:
    return Lease(PeerId(name), stage, incarnation, (f"/of/{name}",), 1, speed, 0, "direct", 3, expires_s=WALL + left_s)


class Run:
    """A run of two stages, or more, watched by one peer of it, or from outside; a second is one look."""

    def __init__(self, *leases: Lease, me: PeerId | None = ME, stages: int = 2, start_peers: int = 1) -> None:
        self.health = SwarmHealth(me, stages, start_peers, stage=0, bootstraps={BOOT})
        self.now = 0.0
        self.said = {each.peer: HealthForm(each.stage, 5, 0, moves=True) for each in leases}
        self.said[BOOT] = HealthForm(KEEPERS, 0, 0)
        self.ahead: dict[PeerId, float] = {}
        self.out: dict[PeerId, float] = {}  # questions, and since when
        self.dead: set[PeerId] = set()
        self.stopped: set[PeerId] = set()
        self.stages = {stage: [each for each in leases if each.stage == stage] for stage in range(stages)}
        self.read()

    def read(self) -> None:
        here = {
            stage: [each for each in leases if each.expires_s > WALL + self.now]
            for stage, leases in self.stages.items()
        }
        self.health.listed(here, self.now, WALL + self.now)

    def second(self, times: int = 1) -> tuple[Trouble, ...]:
        for _ in range(times):
            self.now += 1.0
            self.health.look(self.now)
            if self.health.me is not None:
                self.health.of_ourselves(self.said[self.health.me], self.now)
            for peer in [peer for peer, at in self.out.items() if self.now - at >= ANSWER_S]:
                del self.out[peer]
                self.health.missed(peer, "silent", self.now)
            for peer in self.health.to_ask(self.now):
                self.health.asked(peer, self.now)
                if peer in self.dead:
                    self.health.missed(peer, "gone", self.now, refuses=True)
                elif peer in self.stopped:
                    self.out[peer] = self.now
                else:
                    self.health.told(peer, self.said[peer], self.now, ahead_s=self.ahead.get(peer, 0.0))
            self.health.troubles(self.now)  # as once a second
        return self.health.troubles(self.now)

    def kinds(self) -> list[str]:
        return [each.kind for each in self.health.troubles(self.now)]


def head_and_two() -> Run:
    run = Run(lease("head", 0), lease("me", 1), lease("late", 1, incarnation=9), me=ME)
    assert [each.kind for each in run.second(10)] == ["thin"]
    return run


def test_a_run_that_goes_well_has_no_trouble():
    run = Run(lease("me", 0), lease("a", 1))
    assert run.second(60) == ()


def test_the_one_peer_of_a_stage_is_named_where_others_have_more():
    trouble = head_and_two().health.troubles(10.0)[0]
    assert (trouble.kind, trouble.stage, trouble.peers, trouble.stops) == ("thin", 0, (PeerId("head"),), False)
    assert (
        trouble.words()
        == "stage 0 has one peer (…head), where others have more: should it go, the run waits until another takes its place"
    )


def test_a_paused_head_is_named_and_that_everybody_waits():
    run = head_and_two()
    run.said[PeerId("head")] = HealthForm(0, 5, 0, is_paused=True)
    paused, thin = run.second(4)
    assert (paused.kind, paused.peers, paused.stops) == ("paused", (PeerId("head"),), True)
    assert (
        paused.words()
        == "everybody of stage 0 has paused (…head): the run waits until one of them goes on, or for a peer that joins stage 0"
    )
    assert thin.kind == "thin"
    run.said[PeerId("head")] = HealthForm(0, 5, 0)
    assert [each.kind for each in run.second(4)] == ["thin"]


def test_a_stopped_head_is_named_within_ten_seconds_with_who_takes_its_stage_and_when():
    run = head_and_two()
    run.stopped = {PeerId("head")}
    seconds = next(second for second in range(1, 30) if "frozen" in [each.kind for each in run.second()])
    assert UNANSWERED_S <= seconds <= 10, "its last sign of life may be older than its end"
    frozen = run.health.troubles(run.now)[0]
    assert (frozen.helper, frozen.stops) == (PeerId("late"), True)
    # Its lease has to end, and then whoever moves waits for it to come back.
    assert run.now + frozen.in_s == pytest.approx(LEASE_TTL_S + PATIENCE_S + TAKE_OVER_LOOK_S)
    assert frozen.words().startswith("nobody of stage 0 answers (…head): unless it comes back, …late takes it in about")
    run.stopped = set()
    assert [each.kind for each in run.second(9)] == ["thin"]


def test_a_dead_head_is_named_at_once_and_its_neighbour_takes_over_sooner():
    run = head_and_two()
    run.dead = {PeerId("head")}
    seconds = next(second for second in range(1, 30) if "empty" in [each.kind for each in run.second()])
    assert seconds <= 4
    empty = run.health.troubles(run.now)[0]
    assert (empty.peers, empty.helper) == ((PeerId("head"),), PeerId("late"))
    assert empty.in_s == pytest.approx(REFUSED_S + TAKE_OVER_LOOK_S, abs=4)
    assert "nobody holds stage 0, …head is gone: …late takes it in about" in empty.words()
    run.second(5)
    assert run.health.troubles(run.now)[0].in_s == pytest.approx(empty.in_s - 5.0)
    assert empty.next_words(200.0) == "…late takes it any moment now"


def test_of_a_stage_that_nobody_can_be_spared_for_it_is_said_that_the_run_waits():
    run = Run(lease("head", 0), lease("me", 1))
    run.second(5)
    run.dead = {PeerId("head")}
    empty = run.second(5)[0]
    assert (empty.kind, empty.helper) == ("empty", None)
    assert empty.next_words() == "the run waits for a peer that takes stage 0"


def test_who_was_told_to_hold_one_stage_is_not_said_to_move():
    run = head_and_two()
    run.said[PeerId("late")] = HealthForm(1, 5, 0, moves=False)
    run.dead = {PeerId("head")}
    empty = run.second(5)[0]
    assert empty.helper is None, "and the other is the stage's oldest, which stays"


def test_a_silent_replica_is_named_and_stops_nothing():
    run = Run(lease("me", 0), lease("a", 0), lease("b", 1), lease("c", 1))
    run.second(5)
    run.stopped = {PeerId("a")}
    silent = run.second(12)[0]
    assert (silent.kind, silent.peers, silent.stops) == ("silent", (PeerId("a"),), False)
    assert silent.words() == "…a (stage 0) does not answer: its stage goes on without it"


def test_heartbeats_and_links_are_signs_of_life_where_no_answer_comes():
    run = Run(lease("me", 0), lease("a", 1))
    run.stopped = {PeerId("a")}
    for _ in range(60):
        run.second()
        run.health.heard(PeerId("a"), 1, run.now)
        assert run.kinds() == []


def test_who_stood_still_itself_calls_nobody_silent():
    run = Run(lease("me", 0), lease("a", 1))
    run.second(10)
    run.now += 300.0  # this computer slept
    assert run.second() == ()


def test_a_peer_that_came_back_is_another_process():
    run = head_and_two()
    run.dead = {PeerId("head")}
    assert run.second(5)[0].kind == "empty"
    run.dead = set()
    run.stages[0] = [lease("head", 0, incarnation=2)]
    run.read()
    assert [each.kind for each in run.second(5)] == ["thin"]


def test_a_peer_that_is_linked_and_not_listed_yet_holds_its_stage():
    run = Run(lease("me", 0))
    assert run.second(3)[0].kind == "empty"
    run.health.heard(PeerId("new"), 1, run.now)
    assert run.kinds() == []


def unreached(run: Run, peer: str, seconds: int) -> None:
    for _ in range(seconds):
        run.second()
        if run.out.pop(PeerId(peer), None) is not None:
            run.health.missed(PeerId(peer), "unreached", run.now)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_peer_that_was_heard_or_that_dials_is_not_called_gone_or_silent_for_being_unreached(stage):
    others = [lease("b", 0), lease("a", 1)]
    run = Run(lease("me", 0), *others, lease("far", stage))
    if stage:
        run.second(5)
    run.stopped = {PeerId("far")}
    unreached(run, "far", 60)
    assert run.kinds() == (["thin"] if not stage else [])


def test_a_lease_where_nobody_ever_answers_does_not_hide_that_a_stage_stands_empty():
    run = Run(lease("me", 0), lease("made-up", 1))
    run.stopped = {PeerId("made-up")}
    unreached(run, "made-up", 60)
    trouble = run.health.troubles(run.now)[0]
    assert (trouble.kind, trouble.stage, trouble.peers, trouble.stops) == ("frozen", 1, (PeerId("made-up"),), True)
    run.health.heard(PeerId("made-up"), 1, run.now)
    assert run.kinds() == []


def test_before_the_first_round_it_is_said_how_many_are_missing():
    run = Run(lease("me", 0), lease("a", 1), lease("b", 1), start_peers=2)
    run.said = {peer: replace_round(said, 0) for peer, said in run.said.items()}
    waiting = run.second(5)
    assert [(each.kind, each.stage, each.number, each.of) for each in waiting] == [("waiting", 0, 1, 2)]
    assert waiting[0].words() == "stage 0 has 1 of the 2 peers that it begins with: the run begins when 1 more is here"


def replace_round(said: HealthForm, number: int) -> HealthForm:
    return HealthForm(said.stage, number, said.at_ms, moves=said.moves)


@pytest.mark.parametrize(
    ("ail", "words"), [("disk", "the disk of …head (stage 0) takes nothing"), ("links", "the link process of …head")]
)
def test_what_ails_the_only_head_stops_the_run(ail, words):
    run = head_and_two()
    run.said[PeerId("head")] = HealthForm(0, 5, 0, ails=(ail,))
    trouble = run.second(4)[0]
    assert (trouble.kind, trouble.stops) == (ail, True)
    assert words in trouble.words()
    assert "the run waits" in trouble.words()


@pytest.mark.parametrize("ail", ["disk", "links", "line", "data"])
def test_what_ails_one_of_two_stops_nothing_and_is_named(ail):
    run = Run(lease("me", 0), lease("a", 0), lease("b", 1), lease("c", 1))
    run.said[PeerId("a")] = HealthForm(0, 5, 0, ails=(ail,))
    trouble = run.second(4)[0]
    assert (trouble.kind, trouble.peers, trouble.stops) == (ail, (PeerId("a"),), False)


@pytest.mark.parametrize("kind", ["empty", "frozen", "paused", "silent", "thin", "slow"])
def test_nobody_has_to_be_there_once_the_run_is_over(kind):
    run = Run(lease("me", 0), lease("a", 1, speed=40.0), lease("b", 1, speed=0.0 if kind == "slow" else 40.0))
    if kind == "slow":
        run = Run(lease("me", 0), lease("a", 1, speed=30.0))
    names = [PeerId("a"), PeerId("b")]
    run.second(5)
    if kind == "empty":
        run.dead = set(names)
    elif kind in {"frozen", "silent"}:
        run.stopped = set(names if kind == "frozen" else names[:1])
    elif kind == "paused":
        run.said |= dict.fromkeys(names, HealthForm(1, 5, 0, is_paused=True))
    run.second(40)
    assert kind in run.kinds()
    run.health.is_over = True
    assert run.kinds() == []
    run.dead.add(BOOT)
    run.second(10)
    assert run.kinds() == ["bootstrap"], "whose copy somebody may want"


@pytest.mark.parametrize("ahead_s", [60.0, -60.0])
@pytest.mark.parametrize("off", ["a", "me"])
def test_the_one_clock_that_is_off_is_named_by_all(ahead_s, off):
    run = Run(lease("me", 0), lease("a", 1))
    # Ours is the one: then all the others seem to be off, alike.
    run.ahead = {PeerId("a"): ahead_s} if off == "a" else {PeerId("a"): -ahead_s, BOOT: -ahead_s}
    trouble = run.second(5)[0]
    assert (trouble.kind, trouble.peers, trouble.number) == ("clock", (PeerId(off),), ahead_s)
    assert f"60 s {'ahead of' if ahead_s > 0 else 'behind'} the others'" in trouble.cause


def test_of_two_clocks_it_is_said_that_one_is_off():
    run = Run(lease("me", 0), lease("a", 1))
    run.dead = {BOOT}
    run.ahead = {PeerId("a"): 60.0}
    clocks = run.second(5)[0]
    assert (clocks.kind, clocks.peers) == ("clocks", (PeerId("a"), ME))
    assert run.kinds() == ["clocks", "bootstrap"]
    run.ahead = {PeerId("a"): CLOCK_S - 1}
    run.second(5)
    assert run.kinds() == ["bootstrap"]


def test_a_bootstrap_that_is_gone_is_named_and_training_goes_on():
    run = Run(lease("me", 0), lease("a", 1))
    run.second(4)
    run.dead = {BOOT}
    trouble = run.second(5)[0]
    assert (trouble.kind, trouble.stops) == ("bootstrap", False)
    assert "training goes on" in trouble.words()


def test_a_hostile_peer_is_named_where_most_of_its_stage_say_so():
    run = Run(lease("me", 1), lease("a", 0), lease("b", 0), lease("liar", 0))
    accused = (Accusation(PeerId("liar"), "proven"),)
    run.said[PeerId("a")] = HealthForm(0, 5, 0, accused=accused)
    assert "hostile" not in [each.kind for each in run.second(4)], "one of two others"
    run.said[PeerId("b")] = HealthForm(0, 5, 0, accused=accused)
    hostile = next(each for each in run.second(4) if each.kind == "hostile")
    assert hostile.peers == (PeerId("liar"),)
    assert (
        hostile.words() == "…liar (stage 0) is proven hostile, as its stage says: it is left out of its stage's rosters"
    )


def test_a_liar_s_word_alone_accuses_nobody():
    run = Run(lease("me", 1), lease("a", 0), lease("b", 0), lease("c", 0), lease("liar", 0))
    run.said[PeerId("liar")] = HealthForm(0, 5, 0, accused=tuple(Accusation(PeerId(name), "proven") for name in "abc"))
    assert "hostile" not in [each.kind for each in run.second(4)]
    few = Run(lease("me", 1), lease("a", 0), lease("b", 0), lease("liar", 0))
    few.said[PeerId("liar")] = HealthForm(0, 5, 0, accused=(Accusation(PeerId("a"), "proven"),))
    assert "hostile" not in [each.kind for each in few.second(4)]
    elsewhere = Run(lease("me", 1), lease("a", 1), lease("liar", 0))
    elsewhere.said[PeerId("liar")] = HealthForm(0, 5, 0, accused=(Accusation(PeerId("a"), "proven"),))
    assert "hostile" not in [each.kind for each in elsewhere.second(4)], "of another stage"


def test_what_we_have_seen_ourselves_needs_nobody_else():
    run = Run(lease("me", 0), *(lease(name, 0) for name in "abcd"), lease("x", 1))
    run.said[ME] = HealthForm(0, 5, 0, accused=(Accusation(PeerId("a"), "refused"),))
    assert run.second(4)[0].words().startswith("what …a (stage 0) sends is refused")


def test_a_stage_is_slow_only_after_a_while_and_where_all_speeds_are_known():
    slow = Run(lease("me", 0), lease("a", 1, speed=30.0), lease("b", 2), stages=3)
    assert "slow" not in [each.kind for each in slow.second(20)]
    assert "slow" in [each.kind for each in slow.second(20)]
    unknown = Run(lease("me", 0, speed=0.0), lease("a", 1, speed=30.0), lease("b", 2), stages=3)
    assert unknown.second(60) == ()


def test_no_more_are_asked_at_a_look_than_are_allowed_and_all_get_their_turn():
    names = [f"p{number}" for number in range(50)]
    run = Run(lease("me", 0), *(lease(name, 1) for name in names))
    asked: set[PeerId] = set()
    for second in range(20):
        found = run.health.to_ask(float(second))
        assert len(found) <= ASKS_A_LOOK
        for peer in found:
            run.health.asked(peer, float(second))
            run.health.told(peer, run.said[peer], float(second))
        asked.update(found)
    assert asked >= set(names)


def test_those_who_are_heard_are_asked_one_at_a_time_however_many_they_are():
    health = SwarmHealth(ME, 1, 1, stage=0)
    others = [lease(f"peer{number:02d}", 0) for number in range(40)]
    health.listed({0: others}, 0.0, WALL)
    asked: list[PeerId] = []
    for second in range(1, 241):
        health.look(float(second))
        for each in others:
            health.heard(each.peer, 0, second - 0.5)
        for peer in health.to_ask(float(second)):
            asked.append(peer)
            health.asked(peer, float(second))
            health.told(peer, None, float(second))
    assert len(asked) == 240 / (MOST_SELDOM * HEARD_EVERY_S)
    assert set(asked) == {each.peer for each in others}, "in turn"


@pytest.mark.parametrize(("num_others", "quiet_s"), [(3, 3), (11, 6), (40, 6)])
def test_who_says_a_heartbeat_in_time_is_not_asked_whether_it_is_there(num_others: int, quiet_s: int):
    health = SwarmHealth(ME, 1, 1, stage=0)
    others = [lease(f"peer{number:02d}", 0) for number in range(num_others)]
    health.listed({0: [lease("me", 0), *others]}, 0.0, WALL)
    for each in others:
        health.heard(each.peer, 0, 10.0)
    assert len(health.to_ask(10.0 + quiet_s, most=64)) == 1, "one of those that are heard"
    assert len(health.to_ask(10.1 + quiet_s, most=64)) == num_others


@pytest.mark.parametrize(("num_others", "num_asked"), [(3, range(12, 21)), (11, range(5, 8))])
def test_a_bootstrap_is_asked_by_many_the_more_seldom(num_others: int, num_asked: range):
    health = SwarmHealth(ME, 1, 1, stage=0, bootstraps=[BOOT])
    others = [lease("me", 0), *(lease(f"peer{number:02d}", 0) for number in range(num_others))]
    health.listed({0: others}, 0.0, WALL)
    asked: list[PeerId] = []
    for second in range(60):
        for each in others[1:]:
            health.heard(each.peer, 0, float(second))
        found = health.to_ask(float(second))
        asked += found
        for peer in found:
            health.asked(peer, float(second))
            health.told(peer, None, float(second))
    assert asked.count(BOOT) in num_asked


def test_a_stranger_takes_no_place_for_ever_and_what_is_known_is_bounded():
    run = Run(lease("me", 0), lease("a", 1))
    for number in range(5000):
        run.health.heard(PeerId(f"s{number}"), 1, 1.0)
    assert len(run.health.to_ask(10.0, most=10**6)) <= 1024
    run.now = 40.0
    run.read()
    assert set(run.health.to_ask(40.0, most=10**6)) == {BOOT, "a"}


@pytest.mark.parametrize("me", [ME, None])
def test_peers_and_somebody_outside_name_it_alike(me):
    run = Run(lease("head", 0), lease("me", 1), lease("late", 1, incarnation=9), me=me)
    run.second(5)
    run.dead = {PeerId("head")}
    assert [(each.kind, each.peers, each.helper) for each in run.second(6)] == [("empty", ("head",), "late")]


# -- words and screens -------------------------------------------------------------------------------------------------


def test_every_trouble_has_words_without_a_hole():
    kinds: set[TroubleKind] = {
        "empty",
        "frozen",
        "paused",
        "waiting",
        "thin",
        "slow",
        "silent",
        "disk",
        "links",
        "line",
        "data",
        "clock",
        "clocks",
    }
    kinds |= {"bootstrap", "hostile", "refused"}
    for kind in kinds:
        for stops in (False, True):
            trouble = Trouble(
                kind, 1, (PeerId("12D3KooWabcdefgh"), PeerId("12D3KooWijklmnop")), stops=stops, number=1, of=2
            )
            assert "None" not in trouble.words()
            assert short(trouble.peers[0]) in trouble.words() or kind in {"waiting", "slow"}
            assert TroubleBegan(trouble).level == ("info" if kind in NOTES | {"waiting"} else "warning")
    assert (
        TroubleOver(Trouble("disk", 0, (ME,)), 12.4).line()
        == "over after 12 s: the disk of …me (stage 0) takes nothing"
    )


def test_a_status_counts_the_seconds_down_and_is_as_bad_as_the_worst():
    found = Status()
    trouble = Trouble("empty", 1, stops=True, helper=PeerId("late"), in_s=40.0)
    found.take(TroublesSeen((trouble, Trouble("thin", 0, (ME,)))), 100.0)
    assert found.trouble_words(trouble, 110.0).endswith("…late takes it in about 30 s")


def test_the_worst_stands_in_full_over_the_dashboard_and_the_rest_is_counted():
    found = Status()
    stops = Trouble("empty", 1, (PeerId("12D3KooWAbCdEfGh"),), stops=True, helper=PeerId("12D3KooWzzzzZZZZ"), in_s=42.0)
    found.take(
        TroublesSeen((stops, Trouble("disk", 0, (ME,)), Trouble("data", 0, (ME,)), Trouble("thin", 0, (ME,)))), 0.0
    )
    lines = ["".join(text for text, _ in line) for line in trouble_strip(found, 80, 1.0, most=2)]
    assert lines == [
        " ! nobody holds stage 1, …AbCdEfGh is gone: …zzzzZZZZ takes it in about 41 s",
        " + 2 more, which `status` lists",
    ]
    for width, height in ((80, 24), (120, 40), (40, 12), (20, 6)):
        picture = render(found, Size(width, height), 1.0)
        assert len(picture.lines) == height, "a strip makes the picture no longer"
    noted = Status()
    noted.take(TroublesSeen((Trouble("thin", 0, (ME,)),)), 0.0)
    assert trouble_strip(noted, 80, 1.0, most=3) == [], "the map shows it"


def test_a_word_of_health_is_what_it_was():
    """In this version: golden/health.txt was written when there were words of health for the first time."""
    lines = (Path(__file__).parent / "golden" / "health.txt").read_text().splitlines()
    words = [
        HealthForm(0, 0, 0),
        HealthForm(
            3,
            17,
            1_700_000_000_123,
            is_paused=True,
            moves=True,
            ails=("disk", "line"),
            accused=(Accusation(PeerId("12D3KooWx"), "proven"),),
        ),
    ]
    assert [bytes.fromhex(line) for line in lines] == [encode(word) for word in words]
    assert [HEALTH.read(bytes.fromhex(line)) for line in lines] == words


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        encode((1, 0, 0, 0)),
        encode((2, 0, 0, 0, False, False, (), ())),
        encode((1, 257, 0, 0, False, False, (), ())),
        encode((1, 0, 0, 0, False, False, ("drunk",), ())),
        encode((1, 0, 0, 0, False, False, ("disk",) * 9, ())),
        encode((1, 0, 0, 0, False, False, (), (("x" * 65, "proven"),))),
        bytes(2000),
    ],
)
def test_what_is_no_word_of_health_is_refused(raw):
    with pytest.raises(ProtocolError):
        HEALTH.hear(raw, ME)


def test_events_of_a_disk_and_of_linkd_say_when_it_is_over():
    assert (
        DiskRefused("rounds.log", "no space left on device")
        .line()
        .endswith("this peer goes on as soon as it can write")
    )
    assert DiskRefused("rounds.log", "", is_over=True).level == "info"
    assert LinkProcessEnded("killed").line() == "pipeline: linkd ended (killed); starting it again"
    assert LinkProcessEnded("", is_back=True).level == "info"


def test_a_visitor_that_looks_again_later_names_who_has_stopped_meanwhile():
    """It looks every ten seconds: what it heard the last time tells nothing of now, as `status LINK --watch` found."""
    run = Run(lease("a", 0), lease("b", 1), me=None)
    peers = [PeerId("a"), PeerId("b")]
    for peer in peers:
        run.health.asked(peer, 0.0)
        run.health.told(peer, run.said[peer], 0.0)
    assert all(run.health.is_heard(peer, 0.0) for peer in peers)
    for _ in range(2):
        run.health.asked(peers[0], 12.0)
        run.health.missed(peers[0], "silent", 17.0)
    run.health.asked(peers[1], 12.0)
    run.health.told(peers[1], run.said[peers[1]], 12.0)
    assert [(each.kind, each.peers) for each in run.health.troubles(22.0) if each.stops] == [("frozen", (peers[0],))]
    assert not run.health.is_heard(peers[0], 12.0)


def test_one_that_was_never_heard_is_asked_ever_more_seldom() -> None:
    """It may be nothing but a lease, which leads to a third party."""
    health, never, asked = SwarmHealth(ME, 1, 1, stage=0), PeerId("never"), list[float]()
    health.listed({0: [lease("never", 0, left_s=1e6)]}, 0.0, WALL)
    for second in range(600):
        if never in health.to_ask(float(second)):
            asked.append(second)
            health.asked(never, float(second))
            health.missed(never, "gone", float(second))
    pauses = [later - earlier for earlier, later in pairwise(asked)]
    assert len(pauses) >= 5
    assert pauses == sorted(pauses)
    assert pauses[-1] > 20 * pauses[0]
    health.heard(never, 0, 600.0)
    health.missed(never, "silent", 601.0)
    assert never in health.to_ask(610.0), "it is one that was heard by now"
