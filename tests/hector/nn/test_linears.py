"""Linear layers inside HGT, whose weights are read and which are not called."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.flop_counter import FlopCounterMode

from hector.nn import HGTConv


def small_hgt() -> tuple[HGTConv, Any]:
    conv = HGTConv(4, 4, (["n"], [("n", "r", "n")]), 2)
    edges = torch.tensor([[0, 1, 2, 0], [1, 1, 0, 2]])
    return conv, ({"n": torch.randn(3, 4)}, {("n", "r", "n"): edges})


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Named(nn.Linear):
    """As its base."""


@pytest.mark.parametrize("kind", ["forward", "pre", "backward", "own", "class"])
def test_what_hgt_would_not_run_is_refused(kind: str) -> None:
    conv, given = small_hgt()
    conv(*given)
    lin: Any = conv.kqv_lin.lins["n"]
    if kind == "forward":
        lin.register_forward_hook(lambda m, i, o: o * 2)
    elif kind == "pre":
        lin.register_forward_pre_hook(lambda m, i: (i[0] * 2,))
    elif kind == "backward":
        lin.register_full_backward_hook(lambda m, i, o: None)
    elif kind == "own":
        lin.forward = torch.sin
    else:
        conv.kqv_lin.lins["n"] = Doubled(4, 12)
    with pytest.raises(ValueError, match="without hooks or a forward of its own for"):
        conv(*given)


class _Half(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


PARAMETRIZED: dict[str, Callable[[Any], Any]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "own": lambda lin: parametrize.register_parametrization(lin, "weight", _Half()),
}


@pytest.mark.parametrize("kind", PARAMETRIZED)
def test_parametrized_weights_of_hgt(kind: str) -> None:
    (conv, given), (plain, _) = small_hgt(), small_hgt()
    lin: Any = conv.kqv_lin.lins["n"]
    plain.load_state_dict(conv.state_dict())
    PARAMETRIZED[kind](lin)
    conv.eval()
    with torch.no_grad():
        plain.kqv_lin.lins["n"].weight.copy_(lin.weight)
    found, wanted = conv(*given)["n"], plain(*given)["n"]
    assert torch.equal(found, wanted)
    for out in (found, wanted):
        out.square().sum().backward()
    for p, q in zip(
        (lin.bias, *conv.out_lin.parameters()),
        (plain.kqv_lin.lins["n"].bias, *plain.out_lin.parameters()),
        strict=True,
    ):
        assert torch.equal(p.grad, q.grad)
    grads = [p.grad for p in lin.parametrizations.parameters()]
    assert grads and all(g is not None and bool(g.any()) for g in grads)


def test_hgt_with_a_subclass_and_under_those_that_only_watch() -> None:
    conv, given = small_hgt()
    wanted = conv(*given)["n"]
    named, old = Named(4, 12), conv.kqv_lin.lins["n"]
    named.load_state_dict(old.state_dict())
    conv.kqv_lin.lins["n"] = named
    assert torch.equal(conv(*given)["n"], wanted)
    seen: list[Any] = []
    watch = nn.modules.module.register_module_forward_hook
    with watch(lambda m, i, o: seen.append(m)):
        assert torch.equal(conv(*given)["n"], wanted)
    assert seen
    with FlopCounterMode(display=False):
        assert torch.equal(conv(*given)["n"], wanted)
