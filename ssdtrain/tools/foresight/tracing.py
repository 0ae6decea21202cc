"""Profiles a training step and gives its operators' host times."""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ssdtrain.tools.foresight.overheads import TracedOperator, operators_of

Step = Callable[[], Any]


def composites() -> frozenset[str]:
    """Operators of which every overload only calls others (`aten::linear`)."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key
    implicit = set(registered("CompositeImplicitAutograd"))
    plain = {
        name
        for name in torch._C._dispatch_get_all_op_names()
        if not name.endswith("out") and name not in implicit
    }
    names = {name.partition(".")[0] for name in implicit}
    return frozenset(names - {name.partition(".")[0] for name in plain})


def traced(step: Step, num_steps: int = 2) -> list[TracedOperator]:
    """The operators of `num_steps` profiled steps, shapes included."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        for _ in range(num_steps):
            step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="ssdtrain-") as directory:
        path = Path(directory) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_bytes())["traceEvents"]
    return operators_of(events, composites())


def step_us(step: Step, *, num_warm: int = 3, seconds: float = 0.3) -> float:
    """Microseconds of one step in the steady state, without a profiler."""
    sync = torch.cuda.synchronize if torch.cuda.is_available() else bool
    for _ in range(num_warm):
        step()
    sync()
    now = time.perf_counter if torch.cuda.is_available() else cpu_clock()
    began, count = now(), 0
    while count < 3 or now() - began < seconds:
        step()
        count += 1
        if count % 8 == 0:
            sync()  # the host does not run ahead without bound
    sync()
    return (now() - began) / count * 1e6


def cpu_clock() -> Callable[[], float]:
    """Seconds of work on a CPU: the thread's own where torch uses one thread, which
    stand still while others have the core."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
