"""Finds the recipe of a tensor at the moment it is saved."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ssdtrain.remat.attention import ATTENTION, DEAR_ATTENTION
from ssdtrain.remat.chains import CHAINS
from ssdtrain.remat.compiled import Compiled, Trail
from ssdtrain.remat.dropout import DROPOUT, Draws, saw
from ssdtrain.remat.elementwise import ELEMENTWISE
from ssdtrain.remat.expression import Expression
from ssdtrain.remat.fast import Kernels
from ssdtrain.remat.layout import LAYOUT
from ssdtrain.remat.norms import NORMS
from ssdtrain.remat.producer import Producer, Sources
from ssdtrain.remat.products import PRODUCTS
from ssdtrain.remat.purity import Purity
from ssdtrain.remat.questions import Asking, Keeper
from ssdtrain.remat.registry import DEFAULT, Registry
from ssdtrain.remat.scene import Scene, operators_frame

Set = Callable[[Any, str, Any], Any]
"""Replaces an attribute of an instance, and can undo it."""


def built_in() -> Registry:
    """The recipes that need no plan to weigh them."""
    registry = ELEMENTWISE
    for more in (NORMS, LAYOUT, DROPOUT, ATTENTION):
        registry = registry.merged(more)
    return registry


def with_dear() -> Registry:
    """All recipes that come with ssdtrain, and the user's own."""
    registry = built_in()
    for more in (PRODUCTS, DEAR_ATTENTION, CHAINS, DEFAULT):
        registry = registry.merged(more)
    return registry


class Found(NamedTuple):
    """A recipe that was found."""

    expression: Expression
    trail: Trail | None
    """What was asked for it; None: it cannot be asked again."""


def guarded(expression: Expression) -> Expression:
    """The expression, and others of the same tensor, under a digest."""
    faster = tuple(guarded(each) for each in expression.faster)
    return replace(expression, is_guarded=True, faster=faster)


class Finder:
    """Recipes of one session."""

    def __init__(
        self,
        registry: Registry | None = None,
        kernels: Kernels | None = None,
        *,
        guards: bool = False,
    ) -> None:
        self._guards = guards
        self._registry = registry or built_in().merged(DEFAULT)
        self._purity = Purity()
        self._draws = Draws()
        self._kernels = kernels or Kernels()
        self.is_idle: Callable[[], bool] = lambda: False
        """Whether nobody will ask how what runs now is made."""

    def attach(self, root: nn.Module, replace: Set) -> None:
        """Listen to the model's dropouts."""
        for module in list(root.modules()):
            if type(module) is nn.Dropout and "forward" not in vars(module):
                replace(module, "forward", self._around_dropout(module))

    def find(self, tensor: Tensor, keeper: Keeper) -> Found | None:
        """How to make this base tensor again; None without a recipe."""
        if keeper.is_altered():
            keeper.refuse()
            return None
        if tensor.grad_fn is None:
            drawn = self._draws.expression(tensor)
            if drawn is None:
                return None
            return Found(self._kernels.offer(drawn, tensor, None), None)
        if tensor._version != 0:
            # The node made version 0; something has changed it since.
            return None
        recipe = self._registry.find(tensor.grad_fn.name())
        if recipe is None:
            return None
        # Now: a recipe may be a user's function, with a frame of its own.
        caller = operators_frame()
        scene = cache(lambda: Scene(self._purity, caller))
        trail = Trail(tensor.grad_fn, tensor.output_nr)
        sources = Sources(
            keeper, scene, self._registry.find, trail, guards=self._guards
        )
        node = Producer(tensor.grad_fn, tensor.output_nr, sources, tensor=tensor)
        found = recipe(node)
        if found is None:
            return None
        if not sources.covers(found, tensor.grad_fn):
            keeper.refuse()
            return None
        mark = trail.mark()
        offered = self._kernels.offer(found, tensor, node)
        if not offered.faster:
            trail.back_to(mark)
        if sources.is_guarded:
            offered = guarded(offered)
        return Found(offered, trail)

    def again(
        self, compiled: Compiled, tensor: Tensor, keeper: Keeper
    ) -> Asking | None:
        """What a compiled recipe is told of this base tensor; None: it is not right."""
        if tensor.grad_fn is None:
            return None

        def scene() -> Scene:
            return Scene(self._purity, operators_frame())

        asking = Asking(tensor, keeper, scene)
        return asking if compiled.holds(asking) else None

    def _around_dropout(self, module: nn.Dropout) -> Callable[..., Any]:
        """Its forward, listened to.

        A bound method, as the class's own is: a copy of the model rebinds it to the
        copied module, and a pickle stores the class's.
        """
        draws = self._draws

        def is_idle() -> bool:
            return self.is_idle()

        def forward(self: nn.Dropout, input: Tensor) -> Tensor:
            # An inference tensor has no version, and nobody saves it.
            if torch.compiler.is_compiling() or input.is_inference() or is_idle():
                return type(self).forward(self, input)
            unchanged = input._version == 0
            with draws.around(self, input):
                result = type(self).forward(self, input)
            if unchanged:
                saw(input, result)
            return result

        return MethodType(forward, module)
