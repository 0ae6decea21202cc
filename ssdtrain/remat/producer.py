"""The autograd node that produced a tensor, as a recipe sees it."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ssdtrain.remat.expression import (
    MAX_CHAIN,
    MAX_NODES,
    Expression,
    Held,
    Layout,
    Operand,
    State,
)

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


class Keeper(Protocol):
    """Who holds saved tensors (the cache)."""

    def held(self, packed: Any) -> Held | None:
        """The tensor behind what autograd packed, or behind a note of `notes_of`.

        None if it is nobody's, or was changed since it was saved.
        """

    def parameter(self, parameter: nn.Parameter) -> Held | None:
        """A parameter, unless its data may be gone when backward comes."""

    def narrowed(self, tensor: Tensor) -> Held | None:
        """Keep a new tensor that stands for a wider one."""

    def refuse(self) -> None:
        """Count a recipe that had to be refused."""


class Epsilon(NamedTuple):
    """A known epsilon."""

    value: float | None
    """None: the module leaves it to the operator."""


class Constants(Protocol):
    """What nodes do not expose."""

    def epsilon(self, weight: nn.Parameter | None) -> Epsilon | None:
        """Of the normalization that owns this weight; None if it is not certain."""

    def addend(self) -> float | None:
        """The number that the running module adds to a tensor; None outside."""


@dataclass(slots=True)
class Sources:
    """Where the operands, constants and recipes of one expression come from."""

    keeper: Keeper
    constants: Constants
    find: Callable[[str], Callable[["Producer"], Expression | None] | None]
    nodes_left: int = MAX_NODES


class Notes(NamedTuple):
    """What is remembered on a node: it lives in the graph, as long as the node."""

    outputs: dict[int, Any]
    """Saved tensors among the node's outputs, for the keeper (weak)."""
    versions: dict[int, int]
    """Versions of the parameters at its edges, when first seen."""


def notes_of(node: Any) -> Notes:
    """The notes on a node."""
    notes = node.metadata.get(NOTES)
    if notes is None:
        notes = node.metadata[NOTES] = Notes({}, {})
    return notes  # type: ignore[no-any-return]


class Producer:
    """A node: its saved tensors, its constants, its edges, and what it made."""

    def __init__(
        self, node: Any, index: int, sources: Sources, tensor: Tensor | None, depth: int
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
        return None if packed is None else self._sources.keeper.held(packed)

    def random_state(self, name: str | int) -> State | None:
        """The random generator's state when this input was saved, before the operator
        drew; remembered for 4-D tensors on CUDA."""
        saved = self.saved(name)
        return saved.random_state if isinstance(saved, Held) else None

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
        note = notes_of(node).outputs.get(number)
        held = None if note is None else self._sources.keeper.held(note)
        if held is not None:
            return held
        producer = Producer(node, number, self._sources, None, self._depth + 1)
        result = RESULTS.get(producer.name)
        if result is not None and number == 0:
            found = producer.saved(result)
            if found is not None:
                return found
        make = self._sources.find(producer.name)
        return None if make is None else make(producer)

    def _parameter(self, index: int, variable: Tensor) -> Held | None:
        # The operator read the version that the node saw first: a cached autocast
        # cast may be older than the parameter is now.
        seen = notes_of(self.node).versions.setdefault(index, variable._version)
        if seen != variable._version or not isinstance(variable, nn.Parameter):
            return None
        return self._sources.keeper.parameter(variable)

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

    def epsilon(self, weight: Operand | None) -> Epsilon | None:
        """The epsilon of the normalization that owns this weight, if certain."""
        parameter = weight.parameter if isinstance(weight, Held) else None
        epsilon = self._sources.constants.epsilon(parameter)
        if epsilon is None:
            self._sources.keeper.refuse()
        return epsilon

    def addend(self) -> float | None:
        """The number that the running module adds; None outside known modules."""
        return self._sources.constants.addend()

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
