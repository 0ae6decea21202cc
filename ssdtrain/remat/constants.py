"""Constants that no node shows, from the modules that own them.

[Note: epsilon]
A fused normalization's node keeps no epsilon. Rebuilding from the saved mean and
reciprocal deviation is not bitwise; and a guess cannot be verified, because 1e-12 and
1e-8 give the same bits on ordinary data. So the epsilon is that of the module that
owns the weight (the same parameter object), and without one certain owner the recipe
is refused. Unfused normalizations need none: their reciprocal deviation is a factor.
(tests/ssdtrain/remat/test_norms.py)
"""

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ssdtrain.remat.producer import Epsilon

UNFUSED_GELU_ADDEND = 1.0


def is_unfused_gelu(module: nn.Module) -> bool:
    """transformers' NewGELU: 0.5 x (1.0 + tanh(...)), in separate operators.

    Its `1.0 +` is the one constant that no node shows.
    """
    kind = type(module)
    return (
        kind.__name__ == "NewGELUActivation"
        and kind.__module__ == "transformers.activations"
    )


class ModuleConstants:
    """Constants known from the modules of the model."""

    def __init__(self) -> None:
        self._norms: list[weakref.ref[nn.Module]] = []
        self._known: dict[int, tuple[weakref.ref[Any], Epsilon]] = {}
        self._running = threading.local()

    def collect(self, modules: Iterable[nn.Module]) -> None:
        """Remember the normalizations among these modules."""
        kinds = (nn.LayerNorm, nn.RMSNorm)
        self._norms.extend(weakref.ref(m) for m in modules if isinstance(m, kinds))

    def epsilon(self, weight: nn.Parameter | None) -> Epsilon | None:
        """See [Note: epsilon]."""
        if weight is None:
            return None
        known = self._known.get(id(weight))
        if known is not None and known[0]() is weight:
            return known[1]
        found = set(self._epsilons(weight))
        if len(found) != 1:
            return None
        (epsilon,) = found
        self._known[id(weight)] = weakref.ref(weight), epsilon
        return epsilon

    def _epsilons(self, weight: nn.Parameter) -> Iterator[Epsilon]:
        for reference in self._norms:
            norm: Any = reference()
            if norm is not None and norm.weight is weight:
                yield Epsilon(norm.eps)

    def addend(self) -> float | None:
        """The number that the running module adds to a tensor."""
        return getattr(self._running, "addend", None)

    @contextmanager
    def adding(self, number: float) -> Iterator[None]:
        """While a module runs whose code adds this number to a tensor."""
        before = self.addend()
        self._running.addend = number
        try:
            yield
        finally:
            self._running.addend = before
