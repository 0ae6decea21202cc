"""Finds the recipe of a tensor at the moment it is saved."""

from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ssdtrain.rebuild.compiled import Compiled
from ssdtrain.rebuild.dropout import Draws, saw
from ssdtrain.rebuild.expression import Expression
from ssdtrain.rebuild.frame import CallerFrame, operators_frame
from ssdtrain.rebuild.graph import AutogradGraph, OperandLookup
from ssdtrain.rebuild.node import Producer, RecipeSearch
from ssdtrain.rebuild.purity import Purity
from ssdtrain.rebuild.recipes import OpRules, rules_of

Set = Callable[[Any, str, Any], Any]
"""Replaces an attribute of an instance, and can undo it."""


class Found(NamedTuple):
    """A recipe that was found."""

    expression: Expression
    search: RecipeSearch | None
    """What was read for it; None: it cannot be read again."""


class Finder:
    """Recipes of one session."""

    def __init__(self, rules: OpRules | None = None) -> None:
        self._rules = rules_of(weighed=False) if rules is None else rules
        self._purity = Purity()
        self._draws = Draws()
        self.is_idle: Callable[[], bool] = lambda: False
        """Whether nobody will ask how what runs now is made."""

    def attach(self, root: nn.Module, replace: Set) -> None:
        """Listen to the model's dropouts."""
        for module in list(root.modules()):
            if type(module) is nn.Dropout and "forward" not in vars(module):
                replace(module, "forward", self._around_dropout(module))

    def find(self, tensor: Tensor, lookup: OperandLookup) -> Found | None:
        """How to make this base tensor again; None without a recipe."""
        if lookup.is_altered():
            lookup.refuse()
            return None
        if tensor.grad_fn is None:
            drawn = self._draws.expression(tensor)
            return None if drawn is None else Found(drawn, None)
        rule = self._rules.get(tensor.grad_fn.name())
        if rule is None or rule.recipe is None or tensor._version:
            return None  # the node made version 0
        # Now: a recipe may be a user's function, with a frame of its own.
        caller = operators_frame()
        graph = AutogradGraph(tensor, lookup, lambda: CallerFrame(self._purity, caller))
        search = RecipeSearch(graph, self._rules)
        node = Producer(search, output=tensor.output_nr, is_at_hand=True)
        found = rule.recipe(node)
        if found is None:
            return None
        if not search.covers(found):
            lookup.refuse()
            return None
        graph.forget_frame()
        return Found(found, search)

    def again(
        self, compiled: Compiled, tensor: Tensor, lookup: OperandLookup
    ) -> AutogradGraph | None:
        """The graph of this base tensor; None: a compiled recipe is not right of it."""
        if tensor.grad_fn is None:
            return None
        purity = self._purity
        graph = AutogradGraph(
            tensor, lookup, lambda: CallerFrame(purity, operators_frame())
        )
        return graph if compiled.holds(graph) else None

    def _around_dropout(self, module: nn.Dropout) -> Callable[..., Any]:
        """Its forward, listened to.

        A bound method, as the class's own is: a copy of the model rebinds it to the
        copied module, and a pickle stores the class's.
        """
        draws, finder = self._draws, self

        def forward(self: nn.Dropout, input: Tensor) -> Tensor:
            # A compiler looks no further than the first.
            if torch.compiler.is_compiling() or not self.p or not self.training:
                return type(self).forward(self, input)
            # An inference tensor has no version, and nobody saves it.
            if finder.is_idle() or input.is_inference():
                return type(self).forward(self, input)
            unchanged = input._version == 0
            with draws.around(self, input):
                result = type(self).forward(self, input)
            if unchanged:
                saw(input, result)
            return result

        return MethodType(forward, module)
