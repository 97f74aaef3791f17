"""What a run takes of a peer: one reckoning, whoever asks."""

import math
from dataclasses import replace
from typing import Any

import pytest

from dilocox_peer.cli.expected import Expected, on_one_core
from dilocox_peer.cli.operate import cost_lines
from dilocox_peer.cli.telling_costs import AGAIN_AFTER, OTHERWISE, ROUNDS_SEEN, CostsTeller
from dilocox_peer.config import preset
from dilocox_peer.events import RoundCertified, RoundClosed
from dilocox_peer.events_of_costs import UpkeepReckoned, needs_words
from dilocox_peer.model.memory import StageSize
from dilocox_peer.model.partition import cut_into
from dilocox_peer.peer.bulletin import needs_reckoned, run_joined
from dilocox_peer.peer.planning.upkeep import (
    DAY_S,
    DIRECTORY_BYTES_A_S,
    KEPT_SHARE,
    MESSAGE_BYTES,
    RoundPace,
    StageNeeds,
    Upkeep,
    activation_bytes,
    first_disk,
    talk_of_round,
    traffic_of_round,
    upkeep,
)
from dilocox_peer.peer.status import Status
from dilocox_peer.types import PeerId

TINY = preset("tiny")
NEEDS = StageNeeds.of(TINY, 0)
PACE = RoundPace(peers=4, contribution_bytes=1000, micro_batches=8, round_s=2.0)
ME, OTHER = PeerId("12D3me"), PeerId("12D3other")


def of_work(needs: StageNeeds, pace: RoundPace) -> tuple[float, float]:
    """What a round moves but for messages and the directory."""
    sent, received = traffic_of_round(needs, pace)
    return sent - talk_of_round(pace), received - talk_of_round(pace)


def certified(number: int) -> RoundCertified:
    return RoundCertified(
        number, "h", 1, 1, (ME, OTHER), (ME, OTHER), 8, True, 0.0, 1000, 1, 2.0, "d", expected_rounds=100, inner_steps=8
    )


def test_a_contribution_goes_to_each_of_the_others_and_to_who_keeps_the_run():
    """Who keeps it also copies a state each time that the contributions have grown to half of one."""
    assert of_work(NEEDS, PACE) == ((3 + 1 + 2) * 1000, 3 * 1000)


def test_alone_a_peer_receives_nothing_and_its_work_is_kept():
    assert of_work(NEEDS, replace(PACE, peers=1)) == (3 * 1000, 0)


def test_no_more_than_a_state_a_round_is_copied():
    large = replace(PACE, contribution_bytes=8 * NEEDS.parameters)
    assert of_work(NEEDS, large)[0] == (3 + 1 + 1 / 4) * 8 * NEEDS.parameters


def test_on_a_narrow_line_who_keeps_the_run_gets_a_tenth():
    narrow = replace(PACE, peers=2, contribution_bytes=10**6, line_bps=8e5)
    sent, received = of_work(NEEDS, narrow)
    assert (sent, received) == (10**6 * (1 + KEPT_SHARE), 10**6)


def test_in_slices_traffic_does_not_grow_with_the_peers():
    sliced = replace(NEEDS, is_sliced=True, codec="int4")
    assert of_work(sliced, PACE) == (3000 + 3 * 3 / 4 * 1000, 3 * 3 / 4 * 1000)
    assert of_work(sliced, replace(PACE, peers=64))[1] == 3 * 63 / 64 * 1000
    assert of_work(sliced, replace(PACE, codec="topk")) == of_work(replace(sliced, codec="topk"), PACE)
    assert of_work(replace(sliced, codec="topk"), PACE)[1] == 5 * 3 / 4 * 1000, "its results are larger"
    assert of_work(sliced, replace(PACE, peers=3)) == of_work(NEEDS, replace(PACE, peers=3))


