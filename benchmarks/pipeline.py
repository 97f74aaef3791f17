"""Two stages on two machines with a volunteer's link between them: how much of twice a single process comes out.

    sudo python benchmarks/pipeline.py [--repeat 3] [--rows flush,carry]

Each machine is a network namespace behind a shaped link (testbed/netlab.py; needs root and iproute2). Compute is emulated,
50 ms a stage and micro-batch of 512 tokens; everything else is the peer's own code (pipeline_worker.py). Every row: tokens/s
over twice those of a single process in the same run, beside torch.distributed.pipelining over gloo on the same link.
Expected beforehand: flush with 8 micro-batches is bounded by its bubble, 8/9 = 0.889, and loses two transfers a step (131 kB
at 100 Mbit/s: 11 ms each) and what processes need to hand over; carry has no bubble, its limit is 1.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median

from swarm import header, spread
from testbed.netlab import Lab

WORKER = [sys.executable, str(Path(__file__).with_name("pipeline_worker.py"))]

ROWS = {
    # name: (rate, one-way delay ms between the two, schedule, micro-batches, steps, goal, limit)
    "flush": ("100mbit", 0.0, "flush", 8, 12, 0.80, 8 / 9),
    "carry": ("100mbit", 20.0, "carry", 32, 6, 0.92, 1.0),
}


def run(lab: Lab, role: str, more: list[str], folder: Path) -> list[dict]:
    os.environ["OMP_NUM_THREADS"] = "1"
    summary = lab.run([*WORKER, role, *more], str(folder), timeout=300)
    results = []
    for rank in range(2):
        text = (folder / f"rank{rank}.log").read_text()
        found = [line for line in text.splitlines() if line.startswith("RESULT ")]
        if not found:
            sys.exit(f"{role} rank {rank} gave no result ({summary}):\n{text[-2000:]}")
        results.append(json.loads(found[-1][len("RESULT ") :]))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--no-gloo", action="store_true")
    args = parser.parse_args()
    print(header())
    print(
        "| link | schedule, micro-batches | of 2x single | goal, limit | gloo 1F1B | linkd CPU ms/MB, both ends | window |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in args.rows.split(","):
        rate, delay_ms, schedule, micro_batches, steps, goal, limit = ROWS[name]
        ours, gloo, cpu = [], [], []
        window = 0
        for _ in range(args.repeat):
            with Lab(2, rate=rate, delay_ms=str(delay_ms / 2)) as lab, tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                common = ["--schedule", schedule, "--micro-batches", str(micro_batches), "--steps", str(steps)]
                single = median(each["micro_batches_per_s"] for each in run(lab, "single", common, folder / "single"))
                origin, last = run(lab, "stage", common, folder / "stage")
                ours.append(origin["micro_batches_per_s"] / (2 * single))
                megabytes = (origin["bytes_sent"] + last["bytes_sent"]) / 1e6
                cpu.append(1e3 * (origin["linkd_cpu_s"] + last["linkd_cpu_s"]) / megabytes)
                window = origin["window"]
                if not args.no_gloo:
                    gloo.append(run(lab, "gloo", common, folder / "gloo")[0]["micro_batches_per_s"] / (2 * single))
        shown = spread(gloo) if gloo else "-"
        print(
            f"| {rate}, {delay_ms:g} ms | {schedule}, {micro_batches} | {spread(ours)} | {goal}, {limit:.3f} | {shown} | "
            f"{spread(cpu, '.1f')} | {window} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
