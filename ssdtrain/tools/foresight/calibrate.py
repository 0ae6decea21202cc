"""Scales a shipped device to the machine at hand, in a minute: per family by the median
of measured over predicted time of a sample; its power by a product at length, where the
limit holds the clock.

[Note: the host's scale]
One step is not enough to know a host by: one of few kinds of operators is off by as
much as they are, one without an optimizer knows nothing of the Python that it runs, and
other work makes the same step half as long again. So three whole steps that the host
binds (blocks, tables, relations) are measured in turn and several times, and medians
are taken, of rounds and then of programs. The blocks are as many as models have:
operators that do not fit into caches take the host longer.
(tests/ssdtrain/tools/foresight/test_gather.py)
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ssdtrain.tools.foresight.call import Call, KernelFamily
from ssdtrain.tools.foresight.capture import capture
from ssdtrain.tools.foresight.device import DeviceCosts
from ssdtrain.tools.foresight.graph import Graph
from ssdtrain.tools.foresight.power import Power
from ssdtrain.tools.foresight.price import estimate_step
from ssdtrain.tools.foresight.spec import Kind
from ssdtrain.tools.foresight.sustained import PowerSampler, measure_product
from ssdtrain.tools.foresight.tracing import step_us

# Fewer measurements than this say nothing of a family.
LEAST_SAMPLES = 8
# Of every program that measures the host.
NUM_ROUNDS = 3
# A square product of this size is arithmetic and nothing else; so long it runs.
SUSTAINED_SIZE, SUSTAINED_S = 8192, 1.5
# Above it the power limit does not hold the clock, and nothing is known of the power.
HELD_CLOCK = 0.98


def family_scales(
    device: DeviceCosts, times: Sequence[tuple[Call, float]]
) -> dict[KernelFamily, float]:
    """Median of measured over predicted time, by family."""
    ratios: dict[KernelFamily, list[float]] = {}
    for call, us in times:
        ratios.setdefault(call.family, []).append(us / device.kernel_us(call))
    return {
        family: statistics.median(found)
        for family, found in ratios.items()
        if len(found) >= LEAST_SAMPLES
    }


class _Block(nn.Module):
    """Attention and two products between normalizations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to the same."""
        batch, sequence, width = x.shape
        qkv = self.qkv(self.first(x)).view(batch, sequence, 3, 1, width)
        query, key, value = (each.transpose(1, 2) for each in qkv.unbind(2))
        seen = F.scaled_dot_product_attention(query, key, value)
        joined = self.out(seen.transpose(1, 2).reshape(batch, sequence, width))
        x = x + F.dropout(joined, 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.second(x)))), 0.1)


class _Tables(nn.Module):
    """A lookup a table, products of pairs and a perceptron, as recommenders have."""

    def __init__(self, tables: int = 20, rows: int = 64, width: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        layers = [nn.Linear(tables * tables, 64), nn.ReLU(), nn.Linear(64, 1)]
        self.top = nn.Sequential(*layers)

    def forward(self, ids: Tensor) -> Tensor:
        """(tables, batch) to a scalar."""
        rows = [table(ids[at]) for at, table in enumerate(self.tables)]
        stacked = torch.stack(rows, dim=1)
        pairs = torch.bmm(stacked, stacked.transpose(1, 2)).flatten(1)
        found: Tensor = self.top(pairs).square().mean()
        return found


class _Relations(nn.Module):
    """Rows of one end of every edge, a product, a sum into the other end."""

    def __init__(self, relations: int = 16, width: int = 32) -> None:
        super().__init__()
        shape = (2, relations, width, width)
        self.weight = nn.Parameter(torch.randn(shape) * width**-0.5)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """(nodes, width) and (relations, edges) to a scalar."""
        for layer in self.weight:
            out = torch.zeros_like(x)
            for weight, ends in zip(layer, edges, strict=True):
                out = out.index_add(0, ends, x.index_select(0, ends) @ weight)
            x = torch.relu(out)
        return x.square().mean()


class Program(NamedTuple):
    """A training step that the host binds."""

    model: nn.Module
    forward: Callable[[], Tensor]
    optimizer: str
    """`adamw` or `sgd`, fused."""

    def step(self) -> Callable[[], None]:
        """All of it: gradients' reset, forward, backward, update."""
        kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
        optimizer = kinds[self.optimizer](self.model.parameters(), lr=0.0, fused=True)

        def run() -> None:
            optimizer.zero_grad(set_to_none=True)
            self.forward().backward()
            optimizer.step()

        return run


def programs(kind: Kind) -> list[Program]:
    """On torch's present default device."""
    dtype = torch.bfloat16 if kind is Kind.CUDA else torch.float32
    # So small that the host binds, and as many as models have.
    blocks = nn.Sequential(*(_Block(64) for _ in range(20))).to(dtype)
    tables, relations = _Tables(), _Relations()
    x = torch.randn(2, 32, 64, dtype=dtype)
    ids = torch.zeros(20, 64, dtype=torch.long)
    nodes, edges = torch.randn(64, 32), torch.zeros(16, 64, dtype=torch.long)
    return [
        Program(blocks, lambda: blocks(x).float().square().mean(), "adamw"),
        Program(tables, lambda: tables(ids), "sgd"),
        Program(relations, lambda: relations(nodes, edges), "adamw"),
    ]


def program_graphs(kind: Kind) -> list[Graph]:
    """The three programs' steps, captured without running them."""
    with torch.device("meta"):
        return [
            capture(each.model, each.forward, optimizer=each.optimizer, on=kind)
            for each in programs(kind)
        ]


def host_scale(device: DeviceCosts, seconds: float = 5.0) -> float:
    """Measured over predicted time of small steps on this machine: the median of three
    programs, of each the median of its rounds. See [Note: the host's scale]."""
    graphs = program_graphs(device.spec.kind)
    predicted = [estimate_step(graph, device).step_us for graph in graphs]
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        steps = [each.step() for each in programs(device.spec.kind)]
    share = seconds / (NUM_ROUNDS * len(steps))
    rounds = [
        [step_us(step, seconds=share) for step in steps] for _ in range(NUM_ROUNDS)
    ]
    measured: list[float] = [
        statistics.median(times) for times in zip(*rounds, strict=True)
    ]
    return scale_of(measured, predicted)


def scale_of(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """The median of measured over predicted times."""
    return statistics.median(
        us / expected for us, expected in zip(measured, predicted, strict=True)
    )


def measured_power(power: Power) -> Power:
    """What products draw on this machine's GPU, by the clock that a long one keeps."""
    with PowerSampler() as watch:
        run = measure_product(SUSTAINED_SIZE, SUSTAINED_S)
    return drawn(power, run, watch.between(run["from"], run["to"]))


def drawn(power: Power, run: Mapping[str, Any], seen: Mapping[str, float]) -> Power:
    """The energy of arithmetic at which the limit holds the clock where a product
    (`run`) was seen (`sm_mhz`, `max_sm_mhz`); without those the power stays as it
    is."""
    clock = seen.get("sm_mhz", 0.0) / seen.get("max_sm_mhz", 1.0)
    if not 0.0 < clock < HELD_CLOCK:
        return power
    seconds, size = run["steady_us"] * 1e-6, run["size"]
    joules = (power.limit_watts - power.idle_watts) * seconds
    at_top = joules / clock**power.exponent
    moved = 3 * 2 * size**2 * 1e-9 * power.joules_per_gb
    return replace(power, joules_per_tflop=(at_top - moved) / (2 * size**3 * 1e-12))
