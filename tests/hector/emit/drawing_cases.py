"""A hop of a draw as one kernel, against PyTorch's operations.

Run by test_kernels.py in a process of its own, with Triton's interpreter or a GPU.
"""

import pytest
import torch

from hector.drawing_kernels import padded_hop
from hector.graph import HeteroGraph
from hector.sampling import NeighborSampler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("fanout", [1, 3, 40])
def test_a_hop_is_the_hop(fanout: int) -> None:
    """Nodes with no, few and many edges, slots that are not asked for, more places
    than a block has."""
    torch.manual_seed(fanout)
    dst = torch.cat((torch.randint(50, (400,)), torch.full((90,), 7)))
    src = torch.randint(60, (490,))
    graph = HeteroGraph.from_arrays(src, dst, dst % 3, num_nodes=60)
    sampler = NeighborSampler(graph, (fanout,))
    slots = torch.cat((torch.randperm(60), torch.arange(40)))
    live = torch.rand(100) < 0.8
    for hop, key in enumerate((0, 5, 2**32 - 1)):
        wanted = sampler.hop_padded(slots, live, torch.tensor(key), hop, fanout)
        found = padded_hop(
            *(slots.to(DEVICE), live.to(DEVICE), graph.to(DEVICE).csc()),
            *(graph.src.to(DEVICE), torch.tensor(key, device=DEVICE), fanout, hop),
        )
        edges, nodes, real = (each.cpu() for each in found)
        assert torch.equal(edges, wanted[0]) and torch.equal(real, wanted[2])
        assert torch.equal(nodes[real], wanted[1][real])
        assert 0 < int(real.sum()) < real.numel()
