"""Tensor parallel layers around plain operators, on two ranks; run by
`test_wrapped.py`, which has the same programs on one."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

import ssdtrain
from ssdtrain.cache.rows import RebuiltRow, WrappedRow
from tests.ranks import leave
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.cache.plans import all_moved, every_other_moved, rebuilding
from tests.ssdtrain.rebuild.sharded import recipes_of_wide

WIDTH, ROWS, LAYERS, NUM_STEPS = 16, 8, 2, 12
SETTINGS: dict[str, Any] = {"target": "host", "min_bytes": 1, "max_overhead": 0.0}

Between = Callable[[Tensor, "Gated"], Any]
"""What a program does with the product before `down` gets it: its input."""


class Gated(nn.Module):
    """A gated MLP whose product of plain parts is saved as a DTensor."""

    def __init__(self, hidden: int, *, gelu: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, hidden, bias=False)
        self.up = nn.Linear(WIDTH, hidden, bias=False)
        self.down = nn.Linear(hidden, WIDTH, bias=False)
        self.gelu = gelu
        self.between: Between = unchanged
        self.mesh: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.gelu:
            made = F.gelu(self.up(x), approximate="tanh")
        else:
            made = F.silu(self.gate(x)) * self.up(x)
        result: Tensor = x + self.down(self.between(made, self))
        return result


class Net(nn.Module):
    """Layers whose inputs and outputs are parts of a sequence."""

    def __init__(self, mesh: DeviceMesh, hidden: int, *, gelu: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Gated(hidden, gelu=gelu) for _ in range(LAYERS))
        column = ColwiseParallel(input_layouts=Shard(1))
        plan = {"gate": column, "up": column}
        for layer in self.layers:
            row = RowwiseParallel(output_layouts=Shard(1))
            parallelize_module(layer, mesh, {**plan, "down": row})
            layer.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def batch(number: int, mesh: DeviceMesh, rows: int = ROWS) -> Tensor:
    """This rank's part."""
    draw = torch.Generator().manual_seed(100 + number)
    whole = torch.randn(2, rows, WIDTH, generator=draw)
    return whole.chunk(mesh.size(), dim=1)[mesh.get_local_rank()].contiguous()


# -- programs: what stands between the product and the layer that saves it -------------


def around(made: Tensor, layer: Gated, placement: Any, **options: Any) -> Any:
    return DTensor.from_local(made, layer.mesh, [placement], **options)


def unchanged(made: Tensor, layer: Gated) -> Any:
    """Ranks' parts may differ in size."""
    shape = torch.Size((*made.shape[:-1], layer.down.in_features))
    stride = (shape[1] * shape[2], shape[2], 1)
    return around(made, layer, Shard(-1), shape=shape, stride=stride)


def through_the_wrapper(made: Tensor, layer: Gated) -> Any:
    wrapper = around(made, layer, Shard(-1))
    with torch.no_grad():
        wrapper.mul_(2)
    return wrapper


def past_the_wrapper(made: Tensor, layer: Gated) -> Any:
    wrapper = around(made, layer, Shard(-1))
    with torch.no_grad():
        made.mul_(2)
    return wrapper


def through_its_local_tensor(made: Tensor, layer: Gated) -> Any:
    wrapper = around(made, layer, Shard(-1))
    with torch.no_grad():
        wrapper.to_local().mul_(2)
    return wrapper


def before_the_wrapper(made: Tensor, layer: Gated) -> Any:
    with torch.no_grad():
        made.mul_(2)
    return around(made, layer, Shard(-1))


def by_an_operator(made: Tensor, layer: Gated) -> Any:
    return around(made, layer, Shard(-1)) * 2.0


