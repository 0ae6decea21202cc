"""What a cached graph is compared by, without a look at its tensors' values: on a GPU
only that is known when a call begins."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from hector import graph_cache
from hector.graph import HeteroGraph
from hector.graph_cache import GraphCache


class Blind:
    """A watch that sees nothing."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        del tensors

    def unchanged(self, tensors: Sequence[Tensor]) -> bool:
        return True


def in_place(t: Tensor) -> None:
    t.add_(1)


def set_memory(t: Tensor) -> None:
    t.data = t + 1


def transposed(t: Tensor) -> None:
    t.data = t.data.as_strided((2, 3), (1, 2))


@pytest.mark.parametrize("change", [in_place, set_memory, transposed])
def test_without_a_look_at_the_values(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], None]
) -> None:
    monkeypatch.setattr(graph_cache, "watch", Blind)
    cache, ends = GraphCache(), torch.arange(6).view(2, 3)

    def make(_: bool = False) -> HeteroGraph:
        return HeteroGraph.from_pyg(ends, torch.zeros_like(ends[0]))

    first = cache.get([ends], None, make)
    assert cache.get([ends], None, make) is first
    change(ends)
    assert cache.get([ends], None, make) is not first


def test_inference_tensors_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_cache, "watch", Blind)
    cache = GraphCache()
    with torch.inference_mode():
        ends = torch.arange(6).view(2, 3)

        def make(_: bool = False) -> HeteroGraph:
            return HeteroGraph.from_pyg(ends, torch.zeros_like(ends[0]))

        assert cache.get([ends], None, make) is not cache.get([ends], None, make)
    assert len(cache) == 0


def test_the_least_recently_used_leaves() -> None:
    cache = GraphCache(capacity=2)
    tensors = [torch.tensor([[0], [i]]) for i in range(3)]

    def get(i: int) -> HeteroGraph:
        ends = tensors[i]
        return cache.get(
            [ends],
            None,
            lambda _: HeteroGraph.from_pyg(ends, torch.zeros_like(ends[0])),
        )

    first, second = get(0), get(1)
    assert get(0) is first
    get(2)
    assert get(0) is first and get(1) is not second
    assert len(cache) == 2
    cache.clear()
    assert len(cache) == 0 and not first.state.arrays


def test_facts_are_part_of_the_key() -> None:
    cache, ends = GraphCache(), torch.tensor([[0, 1], [1, 2]])
    kinds = torch.zeros(2, dtype=torch.int64)
    sizes = []
    for nodes in (3, 5):
        graph = cache.get(
            [ends, kinds],
            nodes,
            lambda _, n=nodes: HeteroGraph.from_pyg(ends, kinds, num_nodes=n),
        )
        sizes.append(graph.num_nodes)
    assert sizes == [3, 5]
