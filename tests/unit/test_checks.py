"""What doctor says of what it finds; nothing is looked at here but files of the test's own."""

import asyncio
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import astuple
from types import SimpleNamespace

import pytest
from rich.console import Console

from dilocox_peer.admission import Gate, Grant, Right
from dilocox_peer.cli import checks
from dilocox_peer.cli.checks import Check
from dilocox_peer.cli.doctor import (
    abandonable,
    disk_need,
    judge_speed,
    look_at_device,
    speed_of,
)
from dilocox_peer.cli.expected import Expected
from dilocox_peer.cli.findings import render, report, summary
from dilocox_peer.cli.flags import DoctorFlags
from dilocox_peer.config import preset
from dilocox_peer.errors import RunUnreachable
from dilocox_peer.manifest import AdmissionSection, Manifest
from dilocox_peer.peer.footprint import available_memory
from dilocox_peer.peer.identity import Identity
from dilocox_peer.peer.planning.disk import disk_bytes
from dilocox_peer.peer.planning.sent import AveragedKept, contributions_kept
from dilocox_peer.peer.planning.upkeep import DAY_S, DIRECTORY_BYTES_A_S
from dilocox_peer.signing import SigningKey

MB = 10**6


def test_python():
    assert checks.judge_python((3, 11, 4), "linux") == Check("Python", "ok", "3.11.4 on linux")
    assert checks.judge_python((3, 10, 9), "linux").status == "fail"
    assert "WSL" in checks.judge_python((3, 12, 0), "win32").remedy


@pytest.mark.parametrize(
    ("version", "specifier", "holds"),
    [
        ("2.13.0+cpu", ">=2.4", True), ("2.3.1", ">=2.4", False), ("1.1.12", "<1.2,>=1.1.12", True),
        ("1.2.0", "<1.2,>=1.1.12", False), ("0.8.1", "==0.8.1", True), ("0.8.2", "==0.8.1", False), ("9", "", True),
        ("2.4", ">=2.4.0", True), ("1.0", "~=1.0", True),
    ],
)  # fmt: skip
def test_versions(version, specifier, holds):
    found = checks.judge_packages({"torch": version}, {"torch": specifier})
    assert (found.status == "ok") == holds, found


def test_packages_that_are_missing_are_named():
    found = checks.judge_packages({"torch": "2.5", "hivemind": None, "libp2p": None}, {})
    assert found.status == "fail"
    assert "hivemind, libp2p" in found.found


def test_the_packages_of_this_environment_are_found():
    assert checks.look_at_packages().status == "ok"
    assert set(checks.REQUIREMENTS) <= checks.own_requirements().keys()


@pytest.mark.parametrize(("available", "status"), [(3000 * MB, "ok"), (500 * MB, "warn"), (450 * MB, "fail")])
def test_memory_is_by_stage(available, status):
    found = checks.judge_memory(available, [2000 * MB, 464 * MB], where="machine")
    assert found.status == status
    assert "464 MB to 2.0 GB" in found.found
    assert ("--stage 1" in found.remedy) == (status == "warn")


def test_disk(tmp_path):
    assert checks.judge_disk(10**12, 40 * 10**9, folder=tmp_path).status == "ok"
    assert checks.judge_disk(45 * 10**9, 40 * 10**9, folder=tmp_path).status == "warn"
    full = checks.judge_disk(39 * 10**9, 40 * 10**9, folder=tmp_path)
    assert (full.status, full.may_pass) == ("fail", True)
    assert checks.free_bytes(tmp_path / "not" / "there") > 0


def test_contributions_of_many_peers_take_more_of_a_disk_than_states():
    """1.3 B parameters in int4, 16 of them: each peer keeps 16 rounds of 16 contributions."""
    parameters, blob = 1_300_000_000, 670_000_000
    assert disk_bytes(parameters, AveragedKept(2 * blob, 0)) == 4 * 8 * parameters + 16 * 2 * blob
    assert disk_bytes(parameters, AveragedKept(16 * blob, 0)) == pytest.approx(213e9, rel=0.01)
    assert (
        disk_bytes(parameters, AveragedKept(2_000, 0)) == 5 * 8 * parameters
    )  # small ones are kept for longer, up to the size of a state


def test_doctor_asks_for_room_by_how_many_train_there():
    manifest = preset("tiny", compression={"codec": "none", "adapt": "off"}, limits={"max_peers": 8})
    alone, many, too_many = (disk_need(manifest, None, peers) for peers in (0, 6, 60))
    of_a_contribution = (many - alone) / 16 / 6
    assert of_a_contribution == pytest.approx(4 * 252_544, rel=0.05)
    assert too_many == pytest.approx(alone + 7 * 16 * of_a_contribution, rel=1e-6)  # no more than the run takes


