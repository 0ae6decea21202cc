"""The autograd node that produced a tensor, as a recipe sees it."""

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssdtrain.rebuild.expression import (
    MAX_CHAIN,
    MAX_NODES,
    Epsilon,
    Expression,
    Layout,
    Operand,
    TensorInput,
)
from ssdtrain.rebuild.graph import (
    AutogradGraph,
    Guard,
    Like,
    SavedNumber,
    constant_of,
    number_of,
    packed_by,
)

RecipeBuilder = Callable[["Producer"], Expression | None]
LEAF = "torch::autograd::AccumulateGrad"
MAX_BEHIND = 24
"""Most nodes that are looked at for one that saved a noted tensor."""


class OpRule(NamedTuple):
    """What is known of the operators of one kind of node."""

    recipe: RecipeBuilder | None = None
    """Makes its result again; None: nothing does."""
    result: str = ""
    """Under which its node saves its own result; "": it does not."""
    reads: str = ""
    """Under which a product's node saves what it multiplies."""
    is_view: bool = False
    """Its result shares storage and version counter with its input."""
    is_expensive: bool = False
    """It takes much longer than reading its inputs does: its recipe is used where a
    plan weighs it."""


UNKNOWN = OpRule()


class Reach(Enum):
    """Why nobody can have written to the tensor that a node made."""

    MADE_HERE = auto()
    """The pure forward that runs made it."""
    SEEN = auto()
    """It was seen at version 0 after its consumer, or shares a version with it."""
    SAVED = auto()
    """It is being saved, at version 0."""
    OPEN = auto()
    """Not known of a view: its source will be asked for."""


class Made(NamedTuple):
    """What makes an output of a node."""

    operand: Expression
    at: int
    """The node's number."""
    reach: Reach
    """Why its reader read what the node made; another reader needs as good a reason."""


class SearchMark(NamedTuple):
    """A place in a search to go back to."""

    num_guards: int
    num_nodes: int
    num_inputs: int
    num_owners: int


class RecipeSearch:
    """The search for the recipe of one tensor: what it has read so far."""

    def __init__(
        self,
        graph: AutogradGraph,
        rules: Mapping[str, OpRule],
    ) -> None:
        self.graph = graph
        self._rules = rules
        self.guards: list[Guard] = []
        self.narrow: torch.dtype | None = None
        """The tensor itself is stored in this dtype: the last operand."""
        self.nodes_left = MAX_NODES
        self.made: dict[tuple[Any, int], Made] = {}
        """By node and output, so that each is made once."""
        self.ask(AutogradGraph.root)

    def rule(self, node: Any) -> OpRule:
        """What is known of a node's operator."""
        return self._rules.get(node.name(), UNKNOWN)

    def ask(self, read: Callable[..., Any], *args: Any) -> Any:
        """Read, and leave a guard."""
        answer = read(self.graph, *args)
        self.guards.append(Guard(read, args, answer))
        return answer

    def ask_for(self, read: Callable[..., Any], *args: Any) -> TensorInput | None:
        """An operand; no guard is left where there is none."""
        if not isinstance(self.ask(read, *args), Like):
            self.guards.pop()
            return None
        return self.graph.inputs[-1]

    def step(self, at: int, place: int) -> int:
        """Follow an edge that there is; the number of the node."""
        self.ask(AutogradGraph.follow, at, place)
        return len(self.graph.nodes) - 1

    def mark(self) -> SearchMark:
        """Where it is now."""
        graph = self.graph
        sizes = len(self.guards), len(graph.nodes), len(graph.inputs), len(graph.owners)
        return SearchMark(*sizes)

    def back_to(self, mark: SearchMark) -> None:
        """Forget what led nowhere."""
        del self.guards[mark.num_guards :]
        del self.graph.nodes[mark.num_nodes :]
        del self.graph.inputs[mark.num_inputs :]
        del self.graph.owners[mark.num_owners :]
        self.made = {
            key: each for key, each in self.made.items() if each.at < mark.num_nodes
        }

    def covers(self, expression: Expression) -> bool:
        """Whether plain autograd, too, raises if an input is changed from now on.

        An input found by a note does not count by itself: the node that saved it may
        run in no backward (a metric's). It does if that node is on the way from the
        tensor's own node: the way around a frozen layer.
        """
        return all(
            id(each.owner) in self.graph.owners or self._is_saved_below(each)
            for each in expression.inputs
            if each.is_noted
        )

    def _is_saved_below(self, noted: TensorInput) -> bool:
        """Look for a tensor among what nodes below the root have saved."""
        root = self.graph.nodes[0]
        waiting: deque[tuple[Any, tuple[int, ...]]] = deque([(root, ())])
        for _ in range(MAX_BEHIND):
            if not waiting:
                return False
            node, way = waiting.popleft()
            name = self.rule(node).reads
            packed = packed_by(node, name) if name else None
            if packed is not None and not isinstance(packed, Tensor):
                found = self.graph.lookup.saved(packed, node)
                if found is not None and found.owner is noted.owner:
                    at = 0
                    for place in way:
                        at = self.step(at, place)
                    self.ask(AutogradGraph.saved, at, name)
                    return True
            for place, (below, _) in enumerate(node.next_functions):
                if below is not None:
                    waiting.append((below, (*way, place)))
        return False


