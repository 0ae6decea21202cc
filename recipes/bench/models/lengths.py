"""Batches whose length changes from step to step: time, long steps, and the budget.

One model is trained on three traces: every step as long as the longest, lengths drawn
evenly, and whole documents packed in their order until the next one does not fit. On
each trace, plain steps first, twice: kernels are chosen and compiled in the first pass,
for each new length, and the second one is timed. Then a session of its own under a byte
budget for activations, a share of the plain peak of the longest step. Traces are run
again until the session has settled, and once more for the comparison; behind it, plain
once more, as a device that has worked for some seconds may be slower. What a step
should take is the plain step of the same length times the trace's own median ratio.
Each trace has its share of the time that is left when it begins.

    python -m recipes.bench models.lengths --documents lengths.json
    python -m recipes.bench models.lengths --model tiny --device cpu --most 64 \\
        --documents lengths.json
"""

import itertools
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from recipes.bench.harness import cli
from recipes.bench.models.real_build import build
from recipes.bench.models.real_catalogue import row_of
from recipes.bench.models.real_row import (
    SETTLED_AFTER,
    Step,
    Trainer,
    document_lengths,
    packed,
)

NUM_STEPS = {"constant": 12, "drawn": 18, "packed": 18}
"""Of each trace."""
LEAST_SHARE = 4
"""The shortest drawn length is the longest through this."""
LONG = 1.5
"""Times of what its length predicts that a step may take."""
LAST_SHARE = 0.35
"""Of a trace's time that is left for the pass that is compared."""


def traces_of(most: int, documents: list[int]) -> dict[str, list[int]]:
    """Tokens of every step, by the trace's name."""
    draw, low = random.Random(0), most // LEAST_SHARE
    return {
        "constant": [most] * NUM_STEPS["constant"],
        "drawn": [draw.randint(low, most) for _ in range(NUM_STEPS["drawn"])],
        "packed": packed(documents, most, NUM_STEPS["packed"]),
    }


def peaks_of(steps: list[Step], budget_bytes: int) -> dict[str, Any]:
    """Of each step, in GB, and which of them exceeded the budget."""
    return {
        "peaks_gb": [round(step.peak_bytes / 1e9, 3) for step in steps],
        "over_budget_at": [
            number
            for number, step in enumerate(steps)
            if step.peak_bytes > budget_bytes
        ],
    }


def ms_of(steps: list[Step]) -> list[float]:
    """Of each; waits for the device."""
    return [step.ms for step in steps]


class History:
    """What a session did while steps ran; asks without waiting for the device."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._orders: Any = None
        self.steps: list[Step] = []
        """All that have been enqueued."""
        self.num_plans = 0
        self.plans_at: list[int] = []
        """Steps behind which another plan was in force."""
        self.pinned_gb: list[float] = []
        """Behind every step."""

    def stepped(self, step: Step) -> None:
        """This one has been enqueued."""
        self.steps.append(step)
        plan, pool = self._session.plan, self._session.cache.offloader.pool
        if plan is not None and plan.orders is not self._orders:
            self._orders, self.num_plans = plan.orders, self.num_plans + 1
            self.plans_at.append(len(self.pinned_gb))
        self.pinned_gb.append(round(pool.total_bytes / 1e9, 3))

    def figures(self) -> dict[str, Any]:
        """At the end."""
        reports = self._session.steps
        resized = [report.step for report in reports if report.num_resized]
        counts: Counter[str] = Counter()
        for report in reports:
            counts.update(report.fallbacks)
        by_step = {r.step: r.fallbacks for r in reports if r.fallbacks}
        unplanned = {
            name: [step for step, own in by_step.items() if name in own]
            for name in counts
            if name.startswith("unplanned")
        }
        return {
            "num_plans": self.num_plans,
            "plans_at": self.plans_at,
            "num_tables": self._session.cache.tables.num_made,
            "num_resized": len(resized),
            "unplanned_at": unplanned,
            "all_fallbacks": dict(counts),
            "pinned_gb": self.pinned_gb,
        }


def passes(
    trainer: Trainer, trace: list[int], session: Any, limit_s: float, history: History
) -> list[list[Step]]:
    """Run the trace until the session has settled, and once more."""
    until = time.perf_counter() + limit_s
    found: list[list[Step]] = []
    for number in itertools.count():
        is_over = time.perf_counter() >= until
        is_last = number > 0 and (session.is_settled or is_over)
        steps = []
        for num in trace:
            steps.append(trainer.step(num))
            history.stepped(steps[-1])
        found.append(steps)
        if is_last:
            return found
    return found


def compared(
    trace: list[int], plain_ms: list[float], done: list[list[Step]], budget_bytes: int
) -> dict[str, Any]:
    """What a trace's figures are."""
    times = [ms_of(steps) for steps in done]
    ratios = [own / plain for own, plain in zip(times[-1], plain_ms, strict=True)]
    usual = statistics.median(ratios)
    every = list(itertools.chain(*times))
    expected = [usual * plain_ms[at % len(trace)] for at in range(len(every))]
    excess = [own / other for own, other in zip(every, expected, strict=True)]
    late = excess[SETTLED_AFTER:]
    steps = list(itertools.chain(*done))
    peaks = [step.peak_bytes for step in steps]
    found = {
        "ratio": sum(times[-1]) / sum(plain_ms),
        "plain_s": sum(plain_ms) / 1e3,
        "num_passes": len(done),
        "longest_late": max(late),
        "num_long": sum(each > LONG for each in late),
        "longest_settled": max(excess[-len(trace) :]),
        "peak_gb": max(peaks) / 1e9,
        "settled_peak_gb": max(peaks[-len(trace) :]) / 1e9,
        "budget_gb": budget_bytes / 1e9,
        **peaks_of(steps, budget_bytes),
        "tokens": trace,
        "plain_ms": [round(each, 2) for each in plain_ms],
        "steps_ms": [round(each, 2) for each in every],
    }
    return found


