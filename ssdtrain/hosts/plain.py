"""Plain PyTorch: any nn.Module in any loop.

The root's `forward` is wrapped on the instance, in a context manager. Not module
hooks: a forward_pre_hook/forward_hook pair leaks the saved-tensor hooks on
KeyboardInterrupt. And never inside a submodule: hooks pushed there lie inside
checkpointed regions and defeat non-reentrant checkpointing.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ssdtrain.hosts.hints import Hints
from ssdtrain.hosts.patch import Patches


def progress_of(modules: list[nn.Module]) -> Callable[[], int]:
    """A number that changes with every optimizer step: the version of a weight."""
    trainable = [p for m in modules for p in m.parameters() if p.requires_grad]
    if not trainable:
        return lambda: 0
    return lambda: trainable[0]._version


def attach(root: nn.Module, hints: Hints, patches: Patches, chunk: str) -> None:
    """Let every forward of `root` fill a lane."""
    inner = root.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return inner(*args, **kwargs)
        with hints.forward(chunk=chunk):
            return inner(*args, **kwargs)

    patches.mark(root)
    patches.set(root, "forward", forward)
