"""`torch.compile` around hector.

[Note: not traced] hector compiles by itself, and its compiler is Python: tracing it
takes minutes and finds nothing to fuse. Every door of the package is therefore closed
to `torch.compile`, which calls it as it is and goes on after it.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Run `function` outside of what `torch.compile` traces.

    As `torch.compiler.disable`, which would import PyTorch's compiler (seconds) for
    programs that never ask for it.
    """
    disabled: Callable[P, R] | None = None

    @functools.wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> R:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules or _TRACES() is None:
            return function(*args, **named)
        if disabled is None:
            disabled = cast("Callable[P, R]", torch.compiler.disable(function))
        return disabled(*args, **named)

    # What `torch.compiler.disable` marks its own wrapper with.
    marked: Any = call
    marked._torchdynamo_disable = True
    _skip_frame(marked.__code__)
    return call


_FRAMES: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
_SKIPS = all(
    hasattr(_FRAMES, name) for name in ("_FrameAction", "set_code_exec_strategy")
)
_TRACES: Callable[[], Any] = (
    getattr(_FRAMES, "get_eval_frame_callback", bool) if _SKIPS else bool
)
"""None where frames that are called now are not traced. Not Python, which would be
traced itself; asking takes a tenth of what `torch.compiler.disable` does."""


def _skip_frame(code: Any) -> None:
    """Tell PyTorch's frame evaluation to run `call` itself as it is. Where a version
    has no such function the frame is compiled, around a call that is not."""
    if _SKIPS:
        action = _FRAMES._FrameAction
        strategy = _FRAMES._FrameExecStrategy(action.SKIP, action.DEFAULT)
        _FRAMES.set_code_exec_strategy(code, strategy)