def test_in_slices_a_disk_does_not_fill_with_the_peers():
    alike, sliced = (replace(NEEDS, is_sliced=each, codec="int4") for each in (False, True))
    large = replace(PACE, contribution_bytes=10**6)
    few, many = (replace(large, peers=count) for count in (3, 64))
    assert upkeep(sliced, few).disk_bytes == upkeep(alike, few).disk_bytes
    assert upkeep(sliced, many).disk_bytes < upkeep(sliced, large).disk_bytes < upkeep(alike, large).disk_bytes
    assert upkeep(sliced, replace(large, codec="topk")).disk_bytes > upkeep(sliced, large).disk_bytes


def test_activations_count_by_the_micro_batch_in_both_directions():
    run = cut_into(preset("small"), 3)
    first, middle, last = (activation_bytes(run, stage) for stage in range(3))
    assert first == last[::-1]
    assert middle == (sum(first), sum(first))
    sent, _ = of_work(StageNeeds.of(run, 1), PACE)
    assert sent == 6 * 1000 + 8 * middle[0]


def test_a_day_has_as_many_rounds_as_fit():
    found = upkeep(NEEDS, PACE)
    assert found.sent_bytes_a_day == pytest.approx(DAY_S / 2.0 * traffic_of_round(NEEDS, PACE)[0])


def test_peers_talk_in_every_round_and_to_the_directory_all_day():
    assert talk_of_round(replace(PACE, peers=1)) == 2.0 * DIRECTORY_BYTES_A_S
    assert talk_of_round(PACE) == 3 * MESSAGE_BYTES + 2.0 * DIRECTORY_BYTES_A_S


def test_memory_is_the_figure_that_the_claim_goes_by():
    run = cut_into(preset("small"), 2)
    for stage in range(2):
        size = StageSize.of(run, stage)
        assert StageNeeds.of(run, stage).memory_bytes == size.host_bytes()
        assert StageNeeds.of(run, stage, checkpointing=True).memory_bytes == size.host_bytes(checkpointing=True)


def test_a_copy_of_another_stage_counts():
    run = cut_into(preset("small"), 2)
    alone = replace(StageNeeds.of(run, 0), copied=0)
    assert first_disk(run, StageNeeds.of(run, 0), 1) > first_disk(run, alone, 1)


def of_a_peer(rounds: int) -> Status:
    """A peer whose rounds take 2 s."""
    status = Status()
    status.take(run_joined(TINY, ME, 0, device="cpu", threads=1), 0.0)
    status.take(needs_reckoned(TINY, 0, "cpu", checkpointing=False, base_bits=0), 0.0)
    for number in range(1, rounds + 1):
        status.take(RoundClosed(number, 8, 2.0, 1000, 10_000), 2.0 * number - 1)
        status.take(certified(number), 2.0 * number)
    return status


def test_a_peers_own_status_comes_to_the_same():
    status = of_a_peer(6)
    assert status.costs.upkeep(status.rounds) == upkeep(NEEDS, replace(PACE, peers=2))
    said = status.costs.summary(status.rounds)
    assert said["memory_bytes"] == NEEDS.memory_bytes
    assert cost_lines(said)[0].startswith("  takes up to 5")
    sent, received = traffic_of_round(NEEDS, replace(PACE, peers=2))
    a_day = f"{43200 * sent / 1e6:.1f} MB up and {43200 * received / 1e6:.1f} MB down a day"
    assert a_day in cost_lines(said)[0]


def test_before_there_is_a_pace_no_day_is_told():
    status = of_a_peer(1)
    assert status.costs.upkeep(status.rounds) is None
    said = status.costs.summary(status.rounds)
    assert said["disk_bytes"] == first_disk(TINY, NEEDS, 0)
    assert "a day" not in cost_lines(said)[0]


