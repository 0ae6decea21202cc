"""A product and its factor by one kernel: [Note: pairs]."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ssdtrain
from ssdtrain.cache import rebuilder
from ssdtrain.remat.pairs import Pairs, in_turn
from tests.ssdtrain.bits import same_bits

NUM_LAYERS, NUM_STEPS, WIDTH, ROWS = 3, 3, 32, 16
ALONE: dict[str, Any] = {"plan": "keep-all", "min_bytes": 1}


class Gated(nn.Module):
    """A gated layer, whose product has the order that is asked for."""

    def __init__(self, *, factor_first: bool = True) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.factor_first = factor_first

    def forward(self, x: Tensor) -> Tensor:
        factor, other = F.silu(self.gate(x)), self.up(x)
        both = (factor, other) if self.factor_first else (other, factor)
        return x + self.down(torch.mul(*both))


class Broadcast(Gated):
    """Its product's other factor has one column."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x)[:, :1])


class Kernel:
    """Counts the tensors of the steps, and may be wrong."""

    def __init__(self, factor: float = 1.0) -> None:
        self.num_calls = 0
        self.num_compared = 0
        self._factor = factor

    def __call__(self, gate: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        self.num_compared += gate.numel() == 2**16
        self.num_calls += gate.numel() != 2**16
        factor, product = in_turn(gate, other)
        return factor, product * self._factor


def fails(gate: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    raise ImportError("no Triton")


def use(monkeypatch: pytest.MonkeyPatch, kernel: Any) -> None:
    def pairs() -> Pairs:
        return Pairs(min_bytes=1, device_types=("cpu",), make=kernel)

    monkeypatch.setattr(rebuilder, "Pairs", pairs)


def train(
    kind: type[nn.Module], dtype: torch.dtype, settings: dict[str, Any] | None
) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(*(kind() for _ in range(NUM_LAYERS))).to(dtype)
    found: list[Tensor] = []

    def steps() -> None:
        for number in range(NUM_STEPS):
            draw = torch.Generator().manual_seed(number)
            x = torch.randn(ROWS, WIDTH, generator=draw).to(dtype)
            loss = net(x).float().square().mean()
            loss.backward()
            found.extend([loss.detach(), *(p.grad.clone() for p in net.parameters())])

    if settings is None:
        steps()
    else:
        with ssdtrain.offload(net, target="host", **settings):
            steps()
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [Gated, lambda: Gated(factor_first=False)])
def test_one_kernel_makes_both(
    kind: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel()
    use(monkeypatch, kernel)
    assert same_bits(train(kind, dtype, ALONE), train(kind, dtype, None))
    assert kernel.num_calls == NUM_LAYERS * NUM_STEPS
    assert kernel.num_compared == 1


@pytest.mark.parametrize("kernel", [Kernel(factor=2.0), fails])
def test_a_kernel_of_other_bytes_is_not_used(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, kernel)
    own = train(Gated, torch.bfloat16, ALONE)
    assert same_bits(own, train(Gated, torch.bfloat16, None))


@pytest.mark.parametrize(
    ("kind", "dtype"), [(Gated, torch.float32), (Broadcast, torch.bfloat16)]
)
def test_others_are_made_by_themselves(
    kind: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel()
    use(monkeypatch, kernel)
    assert same_bits(train(kind, dtype, ALONE), train(kind, dtype, None))
    assert kernel.num_calls == 0


def test_each_is_made_by_itself_where_it_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prices are of one tensor."""
    kernel = Kernel()
    use(monkeypatch, kernel)
    net = nn.Sequential(*(Gated() for _ in range(NUM_LAYERS))).bfloat16()
    with ssdtrain.offload(net, target="host", **ALONE) as session:
        clock = session.cache.ledger.clock
        clock.keep_spans = True
        net(torch.randn(ROWS, WIDTH).bfloat16()).float().sum().backward()
        assert kernel.num_calls == 0
        assert session.last_step is not None
        times = session.last_step.recipe_ms
    assert {"SiluBackward0", "MulBackward0"} <= set(times)
