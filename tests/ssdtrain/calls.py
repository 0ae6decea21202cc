"""Counts what the host calls: what it costs, on any machine."""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def calls_of(
    function: Callable[[], Any], kinds: tuple[str, ...] = ("call", "c_call")
) -> tuple[Any, int]:
    """What it returns, and the functions that it calls in this thread: of Python's
    ("call"), of C's ("c_call"). The garbage collector, which may come at any of them,
    does not."""
    num_calls = 0

    def profiled(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal num_calls
        num_calls += event in kinds

    before, enabled = sys.getprofile(), gc.isenabled()
    gc.disable()
    sys.setprofile(profiled)
    try:
        found = function()
    finally:
        sys.setprofile(before)
        if enabled:
            gc.enable()
    return found, num_calls - 1  # its own
