"""Random models that train for a few steps and then do something else.

Recipes are admitted and plans compiled in the first steps; from step `TURN` on, the
surprises that the seed drew begin: writes under no_grad, other epsilons, optimizers
between two backwards, foreign ones among them, draws of other threads, modes, hooks,
changed attributes, forward mode, forks, and forwards of other operators, other sizes,
twice, in other orders or without a backward. The judge compares every gradient of every
step as bytes with the run without ssdtrain.

Plans are random ones of the observed step: a search costs more than the steps, and
would always choose the same.
"""

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import ssdtrain
from ssdtrain.plan import search
from ssdtrain.plan.choose import options
from ssdtrain.plan.placement import AGAIN_PLACEMENTS, Placements
from ssdtrain.plan.plan import Plan
from ssdtrain.plan.profile import Profile
from ssdtrain.plan.regions import by_yield, part_items, spread, with_regions
from ssdtrain.plan.schedule import Style, schedule
from ssdtrain.plan.timeline import Timeline

ROWS, WIDTH = 4, 8
NUM_STEPS, TURN = 8, 4
"""Step 0 warms up, 1 is observed, 2 is the first under a plan, which 3 follows as a
table."""
DATA_ROWS = 64
PLANS: list[dict[str, Any]] = [
    {"plan": "keep-all"},
    {"plan": "offload-all", "window_bytes": 1},
    {"plan": "auto", "max_overhead": 1.0},
]
RANDOM = "random"
"""Policy of the plans that are drawn."""
CHILD_S = 60
"""A forked child that takes longer hangs."""


class Norm(nn.Module):
    """A norm of pure code: what it makes on the way is nobody's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.eps = 1e-3

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float64)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Twice(TorchDispatchMode):
    """Doubles what a GELU gives, below autograd."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is torch.ops.aten.gelu.default else found


class Model(nn.Module):
    """A random chain of operators over a few live tensors."""

    def __init__(self, seed: int, features: Counter[str]) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm, self.rms, self.own = (
            nn.LayerNorm(WIDTH),
            nn.RMSNorm(WIDTH),
            Norm(),
        )
        self.drop = nn.Dropout(0.4)
        self.seed, self.features = seed, features
        self.number = 0
        self.kind = 0
        """Of the forward: which operators."""
        draw = random.Random(seed)
        self.surprises = {
            name for name in SURPRISES if draw.random() < 2 / len(SURPRISES)
        }
        self.length = draw.randint(3, 8)
        self.scripted = torch.jit.script(Tanh()) if is_scripted(seed) else Tanh()
        self.autocast = draw.random() < 0.3

    def surprised(self, name: str) -> bool:
        """Whether this surprise happens now."""
        happens = self.number >= TURN and name in self.surprises
        self.features[name] += happens
        return happens

    def forward(self, x: Tensor) -> Tensor:
        draw = random.Random(self.seed + 1 + 1000 * self.kind)
        live = [self.linears[0](x)]
        late = random.Random(self.seed + self.number)
        with ExitStack() as stack:
            if self.surprised("mode"):
                stack.enter_context(Twice())
            if self.autocast:
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            for _ in range(self.length):
                name = draw.choice(list(OPERATORS))
                source = live[-1 - int(draw.random() ** 2 * len(live))]
                self.features[name] += 1
                live.append(OPERATORS[name](self, source))
                if self.surprised("early end") and late.random() < 0.2:
                    break
                if self.surprised("more operators") and late.random() < 0.2:
                    live.append(torch.sigmoid(live[-1]))
                if self.surprised("metric"):
                    live[-1].float().square().mean()  # saves it, on no path
                if self.surprised("write") and late.random() < 0.4:
                    write(late, live)
            result = sum(each.float().square().mean() for each in live[-3:])
        return self.linears[1](live[-1].float()).sum() + result


