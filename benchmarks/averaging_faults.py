"""One of four peers is killed with -9 in mid-averaging: what the survivors hold, ours against hivemind's averager.

    python benchmarks/averaging_faults.py [--elements 4000000] [--repeats 3] [--timeout 60]

Four real processes on loopback, each with a known vector; the group is formed, the averaging starts, and the victim
with all its helpers (p2pd, hivemind's forks) is killed when its p2pd has read a given share of the bytes that a whole
averaging brings it: the same black-box trigger for both systems, an event and not a guess of time. Ours also at
"accepted": the victim has just signed for the round, durably, and its proposal is about to go out. Every second victim
of ours leads the round.

    ours              this repository's peer below the conductor, over real p2pd, Timing() as it comes, codec none
    hivemind          DecentralizedAverager, next_chunk_timeout 3, allreduce_timeout 40, matchmaking 3, request_timeout 1
    hivemind-default  DecentralizedAverager with its own defaults (no timeouts in the all-reduce)

wrong: share of a survivor's elements that differ by more than 1e-4 from the mean of all four, or from the mean of the
three survivors, whichever is nearer as a whole: an answer has to be one of the two everywhere, not a mixture. holds:
which it is, "as certified" for the exact mean of other contributors that the certificate names. distinct: different
results among the survivors, bit by bit. s: from the kill until the last survivor has its result.

Expected beforehand. Ours: 0 %, 1 distinct; the leader waits for a fetch from the dead peer only until its stream breaks
(well under 1 s), 4 x 3 blobs of 16 MB at 130-190 MB/s of loopback are 1-2 s, so about 2 s, and a ballot more (10 s,
Timing's start value, as no time is learned yet) when the dead peer led. hivemind: the dead peer was to reduce a quarter
of the vector, in which the survivors keep their own values, and the parts in flight have another set of senders: 25-36
% wrong, all results differ, reported as success; or it never returns.
"""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil
from averaging_worker import HIVEMIND_OPTIONS, NUM_PEERS, vector_of, warnings_of
from swarm import header

SYSTEMS = ("ours", *HIVEMIND_OPTIONS)
SHARES = (0.05, 0.35, 0.65)  # of the victim's bytes, one after another
READ_BYTES = {"ours": 6, "hivemind": 3}  # by the victim's p2pd, from network and worker, per byte of the vector
TOLERANCE = 1e-4
MARK = "DILOCOX_AVERAGING_FAULTS"  # in the environment of every process started here
START_S = 90.0
FORM_S = 60.0
POLL_S = 0.001  # the operating system tells nobody about byte counters
TRIES = 4  # hivemind sometimes forms two groups, and a kill may come too late


class Missed(Exception):
    """The trial did not become the one wanted: no group of four, or the averaging was over before the kill."""


@dataclass(frozen=True)
class Kill:
    """Which averaging, and when in it. moment: share of the victim's bytes, or what the victim has said."""

    system: str
    repeat: int
    moment: float | str
    leads: bool

    @property
    def label(self) -> str:
        when = self.moment if isinstance(self.moment, str) else f"{self.moment:.0%} of bytes"
        return when + (", leader" if self.leads else "")


@dataclass(frozen=True)
class Trial:
    """One kill. wrong: share for each survivor that has a result; seconds: None when one of them never got any."""

    system: str
    repeat: int
    moment: str
    wrong: tuple[float, ...]
    num_hung: int
    distinct: int
    seconds: float | None
    answers: tuple[str, ...]
    reported: str


