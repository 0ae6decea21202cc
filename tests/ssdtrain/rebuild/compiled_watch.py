"""Compiles the recipes of one pass and asks them in the next: see test_compiled.py.

Loaded under a name of ssdtrain's own, as what stands between autograd and the program.
"""

from typing import Any

from torch import Tensor

import ssdtrain
from ssdtrain.cache.identity import identify
from ssdtrain.cache.rebuilder import Rebuilder
from ssdtrain.cache.record import RebuiltView
from ssdtrain.rebuild.compiled import Compiled
from ssdtrain.rebuild.expression import evaluate
from tests.ssdtrain.bits import same_bits


class Watch:
    """Compiles the recipes of a first pass and asks them in the second."""

    def __init__(self, session: ssdtrain.Session) -> None:
        self.cache = session.cache
        self.rebuilder: Rebuilder = self.cache.recipes  # type: ignore[assignment]
        self.known: list[Compiled | None] = []
        self.answers: list[bool] = []
        self.equal: list[bool] = []
        self._at = -1
        self._inside = False
        """What a recipe stores for itself is offered inside of another call."""
        self._offer = self.rebuilder.offer
        self.rebuilder.offer = self.offer  # type: ignore[method-assign]

    def again(self) -> None:
        """The second pass begins."""
        self._at = 0

    def offer(self, tensor: Tensor, key: Any, view: Any) -> Any:
        if self._inside:
            return self._offer(tensor, key, view)
        self._inside = True
        try:
            return self._watched(tensor, key, view)
        finally:
            self._inside = False

    def _watched(self, tensor: Tensor, key: Any, view: Any) -> Any:
        if self._at < 0:
            self.cache.lanes.current.binding = self
            handle = self._offer(tensor, key, view)
            self.cache.lanes.current.binding = None
            made = handle is not None and isinstance(handle.source, RebuiltView)
            self.known.append(handle.source.rebuilt.compiled if made else None)
            return handle
        compiled = self.known[self._at] if self._at < len(self.known) else None
        self._at += 1
        if compiled is not None:
            self.ask(compiled, tensor)
        return self._offer(tensor, key, view)

    def ask(self, compiled: Compiled, tensor: Tensor) -> None:
        key, _ = identify(tensor)
        asked = self.rebuilder.ask(compiled, tensor, key)
        self.answers.append(asked is not None)
        if asked is None:
            return
        operands = compiled.operands(asked)
        values = [self.rebuilder.peek(each.holder) for each in operands]
        base = tensor if tensor._base is None else tensor._base
        made = evaluate(compiled.expression, values)
        self.equal.append(same_bits(made, base.detach()))