def test_doctor_asks_for_less_where_the_run_averages_in_slices():
    """From four members on; sixteen of 1.3 B parameters in int4 keep 61 GB, where all to all it is 213."""
    manifest = preset("tiny", compression={"codec": "int4", "adapt": "off"}, limits={"max_peers": 16})
    sliced = preset(
        "tiny", compression={"codec": "int4", "adapt": "off"}, limits={"max_peers": 16}, rounds={"averaging": "slices"}
    )
    assert disk_need(sliced, None, 2) == disk_need(manifest, None, 2)
    assert disk_need(sliced, None, 15) < disk_need(manifest, None, 15) / 2
    assert disk_need(sliced, None, 15) < disk_need(sliced, None, 3) < disk_need(manifest, None, 3)
    kept = contributions_kept(16, 670e6, 1_300_000_000, "int4", is_sliced=True)
    assert disk_bytes(1_300_000_000, kept) == pytest.approx(61e9, rel=0.01)


def expected(left_s: float | None) -> Expected:
    return Expected(450 * MB, 40 * MB, 1.2e9, 1.1e9, left_s, "at the pace of its newest rounds")


@pytest.mark.parametrize(("days", "status"), [(1, "ok"), (464, "warn"), (None, "ok")])
def test_a_run_that_hardly_ends_is_said_beforehand(days, status):
    found = checks.judge_costs(expected(None if days is None else 86400.0 * days))
    assert found.status == status
    assert "450 MB of memory, 40 MB of disk, 1.2 GB up and 1.1 GB down a day" in found.found
    assert (days is None) == ("to its end" not in found.found)
    assert ("dilocox-peer plan" in found.remedy) == (status == "warn")


def test_a_run_without_a_pace_is_reckoned_for_machines_like_this_one():
    manifest = preset("small")
    alone, many = (Expected.reckoned(manifest, peers, 900.0, "like this machine") for peers in (1, 8))
    assert alone.left_s == pytest.approx(200 * 50 * 8 * 256 * manifest.inner.accumulate / 900.0)
    assert many.received_bytes_a_day > alone.received_bytes_a_day == pytest.approx(DAY_S * DIRECTORY_BYTES_A_S)
    assert many.disk_bytes > alone.disk_bytes
    assert "8 peers, each like this machine" in many.words()


def test_a_peer_that_has_been_here_starts_with_less_room_than_a_new_one(tmp_path, monkeypatch):
    """Running it would wait for room; started again it was refused."""
    monkeypatch.setattr(checks, "free_bytes", lambda folder: 2_000_000)
    assert checks.look_at_disk(tmp_path).status == "fail"
    log = tmp_path / "runs" / "0123" / "stage1" / "rounds.log"
    log.parent.mkdir(parents=True)
    log.touch()
    assert checks.look_at_disk(tmp_path).status == "warn"
    assert checks.look_at_disk(tmp_path, run="0123").status == "warn"
    assert checks.look_at_disk(tmp_path, run="4567").status == "fail", "nothing of that run is here yet"
    assert checks.look_at_disk(tmp_path, need=10**6).status == "fail", "where a stage is to be taken"
    monkeypatch.setattr(checks, "free_bytes", lambda folder: 0)
    assert checks.look_at_disk(tmp_path).may_pass


def test_a_home_on_a_disk_that_is_read_only_may_be_written_to_later(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "is_read_only", lambda folder: True)
    found = checks.look_at_disk(tmp_path)
    assert (found.status, found.may_pass) == ("fail", True)
    assert "mount it writable" in found.remedy
    for wrong in (checks.look_at_disk(tmp_path / "new"), checks.look_at_key(tmp_path / "new" / "identity.key")):
        assert (wrong.status, wrong.may_pass) == ("fail", False), "it never was"


def test_a_read_only_disk_is_told_from_another(tmp_path, monkeypatch):
    assert not checks.is_read_only(tmp_path / "new"), "as the tests need it"
    real = os.statvfs(tmp_path)
    flags = SimpleNamespace(f_flag=real.f_flag | os.ST_RDONLY)
    monkeypatch.setattr(os, "statvfs", lambda path: flags)
    assert checks.is_read_only(tmp_path / "new")


