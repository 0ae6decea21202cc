"""Device memory that a plan needs, counted value by value before anything runs.

The estimate and the back end ask the same `lifetimes`, so what is counted here is what
is allocated.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from hector.emit.module import sums_of
from hector.emit.schedules import Sizes, default_schedule
from hector.ir.kernels import Fallback, Kernel, ParameterOp, Plan
from hector.ir.node import Node, Op, stored
from hector.ir.types import NARROW, ROW_DOMAINS, Domain
from hector.passes.lifetimes import late_sums, lifetimes
from hector.passes.pipeline import TrainingPlan

SLACK = 1.1
"""A plan fits if this many times its estimate does: the allocator rounds sizes up, and
free memory lies in pieces."""


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """Memory of one value, from kernel `first` to kernel `last` of a plan."""

    node: Node
    num_bytes: int
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class PlanMemory:
    """What one run of a plan allocates, next to what it is given."""

    buffers: tuple[Buffer, ...]
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """What a step allocates, next to its inputs: bytes."""

    forward: PlanMemory
    backward: PlanMemory | None = None
    saved_bytes: int = 0
    """What forward makes and backward reads."""
    held_bytes: int = 0
    """Outputs and their gradients, which the caller holds during backward."""

    @property
    def peak_bytes(self) -> int:
        """The most that is alive at once, forward or backward."""
        if self.backward is None:
            return self.forward.peak_bytes
        later = self.saved_bytes + self.held_bytes + self.backward.peak_bytes
        return max(self.forward.peak_bytes, later)


def value_bytes(node: Node, sizes: Sizes, feature_bytes: int) -> int:
    """Bytes of a stored value: wide rows have the features' dtype, the rest fp32."""
    wide = node.domain in ROW_DOMAINS and node.type.width > NARROW
    item = feature_bytes if wide else 4
    return sizes.rows(node.domain) * node.type.width * item


def plan_memory(plan: Plan, sizes: Sizes, feature_bytes: int) -> PlanMemory:
    """Buffers of a plan and the most bytes that are alive at once."""
    buffers = tuple(
        Buffer(
            node=node,
            num_bytes=value_bytes(node, sizes, feature_bytes),
            first=first,
            last=last,
        )
        for node, (first, last) in lifetimes(plan).items()
        if not _is_view(node)
    )
    peak, waiting = 0, 0
    late = late_sums(plan)
    for position, kernel in enumerate(plan.kernels):
        alive = sum(b.num_bytes for b in buffers if b.first <= position <= b.last)
        partial = _partial_bytes(kernel, sizes)
        peak = max(peak, alive + waiting + sum(partial.values()))
        waiting += sum(b for n, b in partial.items() if n in late)
    return PlanMemory(buffers=buffers, peak_bytes=peak)


def step_memory(
    plans: Plan | TrainingPlan, sizes: Sizes, feature_bytes: int
) -> StepMemory:
    """Memory of inference (a plan) or of a training step."""
    if isinstance(plans, Plan):
        return StepMemory(forward=plan_memory(plans, sizes, feature_bytes))
    forward = plan_memory(plans.forward, sizes, feature_bytes)
    made = {b.node: b.num_bytes for b in forward.buffers}
    outputs = dict.fromkeys(stored(n) for n in plans.outputs)
    saved = set(plans.saved)
    held = sum(made.get(n, 0) for n in outputs if n not in saved)
    held += _total(plans.output_grads, sizes, feature_bytes)
    return StepMemory(
        forward=forward,
        backward=plan_memory(plans.backward, sizes, feature_bytes),
        saved_bytes=sum(made.get(n, 0) for n in saved),
        held_bytes=held,
    )


def available_bytes(device: torch.device) -> int | None:
    """What may still be allocated on a device, under the process's own limit; None on a
    CPU, which is not limited."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    unused = torch.cuda.memory_reserved(device) - allocated
    share = torch.cuda.get_per_process_memory_fraction(device)
    return int(min(free + unused, share * total - allocated))


def _total(nodes: Iterable[Node], sizes: Sizes, feature_bytes: int) -> int:
    return sum(value_bytes(n, sizes, feature_bytes) for n in nodes)


def _is_view(node: Node) -> bool:
    return node.op is Op.RESHAPE


def _partial_bytes(kernel: Kernel, sizes: Sizes) -> dict[Node, int]:
    """Partial sums of a kernel that reduces rows to types: fp32, a row a chunk; every
    type may end in a chunk of its own."""
    if isinstance(kernel, ParameterOp | Fallback):
        return {}
    found = {}
    for one in sums_of(kernel, default_schedule(kernel, sizes)):
        domain, _, chunk_rows = one.tiles
        chunks = _chunks(sizes, domain, one.out, chunk_rows)
        found[one.out] = 4 * chunks * one.out.type.width
    return found


def _chunks(sizes: Sizes, domain: Domain, out: Node, chunk_rows: int) -> int:
    return -(-sizes.rows(domain) // chunk_rows) + sizes.rows(out.domain)
