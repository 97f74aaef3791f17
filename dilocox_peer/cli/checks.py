"""What `doctor` finds out, one `Check` each: name, verdict, what was found, and what to do about it.

The judging is pure (numbers in, Check out), the looking is thin. `quick_checks` loads neither torch nor hivemind and
takes milliseconds, so that other commands may call it too. Nothing here changes anything: no key is made, no port opened
for longer than a look. Network checks are in doctor.py, which judges with what stands here.
"""

import asyncio
import fcntl
import importlib.metadata
import ipaddress
import os
import re
import shutil
import stat
import statistics
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dilocox_peer.admission import Gate, Grant, Right, told_to_itself, when
from dilocox_peer.cli.expected import Expected
from dilocox_peer.errors import ConfigError, DilocoxError
from dilocox_peer.invitation import parse_multiaddr, parse_multiaddrs
from dilocox_peer.model.memory import size
from dilocox_peer.types import PeerId

CheckStatus = Literal["ok", "warn", "fail", "skipped"]

DISK_FLOOR_BYTES = 200_000_000
START_BYTES = 1_000_000  # what a start writes of its own, where the run's files are there already
OPEN_FILES = 1024
LEASE_TTL_S, LEASE_AGE_S = 90.0, 35.0  # how long leases are written for, and how old one may be before it is renewed
CLOCK_SKEW_S = 30.0  # what the directory's validators put up with
LONG_RUN_S = 90 * 86400.0  # what a run takes to its end: beyond it something is probably not as it was meant
SLOW_SHARE = 0.2  # of the others' speed; below it a peer's rounds are mostly late

REQUIREMENTS = (
    "torch", "numpy", "hivemind", "libp2p", "msgpack", "msgspec", "rich", "typer", "pydantic", "safetensors", "cryptography", "base58",
)  # fmt: skip
"""Distributions that a peer cannot do without; the version ranges are read from our own metadata."""

MOUNT = "mount it writable again, or pass another --home"


@dataclass(frozen=True, slots=True)
class Check:
    """remedy: what to do, empty when there is nothing to do. may_pass: what fails may pass by itself."""

    name: str
    status: CheckStatus
    found: str
    remedy: str = ""
    may_pass: bool = False


def exit_code(checks: Sequence[Check]) -> int:
    return int(any(check.status == "fail" for check in checks))


def one_line(checks: Sequence[Check]) -> str:
    """Names, findings and remedies of checks, for an error or a log line."""
    return "; ".join(
        f"{check.name}: {check.found}" + (f" ({check.remedy})" if check.remedy else "") for check in checks
    )


async def within(name: str, seconds: float, look: Callable[[], Awaitable[Check]]) -> Check:
    """What look finds; a failed Check when it does not come back in time, or fails itself."""
    try:
        async with asyncio.timeout(seconds):
            return await look()
    except TimeoutError:
        return Check(
            name, "fail", f"no answer within {seconds:g} s", "try again; if it stays so, look at the lines above"
        )
    except DilocoxError as error:
        return Check(name, "fail", str(error))
    except Exception as error:  # task boundary: one check that breaks must not take the others with it
        return Check(name, "fail", f"{type(error).__name__}: {error}", "this check itself failed: please report it")


# -- judging: pure ----------------------------------------------------------------------------------------------------


def judge_python(version: tuple[int, ...], platform: str) -> Check:
    text = ".".join(map(str, version[:3]))
    if platform == "win32":
        return Check("Python", "fail", f"{text} on native Windows", "use WSL: hivemind cannot be imported here")
    if version < (3, 11):
        return Check("Python", "fail", text, "install Python 3.11 or newer")
    return Check("Python", "ok", f"{text} on {platform}")


def judge_packages(installed: Mapping[str, str | None], required: Mapping[str, str]) -> Check:
    """installed: name -> version, None when missing. required: name -> specifier such as '>=2.4'."""
    missing = [name for name, version in installed.items() if version is None]
    old = [
        f"{name} {version} (needs {required[name]})"
        for name, version in installed.items()
        if version is not None and not _satisfies(version, required.get(name, ""))
    ]
    if missing or old:
        found = "; ".join(([f"missing: {', '.join(missing)}"] if missing else []) + old)
        return Check("packages", "fail", found, "run `make setup`, or install the wheel that you had it from anew")
    shown = ", ".join(f"{name} {installed[name]}" for name in ("torch", "hivemind", "libp2p") if name in installed)
    return Check("packages", "ok", f"{len(installed)} found ({shown})")


