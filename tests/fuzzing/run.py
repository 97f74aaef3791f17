"""Cases for every decoder: `python -m tests.fuzzing.run [--cases 1000000] [--seed 1] [--only NAME,...] [--guided SECONDS] [--keep]`

Mutates what honest peers send and what corpora/ has. With --guided, and atheris installed (`pip install atheris`), a search that
is led by what code each case reaches goes before, for so many seconds a decoder; --keep adds what it found to corpora/. Ends
with 1 after an exception that is no refusal, a case of more than 50 ms of this thread's processor time, three times of three, or
growth of more than 32 MB after the first tenth.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import psutil

from tests.fuzzing.decoders import CORPORA, DECODERS, Decoder
from tests.fuzzing.mutator import Mutator

SLOW_S = 0.05
MOST_GROWTH_BYTES = 32 << 20
MAX_KEPT, MAX_KEPT_BYTES = 64, 1024  # of one decoder's corpus: lines, and bytes of each


@dataclass
class Findings:
    """Of one decoder."""

    cases: int = 0
    refused: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    grown_bytes: int = 0
    crashes: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)

    @property
    def is_well(self) -> bool:
        return not self.crashes and not self.slow and self.grown_bytes <= MOST_GROWTH_BYTES


def took_s(decoder: Decoder, raw: bytes) -> float:
    """Of this thread's processor time."""
    began = time.thread_time()
    decoder.refuses(raw)
    return time.thread_time() - began


def fuzz(decoder: Decoder, cases: int, seed: int) -> Findings:
    """So many mutated cases."""
    found, mutator = Findings(), Mutator(decoder.corpus(), seed)
    process = psutil.Process()
    warm_bytes = process.memory_info().rss
    began = time.monotonic()
    for number in range(cases):
        if number == cases // 10:
            warm_bytes = process.memory_info().rss
        raw = mutator.next()
        started = time.thread_time()
        try:
            found.refused += decoder.refuses(raw)
        except Exception as error:
            found.crashes.append(f"{type(error).__name__}: {error}; {raw.hex()}")
            if len(found.crashes) >= 10:
                break
            continue
        seconds = time.thread_time() - started
        if seconds > SLOW_S:  # a collection of garbage may have come in between
            seconds = min(seconds, took_s(decoder, raw), took_s(decoder, raw))
            if seconds > SLOW_S:
                found.slow.append(f"{1000 * seconds:.0f} ms; {raw.hex()}")
        found.slowest_s = max(found.slowest_s, seconds)
        found.cases += 1
    found.seconds = time.monotonic() - began
    found.grown_bytes = max(0, process.memory_info().rss - warm_bytes)
    return found


# -- led by what code is reached --------------------------------------------------------------------------------------


def guided(decoder: Decoder, seconds: float, *, keep: bool) -> str:
    """A search by atheris in a process of its own, which libFuzzer ends; what came of it, in a line."""
    with tempfile.TemporaryDirectory(prefix="dilocox-corpus-") as name:
        folder = Path(name)
        for number, raw in enumerate(decoder.corpus()):
            (folder / f"honest{number}").write_bytes(raw)
        honest = set(folder.iterdir())
        done = subprocess.run(
            [
                sys.executable, "-m", "tests.fuzzing.run", "--search", decoder.name, str(folder),
                f"-max_total_time={seconds:.0f}", "-max_len=4096", "-timeout=5", f"-artifact_prefix={folder}/crash-", "-verbosity=0",
            ],
            capture_output=True, text=True, timeout=seconds + 120, check=False,
        )  # fmt: skip
        found = sorted(set(folder.glob("[0-9a-f]*")) - honest)
        crashes = [path.read_bytes().hex() for path in folder.glob("crash-*")]
        if done.returncode or crashes:
            return f"CRASH {crashes[:1]} {done.stderr[-2000:]}"
        if keep:
            _keep(decoder, [path.read_bytes() for path in found])
        return f"{len(found)} cases that reach new code"


def _keep(decoder: Decoder, found: Sequence[bytes]) -> None:
    honest = set(decoder.honest())
    kept = [raw for raw in dict.fromkeys([*decoder.corpus(), *sorted(found, key=len)]) if raw not in honest]
    kept = [raw for raw in kept if raw and len(raw) <= MAX_KEPT_BYTES][:MAX_KEPT]
    CORPORA.mkdir(exist_ok=True)
    if kept:
        decoder.path.write_text("\n".join(raw.hex() for raw in kept))


def search(name: str, arguments: Sequence[str]) -> None:
    """The process of `guided`."""
    atheris = import_module("atheris")

    with atheris.instrument_imports(include=["dilocox_peer"]):
        for module in [each for each in sys.modules if each.startswith(("dilocox_peer", "tests.fuzzing.decoders"))]:
            del sys.modules[module]
        from tests.fuzzing.decoders import DECODERS as instrumented

    [decoder] = [each for each in instrumented if each.name == name]

    def one(raw: bytes) -> None:
        decoder.refuses(raw)

    atheris.Setup([sys.argv[0], *arguments], one)
    atheris.Fuzz()


def has_atheris() -> bool:
    return find_spec("atheris") is not None


def main() -> None:
    if sys.argv[1:2] == ["--search"]:
        search(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=lambda text: set(text.split(",")), default={each.name for each in DECODERS})
    parser.add_argument("--guided", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--keep", action="store_true")
    arguments = parser.parse_args()
    if arguments.guided and not has_atheris():
        print("# no atheris here: mutations alone")
    is_well = True
    for decoder in DECODERS:
        if decoder.name not in arguments.only:
            continue
        if arguments.guided and has_atheris():
            said = guided(decoder, arguments.guided, keep=arguments.keep)
            is_well &= not said.startswith("CRASH")
            print(f"{decoder.name:20} {said}", flush=True)
        found = fuzz(decoder, arguments.cases, arguments.seed)
        is_well &= found.is_well
        print(
            f"{decoder.name:20} {found.cases:8d} cases  refused {found.refused / max(found.cases, 1):5.1%}  "
            f"{1e6 * found.seconds / max(found.cases, 1):7.1f} us each  slowest {1000 * found.slowest_s:5.1f} ms  "
            f"grown {found.grown_bytes / 2**20:5.1f} MB  {'well' if found.is_well else 'NOT WELL'}",
            flush=True,
        )
        for line in (*found.crashes, *found.slow):
            print(f"    {line[:2000]}", flush=True)
    print("well" if is_well else "NOT WELL")
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()
