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
Make = Callable[..., Call]
"""A `Call` of what is the same in every call."""


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
        self.made: dict[object, Make] = {}

    def number(self, key: Key) -> int:
        """The number of a value, in its names."""
        return self._numbers.setdefault(key, len(self._numbers))


class _Writer:
    """Writes a function, and notes what is the same in every call of it."""

    def __init__(self, layout: TableLayout) -> None:
        self.lines: list[str] = []
        self.fixed: list[Any] = []
        self._number = layout.number

    def constant(self, value: Any) -> str:
        """The name of what is the same in every call."""
        self.fixed.append(value)
        return f"c{len(self.fixed) - 1}"

    def value(self, key: Key) -> str:
        """The name of a value's tensor."""
        return f"v{self._number(key)}"

    def address(self, key: Key) -> str:
        """The name of a value's address."""
        return f"p{self._number(key)}"

    def made(self, given: Sequence[str]) -> Make:
        """What makes the function of arguments with these names."""
        names = ", ".join(f"c{i}" for i in range(len(self.fixed)))
        body = "\n        ".join(self.lines)
        text = (
            f"def make({names}):\n"
            f"    def run({', '.join(given)}):\n"
            f"        {body}\n"
            f"    return run\n"
        )
        space: dict[str, Any] = {}
        exec(compile(text, "<bound plan>", "exec"), space)
        made: Make = space["make"]
        return made


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
        self.device, self.run_torch, self._view_of = device, run_torch, view_of
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
        key = (given, wanted, templates, tuple(self.kept), bool(self._shared))
        writer = _Writer(self._layout)
        self._write(writer, given, wanted)
        made = self._layout.made.get(key)
        if made is None:
            arguments = [f"a{i}" for i in range(len(given))]
            made = self._layout.made[key] = writer.made(arguments)
        return made(*writer.fixed)

    def _write(
        self, w: _Writer, given: tuple[Node, ...], wanted: tuple[Node, ...]
    ) -> None:
        tensors: dict[Key, str] = {n: f"a{i}" for i, n in enumerate(given)}
        self._write_arguments(w, tensors)
        for node, value in self.kept.items():
            tensors[node] = w.constant(value)
            w.lines.append(f"{w.address(node)} = {w.constant(value.data_ptr())}")
        empty, device = w.constant(torch.empty), w.constant(self.device)
        stream = self._write_stream(w)
        self._write_shared(w, empty, device)
        torch_op = w.constant(self.run_torch)
        for step in self.steps:
            for key, shape, dtype in step.makes:
                if key in self._shared:
                    continue
                name = tensors[key] = w.value(key)
                size, kind = w.constant(shape), w.constant(dtype)
                w.lines.append(
                    f"{name} = {empty}({size}, dtype={kind}, device={device})"
                )
                w.lines.append(f"{w.address(key)} = {name}.data_ptr()")
            for item in step.work:
                if isinstance(item, Launch):
                    w.lines.append(self._launch(w, item, stream))
                    continue
                made = self._torch(w, item, tensors, torch_op)
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
        view = self._view_of(item.node)
        if view is not None and view.of in tensors:
            dtype = "" if view.dtype is None else f".to({w.constant(view.dtype)})"
            return f"{tensors[view.of]}.view({w.constant(view.shape)}){dtype}"
        reads = {n: tensors[n] for n in item.reads if n in tensors}
        operands = ", ".join(f"{w.constant(n)}: {t}" for n, t in reads.items())
        return f"{run}({w.constant(item.node)}, {{{operands}}})"

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
        size, kind = w.constant(self.shared_bytes), w.constant(torch.uint8)
        # The stream orders this memory's next use after the kernels.
        w.lines.append(f"memory = {empty}({size}, dtype={kind}, device={device})")
        w.lines.append("base = memory.data_ptr()")
        offset = 0
        for key, num_bytes in self._shared.items():
            w.lines.append(f"{w.address(key)} = base + {w.constant(offset)}")
            offset += num_bytes

    def _launch(self, w: _Writer, launch: Launch, stream: str) -> str:
        """The call of a kernel: after its metadata, what hooks would be told, and the
        hooks."""
        kernel = launch.compiled
        slots = {p: w.address(n) for p, n in launch.slots}
        slots |= {p: w.address(Partial(n)) for p, n in launch.partials}
        run = w.constant(kernel.run)
        grid = [w.constant(size) for size in launch.grid]
        head = w.constant(kernel.function), w.constant(kernel.packed_metadata)
        args = [
            slots[i] if i in slots else w.constant(_passed(value))
            for i, value in enumerate(launch.args)
        ]
        passed = (*grid, stream, *head, "None", "None", "None", *args)
        return f"{run}({', '.join(passed)})"


def _passed(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, Tensor) else value


def _memory(tensors: Mapping[Key, str], node: Node) -> str:
    while node not in tensors and node.op is Op.RESHAPE:
        node = node.inputs[0]
    return tensors[node]
