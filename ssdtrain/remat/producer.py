"""The autograd node that produced a tensor, as a recipe sees it."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ssdtrain.remat.expression import (
    MAX_CHAIN,
    MAX_NODES,
    Epsilon,
    Expression,
    Held,
    Layout,
    Operand,
)
from ssdtrain.remat.scene import Scene

NOTES = "ssdtrain"
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


class Keeper(Protocol):
    """Who holds saved tensors (the cache)."""

    def held(self, packed: Any, node: Any) -> Held | None:
        """The tensor behind what autograd packed for this node, or behind a note of
        `notes_of`; None if it is nobody's, or was changed since it was saved."""

    def parameter(
        self, parameter: nn.Parameter, node: Any, edge: int | None = None
    ) -> Held | None:
        """A parameter as the operator of this node read it.

        None if it may have been changed since, or its data may be gone in backward.

        Args:
            parameter: an input of the operator.
            node: the operator's.
            edge: its number among the inputs, if the node did not save it.
        """

    def narrowed(self, tensor: Tensor) -> Held | None:
        """Keep a new tensor that stands for a wider one."""

    def refuse(self) -> None:
        """Count a recipe that had to be refused."""

    def refuse_unsaved(self) -> None:
        """Count a recipe refused by [Note: unsaved tensors]."""


@dataclass(slots=True)
class Sources:
    """Where the operands, constants and recipes of one expression come from."""

    keeper: Keeper
    scene: Callable[[], Scene]
    """The running code; asked for where it matters alone."""
    find: Callable[[str], Callable[["Producer"], Expression | None] | None]
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


class Notes(NamedTuple):
    """What is remembered on a node: it lives in the graph, as long as the node."""

    outputs: dict[int, Any]
    """Saved tensors among the node's outputs, for the keeper (weak)."""
    parameters: dict[int, Hashable]
    """What the parameters at its edges were when the operator ran: `Weights.state`."""
    witnessed: set[int]
    """Edges whose tensor was at version 0 when the operator ran."""


def notes_of(node: Any) -> Notes:
    """The notes on a node."""
    notes = node.metadata.get(NOTES)
    if notes is None:
        notes = node.metadata[NOTES] = Notes({}, {}, set())
    return notes  # type: ignore[no-any-return]


