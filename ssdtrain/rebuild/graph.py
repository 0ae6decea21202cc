"""What may be read of the graph that made a tensor.

The search for a recipe reads an `AutogradGraph`, and leaves a `Guard` for each answer.
A recipe that was found reads the graph of another step through the same methods: see
compiled.py. Nodes are numbered in the order in which edges led to them, from 0.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ssdtrain.rebuild.between import is_as_made
from ssdtrain.rebuild.expression import Epsilon, Layout, TensorInput
from ssdtrain.rebuild.frame import CallerFrame

NOTES = "ssdtrain"
_NOTHING = object()


class Notes(NamedTuple):
    """What is remembered on a node: it lives in the graph, as long as the node."""

    outputs: dict[int, Any]
    """Saved tensors among the node's outputs, for the `OperandLookup` (weak)."""
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


class OperandLookup(Protocol):
    """Finds what recipes may read (the cache)."""

    def saved(self, packed: Any, node: Any) -> TensorInput | None:
        """The tensor of a handle that autograd packed for this node, or of a note.

        None if it is nobody's, or was changed since it was saved.
        """

    def parameter(
        self, parameter: nn.Parameter, node: Any, edge: int | None = None
    ) -> TensorInput | None:
        """A parameter as the operator of this node read it.

        None if it may have been changed since, or its data may be gone in backward.

        Args:
            parameter: an input of the operator.
            node: the operator's.
            edge: its number among the inputs, if the node did not save it.
        """

    def narrowed(
        self, wide: Tensor, dtype: torch.dtype, store: Store | None = None
    ) -> TensorInput:
        """Make and keep a tensor of this dtype for a wider one; see `Compiled`."""

    def is_altered(self) -> bool:
        """Whether what operators gave in this step may be a mode's work: see
        [Note: modes below autograd]."""

    def refuse(self) -> None:
        """Count a recipe that had to be refused."""

    def refuse_unsaved(self) -> None:
        """Count a recipe refused by [Note: unsaved tensors]."""


class NodeKind(NamedTuple):
    """Of a node, and which of its outputs is meant."""

    type: type[Any]
    name: str
    """Of nodes that share a class with others; "": the class tells."""
    output: int

    @classmethod
    def of(cls, node: Any, output: int) -> "NodeKind":
        """The kind of this node."""
        kind = type(node)
        # Nodes without a Python class of their own share this one.
        shared = kind.__name__ == "CppFunction"
        return cls(kind, str(node.name()) if shared else "", output)


class Like(NamedTuple):
    """What must be the same of an operand."""

    layout: Layout
    is_parameter: bool
    epsilon: Epsilon | None


class SavedNumber(NamedTuple):
    """A Python number that an operator was given, as text."""

    text: str


NOBODYS = "nobody's"
"""What a node saved is held by nobody, or was changed."""