class Side:
    """The model, its plain times, and sessions on it."""

    def __init__(
        self, model: str, traces: dict[str, list[int]], device: torch.device
    ) -> None:
        self.traces = traces
        row = row_of(f"{model}/full/8k/eager/ours")
        torch.manual_seed(0)
        most = max(itertools.chain(*traces.values()))
        self._is_tiny = row.model.startswith("tiny")
        self._model = build(row, device, most)
        self.trainer = Trainer(row, self._model, device)
        # The first step makes gradients and the optimizer's state.
        steps = [self.trainer.step(num) for num in (most, most, most)]
        self.plain_bytes = max(step.peak_bytes for step in steps[1:])

    def _plain_ms(self, trace: list[int]) -> list[list[float]]:
        """Of two passes."""
        return [ms_of([self.trainer.step(num) for num in trace]) for _ in range(2)]

    def trace(
        self,
        name: str,
        share: float,
        trace_s: float,
        note: Callable[[dict[str, Any]], None],
    ) -> dict[str, Any]:
        """One trace under a session of its own.

        Args:
            trace_s: time for all of it.
            note: is told what is known before the session begins.
        """
        import ssdtrain

        until = time.perf_counter() + trace_s
        trace = self.traces[name]
        first_ms, plain_ms = self._plain_ms(trace)
        plain = {"plain_first_ms": [round(each, 2) for each in first_ms]}
        note({"tokens": trace, "plain_ms": plain_ms, **plain})
        # A CPU's tensors are counted nowhere; this is as good as any.
        budget_bytes = int(share * self.plain_bytes) or 10**9
        more = {"min_bytes": 1} if self._is_tiny else {}
        with ssdtrain.offload(
            self._model,
            memory_budget=budget_bytes,
            **more,  # type: ignore[arg-type]
        ) as session:
            history = History(session)
            limit_s = (1 - LAST_SHARE) * (until - time.perf_counter())
            try:
                done = passes(self.trainer, trace, session, limit_s, history)
            except TimeoutError:
                peaks = peaks_of(history.steps, budget_bytes)
                note({"budget_gb": budget_bytes / 1e9, **peaks, **history.figures()})
                raise
            found = compared(trace, plain_ms, done, budget_bytes)
            report = session.last_step
            found |= {
                **history.figures(),
                "settled": session.is_settled,
                "planned": session.plan is not None,
                "fallbacks": {} if report is None else report.fallbacks,
            }
        later_ms = ms_of([self.trainer.step(num) for num in trace])
        return {**plain, **found, "plain_later_s": sum(later_ms) / 1e3}


def main(
    bench: cli.Bench,
    *,
    documents: Path,
    model: str = "qwen3-4b:12",
    most: int = 8192,
    share: float = 0.5,
    limit_s: float = 25.0,
    traces: tuple[str, ...] = tuple(NUM_STEPS),
) -> None:
    """Measure the traces.

    Args:
        most: tokens of a step
        share: of the plain peak
        limit_s: of a trace
    """
    settings = {"model": model, "most": most, "share": share}
    # Ratios are to the plain steps of the same process.
    cells = bench.cells({**settings, "device": bench.device.type}, anew=True)
    # A share of the plain peak of the longest step of all: budgets are alike, however
    # many of the traces are run here.
    side = Side(model, traces_of(most, document_lengths(documents)), bench.device)
    for at, name in enumerate(traces):
        own_s = max(0.0, cells.left_s()) / (len(traces) - at)
        trace_s, note = min(limit_s, own_s), partial(cells.note, name)
        limit = max(1.0, 1.3 * own_s)
        cells.run(name, side.trace, name, share, trace_s, note, limit_s=limit)