class _Written(torch.autograd.Function):
    """Writes through a wrapper, and returns another one of the same part."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, mesh: Any) -> Any:
        wrapper = DTensor.from_local(made, mesh, [Shard(-1)])
        wrapper.mul_(2)
        return DTensor.from_local(wrapper.to_local(), mesh, [Shard(-1)])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].to_local(), None


def by_a_function_of_the_program(made: Tensor, layer: Gated) -> Any:
    return _Written.apply(made, layer.mesh)


def in_place_with_a_gradient(made: Tensor, layer: Gated) -> Any:
    return around(made, layer, Shard(-1)).mul_(2)


def a_view(made: Tensor, layer: Gated) -> Any:
    """Of the wrapper."""
    wrapper = around(made, layer, Shard(-1))
    return wrapper.flatten(0, 1).unflatten(0, made.shape[:2])


def of_a_view(made: Tensor, layer: Gated) -> Any:
    return around(made.flatten(0, 1), layer, Shard(-1)).unflatten(0, made.shape[:2])


def through_another_wrapper(made: Tensor, layer: Gated) -> Any:
    """Neither the plain tensor counts it, nor the wrapper that `down` gets."""
    wrapper = around(made, layer, Shard(-1))
    with torch.no_grad():
        wrapper.mul_(2)
    return around(wrapper.to_local(), layer, Shard(-1))


def through_another_wrapper_with_a_gradient(made: Tensor, layer: Gated) -> Any:
    wrapper = around(made, layer, Shard(-1)).mul_(2)
    return around(wrapper.to_local(), layer, Shard(-1))


def a_part(made: Tensor, layer: Gated) -> Any:
    """It is smaller than what the operator made."""
    both = torch.cat([made, made]).sigmoid()
    return around(both[: made.shape[0]], layer, Shard(-1))


def broadcast(made: Tensor, layer: Gated) -> Any:
    """The first rank's bytes go into what the others made, and no version tells."""
    wrapper = around(made, layer, Replicate(), run_check=True)
    return (
        wrapper.redistribute(placements=[Shard(-1)])
        .to_local()
        .repeat(1, 1, layer.mesh.size())
    )


def saved_replica(made: Tensor, layer: Gated) -> Any:
    """As `broadcast`, and an operator saves the replica itself."""
    wrapper = around(made, layer, Replicate(), run_check=True)
    return (wrapper * wrapper).to_local()


def partial_sums(made: Tensor, layer: Gated) -> Any:
    wrapper = around(made, layer, Partial())
    return wrapper.redistribute(placements=[Replicate()]).to_local()


def gathered(made: Tensor, layer: Gated) -> Any:
    """The ranks' parts move before an operator saves them."""
    wrapper = around(made, layer, Shard(-1)).redistribute(placements=[Replicate()])
    return (wrapper * wrapper).redistribute(placements=[Shard(-1)])


def beside_a_replica(made: Tensor, layer: Gated) -> Any:
    """Operands of different placements."""
    wrapper = around(made, layer, Shard(-1))
    other = wrapper.detach().redistribute(placements=[Replicate()])
    return wrapper * other


def saved_twice(made: Tensor, layer: Gated) -> Any:
    """Two operators save one wrapper, and a third one the plain tensor."""
    wrapper = around(made, layer, Shard(-1))
    squared = wrapper * wrapper
    return 0.5 * squared.to_local() + 0.5 * made * made


def turned(made: Tensor, layer: Gated) -> Any:
    """A plain tensor of other strides than its sizes tell."""
    wide = made.transpose(0, 1).tanh().contiguous().transpose(0, 1)
    wrapper = around(wide * wide, layer, Shard(-1))
    return wrapper * 0.5 + wrapper * wrapper


PROGRAMS: dict[str, tuple[Between, bool]] = {
    "unchanged": (unchanged, True),
    "a_view": (a_view, True),
    "saved_twice": (saved_twice, True),
    "turned": (turned, True),
    "of_a_view": (of_a_view, False),
    "through_another_wrapper": (through_another_wrapper, False),
    "through_another_wrapper_with_a_gradient": (
        through_another_wrapper_with_a_gradient,
        False,
    ),
    "through_the_wrapper": (through_the_wrapper, False),
    "past_the_wrapper": (past_the_wrapper, False),
    "through_its_local_tensor": (through_its_local_tensor, False),
    "before_the_wrapper": (before_the_wrapper, False),
    "by_an_operator": (by_an_operator, False),
    "by_a_function_of_the_program": (by_a_function_of_the_program, False),
    "in_place_with_a_gradient": (in_place_with_a_gradient, False),
    "a_part": (a_part, False),
    "broadcast": (broadcast, False),
    "saved_replica": (saved_replica, False),
    "partial_sums": (partial_sums, False),
    "gathered": (gathered, False),
    "beside_a_replica": (beside_a_replica, False),
}
"""By name: what it does, and whether what `down` saves may be made again."""

OF_RANKS = frozenset(
    ("unchanged", "broadcast", "saved_replica", "partial_sums", "gathered")
) | {"beside_a_replica"}
"""Programs that do something else on two ranks than on one."""


