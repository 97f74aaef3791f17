"""Where the micro-batches' time went."""

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dilocox_peer.cli.swarm_view import SwarmView
from dilocox_peer.cli.timeline import Timed, chrome_trace, read, render_svg, shares, table
from dilocox_peer.config import preset
from dilocox_peer.pipeline.contract import MicroBatchTimed
from dilocox_peer.types import PeerId
from dilocox_peer.wire.hops import MicroBatchId


def origin(index: int, start: float, *, behind: float = 0.05) -> Timed:
    sent = start + 0.012
    moments = {
        "forward_start": start, "reserve": start, "grant": start + 0.001, "forward_end": start + 0.010, "step_sent": sent,
        "grad": sent + behind, "backward_start": sent + behind + 0.003, "backward_end": sent + behind + 0.023,
    }  # fmt: skip
    return Timed("peer0", 0, ("a", index), moments, 0.001)


def last(index: int, start: float) -> Timed:
    arrived = start + 0.012 + 0.005
    moments = {
        "asked": start,
        "granted": start,
        "arrived": arrived,
        "forward_start": arrived + 0.002,
        "backward_end": arrived + 0.032,
    }
    return Timed("peer1", 1, ("a", index), moments, 0.002)


def test_every_moment_belongs_to_one_share():
    of = shares([origin(0, 0.0), last(0, 0.0)])
    assert of[0] == pytest.approx({"slot": 2.0, "wire": 0.0, "queue": 3.0, "compute": 29.0, "encode": 1.0})
    # at the last stage: 5 ms there; it answers at 0.049, its caller has the gradient at 0.062
    assert of[1] == pytest.approx({"slot": 0.0, "wire": 5.0 + 13.0, "queue": 2.0, "compute": 28.0, "encode": 2.0})


def test_a_micro_batch_that_was_sent_twice_says_nothing_of_the_wire():
    again = origin(0, 0.0, behind=0.001)  # answered by another peer before this one was done
    assert shares([again, last(0, 0.0)])[1]["wire"] == 0.0


def test_the_picture_is_an_svg_with_a_row_for_each_peer():
    timed = [each for index in range(20) for each in (origin(index, 0.04 * index), last(index, 0.04 * index))]
    root = ET.fromstring(render_svg(timed, title="2 x 1 <carry>"))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "2 x 1 <carry>" in texts
    assert "stage 0, peer0" in texts
    assert "stage 1, peer1" in texts
    assert len(list(root.iter("{http://www.w3.org/2000/svg}rect"))) > 100


def recorded() -> list[Timed]:
    view = SwarmView(preset("tiny"))
    for line in (Path(__file__).parent / "golden" / "demo.jsonl").read_text().splitlines():
        record = json.loads(line)
        view.take(record.pop("process"), record)
    return list(view.timed)


def spans_of(trace: dict[str, Any], **wanted: object) -> list[dict[str, Any]]:
    found = [each for each in trace["traceEvents"] if each["ph"] == "X"]
    return [each for each in found if all(each[key] == value for key, value in wanted.items())]


def test_the_trace_is_in_the_trace_event_format():
    """The JSON object form, with complete ("X") and metadata ("M") events and the fields that each must have."""
    trace = json.loads(json.dumps(chrome_trace(recorded()), allow_nan=False))
    assert trace["displayTimeUnit"] in ("ms", "ns")
    for each in trace["traceEvents"]:
        assert isinstance(each["name"], str)
        assert type(each["pid"]) is type(each["tid"]) is int
        match each:
            case {"ph": "X", "ts": int() | float() as ts, "dur": int() | float() as dur, "cat": str(), "args": dict()}:
                assert ts >= 0
                assert dur >= 0
            case {"ph": "M", "name": "process_name" | "thread_name", "args": {"name": str()}}:
                pass
            case _:
                pytest.fail(f"not in the format: {each}")
    named = {(each["pid"], each["tid"]) for each in trace["traceEvents"] if each["name"] == "thread_name"}
    assert {(each["pid"], each["tid"]) for each in spans_of(trace)} <= named


def test_on_each_thread_of_the_trace_one_thing_follows_another():
    trace = chrome_trace(recorded())
    for pid, tid in {(each["pid"], each["tid"]) for each in spans_of(trace)}:
        until = 0.0
        for each in sorted(spans_of(trace, pid=pid, tid=tid), key=lambda each: each["ts"]):
            assert each["ts"] >= until - 0.01  # microseconds, rounded to thousandths
            until = each["ts"] + each["dur"]


def test_the_torch_threads_of_the_trace_compute_what_the_table_says():
    timed = recorded()
    of = shares(timed)
    for stage in of:
        pids = [
            pid for pid, peer in enumerate(sorted({(each.stage, each.peer) for each in timed}), 1) if peer[0] == stage
        ]
        computed = sum(each["dur"] for pid in pids for each in spans_of(chrome_trace(timed), pid=pid, tid=0))
        count = sum(each.stage == stage for each in timed)
        assert computed / 1e3 / count == pytest.approx(of[stage]["compute"] + of[stage]["encode"], rel=1e-4)


def test_nothing_timed_gives_no_picture():
    with pytest.raises(ValueError, match="no micro-batch"):
        render_svg([], title="")


def test_a_micro_batch_that_did_not_come_to_its_end_is_left_out():
    timed = MicroBatchTimed(MicroBatchId(PeerId("a"), 1, 4), (("forward_start", 1.0), ("backward_end", 2.0)), 0.5)
    assert read("peer0", 1, timed) == Timed("peer0", 1, ("a", 4), {"forward_start": 1.0, "backward_end": 2.0}, 0.5)
    assert read("peer0", 1, replace(timed, moments=timed.moments[:1])) is None


def test_the_table_has_a_line_for_each_stage():
    lines = table([origin(0, 0.0), last(0, 0.0)])
    assert len(lines) == 3
    assert "wire" in lines[0]
