"""The document of the run's page: what certificates and leases make of it, and what strangers cannot make of it."""

import json
import random
import re
import shutil
import subprocess
from contextlib import suppress
from dataclasses import replace
from importlib.resources import files

import pytest

from dilocox_peer.compression.sizes import raw_bytes
from dilocox_peer.config import preset
from dilocox_peer.dht.records import Lease
from dilocox_peer.errors import ConfigError
from dilocox_peer.events_of_data import TextSampled
from dilocox_peer.events_of_health import Trouble
from dilocox_peer.model.architecture import layout_of
from dilocox_peer.peer.planning.plan import first_plan, plan_bounds
from dilocox_peer.peer.planning.sent import contributions_sent
from dilocox_peer.peer.planning.upkeep import RoundPace, StageNeeds, upkeep
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import Digest, PeerId, sha256
from dilocox_peer.web.document import MAX_CONTRIBUTORS, MAX_MAP_PEERS, MAX_NAME, MAX_SAMPLE, RunPage, figures
from dilocox_peer.web.facts import Holder, RunFacts, StageFacts
from dilocox_peer.web.history import COUNTED_OF, MAX_POINTS, PastRound, StageHistory, closed_at, loss_of, thinned
from dilocox_peer.web.server import Shown
from dilocox_peer.web.watcher import holders_of
from dilocox_peer.wire.chain import Averaged, Certificate, Entry, Report, Result, Value
from dilocox_peer.wire.declared import replaced
from dilocox_peer.wire.directives import Directive
from tests.simulated_run import ROUND_S, START_S, peer_names, simulated_chain, simulated_facts, simulated_manifest

MANIFEST = simulated_manifest(200, 2)
FACTS = simulated_facts(MANIFEST, peers=12, rounds=40)
HOSTILE = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "\"><svg/onload=alert(1)>", "javascript:alert(1)",
    "</script><script>alert(1)</script>", "{{constructor.constructor('alert(1)')()}}", "${alert(1)}", "' OR 1=1 --",
    "\u202egnp.exe", "a\x00b", "\x1b]0;owned\x07\x1b[2J", "\r\n\r\nHTTP/1.1 200 OK\r\n", "\u2028alert(1)\u2029",
    "data: x\n\nevent: state\ndata: {}", "é" * 400, "\ud800", "&lt;b&gt;&amp;", "../../../etc/passwd", "__proto__",
    "<style>*{display:none}</style>",
]  # fmt: skip
"""What somebody may call himself, or his run."""


def entry(name: str, loss: float = 0.0, closed_s: int = 0, micro_batches: int = 8) -> Entry:
    report = Report(loss_micronats=round(1e6 * loss), closed_ms=1000 * closed_s)
    return Entry(PeerId(name), 1, sha256(name.encode()), 1000, micro_batches, b"", report)


def document_of(facts: RunFacts = FACTS):
    return RunPage(MANIFEST).take(facts)


def with_stage(number: int, **changes) -> RunFacts:
    stages = list(FACTS.stages)
    stages[number] = replace(stages[number], **changes)
    return replace(FACTS, stages=stages)


# -- history -----------------------------------------------------------------------------------------------------------


def test_the_loss_is_the_median_so_that_a_minority_of_liars_moves_nothing():
    honest = [entry("a", 2.0), entry("b", 2.1), entry("c", 2.2)]
    assert loss_of(honest) == pytest.approx(2.1)
    for lie in (0.000001, 500.0, 1e5):
        assert 2.0 <= (loss_of([*honest, entry("d", lie)]) or 0.0) <= 2.2
    assert loss_of([*honest, entry("e")]) == pytest.approx(2.1), "who reports none is left out"
    assert loss_of([]) is None
    assert loss_of([entry("a", 1e5)]) is None, "no loss of a language model"


def test_time_goes_neither_back_nor_ahead_of_the_readers_clock():
    said = [entry("a", closed_s=100), entry("b", closed_s=110), entry("c", closed_s=2**40)]
    assert closed_at(said, not_before=0.0, now=1000.0) == 110
    assert closed_at(said[2:], not_before=0.0, now=1000.0) == 1000.0
    assert closed_at(said, not_before=200.0, now=1000.0) == 200.0
    assert closed_at([entry("a")], not_before=200.0, now=1000.0) == 200.0


