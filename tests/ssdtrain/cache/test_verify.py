"""Verify mode: sound runs pass it untouched, and nothing else passes it."""

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ssdtrain
from ssdtrain.cache.executor import Executor
from ssdtrain.cache.identity import View
from ssdtrain.cache.verify import Checksum, Moment
from ssdtrain.errors import ActivationChangedError
from ssdtrain.rebuild.node import Producer
from ssdtrain.rebuild.recipes import REGISTERED
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.faulty import Fault, FaultKind, Operation
from tests.ssdtrain.mlp import WIDTH, gradients_of
from tests.ssdtrain.targets import STAGED, TARGETS, settings_of

MODES = ["checksum", "shadow"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return (x * x.mean(0, keepdim=True).expand_as(x)).sum()


@pytest.fixture(params=list(Moment))
def moment(request: Any, monkeypatch: pytest.MonkeyPatch) -> Moment:
    """Both ends of [Note: when verify raises], on the CPU too."""
    start = Checksum.__init__

    def initialise(self: Checksum, device: torch.device, _: Moment) -> None:
        start(self, device, request.param)

    monkeypatch.setattr(Checksum, "__init__", initialise)
    return request.param  # type: ignore[no-any-return]


PLACEMENTS = [
    *((target, "offload-all", "off") for target in TARGETS),
    ("host", "offload-all", "auto"),
    ("host", "keep-all", "auto"),
    ("host", "auto", "off"),
    ("ssd", "offload-all", "auto"),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("target", "plan", "recompute"), PLACEMENTS)
def test_every_placement_is_verified(
    mode: str, target: str, plan: str, recompute: str, tmp_path: Path
) -> None:
    net = Net()
    expected = gradients_of(net)
    settings: dict[str, Any] = {
        **settings_of(target, tmp_path),
        "plan": plan,
        "recompute": recompute,
        "min_bytes": 0,
        "window_bytes": 1,
        "host_bytes": 1 << 20 if target in STAGED else 64 << 10,
    }
    with ssdtrain.offload(net, verify=mode, **settings) as session:
        for _ in range(2):
            assert same_bits(gradients_of(net), expected)
        report = session.last_step
    assert report is not None
    assert report.num_verified >= report.num_records
    assert report.bytes_verified >= report.bytes_saved
    assert (report.bytes_recomputed > 0) == (recompute == "auto")


SILENT = [
    Fault(operation=Operation.WRITE, kind=FaultKind.BIT_FLIP, at=0, count=10**6),
    Fault(operation=Operation.READ, kind=FaultKind.BIT_FLIP, at=0, count=10**6),
    Fault(operation=Operation.WRITE, kind=FaultKind.TORN, at=0, count=10**6),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "fault", SILENT, ids=lambda f: f"{f.operation.value} {f.kind.value}"
)
def test_silent_storage_faults_are_caught(
    mode: str,
    fault: Fault,
    moment: Moment,
    faulty: Any,
    tmp_path: Path,
) -> None:
    """Nobody else can see these: the storage says that all went well."""
    net = Net()
    with faulty(net, fault, verify=mode) as session:
        loss = net(torch.randn(32, WIDTH, requires_grad=True))
        session.cache.offloader.wait_io()
        with pytest.raises(ActivationChangedError) as caught:
            loss.backward()
        text = str(caught.value)
        assert "Backward0" in text
        assert "record" in text
        assert "saved in layers." in text or "saved in model" in text
        assert "restart from the last checkpoint" in text
        assert ("first that differs" in text) == (mode == "shadow")
        del loss, caught
        gc.collect()
        assert session.cache.is_idle
    assert not list(tmp_path.iterdir())


def spoil(data: Tensor) -> Tensor:
    copy = data.clone()
    copy[5] ^= 4
    return copy


def wrong_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = Executor.fetch
    monkeypatch.setattr(
        Executor, "fetch", lambda self, record: spoil(fetch(self, record))
    )


def wrong_view(monkeypatch: pytest.MonkeyPatch) -> None:
    rebuild = View.rebuild

    def transposed(self: View, data: Tensor) -> Tensor:
        tensor = rebuild(self, data)
        square = tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]
        return tensor.t() if square else tensor.flip(0)

    monkeypatch.setattr(View, "rebuild", transposed)


BUGS: list[Callable[[pytest.MonkeyPatch], None]] = [wrong_fetch, wrong_view]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize("plan", ["offload-all", "keep-all"])
def test_bugs_of_the_cache_are_caught(
    mode: str, bug: Any, plan: str, moment: Moment, monkeypatch: Any, everything: Any
) -> None:
    bug(monkeypatch)
    net = Net()
    with (
        ssdtrain.offload(net, verify=mode, **{**everything, "plan": plan}),
        pytest.raises(ActivationChangedError),
    ):
        gradients_of(net)


