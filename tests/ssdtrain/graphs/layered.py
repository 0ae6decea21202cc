"""Random models of repeated layers, whose forwards run again under plans that change.

Every layer is a region: a random chain of operators, some of which have side effects
from step `TURN` on. Between forward and backward the program changes what the layers
have read: attributes, weights, submodules, hooks, globals, settings, random states.
Plans are drawn: which regions run again, and what becomes of all other tensors; another
one is followed in the middle of training, some from between a forward and its backward
on. Judged are, as bytes, the losses, every gradient, and what the generators of torch,
`random` and NumPy draw next.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ssdtrain
from ssdtrain.cache import cache as in_cache
from ssdtrain.transfer.device import CpuDevice
from tests.ssdtrain.graphs import surprises
from tests.ssdtrain.graphs.surprises import (
    DATA_ROWS,
    NUM_STEPS,
    ROWS,
    TURN,
    WIDTH,
    Norm,
    Tanh,
    as_bytes,
    inputs,
    random_plan,
    random_plans,
    step,
    write,
)

NUM_SURPRISES = 3
"""In a model, on the average."""
FIRST_CHANGE = 3
"""Step from which on other plans are followed."""
PLANS: list[dict[str, Any]] = [
    {"plan": "keep-all", "recompute": "regions"},
    {"plan": "offload-all", "recompute": "regions", "window_bytes": 1},
    {"plan": "auto", "max_overhead": 1.0},
]
FACTORS = {"all": 1.0}
"""A global that every layer reads."""


class Options:
    """An object among a layer's attributes."""

    def __init__(self) -> None:
        self.scale = 1.0


class Script:
    """What is to happen, for the model and its layers."""

    def __init__(self, seed: int, features: Counter[str]) -> None:
        self.number = 0
        """Of the step."""
        self.kind = 0
        """Of the forward: which operators."""
        self.seed, self.features = seed, features
        draw = random.Random(seed)
        self.surprises = {
            name for name in SURPRISES if draw.random() < NUM_SURPRISES / len(SURPRISES)
        }

    def chain(self, length: int) -> list[str]:
        """Names of the operators of a layer."""
        draw = random.Random(self.seed + 1 + 1000 * self.kind)
        names = draw.choices(list(OPERATORS), k=length)
        if self.kind == 0:  # what is to surprise must be there
            names += [OPERATOR_OF[name] for name in OPERATOR_OF if name in self.surprises]
        draw.shuffle(names)
        return names

    def surprised(self, name: str) -> bool:
        """Whether this surprise happens now."""
        happens = self.number >= TURN and name in self.surprises
        self.features[name] += happens
        return happens


class Square(torch.autograd.Function):
    """x * x, by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Layer(nn.Module):
    """A random chain of operators, the same in all layers of a model."""

    gain = 1.0
    running: Tensor

    def __init__(self, script: Script, length: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm, self.rms, self.own = (
            nn.LayerNorm(WIDTH),
            nn.RMSNorm(WIDTH),
            Norm(),
        )
        self.drop, self.scripted = nn.Dropout(0.4), Tanh()
        self.register_buffer("running", torch.zeros(WIDTH))
        self.script, self.length = script, length
        self.scale, self.num_calls = 1.0, 0
        self.table, self.log, self.options = {"x": 1.0}, [1.0], Options()

    def surprised(self, name: str) -> bool:
        """For the operators of `surprises`."""
        return self.script.surprised(name)

    def forward(self, x: Tensor, other: Tensor, *, factor: float) -> Any:
        """(ROWS, WIDTH) each to two of the same."""
        draw = random.Random(self.script.seed + 5)
        first = self.linears[0](F.rms_norm(x, (WIDTH,))) * (self.scale * factor * FACTORS["all"])
        live = [first, other * (self.gain * self.options.scale)]
        for name in self.script.chain(self.length):
            source = live[-1 - int(draw.random() ** 2 * len(live))]
            self.script.features[name] += 1
            live.append(OPERATORS[name](self, source))
        y = self.linears[1](F.layer_norm(live[-1].float(), (WIDTH,)))
        other = F.layer_norm(live[-2].float(), (WIDTH,))
        return x + y * (self.table["x"] * self.log[0]), other


def side_effect(layer: Layer, x: Tensor) -> Tensor:
    """Python state that each call changes and the result depends on."""
    if layer.surprised("counter"):
        layer.num_calls += 1
    if layer.surprised("appended"):
        layer.log.append(0.5)
    if layer.surprised("global counter"):
        FACTORS["calls"] = FACTORS.get("calls", 0.0) + 1.0
    return x * (1 + layer.num_calls + len(layer.log) + FACTORS.get("calls", 0.0))


def buffered(layer: Layer, x: Tensor) -> Tensor:
    """A running mean."""
    if layer.surprised("buffer"):
        layer.running.mul_(0.5).add_(x.detach().float().mean(0))
    return x - layer.running


def drawn(layer: Layer, x: Tensor) -> Tensor:
    """By generators that are not torch's."""
    if layer.surprised("python's draw"):
        x = x * random.random()
    if layer.surprised("numpy's draw"):
        x = x * float(np.random.rand())
    return torch.sigmoid(x)


