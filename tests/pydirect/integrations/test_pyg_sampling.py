"""PyG's loaders work unchanged over our sampler."""

import importlib
import warnings
from types import ModuleType

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def ours(pyg: ModuleType) -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torch_geometric.loader")
        return importlib.import_module("pydirect.integrations.pyg_sampling")


def homogeneous(pyg: ModuleType) -> object:
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(50, (2, 400), generator=generator)
    return pyg.data.Data(
        x=torch.arange(50.0)[:, None],
        edge_index=edges,
        edge_attr=torch.arange(400.0),
        heat=(torch.arange(400) % 3).float(),
        num_nodes=50,
    )


def heterogeneous(pyg: ModuleType) -> object:
    generator = torch.Generator().manual_seed(0)
    data = pyg.data.HeteroData()
    data["paper"].x = torch.arange(40.0)[:, None]
    data["author"].x = torch.arange(30.0)[:, None]
    for kind, sizes in (
        (("paper", "cites", "paper"), (40, 40)),
        (("author", "writes", "paper"), (30, 40)),
        (("paper", "by", "author"), (40, 30)),
    ):
        rows = [torch.randint(n, (150,), generator=generator) for n in sizes]
        data[kind].edge_index = torch.stack(rows)
    return data


@pytest.mark.parametrize("workers", [0, 2])
def test_node_loader(pyg: ModuleType, ours: ModuleType, workers: int) -> None:
    data = homogeneous(pyg)
    epochs = []
    for _ in range(2):
        sampler = ours.KeyedNeighborSampler(data, [4, 3], device="cpu", seed=5)
        loader = pyg.loader.NodeLoader(
            data, node_sampler=sampler, batch_size=8, num_workers=workers
        )
        epochs.append(list(loader))
    for batch, again in zip(*epochs, strict=True):
        assert torch.equal(batch.edge_index, again.edge_index)
        assert torch.equal(batch.x[:, 0], batch.n_id.float())
        assert torch.equal(batch.n_id[: batch.batch_size], batch.input_id)
        edges = data.edge_index[:, batch.e_id]
        assert torch.equal(batch.n_id[batch.edge_index], edges)
        assert torch.equal(batch.edge_attr, batch.e_id.float())
        assert sum(batch.num_sampled_edges) == batch.num_edges


def test_weights_and_epochs(pyg: ModuleType, ours: ModuleType) -> None:
    data = homogeneous(pyg)
    sampler = ours.KeyedNeighborSampler(data, [3], device="cpu", weight_attr="heat")
    loader = pyg.loader.NodeLoader(data, node_sampler=sampler, batch_size=50)
    (first,), (second,) = list(loader), list(loader)
    assert bool((data.heat[first.e_id] > 0).all())
    assert not torch.equal(first.e_id, second.e_id)


def test_workers_draw_anew_in_each_epoch(pyg: ModuleType, ours: ModuleType) -> None:
    """Each epoch's workers begin with a copy of the sampler as it was built."""
    runs = []
    for _ in range(2):
        sampler = ours.KeyedNeighborSampler(homogeneous(pyg), [3], device="cpu", seed=4)
        loader = pyg.loader.NodeLoader(
            homogeneous(pyg), node_sampler=sampler, batch_size=50, num_workers=1
        )
        runs.append([batch.e_id.tolist() for _ in range(2) for batch in loader])
    assert runs[0] == runs[1] and runs[0][0] != runs[0][1]


@pytest.mark.parametrize("negative", [None, "binary", "triplet"])
def test_link_loader(pyg: ModuleType, ours: ModuleType, negative: str | None) -> None:
    data = homogeneous(pyg)
    sampler = ours.KeyedNeighborSampler(data, [4], device="cpu")
    loader = pyg.loader.LinkLoader(
        data,
        link_sampler=sampler,
        edge_label_index=data.edge_index,
        neg_sampling=negative and pyg.sampler.NegativeSampling(negative, 2),
        batch_size=100,
    )
    num = 0
    for batch in loader:
        edges = data.edge_index[:, batch.e_id]
        assert torch.equal(batch.n_id[batch.edge_index], edges)
        if negative == "triplet":
            pairs = torch.stack([batch.src_index, batch.dst_pos_index])
        else:
            pairs = batch.edge_label_index[:, :100]
        assert torch.equal(batch.n_id[pairs], data.edge_index[:, batch.input_id])
        num += len(batch.input_id)
    assert num == 400


