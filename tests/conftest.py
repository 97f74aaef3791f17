"""Settings of all tests: the same examples on every run, no example fails for being slow on a busy machine, and no torch takes all cores.

--few, as `make quick` has it: of each simulator's test one batch of seeds or one case, and of each file of tests of real processes one test.
"""

import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before torch is loaded, here and in the processes that tests start. Several tests run at once, each with a thread for every core torch
# would wait at every small product for threads that are not running: that is most of the time it then takes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile(
    "project", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("project")

FEW = {"sim": 1, "shell": 1, "hostile": 1, "swarm": 1, "browser": 1}  # by folder: how many are left of each kind


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--few", action="store_true", help="few seeds and few tests of real processes: make quick")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--few"):
        return
    seen: Counter[str] = Counter()
    kept, left = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        kind = f"{item.path}::{getattr(item, 'originalname', item.name)}" if folder == "sim" else str(item.path)
        if any(item.get_closest_marker(name) for name in ("long", "slow", "nightly")):
            left.append(item)
            continue
        seen[kind] += 1
        (kept if seen[kind] <= FEW.get(folder, len(items)) else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept
