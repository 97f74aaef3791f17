"""How much memory a peer holds, where the system does not say, and how much is free in a control group."""

import os
import resource
from collections.abc import Mapping
from pathlib import Path

import pytest

from dilocox_peer.peer.footprint import available_memory, resident_bytes, whole_memory


def test_without_a_file_descriptor_it_is_not_known_and_nothing_is_raised() -> None:
    """The task that shows it ended the peer."""
    assert resident_bytes() > 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        while True:
            try:
                held.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
        assert resident_bytes() == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in held:
            os.close(each)


GB = 1 << 30


def grouped(root: Path, of_process: str, files: Mapping[str, object]) -> Path:
    """A machine with 60 GB free, and files of its control groups."""
    for name, content in {
        "proc/meminfo": f"MemAvailable: {60 * GB // 1024} kB",
        "proc/self/cgroup": of_process,
        **files,
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def test_pages_of_files_in_a_limited_group_count_as_free(tmp_path: Path) -> None:
    """After a download of 14 GB a container of 16 GB was told to have nothing left."""
    stat = f"anon {2 * GB}\nfile {13 * GB}\ninactive_file {12 * GB}\nactive_file {GB}\nslab_reclaimable {GB}"
    files = {"memory.max": 16 * GB, "memory.current": 16 * GB, "memory.stat": stat}
    root = grouped(tmp_path, "0::/", {f"sys/fs/cgroup/{name}": content for name, content in files.items()})
    assert available_memory(root) == 13 * GB
    assert whole_memory(root) <= 16 * GB


def test_no_more_than_the_limit_is_free_whatever_the_group_says(tmp_path: Path) -> None:
    files = {"memory.max": GB, "memory.current": GB, "memory.stat": f"inactive_file {5 * GB}"}
    root = grouped(tmp_path, "0::/", {f"sys/fs/cgroup/{name}": content for name, content in files.items()})
    assert available_memory(root) == GB


@pytest.mark.parametrize("mounted", ["sys/fs/cgroup/memory/docker/c1", "sys/fs/cgroup/memory"])
def test_groups_of_version_1_are_read_too(tmp_path: Path, mounted: str) -> None:
    files = {
        "memory.limit_in_bytes": 8 * GB,
        "memory.usage_in_bytes": 7 * GB,
        "memory.stat": f"inactive_file 0\ntotal_inactive_file {2 * GB}",
    }
    of_process = "12:cpu,cpuacct:/docker/c1\n9:memory:/docker/c1\n0::/"
    root = grouped(tmp_path, of_process, {f"{mounted}/{name}": content for name, content in files.items()})
    assert available_memory(root) == 3 * GB
    assert whole_memory(root) <= 8 * GB
