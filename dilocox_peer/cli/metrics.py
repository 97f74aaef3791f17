"""`--metrics-port`: a peer's figures for Prometheus, on loopback unless the volunteer says otherwise."""

import ipaddress
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dilocox_peer.cli.observer import Observer
from dilocox_peer.errors import ConfigError, why_not_bound
from dilocox_peer.peer.contributions import Contributions
from dilocox_peer.peer.status import Status, printable
from dilocox_peer.web.own_host import is_own_host

Rows = list[tuple[str, str, float]]
Wsgi = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

MAX_SCRAPES = 8  # at once, each in a thread; one more is hung up on
SCRAPE_S = 10.0  # for a visitor's next bytes
VISIT_S = 15.0  # for all of a visit: a byte now and then would keep a place for days


class ScrapeHandler(WSGIRequestHandler):
    """One visitor's request. timeout: seconds, for each of its next bytes."""

    timeout = SCRAPE_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Scrapes are no news."""


class _Server(ThreadingMixIn, WSGIServer):
    """The standard library's, with a bound on its threads: prometheus_client's own has none, nor an end of a silent visitor."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int) -> None:
        """Raises OSError."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, address = found[0][0], found[0][4]
        self._places = threading.BoundedSemaphore(MAX_SCRAPES)
        super().__init__((str(address[0]), port), ScrapeHandler)

    def server_bind(self) -> None:
        """Without the look-up of the host's name, which may take half a minute where nothing answers."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # there is no room for a thread
            self._places.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        end = threading.Timer(VISIT_S, _cut, (request,))
        end.daemon = True
        try:
            end.start()
            super().process_request_thread(request, client_address)
        except RuntimeError:  # there is no room for a thread
            self.shutdown_request(request)
        finally:
            end.cancel()
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A visitor who goes or falls silent is no news either."""


def _cut(connection: socket.socket) -> None:
    """Whoever reads of it or writes to it finds it ended."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class PeerCollector(Collector):
    """Reads the status at each scrape; nothing is kept in between."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def collect(self) -> Iterator[Metric]:
        now = self._observer.clock()
        counters, gauges, stages = self._observer.read(lambda status: _figures(status, now))
        for name, text, value in counters:
            yield CounterMetricFamily(f"dilocox_{name}", text, value=value)
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"dilocox_{name}", text, value=value)
        peers = GaugeMetricFamily(
            "dilocox_stage_peers", "Peers that hold a stage, as seen from here.", labels=["stage"]
        )
        speed = GaugeMetricFamily(
            "dilocox_stage_tokens_per_second",
            "Of a stage's peers together, as far as they have said.",
            labels=["stage"],
        )
        for stage, holders, tokens_per_s in stages:
            peers.add_metric([str(stage)], holders)
            speed.add_metric([str(stage)], tokens_per_s)
        yield from (peers, speed)
        yield from self._observer.read(lambda status: list(_of_contributions(status.contributions)))


@contextmanager
def metrics_server(observer: Observer, host: str, port: int) -> Iterator[None]:
    """http://host:port/metrics until the block ends; on loopback for who asks by address, as localhost or as host alone. Raises ConfigError
    when it cannot listen there."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(PeerCollector(observer))
    try:
        server = _Server(host, port)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--metrics-port {port}: cannot listen on {host} ({why_not_bound(error)}): pass another one"
        ) from None
    app: Wsgi = make_wsgi_app(registry)
    # Where others of the network may ask they do it under any name; on loopback one that is not ours is a page in the volunteer's browser.
    on_loopback = ipaddress.ip_address(server.server_name).is_loopback
    server.set_app(_for_own_names(app, host) if on_loopback else app)
    thread = threading.Thread(target=server.serve_forever, name="dilocox-metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(2.0)


def _for_own_names(app: Wsgi, host: str) -> Wsgi:
    """The app; a name that somebody has resolved to our address (DNS rebinding) is told 421."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if is_own_host(environ.get("HTTP_HOST", ""), host):
            return app(environ, start_response)
        start_response("421 Misdirected Request", [("Content-Type", "text/plain; charset=utf-8")])
        return [b"Ask for it by its address, or as localhost.\n"]

    return answer


def _of_contributions(contributions: Contributions) -> Iterator[Metric]:
    """By peer, as both are about somebody. The reason stands in a label, for who reads the figures has no other place for it."""
    refused = CounterMetricFamily(
        "dilocox_contributions_refused", "Of a peer, since our start: malformed or not finite.", labels=["peer"]
    )
    reason = GaugeMetricFamily(
        "dilocox_contribution_refused_round", "Where a peer's was last refused, and why.", labels=["peer", "reason"]
    )
    clipped = CounterMetricFamily(
        "dilocox_contributions_clipped",
        "Of a peer, since our start: that weighed less in the mean, as too large or unlike the others'. Not in slices.",
        labels=["peer"],
    )
    norm = GaugeMetricFamily("dilocox_contribution_norm", "In the last merged round; not in slices.", labels=["peer"])
    factor = GaugeMetricFamily(
        "dilocox_contribution_clip_factor",
        "In the last merged round: 1, or what its weight was multiplied with; 0: left out. Not in slices.",
        labels=["peer"],
    )
    for peer, each in contributions.by_peer.items():
        if each.refused is not None:
            refused.add_metric([peer], each.num_refused)
            reason.add_metric([peer, printable(each.refused.reason)], each.refused.round)
        if each.clipped is not None:
            clipped.add_metric([peer], each.num_clipped)
    for peer, (size, share) in contributions.weighed.items():
        norm.add_metric([peer], size)
        factor.add_metric([peer], share)
    counted = GaugeMetricFamily(
        "dilocox_contributions_counted_ratio", "Of those to the last 32 rounds that could have counted."
    )
    if contributions.share is not None:
        counted.add_metric([], contributions.share)
    yield from (refused, reason, clipped, norm, factor, counted)


def _figures(status: Status, now: float) -> tuple[Rows, Rows, list[tuple[int, int, float]]]:
    progress, pipeline = status.progress, status.pipeline
    counters: Rows = [("rounds", "Certified rounds merged by this process.", float(status.num_rounds))]
    gauges: Rows = [
        ("is_well", "0 while something is wrong: what `status` says in red.", float(status.health(now)[0] != "bad")),
        ("paused", "1 while the volunteer has training held.", float(status.paused is not None)),
        ("tokens_per_second", "Of this peer over the last seconds.", status.rates.tokens_per_s()),
        ("busy_ratio", "Share of the last seconds spent computing.", status.busy()),
        ("upload_bytes_per_second", "Payload sent over the last seconds.", status.rates.up_bytes_per_s()),
        ("download_bytes_per_second", "Payload received over the last seconds.", status.rates.down_bytes_per_s()),
    ]
    if progress is not None:
        counters += [
            ("tokens", "Trained by this process.", float(progress.tokens)),
            ("outer_bytes_sent", "Payload of the outer loop sent.", float(progress.bytes_sent)),
            ("outer_bytes_received", "Payload of the outer loop received.", float(progress.bytes_received)),
        ]
        gauges += [
            ("training_round", "The round being trained.", float(progress.round)),
            ("train_loss", "Mean over the targets of the last micro-batches, nats per token.", progress.train_loss),
            ("memory_bytes", "Resident, with helper processes.", float(progress.memory_bytes)),
            ("loop_lag_p99_seconds", "How late the event loop runs.", progress.lag_ms_p99 / 1000),
            ("loop_lag_max_seconds", "Its longest standstill of the last half minute.", progress.lag_ms_max / 1000),
            (
                "queueing_seconds",
                "How long others on the line wait behind what this peer sends.",
                progress.queueing_ms / 1000,
            ),
        ]
    if pipeline is not None:
        counters += [
            ("link_bytes_sent", "Activations and gradients sent.", float(pipeline.bytes_sent)),
            ("link_bytes_received", "Activations and gradients received.", float(pipeline.bytes_received)),
            ("micro_batches_resent", "Sent again to another peer.", float(pipeline.resent)),
        ]
        gauges.append(("linked_peers", "Neighbours of the pipeline.", float(pipeline.linked)))
    month = status.costs.month
    if month is not None:
        gauges += [
            (
                "month_bytes",
                "Sent and received in this calendar month, as of a minute ago at most.",
                float(month.sent + month.received),
            ),
            ("month_allowed_bytes", "Of both, as --max-gb-month says; 0: no limit.", float(month.allowed)),
        ]
    stages = [
        (stage, sum(peer.counts for peer in status.of_stage(stage)), status.stage_speed(stage))
        for stage in status.seen_stages
    ]
    return counters, gauges, stages
