"""What torch.compile must not trace.

[Note: compiled models]
A compiled region saves its tensors through our hooks when it runs, and they work as
ever. But Dynamo compiles whatever Python runs inside a compiled model, and that would
be the hooks themselves (locks, storages, finalizers: wrong book-keeping) and the
wrapper around the root's forward (which, traced, would do nothing at all). So both are
left out: the wrapper is a graph break, and the forward inside it is compiled.
(tests/ssdtrain/hosts/test_compile.py)
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """The function, which Dynamo leaves alone; itself where there is no Dynamo yet."""
    if "torch._dynamo" not in sys.modules:
        return function
    return torch.compiler.disable(function)  # type: ignore[no-any-return]


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
