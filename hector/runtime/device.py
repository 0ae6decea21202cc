"""The Triton back end: generated modules, launches, memory of intermediate values."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hector.arrays import GraphArrays
from hector.emit.gemm import DotPrecision, Emitted
from hector.emit.module import Generated, generate_module, generate_sums, sums_of
from hector.emit.parameters import Share
from hector.emit.source import FUSED, ArgKind
from hector.emit.sums import Sum
from hector.ir.kernels import (
    Fallback,
    ParameterOp,
    Plan,
    Schedule,
)
from hector.ir.node import Node, Op
from hector.ir.types import NARROW, ROW_DOMAINS, Domain
from hector.kept import apart
from hector.passes.lifetimes import constants, late_sums, lifetimes
from hector.runtime.ahead import compiles
from hector.runtime.bound import BoundPlan, TableLayout, Viewed
from hector.runtime.contract import Contraction
from hector.runtime.launch import (
    ALIGNMENT_BYTES,
    Key,
    Launch,
    Partial,
    Step,
    TorchOp,
    compile_together,
)
from hector.runtime.reference import Reference

_TRITON_DTYPE = {
    torch.float32: "tl.float32",
    torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16",
}


def supported(dtype: torch.dtype) -> bool:
    """Whether the generated kernels exist for a feature dtype."""
    return dtype in _TRITON_DTYPE


def dot_precision(dtype: torch.dtype) -> DotPrecision:
    """fp32 products stay fp32-accurate unless PyTorch is told that TF32 will do."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    return DotPrecision(
        dtype=_TRITON_DTYPE[dtype], input_precision="tf32" if allowed else "tf32x3"
    )


class _Template(NamedTuple):
    """A launch without a graph."""

    function: Any
    grid: tuple[int, ...]
    """Places among the program's `extents`."""
    fixed: tuple[int | None, ...]
    """Places among the program's `args`; None: filled in at each call."""
    slots: tuple[tuple[int, Node], ...]
    partials: tuple[tuple[int, Node], ...]
    options: dict[str, int]


_TILES = {
    ArgKind.TILE_TYPE: "segment",
    ArgKind.TILE_START: "start",
    ArgKind.TILE_END: "end",
    ArgKind.TILE_PTR: "segment_ptr",
}
"""Which of a typed product's `Tiles` an argument is."""


@dataclass(frozen=True)
class _Part:
    """One kernel of a program: what is launched, or what PyTorch runs."""

    launches: tuple[_Template, ...]
    makes: tuple[Node, ...]
    sums: tuple[Sum, ...]
    operation: TorchOp | None
    dead: tuple[Key, ...]


