"""What a run would be like before anybody joins it: stages, memory, round, exchange and speed, for so many peers on such lines. Pure.

One peer trains one stage on `work_s` of the whole model's time for a micro-batch, shared out as the cut shares multiplications.

    seconds a micro-batch  = the most of: the busiest stage's work / PIPELINE_SHARE;
                             activations and gradients that a peer sends (and receives) / its line;
                             a micro-batch's way through all stages and back / micro-batches under way
    seconds of a round     = inner steps * micro-batches a step * seconds a micro-batch; no shorter than the exchange
    seconds of an exchange = delay + contribution * copies (sent.py) / line_share of what activations leave of the uplink

Where the stages of a replica are at one site (Peers.by_site), only what checks send crosses its line, and the contributions of all its stages.

Codec, rank and inner steps are those that the run's own controller (controller.py) comes to on such lines. What the peers measure once
they train takes the place of all of it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dilocox_peer.compression.sizes import raw_bytes
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.architecture import layout_of
from dilocox_peer.model.memory import StageSize
from dilocox_peer.model.partition import Costs, cut_of
from dilocox_peer.peer.planning.adaptive_planner import controller_of
from dilocox_peer.peer.planning.controller import Measurement, Setting
from dilocox_peer.peer.planning.plan import total_steps
from dilocox_peer.peer.planning.sent import RESULT_TIMES, contributions_sent
from dilocox_peer.peer.planning.upkeep import DAY_S, RoundPace, StageNeeds, disk, kept_of_round, traffic_of_round
from dilocox_peer.pipeline.checks import FAR_SHARE
from dilocox_peer.pipeline.slots import origin_window
from dilocox_peer.types import Layout

PIPELINE_SHARE = 0.97
"""Of a stage's time that it computes, with a window full of micro-batches: 0.95 to 1.00 in the pipeline's simulator."""
DELAY_S = 0.38
"""Of an exchange, beside transfer and travel: messages and the wait for the others, where processors are free (benchmarks/headline.py)."""
LINE_SHARE = 0.8  # of an uplink, as a peer takes it whose owner has said nothing (network/upload_control.py)
CROWDED_SHARE = 0.66
"""The same where more than two share a stage and lines carry hardly more down than up (CROWDED_BELOW times): what they send at once waits
at those who receive, and a sender takes that for its own line. Seen with four peers on even lines: 0.62 to 0.7 (benchmarks/headline.py)."""
CROWDED_BELOW = 1.5
CODING_S = 20e-9
"""A parameter: encoding our own contribution, looking at another's and taking the mean, on one thread."""
SETTLED_ROUNDS = 200
MOST_ACTIVATIONS = 0.7  # of an uplink, where there is too little for both: rounds get the rest
RECOMPUTED = 4 / 3  # of the work, with checkpointing: the forward is done twice

Binding = Literal["compute", "activations", "round trips", "rounds", "memory"]


