"""`ssdtrain.no_offload()`: saved tensors that stay where they are.

[Note: only the innermost]
Autograd asks the innermost saved-tensor hooks alone. Inside a forward of a session the
scope therefore puts hooks that keep on top of the session's. Where other hooks are on
top (a checkpointed region drops what is saved in it) it does nothing: kept tensors
would take from those what they are for. So it does nothing in the re-run of a region
either, where each tensor has the place that it had in the forward.
(tests/ssdtrain/cache/test_scope.py)
"""

from contextlib import ContextDecorator
from types import TracebackType
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ssdtrain.cache.traced import untraced

OWNER = "_ssdtrain_cache"
"""Attribute of a session's pack hook: its cache."""
HOLD = "_ssdtrain_hold"
"""Attribute of the same: what lives as long as anything that was saved under it."""


def owned(pack: Any, cache: Any, hold: object = None) -> Any:
    """The pack hook, with a mark of whose it is, and with what is to live with it."""

    def marked(tensor: torch.Tensor) -> Any:
        return pack(tensor)

    hook = marked if hasattr(pack, "__self__") else pack  # a method takes no mark
    setattr(hook, OWNER, cache)
    setattr(hook, HOLD, hold)
    return hook


def innermost_cache() -> Any:
    """The cache whose hooks autograd asks now; None if they are somebody else's."""
    # torch has no public name for it (2.11 to 2.13).
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if top is None else getattr(top[0], OWNER, None)


class NoOffload(ContextDecorator):
    """A scope, or a decorator, inside a forward: what autograd saves in it is neither
    moved nor rebuilt.

        with ssdtrain.no_offload():
            scores = self.router(x)

    Outside a session, inside a checkpointed region and in backward it does nothing.
    """

    def __init__(self) -> None:
        self._open: list[saved_tensors_hooks | None] = []

    def _recreate_cm(self) -> "NoOffload":
        return NoOffload()  # calls of a decorated function may nest, in any thread

    def __enter__(self) -> "NoOffload":
        untraced(self._push)()
        return self

    def _push(self) -> None:
        cache = innermost_cache()
        hooks = None
        if cache is not None:
            pack = owned(untraced(cache.pack_staying), cache)
            hooks = saved_tensors_hooks(pack, untraced(cache.unpack))
            hooks.__enter__()
        self._open.append(hooks)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        untraced(self._pop)()

    def _pop(self) -> None:
        hooks = self._open.pop()
        if hooks is not None:
            hooks.__exit__()


def no_offload() -> NoOffload:
    """Leave what autograd saves in this scope where it is; see `NoOffload`."""
    return NoOffload()
