"""The autograd node that produced a tensor, as a recipe sees it.

[Note: guarded recipes]
A chain may pass a tensor that nobody saved and of which nothing is proved ([Note:
unsaved tensors] in scene.py). Under `recompute="full"` it is passed all the same,
and guarded: a digest of the tensor is taken when it is saved, and compared with that of
what the recipe makes, at every rebuild (0.3 ms a GB, twice). Bytes that differ stop
backward with `ActivationChangedError`; on a GPU, which is not waited for, when the next
backward ends or the session is closed. A tensor that is known to have been changed
refuses.
(tests/ssdtrain/remat/test_products.py)
"""

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ssdtrain.remat.between import is_as_made
from ssdtrain.remat.compiled import Trail
from ssdtrain.remat.expression import (
    MAX_CHAIN,
    MAX_NODES,
    Epsilon,
    Expression,
    Held,
    Layout,
    Operand,
)
from ssdtrain.remat.questions import (
    Addend,
    Argument,
    AtLeaf,
    Composite,
    Constant,
    Edge,
    HasEdge,
    HasSaved,
    Keeper,
    LeafDtype,
    Like,
    Made,
    NoArgument,
    Noted,
    Number,
    NumEdges,
    Opaque,
    PureHere,
    SameEdge,
    Saved,
    Saves,
    Witnessed,
    constant_of,
    follows,
    has_edge,
    name_of_kind,
    notes_of,
    number_of,
    packed_by,
)
from ssdtrain.remat.scene import Scene

# Nodes that save their own result: an edge to one of them has a value.
RESULTS = {
    "TanhBackward0": "result",
    "SigmoidBackward0": "result",
    "ExpBackward0": "result",
    "ReluBackward0": "result",
    "RsqrtBackward0": "result",
    "SafeSoftmaxBackward0": "result",
    "SoftmaxBackward0": "result",
    "ScaledDotProductFlashAttentionBackward0": "output",
    "ScaledDotProductFlashAttentionForCpuBackward0": "output",
    "ScaledDotProductEfficientAttentionBackward0": "output",
    "ScaledDotProductCudnnAttentionBackward0": "output",
}


# What products read, as their nodes call it.
READ_BY = {
    "MmBackward0": ("self",),
    "AddmmBackward0": ("mat1",),
    "BmmBackward0": ("self",),
}
MAX_BEHIND = 24
"""Most nodes that are looked at for one that saved a noted tensor."""

# Their results share storage and version counter with their inputs. Not UnsafeView.
VIEWS = frozenset(
    f"{name}Backward0"
    for name in (
        *("Alias", "Expand", "Permute", "ReshapeAlias", "T", "Transpose"),
        *("Unsqueeze", "View", "ViewAs"),
    )
)


class Reach(Enum):
    """Why nobody can have written to the tensor that a node made."""

    MADE_HERE = auto()
    """The pure forward that runs made it."""
    SEEN = auto()
    """It was seen at version 0 behind its consumer, or shares a version with it."""
    SAVED = auto()
    """It is being saved, at version 0."""
    OPEN = auto()
    """Not known of a view: its source will be asked for."""
    GUARDED = auto()
    """Nothing is known, and a digest will tell: [Note: guarded recipes]."""


class Known(NamedTuple):
    """What makes an output of a node."""

    operand: Expression
    at: int
    """The node's number in the trail."""
    reach: "Reach"
    """Why its reader read what the node made; another reader needs as good a reason."""


