"""The first law where graphs are entered or left in unusual ways.

Autocast inside the model, second derivatives, transforms of torch.func, compiled and
sharded modules; losses, gradients and parameters are compared as bytes under every
plan, with recipes and regions.
"""

import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, linearize, vmap
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import ssdtrain
from tests.ssdtrain.bits import same_bits

NUM_STEPS, ROWS, WIDTH = 5, 8, 16
PLANS: list[dict[str, Any]] = [
    {"plan": "keep-all"},
    {"plan": "offload-all", "window_bytes": 1},
    {"plan": "offload-all", "window_bytes": 1, "recompute": "off"},
    {"plan": "offload-all", "window_bytes": 1, "recompute": "full", "target": "ssd"},
    {"plan": "keep-all", "recompute": "regions"},
    {"plan": "auto", "max_overhead": 1.0},
]
NAMES = ["keep", "move", "move alone", "full to ssd", "regions", "auto"]


class Block(nn.Module):
    """Norm, MLP, dropout, residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """(ROWS, WIDTH) to the same."""
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Mixed(nn.Module):
    """Autocast is entered, left and entered again inside the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Block(), Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        """(ROWS, WIDTH) to the same."""
        with torch.autocast("cpu", torch.bfloat16):
            x = self.first(x)
            with torch.autocast("cpu", enabled=False):
                x = self.second(x.float())
            x = F.silu(self.third(x))
        return self.third(x.float())


def mixed() -> nn.Module:
    return Mixed()


def blocks() -> nn.Module:
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH))


def smooth() -> nn.Module:
    """Whose second derivative is not zero, without dropout."""
    layers = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH))
        for _ in range(2)
    ]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def compiled() -> nn.Module:
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH))
    model[0].compile(backend="aot_eager")
    return model


def compiled_whole() -> nn.Module:
    model = nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH))
    model.compile(backend="aot_eager")
    return model


def sharded(policy: MixedPrecisionPolicy) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH))
        mesh = dist.init_device_mesh("cpu", (1,))
        for layer in model:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)

    return make


def backward(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).float().square().sum()
    loss.backward()
    return loss


def hessian(model: nn.Module, x: Tensor) -> Tensor:
    """Of the loss by the input, row by row, then a backward through all of it."""
    x = x[:2, :].requires_grad_()
    (first,) = torch.autograd.grad(model(x).square().sum(), [x], create_graph=True)
    rows = [
        torch.autograd.grad(first.view(-1)[i], [x], create_graph=True)[0]
        for i in range(4)
    ]
    loss = torch.stack(rows).square().sum()
    loss.backward()
    return loss


Loss = Callable[[Tensor], Tensor]
Tool = Callable[[nn.Module, Loss, Tensor], Any]


def hessian_of_torch(model: nn.Module, loss: Loss, x: Tensor) -> Tensor:
    found = torch.autograd.functional.hessian(loss, x[:1], create_graph=True)
    found.square().sum().backward()
    return found


def jacobian_of_torch(model: nn.Module, loss: Loss, x: Tensor) -> Tensor:
    found = torch.autograd.functional.jacobian(
        model, x[:2], vectorize=True, create_graph=True
    )
    found.square().sum().backward()
    return found


def batched(model: nn.Module, loss: Loss, x: Tensor) -> Tensor:
    """Several backwards at once, by vmap."""
    x = x.clone().requires_grad_()
    y = model(x)
    rows = torch.eye(y.numel()).view(-1, *y.shape)
    return torch.autograd.grad(y, x, rows, is_grads_batched=True)[0]


def batched_by_func(model: nn.Module, loss: Loss, x: Tensor) -> Tensor:
    """The same as torch's documentation of vmap has it."""
    x = x.clone().requires_grad_()
    y = model(x).sum(0)
    by = functools.partial(torch.autograd.grad, y, x)
    return vmap(lambda row: by(row, retain_graph=True)[0])(torch.eye(len(y)))


def traced(model: nn.Module, loss: Loss, x: Tensor) -> Tensor:
    found: Tensor = torch.jit.trace(model, (x,))(x)
    return found


