"""Which recipe belongs to which producer.

`DEFAULT` is at module level because a user's decorator has to write somewhere. Every
session copies it when it is opened, so what is registered later, or in another test,
never reaches a running session.
"""

from collections.abc import Callable
from typing import TypeVar

from ssdtrain.remat.expression import Expression
from ssdtrain.remat.producer import Producer

Recipe = Callable[[Producer], Expression | None]
Function = TypeVar("Function", bound=Recipe)


class Registry:
    """Recipes by the name of the node that produces the tensor."""

    def __init__(self, recipes: dict[str, Recipe] | None = None) -> None:
        self._recipes = dict(recipes or {})

    def register(self, *names: str) -> Callable[[Function], Function]:
        """Decorator: a function from a `Producer` to an expression, or None.

        Raises:
            ValueError: a name is taken, or none was given.
        """
        if not names:
            raise ValueError(
                "recipe() expects the name of at least one node, such as "
                "'GeluBackward0'; `tensor.grad_fn.name()` tells it."
            )

        def add(function: Function) -> Function:
            for name in names:
                if name in self._recipes:
                    raise ValueError(
                        f"a recipe for {name!r} is registered already; remove it with "
                        f"Registry.remove({name!r}) before registering another."
                    )
                self._recipes[name] = function
            return function

        return add

    def remove(self, name: str) -> None:
        """Forget a recipe.

        Raises:
            KeyError: there is none.
        """
        del self._recipes[name]

    @property
    def names(self) -> frozenset[str]:
        """Names of the nodes that have a recipe."""
        return frozenset(self._recipes)

    def find(self, name: str) -> Recipe | None:
        """The recipe for a node's name."""
        return self._recipes.get(name)

    def merged(self, other: "Registry") -> "Registry":
        """A copy; where both know a name, `other` wins."""
        return Registry({**self._recipes, **other._recipes})


DEFAULT = Registry()


def recipe(*names: str) -> Callable[[Function], Function]:
    """Register a recipe for all sessions opened from now on (see docs/recipes.md)."""
    return DEFAULT.register(*names)
