"""A recipe that was found and admitted once, and the guards that must hold again.

[Note: compiled recipes]
A recipe is a function of what it reads: with the same answers it gives the same
expression. So the search for it leaves a `Guard` for each answer. If all of them hold
of another graph, the expression is right of that graph, too, with the operands that its
guards find. If one does not, somebody has to search. Guards ask for operators and
constants (0.0 is not -0.0), saved tensors, their layouts and versions. They ask why
nobody can have written to tensors that nobody saved, and for a normalization's epsilon.
Admission is no guard: the class is the same. An edge that led nowhere has none either:
the recipe found another way.
(tests/ssdtrain/rebuild/test_compiled.py)

[Note: similar tensors]
Layers repeat: the recipe of one tensor is often right of the next that looks like it.
So it is tried first on every tensor of the same layout whose node is of the same kind.
That matters where lengths change from batch to batch. A row knows the recipe of its own
size alone, and a search at each `pack` takes nearly twice as long as guards.
(tests/ssdtrain/rebuild/test_recipe_memory.py)
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from torch import Tensor

from ssdtrain.rebuild.expression import Expression, Layout, TensorInput
from ssdtrain.rebuild.graph import AutogradGraph, Guard, Like, NodeKind, Store
from ssdtrain.rebuild.node import RecipeSearch

MOST_LOOKS = 256
"""Of which recipes are remembered; those that were met longest ago are forgotten."""
MOST_EACH = 4
"""Recipes of one look."""


class Compiled:
    """A recipe of one place in the step. See [Note: compiled recipes]."""

    __slots__ = (
        "_covered",
        "_device",
        "_is_in_order",
        "_narrow",
        "_order",
        "copy_place",
        "expression",
        "guards",
        "layout",
    )

    def __init__(
        self,
        expression: Expression,
        search: RecipeSearch,
        base: Tensor,
        order: tuple[int, ...],
    ) -> None:
        self.expression = expression
        """How it is made; its operands' holders are those of no graph."""
        self.guards = _each_once(search.guards)
        """Two recipes with the same guards are right of the same graphs."""
        self._narrow = search.narrow
        num_inputs = len(search.graph.inputs)
        self.copy_place: int | None = None
        """Which of `expression.inputs` is the tensor itself in a smaller dtype."""
        if search.narrow is not None:
            self.copy_place = order.index(num_inputs - 1)
        self.layout = Layout.of(base)
        self._device = base.device
        self._order = order
        self._is_in_order = order == tuple(range(num_inputs))
        self._covered = tuple(
            at
            for at, each in zip(order, expression.inputs, strict=True)
            if each.is_noted
        )

    @classmethod
    def of(
        cls, expression: Expression, search: RecipeSearch, base: Tensor
    ) -> "Compiled | None":
        """What the search for the expression of this tensor has read; None: one of the
        answers may not be had again."""
        if any(guard.read is AutogradGraph.unknown for guard in search.guards):
            return None
        found = search.graph.inputs
        if search.narrow is not None and found[-1].stored_bytes == 0:
            return None  # it is not the last one
        places = {id(each): at for at, each in enumerate(found)}
        if any(id(each) not in places for each in expression.inputs):
            return None
        order = tuple(places[id(each)] for each in expression.inputs)
        return cls(expression.without_holders(), search, base, order)

    def holds(self, graph: AutogradGraph) -> bool:
        """Whether it is right of this graph; False: search again."""
        base = graph.tensor
        if graph.lookup.is_altered() or base._version or base.storage_offset():
            return False
        if base.is_conj() or base.is_neg() or base.device != self._device:
            return False
        if not self.layout.is_of(base):
            return False
        for read, args, answer in self.guards:
            if read(graph, *args) != answer:
                return False
        if not self._covered:
            return True
        return all(id(graph.inputs[at].owner) in graph.owners for at in self._covered)

    def operands(
        self, graph: AutogradGraph, store: Store | None = None
    ) -> list[TensorInput]:
        """The operands in the order of `expression.inputs`, once `holds` has answered.

        What takes the tensor's place in a smaller dtype is stored now.

        Args:
            graph: that was asked.
            store: takes it over; None: the lookup finds out what becomes of it.
        """
        found = graph.inputs
        if self._is_in_order and self._narrow is None:
            return found
        if self._narrow is not None:
            stored = graph.lookup.narrowed(graph.tensor, self._narrow, store)
            found = [*found, stored]
        return [found[at] for at in self._order]


def _each_once(guards: Sequence[Guard]) -> tuple[Guard, ...]:
    """Leave out what was asked before, but for guards that give a node or an
    operand."""
    found: dict[Hashable, Guard] = {}
    for number, guard in enumerate(guards):
        gives = isinstance(guard.answer, NodeKind | Like)
        found.setdefault(number if gives else guard, guard)
    return tuple(found.values())


class RecipeMemory:
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
        look = _look(base)
        found = self._found.setdefault(look, {})
        found.pop(compiled.guards, None)
        found[compiled.guards] = compiled
        if len(found) > MOST_EACH:
            del found[next(iter(found))]
        self._found.move_to_end(look)
        if len(self._found) > MOST_LOOKS:
            self._found.popitem(last=False)


def _look(base: Tensor) -> Hashable:
    return NodeKind.of(base.grad_fn, base.output_nr), Layout.of(base)
