"""Parts of described operators, put together, are the whole operator."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ssdtrain.tools.search.calls import OperatorCall, bound, call_of
from ssdtrain.tools.search.describe import describe_call
from ssdtrain.tools.search.language import Reducer
from ssdtrain.tools.search.partial_run import run_part
from ssdtrain.tools.search.placement import Copied, Cut, Unreduced, piece
from ssdtrain.tools.search.strategies import Strategy, strategies
from tests.ssdtrain.tools.search.operator_cases import cases

COMBINE = {
    Reducer.SUM: lambda parts: sum(parts[1:], parts[0]),
    Reducer.PROD: lambda parts: torch.stack(parts).prod(0),
    Reducer.MAX: lambda parts: torch.stack(parts).amax(0),
    Reducer.MIN: lambda parts: torch.stack(parts).amin(0),
}


def part(tensor: Tensor, need: Any, ways: int, worker: int) -> Tensor:
    """What a worker reads: its piece, rows of neighbours, zeros beyond the ends."""
    if isinstance(need, Copied):
        return tensor.clone()
    size = tensor.shape[need.dim]
    begin, end = piece(size, ways, worker)
    begin, end = begin - need.before, end + need.after
    found = tensor.narrow(need.dim, max(0, begin), min(size, end) - max(0, begin))
    pad = [0, 0] * (tensor.dim() - 1 - need.dim)
    pad += [max(0, -begin), max(0, end - size)]
    return torch.nn.functional.pad(found, pad) if need.has_halo else found.clone()


def split(
    call: OperatorCall, one: Strategy, ways: int, arguments: Any
) -> list[list[Tensor]]:
    weights: list[Tensor] = []

    def run(worker: int, total: Any) -> list[Tensor]:
        count = -1

        def own(tensor: Tensor) -> Tensor:
            nonlocal count
            count += 1
            return part(tensor, one.needs[count], ways, worker)

        mine = tree_map_only(Tensor, own, arguments)
        made = run_part(call, [one], [ways], [worker], mine, total)
        return [x for x in tree_leaves(made) if isinstance(x, Tensor)]

    def noted(weight: Tensor) -> Tensor:
        weights.append(weight)
        return weight

    for worker in range(ways):  # what a loss's mean is over
        run(worker, noted)
    reduces = any(isinstance(give, Unreduced) for give in one.gives)
    return [run(w, lambda x: sum(weights) if reduces else x) for w in range(ways)]


def together(parts: Sequence[Tensor], give: Any) -> Tensor:
    if isinstance(give, Cut):
        return torch.cat(list(parts), give.dim)
    if isinstance(give, Unreduced):
        return COMBINE[give.reducer](list(parts))
    for other in parts[1:]:
        assert torch.equal(other, parts[0])
    return parts[0]


def check(func: Any, args: Any, kwargs: Any) -> int:
    """Compare all strategies; the number of them."""
    given = bound(func, args, kwargs)
    whole = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
    call = call_of(func, args, kwargs, whole)
    described = describe_call(call)
    assert described is not None, call.name
    found = strategies(described, call.shapes, call.results)
    tried = 0
    for one in found:
        for ways in (2, 3):
            sizes = [
                tensor.shape[p.dim]
                for tensors, places in ((call.tensors, one.needs), (whole, one.gives))
                for tensor, p in zip(tensors, places, strict=True)
                if isinstance(p, Cut)
            ]
            pieces = [piece(s, ways, w) for s in sizes for w in range(ways)]
            if any(begin == end for begin, end in pieces):
                continue  # an empty piece
            if one.is_exact and any(s % ways for s in sizes):
                continue
            if any(b == e for b, e in pieces):
                continue
            parts = split(call, one, ways, given)
            tried += 1
            for at, want in enumerate(whole):
                got = together([p[at] for p in parts], one.gives[at])
                assert got.shape == want.shape, (call.name, one)
                if not want.is_floating_point():
                    assert torch.equal(got, want), (call.name, one)
                else:
                    torch.testing.assert_close(
                        got,
                        want,
                        rtol=1e-9,
                        atol=1e-9,
                        equal_nan=True,
                        msg=lambda text, own=one: f"{call.name} {own}: {text}",
                    )
    return tried


@pytest.mark.parametrize("seed", range(3))
def test_parts_make_the_whole(seed: int) -> None:
    torch.manual_seed(seed)
    tried = sum(check(*made) for made in cases(random.Random(seed)))
    assert tried > 200
