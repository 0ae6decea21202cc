"""Which operators are described, and where DTensor's own strategies agree.

    python -m recipes.bench search.coverage

Core operators are those that torch tags as core. Each strategy of each call of the
tests' cases is given to DTensor on a mesh of two (fake) workers: it agrees if it takes
the operands as they are and gives the results with the placements of the description.
"""

import random
from collections import Counter
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves, tree_map_only

from recipes.bench.harness.cli import Bench
from recipes.bench.search.operator_cases import cases
from ssdtrain.tools.search.calls import bound, call_of, describer_of, name_of
from ssdtrain.tools.search.describe import describe, is_elementwise
from ssdtrain.tools.search.placement import Cut
from ssdtrain.tools.search.runner import on_mesh
from ssdtrain.tools.search.strategies import Strategy, strategies

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
        if names is not None and name_of(func) not in names:
            continue
        call = call_of(func, args, kwargs, func(*args, **kwargs))
        described = describe(call)
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


def main(bench: Bench) -> None:
    """Compare, and record what was found."""
    cells = bench.cells()
    cells.run("core operators", lambda: {k: len(v) for k, v in kinds().items()})
    cells.run("not described", lambda: {"names": kinds()["not described: run whole"]})
    totals: dict[str, Counter[str]] = {}
    for seed in range(4):
        for name, told in compared(seed).items():
            totals.setdefault(name, Counter()).update(told)
    cells.run("DTensor", lambda: dict(sum(totals.values(), Counter())))
    for name, told in sorted(totals.items()):
        if set(told) != {"agrees"}:
            cells.run(name, dict, told)
