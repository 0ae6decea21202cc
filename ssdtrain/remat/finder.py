"""Finds the recipe of a tensor at the moment it is saved."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ssdtrain.remat.attention import ATTENTION
from ssdtrain.remat.constants import (
    UNFUSED_GELU_ADDEND,
    ModuleConstants,
    is_unfused_gelu,
)
from ssdtrain.remat.dropout import DROPOUT, Draws
from ssdtrain.remat.elementwise import ELEMENTWISE
from ssdtrain.remat.expression import Expression
from ssdtrain.remat.fast import Kernels
from ssdtrain.remat.layout import LAYOUT
from ssdtrain.remat.norms import NORMS
from ssdtrain.remat.producer import Keeper, Producer, Sources
from ssdtrain.remat.registry import DEFAULT, Registry

Set = Callable[[Any, str, Any], None]
"""Replaces an attribute of an instance, and can undo it."""


def built_in() -> Registry:
    """The recipes that come with ssdtrain."""
    registry = ELEMENTWISE
    for more in (NORMS, LAYOUT, DROPOUT, ATTENTION):
        registry = registry.merged(more)
    return registry


class Finder:
    """Recipes of one session."""

    def __init__(
        self, registry: Registry | None = None, kernels: Kernels | None = None
    ) -> None:
        self._registry = registry or built_in().merged(DEFAULT)
        self._constants = ModuleConstants()
        self._draws = Draws()
        self._kernels = kernels or Kernels()

    def attach(self, root: nn.Module, replace: Set) -> None:
        """Learn the model's constants, and listen to its dropouts."""
        modules = list(root.modules())
        self._constants.collect(modules)
        for module in modules:
            if type(module) is nn.Dropout and "forward" not in vars(module):
                replace(module, "forward", self._around_dropout(module))
            elif is_unfused_gelu(module) and "forward" not in vars(module):
                replace(module, "forward", self._around_gelu(module))

    def find(self, tensor: Tensor, keeper: Keeper) -> Expression | None:
        """How to make this base tensor again; None without a recipe."""
        if tensor.grad_fn is None:
            drawn = self._draws.expression(tensor)
            return self._kernels.offer(drawn, tensor, None)
        if tensor._version != 0:
            # The node made version 0; something has changed it since.
            return None
        recipe = self._registry.find(tensor.grad_fn.name())
        if recipe is None:
            return None
        sources = Sources(keeper, self._constants, self._registry.find)
        node = Producer(tensor.grad_fn, tensor.output_nr, sources, tensor, 0)
        return self._kernels.offer(recipe(node), tensor, node)

    def _around_dropout(self, module: nn.Dropout) -> Callable[..., Any]:
        """Its forward, listened to.

        A bound method, as the class's own is: a copy of the model rebinds it to the
        copied module, and a pickle stores the class's.
        """
        draws = self._draws

        def forward(self: nn.Dropout, input: Tensor) -> Tensor:
            if torch.compiler.is_compiling():
                return type(self).forward(self, input)
            with draws.around(self, input):
                return type(self).forward(self, input)

        return MethodType(forward, module)

    def _around_gelu(self, module: nn.Module) -> Callable[..., Any]:
        """As `_around_dropout`."""
        constants = self._constants

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return type(self).forward(self, *args, **kwargs)
            with constants.adding(UNFUSED_GELU_ADDEND):
                return type(self).forward(self, *args, **kwargs)

        return MethodType(forward, module)
