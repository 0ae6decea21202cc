"""Any loop: where one step ends and the next begins."""

import copy
import gc
import inspect
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, optimizer

import ssdtrain
from tests.ssdtrain.bits import same_bits


class HandWritten:
    """An optimizer that is none of torch's."""

    def __init__(self, parameters: Any) -> None:
        self._parameters = list(parameters)

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self._parameters:
            parameter.sub_(parameter.grad, alpha=0.1)


OPTIMIZERS = {
    "adamw": lambda p: AdamW(p),
    "fused": lambda p: AdamW(p, fused=True),
    "one by one": lambda p: SGD(p, lr=0.1, foreach=False),
    "hand-written": HandWritten,
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_report_for_every_optimizer_step(
    kind: str, everything: dict[str, Any]
) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))
    optim: Optimizer = OPTIMIZERS[kind](model.parameters())
    with ssdtrain.offload(model, **everything) as session:
        for _ in range(3):
            for _ in range(2):
                model(torch.randn(8, 32)).sum().backward()
            optim.step()
            model.zero_grad()
        assert len(session.steps) == 3
        sizes = {report.bytes_saved for report in session.steps}
    assert len(sizes) == 1


def test_the_step_of_another_model_is_not_ours(everything: dict[str, Any]) -> None:
    ours, theirs = nn.Linear(32, 32), nn.Linear(32, 32)
    other = AdamW(theirs.parameters(), fused=True)
    with ssdtrain.offload(ours, **everything) as session:
        for _ in range(3):
            ours(theirs(torch.randn(8, 32))).sum().backward()
            other.step()
        assert len(session.steps) == 1


@pytest.mark.parametrize("fused", [False, True])
def test_weights_that_are_replaced_are_still_the_models(
    fused: bool, everything: dict[str, Any]
) -> None:
    """By `load_state_dict(assign=True)`, by adapters: their steps end ours."""
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))
    with ssdtrain.offload(model, **everything) as session:
        weights = {name: each.clone() for name, each in model.state_dict().items()}
        model.load_state_dict(weights, assign=True)
        optim = AdamW(model.parameters(), fused=fused)
        for _ in range(3):
            model(torch.randn(8, 32)).sum().backward()
            optim.step()
        assert len(session.steps) == 3


def test_a_model_that_is_frozen_may_get_adapters(everything: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))
    model.requires_grad_(False)
    with ssdtrain.offload(model, **everything) as session:
        model.append(nn.Linear(1, 1))
        optim = AdamW(model[3].parameters())
        for _ in range(3):
            model(torch.randn(8, 32)).sum().backward()
            optim.step()
        assert len(session.steps) == 3


def test_close_takes_the_hook_back(everything: dict[str, Any]) -> None:
    before = len(optimizer._global_optimizer_post_hooks)
    with ssdtrain.offload(nn.Linear(4, 4), **everything):
        assert len(optimizer._global_optimizer_post_hooks) > before
    assert len(optimizer._global_optimizer_post_hooks) == before


class Named(nn.Linear):
    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return super().forward(x) * scale


@pytest.mark.parametrize("plan", ["offload-all", "auto"])
def test_a_model_that_nobody_holds_goes_with_its_session(
    plan: str, everything: dict[str, Any]
) -> None:
    """torch's list of hooks of optimizers is the process's, and must hold neither."""
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))
    optim = AdamW(model.parameters())
    session = ssdtrain.offload(model, **{**everything, "plan": plan})
    for _ in range(3):
        model(torch.randn(8, 32)).sum().backward()
        optim.step()
    gone = weakref.ref(model), weakref.ref(session)
    del model, session, optim
    end = time.monotonic() + 30  # a thread may end a copy first
    while any(each() for each in gone):
        assert time.monotonic() < end
        gc.collect()
        time.sleep(0.001)


def test_name_and_signature_stay(everything: dict[str, Any]) -> None:
    model = Named(8, 8)
    before = inspect.signature(model.forward)
    with ssdtrain.offload(model, **everything):
        assert inspect.signature(model.forward) == before
        assert model.forward.__name__ == "forward"
    assert "forward" not in vars(model)


