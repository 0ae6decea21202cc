"""Runs compiled programs: plans bound to a graph, one autograd function a program.

[Note: hot path] A call looks up the executable of (graph, dtypes, needed gradients),
and then only allocates and launches: no host synchronisation, no shape that depends on
data, so a call can be captured in a CUDA graph.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import reduce
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hector.arrays import BoundedArrays, GraphArrays
from hector.cost import CostModel, DeviceModel
from hector.graph import HeteroGraph
from hector.ir.builder import Builder
from hector.ir.kernels import Plan, SegmentMapping
from hector.ir.node import BINARY, UNARY, Node, Op, Program, stored
from hector.ir.types import ROW_DOMAINS
from hector.memory import SLACK, StepMemory, available_bytes, step_memory
from hector.passes import finish
from hector.passes.pipeline import (
    ALL_SETTINGS,
    Gradients,
    Optimizations,
    TrainingPlan,
    backward_plan,
    gradients_of,
    inference_plan,
    optimize_program,
    training_plan,
)
from hector.passes.rewrite import rewrite
from hector.precision import computed
from hector.runtime.again import (
    alive,
    in_pytorch,
    in_transform,
    inputs_of,
    plain_apply,
)
from hector.runtime.ahead import arch, compiles
from hector.runtime.bound import Call
from hector.runtime.host import Host
from hector.runtime.reference import Reference


class Backend(Enum):
    """Who runs a plan."""

    AUTO = "auto"
    """Generated kernels where they exist for the device and dtype, else PyTorch."""
    TRITON = "triton"
    REFERENCE = "reference"


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a program is compiled."""

    optimizations: Optimizations | None = None
    """None: the cost model chooses for each graph and shape."""
    backend: Backend = Backend.AUTO
    tune: bool = False
    """Time candidate schedules on the first call and keep the best on disk."""
    mapping: SegmentMapping | None = None
    """Who walks the groups of a traversal; None: by their number and mean size."""
    device_model: DeviceModel = field(default_factory=DeviceModel)
    memory_limit_bytes: int | None = None
    """What a step may allocate next to its inputs; the choice of optimizations respects
    it. None: what the device has left when a program is compiled."""


@dataclass
class Report:
    """What one executable is: for users who ask, never in the hot path."""

    backend: Backend
    optimizations: Optimizations
    forward: Plan
    backward: Plan | None
    generated_lines: int
    fallbacks: int


def graph_arrays(graph: HeteroGraph, bounded: bool = False) -> GraphArrays:
    """The graph's index arrays, kept with the graph; see `BoundedArrays`."""
    kind = BoundedArrays if bounded else GraphArrays
    known = graph.state.arrays
    if kind not in known:
        known[kind] = kind(graph.bare())
    found: GraphArrays = known[kind]
    return found


def reference_of(arrays: GraphArrays, dtype: torch.dtype) -> Reference:
    """What runs programs in PyTorch's operators."""
    kind = Host if arrays.graph.device.type == "cpu" else Reference
    return kind(arrays, dtype)


def executables(graph: HeteroGraph) -> list["Executable"]:
    """What was compiled for a graph so far, oldest first."""
    return list(graph.state.executables.values())


