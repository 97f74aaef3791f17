"""What Prometheus reads of a peer and of a run's page, and the page of docs/ that lists it."""

import re
from collections.abc import Iterable
from functools import partial
from operator import add
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from dilocox_peer.cli.metrics import PeerCollector
from dilocox_peer.cli.observer import Observer
from dilocox_peer.events_of_costs import MonthCounted
from dilocox_peer.events_of_rounds import ContributionClipped, ContributionRefused
from dilocox_peer.peer.status import STALLED_S
from dilocox_peer.types import PeerId, RunId
from dilocox_peer.web.prometheus import exposition
from tests.unit.dashboard_data import MATES, ME, ROUNDS, certified, events
from tests.unit.test_page import document_of

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def lines_of(observer: Observer) -> list[str]:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(PeerCollector(observer))
    return generate_latest(registry).decode().splitlines()


def peer_with_everything() -> Observer:
    observer, at_s = Observer(), 0.0
    for at_s, event in events():
        observer.take(event, at_s)
    observer.take(MonthCounted("2026-11", 1_500_000, 2_500_000_000, 50_000_000_000), at_s)
    observer.take(certified(ROUNDS + 1, contributors=2, norms=(2.0, 20.0), clip_factors=(1.0, 0.375)), at_s)
    observer.take(ContributionClipped(MATES[0], ROUNDS + 1, 20.0, 2.0, 0.375), at_s)
    return observer


def rows(families: Iterable[Metric]) -> list[str]:
    """As the documentation lists them."""
    found = []
    for family in families:
        labels = [label for label in family.samples[0].labels if label not in ("run", "name")]
        name = family.name + ("_total" if family.type == "counter" else "")
        shown = f"{name}{{{', '.join(labels)}}}" if labels else name
        found.append(f"| `{shown}` | {family.type} | {family.documentation} |")
    return found


def test_the_documentation_lists_every_metric_and_no_other():
    document = exposition({RunId("ab" * 32): document_of()}).decode()
    told = [*rows(PeerCollector(peer_with_everything()).collect()), *rows(text_string_to_metric_families(document))]
    written = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    assert written == told


def test_the_rules_of_the_documentation_name_metrics_that_there_are():
    text = DOCS.read_text()
    there = set(re.findall(r"^\| `(\w+)", text, re.MULTILINE))
    used = {name for rule in re.findall(r"expr: (.*)", text) for name in re.findall(r"dilocox_\w+", rule)}
    assert len(used) > 5
    assert used <= there


def test_whose_contributions_were_refused_or_clipped_and_why():
    observer = Observer()
    for event in (
        ContributionRefused(PeerId("bad"), 7, "not finite"),
        certified(7, contributors=2, norms=(2.0, 20.0), clip_factors=(1.0, 0.375)),
        ContributionClipped(MATES[0], 7, 20.0, 2.0, 0.375),
    ):
        observer.take(event, 100.0)
    lines = lines_of(observer)
    assert 'dilocox_contributions_refused_total{peer="bad"} 1.0' in lines
    assert 'dilocox_contribution_refused_round{peer="bad",reason="not finite"} 7.0' in lines
    assert f'dilocox_contributions_clipped_total{{peer="{MATES[0]}"}} 1.0' in lines
    assert f'dilocox_contribution_norm{{peer="{MATES[0]}"}} 20.0' in lines
    assert f'dilocox_contribution_clip_factor{{peer="{ME}"}} 1.0' in lines
    assert f'dilocox_contribution_clip_factor{{peer="{MATES[0]}"}} 0.375' in lines


def test_a_month_is_told_with_what_is_allowed():
    lines = lines_of(peer_with_everything())
    assert "dilocox_month_bytes 2.5015e+09" in lines
    assert "dilocox_month_allowed_bytes 5e+10" in lines
    assert not any("month" in line for line in lines_of(Observer()))


def test_what_status_says_in_red_is_a_figure():
    last_s = max(at_s for at_s, _event in events())
    for later_s, value in ((0.5, 1.0), (STALLED_S + 60.0, 0.0)):
        observer = Observer(clock=partial(add, last_s, later_s))
        for at_s, event in events():
            observer.take(event, at_s)
        assert f"dilocox_is_well {value}" in lines_of(observer)
