"""The time line for Perfetto or chrome://tracing: one process a rank, one row (and as
many lanes as run at once) for compute, store, write, read and load (Figure 5.5)."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ssdtrain.counters import Span

ROWS = ("compute", "store", "write", "read", "load")
"""Rows in display order; any other row comes after them, by name."""
_LANES_PER_ROW = 1000
_NS_PER_US = 1000


def chrome_trace(ranks: Sequence[Sequence[Span]]) -> dict[str, Any]:
    """Write the spans of every rank in the Trace Event Format, in microseconds since
    the earliest of the rank."""
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(ranks):
        events.append(_named("process_name", rank, 0, f"rank {rank}"))
        origin = min((span.start_ns for span in spans), default=0)
        for row in _rows(spans):
            events += _row_events(rank, row, spans, origin)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(ranks: Sequence[Sequence[Span]], path: Path) -> None:
    """Write `chrome_trace` as JSON."""
    path.write_text(json.dumps(chrome_trace(ranks)), encoding="utf-8")


def _rows(spans: Sequence[Span]) -> list[str]:
    present = {span.row for span in spans}
    others = sorted(present - set(ROWS))
    return [row for row in ROWS if row in present] + others


def _row_events(
    rank: int, row: str, spans: Sequence[Span], origin_ns: int
) -> list[dict[str, Any]]:
    index = ROWS.index(row) if row in ROWS else len(ROWS)
    own = sorted((s for s in spans if s.row == row), key=lambda span: span.start_ns)
    ends: list[int] = []
    events = []
    for span in own:
        lane = _free_lane(ends, span)
        thread = index * _LANES_PER_ROW + lane
        event = {"ph": "X", "name": span.name, "cat": row, "pid": rank, "tid": thread}
        start, end = span.start_ns - origin_ns, span.end_ns - span.start_ns
        times = {"ts": start / _NS_PER_US, "dur": end / _NS_PER_US}
        events.append({**event, **times, "args": {"bytes": span.num_bytes}})
    names = [
        _named("thread_name", rank, index * _LANES_PER_ROW + lane, f"{row} {lane}")
        for lane in range(len(ends))
    ]
    return names + events


def _free_lane(ends: list[int], span: Span) -> int:
    """Return the first lane that is free when `span` starts."""
    for lane, end in enumerate(ends):
        if end <= span.start_ns:
            ends[lane] = span.end_ns
            return lane
    ends.append(span.end_ns)
    return len(ends) - 1


def _named(kind: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    arguments = {"name": name}
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": arguments}
