"""What a run takes of a peer: memory, disk, and bytes a day. Pure, and the one reckoning behind `plan`, `init`, `doctor`, `join`, `status`,
the dashboard and the run's page: they differ in where the pace of rounds comes from (forecast.py, certificates, a peer's own events).

    sent in a round     = own contribution to each other peer of the stage
                          + to who keeps the run, as far as lines allow: own contribution, and its part of a state as often as one is copied
                          + activations and gradients of the micro-batches
                          + messages to each other peer of the stage, and its part of the directory
    received in a round = the others' contributions and messages + activations and gradients + its part of the directory

In slices a contribution goes to fewer, and a result comes on top; a disk has fewer contributions, and results (sent.py). What is passed on for others comes on top of all. What reads
statuses loads this, so the model's libraries are loaded where a stage is looked at.
"""

from dataclasses import dataclass
from typing import Self

from dilocox_peer.manifest import Manifest
from dilocox_peer.model.memory import StageSize
from dilocox_peer.peer.planning.disk import STATE_BYTES, disk_bytes
from dilocox_peer.peer.planning.sent import contributions_kept, contributions_sent

DAY_S = 86400.0
KEPT_SHARE = (
    0.1  # of the line, or of what peers send one another, that who keeps the run takes at most (state/keeping.py)
)
FOLLOW_SHARE = (
    0.5  # of a state: when the contributions since have grown to so much, the next is copied (state/keeping.py)
)
MESSAGE_BYTES = 8_000  # to one other peer in a round: offers, ballots, certificates, what is here, over TCP
DIRECTORY_BYTES_A_S = 2_500  # announced, looked up and kept for others, in either direction; both as in the run of docs/images/dashboard.jsonl


@dataclass(frozen=True, slots=True)
class StageNeeds:
    """What a peer of a stage needs however the rounds go. memory_bytes: at most, of the machine. copied: parameters of the stage whose copy it keeps, 0: none. sent_bytes,
    received_bytes: of a micro-batch's activations and gradients. codec: of contributions, at first. is_sliced: they are averaged in slices.
    card_bytes: at most, of the accelerator that trains; 0: none does."""

    stage: int
    memory_bytes: int
    parameters: int
    frozen_bytes: int
    copied: int
    sent_bytes: int
    received_bytes: int
    codec: str
    is_sliced: bool
    card_bytes: int = 0

    @classmethod
    def of(
        cls, manifest: Manifest, stage: int, *, on_cpu: bool = True, checkpointing: bool = False, base_bits: int = 0
    ) -> Self:
        """Raises ConfigError where a published model cannot be built here."""
        from dilocox_peer.model.architecture import layout_of

        size, count = StageSize.of(manifest, stage, base_bits=base_bits), manifest.stages.count
        sent, received = activation_bytes(manifest, stage)
        others = [layout_of(manifest, each).num_elements for each in range(count) if each != stage]
        return cls(
            stage=stage,
            memory_bytes=size.host_bytes(on_cpu=on_cpu, checkpointing=checkpointing),
            parameters=size.parameters,
            frozen_bytes=size.frozen_bytes,
            copied=max(others, default=0),
            sent_bytes=sent,
            received_bytes=received,
            codec=manifest.compression.codec,
            is_sliced=bool(manifest.rounds.num_slices),
            card_bytes=0 if on_cpu else size.device_bytes(checkpointing=checkpointing),
        )


@dataclass(frozen=True, slots=True)
class RoundPace:
    """How a stage's rounds go. peers: that contribute, this one among them. contribution_bytes: of one. micro_batches: of one peer in a
    round. line_bps: that a peer's contributions have; 0: not known, as if it were wide. codec: of contributions; empty: the run's first."""

    peers: float
    contribution_bytes: float
    micro_batches: float
    round_s: float
    line_bps: float = 0.0
    codec: str = ""


@dataclass(frozen=True, slots=True)
class Upkeep:
    sent_bytes_a_day: float
    received_bytes_a_day: float
    disk_bytes: int


def upkeep(needs: StageNeeds, pace: RoundPace) -> Upkeep:
    """What that takes of each of its peers."""
    sent, received = traffic_of_round(needs, pace)
    return Upkeep(DAY_S / pace.round_s * sent, DAY_S / pace.round_s * received, disk(needs, pace))


def traffic_of_round(needs: StageNeeds, pace: RoundPace) -> tuple[float, float]:
    """(sent, received) by one peer, in bytes."""
    exchanged = pace.contribution_bytes * contributions_sent(
        pace.peers, pace.codec or needs.codec, is_sliced=needs.is_sliced
    )
    talk = talk_of_round(pace)
    return (
        exchanged + kept_of_round(needs, pace) + pace.micro_batches * needs.sent_bytes + talk,
        exchanged + pace.micro_batches * needs.received_bytes + talk,
    )


def kept_of_round(needs: StageNeeds, pace: RoundPace) -> float:
    """Of what is sent, to who keeps the run. No round waits for it."""
    blob, others = pace.contribution_bytes, max(0.0, pace.peers - 1)
    kept = blob + min(blob / FOLLOW_SHARE, STATE_BYTES * needs.parameters / max(1.0, pace.peers))
    if not pace.line_bps:  # its width is not known: nothing is held back
        return kept
    line = pace.line_bps / 8 * pace.round_s
    if not others:  # nothing is held back of a stage that one peer trains alone; the line has no more
        return min(kept, max(0.0, line - talk_of_round(pace)))
    return min(kept, KEPT_SHARE * max(blob * others, line))


def talk_of_round(pace: RoundPace) -> float:
    """Of that, messages and the directory, in either direction."""
    return MESSAGE_BYTES * max(0.0, pace.peers - 1) + DIRECTORY_BYTES_A_S * pace.round_s


def disk(needs: StageNeeds, pace: RoundPace) -> int:
    """Bytes, shards of data and log files apart."""
    peers, codec = max(1, round(pace.peers)), pace.codec or needs.codec
    kept = contributions_kept(peers, pace.contribution_bytes, needs.parameters, codec, is_sliced=needs.is_sliced)
    return disk_bytes(needs.parameters, kept, copied=needs.copied) + needs.frozen_bytes


def first_disk(manifest: Manifest, needs: StageNeeds, peers: int) -> int:
    """As `disk`, of a run before its first round: with contributions as its settings begin. peers: of the stage, besides this one."""
    from dilocox_peer.model.architecture import layout_of
    from dilocox_peer.peer.planning.adaptive_planner import controller_of

    controller = controller_of(manifest, layout_of(manifest, needs.stage))
    count = min(max(peers + 1, manifest.rounds.start_peers), manifest.limits.max_peers)
    return disk(needs, RoundPace(count, controller.contribution_bytes(controller.setting), 0, DAY_S))


def activation_bytes(manifest: Manifest, stage: int) -> tuple[int, int]:
    """(sent, received) for a micro-batch by a peer of the stage."""
    from dilocox_peer.model.body_sizes import BodySizes

    count = manifest.stages.count
    if count == 1:
        return 0, 0
    body = BodySizes.of(manifest)
    forward, back = body.step_bytes, body.hidden_bytes
    if stage == 0:
        return forward, back
    if stage == count - 1:
        return back, forward
    return forward + back, forward + back
