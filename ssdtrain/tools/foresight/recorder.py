"""Notes the operators of a step, their tensors and the lives of storages, by a dispatch
mode that `capture.py` and `steps.py` drive.

[Note: backward without a mode]
Under a dispatch mode autograd adds up gradients, and puts them into rows, out of place;
without one it does so in place. Such operators go by the names that they really have.
(tests/ssdtrain/tools/foresight/test_graph.py)
"""

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves

from ssdtrain.errors import ConfigError
from ssdtrain.tools.foresight.caveats import ASSUMED
from ssdtrain.tools.foresight.graph import CALLER, Allocation, Graph, Node, TensorInfo
from ssdtrain.tools.foresight.overheads import StepPhase

DTYPES: dict[torch.dtype, str] = {
    **{torch.bfloat16: "bf16", torch.float16: "fp16"},
    **{torch.float32: "fp32", torch.float64: "fp64"},
    **{torch.complex64: "complex64", torch.complex128: "complex128"},
    **dict.fromkeys((torch.int64, torch.uint64), "int64"),
    **dict.fromkeys((torch.int32, torch.uint32), "int32"),
    **dict.fromkeys((torch.int16, torch.uint16), "int16"),
    **dict.fromkeys((torch.int8, torch.uint8), "int8"),
    **dict.fromkeys((torch.float8_e4m3fn, torch.float8_e5m2), "fp8"),
    **dict.fromkeys((torch.float8_e4m3fnuz, torch.float8_e5m2fnuz), "fp8"),
    torch.bool: "bool",
}
# Operators whose result the host waits for.
SYNCHRONOUS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::item")
UPDATE_VIEWS = 1.4
"""What an optimizer's Python takes a tensor, in views' worth of host time (on a
CPU)."""
WRAPPED_VIEWS: Mapping[StepPhase, float] = {
    StepPhase.FORWARD: 21.0,
    StepPhase.BACKWARD: 10.1,
    StepPhase.UPDATE: 6.2,
}
"""What the host does for an operator on DTensors, in the update for each tensor, in
views' worth: host time with and without tensor parallelism (on a CPU)."""
IN_PLACE: Mapping[str, str] = {
    "aten::add": "aten::add_",
    "aten::index_add": "aten::index_add_",
    "aten::index_put": "aten::_index_put_impl_",
}
"""See [Note: backward without a mode]."""
STATES = {"adamw": 2, "sgd": 0, "sgd_momentum": 1}
"""Tensors of state that each fused optimizer keeps a parameter."""


class Noted(NamedTuple):
    """An operator on its way into the graph."""

    node: Node
    """Without its tensors."""
    read: Sequence[Tensor]
    written: Sequence[Tensor]
    """Its results, and what it changes."""
    may_view: bool = False
    """Where it makes no storage, it launches nothing."""


Amend = Callable[[Any, tuple[Any, Any], Noted], Noted | None]


class _Stamp:
    """Dies with its storage."""

    def __init__(self, number: int, of: object) -> None:
        self.number = number
        self.of = of
        """What tells recorders apart: the same storage has a number in each."""


