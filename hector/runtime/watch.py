"""Notices changes of a graph's tensors that leave no trace in their versions.

[Note: changes after PyTorch] On a CPU a call compares the tensors with a copy of them
and a changed graph is made anew. On a GPU that comparison would wait for the device in
every call; instead each call launches one kernel after the layer's own that compares
digests, and where they differ fills the results with NaN and sets a flag in pinned
memory, which the next call reads and raises. So a stale graph never gives a number, and
an unchanged one costs a launch. Captured steps are covered as well.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hector.emit.source import FUSED
from hector.kept import StaleGraphError, apart
from hector.runtime.bound import current_stream_of

BLOCK = 4096
"""Elements of one digest."""


class Watch:
    """Compares tensors with a copy of them, by value."""

    is_late = False
    """Whether `raise_if_known` has anything to raise."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        with apart():
            self._copies = [t.detach().clone() for t in tensors]

    def unchanged(self, tensors: Sequence[Tensor]) -> bool:
        """Whether they hold what they held."""
        return all(map(torch.equal, tensors, self._copies))

    def check(self, results: Sequence[Tensor]) -> None:
        """Called with what a layer computed of the graph; nothing is left to do."""

    def raise_if_known(self) -> None:
        """Raise what the device found since the last call."""

    def moved(self, device: torch.device) -> "Watch | None":
        """The watch of a copy of the graph on another device: a copy depends on no
        tensor of the caller's."""
        return None


class RangeWatch(Watch):
    """Ids of a sampled graph that are out of range: known to the device alone."""

    is_late = True

    def __init__(self, wrong: Tensor) -> None:
        self._wrong = wrong
        self._flag = torch.zeros(
            (), dtype=torch.bool, device="cpu", pin_memory=wrong.is_cuda
        )
        self._seen = self._flag.numpy()
        self._flag.copy_(wrong, non_blocking=True)

    def unchanged(self, tensors: Sequence[Tensor]) -> bool:
        return not self._seen

    def check(self, results: Sequence[Tensor]) -> None:
        """NaN into all results if an id was out of range."""
        for out in results:
            out.masked_fill_(self._wrong, float("nan"))

    def moved(self, device: torch.device) -> "Watch":
        return RangeWatch(self._wrong.to(device))

    def raise_if_known(self) -> None:
        """
        Raises:
            ValueError: the results so far are NaN.
        """
        if self._seen:
            raise ValueError(
                "expected the ids of a sampled graph to be below its numbers of nodes "
                "and relations; results on it are NaN. HeteroGraph.from_pyg on a CPU "
                "says which"
            )


class DeviceWatch(Watch):
    """Compares digests on a GPU; see [Note: changes after PyTorch]."""

    def __init__(self, tensors: Sequence[Tensor], kernels: Any) -> None:
        device = tensors[0].device
        self._device = device
        self._compare = kernels.compare
        self._compiled: dict[torch.dtype, tuple[Any, tuple[Any, ...]]] = {}
        self._raised = False
        # Pinned memory has one address for the host and the devices.
        pin = device.type == "cuda"
        self._flag = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=pin)
        self._seen = self._flag.numpy()
        self._last = self._flag.data_ptr(), BLOCK
        self._stream = current_stream_of(device)
        # The memory and not the tensors, whose end is the graph's.
        self._memory = [t.detach() for t in tensors]
        starts, sizes = [], []
        for t in self._memory:
            for first in range(0, t.numel(), BLOCK):
                starts.append(t.data_ptr() + first * t.element_size())
                sizes.append(min(BLOCK, t.numel() - first))
        self._starts = torch.tensor(starts, dtype=torch.int64, device=device)
        self._sizes = torch.tensor(sizes, dtype=torch.int64, device=device)
        self._digests = torch.empty_like(self._starts)
        self._grid = (len(starts), 1, 1)
        if starts:
            parts = (self._starts, self._sizes, self._digests)
            kernels.digest[self._grid](*parts, block=BLOCK, **FUSED)

    def unchanged(self, tensors: Sequence[Tensor]) -> bool:
        """As far as is known: see `check`.

        Raises:
            StaleGraphError: results since the last call are NaN.
        """
        if self._seen[0] and not self._raised:
            self._raised = True
            raise StaleGraphError(
                "expected the tensors of a graph as they were when it was made, but "
                "they were changed through .data or by another library; results since "
                "are NaN. Change them in place through PyTorch, or pass new tensors"
            )
        return not self._raised

    def check(self, results: Sequence[Tensor]) -> None:
        """Fill `results` with NaN where a digest differs; nothing waits."""
        if not self._grid[0]:
            return
        for out in results:
            known = self._compiled.get(out.dtype)
            if known is None:
                self._launch(out)
                continue
            run, fixed = known
            stream = self._stream(self._device.index)
            run(stream, *fixed, out.data_ptr(), out.numel(), *self._last)

    def _launch(self, out: Tensor) -> None:
        """Launch for the first result of a dtype, and keep the launch with its
        questions answered; see [Note: bound plans]."""
        fixed = (self._starts, self._sizes, self._digests)
        args = (*fixed, out, out.numel(), self._flag)
        made = self._compare[self._grid](*args, block=BLOCK, **FUSED)
        if made is not None and hasattr(made, "packed_metadata"):
            head = made.function, made.packed_metadata, None, None, None
            places = [t.data_ptr() for t in fixed]
            run = partial(made.run, *self._grid)
            self._compiled[out.dtype] = run, (*head, *places)


def watch(tensors: Sequence[Tensor]) -> Watch:
    """A watch over tensors of one device."""
    on_device = tensors[0].is_cuda and all(t.is_contiguous() for t in tensors)
    if on_device and all(t.dtype == torch.int64 for t in tensors):
        try:
            from hector.runtime import watch_kernels
        except ImportError:
            return Watch(tensors)
        return DeviceWatch(tensors, watch_kernels)
    return Watch(tensors)
