"""Which code writes to no tensor: [Note: pure code]."""

import math
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import NewGELUActivation
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from ssdtrain.rebuild.purity import Purity

WIDTH = 8
FACTOR = 2.0
KEPT: list[Tensor] = []


def holds(module: nn.Module, *arguments: Any) -> bool:
    certificate = Purity().certificate(module)
    return certificate is not None and certificate.holds_for(module, list(arguments))


PURE = [
    NewGELUActivation(),
    LlamaRMSNorm(WIDTH),
    Qwen3RMSNorm(WIDTH),
    GemmaRMSNorm(WIDTH),
    T5LayerNorm(WIDTH),
]


@pytest.mark.parametrize("module", PURE, ids=lambda m: type(m).__name__)
def test_norms_and_activations_of_transformers(module: nn.Module) -> None:
    assert holds(module, torch.ones(2, WIDTH))


class Base(nn.Module):
    """What the modules below read."""

    bound = 3.0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.eps = 1e-6
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.seen: list[Tensor] = []

    @property
    def tricky(self) -> float:
        KEPT.clear()
        return 1.0

    def half(self, x: Tensor) -> Tensor:
        return x * 0.5

    def keep(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return x


class Branches(Base):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        y = x.float() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.weight.dtype in [torch.float16, torch.bfloat16] and scale > FACTOR:
            y = y.to(self.weight.dtype)
        return self.half(y[..., 1:]) * math.sqrt(self.bound)


class Activations(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = F.softplus(x, 2.0, 1.0) + F.softshrink(x, 0.25)
        return F.glu(y - torch.hardshrink(x, 0.25), 0)


class InPlaceOperator(Base):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return x


class InPlaceMethod(Base):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class InPlaceKeyword(Base):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x, inplace=True)


class InPlacePosition(Base):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x, True)


class Out(Base):
    def forward(self, x: Tensor) -> Tensor:
        return torch.mul(x, x, out=x)


class Item(Base):
    def forward(self, x: Tensor) -> Tensor:
        x[0] = 1.0
        return x


class Attribute(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        return x


class Data(Base):
    def forward(self, x: Tensor) -> Tensor:
        x.data.mul(2)
        return x


class NoGrad(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return x * 2


class Hands(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.keep(x)


class Submodule(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Itself(Base):
    def forward(self, x: Tensor) -> Tensor:
        KEPT.append(x)
        return x


class Aliased(Base):
    def forward(self, x: Tensor) -> Tensor:
        me = self
        return me.weight * x


class Chosen(Base):
    def forward(self, x: Tensor) -> Tensor:
        return (x if self.eps else self).half(x)


class Property(Base):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.tricky


class Loop(Base):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x * 2
        return x


class Many(Base):
    def forward(self, *xs: Tensor) -> Tensor:
        return xs[0] * 2


class Default(Base):
    def forward(self, x: Tensor, kept: Any = KEPT) -> Tensor:
        return x * 2


class Closed(Base):
    def forward(self, x: Tensor) -> Tensor:
        return (lambda: x * 2)()


IMPURE = [
    InPlacePosition,
    InPlaceOperator,
    InPlaceMethod,
    InPlaceKeyword,
    Out,
    Item,
    Attribute,
    Data,
]
IMPURE += [NoGrad, Hands, Submodule, Itself, Aliased, Chosen, Property, Loop, Many]
IMPURE += [Default, Closed]


def test_branches_helpers_and_constants_are_pure() -> None:
    assert holds(Branches(), torch.ones(2, WIDTH), 3.0)


def test_activations_are_pure_by_position_too() -> None:
    """Nothing that they may be given by position is written to."""
    assert holds(Activations(), torch.ones(2, WIDTH))
    x, out = torch.ones(2, WIDTH), torch.zeros(2, WIDTH)
    for activation, numbers in (
        (F.softplus, (1.0, 20.0)),
        (F.softshrink, (0.5,)),
        (F.hardshrink, (0.5,)),
        (torch.hardshrink, (0.5,)),
        (F.glu, (-1,)),
    ):
        activation(x, *numbers)
        with pytest.raises(TypeError):
            activation(x, *numbers, out)
    assert torch.equal(x, torch.ones_like(x)) and not out.any()


@pytest.mark.parametrize("kind", IMPURE)
def test_what_writes_or_may_is_not_pure(kind: type[nn.Module]) -> None:
    assert not holds(kind(), torch.ones(2, WIDTH))


def test_arguments_and_attributes_are_looked_at_every_time() -> None:
    module = Branches()
    assert not holds(module, [torch.ones(2, WIDTH)])
    assert not holds(module, torch.nn.Buffer)
    module.eps = [1e-6]
    assert not holds(module, torch.ones(2, WIDTH))
    module.eps = 1e-5
    assert holds(module, torch.ones(2, WIDTH))
    module.half = lambda x: x.mul_(2)
    assert not holds(module, torch.ones(2, WIDTH))


def test_a_patched_class_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    purity, module = Purity(), Branches()
    before = purity.certificate(module)
    assert before is not None

    def half(self: Base, x: Tensor) -> Tensor:
        return x.mul_(0.5)

    monkeypatch.setattr(Base, "half", half)
    assert not before.holds_for(module, [torch.ones(2, WIDTH)])
    monkeypatch.setattr(Branches, "forward", InPlaceMethod.forward)
    assert purity.certificate(module) is None


def test_a_submodule_call_is_not_pure() -> None:
    config = transformers.T5Config(d_model=WIDTH, d_ff=WIDTH, num_heads=1)
    module = transformers.models.t5.modeling_t5.T5DenseActDense(config)
    assert Purity().certificate(module) is None