def test_rounds_are_counted_from_certificates_alone():
    document, chain = document_of(), FACTS.stages[0].certificates
    rounds = [each.value for each in chain if each.value.kind == "round"]
    tokens = MANIFEST.inner.micro_batch * MANIFEST.model.context
    total = sum(each.micro_batches for value in rounds for each in value.entries)
    assert document["now"]["round"] == len(rounds) == 40
    assert document["now"]["tokens"] == document["history"]["tokens"][-1] == total * tokens
    assert document["now"]["total_rounds"] == 200
    contributors = document["contributors"]["shown"]
    assert sum(each["rounds"] for each in contributors if each["stage"] == 0) == sum(len(v.entries) for v in rounds)
    assert sum(each["tokens"] for each in contributors if each["stage"] == 0) == total * tokens
    assert document["history"]["validation"]["round"] == list(range(8, 40, 8))
    assert document["now"]["val_round"] == 32


def test_traffic_is_what_a_peer_sends_each_of_the_others_beside_a_ring():
    document, raw = document_of(), 4 * RunPage(MANIFEST).num_parameters
    size = 2 * 40 * 6 * 5 * 40_000  # stages, rounds, contributors, each to the others, bytes
    assert document["now"]["sent_bytes"] == size
    assert document["now"]["allreduce_bytes"] == pytest.approx(40 * 2 * 5 * raw * MANIFEST.rounds.inner_steps)


