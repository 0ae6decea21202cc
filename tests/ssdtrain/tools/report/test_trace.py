"""The time line: valid events, nothing lost, nothing overlapping in a lane."""

import json
from collections import defaultdict
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from ssdtrain.counters import Span
from ssdtrain.tools.report.trace import chrome_trace, write_trace

spans = st.builds(
    lambda row, start, length, size: Span(row, "t", start, start + length, size),
    st.sampled_from(["store", "write", "read", "load", "compute", "other"]),
    st.integers(0, 10_000),
    st.integers(0, 3_000),
    st.integers(0, 99),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(spans, max_size=12), max_size=3))
def test_every_span_once_and_no_overlap(ranks: list[list[Span]]) -> None:
    events = chrome_trace(ranks)["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == sum(map(len, ranks))
    lanes = defaultdict(list)
    for event in complete:
        lanes[event["pid"], event["tid"]].append(event)
    for (rank, _), lane in lanes.items():
        assert len({event["cat"] for event in lane}) == 1
        ends = 0.0
        for event in sorted(lane, key=lambda e: (e["ts"], e["dur"])):
            assert event["ts"] >= ends - 1e-6
            ends = event["ts"] + event["dur"]
        assert rank < len(ranks)


def test_rows_are_named_and_in_order(tmp_path: Path) -> None:
    one = [Span("load", "b", 2_000, 3_000, 7), Span("compute", "a", 1_000, 4_000, 0)]
    write_trace([one], tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["ph"] == "M"]
    assert names == ["rank 0", "compute 0", "load 0"]
    [load] = (e for e in events if e.get("cat") == "load")
    assert (load["ts"], load["dur"], load["args"]) == (1.0, 1.0, {"bytes": 7})