def judge_memory(available: int, needs: Sequence[int], *, where: str) -> Check:
    """needs: bytes that each stage takes there. A peer needs to hold one of them."""
    name = f"memory ({where})"
    fits = [stage for stage, need in enumerate(needs) if need <= available]
    have, least, most = size(available), size(min(needs)), size(max(needs))
    found = f"{have} free, a stage needs {least if least == most else f'{least} to {most}'}"
    if not fits:
        return Check(
            name, "fail", found, "close other programs, use a machine with more memory, or ask for more stages"
        )
    if len(fits) < len(needs):
        stages = ", ".join(map(str, fits))
        return Check(name, "warn", f"{found}; stages that fit: {stages}", f"join with --stage {fits[0]}")
    return Check(name, "ok", found)


def judge_disk(free: int, need: int, *, folder: Path, least_gb: float | None = None, is_back: bool = False) -> Check:
    """need: bytes of the run's stage. least_gb: with which `join --max-disk` takes one. is_back: a peer that has been here starts again: one that
    runs waits for room, so it may too."""
    need += START_BYTES if is_back else DISK_FLOOR_BYTES
    found = f"{size(free)} free at {folder}, needs {size(need)}"
    if least_gb is not None:
        found += f"; the least for --max-disk is {least_gb:g}"
    if free < need:
        return Check("disk", "fail", found, "free some space, or pass --home on another disk", may_pass=True)
    if free < max(2 * need, DISK_FLOOR_BYTES):
        return Check("disk", "warn", found, "free some space before it runs out")
    return Check("disk", "ok", found)


def judge_clock(leases_left_s: Sequence[float]) -> Check:
    """leases_left_s: by our clock, how long other peers' leases are still good. Each was written for 90 s by its peer's
    clock at most 35 s ago, so our clock is 55 s to 90 s minus that ahead of theirs. One that was killed, or whose clock is wrong, leaves a lease that
    is older: of two that say different things the one is gone by that says less against ours."""
    if not leases_left_s:
        return Check("clock", "skipped", "no peer is there to compare with")
    peers = "one peer" if len(leases_left_s) == 1 else f"{len(leases_left_s)} peers"
    newest_s = LEASE_TTL_S - LEASE_AGE_S / 2
    middle = statistics.median_low(leases_left_s), statistics.median_high(leases_left_s)
    left = min(middle, key=lambda each: abs(each - newest_s))
    least, most = LEASE_TTL_S - LEASE_AGE_S - left, LEASE_TTL_S - left
    if least <= 0 <= most:
        return Check("clock", "ok", f"within {LEASE_AGE_S:.0f} s of {peers}: leases show no more")
    off = min(abs(least), abs(most))
    side = "ahead" if least > 0 else "behind"
    remedy = "set it by network time: `timedatectl set-ntp true`"
    return Check("clock", "fail" if off > CLOCK_SKEW_S else "warn", f"at least {off:.0f} s {side} of the peers", remedy)


def judge_bootstraps(outcomes: Sequence[tuple[str, float | str]]) -> Check:
    """outcomes: (address, seconds to connect, or why not)."""
    reached = [(address, result) for address, result in outcomes if isinstance(result, float)]
    lost = "; ".join(f"{address} {result}" for address, result in outcomes if isinstance(result, str))
    remedy = "check your own network and firewall; if they are fine ask the run's owner for a new link"
    if not reached:
        return Check("bootstrap", "fail", lost, remedy)
    found = ", ".join(f"{address} in {1000 * result:.0f} ms" for address, result in reached)
    if lost:
        return Check("bootstrap", "warn", f"{found}; but {lost}", "one is enough; tell the run's owner about the other")
    return Check("bootstrap", "ok", found)


def judge_reachability(own: Sequence[str], run: Sequence[str], was_dialled: bool | None = None) -> Check:
    """own: our addresses as p2pd sees them. run: addresses in the link. was_dialled: by a peer of the run that was asked to;
    None where it could not tell, which leaves a likelihood."""
    kinds = [_kind(address) for address in own]
    direct = [address for address, kind in zip(own, kinds, strict=True) if kind == "public"]
    if was_dialled:
        return Check("direct or relayed", "ok", "direct: a peer of the run dialled this one")
    remedy = "open a TCP port in the router and pass --host-maddrs /ip4/0.0.0.0/tcp/PORT --announce-maddrs /ip4/PUBLIC/tcp/PORT"
    if was_dialled is False:
        return Check("direct or relayed", "warn", "peers of the run tried to dial this one and could not", remedy)
    if direct:
        return Check("direct or relayed", "ok", f"direct: {direct[0]}")
    run_kinds = {_kind(address) for address in run}
    if run_kinds <= {"loopback"}:
        return Check("direct or relayed", "ok", "direct: the run is on this machine")
    if run_kinds <= {"loopback", "private"} and "private" in kinds:
        return Check("direct or relayed", "ok", "direct within the local network, where the run is")
    if "relayed" in kinds:
        return Check(
            "direct or relayed", "warn", "relayed: others reach this peer through a relay, which is slower", remedy
        )
    return Check(
        "direct or relayed", "warn", "no public address: this peer dials, others probably cannot dial it", remedy
    )


