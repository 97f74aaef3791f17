"""What a run's config.json has the library build, built in a process of its own first, with bounds on its memory and its time.

A manifest may be a stranger's. Constructors of a hundred families make lists as long as numbers in their config say, and multiply lists by
numbers, before there is anything of which a size could be reckoned. What came through here is built again where it is needed: the same input,
library and machine take no more there.
"""

import hashlib
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from threading import Thread
from typing import Any

import psutil

from dilocox_peer.errors import ConfigError, DilocoxError
from dilocox_peer.files import replace_file
from dilocox_peer.manifest import Manifest, PublishedSection

PASSED = "dry-run"
"""Name of the file that remembers what came through."""
_KNOWN = '{"model_type": "llama"}'
"""Of a family that does no harm: it has torch and the library load what they need for any."""
_LOOK_S = 0.2
_MEMORY, _TIME = "memory", "time"


@dataclass(frozen=True, slots=True)
class DryRunBounds:
    """data_bytes: that may be made beyond what the loaded library has; families take 20 MB at most with their defaults, a Llama of 1024 layers
    60. cpu_s: of a processor, beyond what loading the library took, which no manifest has a say in; a second is needed. wall_s: of all, whatever else
    the machine does. most_bytes: resident, the library with it, where the system heeds no limit of data (macOS)."""

    data_bytes: int = 1 << 29
    cpu_s: int = 60
    wall_s: float = 300.0
    most_bytes: int = 1 << 31


def dry_run(manifest: Manifest, remembered: Path | None = None, bounds: DryRunBounds | None = None) -> None:
    """Blocking, some seconds of a processor, once a process and run. remembered: a file of what came through before, which is not tried again
    unless the library is another. Raises ConfigError: what is built goes beyond bounds, or cannot be built; DilocoxError where that cannot be told
    for now."""
    bounds = bounds or DryRunBounds()
    key = _key(manifest, bounds)
    if remembered is not None and _read(remembered) == key:
        return
    if refusal := _refusal(manifest.to_bytes(), bounds):
        raise ConfigError(refusal)
    if remembered is not None:
        with suppress(OSError):  # then it is tried again
            remembered.parent.mkdir(parents=True, exist_ok=True)
            replace_file(remembered, [key.encode()], durable=False)


def _key(manifest: Manifest, bounds: DryRunBounds) -> str:
    """Of what is built, by what, within which bounds."""
    found = [platform.python_version()]
    for library in ("torch", "transformers"):
        with suppress(metadata.PackageNotFoundError):
            found.append(metadata.version(library))
    return hashlib.sha256(b"\n".join([manifest.to_bytes(), repr((found, bounds)).encode()])).hexdigest()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")[:64]
    except (OSError, ValueError):
        return ""


@lru_cache(8)
def _refusal(raw: bytes, bounds: DryRunBounds) -> str:
    """What is wrong with this manifest's model; empty: nothing. Raises DilocoxError where it cannot be tried for now: no
    mistake of anybody's, so a service starts again."""
    asked = json.dumps([raw.decode(), bounds.data_bytes, bounds.cpu_s]).encode()
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the one who asks
        )  # fmt: skip
    except OSError as error:
        raise DilocoxError(
            f"no process can be started to try the run's model in ({error.strerror}): try again"
        ) from None
    with process:
        try:
            answer, beyond = _waited_for(process, asked, bounds)
        finally:
            process.kill()
    try:
        said = json.loads(answer)
    except ValueError:  # it ended without a word
        said = {"beyond": _TIME if process.returncode == -getattr(signal, "SIGXCPU", 0) else beyond}
    if "refused" in said:
        return str(said["refused"])
    section = Manifest.model_validate_json(raw).model
    assert isinstance(section, PublishedSection), "others have layers of our own"
    of = f"what its config.json (model type {str(json.loads(section.config).get('model_type'))[:60]!r}) has the library build"
    told = {
        _MEMORY: f"takes more than {bounds.data_bytes / 1e6:.0f} MB of memory",
        _TIME: f"takes more than {bounds.cpu_s} s of a processor",
    }.get(said["beyond"])
    if told is None:  # it may be this machine's doing
        how = said["beyond"] or f"ended the process in which it was tried (exit code {process.returncode})"
        raise DilocoxError(f"the run's model cannot be tried: {of} {how}: try again when the machine has less to do")
    return f"the run's model is refused: {of} {told}, with nothing in it: its owner has to take the file as it was published, or another model"


def _waited_for(process: "subprocess.Popen[bytes]", asked: bytes, bounds: DryRunBounds) -> tuple[bytes, str]:
    """(what the process said, beyond which bound it was cut off), one of them empty."""
    began, given = time.monotonic(), asked
    while True:
        try:
            return process.communicate(given, timeout=_LOOK_S)[0], ""
        except subprocess.TimeoutExpired:
            given = b""  # it keeps what it has begun to write
        with suppress(psutil.Error, OSError):
            if psutil.Process(process.pid).memory_info().rss > bounds.most_bytes:
                return b"", _MEMORY
        if time.monotonic() - began > bounds.wall_s:
            return b"", f"was not there within {bounds.wall_s:.0f} s"


# -- in the process ----------------------------------------------------------------------------------------------------


def _main() -> None:
    Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()
    raw, data_bytes, cpu_s = json.loads(sys.stdin.buffer.read())
    answer = os.dup(1)
    os.dup2(2, 1)  # whatever the library prints is no answer
    os.write(answer, json.dumps(_tried(Manifest.model_validate_json(raw), data_bytes, cpu_s)).encode())


def _end_with(parent: int) -> None:
    """A parent that was killed cannot end it."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)


def _tried(manifest: Manifest, data_bytes: int, cpu_s: int) -> dict[str, str]:
    """refused: why it cannot be built, empty if it can; or beyond: the bound that it went beyond."""
    try:
        import torch

        from dilocox_peer.model.families import family_of
        from dilocox_peer.model.memory import StageSize

        torch.set_num_threads(1)  # stacks of others would count as data
        with suppress(ConfigError):  # what is wrong is told of the run's own
            family_of(_KNOWN)
        _bound(data_bytes, cpu_s)
        for stage in range(manifest.stages.count):
            StageSize.of(manifest, stage)
    except (ConfigError, MemoryError) as error:
        return {"beyond": _MEMORY} if _lacks_memory(error) else {"refused": str(error)}
    return {"refused": ""}


def _lacks_memory(error: BaseException | None) -> bool:
    """Whether it, or what it was made of, is that of an allocator: Python's or torch's."""
    while error is not None:
        if isinstance(error, MemoryError) or re.search("allocate memory|not enough memory|bad_alloc", str(error)):
            return True
        error = error.__context__
    return False


def _bound(data_bytes: int, cpu_s: int) -> None:
    """Where the system can: beyond that there is no memory, and the process ends."""
    try:
        import resource
    except ImportError:
        return
    # The system counts what loading took with it: a minute on a slow machine without compiled files.
    until_s = cpu_s + math.ceil(time.process_time())
    wanted: list[tuple[Any, tuple[int, int]]] = [
        (resource.RLIMIT_CORE, (0, 0)),
        (resource.RLIMIT_CPU, (until_s, until_s + 5)),
    ]
    with suppress(OSError, ValueError, StopIteration):
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        taken = 1024 * int(next(line for line in status.splitlines() if line.startswith("VmData:")).split()[1])
        wanted.append((resource.RLIMIT_DATA, (taken + data_bytes,) * 2))
    for limit, values in wanted:
        with suppress(ValueError, OSError):  # there is a lower one
            resource.setrlimit(limit, values)


if __name__ == "__main__":
    _main()
