"""Models on device meshes, with and without ssdtrain; run by `test_meshes.py`.

Every case is trained twice on the same data; each rank says what was equal, what moved
and which plan it followed. All cases share one start of the processes.
"""

import contextlib
import json
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ssdtrain
from ssdtrain.cache.cache import TensorCache
from ssdtrain.cache.run import Run
from ssdtrain.plan.plan import Plan
from tests.ranks import LONGEST_S, leave
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.cache.plans import (
    all_moved,
    every_other_moved,
    misnamed,
    none_again,
)
from tests.ssdtrain.written import written_before_backward

WIDTH, ROWS, LAYERS, NUM_STEPS = 16, 8, 2, 6


class Block(nn.Module):
    """Norm, MLP, residual."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=bias)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, ROWS, WIDTH) to the same."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks and a head."""

    def __init__(self, *, spare: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.spare = nn.Linear(WIDTH, WIDTH) if spare else None
        self.asks_for_spare = False
        self.checkpoints = False

    def forward(self, x: Tensor) -> Tensor:
        """(batch, ROWS, WIDTH) to the same."""
        x = self.first(x)
        for layer in self.layers:
            if self.checkpoints:
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        if self.spare is not None and self.asks_for_spare:
            x = self.spare(x)
        return self.head(self.norm(x))


# -- how a model is spread ------------------------------------------------------------


def sharded(
    dtype: torch.dtype | None, reshard: bool
) -> Callable[[DeviceMesh], nn.Module]:
    """FSDP2 by layer."""

    def make(mesh: DeviceMesh) -> nn.Module:
        model = Model()
        policy = MixedPrecisionPolicy(dtype, None if dtype is None else torch.float32)
        for part in (*model.layers, model):
            fully_shard(
                part, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard
            )
        return model

    return make


def nested(reshard: bool) -> Callable[[DeviceMesh], nn.Module]:
    """FSDP2 by layer, and a part of each layer by itself, as experts are."""

    def make(mesh: DeviceMesh) -> nn.Module:
        model = Model()
        inner = list(model.layers)
        model.layers = nn.ModuleList(nn.Sequential(nn.Tanh(), each) for each in inner)
        for part in (*inner, *model.layers, model):
            fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
        return model

    return make


def split(model: Model, mesh: DeviceMesh) -> None:
    """Tensor parallel with sequence parallel between, as torchtitan does it."""
    block = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    plan = {
        "first": ColwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
        "layers.*.norm": block["norm"],
        "layers.*.up": block["up"],
        "layers.*.down": block["down"],
    }
    parallelize_module(model, mesh, plan)


def parallel(mesh: DeviceMesh) -> nn.Module:
    model = Model()
    split(model, mesh)
    return model


def parallel_and_sharded(mesh: DeviceMesh) -> nn.Module:
    model = Model()
    split(model, mesh["tp"])
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh["dp"])
    return model


def replicated(**settings: Any) -> Callable[[DeviceMesh], nn.Module]:
    def make(mesh: DeviceMesh) -> nn.Module:
        model = Model(spare=settings.get("find_unused_parameters", False))
        return DistributedDataParallel(
            model, process_group=mesh.get_group(), **settings
        )

    return make


# -- how it is trained ----------------------------------------------------------------


class Case:
    """One model, one way to train it."""

    def __init__(
        self,
        make: Callable[[DeviceMesh], nn.Module],
        *,
        parts: int = 1,
        uneven: bool = False,
        slow_ms: float = 0.0,
        num_steps: int = NUM_STEPS,
    ) -> None:
        self.make = make
        self.num_steps = num_steps
        self.parts = parts
        """Micro-batches of a step; gradients are reduced in the last one."""
        self.uneven = uneven
        """Whether rank 1 has fewer steps."""
        self.slow_ms = slow_ms
        """By how much every block of rank 1 is slower, forward."""

    def last_only(self, model: nn.Module, part: int) -> Any:
        """Reduce gradients behind the last micro-batch alone."""
        last = part == self.parts - 1
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
        elif isinstance(model, DistributedDataParallel) and not last:
            return model.no_sync()
        return contextlib.nullcontext()


class Spy:
    """What one training did beside its losses."""

    def __init__(self) -> None:
        self.general: list[int] = []
        self.rows: list[int] = []
        self.plans: list[int] = []
        self.agreed: Plan | None = None
        """The plan that the ranks agreed on."""
        self.strays: list[int] = []
        """Lanes of each step that did not fit their plan."""
        self.report: dict[str, Any] = {}


