"""What `offload` was given: modules and their device, or what to give instead."""

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from ssdtrain.errors import AttachError

INSTEAD = {
    ("transformers", "Trainer"): "give the Trainer "
    "callbacks=[ssdtrain.OffloadCallback(...)]",
    ("lightning", "Trainer"): "give the Trainer "
    "callbacks=[ssdtrain.LightningCallback(...)]",
    ("pytorch_lightning", "Trainer"): "give the Trainer "
    "callbacks=[ssdtrain.LightningCallback(...)]",
    ("accelerate", "Accelerator"): "pass the model that accelerator.prepare(...) "
    "returned",
    ("torch", "Optimizer"): "pass the model that it trains",
    ("torchtitan", "Trainer"): "pass its model_parts",
}
"""By package and class, subclasses too: what to do with it."""
LIGHTNING = ("lightning", "pytorch_lightning")
"""Packages that a LightningModule may come from."""
AUTOMATIC = "automatic_optimization"
"""Attribute of a LightningModule: whether Lightning runs its backward."""
CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Whose members are called, and not they."""


def checked_modules(model: Any) -> list[nn.Module]:
    """The modules whose forward a loop calls.

    Raises:
        AttachError: there is none; says what to pass.
    """
    modules = given(model)
    for module in modules:
        if not isinstance(module, nn.Module):
            raise AttachError(
                "offload() expects an nn.Module, a DeepSpeed engine or a list of "
                f"modules, got {type(module).__name__}; {_instead_of(module)}."
            )
    if not modules:
        raise AttachError("offload() expects at least one module, got an empty list.")
    return [part for module in modules for part in called_of(module)]


def given(model: Any) -> list[Any]:
    """What `offload` was given, as a list."""
    return list(model) if isinstance(model, (list, tuple)) else [model]


def lightning_of(module: nn.Module) -> type | None:
    """Lightning's own class among those of a LightningModule; None: it is none."""
    for kind in type(module).__mro__:
        home = kind.__module__.partition(".")[0]
        if kind.__name__ == "LightningModule" and home in LIGHTNING:
            return kind
    return None


def called_of(module: nn.Module) -> list[nn.Module]:
    """What a loop calls of a module: itself, or the trained parts of a LightningModule
    without a forward whose `training_step` runs backward by hand."""
    kind = lightning_of(module)
    if kind is None or getattr(module, AUTOMATIC, False):
        return [module]
    if getattr(type(module), "forward", None) is not getattr(kind, "forward", None):
        return [module]
    found: list[nn.Module] = []
    waiting = list(module.children())
    while waiting:
        part = waiting.pop(0)
        if isinstance(part, CONTAINERS):
            waiting[:0] = part.children()
        elif any(each.requires_grad for each in part.parameters()):
            found.append(part)
    return found or [module]


def _instead_of(found: Any) -> str:
    for kind in type(found).__mro__:
        known = INSTEAD.get((kind.__module__.partition(".")[0], kind.__name__))
        if known is not None:
            return known
    return "pass the model itself"


def device_of(modules: list[nn.Module]) -> torch.device:
    """Where the modules compute. Not always where their parameters rest: FSDP2 may keep
    its shards in host memory.

    Raises:
        AttachError: no parameter tells, or they have no memory yet.
    """
    for module in modules:
        for parameter in nn.Module.parameters(module):
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None and mesh.device_type == "cuda":
                return torch.device("cuda", torch.cuda.current_device())
            if parameter.is_meta:
                raise AttachError(
                    "offload() found parameters on the meta device, which have no "
                    "memory yet; call it after to_empty() or the loading of weights."
                )
            return parameter.device
    raise AttachError(
        "offload() found no parameter in the model, so there is nothing to train and "
        "no device to work on; pass the model that is trained."
    )


class Own:
    """The parameters of a model, by identity.

    They may be replaced while a session lives (`load_state_dict(assign=True)`, adapters
    that come later): where an optimizer has none of them, the model is asked again.
    It holds no module: torch's list of hooks, which holds this, is the process's.
    (tests/ssdtrain/engines/test_plain.py)
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._ids: set[int] = set()
        self._ask()

    def trains(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer has one of them."""
        return self._has(optimizer) or (self._ask() and self._has(optimizer))

    def _has(self, optimizer: Optimizer) -> bool:
        groups = (group["params"] for group in optimizer.param_groups)
        return any(id(each) in self._ids for group in groups for each in group)

    def _ask(self) -> bool:
        """Look which they are now; whether there is any."""
        self._ids = {
            id(parameter)
            for module in (own() for own in self._modules)
            if module is not None
            for parameter in nn.Module.parameters(module)
            if parameter.requires_grad
        }
        return bool(self._ids)