# -- steps ----------------------------------------------------------------------------


@contextmanager
def counting(found: dict[str, int]) -> Iterator[None]:
    """Count what rows of wrappers make again, and what falls to the general path."""
    pack = WrappedRow.pack

    def packing(self: WrappedRow, tensor: Tensor, run: Any) -> Any:
        handle: Any = pack(self, tensor, run)
        if type(self.inner) is RebuiltRow:
            found["rows"] = found.get("rows", 0) + 1
        return handle

    WrappedRow.pack = packing  # type: ignore[method-assign]
    try:
        yield
    finally:
        WrappedRow.pack = pack  # type: ignore[method-assign]


def train(
    mesh: DeviceMesh,
    settings: dict[str, Any] | None,
    *,
    between: Between,
    first: Between = unchanged,
    hidden: int = 4 * WIDTH,
    gelu: bool = False,
    rebuilds: bool = True,
    num_steps: int = NUM_STEPS,
) -> tuple[list[Tensor], list[ssdtrain.StepReport], int]:
    """Losses, gradients and weights of steps whose program changes in the middle and
    whose plan does at the end; reports; how many rows of wrappers rebuilt.

    first: the program of the steps before the middle.
    """
    net = Net(mesh, hidden, gelu=gelu)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
    found: list[Tensor] = []
    rows: dict[str, int] = {}
    reports: list[ssdtrain.StepReport] = []
    session = None if settings is None else ssdtrain.offload(net, **settings)
    with counting(rows):
        for number in range(num_steps):
            for layer in net.layers:
                layer.between = between if number >= num_steps // 2 else first
            if session is not None and session.plan is not None and rebuilds:
                left = num_steps - number
                if left == 2:
                    session.follow(all_moved(session))
                elif left == 1:
                    session.follow(every_other_moved(session))
                elif session.plan.policy != "rebuilding":
                    session.follow(rebuilding(session))
            loss = net(batch(number, mesh)).square().mean()
            loss.backward()
            found.append(loss.detach().clone())
            found += [local(p.grad) for p in net.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
            found += [local(p) for p in net.parameters()]
    if session is not None:
        reports = list(session.steps)
        session.close()
    return found, reports, rows.get("rows", 0)


def local(tensor: Any) -> Tensor:
    """A copy of this rank's part."""
    part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach().clone()


def compared(mesh: DeviceMesh, settings: dict[str, Any], **how: Any) -> dict[str, Any]:
    """One way of training with and without ssdtrain, and what its steps made again."""
    theirs, _, _ = train(mesh, None, **how)
    ours, reports, rows = train(mesh, settings, **how)
    finite = all(bool(each.isfinite().all()) for each in theirs)
    return {
        "equal": len(ours) == len(theirs) and same_bits(ours, theirs),
        "finite": finite,
        "rows": rows,
        "recipes": [dict(report.recipes) for report in reports],
        "fallbacks": [
            {str(reason): count for reason, count in report.fallbacks.items()}
            for report in reports
        ],
    }


def cases(world: int) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """By name: settings, and how it is trained."""
    found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    fixed = {"max_overhead": 0.01, "target": "host", "min_bytes": 1}
    at_once = {**fixed, "plan": "offload-all", "window_bytes": 1}
    # 65 columns are 33 and 32.
    uneven = {"between": unchanged, "gelu": True, "hidden": 65}
    found["uneven/rebuilding"] = SETTINGS, uneven
    for name, (between, _) in PROGRAMS.items():
        if name in OF_RANKS or world == 1:
            found[f"{name}/rebuilding"] = SETTINGS, {"between": between}
        if world == 1:
            found[f"{name}/at_once"] = at_once, {"between": between, "rebuilds": False}
    if world == 1:
        shadow = {**at_once, "verify": "shadow"}
        found["unchanged/shadow"] = shadow, {"between": unchanged, "rebuilds": False}
        found["gelu/rebuilding"] = SETTINGS, {"between": unchanged, "gelu": True}
    return found


def main() -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    out, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(out / "store"), world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=120),
    )
    mesh = init_device_mesh("cpu", (world,))
    found: dict[str, Any] = {"sharded": recipes_of_wide(rank)}
    for name, (settings, how) in cases(world).items():
        found[name] = compared(mesh, settings, **how)
    (out / f"rank{rank}.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main()
