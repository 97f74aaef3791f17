"""What the demo shows and writes of a swarm, held against what it showed of a recorded one, to the letter.

golden/demo.jsonl is `demo --stages 2 --replicas 2 --rounds 3 --inner-steps 4 --trace ...`, every event of every process,
with fewer MicroBatchTimed. `python tests/unit/test_demo_golden.py` writes golden/demo.txt anew.
"""

import hashlib
import io
import json
from pathlib import Path

from rich.console import Console

from dilocox_peer.cli.demo_table import render, round_line
from dilocox_peer.cli.report import build_report
from dilocox_peer.cli.swarm_view import SwarmView
from dilocox_peer.cli.timeline import render_svg, table
from dilocox_peer.config import preset

GOLDEN = Path(__file__).parent / "golden"
LOOK_EVERY = 50  # events


def shown() -> str:
    """The table as it goes, then the lines of a terminal that is none, the report and the timeline."""
    view = SwarmView(preset("tiny", rounds={"total": 3}, stages={"count": 2}))
    out = io.StringIO()
    console = Console(file=out, width=100)
    for index, line in enumerate((GOLDEN / "demo.jsonl").read_text().splitlines()):
        record = json.loads(line)
        view.take(record.pop("process"), record)
        if index % LOOK_EVERY == 0:
            console.print(render(view, elapsed_s=float(index)))
    console.print(render(view, elapsed_s=30.0))
    lines = [round_line(view, view.rounds[number]) for number in sorted(view.rounds)]
    report = build_report(view, stages=2, replicas=2)
    del report["run_id"]  # a new setting changes it
    lines += [json.dumps(event) for event in report.pop("events")]
    lines.append(json.dumps(report, indent=1))
    lines += table(list(view.timed))
    picture = render_svg(list(view.timed), title="2 x 2, carry")
    lines.append(
        f"timeline.svg: {picture.count('<rect')} rectangles, sha256 {hashlib.sha256(picture.encode()).hexdigest()}"
    )
    return "\n".join([out.getvalue(), *lines]) + "\n"


def test_table_report_and_timeline_of_a_recorded_demo_are_as_they_were():
    assert shown() == (GOLDEN / "demo.txt").read_text()


if __name__ == "__main__":
    (GOLDEN / "demo.txt").write_text(shown())
