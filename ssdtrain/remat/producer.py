"""The autograd node that produced a tensor, as a recipe sees it."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn

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
    Constant,
    Edge,
    HasEdge,
    HasSaved,
    Keeper,
    Like,
    Made,
    NoArgument,
    Noted,
    Number,
    Opaque,
    PureHere,
    Saved,
    Saves,
    Witnessed,
    constant_of,
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


@dataclass(slots=True)
class Sources:
    """Where the operands, constants and recipes of one expression come from."""

    keeper: Keeper
    scene: Callable[[], Scene]
    """The running code; asked for where it matters alone."""
    find: Callable[[str], Callable[["Producer"], Expression | None] | None]
    trail: Trail
    """What has been asked: [Note: compiled recipes] in compiled.py."""
    nodes_left: int = MAX_NODES
    owners: set[int] = field(default_factory=set)
    """Of tensors that nodes of the expression saved, by id."""

    def covers(self, expression: Expression) -> bool:
        """Whether plain autograd, too, raises if an input is changed from now on.

        An input found by a note does not count by itself: the node that saved it may
        run in no backward (a metric's).
        """
        return all(
            not held.is_noted or id(held.owner) in self.owners
            for held in expression.held
        )


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

    def has_edge(self, index: int) -> bool:
        """Whether the input at this position came from a node."""
        found = has_edge(self._node, index)
        self._trail.ask(HasEdge(self._at, index, found))
        return found

    def edge(self, index: int) -> Operand | None:
        """The input at this position, for nodes that do not save it.

        It is a parameter, another node's saved tensor, or an expression of its own.
        """
        mark = self._trail.mark()
        found = self._at_edge(index)
        if found is None:
            self._trail.back_to(mark)
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
        at = self._step(index, node, number)
        result = RESULTS.get(name)
        if result is not None and number == 0:
            mark = self._trail.mark()
            found = Producer(node, number, self._sources, at=at).saved(result)
            if found is not None:
                return found
            self._trail.back_to(mark)
        noted = self._noted(node, number, at)
        if noted is not None:
            return noted
        make = self._sources.find(name)
        if make is None:
            return None
        reach = self._reach_of(index, node, number, at)
        depth, known = self._depth + 1, reach or Reach.OPEN
        source = Producer(node, number, self._sources, depth=depth, reach=known, at=at)
        made = make(source)
        if made is not None and reach is None:
            self._sources.keeper.refuse_unsaved()
            return None
        return made

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
            return None if argument._version else Reach.SEEN
        if self._is_made_here():
            self._trail.ask(NoArgument(at, number))
            return Reach.MADE_HERE
        if self.name in VIEWS and self._reach is Reach.SEEN:
            return Reach.SEEN
        return Reach.OPEN if node.name() in VIEWS else None

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
            self._trail.ask(Opaque())  # it is a parameter that may not be used
            return node.variable.dtype  # type: ignore[no-any-return]
        made = Made.of(self._step(index, node, number), node, number)
        self._trail.ask(made)
        return made.dtype

    def narrowed(self, dtype: torch.dtype) -> Held | None:
        """The tensor itself in a smaller dtype, stored in its place."""
        if self._tensor is None:
            return None
        held = self._sources.keeper.narrowed(self._tensor.detach().to(dtype))
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
