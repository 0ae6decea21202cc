"""Plans whose kernels are compiled: a call is allocations and launches, nothing else.

[Note: bound plans] On small graphs the host bounds a step, and most of a launch's host
time goes into questions that have the same answer in every call: which binary, where
a tensor's memory is, whether the device can reach it, which stream. So after the first
call everything that a plan passes to its kernels stands in one table: counts and the
addresses of the graph's arrays from the start, those of values filled in once a call.
A launch picks its arguments from the table and calls the compiled kernel; addresses as
integers are passed on as they are. (Hooks that were set on Triton's launches do not see
these.) Values that nobody outside the plan reads share one allocation if they are
small; the stream orders its next use after the plan's kernels. Larger ones keep their
own memory, so that it ends with its last reader: see [Note: lifetimes].
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hector.ir.node import Node
from hector.runtime.launch import ALIGNMENT_BYTES, Key, Launch, Partial, Step, TorchOp

SHARED_BYTES = 1 << 25
"""Most bytes of one plan's values that share an allocation for all of its run."""
PLACE_BYTES = 256
"""A shared value starts at a multiple of this."""
STREAM, NOTHING = 0, 1
"""Places in the table."""

RunTorch = Callable[[Node, Mapping[Any, Tensor]], Tensor]
"""The value of a parameter operation from those of its operands."""


