"""What is searched for runs on four ranks, in one start of them.

Models train as a found plan says, with the losses and weights of one process; a Llama
as printed FSDP2 modules split it; a pipeline as the printed JSON of DeepSpeed says.

    python sample_ranks.py OUT
"""

import contextlib
import copy
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ssdtrain.tools.foresight.collectives import Collective, bus_bytes
from ssdtrain.tools.search.launch import configurations
from ssdtrain.tools.search.moves import WorkerAxis, cost, moves
from ssdtrain.tools.search.parallel_layout import Job, ParallelLayout
from ssdtrain.tools.search.placement import Cut
from ssdtrain.tools.search.problem import Problem
from ssdtrain.tools.search.runner import PlannedStep, distribute
from ssdtrain.tools.search.search import Partition, partition
from ssdtrain.tools.search.trace import trace
from tests.ranks import leave

STEPS = 2
JOB = Job(layers=4, hidden=32, tokens=16, batch=16, gpus=4)


def mlp() -> tuple[nn.Module, tuple[int, ...]]:
    sizes = ((16, 64), (64, 16), (16, 8))
    layers = [part for s in sizes for part in (nn.Linear(*s), nn.ReLU())]
    return nn.Sequential(*layers[:-1]), (8, 16)


def halo() -> tuple[nn.Module, tuple[int, ...]]:
    """A convolution whose ranks read rows of their neighbours."""
    net = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.ReLU())
    return net, (1, 3, 16, 16)


class Attention(nn.Module):
    """Four heads of four, with a norm and a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 16)
        self.parts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (p(y).unflatten(-1, (4, 4)).transpose(1, 2) for p in self.parts)
        mixed = (q @ k.transpose(-2, -1) / 2).softmax(-1) @ v
        found: Tensor = x + self.out(mixed.transpose(1, 2).flatten(2))
        return found


class Recurrent(nn.Module):
    """A gated cell, three steps."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.new = nn.Linear(24, 16), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1], 16)
        for step in x.unbind(0):
            both = torch.cat((step, h), -1)
            gate = torch.sigmoid(self.gate(both))
            h = gate * h + (1 - gate) * torch.tanh(self.new(both))
        return h


def attention() -> tuple[nn.Module, tuple[int, ...]]:
    return Attention(), (4, 8, 16)


def recurrent() -> tuple[nn.Module, tuple[int, ...]]:
    return Recurrent(), (3, 8, 8)


def convolutions() -> tuple[nn.Module, tuple[int, ...]]:
    net = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.GroupNorm(4, 16),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(256, 8),
    )
    return net, (4, 4, 16, 16)


MODELS = (mlp, halo, attention, recurrent, convolutions)
CASES = {make.__name__: make for make in MODELS}


