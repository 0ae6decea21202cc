"""Programs that change what a recipe trusts, after the recipe was admitted.

Every program runs with and without a session; what backward gives is compared byte for
byte, step by step. Where plain autograd raises, a session must raise.
"""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import ssdtrain
from ssdtrain.rebuild import modes
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.rebuild.bodies import (
    NUM_STEPS,
    WIDTH,
    Body,
    Net,
    Pure,
    check,
    source,
)

# -- a tensor that nobody saved ----------------------------------------------------


def clamped(net: Net, x: Tensor, step: int) -> Tensor:
    """Small values in the first steps: the clamp changes nothing then."""
    x = x * (0.1 if step < 3 else 9.0)
    t = net.first(x).square() + net.second(x).square()
    with torch.no_grad():
        t.clamp_(0.0, 1.2)
    return net.last(torch.tanh(t))


def clamped_later(net: Net, x: Tensor, step: int) -> Tensor:
    """The same code object, another branch in later steps."""
    t = net.first(x).tanh() + net.second(x).tanh()
    if step >= 3:
        with torch.no_grad():
            t.mul_(2)
    return net.last(torch.sigmoid(t))


def cleaned(net: Net, x: Tensor, step: int) -> Tensor:
    h = net.norm(net.first(x).square())
    if step >= 3:
        h.detach().nan_to_num_().mul_(0.5)
    return net.last(h.to(torch.float64).to(torch.float32))


class Writes(Pure):
    """As `Pure`, but for a write."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float64)
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.factor)
        with torch.no_grad():
            scaled.clamp_(-self.bound, self.bound)
        return self.weight * scaled.to(x.dtype)


class Calls(Pure):
    """As `Pure`, but for a call of something that is not torch's."""

    def __init__(self, watch: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.square = watch

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float64)
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.factor)
        self.square(scaled)
        return self.weight * scaled.to(x.dtype)


def with_module(make: Callable[[], nn.Module]) -> Body:
    def body(net: Net, x: Tensor, step: int) -> Tensor:
        if not hasattr(net, "extra"):
            net.extra = make()
        net.extra.bound = 100.0 if step < 3 else 0.5
        return net.last(net.extra(net.first(x)))

    return body


def halve_later() -> Callable[[Tensor], None]:
    seen: list[int] = []

    def watch(tensor: Tensor) -> None:
        seen.append(1)
        if len(seen) > 3:
            with torch.no_grad():
                tensor.mul_(0.5)

    return watch


