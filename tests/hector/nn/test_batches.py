"""Batches as PyG's loaders and pydirect's samplers give them, and PyG's options."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hector.graph import HeteroGraph
from hector.nn import FastRGCNConv, HGTConv, RGATConv, RGCNConv
from hector.nn.common import CompiledConv

pyg = pytest.importorskip("torch_geometric")
from torch_geometric.data import Data, HeteroData  # noqa: E402
from torch_geometric.nn import HGTConv as PygHGT  # noqa: E402
from torch_geometric.nn import RGATConv as PygRGAT  # noqa: E402
from torch_geometric.nn import RGCNConv as PygRGCN  # noqa: E402

NAMES = ["a", "b", "c"]
TYPES = [("a", "r0", "b"), ("b", "r1", "a"), ("a", "r2", "a"), ("c", "r3", "a")]
W = 4


def batch(seed: int, names: str = "abc", skip: int | None = None) -> HeteroData:
    """What a loader returns for a drawn neighbourhood: local ids, `n_id`, seeds first;
    types without nodes and relations without edges may be there or not."""
    gen = torch.Generator().manual_seed(seed)
    data = HeteroData()
    sizes = {n: 3 + seed % 3 + i for i, n in enumerate(names)}
    for n, size in sizes.items():
        data[n].x = torch.randn(size, W, generator=gen, dtype=torch.float64)
        data[n].n_id = torch.arange(size)
    data["a"].batch_size = 2
    for i, (s, r, d) in enumerate(TYPES):
        if s not in sizes or d not in sizes or i == skip:
            continue
        num = 0 if (seed + i) % 4 == 0 else 6
        src = torch.randint(sizes[s], (num,), generator=gen)
        dst = torch.randint(sizes[d], (num,), generator=gen)
        data[s, r, d].edge_index = torch.stack((src, dst))
        data[s, r, d].e_id = torch.arange(num)
    return data


def both(**options: Any) -> tuple[HGTConv, Any]:
    torch.manual_seed(0)
    ours = HGTConv(W, W, (NAMES, TYPES), heads=2, **options).double()
    theirs = PygHGT(W, W, (NAMES, TYPES), heads=2).double()
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.parametrize("seed", range(12))
def test_hgt_on_dicts_of_a_batch(seed: int) -> None:
    ours, theirs = both()
    names = "abc" if seed % 3 else "ab"
    data = batch(seed, names, skip=seed % 5)
    got = ours(data.x_dict, data.edge_index_dict)
    want = theirs(data.x_dict, data.edge_index_dict)
    reached = {t[2] for t in data.edge_types}
    for name in reached & set(got):
        if want.get(name) is not None:
            torch.testing.assert_close(got[name], want[name])


def test_many_batches_through_one_layer() -> None:
    """More than a cache keeps: the later ones are graphs of many alike."""
    ours, _ = both()
    for seed in range(30):
        data = batch(seed)
        want = copy.deepcopy(ours)(data.x_dict, data.edge_index_dict)
        found = ours(data.x_dict, data.edge_index_dict)
        torch.testing.assert_close(found, want)


def test_a_batch_as_a_graph() -> None:
    ours, _ = both()
    data = batch(1, "ab")
    graph = HeteroGraph.from_batch(data, (NAMES, TYPES))
    assert graph.sampled and graph.num_node_types == 3 and graph.num_edge_types == 4
    rows = torch.cat([data[n].x for n in "ab"])
    want = ours(data.x_dict, data.edge_index_dict)
    got = dict(
        zip("ab", ours(rows, graph).split([len(data[n].x) for n in "ab"]), strict=True)
    )
    for name in "ab":
        torch.testing.assert_close(got[name], want[name])


def test_a_homogeneous_batch_as_a_graph() -> None:
    gen = torch.Generator().manual_seed(0)
    data = Data(
        x=torch.randn(9, W, generator=gen, dtype=torch.float64),
        edge_index=torch.randint(9, (2, 20), generator=gen),
        edge_type=torch.randint(3, (20,), generator=gen),
    )
    torch.manual_seed(0)
    conv = RGCNConv(W, W, 3).double()
    graph = HeteroGraph.from_batch(data, num_relations=3)
    want = conv(data.x, data.edge_index, data.edge_type)
    torch.testing.assert_close(conv(data.x, graph), want)
    with pytest.raises(ValueError, match="num_nodes and num_relations"):
        HeteroGraph.from_batch(data)


def test_a_batch_of_pydirects_kind() -> None:
    data = batch(2)
    other = SimpleNamespace(
        node_ids={n: data[n].n_id for n in NAMES}, edge_index=data.edge_index_dict
    )
    one = HeteroGraph.from_batch(data, (NAMES, TYPES))
    two = HeteroGraph.from_batch(other, (NAMES, TYPES))
    for name in ("src", "dst", "edge_type", "node_type_ptr"):
        assert torch.equal(getattr(one, name), getattr(two, name))


def sparse(edge_index: Tensor, shape: tuple[int, int], values: Tensor) -> Tensor:
    """PyG's adj_t: a row a destination."""
    return torch.sparse_coo_tensor(edge_index.flip(0), values, shape).coalesce()


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_adj_t(layout: str) -> None:
    ours, _ = both()
    data = batch(1)
    adj = {}
    for s, r, d in data.edge_types:
        edges = data[s, r, d].edge_index.unique(dim=1)
        data[s, r, d].edge_index = edges
        shape = (len(data[d].x), len(data[s].x))
        made = sparse(edges, shape, torch.ones(edges.shape[1]))
        adj[s, r, d] = made.to_sparse_csr() if layout == "csr" else made
    want = ours(data.x_dict, data.edge_index_dict)
    torch.testing.assert_close(ours(data.x_dict, adj), want)
    ends = torch.tensor([[0, 1, 2, 2], [1, 0, 0, 3]])
    kinds, x = torch.tensor([0, 1, 1, 0]), torch.randn(4, W).double()
    conv = RGCNConv(W, W, 2).double()
    found = conv(x, sparse(ends, (4, 4), kinds))
    torch.testing.assert_close(found, conv(x, ends, kinds))
    with pytest.raises(ValueError, match="integer values"):
        conv(x, sparse(ends, (4, 4), kinds.double()))


