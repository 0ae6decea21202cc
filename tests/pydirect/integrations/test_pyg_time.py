"""PyG's loaders with disjoint neighbourhoods, times, partial fan-outs and adj_t."""

import importlib
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def ours(pyg: ModuleType) -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torch_geometric.loader")
        return importlib.import_module("pydirect.integrations.pyg_sampling")


def flat(pyg: ModuleType) -> Any:
    torch.manual_seed(0)
    return pyg.data.Data(
        edge_index=torch.randint(50, (2, 400)),
        when=torch.randint(30, (50,)),
        at=torch.randint(30, (400,)),
        num_nodes=50,
    )


def typed(pyg: ModuleType) -> Any:
    torch.manual_seed(1)
    data = pyg.data.HeteroData()
    data["paper"].when = torch.randint(30, (40,))
    data["paper"].num_nodes, data["author"].num_nodes = 40, 30
    for kind, (n, m) in (
        (("paper", "cites", "paper"), (40, 40)),
        (("author", "writes", "paper"), (30, 40)),
        (("paper", "by", "author"), (40, 30)),
    ):
        data[kind].edge_index = torch.stack(
            (torch.randint(n, (150,)), torch.randint(m, (150,)))
        )
    return data


def test_disjoint(pyg: ModuleType, ours: ModuleType) -> None:
    data = flat(pyg)
    sampler = ours.KeyedNeighborSampler(data, [3, 2], device="cpu", disjoint=True)
    loader = pyg.loader.NodeLoader(data, node_sampler=sampler, batch_size=8)
    for batch in loader:
        source, target = batch.edge_index
        assert torch.equal(batch.batch[source], batch.batch[target])
        assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
        assert batch.batch[: batch.batch_size].tolist() == list(range(batch.batch_size))


@pytest.mark.parametrize("attr", ["when", "at"])
@pytest.mark.parametrize("strategy", ["uniform", "last"])
def test_nodes_by_time(
    pyg: ModuleType, ours: ModuleType, attr: str, strategy: str
) -> None:
    data = flat(pyg)
    options = {"time_attr": attr, "temporal_strategy": strategy, "device": "cpu"}
    sampler = ours.KeyedNeighborSampler(data, [3, 2], **options)
    times = torch.randint(30, (50,))
    loader = pyg.loader.NodeLoader(
        data, node_sampler=sampler, batch_size=16, input_time=times
    )
    seen = 0
    for batch in loader:
        limit = times[batch.input_id][batch.batch[batch.edge_index[1]]]
        time = data.at if attr == "at" else data.when[data.edge_index[0]]
        assert bool((time[batch.e_id] <= limit).all())
        seen += len(batch.e_id)
    assert seen > 100
    # Without times of seeds: the nodes' own.
    alone = pyg.loader.NodeLoader(data, node_sampler=sampler, batch_size=50)
    if attr == "at":
        with pytest.raises(ValueError, match="times of the seeds"):
            next(iter(alone))
        return
    (batch,) = alone
    limit = data.when[batch.input_id][batch.batch[batch.edge_index[1]]]
    assert bool((data.when[data.edge_index[0]][batch.e_id] <= limit).all())


def test_links_by_time_of_typed_nodes(pyg: ModuleType, ours: ModuleType) -> None:
    data, kind = typed(pyg), ("author", "writes", "paper")
    sampler = ours.KeyedNeighborSampler(
        data, [3, 2], device="cpu", time_attr="when", seed=2
    )
    when = torch.randint(30, (150,))
    loader = pyg.loader.LinkLoader(
        data,
        link_sampler=sampler,
        edge_label_index=(kind, data[kind].edge_index),
        edge_label_time=when,
        neg_sampling=pyg.sampler.NegativeSampling("binary", 1),
        batch_size=50,
    )
    for batch in loader:
        label = batch[kind].edge_label_index
        pairs = torch.stack(
            (batch["author"].n_id[label[0]], batch["paper"].n_id[label[1]])
        )
        assert torch.equal(
            pairs[:, :50], data[kind].edge_index[:, batch[kind].input_id]
        )
        limit = when[batch[kind].input_id]
        for name in ("cites", "by"):
            edges = next(batch[k] for k in batch.edge_types if k[1] == name)
            end = "paper" if name == "cites" else "author"
            source = batch["paper"].n_id[edges.edge_index[0]]
            tree = batch[end].batch[edges.edge_index[1]]
            assert bool((data["paper"].when[source] <= limit[tree]).all())


def test_partial_fanouts(pyg: ModuleType, ours: ModuleType) -> None:
    data, cites = typed(pyg), ("paper", "cites", "paper")
    others = [k for k in data.edge_types if k != cites]
    partial = {cites: [3, 2]}
    default = pyg.sampler.NumNeighbors(partial, default=[1, 1])
    for given, some in ((partial, False), (default, True)):
        sampler = ours.KeyedNeighborSampler(data, given, device="cpu")
        loader = pyg.loader.NodeLoader(
            data, node_sampler=sampler, input_nodes="paper", batch_size=40
        )
        (batch,) = loader
        assert batch[cites].num_edges > 0
        assert any(batch[k].num_edges for k in others) is some


def test_adj_t_alone(pyg: ModuleType, ours: ModuleType) -> None:
    data = flat(pyg)
    unique = data.edge_index.unique(dim=1).flip(0)
    adj = torch.sparse_coo_tensor(unique.flip(0), torch.ones(unique.shape[1]), (50, 50))
    alone = pyg.data.Data(adj_t=adj.to_sparse_csr(), num_nodes=50)
    sampler = ours.KeyedNeighborSampler(alone, [-1], device="cpu")
    out = sampler.sample_from_nodes(
        pyg.sampler.NodeSamplerInput(None, torch.tensor([3, 7]))
    )
    source = out.node[out.row]
    for i, node in enumerate((3, 7)):
        want = unique[0][unique[1] == node].sort().values
        assert torch.equal(source[out.col == i].sort().values, want)
