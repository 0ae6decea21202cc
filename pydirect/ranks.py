"""One process a GPU, all on one machine (S. W. Min, dissertation, chapter 3).

Each process trains on its own share of the seeds; they share what is large. The graph
and the features lie in host memory once (`Ranks.share`), and each process pins them for
its GPU. Rows in GPU memory are read by the other processes' GPUs in place
(`Ranks.open_all`). Gradients are averaged by PyTorch's DistributedDataParallel.
"""

import atexit
import contextlib
import gc
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import distributed

from pydirect.memory.limits import HostMemoryError
from pydirect.memory.peers import create_block, open_block
from pydirect.memory.shared import SharedFile, create_shared, open_shared

_DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
)
_MAX_DIM = 8
_HANDLE_BYTES = 64
# Instead of a process id: no tensor follows.
_NONE = -1


@dataclass(frozen=True, kw_only=True)
class Block:
    """Memory that the other processes may read in place."""

    tensor: torch.Tensor
    """On the rank's device."""

    handle: bytes
    """What another process opens."""


class Ranks:
    """The processes of one training run; a run of one process is one of them."""

    def __init__(
        self,
        *,
        rank: int = 0,
        size: int = 1,
        device: torch.device | None = None,
        group: "distributed.ProcessGroup | None" = None,
    ) -> None:
        """See `join`.

        Args:
            rank: of this process.
            size: number of processes, all on this machine.
            device: that this process trains on; None for the CPU.
            group: of CPU tensors (gloo), for more than one process.
        """
        self.rank = rank
        self.size = size
        self.device = device or torch.device("cpu")
        self._group = group
        # Blocks live as long as others may read them.
        self._blocks: list[torch.Tensor] = []

    @classmethod
    def join(cls, device: str = "auto") -> "Ranks":
        """Join the ranks that torchrun (or its environment) has started; be alone where
        it has not. Call it again for the same process group.

        Args:
            device: "auto" takes the GPU of the local rank if there is one, "cpu" none.

        Raises:
            ValueError: no such device, ranks on several machines, or fewer GPUs than
                ranks.
        """
        count = torch.cuda.device_count()
        if device == "auto":
            device = "cuda" if count else "cpu"
        name, _, index = device.partition(":")
        number = int(index) if index.isdigit() else 0
        if device != "cpu" and (name != "cuda" or number >= count):
            raise ValueError(
                f"device: expects auto, cpu, or a GPU (torch sees {count}), got "
                f"{device!r}"
            )
        kind = torch.device(device)
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if not distributed.is_initialized() and size == 1:
            return cls(device=_with_index(kind))
        local = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
        if int(os.environ.get("LOCAL_WORLD_SIZE", str(size))) != size:
            raise ValueError(
                f"ranks: expects all {size} on one machine, whose memory they share; "
                f"got {os.environ['LOCAL_WORLD_SIZE']} here"
            )
        if kind.type == "cuda":
            if local >= torch.cuda.device_count():
                raise ValueError(
                    f"ranks: expects a GPU for each, got {torch.cuda.device_count()} "
                    f"GPUs for local rank {local}: start fewer, or set device=cpu"
                )
            kind = torch.device("cuda", local)
            torch.cuda.set_device(kind)
        if not distributed.is_initialized():
            distributed.init_process_group("nccl" if kind.type == "cuda" else "gloo")
            atexit.register(_leave)
        return cls(
            rank=distributed.get_rank(),
            size=distributed.get_world_size(),
            device=kind,
            group=distributed.new_group(backend="gloo"),
        )

    @property
    def is_first(self) -> bool:
        """Whether this process loads, prints and writes."""
        return self.rank == 0

    def share(self, tensor: torch.Tensor | None) -> torch.Tensor:
        """Give the first rank's CPU tensor to every process, as the same memory.

        Args:
            tensor: of the first rank, which copies it once; what others give is not
                looked at.

        Raises:
            ValueError: a tensor that is not the CPU's, or of an unknown type.
            HostMemoryError: no room, or processes that do not share a machine; in
                every process, whichever it was.
        """
        if self.size == 1:
            if tensor is None:
                raise ValueError("share: expects the first rank's tensor, got none")
            return tensor
        header = torch.zeros(4 + _MAX_DIM, dtype=torch.int64, device="cpu")
        shared, place = None, None
        if self.is_first:
            try:
                shared, place = _to_shared(tensor, header)
            except (ValueError, HostMemoryError):
                # The others wait for a header.
                header[0] = _NONE
                self._from_first(header)
                raise
        self._from_first(header)
        pid, descriptor, dtype, dim, *sizes = header.tolist()
        if pid == _NONE:
            raise HostMemoryError(
                "share: the first rank has nothing to share; its error says why"
            )
        kind, shape = _DTYPES[dtype], sizes[:dim]
        num_bytes = math.prod(shape) * kind.itemsize
        try:
            with self._together("share"):
                if shared is None and num_bytes:
                    shared = open_shared(
                        SharedFile(pid=pid, descriptor=descriptor, num_bytes=num_bytes)
                    )
        finally:
            if place is not None:
                os.close(place.descriptor)
        if shared is None:
            return torch.empty(shape, dtype=kind, device="cpu")
        return shared.view(kind).view(shape)

    def share_numbers(self, *numbers: int) -> tuple[int, ...]:
        """Return the first rank's integers in every process, which give as many."""
        values = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        if self.size > 1:
            self._from_first(values)
        return tuple(values.tolist())

    def new_block(self, shape: tuple[int, ...], dtype: torch.dtype) -> Block:
        """Memory of this rank's device that the others may open; see `open_all`.

        Raises:
            CudaDriverError: not enough GPU memory, or no CUDA IPC.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        # An empty share is a block as well.
        room = max(1, num_bytes)
        if self.device.type == "cuda":
            flat, handle = create_block(room, self.device)
        else:
            flat, place = create_shared(room)
            text = f"{place.pid} {place.descriptor}"
            handle = text.encode().ljust(_HANDLE_BYTES)
        self._blocks.append(flat)
        tensor = flat[:num_bytes].view(dtype).view(shape)
        return Block(tensor=tensor, handle=handle)

    def open_all(self, block: Block) -> tuple[torch.Tensor, ...]:
        """Open every rank's block, rank by rank, for this rank's device. All ranks call
        it, when their blocks are filled; sizes of the first dimension may differ.

        Raises:
            CudaDriverError: the GPUs do not reach each other.
            HostMemoryError: another rank could not open one.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        mine = torch.zeros(1 + _HANDLE_BYTES, dtype=torch.int64, device="cpu")
        mine[0] = len(block.tensor)
        mine[1:] = torch.tensor(list(block.handle), device="cpu")
        found = [torch.empty_like(mine) for _ in range(self.size)]
        distributed.all_gather(found, mine, group=self._group)
        rest, dtype = block.tensor.shape[1:], block.tensor.dtype
        opened = []
        with self._together("open_all"):
            for rank, (num_rows, *handle) in enumerate(one.tolist() for one in found):
                if rank == self.rank:
                    opened.append(block.tensor)
                    continue
                shape = (num_rows, *rest)
                num_bytes = math.prod(shape) * dtype.itemsize
                flat = self._open(bytes(handle), max(1, num_bytes))
                opened.append(flat[:num_bytes].view(dtype).view(shape))
        if self.device.type == "cpu":
            os.close(int(block.handle.split()[1]))
        return tuple(opened)

    def reach_all(self) -> bool:
        """Tell whether every rank's GPU reads every other's memory; False alone."""
        if self.size == 1:
            return False
        reaches = True
        if self.device.type == "cuda":
            gpus = [gpu for gpu in range(self.size) if gpu != self.device.index]
            reaches = all(
                torch.cuda.can_device_access_peer(self.device, gpu) for gpu in gpus
            )
        return bool(self.least(int(reaches)))

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """Add up over all ranks, on the CPU."""
        summed = value.detach().cpu().clone()
        if self.size > 1:
            distributed.all_reduce(summed, group=self._group)
        return summed

    def least(self, value: int) -> int:
        """Return the smallest over all ranks."""
        found = torch.tensor(value, device="cpu")
        if self.size > 1:
            distributed.all_reduce(
                found, op=distributed.ReduceOp.MIN, group=self._group
            )
        return int(found)

    def replicate(self, network: torch.nn.Module) -> torch.nn.Module:
        """Wrap the network to average gradients; alone, return it as it is."""
        if self.size == 1:
            return network
        gpu = self.device.type == "cuda"
        return torch.nn.parallel.DistributedDataParallel(
            network, device_ids=[self.device.index] if gpu else None
        )

    def wait(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            distributed.barrier(group=self._group)

    def close(self) -> None:
        """Free blocks once no rank reads them. All ranks call it."""
        self.wait()
        self._blocks.clear()

    @contextlib.contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """Wait until every rank has left the block, and raise in all if one raised."""
        try:
            yield
        except Exception:
            self.least(0)
            raise
        if not self.least(1):
            raise HostMemoryError(
                f"{what}: another rank has failed; its error says why"
            )

    def _from_first(self, values: torch.Tensor) -> None:
        distributed.broadcast(values, 0, group=self._group)

    def _open(self, handle: bytes, num_bytes: int) -> torch.Tensor:
        if self.device.type == "cuda":
            return open_block(handle, num_bytes, self.device)
        pid, descriptor = (int(number) for number in handle.split())
        return open_shared(
            SharedFile(pid=pid, descriptor=descriptor, num_bytes=num_bytes)
        )


def _leave() -> None:
    if distributed.is_initialized():
        gc.collect()  # what holds the group: its threads must end with it
        distributed.destroy_process_group()


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _to_shared(
    tensor: torch.Tensor | None, header: torch.Tensor
) -> tuple[torch.Tensor | None, SharedFile | None]:
    """Copy a tensor to shared memory; what others must know goes to ``header``."""
    if tensor is None or tensor.device.type != "cpu":
        raise ValueError(f"share: expects the first rank's CPU tensor, got {tensor}")
    if tensor.dtype not in _DTYPES or tensor.dim() > _MAX_DIM:
        raise ValueError(
            f"share: expects up to {_MAX_DIM} dimensions of one of {_DTYPES}, got "
            f"{tensor.dim()} of {tensor.dtype}"
        )
    header[2], header[3] = _DTYPES.index(tensor.dtype), tensor.dim()
    header[4 : 4 + tensor.dim()] = torch.tensor(tensor.shape, device="cpu")
    if tensor.numel() == 0:
        return None, None
    flat, place = create_shared(tensor.nbytes)
    header[0], header[1] = place.pid, place.descriptor
    flat.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return flat, place