@contextlib.contextmanager
def watched(spy: Spy) -> Iterator[None]:
    """Count calls of the general path and rows that were followed."""
    pack, hooks = TensorCache.pack, Run.hooks

    def packing(self: Any, tensor: Tensor) -> Any:
        spy.general[-1] += 1
        return pack(self, tensor)

    def hooking(self: Any) -> Any:
        spy.rows[-1] += len(self._table.rows) - 1
        return hooks(self)

    TensorCache.pack, Run.hooks = packing, hooking  # type: ignore[method-assign]
    try:
        yield
    finally:
        TensorCache.pack, Run.hooks = pack, hooks  # type: ignore[method-assign]


def batch(step: int, part: int, rank: int, device: torch.device) -> Tensor:
    draw = torch.Generator().manual_seed(100 * step + 10 * part + rank)
    return torch.randn(2, ROWS, WIDTH, generator=draw).to(device)


def digest(plan: Plan | None) -> int:
    """Of what a plan orders, without what it predicts."""
    return 0 if plan is None else zlib.crc32(repr(plan.orders).encode())


def whole(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach().clone()


def train(
    case: Case, mesh: DeviceMesh, settings: dict[str, Any] | None, data_rank: int
) -> tuple[list[Tensor], Spy]:
    """Losses, gradients of every step, and the weights behind the last one."""
    torch.manual_seed(0)
    device = torch.device(mesh.device_type)
    with device:
        model, spy, found = case.make(mesh), Spy(), []
    # On a GPU two steps more run without hooks, and the search goes on beside them.
    last = case.num_steps if device.type == "cpu" else 2 * case.num_steps
    slow_down(model, case.slow_ms * data_rank)
    session = None
    with contextlib.ExitStack() as stack:
        if settings is not None:
            stack.enter_context(watched(spy))
            session = stack.enter_context(
                ssdtrain.offload(model, min_bytes=0, **settings)
            )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        num_steps = last - data_rank if case.uneven else last
        if case.uneven:
            stack.enter_context(model.join())
        for step in range(num_steps):
            if session is not None:
                follow_another(session, last - step, spy)
            spy.general.append(0)
            spy.rows.append(0)
            found += run_step(case, model, step, data_rank, device)
            optimizer.step()
            optimizer.zero_grad()
            if session is not None:
                spy.plans.append(digest(session.plan))
                spy.strays.append(session.cache.cursor.num_strayed)
        if session is not None and session.last_step is not None:
            spy.report = session.last_step.as_dict()
    return found + [whole(p) for p in model.parameters()], spy


def slow_down(model: nn.Module, slow_ms: float) -> None:
    """Let every block take longer."""
    for part in model.modules():
        if isinstance(part, Block) and slow_ms:
            part.register_forward_pre_hook(lambda *_: time.sleep(slow_ms / 1e3))


def run_step(
    case: Case, model: nn.Module, step: int, rank: int, device: torch.device
) -> list[Tensor]:
    """Losses and gradients of one step."""
    found = []
    inner = getattr(model, "module", model)
    inner.asks_for_spare = step % 3 == 1
    for part in range(case.parts):
        with case.last_only(model, part):
            loss = model(batch(step, part, rank, device)).float().square().mean()
            if isinstance(loss, DTensor):
                loss = loss.full_tensor()
            loss.backward()
        found.append(loss.detach().clone())
    return found + [whole(p.grad) for p in model.parameters() if p.grad is not None]


def follow_another(session: ssdtrain.Session, num_left: int, spy: Spy) -> None:
    """Change the plan under way, behind the one that the ranks agreed on."""
    plan = session.plan
    if plan is None:
        return
    orders = [order for own in plan.orders.values() for order in own]
    if any(order.region >= 0 for order in orders):
        follow_without_regions(session, plan, num_left, spy)
    elif num_left == 3:
        session.follow(all_moved(session))
    elif num_left == 1:
        session.follow(every_other_moved(session))


def follow_without_regions(
    session: ssdtrain.Session, plan: Plan, num_left: int, spy: Spy
) -> None:
    """Let one rank stray alone, in a step whose regions run again; then none does."""
    if num_left == 4:
        spy.agreed = plan
        session.follow(misnamed(plan) if dist.get_rank() % 2 else plan)
    elif num_left == 3:
        session.follow(none_again(spy.agreed or plan))


HOST = {"max_overhead": 0.01, "target": "host", "plan": "auto"}
AT_ONCE = {"target": "host", "plan": "offload-all", "window_bytes": 1}


def cases() -> dict[str, tuple[Case, list[str]]]:
    """By name: a case, and the columns it is run under."""
    every: dict[str, tuple[Case, list[str]]] = {}
    for reshard in (True, False):
        for dtype in (None, torch.bfloat16):
            name = f"fsdp2 {'reshard' if reshard else 'keep'} {dtype or 'fp32'}"
            alike = reshard == (dtype is None)
            every[name] = Case(sharded(dtype, reshard)), ["auto", *["ssd"] * alike]
    every["fsdp2 slow rank"] = Case(sharded(None, True), slow_ms=5.0), ["auto"]
    for reshard in (True, False):
        name = f"fsdp2 nested {'reshard' if reshard else 'keep'}"
        # Some steps of regions are measured before there is a plan.
        every[name] = Case(nested(reshard), num_steps=NUM_STEPS + 4), ["regions"]
    accumulated = Case(sharded(None, True), parts=2)
    every["fsdp2 accumulated"] = accumulated, ["auto"]
    every["tp"] = Case(parallel), ["auto", "shadow"]
    every["tp regions"] = Case(parallel, num_steps=NUM_STEPS + 6), ["regions"]
    every["fsdp2 x tp"] = Case(parallel_and_sharded), ["auto", "at once"]
    every["ddp"] = Case(replicated()), ["auto"]
    every["ddp static"] = Case(replicated(static_graph=True)), ["auto"]
    unused = replicated(find_unused_parameters=True)
    every["ddp unused"] = Case(unused), ["auto"]
    every["ddp accumulated"] = Case(replicated(), parts=2), ["auto"]
    every["ddp uneven"] = Case(replicated(), uneven=True), ["auto"]
    return every


def columns(directory: str) -> dict[str, dict[str, Any]]:
    return {
        "auto": HOST,
        "at once": AT_ONCE,
        "regions": {**HOST, "recompute": "regions"},
        "shadow": {**AT_ONCE, "verify": "shadow"},
        "ssd": {
            "max_overhead": 0.01,
            **AT_ONCE,
            "target": "ssd",
            "directory": directory,
        },
    }


def compared(
    case: Case,
    mesh: DeviceMesh,
    column: dict[str, Any],
    data_rank: int,
    theirs: list[Tensor],
) -> dict[str, Any]:
    with written_before_backward():
        ours, spy = train(case, mesh, column, data_rank)
    equal = len(ours) == len(theirs) and same_bits(ours, theirs)
    return {
        "equal": equal,
        "general": spy.general,
        "rows": spy.rows,
        "plans": spy.plans,
        "strays": spy.strays,
        "report": spy.report,
    }


def main(rank: int, world: int, out: Path, names: list[str], kind: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(LOCAL_WORLD_SIZE=str(world), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    if kind == "cuda":
        torch.cuda.set_device(rank)
        torch.use_deterministic_algorithms(True)
    dist.init_process_group(
        "gloo" if kind == "cpu" else "nccl",
        store=dist.FileStore(str(out / "store"), world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=LONGEST_S),
    )
    shape = (world // 2, 2)
    square = init_device_mesh(kind, shape, mesh_dim_names=("dp", "tp"))
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        for number, (name, (case, wanted)) in enumerate(cases().items()):
            both = name == "fsdp2 x tp"
            # Two of four ranks do one half of the cases, and two the other.
            others = not both and number % (world // 2) != rank // 2
            if others or (names and name not in names) or (both and world < 4):
                continue
            mesh = square if both else square["tp"]
            place = rank // 2 if both else rank % 2
            if name.startswith("tp"):
                place = 0  # one batch for all
            theirs, _ = train(case, mesh, None, place)
            for column in wanted:
                settings = columns(directory)[column]
                told = compared(case, mesh, settings, place, theirs)
                found[f"{name}/{column}"] = told
    (out / f"rank{rank}.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    import torch.multiprocessing as mp

    # OUT DEVICE [CASE ...]: one rank of a launcher's; without one, a rank for each GPU.
    given = Path(sys.argv[1]), sys.argv[3:], sys.argv[2]
    if "RANK" in os.environ:
        main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), *given)
    else:
        ranks = torch.cuda.device_count()
        mp.spawn(main, (ranks, *given), nprocs=ranks)
