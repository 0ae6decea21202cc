"""What the cache asks of recipes, and what answers where there are none."""

from typing import Protocol

from torch import Tensor

from ssdtrain.cache.identity import Key, View
from ssdtrain.cache.record import Handle, RebuiltView
from ssdtrain.rebuild.compiled import Compiled
from ssdtrain.rebuild.graph import AutogradGraph


class Recipes(Protocol):
    """What the cache asks when it packs a record. Off is an object: `NoRecipes`."""

    def forward_begins(self) -> None:
        """A forward of the model is about to run."""

    def offer(self, tensor: Tensor, key: Key, view: View) -> Handle | None:
        """A handle that rebuilds the tensor, or None: store it."""

    def knows(self, key: Key) -> bool:
        """Whether these bytes are rebuilt already."""

    def again(self, tensor: Tensor, key: Key, view: View) -> Handle | None:
        """Another handle of a tensor that is rebuilt already, or None."""

    def ask(
        self, compiled: Compiled, tensor: Tensor, key: Key | None
    ) -> AutogradGraph | None:
        """Whether a tensor may be made by the recipe that its row knows; None: no."""

    def take(
        self,
        compiled: Compiled,
        asked: AutogradGraph,
        tensor: Tensor,
        key: Key | None,
        view: View,
    ) -> Handle:
        """A handle of a tensor whose recipe was asked for."""

    def note(self, tensor: Tensor, handle: Handle, *, by_norm: bool = True) -> None:
        """This handle was given for this tensor, which a normalization may have saved,
        or has not."""

    def use(self, source: RebuiltView) -> Tensor:
        """The tensor, rebuilt. Called in backward."""

    def close(self) -> None:
        """Look at what is still to be compared."""


class NoRecipes:
    """Rebuilds nothing and leaves no trace."""

    def forward_begins(self) -> None:
        """Remember nothing."""

    def offer(self, tensor: Tensor, key: Key, view: View) -> Handle | None:
        """Store it."""
        return None

    def knows(self, key: Key) -> bool:
        """None are."""
        return False

    def again(self, tensor: Tensor, key: Key, view: View) -> Handle | None:
        """There is none."""
        return None

    def ask(
        self, compiled: Compiled, tensor: Tensor, key: Key | None
    ) -> AutogradGraph | None:
        """There is none."""
        return None

    def take(
        self,
        compiled: Compiled,
        asked: AutogradGraph,
        tensor: Tensor,
        key: Key | None,
        view: View,
    ) -> Handle:
        """Never called: `ask` gave nothing."""
        raise RuntimeError(f"{compiled.expression.recipe}: a recipe without recipes")

    def note(self, tensor: Tensor, handle: Handle, *, by_norm: bool = True) -> None:
        """Remember nothing."""

    def use(self, source: RebuiltView) -> Tensor:
        """Never called: `offer` gave no such handle."""
        raise RuntimeError(f"{source.rebuilt.name}: a recipe without recipes")

    def close(self) -> None:
        """Nothing is."""
