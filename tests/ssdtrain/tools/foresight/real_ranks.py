"""Real ranks over gloo that keep a virtual clock; run by `test_real_ranks.py`.

Each rank trains a model with DistributedDataParallel or `fully_shard`. A dispatch mode
sees every operator that really runs, gives it a made-up time and keeps the rank's
queues: host, compute, communication. Where ranks meet they really exchange their
clocks, over gloo. Rank 1 computes slower.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ssdtrain.tools.foresight.graph import write_graph
from ssdtrain.tools.foresight.steps import capture_step
from tests.ranks import leave

WAYS = "ddp", "fsdp"
WIDTH, BATCH, LAYERS, NUM_RANKS, NUM_STEPS = 256, 8, 3, 2, 3
BUCKET_MB = 1
HOST_US, GAP_US, BYTE_US, ELEMENT_US = 2.0, 1.0, 3e-4, 1e-3
SLOWER = (1.0, 1.75)
"""By how much each rank's kernels are slower."""
NO_KERNEL = ("empty", "empty_like", "empty_strided", "_foreach_add_")


class Layer(nn.Module):
    """Norm, MLP, residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, WIDTH) to the same."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Layers between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, WIDTH) to a loss."""
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def kernel_us(name: str, elements: int, rank: int) -> float:
    """The made-up law of operators; an optimizer's update takes 50 us."""
    if "_fused_" in name:
        return 50.0 * SLOWER[rank]
    return (1.0 + ELEMENT_US * elements) * SLOWER[rank]


def wire_us(num_bytes: int) -> float:
    """The made-up law of collectives."""
    return 10.0 + BYTE_US * num_bytes


class Clock(TorchDispatchMode):
    """This rank's queues, in virtual microseconds."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.host = self.compute = self.comm = 0.0
        self.step = 0.0
        self.collectives: list[tuple[str, int]] = []
        self.writers: dict[int, tuple[bool, float]] = {}
        """By storage: whether communication wrote it last, and when."""
        self._quiet = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if not self._quiet and name.startswith("c10d::"):
            self._collective(name, args)
        out = func(*args, **kwargs)
        if not self._quiet and not name.startswith("c10d::"):
            self._operator(func, args, kwargs, out)
        return out

    def _operator(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        namespace, _, short = func._schema.name.partition("::")
        if namespace == "profiler" or short in NO_KERNEL:
            return
        read, written = [], tensors(out)
        for at, argument in enumerate(func._schema.arguments):
            value = kwargs.get(argument.name, args[at] if at < len(args) else None)
            own = tensors(value)
            is_written = (
                argument.alias_info is not None and argument.alias_info.is_write
            )
            if is_written:
                written.extend(own)
            if not (is_written and argument.kwarg_only):
                read.extend(own)
        known = {place(t) for t in read}
        packs = short == "all_gather_copy_in"
        if packs:  # its schema does not say that it writes into the whole
            read = [t for t in read if place(t) != place(written[0])]
        elif not func._schema.is_mutable and {place(t) for t in written} <= known:
            return  # a view
        elif short == "copy_" and self.writers.get(place(written[0]), (False, 0.0))[0]:
            return  # gloo's own, into what it has reduced
        elements = sum(
            t.numel() for t in {id(t): t for t in (read if packs else written)}.values()
        )
        is_comm = packs or short == "chunk_cat"
        if packs:
            read = []  # a rank's shards are there before the step
        length = kernel_us(func._schema.name, elements, self.rank)
        end = self.ready(read, is_comm) + length
        self._done(is_comm, end, written)

    def ready(self, read: list[torch.Tensor], is_comm: bool) -> float:
        """When the next kernel could start: host, its stream, the other's results."""
        self.host += HOST_US
        start = max(self.host, self.comm if is_comm else self.compute)
        for tensor in read:
            wrote_comm, end = self.writers.get(place(tensor), (is_comm, 0.0))
            if wrote_comm is not is_comm:
                start = max(start, end)
        return start

    def _done(self, is_comm: bool, end: float, written: list[torch.Tensor]) -> None:
        if is_comm:
            self.comm = end + GAP_US
        else:
            self.compute = end + GAP_US
        for tensor in written:
            self.writers[place(tensor)] = (is_comm, end)
        self.step = max(self.step, end, self.host)

    def _collective(self, name: str, args: Any) -> None:
        """All ranks exchange when they are ready; the last one starts it."""
        if "allreduce" in name:
            kind = "all_reduce"
            out = given = tensors(args[0])[0]
        else:
            kind = "all_gather" if "allgather" in name else "reduce_scatter"
            out, given = tensors(args[0])[0], tensors(args[1])[0]
        num_bytes = max(out.nbytes, given.nbytes)
        self.collectives.append((kind, num_bytes))
        ready = torch.tensor([self.ready([given], True)], dtype=torch.float64)
        self._quiet = True
        dist.all_reduce(ready, dist.ReduceOp.MAX)
        self._quiet = False
        self._done(True, ready.item() + wire_us(num_bytes), [out])


def tensors(value: Any) -> list[torch.Tensor]:
    """Tensors of a nest, DTensors by their local part."""
    found = [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]
    return [x.to_local() if isinstance(x, DTensor) else x for x in found]


def place(tensor: torch.Tensor) -> int:
    """Where its storage lies."""
    return tensor.untyped_storage().data_ptr()


def spread(how: str, model: Model) -> Any:
    """The model over all ranks."""
    if how == "fsdp":
        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)

    def hook(
        state: object, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        return (
            dist.all_reduce(buffer, async_op=True)
            .get_future()
            .then(lambda future: future.value()[0])
        )

    wrapped.register_comm_hook(None, hook)
    return wrapped


def train(how: str, out: Path, rank: int) -> None:
    """Write what this rank saw of a step, and the graph of one."""
    torch.manual_seed(0)
    model = spread(how, Model())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(BATCH, WIDTH)
    for number in range(NUM_STEPS):
        optimizer.zero_grad(set_to_none=True)
        if number < NUM_STEPS - 1:  # buckets are rebuilt behind the first
            model(x).backward()
            optimizer.step()
            continue
        with Clock(rank) as clock:
            model(x).backward()
            optimizer.step()
    found = {"step_us": clock.step, "collectives": clock.collectives}

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    write_graph(out.with_suffix(f".graph{rank}.json"), capture_step(step, model))
    out.with_suffix(f".{rank}.json").write_text(json.dumps(found))


def main() -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS)
    for how in WAYS:
        train(how, Path(sys.argv[1]) / how, rank)
    leave()


if __name__ == "__main__":
    main()
