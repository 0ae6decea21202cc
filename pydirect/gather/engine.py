"""The paths for an index on a GPU. One `Engine` a device; all work is asynchronous,
except that the CPU and DMA paths wait for the index."""

import functools
import itertools
import threading
from dataclasses import dataclass

import torch

from pydirect.gather.bounds import Faults
from pydirect.gather.cpu import Staging, copy_runs
from pydirect.gather.request import Path, Request
from pydirect.kernels import gather as kernels
from pydirect.kernels.driver import Module

_shape_of = functools.cache(kernels.Shape)
# Rows that GPUs hold are in no page's bucket: many, so that counting them is no queue.
_NEAR_BUCKETS = 1024


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What the kernels are laid out with."""

    num_sms: int
    """Multiprocessors of the device: no gather takes more."""

    direct_sms: int = 16
    """Multiprocessors of a direct gather: eight fill the link, from 50,000 rows on."""

    ordered_sms: int = 16
    """Multiprocessors of an ordered gather. Where translations are the limit, more
    requests in flight only push one another out of the translation caches."""

    bucket_bytes_log2: int = 16
    """Rows of so many bytes of the table are read together: what one line of the
    GPU's page table maps."""

    share: kernels.Share = kernels.Share.CONTIGUOUS
    """How blocks divide an ordered index."""

    tiered_sms: int = 48
    """Multiprocessors of a gather from a tiered table: rows from GPU memory keep warps
    busy that would else have rows of the host in flight."""

    dedup_below: float = 0.8
    """Look for repeats, and read them once, when fewer indices are distinct."""


class Engine:
    """Gathers onto one device."""

    def __init__(
        self, device: torch.device, module: Module, staging: Staging, tuning: Tuning
    ) -> None:
        """``device`` is where indices and results are; see `engine_on` for a GPU."""
        self.device = device
        self.module = module
        self.tuning = tuning
        self._staging = staging
        self._staging_lock = threading.Lock()
        self._faults = Faults(device)

    def raise_if_any(self) -> None:
        """Raise for a bad index of an earlier gather that has finished."""
        self._faults.raise_if_any()

    def check(self) -> None:
        """Wait for the device and raise for a bad index of any earlier gather."""
        self._faults.wait_and_raise()

    def gather(
        self,
        request: Request,
        path: Path,
        *,
        max_sms: int | None = None,
        distinct_share: float = 1.0,
    ) -> None:
        """Write ``request.out`` on the current stream.

        Args:
            request: what to gather; the index is on this engine's device.
            path: how; zero-copy paths need a pinned table.
            max_sms: at most so many multiprocessors, ordering included.
            distinct_share: distinct indices over indices, as far as known.

        Raises:
            GatherIndexError: on the CPU and DMA paths, before any byte is written.
        """
        if path is Path.CPU:
            with self._staging_lock:
                self._staging.gather(request)
        elif path is Path.DMA:
            copy_runs(request)
        elif path is Path.DIRECT:
            self.direct(request, self._budget(max_sms, self._wanted(request, path)))
        else:
            once = distinct_share < self.tuning.dedup_below
            self._ordered(request, max_sms, read_once=once)

    def direct(
        self,
        request: Request,
        sms: int,
        start: kernels.Start = kernels.Start.LINE,
    ) -> None:
        """Zero-copy in the order of the index; ``start`` for comparison."""
        arguments = self.arguments(request, request.index.data_ptr())
        arguments.check = 1
        arguments.wraps = request.wraps
        index = request.index
        if request.tiers is not None and index.dtype != torch.int64:
            index = index.long()
            arguments.index = index.data_ptr()
        shape = _shape_of(num_blocks=sms, start=start)
        kernels.launch_gather(self.module, arguments, index.dtype, shape, self.stream())

    def _ordered(
        self, request: Request, max_sms: int | None, *, read_once: bool
    ) -> None:
        """Zero-copy in the order of pages: [Note: Order without a sort] in gather.cu.

        Ordering and copying repeats are limited by GPU memory, not by the link, and
        take every multiprocessor of the budget; the reads take `Tuning.ordered_sms`.
        """
        num = request.num_indices
        arguments = self._bucket_arguments(request)
        space = _Space(self.device, num, arguments.num_buckets, read_once=read_once)
        space.lend(arguments)
        stream = self.stream()
        wide = 4 * self.tuning.num_sms if max_sms is None else self._budget(max_sms)
        kernels.launch_order(
            self.module,
            arguments,
            request.index.dtype,
            num_blocks=wide,
            stream=stream,
        )
        gather = self.arguments(request, space.order)
        gather.position = arguments.position
        gather.total = arguments.counts + 4 * (arguments.num_buckets + 1)
        if arguments.near_buckets:
            near = arguments.num_buckets - arguments.near_buckets
            gather.split = arguments.counts + 4 * near
        shape = _shape_of(
            num_blocks=self._budget(max_sms, self._wanted(request, Path.SORTED)),
            share=self.tuning.share,
        )
        kernels.launch_gather(self.module, gather, torch.int64, shape, stream)
        if read_once:
            repeats = kernels.RepeatArgs(
                out=request.out.data_ptr(),
                owner=arguments.owner,
                num_indices=num,
                row_bytes=request.row_bytes,
            )
            kernels.launch_repeats(self.module, repeats, num_blocks=wide, stream=stream)

    def _wanted(self, request: Request, path: Path) -> int:
        """Multiprocessors for the reads of a zero-copy path."""
        if request.tiers is not None:
            return self.tuning.tiered_sms
        few = self.tuning
        return few.direct_sms if path is Path.DIRECT else few.ordered_sms

    def _budget(self, max_sms: int | None, wanted: int | None = None) -> int:
        """Blocks for a kernel that would like ``wanted``: a block takes at most one
        multiprocessor."""
        most = min(max_sms or self.tuning.num_sms, self.tuning.num_sms)
        return most if wanted is None else min(wanted, most)

    def _bucket_arguments(self, request: Request) -> kernels.BucketArgs:
        shift = self.tuning.bucket_bytes_log2
        near = 0 if request.tiers is None else _NEAR_BUCKETS
        arguments = kernels.BucketArgs(
            index=request.index.data_ptr(),
            error=self._faults.elected_address,
            fault=self._faults.record_address,
            num_indices=request.num_indices,
            num_rows=request.num_rows,
            row_bytes=request.row_bytes,
            num_buckets=(request.table.nbytes >> shift) + 1 + near,
            shift=shift,
            wraps=request.wraps,
            near_buckets=near,
        )
        if request.tiers is not None:
            arguments.tiers = request.tiers.arguments
        return arguments

    def stream(self) -> int:
        """The raw handle of the current stream."""
        if self.device.type != "cuda":
            return 0
        # What torch's own generated code asks: a Stream object costs microseconds.
        raw = torch._C._cuda_getCurrentRawStream
        return int(raw(self.device.index))

    def arguments(self, request: Request, order: int) -> kernels.GatherArgs:
        """Arguments of a gather that reads in the order at address ``order``."""
        arguments = kernels.GatherArgs(
            table=request.table.data_ptr(),
            out=request.out.data_ptr(),
            index=order,
            error=self._faults.elected_address,
            fault=self._faults.record_address,
            num_indices=request.num_indices,
            num_rows=request.num_rows,
            row_bytes=request.row_bytes,
        )
        if request.tiers is not None:
            arguments.tiers = request.tiers.arguments
        return arguments