def judge_admission(gate: Gate, me: PeerId | None, *, kept: Grant | None, grant: Grant | None, now: float) -> Check:
    """Of a run that is not open. me: None if this peer has no key yet. kept: its pass of an earlier time; grant: the link's."""
    name, remedy = "admission", "ask the run's owner for an invitation"
    if me is not None and gate.refusal(me, Right.JOIN, now) is None:
        return Check(name, "ok", "this peer is on the run's list")
    reasons = []
    for each in (kept, grant):
        if each is None:
            continue
        who = me or each.peer or gate.owner  # without a key yet, for whom it is cannot be judged
        if (reason := gate.why_not(each, who, Right.JOIN, now, check_signature=True)) is None:
            said = "this peer has come in before" if each is kept else "the link's invitation is good"
            return Check(name, "ok", f"{said}, until {when(each.expires_s)}")
        reasons.append(reason)
    if not reasons:
        whom = "listed and invited" if gate.members else "invited"
        me_there = f"this one is {me}" if me is not None else "this one has no key yet, `join` makes it"
        found = f"the run takes {whom} peers only, {me_there}, and the link has no invitation"
        return Check(name, "fail", found, remedy)
    return Check(name, "fail", told_to_itself(reasons[-1]), remedy)


def judge_stages(peers_of_stage: Sequence[int]) -> Check:
    shown = ", ".join(f"stage {stage}: {count}" for stage, count in enumerate(peers_of_stage))
    empty = [str(stage) for stage, count in enumerate(peers_of_stage) if count == 0]
    if not empty:
        return Check("peers", "ok", shown)
    if len(empty) == len(peers_of_stage):
        return Check("peers", "warn", f"nobody is training ({shown})", "join: somebody has to be the first")
    return Check("peers", "warn", shown, f"join: stage {', '.join(empty)} has nobody")


def judge_throughput(tokens_per_s: float, tokens_per_round: int, others: Sequence[float]) -> Check:
    """tokens_per_round: of one peer. others: what the peers of the run say of themselves."""
    found = f"{tokens_per_s:,.0f} tokens/s on this machine, {tokens_per_round / tokens_per_s:,.1f} s a round"
    known = [speed for speed in others if speed > 0]
    if not known:
        return Check("throughput", "ok", found)
    median = statistics.median(known)
    found += f"; the others' median is {median:,.0f}"
    if tokens_per_s < SLOW_SHARE * median:
        return Check(
            "throughput", "warn", found, "pass --threads or --device cuda; a slow peer still counts, by what it does"
        )
    return Check("throughput", "ok", found)


def judge_costs(expected: Expected) -> Check:
    """What taking part comes to, and whether it will ever end."""
    if expected.left_s is not None and expected.left_s > LONG_RUN_S:
        remedy = "a faster device, more peers or a smaller model: `dilocox-peer plan` tells what which would do"
        return Check("costs", "warn", expected.words(), remedy)
    return Check("costs", "ok", expected.words())


def affordable(blocks: int, batch: int, *, context: int, block: int, head: int, limit: float) -> tuple[int, int]:
    """(blocks, sequences) of which one training step takes at most limit multiplications and additions, if one of each does;
    as many as there are where they do. block, head: multiplications a token of the forward pass."""

    def operations() -> float:
        return 6.0 * batch * context * (blocks * block + head)

    while operations() > limit and batch > 1:
        batch //= 2
    while operations() > limit and blocks > 1:
        blocks //= 2
    return blocks, batch


# -- looking: this machine, quickly -----------------------------------------------------------------------------------


def quick_checks(home: Path, identity_path: Path, host_maddrs: Sequence[str], run: str = "*") -> list[Check]:
    """The checks of this machine that take no time and load nothing. run: as of look_at_disk."""
    return [
        judge_python(tuple(sys.version_info[:3]), sys.platform),
        look_at_packages(),
        look_at_open_files(),
        look_at_key(identity_path),
        look_at_ports(host_maddrs),
        look_at_disk(home, run=run),
    ]


def look_at_packages() -> Check:
    installed: dict[str, str | None] = {}
    for name in REQUIREMENTS:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = None
    return judge_packages(installed, own_requirements())


def look_at_open_files() -> Check:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < OPEN_FILES:
        return Check("open files", "warn", f"at most {soft}", f"run `ulimit -n {min(hard, 65536)}` before joining")
    return Check("open files", "ok", f"at most {soft}")