def square(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


class Sent(TorchDispatchMode):
    """Counts collectives, and the bytes that a rank sends by them."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.num_bytes = 0, 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.partition("::")[2]
        out = func(*args, **(kwargs or {}))
        kind = next((k for word, k in KINDS.items() if name.startswith(word)), None)
        if kind is not None:
            message = max(args[0].nbytes, out.nbytes)
            self.count += 1
            self.num_bytes += bus_bytes(kind, message, AXIS)
        return out


KINDS = {
    "all_gather": Collective.ALL_GATHER,
    "all_reduce": Collective.ALL_REDUCE,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "shard_dim_alltoall": Collective.ALL_TO_ALL,
}
AXIS = 2
"""Workers of each axis."""


def expected_bytes(problem: Problem, found: Partition) -> float:
    """What a rank sends here: as planned, but inputs are copies, and gloo, which has no
    all-to-all, gathers twice its bytes."""
    made = {number for one in problem.operations for number in one.results}
    known = made | set(problem.weights.values())
    total = 0.0
    for one, chosen in zip(problem.operations, found.chosen, strict=True):
        ways = [
            (number, found.placements[number], tuple(s.needs[at] for s in chosen))
            for at, number in enumerate(one.operands)
            if number in known
        ]
        ways += [
            (number, tuple(s.gives[at] for s in chosen), found.placements[number])
            for at, number in enumerate(one.results)
        ]
        for number, source, target in ways:
            extent = problem.tensors[number]
            for step in moves(source, target, found.ways, extent.shape):
                times = 2 if step.kind is Collective.ALL_TO_ALL else 1
                total += times * cost([step], extent.num_bytes, found.axes)
    return total


def train(
    model: nn.Module,
    batches: list[Tensor],
    step: Any,
) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for batch in batches:
        with step():
            loss = square(model, batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        losses.append(loss.full_tensor() if isinstance(loss, DTensor) else loss)
    return losses


def planned(name: str) -> dict[str, Any]:
    model, shape = CASES[name]()
    torch.manual_seed(4)
    model = model.double()
    batches = [torch.randn(shape, dtype=torch.float64) for _ in range(STEPS)]
    alone = copy.deepcopy(model)
    want = train(alone, batches, contextlib.nullcontext)
    traced = copy.deepcopy(model).to("meta")
    blank = batches[0].to("meta")
    problem = trace(traced, lambda: square(traced, blank))
    found = partition(problem, [WorkerAxis(AXIS), WorkerAxis(AXIS)])
    mesh = init_device_mesh("cpu", found.ways, mesh_dim_names=("outer", "inner"))
    distribute(model, problem, found, mesh)
    sent = Sent()
    with sent:
        got = train(model, batches, lambda: PlannedStep(problem, found, mesh))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    for (path, one), other in zip(
        model.named_parameters(), alone.parameters(), strict=True
    ):
        torch.testing.assert_close(
            one.full_tensor(),
            other,
            rtol=1e-8,
            atol=1e-9,
            msg=lambda t, p=path: f"{p}: {t}",
        )
    halos = [n for c in found.chosen for s in c for n in s.needs if isinstance(n, Cut)]
    if name == "halo" and not any(need.has_halo for need in halos):
        raise AssertionError("no halo was exchanged")
    cuts = {p for n in problem.weights.values() for p in found.placements[n]}
    return {
        "cut": sum(isinstance(p, Cut) for p in cuts),
        "collectives": sent.count,
        "sent_bytes": sent.num_bytes / STEPS,
        "expected_bytes": expected_bytes(problem, found),
        "planned_bytes": found.cost,
        "worst": max(abs(float(a - b)) for a, b in zip(got, want, strict=True)),
    }


def layout(**more: Any) -> ParallelLayout:
    """A layout of four ranks."""
    plain = {"data": 1, "tensor": 1, "pipeline": 1, "zero": 0, "sequences": 2}
    return ParallelLayout(**{**plain, "way": "plain", **more})


def llama() -> nn.Module:
    """A small Llama of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    return LlamaForCausalLM(config)


def by_fsdp2(own: ParallelLayout) -> list[float]:
    """Train a Llama as the printed module splits it, in float64: its losses have to be
    those of the whole model."""
    names: dict[str, Any] = {}
    text = configurations(own, JOB)["fsdp2"]
    for dtype in ("bfloat16", "float32"):
        text = text.replace(f"torch.{dtype}", "torch.float64")
    exec(text, names)
    torch.manual_seed(0)
    whole = llama().double()
    model = copy.deepcopy(whole)
    names["parallelize"](model, "cpu")
    shape = names["MICRO_BATCHES"], names["MICRO_BATCH"], names["TOKENS"]
    ids = torch.randint(0, 64, shape)
    losses = trained(model, ids)
    torch.testing.assert_close(losses, trained(whole, ids), rtol=1e-10, atol=0.0)
    return losses


def trained(model: nn.Module, ids: Tensor) -> list[float]:
    """Losses of some steps, each of all micro-batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        for words in ids:
            loss = model(input_ids=words, labels=words).loss
            (loss / len(ids)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def by_deepspeed(own: ParallelLayout) -> list[float]:
    """Train a pipeline of DeepSpeed's with the printed JSON."""
    import deepspeed
    from deepspeed.ops import __compatible_ops__ as compatible_ops
    from deepspeed.pipe import PipelineModule

    # The shared-memory operator is compiled at start.
    compatible_ops["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    layers: list[Any] = [nn.Linear(32, 32) for _ in range(JOB.layers)]
    net = PipelineModule(
        layers,
        num_stages=own.pipeline,
        loss_fn=nn.MSELoss(),
        partition_method="uniform",
    )
    config = json.loads(configurations(own, JOB)["deepspeed"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    x = torch.randn(own.sequences, 32, dtype=torch.bfloat16)
    stream = itertools.repeat((x, x))
    return [float(engine.train_batch(stream)) for _ in range(STEPS)]


def main() -> None:
    distributed.init_process_group("gloo")
    torch.manual_seed(3)
    found: dict[str, Any] = {"planned": {name: planned(name) for name in CASES}}
    found["losses"] = {
        "FSDP2": by_fsdp2(layout(data=4, zero=2)),
        "tensor": by_fsdp2(layout(data=2, tensor=2, zero=3, divided=True)),
        "DeepSpeed": by_deepspeed(layout(data=2, pipeline=2, zero=1)),
    }
    if distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main()
