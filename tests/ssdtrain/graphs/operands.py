"""Random models whose recipes read what the rows of a table keep and move.

Most of what can be made again is made again, all else stays or moves, and from step
`TURN` on the program does what a row must notice: it saves other views of the same
bytes (conjugated, complex, of other strides), other lengths, writes to operands before
a backward or between two, runs parts of a backward, or one through gradients, crosses
the backwards of two forwards, checkpoints, has hooks of its own, and follows other
plans. The judge is that of `surprises.py`.
"""

import random
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ssdtrain
from ssdtrain.plan.choose import options
from ssdtrain.plan.placement import AGAIN_PLACEMENTS
from ssdtrain.plan.plan import Plan
from ssdtrain.plan.profile import Profile
from ssdtrain.plan.schedule import Style, schedule
from ssdtrain.plan.timeline import Timeline
from tests.ssdtrain.graphs.surprises import (
    RANDOM,
    Norm,
    adam,
    judged_steps,
    penalty,
    random_plans,
)

ROWS, WIDTH = 4, 8
NUM_STEPS, TURN = 10, 5
"""Step 2 is the first under a plan, which 3 follows as a table."""
PLANS: list[dict[str, Any]] = [
    {"plan": "auto", "max_overhead": 1.0, "min_bytes": 1},
    {"plan": "auto", "max_overhead": 1.0, "min_bytes": 100},
]
WRITES = ("write before backward", "write between backwards", "write in forward")
SURPRISES = (*WRITES, "other view", "other length", "twice", "parts", "penalty")
SURPRISES += ("crossed", "half crossed", "checkpoint", "hooks", "other plan", "dropped")
SURPRISES += ("plan between", "autocast", "epsilon", "evaluation", "other operators")
SURPRISES += ("dead first", "released first")


class Model(nn.Module):
    """A random chain of operators over a few live tensors."""

    def __init__(self, seed: int, features: Counter[str]) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm, self.rms, self.own = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH), Norm()
        self.seed, self.features = seed, features
        self.number = self.kind = 0
        self.live: list[Tensor] = []
        draw = random.Random(seed)
        self.surprises = {
            name for name in SURPRISES if draw.random() < 2.5 / len(SURPRISES)
        }
        self.length = draw.randint(4, 10)

    def surprised(self, name: str) -> bool:
        """Whether this surprise happens now."""
        happens = self.number >= TURN and name in self.surprises
        self.features[name] += happens
        return happens

    def forward(self, x: Tensor) -> Tensor:
        draw = random.Random(self.seed + 1 + 1000 * self.kind)
        late = random.Random(self.seed + self.number)
        self.live = live = [self.linears[0](x)]
        with ExitStack() as stack:
            if self.surprised("autocast"):
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            for _ in range(self.length):
                name = draw.choice(list(OPERATORS))
                source = live[-1 - int(draw.random() ** 2 * len(live))]
                function = OPERATORS[name]
                self.features[name] += 1
                if self.surprised("checkpoint") and late.random() < 0.3:
                    again = late.random() < 0.5
                    made = checkpoint(function, self, source, late, use_reentrant=again)
                else:
                    made = function(self, source, late)
                live.append(made)
                if self.surprised("write in forward") and late.random() < 0.2:
                    write(late, live)
            result = sum(each.float().square().mean() for each in live[-3:])
        return self.linears[1](live[-1].float()).sum() + result


def write(late: random.Random, live: list[Tensor]) -> None:
    """Change a live tensor where autograd only counts it."""
    target = late.choice(live)
    with torch.no_grad():
        late.choice(
            (
                lambda: target.mul_(0.5),
                lambda: target.detach().add_(0.25),
                lambda: target.view(-1)[:3].zero_(),
                lambda: (target if target._base is None else target._base).add_(0.1),
            )
        )()


def gate(model: Model, x: Tensor, late: random.Random) -> Tensor:
    """Both are saved by several."""
    g = F.silu(x)
    return g * x + torch.tanh(g) * g


