"""Whether others use this machine, from CPU seconds."""

import asyncio
import os
import threading
import time
from contextlib import suppress

import pytest

from dilocox_peer.cli.idle import Idleness, Usage, keep_idle, read_usage
from dilocox_peer.errors import ConfigError


def course(others: list[float], *, num_cores: int = 2, own: float = 1.0) -> list[bool]:
    """What is found after each 5 s in which others used so many cores, while our own training uses `own` all the time."""
    idleness = Idleness(num_cores)
    idleness.take(Usage(0.0, 100.0, 50.0))
    busy_s, own_s, found = 100.0, 50.0, []
    for turn, cores in enumerate(others, start=1):
        own_s += 5 * own
        busy_s += 5 * (own + cores)
        found.append(idleness.take(Usage(5.0 * turn, busy_s, own_s))[0])
    return found


def test_our_own_training_is_not_counted():
    assert all(course([0.0] * 20, own=2.0))


def test_it_is_busy_within_two_looks_and_idle_again_after_half_a_minute_of_calm():
    found = course([0.0] * 4 + [1.0] * 4 + [0.0] * 8)
    assert found[:4] == [True] * 4
    assert found[5:8] == [False] * 3
    assert found[8:12] == [False] * 4
    assert found[-1]
    assert found.count(True) + found.count(False) == 16


def test_a_short_burst_does_not_count():
    assert all(course([0.0, 0.0, 0.9, 0.0, 0.0, 0.0, 0.9, 0.0]))


def test_between_the_two_thresholds_it_stays_as_it_was():
    assert all(course([0.4] * 20))
    assert not any(course([2.0] * 4 + [0.4] * 20)[4:])


def test_a_large_machine_has_more_that_runs_anyway():
    assert all(course([2.0] * 10, num_cores=64))
    assert not course([4.0] * 10, num_cores=64)[-1]


def test_a_pause_of_the_readings_is_averaged_over():
    """As when the machine slept: what is between two readings far apart is one stretch."""
    idleness = Idleness(2)
    idleness.take(Usage(0.0, 0.0, 0.0))
    assert idleness.take(Usage(3600.0, 3600.0, 0.0)) == (False, 1.0)
    assert idleness.take(Usage(7200.0, 3600.0, 0.0)) == (True, 0.0)


def test_a_system_without_proc_stat_is_told_what_to_use_instead(tmp_path):
    with pytest.raises(ConfigError, match="--hours"):
        read_usage(tmp_path)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text("cpu  1 2 x\n")
    with pytest.raises(ConfigError, match="/proc/stat"):
        read_usage(tmp_path)


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="needs /proc/stat")
def test_idle_waiting_and_stolen_time_is_not_busy(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text("cpu  100 20 30 9999 999 4 5 888 77 7\ncpu0 1 2 3\n")
    assert read_usage(tmp_path).busy_s == pytest.approx(159 / os.sysconf("SC_CLK_TCK"))


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="needs /proc/stat")
def test_what_this_process_computes_is_its_own():
    before = read_usage()
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    after = read_usage()
    assert after.own_s - before.own_s >= 0.08
    assert after.busy_s >= before.busy_s
    assert after.at_s > before.at_s


async def test_the_peer_is_paused_with_the_figures_and_resumed():
    told = []

    class Peer:
        def pause(self, who, why):
            told.append(("pause", who, why))

        def resume(self, who, why):
            told.append(("resume", who, why))

    cores = os.cpu_count() or 1
    readings = iter(
        [Usage(0.0, 0.0, 0.0), Usage(10.0, 10.0 * cores + 9.0, 9.0), Usage(60.0, 10.0 * cores + 50.0, 50.0)]
    )
    threads = set()

    def read() -> Usage:
        threads.add(threading.current_thread())
        for reading in readings:
            return reading
        raise RuntimeError("no more")

    with suppress(RuntimeError):
        await asyncio.wait_for(keep_idle(Peer(), read, look_s=0.0), 30.0)
    assert [(what, who) for what, who, _ in told] == [("pause", "only-idle"), ("resume", "only-idle")]
    assert told[0][2].startswith(f"others use {cores}.0 of {cores} processor cores")
    assert threading.main_thread() not in threads
