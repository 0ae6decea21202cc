"""For how much of a forward the device waits, as its own profiler sees it."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

MARK = "spin_kernel"
"""What `torch.cuda._sleep` launches: nobody else does."""


class Span(NamedTuple):
    """A kernel, copy or fill on one stream."""

    name: str
    stream: int
    start_ns: int
    end_ns: int


def idle_share(spans: Iterable[Span]) -> float:
    """The part of the last forward in which nothing ran on the marks' stream.

    Every forward stands between two spans called `MARK`.

    Raises:
        ValueError: no forward stands between marks.
    """
    in_order = sorted(spans, key=lambda span: span.start_ns)
    marks = [span for span in in_order if MARK in span.name]
    if len(marks) < 2 or len(marks) % 2:
        raise ValueError(f"expects two marks a forward, got {len(marks)}")
    first, last = marks[-2:]
    busy_ns, until_ns = 0, first.end_ns
    for span in in_order:
        inside = first.end_ns <= span.start_ns and span.end_ns <= last.start_ns
        if span.stream != first.stream or not inside:
            continue
        busy_ns += max(0, span.end_ns - max(span.start_ns, until_ns))
        until_ns = max(until_ns, span.end_ns)
    return 1 - busy_ns / (last.start_ns - first.end_ns)


def measured(step: Callable[[Callable[[], None]], Any], num_steps: int = 3) -> float:
    """Run steps under the device's profiler: the last one's idle share of forward.

    Args:
        step: a training step that calls what it is given before and behind its forward.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(num_steps):
            step(lambda: torch.cuda._sleep(1))
        torch.cuda.synchronize()
    results: Any = profiler.profiler
    return idle_share(
        Span(
            each.name(),
            each.device_resource_id(),
            each.start_ns(),
            each.start_ns() + each.duration_ns(),
        )
        for each in results.kineto_results.events()
        if each.device_type() == torch.autograd.DeviceType.CUDA
    )