class _Make(NamedTuple):
    """Memory of a value: where its address stands, and what it looks like."""

    slot: int
    key: Key
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        size = prod(self.shape) * self.dtype.itemsize
        return -(-size // PLACE_BYTES) * PLACE_BYTES


class _Call(NamedTuple):
    """A launch: the compiled kernel and what picks its arguments from the table."""

    run: Callable[..., object]
    pick: Callable[[list[Any]], tuple[Any, ...]]


class _Operation(NamedTuple):
    node: Node
    slot: int
    reads: tuple[Node, ...]


@dataclass(frozen=True)
class _Bound:
    """One step with places for names."""

    makes: tuple[_Make, ...]
    work: tuple[_Call | _Operation, ...]
    dead: tuple[Key, ...]


class _Known(NamedTuple):
    """A launch without a graph."""

    function: int
    """Where the kernel and, next to it, its metadata stand."""
    fixed: tuple[tuple[int, int], ...]
    """(place in the table, position) of each argument that is the graph's."""
    pick: Callable[[list[Any]], tuple[Any, ...]]


class TableLayout:
    """What stands where in the tables of one program's plans, on whatever graph."""

    def __init__(self) -> None:
        self.size = NOTHING + 1
        self.slots: dict[Key, int] = {}
        self._calls: dict[int, _Known] = {}

    def slot(self, key: Key) -> int:
        """The place of a value."""
        if key not in self.slots:
            self.slots[key] = self._place()
        return self.slots[key]

    def _place(self) -> int:
        self.size += 1
        return self.size - 1

    def call(self, launch: Launch) -> _Known:
        """The places of a launch; the program keeps its template."""
        found = self._calls.get(id(launch.template))
        if found is None:
            found = self._calls[id(launch.template)] = self._made(launch)
        return found

    def _made(self, launch: Launch) -> _Known:
        places = {p: self.slot(n) for p, n in launch.slots}
        places.update((p, self.slot(Partial(n))) for p, n in launch.partials)
        every = range(len(launch.args))
        fixed = {p: self._place() for p in every if p not in places}
        places.update(fixed)
        head = self._place(), self._place()
        # After the metadata: what hooks would be told, and the hooks.
        order = (places[p] for p in every)
        pick = itemgetter(STREAM, *head, NOTHING, NOTHING, NOTHING, *order)
        return _Known(head[0], tuple((s, p) for p, s in fixed.items()), pick)


class BoundPlan:
    """See [Note: bound plans]. Every launch of `steps` has its compiled kernel."""

    def __init__(
        self,
        steps: Sequence[Step],
        device: torch.device,
        run_torch: RunTorch,
        kept: Mapping[Node, Tensor],
        layout: TableLayout | None = None,
    ) -> None:
        """`layout`: that of the program, if it has other plans."""
        self.device, self.run_torch = device, run_torch
        self.kept = dict(kept)
        """Values that depend on the graph alone: the same in every call."""
        self._layout = TableLayout() if layout is None else layout
        self._fixed: list[tuple[int, Any]] = []
        """(place in the table, value) of what is the same in every call."""
        self.launches = tuple(w for s in steps for w in s.work if isinstance(w, Launch))
        """Kept: they hold the graph's arrays, whose addresses stand in the table."""
        bound = [
            self._bind(s)
            for s in steps
            if not (kept and s.makes and all(k in kept for k, _, _ in s.makes))
        ]
        for node, value in self.kept.items():
            self._fixed.append((self._layout.slot(node), value.data_ptr()))
        self._table: list[Any] = [None] * self._layout.size
        for place, known in self._fixed:
            self._table[place] = known
        made = {m.key for s in bound for m in s.makes}
        made |= {w.node for s in bound for w in s.work if isinstance(w, _Operation)}
        self.given = tuple(
            (n, s)
            for n, s in self._layout.slots.items()
            if isinstance(n, Node) and n not in made and n not in self.kept
        )
        self.shared_bytes = 0
        self._shared: list[tuple[int, int]] = []
        """(place in the table, offset) of each value in the shared memory."""
        self.steps = self._share(bound)

    def _bind(self, step: Step) -> _Bound:
        work = (
            _Operation(w.node, self._layout.slot(w.node), w.reads)
            if isinstance(w, TorchOp)
            else self._call(w)
            for w in step.work
        )
        makes = (_Make(self._layout.slot(k), k, s, d) for k, s, d in step.makes)
        return _Bound(tuple(makes), tuple(work), step.dead)

    def _call(self, launch: Launch) -> _Call:
        kernel, known = launch.compiled, self._layout.call(launch)
        head = kernel.function, kernel.packed_metadata
        self._fixed += enumerate(head, known.function)
        for place, position in known.fixed:
            value = launch.args[position]
            value = value.data_ptr() if isinstance(value, Tensor) else value
            self._fixed.append((place, value))
        return _Call(partial(kernel.run, *launch.grid), known.pick)

    def _share(self, steps: list[_Bound]) -> tuple[_Bound, ...]:
        """The steps without what finds room in the shared memory."""
        work = [w for s in steps for w in s.work if isinstance(w, _Operation)]
        ends = {key for s in steps for key in s.dead}
        ends.difference_update(*(w.reads for w in work))
        inner = [(m, m.num_bytes) for s in steps for m in s.makes if m.key in ends]
        if sum(size for _, size in inner) > SHARED_BYTES:
            return tuple(steps)
        for make, size in inner:
            self._shared.append((make.slot, self.shared_bytes))
            self.shared_bytes += size
        gone = {m.key for m, _ in inner}
        return tuple(
            _Bound(
                tuple(m for m in s.makes if m.key not in gone),
                s.work,
                tuple(k for k in s.dead if k not in gone),
            )
            for s in steps
        )

    def run(self, bindings: Mapping[Node, Tensor]) -> dict[Node, Tensor] | None:
        """Values by node: everything bound, and the plan's results; None, and nothing
        was launched, if an input's address is not what the kernels were made for."""
        table = self._table.copy()
        for node, slot in self.given:
            pointer = bindings[node].data_ptr()
            if pointer % ALIGNMENT_BYTES:
                return None
            table[slot] = pointer
        memory = self._place(table)
        device = self.device
        values: dict[Any, Tensor] = {**bindings, **self.kept}
        for step in self.steps:
            for slot, key, shape, dtype in step.makes:
                made = values[key] = torch.empty(shape, dtype=dtype, device=device)
                table[slot] = made.data_ptr()
            for item in step.work:
                if isinstance(item, _Call):
                    item.run(*item.pick(table))
                else:
                    made = values[item.node] = self.run_torch(item.node, values)
                    table[item.slot] = made.data_ptr()
            for key in step.dead:
                del values[key]
        # The stream orders this memory's next use after the kernels.
        del memory
        return values

    def _place(self, table: list[Any]) -> Tensor | None:
        """The stream and the shared memory of one call."""
        if self.device.type == "cuda":
            table[STREAM] = torch.cuda.current_stream(self.device).cuda_stream
        if not self.shared_bytes:
            return None
        memory = torch.empty(self.shared_bytes, dtype=torch.uint8, device=self.device)
        base = memory.data_ptr()
        for slot, offset in self._shared:
            table[slot] = base + offset
        return memory
