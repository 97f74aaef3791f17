"""`/metrics` of the run's page: the figures of its documents, with the run as a label."""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dilocox_peer.types import RunId
from dilocox_peer.web.document import PageDocument, figures

_STAGE = (
    ("stage_round", "Newest certified round of a stage.", "round"),
    ("stage_tokens_per_second", "Of a stage's peers together, as they announce.", "tokens_per_s"),
    ("stage_is_thin", "1 where one more loss would stop the run, or all wait for it.", "thin"),
)


def exposition(documents: Mapping[RunId, PageDocument]) -> bytes:
    """In Prometheus' text format. documents: by run id."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Documents(documents))
    return generate_latest(registry)


class _Documents(Collector):
    def __init__(self, documents: Mapping[RunId, PageDocument]) -> None:
        self._documents = documents

    def collect(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily] = {}

        def add(name: str, text: str, labels: Mapping[str, str], value: float) -> None:
            family = families.setdefault(name, GaugeMetricFamily(f"dilocox_run_{name}", text, labels=list(labels)))
            family.add_metric(list(labels.values()), value)

        for run, document in self._documents.items():
            of_run = {"run": run[:12], "name": document["run"]["name"]}
            for name, text, value in figures(document):
                add(name, text, of_run, value)
            for stage in document["stages"]:
                labels = {**of_run, "stage": str(stage["stage"])}
                add(
                    "stage_peers",
                    "Peers that announce to hold a stage.",
                    labels,
                    len(stage["peers"]) + stage["not_shown"],
                )
                for name, text, key in _STAGE:
                    add(name, text, labels, float(stage[key]))
        yield from families.values()
