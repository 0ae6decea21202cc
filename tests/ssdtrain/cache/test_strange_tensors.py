"""Tensors that are not just bytes, modules that are not Python, parts of data sets."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import ssdtrain
from ssdtrain.cache.identity import is_plain
from ssdtrain.errors import AttachError
from tests.ssdtrain.bits import same_bits

WIDTH = 16
PLANS: list[dict[str, Any]] = [
    {"plan": "keep-all"},
    {"plan": "offload-all", "window_bytes": 1},
    {"plan": "auto", "max_overhead": 1.0},
]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def bytes_saved(model: nn.Module, inputs: list[Tensor]) -> list[int]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    settings: dict[str, Any] = {"plan": "offload-all", "recompute": "off"}
    with ssdtrain.offload(model, target="host", min_bytes=0, **settings) as session:
        for x in inputs:
            model(x).sum().backward()
            optimizer.step()
        return [step.bytes_saved for step in session.steps]


# torch scripts its decompositions for forward mode.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("settings", PLANS, ids=lambda s: s["plan"])
def test_forward_mode(settings: dict[str, Any]) -> None:
    def run(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)
        found = []
        for _ in range(4):
            model.zero_grad()
            with forward_ad.dual_level():
                x = torch.randn(4, WIDTH)
                y = model(forward_ad.make_dual(x, torch.randn(4, WIDTH)))
                primal, tangent = forward_ad.unpack_dual(y)
                (primal.square().sum() + tangent.square().sum()).backward()
            found += [tangent.detach(), *(p.grad for p in model.parameters())]
        return found

    theirs = run(net())
    model = net()
    with ssdtrain.offload(model, target="host", min_bytes=0, **settings):
        ours = run(model)
    assert same_bits(ours, theirs)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.norm(x)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("settings", PLANS, ids=lambda s: s["plan"])
def test_a_scripted_submodule(settings: dict[str, Any]) -> None:
    def run(model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(1)
        found = []
        for _ in range(5):
            model.zero_grad()
            model(torch.randn(4, WIDTH)).square().sum().backward()
            found += [p.grad.clone() for p in model.parameters()]
            optimizer.step()
        return found

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), torch.jit.script(Inner()))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    run(model)  # the interpreter's own warm-up changes bits
    model.load_state_dict(state)
    theirs = run(model)
    model.load_state_dict(state)
    with ssdtrain.offload(model, target="host", min_bytes=0, **settings) as session:
        ours = run(model)
        # A plan that keeps all, as `auto` may make it here, has no hooks.
        assert max(step.bytes_saved for step in session.steps) > 0
    assert same_bits(ours, theirs)


def test_a_traced_model_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(net(), torch.randn(4, WIDTH))
    with pytest.raises(AttachError, match="traced module has none"):
        ssdtrain.offload(traced, max_overhead=0.01, target="host")


def test_a_batch_is_not_its_data_set() -> None:
    data = torch.randn(1000, WIDTH)
    batches = [data[i : i + 8] for i in range(3)]
    copies = [batch.clone() for batch in batches]
    assert bytes_saved(net(), batches) == bytes_saved(net(), copies)


def test_parts_of_what_was_computed_are_one_record() -> None:
    """Small ones, which all are saved, and the whole."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x)
            parts = torch.stack([row * row for row in y.unbind()])
            return parts.sum() + y.sin().sum()

    x = torch.randn(8, WIDTH)
    assert bytes_saved(Rows(), [x]) == [2 * x.nbytes]


def test_zeros_without_memory_are_not_plain() -> None:
    assert is_plain(torch.zeros(2))
    assert not is_plain(torch._efficientzerotensor((2,)))