def differentiated(layer: Layer, x: Tensor) -> Tensor:
    """A backward inside the forward."""
    inner = x.detach().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(F.gelu(inner).sum(), inner)
    return x + slope


def hooked_tensor(layer: Layer, x: Tensor) -> Tensor:
    found = torch.tanh(x)
    if found.requires_grad:
        found.register_hook(lambda grad: grad * 1.5)
    return found


def checkpointed(layer: Layer, x: Tensor) -> Tensor:
    def part(x: Tensor) -> Tensor:
        return F.gelu(layer.linears[2](x.float()))

    found: Tensor = checkpoint(part, x, use_reentrant=False)
    return found


def cast_inside(layer: Layer, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        found: Tensor = layer.linears[2](x.float())
    return found


def made(layer: Layer, x: Tensor) -> Tensor:
    """With a tensor in the default dtype."""
    return (x * torch.full((WIDTH,), 1 / 3)).to(x.dtype)


Operator = Callable[[Any, Tensor], Tensor]
OPERATORS: dict[str, Operator] = {
    **surprises.OPERATORS,
    "side effect": side_effect,
    "buffered": buffered,
    "drawn": drawn,
    "differentiated": differentiated,
    "hooked tensor": hooked_tensor,
    "checkpointed": checkpointed,
    "cast inside": cast_inside,
    "made": made,
    "custom": lambda layer, x: Square.apply(x),
    "written": lambda layer, x: torch.sigmoid(x).mul_(2.0),
}


class Model(nn.Module):
    """A linear layer, layers that may run again, and a few operators behind them."""

    def __init__(self, seed: int, features: Counter[str]) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.script = Script(seed, features)
        draw = random.Random(seed + 2)
        length = draw.randint(1, 4)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            Layer(self.script, length) for _ in range(draw.randint(2, 4))
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.autocast = draw.random() < 0.3

    def surprised(self, name: str) -> bool:
        """Whether this surprise happens now."""
        return self.script.surprised(name)

    @property
    def number(self) -> int:
        """Of the step."""
        return self.script.number

    @property
    def kind(self) -> int:
        """Of the forward."""
        return self.script.kind

    @kind.setter
    def kind(self, kind: int) -> None:
        self.script.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        """(ROWS, WIDTH) to a scalar."""
        late = random.Random(self.script.seed + self.number)
        live = [self.first(x)]
        layers = list(self.layers)
        if self.surprised("other order"):
            late.shuffle(layers)
        if self.surprised("layer twice"):
            layers.append(late.choice(layers))
        if self.surprised("fewer layers"):
            layers.pop()
        with ExitStack() as stack:
            if self.autocast:
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            other = live[0]
            for layer in layers:
                found, other = layer(live[-1], other, factor=1.0)
                live.append(found)
                if self.surprised("write") and late.random() < 0.4:
                    write(late, live)
        y = F.gelu(self.norm(live[-1].float()))
        return y.square().sum() + other.float().square().mean()


# -- between forward and backward ------------------------------------------------------


def _toggled(value: float) -> float:
    return 1.0 if value != 1.0 else 0.5


def attributes(model: Model) -> None:
    for layer in model.layers:
        layer.scale = _toggled(layer.scale)


def contents(model: Model) -> None:
    for layer in model.layers:
        layer.table["x"] = _toggled(layer.table["x"])
        layer.options.scale = _toggled(layer.options.scale)
        layer.log[0] = _toggled(layer.log[0])


def rates(model: Model) -> None:
    for layer in model.layers:
        layer.drop.p = 0.1
        layer.norm.eps, layer.own.eps = 0.1, 0.2


def submodule(model: Model) -> None:
    """Another module in the place of one, and one that was not there."""
    torch.manual_seed(7)
    model.layers[0].linears[2] = nn.Linear(WIDTH, WIDTH)
    model.layers[-1].extra = nn.Identity()


def assigned(model: Model) -> None:
    state = {name: value * 0.5 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def loaded(model: Model) -> None:
    model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})


