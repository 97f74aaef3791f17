"""The most memory that a peer has held, by its processes: what `plan`, `doctor` and `join` tell of it is compared with that."""

import re
from contextlib import suppress
from pathlib import Path

import psutil

OF_NO_FILE = "of no file"


def peaks_of(pid: int) -> dict[str, int]:
    """The most that the process and each of its helpers have been resident with until now (VmHWM), in bytes, by names: `peer` itself, and
    its p2pd, linkd and others; of several with one name the sum. Of the peer's as well, as OF_NO_FILE, what it holds now that is of no
    file, which the system could not have back. Processes that have ended are not in it.

    The sum over names is no less than what they held at once: they need not have had their most at the same moment, and pages of
    libraries that they share are counted in each, as for a peer that is alone on its machine. Empty where the process has ended.
    """
    found: dict[str, int] = {}
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.Error, OSError):
                status = Path(f"/proc/{each.pid}/status").read_text()
                kilobytes = re.search(r"VmHWM:\s+(\d+) kB", status)
                own = re.search(r"RssAnon:\s+(\d+) kB", status)
                if own is not None and each.pid == pid:
                    found[OF_NO_FILE] = int(own[1]) * 1024
                if kilobytes is not None:
                    name = "peer" if each.pid == pid else each.name()
                    found[name] = found.get(name, 0) + int(kilobytes[1]) * 1024
    return found


def held(peaks: dict[str, int]) -> int:
    """All of a peer's processes, in bytes."""
    return sum(size for name, size in peaks.items() if name != OF_NO_FILE)


def processor_of(pid: int) -> dict[str, float]:
    """Seconds of processor that the process and its helpers have taken until now, by the names of `peaks_of`; of ended helpers none."""
    found: dict[str, float] = {}
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                name = "peer" if each.pid == pid else each.name()
                times = each.cpu_times()
                found[name] = found.get(name, 0.0) + times.user + times.system
    return found
