"""Every layout that models are trained in, with and without ssdtrain; run by
`test_layouts.py`.

    layout_ranks.py OUT_DIRECTORY [LAYOUT ...]

All layouts share one start of the processes. Each rank says, for each layout and way
to train it, whether losses, gradients and weights were those without ssdtrain, what
moved, what ran again, and how often FSDP2 gathered weights.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F

import ssdtrain
from ssdtrain.train.settings import Family
from tests.ranks import leave
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.cache.plans import moved_and_again
from tests.ssdtrain.engines.mesh_ranks import (
    ROWS,
    WIDTH,
    Block,
    Model,
    batch,
    nested,
    parallel,
    parallel_and_sharded,
    sharded,
    whole,
)

CPU = torch.device("cpu")
NUM_STEPS, NUM_OBSERVED, NUM_SEARCHED = 2, 3, 8
NUM_MICRO_BATCHES = 8
BASE: dict[str, Any] = {"target": "host", "min_bytes": 0, "host_bytes": 1 << 26}
AT_ONCE = {**BASE, "plan": "offload-all", "window_bytes": 1}
AUTO = {**BASE, "plan": "auto", "max_overhead": 0.5}


class Loop(Protocol):
    """A model and its training."""

    modules: list[nn.Module]

    def step(self, number: int) -> list[Tensor]:
        """Losses and gradients of a step, after which the weights are updated."""


class Way(NamedTuple):
    """How a layout is trained."""

    settings: dict[str, Any]
    imposes: bool = False
    """Whether a plan that moves and reruns takes the place of what is observed."""
    num_steps: int = NUM_STEPS


# -- torch's own ----------------------------------------------------------------------


class Meshed:
    """A model that is called, in a plain loop."""

    def __init__(self, model: nn.Module, place: int) -> None:
        """place: among ranks that train on different data."""
        self.modules: list[nn.Module] = [model]
        self._place = place
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(self, number: int) -> list[Tensor]:
        (model,) = self.modules
        loss = model(batch(number, 0, self._place, CPU)).float().square().mean()
        loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
        loss.backward()
        return [loss.detach().clone(), *stepped(self.modules, self._optimizer)]


class Piped:
    """Stages of torch's pipelining, two on each rank."""

    def __init__(self) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        numbers = range(rank, 2 * ranks, ranks)
        self.modules: list[nn.Module] = []
        for number in numbers:
            torch.manual_seed(number)
            self.modules.append(nn.Sequential(Block(), nn.Dropout(0.1), Block()))
        every = 2 * ranks
        stages = [
            PipelineStage(module, number, every, CPU)
            for module, number in zip(self.modules, numbers, strict=True)
        ]
        own: Any = stages
        self._schedule = ScheduleInterleaved1F1B(
            own, NUM_MICRO_BATCHES, loss_fn=F.mse_loss
        )
        self._is_first, self._is_last = numbers[0] == 0, numbers[-1] == every - 1
        parameters = [p for module in self.modules for p in module.parameters()]
        self._optimizer = torch.optim.SGD(parameters, lr=0.1)

    def step(self, number: int) -> list[Tensor]:
        torch.manual_seed(number)
        x = torch.randn(NUM_MICRO_BATCHES, ROWS, WIDTH)
        losses: list[Tensor] = []
        given = (x,) if self._is_first else ()
        more = {"target": x.flip(0), "losses": losses} if self._is_last else {}
        self._schedule.step(*given, **more)
        losses = [loss.detach().clone() for loss in losses]
        return losses + stepped(self.modules, self._optimizer)