def replaced(model: Model) -> None:
    for layer in model.layers:
        layer.linears[1].weight.data = layer.linears[1].weight.detach() * 0.5


def frozen(model: Model) -> None:
    for parameter in model.layers[0].parameters():
        parameter.requires_grad_(False)


def hooks(model: Model) -> None:
    model.layers[0].norm.register_forward_hook(lambda *args: args[2] * 2)


def patched(model: Model) -> None:
    linear = model.layers[0].linears[0]
    linear.forward = lambda x: F.linear(x, linear.weight)


def of_class(model: Model) -> None:
    Layer.gain = _toggled(Layer.gain)


def of_globals(model: Model) -> None:
    FACTORS["all"] = _toggled(FACTORS["all"])


def draws(model: Model) -> None:
    """Nothing that a re-run draws may be drawn from here on."""
    torch.rand(3), random.random(), np.random.rand()


def settings(model: Model) -> None:
    torch.set_default_dtype(torch.float64)
    torch.backends.mkldnn.set_flags(False)
    torch.set_flush_denormal(True)


def partial(model: Model) -> None:
    """Another model's backward: nothing of this one."""
    x = torch.ones(WIDTH, requires_grad=True)
    F.gelu(model.layers[0].linears[0](x)).sum().backward()


CHANGES: dict[str, Callable[[Model], Any]] = {
    "attributes": attributes,
    "contents": contents,
    "rates": rates,
    "submodule": submodule,
    "assigned": assigned,
    "loaded": loaded,
    "replaced": replaced,
    "frozen": frozen,
    "hooks": hooks,
    "patched": patched,
    "of class": of_class,
    "of globals": of_globals,
    "draws": draws,
    "settings": settings,
    "to evaluation": lambda model: model.eval(),
    "partial": partial,
}
IN_FORWARD = ("write", "foreign epsilon", "attribute", "thread", "hook", "cast weight")
IN_FORWARD += ("counter", "appended", "global counter", "buffer", "python's draw")
IN_FORWARD += ("numpy's draw", "other order", "layer twice", "fewer layers")
AROUND = ("optimizer", "forward mode", "foreign optimizer", "other operators", "fork")
AROUND += ("other size", "twice", "two forwards", "no backward", "evaluation")
AROUND += ("large base", "penalty", "parts", "no number")
OPERATOR_OF = {
    "foreign epsilon": "layer norm",
    "attribute": "own norm",
    "thread": "dropout",
    "hook": "hooked",
    "cast weight": "cast",
    "counter": "side effect",
    "appended": "side effect",
    "global counter": "side effect",
    "buffer": "buffered",
    "python's draw": "drawn",
    "numpy's draw": "drawn",
    "settings": "made",
}
"""Surprises that happen in an operator."""
SURPRISES = (*CHANGES, *IN_FORWARD, *AROUND)
MAY_RAISE = frozenset(("replaced", "hooks", "of class", "of globals", "loaded", "write"))
MAY_RAISE |= {"cast weight", "optimizer", "foreign optimizer", "twice", "fork", "parts"}
MAY_RAISE |= {"forward mode", "global counter", "two forwards", "penalty"}
"""Surprises under which ssdtrain may raise where plain autograd runs: it says what has
changed that it cannot put back."""


