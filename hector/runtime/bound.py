"""Plans whose kernels are compiled: a call is allocations and launches, nothing else.

[Note: bound plans] On small graphs the host bounds a step, and most of a launch's host
time goes into questions that have the same answer in every call: which binary, where
a tensor's memory is, whether the device can reach it, which stream. So after the first
call a plan is a Python function that was written for it: it asks its arguments for
their addresses, allocates, and calls each compiled kernel; addresses as integers are
passed on as they are. (Hooks that were set on Triton's launches do not see these.) What
is the same in every call, counts and the addresses of the graph's arrays, stands in the
function's closure, so graphs of one program share its text. Values that nobody outside
the plan reads share one allocation if they are small; the stream orders its next use
after the plan's kernels. Larger ones keep their own memory, so that it ends with its
last reader: see [Note: lifetimes].
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hector.ir.node import Node, Op
from hector.runtime.launch import ALIGNMENT_BYTES, Key, Launch, Partial, Step, TorchOp

SHARED_BYTES = 1 << 25
"""Most bytes of one plan's values that share an allocation for all of its run."""
PLACE_BYTES = 256
"""A shared value starts at a multiple of this."""

RunTorch = Callable[[Node, Mapping[Any, Tensor]], Tensor]
"""The value of a parameter operation from those of its operands."""
Call = Callable[..., tuple[Tensor, ...] | None]
"""The wanted values of a plan for tensors; None, and nothing was launched, if an
address is not what the kernels were made for."""


def current_stream_of(device: torch.device) -> Callable[[int], int]:
    """What gives the current stream for a device's index, as Triton's own launches ask
    for it."""
    if device.type != "cuda":
        return lambda _: 0
    ask: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
    return ask


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-prod(shape) * dtype.itemsize // PLACE_BYTES) * PLACE_BYTES


class Viewed(NamedTuple):
    """A value that is another one's memory in another shape."""

    of: Node
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None: the other one's."""


class TableLayout:
    """What the functions of one program's plans have in common, on whatever graph."""

    def __init__(self) -> None:
        self._numbers: dict[Key, int] = {}
        self.written: dict[object, _Written] = {}

    def number(self, key: Key) -> int:
        """The number of a value, in its names."""
        return self._numbers.setdefault(key, len(self._numbers))


Read = Callable[["BoundPlan"], tuple[Any, ...]]
"""What is the same in every call of a plan."""


class _Written(NamedTuple):
    """A function without a graph."""

    make: Callable[..., Call]
    """The function for what `reads` give of a plan."""
    reads: tuple[Read, ...]


class _Writer:
    """Writes a function, and notes what is the same in every call of it."""

    def __init__(self, layout: TableLayout) -> None:
        self.lines: list[str] = []
        self._number = layout.number
        self._unpacked: list[str] = []
        self._reads: list[Read] = []
        self._space: dict[str, Any] = {}

    def constant(self, value: Any) -> str:
        """The name of what is the same on all graphs."""
        name = f"k{len(self._space)}"
        self._space[name] = value
        return name

    def fixed(self, read: Read, count: int) -> list[str]:
        """The names of `count` values that are the same in every call of a plan."""
        place = len(self._reads)
        names = [f"c{place}_{i}" for i in range(count)]
        if names:
            self._reads.append(read)
            self._unpacked.append(f"{', '.join(names)}, = c{place}")
        return names

    def value(self, key: Key) -> str:
        """The name of a value's tensor."""
        return f"v{self._number(key)}"

    def address(self, key: Key) -> str:
        """The name of a value's address."""
        return f"p{self._number(key)}"

    def written(self, given: Sequence[str]) -> _Written:
        """The function of arguments with these names."""
        arguments = ", ".join(f"c{i}" for i in range(len(self._reads)))
        text = [f"def make({arguments}):"]
        text += [f"    {line}" for line in self._unpacked]
        text += [f"    def run({', '.join(given)}):"]
        text += [f"        {line}" for line in self.lines]
        text += ["    return run"]
        exec(compile("\n".join(text), "<bound plan>", "exec"), self._space)
        return _Written(self._space["make"], tuple(self._reads))