@pytest.mark.parametrize("hetero", [False, True])
def test_a_sampler_that_repeats_nodes(
    pyg: ModuleType, ours: ModuleType, hetero: bool
) -> None:
    """Rows in the order of the input; features, labels and edges belong to them."""
    data = heterogeneous(pyg) if hetero else homogeneous(pyg)
    store = data["paper"] if hetero else data
    store.y = torch.arange(store.num_nodes) % 10 // 9
    mask = torch.ones(store.num_nodes, dtype=torch.bool)
    loader = pyg.loader.NodeLoader(
        data,
        node_sampler=ours.KeyedNeighborSampler(data, [-1, 2], device="cpu"),
        input_nodes=("paper", mask) if hetero else mask,
        batch_size=25,
        sampler=pyg.loader.ImbalancedSampler(store.y),
    )
    repeated = 0
    for batch in loader:
        rows = batch["paper"] if hetero else batch
        repeated += rows.batch_size - len(rows.input_id.unique())
        assert torch.equal(rows.n_id[: rows.batch_size], rows.input_id)
        assert torch.equal(rows.x[:, 0], rows.n_id.float())
        kind = ("paper", "cites", "paper") if hetero else None
        edges, theirs = (d[kind] if hetero else d for d in (batch, data))
        assert torch.equal(
            rows.n_id[edges.edge_index], theirs.edge_index[:, edges.e_id]
        )
        degree = torch.bincount(theirs.edge_index[1], minlength=store.num_nodes)
        first = edges.edge_index[1, : edges.num_sampled_edges[0]]
        drawn = torch.bincount(first, minlength=rows.batch_size)
        assert torch.equal(drawn, degree[rows.input_id])
    assert repeated > 0


def test_heterogeneous_loaders(pyg: ModuleType, ours: ModuleType) -> None:
    data = heterogeneous(pyg)
    sampler = ours.KeyedNeighborSampler(data, [4, 3], device="cpu")
    loader = pyg.loader.NodeLoader(
        data, node_sampler=sampler, input_nodes="paper", batch_size=10
    )
    for batch in loader:
        for kind in data.edge_types:
            local, ids = batch[kind].edge_index, batch[kind].e_id
            ends = torch.stack(
                [batch[kind[0]].n_id[local[0]], batch[kind[2]].n_id[local[1]]]
            )
            assert torch.equal(ends, data[kind].edge_index[:, ids])
        assert torch.equal(batch["author"].x[:, 0], batch["author"].n_id.float())
    kind = ("author", "writes", "paper")
    links = pyg.loader.LinkLoader(
        data,
        link_sampler=sampler,
        edge_label_index=(kind, data[kind].edge_index),
        batch_size=50,
    )
    for batch in links:
        local = batch[kind].edge_label_index
        ends = torch.stack(
            [batch["author"].n_id[local[0]], batch["paper"].n_id[local[1]]]
        )
        assert torch.equal(ends, data[kind].edge_index[:, batch[kind].input_id])


def test_errors(pyg: ModuleType, ours: ModuleType) -> None:
    data = homogeneous(pyg)
    with pytest.raises(ValueError, match="weight_attr: expects an attribute"):
        ours.KeyedNeighborSampler(data, [3], device="cpu", weight_attr="missing")
    data.short = torch.ones(7)
    with pytest.raises(ValueError, match=r"of 400 edges .* 'short' of shape \[7\]"):
        ours.KeyedNeighborSampler(data, [3], device="cpu", weight_attr="short")
    data.column = torch.ones(400, 1).half()
    ours.KeyedNeighborSampler(data, [3], device="cpu", weight_attr="column")
    sampler = ours.KeyedNeighborSampler(data, [3], device="cpu")
    timed = pyg.sampler.NodeSamplerInput(
        None, torch.tensor([1]), time=torch.tensor([2])
    )
    with pytest.raises(ValueError, match="time: expects a sampler with time_attr"):
        sampler.sample_from_nodes(timed)
    one = torch.tensor([1])
    edge = pyg.sampler.EdgeSamplerInput(None, one, one, time=torch.tensor([2]))
    with pytest.raises(ValueError, match="time: expects a sampler with time_attr"):
        sampler.sample_from_edges(edge)
    for bad, said in ((50, "got 50 to 50"), (-1, "got -1 to -1")):
        edges = torch.tensor([[0], [bad]])
        wrong = pyg.data.Data(edge_index=edges, num_nodes=50)
        with pytest.raises(ValueError, match=f"nodes 0 to 49, {said}"):
            ours.KeyedNeighborSampler(wrong, [3], device="cpu")


def test_workers_draw_on_the_cpu_where_there_is_a_gpu(
    pyg: ModuleType, ours: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = homogeneous(pyg)
    sampler = ours.KeyedNeighborSampler(data, [5, 5])
    asked: list[str] = []

    def settled(*args: object, **kwargs: object) -> object:
        asked.append(str(args[1]))
        return settle(args[0], "cpu", *args[2:], **kwargs)

    settle = ours.settle
    monkeypatch.setattr(ours, "settle", settled)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ours, "in_forked_worker", lambda: True)
    copied = ours.KeyedNeighborSampler(data, [5, 5])
    assert asked == ["cpu"]
    monkeypatch.setattr(ours, "in_forked_worker", lambda: False)
    loader = pyg.loader.NodeLoader(data, copied, batch_size=25)
    found = [batch.n_id for batch in loader]
    assert asked == ["cpu", "cuda"]
    expected = pyg.loader.NodeLoader(data, sampler, batch_size=25)
    for own, other in zip(found, expected, strict=True):
        assert torch.equal(own, other.n_id)