def look_at_key(path: Path) -> Check:
    """The key file: there, private, a key, and free. Makes none, and takes the lock for a moment only."""
    from dilocox_peer.peer.identity import decode_key

    if not os.path.lexists(path):
        if is_read_only(path.parent):
            return Check("key file", "fail", f"{path} cannot be made on a disk that is read-only", MOUNT)
        if trouble := why_not_made(path.parent):
            return Check(
                "key file", "fail", f"{path} cannot be made: {trouble}", "pass another --identity-path or --home"
            )
        return Check("key file", "ok", f"{path} will be made on the first join")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return Check(
            "key file", "fail", f"{path}: {_reason(error)}", "pass another --identity-path, or mend its rights"
        )
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return Check("key file", "fail", f"{path} is no regular file", "pass another --identity-path")
        peer = decode_key(os.read(fd, 4096)).peer_id
        if status.st_mode & 0o077:
            return Check("key file", "fail", f"{path} can be read by others", f"run `chmod 600 {path}`")
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return Check("key file", "warn", f"{path} is in use: a peer of this name runs", "join with another --name")
    except (ValueError, OSError) as error:
        return Check("key file", "fail", f"{path} {error}", "pass another --identity-path; a new key is made there")
    finally:
        os.close(fd)
    return Check("key file", "ok", f"{path}, private and free: {peer}")


def look_at_ports(host_maddrs: Sequence[str]) -> Check:
    from dilocox_peer.network.p2pd import check_listenable

    texts = parse_multiaddrs(host_maddrs, "listen")
    try:
        for text in texts:
            check_listenable(parse_multiaddr(text, "listen"))
    except ConfigError as error:
        return Check("ports", "fail", str(error))
    return Check("ports", "ok", f"can listen on {', '.join(texts)}")


def look_at_disk(home: Path, need: int = 0, least_gb: float | None = None, run: str = "*") -> Check:
    """Room at home, which need not be there yet but has to be makeable. run: the name of its folder there, "*": any."""
    if is_read_only(home):
        found = f"{home} is on a disk that is read-only"  # now, where it was written to before
        return Check("disk", "fail", found, MOUNT, may_pass=home.is_dir())
    if trouble := why_not_made(home):
        return Check("disk", "fail", f"{home} cannot be made: {trouble}", "pass another --home")
    is_back = not need and any(home.glob(f"runs/{run}/stage*/rounds.log"))
    return judge_disk(free_bytes(home), need, folder=home, least_gb=least_gb, is_back=is_back)


def free_bytes(folder: Path) -> int:
    """Free bytes of the disk that folder is or would be on."""
    return shutil.disk_usage(_nearest(folder)).free


def is_read_only(folder: Path) -> bool:
    """Whether the disk is that folder is or would be on: after an error the system mounts one so."""
    return bool(os.statvfs(_nearest(folder)).f_flag & os.ST_RDONLY)


def why_not_made(folder: Path) -> str:
    """Why nothing could be written there, empty if it could: as far as can be told without trying."""
    there = _nearest(folder)
    if not there.is_dir():
        return f"{there} is no directory"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} may not be written to"
    if os.statvfs(there).f_blocks == 0:  # /proc and the like, where root seems to have every right
        return f"{there} is no place for files"
    return ""


def _nearest(folder: Path) -> Path:
    """folder, or of those that it would be in the nearest that is there."""
    return next(each for each in (folder, *folder.absolute().parents) if os.path.exists(each))


def own_requirements() -> dict[str, str]:
    """name -> specifier, from the installed metadata; empty in a checkout that was not installed."""
    try:
        lines = importlib.metadata.requires("dilocox-peer") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    plain = [re.match(r"([A-Za-z0-9._-]+)\s*([<>=!~0-9.,\s]*)", line) for line in lines if "extra ==" not in line]
    return {match[1]: match[2].strip() for match in plain if match is not None}


def _satisfies(version: str, specifier: str) -> bool:
    """Whether version is in the range, as far as >=, >, <, <=, == on numbers go; anything else counts as yes."""
    have = _numbers(version)
    for part in specifier.split(","):
        match = re.fullmatch(r"\s*(>=|<=|==|<|>)\s*([0-9.]+)\s*", part)
        if match is None:
            continue
        want = _numbers(match[2])
        width = max(len(have), len(want))
        left, right = have + (0,) * (width - len(have)), want + (0,) * (width - len(want))
        holds = {">=": left >= right, "<=": left <= right, "==": left == right, "<": left < right, ">": left > right}
        if not holds[match[1]]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """The release part: 2.13.0+cpu is (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in match[0].split(".")) if match else ()


def _kind(address: str) -> str:
    """public, private, loopback, relayed, or name (of a host)."""
    if "/p2p-circuit" in address:
        return "relayed"
    host = address.split("/")[2] if address.count("/") >= 2 else ""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return "name"
    if ip.is_loopback:
        return "loopback"
    return "public" if ip.is_global else "private"


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
