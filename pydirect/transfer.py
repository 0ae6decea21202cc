"""Ways between unified tensors and the processors: aliases, copies, adoption.

[Note: Gradients do not travel] The autograd engine asks every node for a stream of the
one accelerator PyTorch knows, which is CUDA (see `pydirect.accelerator`): a gradient
that is a unified tensor stops it. So no node has one. Functional operators are taken
over above autograd: unified operands enter through `ToProcessor`, and what follows is
an ordinary CPU or CUDA graph. What the host computes under autograd stays a CPU tensor.
The gradient of a unified leaf, or of a view of one, is added to the leaf's ``grad`` (a
unified tensor of host affinity) by the backward of `ToProcessor` itself, and the graph
ends there. Writing into unified memory under autograd is refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from pydirect.errors import PlacementError, UnsupportedOperatorError
from pydirect.placement import Affinity
from pydirect.region import (
    DEVICE_TYPE,
    Region,
    alias,
    allocate,
    flat_bytes,
    in_forked_worker,
    region_of,
    show,
    tensor_on,
)

HOST = torch.device("cpu")


@dataclass(kw_only=True)
class Counters:
    """What the placement rules cost beyond the operators themselves, in bytes."""

    calls: int = 0
    staged_bytes: int = 0
    """CPU operands sent to the GPU because a GPU-affine operand decided."""

    result_bytes: int = 0
    """Results of host work copied into pinned memory."""

    gathers: int = 0
    """Subscripts answered by `pydirect.gather`."""


@dataclass(kw_only=True)
class Machine:
    """What the rules run on; one per process, held by ``torch.unified``."""

    counters: Counters = field(default_factory=Counters)

    def accelerator(self) -> torch.device:
        """The current CUDA device; the CPU where there is no GPU.

        Raises:
            PlacementError: in a forked child of a process that uses CUDA.
        """
        if in_forked_worker():
            raise PlacementError(
                "a GPU-affine unified tensor was used in a forked process, where CUDA "
                "cannot run: give it host affinity there "
                '(tensor.set_affinity_("host")), or start workers by spawn'
            )
        if not torch.cuda.is_available():
            return HOST
        return torch.device("cuda", torch.cuda.current_device())


def alias_on(
    tensor: torch.Tensor, device: torch.device, *, writes: bool
) -> torch.Tensor:
    """A unified tensor as a CPU or CUDA tensor over the same bytes; no autograd."""
    region = region_of(tensor)
    if device.type == "cpu":
        region.wait_for_gpu(before_write=writes)
        return alias(tensor, region.host, device)
    shown = alias(tensor, region.on_device(device), device)
    region.note_gpu_work(torch.cuda.current_stream(device), wrote=writes)
    return shown


def adopt(
    host: torch.Tensor, affinity: Affinity, counters: Counters | None = None
) -> torch.Tensor:
    """A CPU tensor's values as a unified tensor.

    With a GPU they are copied into pinned memory; without one, or in a forked worker,
    the tensor's own memory becomes the region.
    """
    if not torch.cuda.is_available() or in_forked_worker():
        return over(host, affinity)
    if counters is not None:
        counters.result_bytes += host.nbytes
    return staged_copy(host, affinity)


def over(host: torch.Tensor, affinity: Affinity) -> torch.Tensor:
    """A unified tensor over the memory of a CPU tensor: no copy, no autograd.

    The memory is pinned in place when a GPU first works on it.
    """
    host = host.detach().resolve_conj().resolve_neg()
    if host._is_zerotensor():
        host = host.clone()
    return tensor_on(
        show(Region(flat_bytes(host), affinity)),
        host.dtype,
        tuple(host.shape),
        host.stride(),
        int(host.storage_offset()),
    )


def staged_copy(source: torch.Tensor, affinity: Affinity) -> torch.Tensor:
    """A new unified tensor with the values and, where elements do not share memory
    (gradients are often expanded), the strides of ``source``."""
    if torch._debug_has_internal_overlap(source) != 0:
        source = source.contiguous()
    made = empty_strided(tuple(source.shape), source.stride(), source.dtype, affinity)
    return copy_into(made, source, non_blocking=False)


def empty_strided(
    size: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    affinity: Affinity = Affinity.GPU,
) -> torch.Tensor:
    """An uninitialised unified tensor; ``stride`` in elements."""
    extent = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    num_elements = 0 if 0 in size else extent
    region = allocate(num_elements * dtype.itemsize, affinity)
    return tensor_on(show(region), dtype, size, stride)


def copy_into(
    target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool
) -> torch.Tensor:
    """``target.copy_(source)`` where either or both are unified.

    Unified memory takes part as pinned host memory: a copy to or from a GPU is one
    transfer of the copy engine, not loads of a kernel.
    """
    ends = []
    for tensor, writes in ((target, True), (source, False)):
        if tensor.device.type == DEVICE_TYPE:
            region = region_of(tensor)
            region.wait_for_gpu(before_write=writes)
            ends.append(alias(tensor, region.host, HOST))
        else:
            ends.append(tensor)
    ends[0].copy_(ends[1], non_blocking=non_blocking)
    for tensor, other, writes in ((target, source, True), (source, target, False)):
        if tensor.device.type == DEVICE_TYPE:
            region = region_of(tensor)
            if other.device.type == "cuda":
                stream = torch.cuda.current_stream(other.device)
                region.note_gpu_work(stream, wrote=writes)
            if writes:
                region.note_write()
    return target


class ToProcessor(torch.autograd.Function):
    """The alias as a differentiable function: see [Note: Gradients do not travel]."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        ctx.tensor = tensor
        shown = alias_on(tensor, device, writes=False)
        region_of(tensor).track(shown)
        return shown

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None]:
        (grad,) = grads
        with gradient_of(ctx.tensor) as total:
            total.add_(grad.to(HOST))
        return None, None