class BoundPlan:
    """See [Note: bound plans]. Every launch of `steps` has its compiled kernel."""

    def __init__(
        self,
        steps: Sequence[Step],
        device: torch.device,
        run_torch: RunTorch,
        kept: Mapping[Node, Tensor],
        layout: TableLayout | None = None,
        view_of: Callable[[Node], Viewed | None] = lambda _: None,
    ) -> None:
        """`layout`: that of the program, if it has other plans; `view_of`: which
        operations of PyTorch are views."""
        self.device, self.run_torch, self.view_of = device, run_torch, view_of
        self.kept = dict(kept)
        """Values that depend on the graph alone: the same in every call."""
        self._layout = TableLayout() if layout is None else layout
        self.steps = tuple(
            s
            for s in steps
            if not (kept and s.makes and all(k in kept for k, _, _ in s.makes))
        )
        self._work = tuple(w for s in self.steps for w in s.work)
        self.launches = tuple(w for s in steps for w in s.work if isinstance(w, Launch))
        """Kept: they hold the graph's arrays, whose addresses the function has."""
        self._shared = self._share()
        self.shared_bytes = sum(self._shared.values())
        self._calls: dict[object, Call] = {}

    def _share(self) -> dict[Key, int]:
        """{value in the shared memory: its bytes}."""
        ends = {key for s in self.steps for key in s.dead}
        for work in self._work:
            if isinstance(work, TorchOp):
                ends.difference_update(work.reads)
        sizes = {
            k: _bytes(shape, dtype)
            for s in self.steps
            for k, shape, dtype in s.makes
            if k in ends
        }
        return {} if sum(sizes.values()) > SHARED_BYTES else sizes

    def run(self, bindings: Mapping[Node, Tensor]) -> dict[Node, Tensor] | None:
        """Values by node: everything bound, and the plan's results; None if `call`'s
        function gives that."""
        gone = {key for s in self.steps for key in s.dead}
        made = [k for s in self.steps for k, _, _ in s.makes]
        made += [w.node for w in self._work if isinstance(w, TorchOp)]
        made += self.kept
        wanted = tuple(k for k in made if k not in gone and isinstance(k, Node))
        found = self.call(tuple(bindings), wanted)(*bindings.values())
        if found is None:
            return None
        return {**bindings, **dict(zip(wanted, found, strict=True))}

    def call(self, given: tuple[Node, ...], wanted: tuple[Node, ...]) -> Call:
        """The function of tensors in the order of `given` that returns the memory of
        `wanted`; joining or splitting heads changes none."""
        found = self._calls.get((given, wanted))
        if found is None:
            found = self._calls[given, wanted] = self._called(given, wanted)
        return found

    def _called(self, given: tuple[Node, ...], wanted: tuple[Node, ...]) -> Call:
        templates = tuple(
            id(w.template) if isinstance(w, Launch) else w.node for w in self._work
        )
        # Templates and nodes live as long as the program, and so do their functions.
        own = self.device, tuple(self.kept), bool(self._shared)
        key = given, wanted, templates, own
        written = self._layout.written.get(key)
        if written is None:
            writer = _Writer(self._layout)
            self._write(writer, given, wanted)
            arguments = [f"a{i}" for i in range(len(given))]
            written = self._layout.written[key] = writer.written(arguments)
        return written.make(*[read(self) for read in written.reads])

    def _write(
        self, w: _Writer, given: tuple[Node, ...], wanted: tuple[Node, ...]
    ) -> None:
        tensors: dict[Key, str] = {n: f"a{i}" for i, n in enumerate(given)}
        self._write_arguments(w, tensors)
        kept = w.fixed(lambda plan: tuple(plan.kept.values()), len(self.kept))
        places = w.fixed(_places_of_kept, len(self.kept))
        for node, name, place in zip(self.kept, kept, places, strict=True):
            tensors[node] = name
            w.lines.append(f"{w.address(node)} = {place}")
        empty, device = w.constant(torch.empty), w.constant(self.device)
        stream = self._write_stream(w)
        self._write_shared(w, empty, device)
        (run,) = w.fixed(lambda plan: (plan.run_torch,), 1)
        for i, step in enumerate(self.steps):
            shapes = w.fixed(partial(_shapes_of, step=i), len(step.makes))
            for (key, _, dtype), size in zip(step.makes, shapes, strict=True):
                if key in self._shared:
                    continue
                name = tensors[key] = w.value(key)
                kind = w.constant(dtype)
                w.lines.append(
                    f"{name} = {empty}({size}, dtype={kind}, device={device})"
                )
                w.lines.append(f"{w.address(key)} = {name}.data_ptr()")
            for j, item in enumerate(step.work):
                if isinstance(item, Launch):
                    w.lines.append(self._launch(w, item, stream, (i, j)))
                    continue
                made = self._torch(w, item, tensors, run)
                name = tensors[item.node] = w.value(item.node)
                w.lines.append(f"{name} = {made}")
                w.lines.append(f"{w.address(item.node)} = {name}.data_ptr()")
            for key in step.dead:
                name = tensors.pop(key, "")
                if name.startswith("v"):
                    w.lines.append(f"del {name}")
        results = "".join(f"{_memory(tensors, n)}, " for n in wanted)
        w.lines.append(f"return ({results})")

    def _torch(
        self, w: _Writer, item: TorchOp, tensors: Mapping[Key, str], run: str
    ) -> str:
        """What PyTorch computes: a view is taken as it is."""
        node = item.node
        view = self.view_of(node)
        if view is not None and view.of in tensors:
            dtype = "" if view.dtype is None else f".to({w.constant(view.dtype)})"
            (shape,) = w.fixed(partial(_shape_of_view, node=node), 1)
            return f"{tensors[view.of]}.view({shape}){dtype}"
        reads = {n: tensors[n] for n in item.reads if n in tensors}
        operands = ", ".join(f"{w.constant(n)}: {t}" for n, t in reads.items())
        return f"{run}({w.constant(node)}, {{{operands}}})"

    def _write_arguments(self, w: _Writer, tensors: Mapping[Key, str]) -> None:
        read = dict.fromkeys(self._reads())
        names = [(w.address(n), t) for n, t in tensors.items() if n in read]
        w.lines.extend(f"{address} = {t}.data_ptr()" for address, t in names)
        if names:
            every = " | ".join(address for address, _ in names)
            w.lines.append(f"if ({every}) % {ALIGNMENT_BYTES}:")
            w.lines.append("    return None")

    def _reads(self) -> Iterator[Key]:
        """What kernels read or write."""
        for work in self._work:
            if isinstance(work, Launch):
                yield from (n for _, n in work.slots)

    def _write_stream(self, w: _Writer) -> str:
        if self.device.type != "cuda":
            return "None"
        ask = w.constant(current_stream_of(self.device))
        w.lines.append(f"stream = {ask}({w.constant(self.device.index)})")
        return "stream"

    def _write_shared(self, w: _Writer, empty: str, device: str) -> None:
        if not self._shared:
            return
        size, *offsets = w.fixed(BoundPlan._shared_places, 1 + len(self._shared))
        kind = w.constant(torch.uint8)
        # The stream orders this memory's next use after the kernels.
        w.lines.append(f"memory = {empty}({size}, dtype={kind}, device={device})")
        w.lines.append("base = memory.data_ptr()")
        for key, offset in zip(self._shared, offsets, strict=True):
            w.lines.append(f"{w.address(key)} = base + {offset}")

    def _shared_places(self) -> tuple[int, ...]:
        """Bytes of the shared memory, and where each value begins."""
        return (self.shared_bytes, *accumulate((0, *self._shared.values())))[:-1]

    def _launch(
        self, w: _Writer, launch: Launch, stream: str, place: tuple[int, int]
    ) -> str:
        """The call of a kernel: after its metadata, what hooks would be told, and the
        hooks."""
        slots = {p: w.address(n) for p, n in launch.slots}
        slots |= {p: w.address(Partial(n)) for p, n in launch.partials}
        left = [i for i in range(len(launch.args)) if i not in slots]
        read = partial(_values_of, place=place, left=tuple(left))
        run, x, y, z, *head = w.fixed(read, 6 + len(left))
        slots |= dict(zip(left, head[2:], strict=True))
        args = (slots[i] for i in range(len(launch.args)))
        passed = (x, y, z, stream, *head[:2], "None", "None", "None", *args)
        return f"{run}({', '.join(passed)})"


def _places_of_kept(plan: BoundPlan) -> tuple[int, ...]:
    return tuple([value.data_ptr() for value in plan.kept.values()])


def _shapes_of(plan: BoundPlan, step: int) -> tuple[tuple[int, ...], ...]:
    return tuple([shape for _, shape, _ in plan.steps[step].makes])


def _shape_of_view(plan: BoundPlan, node: Node) -> tuple[tuple[int, ...]]:
    view = plan.view_of(node)
    if view is None:
        raise ValueError(f"expected a view, got {node}")
    return (view.shape,)


def _values_of(
    plan: BoundPlan, place: tuple[int, int], left: tuple[int, ...]
) -> tuple[Any, ...]:
    """What a launch passes that is the same in every call."""
    launch: Any = plan.steps[place[0]].work[place[1]]
    kernel, args = launch.compiled, launch.args
    head = (kernel.run, *launch.grid, kernel.function, kernel.packed_metadata)
    return (*head, *[_passed(args[i]) for i in left])


def _passed(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, Tensor) else value


def _memory(tensors: Mapping[Key, str], node: Node) -> str:
    while node not in tensors and node.op is Op.RESHAPE:
        node = node.inputs[0]
    return tensors[node]
