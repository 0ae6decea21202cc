"""What torch.compile must not trace.

[Note: compiled models]
A compiled region saves its tensors through our hooks when it runs, and they work as
ever. But Dynamo compiles whatever Python runs inside a compiled model, and that would
be the hooks themselves (locks, storages, finalizers: wrong book-keeping) and the
wrapper around the root's forward (which, traced, would do nothing at all). So both are
left out: the wrapper is a graph break, and the forward inside it is compiled.

`torch.compiler.disable` around a function costs more than most rows of a table do. So
Dynamo is told once, of every function in the rooms that the hooks enter, to run it as
it is. What is not ours (a user's recipe) is reached through the general path, which is
disabled as a whole, unless Dynamo looks at no frame of this thread (`tracer`).
(tests/ssdtrain/engines/test_compile.py)
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback

Function = TypeVar("Function", bound=Callable[..., Any])
tracer: Callable[[], Any] = get_eval_frame_callback
"""What Dynamo does to frames that begin in this thread; None: nothing."""


def untraced(function: Function) -> Function:
    """The function, which Dynamo leaves alone; itself where there is no Dynamo yet."""
    if "torch._dynamo" not in sys.modules:
        return function
    return torch.compiler.disable(function)  # type: ignore[no-any-return]


def leave_alone(*packages: str) -> bool:
    """Let Dynamo run every function of these packages as it is, and look no further.

    Returns:
        False where there is no Dynamo yet, or it cannot be told.
    """
    if "torch._dynamo" not in sys.modules:
        return False
    try:
        from torch._dynamo.eval_frame import skip_code
    except ImportError:  # another torch: every call is disabled instead
        return False
    for name, module in list(sys.modules.items()):
        if name.startswith(packages):
            for code in _codes_of(module):
                skip_code(code)
    return True


def _codes_of(module: ModuleType) -> Iterator[CodeType]:
    classes = [v for v in vars(module).values() if isinstance(v, type)]
    for space in (module, *classes):
        if getattr(space, "__module__", module.__name__) != module.__name__:
            continue
        for value in vars(space).values():
            value = getattr(value, "fget", value)
            value = getattr(value, "__func__", value)
            if isinstance(value, FunctionType) and value.__module__ == module.__name__:
                yield from _nested(value.__code__)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


class Untraced(AbstractContextManager[None]):
    """A context whose two ends are untraced, around code that may be compiled."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make

    def __enter__(self) -> None:
        untraced(self._enter)()

    def _enter(self) -> None:
        self._scope = self._make()
        self._scope.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return untraced(self._scope.__exit__)(*error)
