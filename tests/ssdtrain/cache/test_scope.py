"""`no_offload`: a scope and a decorator inside a forward."""

import copy
import threading
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ssdtrain
from tests.ranks import SOON_S
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.cache.plans import all_moved

WIDTH, NUM_STEPS = 16, 6


class Routed(nn.Module):
    """Two products, a nonlinearity between them that may stay out."""

    def __init__(self, stays: bool, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.stays, self.checkpointed = stays, checkpointed
        self.after = nn.Linear(WIDTH, WIDTH)

    @ssdtrain.no_offload()
    def decorated(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))

    def inner(self, x: Tensor) -> Tensor:
        if self.stays:
            with ssdtrain.no_offload():
                return self.down(torch.tanh(self.up(x)))
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            y = checkpoint(self.inner, x, use_reentrant=False)
        else:
            y = self.inner(x)
        return torch.tanh(self.after(y)).sum()


def train(model: nn.Module, settings: dict[str, Any] | None) -> Any:
    results, reports = [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = None if settings is None else ssdtrain.offload(model, **settings)
    for step in range(NUM_STEPS):
        if session is not None and session.plan is not None and step == 3:
            session.follow(all_moved(session))  # and a table from the next step on
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = model(x.requires_grad_())
        loss.backward()
        results += [loss.detach(), x.grad, *(p.grad for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    if session is not None:
        reports = list(session.steps)
        session.close()
    return results + list(model.parameters()), reports


def made(stays: bool, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Routed(stays, **options)


SAVED = 4 * 8 * (WIDTH + 64 + WIDTH + WIDTH)  # x, both tanh, the second product's input


@pytest.mark.parametrize("plan", ["offload-all", "auto"])
def test_what_is_saved_in_the_scope_stays(
    everything: dict[str, Any], plan: str
) -> None:
    if plan == "auto":
        everything["plan"] = plan
        del everything["window_bytes"]
    theirs, _ = train(made(False), None)
    ours, reports = train(made(True), everything)
    _, all_leave = train(made(False), everything)
    assert same_bits(ours, theirs)
    # x and the first tanh stay.
    for report in reports[3:]:
        assert report.bytes_saved == 4 * 8 * (WIDTH + WIDTH)
        assert not report.fallbacks
    assert all(report.bytes_saved == SAVED for report in all_leave[3:])


def test_as_a_decorator(everything: dict[str, Any]) -> None:
    model = made(False)
    model.inner = model.decorated
    _, reports = train(model, everything)
    assert reports[-1].bytes_saved == 4 * 8 * (WIDTH + WIDTH)


def test_a_checkpointed_region_stays_one(everything: dict[str, Any]) -> None:
    """Its inputs are offloaded; what it saves is dropped, and not kept."""
    theirs, _ = train(made(False), None)
    ours, reports = train(made(True, checkpointed=True), everything)
    assert same_bits(ours, theirs)
    assert reports[-1].bytes_saved == 4 * 8 * 3 * WIDTH


class Layers(nn.Module):
    """Regions. Each has a scope, and a backward inside of a scope."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Routed(True) for _ in range(3))
        for layer in self.layers:
            layer.forward = MethodType(_layer, layer)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def _layer(layer: Any, x: Tensor) -> Tensor:
    with ssdtrain.no_offload():
        y = F.scaled_dot_product_attention(*3 * [x.view(1, 1, *x.shape)]).view_as(x)
        (slope,) = torch.autograd.grad(y.sin().sum(), y, create_graph=True)
    y = layer.inner(y + slope)
    return x + torch.tanh(layer.after(torch.sin(y)))


@pytest.mark.parametrize("plan", ["keep-all", "offload-all", "auto"])
def test_inside_of_a_region_that_runs_again(
    everything: dict[str, Any], plan: str
) -> None:
    """What the scope kept is kept, and its re-run finds each tensor in its place."""
    torch.manual_seed(0)
    model = Layers()
    theirs, _ = train(copy.deepcopy(model), None)
    ours, reports = train(model, {**everything, "plan": plan, "recompute": "regions"})
    assert same_bits(ours, theirs)
    assert reports[0].recipes["region"] > 0
    assert not reports[0].fallbacks


def test_outside_of_a_session_nothing_happens() -> None:
    x = torch.randn(4, requires_grad=True)
    seen: list[Tensor] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(
            lambda t: (seen.append(t), t)[1], lambda t: t
        ),
        ssdtrain.no_offload(),
    ):
        (x * x).sum().backward()
    assert seen  # who asked for them still gets them


def test_an_error_leaves_the_scope(everything: dict[str, Any]) -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16))

        def forward(self, x: Tensor) -> Tensor:
            try:
                with ssdtrain.no_offload(), ssdtrain.no_offload():
                    raise KeyError
            except KeyError:
                return (torch.tanh(x) * self.weight).sum()

    model = Failing()
    with ssdtrain.offload(model, **everything) as session:
        model(torch.randn(4, 16, requires_grad=True)).backward()
        assert session.last_step is not None
        assert session.last_step.bytes_offloaded > 0


def test_threads_have_scopes_of_their_own(everything: dict[str, Any]) -> None:
    """A decorated method of one module, run by two threads at once."""
    both, models = threading.Barrier(2), [made(False), made(False)]

    def run(at: int, found: list[Any]) -> None:
        model = models[at]
        inner: Callable[[Tensor], Tensor] = model.decorated

        def meeting(x: Tensor) -> Tensor:
            both.wait(SOON_S)
            return inner(x)

        model.inner = meeting
        found[at] = train(model, dict(everything))

    found: list[Any] = [None, None]
    threads = [threading.Thread(target=run, args=(at, found)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (ours, reports), (theirs, _) in [(found[0], found[1])]:
        assert same_bits(ours, theirs)
        assert reports[-1].bytes_saved == 4 * 8 * (WIDTH + WIDTH)
