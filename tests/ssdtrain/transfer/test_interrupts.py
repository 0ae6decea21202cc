"""Ctrl-C at any moment: see [Note: interrupts] in ssdtrain/transfer/offloader.py."""

import dis
import functools
import itertools
import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from recipes.bench.safety.interrupts import Net, held, step
from ssdtrain.transfer.device import CpuDevice
from ssdtrain.transfer.pinned import PinnedPool
from tests.ssdtrain.bits import same_bits

PAGE = 4096
STRIDE = 1201


def test_a_buffer_that_nobody_holds_comes_back() -> None:
    pool = PinnedPool(CpuDevice(), 4 * PAGE)
    first, second = pool.take(PAGE), pool.take(2 * PAGE)
    assert first is not None and second is not None
    del first
    assert pool.used_bytes == 2 * PAGE and pool.total_bytes == 3 * PAGE
    again = pool.take(PAGE)
    assert again is not None and pool.total_bytes == 3 * PAGE
    pool.give(again)
    pool.give(second)
    assert pool.used_bytes == 0
    pool.close()
    assert pool.total_bytes == 0


@functools.cache
def exits_of(code: CodeType) -> frozenset[int]:
    """Where the `with` of a lock, or of one of torch's guards in C, is left without an
    error. CPython looks for signals at calls and jumps, and not between the last of
    them inside and the end of `__exit__`, where that is no function of Python."""
    starts: dict[int, list[int]] = {}
    for start, number in dis.findlinestarts(code):
        starts.setdefault(number, []).append(start)
    entered, line = set(), -1
    for instruction in dis.get_instructions(code):
        line = instruction.starts_line or line
        if instruction.opname in ("BEFORE_WITH", "SETUP_WITH"):
            text = linecache.getline(code.co_filename, line)
            if "lock" in text or "torch._C." in text:
                entered.add(line)
    return frozenset(start for line in entered for start in sorted(starts[line])[1:])


@contextmanager
def interrupted(at: int, inside: Callable[[str], bool]) -> Iterator[list[str]]:
    """Raises KeyboardInterrupt before line number `at` of those that run in files of
    ssdtrain that `inside` wants; gives the place, if it came so far."""
    count, places = 0, []
    wanted = functools.cache(inside)

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        if not wanted(frame.f_code.co_filename):
            return None
        exits = exits_of(frame.f_code)

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal count
            if event == "line" and frame.f_lasti not in exits:
                count += 1
                if count == at:
                    places.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
                    raise KeyboardInterrupt
            return trace

        return trace

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield places
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("plan", ["offload-all", "auto"])
@pytest.mark.parametrize("target", ["host", "ssd"])
def test_an_interrupt_before_any_line_leaves_nothing(
    target: str, plan: str, tmp_path: Path
) -> None:
    """Places of a step, a prime stride apart."""
    tmp_path.chmod(0o700)
    settings: dict[str, Any] = {"target": target, "plan": plan, "min_bytes": 0}
    settings |= {"max_overhead": 1.0, "window_bytes": 1, "host_bytes": 1 << 26}
    if target == "ssd":
        settings["directory"] = str(tmp_path)
    torch.manual_seed(0)
    net: nn.Module = Net()
    expected = step(net)
    rooms = tuple(
        f"ssdtrain/{room}/" for room in ("cache", "observe", "transfer", "hosts")
    )
    places: list[str] = []
    with ssdtrain.offload(net, **settings) as session:
        for _ in range(4):
            step(net)
            session.hints.step_end()
        at = 1
        while True:
            with interrupted(at, lambda name: any(room in name for room in rooms)) as p:
                try:
                    step(net)
                except KeyboardInterrupt:
                    places += p
            if not p:
                break
            assert held(session) == "", places[-1]
            assert same_bits(step(net), expected), places[-1]
            session.hints.step_end()
            at += STRIDE
    assert len(places) > 4
    assert not list(tmp_path.iterdir())


ENDS = {
    "cache/lanes.py": "end:",
    "cache/quiet.py": "__exit__:",
    "engines/hints.py": "forward:",
}
"""Functions that end a forward, by their file."""


@pytest.mark.parametrize("file", ENDS)
def test_a_forward_that_is_interrupted_at_its_end_is_finished(file: str) -> None:
    """Every line of a forward's beginning and end, under a table."""
    torch.manual_seed(0)
    net = Net()
    with ssdtrain.offload(
        net, target="host", plan="auto", min_bytes=0, max_overhead=1.0
    ) as session:
        for _ in range(4):
            step(net)
            session.hints.step_end()
        lanes, places = session.cache.lanes, []
        for at in itertools.count(1):
            with interrupted(at, lambda name: name.endswith(file)) as place:
                try:
                    step(net)
                except KeyboardInterrupt:
                    places += place
            if not place:
                break
            assert held(session) == "", places[-1]
            assert lanes.is_idle and session.cache.retired.num_alive == 0, places[-1]
            top = torch._C._autograd._top_saved_tensors_default_hooks(True)
            assert top is None, places[-1]
            session.hints.step_end()
    assert sum(place.startswith(ENDS[file]) for place in places) > 2, places
