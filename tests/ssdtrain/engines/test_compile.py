"""torch.compile works bitwise wherever it stands; one graph for all is refused."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

import ssdtrain
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.cache.plans import all_moved, every_other_moved

pytestmark = pytest.mark.usefixtures("fresh_compiler")

BACKEND = "aot_eager"
SETTINGS: dict[str, Any] = {
    "target": "host",
    "min_bytes": 0,
    "plan": "offload-all",
    "window_bytes": 1,
    "verify": "shadow",
}


class Layer(nn.Module):
    """Not one of torch's own, whose frames are passed by behind a wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.linear(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def step(call: Callable[[Tensor], Tensor], net: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(32, 64, requires_grad=True)
    net.zero_grad()
    call(x).square().sum().backward()
    return [x.grad, *(p.grad.clone() for p in net.parameters())]


Opened = tuple[nn.Module, Callable[[Tensor], Tensor], ssdtrain.Session]


def offloaded_then_compiled(backend: str = BACKEND, **settings: Any) -> Opened:
    net = Model()
    session = ssdtrain.offload(net, **settings)
    return net, torch.compile(net, backend=backend), session


def compiled_then_offloaded(**settings: Any) -> Opened:
    net = Model()
    call = torch.compile(net, backend=BACKEND)
    return net, call, ssdtrain.offload(call, **settings)


def compiled_in_place(**settings: Any) -> Opened:
    net = Model()
    session = ssdtrain.offload(net, **settings)
    net.compile(backend=BACKEND)
    return net, net, session


def compiled_layers(backend: str = BACKEND, **settings: Any) -> Opened:
    net = Model()
    for layer in net.layers:
        layer.compile(backend=backend)
    return net, net, ssdtrain.offload(net, **settings)


WAYS = [
    offloaded_then_compiled,
    compiled_then_offloaded,
    compiled_in_place,
    compiled_layers,
]


@pytest.mark.parametrize("recompute", ["off", "auto"])
@pytest.mark.parametrize("way", WAYS)
def test_compiled_models_are_offloaded(way: Any, recompute: str) -> None:
    """pytorch#148222, #116221: hooks and torch.compile gave no saving, or wrong."""
    net = Model()
    compiled = way is not compiled_layers
    theirs = torch.compile(net, backend=BACKEND) if compiled else net
    expected = step(theirs, net)
    torch._dynamo.reset()
    counters.clear()
    net, call, session = way(**SETTINGS, recompute=recompute)
    with session:
        for _ in range(3):
            found = step(call, net)
            assert same_bits(found, expected)
        reports = list(session.steps)
    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    for report in reports:
        assert report.bytes_offloaded + report.bytes_recomputed > 0
        assert report.num_verified >= report.num_records > 0
    if recompute == "off":
        assert all(report.bytes_reloaded > 0 for report in reports)


@pytest.mark.slow
# Inductor imports scripted modules.
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("plan", ["offload-all", "auto"])
@pytest.mark.parametrize("way", [offloaded_then_compiled, compiled_layers])
# The processor's vector units are used without a trial program for each of them.
@torch._inductor.config.patch({"cpp.vec_isa_ok": True})
def test_inductors_kernels_are_offloaded(way: Any, plan: str) -> None:
    """What its kernels save is moved, under a plan that changes under way as well."""
    settings = {**SETTINGS, "plan": plan, "verify": "off"}
    found = []
    for ours in (False, True):
        torch._dynamo.reset()
        counters.clear()
        net, call, session = way(backend="inductor", **settings)
        if not ours:
            session.close()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        found.append([])
        for number in range(6):
            if ours and session.plan is not None and number in (3, 5):
                change = all_moved if number == 3 else every_other_moved
                session.follow(change(session))
            found[-1] += step(call, net)
            optimizer.step()
        found[-1] += [p.detach().clone() for p in net.parameters()]
        assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    reports = session.steps
    session.close()
    assert same_bits(found[1], found[0])
    assert len(reports) == 6
    assert all(report.bytes_offloaded > 0 for report in reports[-3:])


def test_one_graph_is_refused_by_dynamo() -> None:
    """fullgraph=True leaves no place for hooks: an error, not silence."""
    net = Model()
    with ssdtrain.offload(net, **SETTINGS):
        call = torch.compile(net, backend=BACKEND, fullgraph=True)
        with pytest.raises(Exception, match=r"[Uu]nsupported|disable|graph break"):
            step(call, net)
