"""Giving way where the kernel shares by session: real sessions, as the kernel tells of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dilocox_peer.network.autogroup import group_niceness
from dilocox_peer.network.p2pd import launch_command

needs_groups = pytest.mark.skipif(group_niceness() is None, reason="this kernel does not share by session")

LAUNCHES = """
import os, subprocess
from dilocox_peer.network.p2pd import launch_command
os.nice({nice})
print(subprocess.run(launch_command(["/bin/cat", "/proc/self/autogroup"]), capture_output=True, text=True).stdout)
"""
GIVES_WAY = """
from dilocox_peer.network.autogroup import giving_way, group_niceness
before = group_niceness()
with giving_way({nice}):
    print(before, group_niceness())
"""
FOLLOWS = """
import os
from dilocox_peer.network.autogroup import follow_niceness, group_niceness
os.nice({nice})
follow_niceness()
print(group_niceness())
"""


def run(program: str, nice: int) -> str:
    """In a session of its own."""
    command = [sys.executable, "-c", program.format(nice=nice)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, start_new_session=True, check=True)
    return done.stdout.strip()


@needs_groups
def test_a_peer_that_gives_way_does_so_with_its_session():
    assert run(GIVES_WAY, 7).split() == ["0", "7"]
    assert run(GIVES_WAY, 0).split() == ["0", "0"]


@needs_groups
@pytest.mark.parametrize("nice", [0, 9])
def test_what_runs_in_a_session_of_its_own_gives_way_too(nice):
    in_all = os.nice(0) + nice  # the tests themselves may have been told to give way
    assert run(LAUNCHES, nice).endswith(f"nice {in_all}")
    assert run(FOLLOWS, nice) == str(in_all)


def test_p2pd_is_launched_where_there_are_no_such_groups(tmp_path: Path):
    """The file cannot be opened there."""
    program = launch_command(["/bin/echo", "started"])
    program[4] = program[4].replace("/proc/self/autogroup", str(tmp_path / "none" / "autogroup"))
    code = f"import os, subprocess\nos.nice(5)\nprint(subprocess.run({program!r}[:5] + [str(os.getpid())] + {program!r}[6:], capture_output=True, text=True).stdout)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "started"