def hooked(net: Net, x: Tensor, step: int) -> Tensor:
    """A forward hook of the norm writes to its result in later steps."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        with torch.no_grad():
            output.mul_(3)

    handle = net.norm.register_forward_hook(hook) if step >= 3 else None
    h = net.norm(net.first(x))
    if handle is not None:
        handle.remove()
    with torch.autocast("cpu", torch.bfloat16):
        return net.last(h).float()


def hooked_before_dropout(net: Net, x: Tensor, step: int) -> Tensor:
    h = F.gelu(net.first(x))
    if step >= 3:
        with torch.no_grad():
            h.add_(1)
    return net.last(net.drops[0](h))


def cast_before_a_change(net: Net, x: Tensor, step: int) -> Tensor:
    """A cast of a weight that is changed before anybody saves the cast."""
    narrow = net.last.weight.to(torch.float64)
    if step >= 3:
        with torch.no_grad():
            net.last.weight.mul_(1.5)
    return F.linear(net.first(x).double(), narrow).float()


HIDDEN = {
    "clamped": clamped,
    "branch": clamped_later,
    "cleaned": cleaned,
    "module": with_module(Writes),
    "callee": with_module(lambda: Calls(halve_later())),
    "hooked": hooked,
    "dropout": hooked_before_dropout,
    "cast": cast_before_a_change,
}


@pytest.mark.parametrize("name", HIDDEN)
def test_an_unsaved_tensor_that_changes_later(name: str) -> None:
    check(HIDDEN[name])


def test_temporaries_of_pure_code_are_passed() -> None:
    reports = check(with_module(Pure))
    # The second step is observed, with hooks on every module.
    first, observed = (each.recipes["ToCopyBackward0"] for each in reports[:2])
    assert observed == first > 0


def test_a_metric_that_is_cleared() -> None:
    """Plain runs: the metric's node is on no gradient's path."""

    def body(net: Net, x: Tensor, step: int) -> Tensor:
        t = net.first(x) + net.second(x)
        metric = t.square().mean()
        y = net.last(torch.tanh(t))
        with torch.no_grad():
            t.zero_()
        return y + 0 * metric.detach()

    check(body)


def test_a_default_device_changes_nothing() -> None:
    before = torch.get_default_device()
    torch.set_default_device("cpu")
    try:
        reports = check(with_module(Pure))
    finally:
        torch.set_default_device(None)
    assert torch.get_default_device() == before
    assert reports[0].recipes["ToCopyBackward0"] > 0


# -- epsilons ----------------------------------------------------------------------


def foreign_epsilon(net: Net, x: Tensor, step: int) -> Tensor:
    """Huge variance hides the epsilon at first."""
    h = net.first(x) * (1e4 if step < 3 else 1e-3)
    return net.last(F.layer_norm(h, (WIDTH,), net.norm.weight, net.norm.bias, 0.1))


def later_epsilon(net: Net, x: Tensor, step: int) -> Tensor:
    net.norm.eps = 1e-5 if step < 3 else 0.5
    return net.last(net.norm(net.first(x)))


def low_level_epsilon(net: Net, x: Tensor, step: int) -> Tensor:
    h = net.first(x) * (1e4 if step < 3 else 1e-3)
    shape, weight, bias = (WIDTH,), net.norm.weight, net.norm.bias
    return net.last(torch.layer_norm(h, shape, weight, bias, 0.1))


def rms_epsilon(net: Net, x: Tensor, step: int) -> Tensor:
    h = net.first(x) * (1e4 if step < 3 else 1e-3)
    return net.last(F.rms_norm(h, (WIDTH,), net.rms.weight, 0.1))


@pytest.mark.parametrize(
    "body", [foreign_epsilon, later_epsilon, low_level_epsilon, rms_epsilon]
)
def test_another_epsilon(body: Body) -> None:
    check(body)


# -- weights -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fused", "foreach", "single"])
def test_an_optimizer_steps_between_two_backwards(kind: str) -> None:
    """Plain runs, because each weight is saved as a cast copy."""
    settings: dict[str, Any] = {"lr": 0.1}
    if kind != "single":
        settings[kind] = True

    def step(net: Net, x: Tensor) -> None:
        optimizer = torch.optim.AdamW(net.parameters(), **settings)
        with torch.autocast("cpu", torch.bfloat16):
            first, second = net(x), net(x + 1)
        first.backward()
        optimizer.step()
        second.backward()

    def body(net: Net, x: Tensor, step: int) -> Tensor:
        h = net.norm(net.first(x)) if kind == "fused" else net.first(x)
        return net.last(F.silu(h)).float()

    check(body, step)


def test_a_fused_step_between_a_cast_and_its_use() -> None:
    """Autocast's cache gives the old cast although the weight's version is the same."""

    def step(net: Net, x: Tensor) -> None:
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
        with torch.autocast("cpu", torch.bfloat16):
            net(x).backward(retain_graph=True)
            optimizer.step()
            net.zero_grad()
            net(x + 1).backward()

    def body(net: Net, x: Tensor, step: int) -> Tensor:
        return net.last(F.silu(net.first(x))).float()

    check(body, step)


# -- random numbers ----------------------------------------------------------------


def test_the_process_wide_generator_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread may draw at any moment: what it gets is what it got."""
    # So that the mode below sees what makes the mask again.
    monkeypatch.setattr(modes, "ASKED", (lambda: 0, *modes.ASKED[1:]))
    real = torch.Generator.set_state
    net = Net(lambda net, x, step: net.last(net.drops[0](net.first(x))))
    session = ssdtrain.offload(net, target="host", min_bytes=0, plan="keep-all")
    torch.manual_seed(3)
    loss = net(source(0))
    states: list[Tensor] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            states.append(torch.get_rng_state())
            return func(*args, **(kwargs or {}))

    before = torch.get_rng_state()
    with Watching():
        loss.backward()
    assert torch.Generator.set_state is real
    assert len(states) > 20
    assert all(same_bits(state, before) for state in states)
    assert session.steps[0].recipes["dropout mask"] > 0
    session.close()


def test_a_draw_between_the_capture_and_the_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread draws after the state was read and before the mask is drawn."""
    real = F.dropout
    drawn: list[int] = []

    def dropout(*args: Any, **kwargs: Any) -> Tensor:
        drawn.append(1)
        # At other places in every step, and at the same ones in every run.
        if len(drawn) % (6 * NUM_STEPS) % 7 > 3:
            thread = threading.Thread(target=lambda: torch.rand(5))
            thread.start()
            thread.join()
        return real(*args, **kwargs)

    def body(net: Net, x: Tensor, step: int) -> Tensor:
        h = net.first(x)
        for drop in net.drops:
            h = drop(net.second(h))
        return net.last(h)

    monkeypatch.setattr(F, "dropout", dropout)
    check(body)