class Recorder(TorchDispatchMode):
    """Notes every operator, its tensors and what it holds. `after_node`: called after
    every operator; `amend`: says what its schema does not, None leaves it out;
    `runs_compiled`: compiled regions run as they were compiled."""

    def __init__(
        self,
        model: nn.Module,
        after_node: Callable[["Recorder"], None] | None = None,
        amend: Amend | None = None,
        runs_compiled: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._after_node = after_node
        self._amend = amend
        self._runs_compiled = runs_compiled
        self._token = object()
        self._is_quiet = self._ignores_detach = False
        self._num_wrapped = 0
        """Operators on DTensors (of lists: tensors) whose local ones come next."""
        self.phase = StepPhase.FORWARD
        self.num_assumed = 0
        """Answers that the host asked a tensor for, taken as yes."""
        self._model = model
        self._nodes: list[Node] = []
        self._tensors: dict[int, TensorInfo] = {}
        self._known: dict[tuple[Any, ...], int] = {}
        self._sizes: dict[int, int] = {}
        self._born: dict[int, int] = {}
        self._dies: dict[int, int] = {}
        self._parameters: set[int] = set()
        self._alive: dict[int, int] = {}
        """Bytes of every storage alive that an operator made."""
        self._apart: set[int] = set()
        self.alive_bytes = self.other_bytes = 0
        """Of all these, and of those that nobody counts apart."""
        self._path: list[str] = []
        self._seen: set[int] = set()
        """Storages that a node has read or written."""
        self._states: list[Tensor] = []
        """Keeps the optimizer's state alive until the graph is made."""
        for parameter in model.parameters():
            self._parameters.add(self.storage_of(local(parameter)))

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]
        """Let Dynamo run compiled code under this mode (torch asks for it)."""
        return self._runs_compiled

    @contextmanager
    def modules(self) -> Iterator[None]:
        """Name the module in whose forward an operator runs."""
        handles = []
        for path, module in self._model.named_modules():

            def enter(*_: Any, path: str = path) -> None:
                self._path.append(path)

            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def unnoticed(self) -> Iterator[None]:
        """Run operators that are none of the step's."""
        self._is_quiet = True
        try:
            yield
        finally:
            self._is_quiet = False

    def ignore_detach(self) -> None:
        """Leave out the view that autograd makes next of what an unpack hook gives."""
        self._ignores_detach = True

    def _leave(self, *_: Any) -> None:
        if self._path:
            self._path.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            if not self._is_quiet and any(hasattr(t, "redistribute") for t in types):
                many = args[0] if args and isinstance(args[0], list | tuple) else [0]
                self._num_wrapped += len(many)
            return NotImplemented  # its local operators come here
        name = func._schema.name
        ignored = self._ignores_detach and name == "aten::detach"
        self._ignores_detach = False
        if self._is_quiet or ignored or name.startswith("profiler::"):
            return func(*args, **kwargs)
        out = self._result(func, args, kwargs)
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if any(isinstance(x, FakeTensor) for x in results):
            return out  # DTensor asks for a result's shape, once for each new operator
        read, written = _roles(func, args, kwargs)
        node = Node(
            name=name,
            phase=self.phase,
            inputs=(),
            outputs=(),
            module=self.module,
            attr=attributes(func, args, kwargs),
            waits_for_device=name in SYNCHRONOUS,
        )
        may_view = not func._schema.is_mutable
        noted = Noted(node, read, [*results, *written], may_view)
        amend = self._amend
        amended = noted if amend is None else amend(func, (args, kwargs), noted)
        if amended is not None:
            self.note(amended)
        return out

    def note(self, noted: "Noted") -> None:
        """Append a node."""
        inputs = tuple(self._tensor(local(x)) for x in noted.read)
        known = {self._tensors[number].storage for number in inputs}
        outputs = tuple(dict.fromkeys(self._tensor(local(x)) for x in noted.written))
        new = {self._tensors[number].storage for number in outputs} - known
        for storage in new - self._seen:
            self._born.setdefault(storage, len(self._nodes))
            self._lives(storage, self._sizes[storage])
        self._seen |= known | new
        is_view = noted.may_view and not new
        node = replace(noted.node, inputs=inputs, outputs=outputs, is_view=is_view)
        if self._num_wrapped:
            views = node.attr.get("host_views", 0.0)
            views += WRAPPED_VIEWS[node.phase] * self._num_wrapped
            node = replace(node, attr={**node.attr, "host_views": views})
            self._num_wrapped = 0
        if node.phase is StepPhase.BACKWARD and self._accumulates(node):
            node = replace(node, name=IN_PLACE[node.name])
        self._nodes.append(node)
        if self._after_node is not None:
            self._after_node(self)

    def _accumulates(self, node: Node) -> bool:
        """See [Note: backward without a mode]."""
        if node.name != "aten::add":
            return node.name in IN_PLACE
        shapes = {self._tensors[n].shape for n in (*node.inputs, *node.outputs)}
        return len(node.inputs) == 2 and len(shapes) == 1

    def _result(self, func: Any, args: Any, kwargs: Any) -> Any:
        """See [Note: as on the device]."""
        asked = func._schema.name == "aten::_local_scalar_dense"
        if asked and args[0].is_meta and args[0].dtype is torch.bool:
            self.num_assumed += 1
            return True
        return func(*args, **kwargs)

    def storage_of(self, tensor: Tensor) -> int:
        """The number of a tensor's storage."""
        storage: Any = tensor.untyped_storage()
        stamp = getattr(storage, "_ssdtrain_foresight", None)
        if stamp is None or stamp.of is not self._token:
            number = len(self._sizes) + 1
            stamp = storage._ssdtrain_foresight = _Stamp(number, self._token)
            weakref.finalize(stamp, self._gone, number)
        number = int(stamp.number)
        # `fully_shard` frees and refills the storages of weights.
        self._sizes[number] = max(self._sizes.get(number, 0), storage.nbytes())
        return number

    @property
    def num_nodes(self) -> int:
        """Operators so far."""
        return len(self._nodes)

    @property
    def module(self) -> str:
        """Path of the module in whose forward the next operator runs."""
        return self._path[-1] if self._path else ""

    def rephase(self, nodes: Sequence[int], phase: StepPhase) -> None:
        """Put operators into another phase than they were taken to be of."""
        for index in nodes:
            self._nodes[index] = replace(self._nodes[index], phase=phase)

    def has_seen(self, tensor: Tensor) -> bool:
        """Whether an operator has read or written the tensor's storage."""
        return self.storage_of(tensor) in self._seen

    def maker_of(self, storage: int) -> int | None:
        """Index of the operator that made a storage; None: it was there before."""
        return self._born.get(storage)

    def read_by(self, node: int) -> tuple[int, ...]:
        """Storages that an operator read, parameters excluded."""
        read = {self._tensors[number].storage for number in self._nodes[node].inputs}
        return tuple(sorted(read - self._parameters))

    def name_of(self, node: int) -> str:
        """An operator's name, such as `aten::mm`."""
        return self._nodes[node].name

    def _gone(self, number: int) -> None:
        self._lives(number, 0)
        self._dies[number] = max(0, len(self._nodes) - 1)

    def _lives(self, storage: int, num_bytes: int) -> None:
        more = num_bytes - self._alive.get(storage, 0)
        self._alive[storage] = num_bytes
        self.alive_bytes += more
        self.other_bytes += 0 if storage in self._apart else more

    def count_apart(self, storage: int) -> None:
        """Take a storage out of `other_bytes`."""
        if storage not in self._apart:
            self.other_bytes -= self._alive.get(storage, 0)
            self._apart.add(storage)

    def _tensor(self, tensor: Tensor) -> int:
        if tensor.layout is not torch.strided:
            raise ConfigError(
                f"execution graphs expect strided tensors, got {tensor.layout}; dense "
                "ones for the prediction: nn.Embedding and nn.EmbeddingBag take "
                "sparse=False."
            )
        storage = self.storage_of(tensor)
        dtype = DTYPES.get(tensor.dtype)
        if dtype is None:
            raise ConfigError(
                f"execution graphs do not know {tensor.dtype} yet; they know "
                f"{', '.join(sorted(set(DTYPES.values())))}."
            )
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        key = (storage, tensor.storage_offset(), shape, stride, dtype)
        number = self._known.setdefault(key, len(self._known))
        info = TensorInfo(shape=shape, dtype=dtype, stride=stride, storage=storage)
        self._tensors.setdefault(number, info)
        return number

    def update(self, optimizer: str) -> None:
        """Add the fused update of every parameter that got a gradient."""
        by_dtype: dict[str, list[nn.Parameter]] = {}
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                by_dtype.setdefault(DTYPES[parameter.dtype], []).append(parameter)
        wrapped = WRAPPED_VIEWS[StepPhase.UPDATE]
        for group in by_dtype.values():
            views = UPDATE_VIEWS * len(group)
            inputs: list[int] = []
            outputs: list[int] = []
            for parameter in group:
                views += wrapped if local(parameter) is not parameter else 0.0
                own = self._tensor(local(parameter))
                grad = parameter.grad
                inputs += [own] if grad is None else [own, self._tensor(local(grad))]
                outputs.append(own)
                for _ in range(STATES[optimizer]):
                    state = torch.empty_like(local(parameter))
                    number = self._tensor(state)
                    self._states.append(state)
                    inputs.append(number)
                    outputs.append(number)
            attr = {"optimizer": optimizer, "tensors": len(group), "host_views": views}
            node = Node(
                name=f"aten::_fused_{optimizer.partition('_')[0]}_",
                phase=StepPhase.UPDATE,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                attr=attr,
            )
            self._nodes.append(node)

    def graph(self, notes: dict[str, str]) -> Graph:
        """What was noted."""
        if self.num_assumed:
            notes[ASSUMED] = str(self.num_assumed)
        gradients = {
            self.storage_of(local(parameter.grad))
            for parameter in self._model.parameters()
            if parameter.grad is not None
        }
        last = len(self._nodes) - 1
        storages = {
            number: Allocation(
                num_bytes=size,
                born=self._born.get(number, CALLER),
                dies=self._dies.get(number, last if number in gradients else CALLER),
                is_parameter=number in self._parameters,
            )
            for number, size in self._sizes.items()
        }
        return Graph(
            nodes=tuple(self._nodes),
            tensors=dict(self._tensors),
            storages=storages,
            notes=notes,
        )


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _given(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """(argument of the schema, what it is given)."""
    for at, argument in enumerate(func._schema.arguments):
        own = args[at] if at < len(args) else None
        yield argument, kwargs.get(argument.name, own)


def _roles(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors that an operator reads, and those that it writes into."""
    read: list[Tensor] = []
    written: list[Tensor] = []
    for argument, value in _given(func, args, kwargs):
        own = [x for x in tree_leaves(value) if isinstance(x, Tensor)]
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            written += own
        if not argument.is_out:
            read += own
    return read, written


def attributes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Arguments that are numbers, flags, names or short lists of integers."""
    found: dict[str, Any] = {}
    for argument, value in _given(func, args, kwargs):
        many = isinstance(value, list | tuple)
        if isinstance(value, float) and not math.isfinite(value):
            found[argument.name] = str(value)  # JSON has no such numbers
        elif isinstance(value, bool | int | float | str):
            found[argument.name] = value
        elif many and all(isinstance(x, bool | int) for x in value):
            found[argument.name] = list(value)
    return found