@dataclass(slots=True)
class Sources:
    """Where the operands, constants and recipes of one expression come from."""

    keeper: Keeper
    scene: Callable[[], Scene]
    """The running code; asked for where it matters alone."""
    find: Callable[[str], Callable[["Producer"], Expression | None] | None]
    trail: Trail
    """What has been asked: [Note: compiled recipes] in compiled.py."""
    guards: bool = False
    """Whether digests may stand for proofs: [Note: guarded recipes]."""
    is_guarded: bool = False
    """Whether one is needed."""
    nodes_left: int = MAX_NODES
    known: dict[tuple[Any, int], "Known"] = field(default_factory=dict)
    """What outputs of nodes are made by, so that it is made once."""
    owners: set[int] = field(default_factory=set)
    """Of tensors that nodes of the expression saved, by id."""

    def covers(self, expression: Expression, node: Any) -> bool:
        """Whether plain autograd, too, raises if an input is changed from now on.

        An input found by a note does not count by itself: the node that saved it may
        run in no backward (a metric's). It does if that node is on the way from the
        tensor's own node: the way around a frozen layer.
        """
        open_ones = [
            held
            for held in expression.held
            if held.is_noted and id(held.owner) not in self.owners
        ]
        return all(self._is_saved_behind(node, held) for held in open_ones)

    def _is_saved_behind(self, node: Any, noted: Held) -> bool:
        """Look for the tensor among what nodes behind this one have saved."""
        waiting: deque[tuple[Any, tuple[Edge, ...]]] = deque([(node, ())])
        for _ in range(MAX_BEHIND):
            if not waiting:
                return False
            at, way = waiting.popleft()
            for name in READ_BY.get(at.name(), ()):
                packed = packed_by(at, name)
                if packed is None or isinstance(packed, Tensor):
                    continue
                held = self.keeper.held(packed, at)
                if held is not None and held.owner is noted.owner:
                    self._take_way(way, name, held)
                    return True
            for index, (behind, output) in enumerate(at.next_functions):
                if behind is not None:
                    kind, name = type(behind), name_of_kind(behind)
                    edge = Edge(0, index, kind, name, output)
                    waiting.append((behind, (*way, edge)))
        return False

    def _take_way(self, way: tuple[Edge, ...], name: str, held: Held) -> None:
        """Ask for the node at the end of a way, and for what it saved."""
        at = 0
        for edge in way:
            at = self.trail.step(edge._replace(at=at))
        self.trail.take(Saved(at, name, Like.of(held)), held)
        self.owners.add(id(held.owner))


