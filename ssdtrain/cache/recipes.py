"""What answers the cache where recipes are off; where they are on: `Rebuilder`."""

from torch import Tensor

from ssdtrain.cache.identity import Key, View
from ssdtrain.cache.record import Handle, RebuiltView
from ssdtrain.rebuild.compiled import Compiled
from ssdtrain.rebuild.graph import AutogradGraph


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
        """There is none. So nobody calls `take`."""
        return None

    def note(self, tensor: Tensor, handle: Handle, *, by_norm: bool = True) -> None:
        """Remember nothing."""

    def use(self, source: RebuiltView) -> Tensor:
        """Never called: `offer` gave no such handle."""
        raise RuntimeError(f"{source.rebuilt.name}: a recipe without recipes")

    def close(self) -> None:
        """Nothing is."""