def test_a_peer_says_what_it_comes_to():
    told: list[Any] = []
    teller = CostsTeller(lambda: (Upkeep(1e9, 2e9, 3 * 10**9), 7300.0), told.append)
    teller.take(run_joined(TINY, ME, 0, device="cpu", threads=1))
    for number in range(1, 20):
        teller.take(replace(certified(number), train_loss=math.nan))  # taken over when it came
    for number in range(1, ROUNDS_SEEN + 5):
        assert bool(told) == (number > ROUNDS_SEEN)
        teller.take(certified(number))
    assert told == [UpkeepReckoned(10**9, 2 * 10**9, 3 * 10**9, 7300.0)]
    assert "sends 1.0 GB and receives 2.0 GB a day" in told[0].line()
    assert "2 hours more" in told[0].line()


def test_a_peer_says_it_again_where_it_has_become_otherwise():
    """As where the plan leaves the codec that the run began with."""
    told: list[Any] = []
    sent = [1e9]
    teller = CostsTeller(lambda: (Upkeep(sent[0], 2e9, 5), None), told.append)
    numbers = iter(range(1, 1000))

    def rounds(count: int) -> None:
        for _ in range(count):
            teller.take(certified(next(numbers)))

    rounds(ROUNDS_SEEN)
    sent[0] *= OTHERWISE + 0.1
    rounds(AGAIN_AFTER - 1)
    assert len(told) == 1, "a pace is made of so many rounds"
    rounds(1)
    assert [each.sent_bytes_a_day for each in told] == [10**9, 1_600_000_000]
    sent[0] /= OTHERWISE - 0.1
    rounds(3 * AGAIN_AFTER)
    assert len(told) == 2, "not so much otherwise"
    sent[0] /= OTHERWISE
    rounds(1)
    assert len(told) == 3
    teller.take(run_joined(TINY, ME, 0, device="cpu", threads=1))
    sent[0] *= 3
    rounds(ROUNDS_SEEN)
    assert len(told) == 3, "elsewhere it has to see as many again"
    rounds(AGAIN_AFTER)
    assert len(told) == 4


def test_who_looks_from_outside_is_told_of_the_stage_that_takes_most_or_of_the_one_that_is_meant():
    def of(stage: int, sent: int | None) -> dict[str, object]:
        costs = {"memory_bytes": 10 + stage, "disk_bytes": 5, "sent_bytes_a_day": sent, "received_bytes_a_day": sent}
        return {"stage": stage, "costs": costs}

    document = {"now": {"eta_s": 60.0}, "stages": [of(0, 300), of(1, 200)]}
    most, meant = Expected.at_its_pace(document, None), Expected.at_its_pace(document, 1)
    assert most is not None
    assert (most.sent_bytes_a_day, most.memory_bytes, most.left_s) == (300, 11, 60.0)
    assert meant is not None
    assert (meant.sent_bytes_a_day, meant.memory_bytes) == (200, 11)
    assert Expected.at_its_pace({**document, "stages": [of(0, None)]}, None) is None


def test_the_owner_is_told_what_a_core_makes_of_each_preset():
    """As benchmarks/predictions.py --core measures a core: 16,077, 1,153 and 152 tokens a second."""
    for name, tokens_per_s in (("tiny", 16_077), ("small", 1_153), ("125m", 152)):
        run = preset(name)
        tokens = run.inner.micro_batch * run.inner.accumulate * run.model.context
        alone = run.rounds.total * run.rounds.inner_steps * tokens / tokens_per_s
        found = on_one_core(run)
        assert found.left_s == pytest.approx(alone, rel=0.25), name
        assert found.memory_bytes == StageNeeds.of(run, 0).memory_bytes


def test_a_peer_with_a_card_is_told_what_it_takes_of_it() -> None:
    manifest = preset("tiny")
    on_card = StageNeeds.of(manifest, 0, on_cpu=False)
    assert on_card.card_bytes == StageSize.of(manifest, 0).device_bytes()
    assert StageNeeds.of(manifest, 0).card_bytes == 0
    assert needs_words(1_400_000_000, 9_000_000_000, 4e9) == "1.4 GB of memory, 9.0 GB of the card's and 4.0 GB of disk"
    assert needs_words(1_400_000_000, 0, 4e8) == "1.4 GB of memory and 400 MB of disk"
