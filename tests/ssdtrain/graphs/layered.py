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

import ssdtrain
from ssdtrain.cache import cache as in_cache
from ssdtrain.transfer.device import CpuDevice
from tests.ssdtrain.graphs.layers import FACTORS, Layer, Model, Script
from tests.ssdtrain.graphs.surprises import (
    DATA_ROWS,
    NUM_STEPS,
    WIDTH,
    adam,
    as_bytes,
    inputs,
    random_plan,
    random_plans,
    step,
)

FIRST_CHANGE = 3
"""Step from which on other plans are followed."""
PLANS: list[dict[str, Any]] = [
    {"plan": "keep-all", "recompute": "regions"},
    {"plan": "offload-all", "recompute": "regions", "window_bytes": 1},
    {"plan": "auto", "max_overhead": 1.0},
]
# -- between forward and backward ------------------------------------------------------


def _toggled(value: float) -> float:
    return 1.0 if value != 1.0 else 0.5


def attributes(model: Model) -> None:
    for layer in model.layers:
        layer.scale = _toggled(layer.scale)


def causal(model: Model) -> None:
    for layer in model.layers:
        layer.causal = not layer.causal


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
    "causal": causal,
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
IN_FORWARD += ("other attention", "attention's metric", "other kernel")
IN_FORWARD += ("mode in a layer",)
AROUND = ("optimizer", "forward mode", "foreign optimizer", "other operators", "fork")
AROUND += ("other size", "twice", "two forwards", "no backward", "evaluation")
AROUND += ("large base", "penalty", "parts", "no number")
SURPRISES = (*CHANGES, *IN_FORWARD, *AROUND)
MAY_RAISE = frozenset(
    ("replaced", "hooks", "of class", "of globals", "loaded", "write")
)
MAY_RAISE |= {"cast weight", "optimizer", "foreign optimizer", "twice", "fork"}
MAY_RAISE |= {"parts", "forward mode", "global counter", "two forwards", "penalty"}
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


def rows(model: Model, data: Tensor) -> Tensor:
    """Of the data; some are no numbers."""
    x = inputs(model, data)
    if model.surprised("no number"):
        x = x.detach().clone()
        x[0, 1], x[1, 2], x[2, 3] = float("nan"), float("inf"), -float("nan")
    return x


def may_raise(seed: int) -> bool:
    """Whether ssdtrain may raise alone in this model."""
    return not MAY_RAISE.isdisjoint(Script(seed, SURPRISES, Counter()).surprises)


def train(seed: int, plan: dict[str, Any] | None, features: Counter[str]) -> Any:
    """Losses, gradients and the next draws of every step as bytes; a string where a
    step raised."""
    with ExitStack() as stack:
        stack.enter_context(own_state())
        model = Model(Script(seed, SURPRISES, features))
        data = torch.randn(DATA_ROWS, WIDTH)
        optimizer = adam(model, seed)
        session = None
        if plan is not None:
            stack.enter_context(limited(seed))
            draw = random.Random(seed)
            plans = random_plans(lambda profile: random_plan(profile, draw))
            stack.enter_context(plans)
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
            features["reruns"] += any(
                one.recipes.get("region") for one in session.steps
            )
    return found
