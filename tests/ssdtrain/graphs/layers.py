"""Random models of repeated layers: chains of operators, some with side effects."""

import random
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from operator import methodcaller
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.ssdtrain.graphs import surprises
from tests.ssdtrain.graphs.surprises import TURN, WIDTH, Norm, Tanh, write
from tests.ssdtrain.unseen import Behind

NUM_SURPRISES = 3
"""In a model, on the average."""
FACTORS = {"all": 1.0}
"""A global that every layer reads."""


class Options:
    """An object among a layer's attributes."""

    def __init__(self) -> None:
        self.scale = 1.0


class Script:
    """What is to happen, for the model and its layers."""

    def __init__(self, seed: int, names: Iterable[str], features: Counter[str]) -> None:
        names = list(names)
        self.number = 0
        """Of the step."""
        self.kind = 0
        """Of the forward: which operators."""
        self.seed = seed
        # Unseen: counting would be a side effect of forwards.
        self.features = Behind(features)
        draw = random.Random(seed)
        self.surprises = {
            name for name in names if draw.random() < NUM_SURPRISES / len(names)
        }

    def chain(self, length: int) -> list[str]:
        """Names of the operators of a layer."""
        draw = random.Random(self.seed + 1 + 1000 * self.kind)
        names = draw.choices(list(OPERATORS), k=length)
        if self.kind == 0:  # what is to surprise must be there
            names += [
                OPERATOR_OF[name] for name in OPERATOR_OF if name in self.surprises
            ]
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
        self.scale, self.num_calls, self.causal = 1.0, 0, True
        self.table, self.log, self.options = {"x": 1.0}, [1.0], Options()

    def surprised(self, name: str) -> bool:
        """For the operators of `surprises`."""
        return self.script.surprised(name)

    def forward(self, x: Tensor, other: Tensor, *, factor: float) -> Any:
        draw = random.Random(self.script.seed + 5)
        first = self.linears[0](F.rms_norm(x, (WIDTH,))) * (
            self.scale * factor * FACTORS["all"]
        )
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


HOOK = methodcaller("register_hook", lambda grad: grad * 1.5)
"""A layer whose own code names it is no region, as it might hook a weight."""


def hooked_tensor(layer: Layer, x: Tensor) -> Tensor:
    found = torch.tanh(x)
    if found.requires_grad:
        HOOK(found)
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


def heads(x: Tensor, number: int = 2) -> Tensor:
    """(rows, columns) to (1, number, rows, columns / number)."""
    return x.reshape(1, len(x), number, -1).transpose(1, 2)


def attended(layer: Layer, x: Tensor) -> Tensor:
    """Attention whose results a plan may store; some calls before it are like it, save
    nothing and are none of them."""
    causal = layer.causal != layer.surprised("other attention")
    q, k, v = (heads(linear(x.float())) for linear in layer.linears)
    if layer.surprised("attention's metric"):
        with torch.no_grad():
            gate = F.scaled_dot_product_attention(k, q, v, is_causal=causal).mean()
        q = q * (1 + gate)
    with ExitStack() as stack:
        if layer.surprised("other kernel"):
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if layer.surprised("mode in a layer"):
            stack.enter_context(Doubled())
        found = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return found.transpose(1, 2).reshape(x.shape)


def attended_twice(layer: Layer, x: Tensor) -> Tensor:
    """One behind the other, and a gate made of both."""
    q, k, v = (heads(linear(x.float())) for linear in layer.linears)
    first = F.scaled_dot_product_attention(q, k, v)
    second = F.scaled_dot_product_attention(first, k, v, scale=layer.scale)
    return (torch.sigmoid(first) * second).transpose(1, 2).reshape(x.shape)


def attended_in_groups(layer: Layer, x: Tensor) -> Tensor:
    """Grouped heads behind a learnt mask, in a lower precision."""
    with torch.autocast("cpu", torch.bfloat16):
        q = heads(layer.linears[0](x.float()), 4)
        k, v = (heads(layer.linears[1](x.float())[:, ::2], 2) for _ in range(2))
        mask = layer.linears[2](x.float())[:, : x.shape[0]]
        found = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    return found.transpose(1, 2).reshape(x.shape)


def attended_by_none(layer: Layer, x: Tensor) -> Tensor:
    """A call that needs no gradient and looks like the one behind it, and decides what
    happens next."""
    own, other = heads(layer.linears[2](x.float())), heads(x.detach().float())
    with torch.no_grad():
        free = F.scaled_dot_product_attention(other, other, other)
    found = F.scaled_dot_product_attention(own, own, own)
    if free.sum() > 0:
        found = torch.sigmoid(found) * free
    return found.transpose(1, 2).reshape(x.shape)


def attended_in_checkpoint(layer: Layer, x: Tensor) -> Tensor:
    found: Tensor = checkpoint(attended_twice, layer, x, use_reentrant=False)
    return found


class Doubled(TorchDispatchMode):
    """Doubles what attention gives, below autograd."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if "scaled_dot_product" in func.__name__ and isinstance(found, tuple):
            return found[0] * 2, *found[1:]
        return found


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
    "attention": attended,
    "attention twice": attended_twice,
    "grouped attention": attended_in_groups,
    "attention of none": attended_by_none,
    "checkpointed attention": attended_in_checkpoint,
    "written": lambda layer, x: torch.sigmoid(x).mul_(2.0),
}

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
    "other attention": "attention",
    "attention's metric": "attention",
    "other kernel": "attention",
    "mode in a layer": "attention",
    "causal": "attention",
}
"""Surprises that happen in an operator."""


class Model(nn.Module):
    """A linear layer, layers that may run again, and a few operators behind them."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        seed = script.seed
        torch.manual_seed(seed)
        self.script = script
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