@pytest.mark.parametrize("home", ["file/home", "locked/home", "/proc/home"])
def test_a_home_that_cannot_be_made_is_no_full_disk(tmp_path, home):
    (tmp_path / "file").touch()
    (tmp_path / "locked").mkdir(mode=0o500)
    if home == "locked/home" and os.getuid() == 0:
        pytest.skip("root may write everywhere")
    for found in (checks.look_at_disk(tmp_path / home), checks.look_at_key(tmp_path / home / "identity.key")):
        assert found.status == "fail"
        assert "cannot be made" in found.found
        assert "--home" in found.remedy
    assert checks.look_at_disk(tmp_path / "new" / "home").status == "ok"


@pytest.mark.parametrize(
    ("left", "status", "side"),
    [
        ([90.0], "ok", ""), ([56.0], "ok", ""), ([75.0, 75.0, 500.0], "ok", ""), ([], "skipped", ""),
        ([110.0], "warn", "20 s behind"), ([40.0], "warn", "15 s ahead"), ([3000.0], "fail", "behind"),
        ([10.0], "fail", "45 s ahead"), ([2.0, 75.0], "ok", ""), ([2.0, 80.0, 3000.0, 60.0], "ok", ""), ([110.0, 120.0], "warn", "20 s behind"),
    ],
)  # fmt: skip
def test_the_clock_is_compared_with_the_median_peers(left, status, side):
    found = checks.judge_clock(left)
    assert found.status == status
    assert side in found.found


def test_one_bootstrap_is_enough():
    assert checks.judge_bootstraps([("/a", 0.01)]).status == "ok"
    some = checks.judge_bootstraps([("/a", 0.01), ("/b", "cannot be reached (refused)")])
    assert some.status == "warn"
    assert "/b cannot be reached (refused)" in some.found
    assert checks.judge_bootstraps([("/b", "does not answer")]).status == "fail"


def test_who_was_dialled_or_was_not_is_no_longer_a_likelihood():
    public = ["/ip4/8.8.8.8/tcp/4712/p2p/x"]
    assert checks.judge_reachability(["/ip4/192.168.1.5/tcp/1"], public, True).status == "ok"
    refused = checks.judge_reachability(public, public, False)
    assert refused.status == "warn"
    assert "--announce-maddrs" in refused.remedy


@pytest.mark.parametrize(
    ("own", "run", "status", "word"),
    [
        (["/ip4/8.8.8.8/tcp/1"], ["/ip4/9.9.9.9/tcp/1"], "ok", "direct"),
        (["/ip4/127.0.0.1/tcp/1"], ["/ip4/127.0.0.1/tcp/2"], "ok", "this machine"),
        (["/ip4/192.168.1.2/tcp/1"], ["/ip4/192.168.1.3/tcp/1"], "ok", "local network"),
        (["/ip4/192.168.1.2/tcp/1"], ["/ip4/9.9.9.9/tcp/1"], "warn", "no public address"),
        (["/ip4/192.168.1.2/tcp/1"], ["/dns4/example.org/tcp/1"], "warn", "no public address"),
        (["/ip4/9.9.9.9/tcp/1/p2p/X/p2p-circuit/p2p/Y"], ["/ip4/9.9.9.9/tcp/1"], "warn", "relayed"),
    ],
)
def test_direct_or_relayed(own, run, status, word):
    found = checks.judge_reachability(own, run)
    assert found.status == status
    assert word in found.found
    assert ("--announce-maddrs" in found.remedy) == (status == "warn")


def test_a_stage_without_peers_is_named():
    assert checks.judge_stages([2, 1]).status == "ok"
    assert checks.judge_stages([2, 0]).remedy == "join: stage 1 has nobody"
    assert checks.judge_stages([0]).status == "warn"


