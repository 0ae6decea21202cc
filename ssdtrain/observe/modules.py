"""Names the module whose forward is running, for the profile.

Only while a step is observed: plain hooks on every submodule, removed after it. They
carry no saved-tensor hooks. Models with compiled parts get no names, because hooks
would make torch compile them again.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class ModuleNames:
    """Tracks the path of the innermost module whose forward runs."""

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self._roots = list(roots)
        self._handles: list[RemovableHandle] = []
        self._stack: list[str] = []

    @property
    def now(self) -> str:
        """The path, such as `blocks.3.mlp`; empty outside of all modules."""
        return self._stack[-1] if self._stack else ""

    def start(self) -> None:
        """Register forward hooks on every submodule."""
        self.stop()
        for root in self._roots:
            if any(_is_compiled(module) for module in root.modules()):
                continue
            for path, module in root.named_modules():
                # A scripted module takes no such hook; its parent's name stands for it.
                if path and not isinstance(module, torch.jit.ScriptModule):
                    self._listen(path, module)

    def stop(self) -> None:
        """Remove all hooks. Idempotent."""
        while self._handles:
            self._handles.pop().remove()
        self._stack.clear()

    def _listen(self, path: str, module: nn.Module) -> None:
        before, behind = _Before(self._stack, path), _Behind(self._stack)
        self._handles.append(module.register_forward_pre_hook(before))
        self._handles.append(module.register_forward_hook(behind, always_call=True))


class _Hook:
    """A hook of an observed step. A copy of the module, or one that was saved, has one
    that does nothing, and that needs no ssdtrain to be loaded."""

    def __init__(self, stack: list[str]) -> None:
        self._stack = stack

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy or pickle a function that takes anything and returns None."""
        return getattr, (nullcontext(), "__exit__")


class _Before(_Hook):
    def __init__(self, stack: list[str], path: str) -> None:
        super().__init__(stack)
        self._path = path

    def __call__(self, module: nn.Module, args: Any) -> None:
        """The forward of a module begins."""
        self._stack.append(self._path)


class _Behind(_Hook):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """It has ended."""
        if self._stack:
            self._stack.pop()


def _is_compiled(module: nn.Module) -> bool:
    name = type(module).__name__
    return name == "OptimizedModule" or module._compiled_call_impl is not None