@dataclass
class _Results:
    """How the caller wants stored values that a plan returns; the rest is the plan's
    choice. A view that nobody needs to take is host time saved."""

    dtypes: dict[Node, torch.dtype] = field(default_factory=dict)
    shapes: dict[Node, tuple[int, ...]] = field(default_factory=dict)

    def add(self, node: Node, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.dtypes[stored(node)] = dtype
        self.shapes[stored(node)] = shape


class _Runner:
    """A plan on one back end."""

    def __init__(
        self,
        plan: Plan,
        arrays: GraphArrays,
        feature: torch.dtype,
        results: "_Results",
        compiled: "Compiled",
        inputs: tuple[torch.dtype, ...],
        ends: "_Ends",
    ) -> None:
        self.plan, self.ends = plan, ends
        self._shapes = [(arrays.rows(n.domain), *n.shape) for n in ends.given]
        self._reference: Reference | None = None
        self._call: Call | None = None
        device = arrays.graph.device
        self._index = device.index if device.type == "cuda" else None
        self.source = ""
        if uses_triton(compiled.options.backend, arrays.graph, feature):
            from hector.runtime.device import DevicePlan

            types = (feature, results.dtypes, inputs)
            program = compiled.device_program(plan, arrays, *types)
            self._device = DevicePlan(program, arrays, results.shapes)
            self.source = program.source
        else:
            # Products of PyTorch want one dtype; see [Note: numbers of a layer].
            self._common = common = computed(
                reduce(torch.promote_types, inputs, feature)
            )
            self._reference = reference_of(arrays, common)
            self._asked = [results.dtypes.get(stored(n), common) for n in ends.wanted]
        self.on_device = self._reference is None
        self.views = not self.on_device
        """Whether values are read as rows of (heads, width): kernels see memory
        alone."""

    def type_of(self, node: Node) -> torch.dtype:
        """The dtype of a value that the plan stores."""
        found: torch.dtype = self._device.dtypes.of(stored(node))
        return found

    def to_compile(self, dtypes: Mapping[Node, torch.dtype]) -> list[Any]:
        """Launches whose kernels are to be compiled for inputs of these dtypes."""
        found: list[Any] = self._device.to_compile(dtypes)
        return found

    def taken(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Tensors as `run` reads them."""
        found = []
        for t, shape in zip(tensors, self._shapes, strict=True):
            t = t if t.is_contiguous() else t.contiguous()
            found.append(t.view(shape) if self.views and t.shape != shape else t)
        return found

    def run(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Values of what is wanted, memory in whatever shape and dtype it was asked
        for, and of what backward reads: a maximum that was rounded is no message's."""
        if self._reference is None:
            call = self._call
            if call is not None and (
                self._index is None or _current_device() == self._index
            ):
                found = call(*tensors)
                if found is not None:
                    return found
            return self._first(tensors)
        common, ends = self._common, self.ends
        given = dict(zip(ends.given, tensors, strict=True))
        for n, t in given.items():
            if t.dtype is not common:
                given[n] = t.to(common)
        kept = ends.kept
        values = self._reference.run((*ends.wanted, *kept), given)
        made = [values[n].to(d) for n, d in zip(ends.wanted, self._asked, strict=True)]
        return [*made, *map(values.__getitem__, kept)]

    def _first(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """What `run` returns, where no function for it is at hand."""
        given, wanted = self.ends.given, (*self.ends.wanted, *self.ends.kept)
        if self._call is None and self._device.bound is not None:
            self._call = self._device.bound.call(given, wanted)
            return self.run(tensors)
        values = self._device.run(dict(zip(given, tensors, strict=True)))
        found: Sequence[Tensor] = self._device.fetch(values, wanted)
        return found


class _Ends(NamedTuple):
    """What a plan is given and what is wanted of it, in their order."""

    given: tuple[Node, ...]
    wanted: tuple[Node, ...]
    kept: tuple[Node, ...] = ()
    """As they are computed."""


_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", int)
"""`torch.cuda.current_device` of a process that has a CUDA context."""


def uses_triton(backend: Backend, graph: HeteroGraph, dtype: torch.dtype) -> bool:
    """Whether generated kernels run; ValueError if they were asked for and cannot."""
    known = dtype in (torch.float32, torch.bfloat16, torch.float16)
    if backend is Backend.TRITON and not known:
        raise ValueError(
            f"expected float32, bfloat16 or float16 for backend triton, got {dtype}; "
            f"set backend to auto or reference"
        )
    if backend is Backend.AUTO:
        return known and compiles(graph.device)
    return backend is Backend.TRITON


class Executable:
    """A program bound to a graph, dtypes and a set of wanted gradients."""

    def __init__(
        self,
        compiled: "Compiled",
        key: "_Key",
        settings: Optimizations,
        arrays: GraphArrays,
        whole: GraphArrays,
    ) -> None:
        """`arrays`: those that kernels read, `whole`: those of exact sizes."""
        self._compiled, self._key, self._settings = compiled, key, settings
        self.inputs, self.known = compiled.inputs, compiled.known
        self.feature = feature = key.feature
        self.arrays, self._whole = arrays, whole
        self._check(key.shapes)
        self._dtypes, self._shapes = key.dtypes, key.shapes
        self._types = (*key.dtypes, *key.known)
        triton = uses_triton(compiled.options.backend, arrays.graph, feature)
        self._backend = Backend.TRITON if triton else Backend.REFERENCE
        backward: Plan | None = None
        self.saved: tuple[Node, ...] = ()
        self.read_again: tuple[int, ...] = ()
        """Inputs that gradients depend on; see [Note: gradients of gradients]."""
        if key.wanted:
            plans = compiled.training_plan(settings, key.wanted)
            forward, backward = plans.forward, plans.backward
            self.outputs = plans.outputs
            self.saved = tuple(n for n in plans.saved if n.op is not Op.GRAPH)
            if not triton:
                self.saved += plans.numbers
            self._backward = self._gradients(
                backward, self.saved, plans.output_grads, plans.gradients
            )
            self.read_again = compiled.read_again(plans)
        else:
            forward = compiled.inference_plan(settings)
            self.outputs = compiled.finished_outputs(settings)
        self.results = key.results or tuple(
            (feature, (arrays.rows(n.domain), *(n.shape if s is None else s)))
            for n, s in zip(self.outputs, compiled.row_shapes, strict=True)
        )
        """Dtype and shape of each output."""
        asked = _Results()
        for node, result in zip(self.outputs, self.results, strict=True):
            asked.add(node, *result)
        self._twice: list[int] = []
        """Outputs that are an input, another output, or what is kept with the graph, in
        memory of their own."""
        if not triton:
            bases = enumerate(map(stored, self.outputs))
            self._twice = [i for i, n in bases if n.op in (Op.GRAPH, Op.CONST)]
        else:
            seen = {*self.inputs, *self.known}
            for i, node in enumerate(map(stored, self.outputs)):
                if node in seen:
                    self._twice.append(i)
                seen.add(node)
        memory = [stored(n) for n in self.outputs]
        self._kind = arrays.graph.device.type
        self._fresh = len(set(memory)) == len(memory) and all(
            n.op in FRESH and n not in self.known for n in memory
        )
        """Whether outputs share no memory with anything on a CPU."""
        given = (*self.inputs, *self.known)
        made = tuple(n for n in self.saved if n not in given)
        self._forward = self._runner(forward, asked, _Ends(given, self.outputs, made))
        where = {n: i + len(self.outputs) for i, n in enumerate((*made, *given))}
        again = (len(where) + len(self.outputs) + i for i in self.read_again)
        self._saves = _picker((*(where[n] for n in self.saved), *again))
        """Of results, what is given and inputs as they came: what is saved."""
        if key.wanted and triton:
            self._compile()
        self._plans = (forward, backward)
        self.parts: dict[object, _Gradients] = {}
        """{(outputs that have a gradient, inputs that need one): their plan}."""
        self._again: dict[object, Executable] = {}

    def _runner(self, plan: Plan, asked: "_Results", ends: _Ends) -> _Runner:
        return _Runner(
            plan, self.arrays, self.feature, asked, self._compiled, self._types, ends
        )

    def _gradients(
        self,
        plan: Plan,
        given: tuple[Node, ...],
        heads: tuple[Node, ...],
        found: Mapping[Node, Node],
    ) -> "_Gradients":
        """`given`: next to the gradients `heads`."""
        gradients = [found.get(n) for n in self.inputs]
        asked = _Results()
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                asked.add(gradient, self._dtypes[i], self._shapes[i])
        there = tuple(g for g in gradients if g is not None)
        runner = self._runner(plan, asked, _Ends((*given, *heads), there))
        places = iter(range(len(there)))
        of = tuple((i, next(places)) for i, g in enumerate(gradients) if g is not None)
        return _Gradients(runner, heads, of)

    def _compile(self) -> None:
        """Compile both ways at once: on all cores, and before backward begins."""
        known = dict(zip((*self.inputs, *self.known), self._types, strict=True))
        kept = {n: known.get(n) or self._forward.type_of(n) for n in self.saved}
        grads = {
            n: dtype
            for n, (dtype, _) in zip(self._backward.heads, self.results, strict=True)
        }
        from hector.runtime.launch import compile_together

        forward = self._forward.to_compile(known)
        backward = self._backward.runner.to_compile({**grads, **kept})
        compile_together([*forward, *backward])

    @property
    def report(self) -> Report:
        """What runs: made when asked for."""
        forward, backward = self._plans
        lines = self._forward.source.count("\n")
        if backward is not None:
            lines += self._backward.runner.source.count("\n")
        plans = [p for p in (forward, backward) if p is not None]
        return Report(
            backend=self._backend,
            optimizations=self._settings,
            forward=forward,
            backward=backward,
            generated_lines=lines,
            fallbacks=sum(len(p.fallbacks()) for p in plans),
        )

    def _check(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """ValueError where a tensor has not one row for each node, edge or type:
        kernels would read beyond its memory."""
        for node, shape in zip(self.inputs, shapes, strict=True):
            rows = self.arrays.rows(node.domain)
            if prod(shape) != rows * node.type.width:
                raise ValueError(
                    f"expected {node.name} with {rows} rows of {list(node.shape)} for "
                    f"this graph ({node.domain.value}), got shape {list(shape)}"
                )

    def __call__(
        self, tensors: Sequence[Tensor], known: Sequence[Tensor] = ()
    ) -> tuple[Tensor, ...]:
        """Outputs in their rows' shapes, in the autograd graph if gradients are
        wanted."""
        kind = self._kind
        if torch.is_autocast_enabled(kind):
            # It would give PyTorch's part of a program other dtypes than the kernels'.
            with torch.autocast(kind, enabled=False):
                return self(tensors, known)
        for t, dtype in zip(tensors, self._dtypes, strict=True):
            if t.dtype is not dtype:
                both = zip(tensors, self._dtypes, strict=True)
                tensors = [t if t.dtype is d else t.to(d) for t, d in both]
                break
        if in_transform() is not None:
            common = computed(reduce(torch.promote_types, self._dtypes, self.feature))
            given = zip(self.inputs, tensors, strict=True)
            reference = Reference(self._whole, common)
            return tuple(in_pytorch(reference, self.outputs, given, self.results))
        if self._key.wanted:
            result: tuple[Tensor, ...] = _apply(self, known, *map(alive, tensors))
            return result
        return tuple(self.forward(tensors, known)[0])

    def forward(
        self, tensors: Sequence[Tensor], known: Sequence[Tensor]
    ) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Outputs, and what is saved for backward."""
        graph, runner = self.arrays.graph, self._forward
        graph.check_unchanged()
        watch = graph.state.watch
        if watch is not None and watch.is_late:
            watch.raise_if_known()
        given: Sequence[Tensor] = (*tensors, *known)
        if runner.views or not all(map(_is_contiguous, given)):
            given = runner.taken(given)
        found = runner.run(given)
        outputs = list(found[: len(self.results)])
        if not runner.on_device:
            if not self._fresh or not all(t.is_contiguous() for t in outputs):
                outputs = _own(outputs, given)
        for i in self._twice:
            outputs[i] = outputs[i].clone()
        if watch is not None:
            watch.check(outputs)
        for i, (dtype, shape) in enumerate(self.results):
            t = outputs[i]
            if t.dtype is not dtype or t.shape != shape:
                outputs[i] = t.to(dtype).view(shape)
        return outputs, self._saves((*found, *given, *tensors))

    def backward(
        self,
        grads: Sequence[Tensor | None],
        needed: Sequence[bool],
        kept: Sequence[Tensor],
    ) -> list[Tensor | None]:
        """Gradients of the inputs, None where none is wanted; `kept`: what `forward`
        saved."""
        watch = self.arrays.graph.state.watch
        if watch is not None and watch.is_late:
            watch.raise_if_known()
        there: Sequence[Tensor]
        for i in self._key.wanted:
            if not needed[i]:
                way = self._part(*self._asked(grads, needed))
                there = (*kept, *(g for g in grads if g is not None))
                break
        else:
            way, there = self._backward, kept[: len(self.saved)]
            for i, g in enumerate(grads):
                there = (*there, self._zeros(i) if g is None else g)
        runner = way.runner
        if runner.views or not all(map(_is_contiguous, there)):
            there = runner.taken(there)
        found = runner.run(there)
        made: list[Tensor | None] = [None] * len(self._dtypes)
        for i, place in way.of:
            t = found[place]
            if t.dtype is not self._dtypes[i] or t.shape != self._shapes[i]:
                t = t.to(self._dtypes[i]).view(self._shapes[i])
            made[i] = t
        return made

    def _zeros(self, i: int) -> Tensor:
        dtype, shape = self.results[i]
        return torch.zeros(shape, dtype=dtype, device=self.arrays.graph.device)

    def _asked(
        self, grads: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Outputs that have a gradient, and inputs that need one."""
        present = tuple(i for i, g in enumerate(grads) if g is not None)
        return present, tuple(i for i in self._key.wanted if needed[i])

    def _part(self, present: tuple[int, ...], wanted: tuple[int, ...]) -> "_Gradients":
        key = (present, wanted)
        if key not in self.parts:
            gradients = self._compiled.gradients(self._settings, wanted, present)
            known = tuple(n for n in self.saved if n.op is not Op.INPUT)
            plan, found = self._compiled.backward_plan(gradients, known)
            given = (*self.saved, *(self.inputs[i] for i in self.read_again))
            self.parts[key] = self._gradients(plan, given, gradients.heads, found)
        return self.parts[key]

    def backward_again(
        self,
        grads: Sequence[Tensor | None],
        needed: Sequence[bool],
        kept: Sequence[Tensor],
    ) -> list[Tensor | None]:
        """`backward`, as functions that have gradients; see [Note: gradients of
        gradients]."""
        saved, again = kept[: len(self.saved)], kept[len(self.saved) :]
        present, wanted = self._asked(grads, needed)
        gradients = self._compiled.gradients(self._settings, wanted, present)
        known = tuple(n for n in self.saved if n.op is not Op.INPUT)
        compiled = self._compiled.again(gradients, known)
        given = dict(zip((self.inputs[i] for i in self.read_again), again, strict=True))
        there = (g for g in grads if g is not None)
        given.update(zip(gradients.heads, there, strict=True))
        values = dict(zip(self.saved, saved, strict=True))
        place = {n: i for i, n in enumerate(self.inputs)}
        results = tuple(
            (self._dtypes[place[n]], self._shapes[place[n]]) for n in gradients.of
        )
        tensors = [given[n] for n in compiled.inputs]
        key = compiled.key(tensors, [values[n] for n in known], results)
        whole = (compiled, key)
        if whole not in self._again:
            args = (compiled, key, self._settings, self.arrays, self._whole)
            self._again[whole] = Executable(*args)
        made = self._again[whole](tensors, [values[n] for n in known])
        found = dict(zip(gradients.of, made, strict=True))
        return [found.get(n) for n in self.inputs]


def _picker(places: tuple[int, ...]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What picks the values at these places."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple([values[i] for i in places])


@dataclass(frozen=True)
class _Gradients:
    """A plan of gradients of some inputs, from those of some outputs."""

    runner: _Runner
    heads: tuple[Node, ...]
    of: tuple[tuple[int, int], ...]
    """(input, place among what the plan returns) of each gradient."""


FRESH = frozenset((Op.AGG, Op.LINEAR, Op.OUTER, Op.SUM_WIDTH, Op.SUM_HEADS, Op.CONCAT))
FRESH |= (BINARY | UNARY) - {Op.DETACH}
"""What PyTorch computes into memory of its own."""


def _own(outputs: Sequence[Tensor], others: Iterable[Tensor]) -> list[Tensor]:
    """Outputs that share no memory with an input or with one another: the caller may
    write to each."""
    taken = {t.untyped_storage().data_ptr() for t in others}
    found = []
    for t in outputs:
        place = t.untyped_storage().data_ptr()
        if place in taken or not t.is_contiguous():
            t = t.clone(memory_format=torch.contiguous_format)
        taken.add(place)
        found.append(t)
    return found


@dataclass(frozen=True)
class _Key:
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    wanted: tuple[int, ...]
    feature: torch.dtype
    """Of results: what node and edge rows are together, whatever weights are."""
    arch: int | None
    """Of `hector.runtime.ahead`."""
    known: tuple[torch.dtype, ...] = ()
    results: tuple[tuple[torch.dtype, tuple[int, ...]], ...] = ()
    """Dtypes and shapes of outputs, where the program does not say."""


def _numbers(
    inputs: Sequence[Node], tensors: Sequence[Tensor]
) -> tuple[torch.dtype, ...]:
    """The dtype that each input is taken in; see [Note: numbers of a layer]."""
    dtypes = [t.dtype for t in tensors]
    if all(d.is_floating_point for d in dtypes):
        return tuple(dtypes)
    for node, d in zip(inputs, dtypes, strict=True):
        if d.is_complex:
            raise ValueError(f"expected real numbers for {node.name}, got {d}")
    real = [d for d in dtypes if d.is_floating_point]
    other = reduce(torch.promote_types, real or (torch.get_default_dtype(),))
    return tuple(d if d.is_floating_point else other for d in dtypes)


class _Run(torch.autograd.Function):
    """One compiled program as one node of the autograd graph."""

    @staticmethod
    def forward(
        ctx: Any, exe: Executable, known: Sequence[Tensor], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        outputs, saved = exe.forward(tensors, known)
        ctx.exe = exe
        # What the methods of these names do.
        ctx.materialize_grads, ctx.to_save = False, saved
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        exe = ctx.exe
        run = exe.backward_again if torch.is_grad_enabled() else exe.backward
        return (None, None, *run(grads, _needed(ctx), ctx.saved_tensors))


def _needed(node: Any) -> list[bool]:
    """Which inputs need their gradient in the backward that runs:
    `torch.autograd.grad` of a few tensors leaves the others out."""
    found = []
    for function, _ in node.next_functions:
        try:
            wanted = function is not None and _executes(function)
        except RuntimeError:
            # A leaf whose gradient `torch.autograd.grad` returns.
            wanted = True
        found.append(wanted)
    return found


_executes = torch._C._will_engine_execute_node
_is_contiguous: Callable[[Tensor], bool] = Tensor.is_contiguous
_apply = plain_apply(_Run)


class Compiled:
    """A program and its executables."""

    def __init__(
        self,
        builder: Builder,
        program: Program,
        options: Options,
        row_shapes: Sequence[tuple[int, ...] | None] | None = None,
        known: Iterable[Node] = (),
    ) -> None:
        self.builder, self.program, self.options = builder, program, options
        self.row_shapes = row_shapes or (None,) * len(program.outputs)
        """Of each output, the shape of a row that the caller wants; None: (heads,
        width)."""
        self.known = tuple(known)
        """Values inside the program that the caller has."""
        self.inputs = tuple(sorted(program.inputs(), key=lambda n: n.serial))
        self._optimized: dict[Optimizations, Program] = {}
        self._training: dict[object, TrainingPlan] = {}
        self._read_again: dict[int, tuple[int, ...]] = {}
        self._inference: dict[Optimizations, Plan] = {}
        self._features: dict[object, torch.dtype] = {}
        self._gradients: dict[object, Gradients] = {}
        """These live as long as this object."""
        self._parts: dict[object, tuple[Plan, dict[Node, Node]]] = {}
        self._again: dict[object, Compiled] = {}
        self._chosen: dict[object, Optimizations] = {}
        """What the first of the sampled graphs was given, and all others are."""
        self._device: dict[object, Any] = {}
        """{(plan, dtypes, schedules): `hector.runtime.device.DeviceProgram`}."""
        self._sampled: dict[object, Any] = {}
        """{(plan, dtypes): that of all sampled graphs}."""

    def __call__(
        self, graph: HeteroGraph, tensors: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Outputs [rows, ...] for inputs in the order of `self.inputs`."""
        return self.executable(graph, tensors)(tensors)

    def executable(self, graph: HeteroGraph, tensors: Sequence[Tensor]) -> Executable:
        """The executable for these tensors, made on first use; see
        [Note: hot path]."""
        facts = tuple([(t.dtype, t.shape, t.requires_grad) for t in tensors])
        place = (self, torch.is_grad_enabled(), arch(), facts)
        found: Executable | None = graph.state.found.get(place)
        if found is None:
            found = graph.state.found[place] = self._found(graph, self.key(tensors))
        return found

    def _found(self, graph: HeteroGraph, key: _Key) -> Executable:
        place, cache = (self, key), graph.state.executables
        if place not in cache:
            triton = uses_triton(self.options.backend, graph, key.feature)
            arrays = graph_arrays(graph, bounded=graph.sampled and triton)
            settings = self.settings_for(graph, bool(key.wanted), key.feature)
            args = (self, key, settings, arrays, graph_arrays(graph))
            cache[place] = Executable(*args)
        found: Executable = cache[place]
        return found

    def key(
        self,
        tensors: Sequence[Tensor],
        known: Sequence[Tensor] = (),
        results: tuple[tuple[torch.dtype, tuple[int, ...]], ...] = (),
    ) -> _Key:
        """What an executable is for."""
        wanted: tuple[int, ...] = ()
        if torch.is_grad_enabled():
            wanted = tuple(i for i, t in enumerate(tensors) if t.requires_grad)
        dtypes = _numbers(self.inputs, tensors)
        shapes = tuple(tuple(t.shape) for t in tensors)
        kinds = tuple(t.dtype for t in known)
        feature = self._feature(dtypes)
        return _Key(dtypes, shapes, wanted, feature, arch(), kinds, results)

    def _feature(self, dtypes: tuple[torch.dtype, ...]) -> torch.dtype:
        if dtypes not in self._features:
            pairs = zip(self.inputs, dtypes, strict=True)
            rows = [d for n, d in pairs if n.domain in ROW_DOMAINS]
            kinds = rows or dtypes or (torch.get_default_dtype(),)
            self._features[dtypes] = reduce(torch.promote_types, kinds)
        return self._features[dtypes]

    def gradients(
        self,
        settings: Optimizations,
        wanted: tuple[int, ...],
        given: tuple[int, ...],
    ) -> Gradients:
        """Of the inputs `wanted`, from those of the outputs `given`."""
        key = (settings, wanted, given)
        if key not in self._gradients:
            inputs = [self.inputs[i] for i in wanted]
            program = self.optimized(settings)
            made = gradients_of(self.builder, program, inputs, given)
            self._gradients[key] = made
        return self._gradients[key]

    def backward_plan(
        self, gradients: Gradients, known: tuple[Node, ...]
    ) -> tuple[Plan, dict[Node, Node]]:
        """Their plan where forward kept the values `known`."""
        key = (id(gradients), *known)
        if key not in self._parts:
            self._parts[key] = backward_plan(self.builder, gradients, known)
        return self._parts[key]

    def again(self, gradients: Gradients, known: tuple[Node, ...]) -> "Compiled":
        """Gradients as a program; see [Note: gradients of gradients]."""
        key = (id(gradients), *known)
        if key not in self._again:
            options = replace(self.options, optimizations=Optimizations())
            self._again[key] = Compiled(
                self.builder, gradients.program, options, known=known
            )
        return self._again[key]

    def optimized(self, settings: Optimizations) -> Program:
        if settings not in self._optimized:
            self._optimized[settings] = optimize_program(
                self.builder, self.program, settings
            )
        return self._optimized[settings]

    def finished_outputs(self, settings: Optimizations) -> tuple[Node, ...]:
        """The outputs after the last rewrites."""
        program = self.optimized(settings)
        return rewrite(self.builder, program, finish.RULES).nodes

    def training_plan(
        self, settings: Optimizations, wanted: tuple[int, ...]
    ) -> TrainingPlan:
        """The plans of a setting, with the gradients of the inputs `wanted`."""
        key = (settings, wanted)
        if key not in self._training:
            program = self.optimized(settings)
            inputs = tuple(self.inputs[i] for i in wanted)
            self._training[key] = training_plan(
                self.builder, program, inputs, frozenset(self.known)
            )
        return self._training[key]

    def read_again(self, plans: TrainingPlan) -> tuple[int, ...]:
        """Inputs that gradients depend on; see [Note: gradients of gradients]."""
        key = id(plans)  # they live as long as this object
        if key not in self._read_again:
            found = inputs_of(plans.gradients.values(), self.inputs)
            self._read_again[key] = found
        return self._read_again[key]

    def inference_plan(self, settings: Optimizations) -> Plan:
        if settings not in self._inference:
            made = inference_plan(self.builder, self.optimized(settings), self.known)
            self._inference[settings] = made
        return self._inference[settings]

    def device_program(
        self,
        plan: Plan,
        arrays: GraphArrays,
        feature: torch.dtype,
        dtypes: Mapping[Node, torch.dtype],
        inputs: tuple[torch.dtype, ...],
    ) -> Any:
        """The generated kernels of a plan: made once for all graphs that want the same
        schedules, and sampled graphs take those of the first.

        Triton's kernels belong to one device and to the dtypes of all that they read,
        so these are part of what a program is found by.
        """
        from hector.runtime.device import DeviceProgram, ValueTypes, dot_precision
        from hector.runtime.tune import schedules_for

        types = ValueTypes(feature, dtypes)
        # Plans live as long as this object.
        key = (
            id(plan),
            feature,
            tuple(dtypes.items()),
            inputs,
            arrays.dtype,
            arrays.graph.device,
            arch(),
            dot_precision(feature),
            # Edges of one relation lie in the order of their destinations.
            arrays.graph.num_edge_types == 1,
        )
        sampled = arrays.graph.sampled
        if sampled and key in self._sampled:
            return self._sampled[key]
        mapping = self.options.mapping
        if sampled and mapping is None:
            # Others count the heavy groups of each graph.
            mapping = SegmentMapping.PROGRAM
        chosen = schedules_for(plan, arrays, types, self.options.tune, mapping)
        whole = (*key, tuple(chosen))
        if whole not in self._device:
            self._device[whole] = DeviceProgram(plan, types, chosen)
        if sampled:
            self._sampled[key] = self._device[whole]
        return self._device[whole]

    def settings_for(
        self, graph: HeteroGraph, training: bool, feature: torch.dtype
    ) -> Optimizations:
        """The chosen optimizations, or the fastest ones that fit into memory by the
        cost model; if none fits, the ones that need least. Sampled graphs get what the
        first of them got."""
        if self.options.optimizations is not None:
            return self.options.optimizations
        if not graph.sampled:
            return self._choose(graph, training, feature)
        key = (training, feature, graph.device)
        if key not in self._chosen:
            self._chosen[key] = self._choose(graph, training, feature)
        return self._chosen[key]

    def _choose(
        self, graph: HeteroGraph, training: bool, feature: torch.dtype
    ) -> Optimizations:
        arrays = graph_arrays(graph)
        costs = self.predicted_seconds(arrays, training, feature)
        limit = self.options.memory_limit_bytes
        if limit is None:
            limit = available_bytes(graph.device)
        if limit is None:
            return min(costs, key=lambda s: costs[s])
        needed = self.predicted_bytes(arrays, training, feature)
        fitting = [s for s in costs if SLACK * needed[s].peak_bytes <= limit]
        if not fitting:
            return min(costs, key=lambda s: needed[s].peak_bytes)
        return min(fitting, key=lambda s: costs[s])

    def predicted_seconds(
        self, arrays: GraphArrays, training: bool, feature: torch.dtype = torch.float32
    ) -> dict[Optimizations, float]:
        """The cost model's view of every setting."""
        o = self.options
        model = CostModel(arrays, o.device_model, feature.itemsize, o.mapping)
        costs = {}
        for settings in ALL_SETTINGS:
            plans = self._plans(settings, training)
            parts = (
                (plans,) if isinstance(plans, Plan) else (plans.forward, plans.backward)
            )
            costs[settings] = model.step_seconds(parts)
        return costs

    def predicted_bytes(
        self, arrays: GraphArrays, training: bool, feature: torch.dtype = torch.float32
    ) -> dict[Optimizations, StepMemory]:
        """The memory of a step under every setting."""
        return {
            s: step_memory(self._plans(s, training), arrays, feature.itemsize)
            for s in ALL_SETTINGS
        }

    def _plans(self, settings: Optimizations, training: bool) -> Plan | TrainingPlan:
        """The plans of a setting, with the gradients of all inputs."""
        if training:
            return self.training_plan(settings, tuple(range(len(self.inputs))))
        return self.inference_plan(settings)
