"""Masks drawn again: [Note: dropout masks]."""

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ssdtrain
from ssdtrain.rebuild.dropout import MASK
from tests.ssdtrain.bits import same_bits

WIDTH = 8
TRITON_CASES = Path("tests/ssdtrain/rebuild/triton_cases.py")


class Net(nn.Module):
    """A dropout, however the body applies it."""

    def __init__(self, body: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.first(x)).square().sum()


def train(net: Net, settings: dict[str, Any] | None) -> tuple[list[Tensor], Any]:
    """Gradients of two forwards before their backwards, and the random numbers."""
    net.zero_grad()
    torch.manual_seed(7)
    session = None
    if settings is not None:
        session = ssdtrain.offload(net, target="host", min_bytes=0, **settings)
    losses = [net(torch.randn(4, WIDTH)) for _ in range(2)]
    for loss in losses:
        loss.backward()
    found = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    found.append(torch.rand(3))
    recipes = None
    if session is not None:
        recipes = session.steps[0].recipes
        session.close()
    return found, recipes


def applied(net: Net, a: Tensor) -> Tensor:
    return net.last(net.drop(a))


def applied_twice(net: Net, a: Tensor) -> Tensor:
    return net.drop(net.last(net.drop(a)))


def of_a_slice(net: Net, a: Tensor) -> Tensor:
    return net.drop(a[:, ::2]).t() @ net.drop(a.t().contiguous().t())


USED = {"once": applied, "twice": applied_twice, "strided": of_a_slice}


@pytest.mark.parametrize("name", USED)
def test_masks_are_drawn_again(name: str) -> None:
    net = Net(USED[name])
    theirs, _ = train(net, None)
    for settings in ({"plan": "keep-all"}, {"plan": "offload-all", "window_bytes": 1}):
        ours, recipes = train(net, settings)
        assert recipes[MASK] > 0
        assert same_bits(ours, theirs)


def functional(net: Net, a: Tensor) -> Tensor:
    return net.last(F.dropout(a, 0.3))


def inverted(net: Net, a: Tensor) -> Tensor:
    """A mask that no dropout module drew."""
    return net.last(a * (torch.rand_like(a) > 0.5))


@pytest.mark.parametrize("body", [functional, inverted])
def test_other_masks_are_stored(body: Any) -> None:
    net = Net(body)
    theirs, _ = train(net, None)
    ours, recipes = train(net, {"plan": "keep-all"})
    assert MASK not in recipes
    assert same_bits(ours, theirs)


@pytest.mark.parametrize("change", ["eval", "rate 0", "rate 1", "inplace"])
def test_inert_dropouts(change: str) -> None:
    net = Net(applied)
    if change == "eval":
        net.eval()
    elif change == "inplace":
        net.drop.inplace = True
    else:
        net.drop.p = float(change[-1])
    theirs, _ = train(net, None)
    ours, recipes = train(net, {"plan": "keep-all"})
    assert MASK not in recipes
    assert same_bits(ours, theirs)


@pytest.mark.parametrize(
    "copying", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_a_copied_dropout_is_its_own(copying: Any) -> None:
    """A copy made while attached (an average of the weights) evaluates as a copy."""
    holder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    with ssdtrain.offload(holder, max_overhead=0.01, target="host", min_bytes=0):
        drop = copying(holder[1])
        drop.eval()
        x = torch.ones(4, WIDTH, requires_grad=True)
        assert same_bits(drop(x), x)
        assert not same_bits(holder[1](x), x)


def test_the_output_of_a_fused_dropout_is_rebuilt_from_its_mask() -> None:
    """On a GPU every dropout is fused; on a CPU it has to be asked for."""

    def fused(net: Net, a: Tensor) -> Tensor:
        return net.last(torch.native_dropout(a.tanh(), 0.3, True)[0])

    plain, _ = train(Net(fused), None)
    ours, recipes = train(Net(fused), {"plan": "keep-all"})
    assert same_bits(plain, ours)
    assert recipes["NativeDropoutBackward0"] == 2 * 4 * WIDTH * 4


def test_the_kernel_draws_as_torch_does() -> None:
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.getcwd()
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", str(TRITON_CASES)]
    command += ["-W", "ignore", "-p", "no:cacheprovider"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
