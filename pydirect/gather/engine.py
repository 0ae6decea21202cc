"""The paths for an index on a GPU. One `Engine` a device; all work is asynchronous,
except that the CPU and DMA paths wait for the index."""

import functools
import threading
from dataclasses import dataclass

import torch

from pydirect.gather.bounds import Faults
from pydirect.gather.cpu import Staging, copy_runs
from pydirect.gather.request import Path, Request
from pydirect.kernels import gather as kernels
from pydirect.kernels.driver import Module

_shape_of = functools.cache(kernels.Shape)


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
    """See `Engine._bucketed`."""

    share: kernels.Share = kernels.Share.CONTIGUOUS
    """How blocks divide an ordered index."""

    dedup_below: float = 0.8
    """Sort fully, and read repeats once, when fewer indices than this are distinct."""


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
            max_sms: at most so many multiprocessors.
            distinct_share: distinct indices over indices, as far as known.

        Raises:
            GatherIndexError: on the CPU and DMA paths, before any byte is written.
        """
        if path is Path.CPU:
            with self._staging_lock:
                self._staging.gather(request)
            return
        if path is Path.DMA:
            copy_runs(request)
            return
        tuned = self.tuning
        few = tuned.direct_sms if path is Path.DIRECT else tuned.ordered_sms
        most = min(max_sms or tuned.num_sms, tuned.num_sms)
        sms = min(few, most)
        if path is Path.DIRECT:
            self.direct(request, sms)
        elif distinct_share < self.tuning.dedup_below:
            self._sorted(request, sms, most)
        else:
            self._bucketed(request, sms)

    def direct(
        self,
        request: Request,
        sms: int,
        start: kernels.Start = kernels.Start.LINE,
    ) -> None:
        """Zero-copy in the order of the index; ``start`` for comparison."""
        arguments = self._arguments(request, request.index)
        arguments.check = 1
        shape = _shape_of(num_blocks=sms, start=start)
        kernels.launch_gather(
            self.module, arguments, request.index.dtype, shape, self._stream()
        )

    def _sorted(self, request: Request, sms: int, most: int) -> None:
        """Full radix sort: repeats become neighbours and are read once. They are
        copied by ``most`` multiprocessors: it is GPU memory that limits the copies."""
        ordered, position = request.index.sort()
        arguments = self._arguments(request, ordered)
        arguments.check = 1
        arguments.position = position.data_ptr()
        arguments.position_stride = 2
        arguments.skip_repeats = 1
        shape = _shape_of(num_blocks=sms, share=self.tuning.share)
        stream = self._stream()
        kernels.launch_gather(self.module, arguments, ordered.dtype, shape, stream)
        shape = _shape_of(num_blocks=most)
        kernels.launch_repeats(self.module, arguments, ordered.dtype, shape, stream)

    def _bucketed(self, request: Request, sms: int) -> None:
        """Order by page only: rows of one page become neighbours in one pass of
        counting, a prefix sum and one pass of placing, instead of the eight passes of
        a radix sort over 64-bit keys."""
        num, index = request.num_indices, request.index
        shift = self.tuning.bucket_bytes_log2
        num_buckets = (request.table.nbytes >> shift) + 1
        order = torch.empty(2 * num, dtype=torch.int64, device=self.device)
        rows, rest = order[:num], order[num:].view(torch.int32)
        rank, position = rest[:num], rest[num:]
        counts = torch.zeros(num_buckets + 1, dtype=torch.int32, device=self.device)
        arguments = kernels.BucketArgs(
            index=index.data_ptr(),
            counts=counts.data_ptr(),
            rank=rank.data_ptr(),
            order=rows.data_ptr(),
            position=position.data_ptr(),
            error=self._faults.elected_address,
            fault=self._faults.record_address,
            num_indices=num,
            num_rows=request.num_rows,
            row_bytes=request.row_bytes,
            num_buckets=num_buckets,
            shift=shift,
        )
        stream = self._stream()
        kernels.launch_bucket_count(self.module, arguments, index.dtype, stream)
        sums = torch.cumsum(counts, 0, dtype=torch.int32)
        arguments.counts = sums.data_ptr()
        kernels.launch_bucket_place(self.module, arguments, index.dtype, stream)
        gather = self._arguments(request, rows)
        gather.position = position.data_ptr()
        gather.position_stride = 1
        shape = _shape_of(num_blocks=sms, share=self.tuning.share)
        kernels.launch_gather(self.module, gather, rows.dtype, shape, stream)

    def _stream(self) -> int:
        if self.device.type != "cuda":
            return 0
        # What torch's own generated code asks: a Stream object costs microseconds.
        raw = torch._C._cuda_getCurrentRawStream
        return int(raw(self.device.index))

    def _arguments(self, request: Request, order: torch.Tensor) -> kernels.GatherArgs:
        return kernels.GatherArgs(
            table=request.table.data_ptr(),
            out=request.out.data_ptr(),
            index=order.data_ptr(),
            error=self._faults.elected_address,
            fault=self._faults.record_address,
            num_indices=request.num_indices,
            num_rows=request.num_rows,
            row_bytes=request.row_bytes,
        )


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