class Expert(nn.Module):
    """A block whose MLP is one of as many as there are ranks: each token goes to the
    rank that its router names, and comes back."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        """mesh: of the experts' weights; None: nobody is told who shares them."""
        super().__init__()
        ranks = dist.get_world_size()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, ranks)
        self.weight = nn.Parameter(torch.randn(ranks, WIDTH, WIDTH) / WIDTH)
        if mesh is None:
            own = self.weight.detach()[dist.get_rank()][None].clone()
            self.weight = nn.Parameter(own)
        else:
            parted = distribute_tensor(self.weight.detach(), mesh, [Shard(0)])
            self.weight = nn.Parameter(parted)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, ROWS, WIDTH) to the same."""
        tokens = self.norm(x).flatten(0, 1)
        chances = self.router(tokens).softmax(-1)
        chance, chosen = chances.max(-1)
        order = chosen.argsort(stable=True)
        sent = chosen.bincount(minlength=chances.shape[1])
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent)
        splits = got.tolist(), sent.tolist()
        here = exchanged(tokens[order], *splits)
        weight: Any = self.weight
        weight = weight.to_local() if hasattr(weight, "to_local") else weight
        back = exchanged(F.gelu(here @ weight[0]), *splits[::-1])
        found = torch.zeros_like(tokens).index_copy(0, order, back)
        y: Tensor = (found * chance[:, None]).view_as(x)
        return x + y


def exchanged(tokens: Tensor, got: list[int], sent: list[int]) -> Tensor:
    """What this rank gets of all."""
    world: Any = dist.group.WORLD
    found: Tensor = all_to_all_single_autograd(tokens, got, sent, world)
    return found


def experts(mesh: DeviceMesh | None) -> nn.Module:
    model = Model()
    model.layers = nn.ModuleList(Expert(mesh) for _ in range(2))
    return model


def stepped(modules: list[nn.Module], optimizer: Any) -> list[Tensor]:
    """Gradients, before the optimizer takes them."""
    weights = [p for module in modules for p in module.parameters()]
    found = [whole(p.grad) for p in weights if p.grad is not None]
    optimizer.step()
    optimizer.zero_grad()
    return found


# -- Megatron's -----------------------------------------------------------------------


class Megatron:
    """megatron-core's own models and schedules."""

    def __init__(self, num_layers: int, split: dict[str, Any], **more: Any) -> None:
        from tests.ssdtrain.megatron.law_ranks import Cell, Training

        cell = Cell("", Family.GPT, split, more=more, layers=num_layers)
        self._training = Training(cell)
        self.modules = self._training.chunks

    def step(self, number: int) -> list[Tensor]:
        losses, gradients = self._training.step(number)
        return [torch.tensor(losses), *gradients]


EXPERTS = {
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
}


class Groups(NamedTuple):
    """Megatron's."""

    split: dict[str, Any]
    experts: int


class Layout(NamedTuple):
    """How a model is spread, and the ways it is trained."""

    make: Callable[[], Loop]
    ways: dict[str, Way]
    groups: Groups | None = None


REGIONS = {"recompute": "regions"}
WAYS = {
    "at once": Way({**AT_ONCE, **REGIONS}),
    "imposed": Way({**AUTO, **REGIONS}, True, NUM_OBSERVED + NUM_STEPS),
}
SEARCHED = {**WAYS, "searched": Way({**AUTO, **REGIONS}, num_steps=NUM_SEARCHED)}
BY_HAND = {name: way for name, way in SEARCHED.items() if not way.imposes}
# The law on two ranks (test_law.py) moves everything at once.
RECIPES = {
    "imposed": Way({**AUTO, "recompute": "auto"}, True, NUM_OBSERVED + NUM_STEPS)
}


