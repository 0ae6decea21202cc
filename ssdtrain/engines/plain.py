"""Plain PyTorch: any nn.Module in any loop.

The root's `forward` is wrapped on the instance, in a context manager. Not module
hooks: a forward_pre_hook/forward_hook pair leaks the saved-tensor hooks on
KeyboardInterrupt. And never inside a submodule: hooks pushed there lie inside
checkpointed regions and defeat non-reentrant checkpointing.

[Note: Whose forward] The wrapper is a bound method: `copy.deepcopy` and pickle bind it
to the copy (an average of the weights, say), which runs its own forward and is no model
of the session. Others may wrap it again (Accelerate's autocast); close then leaves
theirs in place, and ours in it passes everything through.

[Note: Who has stepped] An optimizer step is seen by the version of a weight, whoever
wrote it. Fused optimizers (`fused=True`, the default of transformers.Trainer) leave the
version as it was, so torch's hook after every optimizer's step counts as well; it also
sees the steps of weights that replaced those of before.
Test: tests/ssdtrain/engines/test_plain.py.
"""

import functools
import inspect
from collections import UserDict
from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit._trace import TopLevelTracedModule
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ssdtrain.cache.traced import Untraced, tracer
from ssdtrain.engines.hints import Hints
from ssdtrain.engines.meshes import ranks_of
from ssdtrain.engines.patch import Patches
from ssdtrain.engines.peers import peers_of
from ssdtrain.engines.recognition import AUTOMATIC, Own, lightning_of
from ssdtrain.errors import AttachError
from ssdtrain.gathered import is_gathering
from ssdtrain.plan.agree import Peers
from ssdtrain.regions.kvcaches import asks_for_cache

MOST_NESTED = 3
"""Containers in containers whose tensors are counted."""


class Plain:
    """Any loop. An engine inherits from it and overrides what its framework knows
    better; `ENGINES` of engines/known.py lists them."""

    moves_weights = False
    """Whether it moves parameters about as it likes."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules
        """Whose saved tensors are looked after."""

    def progress(self, patches: Patches) -> Callable[[], int]:
        """A number that changes with every optimizer step; see [Note: Who has
        stepped]."""
        trainable = [p for m in self.modules for p in m.parameters() if p.requires_grad]
        own = Own(self.modules)
        counted = [0]

        def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            counted[0] += own.trains(optimizer)

        patches.also(register_optimizer_step_post_hook(stepped).remove)
        if not trainable:  # adapters may come
            return lambda: counted[0]
        return lambda: trainable[0]._version + counted[0]

    def peers(self, alone: Callable[[], None]) -> Peers:
        """The ranks that follow one plan: those that hold other parts, or other copies,
        of the same parameters.

        alone: told of every plan that this rank made by itself.
        """
        return peers_of(sorted(ranks_of(self.modules)), alone)

    def attach(
        self, hints: Hints, patches: Patches, keep: Callable[[Tensor], None]
    ) -> None:
        """Let every forward fill a lane.

        Args:
            hints: told what the schedule does.
            patches: what puts everything back.
            keep: never move the storage of this tensor.

        Raises:
            AttachError: this model or version must be refused.
        """
        for number, module in enumerate(self.modules):
            attach(module, hints, patches, chunk_name(number))


def chunk_name(chunk: int) -> str:
    """The name of a chunk's lanes."""
    return f"model{chunk or ''}"


def attach(root: nn.Module, hints: Hints, patches: Patches, chunk: str) -> None:
    """Let every forward of `root` fill a lane; see [Note: Whose forward].

    Raises:
        AttachError: its forward cannot be wrapped.
    """
    if isinstance(root, TopLevelTracedModule):
        raise AttachError(
            "offload() wraps the forward of the module that it is given, and a traced "
            "module has none in Python; put it into an nn.Module that calls it."
        )
    patches.mark(root)
    if is_gathering(root):
        _watch_call(root, hints, patches)
    for name in entries_of(root):
        _wrap(root, name, hints, patches, chunk)


def entries_of(root: nn.Module) -> tuple[str, ...]:
    """The methods that a training loop calls: `forward`, and `training_step` of a
    LightningModule whose backward Lightning runs."""
    if lightning_of(root) is not None and getattr(root, AUTOMATIC, False):
        return ("training_step", "forward")
    return ("forward",)


def _watch_call(root: nn.Module, hints: Hints, patches: Patches) -> None:
    """Tell of every call of the root before its hooks run. It is a hook that opens
    nothing, so an interrupt leaves nothing open."""

    def called(module: nn.Module, args: Any) -> None:
        if module is root:  # see [Note: Whose forward]
            hints.root_is_called()

    hook = torch.compiler.disable(called)
    patches.also(root.register_forward_pre_hook(hook, prepend=True).remove)


def _wrap(
    root: nn.Module, name: str, hints: Hints, patches: Patches, chunk: str
) -> None:
    before = vars(root).get(name)
    attached = [True]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inner = method_of(self, name, before)
        if self is not root or not attached:
            return inner(*args, **kwargs)
        # Here: what is untraced sees no compiler around it.
        if tracer():
            hints.is_compiled()
        size = num_elements((*args, *kwargs.values()))
        asks = asks_for_cache(args, kwargs)
        around = partial(
            hints.forward, chunk=chunk, num_elements=size, asks_for_cache=asks
        )
        with Untraced(around):
            return inner(*args, **kwargs)

    look_like(forward, getattr(root, name))
    # Only this frame: what it calls may be compiled. See [Note: compiled models].
    forward = torch.compiler.disable(forward, recursive=False)
    patches.set(root, name, MethodType(forward, root))
    patches.also(attached.clear)


def num_elements(arguments: Iterable[Any]) -> int:
    """Of the tensors among them, in containers of Python's own as well. No function
    mode sees the question."""
    with torch._C.DisableTorchFunction():
        return _num_elements(arguments, MOST_NESTED)


def _num_elements(arguments: Iterable[Any], most_nested: int) -> int:
    found = 0
    for each in arguments:
        if isinstance(each, Tensor):
            found += 0 if each.is_nested else each.numel()
        elif not most_nested:
            continue
        elif isinstance(each, list | tuple):
            found += _num_elements(each, most_nested - 1)
        elif isinstance(each, dict | UserDict):  # as a tokenizer's batch
            found += _num_elements(each.values(), most_nested - 1)
    return found


def method_of(module: nn.Module, name: str, before: Any) -> Callable[..., Any]:
    """The method that `module` would have without us; `before` is the attribute that
    hid its class's own when we came."""
    if before is None:
        return MethodType(getattr(type(module), name), module)
    if isinstance(before, MethodType) and isinstance(before.__self__, nn.Module):
        return MethodType(before.__func__, module)
    return before  # type: ignore[no-any-return]


def look_like(method: Callable[..., Any], inner: Callable[..., Any]) -> None:
    """Name and signature of a bound `inner`; others read them (transformers.Trainer
    drops the columns that `forward` does not name)."""
    functools.update_wrapper(method, inner)
    signature = inspect.signature(inner)
    own = inspect.Parameter("module", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [own, *signature.parameters.values()]
    changed = signature.replace(parameters=parameters)
    method.__signature__ = changed  # type: ignore[attr-defined]