def test_a_batch_without_edges() -> None:
    ours, theirs = both()
    x = {n: torch.randn(3, W).double() for n in "ab"}
    found = ours(x, {})
    gate = {n: theirs.skip[n].sigmoid() for n in "ab"}
    for n in "ab":
        zero = theirs.out_lin.lins[n](torch.zeros(3, W).double())
        torch.testing.assert_close(found[n], gate[n] * zero + (1 - gate[n]) * x[n])


def test_types_that_the_layer_does_not_know() -> None:
    ours, _ = both()
    data = batch(1)
    with pytest.raises(ValueError, match="expected types of the metadata"):
        HeteroGraph.from_batch(data, (NAMES[:2], TYPES[:3]))
    del ours


PAIRS = [(RGCNConv, PygRGCN), (FastRGCNConv, PygRGCN), (RGATConv, PygRGAT)]


@pytest.mark.parametrize("ours, theirs", PAIRS)
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_flow(ours: type[CompiledConv], theirs: Any, flow: str) -> None:
    torch.manual_seed(0)
    mine = ours(W, W, 3, flow=flow).double()  # type: ignore[call-arg]
    other = theirs(W, W, 3, flow=flow).double()
    other.load_state_dict(mine.state_dict())
    ends, kinds = torch.randint(9, (2, 30)), torch.randint(3, (30,))
    x = torch.randn(9, W).double()
    torch.testing.assert_close(mine(x, ends, kinds), other(x, ends, kinds))


def test_flow_of_a_graph_is_refused() -> None:
    graph = HeteroGraph.from_arrays([0], [1], [0], num_nodes=2)
    conv = RGCNConv(W, W, 1, flow="target_to_source")
    with pytest.raises(ValueError, match="ends exchanged"):
        conv(torch.randn(2, W), graph)
    with pytest.raises(ValueError, match="expected flow"):
        RGCNConv(W, W, 1, flow="sideways")


@pytest.mark.parametrize("blocks", [None, 2])
@pytest.mark.parametrize("aggr", ["mean", "sum", "max", "min"])
def test_aggregations(aggr: str, blocks: int | None) -> None:
    torch.manual_seed(0)
    mine = RGCNConv(W, W, 3, num_blocks=blocks, aggr=aggr).double()
    other = PygRGCN(W, W, 3, num_blocks=blocks, aggr=aggr).double()
    other.load_state_dict(mine.state_dict())
    ends, kinds = torch.randint(9, (2, 30)), torch.randint(3, (30,))
    x = torch.randn(9, W).double()
    torch.testing.assert_close(mine(x, ends, kinds), other(x, ends, kinds))


def test_widths_left_open() -> None:
    torch.manual_seed(0)
    ours = HGTConv(-1, W, (NAMES, TYPES), heads=2).double()
    theirs = PygHGT(W, W, (NAMES, TYPES), heads=2).double()
    few, data = batch(1, "ab"), batch(1)
    ours(few.x_dict, few.edge_index_dict)
    assert ours.in_channels == {"a": W, "b": W, "c": -1}
    ours(data.x_dict, data.edge_index_dict)
    theirs.load_state_dict(ours.state_dict())
    got = ours(data.x_dict, data.edge_index_dict)
    want = theirs(data.x_dict, data.edge_index_dict)
    torch.testing.assert_close(got["a"], want["a"])