class Producer:
    """A node: its saved tensors, its constants, its edges, and what it made.

    What it answers is all that a recipe may depend on: see [Note: compiled recipes].
    """

    def __init__(
        self,
        node: Any,
        index: int,
        sources: Sources,
        *,
        tensor: Tensor | None = None,
        depth: int = 0,
        reach: Reach = Reach.SAVED,
        at: int = 0,
    ) -> None:
        self._node = node
        self.name: str = node.name()
        """Such as `GeluBackward0`."""
        self._tensor = tensor
        self._sources = sources
        self._trail = sources.trail
        self._depth = depth
        self._index = index
        self._reach = reach
        self._at = at

    @property
    def node(self) -> Any:
        """The autograd node (`grad_fn`), or the `ctx` of a custom Function.

        A recipe that looks at it is searched for at every step.
        """
        self._trail.ask(Opaque())
        return self._node

    @property
    def tensor(self) -> Tensor | None:
        """The tensor itself when it is at hand; None on the way to another.

        A recipe that looks at it is searched for at every step.
        """
        self._trail.ask(Opaque())
        return self._tensor

    @property
    def is_at_hand(self) -> bool:
        """Whether this is the node of the tensor that is saved, not one on the way."""
        return self._tensor is not None

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor it made."""
        return self._made().dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor it made."""
        return self._made().shape

    def _made(self) -> Made:
        made = Made.of(self._at, self._node, self._index)
        self._trail.ask(made)
        return made

    def saved(self, name: str | int) -> Operand | None:
        """An input that the node saved: `saved("self")` is its `_saved_self`.

        A custom Function's tensors are counted: `saved(0)`. None if the node saved
        none under this name, or saved it past ssdtrain (inside a checkpoint).
        """
        packed = packed_by(self._node, name)
        if packed is None:
            self._trail.ask(HasSaved(self._at, name, False))
            return None
        if isinstance(packed, Tensor):
            number = number_of(packed)
            self._trail.ask(Number(self._at, name, repr(number)))
            return number
        held = self._sources.keeper.held(packed, self._node)
        if held is None:
            self._trail.ask(Opaque())
            return None
        self._sources.owners.add(id(held.owner))
        self._trail.take(Saved(self._at, name, Like.of(held)), held)
        return held

    def has_saved(self, name: str | int) -> bool:
        """Whether the node saved something under this name, whoever holds it."""
        found = packed_by(self._node, name) is not None
        self._trail.ask(HasSaved(self._at, name, found))
        return found

    def constant(self, name: str) -> Any:
        """A value that the node keeps: `_saved_<name>`, or an attribute of `ctx`.

        Not for tensors: reading one would bring it back.
        """
        value = constant_of(self._node, name)
        self._trail.ask(Constant.of(self._at, name, value))
        return value

    def dimension(self, name: str) -> int:
        """A dimension that the node keeps; torch shows -1 as an unsigned number."""
        return signed(self.constant(name))

    @property
    def output(self) -> int:
        """Which output of the node it is."""
        return self._index  # the same at every step: it was asked for on the way

    @property
    def num_edges(self) -> int:
        """How many inputs the operator has, tensors without a gradient included."""
        found = len(self._node.next_functions)
        self._trail.ask(NumEdges(self._at, found))
        return found

    def has_edge(self, index: int) -> bool:
        """Whether the input at this position came from a node."""
        found = has_edge(self._node, index)
        self._trail.ask(HasEdge(self._at, index, found))
        return found

    def edge(self, index: int, *, is_dear: bool = True) -> Operand | None:
        """The input at this position, for nodes that do not save it.

        It is a parameter, another node's saved tensor, or an expression of its own.

        Args:
            index: the position.
            is_dear: whether products and attention may be run for it.
        """
        mark, was_guarded = self._trail.mark(), self._sources.is_guarded
        found = self._at_edge(index)
        if isinstance(found, Expression) and found.is_dear and not is_dear:
            found = None
        if found is None:
            self._sources.is_guarded = was_guarded
            self._trail.back_to(mark)
            known = self._sources.known
            for key in [k for k, each in known.items() if each.at >= mark.num_nodes]:
                del known[key]
        return found

    def _at_edge(self, index: int) -> Operand | None:
        if not has_edge(self._node, index) or self._depth >= MAX_CHAIN:
            return None
        self._sources.nodes_left -= 1
        if self._sources.nodes_left < 0:
            return None
        node, number = self._node.next_functions[index]
        name = node.name()
        if name == "torch::autograd::AccumulateGrad":
            return self._parameter(index, node.variable)
        shared = self._shared(index, node, number)
        if shared is not None:
            return shared
        at = self._step(index, node, number)
        kept = self._result(node, number, at) or self._noted(node, number, at)
        return kept or self._made_by(index, node, number, at)

    def _result(self, node: Any, number: int, at: int) -> Operand | None:
        """An output that its own node has saved."""
        name = RESULTS.get(node.name())
        if name is None or number:
            return None
        mark = self._trail.mark()
        found = Producer(node, number, self._sources, at=at).saved(name)
        if found is None:
            self._trail.back_to(mark)
        return found

    def _made_by(
        self, index: int, node: Any, number: int, at: int
    ) -> Expression | None:
        """An expression for an output of a node, which nobody has saved."""
        make = self._sources.find(node.name())
        if make is None:
            return None
        reach = self._reach_of(index, node, number, at)
        depth, how = self._depth + 1, reach or Reach.OPEN
        source = Producer(node, number, self._sources, depth=depth, reach=how, at=at)
        made = make(source)
        if made is not None and reach is None:
            self._sources.keeper.refuse_unsaved()
            return None
        if made is not None and reach is not None:
            self._sources.known[node, number] = Known(made, at, reach)
        return made

    def _shared(self, index: int, node: Any, number: int) -> Expression | None:
        """What an edge to the same tensor has led to before: it is made once."""
        known = self._sources.known.get((node, number))
        if known is None:
            return None
        mark = self._trail.mark()
        self._trail.ask(SameEdge(self._at, index, known.at, number))
        if self._reach_of(index, node, number, known.at) is known.reach:
            return known.operand
        self._trail.back_to(mark)
        return None

    def _step(self, index: int, node: Any, number: int) -> int:
        kind, name = type(node), name_of_kind(node)
        return self._trail.step(Edge(self._at, index, kind, name, number))

    def _noted(self, node: Any, number: int, at: int) -> Held | None:
        """An output of a node that somebody saved."""
        note = notes_of(node).outputs.get(number)
        held = None if note is None else self._sources.keeper.held(note, node)
        if held is None:
            return None
        saves = self._sources.scene().saves(node, number)
        held.is_noted = not saves
        if saves:
            self._trail.ask(Saves(at, number, saves))
        self._trail.take(Noted(at, number, Like.of(held)), held)
        return held

    def _reach_of(self, index: int, node: Any, number: int, at: int) -> Reach | None:
        """Why the unsaved tensor at this edge is what the operator read; None: it need
        not be. See [Note: unsaved tensors]."""
        if index in notes_of(self._node).witnessed:
            self._trail.ask(Witnessed(self._at, index))
            return Reach.SEEN
        argument = self._sources.scene().argument(node, number)
        if argument is not None:
            self._trail.ask(Argument(at, number))
            return Reach.SEEN if is_as_made(argument) else None
        if self._is_made_here():
            self._trail.ask(NoArgument(at, number))
            return Reach.MADE_HERE
        if self.name in VIEWS and self._reach is Reach.SEEN:
            return Reach.SEEN
        # See [Note: matrix products] in products.py.
        if self.name == "UnsafeViewBackward0" and follows(self._node, node):
            self._trail.ask(Composite(self._at, at))
            return Reach.SEEN
        if node.name() in VIEWS:
            return Reach.OPEN
        if self._sources.guards:
            self._sources.is_guarded = True
            return Reach.GUARDED
        return None

    def _is_made_here(self) -> bool:
        if self._reach is not Reach.SAVED:
            return self._reach is Reach.MADE_HERE
        scene = self._sources.scene()
        if not scene.is_pure or scene.argument(self._node, self._index) is not None:
            return False
        self._trail.ask(PureHere(self._at, self._index))
        return True

    def _parameter(self, index: int, variable: Tensor) -> Held | None:
        if not isinstance(variable, nn.Parameter):
            return None
        held = self._sources.keeper.parameter(variable, self._node, index)
        if held is not None:
            self._trail.take(AtLeaf(self._at, index, Like.of(held)), held)
        return held

    def source_dtype(self, index: int) -> torch.dtype | None:
        """The dtype of the input at this position; None if it is not known."""
        if not self.has_edge(index):
            return None
        node, number = self._node.next_functions[index]
        if node.name() == "torch::autograd::AccumulateGrad":
            leaf = LeafDtype(self._at, index, node.variable.dtype)
            self._trail.ask(leaf)
            return leaf.dtype
        made = Made.of(self._step(index, node, number), node, number)
        self._trail.ask(made)
        return made.dtype

    def narrowed(self, dtype: torch.dtype) -> Held | None:
        """The tensor itself in a smaller dtype, stored in its place."""
        if self._tensor is None:
            return None
        held = self._sources.keeper.narrowed(self._tensor, dtype)
        self._trail.store(dtype, held)
        return held

    def epsilon(self, name: str) -> Epsilon | None:
        """The epsilon of the normalization that saved this input, if certain."""
        source = self.saved(name)
        epsilon = source.epsilon if isinstance(source, Held) else None
        if epsilon is None:
            self._sources.keeper.refuse()
        return epsilon

    def addend(self) -> float | None:
        """The number that the running module adds; None outside known modules."""
        addend = self._sources.scene().addend if self._is_made_here() else None
        self._trail.ask(Addend(addend))
        return addend

    @property
    def layout(self) -> Layout | None:
        """Layout of the tensor, when it is at hand."""
        return None if self._tensor is None else Layout.of(self._tensor)

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
        expression = Expression(
            recipe=self.name,
            function=function,
            operands=tuple(op for op in operands if op is not None),
            constants=tuple(sorted(constants.items())),
        )
        return expression if expression.depth <= MAX_CHAIN else None


def signed(number: int) -> int:
    """What a 64-bit number is when its first bit is its sign."""
    return number - 2**64 if number >= 2**63 else number