class Workers:
    """Four averaging_worker.py of one system; everything they started is gone after the block."""

    def __init__(self, system: str, num_elements: int, logs: Path | None) -> None:
        """logs: a folder that the workers' logs are moved to at the end."""
        self.system = system
        self._logs = logs
        self.num_elements = num_elements
        self.folder = Path(tempfile.mkdtemp(prefix="faults-"))
        self.said: list[dict[str, dict[str, Any]]] = [{} for _ in range(NUM_PEERS)]
        self.processes: list[asyncio.subprocess.Process] = []
        self._readers: list[asyncio.Task[None]] = []
        self._mark = uuid.uuid4().hex
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        worker = str(Path(__file__).with_name("averaging_worker.py"))
        for index in range(NUM_PEERS):
            with self.log(index).open("wb") as log:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-W", "ignore", worker, self.system, "--index", str(index),
                    "--elements", str(self.num_elements), "--folder", str(self.folder),
                    stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log,
                    start_new_session=True,
                    env={**os.environ, MARK: self._mark, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
                )  # fmt: skip
            self.processes.append(process)
            self._readers.append(asyncio.create_task(self._read(index, process)))
        return self

    async def __aexit__(self, *_exc: object) -> None:
        left = marked(self._mark)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for child in self.processes:
            await child.wait()
        _gone, alive = psutil.wait_procs(left, timeout=10)
        await asyncio.gather(*self._readers)
        if self._logs is not None:
            self._logs.mkdir(parents=True, exist_ok=True)
            for index in range(NUM_PEERS):
                shutil.copy(self.log(index), self._logs)
        shutil.rmtree(self.folder, ignore_errors=True)
        assert not alive, f"could not be killed: {alive}"
        assert not marked(self._mark), "a process was started while the others were killed"

    def log(self, index: int) -> Path:
        return self.folder / f"worker{index}.log"

    async def _read(self, index: int, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            with suppress(ValueError):  # hivemind's helpers may print
                record = json.loads(line)
                self.said[index][record["event"]] = record
                self._changed.set()
        self.said[index]["ended"] = {}
        self._changed.set()

    def tell(self, index: int, command: str, **fields: Any) -> None:
        stdin = self.processes[index].stdin
        assert stdin is not None
        stdin.write(json.dumps({"command": command, **fields}).encode() + b"\n")

    def tell_all(self, command: str, **fields: Any) -> None:
        for index in range(NUM_PEERS):
            self.tell(index, command, **fields)

    async def until_all_said(
        self, event: str, timeout_s: float, whom: Sequence[int] = range(NUM_PEERS), *, or_time_out: bool = False
    ) -> None:
        """Raises RuntimeError with the worker's last words when one ends before, TimeoutError."""

        def check() -> bool:
            for index in whom:
                if "ended" in self.said[index] and event not in self.said[index]:
                    raise RuntimeError(f"worker {index} ended:\n{self.log(index).read_text()[-3000:]}")
            return all(event in self.said[index] for index in whom)

        try:
            async with asyncio.timeout(timeout_s):
                while not check():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            if not or_time_out:
                silent = [index for index in whom if event not in self.said[index]]
                raise TimeoutError(f"{self.system}: no {event!r} of {silent} within {timeout_s:g} s") from None

    def tree(self, index: int) -> list[psutil.Process]:
        """Worker and helpers; p2pd first: nothing of a dying worker gets out any more."""
        worker = psutil.Process(self.processes[index].pid)
        helpers = worker.children(recursive=True)
        return sorted([*helpers, worker], key=lambda process: process.name() != "p2pd")

    async def form(self) -> None:
        """Every worker in one group of four, nothing sent yet."""
        if self.system == "ours":
            await self.until_all_said("ready", START_S)
            peers = [(said["ready"]["peer"], said["ready"]["addresses"]) for said in self.said]
            self.tell_all("meet", peers=peers)
            await self.until_all_said("formed", FORM_S)
            return
        await self.until_all_said("imported", START_S)
        self.tell(0, "meet", initial_peers=[])
        await self.until_all_said("ready", START_S, [0])
        for index in range(1, NUM_PEERS):
            self.tell(index, "meet", initial_peers=self.said[0]["ready"]["addresses"])
        await self.until_all_said("ready", START_S)
        self.tell_all("look")
        await self.until_all_said("formed", FORM_S)
        # A full group is formed at once; a smaller one only after min_matchmaking_time, which is 3 s or more.
        slowest = max(said["formed"]["matchmaking_s"] for said in self.said)
        if slowest > 2.9:
            raise Missed(f"matchmaking took {slowest:.1f} s: not one group of {NUM_PEERS}")

    def pick_victim(self, leads: bool) -> int:
        """The last that leads the round, or does not."""
        leading = [said["ready"]["peer"] == said["formed"].get("leader") for said in self.said]
        return max(index for index in range(NUM_PEERS) if leading[index] == leads)


def marked(mark: str) -> list[psutil.Process]:
    """Every process that was started with this mark, orphans too."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


async def run_trial(kill: Kill, *, num_elements: int, timeout_s: float, logs: Path | None) -> Trial:
    """One group, one kill. Raises Missed."""
    if logs is not None:
        logs /= f"{kill.system}-{kill.repeat}"
    async with Workers(kill.system, num_elements, logs) as workers:
        await workers.form()
        victim = workers.pick_victim(kill.leads)
        survivors = [index for index in range(NUM_PEERS) if index != victim]
        tree = workers.tree(victim)
        is_due = _trigger(workers, victim, tree[0], kill.moment)
        workers.tell_all("go")
        deadline = time.monotonic() + timeout_s
        while not is_due():
            if "result" in workers.said[victim] or time.monotonic() > deadline:
                raise Missed("the averaging was over before the kill")
            await asyncio.sleep(POLL_S)
        killed_at = time.monotonic()
        for process in tree:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        await workers.until_all_said("result", timeout_s, survivors, or_time_out=True)
        if "result" in workers.said[victim]:
            raise Missed("the victim had its result before the kill")
        return _judge(workers, kill, survivors, killed_at)


def _trigger(workers: Workers, victim: int, p2pd: psutil.Process, moment: float | str) -> Callable[[], bool]:
    if isinstance(moment, str):
        return lambda: moment in workers.said[victim]
    assert p2pd.name() == "p2pd", p2pd
    goal = moment * READ_BYTES[workers.system.split("-")[0]] * 4 * workers.num_elements
    goal += p2pd.io_counters().read_chars
    return lambda: p2pd.io_counters().read_chars >= goal


def _judge(workers: Workers, kill: Kill, survivors: Sequence[int], killed_at: float) -> Trial:
    vectors = [vector_of(index, workers.num_elements).astype(np.float64) for index in range(NUM_PEERS)]
    acceptable = {"all 4": np.mean(vectors, axis=0), "3 survivors": np.mean([vectors[i] for i in survivors], axis=0)}
    who = [said["ready"]["peer"] for said in workers.said]
    wrong, answers, digests, reports, admitted = [], [], set(), [], []
    have = [index for index in survivors if "result" in workers.said[index]]
    for index in have:
        raw = (workers.folder / f"result{index}").read_bytes()
        digests.add(sha256(raw).digest())
        result = np.frombuffer(raw, dtype=np.float32)
        shares = {name: _share_off(result, answer) for name, answer in acceptable.items()}
        nearest = min(shares, key=lambda name: shares[name])
        wrong.append(shares[nearest])
        named = [who.index(peer) for peer in workers.said[index]["result"].get("contributors", ())]
        if shares[nearest] == 0:
            answers.append(nearest)
        elif named and _share_off(result, np.mean([vectors[i] for i in named], axis=0)) == 0:
            answers.append("as certified")
        else:
            answers.append("neither")
        reports.append(workers.said[index]["result"]["reported"])
        admitted += warnings_of(workers.log(index).read_text(errors="replace"))
    done = [workers.said[index]["result"]["done_at"] for index in have]
    reported = "; ".join(f"{reports.count(each)}x {each}" for each in sorted(set(reports)))
    if admitted:
        reported += f" (logged: {min(admitted, key=float)} to {max(admitted, key=float)} % received)"
    return Trial(
        system=workers.system,
        repeat=kill.repeat,
        moment=kill.label,
        wrong=tuple(wrong),
        num_hung=len(survivors) - len(have),
        distinct=len(digests),
        seconds=max(done) - killed_at if len(have) == len(survivors) else None,
        answers=tuple(answers),
        reported=reported or "nothing",
    )


def _share_off(result: np.ndarray, answer: np.ndarray) -> float:
    if result.shape != answer.shape:
        return 1.0
    return float(np.count_nonzero(~(np.abs(result - answer) <= TOLERANCE)) / len(answer))  # NaN counts as off


def row(trial: Trial) -> str:
    wrong = " ".join(f"{100 * share:.1f}" for share in trial.wrong) or "-"
    seconds = f"{trial.seconds:.2f}" if trial.seconds is not None else f"{trial.num_hung} hung"
    nearest = "/".join(sorted(set(trial.answers))) or "-"
    return (
        f"{trial.system:<17}{trial.repeat:>3}  {trial.moment:<23}{wrong:<17}{trial.distinct:>8}  {seconds:>7}  "
        f"{nearest:<12} {trial.reported}"
    )


def summary(system: str, trials: Sequence[Trial]) -> str:
    wrong = [100 * share for trial in trials for share in trial.wrong]
    seconds = [trial.seconds for trial in trials if trial.seconds is not None]
    hung = sum(trial.num_hung > 0 for trial in trials)
    distinct = [trial.distinct for trial in trials if trial.wrong]
    return (
        f"{system:<17} wrong % {_spread(wrong, '.1f')}; distinct {_spread(distinct, 'g')}; s {_spread(seconds, '.2f')}; "
        f"{hung} of {len(trials)} hung"
    )


def _spread(values: Sequence[float], form: str) -> str:
    if not values:
        return "-"
    return " / ".join(format(value, form) for value in (min(values), statistics.median(values), max(values)))


def plan(systems: Sequence[str], repeats: int, default_repeats: int) -> list[Kill]:
    """Every kill, in order. Only our rounds have a leader; it is the victim every second time."""
    kills: list[Kill] = []
    for system in systems:
        count = default_repeats if system == "hivemind-default" else repeats
        kills += [
            Kill(system, repeat, SHARES[repeat % len(SHARES)], leads=system == "ours" and repeat % 2 == 1)
            for repeat in range(count)
        ]
        if system == "ours":
            kills.append(Kill(system, repeats, "accepted", leads=True))
    return kills


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=4_000_000, help="float32 elements a peer")
    parser.add_argument("--repeats", type=int, default=3, help="kills a system; ours has one more, at 'accepted'")
    parser.add_argument(
        "--default-repeats", type=int, default=2, help="of hivemind-default, whose hangs cost --timeout"
    )
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds after which a survivor counts as hung")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--json", type=Path, help="the trials go here too")
    parser.add_argument("--logs", type=Path, help="the workers' logs are kept in this folder")
    arguments = parser.parse_args()
    began = time.monotonic()
    print(header())
    print(
        f"# {NUM_PEERS} peers, {arguments.elements} float32 elements each, one killed -9; hung after {arguments.timeout:g} s"
    )
    columns = (
        f"{'system':<17}{'rep':>3}  {'killed at':<23}{'wrong %':<17}{'distinct':>8}  {'s':>7}  {'holds':<12} reported"
    )
    print(columns, flush=True)
    trials: list[Trial] = []
    for kill in plan(arguments.systems, arguments.repeats, arguments.default_repeats):
        for attempt in range(TRIES):
            try:
                trial = await run_trial(
                    kill, num_elements=arguments.elements, timeout_s=arguments.timeout, logs=arguments.logs
                )
            except Missed as reason:
                if attempt + 1 == TRIES:
                    raise
                print(f"# {kill.system} {kill.repeat}: {reason}; once more", flush=True)
                continue
            trials.append(trial)
            print(row(trial), flush=True)
            break
    print("min / median / max over survivors (wrong) and kills (distinct, s)")
    for system in arguments.systems:
        print(summary(system, [trial for trial in trials if trial.system == system]))
    print(f"# took {time.monotonic() - began:.0f} s")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(trial) for trial in trials], indent=1))


if __name__ == "__main__":
    asyncio.run(main())