def test_traffic_of_a_run_in_slices_is_what_slices_send():
    peers = sorted(SigningKey(bytes([number]) * 32).peer_id for number in range(12))
    manifest = preset("small", rounds={"averaging": "slices", "slices": 16}, compression={"codec": "int4"})
    plan = first_plan(manifest)
    history = StageHistory(plan, plan, plan_bounds(manifest), raw_bytes(layout_of(manifest, 0)))
    contribution, name = 5_000_000, Digest(bytes(32))
    entries = tuple(Entry(peer, 1, sha256(peer.encode()), contribution, 50) for peer in peers)
    by = tuple((peer, bytes(64)) for peer in peers[:2])
    results = tuple(Result(sha256(bytes([number])), contribution // 16, b"", name, by) for number in range(16))
    value = Value(Averaged(results), 1, 1, 12, entries, tuple(peers), plan)
    assert history.follow([Certificate(0, name, 1, 0, value, ())], 1e9)
    reckoned = contribution * contributions_sent(12, "int4", is_sliced=True)
    assert history.rounds[0].sent_bytes == pytest.approx(reckoned, rel=0.02)


def test_what_a_peer_is_to_expect_is_reckoned_from_the_newest_certificates():
    costs, rounds = [each["costs"] for each in document_of()["stages"]], document_of()["history"]["at_s"]
    round_s = (rounds[-1] - rounds[-13]) / 12
    for stage, found in enumerate(costs):
        needs, pace = StageNeeds.of(MANIFEST, stage), RoundPace(6, 40_000, found_share(stage), round_s)
        expected = upkeep(needs, pace)
        assert found["memory_bytes"] == needs.memory_bytes
        assert found["disk_bytes"] == expected.disk_bytes
        assert found["sent_bytes_a_day"] == pytest.approx(expected.sent_bytes_a_day, rel=1e-3)
        assert found["received_bytes_a_day"] == pytest.approx(expected.received_bytes_a_day, rel=1e-3)
    begun = RunPage(MANIFEST).take(with_stage(0, certificates=()))["stages"][0]["costs"]
    assert begun["sent_bytes_a_day"] is None
    assert begun["disk_bytes"] > 0


def found_share(stage: int) -> float:
    """Micro-batches of a contributor in one of the newest rounds."""
    values = [each.value for each in FACTS.stages[stage].certificates if each.value.kind == "round"][-12:]
    return sum(entry.micro_batches for value in values for entry in value.entries) / 12 / 6


def test_the_share_of_contributions_that_counted_is_of_the_rosters_of_the_newest_rounds():
    assert document_of()["now"]["counted_share"] == 1.0
    chain = FACTS.stages[0].certificates
    assert len(chain[-2].value.roster) == 6

    def without(count: int, rounds: int) -> RunFacts:
        """The last rounds lack so many contributions each."""
        values = [replaced(each.value, entries=each.value.entries[count:]) for each in chain[-rounds:]]
        cut = [replaced(each, value=value) for each, value in zip(chain[-rounds:], values, strict=True)]
        return with_stage(0, certificates=(*chain[:-rounds], *cut))

    document = document_of(without(2, 8))
    assert [each["counted_share"] for each in document["stages"]] == [round(1 - 2 * 8 / (6 * COUNTED_OF), 4), 1.0]
    assert document["now"]["counted_share"] == round(1 - 2 * 8 / (2 * 6 * COUNTED_OF), 4)
    assert document_of(without(3, 40))["stages"][0]["counted_share"] == 0.5
    assert ("contributions_counted_share", 0.5) in {
        (name, value) for name, _, value in figures(document_of(without(6, 40)))
    }
    assert RunPage(MANIFEST).take(with_stage(0, certificates=()))["stages"][0]["counted_share"] is None


def test_the_time_left_is_that_of_the_rounds_left_at_their_pace():
    now = document_of()["now"]
    assert now["round_s"] == ROUND_S
    assert now["eta_s"] == pytest.approx(160 * ROUND_S - 5)


def test_what_is_read_in_parts_is_what_is_read_at_once_and_a_branch_replaces_another():
    page = RunPage(MANIFEST)
    for height in (1, 7, 20):
        cut = [replace(stage, certificates=stage.certificates[:height]) for stage in FACTS.stages]
        page.take(replace(FACTS, stages=cut))
    assert page.take(FACTS) == document_of()
    other = [
        replace(stage, certificates=simulated_chain(MANIFEST, number, peer_names(number, 6), 30, random.Random(9)))
        for number, stage in enumerate(FACTS.stages)
    ]
    assert page.take(replace(FACTS, stages=other)) == document_of(replace(FACTS, stages=other))
    assert page.take(replace(FACTS, stages=other))["now"]["round"] == 30


def test_a_long_curve_is_thinned_and_its_newest_part_is_not():
    rounds = [PastRound(n, START_S + n, 8 * n, float(n), 4, "fp16", 0, 8, 8 * n, 1.0, 1.0) for n in range(1, 5001)]
    points = thinned(rounds)
    assert len(points) <= MAX_POINTS
    assert [point.last.number for point in points[-256:]] == list(range(4745, 5001))
    assert [point.last.number for point in points] == sorted({point.last.number for point in points})
    first = points[0]
    assert first.loss == pytest.approx((1 + first.last.number) / 2)
    assert [point.last for point in thinned(rounds[:MAX_POINTS])] == rounds[:MAX_POINTS]


# -- how it does -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "word", "why"),
    [
        (FACTS, "training", "certified"),
        (
            replace(FACTS, troubles=[Trouble("empty", 1, stops=True, helper=PeerId("somebody"), in_s=40.0)]),
            "stalled",
            "nobody holds stage 1: …somebody takes it in about 40 s",
        ),
        (
            replace(
                FACTS,
                troubles=[Trouble("empty", 1, stops=True, helper=PeerId("somebody"), in_s=40.0)],
                troubles_age_s=12.0,
            ),
            "stalled",
            "in about 28 s",
        ),
        (
            replace(FACTS, troubles=[Trouble("waiting", 0, stops=True, number=1, of=2)]),
            "waiting",
            "has 1 of the 2 peers",
        ),
        (replace(FACTS, troubles=[Trouble("thin", 1, (PeerId("somebody"),))]), "training", "certified"),
        (replace(FACTS, stages=[replace(each, holders=()) for each in FACTS.stages]), "empty", "nobody is here"),
        (
            replace(
                with_stage(0, holders=[replace(each, answers=False) for each in FACTS.stages[0].holders]),
                troubles=[Trouble("frozen", 0, (FACTS.stages[0].holders[0].peer,), stops=True)],
            ),
            "stalled",
            "nobody of stage 0 answers",
        ),
        (replace(FACTS, at_s=FACTS.at_s + 600), "stalled", "no round was certified for 10 minutes"),
        (
            replace(FACTS, stages=[replace(each, is_over=True) for each in FACTS.stages]),
            "complete",
            "not kept yet",
        ),
        (
            replace(FACTS, stages=[replace(each, is_over=True) for each in FACTS.stages], kept_round=40),
            "complete",
            "to be had with `dilocox-peer export`",
        ),
        (
            replace(FACTS, stages=[replace(each, holders=()) for each in FACTS.stages], kept_round=39),
            "empty",
            "kept up to round 39",
        ),
        (
            replace(FACTS, stages=[replace(each, certificates=()) for each in FACTS.stages]),
            "waiting",
            "the first round is under way",
        ),
    ],
)
def test_how_the_run_does_is_said(facts: RunFacts, word: str, why: str):
    now = document_of(facts)["now"]
    assert now["standing"] == word
    assert why in now["why"]
    assert (now["eta_s"] is not None) == (word == "training")


def test_a_stage_that_one_more_loss_would_empty_is_thin():
    one = with_stage(1, holders=FACTS.stages[1].holders[:1])
    assert [stage["thin"] for stage in document_of(one)["stages"]] == [False, True]
    gone = with_stage(1, holders=[replace(each, answers=False) for each in FACTS.stages[1].holders])
    assert [stage["empty"] for stage in document_of(gone)["stages"]] == [False, True]


def directed(**wants) -> RunFacts:
    """With the owner's directive in the newest certificate of stage 0."""
    chain = FACTS.stages[0].certificates
    directive = Directive(sha256(b"run"), 3, **wants)
    last = replaced(chain[-1], value=replaced(chain[-1].value, what=directive))
    return with_stage(0, certificates=(*chain[:-1], last))


def test_what_the_owner_wants_is_on_the_page_and_in_its_forecast():
    now = document_of(directed(stop_after=50, said="thank you all"))["now"]
    assert (now["owner_wants"], now["owner_says"]) == ("ends after round 50", "thank you all")
    assert now["total_rounds"] == 50
    assert now["eta_s"] == pytest.approx(10 * ROUND_S - 5)
    late = document_of(directed(stop_after=38))["now"]
    assert (late["round"], late["total_rounds"]) == (40, 40), "two were on their way when the owner said so"
    longer = document_of(directed(total_steps=300 * 16))["now"]
    assert (longer["total_rounds"], longer["total_steps"]) == (300, 300 * 16)
    assert longer["eta_s"] == pytest.approx(260 * ROUND_S - 5)
    paused = document_of(directed(paused=True))["now"]
    assert (paused["standing"], paused["eta_s"]) == ("paused", None)
    assert "the run's owner has paused it" in paused["why"]
    assert document_of()["now"]["owner_wants"] is None


def test_what_the_model_writes_is_on_the_page_and_bounded():
    assert document_of()["sample"]["round"] is None
    sample = document_of(replace(FACTS, sampled=TextSampled(38, "def ", "f(x):\n" * 1000)))["sample"]
    assert (sample["round"], sample["prompt"]) == (38, "def ")
    assert sample["text"].startswith("f(x):\nf(x):")
    assert len(sample["text"]) == MAX_SAMPLE


# -- strangers ---------------------------------------------------------------------------------------------------------


def test_names_are_bounded_and_have_no_character_that_is_not_seen():
    named = simulated_facts(MANIFEST, peers=60, rounds=3, names=HOSTILE)
    shown = [peer["name"] for stage in document_of(named)["stages"] for peer in stage["peers"] if peer["name"]]
    assert len(shown) == len(HOSTILE)
    assert all(name.isprintable() and len(name) <= MAX_NAME for name in shown)
    for name in set(HOSTILE) - {"__proto__"}:  # which is a plain one
        with pytest.raises(ConfigError, match=r"run\.name"):
            simulated_manifest(4, 1, name)


def test_however_many_announce_themselves_the_document_is_bounded():
    names = [PeerId(f"12D3KooW{number:044d}") for number in range(20_000)]
    crowd = tuple(Holder(peer, 1e300, 2**53, "direct", name="x" * 5000) for peer in names)
    seated = FACTS.stages[0].holders[0]
    document = document_of(with_stage(0, holders=(*crowd, seated)))
    assert len(document["stages"][0]["peers"]) == MAX_MAP_PEERS // 2
    assert document["stages"][0]["not_shown"] == 20_001 - MAX_MAP_PEERS // 2
    assert document["stages"][0]["peers"][0]["peer"] == seated.peer, "the roster is shown before strangers"
    assert len(document["contributors"]["shown"]) <= MAX_CONTRIBUTORS
    assert len(json.dumps(document, allow_nan=False)) < 2_000_000


def test_who_announces_itself_and_does_not_answer_is_neither_shown_first_nor_counted():
    """Some hundred such hid nine of ten honest peers, and the page counted most of them as there."""
    silent = [Holder(PeerId(f"s{number:04}"), 1e12, 0, "direct", answers=False) for number in range(4000)]
    real = [Holder(PeerId(f"real{number}"), 100.0, 3, "direct", answers=True) for number in range(10)]
    stage = document_of(with_stage(0, holders=tuple(silent + real), roster=(PeerId("real0"),)))["stages"][0]
    assert [peer["peer"] for peer in stage["peers"][:10]] == sorted(each.peer for each in real)
    assert sum(peer["answers"] is not False for peer in stage["peers"]) + stage["not_shown"] == 10


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_page_names_no_hour_of_sixty_minutes():
    source = (files("dilocox_peer.web") / "static" / "page.js").read_text()
    function = re.search(r"^function duration\(.*?^}", source, re.MULTILINE | re.DOTALL)
    assert function is not None
    asked = "[5, 89, 90, 5399, 7185, 10785, 7229, 172799, 200000].map(duration)"
    ran = subprocess.run(
        ["node", "-p", f"{function[0]}; JSON.stringify({asked})"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert json.loads(ran.stdout) == [
        "5.0 s", "89 s", "2 min", "90 min", "2 h 0 min", "3 h 0 min", "2 h 0 min", "48 h 0 min", "2.3 days",
    ]  # fmt: skip


def test_an_empty_run_has_a_document_and_figures():
    facts = RunFacts(START_S, "dilocox://x", [StageFacts((), (), ()) for _ in range(2)])
    document = document_of(facts)
    assert document["now"]["round"] == 0
    json.dumps(document, allow_nan=False)
    known = {name: value for name, _, value in figures(document)}
    assert known["peers"] == known["round"] == 0
    assert "train_loss" not in known


@pytest.mark.parametrize(
    ("mode", "join", "export"),
    [
        ("open", "dilocox-peer join dilocox://x", "dilocox://x"),
        ("list", "dilocox-peer join dilocox://x", "LINK"),
        ("invite", None, "LINK"),
    ],
)
def test_no_line_is_shown_that_the_run_refuses_to_everybody(mode: str, join: str | None, export: str):
    manifest = preset("tiny", admission={"mode": mode, "members": peer_names(0, 1) if mode == "list" else ()})
    manifest = manifest.signed_by(SigningKey(bytes(32)))
    run = RunPage(manifest).take(RunFacts(START_S, "dilocox://x", [StageFacts((), (), ())]))["run"]
    assert (run["admission"], run["join"]) == (mode, join)
    assert run["export"] == f"dilocox-peer export {export} --out model"


def test_speeds_whose_sum_is_no_number_stop_no_page():
    def lease(number: int, speed: float) -> Lease:
        """As the directory reads it."""
        peer = SigningKey(bytes([number]) * 32).peer_id
        return Lease.from_bytes(Lease(peer, 0, 1, (), 1, speed, 0, "direct", 1).to_bytes(), peer=peer, expires_s=2e9)

    def facts(leases: list[Lease], at_s: float) -> RunFacts:
        return RunFacts(at_s, "", (StageFacts((), holders_of(leases, {each.peer for each in leases}), ()),))

    shown = Shown(RunPage(preset("tiny").signed_by(SigningKey(bytes(32)))))
    leases = [lease(1, 1000.0)]
    shown.put(shown.page.take(facts(leases, 1.0)))
    before = shown.number
    for number in (2, 3):
        with suppress(ValueError):  # no directory takes it
            leases.append(lease(number, 1.7e308))
    shown.put(shown.page.take(facts(leases, 2.0)))
    assert shown.number > before
    json.loads(shown.raw)