class Tanh(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * x


def write(late: random.Random, live: list[Tensor]) -> None:
    """Change a live tensor where autograd does not look."""
    target = late.choice(live)
    with torch.no_grad():
        late.choice(
            (
                lambda: target.clamp_(-0.1, 0.1),
                lambda: target.mul_(0.5),
                lambda: target.detach().add_(0.25),
                lambda: target.view(-1)[:3].zero_(),
            )
        )()


def layer_norm(model: Model, x: Tensor) -> Tensor:
    if model.surprised("foreign epsilon"):
        return F.layer_norm(x, (WIDTH,), model.norm.weight, model.norm.bias, 0.3)
    return model.norm(x)


def rms_norm(model: Model, x: Tensor) -> Tensor:
    model.rms.eps = 0.3 if model.surprised("attribute") else 1e-3
    return model.rms(x)


def own_norm(model: Model, x: Tensor) -> Tensor:
    model.own.eps = 0.3 if model.surprised("attribute") else 1e-3
    return model.own(x)


def dropout(model: Model, x: Tensor) -> Tensor:
    model.drop.p = 0.2 if model.surprised("attribute") else 0.4
    if model.surprised("thread"):
        thread = threading.Thread(target=lambda: torch.rand(3))
        thread.start()
        thread.join()
    return model.drop(x)


def hooked(model: Model, x: Tensor) -> Tensor:
    """A norm whose result a hook changes in place."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        with torch.no_grad():
            output.mul_(0.5)

    if not model.surprised("hook"):
        return model.norm(x)
    handle = model.norm.register_forward_hook(hook)
    try:
        return model.norm(x)
    finally:
        handle.remove()


def cast(model: Model, x: Tensor) -> Tensor:
    weight = model.linears[2].weight.to(torch.float64)
    if model.surprised("cast weight"):
        with torch.no_grad():
            model.linears[2].weight.mul_(0.9)
    return F.linear(x.double(), weight).float()


Operator = Callable[[Model, Tensor], Tensor]
OPERATORS: dict[str, Operator] = {
    "linear": lambda m, x: m.linears[2](x.float()),
    "gelu": lambda m, x: F.gelu(x),
    "silu": lambda m, x: F.silu(x),
    "tanh": lambda m, x: torch.tanh(x),
    "sigmoid": lambda m, x: torch.sigmoid(x),
    "square": lambda m, x: x.square(),
    "product": lambda m, x: x * torch.tanh(x),
    "sum": lambda m, x: F.gelu(x) + x.square(),
    "copy": lambda m, x: F.gelu(x).t().contiguous().t(),
    "narrow": lambda m, x: x.bfloat16().float(),
    "layer norm": layer_norm,
    "rms norm": rms_norm,
    "own norm": own_norm,
    "dropout": dropout,
    "hooked": hooked,
    "cast": cast,
    "scripted": lambda m, x: m.scripted(x.float()),
}
# Every operator gives WIDTH columns in float32, or in autocast's dtype.
FLOATING = ("layer norm", "rms norm", "own norm", "hooked", "dropout")
for _name in FLOATING:
    OPERATORS[_name] = (lambda of: lambda m, x: of(m, x.float()))(OPERATORS[_name])
SURPRISES = ("write", "foreign epsilon", "attribute", "thread", "mode", "hook")
SURPRISES += ("cast weight", "optimizer", "forward mode", "metric", "foreign optimizer")
SURPRISES += ("other operators", "other size", "early end", "more operators", "twice")
SURPRISES += ("two forwards", "no backward", "evaluation", "fork", "large base")


@contextmanager
def random_plans(plan_of: Callable[[Profile], Plan]) -> Iterator[None]:
    """The planner draws its plans instead of searching for them."""

    def choose(profile: Profile, *args: Any, **settings: Any) -> Plan:
        return plan_of(profile)

    with mock.patch.object(search, "choose", choose):
        yield


def random_plan(profile: Profile, draw: random.Random) -> Plan:
    """A plan of the observed step: anything that may happen, regions included."""
    timeline = Timeline(profile)
    drawn = {
        kind: [draw.choice(options(timeline, item)) for item in items]
        for kind, items in profile.kinds.items()
    }
    placements: Placements = drawn
    regions = spread(timeline)
    if regions:
        chosen = draw.sample(regions, draw.randint(0, len(regions)))
        storing = [each for each in by_yield(timeline) if draw.random() < 0.7]
        for kind, number in storing:
            for item in part_items(timeline, (kind, number)):
                allowed = options(timeline, profile.kinds[kind][item])
                stays = [each for each in allowed if each not in AGAIN_PLACEMENTS]
                drawn[kind][item] = draw.choice(stays)
        placements = with_regions(timeline, drawn, chosen, storing)
    window = draw.choice([None, 1, 1 << 9])
    orders = schedule(timeline, placements, Style(window_bytes=window))
    return Plan(orders=orders, policy=RANDOM)


def is_scripted(seed: int) -> bool:
    """Whether this model has a scripted part."""
    return seed % 16 == 0


def train(seed: int, settings: dict[str, Any] | None, features: Counter[str]) -> Any:
    """Gradients of every step as bytes; a string where a step raised."""
    if settings is None and is_scripted(seed):
        # TorchScript compiles what it has run before: the first run has other bits.
        train_model(Model(seed, Counter()), seed, None, Counter())
    return train_model(Model(seed, features), seed, settings, features)


def train_model(
    model: Model, seed: int, settings: dict[str, Any] | None, features: Counter[str]
) -> Any:
    data = torch.randn(DATA_ROWS, WIDTH)
    optimizer = adam(model, seed)

    def one(session: ssdtrain.Session | None) -> Sequence[Tensor]:
        step(model, inputs(model, data), optimizer, session is not None)
        return ()

    if settings is not None:
        settings = {"min_bytes": 0, **settings}
    draw = random.Random(seed)
    plans = random_plans(lambda profile: random_plan(profile, draw))
    return judged_steps(model, optimizer, NUM_STEPS, settings, plans, one, features)


def adam(model: nn.Module, seed: int) -> torch.optim.Optimizer:
    kind = [{"fused": True}, {"foreach": True}, {}][seed % 3]
    return torch.optim.AdamW(model.parameters(), lr=0.01, **kind)


def judged_steps(
    model: Any,
    optimizer: torch.optim.Optimizer,
    num_steps: int,
    settings: dict[str, Any] | None,
    plans: AbstractContextManager[None],
    one: Callable[[ssdtrain.Session | None], Sequence[Tensor]],
    features: Counter[str],
    before: Callable[[ssdtrain.Session | None], object] = lambda session: None,
) -> list[Any]:
    """What each step tells and its gradients as bytes; a string where one raised.

    Args:
        settings: of the session; None: plain autograd.
        one: runs a step.
        before: is called before each step.
    """
    session, found = None, list[Any]()
    with ExitStack() as stack:
        if settings is not None:
            stack.enter_context(plans)
            session = ssdtrain.offload(model, target="host", **settings)
            stack.callback(session.close)
        for model.number in range(num_steps):
            torch.manual_seed(model.number)
            optimizer.zero_grad(set_to_none=True)
            before(session)
            try:
                told = one(session)
            except RuntimeError as error:
                found.append(f"raised {'inplace' in str(error)}")
                break
            grads = (p.grad for p in model.parameters())
            found.append([as_bytes(each) for each in (*told, *grads)])
            optimizer.step()
    if session is not None and session.plan is not None:
        features["planned"] += session.plan.policy == RANDOM
    return found


def inputs(model: Any, data: Tensor) -> Tensor:
    """Rows of the data, a view of all of them."""
    rows = 2 * ROWS if model.surprised("other size") and model.number % 2 else ROWS
    x = data[model.number : model.number + rows]
    if model.surprised("large base"):
        return x.clone().requires_grad_()[:, :]
    return x


def nothing(losses: list[Tensor]) -> None:
    """Between forward and backward."""


def step(
    model: Any,
    x: Tensor,
    optimizer: torch.optim.Optimizer,
    offloaded: bool,
    between: Callable[[list[Tensor]], None] = nothing,
) -> None:
    """Forward and backward, with what happens around them."""
    model.kind = int(model.surprised("other operators") and model.number % 2)
    if model.surprised("forward mode"):
        with forward_ad.dual_level():
            loss = model(forward_ad.make_dual(x, torch.ones_like(x)))
            between([loss])
            loss.backward()
        return
    optimizers = model.surprised("optimizer"), model.surprised("foreign optimizer")
    losses = forwards(model, x, two=any(optimizers))
    between(losses)
    if model.surprised("fork") and offloaded:
        in_a_child(losses[0])
    for number, loss in enumerate(losses):
        if model.surprised("twice"):
            loss.backward(retain_graph=True)
        if model.surprised("parts"):
            own = [p for p in model.parameters() if p.requires_grad]
            torch.autograd.grad(loss, own[::3], retain_graph=True, allow_unused=True)
        if model.surprised("penalty"):
            penalty(model, loss)
        loss.backward()
        if number + 1 < len(losses):
            if optimizers[0]:
                optimizer.step()
            if optimizers[1]:
                foreign_step(model)


def forwards(model: Any, x: Tensor, two: bool) -> list[Tensor]:
    """Losses of a step, in the order of their backwards."""
    if model.surprised("evaluation"):
        with torch.no_grad():
            model(x)
    if model.surprised("no backward"):
        model(x)
    losses = [model(x)]
    crossed = model.surprised("two forwards")
    if two or crossed:
        losses.append(model(x + 1))
    return losses[::-1] if crossed else losses


def penalty(model: nn.Module, loss: Tensor) -> None:
    """A backward through the gradients."""
    own = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, own, create_graph=True, allow_unused=True)
    squares = [each.square().sum() for each in found if each is not None]
    if squares:  # the weights may be others by now
        torch.stack(squares).sum().backward(retain_graph=True)


def foreign_step(model: nn.Module) -> None:
    """An optimizer that `torch.optim` does not know."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.01)


def in_a_child(loss: Tensor) -> None:
    """A fork that runs this backward as well: equal, or an error, and no hang."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(CHILD_S)
        try:
            loss.backward()
        except RuntimeError:
            os._exit(0)  # of what was moved, or as plain raises
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        raise AssertionError(f"a forked child ended with {code}")


def as_bytes(gradient: Tensor | None) -> bytes | None:
    if gradient is None:
        return None
    return gradient.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def difference(ours: list[Any], theirs: list[Any]) -> str | None:
    """What is silently different; None if all is equal, or ours has raised."""
    for number, mine in enumerate(ours):
        if isinstance(mine, str):
            return None
        if number >= len(theirs) or mine != theirs[number]:
            return f"step {number}: gradients differ, or plain raised"
    return None if len(ours) == len(theirs) else "fewer steps"


def raised_alone(ours: list[Any], theirs: list[Any]) -> bool:
    """Whether ours raised where plain autograd ran: allowed, and counted."""
    return isinstance(ours[-1], str) and not isinstance(theirs[len(ours) - 1], str)


def may_raise(generator: Any, seed: int) -> bool:
    """Whether ssdtrain may raise alone in this model."""
    found: bool = getattr(generator, "may_raise", lambda seed: True)(seed)
    return found