def views(model: Model, x: Tensor, late: random.Random) -> Tensor:
    """Views of one activation."""
    h = F.gelu(x.float() @ model.linears[2].weight)
    top, low = h[:, : WIDTH // 2], h[:, WIDTH // 2 :]
    if model.surprised("other view"):
        top, low = low, top
    made = torch.cat((top * low.sigmoid(), low * top.exp().clamp(max=2)), -1)
    return made + h.t().contiguous().t() * h.view(-1).view(h.shape)


def paired(model: Model, x: Tensor, late: random.Random) -> Tensor:
    """Complex numbers: views of other dtypes, conjugated ones."""
    h = torch.tanh(x.float()) * 0.5
    pairs = h.view(len(h), -1, 2)
    z = torch.view_as_complex(pairs)
    u = torch.complex(h[:, ::2].contiguous(), h[:, 1::2].contiguous())
    p = u * u.cos()
    if model.surprised("other view"):
        what = late.randrange(5)
        if what == 0:
            p = p + u.conj() * p
        elif what == 1:
            p = p * u * z.conj()
        elif what == 2:
            p = p + torch.complex(u.conj().imag * u.imag, u.real)
        elif what == 3:
            real = torch.view_as_real(u)
            p = p + torch.view_as_complex(real * real.sin())
        else:
            p = u * u[:1].expand(u.shape)
    else:
        p = p + u * p
    made = torch.view_as_real(p * z).reshape(h.shape)
    return made + (pairs * pairs.exp()).reshape(h.shape)


def spread(model: Model, x: Tensor, late: random.Random) -> Tensor:
    """What is as large as its base and repeats a part of it."""
    h = torch.sigmoid(x.float())
    if model.surprised("other view"):
        what = late.randrange(3)
        if what == 0:
            return h[1:2].expand(h.shape) * h
        if what == 1:
            return h.view(-1).as_strided(h.shape, (1, 1)) * torch.tanh(h)
        return h.t().reshape(h.shape) * h
    return h * torch.tanh(h)


def norms(model: Model, x: Tensor, late: random.Random) -> Tensor:
    eps = 0.3 if model.surprised("epsilon") else 1e-5
    norm = model.norm
    made = F.layer_norm(x.float(), (WIDTH,), norm.weight, norm.bias, eps)
    return model.linears[2](made) * made


Operator = Callable[[Model, Tensor, random.Random], Tensor]
OPERATORS: dict[str, Operator] = {
    "gate": gate,
    "views": views,
    "paired": paired,
    "spread": spread,
    "norms": norms,
    "linear": lambda m, x, _: m.linears[2](x.float()),
    "gelu": lambda m, x, _: F.gelu(x),
    "silu": lambda m, x, _: F.silu(x),
    "square": lambda m, x, _: x.square(),
    "narrow": lambda m, x, _: x.bfloat16().float() * x,
    "rms norm": lambda m, x, _: m.rms(x.float()),
    "own norm": lambda m, x, _: m.own(x.float()),
    "dropout": lambda m, x, _: F.dropout(x, 0.3) * x,
    "add": lambda m, x, _: F.relu(x + 0.5) + x,
}


def random_plan(profile: Profile, draw: random.Random) -> Plan:
    """Most of what can be made again is; all else stays or moves."""
    timeline = Timeline(profile)
    share = draw.choice((0.3, 0.6, 0.9))
    drawn = {}
    for kind, items in profile.kinds.items():
        drawn[kind] = [_placed(options(timeline, item), share, draw) for item in items]
    window = draw.choice([None, 1, 1 << 9])
    orders = schedule(timeline, drawn, Style(window_bytes=window))
    return Plan(orders=orders, policy=RANDOM)


def _placed(allowed: Any, share: float, draw: random.Random) -> Any:
    again = [each for each in allowed if each in AGAIN_PLACEMENTS]
    if again and draw.random() < share:
        return draw.choice(again)
    others = [each for each in allowed if each not in AGAIN_PLACEMENTS]
    return draw.choice(others)


def may_raise(seed: int) -> bool:
    """Whether ssdtrain may raise alone: something was written to that it reads."""
    return not Model(seed, Counter()).surprises.isdisjoint(WRITES)


def train(seed: int, settings: dict[str, Any] | None, features: Counter[str]) -> Any:
    """Gradients of every step as bytes; a string where a step raised."""
    model, draw = Model(seed, features), random.Random(seed + 3)

    def before(session: ssdtrain.Session | None) -> None:
        if model.surprised("other plan"):
            follow(session, draw, 0.4)

    def one(session: ssdtrain.Session | None) -> list[Tensor]:
        return step(model, session, draw)

    plans = random_plans(lambda profile: random_plan(profile, draw))
    rest = settings, plans, one, features, before
    return judged_steps(model, adam(model, seed), NUM_STEPS, *rest)


def follow(session: ssdtrain.Session | None, draw: random.Random, share: float) -> None:
    """Another plan, at times."""
    if session is not None and session.profile is not None and draw.random() < share:
        session.follow(random_plan(session.profile, draw))


def step(
    model: Model, session: ssdtrain.Session | None, draw: random.Random
) -> list[Tensor]:
    """Forwards and backwards, with what happens around them; the losses."""
    late = random.Random(model.seed + 7 * model.number)
    model.kind = int(model.surprised("other operators") and model.number % 2)
    if model.surprised("evaluation"):
        with torch.no_grad():
            model(torch.randn(ROWS, WIDTH))
    if model.surprised("dropped"):
        model(torch.randn(ROWS, WIDTH))
    with ExitStack() as stack:
        if model.surprised("hooks"):
            pack = late.choice((lambda t: t, lambda t: t * 1, lambda t: t.clone()))
            stack.enter_context(saved_tensors_hooks(pack, lambda t: t))
        losses, kept = forwards(model, late)
    told = [loss.detach().clone() for loss in losses]
    if model.surprised("plan between"):
        follow(session, draw, 0.5)
    if model.surprised("write before backward") and late.random() < 0.5:
        write(late, kept)
    if not model.surprised("released first"):
        kept = [each for each in kept if late.random() < 0.5]
    if model.surprised("crossed"):
        losses.reverse()
    while losses:
        backward(model, losses.pop(0), late, kept)
    return told


def forwards(model: Model, late: random.Random) -> tuple[list[Tensor], list[Tensor]]:
    """Losses of one micro-batch, or of two; and what these had alive."""
    losses: list[Tensor] = []
    kept: list[Tensor] = []
    half = model.surprised("half crossed")
    for number in range(1 + (model.surprised("crossed") or half)):
        rows = ROWS
        if model.surprised("other length"):
            rows = late.choice((1, 2, 3, 6, 7, 12, 17))
        losses.append(model(torch.randn(rows, WIDTH) + number))
        kept += model.live
        model.live = []
        if number == 0 and half:
            weight = model.linears[1].weight
            torch.autograd.grad(losses[0], weight, retain_graph=True)
    return losses, kept


def backward(
    model: Model, loss: Tensor, late: random.Random, kept: list[Tensor]
) -> None:
    """One backward or several of one forward."""
    own = list(model.parameters())
    if model.surprised("parts"):
        some = late.sample(own, 3)
        torch.autograd.grad(loss, some, retain_graph=True, allow_unused=True)
    if model.surprised("penalty"):
        penalty(model, loss)
    twice = model.surprised("twice")
    writes = model.surprised("write between backwards")
    if twice or writes:
        loss.backward(retain_graph=True)
    if writes and kept and late.random() < 0.5:
        write(late, kept)
    if model.surprised("dead first"):
        kept.clear()
    loss.backward()
