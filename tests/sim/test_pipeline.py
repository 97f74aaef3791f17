"""The pipeline in the simulator: its share of the ideal, a thousand seeds of faults, and planted faults.

A failing seed names itself and the command that replays it.
"""

import random

import pytest

from .invariants import Violation
from .pipeline_faults import FAULTS
from .pipeline_scenario import run_pipeline_seed
from .pipeline_world import Mode, PipelineWorld, Settings, share_of_ideal

LAYOUTS = ((2, 2), (4,) * 4, (3, 2, 4), (6, 2), (1, 5), (4,) * 8)
BATCH = 50
# Where a fault shows itself first; found by `python -m tests.sim.replay_pipeline 0 --to 400 --fault NAME`.
FIRST_SEED = {
    "a slot freed twice": 0,
    "a third version": 1,
    "a backward with another version": 0,
    "a late duplicate counted": 4,
    "answers cached by id alone": 20,
    "a gradient of an earlier output": 105,
    "a body without a grant": 0,
    "a slot never freed": 0,
    "calls lost with the dead": 1,
    "the slot of a refused body kept": 23,
    "calls lost whose answer was refused": 9,
    "activations never released": 4,
}


def speeds_of(layout: tuple[int, ...], seed: int) -> tuple[float, ...]:
    """Speeds from 0.5 to 2, or all 1 for seed 0."""
    rng = random.Random(seed)
    return tuple(2 ** rng.uniform(-1, 1) if seed else 1.0 for _ in range(sum(layout)))


def share(layout: tuple[int, ...], *, mode: Mode, latency_s: float, seed: int, measure_s: float) -> float:
    settings = Settings(layout, mode=mode, latency_s=latency_s, speeds=speeds_of(layout, seed))
    world = PipelineWorld(seed, settings)
    world.start()
    return share_of_ideal(world, warm_up_s=20.0, measure_s=measure_s)


@pytest.mark.parametrize("latency_s", [0.0, 0.02])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_carry_reaches_95_percent_of_the_ideal(layout: tuple[int, ...], latency_s: float) -> None:
    for seed in (0, 3):
        reached = share(layout, mode="carry", latency_s=latency_s, seed=seed, measure_s=20.0)
        assert reached >= 0.95, f"{reached:.3f} of the ideal with speeds of seed {seed}"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("latency_s", [0.0, 0.02])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_carry_reaches_95_percent_of_the_ideal_at_many_speeds_and_flush_is_told(
    layout: tuple[int, ...], latency_s: float
) -> None:
    shares = [share(layout, mode="carry", latency_s=latency_s, seed=seed, measure_s=60.0) for seed in range(9)]
    flush = [share(layout, mode="flush", latency_s=latency_s, seed=seed, measure_s=60.0) for seed in (0, 3)]
    print(
        f"{layout} {1000 * latency_s:.0f} ms: carry {min(shares):.3f}-{max(shares):.3f}, flush equal {flush[0]:.3f}, mixed {flush[1]:.3f}"
    )
    assert min(shares) >= 0.95, shares


@pytest.mark.parametrize("first", range(0, 1000, BATCH))
def test_fifty_seeds_of_faults_end_without_deadlock_or_starvation(first: int) -> None:
    for seed in range(first, first + BATCH):
        run_pipeline_seed(seed)


@pytest.mark.parametrize("mbit_s", [0.1, 0.5, 2.0])
def test_seeds_of_faults_with_a_download_limit_end_too(mbit_s: float) -> None:
    """A body is 64 KB: at 2 Mbit/s the limit is near what the peers compute, at 0.1 far below."""
    for seed in range(10):
        run_pipeline_seed(seed, download_bps=mbit_s * 1e6)


def test_a_pipeline_seed_is_a_run() -> None:
    assert run_pipeline_seed(17) == run_pipeline_seed(17)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_pipeline_fault_is_caught(fault: str) -> None:
    with pytest.raises(Violation):
        run_pipeline_seed(FIRST_SEED[fault], machine=FAULTS[fault])