def test_admission_is_judged_by_what_the_link_and_the_disk_hold():
    owner, me = SigningKey(b"o" * 32), SigningKey(b"m" * 32).peer_id
    manifest = Manifest(admission=AdmissionSection(mode="invite")).signed_by(owner)
    gate = Gate.of(manifest)
    assert gate is not None

    def judged(kept: Grant | None, grant: Grant | None, now: float = 100.0) -> checks.Check:
        return checks.judge_admission(gate, me, kept=kept, grant=grant, now=now)

    many = Grant(manifest.run_id, bytes(16), frozenset({Right.JOIN}), 1, 200, None, 3).signed_by(owner)
    own = many.pass_for(me, owner)
    assert judged(None, None).status == "fail"
    assert "has no invitation" in judged(None, None).found
    assert judged(None, many).found == "the link's invitation is good, until 1970-01-01 00:03 UTC"
    assert "has come in before" in judged(own, None).found
    assert judged(None, many, now=200.0).status == "fail"
    assert "expired" in judged(None, many, now=200.0).found
    assert checks.judge_admission(gate, None, kept=None, grant=many, now=1.0).status == "ok"

    listed = Gate.of(Manifest(admission=AdmissionSection(mode="list", members=(me,))).signed_by(owner))
    assert listed is not None
    assert checks.judge_admission(listed, me, kept=None, grant=None, now=1.0).status == "ok"
    assert "`join` makes it" in checks.judge_admission(listed, None, kept=None, grant=None, now=1.0).found
    stranger = SigningKey(b"s" * 32).peer_id
    assert stranger in checks.judge_admission(listed, stranger, kept=None, grant=None, now=1.0).found


def test_throughput_is_compared_with_the_others():
    assert checks.judge_throughput(100.0, 1000, []).found == "100 tokens/s on this machine, 10.0 s a round"
    assert checks.judge_throughput(100.0, 1000, [0.0, 200.0]).status == "ok"
    assert checks.judge_throughput(100.0, 1000, [1000.0]).status == "warn"


@pytest.mark.parametrize(
    ("limit", "expected"), [(1e12, (12, 8)), (6 * 4 * 100 * 121, (12, 4)), (6 * 100 * 61, (6, 1)), (1, (1, 1))]
)
def test_a_large_stage_is_measured_in_part(limit, expected):
    assert checks.affordable(12, 8, context=100, block=10, head=1, limit=limit) == expected


def test_work_that_hangs_is_left_behind():
    release = threading.Event()

    def hang() -> Check:
        release.wait(30)
        return Check("disk", "ok", "")

    async def scenario() -> Check:
        return await checks.within("disk", 0.05, lambda: abandonable(hang))

    try:
        assert asyncio.run(scenario()).status == "fail"
    finally:
        release.set()


def test_work_in_a_thread_gives_its_result_or_its_error():
    async def scenario() -> tuple[Check, Check]:
        return (
            await checks.within("a", 5, lambda: abandonable(lambda: Check("a", "ok", "done"))),
            await checks.within("b", 5, lambda: abandonable(lambda: [][1])),
        )

    good, bad = asyncio.run(scenario())
    assert good.found == "done"
    assert "IndexError" in bad.found


def test_a_key_file_is_looked_at_and_left_alone(tmp_path):
    key = tmp_path / "identity.key"
    assert checks.look_at_key(key).status == "ok"
    assert not key.exists()
    with Identity.open(key) as identity:
        in_use = checks.look_at_key(key)
        assert in_use.status == "warn"
        assert "--name" in in_use.remedy
        peer = identity.peer_id
    before = sorted(os.listdir(tmp_path))
    assert peer in checks.look_at_key(key).found
    assert sorted(os.listdir(tmp_path)) == before
    key.chmod(0o640)
    assert checks.look_at_key(key).remedy == f"run `chmod 600 {key}`"
    key.chmod(0o600)
    key.write_bytes(b"nonsense")
    assert checks.look_at_key(key).status == "fail"
    key.chmod(0o644)
    assert "no libp2p Ed25519 key file" in checks.look_at_key(key).found
    assert checks.look_at_key(tmp_path).status == "fail"


def test_the_key_is_free_again_afterwards(tmp_path):
    key = tmp_path / "identity.key"
    Identity.open(key).close()
    checks.look_at_key(key)
    with key.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = checks.look_at_ports([f"/ip4/127.0.0.1/tcp/{port}"])
    assert found.status == "fail"
    assert str(port) in found.found
    assert checks.look_at_ports(["/ip4/127.0.0.1/tcp/0"]).status == "ok"