class DeviceProgram:
    """A plan's generated kernels, without a graph: `DevicePlan` has the sizes."""

    def __init__(
        self, plan: Plan, dtypes: "ValueTypes", schedules: Sequence[Schedule | None]
    ) -> None:
        self.plan, self.dtypes, self.schedules = plan, dtypes, tuple(schedules)
        self.views = _views(plan)
        self.constants = constants(plan)
        self.compiled: dict[int, Any] = {}
        """{id of a generated function: the kernel that Triton made for aligned
        values}."""
        self.layout = TableLayout()
        self.args: dict[tuple[ArgKind, object], int] = {}
        self.extents: dict[object, int] = {}
        """What launches ask of a graph, each once, with its place."""
        self._texts: list[str] = []
        precision = dot_precision(dtypes.feature)
        lives, late = lifetimes(plan), late_sums(plan)
        parts: list[_Part] = []
        left: list[Sum] = []
        for position, kernel in enumerate(plan.kernels):
            ended = (n for n, (_, last) in lives.items() if last == position)
            dead: tuple[Key, ...] = tuple(n for n in ended if n not in self.views)
            if isinstance(kernel, ParameterOp | Fallback):
                parts += self._operation(kernel.out, dead)
                continue
            schedule = self.schedules[position]
            made = generate_module(kernel, schedule, precision, late)
            sums = sums_of(kernel, schedule)
            dead += tuple(Partial(s.out) for s in sums if s.out not in late)
            parts.append(self._kernel(made, kernel.outputs, sums, dead))
            left += made.sums
        if left:
            last = tuple(Partial(s.out) for s in left)
            parts.append(self._kernel(generate_sums(left), (), (), last))
        self.parts = tuple(parts)
        self.source = "\n\n".join(self._texts)

    def _operation(self, out: Node, dead: tuple[Key, ...]) -> Iterator[_Part]:
        if out not in self.views:
            reads = tuple(self.memory(i) for i in out.inputs)
            yield _Part((), (), (), TorchOp(out, reads), dead)
        elif dead:
            yield _Part((), (), (), None, dead)

    def _kernel(
        self,
        made: Generated,
        makes: Sequence[Node],
        sums: Sequence[Sum],
        dead: tuple[Key, ...],
    ) -> _Part:
        self._texts.append(made.text)
        launches = tuple(self._template(e, f) for e, f in made.functions())
        return _Part(launches, tuple(makes), tuple(sums), None, dead)

    def _template(self, e: Emitted, function: Any) -> _Template:
        fixed: list[int | None] = []
        slots: list[tuple[int, Node]] = []
        partials: list[tuple[int, Node]] = []
        for position, arg in enumerate(e.source.args.values()):
            place = None
            node = arg.what if isinstance(arg.what, Node) else None
            if arg.kind is ArgKind.VALUE and node and node.op is not Op.GRAPH:
                slots.append((position, self.memory(node)))
            elif arg.kind is ArgKind.PARTIAL and node:
                partials.append((position, node))
            else:
                place = self.args.setdefault((arg.kind, arg.what), len(self.args))
            fixed.append(place)
        grid = (self.extents.setdefault(g, len(self.extents)) for g in e.grid)
        options = {"num_warps": e.num_warps, "num_stages": e.num_stages, **FUSED}
        return _Template(
            function, tuple(grid), tuple(fixed), tuple(slots), tuple(partials), options
        )

    def memory(self, node: Node) -> Node:
        """The value whose memory `node` is."""
        while node in self.views:
            node = node.inputs[0]
        return node