class Twice(nn.Module):
    """Two products of one class: admission looks at the first only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            x = layer(nn.functional.gelu(x))
        return x.sum()


@pytest.mark.parametrize("mode", MODES)
def test_a_wrong_recipe_is_caught(mode: str, moment: Moment, everything: Any) -> None:
    """A recipe that drifts after its admission; verify looks at every tensor."""
    calls = 0

    def drifting(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return nn.functional.gelu(x) + (calls > 1)

    def produced_by(node: Producer) -> Any:
        return node.rebuilt_by(drifting, node.saved("self"))

    net, x = Twice(), torch.randn(4, 8, requires_grad=True)
    ssdtrain.recipe("GeluBackward0")(produced_by)
    try:
        settings = {**everything, "recompute": "auto", "verify": mode}
        with ssdtrain.offload(net, **settings):
            loss = net(x)
            with pytest.raises(ActivationChangedError, match="rebuilt by a recipe"):
                loss.backward()
    finally:
        del REGISTERED["GeluBackward0"]


@pytest.mark.parametrize("mode", MODES)
def test_retain_graph_reentrant_and_second_order(mode: str, moment: Moment) -> None:
    net, x = Net(), torch.randn(32, WIDTH, requires_grad=True)

    def second_order() -> Tensor:
        loss = checkpoint(net, x, use_reentrant=False).tanh()
        first = torch.autograd.grad(loss, [x], create_graph=True)[0]
        second = torch.autograd.grad(first.square().sum(), [x], retain_graph=True)[0]
        return second + torch.autograd.grad(first.sum(), [x])[0]

    def reentrant() -> Tensor:
        x.grad = None
        checkpoint(net, x, use_reentrant=True).backward()
        return x.grad.clone()

    expected = second_order(), reentrant()
    with ssdtrain.offload(
        net, max_overhead=0.01, target="host", min_bytes=0, verify=mode
    ):
        assert same_bits(second_order(), expected[0])
        assert same_bits(reentrant(), expected[1])


@pytest.mark.parametrize("mode", MODES)
def test_a_look_outside_backward_is_checked_at_once(
    mode: str, moment: Moment, monkeypatch: pytest.MonkeyPatch, everything: Any
) -> None:
    wrong_fetch(monkeypatch)
    net = nn.Sequential(nn.GELU(), nn.GELU())
    net.anchor = nn.Parameter(torch.ones(1))
    with ssdtrain.offload(net, verify=mode, **everything):
        y = net(torch.randn(4, 8, requires_grad=True))
        with pytest.raises(ActivationChangedError, match="outside backward"):
            _ = y.grad_fn._saved_self


@pytest.mark.parametrize("mode", MODES)
def test_few_elements_of_any_stride(mode: str, everything: Any) -> None:
    """What is empty is contiguous at every stride (found by random graphs)."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            column = (x * self.weight)[3:4, 1:2]
            pair = (x * self.weight)[:2, 1]
            none = (x * self.weight).view(-1)[16::2]
            return sum((part * part).sum() for part in (column, pair, none))

    net, x = Net(), torch.randn(8, 2, dtype=torch.bfloat16)
    net(x).backward()
    expected = net.weight.grad.clone()
    with ssdtrain.offload(net, verify=mode, **everything):
        net.weight.grad = None
        net(x).backward()
    assert same_bits(net.weight.grad, expected)


def test_the_random_sequence_is_untouched(everything: Any) -> None:
    net = Net()
    state = torch.get_rng_state()
    with ssdtrain.offload(net, verify="checksum", **everything):
        assert same_bits(torch.get_rng_state(), state)


class GpuAttention(torch.autograd.Function):
    """Saves where the generator stood, as attention on a GPU does: garbage, where
    nothing is dropped."""

    rate = 0.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx._saved_dropout_p = GpuAttention.rate
        ctx.save_for_backward(x, torch.tensor(time.perf_counter_ns()))
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, _ = ctx.saved_tensors
        return grad * x.cos()


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = GpuAttention.apply(self.linear(x))  # type: ignore[no-untyped-call]
        return result


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_state_that_nobody_wrote_is_not_compared(
    rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GpuAttention, "rate", rate)
    net = nn.Sequential(Attending(), Attending())
    settings: dict[str, Any] = {"recompute": "regions", "verify": "shadow"}
    with ssdtrain.offload(net, target="host", min_bytes=1, **settings):
        loss = net(torch.randn(4, WIDTH)).sum()
        if rate:
            with pytest.raises(ActivationChangedError, match="int64"):
                loss.backward()
        else:
            loss.backward()
