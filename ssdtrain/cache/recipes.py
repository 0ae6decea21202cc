"""What the cache asks of recipes."""

from torch import Tensor

from ssdtrain.cache.identity import Key, View
from ssdtrain.cache.record import Handle, RebuiltView
from ssdtrain.rebuild.compiled import Compiled
from ssdtrain.rebuild.graph import AutogradGraph, Store


class Recipes:
    """What the cache asks when it packs a record. This one has none and leaves no
    trace; `Rebuilder` has some."""

    def forward_begins(self) -> None:
        """A forward of the model is about to run."""

    def offer(self, tensor: Tensor, key: Key, view: View) -> Handle | None:
        """A handle that rebuilds the tensor, or None: store it."""
        return None

    def knows(self, key: Key) -> bool:
        """Whether these bytes are rebuilt already."""
        return False

    def again(self, tensor: Tensor, key: Key, view: View) -> Handle | None:
        """Another handle of a tensor that is rebuilt already, or None."""
        return None

    def ask(
        self, compiled: Compiled, tensor: Tensor, key: Key | None
    ) -> AutogradGraph | None:
        """Whether a tensor may be made by the recipe that its row knows; None: no.

        Args:
            key: None: of its own base, if it has the recipe's layout.
        """
        return None

    def take(
        self,
        compiled: Compiled,
        asked: AutogradGraph,
        tensor: Tensor,
        key: Key | None,
        view: View,
        store: Store | None = None,
    ) -> Handle:
        """A handle of a tensor whose recipe was asked for.

        Args:
            key: by which others of its bytes find the recipe; None: there are none.
            store: takes over what the recipe stores; None: the general path does.
        """
        raise RuntimeError(f"{compiled.expression.recipe}: a recipe without recipes")

    def note(self, tensor: Tensor, handle: Handle, *, by_norm: bool = True) -> None:
        """Remember that this output of a node was saved.

        Args:
            tensor: that was saved.
            handle: given for it.
            by_norm: whether a normalization may be what saves it.
        """

    def use(self, source: RebuiltView) -> Tensor:
        """The tensor, rebuilt unless another handle's use has just done it.

        Raises:
            InPlaceError: it, or an input of its recipe, was changed after it was saved.
        """
        raise RuntimeError(f"{source.rebuilt.name}: a recipe without recipes")

    def close(self) -> None:
        """Look at what is still to be compared; waits for the device.

        Raises:
            ActivationChangedError: a guarded recipe made other bytes.
        """
