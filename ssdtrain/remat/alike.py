"""Recipes that were found for tensors which look alike.

[Note: alike]
Layers repeat, and what made a tensor of one makes that of the next. So a recipe that
was searched for is asked first of every other tensor of the same layout whose node is
of the same kind: what holds of it is right of it, wherever it was found ([Note:
compiled recipes] in compiled.py). That matters where lengths change from batch to
batch. A row knows the recipe of its own size, and at any other one each of its tensors
would be searched for again: on a CPU a `pack` of a small model took 330 microseconds
instead of 180.
(tests/ssdtrain/remat/test_alike.py)
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from torch import Tensor

from ssdtrain.remat.compiled import Compiled
from ssdtrain.remat.expression import Layout
from ssdtrain.remat.questions import name_of_kind

MOST_LOOKS = 256
"""Of which recipes are remembered; those that were met longest ago are forgotten."""
MOST_EACH = 4
"""Recipes of one look."""


class Alike:
    """What was found, by the look of the tensor."""

    def __init__(self) -> None:
        self._found: OrderedDict[Hashable, dict[Hashable, Compiled]] = OrderedDict()

    def of(self, base: Tensor) -> Sequence[Compiled]:
        """Those that may be right of this tensor, the last one that was found first."""
        look = _look(base)
        found = self._found.get(look)
        if found is None:
            return ()
        self._found.move_to_end(look)
        return tuple(reversed(found.values()))

    def add(self, base: Tensor, compiled: Compiled) -> None:
        """This one was searched for."""
        look, asked = _look(base), compiled.asked
        found = self._found.setdefault(look, {})
        found.pop(asked, None)
        found[asked] = compiled
        if len(found) > MOST_EACH:
            del found[next(iter(found))]
        self._found.move_to_end(look)
        if len(self._found) > MOST_LOOKS:
            self._found.popitem(last=False)


def _look(base: Tensor) -> Hashable:
    node = base.grad_fn
    return type(node), name_of_kind(node), base.output_nr, Layout.of(base)
