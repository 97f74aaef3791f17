"""Where the micro-batches' time went."""

import xml.etree.ElementTree as ET

import pytest

from dilocox_peer.cli.timeline import Timed, read, render_svg, shares, table


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


def test_nothing_timed_gives_no_picture():
    with pytest.raises(ValueError, match="no micro-batch"):
        render_svg([], title="")


def test_a_record_that_did_not_come_to_its_end_is_left_out():
    moments = [["forward_start", 1.0], ["backward_end", 2.0]]
    record = {"id": {"origin": "a", "incarnation": 1, "index": 4}, "moments": moments, "encode_s": 0.5}
    assert read("peer0", 1, record) == Timed("peer0", 1, ("a", 4), {"forward_start": 1.0, "backward_end": 2.0}, 0.5)
    assert read("peer0", 1, {**record, "moments": moments[:1]}) is None
    assert read("peer0", 1, {}) is None


def test_the_table_has_a_line_for_each_stage():
    lines = table([origin(0, 0.0), last(0, 0.0)])
    assert len(lines) == 3
    assert "wire" in lines[0]
