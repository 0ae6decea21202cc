"""What the host spends on every operator: T1 to T5 of Lin 2023, 4.4, from a trace.

[Note: host overheads]
T1 passes between the end of one operator and the start of the next on one thread
(Python, modules, autograd), T2 from an operator's start to its first launch, T3 from
its last launch's end to its own end, T4 in the CUDA call itself, T5 between two
launches, or in the whole of an operator that launches nothing. Operators are those
that a dispatch mode sees, as in execution graphs: composite ones are descended into.
T1 is kept by phase and by the operator that follows, so that a module's overhead goes
with the operator that opens it. The profiler's own cost is taken off each event; both
costs are fitted to the same program's time without a profiler.
(tests/ssdtrain/tools/foresight/test_models.py)
"""

import itertools
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

# Longer gaps between operators are the user's code or the profiler, not overhead.
LONGEST_GAP_US = 400.0
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpy", "cudaMemset")
RUNTIME = ("cuda_runtime", "cuda_driver")


class StepPhase(str, Enum):
    """Part of a training step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


@dataclass(frozen=True, kw_only=True)
class HostOverheads:
    """Microseconds of one operator on the host, T1 to T5."""

    t1: float
    t2: float
    t3: float
    t4: float
    t5: float
    num_launches: int

    @property
    def total(self) -> float:
        """All of it, the gap before the operator included."""
        own = self.t2 + self.t3 if self.num_launches else self.t5
        between = max(0, self.num_launches - 1) * self.t5
        return self.t1 + own + self.num_launches * self.t4 + between


@dataclass(frozen=True, kw_only=True)
class TracedOperator:
    """One operator of a trace."""

    name: str
    phase: StepPhase
    t1: float | None
    t2: float
    t3: float
    t4: float
    t5: float
    num_launches: int
    num_events: int
    """Profiled events in it, itself included."""
    start_us: float


@dataclass
class _Span:
    name: str
    category: str
    start: float
    end: float
    inside: list["_Span"] = field(default_factory=list)


def operators_of(
    events: Iterable[Mapping[str, Any]], composites: Collection[str]
) -> list[TracedOperator]:
    """The operators of a Kineto trace (complete events, microseconds), in the order of
    their start; `composites` only call others."""
    threads: dict[Any, list[_Span]] = {}
    updates: list[tuple[float, float]] = []
    for event in events:
        if event.get("ph") != "X":
            continue
        category = event.get("cat", "")
        start, length = float(event["ts"]), float(event.get("dur", 0.0))
        if category == "cpu_op" or category in RUNTIME:
            span = _Span(event["name"], category, start, start + length)
            threads.setdefault(event["tid"], []).append(span)
        elif event.get("name", "").startswith("Optimizer.step"):
            updates.append((start, start + length))
    found: list[TracedOperator] = []
    for spans in threads.values():
        found += _of_thread(spans, updates, composites)
    return sorted(found, key=lambda seen: seen.start_us)


def _of_thread(
    spans: list[_Span],
    updates: Sequence[tuple[float, float]],
    composites: Collection[str],
) -> list[TracedOperator]:
    found: list[TracedOperator] = []
    last_end: float | None = None
    stack = [(root, False) for root in reversed(_nest(spans))]
    while stack:
        span, backward = stack.pop()
        if span.category != "cpu_op":
            continue
        backward = backward or span.name.startswith("autograd::engine")
        if not span.name.startswith("aten::") or span.name in composites:
            stack.extend((inner, backward) for inner in reversed(span.inside))
            continue
        phase = StepPhase.BACKWARD if backward else StepPhase.FORWARD
        if any(start <= span.start <= end for start, end in updates):
            phase = StepPhase.UPDATE
        gap = None if last_end is None else span.start - last_end
        if gap is not None and gap > LONGEST_GAP_US:
            gap = None
        found.append(_seen(span, phase, gap))
        last_end = span.end
    return found


def _nest(spans: list[_Span]) -> list[_Span]:
    """Roots of the trees that containment makes."""
    roots: list[_Span] = []
    open_: list[_Span] = []
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        while open_ and open_[-1].end <= span.start:
            open_.pop()
        (open_[-1].inside if open_ else roots).append(span)
        open_.append(span)
    return roots


def _seen(span: _Span, phase: StepPhase, gap: float | None) -> TracedOperator:
    below = list(_below(span))
    calls = (span for span in below if span.category in RUNTIME)
    launches = [call for call in calls if call.name.startswith(LAUNCHES)]
    launches.sort(key=lambda s: s.start)
    t2, t3, t4, t5 = 0.0, 0.0, 0.0, span.end - span.start
    if launches:
        t2 = launches[0].start - span.start
        t3 = max(0.0, span.end - launches[-1].end)
        t4 = statistics.fmean(s.end - s.start for s in launches)
        gaps = [two.start - one.end for one, two in itertools.pairwise(launches)]
        t5 = statistics.fmean(gaps) if gaps else 0.0
    return TracedOperator(
        name=span.name,
        phase=phase,
        t1=gap,
        t2=t2,
        t3=t3,
        t4=t4,
        t5=t5,
        num_launches=len(launches),
        num_events=1 + len(below),
        start_us=span.start,
    )


def _below(span: _Span) -> Iterable[_Span]:
    for inner in span.inside:
        yield inner
        yield from _below(inner)


def reach(values: Sequence[float]) -> tuple[float, float]:
    """Q1 - 1.5 IQR and Q3 + 1.5 IQR: what lies outside is an outlier."""
    low, _, high = statistics.quantiles(values, n=4)
    beyond = 1.5 * (high - low)
    return low - beyond, high + beyond


def trimmed_mean(values: Sequence[float]) -> float:
    """The mean of what is no outlier."""
    if len(values) < 4:
        return statistics.fmean(values)
    least, most = reach(values)
    return statistics.fmean(v for v in values if least <= v <= most)


def operator_means(seen: Sequence[TracedOperator]) -> list[dict[str, Any]]:
    """One row for each (phase, operator): means and counts."""
    groups: dict[tuple[str, str], list[TracedOperator]] = {}
    for one in seen:
        groups.setdefault((one.phase.value, one.name), []).append(one)
    rows = []
    for (phase, name), group in sorted(groups.items()):
        gaps = [one.t1 for one in group if one.t1 is not None]
        row: dict[str, Any] = {"phase": phase, "name": name, "count": len(group)}
        row["t1"] = round(trimmed_mean(gaps), 3) if gaps else None
        for field_name in ("t2", "t3", "t4", "t5", "num_launches", "num_events"):
            values = [float(getattr(one, field_name)) for one in group]
            row[field_name] = round(trimmed_mean(values), 3)
        rows.append(row)
    return rows
