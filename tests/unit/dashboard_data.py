"""A peer's hour in a run of three stages, as events: invented, for the dashboard's tests and benchmark."""

import math
from collections.abc import Iterator
from typing import Any

from dilocox_peer.events import (
    Event,
    NeighbourLinked,
    NeighbourLost,
    NeighbourSeen,
    PeerStarted,
    PipelineProgress,
    RoundCertified,
    RunJoined,
    SeenPeer,
    StageSeen,
    SwarmSeen,
    TrainingProgress,
    ViewChanged,
)
from dilocox_peer.events_of_data import Evaluated
from dilocox_peer.events_of_rounds import ContributionRefused
from dilocox_peer.events_of_states import StateFetched
from dilocox_peer.peer.status import Status
from dilocox_peer.types import PeerId

START_S = 1_790_000_000.0
ME = PeerId("12D3KooWQm3nJ7Zk4mPq8T2aXoV1eRcLwYbHs6uF9dGtNiKfAb7c")
MATES = tuple(PeerId(f"12D3KooWS{index}xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxMate{index}k2") for index in range(3))
HEADS = tuple(PeerId(f"12D3KooWH{index}xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxHead{index}q9") for index in range(4))
LAST = PeerId("12D3KooWLxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxLast0w5")
ROUNDS = 31


def joined(*, stages: int = 3, stage: int = 1) -> RunJoined:
    return RunJoined(
        run="860b8d0f33ee" * 5, run_name="stdlib-125m", peer=ME, stage=stage, stages=stages, total_rounds=400,
        inner_steps=64, share=512, micro_batch_tokens=512, num_parameters=41_300_224, codec="int4", rank=0,
        overlap="arrival", device="cuda:0", threads=1,
    )  # fmt: skip


def certified(number: int, contributors: int = 4, **changed: object) -> RoundCertified:
    fields: dict[str, Any] = {
        "round": number, "head": f"{number:064x}", "view": 2, "ballot": 0, "contributors": (ME, *MATES)[:contributors],
        "roster": (ME, *MATES), "micro_batches": 512 * contributors, "own_included": True, "wait_s": 61.2, "bytes_sent": 20_900_000,
        "raw_bytes": 165_200_896, "train_loss": 5.2 * 0.96**number + 1.1, "anchor_digest": "ab" * 32, "codec": "int4", "rank": 0,
        "inner_steps": 64, "delay_s": 4.7,
    }  # fmt: skip
    return RoundCertified(**{**fields, **changed})


def progress(second: int, *, round_number: int = ROUNDS + 1, **changed: object) -> TrainingProgress:
    fields: dict[str, Any] = {
        "round": round_number, "micro_batches": 330, "tokens": 8_400_000 + 8_700 * second, "tokens_per_s": 8_700.0,
        "train_loss": 2.6123, "bytes_sent": 650_000_000 + 350_000 * second, "bytes_received": 1_900_000_000 + 1_050_000 * second,
        "lag_ms_p99": 3.4, "busy": 0.94, "memory_bytes": 2_310_000_000, "is_training": True,
    }  # fmt: skip
    return TrainingProgress(**{**fields, **changed})


def events() -> Iterator[tuple[float, Event]]:
    now = START_S
    yield now, joined()
    yield now + 1, PeerStarted(ME, "860b8d0f33ee" * 5, 1, (f"/ip4/203.0.113.7/tcp/4712/p2p/{ME}",))
    yield now + 2, StateFetched(2, (MATES[0],), 495_000_000, 38.2)
    leases = [SeenPeer(peer, 1, 8_100.0 + 300 * index, ROUNDS, "direct") for index, peer in enumerate(MATES[:2])]
    leases.append(SeenPeer(MATES[2], 1, 2_900.0, ROUNDS, "relayed"))
    leases += [SeenPeer(peer, 0, 7_900.0, ROUNDS, "direct") for peer in HEADS]
    leases.append(SeenPeer(LAST, 2, 9_100.0, ROUNDS, "direct"))
    yield now + 3, SwarmSeen((0, 1, 2), tuple(leases))
    yield now + 3, ViewChanged(2, (ME, *MATES), "the run starts")
    for peer in MATES:
        yield now + 3, NeighbourSeen(peer)
    for peer in HEADS:
        yield now + 4, NeighbourLinked(peer, 0)
    yield now + 4, NeighbourLinked(LAST, 2)
    yield now + 5, StageSeen(1, (ME, *MATES), (ME, *MATES), (), MATES[0])
    for number in range(3, ROUNDS + 1):
        now = START_S + 61.2 * number
        if number == ROUNDS - 2:
            yield now - 9, ContributionRefused(MATES[2], number, "layers.0.mlp.up holds values that are not finite")
            yield now, certified(number, contributors=3)
        elif number == ROUNDS - 1:
            yield now - 9, NeighbourLost(MATES[2], "silent")
            yield now - 5, NeighbourSeen(MATES[2])
            yield now, certified(number, own_included=False, contributors=3, delay_s=None)
        else:
            yield now, certified(number)
        if number % 2:
            nats = 5.3 * 0.96**number + 1.15
            yield now + 6, Evaluated(number, nats, 500_000, bits_per_byte=nats / math.log(2))
    yield now + 9, StageSeen(1, (ME, *MATES), (ME, *MATES), (MATES[2],), MATES[0])
    for second in range(8):
        yield (
            now + 10 + second,
            PipelineProgress(
                5,
                0.94,
                6,
                2,
                12,
                3,
                1,
                10**10 + 2_500_000 * second,
                10**10 + 2_400_000 * second,
                10_120_000_000,
                10_120_000_000,
            ),
        )
        yield now + 10 + second, progress(second)


def status() -> tuple[Status, float]:
    """The peer's status, and the time shortly after its last event."""
    folded, at_s = Status(), START_S
    for at_s, event in events():
        folded.take(event, at_s)
    return folded, at_s + 0.4