class Producer:
    """A node: its saved tensors, its constants, its edges, and what it made.

    What it answers is all that a recipe may depend on: see [Note: compiled recipes].
    """

    def __init__(
        self,
        search: RecipeSearch,
        at: int = 0,
        output: int = 0,
        *,
        is_at_hand: bool = False,
        depth: int = 0,
        reach: Reach = Reach.SAVED,
    ) -> None:
        self._search = search
        self._graph = search.graph
        self._node = search.graph.nodes[at]
        self._at = at
        self.name: str = self._node.name()
        """Such as `GeluBackward0`."""
        self.output = output
        """Which output of the node it is."""
        self.is_at_hand = is_at_hand
        """Whether this is the node of the tensor that is saved, not one on the way."""
        self._depth = depth
        self._reach = reach

    @property
    def node(self) -> Any:
        """The autograd node (`grad_fn`), or the `ctx` of a custom Function.

        A recipe that looks at it is searched for at every step.
        """
        self._search.ask(AutogradGraph.unknown)
        return self._node

    @property
    def layout(self) -> Layout | None:
        """Layout of the tensor, when it is at hand."""
        return Layout.of(self._graph.tensor) if self.is_at_hand else None

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor it made."""
        return self._made()[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor it made."""
        return self._made()[1]

    def _made(self) -> tuple[torch.dtype, tuple[int, ...]]:
        found: tuple[torch.dtype, tuple[int, ...]]
        found = self._search.ask(AutogradGraph.made, self._at, self.output)
        return found

    def saved(self, name: str | int) -> Operand | None:
        """An input that the node saved: `saved("self")` is its `_saved_self`.

        A custom Function's tensors are counted: `saved(0)`. None if the node saved
        none under this name, or saved it past ssdtrain (inside a checkpoint).
        """
        answer = self._search.ask(AutogradGraph.saved, self._at, name)
        if isinstance(answer, Like):
            return self._graph.inputs[-1]
        if isinstance(answer, SavedNumber):
            return number_of(packed_by(self._node, name))
        return None

    def has_saved(self, name: str | int) -> bool:
        """Whether the node saved something under this name, whoever holds it."""
        return bool(self._search.ask(AutogradGraph.has_saved, self._at, name))

    def constant(self, name: str) -> Any:
        """A value that the node keeps: `_saved_<name>`, or an attribute of `ctx`.

        Not for tensors: reading one would bring it back.
        """
        self._search.ask(AutogradGraph.constant, self._at, name)
        return constant_of(self._node, name)

    def dimension(self, name: str) -> int:
        """A dimension that the node keeps; torch shows -1 as an unsigned number."""
        return signed(self.constant(name))

    def has_edge(self, index: int) -> bool:
        """Whether the input at this position came from a node."""
        return bool(self._search.ask(AutogradGraph.has_edge, self._at, index))

    def edge(self, index: int, *, may_be_expensive: bool = True) -> Operand | None:
        """The input at this position, for nodes that do not save it.

        It is a parameter, another node's saved tensor, or an expression of its own. A
        guard asks for it only if there is one: else the recipe finds another way.

        Args:
            index: the position.
            may_be_expensive: whether products and attention may be run for it.
        """
        mark = self._search.mark()
        found = self._at_edge(index)
        if isinstance(found, Expression) and found.is_expensive:
            found = found if may_be_expensive else None
        if found is None:
            self._search.back_to(mark)
        return found

    def _at_edge(self, index: int) -> Operand | None:
        search = self._search
        if not self._graph.has_edge(self._at, index) or self._depth >= MAX_CHAIN:
            return None
        search.nodes_left -= 1
        if search.nodes_left < 0:
            return None
        node, output = self._node.next_functions[index]
        if node.name() == LEAF:
            return search.ask_for(AutogradGraph.parameter, self._at, index)
        made = search.made.get((node, output))
        if made is not None:
            mark = search.mark()
            search.ask(AutogradGraph.leads_to, self._at, index, made.at, output)
            if self._reach_of(index, made.at, output) is made.reach:
                return made.operand
            search.back_to(mark)
        at = search.step(self._at, index)
        kept = self._result(at, output) or self._noted(at, output)
        return kept or self._made_by(index, at, output)

    def _result(self, at: int, output: int) -> TensorInput | None:
        """An output that its own node has saved."""
        name = self._search.rule(self._graph.nodes[at]).result
        if not name or output:
            return None
        return self._search.ask_for(AutogradGraph.saved, at, name)

    def _noted(self, at: int, output: int) -> TensorInput | None:
        """An output of a node that somebody saved."""
        found = self._search.ask_for(AutogradGraph.noted, at, output)
        if found is not None:
            found.is_noted = not self._graph.frame_saves(at, output)
            if not found.is_noted:
                self._search.ask(AutogradGraph.frame_saves, at, output)
        return found

    def _made_by(self, index: int, at: int, output: int) -> Expression | None:
        """An expression for an output of a node, which nobody has saved."""
        node = self._graph.nodes[at]
        recipe = self._search.rule(node).recipe
        if recipe is None:
            return None
        reach = self._reach_of(index, at, output)
        depth, how = self._depth + 1, reach or Reach.OPEN
        made = recipe(Producer(self._search, at, output, depth=depth, reach=how))
        if made is not None and reach is None:
            self._graph.lookup.refuse_unsaved()
            return None
        if made is not None and reach is not None:
            self._search.made[node, output] = Made(made, at, reach)
        return made

    def _reach_of(self, index: int, at: int, output: int) -> Reach | None:
        """Why the unsaved tensor at this edge is what the operator read; None: it need
        not be. See [Note: unsaved tensors]."""
        search, graph = self._search, self._graph
        if graph.was_witnessed(self._at, index):
            search.ask(AutogradGraph.was_witnessed, self._at, index)
            return Reach.SEEN
        as_made = graph.argument_is_as_made(at, output)
        if as_made is not None:
            search.ask(AutogradGraph.argument_is_as_made, at, output)
            return Reach.SEEN if as_made else None
        if self._is_made_here():
            search.ask(AutogradGraph.argument_is_as_made, at, output)
            return Reach.MADE_HERE
        if search.rule(self._node).is_view and self._reach is Reach.SEEN:
            return Reach.SEEN
        # See [Note: matrix products] in recipes.py.
        if self.name == "UnsafeViewBackward0" and graph.is_composite(self._at, at):
            search.ask(AutogradGraph.is_composite, self._at, at)
            return Reach.SEEN
        return Reach.OPEN if search.rule(graph.nodes[at]).is_view else None

    def _is_made_here(self) -> bool:
        if self._reach is not Reach.SAVED:
            return self._reach is Reach.MADE_HERE
        if not self._graph.is_pure_here(self._at, self.output):
            return False
        return bool(self._search.ask(AutogradGraph.is_pure_here, self._at, self.output))

    def source_dtype(self, index: int) -> torch.dtype | None:
        """The dtype of the input at this position; None if it is not known."""
        if not self.has_edge(index):
            return None
        node, output = self._node.next_functions[index]
        found: torch.dtype | None
        if node.name() == LEAF:
            found = self._search.ask(AutogradGraph.leaf_dtype, self._at, index)
        else:
            at = self._search.step(self._at, index)
            found, _ = self._search.ask(AutogradGraph.made, at, output)
        return found

    def narrowed(self, dtype: torch.dtype) -> TensorInput | None:
        """The tensor itself in a smaller dtype, stored in its place."""
        if not self.is_at_hand:
            return None
        made = self._graph.lookup.narrowed(self._graph.tensor, dtype)
        self._search.narrow = dtype
        self._graph.inputs.append(made)
        return made

    def epsilon(self, name: str) -> Epsilon | None:
        """The epsilon of the normalization that saved this input, if certain."""
        source = self.saved(name)
        epsilon = source.epsilon if isinstance(source, TensorInput) else None
        if epsilon is None:
            self._graph.lookup.refuse()
        return epsilon

    def addend(self) -> float | None:
        """The number that the running module adds; None outside known modules."""
        if not self._is_made_here():
            return None
        addend: float | None = self._search.ask(AutogradGraph.addend)
        return addend

    def rebuilt_by(
        self,
        function: Callable[..., Tensor],
        *operands: Operand | None,
        **constants: Hashable,
    ) -> Expression | None:
        """`function(*operands, **constants)` makes this tensor.

        Args:
            function: pure, and the same object every time (admission is cached by
                it): a lambda would be checked, and the device waited for, at every
                pack.
            operands: what `saved` and `edge` gave; None among them refuses.
            constants: hashable.
        """
        if any(operand is None for operand in operands):
            return None
        is_expensive, exact = self._search.rule(self._node).is_expensive, None
        if is_expensive:  # [Note: matrix products] in recipes.py
            layouts = [
                op.layout if isinstance(op, TensorInput) else None for op in operands
            ]
            exact = self.shape, *layouts
        expression = Expression(
            recipe=self.name,
            function=function,
            operands=tuple(op for op in operands if op is not None),
            constants=tuple(sorted(constants.items())),
            is_expensive=is_expensive,
            exact=exact,
        )
        return expression if expression.depth <= MAX_CHAIN else None


def signed(number: int) -> int:
    """What a 64-bit number is when its first bit is its sign."""
    return number - 2**64 if number >= 2**63 else number