class AutogradGraph:
    """The graph that made one tensor."""

    __slots__ = ("_frame", "_look", "inputs", "lookup", "nodes", "owners", "tensor")

    def __init__(
        self, tensor: Tensor, lookup: OperandLookup, look: Callable[[], CallerFrame]
    ) -> None:
        """look: at the running code, when something asks about it."""
        self.tensor = tensor
        """The base tensor that is saved."""
        self.lookup = lookup
        self.nodes: list[Any] = [tensor.grad_fn]
        self.inputs: list[TensorInput] = []
        """Operands, in the order in which they were read."""
        self.owners: list[int] = []
        """Of tensors that the nodes themselves saved, by id."""
        self._look: Callable[[], CallerFrame] | None = look
        self._frame: CallerFrame | None = None

    @property
    def frame(self) -> CallerFrame:
        """The running code."""
        if self._frame is None:
            if self._look is None:
                raise RuntimeError("the code that made the tensor has gone on")
            self._frame = self._look()
        return self._frame

    def forget_frame(self) -> None:
        """The search has ended: a frame keeps its tensors, and its caller's."""
        self._look = self._frame = None

    # -- nodes ------------------------------------------------------------------------

    def root(self) -> NodeKind:
        """The node that made the tensor."""
        return NodeKind.of(self.nodes[0], self.tensor.output_nr)

    def follow(self, at: int, place: int) -> NodeKind | None:
        """The node at an edge, which is known by the next number from then on."""
        node, output = self._edge(at, place)
        if node is None:
            return None
        self.nodes.append(node)
        return NodeKind.of(node, output)

    def leads_to(self, at: int, place: int, number: int, output: int) -> bool:
        """Whether an edge leads to this output of a node that has a number."""
        node, found = self._edge(at, place)
        return node is self.nodes[number] and found == output

    def _edge(self, at: int, place: int) -> tuple[Any, int]:
        edges = self.nodes[at].next_functions
        return edges[place] if place < len(edges) else (None, 0)

    def has_edge(self, at: int, place: int) -> bool:
        """Whether the input at this position came from a node."""
        return self._edge(at, place)[0] is not None

    def made(self, at: int, output: int) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape of an output."""
        made = self.nodes[at]._input_metadata[output]
        return made.dtype, tuple(made.shape)

    def constant(self, at: int, name: str) -> tuple[type, str]:
        """A value that a node keeps: 0.0 equals -0.0, and NaN does not equal itself,
        so its text."""
        found = constant_of(self.nodes[at], name)
        return type(found), repr(found)

    def is_composite(self, reader: int, maker: int) -> bool:
        """Whether no node was made between these two: one operator of torch ran both,
        and nobody saw what lies between them."""
        first, second = self.nodes[maker], self.nodes[reader]
        return bool(second._sequence_nr() == first._sequence_nr() + 1)

    # -- operands ---------------------------------------------------------------------

    def saved(self, at: int, name: str | int) -> Like | SavedNumber | str | None:
        """What a node saved under this name; an operand, if it is a tensor."""
        node = self.nodes[at]
        packed = packed_by(node, name)
        if packed is None:
            return None
        if isinstance(packed, Tensor):
            return SavedNumber(repr(number_of(packed)))
        found = self.lookup.saved(packed, node)
        if found is None:
            return NOBODYS
        self.owners.append(id(found.owner))
        return self._take(found)

    def has_saved(self, at: int, name: str | int) -> bool:
        """Whether a node saved something under this name, whoever holds it."""
        return packed_by(self.nodes[at], name) is not None

    def noted(self, at: int, output: int) -> Like | None:
        """An output of a node that somebody saved: an operand."""
        node = self.nodes[at]
        note = notes_of(node).outputs.get(output)
        found = None if note is None else self.lookup.saved(note, node)
        return None if found is None else self._take(found)

    def parameter(self, at: int, place: int) -> Like | None:
        """A parameter at an edge: an operand."""
        variable = getattr(self._edge(at, place)[0], "variable", None)
        if not isinstance(variable, nn.Parameter):
            return None
        found = self.lookup.parameter(variable, self.nodes[at], place)
        return None if found is None else self._take(found)

    def leaf_dtype(self, at: int, place: int) -> torch.dtype | None:
        """Of the leaf at an edge."""
        variable = getattr(self._edge(at, place)[0], "variable", None)
        return getattr(variable, "dtype", None)

    def _take(self, found: TensorInput) -> Like:
        self.inputs.append(found)
        return Like(found.layout, found.parameter is not None, found.epsilon)

    # -- the running code: [Note: unsaved tensors] ------------------------------------

    def was_witnessed(self, at: int, place: int) -> bool:
        """Whether the tensor at an edge was seen at version 0 when the node read it."""
        return place in notes_of(self.nodes[at]).witnessed

    def argument_is_as_made(self, at: int, output: int) -> bool | None:
        """Whether the argument of the running module that this output is, is what the
        node made; None: it is no argument."""
        found = self.frame.argument(self.nodes[at], output)
        return None if found is None else is_as_made(found)

    def is_pure_here(self, at: int, output: int) -> bool:
        """Whether the pure forward that runs made this output."""
        frame = self.frame
        return frame.is_pure and frame.argument(self.nodes[at], output) is None

    def frame_saves(self, at: int, output: int) -> bool:
        """Whether the running forward surely saves this output."""
        return self.frame.saves(self.nodes[at], output)

    def addend(self) -> float | None:
        """The number that the running module adds to a tensor of its own."""
        return self.frame.addend

    def unknown(self) -> bool:
        """The recipe looked at something that no guard can ask for again."""
        return True


class Guard(NamedTuple):
    """What a recipe has read, and must read again."""

    read: Callable[..., Any]
    """A method of `AutogradGraph`."""
    args: tuple[Any, ...]
    answer: Any


def packed_by(node: Any, name: str | int) -> Any:
    """What the pack hook returned for a tensor of a node; None: nothing was saved."""
    if isinstance(name, int):
        every = getattr(node, "_raw_saved_tensors", ())
        raw = every[name] if name < len(every) else None
    else:
        raw = getattr(node, f"_raw_saved_{name}", None)
    # `.data` is what the pack hook returned; reading it runs no unpack hook.
    return getattr(raw, "data", None)


def constant_of(node: Any, name: str) -> Any:
    """A value that a node keeps."""
    found = getattr(node, f"_saved_{name}", _NOTHING)
    return getattr(node, name) if found is _NOTHING else found


def number_of(raw: Tensor) -> int | float | None:
    """A Python number that an operator was given; hooks never see those."""
    if raw.dim() or raw.device.type != "cpu":
        return None
    if raw.dtype is torch.float64 or raw.dtype is torch.int64:
        return raw.item()
    return None
