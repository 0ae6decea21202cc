"""Every described operator has a case, and DTensor's strategies agree."""

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves, tree_map_only

from ssdtrain.tools.search.calls import (
    bound,
    call_of,
    described_names,
    describer_of,
    operator_name,
)
from ssdtrain.tools.search.describe import describe_call, is_elementwise
from ssdtrain.tools.search.placement import Cut
from ssdtrain.tools.search.runner import on_mesh
from ssdtrain.tools.search.strategies import Strategy, strategies
from tests.ssdtrain.tools.search.operator_cases import cases

DIFFERS = {
    "aten::_cdist_forward": "no strategy",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "knows batch and heads alone",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "no strategy",
    "aten::addmv": "cuts what is added, too",
    "aten::all": "reduces by a product",
    "aten::any": "reduces by a sum",
    "aten::avg_pool2d_backward": "no strategy",
    "aten::convolution": "says that pieces of channels are copies",
    "aten::convolution_backward": "knows the batch alone",
    "aten::expand": "never cuts what is repeated",
    "aten::huber_loss": "averages parts; here they are scaled and added",
    "aten::mean": "averages parts; here they are scaled and added",
    "aten::mse_loss": "averages parts; here they are scaled and added",
    "aten::native_group_norm_backward": "fails on pieces of the batch",
    "aten::nll_loss_forward": "averages parts, whatever the weights of the rows",
    "aten::reflection_pad2d": "no strategy",
    "aten::replication_pad2d": "no strategy",
    "aten::smooth_l1_loss": "averages parts; here they are scaled and added",
    "aten::tril": "does not cut the batch",
    "aten::view": "refuses pieces of some sizes",
}
"""What DTensor does otherwise. `test_operators.py` shows that the parts are right."""
NOT_ON_A_CPU = {
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention",
}
SAMPLE = {
    f"aten::{name}"
    for name in (
        "mm addmm bmm _softmax native_layer_norm embedding transpose relu sum "
        "mean cat add view"
    ).split()
}
"""Of the operators: all of them take minutes."""
UNSPLIT = ("_opaque", "_made")
"""Describers of what cannot be split."""


def core() -> dict[str, Any]:
    """Core ATen operators by name, one overload each; none that works in place."""
    found: dict[str, Any] = {}
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in getattr(packet, "overloads", list)():
            func = getattr(packet, overload)
            if name.startswith("sym_") or name.endswith("_"):  # "resize_"
                continue
            if torch.Tag.core in func.tags:
                found.setdefault(f"aten::{name}", func)
    return found


def kinds() -> dict[str, list[str]]:
    """Core operators by how they are described."""
    found: dict[str, list[str]] = {}
    for name, func in core().items():
        own = describer_of(name)
        kind = "not described: run whole"
        if own is not None:
            kind = "own description"
            if own.__name__ in UNSPLIT:
                kind = "opaque: run whole"
        elif is_elementwise(func):
            kind = "elementwise"
        found.setdefault(kind, []).append(name)
    return found


def agreement(func: Any, args: Any, kwargs: Any, one: Strategy, mesh: Any) -> str:
    """What DTensor makes of a strategy."""
    count = -1

    def spread(tensor: Tensor) -> DTensor:
        nonlocal count
        count += 1
        need = one.needs[count]
        local = tensor.clone()
        if isinstance(need, Cut):
            local = tensor.narrow(need.dim, 0, tensor.shape[need.dim] // 2).clone()
        return DTensor.from_local(local, mesh, on_mesh([need]), run_check=False)

    given = tree_map_only(Tensor, spread, (args, kwargs))
    debug = CommDebugMode()
    try:
        with debug:
            out = func(*given[0], **given[1])
    except NotImplementedError:
        return "no strategy"
    except Exception as error:
        return f"{type(error).__name__}"
    got = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
    if debug.get_total_counts():
        return "moves operands"
    for result, give in zip(got, one.gives, strict=True):
        if list(result.placements) != on_mesh([give]):
            return f"gives {result.placements[0]}"
    return "agrees"


def compared(seed: int, names: set[str] | None = None) -> dict[str, Counter[str]]:
    """What DTensor makes of all strategies, by operator; `names`: of these alone."""
    if not distributed.is_initialized():
        store = FakeStore()
        distributed.init_process_group("fake", store=store, rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    found: dict[str, Counter[str]] = {}
    torch.manual_seed(seed)
    for func, args, kwargs in cases(random.Random(seed)):
        if names is not None and operator_name(func) not in names:
            continue
        call = call_of(func, args, kwargs, func(*args, **kwargs))
        described = describe_call(call)
        if described is None:
            continue
        for one in strategies(described, call.shapes, call.results):
            tensors = [
                x
                for x in tree_leaves(bound(func, args, kwargs))
                if isinstance(x, Tensor)
            ]
            cuts = [
                t.shape[n.dim]
                for t, n in zip(tensors, one.needs, strict=True)
                if isinstance(n, Cut)
            ]
            halo = any(isinstance(n, Cut) and n.has_halo for n in one.needs)
            if halo or any(size % 2 for size in cuts):
                continue
            told = agreement(func, args, kwargs, one, mesh)
            found.setdefault(call.name, Counter())[f"{told}"] += 1
    return found


@pytest.fixture
def fake_workers() -> Iterator[None]:
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


def test_dtensor_agrees(fake_workers: None) -> None:
    found = compared(0, SAMPLE)
    others = {name for name, told in found.items() if set(told) != {"agrees"}}
    assert others <= set(DIFFERS), others - set(DIFFERS)
    assert len(found) == len(SAMPLE)


def test_core_operators() -> None:
    found = kinds()
    assert sorted(found["not described: run whole"]) == [
        "aten::_local_scalar_dense",
        "aten::adaptive_avg_pool1d",
        "aten::as_strided",
        "aten::avg_pool1d",
        "aten::nonzero",
    ]
    described = len(found["own description"]) + len(found["elementwise"])
    assert described >= 0.8 * len(core())


def test_every_description_has_a_case() -> None:
    tried = {operator_name(func) for func, _, _ in cases(random.Random(0))}
    for name in described_names():
        unsplit = getattr(describer_of(name), "__name__", "") in UNSPLIT
        on_gpu = name.removesuffix("_backward") in NOT_ON_A_CPU
        assert name in tried or unsplit or on_gpu, name
