"""`torch.compile` around hector.

[Note: not traced] hector compiles by itself, and its compiler is Python: tracing it
takes minutes and finds nothing to fuse. Every door of the package is therefore closed
to `torch.compile`, which calls it as it is and goes on behind it.
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
        if "torch._dynamo" not in sys.modules or not _traces():
            return function(*args, **named)
        if disabled is None:
            disabled = cast("Callable[P, R]", torch.compiler.disable(function))
        return disabled(*args, **named)

    # What `torch.compiler.disable` marks its own wrapper with.
    marked: Any = call
    marked._torchdynamo_disable = True
    _skip_frame(marked.__code__)
    return call


def _traces() -> bool:
    """Whether frames that are called now would be traced; True where a version does not
    tell. Asking takes a tenth of what the wrapper does."""
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    callback = getattr(frames, "get_eval_frame_callback", None)
    return callback is None or callback() is not None


def _skip_frame(code: Any) -> None:
    """Tell PyTorch's frame evaluation to run `call` itself as it is. Where a version
    has no such function the frame is compiled, around a call that is not."""
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    action = getattr(frames, "_FrameAction", None)
    if action is not None and hasattr(frames, "set_code_exec_strategy"):
        strategy = frames._FrameExecStrategy(action.SKIP, action.DEFAULT)
        frames.set_code_exec_strategy(code, strategy)
