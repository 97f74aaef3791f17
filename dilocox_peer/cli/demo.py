"""`demo`: a whole swarm on this machine. Real bootstrap, real peers, a real evaluator, each a process of its own.

This process trains nothing and takes no part: it starts the others, folds their events, draws the table, and ends them.
"""

import asyncio
import json
import signal
import time
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.live import Live

from dilocox_peer.cli.demo_table import render, round_line
from dilocox_peer.cli.flags import DemoFlags
from dilocox_peer.cli.init import check_writable, write_whole
from dilocox_peer.cli.local_swarm import ChildEnded, LocalSwarm
from dilocox_peer.cli.report import build_report, summary, verdict
from dilocox_peer.cli.swarm_view import SwarmView, progress_of
from dilocox_peer.cli.timeline import chrome_trace, render_svg, table
from dilocox_peer.config import preset
from dilocox_peer.errors import ConfigError, DilocoxError
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.partition import cut_into

REFRESH_S = 0.5
ROUNDS_AWAITED = 2  # the newest ones, whose line waits for a validation loss
TINY_LAYERS = 2  # of the tiny preset; a stage needs at least one
WHOLE_ROUNDS = 128  # of the preset's 8 inner steps, if they stay so short
PIPELINED_ROUNDS, PIPELINED_INNER_STEPS = 32, 16  # of more tokens each than a single stage's
PIPELINED_CODEC = "int2"
TUNED_LEARNING_RATES = {"adamw": 4e-3, "muon": 2.7e-2}  # of the tiny preset


class DemoFailed(DilocoxError):
    """The swarm did not do what it should; the message says what and where to look."""


def run_demo(flags: DemoFlags) -> None:
    """Runs the swarm to its last round. Raises DemoFailed, ConfigError; KeyboardInterrupt after Ctrl-C."""
    manifest = demo_manifest(flags)
    for flag, path in (("--report", flags.report), ("--trace", flags.trace)):  # now, not after minutes of training
        if path is not None:
            check_writable(path, flag)

    async def main() -> None:
        await _Demo(flags, manifest).run()

    asyncio.run(main())


def demo_manifest(flags: DemoFlags) -> Manifest:
    """The demo's manifest, not yet signed. Raises ConfigError for values that do not exist."""
    if flags.trace is not None and flags.stages == 1:
        raise ConfigError("--trace: one stage sends no micro-batches; use --stages 2 or more")
    for path in flags.data:
        if not path.exists():
            raise ConfigError(f"--data {path} does not exist: pass a text file, a JSONL file or a folder of them")
    usual_rounds = WHOLE_ROUNDS if flags.stages == 1 and flags.inner_steps is None else PIPELINED_ROUNDS
    rounds: dict[str, Any] = {"start_peers": flags.replicas, "total": flags.rounds or usual_rounds}
    compression: dict[str, Any] = {}
    overrides: dict[str, dict[str, Any]] = {
        "run": {"name": "demo", "seed": flags.seed},
        "stages": {"count": flags.stages, "schedule": flags.schedule or "carry"},
        "rounds": rounds,
    }
    if flags.overlap is not None:
        overrides["outer"] = {"overlap": flags.overlap}
    if flags.stages > 1:
        rounds["inner_steps"], compression["codec"] = PIPELINED_INNER_STEPS, PIPELINED_CODEC
    if flags.inner_steps is not None:  # who chooses gets what was chosen, to the end
        rounds["inner_steps"], compression["adapt"] = flags.inner_steps, "off"
    if flags.codec is not None:
        compression |= {"codec": flags.codec, "adapt": "off"}
    overrides["compression"] = compression
    if flags.inner_optimizer is not None:
        learning_rate = TUNED_LEARNING_RATES.get(flags.inner_optimizer, 4e-3)
        overrides["inner"] = {"optimizer": flags.inner_optimizer, "learning_rate": learning_rate}
    if flags.data:
        overrides["data"] = {"source": "files"}
    if flags.stages > 1:
        overrides["model"] = {"layers": max(TINY_LAYERS, flags.stages)}
    return cut_into(preset("tiny", **overrides), flags.stages)