def layouts() -> dict[str, Layout]:
    """By name."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    line = init_device_mesh("cpu", (ranks,))
    square = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))

    def meshed(make: Callable[[Any], nn.Module], mesh: Any, place: int) -> Any:
        return lambda: Meshed(make(mesh), place)

    found = {
        "fsdp2": Layout(meshed(sharded(None, True), line, rank), SEARCHED),
        "fsdp2 nested": Layout(meshed(nested(True), line, rank), SEARCHED),
        "fsdp2 nested keep": Layout(meshed(nested(False), line, rank), SEARCHED),
        "fsdp2 x tp": Layout(meshed(parallel_and_sharded, square, rank // 2), SEARCHED),
        "tp x sequence": Layout(meshed(parallel, line, 0), WAYS),
        "pp interleaved": Layout(Piped, WAYS),
        "experts": Layout(meshed(experts, line, rank), WAYS),
        "experts by hand": Layout(meshed(experts, None, rank), BY_HAND),
    }
    parted = {"tensor": ranks, "sequence": True}
    cut = {"pipeline": ranks, "virtual_pipeline": 2}
    for name, split, layers, more in (
        ("tp x sequence", parted, 1, {}),
        ("pp interleaved", cut, 2 * ranks, {}),
        ("experts", {}, 1, {**EXPERTS, "expert_model_parallel_size": ranks}),
    ):
        make = partial(Megatron, layers, split, **more)
        own = Groups(split, ranks if more else 1)
        found[f"megatron {name}"] = Layout(make, RECIPES, own)
    return found


# -- with and without -----------------------------------------------------------------


@contextlib.contextmanager
def gathers() -> Iterator[list[int]]:
    """Count what FSDP2 gathers, from one number of the list to the next."""
    counts = [0]
    gather = vars(_fsdp_param_group)["foreach_all_gather"]

    def counting(*args: Any, **kwargs: Any) -> Any:
        counts[-1] += 1
        return gather(*args, **kwargs)

    with mock.patch.object(_fsdp_param_group, "foreach_all_gather", counting):
        yield counts


def train(
    layout: Layout, way: Way | None, *, checkpoints: bool = False, num_steps: int
) -> tuple[list[list[Tensor]], dict[str, Any]]:
    """Losses, gradients and updated weights of each step; what was done."""
    torch.manual_seed(0)
    loop, told = layout.make(), dict[str, Any]()
    weights = [p for module in loop.modules for p in module.parameters()]
    found: list[list[Tensor]] = []
    if checkpoints:
        loop.modules[0].checkpoints = True  # type: ignore[assignment]
    with contextlib.ExitStack() as stack:
        counts, session = stack.enter_context(gathers()), None
        if way is not None:
            session = ssdtrain.offload(loop.modules, **way.settings)
            stack.enter_context(session)
        for step in range(num_steps):
            if session is not None and way is not None and way.imposes:
                if step == NUM_OBSERVED and session.profile is not None:
                    session.follow(moved_and_again(session))
            torch.manual_seed(step)
            found.append([*loop.step(step), *map(whole, weights)])
            counts.append(0)
        if session is not None:
            told = session.last_step.as_dict()  # type: ignore[union-attr]
            told["policy"] = session.plan and session.plan.policy
            told["refused"] = session.cache.regions.reasons
    told["gathers"] = counts[:-1]
    return found, told


def compared(layout: Layout) -> dict[str, Any]:
    """All ways of a layout."""
    longest = max(way.num_steps for way in layout.ways.values())
    theirs, plain = train(layout, None, num_steps=longest)
    found: dict[str, Any] = {"plain": plain}
    if layout.ways is SEARCHED:
        _, told = train(layout, None, checkpoints=True, num_steps=NUM_STEPS)
        found["checkpointing"] = told
    for name, way in layout.ways.items():
        ours, told = train(layout, way, num_steps=way.num_steps)
        equal = same_bits(ours, theirs[: way.num_steps])
        found[name] = {"equal": equal, **told}
    return found


@contextlib.contextmanager
def megatron_groups(own: Groups) -> Iterator[None]:
    """Megatron on the CPU, and its groups."""
    from ssdtrain.train.mcore import parallel as groups
    from tests.ssdtrain.megatron.standin import cpu_for_cuda

    with cpu_for_cuda():
        groups.start(groups.Parallel(**own.split), 7, experts=own.experts)
        yield
        groups.stop()


def main(out: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found: dict[str, Any] = {}
    for name, layout in layouts().items():
        if names and name not in names:
            continue
        around: Any = contextlib.nullcontext()
        if layout.groups is not None:
            around = megatron_groups(layout.groups)
        began = time.process_time()
        with around:
            found[name] = compared(layout)
        print(name, round(time.process_time() - began, 2), "s of CPU", flush=True)
        told = json.dumps(found)
        (out / f"rank{dist.get_rank()}.json").write_text(told)
    print("all", round(time.process_time(), 2), "s of CPU", flush=True)
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