# -- training --------------------------------------------------------------------------


class Between:
    """What happens between forwards and the first backward of their step."""

    def __init__(
        self, seed: int, model: Model, session: ssdtrain.Session | None
    ) -> None:
        self._draw = random.Random(seed + 4)
        self._model, self._session = model, session
        self.losses: list[Tensor] = []
        self.num_plans = 0
        """Drawn plans that were followed."""

    def __call__(self, losses: list[Tensor]) -> None:
        self.losses = [loss.detach() for loss in losses]
        for name, change in CHANGES.items():
            if self._model.surprised(name):
                change(self._model)
        self.other_plan()

    def other_plan(self) -> None:
        """Follow another one, at times."""
        session, draw = self._session, self._draw
        if self._model.number < FIRST_CHANGE or session is None:
            return
        if session.profile is not None and draw.random() < 0.4:
            session.follow(random_plan(session.profile, draw))
            self.num_plans += 1


@contextmanager
def limited(seed: int) -> Iterator[None]:
    """Device memory has an end, so that all regions run again while they are observed;
    and from which size on a region's tensors are records."""
    draw = random.Random(seed + 3)
    with (
        mock.patch.object(in_cache, "TINY_BYTES", draw.choice([0, 150, 4096])),
        mock.patch.object(CpuDevice, "capacity_bytes", lambda device: 1),
    ):
        yield


@contextmanager
def own_state() -> Iterator[None]:
    """Settings and globals that a program changes are as they were, behind it."""
    FACTORS.clear()
    FACTORS["all"] = Layer.gain = 1.0
    random.seed(0)
    np.random.seed(0)
    try:
        yield
    finally:
        usual()


def usual() -> None:
    """The settings that forwards run under."""
    torch.set_default_dtype(torch.float32)
    torch.backends.mkldnn.set_flags(True)
    torch.set_flush_denormal(False)


def plain(seed: int, features: Counter[str]) -> Any:
    """What autograd gives without ssdtrain."""
    return train(seed, None, features)


def rows(model: Model, data: Tensor) -> Tensor:
    """Of the data; some are no numbers."""
    x = inputs(model, data)
    if model.surprised("no number"):
        x = x.detach().clone()
        x[0, 1], x[1, 2], x[2, 3] = float("nan"), float("inf"), -float("nan")
    return x


def may_raise(seed: int) -> bool:
    """Whether ssdtrain may raise alone in this model."""
    return not MAY_RAISE.isdisjoint(Script(seed, Counter()).surprises)


def train(seed: int, plan: dict[str, Any] | None, features: Counter[str]) -> Any:
    """Losses, gradients and the next draws of every step as bytes; a string where a
    step raised."""
    with ExitStack() as stack:
        stack.enter_context(own_state())
        model = Model(seed, features)
        data = torch.randn(DATA_ROWS, WIDTH)
        kind = [{"fused": True}, {"foreach": True}, {}][seed % 3]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **kind)
        session = None
        if plan is not None:
            stack.enter_context(limited(seed))
            stack.enter_context(random_plans(seed))
            session = ssdtrain.offload(model, target="host", min_bytes=0, **plan)
            stack.callback(session.close)
        between = Between(seed, model, session)
        found: list[Any] = []
        for model.script.number in range(NUM_STEPS):
            torch.manual_seed(model.number)
            between.other_plan()
            parameters = list(model.parameters())
            optimizer.zero_grad(set_to_none=True)
            model.train()
            try:
                x = rows(model, data)
                step(model, x, optimizer, session is not None, between)
            except RuntimeError as error:
                found.append(f"raised {'inplace' in str(error)}")
                break
            finally:
                usual()
            drawn = torch.rand(2), random.random(), np.random.rand()
            found.append([drawn[1:], *map(as_bytes, [drawn[0], *between.losses])])
            found[-1] += [as_bytes(p.grad) for p in parameters]
            optimizer.step()
        features["planned"] += between.num_plans > 0
        if session is not None:
            features["reruns"] += any(one.recipes.get("region") for one in session.steps)
    return found