def test_memory_respects_the_control_group(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 8000 kB\nMemAvailable:    4000 kB\n")
    assert available_memory(tmp_path) == 4000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("5\n")
    assert available_memory(tmp_path) == 4000 * 1024
    (group / "memory.max").write_text("1000000\n")
    assert available_memory(tmp_path) == 999_995
    service = group / "system.slice/peer.service"  # systemd's MemoryMax
    service.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/cgroup").write_text("0::/system.slice/peer.service\n")
    assert available_memory(tmp_path) == 999_995
    (service / "memory.max").write_text("700\n")
    (service / "memory.current").write_text("600\n")
    assert available_memory(tmp_path) == 100
    assert available_memory(tmp_path / "nothing") > 0


def test_a_check_that_hangs_fails_or_breaks_is_a_failed_check():
    async def hang() -> Check:
        await asyncio.Event().wait()
        raise AssertionError

    async def fail() -> Check:
        raise RunUnreachable("nobody is there")

    async def break_() -> Check:
        raise KeyError("x")

    hung, failed, broken = (asyncio.run(checks.within("it", 0.01, look)) for look in (hang, fail, break_))
    assert (hung.status, failed.status, broken.status) == ("fail",) * 3
    assert "0.01 s" in hung.found
    assert failed.found == "nobody is there"
    assert "KeyError" in broken.found
    assert broken.remedy


FOUND = [
    Check("Python", "ok", "3.11.4 on linux"),
    Check("clock", "warn", "at least 20 s behind the peers", "set it by network time"),
    Check("ports", "fail", "cannot listen on [4711]", "stop what uses it"),
    Check("peers", "skipped", "needs the run's link"),
]


def test_the_table_fits_80_columns_and_puts_remedies_below():
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(render(FOUND, console.width))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert lines == [
        "check            found",
        "Python  ok       3.11.4 on linux",
        "clock   warn     at least 20 s behind the peers",
        "                 → set it by network time",
        "ports   fail     cannot listen on [4711]",
        "                 → stop what uses it",
        "peers   skipped  needs the run's link",
    ]
    console.file.close()
    assert summary(FOUND) == "4 checks: 1 ok, 1 warn, 1 fail, 1 skipped"


@pytest.mark.parametrize("width", [20, 39])
def test_a_narrow_terminal_loses_no_word(width):
    named = [Check("direct or relayed", *each[1:]) for each in map(astuple, FOUND)]
    with open(os.devnull, "w") as nowhere:
        console = Console(width=width, record=True, file=nowhere)
        console.print(render(named, console.width))
    lines = console.export_text().splitlines()
    assert all(len(line) <= width for line in lines)
    words = " ".join(" ".join(lines).split())
    for check in named:
        assert f"{check.status} {check.name}: {check.found}" in words
        assert f"→ {check.remedy}" in words or not check.remedy


def test_the_json_form_and_the_exit_code():
    told = json.loads(json.dumps(report(FOUND)))
    assert told["ok"] is False
    assert told["checks"][1] == {
        "name": "clock", "status": "warn", "found": "at least 20 s behind the peers", "remedy": "set it by network time",
        "may_pass": False,
    }  # fmt: skip
    assert checks.exit_code(FOUND) == 1
    assert checks.exit_code([check for check in FOUND if check.status != "fail"]) == 0


def test_the_quick_checks_load_nothing_heavy(tmp_path):
    import subprocess
    import sys

    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from dilocox_peer.cli.checks import quick_checks\n"
        f"found = quick_checks(Path({str(tmp_path)!r}), Path({str(tmp_path / 'k')!r}), ['/ip4/127.0.0.1/tcp/0'])\n"
        "assert len(found) == 6 and all(check.status == 'ok' for check in found), found\n"
        "heavy = {'torch', 'hivemind', 'numpy', 'libp2p', 'trio', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_best_device_is_found_and_measured():
    flags = DoctorFlags(device="auto", link=None)
    assert look_at_device("auto").status == "ok"
    assert "tokens/s" in judge_speed(None, speed_of(None, flags), ()).found


def test_a_device_that_is_not_here_names_the_flag_and_the_remedy():
    check = look_at_device("cuda:99")
    assert (check.status, check.remedy) == ("fail", "use --device cpu")
    assert "--device cuda:99" in check.found


@pytest.mark.parametrize(
    ("found", "code"), [("signal.raise_signal(signal.SIGINT)", 130), ("[Check('disk', 'fail', 'it is full')]", 1)]
)
def test_doctor_ends_without_taking_apart_what_a_thread_is_at_work_in(found, code):
    """Torch aborts the process then: Ctrl-C while the throughput was measured ended it with SIGABRT."""
    program = (
        "import atexit, signal, sys\n"
        "from dilocox_peer.__main__ import main\n"
        "from dilocox_peer.cli import doctor\n"
        "from dilocox_peer.cli.checks import Check\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"doctor.examine = lambda *_, **__: {found}\n"
        "atexit.register(print, 'taken apart', flush=True)\n"
        "sys.argv = ['dilocox-peer', 'doctor']\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "taken apart" in done.stdout, "it is full" in done.stdout) == (code, False, code == 1)