class DevicePlan:
    """A program with a graph's sizes and arrays, ready to launch."""

    def __init__(
        self,
        program: DeviceProgram,
        arrays: GraphArrays,
        shapes: Mapping[Node, tuple[int, ...]] | None = None,
    ) -> None:
        self.program, self.arrays, self.dtypes = program, arrays, program.dtypes
        self.plan = program.plan
        self.shapes = dict(shapes or {})
        """Those that differ from rows of (heads, width): kernels see memory alone."""
        self.reference = Reference(arrays, torch.float32)
        with apart():
            self._args = [self._static(*asked) for asked in program.args]
            self._extents = [self._extent(g) for g in program.extents]
        self.steps = tuple(map(self._step, program.parts))
        self.compiled = False
        self.bound: BoundPlan | None = None
        self._kept: dict[Node, Tensor] = {}
        self._contractions = {
            k.out: Contraction(k.out, arrays.rows)
            for k in self.plan.kernels
            if k.outputs[0].op is Op.EINSUM and isinstance(k, ParameterOp)
        }
        launches = [w for s in self.steps for w in s.work if isinstance(w, Launch)]
        known = program.compiled
        if known and all(id(w.function) in known for w in launches):
            # Another graph compiled them all.
            for launch in launches:
                launch.compiled = known[id(launch.function)]
            self.compiled = True
            if arrays.graph.sampled:
                # Others run once as they are, to keep what the graph alone decides.
                self._bind(arrays.graph.device)

    def _step(self, part: _Part) -> Step:
        makes = [
            (n, self.shapes.get(n) or self._shape(n), self.dtypes.of(n))
            for n in part.makes
        ]
        partials = [self._partial(s) for s in part.sums]
        work: tuple[Launch | TorchOp, ...]
        if part.operation is not None:
            work = (part.operation,)
        else:
            found = map(self._launch, part.launches)
            work = tuple(launch for launch in found if launch is not None)
        return Step((*makes, *partials), work, part.dead)

    def _shape(self, node: Node) -> tuple[int, ...]:
        return (self.arrays.rows(node.domain), *node.shape)

    def _partial(self, s: Sum) -> tuple[Partial, tuple[int, ...], torch.dtype]:
        rows = self.arrays.tiles(*s.tiles).num_tiles
        return Partial(s.out), (rows, s.out.type.width), torch.float32

    def _launch(self, t: _Template) -> Launch | None:
        grid = tuple([self._extents[i] for i in t.grid])
        if 0 in grid:
            return None
        fixed = [None if i is None else self._args[i] for i in t.fixed]
        return Launch(t.function, grid, fixed, t.slots, t.partials, t.options, t)

    def _extent(self, g: Any) -> int:
        if isinstance(g, int):
            return g
        kind, *rest = g
        if kind == "times":
            return int(rest[0]) * self._extent(rest[1])
        if kind == "tiles":
            return self.arrays.tiles(*rest).num_tiles
        if kind == "sums":
            return self._programs(*rest)
        if kind == "shares":
            return self._shares(*rest)
        if kind == "heavy":
            return self.arrays.num_heavy(*rest)
        if kind == "light":
            domain, block, *heavy = rest
            light = self.arrays.rows(domain) - self.arrays.num_heavy(*heavy)
            return -(-light // int(block))
        domain, block = rest
        return -(-self.arrays.rows(domain) // int(block))

    def _programs(self, sums: tuple[Sum, ...]) -> int:
        return sum(s.programs * self.arrays.num_types(*s.tiles[:2]) for s in sums)

    def _shares(self, shares: tuple[Share, ...]) -> int:
        return sum(s.programs(self.arrays.rows(s.domain)) for s in shares)

    def _static(self, kind: ArgKind, what: Any) -> Any:
        a = self.arrays
        match kind:
            case ArgKind.VALUE:
                return a.number(what.name, torch.float32)
            case ArgKind.COUNT:
                return self._counted(what)
            case ArgKind.INDEX:
                return a.index(*what)
            case ArgKind.SEGMENT_PTR:
                return a.segments(*what).ptr
            case ArgKind.SEGMENT_ITEMS:
                return a.segments(*what).items
            case ArgKind.SEGMENT_INDEX:
                return a.segment_index(*what)
            case ArgKind.REMAP:
                return a.heavy_first(*what)
        tiles = a.tiles(*what)
        return getattr(tiles, _TILES[kind])

    def _counted(self, what: Any) -> int:
        if isinstance(what, Domain):
            return self.arrays.rows(what)
        if isinstance(what[0], Sum):
            return self._programs(what)
        if isinstance(what[0], Share):
            return self._shares(what)
        return self.arrays.num_heavy(*what)

    def run(self, bindings: Mapping[Node, Tensor]) -> dict[Node, Tensor]:
        """Values by node: everything bound, and the plan's results."""
        device = self.arrays.graph.device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            # Triton launches on the current device, wherever the tensors are.
            with torch.cuda.device(device):
                return self._run_bound(bindings) or self._run(bindings, device)
        return self._run_bound(bindings) or self._run(bindings, device)

    def _run_bound(self, bindings: Mapping[Node, Tensor]) -> dict[Node, Tensor] | None:
        return None if self.bound is None else self.bound.run(bindings)

    def _run(
        self, bindings: Mapping[Node, Tensor], device: torch.device
    ) -> dict[Node, Tensor]:
        values: dict[Any, Tensor] = dict(bindings)
        aligned = not any(
            t.data_ptr() % ALIGNMENT_BYTES for t in bindings.values() if t.is_cuda
        )
        if not self.compiled:
            compile_together(self.to_compile({n: t.dtype for n, t in values.items()}))
        for step in self.steps:
            for node, shape, dtype in step.makes:
                values[node] = torch.empty(shape, dtype=dtype, device=device)
            for work in step.work:
                if isinstance(work, TorchOp):
                    values[work.node] = self._torch(work.node, values)
                    continue
                args = work.args
                for position, node in work.slots:
                    args[position] = values[node]
                for position, node in work.partials:
                    args[position] = values[Partial(node)]
                work(aligned)
                # The stream orders this memory's next use after the kernel.
                work.release()
            made = (n for n, _, _ in step.makes if n in self.program.constants)
            self._kept.update((n, values[n]) for n in made)
            for node in step.dead:
                del values[node]
        if aligned:
            self._bind(device)
        return values

    def _bind(self, device: torch.device) -> None:
        """For the next calls, once every kernel is compiled; the interpreter compiles
        none."""
        launches = [w for s in self.steps for w in s.work if isinstance(w, Launch)]
        if self.bound is None and all(w.compiled is not None for w in launches):
            known = self.program.compiled
            known.update((id(w.function), w.compiled) for w in launches)
            args = (self.steps, device, self._torch, self._kept)
            self.bound = BoundPlan(*args, self.program.layout, self._view_of)

    def to_compile(
        self, dtypes: Mapping[Node, torch.dtype]
    ) -> list[tuple[Launch, Mapping[Node, torch.dtype]]]:
        """Its launches, each with the dtypes of all values, for inputs of `dtypes`.

        None where nothing is compiled or all is; they count as compiled from then on.
        """
        if self.compiled or not compiles(self.arrays.graph.device):
            return []
        self.compiled = True
        known = dict(dtypes)
        launches: list[Launch] = []
        for step in self.steps:
            known.update((n, d) for n, _, d in step.makes if isinstance(n, Node))
            for work in step.work:
                if isinstance(work, TorchOp):
                    like = work.node.inputs[0] if _is_view(work.node) else work.node
                    known[work.node] = known.get(like, self.dtypes.of(work.node))
                else:
                    launches.append(work)
        return [(launch, known) for launch in launches]

    def fetch(
        self, values: Mapping[Node, Tensor], wanted: Sequence[Node]
    ) -> list[Tensor]:
        """The memory of wanted values; joining or splitting heads changes none."""
        found = []
        for node in wanted:
            while node not in values and node.op is Op.RESHAPE:
                node = node.inputs[0]
            found.append(values[node])
        return found

    def _view_of(self, node: Node) -> Viewed | None:
        if not _is_view(node):
            return None
        of = self.program.memory(node.inputs[0])
        # Kernels widen what they load: no copy unless the caller wants a dtype.
        return Viewed(of, self._shape(node), self.dtypes.fixed.get(node))

    def _torch(self, node: Node, values: Mapping[Any, Tensor]) -> Tensor:
        view = self._view_of(node)
        if view is not None and view.of in values:
            value = values[view.of].view(view.shape)
            return value if view.dtype is None else value.to(view.dtype)
        args = [
            self.reference.evaluate(i, [])
            if i.op in (Op.CONST, Op.GRAPH)
            else _rows(values[self.program.memory(i)], i.shape)
            for i in node.inputs
        ]
        contraction = self._contractions.get(node)
        if contraction is not None:
            made = contraction(*args)
        else:
            made = self.reference.evaluate(node, args)
        dtype = self.dtypes.of(node)
        made = made if made.dtype is dtype else made.to(dtype)
        return made if made.is_contiguous() else made.contiguous()


def _views(plan: Plan) -> frozenset[Node]:
    """What kernels alone read as its operand's memory in another shape: that needs no
    operation."""
    found = (k.out for k in plan.kernels if isinstance(k, ParameterOp))
    return frozenset(n for n in found if _is_view(n) and n not in plan.outputs)


def _is_view(node: Node) -> bool:
    return node.op is Op.RESHAPE


def _rows(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """[rows, *shape] in fp32; each call that changes nothing costs host time."""
    if value.shape[1:] != shape:
        value = value.view(-1, *shape)
    return value if value.dtype is torch.float32 else value.float()


class ValueTypes:
    """Which dtype each stored value has."""

    def __init__(
        self,
        feature: torch.dtype,
        fixed: Mapping[Node, torch.dtype] | None = None,
    ) -> None:
        self.feature, self.fixed = feature, dict(fixed or {})

    def of(self, node: Node) -> torch.dtype:
        if node in self.fixed:
            return self.fixed[node]
        if node.domain in ROW_DOMAINS and node.type.width > NARROW:
            return self.feature
        return torch.float32