class DirectGather:
    """`Engine.direct` over one table, with all that depends on the table settled."""

    def __init__(self, engine: Engine, table: torch.Tensor) -> None:
        """``table``: pinned, contiguous, shape (num_rows, ...)."""
        self._engine = engine
        empty = table.new_empty((0,), dtype=torch.int64)
        request = Request(table=table, index=empty, out=table[:0])
        self._template = engine.arguments(request, 0)
        self._template.check = 1
        self._shape = _shape_of(num_blocks=engine.tuning.direct_sms)

    def __call__(self, index: torch.Tensor, out: torch.Tensor, *, wraps: bool) -> None:
        """Write ``out`` (freshly allocated, at its storage's start) on the current
        stream; ``index``: contiguous."""
        arguments = kernels.GatherArgs.from_buffer_copy(self._template)
        arguments.index = index.data_ptr()
        arguments.out = out.data_ptr()
        arguments.num_indices = index.shape[0]
        arguments.wraps = wraps
        kernels.launch_gather(
            self._engine.module,
            arguments,
            index.dtype,
            self._shape,
            self._engine.stream(),
        )


class _Space:
    """GPU memory of one ordered gather: a single allocation."""

    def __init__(
        self, device: torch.device, num: int, num_buckets: int, *, read_once: bool
    ) -> None:
        self._num_slots = 1 << (2 * num - 1).bit_length() if read_once else 0
        owners = num if read_once else 0
        self._num_sums = kernels.num_sums(num_buckets)
        counts = num_buckets + 2
        parts = (num, num, counts, self._num_sums, owners, self._num_slots)
        # 8-byte rows first, so that all parts are aligned.
        self._space = torch.empty(
            2 * num + sum(parts), dtype=torch.int32, device=device
        )
        self.order = self._space.data_ptr()
        starts = itertools.accumulate(parts[:-1], initial=2 * num)
        self._parts = [self.order + 4 * start for start in starts]

    def lend(self, arguments: kernels.BucketArgs) -> None:
        """Fill in the addresses; the memory must outlive the launches' enqueueing."""
        position, rank, counts, sums, owner, slots = self._parts
        arguments.sums, arguments.num_sums = sums, self._num_sums
        arguments.order = self.order
        arguments.position, arguments.rank, arguments.counts = position, rank, counts
        if self._num_slots:
            arguments.owner, arguments.slots = owner, slots
            arguments.num_slots = self._num_slots


def engine_on(device: torch.device) -> Engine:
    """The engine of a GPU, with kernels compiled for it."""
    with torch.cuda.device(device):
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        return Engine(
            device,
            kernels.gather_module(device),
            Staging(torch.cuda.Event),
            Tuning(num_sms=sms),
        )