class Producer:
    """A node: its saved tensors, its constants, its edges, and what it made."""

    def __init__(
        self,
        node: Any,
        index: int,
        sources: Sources,
        *,
        tensor: Tensor | None = None,
        depth: int = 0,
        reach: Reach = Reach.SAVED,
    ) -> None:
        self.node = node
        """The autograd node (`grad_fn`), or the `ctx` of a custom Function."""
        self.name: str = node.name()
        """Such as `GeluBackward0`."""
        self.tensor = tensor
        """The tensor itself when it is at hand; None on the way to another."""
        self._sources = sources
        self._depth = depth
        self._index = index
        self._reach = reach

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor it made."""
        made = self.node._input_metadata[self._index]
        return made.dtype  # type: ignore[no-any-return]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor it made."""
        return tuple(self.node._input_metadata[self._index].shape)

    def saved(self, name: str | int) -> Operand | None:
        """An input that the node saved: `saved("self")` is its `_saved_self`.

        A custom Function's tensors are counted: `saved(0)`. None if the node saved
        none under this name, or saved it past ssdtrain (inside a checkpoint).
        """
        packed = self._packed(name)
        if isinstance(packed, Tensor):
            return _number(packed)
        held = None if packed is None else self._sources.keeper.held(packed, self.node)
        if held is not None:
            self._sources.owners.add(id(held.owner))
        return held

    def has_saved(self, name: str | int) -> bool:
        """Whether the node saved something under this name, whoever holds it."""
        return self._packed(name) is not None

    def _packed(self, name: str | int) -> Any:
        if isinstance(name, int):
            every = getattr(self.node, "_raw_saved_tensors", ())
            raw = every[name] if name < len(every) else None
        else:
            raw = getattr(self.node, f"_raw_saved_{name}", None)
        # `.data` is what the pack hook returned; reading it runs no unpack hook.
        return getattr(raw, "data", None)

    def constant(self, name: str) -> Any:
        """A value that the node keeps: `_saved_<name>`, or an attribute of `ctx`.

        Not for tensors: reading one would bring it back.
        """
        if hasattr(self.node, f"_saved_{name}"):
            return getattr(self.node, f"_saved_{name}")
        return getattr(self.node, name)

    def dimension(self, name: str) -> int:
        """A dimension that the node keeps; torch shows -1 as an unsigned number."""
        return signed(self.constant(name))

    def has_edge(self, index: int) -> bool:
        """Whether the input at this position came from a node."""
        edges = self.node.next_functions
        return index < len(edges) and edges[index][0] is not None

    def edge(self, index: int) -> Operand | None:
        """The input at this position, for nodes that do not save it.

        It is a parameter, another node's saved tensor, or an expression of its own.
        """
        if not self.has_edge(index) or self._depth >= MAX_CHAIN:
            return None
        self._sources.nodes_left -= 1
        if self._sources.nodes_left < 0:
            return None
        node, number = self.node.next_functions[index]
        if node.name() == "torch::autograd::AccumulateGrad":
            return self._parameter(index, node.variable)
        name = node.name()
        result = RESULTS.get(name)
        if result is not None and number == 0:
            found = Producer(node, number, self._sources).saved(result)
            if found is not None:
                return found
        note = notes_of(node).outputs.get(number)
        held = None if note is None else self._sources.keeper.held(note, node)
        if held is not None:
            held.is_noted = not self._sources.scene().saves(node, number)
            return held
        make = self._sources.find(name)
        if make is None:
            return None
        reach = self._reach_of(index, node, number)
        depth, known = self._depth + 1, reach or Reach.OPEN
        found = make(Producer(node, number, self._sources, depth=depth, reach=known))
        if found is not None and reach is None:
            self._sources.keeper.refuse_unsaved()
            return None
        return found

    def _reach_of(self, index: int, node: Any, number: int) -> Reach | None:
        """Why the unsaved tensor at this edge is what the operator read; None: it need
        not be. See [Note: unsaved tensors]."""
        if index in notes_of(self.node).witnessed:
            return Reach.SEEN
        argument = self._sources.scene().argument(node, number)
        if argument is not None:
            return None if argument._version else Reach.SEEN
        if self._is_made_here():
            return Reach.MADE_HERE
        if self.name in VIEWS and self._reach is Reach.SEEN:
            return Reach.SEEN
        return Reach.OPEN if node.name() in VIEWS else None

    def _is_made_here(self) -> bool:
        if self._reach is not Reach.SAVED:
            return self._reach is Reach.MADE_HERE
        scene = self._sources.scene()
        return scene.is_pure and scene.argument(self.node, self._index) is None

    def _parameter(self, index: int, variable: Tensor) -> Held | None:
        if not isinstance(variable, nn.Parameter):
            return None
        return self._sources.keeper.parameter(variable, self.node, index)

    def source_dtype(self, index: int) -> torch.dtype | None:
        """The dtype of the input at this position; None if it is not known."""
        if not self.has_edge(index):
            return None
        node, number = self.node.next_functions[index]
        if node.name() == "torch::autograd::AccumulateGrad":
            return node.variable.dtype  # type: ignore[no-any-return]
        return node._input_metadata[number].dtype  # type: ignore[no-any-return]

    def narrowed(self, dtype: torch.dtype) -> Held | None:
        """The tensor itself in a smaller dtype, stored in its place."""
        if self.tensor is None:
            return None
        return self._sources.keeper.narrowed(self.tensor.detach().to(dtype))

    def epsilon(self, name: str) -> Epsilon | None:
        """The epsilon of the normalization that saved this input, if certain."""
        source = self.saved(name)
        epsilon = source.epsilon if isinstance(source, Held) else None
        if epsilon is None:
            self._sources.keeper.refuse()
        return epsilon

    def addend(self) -> float | None:
        """The number that the running module adds; None outside known modules."""
        return self._sources.scene().addend if self._is_made_here() else None

    @property
    def layout(self) -> Layout | None:
        """Layout of the tensor, when it is at hand."""
        return None if self.tensor is None else Layout.of(self.tensor)

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


def _number(raw: Tensor) -> int | float | None:
    """A Python number that an operator was given; hooks never see those."""
    if raw.dim() or raw.device.type != "cpu":
        return None
    if raw.dtype is torch.float64 or raw.dtype is torch.int64:
        return raw.item()
    return None
