"""What a recipe may ask of the graph, each kind of question a tuple with its answer.

A `Producer` asks when a recipe is searched for, and leaves its questions with their
answers; compiled.py asks them again. Nodes are numbered as edges led to them, from 0.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ssdtrain.remat.between import is_as_made
from ssdtrain.remat.expression import Epsilon, Held, Layout
from ssdtrain.remat.scene import Scene

NOTES = "ssdtrain"
_NOTHING = object()


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


Store = Callable[[Tensor], Any]
"""Takes over what a recipe stores; returns the handle."""


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

    def narrowed(
        self, wide: Tensor, dtype: torch.dtype, store: Store | None = None
    ) -> Held:
        """Make and keep a tensor of this dtype for a wider one; see `Compiled`."""

    def is_altered(self) -> bool:
        """Whether what operators gave in this step may be a mode's work: see
        [Note: modes below autograd]."""

    def refuse(self) -> None:
        """Count a recipe that had to be refused."""

    def refuse_unsaved(self) -> None:
        """Count a recipe refused by [Note: unsaved tensors]."""


class Asking:
    """One graph that is asked."""

    __slots__ = ("_make_scene", "_scene", "held", "keeper", "nodes", "owners", "tensor")

    def __init__(
        self, tensor: Tensor, keeper: Keeper, scene: Callable[[], Scene]
    ) -> None:
        self.tensor = tensor
        """The base tensor that is saved."""
        self.keeper = keeper
        self.nodes: list[Any] = [tensor.grad_fn]
        self.held: list[Held] = []
        """Operands, in the order of the questions for them."""
        self.owners: set[int] = set()
        """Of tensors that the nodes themselves saved, by id."""
        self._make_scene = scene
        self._scene: Scene | None = None

    @property
    def scene(self) -> Scene:
        """The running code; looked at where it matters alone."""
        if self._scene is None:
            self._scene = self._make_scene()
        return self._scene


class Question(Protocol):
    """Asked once with an answer that a recipe relied upon; asked again of others."""

    def holds(self, of: Asking) -> bool:
        """Whether the answer is the same of another graph."""


# -- nodes ----------------------------------------------------------------------------


class IsKind(NamedTuple):
    """The node that made the tensor is of this kind, and this is its output."""

    kind: type[Any]
    name: str
    """Of nodes that share a class with others; "": the class tells."""
    output: int

    @classmethod
    def of(cls, node: Any, output: int) -> "IsKind":
        """The question that this node answers."""
        return cls(type(node), name_of_kind(node), output)

    def holds(self, of: Asking) -> bool:
        """Ask."""
        node = of.nodes[0]
        return (
            of.tensor.output_nr == self.output
            and type(node) is self.kind
            and (not self.name or str(node.name()) == self.name)
        )


def name_of_kind(node: Any) -> str:
    """Its name, where its class does not tell what it is."""
    # Nodes without a Python class of their own share this one.
    return str(node.name()) if type(node).__name__ == "CppFunction" else ""


class Edge(NamedTuple):
    """An edge leads to this output of a node of this kind, which gets a number."""

    at: int
    place: int
    kind: type[Any]
    name: str
    output: int

    def holds(self, of: Asking) -> bool:
        """Ask; the node is known by the next number from then on."""
        edges = of.nodes[self.at].next_functions
        if self.place >= len(edges):
            return False
        node, output = edges[self.place]
        of.nodes.append(node)
        return (
            output == self.output
            and type(node) is self.kind
            and (not self.name or str(node.name()) == self.name)
        )


class HasEdge(NamedTuple):
    """Whether an input came from a node."""

    at: int
    place: int
    answer: bool

    def holds(self, of: Asking) -> bool:
        """Ask."""
        return has_edge(of.nodes[self.at], self.place) is self.answer


def has_edge(node: Any, index: int) -> bool:
    """Whether the input at this position came from a node."""
    edges = node.next_functions
    return index < len(edges) and edges[index][0] is not None


class NumEdges(NamedTuple):
    """How many inputs a node has."""

    at: int
    answer: int

    def holds(self, of: Asking) -> bool:
        """Ask."""
        return len(of.nodes[self.at].next_functions) == self.answer


class Made(NamedTuple):
    """A node made a tensor of this dtype and shape."""

    at: int
    output: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, at: int, node: Any, output: int) -> "Made":
        """The question that this node answers."""
        made = node._input_metadata[output]
        return cls(at, output, made.dtype, tuple(made.shape))

    def holds(self, of: Asking) -> bool:
        """Ask."""
        made = of.nodes[self.at]._input_metadata[self.output]
        return made.dtype is self.dtype and tuple(made.shape) == self.shape


class Constant(NamedTuple):
    """A node keeps this value."""

    at: int
    name: str
    kind: type
    text: str

    @classmethod
    def of(cls, at: int, name: str, value: Any) -> "Constant":
        """The question whose answer is this value."""
        return cls(at, name, type(value), repr(value))

    def holds(self, of: Asking) -> bool:
        """Ask."""
        found = constant_of(of.nodes[self.at], self.name)
        # 0.0 equals -0.0, and NaN does not equal itself: their texts tell.
        return type(found) is self.kind and repr(found) == self.text


def constant_of(node: Any, name: str) -> Any:
    """A value that a node keeps."""
    found = getattr(node, f"_saved_{name}", _NOTHING)
    return getattr(node, name) if found is _NOTHING else found


class Opaque(NamedTuple):
    """The recipe looked at something that cannot be asked for again."""

    def holds(self, of: Asking) -> bool:
        """Never."""
        return False


# -- operands -------------------------------------------------------------------------


class Like(NamedTuple):
    """What must be the same of an operand."""

    layout: Layout
    is_parameter: bool
    is_noted: bool
    epsilon: Epsilon | None

    @classmethod
    def of(cls, held: Held) -> "Like":
        """What is the case of this one."""
        known = held.parameter is not None
        return cls(held.layout, known, held.is_noted, held.epsilon)

    def accepts(self, held: Held) -> bool:
        """Whether another one may stand in its place."""
        return (
            held.layout == self.layout
            and (held.parameter is not None) is self.is_parameter
            and held.epsilon == self.epsilon
        )


def packed_by(node: Any, name: str | int) -> Any:
    """What the pack hook returned for a tensor of a node; None: nothing was saved."""
    if isinstance(name, int):
        every = getattr(node, "_raw_saved_tensors", ())
        raw = every[name] if name < len(every) else None
    else:
        raw = getattr(node, f"_raw_saved_{name}", None)
    # `.data` is what the pack hook returned; reading it runs no unpack hook.
    return getattr(raw, "data", None)


class HasSaved(NamedTuple):
    """Whether a node saved something under this name."""

    at: int
    name: str | int
    answer: bool

    def holds(self, of: Asking) -> bool:
        """Ask."""
        packed = packed_by(of.nodes[self.at], self.name)
        return (packed is not None) is self.answer


class Number(NamedTuple):
    """A node saved this Python number."""

    at: int
    name: str | int
    text: str

    def holds(self, of: Asking) -> bool:
        """Ask."""
        packed = packed_by(of.nodes[self.at], self.name)
        return isinstance(packed, Tensor) and repr(number_of(packed)) == self.text


def number_of(raw: Tensor) -> int | float | None:
    """A Python number that an operator was given; hooks never see those."""
    if raw.dim() or raw.device.type != "cpu":
        return None
    if raw.dtype is torch.float64 or raw.dtype is torch.int64:
        return raw.item()
    return None


class Saved(NamedTuple):
    """A node saved a tensor like this one: an operand."""

    at: int
    name: str | int
    like: Like

    def holds(self, of: Asking) -> bool:
        """Ask."""
        node = of.nodes[self.at]
        packed = packed_by(node, self.name)
        if packed is None or isinstance(packed, Tensor):
            return False
        held = of.keeper.held(packed, node)
        if held is None or not self.like.accepts(held):
            return False
        of.held.append(held)
        of.owners.add(id(held.owner))
        return True


class Noted(NamedTuple):
    """Somebody saved this output of a node: an operand."""

    at: int
    output: int
    like: Like

    def holds(self, of: Asking) -> bool:
        """Ask."""
        node = of.nodes[self.at]
        note = notes_of(node).outputs.get(self.output)
        held = None if note is None else of.keeper.held(note, node)
        if held is None or not self.like.accepts(held):
            return False
        of.held.append(held)
        return True


class AtLeaf(NamedTuple):
    """A parameter is at an edge: an operand."""

    at: int
    place: int
    like: Like

    def holds(self, of: Asking) -> bool:
        """Ask."""
        node = of.nodes[self.at]
        edges = node.next_functions
        leaf = edges[self.place][0] if self.place < len(edges) else None
        variable = getattr(leaf, "variable", None)
        if not isinstance(variable, nn.Parameter):
            return False
        held = of.keeper.parameter(variable, node, self.place)
        if held is None or not self.like.accepts(held):
            return False
        of.held.append(held)
        return True


class LeafDtype(NamedTuple):
    """A leaf of this dtype is at an edge."""

    at: int
    place: int
    dtype: torch.dtype

    def holds(self, of: Asking) -> bool:
        """Ask."""
        edges = of.nodes[self.at].next_functions
        leaf = edges[self.place][0] if self.place < len(edges) else None
        return getattr(getattr(leaf, "variable", None), "dtype", None) is self.dtype


# -- the running code -----------------------------------------------------------------


class Witnessed(NamedTuple):
    """The tensor at an edge was seen at version 0 when the node read it."""

    at: int
    place: int

    def holds(self, of: Asking) -> bool:
        """Ask."""
        return self.place in notes_of(of.nodes[self.at]).witnessed


class Argument(NamedTuple):
    """This output of a node is an argument of the running module, at version 0."""

    at: int
    output: int

    def holds(self, of: Asking) -> bool:
        """Ask."""
        found = of.scene.argument(of.nodes[self.at], self.output)
        return found is not None and is_as_made(found)


class PureHere(NamedTuple):
    """The pure forward that runs made this output of a node."""

    at: int
    output: int

    def holds(self, of: Asking) -> bool:
        """Ask."""
        scene = of.scene
        return scene.is_pure and scene.argument(of.nodes[self.at], self.output) is None


class NoArgument(NamedTuple):
    """This output of a node is no argument of the running module."""

    at: int
    output: int

    def holds(self, of: Asking) -> bool:
        """Ask."""
        return of.scene.argument(of.nodes[self.at], self.output) is None


class Composite(NamedTuple):
    """One operator of torch ran two in a row, so nobody saw what lies between them."""

    reader: int
    maker: int

    def holds(self, of: Asking) -> bool:
        """Ask."""
        return follows(of.nodes[self.reader], of.nodes[self.maker])


def follows(reader: Any, maker: Any) -> bool:
    """Whether no node was made between these two."""
    return bool(reader._sequence_nr() == maker._sequence_nr() + 1)


class SameEdge(NamedTuple):
    """An edge leads to a node that another one has led to before."""

    at: int
    place: int
    node: int
    output: int

    def holds(self, of: Asking) -> bool:
        """Ask."""
        edges = of.nodes[self.at].next_functions
        if self.place >= len(edges):
            return False
        node, output = edges[self.place]
        return node is of.nodes[self.node] and output == self.output


class Addend(NamedTuple):
    """The number that the running module adds to a tensor of its own."""

    value: float | None

    def holds(self, of: Asking) -> bool:
        """Ask."""
        return of.scene.addend == self.value


class Saves(NamedTuple):
    """Whether the running forward surely saves this output of a node."""

    at: int
    output: int
    answer: bool

    def holds(self, of: Asking) -> bool:
        """Ask."""
        return of.scene.saves(of.nodes[self.at], self.output) is self.answer
