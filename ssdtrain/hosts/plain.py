"""Plain PyTorch: any nn.Module in any loop.

The root's `forward` is wrapped on the instance, in a context manager. Not module
hooks: a forward_pre_hook/forward_hook pair leaks the saved-tensor hooks on
KeyboardInterrupt. And never inside a submodule: hooks pushed there lie inside
checkpointed regions and defeat non-reentrant checkpointing.

[Note: Who has stepped] An optimizer step is seen by the version of a weight, whoever
wrote it. Fused optimizers (`fused=True`, the default of transformers.Trainer) leave the
version as it was, so torch's hook behind every optimizer's step counts as well.
Test: tests/ssdtrain/hosts/test_plain.py.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ssdtrain.hosts.hints import Hints
from ssdtrain.hosts.patch import Patches


def progress_of(modules: list[nn.Module], patches: Patches) -> Callable[[], int]:
    """A number that changes with every optimizer step; see [Note: Who has stepped]."""
    trainable = [p for m in modules for p in m.parameters() if p.requires_grad]
    if not trainable:
        return lambda: 0
    own = {id(parameter) for parameter in trainable}
    counted = [0]

    def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        groups = (group["params"] for group in optimizer.param_groups)
        if any(id(parameter) in own for group in groups for parameter in group):
            counted[0] += 1

    patches.also(register_optimizer_step_post_hook(stepped).remove)
    return lambda: trainable[0]._version + counted[0]


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
