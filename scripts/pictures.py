"""README's picture of the dashboard, from what a real peer recorded.

    python scripts/pictures.py            # draws docs/images/dashboard-120x40.svg again, from docs/images/dashboard.jsonl
    python scripts/pictures.py --record   # runs a swarm on this machine first, and keeps one peer's event log there

The swarm: two stages of two peers on loopback, each a real process, training the tiny preset. When a peer
has read in the directory how fast all of them are, which takes minutes, its stage mate is killed, and another joins; that
peer's log is kept. The log is what
`join --log-file` wrote, less the kinds of NOT_KEPT; `dilocox-peer replay docs/images/dashboard.jsonl` plays it.
"""

import argparse
import asyncio
import io
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console

from dilocox_peer.cli.eventlog import read_event_file
from dilocox_peer.cli.local_swarm import LocalSwarm
from dilocox_peer.cli.screen import Size, render
from dilocox_peer.config import preset
from dilocox_peer.peer.status import Status

IMAGES = Path(__file__).parents[1] / "docs" / "images"
RECORDED = IMAGES / "dashboard.jsonl"
SIZE = Size(120, 40)
ROUNDS = 4  # that the newcomer has a part in
PATIENCE_S = 600.0
NOT_KEPT = {
    "CheckpointWritten",
    "MicroBatchDone",
    "MicroBatchTimed",
}  # no picture has them; the first names a path here


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="run a swarm and keep a peer's log")
    if parser.parse_args().record:
        RECORDED.write_text(asyncio.run(record()))
    path = IMAGES / f"dashboard-{SIZE.width}x{SIZE.height}.svg"
    path.write_text(svg_of(RECORDED))
    print(path)


async def record() -> str:
    """Runs the swarm; the log of peer a, as JSONL. Raises ChildEnded, TimeoutError."""
    rounds: Counter[str] = Counter()  # certified with a contribution of this peer's
    slowest = 0.0

    def take(label: str, event: dict[str, Any]) -> None:
        nonlocal slowest
        if event["event"] == "RoundCertified":
            rounds[label] += event["own_included"]
        elif event["event"] == "SwarmSeen" and label == "a":
            slowest = min(each["tokens_per_s"] for each in event["peers"])

    manifest = preset(
        "tiny", run={"name": "tiny"}, stages={"count": 2}, rounds={"total": 100, "inner_steps": 32, "start_peers": 2}
    )
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "a.jsonl")
        async with LocalSwarm(manifest, take) as swarm:
            await swarm.start_bootstrap()
            watched, lost, *_others = await asyncio.gather(
                swarm.start_peer("a", stage=1, more=("--log-file", str(log))),
                swarm.start_peer("b", stage=1),
                swarm.start_peer("c", stage=0),
                swarm.start_peer("d", stage=0),
            )
            await swarm.until(lambda: slowest > 0, [watched], PATIENCE_S)
            lost.process.kill()
            await swarm.start_peer("e", stage=1)
            await swarm.until(lambda: rounds["e"] >= ROUNDS, [watched], PATIENCE_S)
            recorded = await asyncio.to_thread(log.read_text)  # before they leave: the picture is of a peer at work
    kept = [line for line in recorded.splitlines(keepends=True) if json.loads(line)["event"] not in NOT_KEPT]
    return "".join(kept)


def svg_of(log: Path) -> str:
    """The dashboard as the peer that wrote the log had it at the log's end."""
    status, at_s = Status(), 0.0
    for event, at_s in read_event_file(log):
        status.take(event, at_s)
    console = Console(
        width=SIZE.width, height=SIZE.height, record=True, file=io.StringIO(), color_system="truecolor", force_terminal=True
    )  # fmt: skip
    console.print(render(status, SIZE, at_s), end="")
    return console.export_svg(title="dilocox-peer join")


if __name__ == "__main__":
    main()