class _Demo:
    def __init__(self, flags: DemoFlags, manifest: Manifest) -> None:
        self._flags = flags
        self._swarm = LocalSwarm(manifest, self._on_event, data=flags.data)
        self._view = SwarmView(self._swarm.manifest)
        self._printed_round = 0
        self._console = Console()
        self._started = time.monotonic()

    async def run(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        interrupted = False

        def interrupt() -> None:
            nonlocal interrupted
            interrupted = True
            task.cancel()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup's wish is kept
                loop.add_signal_handler(number, interrupt)
        try:
            async with asyncio.timeout(self._flags.timeout), self._swarm:
                await self._train()
        except TimeoutError:
            raise DemoFailed(f"not done after {self._flags.timeout:.0f} s: raise --timeout or lower --rounds") from None
        except ChildEnded as error:
            for line in error.tail:
                typer.echo(line, err=True)
            raise DemoFailed(str(error)) from None
        except asyncio.CancelledError:
            if not interrupted:
                raise
            typer.echo("interrupted; every process of the swarm was ended", err=True)
            raise KeyboardInterrupt from None
        self._finish()

    async def _train(self) -> None:
        manifest = self._swarm.manifest
        typer.echo(
            f"demo: {self._flags.stages} stage{'' if self._flags.stages == 1 else 's'} x {self._flags.replicas} replicas, "
            f"{manifest.rounds.total} rounds, run {manifest.run_id[:12]}"
        )
        typer.echo("starting the bootstrap ...")
        bootstrap = await self._swarm.start_bootstrap()
        peers = []
        stages = self._flags.stages
        more = ["--backup-stages", "0"]  # all disks are this one
        if self._flags.trace is not None:
            more.append("--trace")
        total = stages * self._flags.replicas
        evaluator = None
        for index in range(total):
            if index == total - 1:  # before the last peer, as the rounds begin with it: a short run is over soon after
                evaluator = await self._swarm.start_evaluator()
            typer.echo(f"starting peer{index} ({index + 1} of {total}) ...")
            # One after another: four interpreters that import torch at once on two cores start no sooner. The last stage
            # first: origins find those they need when they come.
            stage = stages - 1 - index % stages
            peers.append(await self._swarm.start_peer(f"peer{index}", stage=stage if stages > 1 else None, more=more))
            typer.echo(f"peer{index} is up, {time.monotonic() - self._started:.0f} s")
        assert evaluator is not None
        ending = [*peers, evaluator]
        with Live(console=self._console, auto_refresh=False) as live:
            while not all(child.process.returncode == 0 for child in ending):
                for child in (bootstrap, *ending):
                    if child.process.returncode not in ((None, 0) if child is not bootstrap else (None,)):
                        raise ChildEnded(child)
                self._draw(live)
                await self._swarm.next_change(REFRESH_S)
            for child in ending:
                assert child.reader is not None
                await child.reader
            self._draw(live, is_over=True)

    def _draw(self, live: Live, *, is_over: bool = False) -> None:
        if self._console.is_terminal:
            live.update(render(self._view, elapsed_s=time.monotonic() - self._started), refresh=True)
            return
        while (seen := self._view.rounds.get(self._printed_round + 1)) is not None:
            if not is_over and seen.val_loss is None and self._printed_round + ROUNDS_AWAITED >= max(self._view.rounds):
                return  # its validation loss is on the way: a round is evaluated once the next one names its states
            self._printed_round += 1
            typer.echo(round_line(self._view, seen))

    def _on_event(self, label: str, record: dict[str, Any]) -> None:
        self._view.take(label, record)

    def _finish(self) -> None:
        report = build_report(
            self._view,
            stages=self._flags.stages,
            replicas=self._flags.replicas,
        )
        sent = sum(progress_of(peer).bytes_sent for peer in self._view.peers.values())
        for line in summary(report, bytes_sent=sent, elapsed_s=time.monotonic() - self._started):
            typer.echo(line)
        if self._flags.report is not None:
            write_whole(self._flags.report, (json.dumps(report, indent=1) + "\n").encode())
            typer.echo(f"report                         {self._flags.report}")
        if self._flags.trace is not None:
            self._draw_timeline(self._flags.trace)
        problems = verdict(report)
        if problems:
            raise DemoFailed("; ".join(problems))

    def _draw_timeline(self, path: Path) -> None:
        timed = list(self._view.timed)
        title = f"{self._flags.stages} x {self._flags.replicas}, {self._swarm.manifest.stages.schedule}"
        is_trace = path.suffix == ".json"
        write_whole(path, (json.dumps(chrome_trace(timed)) if is_trace else render_svg(timed, title=title)).encode())
        typer.echo("")
        for line in table(timed):
            typer.echo(line)
        typer.echo(f"timeline                       {path}")
