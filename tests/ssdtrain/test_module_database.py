"""The first law on every module of `torch.nn`, as torch's own test suite builds them.

Outputs, gradients of inputs and parameters, and buffers are compared as bytes, with
everything moved, and with recipes in place of bytes.
"""

import contextlib
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.common_modules import ModuleInfo, module_db
from torch.utils._pytree import tree_leaves, tree_map

import ssdtrain
from tests.ssdtrain.bits import same_bits

# Its import forbids the whole process to set flags of backends, as users do.
vars_of_backends: Any = torch.backends.flags_frozen.__globals__  # type: ignore[attr-defined]
vars_of_backends["__allow_nonbracketed_mutation_flag"] = True

MOVED = {"min_bytes": 0, "window_bytes": 1, "plan": "offload-all", "target": "host"}
SETTINGS: dict[str, dict[str, Any]] = {
    "moved": {**MOVED, "recompute": "off"},
    "recipes": MOVED,
}
DTYPE = torch.float32
MOST_SAMPLES = 4
"""Of a module: some have hundreds."""


class Model(nn.Module):
    """The module in one that has a parameter for certain."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.own = nn.Parameter(torch.ones(()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module."""
        return self.inner(*args, **kwargs)


def draws_again() -> None:
    """Start all generators that a module or its inputs may draw from."""
    torch.manual_seed(0)
    random.seed(0)


def inputs_of(info: ModuleInfo, dtype: torch.dtype, *, training: bool) -> list[Any]:
    """Torch's samples for the module, spread over all it has."""
    draws_again()
    samples = info.module_inputs_func(
        info, device="cpu", dtype=dtype, requires_grad=True, training=training
    )
    usable = [each for each in samples if each.forward_input is not None]
    return usable[:: -(-len(usable) // MOST_SAMPLES)] if usable else []


def leaves_of(value: Any) -> list[Tensor]:
    """Its floating tensors."""
    found = (each for each in tree_leaves(value) if isinstance(each, Tensor))
    return [each for each in found if each.is_floating_point() or each.is_complex()]


def fresh(value: Any) -> Any:
    """A leaf without a gradient in a tensor's place: samples may have a graph."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def step(info: ModuleInfo, sample: Any, training: bool, settings: Any) -> list[Any]:
    """One forward and backward: outputs, gradients, buffers."""
    draws_again()
    made, given = sample.constructor_input, sample.forward_input
    args, kwargs = tree_map(fresh, (given.args, given.kwargs))
    module = Model(info.module_cls(*made.args, **made.kwargs)).to(DTYPE)
    module.train(training)
    with contextlib.ExitStack() as stack:
        if settings is not None:
            stack.enter_context(ssdtrain.offload(module, **settings))
        found = leaves_of(module(*args, **kwargs))
        outputs = [each for each in found if each.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.randn_like(o) for o in outputs])
    used = [*module.parameters(), *leaves_of((args, kwargs))]
    return [*found, *(each.grad for each in used), *module.buffers()]


@pytest.mark.filterwarnings("ignore")  # torch's own, of its samples
@pytest.mark.parametrize("info", module_db, ids=lambda info: info.name)
def test_a_module_of_torch_is_equal_bit_by_bit(info: ModuleInfo) -> None:
    for training in (True, False) if info.train_and_eval_differ else (True,):
        for number, sample in enumerate(inputs_of(info, DTYPE, training=training)):
            plain = step(info, sample, training, None)
            for name, settings in SETTINGS.items():
                ours = step(info, sample, training, settings)
                assert same_bits(ours, plain), (name, training, number)