def per_sample(model: nn.Module, loss: Loss, x: Tensor) -> list[Tensor]:
    def of_one(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(model, parameters, (row[None],)).square().sum()

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    found = vmap(grad(of_one), (None, 0))(parameters, x)
    return list(found.values())


def penalty(model: nn.Module, loss: Loss, x: Tensor) -> Tensor:
    """Of the gradient, by torch.func, into the parameters."""
    found = grad(loss)(x)
    found.square().sum().backward()
    return found


def forward_mode(model: nn.Module, loss: Loss, x: Tensor) -> Tensor:
    """A tangent, and a backward through it."""
    y, tangent = jvp(model, (x,), (torch.ones_like(x),))
    (tangent.square().sum() + y.sum()).backward()
    return tangent


TOOLS: dict[str, Tool] = {
    "hvp": lambda m, f, x: torch.autograd.functional.hvp(f, x, torch.ones_like(x)),
    "vhp": lambda m, f, x: torch.autograd.functional.vhp(f, x, torch.ones_like(x)),
    "hessian": hessian_of_torch,
    "jacobian": jacobian_of_torch,
    "is_grads_batched": batched,
    "func.vmap of gradients": batched_by_func,
    "jit.trace": traced,
    "func.grad": penalty,
    "func.vmap": lambda m, f, x: vmap(lambda row: m(row[None])[0])(x),
    "func.vmap grad": per_sample,
    "func.jacrev": lambda m, f, x: jacrev(m)(x[:2]),
    "func.jacfwd": lambda m, f, x: jacfwd(m)(x[:2]),
    "func.jvp": forward_mode,
    "func.linearize": lambda m, f, x: linearize(m, x)[1](torch.ones_like(x)),
}


def with_tool(tool: Tool) -> Callable[[nn.Module, Tensor], Tensor]:
    """A step that uses the tool, and trains beside it."""

    def step(model: nn.Module, x: Tensor) -> Tensor:
        def loss_of(x: Tensor) -> Tensor:
            return model(x).square().sum()

        found = tool(model, loss_of, x)
        loss = loss_of(x)
        loss.backward()
        parts = tree_leaves(found)
        return torch.cat([part.detach().flatten() for part in (*parts, loss)])

    return step


STEPS = {name: with_tool(tool) for name, tool in TOOLS.items()}


def train(
    make: Callable[[], nn.Module],
    step: Callable[[nn.Module, Tensor], Tensor],
    settings: dict[str, Any] | None,
) -> tuple[list[Tensor], int]:
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    session = None
    directory = None
    if settings is not None:
        settings = {"max_overhead": 0.01, "target": "host", "min_bytes": 0, **settings}
        if settings["target"] == "ssd":
            directory = settings["directory"] = tempfile.mkdtemp()
        session = ssdtrain.offload(model, **settings)
    found, saved = [], 0
    for number in range(NUM_STEPS):
        torch.manual_seed(number)
        found.append(step(model, torch.randn(ROWS, WIDTH)).detach())
        found += [local(p.grad) for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    found += [local(parameter.detach()) for parameter in model.parameters()]
    if session is not None:
        saved = sum(report.bytes_saved for report in session.steps)
        session.close()
    if directory is not None:
        shutil.rmtree(directory)
    return found, saved


@functools.cache
def reference(
    make: Callable[[], nn.Module], step: Callable[[nn.Module, Tensor], Tensor]
) -> list[Tensor]:
    return train(make, step, None)[0]


def local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor).clone()


def check(
    make: Callable[[], nn.Module],
    step: Callable[[nn.Module, Tensor], Tensor],
    settings: dict[str, Any],
) -> None:
    theirs = reference(make, step)
    ours, saved = train(make, step, settings)
    assert saved > 0
    assert same_bits(ours, theirs)


@pytest.mark.parametrize("settings", PLANS, ids=NAMES)
@pytest.mark.parametrize("make", [mixed, blocks])
def test_autocast_inside_the_model(
    make: Callable[[], nn.Module], settings: dict[str, Any]
) -> None:
    check(make, backward, settings)


@pytest.mark.parametrize("settings", PLANS, ids=NAMES)
def test_second_derivatives(settings: dict[str, Any]) -> None:
    check(smooth, hessian, settings)


# torch's own decompositions and tracer.
@pytest.mark.filterwarnings("ignore:.torch.jit", "ignore:Attempted to insert")
@pytest.mark.parametrize(
    ("tool", "settings"),
    [
        pytest.param(tool, settings, id=f"{tool}-{name}")
        for tool in TOOLS
        for name, settings in zip(NAMES, PLANS, strict=True)
        # It traces the model anew in each step: seconds.
        if tool != "func.linearize" or name in ("full to ssd", "regions")
    ],
)
def test_functional_tools(tool: str, settings: dict[str, Any]) -> None:
    check(smooth, STEPS[tool], settings)


@pytest.mark.parametrize("settings", PLANS, ids=NAMES)
@pytest.mark.parametrize("tool", ["is_grads_batched", "func.vmap of gradients"])
def test_several_backwards_at_once_through_dropout(
    tool: str, settings: dict[str, Any]
) -> None:
    check(blocks, STEPS[tool], settings)


class Changing(nn.Module):
    """Changes what autograd has saved."""

    is_allowed = False

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(ROWS, WIDTH) to the same."""
        x = torch.sigmoid(self.up(x))
        y = self.down(x)
        if self.is_allowed:
            x.add_(1)
        return x + y


def changing() -> nn.Module:
    return nn.Sequential(Changing(), Changing())


def mutating(model: nn.Module, x: Tensor) -> Tensor:
    """Where torch clones what is changed after it was saved, and where it does not."""
    for layer in model.children():
        layer.is_allowed = True
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        backward(model, x)
    for layer in model.children():
        layer.is_allowed = False
    return backward(model, x)


@pytest.mark.parametrize("settings", PLANS, ids=NAMES)
def test_saved_tensors_that_may_be_changed(settings: dict[str, Any]) -> None:
    check(changing, mutating, settings)


@pytest.mark.parametrize("settings", PLANS, ids=NAMES)
@pytest.mark.parametrize("make", [compiled, compiled_whole])
def test_compiled_in_place(
    make: Callable[[], nn.Module], settings: dict[str, Any]
) -> None:
    check(make, backward, settings)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("settings", PLANS, ids=NAMES)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_fsdp2(dtype: torch.dtype | None, settings: dict[str, Any]) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    check(sharded(policy), backward, settings)