@dataclass(frozen=True, slots=True)
class Peers:
    """count of equal ones. tokens_per_s: of the whole model on one of them, were there room. memory_bytes: None: any. by_site: the stages
    of a replica are at one site, as volunteers say with `join --site`; its line is that of uplink_bps and downlink_bps, which its peers
    share, and there are as many sites as replicas. Among themselves they have a network that takes no time."""

    count: int
    uplink_bps: float
    downlink_bps: float
    round_trip_s: float
    tokens_per_s: float
    memory_bytes: int | None = None
    by_site: bool = False


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of one cut. replicas: peers of each stage; parameters, memory_bytes, disk_bytes: of the stage with the most. micro_batch_s: from one to
    the next, way_s: of one through all stages and back. activation_bytes: that an inner stage sends for a micro-batch.
    needed_uplink_bps: with which activations and rounds would take no longer than the work. recomputes: it fits with checkpointing only.
    sent_bytes_a_day, received_bytes_a_day: by the peer that moves most (upkeep.py), of one by site over its line. duration_s: of the run."""

    stages: int
    replicas: int
    parameters: int
    memory_bytes: int
    disk_bytes: int
    micro_batch_s: float
    way_s: float
    step_s: float
    activation_bytes: int
    setting: Setting
    contribution_bytes: int
    exchange_s: float
    round_s: float
    tokens_per_s: float
    sent_bytes_a_day: float
    received_bytes_a_day: float
    duration_s: float
    times_fewer: float
    needed_uplink_bps: float
    recomputes: bool
    binding: Binding

    @property
    def exchange_share(self) -> float:
        return self.exchange_s / self.round_s

    @property
    def peers(self) -> int:
        """That have a place."""
        return self.stages * self.replicas


def forecast(manifest: Manifest, peers: Peers) -> Forecast:
    """A run of the manifest as it is cut. Raises ValueError where there are fewer peers than stages."""
    count, inner = manifest.stages.count, manifest.inner
    replicas = min(peers.count // count, manifest.limits.max_peers)
    if not replicas:
        raise ValueError(f"{count} stages need as many peers, there are {peers.count}")
    tokens = inner.micro_batch * manifest.model.context
    stages = range(count)
    sizes = [StageSize.of(manifest, stage) for stage in stages]
    layouts = [layout_of(manifest, stage) for stage in stages]
    largest = max(stages, key=lambda stage: layouts[stage].num_elements)

    plain, lean = (max(size.host_bytes(checkpointing=each) for size in sizes) for each in (False, True))
    recomputes = peers.memory_bytes is not None and plain > peers.memory_bytes
    needed = lean if recomputes else plain
    work_s = tokens / peers.tokens_per_s * (RECOMPUTED if recomputes else 1.0)
    each_needs = [StageNeeds.of(manifest, stage) for stage in stages]
    load = _load_of(each_needs, replicas, by_site=peers.by_site)
    slowest_s, trips_s, hop_s = work_s * busiest_share(manifest), 0.0, 0.0
    if not peers.by_site:
        trips_s = (count - 1) * peers.round_trip_s
        hop_s = peers.round_trip_s / 2 + 8 * max(load.sent, load.received) / 2 / min(
            peers.uplink_bps, peers.downlink_bps
        )
    windows = inner.accumulate
    if manifest.stages.schedule == "carry":
        windows = origin_window(stations=count, way_s=trips_s, slowest_s=slowest_s, accumulate=inner.accumulate)
    parts: dict[Binding, float] = {
        "compute": slowest_s / (PIPELINE_SHARE if count > 1 else 1.0),
        "activations": 8 * max(load.uploaded / peers.uplink_bps, load.downloaded / peers.downlink_bps),
        "round trips": 0.0 if count == 1 else (work_s + 2 * (count - 1) * hop_s) / windows,
    }
    binding = max(parts, key=lambda part: parts[part])
    micro_batch_s = parts[binding]
    step_s = inner.accumulate * micro_batch_s

    uplink_bps = load.share * peers.uplink_bps
    left_bps = uplink_bps * (1.0 - min(MOST_ACTIVATIONS, 8 * load.uploaded / peers.uplink_bps / micro_batch_s))
    delay_s = DELAY_S + 3 * peers.round_trip_s + CODING_S * layouts[largest].num_elements
    setting, blob = settled(manifest, layouts[largest], replicas, left_bps, step_s, delay_s)
    copies = contributions_sent(replicas, setting.codec, is_sliced=bool(manifest.rounds.num_slices))
    exchange_s = delay_s + 8 * blob * copies / (line_share(replicas, peers) * left_bps) if replicas > 1 else 0.0
    micro_batches = setting.inner_steps * inner.accumulate
    pace = RoundPace(replicas, blob, micro_batches, setting.inner_steps * step_s, left_bps, setting.codec)
    needs = replace(each_needs[largest], sent_bytes=load.sent, received_bytes=load.received)
    sent_a_round, received_a_round = traffic_of_round(needs, pace)
    awaited = sent_a_round - kept_of_round(needs, pace)
    round_s, least_s = setting.inner_steps * step_s, max(exchange_s, 8 * awaited / uplink_bps)
    if least_s > 1.001 * round_s:
        is_rounds = exchange_s == least_s or blob * copies > micro_batches * load.sent
        binding = "rounds" if is_rounds else "activations"
    round_s = max(round_s, least_s)
    # What the line has left goes to who keeps the run: the round is no longer for it.
    sent_a_round = min(sent_a_round, max(awaited, uplink_bps / 8 * round_s))
    if peers.memory_bytes is not None and needed > peers.memory_bytes:
        binding = "memory"
    raw, steps = raw_bytes(layouts[largest]), setting.inner_steps
    all_reduce = 2 * (replicas - 1) / replicas * raw * steps
    return Forecast(
        stages=count,
        replicas=replicas,
        parameters=layouts[largest].num_elements,
        memory_bytes=needed,
        disk_bytes=disk(needs, pace),
        micro_batch_s=micro_batch_s,
        way_s=windows * micro_batch_s if count > 1 else micro_batch_s,
        step_s=step_s,
        activation_bytes=max(each.sent_bytes for each in each_needs),
        setting=setting,
        contribution_bytes=blob,
        exchange_s=exchange_s,
        round_s=round_s,
        tokens_per_s=replicas * micro_batches * tokens / round_s,
        sent_bytes_a_day=DAY_S / round_s * sent_a_round,
        received_bytes_a_day=DAY_S / round_s * received_a_round,
        duration_s=total_steps(manifest) / steps * round_s,
        times_fewer=all_reduce / (blob * copies) if replicas > 1 else 0.0,
        needed_uplink_bps=8 * awaited / (load.share * micro_batches * parts["compute"]),
        recomputes=recomputes,
        binding=binding,
    )


@dataclass(frozen=True, slots=True)
class _Load:
    """Of a line, in bytes a micro-batch. uploaded, downloaded: by all peers whose line it is; sent, received: by the one of them that moves
    most. share: of the line, 0 to 1, what contributions of the largest stage have beside those of others."""

    uploaded: int
    downloaded: int
    sent: int
    received: int
    share: float


def _load_of(stages: Sequence[StageNeeds], replicas: int, *, by_site: bool) -> _Load:
    """Of a peer's own line, or of a site's, which only what is checked crosses: by a callee at another site, where there is one."""
    sent, received = [each.sent_bytes for each in stages], [each.received_bytes for each in stages]
    if not by_site or len(stages) == 1:
        return _Load(max(sent), max(received), max(sent), max(received), 1.0)
    checked = 1 / (FAR_SHARE * (len(stages) - 1)) if replicas > 1 else 0.0
    parameters = [each.parameters for each in stages]
    return _Load(
        uploaded=math.ceil(checked * sum(sent)),
        downloaded=math.ceil(checked * sum(received)),
        sent=math.ceil(checked * max(sent)),
        received=math.ceil(checked * max(received)),
        share=max(parameters) / sum(parameters),
    )


def line_share(replicas: int, peers: Peers) -> float:
    """The part of an uplink, 0 to 1, that a peer sends contributions with where so many share a stage."""
    is_crowded = replicas > 2 and peers.downlink_bps < CROWDED_BELOW * peers.uplink_bps
    return CROWDED_SHARE if is_crowded else LINE_SHARE


def in_slices(manifest: Manifest) -> Manifest | None:
    """The same run, averaged in slices; None: it is, or cannot be."""
    compression, rounds = manifest.compression, manifest.rounds
    if rounds.num_slices or compression.adapt == "rank" or compression.codec not in RESULT_TIMES:
        return None
    return manifest.model_copy(update={"rounds": rounds.model_copy(update={"averaging": "slices"})})


def busiest_share(manifest: Manifest) -> float:
    """The share of a micro-batch's multiplications that the stage has which has the most."""
    costs, cut = Costs.of(manifest.model), cut_of(manifest)
    works = [blocks * costs.block_compute for blocks in cut]
    works[-1] += costs.head_compute
    return max(works) / sum(works)


def operations(manifest: Manifest) -> int:
    """Floating-point operations a token of the whole model, forward and backward: 6 for each multiplication of the forward pass."""
    costs = Costs.of(manifest.model)
    return 6 * (costs.layers * costs.block_compute + costs.head_compute)


def settled(
    manifest: Manifest, layout: Layout, replicas: int, uplink_bps: float, step_s: float, delay_s: float
) -> tuple[Setting, int]:
    """What the controller comes to where every round measures the same, and the bytes of a contribution then."""
    controller = controller_of(manifest, layout)
    setting = Setting(manifest.compression.codec, manifest.compression.rank, manifest.rounds.inner_steps)
    if replicas > 1 and manifest.compression.adapt == "link":
        for number in range(1, SETTLED_ROUNDS):
            same = Measurement(number, (uplink_bps,) * replicas, step_s, delay_s)
            setting, _ = controller.observe(same)
    return setting, controller.contribution_bytes(setting)


def best(found: Sequence[Forecast]) -> Forecast | None:
    """The most tokens a second where memory suffices, the fewer stages of equal ones; None: it suffices nowhere."""
    fitting = [each for each in found if each.binding != "memory"]
    return max(fitting, key=lambda each: (round(each.tokens_per_s, 6), -each.stages), default=None)
