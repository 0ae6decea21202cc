"""The kernels on a GPU draw what the CPU draws."""

import gc

import pytest
import torch

from pydirect.sampling import DeviceSampler, Graph, settle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("residence", ["device", "host"])
def test_same_sample(weighted: bool, replace: bool, residence: str) -> None:
    generator = torch.Generator().manual_seed(1)
    edges = torch.randint(3000, (2, 60_000), generator=generator)
    weights = torch.randint(0, 5, (60_000,), generator=generator)
    graph = Graph.from_edges(edges, 3000, weights=weights)
    batches = []
    for device in ("cpu", "cuda"):
        there = settle(graph, device, residence, weighted=weighted)
        sampler = DeviceSampler(there, [9, -1, 4], replace=replace, weighted=weighted)
        batches.append(sampler.sample(torch.arange(100), seed=5, batch=2))
    here, far = batches
    assert far.node_ids.is_cuda
    assert torch.equal(here.node_ids, far.node_ids.cpu())
    assert torch.equal(here.edge_index, far.edge_index.cpu())
    assert torch.equal(here.edge_ids, far.edge_ids.cpu())


def test_edges_stay_pinned_for_a_second_sampler() -> None:
    """Both read one registration; the first one's end must not be the second's."""
    graph = Graph.from_edges(torch.randint(3000, (2, 60_000)), 3000)
    want = DeviceSampler(settle(graph, "cpu"), [5]).sample(torch.arange(100), 1)
    first = settle(graph, "cuda", "host")
    second = DeviceSampler(settle(graph, "cuda", "host"), [5])
    del first
    gc.collect()
    got = second.sample(torch.arange(100), 1)
    assert torch.equal(got.node_ids.cpu(), want.node_ids)