@pytest.mark.parametrize(
    "copying", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
@pytest.mark.parametrize("wrapped_before", [False, True])
def test_a_copy_is_its_own_and_nobodys(
    copying: Callable[[nn.Module], nn.Module],
    wrapped_before: bool,
    everything: dict[str, Any],
) -> None:
    """An average of the weights is a copy; a closure would run the original."""
    model = Named(8, 8)
    if wrapped_before:
        model.forward = MethodType(Named.forward, model)
    x = torch.randn(4, 8)
    with ssdtrain.offload(model, **everything) as session:
        other = copying(model)
        with torch.no_grad():
            other.weight.zero_()
            other.bias.fill_(1.0)
        assert torch.equal(other(x), torch.full((4, 8), 2.0))
        other(x).sum().backward()
        assert not session.steps
        with ssdtrain.offload(other, **everything) as second:
            other(x).sum().backward()
            assert len(second.steps) == 1
    model(x).sum().backward()
    assert not session.steps


@pytest.mark.parametrize("recompute", ["auto", "regions"])
def test_a_model_is_copied_and_saved_in_any_step(recompute: str) -> None:
    """In observed ones there are hooks on its modules."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.GELU(), nn.Linear(8, 8)))
    x = torch.randn(4, 8)
    settings = {
        "max_overhead": 0.01,
        "target": "host",
        "min_bytes": 0,
        "recompute": recompute,
    }
    with ssdtrain.offload(model, plan="auto", **settings) as session:
        num_hooks = 0
        for _ in range(5):
            loss = model(x).sum()
            num_hooks += len(model[1]._forward_hooks)
            text = pickle.dumps(model)
            assert b"ssdtrain." not in text  # it is loaded without it
            for other in (pickle.loads(text), copy.deepcopy(model)):
                assert torch.equal(other(x), model(x))
            loss.backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert num_hooks and not model[1]._forward_hooks
        assert not any("observe" in str(hook) for hook in other.modules())
        assert session.last_step is not None


def test_who_wraps_us_stays_wrapped(everything: dict[str, Any]) -> None:
    """Accelerate puts its autocast around; close() must not take it away."""
    model = Named(8, 8)
    session = ssdtrain.offload(model, **everything)
    ours = model.forward
    model.forward = lambda x: ours(x) + 1
    x = torch.randn(4, 8)
    model(x).sum().backward()
    assert len(session.steps) == 1
    session.close()
    assert torch.equal(model(x), Named.forward(model, x) + 1)
    model(x).sum().backward()
    assert len(session.steps) == 1
    with ssdtrain.offload(model, **everything) as again:
        model(x).sum().backward()
        assert len(again.steps) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"plan": "offload-all", "recompute": "full"},
        {"plan": "auto", "max_overhead": 1.0, "recompute": "off"},
    ],
    ids=["recipes", "table"],
)
def test_weights_may_be_swapped(settings: dict[str, Any]) -> None:
    """As `Module.to` and `load_state_dict` do where they are told so: torch refuses it
    where there are weak references."""

    def run(offloaded: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, found = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), []
        others = {"max_overhead": 0.01, "target": "host", "min_bytes": 0, **settings}
        session = ssdtrain.offload(model, **others) if offloaded else None
        for _ in range(6):
            loss = model(torch.randn(4, 8)).square().sum()
            loss.backward()
            found += [loss.detach(), *(p.grad for p in model.parameters())]
            del loss
            model.zero_grad()
            for parameter in list(model.parameters()):
                other = nn.Parameter(parameter.detach() * 0.9)
                torch.utils.swap_tensors(parameter, other)
        if session is not None:
            session.close()
        return found  # type: ignore[return-value]

    assert same_bits(run(True), run(False))


def test_two_threads_that_begin_at_once(
    everything: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one runs as without us: hooks of both would fill one lane."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
    losses: list[torch.Tensor] = []

    def other() -> None:
        losses.append(model(x).sum())

    with ssdtrain.offload(model, **everything) as session:
        begin, num_begun = session.cache.lanes.begin, []

        def beginning(*args: Any) -> Any:
            num_begun.append(1)
            thread = threading.Thread(target=other)
            if len(num_begun) == 1:
                thread.start()
                thread.join()
            return begin(*args)

        monkeypatch.setattr(session.cache.lanes, "begin", beginning)
        losses.append(model(x).sum())
        assert len(num_begun) == 1 and len(losses) == 2
        for loss in losses:
            loss.backward()
        gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    for _ in range(2):
        model(x).sum().backward()
    assert same_bits(gradients, [p.grad for p in model.parameters()])