def enter_graph(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The alias of a unified tensor that requires gradients, as a node of the graph.

    Raises:
        UnsupportedOperatorError: its gradient has nowhere to go.
    """
    leaf_of(tensor)
    return cast(torch.Tensor, ToProcessor.apply(tensor, device))  # type: ignore[no-untyped-call]


def leaf_of(tensor: torch.Tensor) -> torch.Tensor:
    """The leaf that ``tensor`` is, or is a view of.

    Raises:
        UnsupportedOperatorError: neither, or a view with other bytes an element.
    """
    leaf = tensor if tensor.is_leaf or tensor._base is None else tensor._base
    same = leaf.dtype == tensor.dtype and not tensor.is_conj() and not tensor.is_neg()
    if not leaf.is_leaf or not same:
        raise UnsupportedOperatorError(
            "autograd reaches unified tensors that are leaves or views of leaves, got "
            f"the result of {type(tensor.grad_fn).__name__}: compute it on a CPU or "
            "CUDA tensor (pydirect.to_host, pydirect.to_device)"
        )
    return leaf


@contextmanager
def gradient_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The gradient of a unified leaf or of its view, to add to: a CPU tensor.

    The leaf's ``grad`` is made, zero, if there is none.
    """
    leaf = leaf_of(tensor)
    with region_of(leaf).lock, torch.no_grad():
        if leaf.grad is None:
            total = empty_strided(
                tuple(leaf.shape), leaf.stride(), leaf.dtype, Affinity.HOST
            )
            alias_on(total, HOST, writes=True).zero_()
            leaf.grad = total
        offset = tensor.storage_offset() - leaf.storage_offset()
        yield alias_on(leaf.grad, HOST, writes=True).as_strided(
            tensor.size(), tensor.stride(), offset
        )


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A unified tensor as a CPU tensor over the same bytes; differentiable."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        return enter_graph(tensor, HOST)
    return alias_on(tensor, HOST, writes=False)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A unified tensor as a CUDA tensor over the same bytes; differentiable."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        return enter_graph(tensor, device)
    return alias_on(tensor, device, writes=False)
